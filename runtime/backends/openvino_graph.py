"""A canonical graph rewritten for OpenVINO: the same function, in the form that OpenVINO's CPU plugin runs fastest.

The rewriting gains most in bf16, on a processor with AMX. The benchmark's `openvino-static` runs without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import openvino
from openvino import opset1
from openvino import opset13 as ops

from attnforge.arrays import Array
from attnforge.machine import this_machine

NARROW = ("bf16", "f16")

LEAST = "-65504"
"""The least number of fp16."""

PRECISE = """<net name="precise" version="11"><layers>
<layer id="0" name="x" type="Parameter" version="opset1"><data shape="1" element_type="f32"/>
<rt_info><attribute name="precise" version="0"/></rt_info><output><port id="0" precision="FP32"/></output></layer>
<layer id="1" name="y" type="Result" version="opset1"><input><port id="0" precision="FP32"/></input></layer>
</layers><edges><edge from-layer="0" from-port="0" to-layer="1" to-port="0"/></edges></net>"""
"""A model whose parameter has OpenVINO's mark for nodes that stay in fp32; its Python API copies the mark, but does not
make one."""

LARGE = 100.0
"""The factor from which a sum with a constant is kept apart from other constants (:func:`masks_apart`)."""

WITHOUT_FUSION = {"SNIPPETS_MODE": "DISABLE"}
"""The property with which OpenVINO generates no kernels for several operations at once."""

ARITHMETIC = ("Add", "Divide", "Multiply", "Subtract")

UNMARKED = ("Constant", "MVN", "Parameter", "Result", "ScaledDotProductAttention")
"""Nodes that keep no mark: OpenVINO reads bf16 norms as fp32, and its kernel of attention adds up in fp32 anyway."""


def prepared(model: Any, widen: bool, scores: bool = False) -> Any:
    """An `openvino.Model` that computes the same function as `model`, within rounding, with the same inputs and
    outputs.

    Args:
        model: an `openvino.Model`, which is modified and must not be used any more.
        widen: whether to convert 16-bit types to fp32 (:func:`widened`), which needs memory for the weights in both.
        scores: whether queries and keys are rounded for speed, which is no gain on a processor that saturates.
    """
    rows_first(model)
    if this_machine(gpus=False).saturates:
        weights_in_fp32(model)
        if scores:
            scores_in_fp32(model)
    zeros_without_keys(model)
    heads_first(model)
    masks_apart(model)
    fp32_stays(model)
    as_products(model)
    model.validate_nodes_and_infer_types()
    return widened(model) if widen else model


def rows_first(model: Any) -> None:
    """Look up rows of 8-bit tables before they are dequantised; otherwise OpenVINO would dequantise the whole table on
    every call."""
    for node in _of_type(model, "Gather"):
        index, axis = node.input_value(1), node.input_value(2)
        table, scale = _dequantised(node.input_value(0).get_node())
        if _value(axis) != 0 or table is None or list(scale.get_output_shape(0)) != [table.get_shape()[0], 1]:
            continue
        rows = ops.convert(ops.gather(table, index, axis), _kind(node.output(0)))
        _replace(node, ops.multiply(rows, ops.gather(scale.output(0), index, axis)))


def weights_in_fp32(model: Any) -> None:
    """Dequantise 8-bit weights, so that OpenVINO multiplies in fp32 what its integer products would saturate."""
    for node in _of_type(model, "MatMul"):
        scaled = node.input_value(1).get_node()
        stored, scale = _dequantised(scaled)
        while scale is not None and scale.get_type_name() == "Reshape":
            scale = scale.input_value(0).get_node()
        if stored is not None and scale.get_type_name() == "Constant":
            factors = scale.get_data().reshape(list(scaled.get_input_shape(1)))
            _replace(scaled, ops.constant(stored.get_node().get_data() * factors))


def _dequantised(product: Any) -> tuple[Any, Any]:
    """The 8-bit constant that a node scales, and the node of the scale; None twice for any other node."""
    if product.get_type_name() == "Multiply":
        converted, scale = (product.input_value(i).get_node() for i in range(2))
        stored = converted.input_value(0) if converted.get_type_name() == "Convert" else None
        if stored is not None and stored.get_node().get_type_name() == "Constant" and _kind(stored) == "i8":
            return stored, scale
    return None, None


def scores_in_fp32(model: Any) -> None:
    """Remove the 8-bit Q/DQ of queries and keys, for the same reason."""
    for node in _of_type(model, "ScaledDotProductAttention"):
        for i in range(2):
            if (source := _before_rounding(node.input_value(i))) is not None:
                node.input(i).replace_source_output(source)


def _before_rounding(restored: Any) -> Any | None:
    """The tensor that is rounded to int8 with one scale to give an output; None if it is not."""
    scaled = restored.get_node()
    if scaled.get_type_name() != "Multiply" or (scale := _value(scaled.input_value(1))) is None:
        return None
    node = scaled.input_value(0).get_node()
    while node.get_type_name() in ("Subtract", "Convert"):
        node = node.input_value(0).get_node()
    if node.get_type_name() != "FakeQuantize" or (most := _value(node.input_value(2))) is None:
        return None
    return node.input_value(0) if math.isclose(most, 127 * scale, rel_tol=1e-5) else None


def heads_first(model: Any) -> None:
    """Add a missing batch dim before heads and tokens are transposed, and remove it after they are transposed back.

    OpenVINO fuses a transpose into the attention before or after it. If a dim is added or removed between the two, the
    transpose is a separate pass over memory.
    """
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Unsqueeze" and _numbers(node) == [0]:
            inner = node.input_value(0).get_node()
            if _order(inner) and len(inner.output(0).get_target_inputs()) == 1:
                apart = ops.unsqueeze(inner.input_value(0), [0])
                _replace(node, ops.transpose(apart, _under_batch(_order(inner))))
        elif order := _order(node):
            inner = node.input_value(0).get_node()
            if inner.get_type_name() == "Squeeze" and _numbers(inner) == [0]:
                _replace(node, ops.squeeze(ops.transpose(inner.input_value(0), _under_batch(order)), [0]))


def zeros_without_keys(model: Any) -> None:
    """Give zeros in fully masked rows, and only there.

    OpenVINO reads Attention as products whose NaN become zeros. In 16 bits its softmax over nothing is not NaN, and a
    NaN in the model's input would be lost.
    """
    for node in _of_type(model, "Select"):
        test, attention = (node.input_value(i).get_node() for i in (0, 2))
        if test.get_type_name() != "IsNaN" or attention.get_type_name() != "ScaledDotProductAttention":
            continue
        if attention.get_attributes().get("causal") or attention.get_input_size() < 4:
            continue
        mask = attention.input_value(3)
        if _kind(mask) == "boolean":
            none = ops.logical_not(ops.reduce_logical_or(mask, [-1], True))
            _replace(node, ops.select(none, node.input_value(1), attention))


def as_products(model: Any) -> None:
    """Decompose attention into products and a softmax, which OpenVINO compiles into one kernel with the transposes
    before and after it. Causal attention, and attention whose scale is not known, stays one operator."""
    for node in _of_type(model, "ScaledDotProductAttention"):
        query, key, value, *rest = (node.input_value(i) for i in range(node.get_input_size()))
        scale = _scale(query, rest)
        if scale is None or len(rest) > 2 or node.get_attributes().get("causal"):
            continue
        kind = _kind(query)
        scores = ops.multiply(ops.matmul(query, key, False, True), _constant(scale, kind))
        if rest and _value(rest[0]) != 0:
            if _kind(rest[0]) == "boolean":
                scores = ops.select(rest[0], scores, _constant(-math.inf, kind))
            else:
                scores = ops.add(scores, rest[0])
        _replace(node, ops.matmul(ops.softmax(scores, -1), value, False, False))


def properties_for(model: Any, properties: Mapping[str, Any]) -> dict[str, Any]:
    """The properties with which to compile `model`: those given, and :data:`WITHOUT_FUSION` if it is needed.

    If all shapes are static, OpenVINO 2026.4 compiles attention and the element-by-element operations after it into one
    kernel. That is wrong if a transpose of queries swaps as many tokens with heads, and in bf16 if scores are a sum of
    two products, one with constant keys; and OpenVINO ends the process if the output is added or multiplied twice, as
    in `y - y * x.sigmoid()`, or if group norms are added.
    """
    is_low = properties["INFERENCE_PRECISION_HINT"] == "bf16"
    for node in model.get_ordered_ops():
        if not node.get_output_size() or not (shape := node.get_output_partial_shape(0)).is_static:
            continue
        if _order(node) in ([0, 2, 1, 3], [1, 0, 2]):
            *_, some, others, _ = shape.to_shape()
            if some == others > 1:
                return {**properties, **WITHOUT_FUSION}
        kind = node.get_type_name()
        is_weighed = kind == "MatMul" and node.input_value(0).get_node().get_type_name() == "Softmax"
        most = {"GroupNormalization": 0, "ScaledDotProductAttention": 1}.get(kind, 1 if is_weighed else None)
        if most is not None and sum(user.get_node().get_type_name() in ARITHMETIC for user in _users(node)) > most:
            return {**properties, **WITHOUT_FUSION}
        if is_low and kind == "Softmax" and _products_in(node.input_value(0).get_node()) > 1:
            return {**properties, **WITHOUT_FUSION}
    return dict(properties)


def _products_in(scores: Any) -> int:
    """The number of products that scores are computed from, element by element."""
    nodes = {scores.get_name(): scores}
    todo = [scores]
    for node in todo:
        operands = [x.get_node() for x in node.input_values()] if node.get_type_name() in ARITHMETIC else []
        new = {operand.get_name(): operand for operand in operands if operand.get_name() not in nodes}
        nodes |= new
        todo += new.values()
    return sum(node.get_type_name() == "MatMul" for node in todo)


def masks_apart(model: Any) -> None:
    """Keep constants that are added to an additive mask, such as a bias or causality at fixed sizes, apart from it.

    OpenVINO compiles `(1 - x) * least + bias` to `x * -least + (least + bias)`, and the sum of constants absorbs the
    bias.
    """
    for node in _of_type(model, "Multiply"):
        for shown, least in (node.input_values(), node.input_values()[::-1]):
            inner = shown.get_node()
            is_moved = inner.get_type_name() in ("Add", "Subtract") and any(
                _number(x) is not None for x in inner.input_values()
            )
            if is_moved and abs(_number(least) or 0.0) >= LARGE:
                users, zero = _users(node), _constant(0.0, _kind(shown))
                _redirect(users, ops.select(ops.equal(shown, zero), zero, node))


def fp32_stays(model: Any) -> None:
    """Keep in fp32 what a bf16 model computes in fp32, such as angles and cumulative sums, and what it compares or
    converts to integers there, such as distances that get buckets; the hint would narrow both."""
    nodes = [node for node in model.get_ordered_ops() if node.get_output_size()]
    if not any(_kind(node.output(0)) == "bf16" for node in nodes):
        return
    mark = openvino.Core().read_model(PRECISE.encode(), b"").get_parameters()[0].get_rt_info()
    for node in nodes:
        kinds = {_kind(x) for x in (node.output(0), *node.input_values())}
        if node.get_type_name() in UNMARKED or "f32" not in kinds or _kind(node.output(0)) == "bf16":
            continue
        users = _users(node)  # before a new node is one of them
        marked = _as_compiled(node) if _kind(node.output(0)) == "f32" else [node]
        if marked[-1] is not node:
            _redirect(users, marked[-1])
        for key, value in mark.items():
            for stays in marked:
                stays.set_rt_info(value, key)


def _as_compiled(node: Any) -> list[Any]:
    """Nodes that compute the same, the last one the result, in the form into which OpenVINO would change the node: its
    own nodes have no mark."""
    kind = node.get_type_name()
    if kind in ("Squeeze", "Unsqueeze"):
        return [ops.reshape(node.input_value(0), ops.shape_of(node), False)]
    if kind == "Softmax" and (rank := node.get_input_partial_shape(0).rank).is_static:
        return [opset1.softmax(node.input_value(0), node.get_attributes()["axis"] % rank.get_length())]
    if (linear := _linear(node)) is None:
        return [node]
    x, factor, term = linear
    while len(x.get_target_inputs()) == 1 and (linear := _linear(x.get_node())) is not None:
        x, factor, term = linear[0], factor * linear[1], factor * linear[2] + term
    marked = []
    if (factor != 1).any():
        marked.append(x := ops.multiply(x, factor))
    if term.any() or not marked:
        marked.append(ops.add(x, term))
    return marked


def _linear(node: Any) -> tuple[Any, Array, Array] | None:
    """`x`, `factor` and `term` of a node that computes `x * factor + term`, None for any other."""
    kind, operands = node.get_type_name(), node.input_values()
    is_constant = [x.get_node().get_type_name() == "Constant" for x in operands]
    if kind not in ARITHMETIC or sum(is_constant) != 1:
        return None
    x, number = operands[is_constant[0]], operands[is_constant[1]].get_node().get_data()
    one, zero = np.ones_like(number), np.zeros_like(number)
    if kind == "Divide":
        return (x, 1 / number, zero) if is_constant[1] and number.all() else None
    if kind == "Subtract":
        return (x, one, -number) if is_constant[1] else (x, -one, number)
    return (x, one, number) if kind == "Add" else (x, number, zero)


def widened(model: Any) -> Any:
    """The model with all 16-bit tensors converted to fp32, except its inputs and outputs.

    OpenVINO computes in the type of its INFERENCE_PRECISION_HINT. 16-bit types in the graph make it also round numbers
    that a kernel keeps in registers, which takes time and loses precision. The least number of fp16, which stands for
    minus infinity in an additive mask, becomes that of fp32: it must absorb any score in fp32 too.
    """
    inputs, outputs = ([port.get_element_type() for port in ports] for ports in (model.inputs, model.outputs))
    nodes = [node for node in model.get_ordered_ops() if node.get_output_size()]
    kinds = NARROW if all(_kind(node.output(0)) != "f16" for node in nodes) else (*NARROW, "f32")
    for node in nodes:
        if _kind(node.output(0)) not in kinds:
            continue
        if node.get_type_name() == "Parameter":
            node.set_element_type(openvino.Type.f32)
        elif node.get_type_name() == "Constant":
            targets = node.output(0).get_target_inputs()  # before the conversion is one of them
            wide = (ops.constant(np.finfo(np.float32).min) if _is_least(node) else ops.convert(node, "f32")).output(0)
            for target in targets:
                target.replace_source_output(wide)
        elif node.get_type_name() == "Convert":
            _replace(node, ops.convert(node.input_value(0), "f32"))
    model.validate_nodes_and_infer_types()
    outside = openvino.preprocess.PrePostProcessor(model)
    for i, kind in enumerate(inputs):
        outside.input(i).tensor().set_element_type(kind)
    for i, kind in enumerate(outputs):
        outside.output(i).tensor().set_element_type(kind)
    return outside.build()


def _is_least(constant: Any) -> bool:
    """Whether a constant is the least number of fp16; in fp32, only where it multiplies or fills a mask."""
    if list(constant.get_output_shape(0)) or constant.get_value_strings() != [LEAST]:
        return False
    users = {target.get_node().get_type_name() for target in constant.output(0).get_target_inputs()}
    return _kind(constant.output(0)) == "f16" or users <= {"Multiply", "Select"}


def _of_type(model: Any, kind: str) -> list[Any]:
    """The nodes of a type, in an order in which they can be computed."""
    return [node for node in model.get_ordered_ops() if node.get_type_name() == kind]


def _replace(node: Any, by: Any) -> None:
    by.set_friendly_name(node.get_friendly_name())
    node.output(0).replace(by.output(0))


def _users(node: Any) -> list[Any]:
    """The inputs that read a node, except those of results, whose names belong to the node."""
    return [x for x in node.output(0).get_target_inputs() if x.get_node().get_type_name() != "Result"]


def _redirect(users: list[Any], by: Any) -> None:
    for user in users:
        user.replace_source_output(by.output(0))


def _kind(output: Any) -> str:
    return str(output.get_element_type().get_type_name())


def _numbers(node: Any) -> list[int]:
    """The numbers of a node's second input if it is a constant, otherwise an empty list."""
    second = node.input_value(1).get_node() if node.get_input_size() > 1 else None
    return second.get_data().reshape(-1).tolist() if second and second.get_type_name() == "Constant" else []


def _order(node: Any) -> list[int]:
    """The order of dims of a transpose; empty for any other node."""
    return _numbers(node) if node.get_type_name() == "Transpose" else []


def _under_batch(order: list[int]) -> list[int]:
    """The same order for dims that follow a first one, which stays first."""
    return [0, *(1 + i for i in order)]


def _constant(value: float, kind: str) -> Any:
    """A number of a type; OpenVINO cannot create an infinite 16-bit constant, but can convert one."""
    return ops.convert(ops.constant(np.float32(value)), kind)


def _value(output: Any) -> float | None:
    """The constant that an output is, or None."""
    node = output.get_node()
    while node.get_type_name() in ("Convert", "ConvertLike"):
        node = node.input_value(0).get_node()
    if node.get_type_name() != "Constant" or len(node.get_output_shape(0)) or _kind(node.output(0)) in NARROW:
        return None
    return float(node.get_data())


def _number(output: Any) -> float | None:
    """The same as a number that may have been rounded to 16 bits, and of any shape with one element."""
    node = output.get_node()
    while node.get_type_name() in ("Convert", "ConvertLike"):
        node = node.input_value(0).get_node()
    is_one = node.get_type_name() == "Constant" and math.prod(node.get_output_shape(0)) == 1
    return float(node.get_value_strings()[0]) if is_one else None


def _scale(query: Any, rest: list[Any]) -> float | None:
    if len(rest) > 1:
        return _value(rest[1])
    width = query.get_partial_shape()[-1]
    return float(width.get_length() ** -0.5) if width.is_static else None
