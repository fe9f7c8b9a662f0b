"""Causal attention in steps: each block of queries meets the keys up to its own, and no later ones.

Of n² products, `steps` blocks compute the share `(steps + 1) / (2 · steps)`, each in a kernel of its own. A query's
keys stay together, so nothing has to be joined. What a mask hides beside later keys is computed for the pairs of each
block alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import onnx_ir as ir

from attnforge.export.attention.layout import Size
from attnforge.export.attention.mask_blocks import mask_at_blocks
from attnforge.export.graphs.build import Builder, constant, dims_of, typed
from attnforge.export.lowering.attention import SIDE_BY_SIDE, Attention, blocks_of
from attnforge.export.lowering.blocks import within

BOOL = ir.DataType.BOOL


def in_stairs(op: Builder, a: Attention, steps: int, attend: Callable[[Attention, int], ir.Value]) -> ir.Value:
    """The output of attention to the keys up to each query's own.

    Args:
        a: the site, a staircase (:attr:`~.attention.Attention.is_staircase`) with static heads.
        steps: blocks of queries.
        attend: writes the attention of the block of a number, `(batch, width, heads · d_k)` on `(batch, (number + 1) ·
            width, …)` under a mask `(batch or 1, heads or 1, width, (number + 1) · width)`, boolean, or added with
            minus infinity for pairs that are not visible, and returns its output. The last block is filled up with
            zeros, which no other query sees.
    """
    *layouts, whole = (a.layout("B", *dims) for dims in SIDE_BY_SIDE)
    operands = a.inputs(op, layouts)
    stairs = _Stairs(op, operands[0], a.size("n_q"), steps)
    filled = [stairs.filled(operand) for operand in operands]
    outputs = [attend(_block(op, a, filled, stairs, i), i) for i in range(steps)]
    result = op.Slice(op.Concat(*outputs, axis=1), constant(op, [0]), stairs.tokens, constant(op, [1]))
    return a.as_output(op, typed(result, a.dtype, [size.dim() for size in whole.sizes()]), whole)


def _block(op: Builder, a: Attention, filled: list[ir.Value], stairs: _Stairs, number: int) -> Attention:
    """The attention of a block of queries and the keys up to its last."""
    n_q, n_k = stairs.size(1), stairs.size(number + 1)
    query, key, value = filled
    operands = [stairs.rows(query, number, number + 1), *(stairs.rows(x, 0, number + 1) for x in (key, value))]
    mask = typed(stairs.mask(number), BOOL, [1, 1, n_q.dim(), n_k.dim()])
    if a.residue == "none":
        block = a.of_block({"n_q": n_q, "n_k": n_k}, operands, mask)
        return replace(block, silent_rows_are_nan=True)  # there are none: every query has its own key
    rest = mask_at_blocks(op, a.node, lambda op, x: stairs.pairs(op, x, number))
    return a.of_block({"n_q": n_q, "n_k": n_k}, operands, within(op, mask, rest))


class _Stairs:
    """Cuts tensors of tokens into blocks that begin with the first token.

    Args:
        query: `(batch, tokens, features)`.
        tokens: how many there are.
        steps: blocks.

    Attributes:
        tokens: how many there are, as a tensor `(1,)`.
    """

    def __init__(self, op: Builder, query: ir.Value, tokens: Size, steps: int) -> None:
        self._op, self._steps = op, steps
        self._size = blocks_of(tokens, steps)
        self.tokens = op.Shape(query, start=1, end=2)
        self._width = op.Div(op.Add(self.tokens, constant(op, [steps - 1])), constant(op, [steps]))

    def size(self, blocks: int) -> Size:
        """Tokens of some blocks."""
        return Size(blocks) * self._size

    def filled(self, x: ir.Value) -> ir.Value:
        """`(batch, tokens, size)` with zeros behind the last token, up to a whole number of blocks."""
        op = self._op
        missing = op.Sub(self._end(self._steps), self.tokens)
        return op.Pad(x, op.Concat(constant(op, [0] * 4), missing, constant(op, [0]), axis=0))

    def rows(self, x: ir.Value, begin: int, end: int) -> ir.Value:
        """The blocks from one to before another, of `(batch, blocks · width, size)`."""
        return self._op.Slice(x, self._end(begin), self._end(end), constant(self._op, [1]))

    def mask(self, number: int) -> ir.Value:
        """`(1, 1, width, (number + 1) · width)`, True where the key is not later than the query."""
        op, (begin, end) = self._op, (self._op.Squeeze(self._end(number)), self._op.Squeeze(self._end(number + 1)))
        queries, keys = op.Range(begin, end, constant(op, 1)), op.Range(constant(op, 0), end, constant(op, 1))
        return op.LessOrEqual(
            op.Unsqueeze(keys, constant(op, [0, 1, 2])), op.Unsqueeze(queries, constant(op, [0, 1, 3]))
        )

    def pairs(self, op: Builder, x: ir.Value, number: int) -> ir.Value:
        """What a block sees of `(batch, heads, queries, keys)`, of which each dim may be 1."""
        (batch, heads, *sides), dtype = dims_of(x), x.dtype
        assert dtype is not None
        for axis, side, begin in ((2, sides[0], number), (3, sides[1], 0)):
            if side != 1:
                missing = op.Sub(self._end(self._steps), self.tokens)
                pads = op.Concat(constant(op, [0] * (4 + axis)), missing, constant(op, [0] * (3 - axis)), axis=0)
                ends = self._end(begin), self._end(number + 1), constant(op, [axis])
                x = op.Slice(op.Pad(x, pads), *ends)
        dims = (side if side == 1 else self.size(n).dim() for side, n in zip(sides, (1, number + 1), strict=True))
        return typed(x, dtype, [batch, heads, *dims])

    def _end(self, blocks: int) -> ir.Value:
        return self._op.Mul(self._width, constant(self._op, [blocks]))
