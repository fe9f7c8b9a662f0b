"""What compares nothing proves nothing: no verdict, no deployment and no time rests on NaN alone."""

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
from attnforge.arrays import Array
from attnforge.bundle import REFERENCE_OUTPUTS, Bundle, Case, Manifest
from attnforge.errors import BuildError
from attnforge.export.reference import _FiniteOutputs
from attnforge.precision import PRECISIONS
from attnforge.runtime.parity.verify import hold
from tests.support.bundles import DeploySmall, rewrite


def answering(folder: Path, number: float, truth: float | None = None, where: str = "") -> Bundle:
    """The bundle with a model that answers one number everywhere, and with references that say the same.

    Args:
        folder: of the bundle.
        number: that the model answers, and eager.
        truth: of float64; the same by default.
        where: only in cases whose names begin so.
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
def test_a_backend_of_which_nothing_finite_was_compared_fails(copy: Path, number: float, truth: float | None) -> None:
    report = attnforge.verify(answering(copy, number, truth), ["onnxruntime-cpu"])
    backend = report.backends["onnxruntime-cpu"]
    assert not report.passed and not backend.passed
    if not backend.failures:
        assert backend.reason == "of output no finite number was compared in any ordinary case, so nothing is proven"
        assert backend.missed == backend.reason


def test_hard_cases_alone_prove_nothing(copy: Path, small: DeploySmall) -> None:
    def without_ordinary(manifest: Manifest) -> None:
        manifest.cases = [case for case in manifest.cases if not case.is_ordinary]

    report = attnforge.verify(rewrite(copy, without_ordinary), ["onnxruntime-cpu"])
    assert not report.passed
    whole = small("fp32")
    with attnforge.load(whole, "onnxruntime-cpu") as session:
        hard = [case for case in whole.manifest.cases if not case.is_ordinary]
        assert hold(whole, "onnxruntime-cpu", session.run, hard).passed  # who asks for these gets an answer on these
        one = [case for case in whole.manifest.cases if case.kind == "example"]
        assert hold(whole, "onnxruntime-cpu", session.run, one).passed


def test_a_bundle_without_cases_fails(copy: Path) -> None:
    bundle = rewrite(copy, lambda manifest: setattr(manifest, "cases", []))
    assert not attnforge.verify(bundle, ["onnxruntime-cpu"]).passed


def test_one_finite_case_is_proof_and_nan_where_eager_has_it_is_right(small: DeploySmall) -> None:
    """As attention has NaN where a mask excludes every key."""
    report = attnforge.verify(small("fp32"), ["onnxruntime-cpu"])
    assert report.passed
    assert all(c.size >= c.compared > 0 for c in report.backends["onnxruntime-cpu"].comparisons if c.size)


def test_a_time_needs_a_finite_number(copy: Path) -> None:
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
    with pytest.raises(BuildError, match=r"output 'output' has no number that fp32 holds .*even computed in float64"):
        attnforge.deploy(Affine(weight), (torch.randn(3, 4),), tmp_path / "bundle", targets=["onnxruntime"], tune=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("eager", "exact", "refused", "warned"),
    [
        ([1.0, 2.0], [1.0, 2.0], False, False),
        ([math.nan, 2.0], [math.nan, 2.0], False, False),
        ([math.nan] * 2, [math.nan] * 2, True, False),
        ([math.inf] * 2, [1e59, 1e59], True, False),
        ([math.inf] * 2, [1e30, 1e59], False, True),
        ([], [], False, False),
    ],
)
def test_what_is_said_of_outputs(
    caplog: pytest.LogCaptureFixture, eager: list[float], exact: list[float], refused: bool, warned: bool
) -> None:
    case = Case(name="normal", sizes={}, kind="normal", seed=1)
    arrays: list[dict[str, Array]] = [{"y": np.array(numbers)} for numbers in (eager, exact)]
    finite = _FiniteOutputs(PRECISIONS["fp32"])
    finite.note(case, *arrays)
    finite.note(case.model_copy(update={"kind": "extremes"}), {"y": np.ones(2)}, {"y": np.ones(2)})
    if refused:
        with pytest.raises(BuildError, match="'y' has no number"):
            finite.check()
    else:
        finite.check()
    assert ("fp32 does not hold this model" in caplog.text) == warned


@pytest.mark.parametrize("number", [math.nan, 1e30])
def test_at_16_bits_it_is_said_and_the_model_can_be_diagnosed(caplog: pytest.LogCaptureFixture, number: float) -> None:
    finite = _FiniteOutputs(PRECISIONS["fp16"])
    arrays: dict[str, Array] = {"y": np.array([number])}
    finite.note(Case(name="normal", sizes={}, kind="normal", seed=1), arrays, arrays)
    finite.check()
    assert "fp16 does not hold this model" in caplog.text


def test_a_spread_that_is_no_number_allows_nothing() -> None:
    with pytest.raises(ValueError, match="finite"):
        Case(name="normal", sizes={}, kind="normal", seed=1, spread={"output": (math.inf, math.nan)})
