"""diagnose on quantised bundles: the most costly step, clipped ranges, outlier channels, and saturated sums."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from typer.testing import CliRunner

import attnforge
from attnforge.bundle import CANONICAL, Bundle
from attnforge.cli import app
from attnforge.export.diagnosis.diagnose import Diagnosis
from attnforge.export.diagnosis.quantised import (
    Rounding,
    saturated_on,
    saturated_product,
    unrounded,
    why_costly,
    with_weights,
)
from attnforge.export.diagnosis.stages import decomposed, sites_of
from attnforge.export.diagnosis.trace import Finding, Trace, error_of, trace
from attnforge.export.graphs.execute import as_it_is
from attnforge.export.graphs.qdq import SCHEMES, products_between
from attnforge.export.graphs.saving import load_graph
from attnforge.runtime import cases as reference
from attnforge.runtime.parity.verify import stored_inputs
from tests.export.precision.test_fp8_and_int4 import fixed
from tests.export.precision.test_int8 import Block, Outliers, deployed, real
from tests.support.bundles import rewrite
from tests.support.faults.eight_bits import UP, scales
from tests.support.faults.graph import Graph

ONLY = ["onnxruntime-cpu"]


@pytest.fixture(scope="module")
def outliers(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return deployed(tmp_path_factory.mktemp("diagnosed") / "outliers", Outliers, max_error=0.9)


def test_outlier_channels_are_named(outliers: Bundle) -> None:
    diagnosis = attnforge.diagnose(outliers, ONLY)
    finding = diagnosis.finding
    assert finding.cause == "outlier channel" and finding.evidence.startswith("channels 3, 17 take up")
    assert finding.module == "attention.query_proj, attention.key_proj, attention.value_proj"
    assert diagnosis.failing == [] and not diagnosis.healthy and diagnosis.same_function == []
    assert diagnosis.error is not None and diagnosis.eager_error == pytest.approx(diagnosis.error, rel=0.1)
    assert finding.error_without is not None and finding.error_without < 0.8 * diagnosis.error
    assert any(tensor.tensor == finding.tensor for tensor in diagnosis.tensors)


def test_the_cli_reports_outliers(outliers: Bundle) -> None:
    result = CliRunner().invoke(app, ["diagnose", str(outliers.path), "--backend", *ONLY])
    assert result.exit_code == 1 and "outlier channel at the input of attention.query_proj" in " ".join(
        result.output.split()
    )


@pytest.mark.parametrize(("failing", "error", "code"), [([], 1e-2, 0), (["openvino"], 1e-2, 1), ([], 0.5, 1)])
def test_clipped_numbers_are_a_note_if_they_cost_little(
    monkeypatch: pytest.MonkeyPatch, failing: list[str], error: float, code: int
) -> None:
    clipped = Diagnosis(
        bundle="b", name="b", precision="int8", case="example", why="asked for", failing=failing,
        finding=Finding(cause="clipping", stage="eager", evidence="3% are beyond"),
        error=error, eager_error=error, same_function=[], tensors=[], examined=1, allowed=0.05,
    )  # fmt: skip
    monkeypatch.setattr(attnforge, "diagnose", lambda *_, **__: clipped)
    result = CliRunner().invoke(app, ["diagnose", "b"])
    assert result.exit_code == code and clipped.healthy == (code == 0)
    assert ("note: clipping" in result.output) == (code == 0) and "clipping: 3% are beyond" in result.output


@pytest.mark.parametrize("precision", ["int4", "fp8"])
def test_if_nothing_is_wrong_the_largest_cost_is_reported(tmp_path: Path, precision: str) -> None:
    bundle = (
        fixed(tmp_path / "b")
        if precision == "fp8"
        else deployed(tmp_path / "b", Block, "int4", data=real(), max_error=0.9)
    )
    diagnosis = attnforge.diagnose(bundle, ONLY)
    assert diagnosis.healthy and diagnosis.finding.cause == "quantisation", diagnosis.finding
    assert "down has the largest error by itself" in diagnosis.finding.evidence
    assert ("costs most" in diagnosis.finding.evidence) == (precision == "fp8")


def test_a_wrong_scale_in_a_backends_graph_is_located(outliers: Bundle, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(outliers.path, tmp_path / "b"))
    file = folder / outliers.manifest.targets["onnxruntime"].model
    model = ir.load(file)
    scales(UP, lambda s: s * 8)(Graph(model))
    ir.save(model, file)
    finding = attnforge.diagnose(rewrite(folder), ONLY).finding
    assert (finding.cause, finding.stage) == ("operator", "onnxruntime-cpu")
    assert outliers.manifest.quantised is not None
    up = outliers.manifest.quantised.products[UP].name
    assert finding.tensor is not None and finding.tensor.startswith(f"{up}/int8")


# --- why --------------------------------------------------------------------------------------------------------------


def step(scheme: str = "int8", scale: float = 1 / 127) -> Rounding:
    return Rounding("t/DequantizeLinear", "t", scale, SCHEMES[scheme], "up", ("up/int8",), True)


def test_clipped_numbers_are_counted() -> None:
    source = np.random.default_rng(0).uniform(-1, 1, (10, 32))
    assert why_costly(step(), source) is None
    source[0, 0] = -3
    cause, why = why_costly(step(), source) or ("", "")
    assert cause == "clipping" and why.startswith("0.31% of its numbers are beyond its range of ±1, up to 3")
    source[0, 0] = 1.002  # by token, a number may exceed the range by a rounding
    assert why_costly(step(), source) is None


@pytest.mark.parametrize("count", [1, 2, 3])
def test_channels_that_take_the_range_are_few(count: int) -> None:
    source = np.random.default_rng(0).uniform(-1, 1, (10, 32)) / 20
    source[:, 5 : 5 + count] *= 20
    cause = why_costly(step(), source)
    if count == 3:  # a tenth of 32 channels are not outliers
        assert cause is None
        return
    assert cause is not None and cause[0] == "outlier channel"
    assert cause[1].startswith(["channel 5 takes", "channels 5, 6 take"][count - 1])
    assert why_costly(step("fp8", scale=1 / 448), source) is None  # floating-point steps are as fine there


# --- saturation -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[ir.Model, Trace]:
    bundle = deployed(tmp_path_factory.mktemp("saturated") / "b", Block, max_error=0.9)
    canonical = decomposed(load_graph(bundle, CANONICAL), sites_of(bundle.manifest.attention))
    for between in products_between(canonical):  # all weights as large as they may be, so that pairs saturate
        stored = between.stored.const_value
        assert stored is not None
        signs = np.where(stored.numpy() < 0, -127, 127).astype(np.int8)
        between.stored.const_value = ir.tensor(signs, name=between.stored.name)
    case = bundle.manifest.cases[0]
    feeds = reference.make_inputs(case, bundle.manifest.inputs, stored_inputs(bundle))
    model = with_weights(canonical)
    return canonical, trace(model, feeds, exact_model=unrounded(model))


def test_sums_of_pairs_saturate_at_16_bits(traced: tuple[ir.Model, Trace]) -> None:
    canonical, of = traced
    between = products_between(canonical)[0]
    assert between.quantise is not None and between.quantise.inputs[0] is not None
    source = of.stored[str(between.quantise.inputs[0].name)]
    product = saturated_product(between, source)
    assert product is not None and between.stored.const_value is not None
    narrow, scales_of = between.quantise.outputs[0], between.weight.inputs[1]
    assert scales_of is not None and scales_of.const_value is not None
    numbers = as_it_is(canonical, [str(narrow.name)])(of.feeds)[str(narrow.name)].astype(int)[0, 0] + 128
    weight = between.stored.const_value.numpy().astype(int)[:, 0]
    pairs = [numbers[i] * weight[i] + numbers[i + 1] * weight[i + 1] for i in range(0, len(weight), 2)]
    assert any(abs(pair) > 32767 for pair in pairs)
    total = sum(min(max(pair, -32768), 32767) for pair in pairs) - 128 * weight.sum()
    assert product[0, 0, 0] == pytest.approx(total / 127 * scales_of.const_value.numpy()[0])


def test_a_backend_with_saturating_sums_is_recognised(traced: tuple[ir.Model, Trace]) -> None:
    canonical, of = traced
    between = products_between(canonical)[0]
    assert between.quantise is not None and between.quantise.inputs[0] is not None
    product = saturated_product(between, of.stored[str(between.quantise.inputs[0].name)])
    assert product is not None
    name = str(between.product.outputs[0].name)
    tensor, evidence = saturated_on(canonical, of, {name: error_of(product, of.exact[name])}) or (None, "")
    assert tensor is not None and tensor.name == name and "processors without VNNI" in evidence
    right = {tensor.name: tensor.error for tensor in of.tensors}
    assert saturated_on(canonical, of, right) is None
    assert saturated_on(canonical, of, {name: 100.0}) is None
