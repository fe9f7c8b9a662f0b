"""Attention within a band, in blocks of queries that each attend only to the keys that they may see.

The keys are those of a window, or of a block's own and neighbouring chunks, preceded by some first ones if all queries
see them. First queries that see all keys are computed separately and inserted into the output.

A window of 256 keys before the query leaves a sixteenth of the products of 4,096 tokens. Blocks become heads, and heads
samples of a batch, or blocks become samples, so one kernel computes them all, in memory that grows linearly with the
tokens instead of quadratically: the form of Longformer (https://arxiv.org/abs/2004.05150, 3.1) with one block of keys
around each block of queries. Blocks as heads need no transposes but those between tokens and heads: over 4,096 tokens
with 8 heads of 64 and the heads first, a window of 256 took 0.75 of the time of blocks as samples.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.export.attention.masking import within
from attnforge.export.graphs.build import Builder, constant, dims_of, filled_up, typed
from attnforge.export.graphs.sizes import Size
from attnforge.export.lowering.attention import HEADS_FIRST, SIDE_BY_SIDE, Attention, Candidate, blocks_of
from attnforge.export.lowering.band import Band
from attnforge.export.masks.at_blocks import mask_at_blocks

BOOL = ir.DataType.BOOL

BAND = "attnforge.band"
"""Metadata of a node that attends in blocks: least and most of `query − key`, by the indices of the tokens or of their
chunks, how many first keys every block has, and how many tokens the first block begins before the first token."""


IN_BAND = "the mask leaves a band: each block of queries attends only to the keys in it"
IN_CAUSAL_BLOCKS = "causal: each block of queries attends to the keys up to its own"
"""Why a site is computed in blocks."""

BLOCKS = (64, 128, 256)
"""Queries per block of the forms on a CPU."""


def forms_in_blocks(
    a: Attention, form: str, node: str, emit: Callable[..., ir.Value], tokens: int, many: bool, more: str = ""
) -> Iterator[Candidate]:
    """The forms of a site in blocks of its band, if it has one; the smallest blocks that are not narrower than it pay
    where they skip half of the products.

    Args:
        a: the site.
        form: name of what is computed in blocks.
        node: name of the node by which the site is identified.
        emit: writes the form with as many queries per block as its argument `width` says.
        tokens: the usual number of queries, and of keys.
        many: whether there are so many scores that blocks may pay.
        more: the end of each form's name.
    """
    if (band := a.band) is None or not a.has_static_heads:
        return
    widths = band.widths(BLOCKS)
    for width in widths:
        is_preferred = width == next((width for width in widths if width >= band.span), widths[-1])
        pays = many and is_preferred and 2 * band.products(width, tokens) <= tokens**2
        name = f"{form}, blocks of {width} × {band.wide(width)}{more}"
        yield Candidate(name, node, partial(emit, width=width), pays, IN_BAND, materialises_scores=False)


def in_blocks(
    op: Builder, a: Attention, width: int, attend: Callable[[Attention, int], ir.Value], as_heads: bool = True
) -> ir.Value:
    """The output of attention within a band, with static heads.

    Args:
        a: the site.
        width: queries per block, in whole chunks.
        attend: writes the attention of a part, and returns its output. Part 0 is the blocks, `(batch · blocks, width,
            heads · d_k)` on `(batch · blocks, keys, …)`: the first keys, which all see, and those within reach. Queries
            after the last one are zeros. The mask is complete: `(batch · blocks, 1 or heads, width, keys)`, boolean, or
            additive with minus infinity for pairs that are not visible. Part 1 is the first queries, which see all
            keys, if there are any.
        as_heads: whether part 0 is `(batch · heads, blocks, width, d_k)` on `(batch · heads, blocks, keys, …)`, under a
            mask `(1, blocks, width, keys)`, where all samples and heads share it and no first query sees all keys.
    """
    assert a.band is not None
    as_heads &= a.size("H") == a.size("H_kv") and not a.band.first_queries
    if a.mask is not None and not a.band.is_all:
        as_heads &= dims_of(a.mask)[:2] == [1, 1]
    ends = [("B H", *dims[1:]) for dims in HEADS_FIRST] if as_heads else [("B", *dims) for dims in SIDE_BY_SIDE]
    *layouts, whole = (a.layout(*dims) for dims in ends)
    query, key, value = a.inputs(op, layouts)
    count = blocks_of(a.size("n_q"), width, a.band.shift)
    cut = _Cut(op, query, a.band, width, as_heads)
    seen = op.And(constant(op, band_pairs(a.band, width), BOOL), op.Unsqueeze(cut.there, constant(op, [1])))
    mask = typed(op.Unsqueeze(seen, constant(op, [0, 2])), BOOL, [1, count.dim(), 1, width, cut.wide])
    mask = within(op, mask, None if a.band.is_all else mask_at_blocks(op, a.node, cut.pairs))
    sizes = {"n_q": Size(width), "n_k": Size(cut.wide)}
    operands = [cut.queries(query), cut.keys(key), cut.keys(value)]
    if as_heads:
        sizes |= {"B": a.size("B") * a.size("H"), "H": count}
        shared = typed(op.Squeeze(mask, constant(op, [2])), mask.dtype, [1, count.dim(), width, cut.wide])
        blocks = a.of_block(sizes, operands, shared, HEADS_FIRST)
    else:
        sizes["B"] = a.size("B") * count
        blocks = a.of_block(sizes, operands, cut.of_samples(mask, sizes["B"]))
    if a.band.is_all:  # every query sees its own key
        blocks = replace(blocks, silent_rows_are_nan=True)
    if a.band.is_causal_chunk and width == a.band.chunk:  # no query sees the padding of the last block
        blocks = replace(blocks, causal_prefix=0, residue="none")
    result = attend(blocks, 0)
    first = attend(_first_queries(op, a, [query, key, value]), 1) if a.band.first_queries else None
    return a.as_output(op, cut.joined(result, first), whole)


def _first_queries(op: Builder, a: Attention, operands: list[ir.Value]) -> Attention:
    """The attention of the queries that see all keys; if there are fewer, the last one is repeated."""
    assert a.band is not None
    query, key, value = operands
    count = a.band.first_queries
    last = op.Sub(op.Shape(query, start=1, end=2), constant(op, [1]))
    rows = op.Min(constant(op, np.arange(count)), last)

    def cut(op: Builder, x: ir.Value) -> ir.Value:
        batch, heads, n_q, n_k = dims_of(x)
        return x if n_q == 1 else typed(op.Gather(x, rows, axis=2), x.dtype, [batch, heads, count, n_k])

    mask = None if a.band.is_all else mask_at_blocks(op, a.node, cut)
    part = a.of_block({"n_q": Size(count)}, [op.Gather(query, rows, axis=1), key, value], mask)
    return replace(part, silent_rows_are_nan=True) if a.band.is_all else part


class _Cut:
    """Cuts tensors into blocks of queries and of the keys that these may see.

    Args:
        query: `(batch, tokens, features)`.
        width: queries per block.
        apart: whether samples and blocks stay two dims.

    Attributes:
        wide: keys per block.
        rows: `(blocks, wide)`, the index of each key, clamped to the first and the last.
        there: whether the key exists.
    """

    def __init__(self, op: Builder, query: ir.Value, band: Band, width: int, apart: bool) -> None:
        self._op, self._query, self._width, self.wide, self._apart = op, query, width, band.wide(width), apart
        self._first_queries, self._shift = band.first_queries, band.shift
        tokens = op.Shape(query, start=1, end=2)
        blocks = op.Div(op.Add(tokens, constant(op, [band.shift + width - 1])), constant(op, [width]))
        missing = op.Sub(op.Mul(blocks, constant(op, [width])), tokens)
        self._missing = op.Sub(missing, constant(op, [band.shift])) if band.shift else missing
        numbers = op.Range(constant(op, 0), op.Squeeze(blocks), constant(op, 1))
        begin = op.Sub(op.Mul(numbers, constant(op, width)), constant(op, band.most + band.shift))
        wanted = op.Add(op.Unsqueeze(begin, constant(op, [1])), constant(op, np.arange(width + band.span)))
        least = [0]
        if band.first_keys:  # they are not counted again where they are within reach
            first = op.Expand(constant(op, [np.arange(band.first_keys)]), op.Concat(blocks, constant(op, [1]), axis=0))
            wanted = op.Concat(first, wanted, axis=1)
            least = [0] * band.first_keys + [band.first_keys] * (width + band.span)
        self.rows = op.Max(op.Min(wanted, op.Sub(tokens, constant(op, [1]))), constant(op, [0]))
        self.there = op.And(op.GreaterOrEqual(wanted, constant(op, least)), op.Less(wanted, tokens))

    def queries(self, x: ir.Value) -> ir.Value:
        """`(batch, tokens, size)` as `(batch · blocks, width, size)`."""
        return self._blocks(filled_up(self._op, x, 1, self._missing, 3, self._shift), self._width, x)

    def keys(self, x: ir.Value) -> ir.Value:
        """`(batch, tokens, size)` as `(batch · blocks, wide, size)`."""
        rows = self._op.Gather(x, self.rows, axis=1)
        return rows if self._apart else self._blocks(rows, self.wide, x)

    def _blocks(self, rows: ir.Value, width: int, x: ir.Value) -> ir.Value:
        samples = [0, -1] if self._apart else [-1]
        return self._op.Reshape(rows, constant(self._op, [*samples, width, int(dims_of(x)[2])]))  # type: ignore[arg-type]

    def joined(self, rows: ir.Value, first: ir.Value | None) -> ir.Value:
        """`(batch · blocks, width, size)` as `(batch, tokens, size)`, with the first rows replaced by `(batch, first
        queries, size)`."""
        op, query = self._op, self._query
        shape = op.Concat(op.Shape(query, start=0, end=1), constant(op, [-1, int(dims_of(rows)[-1])]), axis=0)  # type: ignore[arg-type]
        rows, begin, axis = op.Reshape(rows, shape), self._shift + self._first_queries, constant(op, [1])
        if begin:
            others = op.Slice(rows, constant(op, [begin]), constant(op, [sys.maxsize]), axis)
            rows = others if first is None else op.Concat(first, others, axis=1)
        return op.Slice(rows, constant(op, [0]), op.Shape(query, start=1, end=2), axis)

    def of_samples(self, mask: ir.Value, samples: Size) -> ir.Value:
        """`(batch or 1, blocks, heads or 1, width, wide)` as `(batch · blocks, heads or 1, width, wide)`."""
        op, heads, ends = self._op, dims_of(mask)[2], (self._width, self.wide)
        batch = op.Concat(op.Shape(self._query, start=0, end=1), constant(op, [1, 1, 1, 1]), axis=0)
        shape = op.Concat(constant(op, [-1]), op.Shape(mask, start=2, end=3), constant(op, ends), axis=0)
        return typed(op.Reshape(op.Expand(mask, batch), shape), mask.dtype, [samples.dim(), heads, *ends])

    def pairs(self, op: Builder, x: ir.Value) -> ir.Value:
        """`(batch, heads, queries, keys)` as `(batch, blocks, heads, width, wide)`; each input dim may be 1."""
        batch, heads, n_q, n_k = dims_of(x)
        blocks: int | ir.SymbolicDim = ir.SymbolicDim(None)
        if n_q == 1 and n_k == 1:
            return typed(op.Unsqueeze(x, constant(op, [1])), x.dtype, [batch, 1, heads, 1, 1])
        if n_q == 1:
            cut = op.Transpose(op.Gather(x, self.rows, axis=3), perm=[0, 3, 1, 2, 4])
            return typed(cut, x.dtype, [batch, blocks, heads, 1, self.wide])
        shape = op.Concat(op.Shape(x, start=0, end=2), constant(op, [-1, self._width]), op.Shape(x, start=3), axis=0)
        rows = filled_up(op, x, 2, self._missing, before=self._shift)
        cut = op.Transpose(op.Reshape(rows, shape), perm=[0, 2, 1, 3, 4])
        if n_k == 1:
            return typed(cut, x.dtype, [batch, blocks, heads, self._width, 1])
        rows = op.Unsqueeze(self.rows, constant(op, [0, 2, 3]))
        every = op.Expand(rows, op.Concat(op.Shape(cut, start=0, end=4), constant(op, [1]), axis=0))
        cut = op.GatherElements(cut, every, axis=4)
        return typed(cut, x.dtype, [batch, blocks, heads, self._width, self.wide])


def band_pairs(band: Band, width: int) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """`(width, keys)`: the visible pairs of a block: all of those with first keys, and of those with the other keys,
    which begin `most` before the first query, the ones in the band."""
    seen = replace(band, shift=0).between(np.arange(width)[:, None], np.arange(width + band.span) - band.most)
    return np.concatenate([np.ones((width, band.first_keys), bool), seen], axis=1)


def written(band: Band) -> str:
    """A band in the format of :data:`BAND`."""
    return " ".join(map(str, (band.least, band.most, band.first_keys, band.shift)))


def band_of(node: ir.Node) -> Band | None:
    """Return the band of a node that attends in blocks, from :data:`BAND`; None for any other node."""
    text = node.metadata_props.get(BAND)
    if text is None:
        return None
    least, most, first_keys, *shift = map(int, text.split())
    return Band(least, most, first_keys=first_keys, shift=sum(shift))


def of_all_pairs(weights: Array, band: Band, tokens: int) -> Array:
    """Return the weights of all pairs, `(heads, tokens, tokens)`, from those of one sample's blocks, `(blocks, heads,
    width, keys)`."""
    blocks, heads, width, wide = weights.shape
    pairs = np.zeros((heads, blocks * width, tokens), weights.dtype)
    for i in range(blocks):
        reached = i * width - band.shift - band.most + np.arange(wide - band.first_keys)
        keys = np.concatenate([np.arange(band.first_keys), reached])
        there = (keys >= 0) & (keys < tokens)
        there[band.first_keys :] &= reached >= band.first_keys
        pairs[:, i * width : (i + 1) * width, keys[there]] = weights[i][..., there]
    return pairs[:, band.shift : band.shift + tokens]


# --- causal blocks ----------------------------------------------------------------------------------------------------

# Causal attention in blocks of queries: each block attends to the keys up to its own, and to no later ones except some
# first keys that every query sees (a prefix).
#
# Of n² products, `steps` blocks compute the share `(steps + 1) / (2 · steps)`, each in a separate kernel. A query's
# keys stay together, so nothing has to be merged. Whatever a mask hides in addition to later keys is computed only for
# the pairs of each block.


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
    cut = _CausalCut(op, operands[0], a.size("n_q"), steps, a.causal_prefix)
    filled = [cut.filled(operand) for operand in operands]
    outputs = [attend(_block(op, a, filled, cut, i), i) for i in range(steps)]
    result = op.Slice(op.Concat(*outputs, axis=2), constant(op, [0]), cut.tokens, constant(op, [2]))
    return a.as_output(op, result, whole)


def _block(op: Builder, a: Attention, filled: list[ir.Value], cut: _CausalCut, number: int) -> Attention:
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


class _CausalCut:
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
        keys, queries = op.Unsqueeze(keys, constant(op, [0, 1, 2])), op.Unsqueeze(queries, constant(op, [0, 1, 3]))
        return op.LessOrEqual(keys, queries)

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
