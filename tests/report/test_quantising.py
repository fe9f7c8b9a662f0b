"""The headline of a quantised bundle: what quantising costs, and the limit that was asked for."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import attnforge
from attnforge.bundle import Bundle, Manifest
from attnforge.cli import app
from attnforge.report.quantising import cost_of_quantising
from attnforge.report.render import percent
from attnforge.report.verify_page import write_page
from attnforge.runtime.parity.verify import Report
from tests.support.html_pages import Parsed

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def quantised() -> tuple[Report, Manifest]:
    bundle = Bundle(GOLDEN / "encoder-int8")
    return attnforge.verify(bundle, ["onnxruntime-cpu"]), bundle.manifest


def with_limit(manifest: Manifest, **update: Any) -> Manifest:
    assert manifest.quantised is not None
    return manifest.model_copy(update={"quantised": manifest.quantised.model_copy(update=update)})


def test_the_cost_is_eagers_error_and_the_limit_is_named(quantised: tuple[Report, Manifest]) -> None:
    report, manifest = quantised
    cost = cost_of_quantising(report, manifest)
    assert cost is not None and manifest.quantised is not None and not cost.exceeds
    errors = {c.where: c.eager_error for c in report.backends["onnxruntime-cpu"].comparisons}
    worst = max(errors, key=lambda where: errors[where])
    assert f"by {percent(statistics.median(errors.values()))} in a typical case" in cost.text
    assert f"by {percent(errors[worst])} in the worst, {worst};" in cost.text
    assert "the least cosine similarity is 0.9999" in cost.text
    assert f"Up to {percent(manifest.quantised.max_error)} was allowed on random inputs" in cost.text


def test_ordinary_cases_beyond_the_limit_are_named(quantised: tuple[Report, Manifest]) -> None:
    report, manifest = quantised
    ordinary = {case.name for case in report.cases if case.is_ordinary}
    errors = {c.where: c.eager_error for c in report.backends["onnxruntime-cpu"].comparisons if c.case in ordinary}
    limit = sorted(errors.values())[-2]  # the worst of the ordinary cases exceeds it
    cost = cost_of_quantising(report, with_limit(manifest, max_error=limit))
    assert cost is not None and cost.exceeds
    worst = max(errors, key=lambda where: errors[where])
    assert cost.text.endswith(f"In 1 of the {len(errors)} ordinary reference cases it is more: {worst}.")


def test_a_metric_is_the_requirement(quantised: tuple[Report, Manifest]) -> None:
    report, manifest = quantised
    by_metric = with_limit(manifest, max_error=None).model_copy(update={"metric": "accuracy", "least": 0.95})
    cost = cost_of_quantising(report, by_metric)
    assert cost is not None and not cost.exceeds
    assert cost.text.endswith("The requirement was the metric accuracy of at least 0.95 on random inputs.")


def test_a_model_that_is_not_quantised_has_no_such_cost(quantised: tuple[Report, Manifest]) -> None:
    report, manifest = quantised
    assert cost_of_quantising(report, manifest.model_copy(update={"quantised": None})) is None
    assert cost_of_quantising(report.model_copy(update={"backends": {}}), manifest) is None


def test_the_page_and_the_terminal_begin_with_it(quantised: tuple[Report, Manifest], tmp_path: Path) -> None:
    report, manifest = quantised
    cost = cost_of_quantising(report, manifest)
    assert cost is not None
    page = write_page(report, GOLDEN / "encoder-int8", tmp_path / "page.html").read_text()
    assert '<p class="verdict box good">' in page
    text = Parsed(page).text
    assert cost.text in text and "The backends add nothing to that" in text
    assert "computes the same function" not in text
    printed = CliRunner().invoke(app, ["verify", str(GOLDEN / "encoder-int8"), "-b", "onnxruntime-cpu"]).stdout
    assert " ".join(printed.split()).startswith(cost.text)
