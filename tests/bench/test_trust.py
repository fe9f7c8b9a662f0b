"""Nothing that a manifest names is imported, opened or run unless the caller trusts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import torch

import attnforge
from attnforge.bench import alone
from attnforge.bundle import Manifest, Source
from attnforge.children import command, environment
from attnforge.errors import UntrustedError
from attnforge.export.sources.named import check_trusted, rebuild
from tests.support.bundles import Small, rewrite
from tests.support.plans import build

HOSTILE = (
    Source(kind="callable", name="os:system", options={"command": "touch ran"}),
    Source(kind="registered", name="os:system", options={"command": "touch ran"}),  # the kind decides, not the name
    Source(kind="huggingface", name="os:system", options={"command": "touch ran"}),
    Source(kind="huggingface", name="hf:folder"),
    Source(kind="program", name="program.pt2"),
    Source(kind="onnx", name="model.onnx"),
    Source(kind="registered", name="self-attention", weights="weights.safetensors"),
)


def named(copy: Path, source: Source, *, without_normal: bool = False) -> attnforge.Bundle:
    """Return the bundle with a different source in its manifest."""

    def change(manifest: Manifest) -> None:
        manifest.source = source
        if without_normal:
            manifest.cases = [case for case in manifest.cases if not case.name.startswith("normal")]

    return rewrite(copy, change)


@pytest.mark.parametrize("source", HOSTILE, ids=lambda source: f"{source.kind} {source.name}")
@pytest.mark.parametrize("against", [["eager"], []], ids=["a peer", "sizes of no case"])
def test_a_benchmark_runs_nothing_that_the_manifest_names(
    copy: Path, monkeypatch: pytest.MonkeyPatch, source: Source, against: list[str]
) -> None:
    monkeypatch.chdir(copy.parent)
    bundle = named(copy, source, without_normal=True)
    with pytest.raises(attnforge.errors.AttnforgeError) as raised:
        attnforge.benchmark(bundle, ["onnxruntime-cpu"], against, rounds=1, quick=True)
    assert not Path("ran").exists()
    if not (source.kind == "registered" and source.weights is None):
        assert isinstance(raised.value, UntrustedError)
        assert "--trust-source (trust_source=True)" in str(raised.value)


def test_a_source_that_is_trusted_runs(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copy.parent)
    Path("small_model.py").write_text("from tests.support.bundles import small_example as make")
    bundle = named(copy, Source(kind="callable", name="small_model:make"))
    (model,) = attnforge.benchmark(
        bundle, ["onnxruntime-cpu"], ["eager"], rounds=1, quick=True, trust_source=True
    ).models
    assert {contender.name for contender in model.contenders} == {"onnxruntime-cpu", "eager"}
    module = Small()  # a passed module needs no trust
    attnforge.benchmark(named(copy, HOSTILE[0]), ["onnxruntime-cpu"], ["eager"], rounds=1, quick=True, module=module)
    assert not Path("ran").exists()


def test_what_is_this_librarys_own_needs_no_trust() -> None:
    check_trusted(Source(kind="registered", name="self-attention"), False)
    assert rebuild(Source(kind="registered", name="self-attention")).args
    with pytest.raises(attnforge.errors.UnknownNameError):
        rebuild(Source(kind="registered", name="os:system", options={"command": "touch ran"}), trusted=True)


# --- children ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def booby_trapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with modules that a child may import."""
    for name in ("json", "numpy", "subprocess", "tensorrt_rtx", "torch", "onnxruntime", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "module", ["attnforge.export.tensorrt.process", "attnforge.export.measuring", "attnforge.bench.alone"]
)
def test_children_import_nothing_from_the_current_folder(booby_trapped: Path, module: str) -> None:
    done = subprocess.run(command(module), input="", capture_output=True, text=True, env=environment(), timeout=120)
    assert "EOF while parsing" in done.stderr or "Expecting value" in done.stderr, done.stderr  # it got so far
    assert not (booby_trapped / "ran").exists()
    grandchild = [sys.executable, "-c", "import json"]  # without -P
    assert subprocess.run(grandchild, env=environment(), timeout=60).returncode == 0
    assert not (booby_trapped / "ran").exists()


def test_a_paths_variable_that_names_the_current_folder_is_no_way_in(
    booby_trapped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (booby_trapped / "library").mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "library"]))
    assert environment()["PYTHONPATH"] == str(booby_trapped / "library")


def test_a_fresh_process_stands_in_a_folder_of_its_own(booby_trapped: Path, copy: Path) -> None:
    order = alone.RunRequest(
        bundle=str(copy), contender="onnxruntime-cpu", engine="backend", file=None, sizes={}, threads=1,
        folder=str(booby_trapped), any_sizes=True, warm=False,
    )  # fmt: skip
    assert alone.measured(order).cold.first_s > 0
    assert not (booby_trapped / "ran").exists()


def test_a_builder_stands_in_a_folder_of_its_own(booby_trapped: Path, copy: Path) -> None:
    """With relative paths, as a user in the bundle's folder gives them."""
    pytest.importorskip("tensorrt_rtx")
    specs = attnforge.Bundle(copy).manifest.inputs
    assert build(Path("copy/tensorrt/model.onnx"), "tensorrt_rtx", specs, "fp32").layers
    assert not (booby_trapped / "ran").exists()


def test_an_onnx_source_is_not_opened(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx, "load", pytest.fail)
    monkeypatch.setattr(torch.export, "load", pytest.fail)
    for source in HOSTILE:
        if source.kind in ("onnx", "program"):
            with pytest.raises(UntrustedError):
                attnforge.benchmark(named(copy, source), ["onnxruntime-cpu"], ["eager"], rounds=1, quick=True)
