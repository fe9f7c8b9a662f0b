"""Attention decomposed into two products around a softmax, and the steps of a canonical node's mask."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attnforge.export.attention.canonical import MASK_STEP, QUERY
from attnforge.export.attention.layout import needs_transpose
from attnforge.export.attention.masking import all_of, any_key, representable
from attnforge.export.attention.operands import scalar
from attnforge.export.graphs.build import Builder, cast, constant, dims_of, like, typed
from attnforge.export.graphs.nodes import input_of, inputs_of, is_op
from attnforge.export.graphs.qdq import FP8, MOST_FP8, rounded_to, rounding_of
from attnforge.export.lowering.attention import Attention

BOOL, FLOAT = ir.DataType.BOOL, ir.DataType.FLOAT


def products(op: Builder, a: Attention, name: str) -> ir.Value:
    """The output of attention as two products around a Softmax of this name; transposed if the graph's output is."""
    rows, columns = a.layout("B", "H", "n_q", "d_v"), a.layout("B", "H", "d_v", "n_q")
    as_columns = needs_transpose(rows, a.output.layout) and not needs_transpose(columns, a.output.layout)
    value_layout = a.layout("B", "H", "d_v", "n_k") if as_columns else a.layout("B", "H", "n_k", "d_v")
    query, key, value = a.inputs(op, [a.layout(*QUERY), a.layout("B", "H", "d_k", "n_k"), value_layout])
    return a.as_output(op, decompose(op, a, query, key, value, name, as_columns), columns if as_columns else rows)


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

    The scale is applied to the query, where it costs n·d and keeps the scores small. fp8 Q/DQ come after it, right
    before the products, where TensorRT fuses them; the softmax's output is at most 1, so its scale is fixed. Masks
    are applied to the scores before these are cast and, where the order makes no difference, before a bias is added:
    only there does TensorRT keep the Where inside its fused kernel.

    Args:
        query: `(B, H, n_q, d)`.
        key_transposed: `(B, H, d, n_k)`.
        value: `(B, H, n_k, d_v)`, or `(B, H, d_v, n_k)` if `as_columns`.
        softmax_name: name for the Softmax node.
        as_columns: compute the output transposed.

    Returns:
        `(B, H, n_q, d_v)`, or `(B, H, d_v, n_q)` if `as_columns`.
    """
    dtype = attention.dtype
    if attention.scale != 1.0:
        query = _scaled(op, query, attention.scale)
    if attention.scales is not None:
        of_query, of_key, of_value = attention.scales
        query = rounded_to(op, query, of_query * attention.scale, FP8)
        key_transposed, value = rounded_to(op, key_transposed, of_key, FP8), rounded_to(op, value, of_value, FP8)
    scores = typed(op.MatMul(query, key_transposed), dtype, [*dims_of(query)[:3], dims_of(key_transposed)[3]])
    if attention.softcap:
        cap = constant(op, attention.softcap, dtype)
        scores = like(op.Mul(like(op.Tanh(like(op.Div(scores, cap), scores)), scores), cap), scores)
    for step in _steps(op, attention, query, key_transposed):
        scores = _masked(op, scores, step)
    scores = cast(op, scores, attention.softmax_dtype)
    weights = cast(op, like(op.op("Softmax", [scores], {"axis": -1}, name=softmax_name), scores), dtype)
    if attention.scales is not None:
        weights = rounded_to(op, weights, 1 / MOST_FP8, FP8, rounding_of(softmax_name))
    batch, heads, n_q = dims_of(query)[:3]
    if as_columns:
        product = op.MatMul(value, op.Transpose(weights, perm=[0, 1, 3, 2]))
        result = typed(product, dtype, [batch, heads, dims_of(value)[2], n_q])
    else:
        result = typed(op.MatMul(weights, value), dtype, [batch, heads, n_q, dims_of(value)[3]])
    if attention.mask is None or attention.silent_rows_are_nan:
        return result
    some = any_key(op, attention.mask)
    if as_columns:
        some = op.Transpose(some, perm=[0, 1, 3, 2])
    return like(op.Where(some, result, constant(op, 0.0, dtype)), result)


def _scaled(op: Builder, query: ir.Value, scale: float) -> ir.Value:
    """`query` times `scale`, which is not rounded to 16 bits, because eager does not round it either."""
    dtype = query.dtype
    assert dtype is not None
    if dtype.bitwidth != 16 or float(np.asarray(scale).astype(dtype.numpy())) == scale:
        return like(op.Mul(query, constant(op, scale, dtype)), query)
    wide = like(op.Cast(query, to=FLOAT.value), query, FLOAT)
    return like(op.Cast(like(op.Mul(wide, constant(op, scale, FLOAT)), wide), to=dtype.value), query)


# --- masks ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MaskStep:
    """A bias; or a condition, and the number `fill` that replaces the scores where the condition is False."""

    operand: ir.Value
    fill: float | None = None


def mask_steps(mask: ir.Value | None) -> list[MaskStep]:
    """The operations of a canonical node's mask on the scores, in the author's order. The last one of an additive mask
    is the Add or Where that computes it, or a bias as it stands."""
    if mask is None:
        return []
    if mask.dtype == BOOL:
        return [MaskStep(mask, -np.inf)]
    node = mask.producer()
    fills = is_op(node, "Where") and scalar(node.inputs[2]) == -np.inf
    if node is None or node.domain != "" or not (fills or MASK_STEP in node.metadata_props):
        return [MaskStep(mask)]
    if node.op_type == "Add":
        before, bias = inputs_of(node)
        return [*mask_steps(before), MaskStep(bias)]
    condition, before, number = inputs_of(node)
    return [*([] if scalar(before) == 0.0 else mask_steps(before)), MaskStep(condition, scalar(number))]


def fills_in_number(mask: ir.Value | None) -> bool:
    """Whether a mask replaces scores with a finite number, which is not the same as adding it."""
    return any(step.fill not in (None, -np.inf) for step in mask_steps(mask))


def _steps(op: Builder, attention: Attention, query: ir.Value, key_transposed: ir.Value) -> list[MaskStep]:
    """The steps of mask and causality; all conditions first and merged into one where the order makes no difference."""
    steps = mask_steps(attention.mask)
    if attention.is_causal:
        steps.insert(0, MaskStep(_causal(op, query, key_transposed), -np.inf))
    conditions = [step.operand for step in steps if step.fill is not None]
    if not conditions or fills_in_number(attention.mask):
        return steps
    # One Where for all conditions: two in a row crash TensorRT-RTX 1.7's builder.
    return [MaskStep(all_of(op, conditions), -np.inf), *(step for step in steps if step.fill is None)]


def _masked(op: Builder, scores: ir.Value, step: MaskStep) -> ir.Value:
    if step.fill is None:
        bias = _kept_finite(op, step.operand)
        assert bias.dtype is not None
        scores = cast(op, scores, bias.dtype)  # wider if attention alone is narrow, so -1e9 is not changed
        return like(op.Add(scores, bias), scores)
    assert scores.dtype is not None
    number = constant(op, representable(step.fill, scores.dtype), scores.dtype)
    return like(op.Where(step.operand, scores, number), scores)


def _kept_finite(op: Builder, bias: ir.Value) -> ir.Value:
    """A bias whose finite numbers stay finite if it is cast to a type of smaller range; infinities stay."""
    node = bias.producer()
    if node is None or node.op_type != "Cast" or bias.dtype is None:
        return bias
    source = input_of(node)
    if source.dtype is None or not source.dtype.is_floating_point() or float(source.dtype.max) <= float(bias.dtype.max):
        return bias
    infinity = constant(op, -np.inf, source.dtype)
    infinite = like(op.Equal(source, infinity), source, BOOL)
    finite = like(op.Max(source, constant(op, bias.dtype.min, source.dtype)), source)
    return like(op.Cast(like(op.Where(infinite, infinity, finite), source), to=bias.dtype.value), bias)


def _causal(op: Builder, query: ir.Value, key_transposed: ir.Value) -> ir.Value:
    """`(1, 1, n_q, n_k)`, True where the key is not later than the query."""
    zero, one = constant(op, 0), constant(op, 1)
    rows = op.Range(zero, op.Squeeze(op.Shape(query, start=2, end=3)), one)
    columns = op.Range(zero, op.Squeeze(op.Shape(key_transposed, start=3, end=4)), one)
    mask = op.LessOrEqual(op.Unsqueeze(columns, constant(op, [0, 1, 2])), op.Unsqueeze(rows, constant(op, [0, 1, 3])))
    return typed(mask, BOOL, [1, 1, dims_of(query)[2], dims_of(key_transposed)[3]])
