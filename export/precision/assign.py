"""Two precisions in one graph: 16 bits for most operators, fp32 for some, and casts where they meet.

What only moves numbers has the type of what it moves. Inputs and outputs of the graph stay fp32, so that whoever calls
the model need not know. The types are the graph's own, as strongly typed builds want them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import onnx_ir as ir

from attnforge.export.attention.layout import VIEWS
from attnforge.export.graphs.build import like
from attnforge.export.graphs.types import FLOAT, kept_in_fp32, retyped
from attnforge.runtime.inputs import size_of

MOVERS = VIEWS | {"Slice", "Split", "Expand", "Tile", "Pad", "Gather", "GatherElements", "Concat"}
"""Operators whose result holds numbers of their first input, or of several of one type, as they are."""

ALWAYS_FP32 = ("Range", "ConstantOfShape", "EyeLike", "Resize", "RandomNormal", "RandomUniform")
"""Operators that know no 16-bit types, or whose type is an attribute of their own."""

PRODUCTS = ("MatMul", "Gemm", "Attention", "Conv", "Einsum")

RATE_16, RATE_32, BANDWIDTH = 312e12, 19.5e12, 1.6e12
"""Operations a second of 16-bit and fp32 products, and bytes a second: an A100's (NVIDIA A100 datasheet). Only their
proportions matter here."""


def operators(model: ir.Model) -> list[ir.Node]:
    """The nodes of an fp32 graph whose precision is a choice: they compute floating-point numbers."""
    fixed = kept_in_fp32(model.graph)
    return [
        node
        for node in model.graph
        if not _moves(node)
        and node.op_type not in ("Constant", "Shape", *ALWAYS_FP32)
        and any(v.dtype == FLOAT and v not in fixed for v in node.outputs)
    ]


def _moves(node: ir.Node) -> bool:
    """Whether a node only moves what was computed."""
    if node.domain != "" or node.op_type not in MOVERS:
        return False
    moved = [v for v in node.inputs if v is not None and v.dtype == FLOAT]
    return all(v.producer() is not None for v in moved) and bool(moved)


def assign(model: ir.Model, low: ir.DataType, high: Collection[str]) -> None:
    """Give every operator of an fp32 graph the type `low`, but for those named in `high`, in place.

    Args:
        model: canonical, all fp32.
        low: fp16 or bf16.
        high: names of nodes that stay fp32.
    """
    graph, fixed = model.graph, kept_in_fp32(model.graph)
    chosen = {node: FLOAT if node.name in high else low for node in operators(model)}
    types: dict[ir.Value, ir.DataType] = {value: FLOAT for value in graph.inputs if value.dtype == FLOAT}
    casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
    weights = {value for value in graph.initializers.values() if value.dtype == FLOAT}
    outputs = list(graph.outputs)
    for node in list(graph):
        if any(output in fixed for output in node.outputs):
            continue
        dtype = chosen.get(node)
        floats = [(i, v) for i, v in enumerate(node.inputs) if v is not None and v.dtype == FLOAT and v not in fixed]
        if dtype is None:  # it moves numbers, is a constant, or computes none
            moved = [types[v] for _, v in floats if v in types]
            dtype = (moved or [low])[0] if node.op_type not in ("Constant", *ALWAYS_FP32) else FLOAT
            if node.op_type == "Concat" and FLOAT in moved:
                dtype = FLOAT
        for i, value in floats:
            if value in weights:
                node.replace_input_with(i, _weight(graph, value, dtype, casts))
            elif types.get(value, FLOAT) != dtype:
                node.replace_input_with(i, _cast(graph, value, dtype, casts))
        for output in node.outputs:
            if output.dtype == FLOAT:
                types[output] = dtype
        if dtype != FLOAT and "to" in node.attributes and node.attributes["to"].as_int() == FLOAT.value:
            node.attributes["to"] = ir.AttrInt64("to", dtype.value)
    for value, dtype in types.items():
        value.type = ir.TensorType(dtype)
    for i, output in enumerate(outputs):
        if types.get(output, FLOAT) != FLOAT:
            wide = _cast(graph, output, FLOAT, casts)
            output.name, wide.name = f"{output.name}/{str(output.dtype).lower()}", output.name
            graph.outputs[i] = wide
    for weight in weights:
        if not weight.uses() and not weight.is_graph_output():
            del graph.initializers[str(weight.name)]


def _weight(
    graph: ir.Graph, weight: ir.Value, dtype: ir.DataType, made: dict[tuple[ir.Value, ir.DataType], ir.Value]
) -> ir.Value:
    """A weight at a type: rounded ahead of time, finite numbers to finite ones."""
    if dtype == FLOAT:
        return weight
    if (weight, dtype) not in made:
        assert weight.const_value is not None
        narrow = ir.Value(
            name=f"{weight.name}/{dtype.name.lower()}", type=ir.TensorType(dtype), shape=weight.shape,
            const_value=retyped(weight.const_value, dtype),
        )  # fmt: skip
        graph.register_initializer(narrow)
        made[weight, dtype] = narrow
    return made[weight, dtype]


def _cast(
    graph: ir.Graph, value: ir.Value, dtype: ir.DataType, made: dict[tuple[ir.Value, ir.DataType], ir.Value]
) -> ir.Value:
    if (value, dtype) not in made:
        name = f"{value.name}/to_{dtype.name.lower()}"
        node = ir.node("Cast", [value], {"to": dtype.value}, name=name)
        node.outputs[0].name = f"{name}:0"
        like(node.outputs[0], value, dtype)
        node.outputs[0].type = ir.TensorType(dtype)
        producer = value.producer()
        if producer is None:
            graph.insert_before(next(iter(graph)), node)
        else:
            graph.insert_after(producer, node)
        made[value, dtype] = node.outputs[0]
    return made[value, dtype]


# --- what it costs ----------------------------------------------------------------------------------------------------


def flops_of(node: ir.Node, sizes: Mapping[str, int]) -> float:
    """Floating-point operations of a matrix product or of attention at these sizes; 0 of all else."""
    if node.op_type not in PRODUCTS or node.domain != "":
        return 0.0
    shapes = [_numbers(v, sizes) for v in node.inputs if v is not None and v.dtype is not None][:3]
    results = math.prod(_numbers(node.outputs[0], sizes))
    if node.op_type == "Attention" and all(len(shape) == 4 for shape in shapes):
        (batch, heads, n_q, d_k), (_, _, n_k, _), (_, _, _, d_v) = shapes
        return 2.0 * batch * heads * n_q * n_k * (d_k + d_v)
    if node.op_type == "Conv":
        return 2.0 * results * math.prod(shapes[1][1:])
    if node.op_type == "Gemm" and node.attributes.get_int("transA") == 1:
        return 2.0 * results * shapes[0][0]
    return 2.0 * results * (shapes[0] or [1])[-1]


def cost_of(node: ir.Node, sizes: Mapping[str, int], is_high: bool) -> float:
    """Seconds that a node is estimated to take: its products and the memory it reads and writes."""
    numbers = sum(math.prod(_numbers(v, sizes)) for v in (*node.inputs, *node.outputs) if v is not None)
    return flops_of(node, sizes) / (RATE_32 if is_high else RATE_16) + numbers * (4 if is_high else 2) / BANDWIDTH


def _numbers(value: ir.Value, sizes: Mapping[str, int]) -> list[int]:
    found = []
    for dim in value.shape or ():
        try:
            found.append(dim if isinstance(dim, int) else size_of(str(dim.value), sizes))
        except (KeyError, NotImplementedError, ZeroDivisionError):
            found.append(1)
    return found
