"""Attention within a band, in blocks of queries that each meet the keys that they may see, and no others.

A window of 256 keys behind the query leaves a sixteenth of the products of 4,096 tokens. Blocks are samples of a batch,
so one kernel computes them all, in memory that grows with the tokens instead of with their square: the form of
Longformer (https://arxiv.org/abs/2004.05150, 3.1) with one block of keys around each block of queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.export.attention.canonical import SILENT_ROWS
from attnforge.export.attention.mask_blocks import mask_at_blocks, why_not_by_blocks
from attnforge.export.attention.visibility import visibility
from attnforge.export.graphs.build import Builder, cast, constant, dims_of, typed

BOOL = ir.DataType.BOOL

BAND = "attnforge.band"
"""Metadata of a node that attends in blocks: least and most of `query − key`, by the tokens' indices."""


@dataclass(frozen=True)
class Band:
    """What a mask leaves: pairs with `least ≤ query − key ≤ most`, by the tokens' indices.

    Attributes:
        is_all: whether exactly these pairs are visible; else the mask still has to be applied inside.
    """

    least: int
    most: int
    is_all: bool = True

    @property
    def span(self) -> int:
        """How many more keys than queries a block has."""
        return self.most - self.least

    def holds(self, queries: int, keys: int) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        """`(queries, keys)`, whether each pair is visible."""
        distance = np.arange(queries)[:, None] - np.arange(keys)
        return (self.least <= distance) & (distance <= self.most)


def band_of(node: ir.Node) -> Band | None:
    """The band that a canonical node's mask is proved to leave, of as many queries as keys.

    None where it leaves something else; where a query is not in reach of its own key; and where the rest of the mask
    cannot be computed in blocks, or leaves queries without keys that do not get zeros.
    """
    if len(node.inputs) < 4:
        return None
    seen = visibility(node)
    if len(seen.regions) != 1 or seen.n_q != seen.n_k:
        return None
    (region,) = seen.regions
    if region.blocks is not None or not region.queries.is_open or not region.keys.is_open:
        return None
    least, most = (None if end is None else end.constant for end in (region.band.least, region.band.most))
    if least is None or most is None or not least <= 0 <= most:
        return None
    if seen.residue:
        gives_zeros = seen.silent == "empty" and node.metadata_props.get(SILENT_ROWS) != "nan"
        if not (gives_zeros or seen.silent == "never") or why_not_by_blocks(node) is not None:
            return None
    return Band(least, most, is_all=not seen.residue)


@dataclass(frozen=True)
class Blocked:
    """Operands in blocks, as samples of a batch.

    Attributes:
        query: `(batch · blocks, width, features)`; queries behind the last one are zeros.
        key, value: `(batch · blocks, width + span, features)`.
        bias: `(batch · blocks, 1 or heads, width, width + span)`, minus infinity for pairs that are not visible.
    """

    query: ir.Value
    key: ir.Value
    value: ir.Value
    bias: ir.Value


def in_blocks(
    op: Builder,
    operands: Sequence[ir.Value],
    features: Sequence[int],
    band: Band,
    width: int,
    node: ir.Node | None = None,
) -> Blocked:
    """Cut attention within a band into blocks of `width` queries.

    Args:
        operands: query, key and value, each `(batch, tokens, features)`.
        features: of each.
        node: the canonical node, whose mask is applied inside the band.
    """
    query, key, value = operands
    assert query.dtype is not None
    cut = _Cut(op, query, band, width)
    seen = op.And(constant(op, band_pairs(band, width), BOOL), op.Unsqueeze(cut.there, constant(op, [1])))
    seen = typed(op.Unsqueeze(seen, constant(op, [0, 2])), BOOL, [1, ir.SymbolicDim(None), 1, width, cut.wide])
    mask = mask_at_blocks(op, node, cut.pairs) if node is not None else None
    if mask is not None and mask.dtype == BOOL:
        seen, mask = op.And(mask, seen), None
    shown = constant(op, 0.0, query.dtype) if mask is None else cast(op, mask, query.dtype)
    bias = op.Where(seen, shown, constant(op, -np.inf, query.dtype))  # (batch or 1, blocks, heads or 1, width, wide)
    batch = op.Concat(op.Shape(query, start=0, end=1), constant(op, [1, 1, 1, 1]), axis=0)
    heads = op.Shape(bias, start=2, end=3)
    ends = op.Concat(constant(op, [-1]), heads, constant(op, [width, cut.wide]), axis=0)
    return Blocked(
        op.Reshape(op.Pad(query, cut.pads(3, 1)), constant(op, [-1, width, features[0]])),
        cut.keys(key, features[1]),
        cut.keys(value, features[2]),
        op.Reshape(op.Expand(bias, batch), ends),
    )


class _Cut:
    """Cuts tensors into blocks of queries, and of the keys that these may see.

    Args:
        query: `(batch, tokens, features)`.
        width: queries of a block.

    Attributes:
        wide: keys of a block.
        rows: `(blocks, wide)`, the index of each key; of those before the first and behind the last, an end's.
        there: whether there is such a key.
    """

    def __init__(self, op: Builder, query: ir.Value, band: Band, width: int) -> None:
        self._op, self._width, self.wide = op, width, width + band.span
        tokens = op.Shape(query, start=1, end=2)
        blocks = op.Div(op.Add(tokens, constant(op, [width - 1])), constant(op, [width]))
        self._missing = op.Sub(op.Mul(blocks, constant(op, [width])), tokens)
        numbers = op.Range(constant(op, 0), op.Squeeze(blocks), constant(op, 1))
        begin = op.Sub(op.Mul(numbers, constant(op, width)), constant(op, band.most))
        wanted = op.Add(op.Unsqueeze(begin, constant(op, [1])), constant(op, np.arange(self.wide)))
        self.rows = op.Max(op.Min(wanted, op.Sub(tokens, constant(op, [1]))), constant(op, [0]))
        self.there = op.And(op.GreaterOrEqual(wanted, constant(op, [0])), op.Less(wanted, tokens))

    def pads(self, rank: int, axis: int) -> ir.Value:
        """What Pad takes to fill up the last block along an axis."""
        op, zeros = self._op, constant(self._op, [0] * (rank + axis))
        return op.Concat(zeros, self._missing, constant(op, [0] * (rank - axis - 1)), axis=0)

    def keys(self, x: ir.Value, size: int) -> ir.Value:
        """`(batch, tokens, size)` as `(batch · blocks, wide, size)`."""
        return self._op.Reshape(self._op.Gather(x, self.rows, axis=1), constant(self._op, [-1, self.wide, size]))

    def pairs(self, op: Builder, x: ir.Value) -> ir.Value:
        """`(batch, heads, queries, keys)` as `(batch, blocks, heads, width, wide)`; each dim may be 1."""
        batch, heads, n_q, n_k = dims_of(x)
        assert x.dtype is not None
        blocks: int | ir.SymbolicDim = ir.SymbolicDim(None)
        if n_q == 1 and n_k == 1:
            return typed(op.Unsqueeze(x, constant(op, [1])), x.dtype, [batch, 1, heads, 1, 1])
        if n_q == 1:
            cut = op.Transpose(op.Gather(x, self.rows, axis=3), perm=[0, 3, 1, 2, 4])
            return typed(cut, x.dtype, [batch, blocks, heads, 1, self.wide])
        shape = op.Concat(op.Shape(x, start=0, end=2), constant(op, [-1, self._width]), op.Shape(x, start=3), axis=0)
        cut = op.Transpose(op.Reshape(op.Pad(x, self.pads(4, 2)), shape), perm=[0, 2, 1, 3, 4])
        if n_k == 1:
            return typed(cut, x.dtype, [batch, blocks, heads, self._width, 1])
        rows = op.Unsqueeze(self.rows, constant(op, [0, 2, 3]))
        every = op.Expand(rows, op.Concat(op.Shape(cut, start=0, end=4), constant(op, [1]), axis=0))
        cut = op.GatherElements(cut, every, axis=4)
        return typed(cut, x.dtype, [batch, blocks, heads, self._width, self.wide])


def band_pairs(band: Band, width: int) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """`(width, width + span)`: the pairs of a block that are visible, whose first key is `most` before its first
    query."""
    distance = np.arange(width)[:, None] + band.most - np.arange(width + band.span)
    return (band.least <= distance) & (distance <= band.most)


def before_blocks(node: ir.Node) -> tuple[ir.Value, ir.Value, Band] | None:
    """Query and key as :func:`in_blocks` was given them, and the band; None where a node does not attend in blocks."""
    written = node.metadata_props.get(BAND)
    if written is None:
        return None
    query, key = (_before(node, i, op_type) for i, op_type in enumerate(("Pad", "Gather")))
    least, most = map(int, written.split())
    return query, key, Band(least, most)


def _before(node: ir.Node, i: int, op_type: str) -> ir.Value:
    """The first input of the node behind whose reshaped result is input `i`."""
    value = node.inputs[i]
    while value is not None and (producer := value.producer()) is not None:
        value = producer.inputs[0]
        if producer.op_type == op_type and value is not None:
            return value
    raise ValueError(f"{node.name} does not attend in blocks")


def mask_of_blocks(bias: Array, band: Band, tokens: int) -> Array:
    """The bias of the first sample's blocks as one of all pairs, `(1 or heads, tokens, tokens)`."""
    width, wide = bias.shape[2:]
    blocks = -(-tokens // width)
    mask = np.full((bias.shape[1], blocks * width, tokens), -np.inf, bias.dtype)
    for i in range(blocks):
        keys = i * width - band.most + np.arange(wide)
        there = (keys >= 0) & (keys < tokens)
        mask[:, i * width : (i + 1) * width, keys[there]] = bias[i][..., there]
    return mask[:, :tokens]


def out_of_blocks(op: Builder, result: ir.Value, query: ir.Value, features: int) -> ir.Value:
    """`(batch · blocks, width, features)` as `(batch, tokens, features)`, with as many tokens as `query` has."""
    batch, tokens = op.Shape(query, start=0, end=1), op.Shape(query, start=1, end=2)
    joined = op.Reshape(result, op.Concat(batch, constant(op, [-1, features]), axis=0))
    return op.Slice(joined, constant(op, [0]), tokens, constant(op, [1]))
