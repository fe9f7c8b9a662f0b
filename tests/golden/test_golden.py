"""Bundles written by earlier versions (`make.py`) load, verify, and give the same outputs as before."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import attnforge
from attnforge.arrays import Array
from attnforge.bundle import Bundle
from attnforge.cli import app
from attnforge.errors import BundleError
from attnforge.runtime.backends.registry import why_not_here
from attnforge.runtime.parity.budget import relative_error
from tests.golden.make import BUNDLES, CAPACITY, HEADS

HERE = Path(__file__).parent
CLOSE = {"fp32": 1e-5, "fp16": 2e-3, "int8": 1e-2}
"""Relative error allowed for the kernels of other processors."""

ENCODERS = [name for name in BUNDLES if name.startswith("encoder")]
BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(why_not_here(name) is not None, reason=str(why_not_here(name))))
    for name in ("onnxruntime-cpu", "openvino")
]


def stored(name: str) -> tuple[Array, list[Array]]:
    """Return a bundle's stored inputs and outputs."""
    with np.load(HERE / f"{name}.npz") as file:
        return file["given"], [file[key] for key in file.files if key != "given"]


def agree(name: str, got: list[Array], expected: list[Array]) -> None:
    close = CLOSE[BUNDLES[name][0]]
    for output, wanted in zip(got, expected, strict=True):
        assert output.dtype == wanted.dtype and relative_error(output.astype(float), wanted.astype(float)) < close


def command(*arguments: str | Path) -> Mapping[str, Any]:
    """Run a command with `--json` and return the document."""
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    document: Mapping[str, Any] = json.loads(done.stdout)
    return document


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_gives_the_same_outputs(name: str, backend: str) -> None:
    given, outputs = stored(name)
    with attnforge.load(HERE / name, backend) as session:
        agree(name, [session(given)], outputs)
        agree(name, [session(given[:1, :1])[:, 0]], [session(given[:1, [0, 0]])[:, 0]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_decoder_gives_the_same_outputs(backend: str) -> None:
    given, outputs = stored("decoder-fp32")
    with attnforge.load(HERE / "decoder-fp32", backend) as session:
        decoder = session.decoder(2)
        agree("decoder-fp32", [decoder.prefill(given), decoder.step(given[:, 0])], outputs)
        decoder.crop([given.shape[1]] * 2)
        agree("decoder-fp32", [decoder.fork([0, 1]).step(given[:, 0])], outputs[1:])


@pytest.mark.parametrize("name", BUNDLES)
def test_every_available_backend_passes(name: str) -> None:
    report = attnforge.verify(HERE / name)
    assert report.passed and "onnxruntime-cpu" in report.backends, report
    assert all(backend.cases >= 5 for backend in report.backends.values())


@pytest.mark.parametrize("name", BUNDLES)
def test_inspect_reads_the_manifest(name: str) -> None:
    document, bundle = command("inspect", HERE / name), Bundle(HERE / name)
    attention = document["attention"]
    assert (attention["sites"], attention["canonical"]) == (1, 1) and attention["fused"]["onnxruntime"] == 1
    assert (document["name"], document["precision"]) == (name, BUNDLES[name][0])
    assert not bundle.unlisted()
    assert (bundle.manifest.quantised is not None) == name.endswith("int8")


def test_the_decoding_record_is_read() -> None:
    decoding = Bundle(HERE / "decoder-fp32").manifest.decoding
    assert decoding is not None and decoding.places == CAPACITY
    assert [cache.window for cache in decoding.caches] == [None] and len(decoding.tensors) == 2
    assert HEADS in decoding.tensors[0].dims


@pytest.mark.parametrize("name", ENCODERS)
def test_the_command_runs_on_files(name: str, tmp_path: Path) -> None:
    given, outputs = stored(name)
    np.save(tmp_path / "x.npy", given)
    command("run", HERE / name, f"x={tmp_path / 'x.npy'}", "--out", tmp_path / "y.npz")
    with np.load(tmp_path / "y.npz") as written:
        agree(name, [*written.values()], outputs)


def test_the_command_verifies() -> None:
    document = command("verify", HERE / "encoder-fp32", "--backend", "onnxruntime-cpu")
    backend = document["backends"]["onnxruntime-cpu"]
    assert document["passed"] and backend["passed"] and backend["error"] <= backend["budget"]


def test_the_command_generates() -> None:
    prompt = np.array([[3, 1, 4]])
    document = command("generate", HERE / "decoder-fp32", "--ids", "3,1,4", "--max-new-tokens", "4")
    with attnforge.load(HERE / "decoder-fp32", "onnxruntime-cpu") as session:
        decoder = session.decoder()
        likeliest = [int(decoder.prefill(prompt)[0].argmax())]
        while len(likeliest) < 4:
            likeliest.append(int(decoder.step(np.array(likeliest[-1:]))[0].argmax()))
    assert document["tokens"] == likeliest


def test_it_is_packaged_for_a_server(tmp_path: Path) -> None:
    (model,) = command("package", HERE / "encoder-fp32", "--for", "triton", "--out", tmp_path / "models")["models"]
    assert 'name: "x"' in (Path(model["folder"]).parent / "config.pbtxt").read_text()


def test_an_altered_bundle_is_refused(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(HERE / "encoder-fp32", tmp_path / "copy"))
    model = copy / "onnxruntime" / "model.onnx"
    model.write_bytes(model.read_bytes()[:-1] + b"\0")
    with pytest.raises(BundleError, match=r"onnxruntime/model\.onnx was altered"):
        attnforge.load(copy)
