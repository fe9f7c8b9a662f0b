"""The meaning of attention: operators that compute it, read as one :class:`Reading` each, and the products that they
stand for.

- ai.onnx Attention (https://onnx.ai/onnx/operators/onnx__Attention.html): packed heads on three dims, a cache of past
  keys and values, masks of fewer dims, lengths, windows.
- ONNX Runtime's com.microsoft operators MultiHeadAttention, Attention and GroupQueryAttention
  (https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md).

Whatever else an operator does (projections, caches, rotary embeddings) is decomposed into separate nodes.
Canonicalising writes a reading as one canonical node, float64 execution and attention maps as :func:`products`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from attnforge.export.graphs.build import Builder, constant, dims_of, like, numbered, typed, up_to
from attnforge.export.graphs.nodes import is_used, optional_input
from attnforge.export.graphs.sizes import ONE, Size, sizes_of

BOOL, INT32, INT64 = ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64
CONTRIB = "com.microsoft"

SILENT_ROWS = "attnforge.silent_rows"
"""Metadata of an Attention node: what a fully masked row gets. `nan`, as from a bare softmax; without this entry zeros,
as the operator specifies."""


class NotAttention(Exception):
    """A graph is not attention that a canonical node can compute; the message gives a reason that a user can act on."""


@dataclass(frozen=True)
class Reading:
    """The operands and outputs of an attention operator.

    Attributes:
        query: `(B, H, n_q, d_k)`.
        key: `(B, H', n_k, d_k)`, past keys first.
        value: `(B, H', n_k, d_v)`, past values first.
        masks: each on four dims, boolean or added to the scores.
        offset: number of keys before the first query's own key, int64, one element or one per sample.
        window: number of keys that a query sees to its left and to its right; -1 for all.
        silent_rows_are_nan: whether fully masked rows are NaN instead of zeros.
        in_buffer: whether keys and values are in a buffer that may be longer than the keys in it.
        packed_output: whether the output is `(B, n_q, H·d_v)` instead of `(B, H, n_q, d_v)`.
        sinks: `(H,)`, the score of each head's attention sink.
        present: the keys and values that are the operator's outputs 1 and 2.
    """

    query: ir.Value
    key: ir.Value
    value: ir.Value
    scale: float
    masks: tuple[ir.Value, ...] = ()
    is_causal: bool = False
    offset: ir.Value | None = None
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    softmax_precision: int = 0
    silent_rows_are_nan: bool = True
    in_buffer: bool = False
    packed_output: bool = True
    sinks: ir.Value | None = None
    present: tuple[ir.Value, ...] = ()

    def masked(self, *masks: ir.Value) -> Reading:
        """The same with further masks added."""
        return replace(self, masks=(*self.masks, *masks))

    @property
    def is_windowed(self) -> bool:
        return self.window != (-1, -1)


def reach(op: Builder, reading: Reading) -> Iterator[ir.Value]:
    """Yield the conditions `(1 | B, 1, n_q, n_k)` under which causality and the window allow a query to attend to a
    key."""
    n_q, n_k = dims_of(reading.query)[2], dims_of(reading.key)[2]
    rows = typed(op.Unsqueeze(numbered(op, reading.query, 2), constant(op, [0, 1, 3])), INT64, [1, 1, n_q, 1])
    columns = typed(op.Unsqueeze(numbered(op, reading.key, 2), constant(op, [0, 1, 2])), INT64, [1, 1, 1, n_k])
    dims = [1 if reading.offset is None else dims_of(reading.offset)[0], 1, n_q, n_k]
    if reading.offset is not None:
        rows = typed(op.Add(rows, reading.offset), INT64, [*dims[:3], 1])
    distance = typed(op.Sub(rows, columns), INT64, dims)
    left, right = reading.window
    if reading.is_causal:
        yield typed(op.GreaterOrEqual(distance, constant(op, 0)), BOOL, dims)
    if left >= 0:
        yield typed(op.LessOrEqual(distance, constant(op, left)), BOOL, dims)
    if right >= 0:
        yield typed(op.GreaterOrEqual(distance, constant(op, -right)), BOOL, dims)


def merged_heads(op: Builder, x: ir.Value) -> ir.Value:
    """`(B, H, n, d)` as `(B, n, H·d)`."""
    batch, heads, tokens, size = dims_of(x)
    width = sizes_of(x)[1] * sizes_of(x)[3]
    transposed = typed(op.Transpose(x, perm=[0, 2, 1, 3]), x.dtype, [batch, tokens, heads, size])
    return typed(op.Reshape(transposed, constant(op, [0, 0, width.factor])), x.dtype, [batch, tokens, width.dim()])


# --- products ---------------------------------------------------------------------------------------------------------


def products(op: Builder, reading: Reading) -> tuple[ir.Value, ir.Value]:
    """Write `softmax(softcap(scale · query · keyᵀ), masked) · value`, in the type of the operands.

    Returns:
        The weights `(B, H, n_q, n_k)`, which are the result of the softmax; with sinks, `(B, H, n_q, 1 + n_k)`, theirs
        first. And the operator's first output.

    Raises:
        NotAttention: the number of heads is dynamic.
    """
    dtype = reading.query.dtype
    assert dtype is not None
    heads = sizes_of(reading.query)[1]
    key, value = (_for_all_heads(op, x, heads) for x in (reading.key, reading.value))
    query = like(op.Mul(reading.query, constant(op, reading.scale, dtype)), reading.query)
    dims = [*dims_of(query)[:3], dims_of(key)[2]]
    scores = typed(op.MatMul(query, op.Transpose(key, perm=[0, 1, 3, 2])), dtype, dims)
    if reading.softcap:
        cap = constant(op, reading.softcap, dtype)
        scores = like(op.Mul(op.Tanh(op.Div(scores, cap)), cap), scores)
    low = constant(op, -np.inf, dtype)
    for mask in (*reading.masks, *(reach(op, reading) if reading.is_causal or reading.is_windowed else ())):
        scores = like(op.Where(mask, scores, low) if mask.dtype == BOOL else op.Add(scores, mask), scores)
    joined = scores if reading.sinks is None else _after_sinks(op, reading.sinks, scores)
    weights = of_keys = like(op.Softmax(joined, axis=-1), joined)
    if reading.sinks is not None:
        of_keys = like(op.Slice(weights, constant(op, [1]), constant(op, [2**62]), constant(op, [3])), scores)
    output = typed(op.MatMul(of_keys, value), dtype, [*dims[:3], dims_of(value)[3]])
    if (reading.masks or reading.window[0] >= 0) and not reading.silent_rows_are_nan:
        seen = op.Cast(op.Not(op.Equal(scores, low)), to=dtype.value)
        count = op.ReduceSum(seen, constant(op, [-1]), keepdims=1)  # ReduceMax has other inputs below opset 18
        output = like(op.Where(op.Equal(count, constant(op, 0, dtype)), constant(op, 0, dtype), output), output)
    return weights, merged_heads(op, output) if reading.packed_output else output


def _after_sinks(op: Builder, sinks: ir.Value, scores: ir.Value) -> ir.Value:
    """`(B, H, n_q, 1 + n_k)`: scores after those of the sinks, `(H,)`."""
    *dims, _ = dims_of(scores)
    by_head = op.Reshape(sinks, constant(op, [1, -1, 1, 1]))
    shape = op.Concat(op.Shape(scores, end=3), constant(op, [1]), axis=0)
    column = typed(op.Expand(by_head, shape), scores.dtype, [*dims, 1])
    return typed(op.Concat(column, scores, axis=3), scores.dtype, [*dims, sizes_of(scores)[3].plus(1).dim()])


def _for_all_heads(op: Builder, x: ir.Value, heads: Size) -> ir.Value:
    """Keys or values `(B, H', n, d)` as `(B, H, n, d)`."""
    shared = sizes_of(x)[1]
    if shared == heads:
        return x
    if not (shared.is_static and heads.is_static):
        raise NotAttention("the number of heads is dynamic")
    index = constant(op, np.repeat(np.arange(shared.factor), heads.factor // shared.factor))
    batch, _, *others = dims_of(x)
    return typed(op.Gather(x, index, axis=1), x.dtype, [batch, heads.factor, *others])


# --- readers ----------------------------------------------------------------------------------------------------------


def _attention(op: Builder, node: ir.Node) -> Reading:
    """ai.onnx Attention."""
    query, key, value, mask, past_key, past_value, lengths = _inputs(node, 7)
    packed = len(sizes_of(query)) == 3
    if packed:
        heads, shared = (_integer(node, name) for name in ("q_num_heads", "kv_num_heads"))
        query, key, value = (_split(op, x, h) for x, h in ((query, heads), (key, shared), (value, shared)))
    if node.attributes.get_int("qk_matmul_output_mode", 0) or (len(node.outputs) > 3 and is_used(node.outputs[3])):
        raise NotAttention("the scores are an output of the Attention node; a fused kernel never stores them")
    reading = Reading(
        query, key, value, scale_of(node, query), packed_output=packed,
        is_causal=bool(node.attributes.get_int("is_causal", 0)),
        window=(node.attributes.get_int("left_window_size", -1), node.attributes.get_int("right_window_size", -1)),
        softcap=node.attributes.get_float("softcap", 0.0) or 0.0,
        softmax_precision=node.attributes.get_int("softmax_precision", 0),
        silent_rows_are_nan=node.metadata_props.get(SILENT_ROWS) == "nan",
    )  # fmt: skip
    reading = _with_past(op, node, reading, past_key, past_value)
    if mask is not None:
        reading = reading.masked(_on_four_dims(op, mask, reading.key, is_padded=lengths is not None))
    if lengths is not None:
        reading = reading.masked(_within(op, lengths, reading.key))
        first = op.Sub(lengths, op.Shape(query, start=2, end=3))
        offset = typed(op.Unsqueeze(first, constant(op, [1, 2, 3])), INT64, [dims_of(lengths)[0], 1, 1, 1])
        reading = replace(reading, offset=offset)
    return reading


def _multi_head_attention(op: Builder, node: ir.Node) -> Reading:
    """com.microsoft MultiHeadAttention."""
    query, key, value, bias, padding, added, past_key, past_value, *others = _inputs(node, 10)
    if any(other is not None for other in others):
        raise NotAttention("a MultiHeadAttention with a shared buffer for its cache")
    heads = _integer(node, "num_heads")
    if key is None:  # (B, n, H, 3, d)
        query, key, value = _unstacked(op, query, 3, bias, heads)
    else:
        width = sizes_of(query)[-1].factor
        query = _split(op, _biased(op, query, bias, 0), heads)
        if len(sizes_of(key)) == 5:  # (B, m, H, 2, d)
            key, value = _unstacked(op, key, 2, None, heads)
        elif len(sizes_of(key)) == 3:
            key = _split(op, _biased(op, key, bias, width), heads)
            value = _split(op, _biased(op, value, bias, 2 * width), heads)
    reading = _unidirectional(node, query, key, value, added)
    if reading.is_causal and past_key is None and sizes_of(query)[2] != sizes_of(key)[2]:
        raise NotAttention("a causal MultiHeadAttention with different numbers of keys and queries, without a past")
    return _masked(op, node, _with_past(op, node, reading, past_key, past_value), padding, added)


def _packed_attention(op: Builder, node: ir.Node) -> Reading:
    """com.microsoft Attention, which projects its input to queries, keys and values."""
    x, weights, bias, padding, past, added, shared_length = _inputs(node, 7)
    heads = _integer(node, "num_heads")
    if shared_length is not None or node.attributes.get_int("do_rotary"):
        raise NotAttention("a com.microsoft Attention with a rotary embedding or a shared buffer for its cache")
    total = sizes_of(weights)[1]
    widths = list(node.attributes.get_ints("qkv_hidden_sizes") or [total.factor // 3] * 3)
    projected = typed(op.MatMul(x, weights), x.dtype, [*dims_of(x)[:2], total.dim()])
    if bias is not None:
        projected = like(op.Add(projected, bias), projected)
    query, key, value = (_split(op, part, heads) for part in _parts(op, projected, widths))
    if past is not None or (len(node.outputs) > 1 and is_used(node.outputs[1])):
        raise NotAttention("a com.microsoft Attention with a cache of keys and values in one tensor")
    return _masked(op, node, _unidirectional(node, query, key, value, added), padding, added)


def _group_query_attention(op: Builder, node: ir.Node) -> Reading:
    """com.microsoft GroupQueryAttention, which is always causal: over each sample's first tokens, or after those of a
    past in a buffer of fixed size. A bias has as many keys as the longest sample."""
    query, key, value, past_key, past_value, lengths, _, *others = _inputs(node, 14)
    cosine, sine, positions, added, sinks, *scales = others
    heads, shared = _integer(node, "num_heads"), _integer(node, "kv_num_heads")
    if node.attributes.get_int("smooth_softmax", 0) == 1 or any(v is not None for v in scales):
        raise NotAttention("a GroupQueryAttention with a smooth softmax or a quantised cache")
    if key is None:  # all packed: (B, n, (H + 2·H')·d)
        query, key, value = _unpacked(op, query, heads, shared)
    query, key, value = (_split(op, x, h) for x, h in ((query, heads), (key, shared), (value, shared)))
    length = first = offset = None
    if lengths is not None:
        last = typed(op.Cast(op.Reshape(lengths, constant(op, [-1])), to=INT64.value), INT64, [dims_of(query)[0]])
        length = like(op.Add(last, constant(op, [1])), last)
    if past_key is not None and length is not None:
        # In a first prompt, a sample may have fewer tokens than there are columns.
        first = like(op.Max(op.Sub(length, op.Shape(query, start=2, end=3)), constant(op, [0])), length)
        offset = typed(op.Reshape(first, constant(op, [-1, 1, 1, 1])), INT64, [*dims_of(first), 1, 1, 1])
    if node.attributes.get_int("do_rotary", 0):
        tables = [cosine, sine, _positions(op, query, first) if positions is None else positions]
        interleaved = node.attributes.get_int("rotary_interleaved", 0)
        query, key = (_rotated(op, x, tables, interleaved) for x in (query, key))
    present = key, value
    if first is not None:
        buffers = zip((past_key, past_value), present, strict=True)
        key, value = (like(op.op("TensorScatter", [buffer, x, first], {"axis": 2}), buffer) for buffer, x in buffers)
        present = key, value
        if added is not None:  # a bias may have fewer keys than the buffers
            key, value = (up_to(op, x, 2, op.Shape(added, start=3, end=4), dims_of(added)[3]) for x in present)
    window = node.attributes.get_int("local_window_size", -1)
    in_buffer = past_key is not None or any(is_used(output) for output in node.outputs[1:])
    reading = Reading(
        query, key, value, scale_of(node, query), is_causal=True, offset=offset,
        window=(window - 1 if window >= 0 else -1, -1), softcap=node.attributes.get_float("softcap", 0.0) or 0.0,
        in_buffer=in_buffer, sinks=sinks, present=present,
        silent_rows_are_nan=added is not None and not in_buffer,  # ONNX Runtime 1.31 has two kernels
    )  # fmt: skip
    if length is not None:
        reading = reading.masked(_within(op, length, key))
    return _masked(op, node, reading, None, added)


READERS: dict[tuple[str, str], Callable[[Builder, ir.Node], Reading]] = {
    ("", "Attention"): _attention,
    (CONTRIB, "MultiHeadAttention"): _multi_head_attention,
    (CONTRIB, "Attention"): _packed_attention,
    (CONTRIB, "GroupQueryAttention"): _group_query_attention,
}
"""The known operators, by domain and name."""


def read(op: Builder, node: ir.Node) -> Reading:
    """Read an operator of :data:`READERS`.

    Args:
        op: records the nodes that compute what the operator does not have as an input.
        node: is not changed.

    Raises:
        NotAttention: the operator does something that is not attention, or is in a form that is not known.
        LayoutError: the shape of an operand is not known.
    """
    for value in node.inputs[:3]:
        if value is not None:
            sizes_of(value)  # raises if the shape is not known
    return READERS[node.domain, node.op_type](op, node)


# --- helpers of the readers -------------------------------------------------------------------------------------------


def _inputs(node: ir.Node, count: int) -> list[Any]:
    """The first `count` inputs of a node, None for each that is omitted."""
    return [optional_input(node, i) for i in range(count)]


def _integer(node: ir.Node, name: str) -> int:
    number = node.attributes.get_int(name, 0)
    if not number:
        raise NotAttention(f"{node.op_type} has no {name}")
    return number


def scale_of(node: ir.Node, query: ir.Value) -> float:
    """The factor on the scores: the attribute, or by default the head size to the power of -1/2.

    Raises:
        NotAttention: neither is known.
    """
    scale = node.attributes.get_float("scale")
    size = sizes_of(query)[3]
    if scale or (scale == 0.0 and node.domain == ""):  # 0 means the default in com.microsoft operators
        return scale
    if not size.is_static:
        raise NotAttention(f"{node.op_type} has no scale, and its head size is dynamic")
    return float(size.factor**-0.5)


def _split(op: Builder, x: ir.Value, heads: int) -> ir.Value:
    """`(B, n, H·d)` as `(B, H, n, d)`."""
    batch, tokens, _ = dims_of(x)
    head = sizes_of(x)[2].divide(Size(heads))
    if head is None or not head.is_static:
        raise NotAttention(f"{x.name!r} does not divide into {heads} heads")
    apart = typed(op.Reshape(x, constant(op, [0, 0, heads, head.factor])), x.dtype, [batch, tokens, heads, head.factor])
    return typed(op.Transpose(apart, perm=[0, 2, 1, 3]), x.dtype, [batch, heads, tokens, head.factor])


def _unstacked(op: Builder, x: ir.Value, count: int, bias: ir.Value | None, heads: int) -> list[ir.Value]:
    """`(B, n, H, count, d)` as tensors `(B, H, n, d)`."""
    batch, tokens, _, _, size = dims_of(x)
    if bias is not None:
        raise NotAttention("a MultiHeadAttention with a bias on a stacked query, key and value")
    parts = []
    for i in range(count):
        part = typed(op.Gather(x, constant(op, i), axis=3), x.dtype, [batch, tokens, heads, size])
        parts.append(typed(op.Transpose(part, perm=[0, 2, 1, 3]), x.dtype, [batch, heads, tokens, size]))
    return parts


def _unpacked(op: Builder, x: ir.Value, heads: int, shared: int) -> list[ir.Value]:
    """`(B, n, (H + 2·H')·d)` as query `(B, n, H·d)`, key and value `(B, n, H'·d)`."""
    head = sizes_of(x)[2].divide(Size(heads + 2 * shared))
    if head is None or not head.is_static:
        raise NotAttention(f"{x.name!r} does not divide into {heads} query heads and twice {shared} key-value heads")
    return _parts(op, x, [count * head.factor for count in (heads, shared, shared)])


def _parts(op: Builder, x: ir.Value, widths: list[int]) -> list[ir.Value]:
    """`(B, n, sum of widths)` as tensors `(B, n, width)`."""
    parts = op.op_multi_out("Split", [x, constant(op, widths)], {"axis": -1}, num_outputs=len(widths))
    return [typed(part, x.dtype, [*dims_of(x)[:2], width]) for part, width in zip(parts, widths, strict=True)]


def _biased(op: Builder, x: ir.Value, bias: ir.Value | None, start: int) -> ir.Value:
    """`x` plus its slice of `bias`, which concatenates the biases of query, key and value."""
    if bias is None:
        return x
    width = sizes_of(x)[-1].factor
    part = op.Slice(bias, constant(op, [start]), constant(op, [start + width]), constant(op, [0]))
    return like(op.Add(x, typed(part, x.dtype, [width])), x)


def _unidirectional(node: ir.Node, query: ir.Value, key: ir.Value, value: ir.Value, added: ir.Value | None) -> Reading:
    """An operator of ONNX Runtime that may be causal, before it is masked."""
    is_causal = bool(node.attributes.get_int("unidirectional", 0))
    return Reading(query, key, value, scale_of(node, query), is_causal=is_causal, silent_rows_are_nan=added is not None)


def _masked(op: Builder, node: ir.Node, reading: Reading, padding: ir.Value | None, added: ir.Value | None) -> Reading:
    """The reading with a key padding mask and a bias of the scores."""
    reading = reading.masked(*_padding_mask(op, node, reading, padding))
    return reading if added is None else reading.masked(_on_four_dims(op, added, reading.key))


def _with_past(
    op: Builder, node: ir.Node, reading: Reading, past_key: ir.Value | None, past_value: ir.Value | None
) -> Reading:
    """The reading with past keys and values prepended; the results are the node's outputs 1 and 2."""
    key = _after_past(op, node, 1, past_key, reading.key)
    value = _after_past(op, node, 2, past_value, reading.value)
    offset = reading.offset if past_key is None else typed(op.Shape(past_key, start=2, end=3), INT64, [1])
    return replace(reading, key=key, value=value, offset=offset, present=(key, value))


def _after_past(op: Builder, node: ir.Node, output: int, past: ir.Value | None, now: ir.Value) -> ir.Value:
    """`(B, H', n_past + n, d)`: past keys or values followed by the new ones, which is output number `output`."""
    if past is None:
        return now
    past_size, size = sizes_of(past)[2], sizes_of(now)[2]
    stored = node.outputs[output] if len(node.outputs) > output else None
    if past_size.is_static and size.is_static:
        tokens: int | ir.SymbolicDim = past_size.factor + size.factor
    elif stored is not None and stored.shape is not None:
        tokens = dims_of(stored)[2]
    else:
        tokens = ir.SymbolicDim(f"{past_size.dim()} + {size.dim()}")
    return typed(op.Concat(past, now, axis=2), now.dtype, [*dims_of(now)[:2], tokens, dims_of(now)[3]])


def _on_four_dims(op: Builder, mask: ir.Value, key: ir.Value, *, is_padded: bool = False) -> ir.Value:
    """Prepend dims of size 1 to a mask, up to four dims.

    Args:
        op: the builder.
        mask: on up to four dims.
        key: `(B, H', n_k, d)`.
        is_padded: whether another mask hides the keys beyond the end of a shorter mask, so that it may say anything
            about them.

    Raises:
        NotAttention: the mask is not as long as the keys; ai.onnx does not attend to the keys beyond its end.
    """
    sizes = sizes_of(mask)
    if len(sizes) < 4:
        missing = list(range(4 - len(sizes)))
        mask = typed(op.Unsqueeze(mask, constant(op, missing)), mask.dtype, [*[1] * len(missing), *dims_of(mask)])
    have, want = sizes_of(mask)[3], sizes_of(key)[2]
    if have in (want, ONE):
        return mask
    if not (have.is_static and want.is_static):
        raise NotAttention(f"a mask over {have.text} keys, while there are {want.text} keys")
    if not is_padded:
        raise NotAttention("a mask that is shorter than the keys")
    last = constant(op, np.minimum(np.arange(want.factor), have.factor - 1))
    return typed(op.Gather(mask, last, axis=3), mask.dtype, [*dims_of(mask)[:3], want.factor])


def _padding_mask(op: Builder, node: ir.Node, reading: Reading, mask: ir.Value | None) -> list[ir.Value]:
    """The key padding mask of ONNX Runtime's operators as an additive mask on four dims: a list of none or one.

    The input is `(B, n_k)` or `(B, n_q, n_k)`, integer, 0 for padding; or `(B,)`, the number of keys before padding.
    The scores of padding get a large negative number added.

    Raises:
        NotAttention: the mask has other dims.
    """
    if mask is None:
        return []
    size, *others = sizes_of(mask)
    batch, *rest = dims_of(mask)
    if not others and size == sizes_of(reading.query)[0]:
        kept = _within(op, like(op.Cast(mask, to=INT64.value), mask, INT64), reading.key)
    elif len(others) in (1, 2):
        new = [1, 2][: 3 - len(others)]
        open_keys = op.Greater(mask, constant(op, 0, mask.dtype or INT32))
        kept = typed(op.Unsqueeze(open_keys, constant(op, new)), BOOL, [batch, *[1] * len(new), *rest])
    else:
        how = f"on {len(others) + 1} dims" if others else "by the first and last key of each sample"
        raise NotAttention(f"a {node.op_type} whose padding mask is given {how}")
    low, dtype = node.attributes.get_float("mask_filter_value", -10000.0), reading.query.dtype
    return [like(op.Where(kept, constant(op, 0.0, dtype), constant(op, low, dtype)), kept, dtype)]


def _within(op: Builder, lengths: ir.Value, key: ir.Value) -> ir.Value:
    """`(B, 1, 1, n_k)`, True for the first `lengths` keys of each sample."""
    columns = op.Unsqueeze(numbered(op, key, 2), constant(op, [0, 1, 2]))
    ends = op.Unsqueeze(lengths, constant(op, [1, 2, 3]))
    return typed(op.Less(columns, ends), BOOL, [dims_of(lengths)[0], 1, 1, dims_of(key)[2]])


def _positions(op: Builder, query: ir.Value, first: ir.Value | None) -> ir.Value:
    """`(B, n)`: positions of each sample's tokens, from `first` `(B,)`, by default 0."""
    row = op.Unsqueeze(numbered(op, query, 2), constant(op, [0]))
    dims = [dims_of(query)[0], dims_of(query)[2]]
    if first is not None:
        return typed(op.Add(op.Unsqueeze(first, constant(op, [1])), row), INT64, dims)
    shape = op.Concat(op.Shape(query, start=0, end=1), op.Shape(query, start=2, end=3), axis=0)
    return typed(op.Expand(row, shape), INT64, dims)


def _rotated(op: Builder, x: ir.Value, tables: list[ir.Value], interleaved: int) -> ir.Value:
    """`x` rotated by tables: cosines, sines, and the positions at which they are looked up."""
    dim = sizes_of(tables[0])[-1].factor * 2
    attributes = {"interleaved": interleaved}
    if dim != sizes_of(x)[3].factor:
        attributes["rotary_embedding_dim"] = dim
    return like(op.op("RotaryEmbedding", [x, *tables], attributes), x)
