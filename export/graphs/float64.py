"""A graph in float64: ONNX Runtime runs the operators that it has double kernels for, and the others are decomposed
into such operators.

ONNX Runtime's CPU provider has double kernels for most operators. For the others it either has none, or uses the
operator's own function body, which may round a constant or a mean to fp32 on the way (Attention and GroupNormalization:
1e-7, FastGelu: 2e-7, HardSwish: 4e-8). These operators are decomposed here, for every opset from :data:`FIRST_OPSET`
on. An operator without a double path is refused by name; nothing is silently computed in fp32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
from onnx_ir.passes import PassResult
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attnforge.export.graphs.build import Builder, constant, insert
from attnforge.export.graphs.nodes import inputs_of, optional_input, rank_of
from attnforge.export.graphs.rotary import turn_before_attention
from attnforge.export.graphs.types import DOUBLE, FLOATS, retype

FIRST_OPSET = 13
"""The first opset in which the operators of the decompositions have the form that is used here."""

FUNCTIONS = (
    *("Celu", "Elu", "HardSigmoid", "LeakyRelu", "MeanVarianceNormalization", "Mish", "PRelu"),
    *("RotaryEmbedding", "Selu", "Softplus", "Softsign", "ThresholdedRelu"),
)
"""Operators without a double kernel whose ONNX function body is exact in double."""

_NORMALIZATIONS = ("GroupNormalization", "LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")


SILENT_ROWS = "attnforge.silent_rows"
"""Metadata of an Attention node: what a fully masked row gets. `nan`, as from a bare softmax; without this entry zeros,
as the operator specifies."""


class NoDoublePath(Exception):
    """The graph has an operator that cannot be computed in double here; the message has its name."""


def to_double(model: ir.Model, *, least_stays_least: bool = True) -> PassResult:
    """Make every floating-point tensor of `model` double, in place, and decompose the operators that ONNX Runtime does
    not compute in double.

    Args:
        model: changed in place.
        least_stays_least: see :func:`~attnforge.export.graphs.types.retype`.

    Raises:
        NoDoublePath: an operator in a form that is not decomposed here.
    """
    narrow = [dtype for dtype in FLOATS if dtype != DOUBLE]
    modified = turn_before_attention(model).modified
    modified |= retype(model, narrow, DOUBLE, least_stays_least=least_stays_least).modified
    modified |= inline_functions(model).modified
    for node in list(model.graph):
        if node.domain == "" and node.op_type in _NORMALIZATIONS:
            node.attributes["stash_type"] = ir.AttrInt64("stash_type", DOUBLE.value)
        write = _DECOMPOSITIONS.get((node.domain, node.op_type))
        if write is None:
            continue
        modified = True
        try:
            results = _written(model.graph, node, write)
        except NoDoublePath as error:
            raise NoDoublePath(f"{node.op_type} ({node.name}): {error}") from error
        for old, new in zip(node.outputs, results, strict=False):
            new.type, new.shape = old.type, old.shape
            if old.is_graph_output():
                old.name, new.name = f"{old.name}/replaced", old.name
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        if any(output.uses() for output in node.outputs):
            raise NoDoublePath(f"{node.op_type} ({node.name}): output {len(results)} is used")
    RemoveUnusedNodesPass()(model)
    return PassResult(model, modified)


Write = Callable[[Builder, ir.Node], list[ir.Value]]


def _written(graph: ir.Graph, node: ir.Node, write: Write) -> list[ir.Value]:
    results: list[ir.Value] = []

    def build(op: Builder) -> ir.Value:
        results.extend(write(op, node))
        return results[0]

    insert(graph, node, build, stem=f"{node.name or node.op_type}/in double")  # a lowering used the node's own name
    return results


def inline_functions(model: ir.Model) -> PassResult:
    """Replace the operators :data:`FUNCTIONS` by their ONNX function bodies, in place. Weights are not copied."""
    names = {node.op_type for node in model.graph if node.domain == "" and node.op_type in FUNCTIONS}
    if names:
        functions = [("", name) for name in names]
        inline = onnx.inliner.inline_selected_functions
        through_onnx(model, lambda proto: inline(proto, functions, inline_schema_functions=True))
    return PassResult(model, bool(names))


def through_onnx(model: ir.Model, change: Callable[[onnx.ModelProto], onnx.ModelProto]) -> None:
    """Apply a function on an onnx proto to `model`, in place. Large weights are left out, as protobuf is limited to
    2 GiB.

    Args:
        model: changed in place.
        change: maps a model, whose large weights are inputs, to another model with the same inputs.
    """
    kept = {}
    light = model.clone()
    for name, value in list(light.graph.initializers.items()):
        if value.const_value is not None and value.const_value.nbytes > 2**16:
            kept[name] = value.const_value
            del light.graph.initializers[name]
            light.graph.inputs.append(value)
            value.const_value = None
            value.type, value.shape = ir.TensorType(kept[name].dtype), ir.Shape(kept[name].shape.numpy())
    changed = ir.from_proto(change(ir.to_proto(light)))
    for value in list(changed.graph.inputs):
        if (tensor := kept.get(value.name or "")) is not None:
            changed.graph.inputs.remove(value)
            value.const_value = tensor
            changed.graph.register_initializer(value)
    model.graph = changed.graph


# --- activations ------------------------------------------------------------------------------------------------------


def erf(op: Builder, x: ir.Value) -> ir.Value:
    """erf by its Taylor series about the nearest point of a grid with step 1/64; beyond 6 it is 1 in double."""
    steps, reach, order = 64, 6, 8
    points = np.arange(-reach * steps, reach * steps + 1) / steps
    # The derivatives of erf are Hermite polynomials times a Gaussian: H(k+1) = 2x·H(k) − 2k·H(k−1).
    hermite = [np.ones_like(points), 2 * points]
    for k in range(1, order - 1):
        hermite.append(2 * points * hermite[k] - 2 * k * hermite[k - 1])
    gaussian = 2 / math.sqrt(math.pi) * np.exp(-(points**2))
    series = [np.array([math.erf(p) for p in points])]
    series += [(-1) ** k * h * gaussian / math.factorial(k + 1) for k, h in enumerate(hermite)]
    is_nan = op.IsNaN(x)
    inside = op.Clip(op.Where(is_nan, _number(op, 0), x), _number(op, -reach), _number(op, reach))
    nearest = op.Round(op.Mul(inside, _number(op, steps)))
    offset = op.Sub(inside, op.Div(nearest, _number(op, steps)))
    index = op.Add(op.Cast(nearest, to=ir.DataType.INT64.value), constant(op, reach * steps))
    result = op.Gather(constant(op, series[-1], DOUBLE), index)
    for coefficients in reversed(series[:-1]):
        result = op.Add(op.Mul(result, offset), op.Gather(constant(op, coefficients, DOUBLE), index))
    return op.Where(is_nan, x, result)


def _number(op: Builder, number: float) -> ir.Value:
    return constant(op, number, DOUBLE)


def _erf(op: Builder, node: ir.Node) -> list[ir.Value]:
    return [erf(op, _input(node, 0))]


def _gelu(op: Builder, node: ir.Node) -> list[ir.Value]:
    """Gelu, FastGelu and BiasGelu, with an optional bias on the input."""
    x = _input(node, 0)
    if (bias := optional_input(node, 1)) is not None:
        x = op.Add(x, bias)
    if node.op_type == "FastGelu" or node.attributes.get_string("approximate", "none") == "tanh":
        cubic = op.Add(x, op.Mul(_number(op, 0.044715), op.Mul(x, op.Mul(x, x))))
        bent = op.Tanh(op.Mul(cubic, _number(op, math.sqrt(2 / math.pi))))
    else:
        bent = erf(op, op.Mul(x, _number(op, math.sqrt(0.5))))
    return [op.Mul(op.Mul(x, _number(op, 0.5)), op.Add(bent, _number(op, 1)))]


def _quick_gelu(op: Builder, node: ir.Node) -> list[ir.Value]:
    x = _input(node, 0)
    return [op.Mul(x, op.Sigmoid(op.Mul(x, _number(op, node.attributes.get_float("alpha", 1.702) or 0.0))))]


def _hard_swish(op: Builder, node: ir.Node) -> list[ir.Value]:
    x = _input(node, 0)
    gate = op.Add(op.Div(x, _number(op, 6)), _number(op, 0.5))
    return [op.Mul(x, op.Clip(gate, _number(op, 0), _number(op, 1)))]


def _mean(op: Builder, node: ir.Node) -> list[ir.Value]:
    inputs = inputs_of(node)
    return [op.Div(op.Sum(*inputs), _number(op, len(inputs)))]


# --- convolution ------------------------------------------------------------------------------------------------------


def _conv(op: Builder, node: ir.Node) -> list[ir.Value]:
    """Conv as a product of the kernel with the concatenated pixels under each of its positions (im2col)."""
    x, weight, bias = _input(node, 0), _input(node, 1), optional_input(node, 2)
    if weight.shape is None or not weight.shape.is_static():
        raise NoDoublePath("the size of its kernel is not static")
    out_channels, in_channels, *kernel = weight.shape.numpy()
    rank, groups = len(kernel), node.attributes.get_int("group", 1) or 1
    if node.attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise NoDoublePath("it sets auto_pad")
    strides = node.attributes.get_ints("strides") or [1] * rank
    dilations = node.attributes.get_ints("dilations") or [1] * rank
    pads = list(node.attributes.get_ints("pads") or [0] * 2 * rank)
    if any(pads):
        x = op.Pad(x, constant(op, [0, 0, *pads[:rank], 0, 0, *pads[rank:]]))
    axes, steps = constant(op, list(range(2, rank + 2))), constant(op, list(strides))
    under = []
    for position in itertools.product(*(range(k) for k in kernel)):
        starts = [p * d for p, d in zip(position, dilations, strict=True)]
        left = [(k - 1 - p) * d for p, k, d in zip(position, kernel, dilations, strict=True)]
        ends = [-n if n else np.iinfo(np.int64).max for n in left]
        under.append(op.Slice(x, constant(op, starts), constant(op, ends), axes, steps))
    shape = op.Shape(under[0])
    flat = [op.Reshape(pixels, constant(op, [0, groups, in_channels, 1, -1])) for pixels in under]
    columns = op.Reshape(op.Concat(*flat, axis=3), constant(op, [0, groups, in_channels * math.prod(kernel), -1]))
    rows = op.Reshape(weight, constant(op, [groups, out_channels // groups, -1]))
    size = op.Slice(shape, constant(op, [2]), constant(op, [rank + 2]))
    batch = op.Slice(shape, constant(op, [0]), constant(op, [1]))
    result = op.Reshape(op.MatMul(rows, columns), op.Concat(batch, constant(op, [out_channels]), size, axis=0))
    if bias is not None:
        result = op.Add(result, op.Reshape(bias, constant(op, [1, out_channels, *[1] * rank])))
    return [result]


def _global_average(op: Builder, node: ir.Node) -> list[ir.Value]:
    x = _input(node, 0)
    if x.shape is None:
        raise NoDoublePath("the rank of its input is not known")
    flat = op.Reshape(x, constant(op, [0, 0, -1]))
    size = op.Cast(op.Gather(op.Shape(flat), constant(op, 2)), to=DOUBLE.value)
    total = op.ReduceSum(flat, constant(op, [2]), keepdims=1)
    return [op.Reshape(op.Div(total, size), constant(op, [0, 0, *[1] * (len(x.shape) - 2)]))]


# --- normalization ----------------------------------------------------------------------------------------------------


def _layer_norm(op: Builder, x: ir.Value, scale: ir.Value, shift: ir.Value | None, epsilon: float) -> ir.Value:
    inputs = [x, scale, *([shift] if shift is not None else [])]
    return op.op("LayerNormalization", inputs, {"epsilon": epsilon, "axis": -1, "stash_type": DOUBLE.value})


def _skip_layer_norm(op: Builder, node: ir.Node) -> list[ir.Value]:
    """`LayerNorm(x + skip + bias)`; the simplified operator only divides by the root mean square."""
    simplified = node.op_type == "SkipSimplifiedLayerNormalization"
    total = op.Add(_input(node, 0), _input(node, 1))
    if (bias := optional_input(node, 3 if simplified else 4)) is not None:
        total = op.Add(total, bias)
    epsilon = node.attributes.get_float("epsilon", 1e-5) or 0.0
    if any(output.uses() for output in node.outputs[1:3]):
        raise NoDoublePath("its mean or deviation is used")
    if simplified:
        normal = op.SimplifiedLayerNormalization(
            total, _input(node, 2), epsilon=epsilon, axis=-1, stash_type=DOUBLE.value
        )
    else:
        normal = _layer_norm(op, total, _input(node, 2), optional_input(node, 3), epsilon)
    return [normal, normal, normal, total]


def _embed_layer_norm(op: Builder, node: ir.Node) -> list[ir.Value]:
    words = op.Gather(_input(node, 2), _input(node, 0))
    positions, segments, mask = optional_input(node, 8), optional_input(node, 1), optional_input(node, 7)
    if positions is None:
        positions = _numbered(op, _input(node, 0), 1)
    total = op.Add(words, op.Gather(_input(node, 3), positions))
    if segments is not None:
        total = op.Add(total, op.Gather(_input(node, 4), segments))
    normal = _layer_norm(op, total, _input(node, 5), _input(node, 6), node.attributes.get_float("epsilon", 1e-12) or 0)
    if mask is None:
        return [normal]
    return [normal, op.ReduceSum(mask, constant(op, [1]), keepdims=0), total]


# --- attention --------------------------------------------------------------------------------------------------------


def _attention(op: Builder, node: ir.Node) -> list[ir.Value]:
    """ai.onnx Attention with heads packed or not, grouped heads, a mask, a causal flag, windows or a past."""
    query, key, value = (_input(node, i) for i in range(3))
    heads, shared = node.attributes.get_int("q_num_heads"), node.attributes.get_int("kv_num_heads")
    packed = heads is not None and shared is not None and (query.shape is None or len(query.shape) == 3)
    if packed:
        assert heads is not None and shared is not None
        query, key, value = (_apart(op, v, h) for v, h in ((query, heads), (key, shared), (value, shared)))
    else:
        heads, shared = (int(v.shape[1]) if v.shape is not None else 0 for v in (query, key))  # type: ignore[arg-type]
    mask, past_key, past_value = (optional_input(node, i) for i in (3, 4, 5))
    causal, softcap = node.attributes.get_int("is_causal", 0), node.attributes.get_float("softcap", 0.0)
    left, right = (node.attributes.get_int(f"{side}_window_size", -1) for side in ("left", "right"))
    near = _in_window(op, query, key, left, 0 if causal else right)
    if (past_key is not None and near) or (softcap and (mask is not None or near)) or optional_input(node, 6):
        raise NoDoublePath("it has a causal flag or a window with a past, a soft cap with a mask, or lengths")
    if past_key is not None and past_value is not None:
        key, value = op.Concat(past_key, key, axis=2), op.Concat(past_value, value, axis=2)
    present = [key, value]
    assert heads is not None and shared is not None
    if shared:
        key, value = _repeated(op, (key, value), heads, shared)
    scores = _scores(op, query, key, node.attributes.get_float("scale"))
    if softcap:
        scores = op.Mul(op.Tanh(op.Div(scores, _number(op, softcap))), _number(op, softcap))
    if mask is not None:
        boolean = mask.dtype == ir.DataType.BOOL
        scores = op.Where(mask, scores, _number(op, -np.inf)) if boolean else op.Add(scores, mask)
    for condition in near:
        scores = op.Where(condition, scores, _number(op, -np.inf))
    result = op.MatMul(op.Softmax(scores, axis=-1), value)
    if (mask is not None or left >= 0) and node.metadata_props.get(SILENT_ROWS) != "nan":  # zeros for fully masked rows
        highest = op.ReduceMax(scores, constant(op, [-1]), keepdims=1)
        result = op.Where(op.Equal(highest, _number(op, -np.inf)), _number(op, 0), result)
    return [_joined(op, result) if packed else result, *present]


def _multi_head_attention(op: Builder, node: ir.Node) -> list[ir.Value]:
    """com.microsoft MultiHeadAttention on separate query, key and value."""
    query, key, value, bias = _input(node, 0), optional_input(node, 1), optional_input(node, 2), optional_input(node, 3)
    if key is None or value is None or any(optional_input(node, i) for i in (6, 7, 8, 9)):
        raise NoDoublePath("it has packed operands or a past")
    heads = node.attributes.get_int("num_heads") or 1
    four = key.shape is not None and len(key.shape) == 4
    if bias is not None:
        if four or query.shape is None or not isinstance(query.shape[-1], int):
            raise NoDoublePath("it has a bias on keys on four dims")
        width = query.shape[-1]
        ends = [0, width, 2 * width, np.iinfo(np.int64).max]
        parts = [op.Slice(bias, constant(op, [a]), constant(op, [b])) for a, b in itertools.pairwise(ends)]
        query, key, value = (op.Add(v, part) for v, part in zip((query, key, value), parts, strict=True))
    query = _apart(op, query, heads)
    if not four:
        key, value = _apart(op, key, heads), _apart(op, value, heads)
    return [_microsoft(op, node, query, key, value, optional_input(node, 4), optional_input(node, 5))]


def _group_query_attention(op: Builder, node: ir.Node) -> list[ir.Value]:
    """com.microsoft GroupQueryAttention on separate query, key and value: causal, optionally within a window, over each
    sample's first tokens, or after those of a past in a buffer of fixed size. A bias has as many keys as the longest
    sample."""
    attributes, lengths = node.attributes, _input(node, 5)
    special = attributes.get_int("do_rotary", 0) or attributes.get_int("smooth_softmax", 0)
    past = [value for i in (3, 4) if (value := optional_input(node, i)) is not None]
    bias = optional_input(node, 10)
    others = [i for i in range(7, len(node.inputs)) if optional_input(node, i) not in (None, bias)]
    if others or special or len(past) == 1 or (bias is not None and not past):
        raise NoDoublePath("it has a rotary embedding, a sink, a bias without a past, or a past of keys alone")
    heads, shared = attributes.get_int("num_heads") or 1, attributes.get_int("kv_num_heads") or 1
    query, *present = (_apart(op, _input(node, i), count) for i, count in enumerate((heads, shared, shared)))
    last = op.Cast(lengths, to=ir.DataType.INT64.value)  # the index of each sample's last key
    count = op.Shape(query, start=2, end=3)
    first = op.Sub(op.Add(last, constant(op, [1])), count) if past else op.Mul(last, constant(op, [0]))
    if past:
        present = [op.op("TensorScatter", [x, new, first], {"axis": 2}) for x, new in zip(past, present, strict=True)]
    key, value = _repeated(op, present, heads, shared)
    if bias is not None:
        end = op.Shape(bias, start=3, end=4)
        key, value = (op.Slice(x, constant(op, [0]), end, constant(op, [2])) for x in (key, value))
    scores = _scores(op, query, key, attributes.get_float("scale", 0.0) or None)
    if softcap := attributes.get_float("softcap", 0.0):
        scores = op.Mul(op.Tanh(op.Div(scores, _number(op, softcap))), _number(op, softcap))
    if bias is not None:
        scores = op.Add(scores, bias)
    last, first = (op.Reshape(x, constant(op, [-1, 1, 1, 1])) for x in (last, first))
    columns = _numbered(op, key, 2)
    rows = op.Add(first, op.Reshape(_numbered(op, query, 2), constant(op, [1, 1, -1, 1])))  # each query's own key
    seen = op.And(op.LessOrEqual(columns, rows), op.LessOrEqual(columns, last))
    if (window := attributes.get_int("local_window_size", -1) or -1) > 0:
        seen = op.And(seen, op.Greater(columns, op.Sub(rows, constant(op, window))))
    result = op.MatMul(op.Softmax(op.Where(seen, scores, _number(op, -np.inf)), axis=-1), value)
    return [_joined(op, result), *present]


def _repeated(op: Builder, operands: Sequence[ir.Value], heads: int, shared: int) -> list[ir.Value]:
    """Keys and values `(B, shared, n, d)` as `(B, heads, n, d)`."""
    if heads == shared:
        return list(operands)
    index = constant(op, np.repeat(np.arange(shared), heads // shared))
    return [op.Gather(x, index, axis=1) for x in operands]


def _packed_attention(op: Builder, node: ir.Node) -> list[ir.Value]:
    """com.microsoft Attention, which includes the projections of query, key and value."""
    if any(optional_input(node, i) for i in (4, 6)) or node.attributes.get_int("do_rotary") == 1:
        raise NoDoublePath("it has a past or a rotary embedding")
    weight, bias, heads = _input(node, 1), optional_input(node, 2), node.attributes.get_int("num_heads") or 1
    if weight.shape is None or not isinstance(weight.shape[1], int):
        raise NoDoublePath("the size of its weights is not known")
    widths = list(node.attributes.get_ints("qkv_hidden_sizes") or [weight.shape[1] // 3] * 3)
    product = op.MatMul(_input(node, 0), weight)
    if bias is not None:
        product = op.Add(product, bias)
    ends = [0, *itertools.accumulate(widths)]
    parts = [
        op.Slice(product, constant(op, [a]), constant(op, [b]), constant(op, [2])) for a, b in itertools.pairwise(ends)
    ]
    query, key, value = (_apart(op, part, heads) for part in parts)
    return [_microsoft(op, node, query, key, value, optional_input(node, 3), optional_input(node, 5))]


def _microsoft(
    op: Builder,
    node: ir.Node,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    mask: ir.Value | None,
    bias: ir.Value | None,
) -> ir.Value:
    """The common part of com.microsoft's two operators, which add a number to the scores of masked keys."""
    scores = _scores(op, query, key, node.attributes.get_float("scale") or None)
    if bias is not None:
        scores = op.Add(scores, bias)
    number = _number(op, node.attributes.get_float("mask_filter_value", -10000.0) or 0.0)
    if mask is not None:
        scores = op.Add(scores, op.Where(_kept_keys(op, mask, key), _number(op, 0), number))
    if node.attributes.get_int("unidirectional", 0):
        (not_later,) = _in_window(op, query, key, -1, 0)
        scores = op.Where(not_later, scores, _number(op, -np.inf))
    return _joined(op, op.MatMul(op.Softmax(scores, axis=-1), value))


def _kept_keys(op: Builder, mask: ir.Value, key: ir.Value) -> ir.Value:
    """`mask`, which gives the keys that count or their number, as a condition on the scores."""
    rank = rank_of(mask)
    if rank == 1:
        count = op.Reshape(op.Cast(mask, to=ir.DataType.INT64.value), constant(op, [-1, 1, 1, 1]))
        return op.Less(_numbered(op, key, 2), count)
    if rank not in (2, 3):
        raise NoDoublePath(f"its mask has {rank} dims; 1, 2 or 3 are supported")
    kept = op.Greater(op.Cast(mask, to=ir.DataType.INT64.value), constant(op, 0))
    return op.Unsqueeze(kept, constant(op, [1, 2] if rank == 2 else [1]))


def _scores(op: Builder, query: ir.Value, key: ir.Value, scale: float | None) -> ir.Value:
    if scale is None:
        size = op.Cast(op.Gather(op.Shape(query), constant(op, 3)), to=DOUBLE.value)
        query = op.Div(query, op.Sqrt(size))
    else:
        query = op.Mul(query, _number(op, scale))
    return op.MatMul(query, op.Transpose(key, perm=[0, 1, 3, 2]))


def _in_window(op: Builder, query: ir.Value, key: ir.Value, left: int, right: int) -> list[ir.Value]:
    """Conditions on the scores: a key is at most `left` before the query and `right` after it; -1 for no limit."""
    ahead = op.Sub(_numbered(op, key, 2), op.Unsqueeze(_numbered(op, query, 2), constant(op, [1])))
    conditions = [op.GreaterOrEqual(ahead, constant(op, -left))] if left >= 0 else []
    return conditions + ([op.LessOrEqual(ahead, constant(op, right))] if right >= 0 else [])


def _numbered(op: Builder, x: ir.Value, axis: int) -> ir.Value:
    """`0, 1, …`, as long as axis `axis` of `x`."""
    return op.Range(constant(op, 0), op.Gather(op.Shape(x), constant(op, axis)), constant(op, 1))


def _apart(op: Builder, x: ir.Value, heads: int) -> ir.Value:
    """`(B, n, H·d)` as `(B, H, n, d)`."""
    return op.Transpose(op.Reshape(x, constant(op, [0, 0, heads, -1])), perm=[0, 2, 1, 3])


def _joined(op: Builder, x: ir.Value) -> ir.Value:
    """`(B, H, n, d)` as `(B, n, H·d)`."""
    return op.Reshape(op.Transpose(x, perm=[0, 2, 1, 3]), constant(op, [0, 0, -1]))


def _input(node: ir.Node, i: int) -> ir.Value:
    value = optional_input(node, i)
    if value is None:
        raise NoDoublePath(f"it has no input {i}")
    return value


def _recurrent(op: Builder, node: ir.Node) -> list[ir.Value]:
    raise NoDoublePath("ONNX Runtime computes it in fp32 only")


_DECOMPOSITIONS: dict[tuple[str, str], Write] = {
    ("", "Attention"): _attention,
    ("", "Conv"): _conv,
    ("", "Erf"): _erf,
    ("", "Gelu"): _gelu,
    ("", "GRU"): _recurrent,
    ("", "GlobalAveragePool"): _global_average,
    ("", "HardSwish"): _hard_swish,
    ("", "LSTM"): _recurrent,
    ("", "Mean"): _mean,
    ("com.microsoft", "Attention"): _packed_attention,
    ("com.microsoft", "BiasGelu"): _gelu,
    ("com.microsoft", "EmbedLayerNormalization"): _embed_layer_norm,
    ("com.microsoft", "FastGelu"): _gelu,
    ("com.microsoft", "Gelu"): _gelu,
    ("com.microsoft", "GroupQueryAttention"): _group_query_attention,
    ("com.microsoft", "MultiHeadAttention"): _multi_head_attention,
    ("com.microsoft", "QuickGelu"): _quick_gelu,
    ("com.microsoft", "SkipLayerNormalization"): _skip_layer_norm,
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): _skip_layer_norm,
}
