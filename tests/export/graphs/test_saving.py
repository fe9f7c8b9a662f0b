"""Weights of large graphs are stored once, in a file that is mapped, and do not stay in memory."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from attnforge.bundle import WEIGHTS
from attnforge.export.graphs import saving
from attnforge.export.graphs.execute import as_it_is

X = np.ones((1, 32), np.float32)


def graph() -> ir.Model:
    """`(x W) B` with a large weight W and a small weight B."""
    x = ir.Value(name="x", shape=ir.Shape([1, 32]), type=ir.TensorType(ir.DataType.FLOAT))
    weights = []
    for name, shape in (("W", (32, 64)), ("B", (64, 2))):
        tensor = ir.Tensor(np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 1000, name=name)
        weights.append(ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor))
    first = ir.node("MatMul", [x, weights[0]], name="first")
    second = ir.node("MatMul", [first.outputs[0], weights[1]], name="second")
    first.outputs[0].name, second.outputs[0].name = "between", "y"
    second.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    made = ir.Graph(
        [x], second.outputs, nodes=[first, second], initializers=weights, opset_imports={"": 23}, name="graph"
    )
    return ir.Model(made, ir_version=10)


@pytest.fixture
def shelved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count graphs as large from the first byte of weights."""
    monkeypatch.setattr(saving, "SHELVED", 1)
    monkeypatch.setattr("attnforge.export.graphs.execute.SHELVED", 1)


@pytest.mark.usefixtures("shelved")
def test_shelved_weights_leave_memory_and_the_graph_computes_the_same_function(tmp_path: Path) -> None:
    model = graph()
    expected = as_it_is(model)({"x": X})["y"]
    plain, original = model.clone(), model.clone()
    weight = weakref.ref(model.graph.initializers["W"].const_value)
    shelf = saving.Shelf(tmp_path)
    assert shelf.save(model, "canonical.onnx") == "canonical.onnx"
    shelf.save_sharing(plain, "plain.onnx", model, "canonical.onnx")
    shelf.share(original)
    gc.collect()
    assert weight() is None, "something keeps the weight in memory"
    for each in (model, plain, original):
        large, small = (each.graph.initializers[name].const_value for name in "WB")
        assert (
            isinstance(large, ir.ExternalTensor)
            and large.location == WEIGHTS
            and not isinstance(small, ir.ExternalTensor)
        )
        np.testing.assert_array_equal(as_it_is(each)({"x": X})["y"], expected)
    size = (tmp_path / WEIGHTS).stat().st_size
    assert shelf.save(model.clone(), "onnxruntime/model.onnx") == "onnxruntime.model.onnx"
    assert (tmp_path / WEIGHTS).stat().st_size == size == 4 * 32 * 64, "weights are stored more than once"
    np.testing.assert_array_equal(as_it_is(ir.load(tmp_path / "onnxruntime.model.onnx"))({"x": X})["y"], expected)


def test_a_graph_beyond_the_limit_has_its_weights_in_a_separate_file(tmp_path: Path) -> None:
    saving.save(graph(), tmp_path / "one.onnx")
    saving.save(graph(), tmp_path / "two.onnx", limit=1)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.onnx", "two.onnx", "two.onnx.data"]
    first, second = (as_it_is(ir.load(tmp_path / f"{name}.onnx"))({"x": X})["y"] for name in ("one", "two"))
    np.testing.assert_array_equal(first, second)
