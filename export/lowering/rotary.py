"""Queries and keys of a decoder step that rotary tables rotate (Su et al. 2021, https://arxiv.org/abs/2104.09864), as
GroupQueryAttention can rotate them itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attnforge.export.attention.canonical import PLACES
from attnforge.export.attention.layout import Layout, before_views
from attnforge.export.attention.operands import Operand, scalar
from attnforge.export.graphs.build import dims_of, initializer
from attnforge.export.graphs.nodes import input_of, is_op, maker_of

Parts = tuple[ir.Value, ir.Value, ir.Value]
"""The rotated value, the cosines and the sines."""


@dataclass(frozen=True)
class Turned:
    """Queries or keys that rotary tables rotate.

    Attributes:
        operand: the operand before the rotation.
        cosine, sine: initializers, `(positions, half a head)`.
        interleaved: 1 if neighbours form a pair, 0 if halves of a head do.
    """

    operand: Operand
    cosine: ir.Value
    sine: ir.Value
    interleaved: int

    def is_as(self, other: Turned) -> bool:
        """Whether both are rotated by the same tables in the same way."""
        return (self.cosine, self.sine, self.interleaved) == (other.cosine, other.sine, other.interleaved)


def before_rotation(operand: Operand, size: int) -> Turned | None:
    """The operand before its rotation; None if it is not the result of rotating whole heads by tables at the tokens'
    positions.

    Args:
        operand: `(batch, heads, tokens, size)` where it is rotated.
        size: head size; the kernel rotates multiples of 16.
    """
    node = operand.value.producer()
    if node is None or node.domain != "" or len(operand.layout) != 4 or size % 16:
        return None
    is_operator = node.op_type == "RotaryEmbedding" and len(node.inputs) == 3
    parts: Sequence[ir.Value | None] | None = node.inputs if is_operator else _by_halves(node, size)
    if parts is None:
        return None
    x, cosine, sine = parts
    interleaved = node.attributes.get_int("interleaved", 0) or 0 if is_operator else 0
    tables = [_table(rows, size // 2) for rows in (cosine, sine)]
    if x is None or tables[0] is None or tables[1] is None:
        return None
    return Turned(Operand(*before_views(x, operand.layout)), tables[0], tables[1], interleaved)


def _by_halves(node: ir.Node, size: int) -> Parts | None:
    """A rotation of the halves x₁ and x₂ of a head as modules write it; None if a node is something else:
    `x · cos + (-x₂, x₁) · sin`, or `(x₁ · cos - x₂ · sin, x₂ · cos + x₁ · sin)`."""
    if node.op_type != "Add":
        return _of_halves(node, size) if node.op_type == "Concat" and _is_last_axis(node) else None
    for (x, cosine), (turned, sine) in itertools.product(*_factors(node)):
        cat = maker_of(turned)
        if not is_op(cat, "Concat") or len(cat.inputs) != 2 or not _is_last_axis(cat):
            continue
        negative, first = maker_of(cat.inputs[0]), _half(cat.inputs[1], size)
        if is_op(negative, "Neg") and _half(negative.inputs[0], size) == (x, 1) and first == (x, 0):
            return x, cosine, sine
    return None


def _of_halves(node: ir.Node, size: int) -> Parts | None:
    first, second = map(maker_of, node.inputs) if len(node.inputs) == 2 else (None, None)
    if not is_op(first, "Sub") or not is_op(second, "Add"):
        return None
    for (x1, cosine), (x2, sine) in itertools.product(*_factors(first)):
        half = _half(x1, size)
        if half is None or half[1] != 0 or _half(x2, size) != (half[0], 1):
            continue
        of_second = list(itertools.product(*_factors(second)))
        if ((x2, cosine), (x1, sine)) in of_second or ((x1, sine), (x2, cosine)) in of_second:
            return half[0], cosine, sine
    return None


def _factors(node: ir.Node) -> list[list[tuple[ir.Value, ir.Value]]]:
    """The factors, in both orders, of each product that a node adds or subtracts; none for an input that is not a
    product."""
    factors = []
    for value in node.inputs:
        product = maker_of(value)
        a, b = product.inputs if is_op(product, "Mul") else (None, None)
        factors.append([] if a is None or b is None else [(a, b), (b, a)])
    return factors


def _half(value: ir.Value | None, size: int) -> tuple[ir.Value, int] | None:
    """The tensor that a value is the first (0) or second (1) half of, in the last of four dims, which has that size."""
    node = maker_of(value)
    if value is None or not is_op(node, "Split", "Slice"):
        return None
    x = input_of(node)
    if node.op_type == "Split":
        is_equal = len(node.outputs) == 2 and dims_of(value)[-1] == size // 2
        return (x, value.index() or 0) if is_equal and _is_last_axis(node) else None
    if len(node.inputs) < 4:
        return None
    start, end, axis, step = (scalar(each) for each in (*node.inputs[1:], *[None] * (5 - len(node.inputs))))
    if axis not in (-1, 3) or step not in (None, 1) or start is None or end is None:
        return None
    if (start, end) == (0, size // 2):
        return x, 0
    return (x, 1) if start == size // 2 and end >= size else None


def _is_last_axis(node: ir.Node) -> bool:
    """Whether the axis of a node is the last of four."""
    return node.attributes.get_int("axis", 0) in (-1, 3)


def _table(rows: ir.Value | None, width: int) -> ir.Value | None:
    """The table of that width whose rows at the tokens' positions are `rows`; None if they are anything else.

    Args:
        rows: `(batch, tokens, width)` or `(batch, 1, tokens, width)`, or twice as wide with two equal halves.
        width: half a head.
    """
    if rows is None or rows.shape is None:
        return None
    layout = Layout.fresh(rows)
    value, before = before_views(rows, layout)
    node = maker_of(value)
    if not is_op(node, "Gather") or node.attributes.get_int("axis", 0) != 0:
        return None
    table, positions = node.inputs
    of_tokens = maker_of(positions)
    if table is None or not table.is_initializer() or of_tokens is None or PLACES not in of_tokens.metadata_props:
        return None
    dims = layout.dims
    if len(dims) == 4 and not dims[1]:
        dims = [dims[0], *dims[2:]]
    if before.dims != dims:
        return None
    return table if dims_of(table)[1:] == [width] else _first_half(table, width)


def _first_half(table: ir.Value, width: int) -> ir.Value | None:
    """The first half of a table's columns as a table, which is written once; None if the second half differs."""
    graph, numbers = table.graph, ir.convenience.get_const_tensor(table)
    if graph is None or numbers is None or dims_of(table)[1:] != [2 * width]:
        return None
    name = f"{table.name}/half"
    if name in graph.initializers:
        return graph.initializers[name]
    first, second = np.split(numbers.numpy(), 2, axis=1)
    return initializer(graph, name, np.ascontiguousarray(first)) if np.array_equal(first, second) else None
