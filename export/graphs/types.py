"""Types of a whole graph: every float tensor of some types made another's, in place."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx_ir.passes import PassResult

from attnforge.arrays import Array
from attnforge.export.graphs.build import like

FLOAT, DOUBLE = ir.DataType.FLOAT, ir.DataType.DOUBLE
LOW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
FLOATS = (*LOW, FLOAT, DOUBLE)

_FLOAT32_INPUTS = {("", "Resize"): (1, 2), ("", "Upsample"): (1,), ("com.microsoft", "Resize"): (1, 2)}
"""Inputs that an operator takes in fp32 whatever the type of its data: regions and scales."""

_INNER = ("softmax_precision", "stash_type")
"""Types that an operator computes in, within: never made narrower."""

_LARGE = 2**16
"""Bytes."""


def widen(model: ir.Model) -> PassResult:
    """Let `model` compute in fp32 what it computes in fp16 or bf16, in place. Inputs and outputs keep their types.

    The weights' values stay what they were, rounded to 16 bits; only what is computed from them is rounded less.
    """
    graph = model.graph
    outputs = [(i, v.dtype) for i, v in enumerate(graph.outputs) if v.dtype in LOW]
    inputs = [v for v in graph.inputs if v.dtype in LOW]
    if not (inputs or outputs or any(v.dtype in LOW for v in graph.initializers.values())):
        return PassResult(model, False)
    types = {v: v.dtype for v in inputs}
    retype(model, LOW, FLOAT)
    for source in inputs:
        source.type = ir.TensorType(types[source])  # type: ignore[arg-type]
        users = list(source.uses())
        cast = ir.node("Cast", [source], {"to": FLOAT.value}, name=f"{source.name}/widened")
        cast.outputs[0].name = f"{source.name}/fp32"
        like(cast.outputs[0], source, FLOAT)
        for node, index in users:
            node.replace_input_with(index, cast.outputs[0])
        graph.insert_before(next(iter(graph)), cast)
    for i, dtype in outputs:
        result = graph.outputs[i]
        if result.dtype != FLOAT:
            continue  # an input that is passed through
        assert dtype is not None
        cast = ir.node("Cast", [result], {"to": dtype.value}, name=f"{result.name}/narrowed")
        cast.outputs[0].name, result.name = result.name, f"{result.name}/fp32"
        like(cast.outputs[0], result, dtype)
        graph.outputs[i] = cast.outputs[0]
        graph.append(cast)
    return PassResult(model, True)


def retype(
    model: ir.Model, sources: Collection[ir.DataType], target: ir.DataType, *, least_stays_least: bool = True
) -> None:
    """Make every tensor of one of the types `sources` one of type `target`, in place: inputs, outputs, weights,
    constants, and the types that casts and operators name in attributes. What an operator takes in fp32 whatever its
    data's type stays fp32, and so does what is made for it alone.

    Numbers beyond the range of `target` become its largest: the least number of a type stands for minus infinity where
    a mask is added, but infinity itself would make NaN of a query without keys.

    Args:
        model: is changed.
        sources: the types to replace.
        target: by which.
        least_stays_least: whether a lone number that is the least of its type becomes the least of a wider one, for it
            stands for minus infinity, and must swallow whatever it is added to there too.
    """
    kept = kept_in_fp32(model.graph)
    to = _To(frozenset(sources), target, least_stays_least)
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        if value not in kept:
            _retype_value(value, to)
    for node in model.graph:
        _retype_node(node, to, fp32=any(output in kept for output in node.outputs))
        for output in node.outputs:
            if output not in kept:
                _retype_value(output, to)


@dataclass(frozen=True)
class _To:
    sources: frozenset[ir.DataType]
    target: ir.DataType
    least_stays_least: bool = True


def round_results(model: ir.Model, unrounded: Collection[ir.Value] = ()) -> None:
    """Let every 16-bit operator of `model` compute in float32 and its result be rounded to its type, in place. Inputs
    and outputs become float32, outputs with the numbers that are stored.

    This is how ONNX Runtime itself runs 16-bit operators that it has no kernels for; for bfloat16 it has to be written
    out.

    Args:
        model: is changed.
        unrounded: results that stay as they are computed.
    """
    graph = model.graph
    low = {
        output: output.dtype
        for node in graph
        for output in node.outputs
        if output.dtype in LOW and output not in unrounded
    }
    retype(model, LOW, FLOAT, least_stays_least=False)
    stored: dict[ir.Value, ir.Value] = {}
    for output, dtype in low.items():
        users, node = list(output.uses()), output.producer()
        assert node is not None and dtype is not None
        rounded = ir.node("Cast", [output], {"to": dtype.value}, name=f"{output.name}/rounded")
        again = ir.node("Cast", [rounded.outputs[0]], {"to": FLOAT.value}, name=f"{output.name}/again")
        for cast, target in ((rounded, dtype), (again, FLOAT)):
            cast.outputs[0].name, cast.outputs[0].type = f"{cast.name}:0", ir.TensorType(target)
        for user, index in users:
            user.replace_input_with(index, again.outputs[0])
        graph.insert_after(node, [rounded, again])
        stored[output] = again.outputs[0]
    graph.outputs[:] = [stored.get(value, value) for value in graph.outputs]


def kept_in_fp32(graph: ir.Graph) -> set[ir.Value]:
    """What operators take in fp32, and what is computed to become a whole number (a size, a position), which 16 bits
    would change; with all that it is made of, where that is neither an input nor used for anything else."""
    kept: set[ir.Value] = set()
    for node in graph:
        seeds = [node.inputs[i] for i in _FLOAT32_INPUTS.get((node.domain, node.op_type), ()) if i < len(node.inputs)]
        if node.op_type == "Cast" and node.domain == "" and ir.DataType(node.attributes.get_int("to", 1)).is_integer():
            seeds.append(node.inputs[0])
        cone = _made_of([v for v in seeds if v is not None and v.dtype == FLOAT])
        users = {use.node for value in cone for use in value.uses()} - {node}
        inside = all(output in cone for user in users for output in user.outputs)
        if inside and not any(v.is_graph_input() or v.is_graph_output() for v in cone):
            kept |= cone
    return kept


def _made_of(values: list[ir.Value]) -> set[ir.Value]:
    cone: set[ir.Value] = set()
    while values:
        value = values.pop()
        if value.dtype == FLOAT and value not in cone:
            cone.add(value)
            if (node := value.producer()) is not None:
                values += [v for v in node.inputs if v is not None]
    return cone


def _retype_value(value: ir.Value, to: _To) -> None:
    if value.dtype in to.sources:
        value.type = ir.TensorType(to.target)
    if value.const_value is not None and value.const_value.dtype in to.sources:
        value.const_value = _retyped(value.const_value, to)


def _retype_node(node: ir.Node, to: _To, fp32: bool) -> None:
    if fp32:
        return
    target, numbers = to.target, {t.value for t in to.sources}
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype in to.sources:
            node.attributes[name] = ir.AttrTensor(name, _retyped(attribute.value, to))
        elif name in ("to", "dtype", *_INNER) and attribute.type == ir.AttributeType.INT:
            wider = target.bitwidth > ir.DataType(attribute.value).bitwidth
            if attribute.value in numbers and (wider or name not in _INNER):
                node.attributes[name] = ir.AttrInt64(name, target.value)
    # These give fp32 by default, and no attribute says so.
    if node.domain == "" and FLOAT in to.sources:
        if node.op_type == "Constant" and (value := _number(node)) is not None:
            node.attributes.clear()
            node.attributes["value"] = ir.AttrTensor("value", _retyped(ir.tensor(value), to))
        elif node.op_type == "ConstantOfShape" and "value" not in node.attributes:
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.zeros(1, target.numpy()), dtype=target))
        elif node.op_type in ("RandomNormal", "RandomUniform") and "dtype" not in node.attributes:
            node.attributes["dtype"] = ir.AttrInt64("dtype", target.value)


def _number(node: ir.Node) -> Array | None:
    if "value_float" in node.attributes:
        return np.asarray(node.attributes["value_float"].as_float(), np.float32)
    if "value_floats" in node.attributes:
        return np.asarray(node.attributes["value_floats"].as_floats(), np.float32)
    return None


def retyped(tensor: ir.TensorProtocol, target: ir.DataType) -> ir.TensorProtocol:
    """`tensor` in another type; a large one is made when it is asked for, so that weights are not held twice."""
    return _retyped(tensor, _To(frozenset(), target))


def _retyped(tensor: ir.TensorProtocol, to: _To) -> ir.TensorProtocol:
    if tensor.nbytes < _LARGE:
        return _numbers_retyped(tensor, to)
    return ir.LazyTensor(
        lambda: _numbers_retyped(tensor, to), dtype=to.target, shape=ir.Shape(tensor.shape.numpy()), name=tensor.name
    )


def _numbers_retyped(tensor: ir.TensorProtocol, to: _To) -> ir.TensorProtocol:
    numbers, target = tensor.numpy(), to.target
    least = float(ml_dtypes.finfo(target.numpy()).min)  # type: ignore[no-untyped-call]
    own = float(ml_dtypes.finfo(numbers.dtype).min)  # type: ignore[no-untyped-call]
    if own > least:
        wider = numbers.astype(target.numpy())
        if to.least_stays_least and numbers.size == 1 and float(numbers.reshape(())) == own:
            wider = np.full_like(wider, least)
        return ir.tensor(wider, dtype=target, name=tensor.name)
    with np.errstate(over="ignore"):
        narrow = numbers.astype(target.numpy())
        held = np.clip(numbers, least, -least).astype(target.numpy())
    return ir.tensor(np.where(np.isfinite(numbers), held, narrow), dtype=target, name=tensor.name)
