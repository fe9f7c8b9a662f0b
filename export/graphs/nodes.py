"""What a node says: the operator that it is, its inputs, what made them, and their constants."""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

VIEWS = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
"""Operators that move numbers without changing, adding or dropping any."""

REPEATS = VIEWS | {"Cast", "Expand", "Tile"}
"""Operators whose results have no other numbers than their first inputs."""

BY_ELEMENT = frozenset((
    "Abs", "Add", "And", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "CastLike", "Ceil", "Celu",
    "Clip", "Cos", "Cosh", "DequantizeLinear", "Div", "Elu", "Equal", "Erf", "Exp", "Expand", "Floor", "Gelu",
    "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less",
    "LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "Pow",
    "QuantizeLinear", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus",
    "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tan", "Tanh", "ThresholdedRelu", "Where", "Xor",
))  # fmt: skip
"""Operators whose every number depends on those in the same place."""


def is_op(node: ir.Node | None, *op_types: str) -> TypeGuard[ir.Node]:
    """Whether a node is one of some operators of ai.onnx."""
    return node is not None and node.domain == "" and node.op_type in op_types


def optional_input(node: ir.Node, i: int) -> ir.Value | None:
    """An input; None where it is left out."""
    return node.inputs[i] if i < len(node.inputs) else None


def input_of(node: ir.Node, i: int = 0) -> ir.Value:
    """An input that the operator always has."""
    value = node.inputs[i]
    assert value is not None
    return value


def inputs_of(node: ir.Node) -> list[ir.Value]:
    """The inputs that are not left out."""
    return [value for value in node.inputs if value is not None]


def maker_of(value: ir.Value | None) -> ir.Node | None:
    """The node that computes a value; None of an input or parameter, or where there is no value."""
    return value.producer() if value is not None else None


def rank_of(value: ir.Value | None) -> int:
    """How many dims a value has; 0 where its shape is not known."""
    return len(value.shape) if value is not None and value.shape is not None else 0


def numpy_type(value: ir.Value) -> np.dtype[Any]:
    """NumPy's type of the numbers of a value whose type is known."""
    assert value.dtype is not None
    return value.dtype.numpy()


def constant_of(value: ir.Value | None) -> NDArray[Any] | None:
    """The numbers of a value that is constant; None of others, or where there is no value."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else tensor.numpy()
