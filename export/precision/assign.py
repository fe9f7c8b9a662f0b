"""Two precisions in one graph: 16 bits for most operators, fp32 for some, and casts where they meet.

An operator that only moves numbers has the type of the numbers that it moves. Inputs and outputs of the graph stay
fp32, so nothing changes for callers of the model. The types are written into the graph, as strongly typed builds
require.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from attnforge.export.attention.canonicalize import Site
from attnforge.export.diagnosis.stages import module_of, scores_of
from attnforge.export.graphs.build import like
from attnforge.export.graphs.execute import Runner, at_own_precision
from attnforge.export.graphs.nodes import VIEWS, inputs_of, is_used
from attnforge.export.graphs.types import FLOAT, LOW, kept_in_fp32, retyped
from attnforge.export.lowering.tensorrt import lower
from attnforge.export.tensorrt.build import site_of
from attnforge.precision import Precision

MOVERS = VIEWS | {"Slice", "Split", "Expand", "Tile", "Pad", "Gather", "GatherElements", "Concat"}
"""Operators whose result contains numbers of their first input, or of several inputs of one type, unchanged."""

ALWAYS_FP32 = ("Range", "ConstantOfShape", "EyeLike", "Resize", "RandomNormal", "RandomUniform")
"""Operators that do not support 16-bit types, or whose type is an attribute of their own."""


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
    """Whether a node only moves numbers that other nodes computed."""
    if node.domain != "" or node.op_type not in MOVERS:
        return False
    moved = [v for v in inputs_of(node) if v.dtype == FLOAT]
    return bool(moved) and all(v.producer() is not None for v in moved)


def assign(model: ir.Model, low: ir.DataType, high: Collection[str]) -> None:
    """Give every operator of an fp32 graph the type `low`, except those named in `high`, in place.

    Args:
        model: a canonical graph, all in fp32.
        low: fp16 or bf16.
        high: names of the nodes that stay in fp32.
    """
    assigner = _Assigner(model, low, high)
    for node in list(model.graph):
        assigner.retype(node)
    for value, dtype in assigner.types.items():
        value.type = ir.TensorType(dtype)
    assigner.widen_outputs()
    for weight in assigner.weights:
        if not is_used(weight):  # only its 16-bit copies are
            del model.graph.initializers[str(weight.name)]


class MixedGraph:
    """A canonical fp32 graph, and its assignments of precisions: every operator in fp32 or in 16 bits.

    Args:
        model: not modified.
        sites: its attention sites.
        precision: the 16-bit precision.

    Attributes:
        nodes: the operators whose precision is a choice, by name, in graph order.
        low: the 16-bit type.
    """

    def __init__(self, model: ir.Model, sites: list[Site], precision: Precision) -> None:
        self.model, self.sites, self.precision = model, sites, precision
        self.nodes = {str(node.name): node for node in operators(model)}
        self.low = ir.DataType.from_numpy(precision.dtype)

    def assigned(self, high: Collection[str]) -> ir.Model:
        """A copy of the graph with the operators `high` in fp32."""
        model = self.model.clone()
        assign(model, self.low, high)
        return model

    def lowered(self, high: Collection[str]) -> tuple[ir.Model, list[str]]:
        """The same, lowered for TensorRT, and the names of the sites that it fuses."""
        model = self.assigned(high)
        return model, [form.site for form in lower(model, self.sites) if form.unfused is None]

    def run(self, high: Collection[str]) -> Runner:
        """Its runner, which stores numbers as a plan of TensorRT does."""
        return emulate(*self.lowered(high))

    def text(self, high: Collection[str]) -> str:
        return f"{len(high)} of {len(self.nodes)} operators in fp32"

    def by_module(self, names: Collection[str]) -> dict[str, list[str]]:
        """Names of operators by their module, in graph order."""
        groups: dict[str, list[str]] = {}
        for name, node in self.nodes.items():
            if name in names:
                groups.setdefault(module_of(node), []).append(name)
        return groups


class _Assigner:
    """Retypes the nodes of a graph one by one, in execution order.

    Attributes:
        types: the new type of every value computed so far.
        casts: values that were cast, weights ahead of time, so that several users share one cast.
    """

    def __init__(self, model: ir.Model, low: ir.DataType, high: Collection[str]) -> None:
        self.graph, self.low = model.graph, low
        self.fixed = kept_in_fp32(model.graph)
        self.chosen = {node: FLOAT if node.name in high else low for node in operators(model)}
        self.weights = {value for value in self.graph.initializers.values() if value.dtype == FLOAT}
        self.types: dict[ir.Value, ir.DataType] = {v: FLOAT for v in self.graph.inputs if v.dtype == FLOAT}
        self.casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}

    def retype(self, node: ir.Node) -> None:
        """Give a node its type, and cast its inputs to the same type."""
        if any(output in self.fixed for output in node.outputs):
            return
        floats = ((i, v) for i, v in enumerate(node.inputs) if v is not None and v.dtype == FLOAT)
        inputs = [(i, v) for i, v in floats if v not in self.fixed]
        dtype = self.chosen.get(node) or self._type_of_moved(node, [v for _, v in inputs])
        for i, value in inputs:
            node.replace_input_with(i, self._at(value, dtype))
        for output in node.outputs:
            if output.dtype == FLOAT:
                self.types[output] = dtype
        if dtype != FLOAT and "to" in node.attributes and node.attributes["to"].as_int() == FLOAT.value:
            node.attributes["to"] = ir.AttrInt64("to", dtype.value)

    def _type_of_moved(self, node: ir.Node, inputs: list[ir.Value]) -> ir.DataType:
        """The type of a node that computes nothing: that of the numbers that it moves; fp32 if it joins both types."""
        if node.op_type in ("Constant", *ALWAYS_FP32):
            return FLOAT
        moved = [self.types[value] for value in inputs if value in self.types]
        if node.op_type == "Concat" and FLOAT in moved:
            return FLOAT
        return (moved or [self.low])[0]

    def _at(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """A value at a type."""
        if self.types.get(value, FLOAT) == dtype:
            return value
        if (value, dtype) not in self.casts:
            make = self._narrow if value in self.weights else self._cast
            self.casts[value, dtype] = make(value, dtype)
        return self.casts[value, dtype]

    def _narrow(self, weight: ir.Value, dtype: ir.DataType) -> ir.Value:
        """A weight that is rounded ahead of time; finite numbers stay finite."""
        assert weight.const_value is not None
        narrow = ir.Value(name=f"{weight.name}/{dtype.name.lower()}", const_value=retyped(weight.const_value, dtype))
        self.graph.register_initializer(like(narrow, weight, dtype))
        return narrow

    def _cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """A computed value or an input, cast immediately after it is computed."""
        name = f"{value.name}/to_{dtype.name.lower()}"
        node = ir.node("Cast", [value], {"to": dtype.value}, name=name)
        node.outputs[0].name = f"{name}:0"
        if (producer := value.producer()) is None:
            self.graph.insert_before(self.graph[0], node)
        else:
            self.graph.insert_after(producer, node)
        return like(node.outputs[0], value, dtype)

    def widen_outputs(self) -> None:
        """Restore fp32 outputs under the names of the graph's outputs."""
        for i, output in enumerate(list(self.graph.outputs)):
            if (wide := self._at(output, FLOAT)) is not output:
                output.name, wide.name = f"{output.name}/{str(output.dtype).lower()}", output.name
                self.graph.outputs[i] = wide


# --- emulation --------------------------------------------------------------------------------------------------------

# Emulation of a TensorRT plan on the CPU: each operator computes in float32 and rounds its result to the type that it
# is stored in, except for what a kernel never stores: the scores of fused attention.
#
# This is the only emulation of 16-bit storage in the package. It differs from a GPU in the order of sums, and does not
# include the approximations of a GPU's kernels.


def emulate(model: ir.Model, fused: Collection[str]) -> Runner:
    """A runner of a graph that was lowered for TensorRT; inputs and outputs that are 16-bit in the graph are float32.
    Every product is rounded before its bias is added, which is stricter than a plan.

    Args:
        model: not modified.
        fused: names of the sites that TensorRT fuses.
    """
    return at_own_precision(model, unrounded=unrounded_in_fused_kernels(model, fused))


def unrounded_in_fused_kernels(model: ir.Model, fused: Collection[str]) -> list[ir.Value]:
    """The 16-bit scores of the sites named `fused`, from the product to the softmax: a fused kernel keeps them in
    float32 and rounds only the attention map."""
    softmaxes = (node for node in model.graph if node.op_type == "Softmax" and site_of(str(node.name)) in fused)
    return [value for softmax in softmaxes for value in scores_of(softmax) if value.dtype in LOW]
