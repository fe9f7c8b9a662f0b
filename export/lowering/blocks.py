"""Attention within a band, in blocks of queries that each meet the keys that they may see, and no others.

A window of 256 keys behind the query leaves a sixteenth of the products of 4,096 tokens. Blocks are samples of a batch,
so one kernel computes them all, in memory that grows with the tokens instead of with their square: the form of
Longformer (https://arxiv.org/abs/2004.05150, 3.1) with one block of keys around each block of queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attnforge.export.attention.visibility import visibility
from attnforge.export.graphs.build import Builder, constant

BOOL = ir.DataType.BOOL

BAND = "attnforge.band"
"""Metadata of a node that attends in blocks: least and most of `query − key`, by the tokens' indices."""


@dataclass(frozen=True)
class Band:
    """What a mask leaves where exactly `least ≤ query − key ≤ most` is visible, by the tokens' indices."""

    least: int
    most: int

    @property
    def span(self) -> int:
        """How many more keys than queries a block has."""
        return self.most - self.least

    def holds(self, queries: int, keys: int) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        """`(queries, keys)`, whether each pair is visible."""
        distance = np.arange(queries)[:, None] - np.arange(keys)
        return (self.least <= distance) & (distance <= self.most)


def band_of(node: ir.Node) -> Band | None:
    """The band that a canonical node's mask is proved to leave, neither more nor less. None where it leaves something
    else, where there are not as many queries as keys, or where a query does not see its own key."""
    if len(node.inputs) < 4:
        return None
    seen = visibility(node)
    if len(seen.regions) != 1 or seen.residue or seen.n_q != seen.n_k:
        return None
    (region,) = seen.regions
    if region.blocks is not None or not region.queries.is_open or not region.keys.is_open:
        return None
    ends = [None if end is None else end.constant for end in (region.band.least, region.band.most)]
    if ends[0] is None or ends[1] is None or not ends[0] <= 0 <= ends[1]:
        return None
    return Band(ends[0], ends[1])


@dataclass(frozen=True)
class Blocked:
    """Operands in blocks, as samples of a batch.

    Attributes:
        query: `(batch · blocks, width, features)`; queries behind the last one are zeros.
        key, value: `(batch · blocks, width + span, features)`.
        bias: `(batch · blocks, 1, width, width + span)`, minus infinity for pairs that are not visible.
    """

    query: ir.Value
    key: ir.Value
    value: ir.Value
    bias: ir.Value


def in_blocks(
    op: Builder, query: ir.Value, key: ir.Value, value: ir.Value, band: Band, width: int, features: tuple[int, int, int]
) -> Blocked:
    """Cut attention within a band into blocks of `width` queries.

    Args:
        query, key, value: `(batch, tokens, features)`.
        features: of query, key and value.
    """
    assert query.dtype is not None
    wide = width + band.span
    tokens = op.Shape(query, start=1, end=2)
    zero, step = constant(op, 0), constant(op, width)
    blocks = op.Div(op.Add(tokens, constant(op, [width - 1])), constant(op, [width]))
    missing = op.Sub(op.Mul(blocks, constant(op, [width])), tokens)
    pads = op.Concat(constant(op, [0, 0, 0, 0]), missing, constant(op, [0]), axis=0)
    first = op.Mul(op.Range(zero, op.Squeeze(blocks), constant(op, 1)), step)  # query of each block
    begin = op.Unsqueeze(op.Sub(first, constant(op, band.most)), constant(op, [1]))
    wanted = op.Add(begin, constant(op, np.arange(wide)))  # (blocks, width + span): keys, before 0 and behind the last
    rows = op.Max(op.Min(wanted, op.Sub(tokens, constant(op, [1]))), constant(op, [0]))

    def cut(x: ir.Value, size: int) -> ir.Value:
        return op.Reshape(op.Gather(x, rows, axis=1), constant(op, [-1, wide, size]))

    there = op.And(op.GreaterOrEqual(wanted, constant(op, [0])), op.Less(wanted, tokens))
    pairs = constant(op, band_pairs(band, width), BOOL)
    seen = op.And(pairs, op.Unsqueeze(there, constant(op, [1])))  # (blocks, width, width + span)
    least = constant(op, -np.inf, query.dtype)
    bias = op.Unsqueeze(op.Where(seen, constant(op, 0.0, query.dtype), least), constant(op, [0]))
    every = op.Expand(bias, op.Concat(op.Shape(query, start=0, end=1), constant(op, [1, 1, 1]), axis=0))
    return Blocked(
        op.Reshape(op.Pad(query, pads), constant(op, [-1, width, features[0]])),
        cut(key, features[1]),
        cut(value, features[2]),
        op.Reshape(every, constant(op, [-1, 1, width, wide])),
    )


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


def out_of_blocks(op: Builder, result: ir.Value, query: ir.Value, features: int) -> ir.Value:
    """`(batch · blocks, width, features)` as `(batch, tokens, features)`, with as many tokens as `query` has."""
    batch, tokens = op.Shape(query, start=0, end=1), op.Shape(query, start=1, end=2)
    joined = op.Reshape(result, op.Concat(batch, constant(op, [-1, features]), axis=0))
    return op.Slice(joined, constant(op, [0]), tokens, constant(op, [1]))
