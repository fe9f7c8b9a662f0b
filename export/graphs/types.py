"""Passes that change the type of every floating-point tensor of a graph."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import numpy as np
import onnx_ir as ir

from attnforge.export.graphs.build import Builder, cast, constant, dims_of, insert, read_instead, replace_value, typed
from attnforge.export.graphs.nodes import REPEATS, constant_of, input_of, is_op, is_used, upstream

FLOAT, DOUBLE = ir.DataType.FLOAT, ir.DataType.DOUBLE
LOW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
FLOATS = (*LOW, FLOAT, DOUBLE)

_FLOAT32_INPUTS = {("", "Resize"): (1, 2), ("", "Upsample"): (1,), ("com.microsoft", "Resize"): (1, 2)}
"""Inputs, by position, that an operator takes in fp32 whatever the type of its data: regions and scales."""

_INNER = ("softmax_precision", "stash_type")
"""Attributes that name the type in which an operator computes internally; they are never narrowed."""

LARGE = 2**16
"""Bytes from which a tensor is converted lazily."""


def widen(model: ir.Model, wide: Collection[ir.Value] = ()) -> None:
    """Make `model` compute in fp32 what it computes in fp16 or bf16, in place. Inputs and outputs keep their types.

    The weights keep their values, rounded to 16 bits; only what is computed from them is rounded less.

    Args:
        model: changed in place.
        wide: inputs and outputs that become fp32 too.
    """
    graph = model.graph
    outputs = [(v, dtype) for v in graph.outputs if (dtype := v.dtype) in LOW and v not in wide]
    inputs = [(v, dtype) for v in graph.inputs if (dtype := v.dtype) in LOW and v not in wide]
    if not (inputs or outputs or any(v.dtype in LOW for v in graph.initializers.values())):
        return
    retype(model, LOW, FLOAT)
    for value, dtype in inputs:
        cast_input(graph, value, outside=dtype, inside=FLOAT)
    for value, dtype in outputs:
        if value.dtype == FLOAT:  # and not an input that is passed through
            cast_output(graph, value, dtype)


def in_fp32(model: ir.Model, operators: Collection[str]) -> None:
    """Compute nodes of these operators, where their first input is bf16, in fp32 between casts, in place."""
    found = [node for node in model.graph if is_op(node, *operators) and input_of(node).dtype == ir.DataType.BFLOAT16]
    for node in found:
        for old, new in insert(model.graph, node, partial(_in_fp32, node=node)):
            replace_value(old, new)


def _in_fp32(op: Builder, node: ir.Node) -> list[tuple[ir.Value, ir.Value]]:
    """The outputs of an operator that are used, each with the same computed in fp32."""

    def wide(value: ir.Value | None) -> ir.Value | None:
        if value is None or value.dtype != ir.DataType.BFLOAT16:
            return value
        numbers = constant_of(value)  # TensorRT takes no kernels that are computed
        return cast(op, value, FLOAT) if numbers is None else constant(op, numbers.astype(np.float32), FLOAT)

    results = op.op_multi_out(
        node.op_type, [wide(value) for value in node.inputs], node.attributes, num_outputs=len(node.outputs),
        name=f"{node.name}/in fp32",
    )  # fmt: skip
    used = [(old, result) for old, result in zip(node.outputs, results, strict=True) if is_used(old)]
    return [(old, cast(op, typed(result, FLOAT, dims_of(old)), ir.DataType.BFLOAT16)) for old, result in used]


def cast_input(graph: ir.Graph, value: ir.Value, outside: ir.DataType, inside: ir.DataType) -> None:
    """Change the type of an input to `outside`, and cast it to `inside` for its users."""
    value.type = ir.TensorType(outside)
    result = ir.val(f"{value.name}/{inside.name.lower()}", inside, value.shape)
    read_instead(value, result)
    name = f"{value.name}/to_{inside.name.lower()}"
    graph.insert_before(graph[0], ir.node("Cast", [value], {"to": inside.value}, outputs=[result], name=name))


def cast_output(graph: ir.Graph, value: ir.Value, outside: ir.DataType) -> None:
    """Cast a computed output to the type `outside`, under its name."""
    assert value.dtype is not None
    result, name = ir.val(value.name, outside, value.shape), f"{value.name}/to_{outside.name.lower()}"
    value.name = f"{value.name}/{value.dtype.name.lower()}"
    graph.outputs[:] = [result if output is value else output for output in graph.outputs]
    graph.append(ir.node("Cast", [value], {"to": outside.value}, outputs=[result], name=name))


def retype(
    model: ir.Model, sources: Collection[ir.DataType], target: ir.DataType, *, least_stays_least: bool = True
) -> None:
    """Change the type of every tensor of the types `sources` to `target`, in place: inputs, outputs, weights,
    constants, and the types that casts and operators name in attributes. Tensors that an operator takes in fp32
    whatever the type of its data stay fp32, and so do tensors that are computed for it alone.

    Numbers beyond the range of `target` are clipped to it: in an additive mask, the least number of a type stands for
    minus infinity, but infinity itself would turn a fully masked row into NaN.

    Args:
        model: changed in place.
        sources: the types to replace.
        target: the type that replaces them.
        least_stays_least: whether a scalar that is the least number of its type becomes the least number of a wider
            type: it stands for minus infinity, and must absorb whatever it is added to in that type too. One that
            only fills outputs keeps its value, because they may be cast back.
    """
    graph, kept = model.graph, kept_in_fp32(model.graph)
    results = (output for node in graph for output in node.outputs)
    values = [v for v in (*graph.inputs, *graph.initializers.values(), *results) if v not in kept]
    if least_stays_least and any(v.dtype == ir.DataType.FLOAT16 for v in values):
        _deepen_masks(graph)
    shown = set(upstream(graph.outputs, lambda v: not is_op(v.producer(), *REPEATS, "Where")))

    def convert(tensor: ir.TensorProtocol, value: ir.Value) -> ir.TensorProtocol:
        fills = value in shown and all(shown.issuperset(node.outputs) for node in value.consumers())
        return retyped(tensor, target, least_stays_least and not fills)

    for node in graph:
        if kept.isdisjoint(node.outputs):
            _retype_node(node, sources, target, partial(convert, value=node.outputs[0]))
    for value in values:
        if value.dtype in sources:
            value.type = ir.TensorType(target)
        if value.const_value is not None and value.const_value.dtype in sources:
            value.const_value = convert(value.const_value, value)


def round_results(model: ir.Model, unrounded: Collection[ir.Value] = ()) -> None:
    """Make every 16-bit operator of `model` compute in float32 and round its result to its type, in place. Inputs and
    outputs become float32, and outputs have the rounded numbers.

    ONNX Runtime itself runs 16-bit operators that it has no kernels for in this way; for bfloat16 the casts have to be
    explicit.

    Args:
        model: changed in place.
        unrounded: results that are not rounded.
    """
    graph = model.graph
    results = [output for node in graph for output in node.outputs if output not in unrounded]
    low = {output: dtype for output in results if (dtype := output.dtype) in LOW}
    retype(model, LOW, FLOAT, least_stays_least=False)
    stored: dict[ir.Value, ir.Value] = {}
    for output, dtype in low.items():
        node = output.producer()
        assert node is not None
        rounded, again = ir.val(f"{output.name}/rounded:0", dtype), ir.val(f"{output.name}/again:0", FLOAT)
        read_instead(output, again)
        casts = [
            ir.node("Cast", [output], {"to": dtype.value}, outputs=[rounded], name=f"{output.name}/rounded"),
            ir.node("Cast", [rounded], {"to": FLOAT.value}, outputs=[again], name=f"{output.name}/again"),
        ]
        graph.insert_after(node, casts)
        stored[output] = again
    graph.outputs[:] = [stored.get(value, value) for value in graph.outputs]


def kept_in_fp32(graph: ir.Graph) -> set[ir.Value]:
    """Tensors that operators take in fp32, and tensors that are cast to integers (sizes, positions), which 16 bits
    would change; with all tensors that they are computed from, unless these are inputs or used for anything else."""
    seeds = {(node, i) for node in graph for i in _FLOAT32_INPUTS.get((node.domain, node.op_type), ())}
    seeds |= {(n, 0) for n in graph if is_op(n, "Cast") and ir.DataType(n.attributes.get_int("to", 1)).is_integer()}
    kept: set[ir.Value] = set()
    for node, i in seeds:
        seed = node.inputs[i] if i < len(node.inputs) else None
        reached = upstream([seed] if seed is not None else [], lambda v: v.dtype != FLOAT)
        cone = {v for v in reached if v.dtype == FLOAT}
        users = {use.node for value in cone for use in value.uses() if (use.node, use.idx) not in seeds}
        inside = all(output in cone for user in users for output in user.outputs)
        if inside and not any(v.is_graph_input() or v.is_graph_output() for v in cone):
            kept |= cone
    return kept


def _retype_node(
    node: ir.Node,
    sources: Collection[ir.DataType],
    target: ir.DataType,
    convert: Callable[[ir.TensorProtocol], ir.TensorProtocol],
) -> None:
    numbers = {source.value for source in sources}
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype in sources:
            node.attributes[name] = ir.AttrTensor(name, convert(attribute.value))
        elif name in ("to", "dtype", *_INNER) and attribute.type == ir.AttributeType.INT:
            wider = target.bitwidth > ir.DataType(attribute.value).bitwidth
            if attribute.value in numbers and (wider or name not in _INNER):
                node.attributes[name] = ir.AttrInt64(name, target.value)
    # These operators return fp32 by default, without an attribute for it.
    if node.domain == "" and FLOAT in sources:
        if node.op_type == "Constant" and not {"value_float", "value_floats"}.isdisjoint(node.attributes):
            value = constant_of(node.outputs[0])
            assert value is not None
            node.attributes.clear()
            node.attributes["value"] = ir.AttrTensor("value", convert(ir.tensor(value)))
        elif node.op_type == "ConstantOfShape" and "value" not in node.attributes:
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.zeros(1, target.numpy()), dtype=target))
        elif node.op_type in ("RandomNormal", "RandomUniform") and "dtype" not in node.attributes:
            node.attributes["dtype"] = ir.AttrInt64("dtype", target.value)


def _deepen_masks(graph: ir.Graph) -> None:
    """Make the least number of fp16 that of fp32 where it multiplies or fills a mask in fp32: the mask is rounded to
    fp16 before it is added to scores, and must absorb them in fp32 too."""
    for value in graph.initializers.values():
        numbers = constant_of(value) if value.dtype == FLOAT else None
        is_least = numbers is not None and numbers.size == 1 and float(numbers.reshape(())) == -65504
        if is_least and all(is_op(node, "Mul", "Where") for node in value.consumers()):
            value.const_value = ir.tensor(np.full_like(numbers, np.finfo(np.float32).min), name=value.name)


def retyped(tensor: ir.TensorProtocol, target: ir.DataType, least_stays_least: bool = True) -> ir.TensorProtocol:
    """Convert `tensor` to another type, as in :func:`retype`. A large tensor is converted lazily, so that memory does
    not hold it twice."""
    if tensor.nbytes < LARGE:
        return _numbers_retyped(tensor, target, least_stays_least)
    return ir.LazyTensor(
        lambda: _numbers_retyped(tensor, target, least_stays_least),
        dtype=target, shape=ir.Shape(tensor.shape.numpy()), name=tensor.name,
    )  # fmt: skip


def _numbers_retyped(tensor: ir.TensorProtocol, target: ir.DataType, least_stays_least: bool) -> ir.TensorProtocol:
    numbers = tensor.numpy()
    least, source_least = float(target.min), float(tensor.dtype.min)
    if source_least > least:
        wider = numbers.astype(target.numpy())
        if least_stays_least and numbers.size == 1 and float(numbers.reshape(())) == source_least:
            wider = np.full_like(wider, least)
        return ir.tensor(wider, dtype=target, name=tensor.name)
    with np.errstate(over="ignore"):
        narrow = numbers.astype(target.numpy())
        clipped = np.clip(numbers, least, -least).astype(target.numpy())
    return ir.tensor(np.where(np.isfinite(numbers), clipped, narrow), dtype=target, name=tensor.name)
