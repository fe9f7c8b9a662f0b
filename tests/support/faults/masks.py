"""Faults of lowered masks: blocks of queries with the keys of a window, and hidden keys as a feature."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.export.graphs.build import Builder, constant
from tests.support.faults.graph import (
    Alter,
    Build,
    Family,
    Graph,
    NotThere,
    all_true,
    first_along,
    is_constant,
    numbers,
    producer,
    required,
    rolled,
)

WINDOW, BARE, PADDED, PADDED_CAUSAL = "window", "bare-window", "padded", "padded-causal"
IN_PRODUCTS = "window-in-products"
IN_PADDING = (WINDOW, IN_PRODUCTS)
WINDOWS = (BARE, *IN_PADDING)
FEATURES = (PADDED, PADDED_CAUSAL)


class Blocks:
    """The parts of attention in blocks.

    Attributes:
        output: the output of the node that computes all blocks, or of their products.
        fill: the Where that selects the additive mask or the scores for visible pairs, and its last input for others.
        band: `(width, wide)`, the pairs of a block that are visible.
        first: how many keys before its first query a block's first key is.
        there: the And that tells whether a block's key is neither before the first token nor after the last.
        keys, values: the Gather of the keys and of the values.
        rows: `(blocks, wide)`, the keys of each block.
        rest: `(batch, blocks, 1, width, wide)`, the rest of the mask, if it is more than a band.
        mask: the whole mask, by sample and block.
        axis: the dim of the output that has the blocks: the samples', or the heads'.
    """

    def __init__(self, g: Graph) -> None:
        if g.nodes("Attention"):
            node = g.node("Attention")
            self.output, self.fill, (key, value) = node.outputs[0], producer(node.inputs[3]), node.inputs[1:3]
        else:
            site = g.sites[0]
            self.output, key, value = site.context.outputs[0], site.scores.inputs[1], site.context.inputs[1]
            if site.fill is None:
                raise NotThere("attention in blocks")
            self.fill = site.fill
        self.keys, self.values = _gathered(key), _gathered(value)
        self.rows = required(self.keys.inputs[1])
        wanted = producer(required(producer(self.rows).inputs[0])).inputs[0]  # of Max(Min(wanted, last), 0)
        begin = producer(producer(required(producer(wanted).inputs[0])).inputs[0])
        self.first = required(begin.inputs[1])
        self.mask = required(self.fill.inputs[0])
        seen = producer(self.mask)
        self.axis = int(seen.op_type == "Squeeze")
        while seen.op_type in ("Reshape", "Expand", "Squeeze"):
            seen = producer(seen.inputs[0])
        self.rest = required(seen.inputs[0]) if seen.op_type == "And" else None
        if self.rest is not None:
            seen = producer(seen.inputs[1])
        seen = producer(seen.inputs[0])
        self.band, there = required(seen.inputs[0]), producer(required(seen.inputs[1]))
        self.there = producer(there.inputs[0])
        if not (is_constant(self.band) and is_constant(self.first) and self.there.op_type == "And"):
            raise NotThere("attention in blocks")


def _gathered(operand: ir.Value | None) -> ir.Node:
    """Return the node that gathers the keys of each block, before reshapes and transposes."""
    node = producer(operand)
    while node.op_type in ("Reshape", "Transpose", "Expand", "Unsqueeze", "Add"):
        node = producer(node.inputs[0])
    if node.op_type != "Gather":
        raise NotThere("attention in blocks")
    return node


def band(change: Callable[[Array], Array]) -> Alter:
    """Change the visible pairs of a block."""

    def alter(g: Graph) -> None:
        pairs = Blocks(g).band
        g.set(pairs, change(numbers(pairs)))

    return alter


def edge(end_of_band: str, by: int) -> Alter:
    """Extend the band by one key, or with `by` -1 shorten it, before or after the query, if the block has that key."""

    def change(pairs: Array) -> Array:
        changed = pairs.copy()
        for row in changed:
            seen = np.flatnonzero(row)
            end = seen[0] - max(by, 0) if end_of_band == "before" else seen[-1] + max(by, 0)
            row[np.clip(end, 0, len(row) - 1)] = by > 0
        return changed

    return band(change)


def first_row(pairs: Array) -> Array:
    """Use the visible pairs of the first query for all."""
    return np.broadcast_to(pairs[:1], pairs.shape)


def first_key(by: int) -> Alter:
    """Start the keys of every block later, without moving the band."""

    def alter(g: Graph) -> None:
        first = Blocks(g).first
        g.set(first, numbers(first) - by)

    return alter


def there(keep: int | None) -> Alter:
    """Include keys outside the tokens: at both ends, or at the end that input `keep` does not check."""

    def alter(g: Graph) -> None:
        both = Blocks(g).there
        left = required(both.inputs[keep or 0])
        g.after(both.outputs[0], lambda op, x: all_true(op, x) if keep is None else op.Identity(left))

    return alter


def of_block(part: str, build: Build) -> Alter:
    """Apply `build` to a part of the blocks."""

    def alter(g: Graph) -> None:
        blocks = Blocks(g)
        if part == "keys" or part == "values":
            g.before(getattr(blocks, part), 1, build)
        else:
            g.after(required(getattr(blocks, part)), build)

    return alter


def of_output(build: Callable[[int], Build]) -> Alter:
    """Apply what `build` returns for the dim of the blocks to their output."""

    def alter(g: Graph) -> None:
        blocks = Blocks(g)
        g.after(blocks.output, build(blocks.axis))

    return alter


def moved(axis: int) -> Build:
    """Roll by one along an axis."""
    return lambda op, x: rolled(op, x, axis)


def last_lost(axis: int) -> Build:
    """Set the last along an axis to zeros."""

    def build(op: Builder, rows: ir.Value) -> ir.Value:
        kept = op.Slice(rows, constant(op, [0]), constant(op, [-1]), constant(op, [axis]))
        last = op.Slice(rows, constant(op, [-1]), constant(op, [2**31]), constant(op, [axis]))
        return op.Concat(kept, op.Mul(last, constant(op, 0.0, rows.dtype or ir.DataType.FLOAT)), axis=axis)

    return build


def fill(number: float) -> Alter:
    """Set the fill value of hidden pairs."""

    def alter(g: Graph) -> None:
        g.set(required(Blocks(g).fill.inputs[2]), np.asarray(number))

    return alter


def without_guard(g: Graph) -> None:
    """Keep the kernel's output for a query without keys."""
    guard = next((node for node in reversed(g.nodes("Where")) if _is_zero(node.inputs[2])), None)
    if guard is None or guard.inputs[1] is None:
        raise NotThere("a guard of queries without keys")
    g.replace(guard.outputs[0], guard.inputs[1])


def _is_zero(value: ir.Value | None) -> bool:
    return value is not None and is_constant(value) and numbers(value).size == 1 and not numbers(value).any()


def padded(g: Graph) -> ir.Node:
    """Return the Where that computes the feature of each key."""
    for node in g.nodes("Where"):
        hidden = node.inputs[2]
        if is_constant(hidden) and hidden is not None and numbers(hidden).size == 1 and numbers(hidden) < -1e30:
            return node
    raise NotThere("a mask as a feature")


def feature(build: Build) -> Alter:
    """Apply `build` to the feature of the keys."""
    return lambda g: g.after(padded(g).outputs[0], build)


def hidden_is(number: float) -> Alter:
    def alter(g: Graph) -> None:
        g.set(required(padded(g).inputs[2]), np.asarray(number))

    return alter


def ones_of_query(number: float) -> Alter:
    """Change the queries' feature, which should be one."""

    def alter(g: Graph) -> None:
        for node in g.nodes("Pad"):
            if len(node.inputs) > 2 and (one := node.inputs[2]) is not None and numbers(one) == 1:
                return g.set(one, np.asarray(number))
        raise NotThere("the feature of queries")

    return alter


def without_scale(g: Graph) -> None:
    """Remove the scale of the query."""
    for node in g.nodes("Pad"):
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            query = producer(node.inputs[0])
            by = query.inputs[1]
            if query.op_type == "Mul" and by is not None and is_constant(by):
                return g.set(by, np.asarray(1.0))
    raise NotThere("a scaled query")


def guard_threshold(number: int) -> Alter:
    """Raise the number of keys from which on a query's output is not zero."""

    def alter(g: Graph) -> None:
        least = required(g.node("Greater", -1).inputs[1])
        g.set(least, numbers(least) + number)

    return alter


IN_BLOCKS: Family = [
    ("band-shorter-behind", "the furthest earlier key is left out", edge("before", -1), WINDOWS),
    ("band-shorter-ahead", "the furthest later key is left out", edge("after", -1), WINDOWS),
    ("band-longer-behind", "one earlier key more, if the block has it", edge("before", 1), BARE),
    ("band-longer-ahead", "one later key more, if the block has it", edge("after", 1), BARE),
    ("band-mirrored", "earlier and later keys exchanged", band(lambda pairs: pairs[:, ::-1]), WINDOWS),
    ("band-of-block", "a query sees all keys of its block", band(np.ones_like), BARE),
    ("band-first-row", "all queries of a block see what its first sees", band(first_row), WINDOWS),
    ("block-later", "the keys of every block begin one later", first_key(1), WINDOWS),
    ("block-earlier", "the keys of every block begin one earlier", first_key(-1), WINDOWS),
    ("ends-seen", "copies of the ends' keys are seen", there(None), WINDOWS),
    ("start-seen", "copies of the first key are seen", there(1), WINDOWS),
    ("end-seen", "copies of the last key are seen", there(0), WINDOWS),
    ("block-lost", "a block too few", of_output(last_lost), WINDOWS),
    ("blocks-moved", "every block replaces the one before", of_output(moved), WINDOWS),
    ("keys-of-first-block", "all blocks have the first one's keys", of_block("keys", first_along(0)), WINDOWS),
    ("keys-moved", "every block has the keys of the next", of_block("keys", moved(0)), WINDOWS),
    ("values-moved", "values one ahead of the keys", of_block("values", moved(1)), WINDOWS),
    ("residue-dropped", "padding inside the band is ignored", of_block("rest", all_true), IN_PADDING),
    ("residue-of-first-block", "all blocks have the first's padding", of_block("rest", first_along(1)), IN_PADDING),
    ("residue-of-first-sample", "all samples have the first's padding", of_block("rest", first_along(0)), IN_PADDING),
    ("residue-moved", "padding one key earlier", of_block("rest", moved(4)), IN_PADDING),
    ("blocks-fill-10", "-10 where -inf is meant", fill(-10.0), WINDOWS),
]  # fmt: skip

AS_FEATURES: Family = [
    ("feature-missing", "padding is ignored", feature(lambda op, x: op.Sub(x, x)), FEATURES),
    ("feature-moved", "moved by one key", feature(moved(3)), FEATURES),
    ("feature-first-sample", "all samples have the first one's", feature(first_along(0)), FEATURES),
    ("feature-10", "-10 where a very low number is meant", hidden_is(-10.0), FEATURES),
    ("feature-positive", "hidden keys have a very high number", hidden_is(1e30), FEATURES),
    ("query-without-feature", "queries have a zero where a one is meant", ones_of_query(0.0), FEATURES),
    ("query-minus-one", "queries have minus one where a one is meant", ones_of_query(-1.0), FEATURES),
    ("feature-scale-missing", "queries are not scaled", without_scale, FEATURES),
    ("silent-rows", "a query without keys gets the mean of all values", without_guard, FEATURES),
    ("silent-but-one", "zeros for queries with one key", guard_threshold(1), PADDED_CAUSAL),
]
