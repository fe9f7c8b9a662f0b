"""What every lowering shares: reading a canonical node, and writing attention out as products around a softmax."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from attnforge.export.attention.canonical import MASK_STEP, SILENT_ROWS
from attnforge.export.attention.canonicalize import Site
from attnforge.export.attention.layout import ONE, Axis, Dims, Layout, Size, Sized, after_views, before_views, sizes_of
from attnforge.export.attention.masking import largest, representable
from attnforge.export.attention.operands import Operand, scalar
from attnforge.export.graphs.build import Builder, broadcast_like, cast, constant, dims_of, like, typed

BOOL, FLOAT = ir.DataType.BOOL, ir.DataType.FLOAT


@dataclass
class Lowered:
    """What a lowering made of one site.

    Attributes:
        site: name of the site.
        form: what stands there now.
        why: why this form and no other.
        node: name of the node by which the site is found again in what the backend compiled.
        unfused: why no fused kernel is to be expected; None where one is.
        measured: milliseconds of every form that was timed.
        dropped: forms that were tried and not timed, and why.
    """

    site: str
    form: str
    why: str
    node: str
    unfused: str | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Attention:
    """A canonical Attention node: its operands traced back through views, its output forward through them."""

    node: ir.Node
    query: Operand
    key: Operand
    value: Operand
    mask: ir.Value | None
    output: ir.Value
    output_layout: Layout
    scale: float
    softcap: float
    is_causal: bool
    silent_rows_are_nan: bool
    softmax_dtype: ir.DataType
    dims: dict[str, Layout]  # one-dim layouts of the axes B, H, n_q, n_k, d_k, d_v, and of H_kv, the keys' own heads

    @property
    def dtype(self) -> ir.DataType:
        """Of query, key, value and output."""
        assert self.query.value.dtype is not None
        return self.query.value.dtype

    @property
    def sized(self) -> list[Sized]:
        """By which the sizes of axes can be told that an operand lacks: heads that share one key, say."""
        return [(operand.value, operand.layout) for operand in (self.query, self.key, self.value)]

    def narrowed(self, op: Builder, dtype: ir.DataType) -> Attention:
        """The same with query, key and values cast to `dtype`; so is the output, which whoever emits it casts back. A
        bias and the softmax stay as precise as they are."""
        query, key, value = (Operand(cast(op, o.value, dtype), o.layout) for o in (self.query, self.key, self.value))
        return replace(self, query=query, key=key, value=value)

    def layout(self, *names: str) -> Layout:
        """The layout whose dims are the named axes; `"H d_k"` in one dim are the heads side by side."""
        return Layout(tuple(a for part in name.split() for a in self.dims[part].axes) for name in names)

    def size(self, name: str) -> Size:
        return self.dims[name].sizes()[0]


def attentions(model: ir.Model, sites: list[Site]) -> Iterator[tuple[Site, Attention]]:
    """The canonical nodes of `model`, each with its site."""
    by_name = {site.node: site for site in sites if site.node is not None}
    for node in list(model.graph):
        if node.op_type == "Attention" and node.domain == "" and node.name in by_name:
            yield by_name[node.name], _read(node)


def _read(node: ir.Node) -> Attention:
    q, k, v = node.inputs[:3]
    assert q is not None and k is not None and v is not None and q.dtype is not None
    batch, heads, n_q, d_k = Layout.fresh(q).dims
    n_k, d_v = (() if size == ONE else (Axis(size),) for size in (sizes_of(k)[2], sizes_of(v)[3]))
    shared: Dims = heads
    if (own := sizes_of(k)[1]) != sizes_of(q)[1]:  # every key head serves several query heads that follow one another
        (head,) = heads
        group = head.size.divide(own)
        assert group is not None
        head.split(own, group)
        shared = () if own == ONE else (head.leaves()[0],)
    dims = {"B": batch, "H": heads, "n_q": n_q, "n_k": n_k, "d_k": d_k, "d_v": d_v, "H_kv": shared}
    output, output_layout = after_views(node.outputs[0], Layout([batch, heads, n_q, d_v]))
    return Attention(
        node,
        Operand(*before_views(q, Layout([batch, heads, n_q, d_k]))),
        Operand(*before_views(k, Layout([batch, shared, n_k, d_k]))),
        Operand(*before_views(v, Layout([batch, shared, n_k, d_v]))),
        node.inputs[3] if len(node.inputs) > 3 else None,
        output,
        output_layout,
        scale=node.attributes["scale"].as_float(),
        softcap=node.attributes.get_float("softcap", 0.0) or 0.0,
        is_causal=bool(node.attributes.get_int("is_causal", 0)),
        silent_rows_are_nan=node.metadata_props.get(SILENT_ROWS) == "nan",
        softmax_dtype=ir.DataType(node.attributes.get_int("softmax_precision", 0) or q.dtype.value),
        dims={name: Layout([dim]) for name, dim in dims.items()},
    )


def _scaled(op: Builder, query: ir.Value, scale: float) -> ir.Value:
    """`query` times `scale`, which is not itself rounded to 16 bits: eager does not round it either."""
    dtype = query.dtype
    assert dtype is not None
    if dtype.bitwidth != 16 or float(np.asarray(scale).astype(dtype.numpy())) == scale:
        return like(op.Mul(query, constant(op, scale, dtype)), query)
    wide = like(op.Cast(query, to=FLOAT.value), query, FLOAT)
    return like(op.Cast(like(op.Mul(wide, constant(op, scale, FLOAT)), wide), to=dtype.value), query)


def decompose(
    op: Builder,
    attention: Attention,
    query: ir.Value,
    key_transposed: ir.Value,
    value: ir.Value,
    softmax_name: str,
    as_columns: bool = False,
) -> ir.Value:
    """Attention as two products around a softmax, on four dims.

    The scale goes on the query, where it costs n·d and keeps the scores small. Masks are applied to the scores before
    these are cast and, wherever the order makes no difference, before a bias is added: TensorRT keeps the choice
    inside its fused kernel only there.

    Args:
        query: `(B, H, n_q, d)`.
        key_transposed: `(B, H, d, n_k)`.
        value: `(B, H, n_k, d_v)`, or `(B, H, d_v, n_k)` where `as_columns`.
        softmax_name: name for the Softmax node.
        as_columns: compute the output transposed.

    Returns:
        `(B, H, n_q, d_v)`, or `(B, H, d_v, n_q)` where `as_columns`.
    """
    dtype = attention.dtype
    if attention.scale != 1.0:
        query = _scaled(op, query, attention.scale)
    scores = op.MatMul(query, key_transposed)
    typed(scores, dtype, [*dims_of(query)[:3], dims_of(key_transposed)[3]])
    if attention.softcap:
        cap = constant(op, attention.softcap, dtype)
        scores = like(op.Mul(like(op.Tanh(like(op.Div(scores, cap), scores)), scores), cap), scores)
    steps = mask_steps(attention.mask)
    if attention.is_causal:
        steps.insert(0, Step(_causal(op, query, key_transposed), -np.inf))
    if all(step.fill in (None, -np.inf) for step in steps):
        conditions = [step.operand for step in steps if step.fill is not None]
        biases = [step for step in steps if step.fill is None]
        # One choice for all: two in a row crash TensorRT-RTX 1.7's builder.
        steps = [*([Step(_all(op, conditions), -np.inf)] if conditions else []), *biases]
    for step in steps:
        if step.fill is None:
            bias = _narrowed(op, step.operand)
            assert bias.dtype is not None
            scores = cast(op, scores, bias.dtype)  # wider where attention alone is narrow, so -1e9 stays what it is
            scores = like(op.Add(scores, bias), scores)
        else:
            assert scores.dtype is not None
            number = constant(op, representable(step.fill, scores.dtype), scores.dtype)
            scores = like(op.Where(step.operand, scores, number), scores)
    precise = attention.softmax_dtype
    scores = cast(op, scores, precise)
    weights = like(op.op("Softmax", [scores], {"axis": -1}, name=softmax_name), scores)
    weights = cast(op, weights, dtype)
    outer = dims_of(query)[:3]
    guard = attention.mask is not None and not attention.silent_rows_are_nan
    if as_columns:
        product = op.MatMul(value, op.Transpose(weights, perm=[0, 1, 3, 2]))
        result = typed(product, dtype, [*outer[:2], dims_of(value)[2], outer[2]])
    else:
        result = typed(op.MatMul(weights, value), dtype, [*outer, dims_of(value)[3]])
    if attention.mask is None or not guard:
        return result
    return zero_silent_rows(op, result, attention.mask, as_columns)


@dataclass
class Step:
    """A bias, or a condition and the number that takes the place of the scores where it is False."""

    operand: ir.Value
    fill: float | None = None


def _all(op: Builder, conditions: list[ir.Value]) -> ir.Value:
    """The conjunction of conditions that broadcast to one another."""
    result = conditions[0]
    for other in conditions[1:]:
        result = broadcast_like(op.And(result, other), result, other)
    return result


def _narrowed(op: Builder, bias: ir.Value) -> ir.Value:
    """A bias that is cast to a type of smaller range, its finite numbers kept finite, its infinities infinite."""
    made_by = bias.producer()
    if made_by is None or made_by.op_type != "Cast" or bias.dtype is None:
        return bias
    source = made_by.inputs[0]
    assert source is not None
    if source.dtype is None or not source.dtype.is_floating_point() or largest(source.dtype) <= largest(bias.dtype):
        return bias
    infinity = constant(op, -np.inf, source.dtype)
    infinite = like(op.Equal(source, infinity), source, BOOL)
    finite = like(op.Max(source, constant(op, -largest(bias.dtype), source.dtype)), source)
    return like(op.Cast(like(op.Where(infinite, infinity, finite), source), to=bias.dtype.value), bias)


def mask_steps(mask: ir.Value | None) -> list[Step]:
    """What a mask does to the scores, in order."""
    if mask is None:
        return []
    if mask.dtype == BOOL:
        return [Step(mask, -np.inf)]
    node = mask.producer()
    if node is None or node.domain != "":
        return [Step(mask)]
    kind = node.metadata_props.get(MASK_STEP)
    if kind == "bias":
        assert node.inputs[1] is not None
        return [*mask_steps(node.inputs[0]), Step(node.inputs[1])]
    if kind == "fill" or (node.op_type == "Where" and scalar(node.inputs[2]) == -np.inf):
        condition, before, number = node.inputs
        assert condition is not None
        return [*([] if scalar(before) == 0.0 else mask_steps(before)), Step(condition, scalar(number))]
    return [Step(mask)]


def zero_silent_rows(op: Builder, result: ir.Value, mask: ir.Value, as_columns: bool) -> ir.Value:
    """`result` with zeros for every query that `mask` lets attend to nothing."""
    some = attends_to_some(op, mask)
    if as_columns:
        some = op.Transpose(some, perm=[0, 1, 3, 2])
    assert result.dtype is not None
    return like(op.Where(some, result, constant(op, 0.0, result.dtype)), result)


def attends_to_some(op: Builder, mask: ir.Value) -> ir.Value:
    """For every row of `mask` whether it is open to any key, in the mask's dims with 1 for the last."""
    assert mask.dtype is not None
    allowed = mask
    if mask.dtype != BOOL:
        # Not a reduction of the mask itself: TensorRT would merge that into the softmax, and not fuse the attention.
        allowed = op.Greater(mask, constant(op, -np.inf, mask.dtype))
    some = op.ReduceMax(op.Cast(allowed, to=ir.DataType.INT32.value), constant(op, [-1]), keepdims=1)
    return typed(op.Cast(some, to=BOOL.value), BOOL, [*dims_of(mask)[:-1], 1])


def _causal(op: Builder, query: ir.Value, key_transposed: ir.Value) -> ir.Value:
    """`(n_q, n_k)`, True where the key is not later than the query."""
    zero, one = constant(op, 0), constant(op, 1)
    rows = op.Range(zero, op.Squeeze(op.Shape(query, start=2, end=3)), one)
    columns = op.Range(zero, op.Squeeze(op.Shape(key_transposed, start=3, end=4)), one)
    mask = op.LessOrEqual(op.Unsqueeze(columns, constant(op, [0, 1, 2])), op.Unsqueeze(rows, constant(op, [0, 1, 3])))
    return typed(mask, BOOL, [1, 1, dims_of(query)[2], dims_of(key_transposed)[3]])
