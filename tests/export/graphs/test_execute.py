"""The graph executor computes any tensor from any tensors: as it is, in float64 and with emulated 16-bit storage."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn
from torch.export import Dim

from attnforge.arrays import Array
from attnforge.export.graphs.attention import SILENT_ROWS
from attnforge.export.graphs.execute import as_it_is, at_own_precision, computed, in_float64, part_of
from attnforge.export.graphs.float64 import FUNCTIONS, NoDoublePath
from attnforge.export.graphs.types import widen
from attnforge.export.sources.torch_module import capture
from attnforge.precision import precision_named
from tests.support.linear_graph import ROWS, inputs, linear

BFLOAT16, FLOAT16, FLOAT = ir.DataType.BFLOAT16, ir.DataType.FLOAT16, ir.DataType.FLOAT
TYPES = pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT], ids=str)


def test_parts_of_a_graph() -> None:
    model = linear(FLOAT)
    assert computed(model) == ["product", "y"]
    part = part_of(model, ["product"])
    assert [node.op_type for node in part.graph] == ["MatMul"] and list(part.graph.initializers) == ["weight"]
    part = part_of(model, ["y"], ["product"])
    assert [node.op_type for node in part.graph] == ["Add"] and [v.name for v in part.graph.inputs] == ["product"]
    assert [node.op_type for node in model.graph] == ["MatMul", "Add"], "the model itself is not touched"


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT], ids=str)
def test_inputs_and_parameters_are_tensors_too(dtype: ir.DataType) -> None:
    """NumPy and ONNX Runtime share no bfloat16, so it is returned as float32."""
    tensors = as_it_is(linear(dtype), ["weight", "x"])({"x": inputs(dtype), "unknown": inputs(FLOAT)})
    assert list(tensors) == ["weight", "x"] and {array.dtype for array in tensors.values()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(tensors["x"], inputs(dtype).astype(np.float32))


@TYPES
def test_results_are_rounded_to_the_type_they_are_stored_in(dtype: ir.DataType) -> None:
    model, feeds = linear(dtype), {"x": inputs(dtype)}
    exact = in_float64(model)(feeds)["y"]
    stored = at_own_precision(model)(feeds)
    assert list(stored) == ["y", "x"] and stored["y"].dtype == np.float32
    np.testing.assert_array_equal(stored["y"], stored["y"].astype(dtype.numpy()).astype(np.float32))
    product = model.graph[0].outputs[0]
    once = at_own_precision(model, unrounded=[product])(feeds)["y"]
    unit = float(ml_dtypes.finfo(dtype.numpy()).eps) / 2  # type: ignore[no-untyped-call]
    np.testing.assert_allclose(once, exact, rtol=1.01 * unit, atol=1e-6)


@TYPES
def test_tensors_can_be_given(dtype: ir.DataType) -> None:
    model, product = linear(dtype), np.arange(2.0 * ROWS).reshape(ROWS, 2)
    for run in (in_float64, at_own_precision):
        tensors = run(model, ["y", "product"], ["product"])({"product": product, "x": inputs(dtype)})
        np.testing.assert_allclose(tensors["y"], product + np.array([0.3, 0.7]), rtol=2**-7)
        assert np.abs(tensors["product"] - product).max() > 1, "a given tensor is still computed if it is an output"


def test_an_operator_without_a_double_path_is_named() -> None:
    model = linear(FLOAT)
    node = ir.node("Hardmax", [model.graph.inputs[0]], name="hardest")
    node.outputs[0].name, node.outputs[0].type = "one_hot", ir.TensorType(FLOAT)
    model.graph.append(node)
    with pytest.raises(NoDoublePath, match="Hardmax"):
        in_float64(model, ["one_hot"])
    in_float64(model, ["y"])  # y does not need it


@pytest.mark.parametrize(
    "module",
    [
        nn.InstanceNorm1d(4, affine=True),
        nn.InstanceNorm2d(4),
        nn.AvgPool1d(3, 2, 1),
        nn.AvgPool2d((3, 2), 2, 1, count_include_pad=False),
        nn.Conv2d(4, 6, 3, 2, 1, dilation=2, groups=2),
        nn.ConvTranspose1d(4, 6, 4, 2, 1, bias=False),
        nn.ConvTranspose2d(4, 6, (3, 2), (2, 3), (1, 2), output_padding=1, groups=2, dilation=2),
    ],
    ids=repr,
)
def test_an_operator_without_a_double_kernel_is_decomposed(module: nn.Module) -> None:
    dims = (4, 9) if "1d" in repr(module) else (4, 9, 8)
    batch = ({0: Dim("batch", max=4)},)
    captured = capture(module.eval(), (torch.randn(2, *dims),), batch, precision_named("fp32"))
    feeds = {captured.inputs[0].name: np.random.default_rng(0).standard_normal((3, *dims))}
    (got,), (expected,) = in_float64(captured.model)(feeds).values(), captured.exact(feeds).values()
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-14)


def test_a_widened_graph_runs_from_bfloat16() -> None:
    """Its inputs and outputs are cast already, and are cast again for NumPy."""
    model, feeds = linear(BFLOAT16), {"x": inputs(BFLOAT16)}
    exact = in_float64(model)(feeds)["y"]
    widen(model)
    np.testing.assert_allclose(as_it_is(model)(feeds)["y"], exact, rtol=2**-8)


def alone(node: ir.Node, inputs: list[ir.Value], weights: list[ir.Value]) -> ir.Model:
    """A graph of one node, whose first output is called `output`."""
    (output, *_) = node.outputs
    output.name, output.type = "output", ir.TensorType(FLOAT)
    opsets = {"": 21, "com.microsoft": 1}
    return ir.Model(ir.Graph(inputs, [output], nodes=[node], initializers=weights, opset_imports=opsets), ir_version=10)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_group_query_attention_is_computed_in_float64(softcap: float) -> None:
    """Compare the kernel and float64 to the formula, with grouped heads and a sample that is shorter."""
    batch, tokens, heads, shared, size = 2, 9, 4, 2, 8
    names = {"query": heads, "key": shared, "value": shared}
    inputs = [
        ir.Value(name=name, shape=ir.Shape([batch, tokens, count * size]), type=ir.TensorType(FLOAT))
        for name, count in names.items()
    ]
    lengths = [tokens, tokens - 3]
    constants = {"last": np.asarray(lengths, np.int32) - 1, "total": np.asarray(tokens, np.int32)}
    weights = [ir.Value(name=name, const_value=ir.tensor(array, name=name)) for name, array in constants.items()]
    node = ir.node(
        "GroupQueryAttention", [*inputs, None, None, *weights], domain="com.microsoft", num_outputs=3,
        attributes={"num_heads": heads, "kv_num_heads": shared, "scale": 0.4, "softcap": softcap},
    )  # fmt: skip
    model = alone(node, inputs, weights)
    draws = np.random.default_rng(0)
    feeds = {name: draws.normal(size=(batch, tokens, count * size)).astype(np.float32) for name, count in names.items()}
    query, key, value = (
        np.repeat(feeds[name].astype(np.float64).reshape(batch, tokens, count, size), heads // count, 2).swapaxes(1, 2)
        for name, count in names.items()
    )
    scores = query @ key.swapaxes(2, 3) * 0.4
    if softcap:
        scores = np.tanh(scores / softcap) * softcap
    scores[:, :, ~np.tri(tokens, dtype=bool)] = -np.inf
    weighted = np.exp(scores - scores.max(-1, keepdims=True))
    result = weighted / weighted.sum(-1, keepdims=True) @ value
    expected = result.swapaxes(1, 2).reshape(batch, tokens, -1)
    exact, kernel = (run(model)(feeds)["output"] for run in (in_float64, as_it_is))
    for sample, length in enumerate(lengths):
        np.testing.assert_allclose(exact[sample, :length], expected[sample, :length], rtol=1e-12)
        np.testing.assert_allclose(kernel[sample, :length], expected[sample, :length], rtol=1e-4, atol=1e-6)


def test_group_query_attention_rotates_each_samples_tokens_from_the_first_on() -> None:
    """Compare the kernel to float64 on a first prompt whose samples have fewer tokens than there are columns."""
    batch, tokens, heads, shared, size, lengths = 3, 6, 4, 2, 16, [6, 4, 1]
    angles = np.arange(8)[:, None] * 10_000.0 ** (-np.arange(0, size, 2) / size)
    constants = {
        "last": np.asarray(lengths, np.int32) - 1, "total": np.asarray(tokens, np.int32),
        "cosines": np.cos(angles).astype(np.float32), "sines": np.sin(angles).astype(np.float32),
    }  # fmt: skip
    tensors = [ir.tensor(array, name=name) for name, array in constants.items()]
    weights = [
        ir.Value(name=t.name, const_value=t, type=ir.TensorType(t.dtype), shape=ir.Shape(t.shape.numpy()))
        for t in tensors
    ]
    names = {"query": heads, "key": shared, "value": shared}
    inputs = [
        ir.Value(name=name, type=ir.TensorType(FLOAT), shape=ir.Shape([batch, tokens, count * size]))
        for name, count in names.items()
    ]
    last, total, *tables = weights
    node = ir.node(
        "GroupQueryAttention", [*inputs, None, None, last, total, *tables], domain="com.microsoft", num_outputs=3,
        attributes={"num_heads": heads, "kv_num_heads": shared, "do_rotary": 1},
    )  # fmt: skip
    model = alone(node, inputs, weights)
    draws = np.random.default_rng(0)
    feeds = {name: draws.normal(size=(batch, tokens, count * size)).astype(np.float32) for name, count in names.items()}
    exact, kernel = (run(model)(feeds)["output"] for run in (in_float64, as_it_is))
    for sample, length in enumerate(lengths):
        np.testing.assert_allclose(kernel[sample, :length], exact[sample, :length], rtol=1e-4, atol=1e-6)


def attends(batch: int, n_q: int, n_k: int, mask: str | None, **attributes: int) -> tuple[ir.Model, dict[str, Array]]:
    """A graph of one Attention of two heads, and its inputs."""
    draws = np.random.default_rng(n_q + 31 * n_k)
    feeds: dict[str, Array] = {
        name: draws.normal(size=(batch, 2, n, 4)) for name, n in (("q", n_q), ("k", n_k), ("v", n_k))
    }
    if mask == "boolean":
        feeds["mask"] = draws.random((n_q, n_k)) < 0.5
        feeds["mask"][0] = False
    elif mask == "added":
        feeds["mask"] = np.where(draws.random((n_q, n_k)) < 0.5, -np.inf, draws.normal(size=(n_q, n_k)))
    inputs = [
        ir.Value(
            name=name, shape=ir.Shape(array.shape),
            type=ir.TensorType(ir.DataType.BOOL if array.dtype == bool else FLOAT),
        )
        for name, array in feeds.items()
    ]  # fmt: skip
    return alone(ir.node("Attention", inputs, attributes), inputs, []), feeds


@pytest.mark.parametrize("mask", [None, "boolean", "added"])
@pytest.mark.parametrize(("n_q", "n_k"), [(7, 7), (9, 4), (3, 8)])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize(("left", "right"), [(-1, -1), (2, -1), (-1, 1), (1, 2), (0, 0)])
def test_attention_is_what_the_standard_says(
    mask: str | None, n_q: int, n_k: int, causal: int, left: int, right: int
) -> None:
    windows = {"left_window_size": left, "right_window_size": right} if (left, right) != (-1, -1) else {}
    model, feeds = attends(2, n_q, n_k, mask, is_causal=causal, **windows)
    exact = in_float64(model)(feeds)["output"]
    model.graph.opset_imports[""] = 25
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.type = value.type if value.dtype == ir.DataType.BOOL else ir.TensorType(ir.DataType.DOUBLE)
    expected: Any = next(iter(ReferenceEvaluator(ir.to_proto(model)).run(None, feeds)))
    np.testing.assert_allclose(exact, expected, rtol=1e-12, atol=1e-14)


def test_a_fully_masked_row_gets_what_the_metadata_says() -> None:
    model, feeds = attends(1, 3, 5, "boolean")
    assert (in_float64(model)(feeds)["output"][:, :, 0] == 0).all()
    model.graph[0].metadata_props[SILENT_ROWS] = "nan"
    result = in_float64(model)(feeds)["output"]
    assert np.isnan(result[:, :, 0]).all() and np.isfinite(result[:, :, 1:]).all()


@pytest.mark.parametrize("op", sorted({*FUNCTIONS} - {"RotaryEmbedding"}))
def test_functions_of_onnx_without_attributes_in_double(op: str) -> None:
    x = np.linspace(-3, 3, 36, dtype=np.float32).reshape(2, 2, 3, 3)
    arguments = "x, x" if op == "PRelu" else "x"
    graph = f"g (float[2, 2, 3, 3] x) => (float[2, 2, 3, 3] y) {{ y = {op}({arguments}) }}"
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 23]> {graph}')
    (got,) = in_float64(ir.from_proto(proto))({"x": x}).values()
    expected: Any = ReferenceEvaluator(proto).run(None, {"x": x})
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected[0], rtol=1e-5, atol=1e-6)
