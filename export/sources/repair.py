"""What torch's exporter writes against the ONNX specification, put right."""

from __future__ import annotations

from functools import partial

import onnx_ir as ir
from onnx_ir.passes import PassResult

from attnforge.arrays import Array
from attnforge.export.attention.layout import ONE, sizes_of
from attnforge.export.graphs.build import Builder, constant, dims_of, insert, typed

LEAST_BYTES = 1024
"""Of a weight that is worth sharing."""


def repair(model: ir.Model) -> PassResult:
    """Give every RotaryEmbedding of `model` caches of its input's batch size, in place.

    Without position ids the caches are `(batch, tokens, head_size / 2)`
    (https://onnx.ai/onnx/operators/onnx__RotaryEmbedding.html). The exporter's own fusion leaves them with a batch of
    one, as the author computed them; ONNX Runtime refuses these for larger batches.
    """
    expanded: dict[tuple[ir.Value, str], ir.Value] = {}
    for node in list(model.graph):
        if node.domain != "" or node.op_type != "RotaryEmbedding" or (len(node.inputs) > 3 and node.inputs[3]):
            continue
        x = node.inputs[0]
        assert x is not None
        for i, cache in enumerate(node.inputs[1:3], start=1):
            assert cache is not None
            _know_shape(cache)
            if cache.shape is None or x.shape is None:
                continue
            if sizes_of(cache)[0] == ONE and sizes_of(x)[0] != ONE:
                key = cache, str(dims_of(x)[0])  # layers share their caches
                if key not in expanded:
                    build = partial(_expanded, cache=cache, x=x)
                    expanded[key] = insert(model.graph, node, build, stem=f"{cache.name}/{key[1]}")
                node.replace_input_with(i, expanded[key])
    return PassResult(model, bool(expanded))


def _know_shape(cache: ir.Value) -> None:
    """The exporter's fusion makes caches anew, and forgets the shapes of their sine and cosine."""
    node = cache.producer()
    if cache.shape is None and node is not None and node.op_type in ("Cos", "Sin", "Mul", "Cast"):
        source = node.inputs[0]
        assert source is not None and source.dtype is not None
        _know_shape(source)
        dtype = ir.DataType(node.attributes.get_int("to", source.dtype.value))
        typed(cache, dtype, dims_of(source))


def _expanded(op: Builder, cache: ir.Value, x: ir.Value) -> ir.Value:
    assert cache.dtype is not None
    shape = op.Concat(op.Shape(x, start=0, end=1), constant(op, [1, 1]), axis=0)
    return typed(op.Expand(cache, shape), cache.dtype, [dims_of(x)[0], *dims_of(cache)[1:]])


def share_weights(model: ir.Model) -> PassResult:
    """Let layers that share a weight share its transpose too, in place: torch folds one for each, all views of the same
    memory, which would be written once for each."""
    first: dict[tuple[object, ...], tuple[ir.Value, Array]] = {}
    modified = False
    for name, value in list(model.graph.initializers.items()):
        if value.const_value is None or value.const_value.nbytes < LEAST_BYTES or value.is_graph_output():
            continue
        array = value.const_value.numpy()  # held, so that no other array gets its place in memory
        place = array.__array_interface__["data"][0]
        kept, _ = first.setdefault((value.dtype, array.shape, array.strides, place), (value, array))
        if kept is not value:
            value.replace_all_uses_with(kept)
            del model.graph.initializers[name]
            modified = True
    return PassResult(model, modified)
