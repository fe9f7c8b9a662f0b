"""Queries and keys of a decoder's step that rotary tables turn (Su et al. 2021, https://arxiv.org/abs/2104.09864), as
GroupQueryAttention can turn them itself."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attnforge.export.attention.canonical import PLACES
from attnforge.export.attention.layout import Layout, before_views
from attnforge.export.attention.operands import Operand, scalar
from attnforge.export.graphs.build import dims_of, initializer


@dataclass(frozen=True)
class Turned:
    """Queries or keys that rotary tables turn.

    Attributes:
        operand: before that.
        cosine, sine: initializers, `(places, half a head)`.
        interleaved: 1 where neighbours make a pair, 0 where halves of a head do.
    """

    operand: Operand
    cosine: ir.Value
    sine: ir.Value
    interleaved: int

    def is_as(self, other: Turned) -> bool:
        """Whether both are turned alike."""
        return (self.cosine, self.sine, self.interleaved) == (other.cosine, other.sine, other.interleaved)


def before_rotation(operand: Operand, size: int) -> Turned | None:
    """What is turned to make an operand; None where something else than a rotation of whole heads, by tables at the
    places of the tokens, makes it.

    Args:
        operand: `(batch, heads, tokens, size)` where it is turned.
        size: of a head; the kernel turns multiples of 16.
    """
    node = operand.value.producer()
    if node is None or node.domain != "" or len(operand.layout) != 4 or size % 16:
        return None
    interleaved = 0
    if node.op_type == "RotaryEmbedding" and len(node.inputs) == 3:
        x, cosine, sine = node.inputs
        interleaved = node.attributes.get_int("interleaved", 0) or 0
    elif (halves := _by_halves(node, size)) is not None:
        x, cosine, sine = halves
    else:
        return None
    tables = [_table(rows, size // 2) for rows in (cosine, sine)]
    if x is None or tables[0] is None or tables[1] is None:
        return None
    return Turned(Operand(*before_views(x, operand.layout)), tables[0], tables[1], interleaved)


def _by_halves(node: ir.Node, size: int) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """`x`, cosines and sines of `x · cos + (-x₂, x₁) · sin`, as most modules turn the halves x₁ and x₂ of a head; None
    where a node is something else."""
    products = [_producer(value) for value in node.inputs]
    if node.op_type != "Add" or any(each is None or each.op_type != "Mul" for each in products):
        return None
    for plain, turned in (products, products[::-1]):
        assert plain is not None and turned is not None
        for i, j in itertools.product((0, 1), repeat=2):
            x, other = plain.inputs[i], _producer(turned.inputs[j])
            cosine, sine = plain.inputs[1 - i], turned.inputs[1 - j]
            if x is None or other is None or cosine is None or sine is None or other.op_type != "Concat":
                continue
            if other.attributes.get_int("axis", 0) not in (-1, 3) or len(other.inputs) != 2:
                continue
            second, first = _producer(other.inputs[0]), other.inputs[1]
            if second is None or second.op_type != "Neg":
                continue
            if _is_half(first, x, 0, size) and _is_half(second.inputs[0], x, 1, size):
                return x, cosine, sine
    return None


def _is_half(value: ir.Value | None, x: ir.Value, which: int, size: int) -> bool:
    """Whether a value is the first (0) or the second (1) half of the last dim of `x`, which has that size."""
    node = _producer(value)
    if value is None or node is None or node.inputs[0] is not x:
        return False
    if node.op_type == "Split":
        equal = len(node.outputs) == 2 and dims_of(value)[-1] == size // 2
        return equal and node.attributes.get_int("axis", 0) in (-1, 3) and value.index() == which
    if node.op_type != "Slice" or len(node.inputs) < 4:
        return False
    numbers = [scalar(each) for each in (*node.inputs[1:], *[None] * (5 - len(node.inputs)))]
    start, end, axis, step = numbers
    is_to_its_end = end is not None and (end == size // 2 if which == 0 else end >= size)
    return axis in (-1, 3) and start == which * size // 2 and is_to_its_end and step in (None, 1)


def _producer(value: ir.Value | None) -> ir.Node | None:
    """The node of ONNX's own operators that computes a value; None where there is none."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.domain == "" else None


def _table(rows: ir.Value | None, width: int) -> ir.Value | None:
    """The table of that width of which `rows` are those at the places of the tokens; None where they are others.

    Args:
        rows: `(batch, tokens, width)`, or `(batch, 1, tokens, 2 · width)` with both halves the same.
        width: half a head.
    """
    if rows is None or rows.shape is None:
        return None
    layout = Layout.fresh(rows)
    value, before = before_views(rows, layout)
    node = _producer(value)
    if node is None or node.op_type != "Gather" or node.attributes.get_int("axis", 0) != 0:
        return None
    table, places = node.inputs
    of_tokens = _producer(places)
    if table is None or not table.is_initializer() or of_tokens is None or PLACES not in of_tokens.metadata_props:
        return None
    dims = layout.dims
    if len(dims) == 4 and not dims[1] and before.dims == [dims[0], *dims[2:]]:
        return _first_half(table, width)
    return table if before.dims == dims and dims_of(table)[1:] == [width] else None


def _first_half(table: ir.Value, width: int) -> ir.Value | None:
    """The first half of a table's columns as a table, which is written once; None where the second half differs."""
    graph, numbers = table.graph, ir.convenience.get_const_tensor(table)
    if graph is None or numbers is None or dims_of(table)[1:] != [2 * width]:
        return None
    name = f"{table.name}/half"
    if name in graph.initializers:
        return graph.initializers[name]
    first, second = np.split(numbers.numpy(), 2, axis=1)
    return initializer(graph, name, np.ascontiguousarray(first)) if np.array_equal(first, second) else None
