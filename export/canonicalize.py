"""Every attention site, however it was written, becomes one ai.onnx Attention node.

The canonical form (operator Attention, opset 23): query `(B, H, n_q, d_k)`, key `(B, H, n_k, d_k)`, value `(B, H, n_k,
d_v)`, an optional mask that broadcasts to `(B, H, n_q, n_k)`, boolean (True attends) or added to the scores, and
`scale` always given. A query that may attend to nothing gets NaN there, as a softmax over nothing does; what a model
makes of such queries stands explicitly behind the node. Sites that are not understood keep their graph, and get a
reason.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attnforge.export.layout import (
    Axis,
    Builder,
    Dims,
    Layout,
    LayoutError,
    constant,
    insert,
    like,
    rearrange,
    sizes_of,
    typed,
    walk_back,
    walk_forward,
)
from attnforge.export.recognise import (
    NotAttention,
    Operand,
    Scores,
    Walk,
    Weights,
    strip_factors,
    walk_to_output,
    walk_to_product,
)

BOOL, FLOAT, INT32 = ir.DataType.BOOL, ir.DataType.FLOAT, ir.DataType.INT32


@dataclass
class Site:
    """One place where a graph attends.

    Attributes:
        name: qualified name of the module it stands in; numbered where a module has several.
        written_as: the operators from the first product to the second, as the author's graph has them.
        node: name of the canonical Attention node, or None where there is none.
        reason: why there is none.
    """

    name: str
    written_as: str
    node: str | None = None
    reason: str | None = None


def canonicalize(model: ir.Model) -> list[Site]:
    """Rewrite every attention site of `model`, in place, to a canonical Attention node.

    Returns:
        the sites in graph order; those that could not be rewritten have a reason instead of a node.
    """
    sites: list[Site] = []
    for node in list(model.graph):
        name = _unused_name(node, sites)
        if node.domain != "":
            continue
        site = None
        if node.op_type == "Softmax":
            site = _from_softmax(model.graph, node, name)
        elif node.op_type == "Attention":
            site = _from_attention(model.graph, node, name)
        elif node.op_type == "ArgMax":
            site = _from_argmax(node, name)
        if site is not None:
            sites.append(site)
    RemoveUnusedNodesPass()(model)
    return sites


def _unused_name(node: ir.Node, sites: list[Site]) -> str:
    """The qualified name of the module that `node` stands in, from the exporter's metadata."""
    scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
    classes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.class_hierarchy", "[]"))
    name = scopes[-2] if len(scopes) > 1 else ""
    if not name:
        name = classes[-2].rpartition(".")[2] if len(classes) > 1 else "graph"
    count = sum(site.name.partition("#")[0] == name for site in sites)
    return f"{name}#{count + 1}" if count else name


# --- from a softmax ---------------------------------------------------------------------------------------------------


def _from_softmax(graph: ir.Graph, node: ir.Node, name: str) -> Site | None:
    source = node.inputs[0]
    assert source is not None
    try:
        layout = Layout.fresh(source)
    except LayoutError as error:
        return Site(name, "Softmax", reason=str(error))
    dim = layout.dims[node.attributes.get_int("axis", -1)]
    if not dim:
        return None  # a softmax over one element is no attention
    scores, weights = Scores(), Weights()
    reasons = []
    back = partial(walk_to_product, Walk(source, layout, dim[0]), scores)
    forward = partial(walk_to_output, Walk(node.outputs[0], layout, dim[0]), weights)
    for walk in (back, forward):
        try:
            walk()
        except (NotAttention, LayoutError) as error:
            reasons.append(str(error))
    if weights.output is None and not _both_computed(scores):
        return None  # a classifier's softmax, or another that weighs nothing
    site = Site(name, "·".join([*reversed(scores.path), "Softmax", *weights.path]))
    if not reasons:
        try:
            site.node = _emit(graph, name, scores, weights, Layout([dim]), softmax_dtype=source.dtype)
        except (NotAttention, LayoutError) as error:
            reasons.append(str(error))
    site.reason = "; ".join(reasons) or None
    return site


def _both_computed(scores: Scores) -> bool:
    """Whether query and key both depend on the input: what tells attention from a classifier's last layer."""
    operands = [o for o in (scores.query, scores.key) if o is not None]
    constants = [ir.convenience.get_const_tensor(walk_back(o.value, o.layout)[0]) is not None for o in operands]
    return len(operands) == 2 and not any(constants)


def _emit(
    graph: ir.Graph, name: str, scores: Scores, weights: Weights, keys: Layout, softmax_dtype: ir.DataType | None
) -> str:
    """Put the Attention node and the views around it in front of the product with the values, and reroute its users."""
    assert scores.query and scores.key and weights.value and weights.product and weights.output
    query_factor, query = strip_factors(scores.query)
    key_factor, key = strip_factors(scores.key)
    value_factor, value = strip_factors(weights.value)
    final, output = walk_forward(weights.product.outputs[0], weights.output)
    dtype = query.value.dtype
    if dtype is None or not dtype == key.value.dtype == value.value.dtype == final.dtype:
        raise NotAttention("query, key, values and output are not all of one type")

    if set(key.layout.axes) & set(scores.batch.axes) - set(value.layout.axes):
        raise NotAttention("the keys differ by query, as in an additive score: no inner product of queries and keys")

    # No walk follows that could split an axis, so from here the axes are final.
    n_q, n_k, d_k, d_v = (tuple(part.axes) for part in (scores.queries, keys, scores.features, weights.value_features))
    batch, heads = _batch_and_heads(scores.batch, query.layout, d_k)
    node_name = f"{name}/Attention"

    def build(op: Builder) -> ir.Value:
        operands = [
            rearrange(op, operand.value, operand.layout, Layout([batch, heads, *inner]))
            for operand, inner in ((query, (n_q, d_k)), (key, (n_k, d_k)), (value, (n_k, d_v)))
        ]
        mask = _mask(op, scores, Layout([batch, heads, n_q, n_k]), dtype)
        attributes: dict[str, float | int] = {"scale": scores.scale * query_factor * key_factor}
        if softmax_dtype is not None and softmax_dtype != dtype:
            attributes["softmax_precision"] = softmax_dtype.value
        result_layout = Layout([batch, heads, n_q, d_v])
        result = op.op("Attention", [*operands, *([mask] if mask is not None else [])], attributes, name=node_name)
        typed(result, dtype, [size.dim() for size in result_layout.sizes()])
        if (factor := weights.scale * value_factor) != 1.0:
            result = like(op.Mul(result, constant(op, factor, dtype)), result)
        zeros = constant(op, 0.0, dtype)
        rows = Layout([batch, heads, n_q, ()])
        for kept in weights.kept_rows:
            result = like(op.Where(_broadcastable(op, kept, rows), result, zeros), result)
        for zeroed in weights.zeroed_rows:
            result = like(op.Where(_broadcastable(op, zeroed, rows), zeros, result), result)
        if weights.nan_rows_zeroed:
            if mask is None:
                raise NotAttention("NaN weights are replaced by zeros although nothing is masked")
            result = zero_silent_rows(op, result, mask)
        return rearrange(op, result, result_layout, output)

    result = insert(graph, weights.product, build)
    replace_value(final, result)
    return node_name


def _batch_and_heads(axes: Layout, query: Layout, features: Dims) -> tuple[list[Axis], list[Axis]]:
    """Which axes that attend apart are heads: the last of several; a lone one if it shares a dim with features."""
    *batch, last = axes.axes or [None]
    if last is None:
        return [], []
    side_by_side = any(last in dim and set(features) & set(dim) for dim in query.dims)
    return (batch, [last]) if batch or side_by_side else ([last], [])


def _mask(op: Builder, scores: Scores, canonical: Layout, dtype: ir.DataType) -> ir.Value | None:
    """One mask out of all: boolean where all are, else added to the scores, with -inf where forbidden."""
    allowed: ir.Value | None = None
    for operand in scores.allowed:
        part = _broadcastable(op, operand, canonical)
        allowed = part if allowed is None else broadcast_like(op.And(allowed, part), allowed, part)
    for operand in scores.forbidden:
        source = _broadcastable(op, operand, canonical)
        part = like(op.Not(source), source)
        allowed = part if allowed is None else broadcast_like(op.And(allowed, part), allowed, part)
    bias: ir.Value | None = None
    for operand, factor in scores.biases:
        part = _broadcastable(op, operand, canonical)
        if part.dtype != dtype:
            part = like(op.Cast(part, to=dtype.value), part, dtype)
        if factor != 1.0:
            part = like(op.Mul(part, constant(op, factor, dtype)), part)
        bias = part if bias is None else broadcast_like(op.Add(bias, part), bias, part)
    if bias is None or allowed is None:
        return allowed if bias is None else bias
    return broadcast_like(op.Where(allowed, bias, constant(op, -np.inf, dtype)), bias, allowed)


def _broadcastable(op: Builder, operand: Operand, layout: Layout) -> ir.Value:
    """`operand` in the dims of `layout`, 1 where it does not vary."""
    present = set(operand.layout.axes)
    target = Layout(dim if present & set(dim) else () for dim in layout.dims)
    return rearrange(op, operand.value, operand.layout, target)


def broadcast_like(value: ir.Value, first: ir.Value, second: ir.Value) -> ir.Value:
    """Set on `value` the type of `first` and the shape to which `first` and `second`, of one rank, broadcast."""
    assert first.shape is not None and second.shape is not None
    assert first.dtype is not None
    return typed(value, first.dtype, [b if a == 1 else a for a, b in zip(first.shape, second.shape, strict=True)])


def zero_silent_rows(op: Builder, result: ir.Value, mask: ir.Value) -> ir.Value:
    """`result` with zeros for every query that `mask` lets attend to nothing."""
    assert mask.shape is not None and mask.dtype is not None and result.dtype is not None
    last = constant(op, [-1])
    if mask.dtype == BOOL:
        some = op.Cast(op.ReduceMax(op.Cast(mask, to=INT32.value), last, keepdims=1), to=BOOL.value)
    else:
        some = op.Greater(op.ReduceMax(mask, last, keepdims=1), constant(op, -np.inf, mask.dtype))
    typed(some, BOOL, [*list(mask.shape)[:-1], 1])
    return like(op.Where(some, result, constant(op, 0.0, result.dtype)), result)


def replace_value(old: ir.Value, new: ir.Value) -> None:
    """Let `new` stand wherever `old` stood, under its name if it is an output of the graph."""
    like(new, old)
    if old.is_graph_output():
        old.name, new.name = f"{old.name}/replaced", old.name
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


# --- from other anchors -----------------------------------------------------------------------------------------------


def _from_attention(graph: ir.Graph, node: ir.Node, name: str) -> Site:
    """An Attention node that the exporter or another author wrote."""
    site = Site(name, "Attention")
    query, key, value = node.inputs[:3]
    assert query is not None and key is not None and value is not None
    mask = node.inputs[3] if len(node.inputs) > 3 else None
    if any(v is not None for v in node.inputs[4:]) or any(output.uses() for output in node.outputs[1:]):
        site.reason = "an Attention node with a key-value cache or with the scores as an output"
    elif node.attributes.get_float("softcap", 0.0):
        site.reason = "an Attention node with a soft cap"
    elif any(v.shape is None or len(v.shape) != 4 for v in (query, key, value)):
        site.reason = "an Attention node on three dims, its heads packed"
    elif sizes_of(query)[1] != sizes_of(key)[1]:
        site.reason = "an Attention node with fewer key heads than query heads"
    if site.reason is not None:
        return site
    if node.attributes.get_float("scale") is None:
        head_dim = sizes_of(query)[-1]
        node.attributes["scale"] = ir.AttrFloat32("scale", head_dim.factor**-0.5)
    site.node = node.name = f"{name}/Attention"
    from_torch = "scaled_dot_product_attention" in node.metadata_props.get("pkg.torch.onnx.fx_node", "")
    if from_torch and mask is not None:
        # PyTorch's own answer to a query that may attend to nothing is zeros; the operator's is NaN.
        _zero_silent_rows_behind(graph, node, mask)
    return site


def _zero_silent_rows_behind(graph: ir.Graph, node: ir.Node, mask: ir.Value) -> None:
    output = node.outputs[0]
    users = list(output.uses())
    after = insert(graph, node, lambda op: zero_silent_rows(op, output, mask), after=True)
    if output.is_graph_output():
        replace_value(output, after)
        where = after.producer()
        assert where is not None
        where.replace_input_with(1, output)
        return
    for user, index in users:
        user.replace_input_with(index, after)


def _from_argmax(node: ir.Node, name: str) -> Site | None:
    """Hard alignment: the best key alone. Reported, since whoever wrote it may expect it fused."""
    source = node.inputs[0]
    assert source is not None
    scores = Scores()
    try:
        layout = Layout.fresh(source)
        dim = layout.dims[node.attributes.get_int("axis", 0)]
        walk_to_product(Walk(source, layout, dim[0]), scores)
    except (NotAttention, LayoutError, IndexError):
        return None
    if not _both_computed(scores):
        return None
    reason = "the alignment is hard (ArgMax): fused attention kernels compute a softmax"
    return Site(name, "·".join([*reversed(scores.path), "ArgMax"]), reason=reason)
