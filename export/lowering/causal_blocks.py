"""Causal attention in blocks of queries: each block attends to the keys up to its own, and to no later ones except some
first keys that every query sees (a prefix).

Of n² products, `steps` blocks compute the share `(steps + 1) / (2 · steps)`, each in a separate kernel. A query's
keys stay together, so nothing has to be merged. Whatever a mask hides in addition to later keys is computed only for
the pairs of each block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import onnx_ir as ir

from attnforge.export.attention.masking import within
from attnforge.export.graphs.build import Builder, constant, dims_of, filled_up, typed
from attnforge.export.graphs.sizes import Size
from attnforge.export.lowering.attention import HEADS_FIRST, Attention, blocks_of
from attnforge.export.masks.at_blocks import mask_at_blocks

BOOL = ir.DataType.BOOL


def in_causal_blocks(op: Builder, a: Attention, steps: int, attend: Callable[[Attention, int], ir.Value]) -> ir.Value:
    """The output of attention to the keys up to each query's own.

    Args:
        a: the site, with a :attr:`~.attention.Attention.causal_prefix` and static heads.
        steps: blocks of queries.
        attend: writes the attention of the block of a number, `(batch, heads, width, d_k)` on `(batch, key heads,
            (number + 1) · width, …)` under a mask `(batch or 1, heads or 1, width, (number + 1) · width)`, boolean, or
            additive with minus infinity for pairs that are not visible, and returns its output. The last block is
            padded with zeros, which no other query sees. If the first keys extend beyond the block's, it gets all of
            them.
    """
    assert a.causal_prefix is not None
    *layouts, whole = (a.layout("B", *dims) for dims in HEADS_FIRST)
    operands = a.inputs(op, layouts)
    cut = _Cut(op, operands[0], a.size("n_q"), steps, a.causal_prefix)
    filled = [cut.filled(operand) for operand in operands]
    outputs = [attend(_block(op, a, filled, cut, i), i) for i in range(steps)]
    result = op.Slice(op.Concat(*outputs, axis=2), constant(op, [0]), cut.tokens, constant(op, [2]))
    return a.as_output(op, typed(result, a.dtype, [size.dim() for size in whole.sizes()]), whole)


def _block(op: Builder, a: Attention, filled: list[ir.Value], cut: _Cut, number: int) -> Attention:
    """The attention of a block of queries and the keys up to its last."""
    n_q, n_k = cut.size(1), cut.keys(number)
    query, key, value = filled
    operands = [cut.rows(query, 2, number), *(cut.rows(x, 2, number, of_keys=True) for x in (key, value))]
    mask = typed(cut.mask(number), BOOL, [1, 1, n_q.dim(), n_k.dim()])
    if a.residue == "none":
        block = a.of_block({"n_q": n_q, "n_k": n_k}, operands, mask, HEADS_FIRST)
        return replace(block, silent_rows_are_nan=True)  # there are none: every query sees its own key
    rest = mask_at_blocks(op, a.node, lambda op, x: cut.pairs(op, x, number))
    return a.of_block({"n_q": n_q, "n_k": n_k}, operands, within(op, mask, rest), HEADS_FIRST)


class _Cut:
    """Cuts tensors of tokens into blocks, starting with the first token.

    Args:
        query: `(batch, heads, tokens, features)`.
        tokens: number of tokens.
        steps: number of blocks.
        first: number of first keys that every query sees.

    Attributes:
        tokens: number of tokens, as a tensor `(1,)`.
    """

    def __init__(self, op: Builder, query: ir.Value, tokens: Size, steps: int, first: int) -> None:
        self._op, self._steps, self._first = op, steps, first
        self._size = blocks_of(tokens, steps)
        self.tokens = op.Shape(query, start=2, end=3)
        self._width = op.Div(op.Add(self.tokens, constant(op, [steps - 1])), constant(op, [steps]))

    def size(self, blocks: int) -> Size:
        """Number of tokens in some blocks."""
        return Size(blocks) * self._size

    def keys(self, number: int) -> Size:
        """Number of keys of a block."""
        size, whole = self.size(number + 1), self.size(self._steps)
        if not self._first or number + 1 == self._steps:
            return size
        if size.is_static and whole.is_static:
            return Size(min(max(size.factor, self._first), whole.factor))
        return Size.of(ir.SymbolicDim(f"min(max({size.dim()}, {self._first}), {whole.dim()})"))

    def filled(self, x: ir.Value, axis: int = 2) -> ir.Value:
        """`x` padded with zeros after the last token, along an axis of tokens, to a whole number of blocks."""
        return filled_up(self._op, x, axis, self._op.Sub(self._end(self._steps), self.tokens))

    def rows(self, x: ir.Value, axis: int, number: int, of_keys: bool = False) -> ir.Value:
        """Slice a block's queries, or its keys, from a tensor that has all of them along an axis."""
        begin, end = (constant(self._op, [0]), self._end_of_keys(number)) if of_keys else self._ends(number)
        return self._op.Slice(x, begin, end, constant(self._op, [axis]))

    def mask(self, number: int) -> ir.Value:
        """`(1, 1, width, keys)`, True where the key is not later than the query, or one of the first."""
        op, (begin, end) = self._op, map(self._op.Squeeze, self._ends(number))
        last = op.Squeeze(self._end_of_keys(number))
        queries, keys = op.Range(begin, end, constant(op, 1)), op.Range(constant(op, 0), last, constant(op, 1))
        if self._first:  # the zeros after the last token are not first keys
            first = op.Min(constant(op, self._first), op.Squeeze(self.tokens))
            queries = op.Max(queries, op.Sub(first, constant(op, 1)))
        return op.LessOrEqual(
            op.Unsqueeze(keys, constant(op, [0, 1, 2])), op.Unsqueeze(queries, constant(op, [0, 1, 3]))
        )

    def pairs(self, op: Builder, x: ir.Value, number: int) -> ir.Value:
        """The pairs of a block from `(batch, heads, queries, keys)`, of which each dim may be 1."""
        (batch, heads, *sides), dtype = dims_of(x), x.dtype
        for axis, side in zip((2, 3), sides, strict=True):
            if side != 1:
                x = self.rows(self.filled(x, axis), axis, number, of_keys=axis == 3)
        have = (self.size(1), self.keys(number))
        dims = (side if side == 1 else size.dim() for side, size in zip(sides, have, strict=True))
        return typed(x, dtype, [batch, heads, *dims])

    def _ends(self, number: int) -> tuple[ir.Value, ir.Value]:
        """Start and end of a block's queries."""
        return self._end(number), self._end(number + 1)

    def _end_of_keys(self, number: int) -> ir.Value:
        """End of a block's keys, which start with the first key."""
        op, end = self._op, self._end(number + 1)
        return op.Min(op.Max(end, constant(op, [self._first])), self._end(self._steps)) if self._first else end

    def _end(self, blocks: int) -> ir.Value:
        return self._op.Mul(self._width, constant(self._op, [blocks]))
