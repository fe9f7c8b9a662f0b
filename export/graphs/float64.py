"""A graph in float64: ONNX Runtime runs the operators that it has double kernels for, and the others are decomposed
into such operators.

ONNX Runtime's CPU provider has double kernels for most operators. For the others it either has none, or uses the
operator's own function body, which may round a constant or a mean to fp32 on the way (Attention and GroupNormalization:
1e-7, FastGelu: 2e-7, HardSwish: 4e-8). These operators are decomposed here, for every opset from :data:`FIRST_OPSET`
on. An operator without a double path is refused by name; nothing is silently computed in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, ShapeInferencePass

from attnforge.export.graphs.attention import READERS, NotAttention, products, read
from attnforge.export.graphs.build import Builder, constant, insert, numbered
from attnforge.export.graphs.nodes import inputs_of, is_op, is_used, optional_input
from attnforge.export.graphs.sizes import LayoutError
from attnforge.export.graphs.types import DOUBLE, FLOATS, retype

FIRST_OPSET = 13
"""The first opset in which the operators of the decompositions have the form that is used here."""

FUNCTIONS = (
    *("Celu", "Elu", "HardSigmoid", "LeakyRelu", "MeanVarianceNormalization", "Mish", "PRelu"),
    *("RotaryEmbedding", "Selu", "Softplus", "Softsign", "ThresholdedRelu"),
)
"""Operators without a double kernel whose ONNX function body is exact in double."""

ROTARY_OPSET = 23
"""The first opset with RotaryEmbedding."""

_NORMALIZATIONS = ("GroupNormalization", "LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")


class NoDoublePath(Exception):
    """The graph has an operator that cannot be computed in double here; the message has its name."""


def to_double(model: ir.Model, *, least_stays_least: bool = True) -> None:
    """Make every floating-point tensor of `model` double, in place, and decompose the operators that ONNX Runtime does
    not compute in double.

    Args:
        model: changed in place.
        least_stays_least: see :func:`~attnforge.export.graphs.types.retype`.

    Raises:
        NoDoublePath: an operator in a form that is not decomposed here.
    """
    graph, narrow = model.graph, [dtype for dtype in FLOATS if dtype != DOUBLE]
    retype(model, narrow, DOUBLE, least_stays_least=least_stays_least)
    attention_as_products(model)
    if any(is_op(node, "RotaryEmbedding") for node in graph):
        graph.opset_imports[""] = max(graph.opset_imports.get("", 0), ROTARY_OPSET)
    if inline_functions(model):
        retype(model, narrow, DOUBLE)  # of constants in their bodies
    for node in model.graph:
        if is_op(node, *_NORMALIZATIONS):
            node.attributes["stash_type"] = ir.AttrInt64("stash_type", DOUBLE.value)
    _decompose(model.graph, _DECOMPOSITIONS)
    RemoveUnusedNodesPass()(model)


def attention_as_products(model: ir.Model) -> None:
    """Decompose the attention operators of a graph, in place: ONNX Runtime's own do not take every mask.

    Raises:
        NoDoublePath: one of them is in a form that is not decomposed.
    """
    read = [node for node in model.graph if (node.domain, node.op_type) in READERS]
    if any(value.shape is None for node in read for value in inputs_of(node)):  # a lowering leaves some out
        ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(model)
    _decompose(model.graph, dict.fromkeys(READERS, _attention))


Write = Callable[..., list[ir.Value]]
"""Writes what an operator computes in double: `write(op, node)` returns its outputs."""


def _decompose(graph: ir.Graph, decompositions: Mapping[tuple[str, str], Write]) -> None:
    """Decompose every operator of a graph that `decompositions` has.

    Raises:
        NoDoublePath: an operator in a form that is not decomposed, or a further output of it is used.
    """
    for node in [node for node in graph if (node.domain, node.op_type) in decompositions]:
        write = partial(decompositions[node.domain, node.op_type], node=node)
        try:  # under a stem of its own: a lowering used the node's name
            results = insert(graph, node, write, stem=f"{node.name or node.op_type}/in double")
        except NoDoublePath as error:
            raise NoDoublePath(f"{node.op_type} ({node.name}): {error}") from error
        for old, new in zip(node.outputs, results, strict=False):
            new.type, new.shape = old.type, old.shape
            if old.is_graph_output():
                old.name, new.name = f"{old.name}/replaced", old.name
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        if any(map(is_used, node.outputs)):
            raise NoDoublePath(f"{node.op_type} ({node.name}): output {len(results)} is used")


def inline_functions(model: ir.Model) -> bool:
    """Replace the operators :data:`FUNCTIONS` by their ONNX function bodies, in place, and return whether there were
    any. Weights are not copied."""
    found = [node for node in model.graph if node.domain == "" and node.op_type in FUNCTIONS]
    for node in found:  # onnx's inliner takes an attribute that a node omits for an empty one
        schema = onnx.defs.get_schema(node.op_type, model.opset_imports[""])
        for name, attribute in schema.attributes.items():
            if name not in node.attributes and attribute.default_value.name:
                node.attributes.add(ir.serde.deserialize_attribute(attribute.default_value))
    if found:
        functions = [("", name) for name in {node.op_type for node in found}]
        inline = onnx.inliner.inline_selected_functions
        through_onnx(model, lambda proto: inline(proto, functions, inline_schema_functions=True))
        inline_functions(model)  # Mish computes a Softplus
    return bool(found)


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
    hermite = np.polynomial.hermite.hermvander(points, order - 1).T  # derivatives of erf are these times a Gaussian
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


def _one_hot(op: Builder, node: ir.Node) -> list[ir.Value]:
    indices, depth, values = (_input(node, i) for i in range(3))
    if values.dtype != DOUBLE:
        return [op.op("OneHot", [indices, depth, values], node.attributes)]
    whole = [op.Cast(x, to=ir.DataType.INT64.value) for x in (indices, depth)]
    hot = op.Cast(op.op("OneHot", [*whole, constant(op, [0, 1])], node.attributes), to=ir.DataType.BOOL.value)
    return [op.Where(hot, op.Gather(values, constant(op, 1)), op.Gather(values, constant(op, 0)))]


# --- convolution ------------------------------------------------------------------------------------------------------


def _conv(op: Builder, node: ir.Node) -> list[ir.Value]:
    """Conv as a product of the kernel with the concatenated pixels under each of its positions (im2col)."""
    return [_convolved(op, node, _input(node, 0), _input(node, 1), _kernel(node), _pads(node))]


def _transposed_conv(op: Builder, node: ir.Node) -> list[ir.Value]:
    """ConvTranspose as the Conv of its pixels, with zeros between them, with the reversed kernel."""
    x, weight, (in_channels, out_channels, *kernel) = _input(node, 0), _input(node, 1), _kernel(node)
    if node.attributes.get_ints("output_shape"):
        raise NoDoublePath("it sets output_shape")
    rank, groups, pads = len(kernel), node.attributes.get_int("group", 1) or 1, _pads(node)
    strides, dilations, further = (
        node.attributes.get_ints(name) or [usual] * rank
        for name, usual in (("strides", 1), ("dilations", 1), ("output_padding", 0))
    )
    for axis, stride in enumerate(strides, 2):
        if stride > 1:
            zeros = np.zeros((2, rank + 3), np.int64)
            zeros[1, axis + 1] = stride - 1
            apart = op.Pad(op.Unsqueeze(x, constant(op, [axis + 1])), constant(op, zeros.reshape(-1)))
            rest = op.Slice(op.Shape(x), constant(op, [axis + 1]), constant(op, [rank + 2]))
            x = op.Reshape(apart, op.Concat(constant(op, [*[0] * axis, -1]), rest, axis=0))
    reach = [d * (k - 1) for k, d in zip(kernel, dilations, strict=True)]
    before = [r - pads[i] for i, r in enumerate(reach)]
    after = [r - pads[rank + i] + further[i] - (strides[i] - 1) for i, r in enumerate(reach)]
    last, past, back = (constant(op, [number] * rank) for number in (-1, np.iinfo(np.int64).min, -1))
    turned = op.Slice(weight, last, past, constant(op, list(range(2, rank + 2))), back)
    parts = op.Reshape(turned, constant(op, [groups, in_channels // groups, out_channels, *kernel]))
    parts = op.Transpose(parts, perm=[0, 2, 1, *range(3, rank + 3)])
    sizes = [groups * out_channels, in_channels // groups, *kernel]
    return [_convolved(op, node, x, op.Reshape(parts, constant(op, sizes)), sizes, before + after)]


def _kernel(node: ir.Node) -> list[int]:
    """The sizes of a convolution's weight."""
    shape = _input(node, 1).shape
    if shape is None or not shape.is_static():
        raise NoDoublePath("the size of its kernel is not static")
    return [*shape.numpy()]


def _pads(node: ir.Node) -> list[int]:
    """The padding of a convolution or a pool, before all axes and after them."""
    if node.attributes.get_string("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise NoDoublePath("it sets auto_pad")
    rank = len(node.attributes.get_ints("kernel_shape") or _kernel(node)[2:])
    return list(node.attributes.get_ints("pads") or [0] * 2 * rank)


def _under(op: Builder, node: ir.Node, x: ir.Value, kernel: Sequence[int], pads: Sequence[int]) -> list[ir.Value]:
    """The pixels under each position of a kernel, which moves by one over the pixels of a ConvTranspose."""
    rank = len(kernel)
    strides = None if node.op_type == "ConvTranspose" else node.attributes.get_ints("strides")
    dilations = node.attributes.get_ints("dilations") or [1] * rank
    if any(pads):
        x = op.Pad(x, constant(op, [0, 0, *pads[:rank], 0, 0, *pads[rank:]]))
    axes, steps = constant(op, list(range(2, rank + 2))), constant(op, list(strides or [1] * rank))
    under = []
    for position in np.ndindex(*kernel):
        starts = [p * d for p, d in zip(position, dilations, strict=True)]
        left = [(k - 1 - p) * d for p, k, d in zip(position, kernel, dilations, strict=True)]
        ends = [-n if n else np.iinfo(np.int64).max for n in left]
        under.append(op.Slice(x, constant(op, starts), constant(op, ends), axes, steps))
    return under


def _convolved(
    op: Builder, node: ir.Node, x: ir.Value, weight: ir.Value, sizes: Sequence[int], pads: Sequence[int]
) -> ir.Value:
    """The product of a kernel of these sizes with the pixels under each of its positions, and the node's bias."""
    (out_channels, in_channels, *kernel), bias = sizes, optional_input(node, 2)
    rank, groups = len(kernel), node.attributes.get_int("group", 1) or 1
    under = _under(op, node, x, kernel, pads)
    shape = op.Shape(under[0])
    flat = [op.Reshape(pixels, constant(op, [0, groups, in_channels, 1, -1])) for pixels in under]
    columns = op.Reshape(op.Concat(*flat, axis=3), constant(op, [0, groups, in_channels * math.prod(kernel), -1]))
    rows = op.Reshape(weight, constant(op, [groups, out_channels // groups, -1]))
    size = op.Slice(shape, constant(op, [2]), constant(op, [rank + 2]))
    batch = op.Slice(shape, constant(op, [0]), constant(op, [1]))
    result = op.Reshape(op.MatMul(rows, columns), op.Concat(batch, constant(op, [out_channels]), size, axis=0))
    return result if bias is None else op.Add(result, op.Reshape(bias, constant(op, [1, out_channels, *[1] * rank])))


def _average_pool(op: Builder, node: ir.Node) -> list[ir.Value]:
    """The mean of the pixels under a kernel, of all or of those that are no padding."""
    x, kernel, pads = _input(node, 0), node.attributes.get_ints("kernel_shape") or [], _pads(node)
    if node.attributes.get_int("ceil_mode", 0):
        raise NoDoublePath("it rounds sizes up")
    count = _number(op, math.prod(kernel))
    if any(pads) and not node.attributes.get_int("count_include_pad", 0):
        ones = op.ConstantOfShape(op.Shape(x), value=ir.tensor(np.ones(1)))
        count = op.Sum(*_under(op, node, ones, kernel, pads))
    return [op.Div(op.Sum(*_under(op, node, x, kernel, pads)), count)]


def _global_average(op: Builder, node: ir.Node) -> list[ir.Value]:
    x = _input(node, 0)
    if x.shape is None:
        raise NoDoublePath("the rank of its input is not known")
    flat = op.Reshape(x, constant(op, [0, 0, -1]))
    return [op.Reshape(_mean_of_rows(op, flat), constant(op, [0, 0, *[1] * (len(x.shape) - 2)]))]


def _mean_of_rows(op: Builder, flat: ir.Value) -> ir.Value:
    """The mean over the last of three axes."""
    size = op.Cast(op.Gather(op.Shape(flat), constant(op, 2)), to=DOUBLE.value)
    return op.Div(op.ReduceSum(flat, constant(op, [2]), keepdims=1), size)


# --- normalization ----------------------------------------------------------------------------------------------------


def _normal(op: Builder, op_type: str, operands: list[ir.Value | None], epsilon: float) -> ir.Value:
    inputs = [operand for operand in operands if operand is not None]
    return op.op(op_type, inputs, {"epsilon": epsilon, "axis": -1, "stash_type": DOUBLE.value})


def _instance_norm(op: Builder, node: ir.Node) -> list[ir.Value]:
    x, (scale, bias) = _input(node, 0), (op.Unsqueeze(_input(node, i), constant(op, [1])) for i in (1, 2))
    flat = op.Reshape(x, constant(op, [0, 0, -1]))
    centred = op.Sub(flat, _mean_of_rows(op, flat))
    variance = _mean_of_rows(op, op.Mul(centred, centred))
    deviation = op.Sqrt(op.Add(variance, _number(op, node.attributes.get_float("epsilon", 1e-5) or 0.0)))
    return [op.Reshape(op.Add(op.Mul(op.Div(centred, deviation), scale), bias), op.Shape(x))]


def _skip_layer_norm(op: Builder, node: ir.Node) -> list[ir.Value]:
    """`LayerNorm(x + skip + bias)`; the simplified operator only divides by the root mean square."""
    simplified = node.op_type == "SkipSimplifiedLayerNormalization"
    total = op.Add(_input(node, 0), _input(node, 1))
    if (bias := optional_input(node, 3 if simplified else 4)) is not None:
        total = op.Add(total, bias)
    epsilon = node.attributes.get_float("epsilon", 1e-5) or 0.0
    if any(output.uses() for output in node.outputs[1:3]):
        raise NoDoublePath("its mean or deviation is used")
    op_type = node.op_type.removeprefix("Skip")
    shift = None if simplified else optional_input(node, 3)
    normal = _normal(op, op_type, [total, _input(node, 2), shift], epsilon)
    return [normal, normal, normal, total]


def _embed_layer_norm(op: Builder, node: ir.Node) -> list[ir.Value]:
    words = op.Gather(_input(node, 2), _input(node, 0))
    positions, segments, mask = optional_input(node, 8), optional_input(node, 1), optional_input(node, 7)
    if positions is None:
        positions = numbered(op, _input(node, 0), 1)
    total = op.Add(words, op.Gather(_input(node, 3), positions))
    if segments is not None:
        total = op.Add(total, op.Gather(_input(node, 4), segments))
    epsilon = node.attributes.get_float("epsilon", 1e-12) or 0.0
    normal = _normal(op, "LayerNormalization", [total, _input(node, 5), _input(node, 6)], epsilon)
    if mask is None:
        return [normal]
    return [normal, op.ReduceSum(mask, constant(op, [1]), keepdims=0), total]


# --- attention --------------------------------------------------------------------------------------------------------


def _attention(op: Builder, node: ir.Node) -> list[ir.Value]:
    """An operator of :data:`~attnforge.export.graphs.attention.READERS`.

    Opsets differ in whether ai.onnx Attention caps scores before or after it masks them.
    """
    try:
        reading = read(op, node)
        if node.domain == "" and reading.softcap and (reading.masks or reading.is_causal or reading.is_windowed):
            raise NoDoublePath("it has a soft cap with a mask, a causal flag or a window")
        _, output = products(op, reading)
        return [output, *reading.present]
    except (NotAttention, LayoutError) as error:
        raise NoDoublePath(str(error)) from error


def _input(node: ir.Node, i: int) -> ir.Value:
    value = optional_input(node, i)
    if value is None:
        raise NoDoublePath(f"it has no input {i}")
    return value


def _recurrent(op: Builder, node: ir.Node) -> list[ir.Value]:
    raise NoDoublePath("ONNX Runtime computes it in fp32 only")


_DECOMPOSITIONS: dict[tuple[str, str], Write] = {
    ("", "AveragePool"): _average_pool,
    ("", "Conv"): _conv,
    ("", "ConvTranspose"): _transposed_conv,
    ("", "Erf"): lambda op, node: [erf(op, _input(node, 0))],
    **dict.fromkeys((("", "Gelu"), *(("com.microsoft", name) for name in ("BiasGelu", "FastGelu", "Gelu"))), _gelu),
    **dict.fromkeys((("", "GRU"), ("", "LSTM")), _recurrent),
    ("", "GlobalAveragePool"): _global_average,
    ("", "HardSwish"): _hard_swish,
    ("", "InstanceNormalization"): _instance_norm,
    ("", "Mean"): lambda op, node: [op.Div(op.Sum(*inputs_of(node)), _number(op, len(inputs_of(node))))],
    ("", "OneHot"): _one_hot,
    ("com.microsoft", "EmbedLayerNormalization"): _embed_layer_norm,
    ("com.microsoft", "QuickGelu"): _quick_gelu,
    ("com.microsoft", "SkipLayerNormalization"): _skip_layer_norm,
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): _skip_layer_norm,
}
