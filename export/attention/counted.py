"""Count softmaxes and attention operators in the module as it runs, in its exported program, and in its graph, so that
none goes missing on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
from torch import nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Node
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from attnforge.export.graphs.attention import READERS
from attnforge.export.graphs.nodes import is_op, scope_of

_COUNTED = ("softmax", "scaled_dot_product", "multi_head_attention", "flex_attention")
"""Parts of the names of torch's operators that compute a softmax or attention."""


def _is_counted(operator: str) -> bool:
    return "log_softmax" not in operator and any(part in operator for part in _COUNTED)


@contextmanager
def counted(module: nn.Module) -> Iterator[Counter[str]]:
    """Yield a counter that receives, while `module` runs, the submodules of softmaxes and attention operators."""

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if _is_counted(func.name()):
                modules[running[-1]] += 1
            return func(*args, **(kwargs or {}))

    names = {part: name or type(part).__name__ for name, part in module.named_modules()}
    running, modules = [type(module).__name__], Counter[str]()

    def enter(part: nn.Module, args: Any) -> None:
        running.append(names.get(part, running[-1]))

    def leave(part: nn.Module, args: Any, result: Any) -> None:
        running.pop()

    with register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True), Counting():  # type: ignore[no-untyped-call]
        yield modules


def writes(node: Node) -> bool:
    """Whether an operator changes a tensor in place, which its users do not show."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def in_program(program: ExportedProgram) -> Counter[str]:
    """The submodules of the softmaxes and attention operators of a program whose results depend on its inputs, and on
    which its outputs depend. The same operator on the same operands counts once."""
    used: set[Node] = set()
    for node in reversed(program.graph.nodes):
        if node.op == "output" or node in used or writes(node):
            used.update(node.all_input_nodes)
    dependent = {node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs}
    modules: dict[str, str] = {}
    for node in program.graph.nodes:
        if dependent.isdisjoint(node.all_input_nodes):
            continue
        dependent.add(node)
        if _is_counted(str(node.target)) and node in used:
            name, kind = [("", ""), *node.meta.get("nn_module_stack", {}).values()][-1]
            modules[f"{node.target} {node.args} {node.kwargs}"] = name or kind.rpartition(".")[2]
    return Counter(modules.values())


def in_graph(graph: ir.Graph) -> Counter[str]:
    """The submodules of the softmaxes and attention operators of an exported graph."""
    return Counter(
        str(scope_of(node)) for node in graph if is_op(node, "Softmax") or (node.domain, node.op_type) in READERS
    )


def missing(modules: Counter[str], part: Counter[str]) -> list[str]:
    """Return the modules that have more of what is counted than a part of it. A module with two names, of which the
    counts may give different ones, is compared by the totals."""
    return [*(modules - part).elements()][: max(modules.total() - part.total(), 0)]
