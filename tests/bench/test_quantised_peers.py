"""Quantised peers, on an int8 bundle and on an fp32 bundle."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from pathlib import Path

import pytest

import attnforge
from attnforge.bench.contenders.peers import PeerJob
from attnforge.bench.contenders.quantised import QUANTISED
from attnforge.bundle import Bundle
from attnforge.errors import UnavailableError
from attnforge.runtime import cases as reference
from attnforge.runtime.parity.budget import relative_error
from tests.export.precision.test_int8 import Block, deployed, made, real


def job_of(bundle: Bundle, folder: Path) -> PeerJob:
    module, _ = made(Block)
    return PeerJob(bundle, {"x": real()[0][0].numpy()}, 1, folder, module)


def test_each_gives_the_answers_of_its_tool(tmp_path: Path) -> None:
    job = job_of(deployed(tmp_path / "b", data=real(), max_error=0.05), tmp_path)
    truth = made(Block)[0](real()[0][0]).detach().numpy()
    for name, peer in QUANTISED.items():
        if name == "torchao-int8" and importlib.util.find_spec("torchao") is None:
            continue
        with ExitStack() as stack:
            (answer,) = peer.open(job, stack)(job.feeds).values()
            error = relative_error(answer.astype("float64"), truth.astype("float64"))
            assert 1e-4 < error < 0.1, (name, error)  # it is quantised, and computes the same function


def test_missing_requirements_are_reported(tmp_path: Path) -> None:
    plain = job_of(deployed(tmp_path / "fp32", precision="fp32"), tmp_path)
    without = job_of(deployed(tmp_path / "int8", max_error=0.05), tmp_path)
    for name, peer in QUANTISED.items():
        with ExitStack() as stack, pytest.raises(UnavailableError, match="the bundle is fp32"):
            peer.open(plain, stack)
        if name not in ("onnxruntime-dynamic", "torchao-int8"):
            with ExitStack() as stack, pytest.raises(UnavailableError, match="the bundle was deployed without any"):
                peer.open(without, stack)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is installed")
def test_a_tool_that_is_not_installed_is_named(tmp_path: Path) -> None:
    job = job_of(deployed(tmp_path / "int8", max_error=0.05), tmp_path)
    with ExitStack() as stack, pytest.raises(UnavailableError, match="pip install torchao"):
        QUANTISED["torchao-int8"].open(job, stack)


def test_a_size_without_stored_outputs_is_checked_against_the_same_q_dq(tmp_path: Path) -> None:
    bundle = deployed(tmp_path / "b", max_error=0.05)
    sizes = {"batch": 3, "tokens": 23}
    assert not any(case.sizes == sizes for case in bundle.manifest.cases)
    (model,) = attnforge.benchmark(
        bundle, ["onnxruntime-cpu"], [], sizes=sizes, rounds=3, quick=True, module=made(Block)[0]
    ).models
    (ours,) = model.contenders
    assert model.wrong == {} and 1e-4 < ours.error <= ours.budget
    assert reference.at(bundle.manifest.inputs, sizes).sizes == sizes
