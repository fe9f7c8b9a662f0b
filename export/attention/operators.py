"""Attention operators as others write them become the plain Attention node that this library calls canonical.

Of ai.onnx Attention (https://onnx.ai/onnx/operators/onnx__Attention.html): heads packed on three dims, a cache of past
keys and values, masks of fewer dims, lengths, windows. Of ONNX Runtime's com.microsoft operators
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md): MultiHeadAttention, Attention and
GroupQueryAttention. What an operator does beside attending (projections, caches, rotary embeddings) is written out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from attnforge.export.attention.layout import ONE, Size, sizes_of
from attnforge.export.attention.operands import NotAttention
from attnforge.export.graphs.build import Builder, broadcast_like, constant, dims_of, insert, like, replace_value, typed

BOOL, INT32, INT64 = ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64
CONTRIB = "com.microsoft"


@dataclass
class Given:
    """What an operator attends with, all on four dims, and what its other outputs are."""

    query: ir.Value  # (B, H, n_q, d_k)
    key: ir.Value  # (B, H', n_k, d_k), the past's in front
    value: ir.Value  # (B, H', n_k, d_v)
    scale: float
    masks: list[ir.Value] = field(default_factory=list)  # 4-D, boolean or added
    is_causal: bool = False
    offset: ir.Value | None = None  # how many keys come before the first query's own, as an int64 of one element
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    softmax_precision: int = 0
    packed_output: bool = True
    more_outputs: dict[int, ir.Value] = field(default_factory=dict)


def standard(graph: ir.Graph, node: ir.Node, name: str) -> None:
    """Put an Attention node called `name`, on four dims, without cache and with its scale, in the place of `node`.

    Raises:
        NotAttention: `node` does what no Attention node does, or its operands' sizes are not known.
    """
    read = READERS[node.domain, node.op_type]
    given: Given | None = None

    def build(op: Builder) -> ir.Value:
        nonlocal given
        given = read(op, node)
        return _emit(op, given, name)

    result = insert(graph, node, build, stem=f"{name}/operands")
    assert given is not None
    like(node.outputs[0], result)
    replace_value(node.outputs[0], result)
    for i, value in given.more_outputs.items():
        like(node.outputs[i], value)
        replace_value(node.outputs[i], value)


def is_standard(node: ir.Node) -> bool:
    """Whether an Attention node is canonical as it stands."""
    inputs = [*node.inputs, *[None] * 7]
    operands = inputs[:3]
    is_causal = node.attributes.get_int("is_causal", 0)
    return (
        node.domain == ""
        and all(v is not None and v.shape is not None and len(v.shape) == 4 for v in operands)
        and _is_whole(inputs[3], inputs[1])
        and not (inputs[3] is not None and is_causal)
        and all(v is None for v in inputs[4:])
        and not any(output.uses() or output.is_graph_output() for output in node.outputs[1:])
        and not {"left_window_size", "right_window_size"} & set(node.attributes)
    )


def _is_whole(mask: ir.Value | None, key: ir.Value | None) -> bool:
    """Whether a mask has four dims, the last as long as the keys or one."""
    if mask is None or key is None:
        return True
    return mask.shape is not None and len(mask.shape) == 4 and sizes_of(mask)[3] in (ONE, sizes_of(key)[2])


def _emit(op: Builder, given: Given, name: str) -> ir.Value:
    query, key, value = given.query, given.key, given.value
    attributes: dict[str, float | int] = {"scale": given.scale}
    # Together with a mask it is written out: a query may be left without keys by both that neither leaves so.
    plain_causal = given.is_causal and given.offset is None and given.window == (-1, -1) and not given.masks
    if plain_causal:
        attributes["is_causal"] = 1
    if given.softcap:
        attributes["softcap"] = given.softcap
    if given.softmax_precision:
        attributes["softmax_precision"] = given.softmax_precision
    mask = _joined(op, given, plain_causal)
    inputs = [query, key, value, *([mask] if mask is not None else [])]
    result = op.op("Attention", inputs, attributes, name=name)
    assert query.dtype is not None
    typed(result, query.dtype, [*dims_of(query)[:3], dims_of(value)[3]])
    return _merged(op, result) if given.packed_output else result


def _joined(op: Builder, given: Given, plain_causal: bool) -> ir.Value | None:
    """One mask out of all, and of what causality and a window forbid."""
    conditions = [mask for mask in given.masks if mask.dtype == BOOL]
    biases = [mask for mask in given.masks if mask.dtype != BOOL]
    if (given.is_causal and not plain_causal) or given.window != (-1, -1):
        conditions.append(_in_reach(op, given))
    mask = None
    for bias in biases:
        mask = bias if mask is None else broadcast_like(op.Add(mask, bias), mask, bias)
    allowed = None
    for condition in conditions:
        allowed = condition if allowed is None else broadcast_like(op.And(allowed, condition), allowed, condition)
    if mask is None or allowed is None:
        return allowed if mask is None else mask
    assert mask.dtype is not None
    return broadcast_like(op.Where(allowed, mask, constant(op, -np.inf, mask.dtype)), mask, allowed)


def _in_reach(op: Builder, given: Given) -> ir.Value:
    """`(1 | B, 1, n_q, n_k)`, True where a key is neither later than causality nor further than the window allows."""
    rows = op.Unsqueeze(_range(op, given.query, 2), constant(op, [0, 1, 3]))
    columns = op.Unsqueeze(_range(op, given.key, 2), constant(op, [0, 1, 2]))
    if given.offset is not None:
        rows = op.Add(rows, given.offset)
    behind = op.Sub(rows, columns)
    left, right = given.window
    conditions = [op.GreaterOrEqual(behind, constant(op, 0))] if given.is_causal else []
    if left >= 0:
        conditions.append(op.LessOrEqual(behind, constant(op, left)))
    if right >= 0:
        conditions.append(op.GreaterOrEqual(behind, constant(op, -right)))
    batch = 1 if given.offset is None or given.offset.shape is None else dims_of(given.offset)[0]
    allowed: ir.Value | None = None
    for condition in conditions:
        typed(condition, BOOL, [batch, 1, dims_of(given.query)[2], dims_of(given.key)[2]])
        allowed = condition if allowed is None else like(op.And(allowed, condition), condition)
    assert allowed is not None
    return allowed


# --- readers ----------------------------------------------------------------------------------------------------------


def _attention(op: Builder, node: ir.Node) -> Given:
    query, key, value, mask, past_key, past_value, lengths = _inputs(node, 7)
    packed = len(sizes_of(query)) == 3
    if packed:
        heads, shared = (_integer(node, name) for name in ("q_num_heads", "kv_num_heads"))
        query, key, value = (_split(op, x, h) for x, h in ((query, heads), (key, shared), (value, shared)))
    if node.attributes.get_int("qk_matmul_output_mode", 0) or (len(node.outputs) > 3 and _is_used(node.outputs[3])):
        raise NotAttention("the scores are an output of the Attention node; a fused kernel never has them in memory")
    given = Given(
        query, key, value, scale_of(node, query), packed_output=packed,
        is_causal=bool(node.attributes.get_int("is_causal", 0)),
        window=(node.attributes.get_int("left_window_size", -1), node.attributes.get_int("right_window_size", -1)),
        softcap=node.attributes.get_float("softcap", 0.0) or 0.0,
        softmax_precision=node.attributes.get_int("softmax_precision", 0),
    )  # fmt: skip
    _remember(op, node, given, past_key, past_value)
    if mask is not None:
        given.masks.append(_on_four_dims(op, mask, given.key))
    if lengths is not None:
        given.masks.append(_within(op, lengths, given.key))
        if given.is_causal:
            first = op.Sub(lengths, op.Shape(given.query, start=2, end=3))
            given.offset = typed(op.Unsqueeze(first, constant(op, [1, 2, 3])), INT64, [dims_of(lengths)[0], 1, 1, 1])
    return given


def _multi_head_attention(op: Builder, node: ir.Node) -> Given:
    query, key, value, bias, padding, added, past_key, past_value, *others = _inputs(node, 10)
    if any(other is not None for other in others):
        raise NotAttention("a MultiHeadAttention that shares the buffer of its cache")
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
    given = Given(
        query, key, value, scale_of(node, query), is_causal=bool(node.attributes.get_int("unidirectional", 0))
    )
    if given.is_causal and past_key is None and sizes_of(query)[2] != sizes_of(given.key)[2]:
        raise NotAttention("a causal MultiHeadAttention over more or fewer keys than queries, without a past")
    _remember(op, node, given, past_key, past_value)
    _pad(op, node, given, padding)
    if added is not None:
        given.masks.append(_on_four_dims(op, added, given.key))
    return given


def _packed_attention(op: Builder, node: ir.Node) -> Given:
    x, weights, bias, padding, past, added, shared_length = _inputs(node, 7)
    heads = _integer(node, "num_heads")
    rotary = node.attributes.get_int("do_rotary", 0)
    if shared_length is not None or rotary:
        raise NotAttention("a com.microsoft Attention with a rotary embedding or a shared buffer for its cache")
    total = sizes_of(weights)[1]
    widths = list(node.attributes.get_ints("qkv_hidden_sizes") or [total.factor // 3] * 3)
    projected = op.MatMul(x, weights)
    assert x.dtype is not None
    typed(projected, x.dtype, [*dims_of(x)[:2], total.dim()])
    if bias is not None:
        projected = like(op.Add(projected, bias), projected)
    parts = op.op_multi_out("Split", [projected, constant(op, widths)], {"axis": -1}, num_outputs=3)
    for part, width in zip(parts, widths, strict=True):
        typed(part, x.dtype, [*dims_of(x)[:2], width])
    query, key, value = (_split(op, part, heads) for part in parts)
    given = Given(
        query, key, value, scale_of(node, query), is_causal=bool(node.attributes.get_int("unidirectional", 0))
    )
    if past is not None or (len(node.outputs) > 1 and _is_used(node.outputs[1])):
        raise NotAttention("a com.microsoft Attention with a cache of keys and values in one tensor")
    _pad(op, node, given, padding)
    if added is not None:
        given.masks.append(_on_four_dims(op, added, given.key))
    return given


def _group_query_attention(op: Builder, node: ir.Node) -> Given:
    query, key, value, past_key, past_value, lengths, _, cosine, sine, positions, added, *others = _inputs(node, 14)
    heads, shared = _integer(node, "num_heads"), _integer(node, "kv_num_heads")
    if past_key is not None or past_value is not None or any(_is_used(output) for output in node.outputs[1:]):
        raise NotAttention("a GroupQueryAttention with a cache, whose buffer may hold more keys than there are")
    if node.attributes.get_int("smooth_softmax", 0) == 1 or any(v is not None for v in others):
        raise NotAttention("a GroupQueryAttention with sinks or a quantised cache")
    if key is None:  # all in one: (B, n, (H + 2·H')·d)
        query, key, value = _unpacked(op, query, heads, shared)
    query, key, value = (_split(op, x, h) for x, h in ((query, heads), (key, shared), (value, shared)))
    if node.attributes.get_int("do_rotary", 0):
        if positions is None:
            row = op.Unsqueeze(_range(op, query, 2), constant(op, [0]))
            shape = op.Concat(op.Shape(query, start=0, end=1), op.Shape(query, start=2, end=3), axis=0)
            positions = typed(op.Expand(row, shape), INT64, [dims_of(query)[0], dims_of(query)[2]])
        interleaved = node.attributes.get_int("rotary_interleaved", 0)
        query, key = (_rotated(op, x, cosine, sine, positions, interleaved) for x in (query, key))
    window = node.attributes.get_int("local_window_size", -1)
    given = Given(
        query, key, value, scale_of(node, query), is_causal=True,
        window=(window - 1 if window >= 0 else -1, -1), softcap=node.attributes.get_float("softcap", 0.0) or 0.0,
    )  # fmt: skip
    if lengths is not None:
        last = typed(op.Cast(op.Reshape(lengths, constant(op, [-1])), to=INT64.value), INT64, [dims_of(query)[0]])
        given.masks.append(_within(op, like(op.Add(last, constant(op, [1])), last), key))
    if added is not None:
        given.masks.append(_on_four_dims(op, added, key))
    return given


READERS: dict[tuple[str, str], Callable[[Builder, ir.Node], Given]] = {
    ("", "Attention"): _attention,
    (CONTRIB, "MultiHeadAttention"): _multi_head_attention,
    (CONTRIB, "Attention"): _packed_attention,
    (CONTRIB, "GroupQueryAttention"): _group_query_attention,
}
"""The operators that are known, by domain and name."""


# --- what readers share -----------------------------------------------------------------------------------------------


def _inputs(node: ir.Node, count: int) -> list[Any]:
    """The inputs, None for those not given."""
    return [*node.inputs, *[None] * count][:count]


def _integer(node: ir.Node, name: str) -> int:
    number = node.attributes.get_int(name, 0)
    if not number:
        raise NotAttention(f"{node.op_type} has no {name}")
    return number


def _is_used(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def scale_of(node: ir.Node, query: ir.Value | None) -> float:
    """The factor on the scores: the attribute, or one over the root of the head size."""
    assert query is not None
    given = node.attributes.get_float("scale")
    size = sizes_of(query)[3]
    if given or (given == 0.0 and node.domain == ""):
        return given
    if not size.is_static:
        raise NotAttention(f"{node.op_type} has no scale, and its head size is dynamic")
    return float(size.factor**-0.5)


def _split(op: Builder, x: ir.Value, heads: int) -> ir.Value:
    """`(B, n, H·d)` as `(B, H, n, d)`."""
    batch, tokens, _ = dims_of(x)
    head = sizes_of(x)[2].divide(Size(heads))
    if head is None or not head.is_static:
        raise NotAttention(f"{x.name!r} does not divide into {heads} heads")
    assert x.dtype is not None
    apart = op.Reshape(x, constant(op, [0, 0, heads, head.factor]))
    typed(apart, x.dtype, [batch, tokens, heads, head.factor])
    return typed(op.Transpose(apart, perm=[0, 2, 1, 3]), x.dtype, [batch, heads, tokens, head.factor])


def _merged(op: Builder, x: ir.Value) -> ir.Value:
    """`(B, H, n, d)` as `(B, n, H·d)`."""
    batch, heads, tokens, size = dims_of(x)
    width = sizes_of(x)[1] * sizes_of(x)[3]
    assert x.dtype is not None
    beside = typed(op.Transpose(x, perm=[0, 2, 1, 3]), x.dtype, [batch, tokens, heads, size])
    return typed(op.Reshape(beside, constant(op, [0, 0, width.factor])), x.dtype, [batch, tokens, width.dim()])


def _unstacked(op: Builder, x: ir.Value, count: int, bias: ir.Value | None, heads: int) -> list[ir.Value]:
    """`(B, n, H, count, d)` as tensors `(B, H, n, d)`."""
    batch, tokens, _, _, size = dims_of(x)
    if bias is not None:
        raise NotAttention("a MultiHeadAttention on a stacked query, key and value with a bias")
    assert x.dtype is not None
    taken = []
    for i in range(count):
        one = typed(op.Gather(x, constant(op, i), axis=3), x.dtype, [batch, tokens, heads, size])
        taken.append(typed(op.Transpose(one, perm=[0, 2, 1, 3]), x.dtype, [batch, heads, tokens, size]))
    return taken


def _unpacked(op: Builder, x: ir.Value, heads: int, shared: int) -> list[ir.Value]:
    head = sizes_of(x)[2].divide(Size(heads + 2 * shared))
    if head is None or not head.is_static:
        raise NotAttention(f"{x.name!r} does not divide into {heads} heads and twice {shared}")
    widths = [count * head.factor for count in (heads, shared, shared)]
    parts = op.op_multi_out("Split", [x, constant(op, widths)], {"axis": -1}, num_outputs=3)
    assert x.dtype is not None
    return [typed(p, x.dtype, [*dims_of(x)[:2], width]) for p, width in zip(parts, widths, strict=True)]


def _biased(op: Builder, x: ir.Value, bias: ir.Value | None, start: Size, width: Size) -> ir.Value:
    """`x` with its part of the biases of query, key and value, which lie one behind the other."""
    if bias is None:
        return x
    first = start.factor if start.is_static else 0
    part = op.Slice(bias, constant(op, [first]), constant(op, [first + width.factor]), constant(op, [0]))
    assert x.dtype is not None
    return like(op.Add(x, typed(part, x.dtype, [width.factor])), x)


def _remember(op: Builder, node: ir.Node, given: Given, past_key: ir.Value, past_value: ir.Value) -> None:
    """Put the past's keys and values in front, and let the node's other outputs be both together."""
    for i, name, past in ((1, "key", past_key), (2, "value", past_value)):
        now: ir.Value = getattr(given, name)
        if past is not None:
            sizes = sizes_of(past)[2], sizes_of(now)[2]
            total = Size(sizes[0].factor + sizes[1].factor) if sizes[0].is_static and sizes[1].is_static else None
            known = dims_of(node.outputs[i]) if len(node.outputs) > i and node.outputs[i].shape is not None else None
            both = f"{sizes[0].dim()} + {sizes[1].dim()}"
            dim = total.dim() if total is not None else known[2] if known else ir.SymbolicDim(both)
            joined = op.Concat(past, now, axis=2)
            assert now.dtype is not None
            setattr(given, name, typed(joined, now.dtype, [*dims_of(now)[:2], dim, dims_of(now)[3]]))
        if len(node.outputs) > i and _is_used(node.outputs[i]):
            given.more_outputs[i] = getattr(given, name)
    if past_key is not None and given.is_causal:
        given.offset = typed(op.Shape(past_key, start=2, end=3), INT64, [1])


def _on_four_dims(op: Builder, mask: ir.Value, key: ir.Value) -> ir.Value:
    """A mask with dims of one in front, as long as the keys: those that it does not name are not attended to."""
    sizes = sizes_of(mask)
    if len(sizes) < 4:
        missing = list(range(4 - len(sizes)))
        assert mask.dtype is not None
        mask = typed(op.Unsqueeze(mask, constant(op, missing)), mask.dtype, [*[1] * len(missing), *dims_of(mask)])
    have, want = sizes_of(mask)[3], sizes_of(key)[2]
    if have in (want, ONE):
        return mask
    if not (have.is_static and want.is_static):
        raise NotAttention(f"a mask of {have.dim()} keys where there are {want.dim()}")
    raise NotAttention("a mask that is shorter than the keys")


def _pad(op: Builder, node: ir.Node, given: Given, mask: ir.Value | None) -> None:
    """A key padding mask of ONNX Runtime's operators: `(B, n_k)` or `(B, n_q, n_k)` of integers, 0 for padding, to
    whose scores a large negative number is added."""
    if mask is None:
        return
    rank = len(sizes_of(mask))
    if rank not in (2, 3):
        how = "by lengths" if rank == 1 else f"on {rank} dims"
        raise NotAttention(f"a {node.op_type} whose padding is given {how}")
    low = node.attributes.get_float("mask_filter_value", -10000.0)
    dtype = given.query.dtype
    assert dtype is not None
    open_keys = like(op.Greater(mask, constant(op, 0, mask.dtype or INT32)), mask, BOOL)
    added = like(op.Where(open_keys, constant(op, 0.0, dtype), constant(op, low, dtype)), mask, dtype)
    batch, *rest = dims_of(mask)
    places = [1, 2] if rank == 2 else [1]
    dims = [batch, *[1] * len(places), *rest]
    given.masks.append(typed(op.Unsqueeze(added, constant(op, places)), dtype, dims))


def _within(op: Builder, lengths: ir.Value, key: ir.Value) -> ir.Value:
    """`(B, 1, 1, n_k)`, True for the first so many keys of each sample."""
    columns = op.Unsqueeze(_range(op, key, 2), constant(op, [0, 1, 2]))
    ends = op.Unsqueeze(lengths, constant(op, [1, 2, 3]))
    return typed(op.Less(columns, ends), BOOL, [dims_of(lengths)[0], 1, 1, dims_of(key)[2]])


def _range(op: Builder, x: ir.Value, axis: int) -> ir.Value:
    """`0, 1, …` as long as an axis of `x`."""
    length = op.Squeeze(op.Shape(x, start=axis, end=axis + 1))
    return typed(op.Range(constant(op, 0), length, constant(op, 1)), INT64, [dims_of(x)[axis]])


def _rotated(
    op: Builder, x: ir.Value, cosine: ir.Value, sine: ir.Value, positions: ir.Value, interleaved: int
) -> ir.Value:
    dim = sizes_of(cosine)[-1].factor * 2
    attributes = {"interleaved": interleaved}
    if dim != sizes_of(x)[3].factor:
        attributes["rotary_embedding_dim"] = dim
    return like(op.op("RotaryEmbedding", [x, cosine, sine, positions], attributes), x)
