"""Constants of an exported graph, as torch computes them.

The exporter folds constants with NumPy, whose `exp`, `pow` or `sin` differ from torch's in the last bit. Embeddings of
timesteps and positions multiply such a constant by a thousand and take the sine, which turns that bit into an error of
5e-6 where eager's is 1e-7.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from attnforge.export.graphs.types import DOUBLE, FLOAT

CLOSE = 1e-3
"""The largest difference, relative and absolute, between two results of the same operators."""

FLOAT16 = ir.DataType.FLOAT16


def computed_by_torch(program: torch.onnx.ONNXProgram) -> None:
    """Replace the floating-point constants that the exporter folded by what torch computes, in place."""
    assert program.exported_program is not None
    constants: dict[str, Node] = {}
    for node in program.exported_program.graph.nodes:
        is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if node.op == "call_function" and not is_random and all(x.name in constants for x in node.all_input_nodes):
            constants[node.name] = node
    known: dict[Node, Any] = {}
    for name, value in program.model.graph.initializers.items():
        if name not in constants or value.const_value is None or value.dtype not in (DOUBLE, FLOAT, FLOAT16):
            continue
        result, folded = _result(constants[name], known), torch.from_numpy(value.const_value.numpy())
        is_alike = isinstance(result, Tensor) and (result.shape, result.dtype) == (folded.shape, folded.dtype)
        if is_alike and torch.allclose(result, folded, CLOSE, CLOSE, equal_nan=True):
            value.const_value = ir.tensor(result.numpy(), name=name)


def _result(node: Node, known: dict[Node, Any]) -> Any:
    """What torch computes at a node that depends on constants only."""
    if node not in known:
        for source in node.all_input_nodes:
            _result(source, known)
        target: Any = node.target
        known[node] = target(*map_arg(node.args, known.get), **map_arg(node.kwargs, known.get))
    return known[node]
