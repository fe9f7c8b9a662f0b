"""Rows of the demo: the worst backend, the counts of fused sites, and that every session is closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import attnforge
from attnforge import demo
from attnforge.bundle import Bundle, Certificate, Engine, TargetRecord
from attnforge.model.registry import build_model
from attnforge.runtime.parity.verify import BackendReport, Report, verify
from attnforge.runtime.session import Session

pytestmark = pytest.mark.xdist_group("demo")


def report_of(error: float, budget: float = 1e-6, passed: bool = True, eager: float = 1e-7) -> BackendReport:
    return BackendReport(
        passed=passed, error=error, eager_error=eager, budget=budget, case="example", cases=3, failures=[]
    )


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    module, _, shapes = build_model("patch-attention-digits")
    folder = tmp_path_factory.mktemp("demo") / "digits"
    example = (demo.real_example("patch-attention-digits"),)
    return attnforge.deploy(
        module, example, folder, shapes, "fp32", ["onnxruntime"], name="patch-attention-digits", tune=False
    )


def verified(**backends: BackendReport) -> Report:
    return Report(passed=True, bundle="b", name="b", precision="fp32", reference="eager", skipped={}, backends=backends)


def test_eagers_error_is_in_the_case_closest_to_its_budget_or_that_failed(bundle: Bundle) -> None:
    first, close, failed = report_of(2e-7, eager=1e-7), report_of(9e-7, eager=2e-7), report_of(5e-7, passed=False)

    def shown(**backends: BackendReport) -> str:
        return next(demo._rows(bundle, verified(**backends))).error

    assert shown(tensorrt=first, openvino=close) == "2e-7"
    failed.eager_error = 3e-7
    assert shown(tensorrt=first, openvino=close, eager=failed) == "3e-7"
    assert shown(tensorrt=report_of(0.0, budget=0.0), openvino=close) == "2e-7"
    assert shown() == ""


def test_every_session_is_closed(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    closed: list[str] = []
    load, close = attnforge.load, Session.close

    def loading(bundle: Any, backend: str, **options: Any) -> Session:
        opened.append(backend)
        return load(bundle, backend, **options)

    def closing(session: Session) -> None:
        closed.append(session.backend)
        close(session)

    monkeypatch.setattr(attnforge, "load", loading)
    monkeypatch.setattr(Session, "close", closing)
    rows = demo.rows_of(bundle, verify(bundle, ["onnxruntime-cpu"]), tmp_path)
    assert opened == ["eager", "onnxruntime-cpu"] and set(closed) == set(opened)
    assert [row.backend for row in rows] == opened
    assert [row.agreement for row in rows] == ["100.00%", "100.00%"] and float(rows[1].accuracy.rstrip("%")) > 95


def test_a_backend_that_compiled_nothing_has_no_fused_count(bundle: Bundle) -> None:
    """ONNX Runtime's count is from its CPU graph, TensorRT's from its plan, with or without a GPU."""
    manifest = bundle.manifest
    engine = Engine(
        file="plan", flavour="tensorrt_rtx", version="1.7", compute_capabilities=["portable"], layers=3, size=2_500_000,
        build_seconds=1,
    )  # fmt: skip
    targets = {**manifest.targets, "tensorrt_rtx": TargetRecord(model="tensorrt/model.onnx", engines=[engine])}
    certificate = Certificate(sites=2, canonical=2, fused={"onnxruntime": 2, "tensorrt_rtx": 0}, unfused=[], details=[])
    altered = Bundle(bundle.path)
    altered.manifest = manifest.model_copy(update={"targets": targets, "attention": certificate})
    names = ("onnxruntime-tensorrt", "onnxruntime-cuda", "onnxruntime-cpu", "openvino")
    report = verified(**{name: report_of(2e-7) for name in names})
    rows = {row.backend: row for row in demo._rows(altered, report)}
    assert {name: row.fused for name, row in rows.items()} == {
        "eager": "–", "tensorrt_rtx": "0 of 2", "onnxruntime-tensorrt": "–", "onnxruntime-cuda": "–",
        "onnxruntime-cpu": "2 of 2", "openvino": "–",
    }  # fmt: skip
    assert (rows["tensorrt_rtx"].error, rows["tensorrt_rtx"].plan_mb) == ("not run", "2.5")
    assert (rows["openvino"].error, rows["openvino"].budget) == ("2e-7", "1e-6")
