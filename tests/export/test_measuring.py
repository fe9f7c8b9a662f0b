"""Measurements in a separate process."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import attnforge
from attnforge import children
from attnforge.bundle import Bundle
from attnforge.errors import BuildError, UnavailableError
from attnforge.export import measuring
from attnforge.progress import Silent
from attnforge.runtime import choose as choosing
from attnforge.runtime.backends.registry import why_not_here
from tests.support.broken import Attention, made
from tests.support.bundles import DeploySmall

REFUSED = r"measuring backends (failed|crashed \(signal 6\)): .*; deploy without it"


@pytest.fixture
def bundle(small: DeploySmall, tmp_path: Path) -> Bundle:
    return Bundle(shutil.copytree(small("fp32").path, tmp_path / "copy"))


def test_a_model_that_cannot_be_measured_leaves_no_optimized_one(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(run: Callable[[], Any]) -> float:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(choosing, "seconds_of", fails)
    request = measuring.MeasureRequest(folder=bundle.path, seconds=5.0)
    assert measuring.measured(request, Silent()).session is None
    assert not any("optimized" in name for name in Bundle(bundle.path).manifest.files)
    assert not list(bundle.path.rglob("*optimized*"))


def test_the_process_has_neither_torch_nor_the_module(tmp_path: Path) -> None:
    module, args, shapes = made(Attention)
    bundle = attnforge.deploy(module, args, tmp_path / "bundle", shapes, targets=["onnxruntime"])
    assert attnforge.verify(bundle).passed
    cost = bundle.manifest.children[measuring.MEASURING]
    assert 2**20 < cost.memory < bundle.manifest.memory[measuring.MEASURING]
    assert 0 < cost.seconds <= bundle.manifest.seconds[measuring.MEASURING]


@pytest.mark.parametrize("program", ["import os; os.abort()", "raise SystemExit('no room')", ""])
def test_a_process_that_fails_leaves_no_bundle(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "command", lambda *arguments: [sys.executable, "-c", program])
    module, args, shapes = made(Attention)
    with pytest.raises(BuildError, match=REFUSED):
        attnforge.deploy(module, args, tmp_path / "bundle", shapes, targets=["onnxruntime"])
    assert list(tmp_path.iterdir()) == []


CRASHING = """
from attnforge.runtime.backends.openvino import OpenVino
from attnforge.export import measuring

OpenVino.run = lambda *arguments: __import__("os").abort()
measuring.serve(measuring.MeasureRequest, measuring.measured)
"""
"""Measures, and crashes in the first run on OpenVINO."""


@pytest.mark.skipif(why_not_here("openvino") is not None, reason=str(why_not_here("openvino")))
def test_a_backend_that_crashes_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "command", lambda *arguments: [sys.executable, "-c", CRASHING])
    module, args, shapes = made(Attention)
    bundle = attnforge.deploy(module, args, tmp_path / "bundle", shapes, targets=["onnxruntime"])
    choice = bundle.manifest.choice
    assert choice is not None and choice.picked == "onnxruntime-cpu"
    assert choice.dropped["openvino"].startswith("its process crashed (signal 6)")
    assert attnforge.load(bundle).backend == "onnxruntime-cpu"
    with pytest.raises(UnavailableError, match=r"openvino: its process crashed \(signal 6\): .* when the bundle was"):
        attnforge.load(bundle, "openvino")


def test_lines_of_the_process_are_distinguished_by_their_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        """print('{"done": 1, "total": 2, "what": "openvino"}\\n{"memory": 7, "choice": null, "session": null}')"""
    )
    monkeypatch.setattr(children, "command", lambda *arguments: [sys.executable, "-c", program])
    steps: list[tuple[str, float, float | None]] = []

    class Recorder(Silent):
        def step(self, what: str, done: float, total: float | None) -> None:
            steps.append((what, done, total))

    manifest = attnforge.bundle.Manifest.model_construct(targets={}, children={})
    measuring.measure(tmp_path, manifest, Recorder())
    assert steps == [("openvino", 1, 2)] and manifest.children[measuring.MEASURING].memory == 7
