"""Write the canonical node of a site that the walks from its softmax recognised, or that is an operator already."""

from __future__ import annotations

import onnx_ir as ir

from attnforge.export.attention.canonical import KEY, OUTPUT, QUERY, ROWS, VALUE, SiteAxes, SiteWriter, attention_node
from attnforge.export.attention.layout import Dims, Layout, after_views
from attnforge.export.attention.masking import is_idle, mask_of, settled, with_one_mask, with_sinks, with_zeros, zeroed
from attnforge.export.attention.operands import Operand, strip_factors
from attnforge.export.attention.walk_back import Scores
from attnforge.export.attention.walk_forward import Weights
from attnforge.export.graphs.attention import NotAttention, Reading, merged_heads, read, scale_of
from attnforge.export.graphs.build import Builder, constant, insert, like, replace_value
from attnforge.export.graphs.nodes import input_of, is_op, is_used, optional_input, rank_of
from attnforge.export.graphs.sizes import ONE, sizes_of


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
    score_steps, weight_steps = settled(scores.steps, weights.steps)
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

    def build(op: Builder) -> ir.Value:
        writer = SiteWriter(op, axes, dtype, [(o.value, o.layout) for o in operands])
        layouts = (axes.layout(*dims) for dims in (QUERY, KEY, VALUE))
        query, key, value = map(writer.arranged, operands, layouts)
        query = writer.scaled(query, score_steps.tensor_scales, *ROWS)
        mask = mask_of(writer, score_steps)
        if sink is not None:
            key, value = (with_zeros(op, x, sink.count, first=sink.first) for x in (key, value))
            mask = with_sinks(writer, mask, sink)
        precision = softmax_dtype.value if softmax_dtype is not None and softmax_dtype != dtype else 0
        reading = Reading(
            query, key, value, scale, softcap=score_steps.softcap, softmax_precision=precision,
            silent_rows_are_nan=not weight_steps.nan_rows_zeroed,
        )  # fmt: skip
        result = attention_node(op, name, reading, mask)
        if (factor := weight_steps.scale * value_factor) != 1.0:
            result = like(op.Mul(result, constant(op, factor, dtype)), result)
        result = writer.scaled(result, weight_steps.tensor_scales, *ROWS)
        result = zeroed(writer, result, weight_steps)
        return writer.arranged(Operand(result, axes.layout(*OUTPUT)), output.layout)

    replace_value(output.value, insert(graph, weights.product, build))


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


# --- operators --------------------------------------------------------------------------------------------------------

# Rewrite the attention operators of exporters and other tools to the canonical node (:mod:`.canonical`).


def is_standard(node: ir.Node) -> bool:
    """Whether an Attention node is canonical already, apart from its scale."""
    query, key, value, mask, *others = (optional_input(node, i) for i in range(7))
    if node.domain != "" or any(rank_of(v) != 4 for v in (query, key, value)):
        return False
    if node.attributes.get_float("scale", 1.0) <= 0:
        return False
    if mask is not None:  # on four dims, the last as long as the keys or one, and it masks something
        is_whole = rank_of(mask) == 4 and sizes_of(mask)[3] in (ONE, sizes_of(input_of(node, 1))[2])
        if not is_whole or is_idle(mask) or node.attributes.get_int("is_causal"):
            return False
    return (
        all(v is None for v in others)
        and not any(is_used(output) for output in node.outputs[1:])
        and not {"left_window_size", "right_window_size"} & set(node.attributes)
    )


def standard(graph: ir.Graph, node: ir.Node, name: str) -> None:
    """Replace an operator of :data:`~attnforge.export.graphs.attention.READERS` by a canonical node called
    `name`; an Attention that is one already gets its scale and name.

    Raises:
        NotAttention: the operator does something that no canonical node does.
        LayoutError: the shape of an operand is not known.
    """
    if is_standard(node):
        node.attributes["scale"] = ir.AttrFloat32("scale", scale_of(node, input_of(node)))
        node.name = name
        return

    def build(op: Builder) -> tuple[ir.Value, ...]:
        reading = read(op, node)
        if reading.in_buffer:
            raise NotAttention(f"a {node.op_type} with a cache, whose buffer may be longer than the keys in it")
        if reading.sinks is not None:
            raise NotAttention("a GroupQueryAttention with attention sinks")
        reading, mask = with_one_mask(op, reading)
        result = attention_node(op, name, reading, mask)
        return (merged_heads(op, result) if reading.packed_output else result), *reading.present

    for old, new in zip(node.outputs, insert(graph, node, build, stem=f"{name}/operands"), strict=False):
        if old is node.outputs[0] or is_used(old):
            like(old, new)
            replace_value(old, new)
