"""Turn decoder steps back into graphs of the whole model, for code that inspects graphs: a step without a past."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attnforge.bundle import NEXT, Bundle, Decoding
from attnforge.export.attention.canonical import SINKS, WINDOW
from attnforge.export.attention.masking import before_sinks, with_zeros
from attnforge.export.graphs.build import Builder, constant, dims_of, insert, like, numbered, up_to
from attnforge.export.graphs.nodes import input_of, numpy_type
from attnforge.export.graphs.qdq import InInt8
from attnforge.export.graphs.saving import load_graph
from attnforge.export.graphs.sizes import sizes_of
from attnforge.export.lowering.attention import BY_HEAD, writer_of


def whole_graph(bundle: Bundle, name: str) -> ir.Model:
    """Load a graph of a bundle and check it; it takes the model's inputs and has its outputs, without caches.

    Args:
        bundle: the bundle.
        name: name of the file, as listed in the manifest.

    Raises:
        BundleError: the file is missing, altered, or not an ONNX model.
    """
    model = load_graph(bundle, name)
    if bundle.manifest.decoding is not None:
        without_past(model, bundle.manifest.decoding)
    return model


def without_past(model: ir.Model, decoding: Decoding) -> None:
    """Make a step start from empty caches and return none, in place."""
    graph = model.graph
    inputs = {str(value.name): value for value in graph.inputs}
    if decoding.past not in inputs:
        return  # the graph as it was exported
    tokens = inputs[decoding.tokens]
    if decoding.kept is not None:  # outputs are those of all tokens
        kept = inputs[decoding.kept]
        (dim,), count_dim = dims_of(kept), dims_of(tokens)[1]
        every = insert(graph, graph[0], partial(numbered, x=tokens, axis=1), stem=f"without past/{kept.name}")
        ir.convenience.replace_all_uses_with(kept, every)
        graph.inputs.remove(kept)
        for value in (output for node in graph for output in node.outputs if output.shape is not None):
            value.shape = ir.Shape([count_dim if each == dim else each for each in dims_of(value)])
    caches = [spec.name for spec in decoding.tensors]
    following = {f"{name}{NEXT}" for name in caches}
    for name in (decoding.past, *caches):
        value = inputs[name]

        def empty(op: Builder, value: ir.Value = value) -> ir.Value:
            others = constant(op, [dim for dim in dims_of(value)[1:] if isinstance(dim, int)])
            shape = op.Concat(op.Shape(tokens, start=0, end=1), others, axis=0)
            zero = ir.tensor(np.zeros(1, numpy_type(value)), dtype=value.dtype)
            return like(op.ConstantOfShape(shape, value=zero), value)

        ir.convenience.replace_all_uses_with(value, insert(graph, graph[0], empty, stem=f"without past/{name}"))
        graph.inputs.remove(value)
    graph.outputs[:] = [value for value in graph.outputs if value.name not in following]
    for node in graph:
        if node.op_type == "Attention" and WINDOW in node.metadata_props:
            _read_new_alone(graph, node)
    RemoveUnusedNodesPass()(model)


def _read_new_alone(graph: ir.Graph, node: ir.Node) -> None:
    """Make a canonical node read the new keys and values instead of a cache that contains only them."""
    mask, query = input_of(node, 3), input_of(node)
    tokens, has_sink = sizes_of(query)[2], SINKS in node.metadata_props
    attended = tokens.plus(1) if has_sink else tokens
    for name in (WINDOW, *BY_HEAD.values()):
        node.metadata_props.pop(name, None)
    for index in (1, 2):
        read = before_sinks(input_of(node, index))
        new = input_of(writer_of(read), 1)
        rounded = InInt8.of_stored(new, read)
        if rounded is not None:
            new = insert(graph, node, rounded.restored, stem=f"{node.name}/without past/{index}")
        if has_sink:
            zeros = partial(with_zeros, x=new, count=1, first=True)
            new = insert(graph, node, zeros, stem=f"{node.name}/without past/{index} with sinks")
        node.replace_input_with(index, new)

    def first(op: Builder) -> ir.Value:
        end = op.Shape(query, start=2, end=3)
        end = op.Add(end, constant(op, [1])) if has_sink else end
        return up_to(op, mask, 3, end, attended.dim())

    node.replace_input_with(3, insert(graph, node, first, stem=f"{node.name}/mask without past"))
