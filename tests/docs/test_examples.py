"""The scripts of examples/ run as a reader would run them. The one that needs no torch runs in a separate process, the
others in this process, which has imported torch already."""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.export import Dim

import attnforge
from tests.docs.pages import ROOT
from tests.support.first_hour import run_job

pytestmark = pytest.mark.filterwarnings("ignore")  # from torch's exporter

SCRIPTS = {
    "own_module.py": ((), "1 of 1 sites canonical"),
    "onnx_file.py": (("model.onnx", "batch=1:2:4", "tokens=1:8:16"), "passed onnxruntime-cpu"),
    "hugging_face.py": ((), "'last_hidden_state': (3, 20, 64)"),
    "precision_and_metric.py": ((), "accuracy"),
    "generate.py": (("1",), "passed"),
    "serving_loop.py": (("layer.bundle", "20"), "torch was not imported"),
    "ray_batch.py": ((".", "300"), "300 tiles, equal to one Session's to the bit"),
    "ray_serve.py": ((".", "100", "PORT"), "over HTTP, the first digit is a 0"),
}
"""The arguments of each script, and what it must print."""

WITHOUT_TORCH = "serving_loop.py"

WITH_RAY = {"ray_batch.py", "ray_serve.py"}


together = pytest.mark.xdist_group("examples")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an ONNX file and a bundle."""
    path = tmp_path_factory.mktemp("examples")
    module, args = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval(), (torch.randn(2, 8, 32),)
    sizes = ({0: Dim("batch", min=1, max=4), 1: Dim("tokens", min=1, max=16)},)
    torch.onnx.export(
        module, args, path / "model.onnx", dynamo=True, dynamic_shapes=sizes, external_data=False, verbose=False
    )
    attnforge.deploy(module, args, path / "layer.bundle", sizes, targets=["onnxruntime"], tune=False)
    return path


def test_every_script_is_tested() -> None:
    assert {file.name for file in (ROOT / "examples").glob("*.py")} == set(SCRIPTS)


@together
@pytest.mark.parametrize("name", sorted({*SCRIPTS} - {WITHOUT_TORCH} - WITH_RAY))
def test_the_example_runs(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example(name, folder, monkeypatch)
    assert SCRIPTS[name][1] in capsys.readouterr().out


@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("name", sorted(WITH_RAY))
def test_the_ray_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_example(name, tmp_path, monkeypatch)
    assert SCRIPTS[name][1] in capsys.readouterr().out


def run_example(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script in a folder; a failure raises an exception."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [name, *(free_port() if word == "PORT" else word for word in SCRIPTS[name][0])])
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


@together
def test_a_colleagues_file_is_explained(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_job("explain", folder, monkeypatch)
    printed = capsys.readouterr().out
    assert "sizes: batch 1 to 4, tokens 1 to 16\nattention: 1 sites, 1 canonical" in printed
    assert "fused by onnxruntime" in printed and "own: passed\nonnxruntime-cpu: error" in printed.replace("fp32", "own")


@together
def test_the_example_without_torch_runs(folder: Path) -> None:
    arguments, printed = SCRIPTS[WITHOUT_TORCH]
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / WITHOUT_TORCH), *arguments],
        cwd=folder, env={**os.environ, "PYTHONWARNINGS": "ignore"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert printed in ran.stdout
