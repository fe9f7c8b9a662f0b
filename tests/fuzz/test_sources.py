"""Attention graphs, and ONNX's node tests, with altered operators, attributes, types, sizes, constants or bytes."""

from __future__ import annotations

import functools
import math
import shutil
import warnings
from base64 import b64encode

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import assume, event, given, note
from hypothesis import strategies as st
from onnx import TensorProto
from onnx.backend.test.case.node import collect_testcases

from tests.fuzz.budget import LONG, tries
from tests.fuzz.changes import changed_bytes, texts
from tests.fuzz.subject import Subject
from tests.support.random_graphs import FLOAT, Drawn, Invalid, attention

OPERATORS = ("Add", "Sub", "Div", "MatMul", "Softmax", "Transpose", "Reshape", "Identity", "Where", "Gather",
             "Expand", "ConstantOfShape", "Range", "Loop", "If", "RandomNormal", "NonZero", "Unique", "Attention",
             "Tile", "NoSuchOperator", "Einsum", "Cast", "Resize", "Compress", "StringNormalizer")  # fmt: skip
WHOLE = st.sampled_from([0, 1, -1, 2, 3, 100, 2**31, 2**40, 2**63 - 1, -(2**63)]) | st.integers(-5, 5)
TYPES = st.integers(0, 25)
OUTSIDE = ("../outside", "/etc/passwd", "absent", "model.onnx")


@st.composite
def wrong(draw: st.DrawFn, model: onnx.ModelProto) -> onnx.ModelProto:
    """Draw the model with one to three changes."""
    for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
        change = draw(st.sampled_from([_operator, _edge, _attribute, _constant, _value, _version]))
        change(draw, model)
    return model


def _operator(draw: st.DrawFn, model: onnx.ModelProto) -> None:
    nodes = model.graph.node
    assume(nodes)
    node = nodes[draw(st.integers(0, len(nodes) - 1))]
    how = draw(st.sampled_from(["other", "domain", "gone", "twice", "name"]))
    if how == "other":
        node.op_type = draw(st.sampled_from(OPERATORS))
    elif how == "domain":
        node.domain = draw(st.sampled_from(["com.microsoft", "ai.onnx.ml", "own", "x" * 2_000]))
    elif how == "gone":
        nodes.remove(node)
    elif how == "twice":
        nodes.append(node)
    else:
        node.name = draw(texts.filter(_is_utf8))


def _edge(draw: st.DrawFn, model: onnx.ModelProto) -> None:
    nodes = [node for node in model.graph.node if node.input]
    assume(nodes)
    node = nodes[draw(st.integers(0, len(nodes) - 1))]
    names = [name for each in model.graph.node for name in (*each.input, *each.output)]
    name = draw(st.sampled_from(["", "unknown", *dict.fromkeys(names)]))
    side = draw(st.sampled_from([node.input, node.output]))
    how = draw(st.sampled_from(["other", "gone", "more"]))
    if how == "more":
        side.append(name)
    elif side:
        position = draw(st.integers(0, len(side) - 1))
        if how == "other":
            side[position] = name
        else:
            del side[position]


def _attribute(draw: st.DrawFn, model: onnx.ModelProto) -> None:
    nodes = [node for node in model.graph.node if node.attribute]
    assume(nodes)
    node = nodes[draw(st.integers(0, len(nodes) - 1))]
    attribute = node.attribute[draw(st.integers(0, len(node.attribute) - 1))]
    how = draw(st.sampled_from(["value", "gone", "type", "name"]))
    if how == "gone":
        node.attribute.remove(attribute)
    elif how == "type":
        attribute.type = draw(st.integers(0, 14))
    elif how == "name":
        attribute.name = draw(st.sampled_from(["axis", "perm", "to", "scale", "nothing"]))
    else:
        attribute.i = draw(WHOLE)
        attribute.f = draw(st.floats(width=32) | st.sampled_from([0.0, 1e30]))
        if attribute.ints:
            attribute.ints[draw(st.integers(0, len(attribute.ints) - 1))] = draw(WHOLE)


def _constant(draw: st.DrawFn, model: onnx.ModelProto) -> None:
    constants = [node.attribute[0].t for node in model.graph.node if node.op_type == "Constant" and node.attribute]
    constants += model.graph.initializer
    assume(constants)
    tensor = constants[draw(st.integers(0, len(constants) - 1))]
    how = draw(st.sampled_from(["dims", "type", "bytes", "outside", "number"]))
    if how == "dims":
        position = draw(st.integers(0, len(tensor.dims)))
        if position == len(tensor.dims):
            tensor.dims.append(draw(WHOLE))
        else:
            tensor.dims[position] = draw(WHOLE)
    elif how == "type":
        tensor.data_type = draw(TYPES)
    elif how == "outside":
        tensor.data_location = TensorProto.EXTERNAL
        entry = tensor.external_data.add()
        entry.key, entry.value = (
            "location",
            draw(st.sampled_from(OUTSIDE)),
        )
    elif how == "number" and tensor.data_type == TensorProto.INT64 and len(tensor.raw_data) >= 8:
        tensor.raw_data = draw(WHOLE).to_bytes(8, "little", signed=True) + tensor.raw_data[8:]
    else:
        tensor.raw_data = draw(changed_bytes(tensor.raw_data))


def _value(draw: st.DrawFn, model: onnx.ModelProto) -> None:
    values = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    value = values[draw(st.integers(0, len(values) - 1))]
    how = draw(st.sampled_from(["type", "dim", "rank", "name", "none"]))
    if how == "type":
        value.type.tensor_type.elem_type = draw(TYPES)
    elif how == "name":
        value.name = draw(texts.filter(_is_utf8))
    elif how == "none":
        value.ClearField("type")
    else:
        dims = value.type.tensor_type.shape.dim
        dim = dims.add() if how == "rank" or not dims else dims[draw(st.integers(0, len(dims) - 1))]
        if draw(st.booleans()):
            dim.dim_value = draw(WHOLE)
        else:
            dim.dim_param = draw(st.sampled_from(["n", "2*n", "n//0", "import os", "", "x" * 3_000, "((("]))


def _version(draw: st.DrawFn, model: onnx.ModelProto) -> None:
    if draw(st.booleans()):
        model.opset_import[0].version = draw(st.integers(0, 30) | WHOLE)
    else:
        model.ir_version = draw(st.integers(0, 14) | WHOLE)


def _is_utf8(text: str) -> bool:
    return not any(0xD800 <= ord(letter) < 0xE000 for letter in text)


@functools.cache
def operators() -> list[bytes]:
    """The graphs of ONNX's node tests (`onnx.backend.test`), of up to 64 KiB and 4,096 numbers of input and output.
    Those that return scores are left out: ONNX Runtime has the least number in place of minus infinity."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        models = [case.model for case in collect_testcases(None) if case.model is not None and "_qk_" not in case.name]
    small = [model for model in models if max(map(_numbers, (*model.graph.input, *model.graph.output))) <= 4096]
    return [text for text in map(onnx.ModelProto.SerializeToString, small) if len(text) <= 2**16]


def _numbers(value: onnx.ValueInfoProto) -> int:
    return math.prod(dim.dim_value for dim in value.type.tensor_type.shape.dim if dim.dim_value)


def attention_graph(data: st.DataObject) -> bytes:
    try:
        text: bytes = ir.to_proto(attention(Drawn(data), None, (), FLOAT).model).SerializeToString()
        return text
    except Invalid:
        assume(False)
        raise


@pytest.mark.parametrize(
    "kind",
    ["attention", pytest.param("operator", marks=pytest.mark.skipif(not LONG, reason="in `make fuzz` alone"))],
)
@tries(few=8, many=1_000, shrinks=False)  # every example is deployed
@given(data=st.data())
def test_a_graph_is_accepted_rightly_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, subject: Subject, kind: str, data: st.DataObject
) -> None:
    text = attention_graph(data) if kind == "attention" else data.draw(st.sampled_from(operators()))
    model = onnx.ModelProto.FromString(text)
    if kind == "attention" or data.draw(st.integers(0, 3)):
        model = data.draw(wrong(model))
    assume(kind == "attention" or max(map(_numbers, model.graph.input), default=0) <= 2**20)  # others may take minutes
    text = model.SerializeToString()
    if data.draw(st.integers(0, 4)) == 4:
        text = data.draw(changed_bytes(text))
    note(f"base64: {b64encode(text).decode()}")
    folder = tmp_path_factory.getbasetemp() / "source"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "model.onnx").write_bytes(text)
    answer = subject.ask("deploy_source", str(folder / "model.onnx"), str(folder / "out"))
    event(answer.text if answer.kind == "accepted" else "refused")
    left = {path.name for path in folder.iterdir()}
    assert left <= {"model.onnx", "out"} and ("out" in left) == (answer.kind == "accepted")
