"""Programs of torch.export in operators that have ONNX functions.

Torch traces a program twice to decompose its operators into those, which takes half of an export. Most programs have
nothing to decompose but operators that are others under another name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram

aten: Any = torch.ops.aten

ASSERTIONS = frozenset({
    aten._assert_async.default, aten._assert_async.msg, aten._assert_scalar.default,
    aten._assert_tensor_metadata.default, aten.sym_constrain_range_for_size.default,
})  # fmt: skip
"""Operators that torch's exporter leaves out."""

SAME: Mapping[OpOverload, OpOverload] = {
    aten.__and__.Tensor: aten.bitwise_and.Tensor,
    aten.__or__.Tensor: aten.bitwise_or.Tensor,
    aten.detach_.default: aten.detach.default,
    aten.max.other: aten.maximum.default,
    aten.min.other: aten.minimum.default,
}
"""Operators that compute the same of the same arguments."""

CASTS: Mapping[OpOverload, int] = {aten.to.dtype: 1, aten.to.device: 2, aten.to.dtype_layout: 1}
"""Operators that cast, and the position of the dtype in their arguments."""


def decomposed(
    decompose: Callable[[ExportedProgram, Any], ExportedProgram], program: ExportedProgram, registry: Any
) -> ExportedProgram:
    """Return a program whose operators have ONNX functions and write to none of their inputs.

    Args:
        decompose: torch's own function for this.
        program: changed in place, and returned, if all its other operators are in :data:`SAME` and :data:`CASTS`.
        registry: torch's table of ONNX functions.
    """
    known = {functions[0].fx_target for functions in registry.functions.values()} | ASSERTIONS
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    if not all(_has_function(node, known) for node in nodes):
        return decompose(program, registry)
    for node in nodes:
        if node.target in CASTS:
            dtype = node.kwargs.get("dtype", (*node.args, None, None)[CASTS[node.target]])
            node.target, node.args, node.kwargs = aten._to_copy.default, node.args[:1], {"dtype": dtype}
        elif node.target == aten.mT.default:  # the exporter's is an Einsum, which does not take Booleans
            node.target, node.args = aten.transpose.int, (*node.args, -2, -1)
        node.target = SAME.get(node.target, node.target)
    program.graph.eliminate_dead_code()
    return program


def _has_function(node: fx.Node, known: Collection[object]) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return not isinstance(target, HigherOrderOperator)
    if target in SAME or target in CASTS or target == aten.mT.default:
        return True
    return target in known and not target._schema.is_mutable
