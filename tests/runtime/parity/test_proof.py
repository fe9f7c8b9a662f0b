"""Comparisons of NaN alone prove nothing: they support no verdict, no deployment and no timing."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

import attnforge
from attnforge.bundle import REFERENCE_OUTPUTS, Bundle, Case, Manifest
from attnforge.errors import WrongError
from attnforge.runtime import cases as reference
from attnforge.runtime.parity.verify import References, hold, unproved
from tests.support.bundles import DeploySmall, rewrite


def answering(folder: Path, number: float, truth: float | None = None, where: str = "") -> Bundle:
    """Rewrite the bundle so that its model returns one number everywhere, and its references match.

    Args:
        folder: of the bundle.
        number: output of the model and of eager.
        truth: output in float64; `number` by default.
        where: prefix of the names of the cases whose references are changed.
    """
    file = folder / "onnxruntime/model.onnx"
    model = onnx.load(str(file))
    graph = model.graph
    graph.node[-1].output[0] = "before"
    graph.node.append(helper.make_node("Sub", ["before", "before"], ["zero"]))
    graph.node.append(helper.make_node("Add", ["zero", "number"], ["output"]))
    graph.initializer.append(helper.make_tensor("number", TensorProto.FLOAT, [], [number]))
    onnx.save(model, file)
    outputs = load_file(folder / REFERENCE_OUTPUTS)
    for key, array in outputs.items():
        if key.startswith(where):
            exact = truth if truth is not None and key.endswith("float64") else number
            outputs[key] = np.full_like(array, exact)
    save_file(outputs, folder / REFERENCE_OUTPUTS)
    return rewrite(folder)


@pytest.mark.parametrize(("number", "truth"), [(math.nan, None), (math.inf, None), (math.inf, 1e59)])
def test_a_backend_without_finite_comparisons_fails(copy: Path, number: float, truth: float | None) -> None:
    report = attnforge.verify(answering(copy, number, truth), ["onnxruntime-cpu"])
    backend = report.backends["onnxruntime-cpu"]
    assert not report.passed and not backend.passed
    if not backend.failures:
        assert str(backend.reason).startswith("nothing is proved: output has no number in the range of fp32")
        assert backend.missed == backend.reason


def test_hard_cases_alone_prove_nothing(copy: Path, small: DeploySmall) -> None:
    def without_ordinary(manifest: Manifest) -> None:
        manifest.cases = [case for case in manifest.cases if not case.is_ordinary]

    report = attnforge.verify(rewrite(copy, without_ordinary), ["onnxruntime-cpu"])
    assert not report.passed
    whole = small("fp32")
    with attnforge.load(whole, "onnxruntime-cpu") as session:
        hard = [case for case in whole.manifest.cases if not case.is_ordinary]
        assert hold(
            whole, "onnxruntime-cpu", session.run, hard
        ).passed  # hard cases that were requested explicitly are judged
        example = [case for case in whole.manifest.cases if case.kind == "example"]
        assert hold(whole, "onnxruntime-cpu", session.run, example).passed


def test_a_bundle_without_cases_fails(copy: Path) -> None:
    bundle = rewrite(copy, lambda manifest: setattr(manifest, "cases", []))
    assert not attnforge.verify(bundle, ["onnxruntime-cpu"]).passed


def test_one_finite_case_is_proof_and_nan_where_eager_has_it_is_correct(small: DeploySmall) -> None:
    """For example, attention gives NaN where a mask excludes every key."""
    report = attnforge.verify(small("fp32"), ["onnxruntime-cpu"])
    assert report.passed
    assert all(c.size >= c.compared > 0 for c in report.backends["onnxruntime-cpu"].comparisons if c.size)


def test_timing_needs_finite_outputs(copy: Path) -> None:
    bundle = answering(copy, math.nan)
    (model,) = attnforge.benchmark(bundle, ["onnxruntime-cpu"], rounds=1, quick=True).models
    assert not model.contenders and "onnxruntime-cpu fp32" in model.wrong


class Affine(nn.Module):
    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), weight))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight) * self.weight


@pytest.mark.parametrize("weight", [math.nan, math.inf, 1e30])
def test_a_model_without_finite_outputs_is_not_deployed(tmp_path: Path, weight: float) -> None:
    with pytest.raises(WrongError, match=r"output has no number in the range of fp32 .* not even in float64"):
        attnforge.deploy(Affine(weight), (torch.randn(3, 4),), tmp_path / "bundle", targets=["onnxruntime"], tune=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("eager", "exact", "why"),
    [
        ([1.0, 2.0], [1.0, 2.0], None),
        ([math.nan, 2.0], [math.nan, 2.0], None),
        ([math.nan] * 2, [math.nan] * 2, "output has no number in the range of fp32"),
        ([math.inf] * 2, [1e59, 1e59], "output has no number in the range of fp32"),
        ([math.inf] * 2, [1e30, 1e59], None),  # eager overflows; a backend that does not can be compared with float64
        ([1.0] * 9, [1.0] * 8 + [1.2], None),
        ([1.0] * 9, [1.0] * 8 + [2.2], "eager at fp32 is itself 3.3e-1 off float64"),
        ([1.0] * 32, [1.0] * 31 + [2.2], "eager at fp32 is itself 2e-1 off float64"),
        ([], [], None),
    ],
)
def test_proof_of_outputs(small: DeploySmall, eager: list[float], exact: list[float], why: str | None) -> None:
    manifest = small("fp32").manifest.model_copy()
    normal = Case(name="normal", sizes={}, kind="normal", seed=1)
    hard = normal.model_copy(update={"name": "extremes", "kind": "extremes"})
    outputs = {
        reference.key(case, "output", which): np.array(numbers)
        for case, of_case in ((normal, (eager, exact)), (hard, ([1.0] * 32, [9.0] * 32)))
        for which, numbers in zip(("eager", "float64"), of_case, strict=True)
    }
    reason = unproved(manifest, [normal], References({}, outputs))
    assert reason is None if why is None else why in str(reason)
    of_masks = unproved(manifest, [normal.model_copy(update={"masks": "none"})], References({}, outputs))
    assert of_masks is None or "no number" in of_masks  # a case with every key masked is not ordinary
    assert unproved(manifest, [hard], References({}, outputs)) is None  # only hard inputs were requested
    assert unproved(manifest, [], References({}, outputs)) == "nothing is proved: there is no ordinary case"


def test_a_spread_of_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        Case(name="normal", sizes={}, kind="normal", seed=1, spread={"output": (math.inf, math.nan)})
