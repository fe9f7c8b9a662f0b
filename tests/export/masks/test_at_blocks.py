"""A mask that is computed by blocks equals the whole mask, cut to blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from attnforge.arrays import Array
from attnforge.export.graphs.build import Builder, constant, dims_of, typed
from attnforge.export.graphs.sizes import ONE, Size
from attnforge.export.masks.at_blocks import NotByBlocks, mask_at_blocks, why_not_by_blocks
from attnforge.export.masks.visibility import visibility
from tests.support.random_graphs import FLOAT, INT64, Drawn, Graph
from tests.support.random_masks import RandomMask, drawn_mask, outputs_of

T = TypeVar("T")


class Never:
    """Always makes the first choice, and says no."""

    def pick(self, options: Sequence[T]) -> T:
        return options[0]

    def chance(self, percent: int) -> bool:
        return False


@dataclass(frozen=True)
class Piece:
    """One block: queries and keys from one index to another."""

    queries: slice
    keys: slice

    def __call__(self, op: Builder, x: ir.Value) -> ir.Value:
        for axis, part in ((2, self.queries), (3, self.keys)):
            dims = dims_of(x)
            if dims[axis] != 1:
                ends = [constant(op, [n]) for n in (part.start, part.stop, axis)]
                assert x.dtype is not None
                dims[axis] = part.stop - part.start
                x = typed(op.Slice(x, *ends), x.dtype, dims)
        return x

    def of(self, whole: Array) -> Array:
        return whole[:, :, self.queries, self.keys]


@dataclass(frozen=True)
class Blocks:
    """All blocks, as a dim after the heads: rows of queries, and for every row keys of any indices.

    Attributes:
        keys: `(blocks, keys of a block)`, indices.
        n_q: number of queries.
        n_k: number of keys.
    """

    keys: Array
    n_q: int
    n_k: int

    def __call__(self, op: Builder, x: ir.Value) -> ir.Value:
        batch, heads, *varies = dims_of(x)
        by_query, by_key = (dim != 1 for dim in varies)
        blocks, rows = len(self.keys), self.n_q // len(self.keys)
        width = self.keys.shape[1] if by_key else 1
        index = np.broadcast_to(self.keys[:, None, :] if by_key else 0, (blocks, rows, width))
        first = np.arange(self.n_q).reshape(blocks, rows, 1) * (self.n_k if by_key else 1)
        index = index + first if by_query else index[:, :1]
        index = index if by_query or by_key else index[:1]
        flat = op.Reshape(x, constant(op, [0, 0, -1]))
        assert x.dtype is not None
        return typed(op.Gather(flat, constant(op, index), axis=2), x.dtype, [batch, heads, *index.shape])

    def of(self, whole: Array) -> Array:
        rows = np.arange(self.n_q).reshape(len(self.keys), -1)
        return whole[:, :, rows[:, :, None], self.keys[:, None, :]]


def blocked(mask: RandomMask, cut: Piece | Blocks) -> Array:
    """Compute the mask by blocks with ONNX Runtime.

    Raises:
        NotByBlocks: it cannot be computed by blocks.
    """
    model = mask.model.clone()
    values = {value.name: value for node in model.graph for value in node.outputs}
    values |= {value.name: value for value in (*model.graph.inputs, *model.graph.initializers.values())}
    node = ir.node("Attention", [mask.node.inputs[0], mask.node.inputs[1], mask.node.inputs[2], values[mask.mask.name]])
    query, key = (next(v for v in model.graph.inputs if v.name == x.name) for x in mask.node.inputs[:2] if x)
    node.replace_input_with(0, query)
    node.replace_input_with(1, key)
    op = Builder()
    result = mask_at_blocks(op, node, cut)
    assert result is not None and result.dtype == mask.mask.dtype
    for i, written in enumerate(op.nodes):
        written.name = f"blocks/{i}"
        written.outputs[0].name = f"blocks/{i}:0"
    model.graph.extend(op.nodes)
    model.graph.outputs[:] = [result]
    (array,) = outputs_of(model, mask.inputs)
    return array


def check(mask: RandomMask, cut: Piece | Blocks) -> None:
    (whole,) = outputs_of(mask.model, mask.inputs)
    whole = np.broadcast_to(whole, np.broadcast_shapes(whole.shape, (1, 1, mask.n_q, mask.n_k)))
    wanted, got = cut.of(whole), blocked(mask, cut)
    np.testing.assert_array_equal(np.broadcast_to(got, np.broadcast_shapes(got.shape, wanted.shape)), wanted)


def test_blocks_that_are_numbered_and_repeated() -> None:
    """A mask of 3 × 3 blocks, each repeated for its 4 × 4 pairs: read at `query // 4` and `key // 4`."""
    g, blocks, size, tokens = Graph(Never()), Size(3), Size(4), Size(12)
    query, key = (g.input(name, [Size(2), Size(2), tokens, Size(2)]) for name in ("query", "key"))
    first = g.input("first", [ONE], INT64)
    count = [g.constant(np.int64(n), INT64) for n in (0, 3, 1)]
    rows = g.binary("Add", g.op("Range", count, [blocks], INT64), first)
    seen = g.binary("GreaterOrEqual", g.unsqueeze(rows, [1]), g.unsqueeze(rows, [0]))
    apart = g.expand(g.reshape(seen, [blocks, ONE, blocks, ONE]), [blocks, size, blocks, size])
    mask = g.reshape(apart, [ONE, ONE, tokens, tokens])
    node = ir.node("Attention", [query, key, key, mask], {"scale": 1.0})
    inputs: dict[str, Array] = {str(x.name): np.zeros([2, 2, 12, 2], np.float32) for x in (query, key)}
    inputs[str(first.name)] = np.array([5])
    program = RandomMask(g.model(mask), node, mask, inputs, {}, 12, 12)
    assert visibility(node).text() == "blocks of 4, −∞ … 0"
    check(program, Piece(slice(3, 10), slice(1, 9)))
    check(program, Blocks(np.array([[0, 1, 2], [7, 3, 1], [11, 0, 8]]), 12, 12))


def test_a_mask_and_a_bias_that_are_tiled() -> None:
    g, period, tokens = Graph(Never()), Size(4), Size(12)
    query, key = (g.input(name, [Size(2), Size(2), tokens, Size(2)]) for name in ("query", "key"))
    rows = g.constant(np.arange(12), INT64)
    seen = g.binary("GreaterOrEqual", g.unsqueeze(rows, [1]), g.unsqueeze(rows, [0]))
    seen = g.op("Tile", [g.unsqueeze(seen, [0, 1]), g.ints(2, 2, 1, 1)], [Size(2), Size(2), tokens, tokens])
    added = g.input("bias", [period])
    bias = g.op("Tile", [added, g.ints(3)], [tokens])
    mask = g.where(seen, bias, g.constant(np.float32(-np.inf)))
    node = ir.node("Attention", [query, key, key, mask], {"scale": 1.0})
    inputs: dict[str, Array] = {str(x.name): np.zeros([2, 2, 12, 2], np.float32) for x in (query, key)}
    inputs[str(added.name)] = np.random.default_rng(0).standard_normal(4).astype(np.float32)
    program = RandomMask(g.model(mask), node, mask, inputs, {}, 12, 12)
    assert visibility(node).text() == "band −∞ … 0, residue: bias"
    check(program, Piece(slice(3, 10), slice(1, 9)))
    check(program, Blocks(np.array([[0, 1, 2], [7, 3, 1], [11, 0, 8]]), 12, 12))


def test_a_clamped_distance_and_a_slice_of_a_slice_of_a_constant() -> None:
    g, size, tokens = Graph(Never()), Size(20), Size(1, ("tokens",))
    query = g.input("query", [Size(2), Size(2), tokens, Size(2)])
    length, zero = g.squeeze(g._size(tokens), [0]), g.constant(np.int64(0), INT64)
    positions = g.op("Range", [zero, length, g.constant(np.int64(1), INT64)], [tokens], INT64)
    apart = g.binary("Sub", positions, g.unsqueeze(positions, [1]))
    ends = [g.constant(np.int64(n), INT64) for n in (-4, 2)]
    clamped = g.cast(g.op("Clip", [apart, *ends], [tokens, tokens]), FLOAT)
    table = g.constant(np.random.default_rng(0).standard_normal((20, 20)))
    for axis, dims in enumerate(([tokens, size], [tokens, tokens])):
        table = g.op("Slice", [table, g.ints(0), g.unsqueeze(length, [0]), g.ints(axis)], dims)
    mask = g.unsqueeze(g.binary("Add", clamped, table), [0, 1])
    node = ir.node("Attention", [query, query, query, mask], {"scale": 1.0})
    inputs: dict[str, Array] = {str(query.name): np.zeros([2, 2, 12, 2], np.float32)}
    program = RandomMask(g.model(mask), node, mask, inputs, {"tokens": 12}, 12, 12)
    check(program, Piece(slice(3, 10), slice(1, 9)))
    check(program, Blocks(np.array([[0, 1, 2], [7, 3, 1], [11, 0, 8]]), 12, 12))


def test_a_product_of_all_pairs_is_not_written_at_blocks() -> None:
    g, tokens = Graph(Never()), Size(6)
    query, key, left, right = (g.input(name, [tokens, tokens]) for name in ("query", "key", "left", "right"))
    query, key = (g.unsqueeze(x, [0, 1]) for x in (query, key))
    bias = g.unsqueeze(g.op("MatMul", [left, right], [tokens, tokens]), [0, 1])
    node = ir.node("Attention", [query, key, key, bias], {"scale": 1.0})
    reason = why_not_by_blocks(node)
    assert reason is not None and reason.endswith("is computed for all pairs by MatMul")
    assert len(bias.uses()) == 1, "nodes of a failed attempt must not count as users"


@settings(max_examples=settings().max_examples * 2 // 5)  # each is two sessions of ONNX Runtime and more
@given(st.data())
def test_at_blocks_as_the_whole_mask_cut(data: st.DataObject) -> None:
    mask = drawn_mask(Drawn(data))
    draw = data.draw
    start, first = draw(st.integers(0, mask.n_q - 1)), draw(st.integers(0, mask.n_k - 1))
    piece = Piece(
        slice(start, draw(st.integers(start + 1, mask.n_q))), slice(first, draw(st.integers(first + 1, mask.n_k)))
    )
    count = draw(st.sampled_from([n for n in range(1, mask.n_q + 1) if mask.n_q % n == 0]))
    keys = draw(st.integers(1, 4).flatmap(lambda width: st.lists(
        st.lists(st.integers(0, mask.n_k - 1), min_size=width, max_size=width), min_size=count, max_size=count
    )))  # fmt: skip
    reason = why_not_by_blocks(mask.node)
    event("refused" if reason else "written")
    if reason is not None:
        event(reason.partition("'")[0])
        with pytest.raises(NotByBlocks):
            blocked(mask, piece)
        return
    check(mask, piece)
    check(mask, Blocks(np.array(keys), mask.n_q, mask.n_k))
