"""Every attention site, however it was written, becomes one ai.onnx Attention node.

The canonical form (operator Attention, opset 23): query `(B, H, n_q, d_k)`, key `(B, H', n_k, d_k)`, value
`(B, H', n_k, d_v)`, an optional mask that broadcasts to `(B, H, n_q, n_k)`, boolean (True attends) or added to the
scores, and `scale` always given; H' divides H. What the operator leaves open, node metadata says: :data:`SILENT_ROWS`
and :data:`MASK_STEP`. Sites that are not understood keep their graph, and get a reason.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attnforge.export.attention.layout import (
    ONE,
    Axis,
    Dims,
    Layout,
    LayoutError,
    Sized,
    rearrange,
    sizes_of,
    walk_forward,
)
from attnforge.export.attention.operators import READERS, is_standard, scale_of, standard
from attnforge.export.attention.recognise import (
    Bias,
    Fill,
    NotAttention,
    Operand,
    Scores,
    Sink,
    Walk,
    Weights,
    both_computed,
    same_value,
    strip_factors,
    walk_to_outputs,
    walk_to_product,
    without_not,
)
from attnforge.export.attention.softmax import restore_softmax
from attnforge.export.graphs.build import (
    Builder,
    broadcast_like,
    cast,
    constant,
    dims_of,
    insert,
    like,
    replace_value,
    typed,
)

BOOL, FLOAT, INT32 = ir.DataType.BOOL, ir.DataType.FLOAT, ir.DataType.INT32

SILENT_ROWS = "attnforge.silent_rows"
"""What a query that may attend to nothing gets: zeros, as the operator says, or `nan`, as a bare softmax gives."""

MASK_STEP = "attnforge.mask_step"
"""On the nodes that a mask is made of, in the order in which the author applied them to the scores: an Add of a `bias`,
or a Where that puts a number in the place of scores (`fill`). A finite number is not the same as one that is added: it
gives a query that may attend to nothing the mean of all values."""


@dataclass
class Site:
    """One place where a graph attends.

    Attributes:
        name: qualified name of the module it stands in; numbered where a module has several.
        written_as: the operators from the first product to the second, as the author's graph has them.
        node: name of the canonical Attention node, or None where there is none.
        form: what that node computes, in short.
        reason: why there is none.
    """

    name: str
    written_as: str
    node: str | None = None
    form: str | None = None
    reason: str | None = None


def canonicalize(model: ir.Model) -> list[Site]:
    """Rewrite every attention site of `model`, in place, to a canonical Attention node.

    Returns:
        the sites in graph order; those that could not be rewritten have a reason instead of a node.
    """
    RemoveUnusedNodesPass()(model)  # what nothing comes of must not count as a use of the scores
    if restore_softmax(model):
        RemoveUnusedNodesPass()(model)
    sites: list[Site] = []
    for node in list(model.graph):
        if (node.domain, node.op_type) in READERS:
            sites.append(_from_operator(model.graph, node, _unused_name(node, sites)))
        elif node.domain == "" and node.op_type == "Softmax":
            sites += _from_softmax(model.graph, node, _unused_name(node, sites))
        elif node.domain == "" and node.op_type == "ArgMax":
            sites += _from_argmax(node, _unused_name(node, sites))
    RemoveUnusedNodesPass()(model)
    nodes = {node.name: node for node in model.graph}
    for site in sites:
        if site.node is not None:
            site.form = _described(nodes[site.node])
    return sites


def _described(node: ir.Node) -> str:
    """A canonical node in short: `Attention(heads 12, head size 64, mask bool, causal, softcap 30)`."""
    query, key, value, mask = (*node.inputs[:3], node.inputs[3] if len(node.inputs) > 3 else None)
    assert query is not None and query.shape and key is not None and key.shape and value is not None and value.shape
    heads, shared, size, value_size = query.shape[1], key.shape[1], query.shape[3], value.shape[3]
    said = [f"heads {heads}"]
    if shared != heads:
        said.append(f"key heads {shared}")
    said.append(f"head size {size}" if size == value_size else f"head sizes {size} and {value_size}")
    if mask is not None and mask.dtype is not None:
        said.append(f"mask {mask.dtype.numpy().name}")
    if node.attributes.get_int("is_causal", 0):
        said.append("causal")
    if softcap := node.attributes.get_float("softcap", 0.0):
        said.append(f"softcap {softcap:g}")
    if precise := node.attributes.get_int("softmax_precision", 0):
        said.append(f"softmax {ir.DataType(precise).numpy().name}")
    return f"Attention({', '.join(said)})"


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


def _from_softmax(graph: ir.Graph, node: ir.Node, name: str) -> list[Site]:
    """One site, or none, or one for each product that takes the weights."""
    source = node.inputs[0]
    assert source is not None
    try:
        layout = Layout.fresh(source)
    except LayoutError as error:
        return [Site(name, "Softmax", reason=str(error))]
    dim = layout.dims[node.attributes.get_int("axis", -1)]
    if not dim:
        return []  # a softmax over one element is no attention
    scores, weights = Scores(), Weights()
    reasons = []
    try:
        walk_to_product(Walk(source, layout, dim[0]), scores)
        weights.sink = scores.sink
    except (NotAttention, LayoutError) as error:
        reasons.append(str(error))
    every = [weights]
    try:
        every = walk_to_outputs(Walk(node.outputs[0], layout, dim[0]), weights)
    except (NotAttention, LayoutError) as error:
        reasons.append(str(error))
    if every[0].output is None and not both_computed(scores):
        return []  # a classifier's softmax, or another that weighs nothing
    sites = []
    for i, one in enumerate(every):
        written_as = "·".join([*reversed(scores.path), "Softmax", *one.path])
        site = Site(f"{name}, values {i + 1}" if i else name, written_as, reason="; ".join(reasons) or None)
        if not reasons:
            try:
                keys = Layout([(scores.sink.keys,) if scores.sink is not None else dim])
                own = replace(scores, masking=[replace(step) for step in scores.masking])
                _settle_zeroing(own, one)
                site.node = _emit(graph, site.name, own, one, keys, softmax_dtype=source.dtype)
            except (NotAttention, LayoutError) as error:
                site.reason = str(error)
        sites.append(site)
    return sites


NEGLIGIBLE = -9.9e3
"""A score below which a softmax gives a key no weight, where another key has an ordinary score. People write -1e4,
which is -9984 in bfloat16."""


def _settle_zeroing(scores: Scores, weights: Weights) -> None:
    """Weights zeroed where a mask had excluded the keys already: of that remains what it does to queries without keys.

    Raises:
        NotAttention: other weights are zeroed as well, so that the rest no longer sums to one.
    """
    fills = [step for step in scores.masking if isinstance(step, Fill)]
    for zeroing in weights.zeroing:
        condition, negated = without_not(zeroing.condition)
        for fill in fills:
            other, negated_too = without_not(fill.condition)
            alike = same_value(condition.value, other.value) and condition.layout.dims == other.layout.dims
            if not alike or (negated ^ zeroing.inverted) != (negated_too ^ fill.inverted):
                continue
            if len(scores.masking) == 1 and fill.number <= NEGLIGIBLE:
                weights.nan_rows_zeroed |= fill.number != -np.inf or not zeroing.nan_stays
                fill.number = -np.inf
                break
            if all(one.number == -np.inf for one in fills):  # a number put there later would be seen again
                if not zeroing.nan_stays:  # what another step silences stays NaN
                    weights.kept_with_keys.append(zeroing)
                break
        else:
            raise NotAttention("a mask is applied to the weights after the softmax, so they no longer sum to one")


def _emit(
    graph: ir.Graph, name: str, scores: Scores, weights: Weights, keys: Layout, softmax_dtype: ir.DataType | None
) -> str:
    """Put the Attention node and the views around it in front of the product with the values, and reroute its users."""
    assert scores.query and scores.key and weights.value and weights.product and weights.output
    query_factor, query = strip_factors(scores.query)
    key_factor, key = strip_factors(scores.key)
    value_factor, value = strip_factors(weights.value)
    (q_more, query), (k_more, key) = (_before_widening(operand, value.value.dtype) for operand in (query, key))
    final, output = walk_forward(weights.product.outputs[0], weights.output)
    dtype = query.value.dtype
    if (narrowed := _cast_back(final, dtype)) is not None:
        final, output = walk_forward(narrowed, output)
    if dtype is None or not dtype == key.value.dtype == value.value.dtype == final.dtype:
        raise NotAttention("query, key, values and output are not all of one type")

    # The last of them numbers the queries; those before it are batches whose keys are shared.
    own = [dim for dim in scores.own.dims if not set(dim) & set(value.layout.axes)] or [()]
    batch_layout = Layout(dim for dim in scores.rows.dims if dim != own[-1])
    if set(key.layout.axes) & set(batch_layout.axes) - set(value.layout.axes) - set(query.layout.axes):
        raise NotAttention("the keys differ by query, as in an additive score: no inner product of queries and keys")

    # No walk follows that could split an axis, so from here the axes are final.
    n_k, d_k, d_v = (tuple(part.axes) for part in (keys, scores.features, weights.value_features))
    n_q = own[-1]
    batch, heads = _batch_and_heads(batch_layout, query.layout, d_k)
    shared = _shared_heads(heads, key.layout, value.layout)
    scale = scores.scale * query_factor * key_factor * q_more * k_more
    node_name = f"{name}/Attention"
    if scores.sink is not None:
        _settle_fills_beside_sinks(scores)

    def build(op: Builder) -> ir.Value:
        sized = [(operand.value, operand.layout) for operand in (query, key, value)]
        q = rearrange(op, query.value, query.layout, Layout([batch, heads, n_q, d_k]), sized)
        k = rearrange(op, key.value, key.layout, Layout([batch, shared, n_k, d_k]), sized)
        v = rearrange(op, value.value, value.layout, Layout([batch, shared, n_k, d_v]), sized)
        rows, every = Layout([batch, heads, n_q, ()]), Layout([batch, heads, n_q, n_k])
        for by in scores.tensor_scales:
            q = like(op.op(by.op_type, [q, cast(op, _broadcastable(op, by.operand, rows, sized), dtype)]), q)
        if scale < 0:  # the operator takes the root of its scale
            q = like(op.Neg(q), q)
        mask = _mask(op, scores, every, dtype, sized)
        if scores.sink is not None:
            k, v = (_with_zeros(op, x, scores.sink) for x in (k, v))
            mask = _beside_sinks(op, mask, scores.sink, every, sized, dtype)
        attributes: dict[str, float | int] = {"scale": abs(scale)}
        if scores.softcap:
            attributes["softcap"] = scores.softcap
        if softmax_dtype is not None and softmax_dtype != dtype:
            attributes["softmax_precision"] = softmax_dtype.value
        metadata = {} if weights.nan_rows_zeroed else {SILENT_ROWS: "nan"}
        inputs = [q, k, v, *([mask] if mask is not None else [])]
        result = op.op("Attention", inputs, attributes, name=node_name, metadata_props=metadata)
        result_layout = Layout([batch, heads, n_q, d_v])
        typed(result, dtype, [size.dim() for size in result_layout.sizes()])
        if (factor := weights.scale * value_factor) != 1.0:
            result = like(op.Mul(result, constant(op, factor, dtype)), result)
        for by in weights.tensor_scales:
            result = like(
                op.op(by.op_type, [result, cast(op, _broadcastable(op, by.operand, rows, sized), dtype)]), result
            )
        zeros = constant(op, 0.0, dtype)
        for kept in weights.kept_rows:
            result = like(op.Where(_broadcastable(op, kept, rows, sized), result, zeros), result)
        for zeroing in weights.kept_with_keys:
            shown = _allowed(op, Fill(zeroing.condition, zeroing.inverted, 0.0), every, sized)
            result = like(op.Where(_any_key(op, shown), result, zeros), result)
        for zeroed in weights.zeroed_rows:
            result = like(op.Where(_broadcastable(op, zeroed, rows, sized), zeros, result), result)
        return rearrange(op, result, result_layout, output, sized)

    result = insert(graph, weights.product, build)
    replace_value(final, result)
    return node_name


def _before_widening(operand: Operand, dtype: ir.DataType | None) -> tuple[float, Operand]:
    """A query or key before it was cast from the values' 16-bit type: the products are summed in fp32 all the same."""
    node = operand.value.producer()
    if node is None or node.domain != "" or node.op_type != "Cast" or dtype is None or dtype.bitwidth != 16:
        return 1.0, operand
    source = node.inputs[0]
    if source is None or source.dtype != dtype or operand.value.dtype != FLOAT:
        return 1.0, operand
    return strip_factors(Operand(source, operand.layout))


def _cast_back(value: ir.Value, dtype: ir.DataType | None) -> ir.Value | None:
    """What `value` is cast to, where that is `dtype` and its only use."""
    users = [use.node for use in value.uses()]
    if value.dtype == dtype or value.is_graph_output() or len(users) != 1 or users[0].op_type != "Cast":
        return None
    return users[0].outputs[0] if users[0].outputs[0].dtype == dtype else None


def _with_zeros(op: Builder, x: ir.Value, sink: Sink) -> ir.Value:
    """Keys or values `(B, H, n_k, d)` with zeros for the sinks, which so score what the mask adds, and give nothing."""
    pads = [0] * 8
    pads[2 if sink.first else 6] = sink.count
    shape = [*dims_of(x)[:2], sink.joint.size.dim(), dims_of(x)[3]]
    assert x.dtype is not None
    return typed(op.Pad(x, constant(op, pads)), x.dtype, shape)


def _settle_fills_beside_sinks(scores: Scores) -> None:
    """With a sink no query is without keys, so a very low score is as good as none; another number is not added.

    Raises:
        NotAttention: a mask puts another finite number in the place of scores, or a bias could be as low.
    """
    fills = [step for step in scores.masking if isinstance(step, Fill)]
    for fill in fills:
        if fill.number != -np.inf and (fill.number > NEGLIGIBLE or len(fills) < len(scores.masking)):
            raise NotAttention("beside sinks a mask puts a finite number in the place of scores that are biased too")
        fill.number = -np.inf


def _beside_sinks(
    op: Builder, mask: ir.Value | None, sink: Sink, canonical: Layout, sized: list[Sized], dtype: ir.DataType
) -> ir.Value:
    """What is added to the scores of the keys, none or a mask, joined with the scores of the sinks."""
    keys = canonical.dims[3]
    column = sink.column
    if mask is None:
        mask = constant(op, np.zeros((1, 1, 1, 1)), dtype)
    if mask.dtype == BOOL:
        zero, low = constant(op, np.zeros((1, 1, 1, 1)), dtype), constant(op, -np.inf, dtype)
        mask = like(op.Where(mask, zero, low), mask, dtype)
    shared = [size != ONE or bool(set(dim) & set(column.layout.axes))
              for size, dim in zip(sizes_of(mask)[:3], canonical.dims[:3], strict=True)]  # fmt: skip
    outer = [dim if wide else () for dim, wide in zip(canonical.dims, shared, strict=False)]
    have = Layout(() if size == ONE else dim for size, dim in zip(sizes_of(mask), canonical.dims, strict=True))
    mask = rearrange(op, mask, have, Layout([*outer, keys]), sized)
    sinks = [axis for axis in column.layout.axes if axis not in canonical.axes]
    scores = cast(op, rearrange(op, column.value, column.layout, Layout([*outer, sinks]), sized), dtype)
    if sink.factor != 1.0:
        scores = like(op.Mul(scores, constant(op, sink.factor, dtype)), scores)
    parts = (scores, mask) if sink.first else (mask, scores)
    joined = op.Concat(*parts, axis=3)
    return typed(joined, dtype, [*dims_of(mask)[:3], sink.joint.size.dim()])


def _batch_and_heads(batch: Layout, query: Layout, features: Dims) -> tuple[list[Axis], list[Axis]]:
    """Which of the axes that attend apart are heads: those beside the features in the query; else its last such dim,
    where there is more than one."""
    apart = set(batch.axes)
    beside = [dim for dim in query.dims if set(dim) & set(features) and set(dim) & apart]
    dims = [dim for dim in query.dims if set(dim) & apart]
    chosen = beside or (dims[-1:] if len(dims) > 1 else [])
    heads = [axis for dim in chosen for axis in dim if axis in apart]
    return [axis for axis in batch.axes if axis not in heads], heads


def _shared_heads(heads: list[Axis], key: Layout, value: Layout) -> list[Axis]:
    """The heads that keys and values have of their own: all, or the first of them where the others share these."""
    present = [axis in key.axes or axis in value.axes for axis in heads]
    own = sum(present)
    return heads[:own] if all(present[:own]) else heads


def _mask(
    op: Builder, scores: Scores, canonical: Layout, dtype: ir.DataType, sized: Sequence[Sized]
) -> ir.Value | None:
    """One mask out of all: boolean where all put -inf, else added to the scores."""
    steps = list(reversed(scores.masking))  # the author's order
    fills = [step for step in steps if isinstance(step, Fill)]
    biases = [step for step in steps if isinstance(step, Bias)]
    if not biases and fills and all(step.number == -np.inf for step in fills):
        allowed = _allowed(op, fills[0], canonical, sized)
        for fill in fills[1:]:
            other = _allowed(op, fill, canonical, sized)
            allowed = broadcast_like(op.And(allowed, other), allowed, other)
        return allowed
    mask: ir.Value | None = None
    for step in steps:
        if isinstance(step, Bias):
            bias = _bias(op, step, canonical, dtype, sized)
            mask = bias if mask is None else broadcast_like(_step(op, "Add", [mask, bias], "bias"), mask, bias)
        else:
            allowed = _allowed(op, step, canonical, sized)
            before = constant(op, np.zeros((1, 1, 1, 1)), dtype) if mask is None else mask
            number = constant(op, representable(step.number, dtype), dtype)
            mask = broadcast_like(_step(op, "Where", [allowed, before, number], "fill"), before, allowed)
    return mask


def representable(number: float, dtype: ir.DataType) -> float:
    """A finite number stays finite in a type of smaller range: infinity would make NaN of a query without keys."""
    return float(np.clip(number, -largest(dtype), largest(dtype))) if np.isfinite(number) else number


def _step(op: Builder, op_type: str, inputs: list[ir.Value], kind: str) -> ir.Value:
    return op.op(op_type, inputs, metadata_props={MASK_STEP: kind})


def _allowed(op: Builder, step: Fill, canonical: Layout, sized: Sequence[Sized]) -> ir.Value:
    condition = cast(op, _broadcastable(op, step.condition, canonical, sized), BOOL)
    return like(op.Not(condition), condition) if step.inverted else condition


def _any_key(op: Builder, allowed: ir.Value) -> ir.Value:
    """`(…, 1)`, whether a query may attend to any key."""
    count = op.ReduceMax(op.Cast(allowed, to=INT32.value), constant(op, [-1]), keepdims=1)
    return typed(op.Cast(count, to=BOOL.value), BOOL, [*dims_of(allowed)[:3], 1])


def _bias(op: Builder, step: Bias, canonical: Layout, dtype: ir.DataType, sized: Sequence[Sized]) -> ir.Value:
    bias = cast(op, _broadcastable(op, step.operand, canonical, sized), dtype)
    if step.factor != 1.0:
        bias = like(op.Mul(bias, constant(op, step.factor, dtype)), bias)
    for by in step.scales:
        scale = cast(op, _broadcastable(op, by.operand, canonical, sized), dtype)
        bias = broadcast_like(op.op(by.op_type, [bias, scale]), bias, scale)
    if step.floor != -np.inf:
        bias = like(op.Max(bias, constant(op, representable(step.floor, dtype), dtype)), bias)
    return bias


def largest(dtype: ir.DataType) -> float:
    """The largest finite number of a floating-point type."""
    return float(ml_dtypes.finfo(dtype.numpy()).max)  # type: ignore[no-untyped-call]


def _broadcastable(op: Builder, operand: Operand, layout: Layout, sized: Sequence[Sized]) -> ir.Value:
    """`operand` in the dims of `layout`, 1 where it does not vary. A dim in which it varies in part is filled
    up, by sizes that are read off `sized`."""
    present = set(operand.layout.axes)
    target = Layout(dim if present & set(dim) else () for dim in layout.dims)
    return rearrange(op, operand.value, operand.layout, target, sized)


# --- from other anchors -----------------------------------------------------------------------------------------------


def _from_operator(graph: ir.Graph, node: ir.Node, name: str) -> Site:
    """An attention operator that the exporter or another author wrote."""
    site = Site(name, f"{node.domain}::{node.op_type}" if node.domain else node.op_type)
    canonical = f"{name}/Attention"
    try:
        if is_standard(node):
            node.attributes["scale"] = ir.AttrFloat32("scale", scale_of(node, node.inputs[0]))
            node.name = canonical
        else:
            standard(graph, node, canonical)
        site.node = canonical
    except (NotAttention, LayoutError) as error:
        site.reason = str(error)
    return site


def _from_argmax(node: ir.Node, name: str) -> list[Site]:
    """Hard alignment: the best key alone. Reported, since whoever wrote it may expect it fused."""
    source = node.inputs[0]
    assert source is not None
    scores = Scores()
    try:
        layout = Layout.fresh(source)
        dim = layout.dims[node.attributes.get_int("axis", 0)]
        walk_to_product(Walk(source, layout, dim[0]), scores)
    except (NotAttention, LayoutError, IndexError):
        return []
    if not both_computed(scores):
        return []
    reason = "the alignment is hard (ArgMax): fused attention kernels compute a softmax"
    return [Site(name, "·".join([*reversed(scores.path), "ArgMax"]), reason=reason)]
