"""Deploys that fail: too little memory, a full disk, an interruption. One line reports it, existing files stay, and
nothing is left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import attnforge
from attnforge.errors import BundleError, UnavailableError
from attnforge.export import room
from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.room import MemoryNeeds, most_alive
from attnforge.export.sources.torch_module import capture
from attnforge.files import sha256
from attnforge.precision import precision_named
from attnforge.runtime.cases import sizes_at
from tests.support.bundles import small_example

FP32 = precision_named("fp32")


def contents(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): sha256(file) for file in sorted(folder.rglob("*")) if file.is_file()}


# Memory


@pytest.fixture(scope="module")
def work() -> MemoryNeeds:
    """The small model, for all targets and tuned."""
    captured = capture(*small_example(), FP32)
    canonicalize(captured.model)
    return MemoryNeeds(captured.model, FP32, ["onnxruntime", "tensorrt_rtx"], True, sizes_at(captured.inputs, "max"))


def test_live_memory_grows_with_the_sizes(work: MemoryNeeds) -> None:
    assert dict(work.sizes) == {"batch": 4, "tokens": 9, "pairs": 6}
    at_most = most_alive(work.model, work.sizes)
    inputs = 4 * 9 * 16 + 4 * 12 * 16 + 4 * 12 + 16
    assert inputs < at_most < 10 * inputs
    assert most_alive(work.model, {**work.sizes, "batch": 8}) == pytest.approx(2 * at_most, rel=0.02)


def test_too_little_memory_is_reported_with_what_needs_less(work: MemoryNeeds, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = work.bytes()
    monkeypatch.setattr(room, "available", lambda: needed)
    work.check()
    monkeypatch.setattr(room, "available", lambda: None)
    work.check()
    monkeypatch.setattr(room, "available", lambda: needed - 1)
    with pytest.raises(
        UnavailableError,
        match=r"needs at least .* GiB of memory at batch 4, tokens 9, pairs 6, and .* are available; .*"
        r"--target onnxruntime \(.*dims of half the maximum",
    ) as caught:
        work.check()
    assert "\n" not in str(caught.value)


def test_memory_is_checked_before_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "available", lambda: 1)
    monkeypatch.setattr("attnforge.export.deployment.write_reference", pytest.fail)
    module, args, shapes = small_example()
    with pytest.raises(UnavailableError, match="needs at least"):
        attnforge.deploy(module, args, tmp_path / "new", shapes, targets=["onnxruntime"])
    assert list(tmp_path.iterdir()) == []


# A full disk


@pytest.fixture
def small_files(copy: Path) -> Iterator[None]:
    """Once the bundle is copied, no file may be larger than 10,000 bytes, as on a full disk."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
def test_a_full_disk_loses_nothing(copy: Path) -> None:
    before = contents(copy)
    module, args, shapes = small_example()
    with pytest.raises(BundleError, match=r"the disk of .* is full, .*; nothing was written; make room") as caught:
        attnforge.deploy(module, args, copy, shapes, targets=["onnxruntime"], tune=False, force=True)
    assert "\n" not in str(caught.value)
    assert contents(copy) == before and list(copy.parent.iterdir()) == [copy]


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root can mount a small disk")
@pytest.mark.parametrize("kibibytes", [16, 160])
def test_a_small_disk_that_fills_loses_nothing(tmp_path: Path, kibibytes: int) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no right to mount")
    try:
        module, args, shapes = small_example()
        with pytest.raises(BundleError, match="is full"):
            attnforge.deploy(module, args, disk / "bundle", shapes, tune=False)
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# Interruptions

AT_WORK = """
import signal, sys, time
from attnforge import cli
from attnforge.bundle import writing

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job is started with some signals ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)

def work(**options):
    with writing(sys.argv[1], force=False) as folder:
        (folder / "half").write_text("written")
        time.sleep(60)

cli.app = work
cli.main()
"""


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX's")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_interrupted_command_leaves_nothing(tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", AT_WORK, str(tmp_path / "bundle")], stderr=subprocess.PIPE)
    while not list(tmp_path.glob(".*/half")):
        time.sleep(0.02)
        assert process.poll() is None
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code and errors.decode().split() == ["interrupted"]
    assert list(tmp_path.iterdir()) == []
