"""The uses of cuda-python, checked without a GPU: every function of the driver exists, and every use of
cuda.core fits its published signatures. cuda.core's own module is put together when it is imported, which hides its
types from a checker; they are laid out for it here."""

from __future__ import annotations

import ast
import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnforge.errors import InputError, UsageError

pytestmark = pytest.mark.xdist_group("cuda-names")

ROOT = Path(__file__).parents[2]
FILES = sorted(file for folder in ("runtime", "attnforge", "benchmarks") for file in (ROOT / folder).rglob("*.py"))
PUBLIC = """
from cuda.core._device import Device as Device
from cuda.core._event import Event as Event, EventOptions as EventOptions
from cuda.core._memory._buffer import Buffer as Buffer
from cuda.core._stream import Stream as Stream, StreamOptions as StreamOptions
LEGACY_DEFAULT_STREAM: Stream
"""
CONFIG = """
[mypy]
python_version = 3.11
strict = True
disallow_untyped_calls = False
ignore_missing_imports = True
[mypy-cuda.*]
ignore_errors = True
[mypy-torch.*,sympy.*,onnx.*,onnxscript.*,onnx_ir.*,rich.*,attnforge.export.*,attnforge.model.*,attnforge.bench.*]
follow_imports = skip
"""


def used(source: str) -> set[str]:
    """Return the attributes of the name `driver` that a file uses."""
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "driver"
    }


def test_every_function_of_the_driver_exists() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    names = set().union(*(used(file.read_text(encoding="utf-8")) for file in FILES))
    assert len(names) >= 15 and {"cuMemcpyHtoDAsync", "cuCtxPushCurrent", "cuMemAllocHost"} <= names
    assert [name for name in sorted(names) if not hasattr(driver, name)] == []
    assert used("driver.cuMemAlloc(1); driver.cuMemAllocc(2)") == {"cuMemAlloc", "cuMemAllocc"}


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the signatures in `types/cuda/core`, and `attnforge` as installed."""
    pytest.importorskip("mypy")
    try:
        shipped = Path(str(importlib.metadata.distribution("cuda-core").locate_file("cuda/core/cu13")))
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("cuda-core is not installed")
    folder = tmp_path_factory.mktemp("typed")
    core = folder / "types" / "cuda" / "core"
    shutil.copytree(shipped, core, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (core / "__init__.py").unlink()
    (core / "__init__.pyi").write_text(PUBLIC)
    shutil.copytree(ROOT / "attnforge", folder / "attnforge", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "mypy.ini").write_text(CONFIG)
    return folder


def checked(folder: Path) -> str:
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--follow-imports", "silent"]
    files = [f"attnforge/runtime/{name}.py" for name in ("gpu", "backends/tensorrt", "backends/onnxruntime_gpu")]
    environment = {"MYPYPATH": "types", "PATH": ""}
    done = subprocess.run([*command, *files], capture_output=True, text=True, cwd=folder, env=environment, timeout=300)
    return done.stdout + done.stderr


def test_every_use_of_cuda_core_fits_its_signatures(laid_out: Path) -> None:
    assert "Success: no issues found in 3 source files" in checked(laid_out)


def test_a_use_that_does_not_fit_is_noticed(laid_out: Path) -> None:
    file = laid_out / "attnforge" / "runtime" / "backends" / "tensorrt.py"
    source = file.read_text(encoding="utf-8")
    for right, wrong in (
        ("graph.graph.launch(stream)", "stream.launch(graph)"),
        ("recorder.end_building()", "recorder.end()"),
    ):
        assert right in source
        file.write_text(source.replace(right, wrong), encoding="utf-8")
        assert "attr-defined" in checked(laid_out)
    file.write_text(source, encoding="utf-8")


def test_the_per_thread_default_stream_is_refused_in_every_form() -> None:
    core = pytest.importorskip("cuda.core")
    from attnforge.runtime.gpu import Gpu

    for stream in (core.PER_THREAD_DEFAULT_STREAM, 2):
        with pytest.raises(UsageError, match="differs from thread to thread"):
            Gpu.stream_of(stream)
    assert Gpu.stream_of(core.LEGACY_DEFAULT_STREAM) is Gpu.stream_of(0) is core.LEGACY_DEFAULT_STREAM


def test_negative_views_are_not_read_as_they_are() -> None:
    """Their memory has the other sign, and DLPack does not say so."""
    pytest.importorskip("cuda.core")
    from attnforge.runtime.gpu import Gpu, _contiguous

    tensor = torch.arange(6.0).view(2, 3)
    negative = torch._neg_view(tensor)
    assert not _contiguous("torch", negative).is_neg() and torch.equal(_contiguous("torch", negative), -tensor)
    assert _contiguous("torch", tensor) is tensor
    with pytest.raises(InputError, match=r"x is a negative view of another tensor; call its resolve_neg\(\) first"):
        Gpu.view(Gpu.__new__(Gpu), "x", negative, None)
