"""Move the rotation that GroupQueryAttention applies into a RotaryEmbedding before it."""

from __future__ import annotations

from functools import partial

import onnx_ir as ir
from onnx_ir.passes import PassResult

from attnforge.export.graphs.build import Builder, constant, insert, like
from attnforge.export.graphs.nodes import input_of, optional_input

INT64 = ir.DataType.INT64

OPSET = 23
"""The first opset with RotaryEmbedding."""


def turn_before_attention(model: ir.Model) -> PassResult:
    """Write the rotation of every `com.microsoft::GroupQueryAttention` with `do_rotary` as RotaryEmbedding nodes on its
    query and key, in place. An operator whose query, key and value are packed in one tensor stays as it is."""
    graph, modified = model.graph, False
    for node in list(graph):
        if node.op_type != "GroupQueryAttention" or not node.attributes.get_int("do_rotary", 0):
            continue
        if node.inputs[1] is None:
            continue
        modified = True
        positions = insert(graph, node, lambda op, node=node: _positions(op, node), stem=f"{node.name}/places")  # type: ignore[misc]
        for i, heads in enumerate(("num_heads", "kv_num_heads")):
            build = partial(_rotated, node=node, x=input_of(node, i), positions=positions, heads=heads)
            node.replace_input_with(i, insert(graph, node, build, stem=f"{node.name}/turned/{heads}"))
        node.resize_inputs(7)
        for name in ("do_rotary", "rotary_interleaved"):
            node.attributes.pop(name, None)
        graph.opset_imports[""] = max(graph.opset_imports.get("", 0), OPSET)
    return PassResult(model, modified)


def _rotated(op: Builder, node: ir.Node, x: ir.Value, positions: ir.Value, heads: str) -> ir.Value:
    attributes = {
        "num_heads": node.attributes.get_int(heads) or 1,
        "interleaved": node.attributes.get_int("rotary_interleaved", 0) or 0,
    }
    return like(op.op("RotaryEmbedding", [x, input_of(node, 7), input_of(node, 8), positions], attributes), x)


def _positions(op: Builder, node: ir.Node) -> ir.Value:
    """`(batch, tokens)`, int64: the positions by which the operator rotates tokens. They follow the cached tokens; in a
    first prompt, whose samples may have fewer tokens than there are columns, they count from 0."""
    if (given := optional_input(node, 9)) is not None:
        return given
    count = op.Shape(input_of(node), start=1, end=2)
    ends = op.Add(op.Cast(input_of(node, 5), to=INT64.value), constant(op, [1]))
    first = op.Unsqueeze(op.Max(op.Sub(ends, count), constant(op, [0])), constant(op, [1]))
    following = op.Range(constant(op, 0), op.Squeeze(count, constant(op, [0])), constant(op, 1))
    return op.Add(first, following)
