"""Attention over a cache for ONNX Runtime: the forms that read only its filled part.

`com.microsoft::GroupQueryAttention` writes new keys and values into the cache, which is input and output in one buffer,
and reads the filled part of each sample: one token over 1,024 of 2,048 slots of 12 heads of 64 takes 0.20 ms, where
Attention over all slots takes 0.56, on two cores. It accepts several tokens after earlier ones for only one sample at a
time, so a prompt is run sample by sample. If queries and keys are rotated by rotary tables immediately before, it does
the rotation itself, and the projections are its inputs directly.

Where it does not apply, Attention reads the first slots of the cache, as many as the longest sample has filled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from attnforge.export.attention.canonical import PLACES, SiteAxes
from attnforge.export.attention.layout import Axis, Layout, before_views
from attnforge.export.attention.masking import with_zeros
from attnforge.export.attention.operands import Operand, scalar
from attnforge.export.graphs.build import (
    Builder,
    cast,
    constant,
    dims_of,
    initializer,
    insert,
    like,
    replace_value,
    typed,
    up_to,
)
from attnforge.export.graphs.nodes import input_of, is_op, maker_of
from attnforge.export.graphs.sizes import Size, sizes_of
from attnforge.export.lowering.attention import SIDE_BY_SIDE, Attention, ByHead, Cache, Cached, Emit, Seen

BOOL, FLOAT = ir.DataType.BOOL, ir.DataType.FLOAT
INT32, INT64 = ir.DataType.INT32, ir.DataType.INT64

BIAS = 10
"""Index of GroupQueryAttention's input that is added to scores."""

HEAD_SINK = 11
"""Index of GroupQueryAttention's input for the score of each head's attention sink."""

SCALES = 12
"""Index of GroupQueryAttention's input for the scales of keys in int8 caches; those of values follow it."""

FILLED = "filled"
"""The symbol of the number of cache slots that the longest sample has filled."""


def is_for_group_query(a: Attention) -> bool:
    """Whether the kernel supports a site: head sizes that are a multiple of 8 and equal for keys and values."""
    d_k, d_v = a.size("d_k"), a.size("d_v")
    return a.has_static_heads and d_k == d_v and d_k.factor % 8 == 0 and a.softmax_dtype == a.dtype


def group_query(op: Builder, a: Attention, name: str, all_slots: bool = False) -> ir.Value:
    """GroupQueryAttention that writes to the cache and reads it. Its outputs become the graph's outputs.

    Args:
        op: records the nodes.
        a: the site.
        name: name for the node by which the site is identified.
        all_slots: give the number of all slots as that of the longest sample's tokens, which is then a constant; each
            sample's own number limits what is read. On CUDA the answers were wrong with a computed one (ONNX Runtime
            1.31), which the kernel reads on the host.
    """
    cached = a.cached
    assert cached is not None
    attributes = a.attributes()
    if cached.seen.window is not None:
        attributes["local_window_size"] = cached.seen.window
    sides = [(a.query, a.layout("B", *SIDE_BY_SIDE[0])), *map(_written, cached.caches)]
    tables: list[ir.Value] = []
    query, key = (before_rotation(operand, a.size("d_k").factor) for operand, _ in sides[:2])
    if query is not None and key is not None and query.rotation == key.rotation:
        sides[:2] = (query.operand, sides[0][1]), (key.operand, sides[1][1])
        *tables, interleaved = query.rotation
        attributes |= {"do_rotary": 1, "rotary_interleaved": interleaved}
    rows = [a.arranged(op, *side) for side in sides]
    before = [cache.before for cache in cached.caches]
    inputs: list[ir.Value | None] = [*rows, *before, *_lengths(cached, all_slots), *tables]
    inputs += [None] * (SCALES - len(inputs))
    if cached.seen.slopes is not None:
        inputs[BIAS] = _bias(cached, cached.seen.slopes, a.dtype)
    if cached.seen.sinks is not None:
        inputs[HEAD_SINK] = constant(op, cached.seen.sinks, a.dtype)
    if rounded := [cache.in_int8 for cache in cached.caches if cache.in_int8 is not None]:
        attributes |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
        inputs += [constant(op, part.scale.reshape(-1), FLOAT) for part in rounded]
    while inputs[-1] is None:
        inputs.pop()
    result, *written = op.op_multi_out(
        "GroupQueryAttention", inputs, attributes, domain="com.microsoft", num_outputs=3, name=name
    )
    for cache, after in zip(cached.caches, written, strict=True):
        replace_value(cache.after, after)
    return a.as_output(op, result, a.layout("B", *SIDE_BY_SIDE[3]))


def _shared(cached: Cached, name: str, build: Callable[[Builder], ir.Value]) -> ir.Value:
    """A value that all sites read and that the first one writes."""
    graph = cached.past.graph
    assert isinstance(graph, ir.Graph)
    known = next((node.outputs[0] for node in graph if node.name == name), None)
    if known is None:
        known = insert(graph, graph[0], build, stem=name)
        node = known.producer()
        assert node is not None
        node.name = name
    return known


def _bias(cached: Cached, slopes: ByHead, dtype: ir.DataType) -> ir.Value:
    """`(batch, heads, tokens, filled slots)`: the bias by distance."""

    def build(op: Builder) -> ir.Value:
        zero, one = constant(op, 0), constant(op, 1)
        count = op.Shape(cached.tokens, start=1, end=2)
        new = op.Add(op.Unsqueeze(cached.past, constant(op, [1])), op.Range(zero, op.Squeeze(count), one))
        batch, tokens = dims_of(cached.tokens)[:2]
        positions = typed(op.Unsqueeze(new, constant(op, [1, 3])), INT64, [batch, 1, tokens, 1])
        end = op.Squeeze(op.Add(op.ReduceMax(cached.past, keepdims=1), count))
        columns = op.Unsqueeze(op.Range(zero, end, one), constant(op, [0, 1, 2]))
        typed(columns, INT64, [1, 1, 1, ir.SymbolicDim(FILLED)])
        return _by_distance(op, columns, positions, slopes, dtype)

    return _shared(cached, f"decoding/bias {dtype.name} {slopes}", build)


def _lengths(cached: Cached, all_slots: bool) -> list[ir.Value]:
    """The position of each sample's last token, and how many tokens the longest sample has, or slots, int32; the same
    values for all sites."""

    def last(op: Builder) -> ir.Value:
        count = op.Shape(cached.tokens, start=1, end=2)
        return op.Cast(op.Sub(op.Add(cached.past, count), constant(op, [1])), to=INT32.value)

    def total(op: Builder) -> ir.Value:
        if all_slots:
            return constant(op, sizes_of(cached.caches[0].before)[2].factor, INT32)
        longest = op.Add(op.ReduceMax(cached.past, keepdims=1), op.Shape(cached.tokens, start=1, end=2))
        return op.Cast(op.Squeeze(longest, constant(op, [0])), to=INT32.value)

    return [_shared(cached, "decoding/last", last), _shared(cached, "decoding/total", total)]


def _written(cache: Cache) -> tuple[Operand, Layout]:
    """The rows written into a cache, before they are rounded and before all views, and their layout with heads side by
    side."""
    new = cache.new if cache.in_int8 is None else cache.in_int8.source
    layout = Layout.fresh(new)
    batch, heads, tokens, size = layout.dims
    return Operand(*before_views(new, layout)), Layout([batch, tokens, (*heads, *size)])


def over_filled(op: Builder, a: Attention, name: str, attend: Emit) -> ir.Value:
    """Attention over the slots up to the last that any sample has filled.

    Args:
        op: records the nodes.
        a: the site.
        name: name for the node by which the site is identified.
        attend: writes the attention over these slots.
    """
    cached, mask = a.cached, a.mask
    assert cached is not None and mask is not None
    count = op.Shape(a.node.inputs[0], start=2, end=3)
    end = op.ReduceMax(op.Add(cached.past, count), keepdims=1)  # on the host, where CUDA's Slice reads it
    filled = Size(1, (FILLED,))
    has_sink = cached.seen.sinks is not None
    attended = filled.plus(1) if has_sink else filled
    axes = SiteAxes({**a.axes.dims, "n_k": (Axis(attended),)})

    def read(cache: Cache, size: str) -> Operand:
        """Keys or values in these slots, and zeros for the sink."""
        part = up_to(op, cache.after, 2, end, filled.dim())
        if cache.in_int8 is not None:
            part = cache.in_int8.restored(op, part)
        part = with_zeros(op, part, 1, first=True) if has_sink else part
        return Operand(part, axes.layout("B", "H_kv", "n_k", size))

    key, value = map(read, cached.caches, ("d_k", "d_v"))
    mask = up_to(op, mask, 3, op.Add(end, constant(op, [1])) if has_sink else end, attended.dim())
    return attend(op, replace(a, key=key, value=value, mask=mask, axes=axes, cached=None), name)


def step_mask(op: Builder, positions: ir.Value, site: Seen, capacity: int, dtype: ir.DataType) -> ir.Value:
    """The mask of a step over all slots of a cache, `(batch, 1 or heads, tokens, capacity)`: boolean, or numeric if
    there is a bias by distance; with attention sinks numeric, and their scores are a column before it.

    Args:
        op: records the nodes.
        positions: `(batch, tokens)`, int64, the positions of the tokens.
        site: which keys are seen, and how.
        capacity: of the cache, in tokens.
        dtype: type of a numeric mask.
    """
    batch, tokens = dims_of(positions)
    columns = constant(op, [[[list(range(capacity))]]])
    positions = typed(op.Unsqueeze(positions, constant(op, [1, 3])), INT64, [batch, 1, tokens, 1])
    shown = typed(op.LessOrEqual(columns, positions), BOOL, [*dims_of(positions)[:3], capacity])
    if site.window is not None:
        first = like(op.Sub(positions, constant(op, site.window)), positions)
        shown = like(op.And(shown, like(op.Greater(columns, first), shown)), shown)
    if site.slopes is None and site.sinks is None:
        return shown
    heads = len(site.slopes or site.sinks or ())
    dims: list[int | ir.SymbolicDim] = [batch, heads, tokens, capacity]
    bias = constant(op, np.zeros((1, heads, 1, 1)), dtype)
    if site.slopes is not None:
        bias = _by_distance(op, columns, positions, site.slopes, dtype)
    mask = typed(op.Where(shown, bias, constant(op, -np.inf, dtype)), dtype, dims)
    if site.sinks is None:
        return mask
    column = op.Expand(constant(op, np.reshape(site.sinks, [1, -1, 1, 1]), dtype), op.Shape(positions))
    return typed(op.Concat(typed(column, dtype, [*dims[:3], 1]), mask, axis=3), dtype, [*dims[:3], capacity + 1])


def _by_distance(op: Builder, columns: ir.Value, rows: ir.Value, slopes: ByHead, dtype: ir.DataType) -> ir.Value:
    """`slope · (key − query)`, 0 at the query's own key.

    Args:
        columns: `(1, 1, 1, keys)`, int64, the positions of keys.
        rows: `(batch, 1, tokens, 1)`, int64, those of queries.
    """
    dims = [*dims_of(rows)[:3], dims_of(columns)[3]]
    distance = cast(op, typed(op.Sub(columns, rows), INT64, dims), FLOAT)
    by_head = constant(op, np.reshape(slopes, [1, -1, 1, 1]), FLOAT)
    dims[1] = len(slopes)
    return cast(op, typed(op.Mul(distance, by_head), FLOAT, dims), dtype)


def caches(model: ir.Model) -> list[ir.Value]:
    """The inputs and outputs of a step that are caches."""
    writers = [node for node in model.graph if node.op_type == "TensorScatter" and node.domain == ""]
    ends = [value for node in writers for value in (node.inputs[0], node.outputs[0])]
    return [value for value in ends if value is not None and (value.is_graph_input() or value.is_graph_output())]


# --- rotation ---------------------------------------------------------------------------------------------------------

# Queries and keys of a decoder step that rotary tables rotate (Su et al. 2021, https://arxiv.org/abs/2104.09864), as
# GroupQueryAttention can rotate them itself.


Parts = tuple[ir.Value, ir.Value, ir.Value]
"""The rotated value, the cosines and the sines."""


@dataclass(frozen=True)
class Turned:
    """Queries or keys that rotary tables rotate.

    Attributes:
        operand: the operand before the rotation.
        rotation: the tables of cosines and sines, initializers of `(positions, half a head)`; and 1 if neighbours form
            a pair, 0 if halves of a head do.
    """

    operand: Operand
    rotation: tuple[ir.Value, ir.Value, int]


def before_rotation(operand: Operand, size: int) -> Turned | None:
    """The operand before its rotation; None if it is not the result of rotating whole heads by tables at the tokens'
    positions.

    Args:
        operand: `(batch, heads, tokens, size)` where it is rotated.
        size: head size; the kernel rotates multiples of 16.
    """
    node = operand.value.producer()
    if node is None or node.domain != "" or len(operand.layout) != 4 or size % 16:
        return None
    is_operator = node.op_type == "RotaryEmbedding" and len(node.inputs) == 3
    parts: Sequence[ir.Value | None] | None = node.inputs if is_operator else _by_halves(node, size)
    if parts is None:
        return None
    x, cosine, sine = parts
    interleaved = node.attributes.get_int("interleaved", 0) or 0 if is_operator else 0
    cosines, sines = (_table(rows, size // 2) for rows in (cosine, sine))
    if x is None or cosines is None or sines is None:
        return None
    return Turned(Operand(*before_views(x, operand.layout)), (cosines, sines, interleaved))


def _by_halves(node: ir.Node, size: int) -> Parts | None:
    """A rotation of the halves x₁ and x₂ of a head as modules write it; None if a node is something else:
    `x · cos + (-x₂, x₁) · sin`, or `(x₁ · cos - x₂ · sin, x₂ · cos + x₁ · sin)`."""
    if node.op_type != "Add":
        return _of_halves(node, size) if node.op_type == "Concat" and _is_last_axis(node) else None
    for (x, cosine), (turned, sine) in itertools.product(*_factors(node)):
        cat = maker_of(turned)
        if not is_op(cat, "Concat") or len(cat.inputs) != 2 or not _is_last_axis(cat):
            continue
        negative, first = maker_of(cat.inputs[0]), _half(cat.inputs[1], size)
        if is_op(negative, "Neg") and _half(negative.inputs[0], size) == (x, 1) and first == (x, 0):
            return x, cosine, sine
    return None


def _of_halves(node: ir.Node, size: int) -> Parts | None:
    first, second = map(maker_of, node.inputs) if len(node.inputs) == 2 else (None, None)
    if not is_op(first, "Sub") or not is_op(second, "Add"):
        return None
    for (x1, cosine), (x2, sine) in itertools.product(*_factors(first)):
        half = _half(x1, size)
        if half is None or half[1] != 0 or _half(x2, size) != (half[0], 1):
            continue
        of_second = list(itertools.product(*_factors(second)))
        if ((x2, cosine), (x1, sine)) in of_second or ((x1, sine), (x2, cosine)) in of_second:
            return half[0], cosine, sine
    return None


def _factors(node: ir.Node) -> Iterator[list[tuple[ir.Value, ir.Value]]]:
    """Yield the factors, in both orders, of each product that a node adds or subtracts; none for an input that is not a
    product."""
    for value in node.inputs:
        product = maker_of(value)
        a, b = product.inputs if is_op(product, "Mul") else (None, None)
        yield [] if a is None or b is None else [(a, b), (b, a)]


def _half(value: ir.Value | None, size: int) -> tuple[ir.Value, int] | None:
    """The tensor that a value is the first (0) or second (1) half of, in the last of four dims, which has that size."""
    node = maker_of(value)
    if value is None or not is_op(node, "Split", "Slice"):
        return None
    x = input_of(node)
    if node.op_type == "Split":
        is_equal = len(node.outputs) == 2 and dims_of(value)[-1] == size // 2
        return (x, value.index() or 0) if is_equal and _is_last_axis(node) else None
    if len(node.inputs) < 4:
        return None
    start, end, axis, step = (scalar(each) for each in (*node.inputs[1:], *[None] * (5 - len(node.inputs))))
    if axis not in (-1, 3) or step not in (None, 1) or start is None or end is None:
        return None
    if (start, end) == (0, size // 2):
        return x, 0
    return (x, 1) if start == size // 2 and end >= size else None


def _is_last_axis(node: ir.Node) -> bool:
    """Whether the axis of a node is the last of four."""
    return node.attributes.get_int("axis", 0) in (-1, 3)


def _table(rows: ir.Value | None, width: int) -> ir.Value | None:
    """The table of that width whose rows at the tokens' positions are `rows`; None if they are anything else.

    Args:
        rows: `(batch, tokens, width)` or `(batch, 1, tokens, width)`, or twice as wide with two equal halves.
        width: half a head.
    """
    if rows is None or rows.shape is None:
        return None
    layout = Layout.fresh(rows)
    value, before = before_views(rows, layout)
    node = maker_of(value)
    if not is_op(node, "Gather") or node.attributes.get_int("axis", 0) != 0:
        return None
    table, positions = node.inputs
    of_tokens = maker_of(positions)
    if table is None or not table.is_initializer() or of_tokens is None or PLACES not in of_tokens.metadata_props:
        return None
    dims = layout.dims
    if len(dims) == 4 and not dims[1]:
        dims = [dims[0], *dims[2:]]
    if before.dims != dims:
        return None
    return table if dims_of(table)[1:] == [width] else _first_half(table, width)


def _first_half(table: ir.Value, width: int) -> ir.Value | None:
    """The first half of a table's columns as a table, which is written once; None if the second half differs."""
    graph, numbers = table.graph, ir.convenience.get_const_tensor(table)
    if graph is None or numbers is None or dims_of(table)[1:] != [2 * width]:
        return None
    name = f"{table.name}/half"
    if name in graph.initializers:
        return graph.initializers[name]
    first, second = np.split(numbers.numpy(), 2, axis=1)
    return initializer(graph, name, np.ascontiguousarray(first)) if np.array_equal(first, second) else None
