"""Tensors of a graph by name, and the part of a graph that computes given tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attnforge.export.graphs.types import FLOATS


def computed(model: ir.Model) -> list[str]:
    """Names of the floating-point tensors that `model` computes, in graph order."""
    return [
        str(output.name)
        for node in model.graph
        if node.op_type != "Constant"
        for output in node.outputs
        if output.dtype in FLOATS and output.name
    ]


def values_of(model: ir.Model) -> dict[str, ir.Value]:
    """Every tensor of a graph by name: inputs, weights and results."""
    return ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)


def part_of(model: ir.Model, names: Sequence[str], given: Collection[str] = ()) -> ir.Model:
    """A copy of `model` that computes given tensors, with only the nodes, weights and inputs that they need.

    Args:
        model: is not changed; its weights are shared.
        names: names of the tensors, which are the outputs of the part in this order. A tensor that a node computes
            keeps its name, unless it is in `given` too: then the input has that name.
        given: names of tensors that are inputs of the part.
    """
    part = model.clone()
    graph, values = part.graph, values_of(part)
    for name in given:
        value = values[name]
        if value.is_graph_input():
            continue
        source = ir.Value(name=name, type=value.type, shape=value.shape)
        value.name = f"{name}/computed"
        for user, index in list(value.uses()):
            user.replace_input_with(index, source)
        graph.inputs.append(source)
    graph.outputs[:] = [_as_output(graph, values[name]) for name in names]
    RemoveUnusedNodesPass()(part)
    graph.inputs[:] = [value for value in graph.inputs if value.uses()]
    return part


def _as_output(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """`value`, or an Identity of an input or weight, which cannot be an output itself."""
    if value.producer() is not None:
        return value
    copy = ir.node("Identity", [value], name=f"{value.name}/output")
    output = copy.outputs[0]
    output.name, output.type, output.shape = f"{copy.name}:0", value.type, value.shape
    graph.append(copy)
    return output
