"""Replace what a graph computes from token positions by tables, in which a step looks up its positions.

Rotary angles, learned embeddings and the like depend on a token's position, not on the token. Each is computed once for
all positions of the cache, by the graph's own operators. A table is correct if a position has the same row for any
number of tokens, which is checked for two numbers; otherwise, there can be no cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.errors import UsageError, raised_as
from attnforge.export.decoding.order import token_axes
from attnforge.export.decoding.tokens import Kinds, is_count_as_shape
from attnforge.export.graphs.build import Builder, constant, dims_of, initializer, insert, typed
from attnforge.export.graphs.execute import at_own_precision
from attnforge.export.graphs.nodes import BY_ELEMENT, constant_of, input_of, inputs_of, is_op, numpy_type, rank_of

Dim = int | ir.SymbolicDim
"""The size of an axis."""


class NotByPosition(UsageError):
    """Positions of a graph change with the number of tokens, or end before the cache does."""


@dataclass(frozen=True)
class _Read:
    """A read of a value that depends on positions, by a node that depends on tokens.

    Attributes:
        value: the value.
        node: the node that reads it.
        index: the index of the node's input.
    """

    value: ir.Value
    node: ir.Node
    index: int


def look_up_positions(
    model: ir.Model,
    kinds: Kinds,
    tokens: str,
    ids: ir.Value,
    positions: ir.Value,
    capacity: int,
    numbering: Collection[ir.Node] = (),
) -> None:
    """Replace everything that is computed from token positions by lookups at `positions`, in place.

    Args:
        model: a model whose tokens are at positions 0, 1, … of every sample.
        kinds: the kinds of its values.
        tokens: the symbol of the number of tokens.
        ids: the model's input, `(batch, tokens, …)`.
        positions: `(batch, tokens)`, int64, of every token.
        capacity: the number of positions.
        numbering: nodes that do not depend on positions although they read them.

    Raises:
        NotByPosition: a row of a table changes with the number of tokens, or there are fewer positions.
    """
    reads = [
        _Read(value, node, index)
        for node in model.graph
        if node not in numbering and any(value in kinds.by_token for value in inputs_of(node))
        for index, value in enumerate(node.inputs)
        if value is not None and value in kinds.by_count and not is_count_as_shape(node, index)
        if not _is_one_number(value)
    ]
    values = list(dict.fromkeys(read.value for read in reads))
    for read in reads:
        if len(token_axes(read.value, tokens)) != 1:
            raise NotByPosition(
                f"{read.node.op_type} ({read.node.name}) reads a value that depends on the number of tokens and does "
                "not have one entry per token, so it changes with every step; deploy the model without cache_tokens"
            )
    batch = dims_of(ids)[0]
    tables = _stored(model.graph, _tables(model, values, tokens, ids, capacity))
    looked_up: dict[tuple[ir.Value, tuple[int, ...], int], ir.Value] = {}
    for read in reads:
        axis, sizes = _arrangement(read, tokens, batch)
        key = tables[read.value], sizes, axis
        if key not in looked_up:
            looked_up[key] = _looked_up(model.graph, *key, positions)
        read.node.replace_input_with(read.index, looked_up[key])


def _is_one_number(value: ir.Value) -> bool:
    """Whether a value is one constant number, repeated."""
    node = value.producer()
    if is_op(node, "Expand"):
        number = constant_of(input_of(node))
        return number is not None and number.size == 1
    return is_op(node, "ConstantOfShape")


def _tables(
    model: ir.Model, values: Sequence[ir.Value], tokens: str, ids: ir.Value, capacity: int
) -> dict[ir.Value, Array]:
    """Every value for all positions of one sample, positions first."""
    if not values:
        return {}
    run = at_own_precision(model, [str(value.name) for value in values])
    batch, *_ = dims = dims_of(ids)

    def computed(count: int) -> list[Array]:
        shape = [_static(batch), count, *(dim for dim in dims[2:] if isinstance(dim, int))]
        message = f"the model has no positions for {count} tokens"  # if its table of positions is too short
        with raised_as(NotByPosition, message, "; give a smaller cache_tokens"):
            results = run({str(ids.name): np.zeros(shape, numpy_type(ids))})
        return [_positions_first(results[str(value.name)], value, tokens, batch) for value in values]

    whole, fewer = computed(capacity), computed(max(capacity // 2, 1))
    for value, table, part in zip(values, whole, fewer, strict=True):
        if len(table) != capacity:
            raise NotByPosition(
                f"{value.name} has {len(table)} positions and the cache has {capacity}; give a smaller cache_tokens"
            )
        if not np.allclose(table[: len(part)], part, rtol=1e-5, atol=1e-6, equal_nan=True):
            raise NotByPosition(
                f"{value.name} has other numbers for a position when there are more tokens, so earlier keys would "
                "change with every step; deploy the model without cache_tokens"
            )
    return {value: table.astype(numpy_type(value)) for value, table in zip(values, whole, strict=True)}


def _positions_first(array: Array, value: ir.Value, tokens: str, batch: Dim) -> Array:
    """The result for identical samples, as a table for one sample."""
    if _has_batch(value, tokens, batch):
        array = array[:1]
    return np.moveaxis(array, token_axes(value, tokens)[0], 0)


def _has_batch(value: ir.Value, tokens: str, batch: Dim) -> bool:
    """Whether the first axis is that of samples, which has size 1 in a table."""
    return token_axes(value, tokens)[0] > 0 and dims_of(value)[0] in (1, batch)


def _stored(graph: ir.Graph, tables: Mapping[ir.Value, Array]) -> dict[ir.Value, ir.Value]:
    """Initializers `(positions, numbers)` of the tables. Layers that compute the same table share it."""
    stored: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
    result = {}
    for value, table in tables.items():
        rows = np.ascontiguousarray(table.reshape(len(table), -1))
        key = rows.dtype.name, rows.shape, hashlib.sha256(rows.tobytes()).digest()
        if key not in stored:
            stored[key] = initializer(graph, f"{value.name}/by place", rows)
        result[value] = stored[key]
    return result


def _arrangement(read: _Read, tokens: str, batch: Dim) -> tuple[int, tuple[int, ...]]:
    """The axis of the tokens in a value that is expanded to the rank that it needs if each sample has its own
    positions, and the sizes of its other axes, without that of samples.

    Raises:
        NotByPosition: the node that reads it does not broadcast.
    """
    value, shape = read.value, dims_of(read.value)
    missing = max(rank_of(read.node.outputs[0]) - len(shape), 0) if read.node.op_type in BY_ELEMENT else 0
    if not missing and not _has_batch(value, tokens, batch):
        raise NotByPosition(
            f"{read.node.op_type} ({read.node.name}) reads the positions of one sample for all samples, but in a "
            "decoder each sample has its own positions; deploy the model without cache_tokens"
        )
    dims = [1] * missing + shape
    axis = token_axes(value, tokens)[0] + missing
    return axis, tuple(_static(dim) for i, dim in enumerate(dims) if i not in (0, axis))


def _looked_up(graph: ir.Graph, table: ir.Value, sizes: Sequence[int], axis: int, positions: ir.Value) -> ir.Value:
    """Look up the rows of a table at `positions`.

    Args:
        graph: the graph of the table.
        table: `(positions, numbers)`.
        sizes: sizes of the axes after samples, without that of the tokens.
        axis: the axis of the tokens.
        positions: `(batch, tokens)`.
    """
    after, dtype = positions.producer(), table.dtype
    assert after is not None and dtype is not None and table.shape is not None
    batch, count = dims_of(positions)
    rank = 2 + len(sizes)
    dims: list[int | ir.SymbolicDim] = [batch, *sizes]
    dims.insert(axis, count)
    others = [i for i in range(1, rank) if i != axis]
    wide = [i for i in others if dims[i] != 1]

    def build(op: Builder) -> ir.Value:
        rows = typed(op.Gather(table, positions, axis=0), dtype, [*dims_of(positions), table.shape[1]])  # type: ignore[index]
        if len(wide) == 1 and wide[0] > axis:
            ones = [i for i in others if i not in wide]
            return typed(op.Unsqueeze(rows, constant(op, ones)), dtype, dims) if ones else rows
        shape = op.Shape(positions)
        apart = op.Reshape(rows, op.Concat(shape, constant(op, list(sizes)), axis=0) if sizes else shape)
        perm = [0, *(1 if i == axis else 2 + others.index(i) for i in range(1, rank))]
        return typed(op.Transpose(apart, perm=perm), dtype, dims)

    return insert(graph, after, build, after=True, stem=f"{table.name}/at positions/{axis} of {rank}")


def _static(dim: int | ir.SymbolicDim) -> int:
    """The size of a dim of a table; a dynamic dim is that of samples and has size 1."""
    return dim if isinstance(dim, int) else 1
