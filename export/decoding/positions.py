"""What a graph computes of the places of tokens, as tables that a step looks its own places up in.

Rotary angles, learned embeddings and the like depend on a token's place, not on the token. Each is computed once for
all places of the cache, by the graph's own operators. A table is right where a place has the same row whatever the
number of tokens, which two numbers of tokens tell; else the positions cannot be cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.errors import UsageError, first_line
from attnforge.export.decoding.tokens import BY_ELEMENT, Kinds, is_count_as_shape, token_axes
from attnforge.export.graphs.build import Builder, constant, initializer, insert, typed
from attnforge.export.graphs.execute import at_own_precision

Dim = int | ir.SymbolicDim
"""The size of an axis."""


class NotByPlace(UsageError):
    """A graph whose positions change with the number of tokens, or end before the cache does."""


@dataclass(frozen=True)
class _Read:
    """A value by place that something by token reads.

    Attributes:
        value: the value.
        node: reads it.
        index: of the input.
    """

    value: ir.Value
    node: ir.Node
    index: int


def look_up_positions(
    model: ir.Model, kinds: Kinds, tokens: str, ids: ir.Value, positions: ir.Value, places: int
) -> None:
    """Let everything that is computed of the places of tokens be looked up at `positions`, in place.

    Args:
        model: whose tokens stand at 0, 1, … of every sample.
        kinds: of its values.
        tokens: the symbol of the number of tokens.
        ids: the model's input, `(batch, tokens, …)`.
        positions: `(batch, tokens)`, int64, of every token.
        places: how many there are.

    Raises:
        NotByPlace: what stands at a place changes with the number of tokens, or there are fewer places.
    """
    reads = [
        _Read(value, node, index)
        for node in model.graph
        if any(value in kinds.by_token for value in node.inputs if value is not None)
        for index, value in enumerate(node.inputs)
        if value is not None and value in kinds.by_count and not is_count_as_shape(node, index)
    ]
    values = list(dict.fromkeys(read.value for read in reads))
    for read in reads:
        if len(token_axes(read.value, tokens)) != 1:
            raise NotByPlace(
                f"{read.node.op_type} ({read.node.name}) reads a value that depends on the number of tokens and is not "
                "one for each token, so it changes with every step; deploy the model without cache_tokens"
            )
    assert ids.shape is not None
    batch = ids.shape[0]
    tables = _tables(model, values, tokens, ids, places)
    stored = {value: initializer(model.graph, f"{value.name}/by place", table) for value, table in tables.items()}
    looked_up: dict[tuple[ir.Value, int], ir.Value] = {}
    for read in reads:
        rank = _rank_for(read, tokens, batch)
        key = read.value, rank
        if key not in looked_up:
            looked_up[key] = _looked_up(model.graph, read, stored[read.value], positions, tokens, rank)
        read.node.replace_input_with(read.index, looked_up[key])


def _tables(
    model: ir.Model, values: Sequence[ir.Value], tokens: str, ids: ir.Value, places: int
) -> dict[ir.Value, Array]:
    """Every value for all places of one sample, places first."""
    if not values:
        return {}
    names = [str(value.name) for value in values]
    run = at_own_precision(model, names)

    def at(count: int) -> list[Array]:
        assert ids.dtype is not None and ids.shape is not None
        samples = ids.shape[0] if isinstance(ids.shape[0], int) else 1
        shape = [samples, count, *(int(dim) for dim in ids.shape[2:] if isinstance(dim, int))]
        try:
            found = run({str(ids.name): np.zeros(shape, ids.dtype.numpy())})
        except Exception as error:  # a table of positions that ends, in ONNX Runtime's words
            raise NotByPlace(
                f"the model has no positions for {count} tokens: {first_line(error)}; give a smaller cache_tokens"
            ) from error
        return [_places_first(found[str(value.name)], value, tokens, ids.shape[0]) for value in values]

    whole, fewer = at(places), at(max(places // 2, 1))
    for value, table, part in zip(values, whole, fewer, strict=True):
        if len(table) != places:
            raise NotByPlace(
                f"{value.name} has {len(table)} places and the cache {places}; give a smaller cache_tokens"
            )
        if not np.allclose(table[: len(part)], part, rtol=1e-5, atol=1e-6, equal_nan=True):
            raise NotByPlace(
                f"{value.name} gives a place another number when there are more tokens, so earlier keys would change "
                "with every step; deploy the model without cache_tokens"
            )
    kept = {}
    for value, table in zip(values, whole, strict=True):
        assert value.dtype is not None
        kept[value] = table.astype(value.dtype.numpy())
    return kept


def _places_first(array: Array, value: ir.Value, tokens: str, batch: Dim) -> Array:
    """What was computed for samples that are all alike, as a table for one."""
    if _has_batch(value, tokens, batch):
        array = array[:1]
    return np.moveaxis(array, token_axes(value, tokens)[0], 0)


def _has_batch(value: ir.Value, tokens: str, batch: Dim) -> bool:
    """Whether the first axis is that of samples, of which a table has one."""
    assert value.shape is not None
    return token_axes(value, tokens)[0] > 0 and value.shape[0] in (1, batch)


def _rank_for(read: _Read, tokens: str, batch: Dim) -> int:
    """The rank that a value has to have where its reader meets tokens of samples that have places of their own.

    Raises:
        NotByPlace: the reader does not broadcast.
    """
    value, (output, *_) = read.value, read.node.outputs
    assert value.shape is not None
    rank = len(value.shape)
    if read.node.op_type in BY_ELEMENT and output.shape is not None and len(output.shape) > rank:
        return len(output.shape)
    if _has_batch(value, tokens, batch):
        return rank
    raise NotByPlace(
        f"{read.node.op_type} ({read.node.name}) reads the places of one sample for all samples, which stand at places "
        "of their own in a decoder; deploy the model without cache_tokens"
    )


def _looked_up(graph: ir.Graph, read: _Read, table: ir.Value, positions: ir.Value, tokens: str, rank: int) -> ir.Value:
    """The rows of a table at `positions`, `(batch, …, tokens, …)` of a rank."""
    value = read.value
    dtype = value.dtype
    assert value.shape is not None and dtype is not None and table.shape is not None
    own = list(value.shape)
    place = token_axes(value, tokens)[0] + rank - len(own)
    batch_dim, token_dim = positions.shape  # type: ignore[misc]
    rest = [1] * (rank - len(own)) + own
    others = [i for i in range(rank) if i not in (0, place)]
    sizes = [_static(rest[i]) for i in others]

    def build(op: Builder) -> ir.Value:
        flat = op.Reshape(table, constant(op, [-1, int(np.prod(sizes, dtype=np.int64))]))
        rows = op.Gather(flat, positions, axis=0)  # (batch, tokens, numbers)
        shape = op.Shape(positions)
        apart = op.Reshape(rows, op.Concat(shape, constant(op, sizes), axis=0) if sizes else shape)
        order = [0 if i == 0 else 1 if i == place else 2 + others.index(i) for i in range(rank)]
        moved = apart if order == list(range(rank)) else op.Transpose(apart, perm=order)
        dims = [batch_dim if i == 0 else token_dim if i == place else _static(rest[i]) for i in range(rank)]
        return typed(moved, dtype, [d if isinstance(d, int) else ir.SymbolicDim(d.value) for d in dims])

    first = next(node for node in graph if read.value in node.inputs)
    return insert(graph, first, build, stem=f"{value.name}/at positions/{rank}")


def _static(dim: int | ir.SymbolicDim) -> int:
    """The size of a dim of a table; a dynamic one is that of samples, of which there is one."""
    return dim if isinstance(dim, int) else 1
