"""Rewrite the attention operators of exporters and other tools to the canonical node (:mod:`.canonical`).

- ai.onnx Attention (https://onnx.ai/onnx/operators/onnx__Attention.html): packed heads on three dims, a cache of past
  keys and values, masks of fewer dims, lengths, windows.
- ONNX Runtime's com.microsoft operators MultiHeadAttention, Attention and GroupQueryAttention
  (https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md).

Whatever else an operator does (projections, caches, rotary embeddings) is decomposed into separate nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from attnforge.export.attention.canonical import attention_node
from attnforge.export.attention.layout import ONE, Size, sizes_of
from attnforge.export.attention.masking import all_of, masks_nothing
from attnforge.export.attention.operands import NotAttention
from attnforge.export.graphs.build import Builder, broadcast_like, constant, dims_of, insert, like, replace_value, typed
from attnforge.export.graphs.nodes import optional_input

BOOL, INT32, INT64 = ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64
CONTRIB = "com.microsoft"


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
        packed_output: whether the output is `(B, n_q, H·d_v)` instead of `(B, H, n_q, d_v)`.
        more_outputs: values of the operator's other outputs, by position.
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
    packed_output: bool = True
    more_outputs: Mapping[int, ir.Value] = field(default_factory=dict)

    def masked(self, *masks: ir.Value) -> Reading:
        """The same with further masks added, except those that mask nothing."""
        masks = tuple(mask for mask in masks if not masks_nothing(mask, attends=mask.dtype == BOOL))
        return replace(self, masks=(*self.masks, *masks))


def is_standard(node: ir.Node) -> bool:
    """Whether an Attention node is canonical already, apart from its scale."""
    query, key, value, mask, *others = _inputs(node, 7)
    is_causal = node.attributes.get_int("is_causal", 0)
    return (
        node.domain == ""
        and all(v is not None and v.shape is not None and len(v.shape) == 4 for v in (query, key, value))
        and _is_whole(mask, key)
        and not (mask is not None and is_causal)
        and all(v is None for v in others)
        and not any(_is_used(output) for output in node.outputs[1:])
        and not {"left_window_size", "right_window_size"} & set(node.attributes)
    )


def _is_whole(mask: ir.Value | None, key: ir.Value | None) -> bool:
    """Whether a mask has four dims, the last as long as the keys or one, and masks something."""
    if mask is None or key is None:
        return True
    if masks_nothing(mask, attends=mask.dtype == BOOL):
        return False
    return mask.shape is not None and len(mask.shape) == 4 and sizes_of(mask)[3] in (ONE, sizes_of(key)[2])


def standard(graph: ir.Graph, node: ir.Node, name: str) -> None:
    """Replace an operator of :data:`READERS` by a canonical node called `name`.

    Raises:
        NotAttention: the operator does something that no canonical node does.
        LayoutError: the shape of an operand is not known.
    """
    reading: Reading | None = None

    def build(op: Builder) -> ir.Value:
        nonlocal reading
        reading = READERS[node.domain, node.op_type](op, node)
        return _emit(op, reading, name)

    result = insert(graph, node, build, stem=f"{name}/operands")
    assert reading is not None
    for i, value in {0: result, **reading.more_outputs}.items():
        like(node.outputs[i], value)
        replace_value(node.outputs[i], value)


def _emit(op: Builder, reading: Reading, name: str) -> ir.Value:
    # With a mask, causality becomes part of it: both together may mask a row fully that neither masks alone.
    plain_causal = reading.is_causal and reading.offset is None and reading.window == (-1, -1) and not reading.masks
    result = attention_node(
        op, name, reading.query, reading.key, reading.value, _joined_mask(op, reading, plain_causal),
        scale=reading.scale, is_causal=plain_causal, softcap=reading.softcap,
        softmax_precision=reading.softmax_precision,
    )  # fmt: skip
    return _merged(op, result) if reading.packed_output else result


def _joined_mask(op: Builder, reading: Reading, plain_causal: bool) -> ir.Value | None:
    """Combine all masks, causality and window into one mask; None if there are none."""
    conditions = [mask for mask in reading.masks if mask.dtype == BOOL]
    biases = [mask for mask in reading.masks if mask.dtype != BOOL]
    if (reading.is_causal and not plain_causal) or reading.window != (-1, -1):
        conditions.append(_in_reach(op, reading))
    mask = None
    for bias in biases:
        mask = bias if mask is None else broadcast_like(op.Add(mask, bias), mask, bias)
    if not conditions:
        return mask
    allowed = all_of(op, conditions)
    if mask is None:
        return allowed
    assert mask.dtype is not None
    return broadcast_like(op.Where(allowed, mask, constant(op, -np.inf, mask.dtype)), mask, allowed)


def _in_reach(op: Builder, reading: Reading) -> ir.Value:
    """`(1 | B, 1, n_q, n_k)`, True where causality and the window allow a query to attend to a key."""
    rows = op.Unsqueeze(_range(op, reading.query, 2), constant(op, [0, 1, 3]))
    columns = op.Unsqueeze(_range(op, reading.key, 2), constant(op, [0, 1, 2]))
    offset = reading.offset
    if offset is not None:
        rows = op.Add(rows, offset)
    distance = op.Sub(rows, columns)
    left, right = reading.window
    conditions = [op.GreaterOrEqual(distance, constant(op, 0))] if reading.is_causal else []
    if left >= 0:
        conditions.append(op.LessOrEqual(distance, constant(op, left)))
    if right >= 0:
        conditions.append(op.GreaterOrEqual(distance, constant(op, -right)))
    batch = 1 if offset is None or offset.shape is None else dims_of(offset)[0]
    dims = [batch, 1, dims_of(reading.query)[2], dims_of(reading.key)[2]]
    return all_of(op, [typed(condition, BOOL, dims) for condition in conditions])


# --- readers ----------------------------------------------------------------------------------------------------------


def _attention(op: Builder, node: ir.Node) -> Reading:
    """ai.onnx Attention."""
    query, key, value, mask, past_key, past_value, lengths = _inputs(node, 7)
    packed = len(sizes_of(query)) == 3
    if packed:
        heads, shared = (_integer(node, name) for name in ("q_num_heads", "kv_num_heads"))
        query, key, value = (_split(op, x, h) for x, h in ((query, heads), (key, shared), (value, shared)))
    if node.attributes.get_int("qk_matmul_output_mode", 0) or (len(node.outputs) > 3 and _is_used(node.outputs[3])):
        raise NotAttention("the scores are an output of the Attention node; a fused kernel never stores them")
    reading = Reading(
        query, key, value, scale_of(node, query), packed_output=packed,
        is_causal=bool(node.attributes.get_int("is_causal", 0)),
        window=(node.attributes.get_int("left_window_size", -1), node.attributes.get_int("right_window_size", -1)),
        softcap=node.attributes.get_float("softcap", 0.0) or 0.0,
        softmax_precision=node.attributes.get_int("softmax_precision", 0),
    )  # fmt: skip
    reading = _with_past(op, node, reading, past_key, past_value)
    if mask is not None:
        reading = reading.masked(_on_four_dims(op, mask, reading.key))
    if lengths is not None:
        reading = reading.masked(_within(op, lengths, reading.key))
        if reading.is_causal:
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
        width = sizes_of(query)[-1]
        query = _split(op, _biased(op, query, bias, Size(0), width), heads)
        if len(sizes_of(key)) == 5:  # (B, m, H, 2, d)
            key, value = _unstacked(op, key, 2, None, heads)
        elif len(sizes_of(key)) == 3:
            key = _split(op, _biased(op, key, bias, width, width), heads)
            value = _split(op, _biased(op, value, bias, Size(2 * width.factor), sizes_of(value)[-1]), heads)
    is_causal = bool(node.attributes.get_int("unidirectional", 0))
    if is_causal and past_key is None and sizes_of(query)[2] != sizes_of(key)[2]:
        raise NotAttention("a causal MultiHeadAttention with different numbers of keys and queries, without a past")
    reading = Reading(query, key, value, scale_of(node, query), is_causal=is_causal)
    reading = _with_past(op, node, reading, past_key, past_value)
    reading = reading.masked(*_padding_mask(op, node, query, padding))
    return reading if added is None else reading.masked(_on_four_dims(op, added, reading.key))


def _packed_attention(op: Builder, node: ir.Node) -> Reading:
    """com.microsoft Attention, which projects its input to queries, keys and values."""
    x, weights, bias, padding, past, added, shared_length = _inputs(node, 7)
    heads = _integer(node, "num_heads")
    rotary = node.attributes.get_int("do_rotary", 0)
    if shared_length is not None or rotary:
        raise NotAttention("a com.microsoft Attention with a rotary embedding or a shared buffer for its cache")
    total = sizes_of(weights)[1]
    widths = list(node.attributes.get_ints("qkv_hidden_sizes") or [total.factor // 3] * 3)
    projected = op.MatMul(x, weights)
    typed(projected, x.dtype, [*dims_of(x)[:2], total.dim()])
    if bias is not None:
        projected = like(op.Add(projected, bias), projected)
    query, key, value = (_split(op, part, heads) for part in _parts(op, projected, widths))
    if past is not None or (len(node.outputs) > 1 and _is_used(node.outputs[1])):
        raise NotAttention("a com.microsoft Attention with a cache of keys and values in one tensor")
    is_causal = bool(node.attributes.get_int("unidirectional", 0))
    reading = Reading(query, key, value, scale_of(node, query), is_causal=is_causal)
    reading = reading.masked(*_padding_mask(op, node, query, padding))
    return reading if added is None else reading.masked(_on_four_dims(op, added, key))


def _group_query_attention(op: Builder, node: ir.Node) -> Reading:
    """com.microsoft GroupQueryAttention, which is always causal."""
    query, key, value, past_key, past_value, lengths, _, cosine, sine, positions, added, *others = _inputs(node, 14)
    heads, shared = _integer(node, "num_heads"), _integer(node, "kv_num_heads")
    if past_key is not None or past_value is not None or any(_is_used(output) for output in node.outputs[1:]):
        raise NotAttention("a GroupQueryAttention with a cache, whose buffer may be longer than the keys in it")
    if node.attributes.get_int("smooth_softmax", 0) == 1 or any(v is not None for v in others):
        raise NotAttention("a GroupQueryAttention with sinks or a quantised cache")
    if key is None:  # all packed: (B, n, (H + 2·H')·d)
        query, key, value = _unpacked(op, query, heads, shared)
    query, key, value = (_split(op, x, h) for x, h in ((query, heads), (key, shared), (value, shared)))
    if node.attributes.get_int("do_rotary", 0):
        positions = _positions(op, query) if positions is None else positions
        interleaved = node.attributes.get_int("rotary_interleaved", 0)
        query, key = (_rotated(op, x, cosine, sine, positions, interleaved) for x in (query, key))
    window = node.attributes.get_int("local_window_size", -1)
    reading = Reading(
        query, key, value, scale_of(node, query), is_causal=True,
        window=(window - 1 if window >= 0 else -1, -1), softcap=node.attributes.get_float("softcap", 0.0) or 0.0,
    )  # fmt: skip
    if lengths is not None:
        last = typed(op.Cast(op.Reshape(lengths, constant(op, [-1])), to=INT64.value), INT64, [dims_of(query)[0]])
        reading = reading.masked(_within(op, like(op.Add(last, constant(op, [1])), last), key))
    return reading if added is None else reading.masked(_on_four_dims(op, added, key))


READERS: dict[tuple[str, str], Callable[[Builder, ir.Node], Reading]] = {
    ("", "Attention"): _attention,
    (CONTRIB, "MultiHeadAttention"): _multi_head_attention,
    (CONTRIB, "Attention"): _packed_attention,
    (CONTRIB, "GroupQueryAttention"): _group_query_attention,
}
"""The known operators, by domain and name."""


# --- helpers of the readers -------------------------------------------------------------------------------------------


def _inputs(node: ir.Node, count: int) -> list[Any]:
    """The first `count` inputs of a node, None for each that is omitted."""
    return [optional_input(node, i) for i in range(count)]


def _integer(node: ir.Node, name: str) -> int:
    number = node.attributes.get_int(name, 0)
    if not number:
        raise NotAttention(f"{node.op_type} has no {name}")
    return number


def _is_used(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def scale_of(node: ir.Node, query: ir.Value | None) -> float:
    """The factor on the scores: the attribute, or by default the head size to the power of -1/2.

    Raises:
        NotAttention: neither is known.
    """
    assert query is not None
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
    apart = op.Reshape(x, constant(op, [0, 0, heads, head.factor]))
    typed(apart, x.dtype, [batch, tokens, heads, head.factor])
    return typed(op.Transpose(apart, perm=[0, 2, 1, 3]), x.dtype, [batch, heads, tokens, head.factor])


def _merged(op: Builder, x: ir.Value) -> ir.Value:
    """`(B, H, n, d)` as `(B, n, H·d)`."""
    batch, heads, tokens, size = dims_of(x)
    width = sizes_of(x)[1] * sizes_of(x)[3]
    transposed = typed(op.Transpose(x, perm=[0, 2, 1, 3]), x.dtype, [batch, tokens, heads, size])
    return typed(op.Reshape(transposed, constant(op, [0, 0, width.factor])), x.dtype, [batch, tokens, width.dim()])


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


def _biased(op: Builder, x: ir.Value, bias: ir.Value | None, start: Size, width: Size) -> ir.Value:
    """`x` plus its slice of `bias`, which concatenates the biases of query, key and value."""
    if bias is None:
        return x
    first = start.factor if start.is_static else 0
    part = op.Slice(bias, constant(op, [first]), constant(op, [first + width.factor]), constant(op, [0]))
    return like(op.Add(x, typed(part, x.dtype, [width.factor])), x)


def _with_past(
    op: Builder, node: ir.Node, reading: Reading, past_key: ir.Value | None, past_value: ir.Value | None
) -> Reading:
    """The reading with past keys and values prepended; the results are the node's outputs 1 and 2."""
    key = _after_past(op, node, 1, past_key, reading.key)
    value = _after_past(op, node, 2, past_value, reading.value)
    offset = reading.offset
    if past_key is not None and reading.is_causal:
        offset = typed(op.Shape(past_key, start=2, end=3), INT64, [1])
    used = {i: x for i, x in ((1, key), (2, value)) if len(node.outputs) > i and _is_used(node.outputs[i])}
    return replace(reading, key=key, value=value, offset=offset, more_outputs=used)


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
    joined = op.Concat(past, now, axis=2)
    return typed(joined, now.dtype, [*dims_of(now)[:2], tokens, dims_of(now)[3]])


def _on_four_dims(op: Builder, mask: ir.Value, key: ir.Value) -> ir.Value:
    """Prepend dims of size 1 to a mask, up to four dims.

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
        raise NotAttention(f"a mask over {have.dim()} keys, while there are {want.dim()} keys")
    raise NotAttention("a mask that is shorter than the keys")


def _padding_mask(op: Builder, node: ir.Node, query: ir.Value, mask: ir.Value | None) -> list[ir.Value]:
    """The key padding mask of ONNX Runtime's operators as an additive mask on four dims: a list of none or one.

    The input is `(B, n_k)` or `(B, n_q, n_k)`, integer, 0 for padding, whose scores get a large negative number added.

    Raises:
        NotAttention: the mask has other dims.
    """
    if mask is None:
        return []
    rank = len(sizes_of(mask))
    if rank not in (2, 3):
        how = "by lengths" if rank == 1 else f"on {rank} dims"
        raise NotAttention(f"a {node.op_type} whose padding mask is given {how}")
    low = node.attributes.get_float("mask_filter_value", -10000.0)
    dtype = query.dtype
    assert dtype is not None
    open_keys = like(op.Greater(mask, constant(op, 0, mask.dtype or INT32)), mask, BOOL)
    added = like(op.Where(open_keys, constant(op, 0.0, dtype), constant(op, low, dtype)), mask, dtype)
    batch, *rest = dims_of(mask)
    new = [1, 2] if rank == 2 else [1]
    return [typed(op.Unsqueeze(added, constant(op, new)), dtype, [batch, *[1] * len(new), *rest])]


def _within(op: Builder, lengths: ir.Value, key: ir.Value) -> ir.Value:
    """`(B, 1, 1, n_k)`, True for the first `lengths` keys of each sample."""
    columns = op.Unsqueeze(_range(op, key, 2), constant(op, [0, 1, 2]))
    ends = op.Unsqueeze(lengths, constant(op, [1, 2, 3]))
    return typed(op.Less(columns, ends), BOOL, [dims_of(lengths)[0], 1, 1, dims_of(key)[2]])


def _range(op: Builder, x: ir.Value, axis: int) -> ir.Value:
    """`0, 1, …`, int64, as long as axis `axis` of `x`."""
    length = op.Squeeze(op.Shape(x, start=axis, end=axis + 1))
    return typed(op.Range(constant(op, 0), length, constant(op, 1)), INT64, [dims_of(x)[axis]])


def _positions(op: Builder, query: ir.Value) -> ir.Value:
    """`(B, n)`: positions of each sample's tokens, from 0."""
    row = op.Unsqueeze(_range(op, query, 2), constant(op, [0]))
    shape = op.Concat(op.Shape(query, start=0, end=1), op.Shape(query, start=2, end=3), axis=0)
    return typed(op.Expand(row, shape), INT64, [dims_of(query)[0], dims_of(query)[2]])


def _rotated(
    op: Builder, x: ir.Value, cosine: ir.Value, sine: ir.Value, positions: ir.Value, interleaved: int
) -> ir.Value:
    dim = sizes_of(cosine)[-1].factor * 2
    attributes = {"interleaved": interleaved}
    if dim != sizes_of(x)[3].factor:
        attributes["rotary_embedding_dim"] = dim
    return like(op.op("RotaryEmbedding", [x, cosine, sine, positions], attributes), x)
