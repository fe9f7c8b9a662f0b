"""The model of a bundle in opset 17, the last one that TensorRT 8.6 parses."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor, replace_nodes_and_values
from onnx_ir.tape import Tape


def convert(source: Path, target: Path) -> None:
    """Write the model `source`, of opset 23, as one of opset 17 to `target`.

    Raises:
        ValueError: an operator has a form that opset 17 lacks.
    """
    model = ir.external_data.load_to_model(ir.load(source))  # TensorRT would look for weights next to `target`
    for node in list(model.graph):
        tape = Tape()
        result = _older(node, tape)
        if result is not None:
            for i, new in enumerate(tape.nodes):
                new.name = f"{node.outputs[0].name}/{i}"
                new.outputs[0].name = f"{node.outputs[0].name}/{i}"
            replace_nodes_and_values(model.graph, node, [node], tape.nodes, [node.outputs[0]], [result])
        node.metadata_props.clear()
    model.graph.opset_imports[""] = 17
    model.ir_version = 8
    ir.save(model, target)


def _older(node: ir.Node, tape: Tape) -> ir.Value | None:
    """The output of the nodes on `tape` that replace a node; None if it stays, changed where opset 17 differs."""

    def constant(value: float | list[int], dtype: ir.DataType) -> ir.Value:
        return tape.op("Constant", [], {"value": ir.tensor(np.array(value, dtype.numpy()))})

    x = node.inputs[0] if node.inputs else None
    if x is None:
        return None
    dtype = x.dtype or ir.DataType.FLOAT
    if node.op_type == "Gelu":
        if node.attributes.get_string("approximate", "none") != "none":
            raise ValueError(f"{node.outputs[0].name} is an approximation of GELU, which opset 17 lacks")
        bell = tape.op("Erf", [tape.op("Mul", [x, constant(math.sqrt(0.5), dtype)])])
        return tape.op("Mul", [tape.op("Mul", [x, tape.op("Add", [bell, constant(1, dtype)])]), constant(0.5, dtype)])
    if node.op_type == "RMSNormalization":
        if node.attributes.get_int("axis", -1) not in (-1, len(x.shape or ()) - 1):
            raise ValueError(f"{node.outputs[0].name} normalises over more than the last axis")
        wide = tape.op("Cast", [x], {"to": ir.DataType.FLOAT})
        mean = tape.op("ReduceMean", [tape.op("Mul", [wide, wide])], {"axes": [-1]})
        moved = tape.op("Add", [mean, constant(node.attributes.get_float("epsilon", 1e-5), ir.DataType.FLOAT)])
        scaled = tape.op("Cast", [tape.op("Div", [wide, tape.op("Sqrt", [moved])])], {"to": dtype})
        return tape.op("Mul", [scaled, node.inputs[1]])
    if node.op_type == "Shape" and node.attributes:  # which 8.6 ignores
        limits = [node.attributes.get_int("start", 0)], [node.attributes.get_int("end", 2**31 - 1)], [0]
        return tape.op("Slice", [tape.op("Shape", [x]), *(constant(limit, ir.DataType.INT64) for limit in limits)])
    if node.op_type == "Split":
        node.attributes.pop("num_outputs", None)  # equal parts are the default
    if node.op_type.startswith("Reduce") and node.op_type != "ReduceSum" and len(node.inputs) > 1:
        given = node.inputs[1]
        axes = None if given is None else get_const_tensor(given)
        if axes is None:
            raise ValueError(f"the axes of {node.outputs[0].name} ({node.op_type}) are no constant")
        node.attributes["axes"] = ir.AttrInt64s("axes", axes.numpy().tolist())
        node.attributes.pop("noop_with_empty_axes", None)
        node.resize_inputs(1)
    return None
