"""Replace what a graph computes from token positions by tables, in which a step looks up its positions.

Rotary angles, learned embeddings and the like depend on a token's position, not on the token. Each is computed once for
all positions of the cache, by the graph's own operators. A table is correct if a position has the same row for any
number of tokens, which is checked for the capacity, half of it, a quarter and so on, and one less than each; otherwise,
there can be no cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.errors import UsageError, raised_as
from attnforge.export.attention.layout import Axis, Layout, rearrange
from attnforge.export.attention.operands import scalar
from attnforge.export.attention.roles import SHAPE_INPUTS
from attnforge.export.decoding.order import token_axes
from attnforge.export.decoding.tokens import Kinds
from attnforge.export.graphs.build import Builder, dims_of, initializer, insert, typed
from attnforge.export.graphs.execute import at_own_precision
from attnforge.export.graphs.nodes import BY_ELEMENT, inputs_of, numpy_type, rank_of
from attnforge.export.graphs.sizes import ONE, Size


class NotByPosition(UsageError):
    """Positions of a graph change with the number of tokens, or end before the cache does."""


def look_up_positions(
    model: ir.Model,
    kinds: Kinds,
    tokens: str,
    ids: ir.Value,
    positions: ir.Value,
    capacity: int,
    least: int,
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
        least: the least number of tokens of a sequence.
        numbering: nodes that do not depend on positions although they read them.

    Raises:
        NotByPosition: a row of a table changes with the number of tokens, or there are fewer positions.
    """
    reads = [  # of values that depend on positions, and are no sizes, axes or repeated numbers
        (value, node, index)
        for node in model.graph
        if node not in numbering and any(value in kinds.by_token for value in inputs_of(node))
        for index, value in enumerate(node.inputs)
        if value is not None and value in kinds.by_count and scalar(value) is None
        if node.domain != "" or index not in SHAPE_INPUTS.get(node.op_type, ())
    ]
    values = list(dict.fromkeys(value for value, *_ in reads))
    for value, node, _ in reads:
        if len(token_axes(value, tokens)) != 1:
            raise NotByPosition(
                f"{node.op_type} ({node.name}) reads a value that depends on the number of tokens and does "
                "not have one entry per token, so it changes with every step; deploy the model without cache_tokens"
            )
    batch = dims_of(ids)[0]
    tables = _stored(model.graph, _tables(model, values, tokens, ids, capacity, least))
    looked_up: dict[tuple[ir.Value, tuple[int, ...], int, int], ir.Value] = {}
    for value, node, index in reads:
        key = tables[value], *_arrangement(value, node, tokens, batch)
        if key not in looked_up:
            looked_up[key] = _looked_up(model.graph, *key, positions)
        node.replace_input_with(index, looked_up[key])


def _tables(
    model: ir.Model, values: Sequence[ir.Value], tokens: str, ids: ir.Value, capacity: int, least: int
) -> dict[ir.Value, Array]:
    """Every value for all positions of one sample, positions first."""
    if not values:
        return {}
    run = at_own_precision(model, [str(value.name) for value in values])
    batch, *_ = dims = dims_of(ids)

    def computed(count: int) -> list[Array]:
        shape = [_static(batch), count, *(dim for dim in dims[2:] if isinstance(dim, int))]
        message = f"the model has no positions for {capacity} tokens"  # if its table of positions is too short
        with raised_as(NotByPosition, message, "; give a smaller cache_tokens"):
            results = run({str(ids.name): np.zeros(shape, numpy_type(ids))})
        return [np.moveaxis(results[str(value.name)], token_axes(value, tokens)[0], 0) for value in values]

    halves = [capacity >> i for i in range(capacity.bit_length())]
    agreed: list[int] = []
    tables: list[Array] = []
    for count in sorted({count for half in halves for count in (half - 1, half) if count >= least} | {capacity}):
        more = computed(count)
        for value, table, part in zip(values, more, tables or more, strict=True):
            if not np.allclose(table[: len(part)], part, rtol=1e-5, atol=1e-6, equal_nan=True):
                advice = f"give at most {agreed[-1]} as" if len(agreed) > 2 else "deploy the model without"
                raise NotByPosition(
                    f"{value.name} has other numbers for a position when there are more tokens ({count} instead of "
                    f"{agreed[-1]}), so earlier keys would change with every step; {advice} cache_tokens"
                )
        tables = more
        agreed.append(count)
    for value, table in zip(values, tables, strict=True):
        if len(table) != capacity:
            raise NotByPosition(
                f"{value.name} has {len(table)} positions and the cache has {capacity}; give a smaller cache_tokens"
            )
    return {value: table.astype(numpy_type(value)) for value, table in zip(values, tables, strict=True)}


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


def _arrangement(
    value: ir.Value, node: ir.Node, tokens: str, batch: int | ir.SymbolicDim
) -> tuple[tuple[int, ...], int, int]:
    """How a value that a node reads is expanded to the rank that it needs if each sample has its own positions: the
    sizes of its axes without those of tokens and samples, the axis of the tokens, and the axis of the samples.

    Raises:
        NotByPosition: the node does not broadcast, or has no axis of samples.
    """
    result, is_broadcast = dims_of(node.outputs[0]), node.op_type in BY_ELEMENT
    dims = [*[1] * (len(result) - rank_of(value) if is_broadcast else 0), *dims_of(value)]
    axis = token_axes(value, tokens)[0] + len(dims) - rank_of(value)
    of_samples = [i for i, dim in enumerate(result) if dim == batch and i != axis] if is_broadcast else [0]
    if not of_samples or of_samples[0] == axis or dims[of_samples[0]] not in (1, batch):
        raise NotByPosition(
            f"{node.op_type} ({node.name}) reads the positions of one sample for all samples, but in a "
            "decoder each sample has its own positions; deploy the model without cache_tokens"
        )
    samples = of_samples[0]
    return tuple(_static(dim) for i, dim in enumerate(dims) if i not in (samples, axis)), axis, samples


def _looked_up(
    graph: ir.Graph, table: ir.Value, sizes: Sequence[int], axis: int, samples: int, positions: ir.Value
) -> ir.Value:
    """Look up the rows of a table at `positions`.

    Args:
        graph: the graph of the table.
        table: `(positions, numbers)`.
        sizes: sizes of the other axes.
        axis: the axis of the tokens.
        samples: the axis of the samples.
        positions: `(batch, tokens)`.
    """
    after, dims = positions.producer(), dims_of(positions)
    assert after is not None
    batch, count, *others = ((Axis(size),) if (size := Size.of(dim)) != ONE else () for dim in (*dims, *sizes))
    placed = list(others)
    for i, dim in sorted([(samples, batch), (axis, count)]):
        placed.insert(i, dim)

    def build(op: Builder) -> ir.Value:
        rows = typed(op.Gather(table, positions, axis=0), table.dtype, [*dims, dims_of(table)[1]])
        return rearrange(op, rows, Layout([batch, count, sum(others, ())]), Layout(placed))

    stem = f"{table.name}/at positions/{samples}, {axis} of {len(placed)}"
    return insert(graph, after, build, after=True, stem=stem)


def _static(dim: int | ir.SymbolicDim) -> int:
    """The size of a dim of a table; a dynamic dim is that of samples and has size 1."""
    return dim if isinstance(dim, int) else 1
