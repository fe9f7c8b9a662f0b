"""Accessors of nodes: operator types, inputs, their producers and their constants."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from attnforge.export.graphs.sizes import Size

VIEWS = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
"""Operators that move numbers without changing, adding or dropping any."""

REPEATS = VIEWS | {"Cast", "Expand", "Tile"}
"""Operators whose results contain only numbers of their first input."""

BY_ELEMENT = frozenset((
    "Abs", "Add", "And", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "CastLike", "Ceil", "Celu",
    "Clip", "Cos", "Cosh", "DequantizeLinear", "Div", "Elu", "Equal", "Erf", "Exp", "Expand", "Floor", "Gelu",
    "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less",
    "LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "Pow",
    "QuantizeLinear", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus",
    "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tan", "Tanh", "ThresholdedRelu", "Where", "Xor",
))  # fmt: skip
"""Elementwise operators: every number depends on those at the same position."""


def dependent_on_inputs(graph: ir.Graph) -> set[ir.Value]:
    """The values that depend on the contents of a graph's inputs, and not on their shapes alone."""
    dependent = set(graph.inputs)
    sizes = {name for value in graph.inputs for dim in value.shape or () for name in Size.of(dim).names}
    for node in graph:
        shape = input_of(node).shape if is_op(node, "Shape", "Size") else None
        is_size = shape is not None and all(Size.of(dim).names <= sizes for dim in shape)
        if not is_size and not dependent.isdisjoint(node.inputs):
            dependent.update(node.outputs)
    return dependent


def scope_of(node: ir.Node) -> str | None:
    """The qualified name of the module that a node belongs to, or the class of the outermost module; None without the
    exporter's metadata."""
    scopes, classes = (
        ast.literal_eval(node.metadata_props.get(f"pkg.torch.onnx.{key}", "[]"))
        for key in ("name_scopes", "class_hierarchy")
    )
    return (scopes[-2] or str(classes[-2]).rpartition(".")[2]) if len(scopes) > 1 else None


def is_op(node: ir.Node | None, *op_types: str) -> TypeGuard[ir.Node]:
    """Whether a node is one of the given operators of ai.onnx."""
    return node is not None and node.domain == "" and node.op_type in op_types


def optional_input(node: ir.Node, i: int) -> ir.Value | None:
    """Input `i`; None if it is omitted."""
    return node.inputs[i] if i < len(node.inputs) else None


def input_of(node: ir.Node, i: int = 0) -> ir.Value:
    """Input `i`, which the operator always has."""
    value = node.inputs[i]
    assert value is not None
    return value


def inputs_of(node: ir.Node) -> list[ir.Value]:
    """The inputs that are not omitted."""
    return [value for value in node.inputs if value is not None]


def maker_of(value: ir.Value | None) -> ir.Node | None:
    """The node that computes a value; None for an input or weight, or if there is no value."""
    return value.producer() if value is not None else None


def upstream(values: Iterable[ir.Value], ends: Callable[[ir.Value], bool]) -> Iterator[ir.Value]:
    """Yield values and all that they are computed from, each once; nothing that is computed before those of which
    `ends` is true."""
    todo, seen = list(values), set[ir.Value]()
    while todo:
        if (value := todo.pop()) in seen:
            continue
        seen.add(value)
        yield value
        if not ends(value) and (node := value.producer()) is not None:
            todo += inputs_of(node)


def is_used(value: ir.Value) -> bool:
    """Whether a node reads a value, or the graph returns it."""
    return bool(value.uses()) or value.is_graph_output()


def rank_of(value: ir.Value | None) -> int:
    """The number of dims of a value; 0 if its shape is not known."""
    return len(value.shape) if value is not None and value.shape is not None else 0


def numpy_type(value: ir.Value) -> np.dtype[Any]:
    """The NumPy dtype of a value whose type is known."""
    assert value.dtype is not None
    return value.dtype.numpy()


def constant_of(value: ir.Value | None) -> NDArray[Any] | None:
    """The array of a constant value; None for other values, or if there is no value."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else tensor.numpy()


def constant_input(node: ir.Node, i: int) -> NDArray[Any] | None:
    """The array of input `i`, which may be omitted, if it is constant."""
    return constant_of(optional_input(node, i))
