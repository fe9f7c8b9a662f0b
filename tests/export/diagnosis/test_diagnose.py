"""diagnose: where and why deliberately broken models break; and that a wrong rewrite is distinguished from rounding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from torch import nn
from typer.testing import CliRunner

import attnforge
from attnforge.bundle import Bundle, Manifest, TargetRecord
from attnforge.cli import app
from attnforge.errors import UnknownNameError
from attnforge.export.diagnosis.deployed import stored_low
from attnforge.export.diagnosis.diagnose import Diagnosis, diagnose
from attnforge.export.diagnosis.trace import trace
from attnforge.export.graphs.build import Builder
from attnforge.export.lowering import onnxruntime as for_onnxruntime
from attnforge.export.lowering.attention import Attention
from attnforge.runtime.backends.registry import why_not_here
from tests.export.conftest import DeployBroken
from tests.support.broken import BROKEN, healthy, made
from tests.support.bundles import DeploySmall, rewrite

TARGETS = ("onnxruntime", "tensorrt_rtx")


def deployed(make: Callable[[], nn.Module], precision: str, folder: Path) -> Bundle:
    module, args, shapes = made(make)
    return attnforge.deploy(module, args, folder, shapes, precision, TARGETS, tune=False, keep_wrong=True)


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_is_found_and_why(name: str, broken: DeployBroken) -> None:
    expected = BROKEN[name]
    diagnosis = diagnose(broken(name, expected.precision), case="example")
    finding = diagnosis.finding
    blamed = (expected.cause, expected.module, expected.operator)
    assert (finding.cause, finding.module, finding.operator) == blamed, finding
    assert finding.stage == "eager" and not diagnosis.healthy
    assert diagnosis.same_function == ["plain", "canonical", *TARGETS]
    if finding.error_without is not None:
        assert diagnosis.error is not None and finding.error_without < diagnosis.error / 2
    assert any(report.tensor == finding.tensor for report in diagnosis.tensors), "it is among those listed"
    if finding.line is not None:
        assert finding.line.startswith("broken.py:")


@pytest.fixture(scope="module")
def of_healthy(broken: DeployBroken) -> Diagnosis:
    return diagnose(broken("healthy", "fp16"))


def test_a_healthy_model_is_reported_as_healthy(of_healthy: Diagnosis) -> None:
    diagnosis = of_healthy
    assert diagnosis.healthy and diagnosis.finding.cause == "rounding" and diagnosis.finding.tensor is None
    assert diagnosis.error is not None and diagnosis.eager_error is not None
    assert diagnosis.error == pytest.approx(diagnosis.eager_error, rel=0.5), "the emulated eager is torch's eager"
    assert 30 < diagnosis.examined < 200 and len(diagnosis.tensors) == 12


def test_weights_beyond_the_range_of_the_precision(tmp_path: Path) -> None:
    def make() -> nn.Module:
        module = healthy()
        module.steps[0].mlp[0].bias.data[0] = 1e5  # type: ignore[index, union-attr]
        return module

    finding = diagnose(deployed(make, "fp16", tmp_path / "b")).finding
    assert finding.cause == "overflow" and "weights steps.0.mlp.0.bias" in finding.evidence


def test_terms_that_cancel_to_zero_are_not_below_the_range_of_their_type() -> None:
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, 3]))
    node = ir.node("ReduceSum", [x])
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "sum", x.type, ir.Shape([1, 1])
    model = ir.Model(ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 23}, name="g"), ir_version=10)
    (result,) = trace(model, {"x": np.array([[1, 1e-12, -1]], np.float32)}).tensors
    assert result.own == 1 and result.zeroed == 0


# Graphs that are another function


def altered(bundle: Bundle, copy: Path, file: str, change: Callable[[ir.Model], None]) -> Diagnosis:
    """Diagnose a copy of `bundle` with one of its graphs changed."""
    shutil.copytree(bundle.path, copy)
    model = ir.load(copy / file)
    change(model)
    ir.save(model, copy / file)
    return diagnose(rewrite(copy))


def another_scale(model: ir.Model) -> None:
    node = next(n for n in model.graph if n.op_type == "MultiHeadAttention")
    node.attributes["scale"] = ir.AttrFloat32("scale", node.attributes["scale"].as_float() * 1.01)


def reproduced(diagnosis: Diagnosis) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The outputs of the parts that reproduce a fault, before and after."""
    before, after, inputs = diagnosis.finding.reproduction
    arrays = np.load(inputs)
    results = []
    for file in (before, after):
        session = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
        results.append(session.run(None, {value.name: arrays[value.name] for value in session.get_inputs()}))
    return results[0], results[1]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_wrong_lowering_is_named(precision: str, broken: DeployBroken, tmp_path: Path) -> None:
    diagnosis = altered(broken("healthy", precision), tmp_path / "b", "onnxruntime/model.onnx", another_scale)
    finding = diagnosis.finding
    assert finding.cause == "rewrite" and finding.stage == "onnxruntime" and finding.module == "steps.0.attention"
    assert str(finding.rule).startswith("lowering for onnxruntime: Attention to com.microsoft::MultiHeadAttention")
    assert diagnosis.same_function == ["plain", "canonical"]
    assert diagnosis.failing == (["onnxruntime-cpu"] if precision == "fp32" else diagnosis.failing)
    nodes = [node.op_type for node in ir.load(finding.reproduction[1]).graph]
    assert nodes.count("MultiHeadAttention") == 1 and len(nodes) < 20, "the site alone"
    before, after = reproduced(diagnosis)
    assert not np.allclose(before[0], after[0], rtol=1e-4)


def test_a_fault_in_the_lowering_itself_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that is applied twice, as a bug in our own code might do."""
    right = for_onnxruntime._multi_head

    def wrong(op: Builder, a: Attention, name: str, packed: bool) -> ir.Value:
        return right(op, replace(a, scale=2 * a.scale), name, packed)

    monkeypatch.setattr(for_onnxruntime, "_multi_head", wrong)
    finding = diagnose(deployed(healthy, "fp16", tmp_path / "b")).finding
    assert finding.cause == "rewrite" and finding.module == "steps.0.attention"
    assert str(finding.rule).startswith("lowering for onnxruntime: Attention to com.microsoft::MultiHeadAttention")


def test_a_wrong_canonical_graph_is_named(broken: DeployBroken, tmp_path: Path) -> None:
    def change(model: ir.Model) -> None:
        node = [n for n in model.graph if n.op_type == "Attention"][1]
        node.attributes["scale"] = ir.AttrFloat32("scale", 0.3)

    diagnosis = altered(broken("healthy", "fp32"), tmp_path / "b", "canonical.onnx", change)
    assert diagnosis.finding.cause == "rewrite" and diagnosis.finding.stage == "canonical"
    assert diagnosis.finding.module == "steps.1.attention"
    assert str(diagnosis.finding.rule).startswith("canonicalize: MatMul·") and diagnosis.same_function == ["plain"]


def test_a_wrong_form_for_tensorrt_is_named_although_nothing_runs_it(broken: DeployBroken, tmp_path: Path) -> None:
    def change(model: ir.Model) -> None:
        node = next(n for n in model.graph if n.op_type == "Softmax")
        node.attributes["axis"] = ir.AttrInt64("axis", 2)

    diagnosis = altered(broken("healthy", "fp16"), tmp_path / "b", "tensorrt/model.onnx", change)
    assert diagnosis.failing == [] and not diagnosis.healthy
    assert diagnosis.finding.stage == "tensorrt_rtx" and diagnosis.finding.module == "steps.0.attention"
    before, after = reproduced(diagnosis)
    assert not np.allclose(before[0], after[0], rtol=1e-2)


def test_altered_weights_are_named(broken: DeployBroken, tmp_path: Path) -> None:
    def change(model: ir.Model) -> None:
        weight = model.graph.initializers["steps.1.mlp.0.bias"]
        assert weight.const_value is not None
        numbers = weight.const_value.numpy().copy()
        numbers[7] *= 1.5
        weight.const_value = ir.tensor(numbers, name=weight.name)

    finding = altered(broken("healthy", "fp32"), tmp_path / "b", "onnxruntime/model.onnx", change).finding
    assert finding.rule == "the weights steps.1.mlp.0.bias differ at 1 of 256 positions, first at [7]"
    assert finding.module == "steps.1.mlp.0"


def test_another_operator_is_named(broken: DeployBroken, tmp_path: Path) -> None:
    def change(model: ir.Model) -> None:
        node = next(n for n in model.graph if n.op_type == "Gelu")
        node.attributes["approximate"] = ir.AttrString("approximate", "tanh")

    finding = altered(broken("healthy", "fp32"), tmp_path / "b", "onnxruntime/model.onnx", change).finding
    assert finding.module == "steps.0.mlp.1" and "Gelu (node_gelu) has other attributes" in str(finding.rule)


def test_a_cast_in_the_deployed_graph_alone_is_found_in_the_backends_own_tensors(
    broken: DeployBroken, tmp_path: Path
) -> None:
    """In float64 a cast does nothing, so the graphs are one function; only the backend's own tensors show it."""

    def change(model: ir.Model) -> None:
        node = next(n for n in model.graph if n.op_type == "Gelu")
        value = node.outputs[0]
        users = list(value.uses())
        narrow = ir.node("Cast", [value], {"to": ir.DataType.FLOAT16.value}, name="narrow")
        wide = ir.node("Cast", narrow.outputs, {"to": ir.DataType.FLOAT.value}, name="wide")
        for cast, dtype in ((narrow, ir.DataType.FLOAT16), (wide, ir.DataType.FLOAT)):
            cast.outputs[0].name, cast.outputs[0].type = f"{cast.name}:0", ir.TensorType(dtype)
            cast.outputs[0].shape = value.shape
        for user, index in users:
            user.replace_input_with(index, wide.outputs[0])
        model.graph.insert_after(node, [narrow, wide])

    diagnosis = altered(broken("healthy", "fp32"), tmp_path / "b", "onnxruntime/model.onnx", change)
    finding = diagnosis.finding
    assert diagnosis.same_function == ["plain", "canonical", *TARGETS] and diagnosis.failing == ["onnxruntime-cpu"]
    assert (finding.cause, finding.stage, finding.module) == ("operator", "onnxruntime-cpu", "steps.0.mlp.2"), finding
    assert "it is stored in float16" in finding.evidence


def test_a_cast_is_looked_for_in_the_graph_that_a_backend_runs(broken: DeployBroken, tmp_path: Path) -> None:
    """OpenVINO's own graph if it has one, otherwise the canonical one, whether or not there is one for ONNX Runtime."""
    copy = shutil.copytree(broken("healthy", "fp32").path, tmp_path / "b")
    model = ir.load(copy / "onnxruntime/model.onnx")
    node = next(n for n in model.graph if n.op_type == "Gelu")
    narrow = ir.node("Cast", [node.inputs[0]], {"to": ir.DataType.FLOAT16.value}, name="narrow")
    narrow.outputs[0].name, narrow.outputs[0].type = "narrow:0", ir.TensorType(ir.DataType.FLOAT16)
    wide = ir.node("Cast", narrow.outputs, {"to": ir.DataType.FLOAT.value}, name="wide")
    node.replace_input_with(0, wide.outputs[0])
    model.graph.insert_before(node, [narrow, wide])
    ir.save(model, copy / "openvino.model.onnx")
    tensor = str(node.outputs[0].name)

    def add_target(manifest: Manifest) -> None:
        manifest.targets["openvino"] = TargetRecord(model="openvino.model.onnx")

    bundle = rewrite(copy, add_target)
    assert stored_low(bundle, "openvino", tensor) == "FLOAT16" and stored_low(bundle, "onnxruntime-cpu", tensor) is None
    bundle = rewrite(copy, lambda manifest: [manifest.targets.pop(name) for name in ("openvino", "onnxruntime")])
    assert stored_low(bundle, "openvino", tensor) is None


def test_tensors_of_a_backend_are_reported_with_those_of_eager(of_healthy: Diagnosis) -> None:
    assert of_healthy.not_traced == {}
    reports = [report for report in of_healthy.tensors if "onnxruntime-cpu" in report.deployed]
    assert reports, "the graphs have names in common"
    for report in reports:
        error = report.deployed["onnxruntime-cpu"] or 0
        assert report.error is not None and 0 <= error < report.error, "it computes in fp32"


@pytest.mark.gpu("tensorrt_rtx")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_tensors_of_tensorrt_rtx(precision: str, broken: DeployBroken) -> None:
    diagnosis = diagnose(broken("healthy", precision), ["tensorrt_rtx"])
    assert diagnosis.healthy and diagnosis.not_traced == {}
    assert any("tensorrt_rtx" in report.deployed for report in diagnosis.tensors)


# The command


def test_the_command(broken: DeployBroken) -> None:
    overflowing, fine = broken("residual stream", "fp16"), broken("healthy", "fp16")
    ran = CliRunner().invoke(app, ["diagnose", str(overflowing.path), "--json"])
    assert ran.exit_code == 1 and json.loads(ran.stdout)["finding"]["cause"] == "overflow"
    ran = CliRunner().invoke(app, ["diagnose", str(fine.path)])
    text = " ".join(ran.stdout.split())
    assert ran.exit_code == 0 and "no tensor is to blame" in text and "plain = canonical = onnxruntime" in text
    with pytest.raises(UnknownNameError, match="unknown case 'none'"):
        diagnose(fine, case="none")


@pytest.mark.skipif(why_not_here("openvino") is not None, reason="no OpenVINO")
def test_the_tensors_of_openvino_are_those_of_the_canonical_graph(small: DeploySmall) -> None:
    diagnosis = diagnose(small("fp32"), ["openvino"])
    assert diagnosis.healthy and diagnosis.not_traced == {}
