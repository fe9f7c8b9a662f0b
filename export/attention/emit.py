"""Write the canonical node of a site that the walks from its softmax recognised."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from attnforge.export.attention.canonical import KEY, OUTPUT, QUERY, VALUE, SiteAxes, SiteWriter, attention_node
from attnforge.export.attention.layout import Dims, Layout, after_views
from attnforge.export.attention.masking import (
    allowed,
    any_key,
    mask_of,
    settle_fills_with_sinks,
    settle_zeroing,
    with_sinks,
    with_zeros,
)
from attnforge.export.attention.operands import Operand, TensorScale, strip_factors
from attnforge.export.attention.walk_back import Scores
from attnforge.export.attention.walk_forward import Weights, WeightSteps
from attnforge.export.graphs.attention import NotAttention
from attnforge.export.graphs.build import Builder, cast, constant, insert, like, replace_value
from attnforge.export.graphs.nodes import input_of, is_op

ROWS = ("B", "H", "n_q", "")
"""Dim names of a tensor with one number per query."""


def emit(graph: ir.Graph, name: str, scores: Scores, weights: Weights, softmax_dtype: ir.DataType | None) -> None:
    """Replace a site by a canonical node called `name`, with the views that it needs.

    Args:
        graph: changed in place, unless an error is raised.
        name: the name of the Attention node.
        scores: the result of the walk back from the softmax.
        weights: the result of the walk forward from the softmax.
        softmax_dtype: the type of the softmax's input.

    Raises:
        NotAttention: the site does something that no canonical node does.
        LayoutError: an operand varies along an axis that no canonical operand has, or a size cannot be computed.
    """
    score_steps, weight_steps = settle_zeroing(scores.steps, weights.steps)
    value_factor, value = strip_factors(weights.value)
    query_factor, query = _stripped(scores.query, value.value.dtype)
    key_factor, key = _stripped(scores.key, value.value.dtype)
    operands, dtype = (query, key, value), query.value.dtype
    output = _output(weights, dtype)
    if dtype == ir.DataType.DOUBLE:
        raise NotAttention("it is computed in double, which fused attention kernels do not know")
    if dtype is None or not dtype == key.value.dtype == value.value.dtype == output.value.dtype:
        raise NotAttention("query, key, values and output are not all of one type")
    scale = scores.steps.scale * query_factor * key_factor
    axes = _axes(scores, weights, *(operand.layout for operand in operands))
    sink = score_steps.sink
    if sink is not None:
        score_steps = settle_fills_with_sinks(score_steps)

    def build(op: Builder) -> ir.Value:
        writer = SiteWriter(op, axes, dtype, [(o.value, o.layout) for o in operands])
        query, key, value = (
            writer.arranged(operand, axes.layout(*dims))
            for operand, dims in zip(operands, (QUERY, KEY, VALUE), strict=True)
        )
        query = _scaled(writer, query, score_steps.tensor_scales)
        if scale < 0:  # the operator takes the root of its scale
            query = like(op.Neg(query), query)
        mask = mask_of(writer, score_steps)
        if sink is not None:
            key, value = (with_zeros(op, x, sink.count, first=sink.first) for x in (key, value))
            mask = with_sinks(writer, mask, sink)
        precision = softmax_dtype.value if softmax_dtype is not None and softmax_dtype != dtype else 0
        result = attention_node(
            op, name, query, key, value, mask,
            scale=abs(scale), softcap=score_steps.softcap, softmax_precision=precision,
            silent_rows_are_nan=not weight_steps.nan_rows_zeroed,
        )  # fmt: skip
        if (factor := weight_steps.scale * value_factor) != 1.0:
            result = like(op.Mul(result, constant(op, factor, dtype)), result)
        result = _scaled(writer, result, weight_steps.tensor_scales)
        result = _zeroed(writer, result, weight_steps)
        return writer.arranged(Operand(result, axes.layout(*OUTPUT)), output.layout)

    replace_value(output.value, insert(graph, weights.product, build))


def _scaled(writer: SiteWriter, x: ir.Value, scales: Sequence[TensorScale]) -> ir.Value:
    """Scale queries or outputs by tensors that are the same for all keys."""
    for by in scales:
        scale = cast(writer.op, writer.broadcastable(by.operand, *ROWS), writer.dtype)
        x = like(writer.op.op(by.op_type, [x, scale]), x)
    return x


def _zeroed(writer: SiteWriter, result: ir.Value, steps: WeightSteps) -> ir.Value:
    """The output with zeros for the queries that the graph zeroes after the softmax."""
    op = writer.op
    zeros = constant(op, 0.0, writer.dtype)
    for zeroing in steps.zeroing:
        if zeroing.by_key:  # zero where it excludes all keys of a query
            result = like(op.Where(any_key(op, allowed(writer, zeroing)), result, zeros), result)
        else:
            rows = writer.broadcastable(zeroing.condition, *ROWS)
            result = like(op.Where(rows, *((zeros, result) if zeroing.inverted else (result, zeros))), result)
    return result


# --- operands ---------------------------------------------------------------------------------------------------------


def _stripped(operand: Operand, dtype: ir.DataType | None) -> tuple[float, Operand]:
    """A query or key before factors, views and a cast from the values' 16-bit type to fp32, and the product of the
    factors: kernels accumulate in fp32 either way."""
    factor, operand = strip_factors(operand)
    node = operand.value.producer()
    if is_op(node, "Cast") and operand.value.dtype == ir.DataType.FLOAT:
        source = input_of(node)
        if source.dtype == dtype and dtype is not None and dtype.bitwidth == 16:
            inner, operand = strip_factors(Operand(source, operand.layout))
            factor *= inner
    return factor, operand


def _output(weights: Weights, dtype: ir.DataType | None) -> Operand:
    """The output after views, and after the Cast to the type of the query that is its only user, if there is one."""
    value, layout = after_views(weights.product.outputs[0], weights.output)
    users = [use.node for use in value.uses()]
    result = users[0].outputs[0] if len(users) == 1 and users[0].op_type == "Cast" else value
    if value.dtype != dtype == result.dtype and not value.is_graph_output():
        value, layout = after_views(result, layout)
    return Operand(value, layout)


# --- axes -------------------------------------------------------------------------------------------------------------


def _axes(scores: Scores, weights: Weights, query: Layout, key: Layout, value: Layout) -> SiteAxes:
    """Sort the axes into batch, heads, queries, keys and features. No walk follows that could split an axis further."""
    # The last dim that only the query has is n_q; the dims before it are batches that share their keys.
    query_dims = [dim for dim in scores.query_only.dims if not set(dim) & set(value.axes)] or [()]
    batches = Layout(dim for dim in scores.rows.dims if dim != query_dims[-1])
    if set(key.axes) & set(batches.axes) - set(value.axes) - set(query.axes):
        raise NotAttention("the keys differ by query, as in additive scores and talking heads: not an inner product")
    n_k, d_k, d_v = (tuple(part.axes) for part in (scores.keys, scores.features, weights.value_features))
    # Of the axes that attend independently, heads are those that share a dim of the query with the features; if there
    # are none, the last dim of the query with such axes, if several dims have them.
    independent = set(batches.axes)
    dims = [dim for dim in query.dims if set(dim) & independent]
    chosen = [dim for dim in dims if set(dim) & set(d_k)] or (dims[-1:] if len(dims) > 1 else [])
    heads = tuple(axis for dim in chosen for axis in dim if axis in independent)
    batch = tuple(axis for axis in batches.axes if axis not in heads)
    shared = shared_heads(heads, key, value)
    return SiteAxes({"B": batch, "H": heads, "H_kv": shared, "n_q": query_dims[-1], "n_k": n_k, "d_k": d_k, "d_v": d_v})


def shared_heads(heads: Dims, key: Layout, value: Layout) -> Dims:
    """The heads of keys and values: all heads, or only the outer ones where the inner ones share them."""
    present = [axis in key.axes or axis in value.axes for axis in heads]
    count = sum(present)
    return heads[:count] if all(present[:count]) else heads
