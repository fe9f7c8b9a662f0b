"""precision="auto": 16 bits except where the budget demands fp32, with attention still fused."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from typer.testing import CliRunner

import attnforge
from attnforge.arrays import Array
from attnforge.bundle import Bundle, Mixed
from attnforge.cli import app
from attnforge.errors import BuildError, UnknownNameError, UsageError
from attnforge.export.flops import known_flops
from attnforge.export.precision.assign import assign, operators
from attnforge.export.precision.judge import Requirement, Trial
from attnforge.model import build_model
from attnforge.precision import PRECISIONS
from attnforge.runtime.parity.metrics import MeasuredMetric, accuracy
from attnforge.runtime.parity.verify import hold, stored_inputs
from attnforge.runtime.session import Session
from tests.export.conftest import DeployBroken
from tests.support.broken import BROKEN, DIM, TOKENS, Block, Shifted, Stack, healthy, made
from tests.support.emulated import Emulated

FLOAT, FLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16
TARGETS = ("onnxruntime", "tensorrt_rtx")


def chosen(make: Callable[[], nn.Module], folder: Path, precision: str = "auto", **options: object) -> Bundle:
    module, args, shapes = made(make)
    return attnforge.deploy(module, args, folder, shapes, precision, TARGETS, tune=False, **options)  # type: ignore[arg-type]


def of(bundle: Bundle) -> Mixed:
    assert bundle.manifest.mixed is not None
    return bundle.manifest.mixed


def check(bundle: Bundle) -> None:
    """Check that the bundle is within its budget, deployed and as TensorRT would store it, and that its files match its
    record of types."""
    assert attnforge.verify(bundle).passed
    session = Session(bundle, Emulated(bundle))
    report = hold(bundle, session.backend, session.run)
    assert report.passed, report.failures
    mixed, manifest = of(bundle), bundle.manifest
    assert mixed.error <= mixed.max_error and manifest.precision == mixed.low
    assert {spec.dtype for spec in (*manifest.inputs, *manifest.outputs)} == {"float32"}
    canonical = ir.load(bundle.file("canonical.onnx"))
    high = {name for region in mixed.regions for name in region.nodes}
    assert high == {
        str(node.name)
        for node in canonical.graph
        if node.op_type != "Cast" and node.name in high and node.outputs[0].dtype == FLOAT
    }


# Models that break on purpose


IN_BF16 = ("residual stream", "LayerNorm")
"""Models that bf16 can represent without fp32, so that `auto` takes it; otherwise it takes fp16, as `auto-fp16`
does."""


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        (name, precision)
        for name, broken in BROKEN.items()
        for precision in (["auto", "auto-fp16"] if name in IN_BF16 else ["auto"])
        if broken.saved
    ],
)
def test_what_breaks_is_saved(name: str, precision: str, broken: DeployBroken) -> None:
    bundle = broken(name, precision)
    check(bundle)
    assert of(bundle).low == ("bf16" if precision == "auto" and name in IN_BF16 else "fp16")
    assert of(bundle).low_flops >= 0.8
    attention = bundle.manifest.attention
    assert attention.sites > 0
    if name == "unscaled, head of 512":
        assert (
            attention.fused["tensorrt_rtx"] == 0 and "exceed what fused kernels support" in attention.unfused[0].reason
        )
    else:
        assert attention.fused["tensorrt_rtx"] == attention.sites


def test_what_stays_in_fp32_and_why(broken: DeployBroken) -> None:
    mixed = of(broken("residual stream", "auto-fp16"))
    modules = [region.module for region in mixed.regions]
    assert "steps.2" in modules and "steps.0" not in modules and "steps.0.mlp.0" not in modules
    stream = next(region for region in mixed.regions if region.module == "steps.2")
    assert "beyond the range of fp16" in stream.why
    assert mixed.steps[0].startswith("all in 16 bits: 0 of") and "NaN or infinity" in mixed.steps[0]


def test_a_healthy_model_stays_in_16_bits(broken: DeployBroken) -> None:
    bundle = broken("healthy", "auto")
    check(bundle)
    mixed = of(bundle)
    assert (mixed.low, mixed.regions, mixed.low_flops, mixed.trials) == ("fp16", [], 1.0, 1)


def test_a_vit_stays_in_16_bits(tmp_path: Path) -> None:
    module, args, shapes = build_model("vit", num_layers=1)
    bundle = attnforge.deploy(module, args, tmp_path / "b", shapes, "auto", TARGETS, tune=False)
    check(bundle)
    assert of(bundle).regions == [] and bundle.manifest.attention.fused["tensorrt_rtx"] == 1


def test_operators_raised_for_nothing_are_lowered_again(tmp_path: Path) -> None:
    """An offset that is subtracted again needs two operators in fp32, and no others of a deep model."""
    make = lambda: Stack(Block(), Shifted(100.0), Block())  # noqa: E731
    mixed = of(chosen(make, tmp_path / "b", "auto-fp16"))
    assert {region.module for region in mixed.regions} == {"steps.1"} and mixed.low_flops == 1.0


# The budget


def one_block() -> nn.Module:
    return Stack(Block(), nn.LayerNorm(DIM))


def test_a_smaller_error_takes_more_of_fp32(tmp_path: Path) -> None:
    loose = of(chosen(one_block, tmp_path / "loose", max_error=2e-3))
    bundle = chosen(one_block, tmp_path / "tight", max_error=3e-4)
    tight = of(bundle)
    check(bundle)
    assert loose.regions == [] and tight.regions and tight.error <= 3e-4 < loose.error
    assert tight.low_flops <= loose.low_flops and len(tight.regions) > 2
    assert (tight.max_error, tight.exactly, loose.exactly) == (3e-4, True, True)


def test_an_error_that_fp32_misses_too_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="even fp32 throughout misses the budget"):
        chosen(one_block, tmp_path / "b", max_error=1e-9)
    assert not (tmp_path / "b").exists()


def test_bf16(broken: DeployBroken) -> None:
    bundle = broken("healthy", "auto-bf16")
    check(bundle)
    assert of(bundle).low == bundle.manifest.precision == "bf16" and of(bundle).regions == []


def test_invalid_options(tmp_path: Path) -> None:
    module, args, _ = made(healthy)
    for options, error, message in (
        ({"precision": "automatic"}, UnknownNameError, "unknown precision 'automatic'"),
        ({"precision": "fp16", "max_error": 1e-2}, UsageError, "precision fp16; it is for precision auto or int8"),
        ({"precision": "auto", "max_error": 2.0}, UsageError, "give a relative error between 0 and 1"),
        ({"precision": "auto", "attention_precision": "fp16"}, UsageError, "leave one out"),
        ({"metric": "accuracy"}, UsageError, "measured on real inputs"),
        ({"metric": "accuracy", "data": [args]}, UsageError, "accuracy needs labels"),
        ({"data": [args], "labels": [torch.zeros(2)] * 2}, UsageError, "2 labels were given for 1 inputs"),
    ):
        with pytest.raises(error, match=message):
            attnforge.deploy(module, args, tmp_path / "b", None, **options)
        assert not (tmp_path / "b").exists()


# A task


class Classifier(nn.Module):
    """Classifies means, with classes that are close to one another."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.block(x).mean(1))
        return logits


def classified(folder: Path, precision: str, **options: object) -> tuple[Bundle, Tensor]:
    module = made(Classifier).module
    images = torch.randn(64, TOKENS, DIM, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        labels = module(images).argmax(-1)
    shapes = {"x": {0: Dim("batch", min=1, max=64)}}
    bundle = attnforge.deploy(
        module, (images[:2],), folder, shapes, precision, ["onnxruntime"], tune=False, data=[(images,)],
        labels=[labels], metric="accuracy", **options,  # type: ignore[arg-type]
    )  # fmt: skip
    return bundle, labels


Classify = Callable[[str], tuple[Bundle, Tensor]]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Classify:
    """`classifier(precision)`: the classifier, deployed once, with the labels of its data."""
    return functools.cache(lambda precision: classified(tmp_path_factory.mktemp("classifier") / "b", precision))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "auto"])
def test_accuracy_is_measured_over_real_data(precision: str, classifier: Classify) -> None:
    bundle, labels = classifier(precision)
    report = attnforge.verify(bundle)
    metric = report.backends["onnxruntime-cpu"].metric
    assert report.passed and metric is not None and metric.name == "accuracy"
    assert metric.samples == 64 and metric.float64 == 1.0 and metric.value >= metric.least
    assert any(case.kind == "data" and case.sizes == {"batch": 64} for case in bundle.manifest.cases)
    with attnforge.load(bundle) as session:
        stored = stored_inputs(bundle)["data-0/x"]
        predicted = session(stored).argmax(-1)
    assert metric.value == np.mean(predicted == labels.numpy())


def test_a_metric_that_is_missed_fails(classifier: Classify) -> None:
    bundle, _ = classifier("fp32")
    report = attnforge.verify(bundle, least=1.01)
    assert not report.passed and report.backends["onnxruntime-cpu"].failures == []
    assert report.backends["onnxruntime-cpu"].reason == "accuracy is 1, below the required 1.01"
    cosine = attnforge.verify(bundle, metric="cosine").backends["onnxruntime-cpu"].metric
    assert cosine is not None and cosine.value == pytest.approx(1), "compared with float64, not with labels"

    def share_of_class_0(outputs: Mapping[str, Array], labels: Array) -> float:
        return float(np.mean(outputs["output"].argmax(-1) == 0))

    share = attnforge.verify(bundle, metric=share_of_class_0).backends["onnxruntime-cpu"].metric
    assert share is not None and share.name == "share_of_class_0" and share.value == share.float64
    with pytest.raises(UnknownNameError, match="unknown metric 'f1'"):
        attnforge.verify(bundle, metric="f1")


def test_a_metric_instead_of_an_error(tmp_path: Path) -> None:
    bundle, _ = classified(tmp_path / "b", "auto", least=0.9)
    assert of(bundle).regions == [] and of(bundle).exactly
    assert attnforge.verify(bundle).passed


@pytest.mark.parametrize(
    ("value", "passed"), [(0.9, True), (1.0, True), (np.nextafter(0.9, 0), False), (np.nan, False), (-np.inf, False)]
)
def test_a_metric_that_is_nan_or_a_rounding_short_is_missed(value: float, passed: bool) -> None:
    scores = MeasuredMetric("own", accuracy, {}, 0.9, [(1, value, 1.0, 1.0)])
    requirement = Requirement(baseline=PRECISIONS["fp16"])
    trial = requirement.verdict([Trial(0.5, 1e-3)], scores)
    assert trial.passed is passed
    assert trial.text == f"0.50 of the budget; own {value:.6g}, with 0.9 required"
    assert requirement.verdict([Trial(0.0, 1e-3)], scores).text.startswith("an error of 1e-3; own")


@pytest.mark.parametrize(("error", "shown"), [(0.0501, "5.01e-2"), (0.05, "5e-2"), (0.04999, "5e-2"), (0.1, "1e-1")])
def test_an_error_is_shown_in_digits_that_tell_it_from_the_limit(error: float, shown: str) -> None:
    verdict = Requirement(0.05).verdict([Trial(error / 0.05, error)])
    assert verdict.text == f"an error of {shown}, with 0.05 allowed"


def test_cosine_of_embeddings_without_labels(tmp_path: Path) -> None:
    module, args, _ = made(healthy)
    bundle = attnforge.deploy(
        module, args, tmp_path / "b", None, "fp16", ["onnxruntime"], data=[args], metric="cosine", tune=False
    )
    metric = attnforge.verify(bundle).backends["onnxruntime-cpu"].metric
    assert metric is not None and metric.passed and metric.float64 == pytest.approx(1) and 1 - metric.value < 1e-5


def test_a_metric_needs_data(broken: DeployBroken) -> None:
    bundle = broken("healthy", "fp32")
    with pytest.raises(UsageError, match="deployed without any; give it to deploy"):
        attnforge.verify(bundle, metric="cosine")
    with pytest.raises(UsageError, match="no metric was named"):
        attnforge.verify(bundle, least=0.5)


# Types


def test_types_of_a_mixed_graph(broken: DeployBroken) -> None:
    model = ir.load(broken("healthy", "fp32").file("canonical.onnx"))
    names = [str(node.name) for node in operators(model)]
    assert not any(node.op_type in ("Reshape", "Transpose", "Slice") for node in operators(model))
    high = next(name for name in names if "layer_norm" in name)
    assign(model, FLOAT16, [high])
    for node in model.graph:
        types = {v.dtype for v in (*node.inputs, *node.outputs) if v is not None and v.dtype in (FLOAT, FLOAT16)}
        if node.op_type == "Cast":
            assert types == {FLOAT, FLOAT16}
        else:
            assert types <= ({FLOAT} if node.name == high else {FLOAT16})
    assert [v.dtype for v in (*model.graph.inputs, *model.graph.outputs)] == [FLOAT, FLOAT]
    assert model.graph.outputs[0].name == "output"


def test_operations_are_counted() -> None:
    def value(*shape: int) -> ir.Value:
        return ir.Value(shape=ir.Shape(shape), type=ir.TensorType(FLOAT))

    def node(op_type: str, *inputs: ir.Value, result: ir.Value) -> ir.Node:
        made = ir.node(op_type, list(inputs))
        made.outputs[0].shape, made.outputs[0].type = result.shape, result.type
        return made

    product = node("MatMul", value(2, 5, 8), value(8, 3), result=value(2, 5, 3))
    assert known_flops(product, {}) == 2 * 2 * 5 * 8 * 3
    attention = node(
        "Attention", value(1, 4, 10, 16), value(1, 4, 20, 16), value(1, 4, 20, 8), result=value(1, 4, 10, 8)
    )
    assert known_flops(attention, {}) == 2 * 4 * 10 * 20 * (16 + 8)
    convolution = node("Conv", value(1, 3, 8, 8), value(16, 3, 2, 2), result=value(1, 16, 4, 4))
    assert known_flops(convolution, {}) == 2 * 16 * 16 * 3 * 4
    assert known_flops(node("Add", value(3), value(3), result=value(3)), {}) == 0


# The command


def test_the_command_of_auto(tmp_path: Path) -> None:
    arguments = ["patch-attention-digits", "--precision", "auto", "--metric", "accuracy", "--no-tune"]
    out = str(tmp_path / "b")
    ran = CliRunner().invoke(app, ["deploy", *arguments, "--target", "onnxruntime", "--out", out, "--json"])
    assert ran.exit_code == 0, ran.output
    document = json.loads(ran.stdout)
    assert document["mixed"]["low"] == "fp16" and document["metric"] == "accuracy"
    ran = CliRunner().invoke(app, ["verify", out, "--json"])
    metric = json.loads(ran.stdout)["backends"]["onnxruntime-cpu"]["metric"]
    assert ran.exit_code == 0 and metric["samples"] == 450 and metric["value"] > 0.98
    assert "precisions chosen: 100.0%" in CliRunner().invoke(app, ["inspect", out]).stdout
