"""Operands of an attention site, and facts about values of the graph: constants, factors, users."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir

from attnforge.export.attention.layout import Axis, Dims, Layout, before_views
from attnforge.export.graphs.attention import NotAttention
from attnforge.export.graphs.nodes import VIEWS, constant_of, input_of, is_op, maker_of, optional_input
from attnforge.export.graphs.sizes import ONE, is_size_of, sizes_of


@dataclass(frozen=True)
class Operand:
    """A tensor that a site reads or computes, and the axes of its dims."""

    value: ir.Value
    layout: Layout


@dataclass(frozen=True)
class Position:
    """The position of a walk: a value, its layout, and the axis that the softmax runs over.

    Attributes:
        also_used_by: nodes outside the walk's path that may read the value, because they change nothing.
    """

    value: ir.Value
    layout: Layout
    softmax_axis: Axis
    also_used_by: frozenset[ir.Node] = frozenset()

    @property
    def keys(self) -> Dims:
        """The axes that the softmax runs over."""
        return tuple(self.softmax_axis.leaves())

    def differs_by_key(self, operand: Operand) -> bool:
        return not set(operand.layout.axes).isdisjoint(self.keys)

    def aligned(self, value: ir.Value) -> Operand:
        """`value` with the axes along which it varies when it is broadcast against the value at this position.

        Raises:
            NotAttention: `value` would broadcast the tensor that it is combined with to a larger shape.
        """
        sizes = sizes_of(value)
        first = len(self.layout) - len(sizes)
        if first < 0:
            raise NotAttention(f"{value.name!r} has more dims than the scores it is combined with")
        dims, full = self.layout.dims[first:], self.layout.sizes()[first:]
        if not all(have == ONE or is_size_of(have, want) for have, want in zip(sizes, full, strict=True)):
            raise NotAttention(f"{value.name!r} does not broadcast to the scores it is combined with")
        return Operand(value, Layout(dim if size != ONE else () for dim, size in zip(dims, sizes, strict=True)))

    def condition(self, value: ir.Value, inverted: bool = False) -> tuple[Operand, bool]:
        """A condition before any Not, aligned, and whether it is inverted."""
        return without_not(self.aligned(value), inverted)

    def only_user(self, name: str) -> ir.Node:
        """The only node that reads the value, apart from Shape and `also_used_by`.

        Args:
            name: what the value is, for the message, in the plural.

        Raises:
            NotAttention: the value is an output of the model, or other nodes read it too.
        """
        what, uses = f"the {name} {self.value.name!r} are", self.value.uses()
        if self.value.is_graph_output():
            raise NotAttention(f"{what} an output of the model; a fused kernel never stores them")
        nodes = [use.node for use in uses if use.node not in self.also_used_by and use.node.op_type != "Shape"]
        if len(nodes) != 1:
            raise NotAttention(f"{what} used {len(nodes)} times; a fused kernel never stores them")
        return nodes[0]


def scalar(value: ir.Value | None) -> float | None:
    """The number that is every element of a constant `value`; None if there is no such number."""
    if value is None:
        return None
    if (numbers := constant_of(value)) is not None:
        numbers = numbers.reshape(-1)
        uniform = numbers.size == 1 or (numbers.size > 1 and bool((numbers == numbers[0]).all()))
        return float(numbers[0].astype(np.float64)) if uniform else None
    node = value.producer()
    if node is None or node.domain != "":
        return None
    if node.op_type == "ConstantOfShape":
        filled = node.attributes.get("value")
        return float(filled.as_tensor().numpy().reshape(())) if filled is not None else 0.0
    if node.op_type in ("Cast", "Mul") and value.dtype is not None:
        factors = [factor for operand in node.inputs if (factor := scalar(operand)) is not None]
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = np.asarray(prod(factors)).astype(value.dtype.numpy()).astype(np.float64)
        return float(rounded) if len(factors) == len(node.inputs) else None
    return scalar(node.inputs[0]) if is_op(node, *VIEWS, "Expand") else None


def factor_of(node: ir.Node) -> tuple[float, ir.Value] | None:
    """The finite number by which a Mul or Div multiplies, and the value that it multiplies; None for other nodes."""
    if not is_op(node, "Mul", "Div"):
        return None
    left, right = node.inputs
    if left is not None and (number := scalar(right)) and np.isfinite(number):
        return (number if node.op_type == "Mul" else 1.0 / number), left
    if node.op_type == "Mul" and right is not None and (number := scalar(left)) and np.isfinite(number):
        return number, right
    return None


def strip_factors(operand: Operand) -> tuple[float, Operand]:
    """Walk back through views and factors; return the product of the factors and the operand that they multiply."""
    scale = 1.0
    while True:
        operand = Operand(*before_views(operand.value, operand.layout))
        node = operand.value.producer()
        factor = factor_of(node) if node is not None else None
        if factor is None or sizes_of(factor[1]) != operand.layout.sizes():
            return scale, operand
        scale *= factor[0]
        operand = Operand(factor[1], operand.layout)


def without_not(operand: Operand, inverted: bool = False) -> tuple[Operand, bool]:
    """The condition before any Not, and whether the Nots invert it."""
    while is_op(node := operand.value.producer(), "Not"):
        operand, inverted = Operand(input_of(node), operand.layout), not inverted
    return operand, inverted


def same_value(a: ir.Value | None, b: ir.Value | None, depth: int = 8) -> bool:
    """Whether two values are computed by the same operators from the same values, at most `depth` operators back."""
    if a is b or a is None or b is None:
        return a is b
    tensor_a, tensor_b = (ir.convenience.get_const_tensor(value) for value in (a, b))
    if tensor_a is not None and tensor_b is not None:
        return tensor_a.dtype == tensor_b.dtype and np.array_equal(tensor_a.numpy(), tensor_b.numpy())
    node_a, node_b = a.producer(), b.producer()
    if node_a is None or node_b is None or depth == 0 or a.index() != b.index():
        return False
    if node_a.op_identifier() != node_b.op_identifier() or node_a.attributes != node_b.attributes:
        return False
    pairs = zip(node_a.inputs, node_b.inputs, strict=False)
    return len(node_a.inputs) == len(node_b.inputs) and all(same_value(x, y, depth - 1) for x, y in pairs)


def is_zero_or_one(value: ir.Value | None) -> bool:
    """Whether every number is known to be 0 or 1: cast from a condition, or moved from a constant of 0 and 1."""
    if (numbers := constant_of(value)) is not None:
        return bool(np.isin(numbers, (0, 1)).all())
    node = maker_of(value)
    if node is None or node.domain != "" or not node.inputs:
        return False
    source = node.inputs[0]
    if node.op_type == "Cast" and source is not None and source.dtype == ir.DataType.BOOL:
        return True
    if node.op_type == "Concat":
        return all(is_zero_or_one(part) for part in node.inputs)
    moves = is_op(node, *VIEWS) or node.op_type in ("Cast", "Slice", "Gather", "Expand", "Tile", "Trilu")
    return moves and is_zero_or_one(source)


def keeps_numbers(node: ir.Node, name: str) -> bool:
    """Whether a node is a Cast between floating-point types, or a Dropout, which must drop nothing.

    Args:
        node: the node.
        name: what goes through it, for the message, in the plural.

    Raises:
        NotAttention: the Cast is from or to another type; the Dropout is in training mode, or may be.
    """
    if is_op(node, "Cast"):
        for end, value in (("from", input_of(node)), ("to", node.outputs[0])):
            if value.dtype is None or not value.dtype.is_floating_point():
                raise NotAttention(f"the {name} are cast {end} {value.dtype}")
    elif is_op(node, "Dropout"):
        training = optional_input(node, 2)
        if training is not None and scalar(training) != 0:
            raise NotAttention("a Dropout that is in training mode, or may be")
    return is_op(node, "Cast", "Dropout")
