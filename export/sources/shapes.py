"""Convert graphs of other exporters to one opset, fold their constants and infer every shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes import common
from onnxruntime.tools import symbolic_shape_infer as symbolic
from onnxscript import optimizer, version_converter

from attnforge.errors import UsageError, raised_as
from attnforge.export.graphs.float64 import through_onnx
from attnforge.export.graphs.nodes import constant_of
from attnforge.export.graphs.types import FLOATS
from attnforge.quiet import quiet

OPSET = 23
"""The first opset with the Attention operator."""


_OF_ONNXRUNTIME = "attnforge.of_onnxruntime"
"""Domain, during a conversion, of operators that ONNX Runtime adds to onnx's, such as LayerNormalization before opset
17 and SimplifiedLayerNormalization; onnx's converter refuses them."""


def at_opset(model: ir.Model) -> None:
    """Convert `model` in place to the first opset that has the Attention operator, if it has an earlier one.

    Raises:
        UsageError: onnx's converter cannot convert an operator; the message includes its reason.
    """
    have = model.opset_imports.get("") or 0
    if have >= OPSET:
        return
    resized = {node.outputs[0].name for node in model.graph if have < 11 and node.op_type in ("Resize", "Upsample")}
    model.ir_version = max(model.ir_version, 10)  # before 4, weights had to be inputs too
    with raised_as(UsageError, f"the graph is of opset {have} and cannot be converted to opset {OPSET}"), quiet():
        if have >= 18:
            version_converter.convert_version(model, OPSET)
        else:  # below 18, onnxscript's converter changes only the opset number
            for node in model.graph:
                if node.domain == "" and not onnx.defs.has(node.op_type, have):
                    node.domain = _OF_ONNXRUNTIME
            model.opset_imports[_OF_ONNXRUNTIME] = 1
            through_onnx(model, lambda proto: onnx.version_converter.convert_version(proto, OPSET))
            model.opset_imports[""] = OPSET
            del model.opset_imports[_OF_ONNXRUNTIME]
    for node in model.graph:
        node.version = None
        if node.domain == _OF_ONNXRUNTIME:
            node.domain = ""
        if node.op_type == "Resize" and node.outputs[0].name in resized:
            # it computes what it did before opset 11; onnx 1.23 leaves it with newer defaults
            scales = constant_of(node.inputs[2])
            mode = "ceil" if scales is not None and scales.min() < 1 else "floor"
            node.attributes.add(ir.AttrString("coordinate_transformation_mode", "asymmetric"))
            node.attributes.add(ir.AttrString("nearest_mode", mode))


def fold(model: ir.Model, floats: bool = True) -> None:
    """Fold constants, in place.

    Args:
        model: changed in place.
        floats: whether floating-point numbers are folded too; the reference computes them in float64.
    """

    def should_fold(node: ir.Node) -> bool | None:
        if node.op_type == "NonMaxSuppression" or _is_out_of_range(node):
            return False  # numpy would take hours
        return False if not floats and any(v.dtype in FLOATS for v in node.outputs) else None

    with quiet():
        optimizer.fold_constants(model, onnx_shape_inference=False, should_fold=should_fold)
    if (model.opset_imports.get("") or OPSET) < 18:
        for node in model.graph:
            if node.op_type == "Split":  # folding writes a SplitToSequence as a Split of any opset
                node.attributes.pop("num_outputs", None)
    # ONNX Runtime's inference does not read integers in an attribute of a Constant.
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.IdentityEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)


def _is_out_of_range(node: ir.Node) -> bool:
    """Whether a GatherElements has constant indices beyond its constant operand."""
    if node.op_type != "GatherElements":
        return False
    data, indices = map(constant_of, node.inputs)
    size = data.shape[node.attributes.get_int("axis", 0)] if data is not None and data.ndim else 0
    return indices is not None and bool(size) and bool(((indices < -size) | (indices >= size)).any())


def infer_shapes(model: ir.Model) -> None:
    """Set the type and shape of every value, in place, with ONNX Runtime's symbolic inference from the inputs.

    The shapes that the file gives for inner values are dropped, because it may name the same size differently.
    """
    outputs = [output for node in model.graph for output in node.outputs]
    for output in outputs:
        output.shape = None
    inferred: dict[str, ir.Value] = {}
    known: dict[str, onnx.ValueInfoProto] = {}

    def look(proto: onnx.ModelProto) -> onnx.ModelProto:
        with quiet():
            try:
                result = _symbolically(proto, known)
            except Exception:  # an operator that it does not know; onnx's inference gets as far as it can
                result = onnx.shape_inference.infer_shapes(proto, data_prop=not _has_long_list(proto))
        inferred.update({v.name or "": v for node in ir.from_proto(result).graph for v in node.outputs})
        inferred.update({name: ir.serde.deserialize_value_info_proto(v, None) for name, v in known.items()})
        return proto

    through_onnx(model.clone(), look)
    for output in outputs:
        value = inferred.get(output.name or "")
        if value is not None and value.dtype is not None:
            output.type = ir.TensorType(value.dtype)
        if value is not None and value.shape is not None:
            output.shape = ir.Shape(list(value.shape))


def _has_long_list(proto: onnx.ModelProto) -> bool:
    """Whether an input is a list of more numbers than any shape has; inference would make a dim of each."""
    dims = (value.type.tensor_type.shape.dim for value in proto.graph.input)
    return any(len(each) == 1 and each[0].dim_value > 2**20 for each in dims)


def _is_shaped(info: onnx.ValueInfoProto) -> bool:
    """Whether the size of every dim is known, as a number or by name."""
    kind = info.type.tensor_type
    return kind.HasField("shape") and all(dim.WhichOneof("value") for dim in kind.shape.dim)


def dims_as_multiplied(rank: int, side: str, attributes: Mapping[str, int]) -> list[int]:
    """The order in which a FusedMatMul of ONNX Runtime multiplies the dims of an operand, "A" or "B"."""
    dims = list(range(rank))
    if attributes.get(f"transBatch{side}"):
        dims = [*dims[1:-1], 0, dims[-1]]
    return [*dims[:-2], dims[-1], dims[-2]] if attributes.get(f"trans{side}") else dims


class _Inference(symbolic.SymbolicShapeInference):  # type: ignore[misc]
    """ONNX Runtime's inference, without computing and keeping the integers of a large ConstantOfShape, with
    FusedMatMul, products of symbols in Flatten, and constants for every operator whose shape onnx infers, such as the
    axes of a ReduceMax."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dispatcher_["FusedMatMul"] = self._infer_FusedMatMul
        self.dispatcher_["Flatten"] = self._infer_Flatten

    def _onnx_infer_single_node(self, node: onnx.NodeProto) -> None:
        super()._onnx_infer_single_node(node)
        constants = [self.initializers_[name] for name in node.input if name in self.initializers_]
        found = [self.known_vi_[name] for name in node.output if name]
        if constants and not all(value.type.tensor_type.HasField("shape") for value in found):
            inputs = [self.known_vi_[name] for name in node.input if name]
            self.tmp_mp_.graph.CopyFrom(onnx.helper.make_graph([node], "node", inputs, found, constants))
            for value, better in zip(found, onnx.shape_inference.infer_shapes(self.tmp_mp_).graph.output, strict=True):
                value.CopyFrom(better)

    def _infer_FusedMatMul(self, node: onnx.NodeProto) -> None:
        attributes = {attribute.name: attribute.i for attribute in node.attribute}
        shapes = [list(self._get_shape(node, i)) for i in range(2)]
        if min(map(len, shapes)) < 2:
            return
        orders = [dims_as_multiplied(len(shape), side, attributes) for shape, side in zip(shapes, "AB", strict=True)]
        left, right = ([shape[i] for i in order] for shape, order in zip(shapes, orders, strict=True))
        shape = [*self._broadcast_shapes(left[:-2], right[:-2]), left[-2], right[-1]]
        self._know(node.output[0], node.input[0], shape)

    def _infer_Flatten(self, node: onnx.NodeProto) -> None:
        dims, axis = self._get_sympy_shape(node, 0), symbolic.get_attribute(node, "axis", 1)
        axis = axis if axis >= 0 else axis + len(dims)
        shape = symbolic.get_shape_from_sympy_shape([prod(dims[:axis]), prod(dims[axis:])])
        self._know(node.output[0], node.input[0], shape)

    def _infer_ConstantOfShape(self, node: onnx.NodeProto) -> None:
        shape = self._get_int_or_float_values(node)[0]
        if isinstance(shape, list) and all(map(symbolic.is_literal, shape)) and prod(map(int, shape)) > 2**20:
            self._know(node.output[0], node.output[0], list(map(int, shape)))
        else:
            super()._infer_ConstantOfShape(node)

    def _know(self, name: str, typed: str, shape: Sequence[Any]) -> None:
        """Set the shape of a value, with the type of another one or of itself."""
        dtype = self.known_vi_[typed].type.tensor_type.elem_type
        self.known_vi_[name].CopyFrom(onnx.helper.make_tensor_value_info(name, dtype, shape))


MOST_ROUNDS = 100
"""Maximum number of inference runs; each follows a merge of sizes that turned out to be equal."""


def _symbolically(proto: onnx.ModelProto, known: dict[str, onnx.ValueInfoProto]) -> onnx.ModelProto:
    """Do what `SymbolicShapeInference.infer_shapes` does, with its own steps: that function loops forever if a round
    finds nothing new, and writes a file to the current folder if it gives up.

    Args:
        proto: the model.
        known: receives the values whose shapes were inferred, if those of others cannot be.

    Raises:
        ValueError: the shape of some value cannot be inferred.
    """
    inference = _Inference(2**31 - 1, auto_merge=True, guess_output_rank=False, verbose=0)
    inference._preprocess(proto)
    for _ in range(MOST_ROUNDS):
        is_complete = inference._infer_impl()
        if not inference.run_ and is_complete:
            inference._update_output_from_vi()
            inferred: onnx.ModelProto = inference.out_mp_
            return inferred
        if not inference.run_:
            break
    produced = {name for node in proto.graph.node for name in node.output}
    known.update({name: v for name, v in inference.known_vi_.items() if name in produced and _is_shaped(v)})
    raise ValueError("the shape of some value cannot be inferred")
