"""A real Triton server: every reference case over HTTP and gRPC, invalid requests, versions, altered and unsigned
bundles."""

from __future__ import annotations

import re
import shutil
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from tritonclient.utils import InferenceServerException

import attnforge
from attnforge.arrays import Array
from attnforge.bundle import TRUSTED, Bundle, sign
from attnforge.runtime.parity.verify import hold
from attnforge.serving.triton.model import FOLDER
from attnforge.serving.triton.options import Packaging
from attnforge.serving.triton.repository import package
from benchmarks.load import press
from benchmarks.servers.triton.client import PROTOCOLS, asking, client_of, connecting, inputs_of
from benchmarks.servers.triton.server import Server, why_unavailable
from tests.support.bundles import Deploy, DeploySmall, small_inputs
from tests.support.keys import new_key

pytestmark = [
    pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable())),
    pytest.mark.xdist_group("triton"),
]

QUICK = Packaging(preferred=(), threads=1, kind="cpu")
"""Nothing is measured."""

DIGITS = "patch-attention-digits-fp32"

by_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)


COUNTED = 10.0
"""Seconds within which a server updates the counts of its answers."""


@pytest.fixture(scope="module")
def bundles(registered: Deploy, small: DeploySmall) -> dict[str, Bundle]:
    """Bundles by the names of their models: one with a batch, one in fp16 with a mask, a static one, and one with an
    input that has no batch, in fp32 and bf16."""
    return {
        DIGITS: registered("patch-attention-digits", "fp32"),
        "cross-attention-fp16": registered("cross-attention", "fp16"),
        "worked-example-fp32": registered("worked-example", "fp32"),
        "small-fp32": small("fp32"),
        "small-bf16": small("bf16"),
    }


@pytest.fixture(scope="module")
def server(bundles: dict[str, Bundle], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with these models, which loads others on request."""
    folder = tmp_path_factory.mktemp("triton")
    package(list(bundles.values()), folder / "repository", QUICK)
    options = ["--model-control-mode=explicit", "--load-model=*"]
    with Server(folder / "repository", folder / "log", options) as started:
        yield started


@pytest.fixture
def repository(server: Server) -> Path:
    return server.log.parent / "repository"


@by_protocol
def test_every_reference_case_is_answered_within_the_budget(
    server: Server, bundles: dict[str, Bundle], protocol: str
) -> None:
    with client_of(server, protocol) as client:
        for name, bundle in bundles.items():
            report = hold(bundle, "onnxruntime-cpu", asking(client, protocol, name))
            assert report.passed, report.missed
            assert report.cases == len(bundle.manifest.cases)


class Scored(nn.Module):
    """Attention whose outputs are one number per sample and, optionally, one number."""

    def __init__(self, in_all: bool) -> None:
        super().__init__()
        self.in_all = in_all

    def forward(self, x: Tensor, gain: Tensor) -> tuple[Tensor, ...]:
        scores = ((x @ x.transpose(1, 2)).softmax(-1) @ x).mean((1, 2)) * gain
        return (scores, scores.sum()) if self.in_all else (scores,)


@pytest.mark.parametrize(("in_all", "shapes"), [(False, [(3, 1)]), (True, [(3,), (1,)])])
def test_numbers_without_further_dims_keep_their_shape(
    server: Server, tmp_path: Path, repository: Path, in_all: bool, shapes: list[tuple[int, ...]]
) -> None:
    """Triton requires a dim of every tensor: for clients, a number per sample has one, and so has a single number."""
    batch = Dim("batch", min=1, max=4)
    bundle = attnforge.deploy(
        Scored(in_all), (torch.randn(2, 5, 8), torch.rand(2)), tmp_path / "bundle",
        {"x": {0: batch}, "gain": {0: batch}}, targets=["onnxruntime"], tune=False,
    )  # fmt: skip
    name = f"scored-{in_all}"
    package([bundle], repository, QUICK, name=name)
    feeds = {"x": np.ones((3, 5, 8), np.float32), "gain": np.arange(3, dtype=np.float32)}
    with client_of(server, "http") as client, attnforge.load(bundle, threads=1) as session:
        client.load_model(name)
        run = asking(client, "http", name)
        given = feeds if in_all else {**feeds, "gain": feeds["gain"][:, None]}
        answers, expected = run(given), session.run(feeds)
    for (output, array), shape in zip(expected.items(), shapes, strict=True):
        assert answers[output].shape == shape
        np.testing.assert_allclose(answers[output].reshape(array.shape), array, rtol=1e-5)


def image(batch: int = 1, seed: int = 0) -> Array:
    return np.random.default_rng(seed).random((batch, 1, 8, 8)).astype(np.float32)


WRONG: dict[str, tuple[dict[str, Array], str]] = {
    "name": ({"picture": image()}, "unexpected inference input 'picture'|expected 1 inputs"),
    "type": ({"image": image().astype(np.float64)}, "data-type is 'FP64', but model .* expects 'FP32'"),
    "rank": ({"image": image()[0]}, "unexpected shape for input 'image'"),
    "size": ({"image": image()[..., :7]}, "unexpected shape for input 'image'"),
    "an empty batch": ({"image": image(0)}, "batch|empty|input byte size|shape"),
    "a batch beyond the largest": ({"image": image(33)}, "batch-size must be <= 32"),
    "too many": ({"image": image(), "more": image()}, "expected 1 inputs but got 2"),
    "none": ({}, "expected 1 inputs but got 0|at least one input"),
}


@by_protocol
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_request_gets_an_error_and_the_next_one_its_answer(
    server: Server, bundles: dict[str, Bundle], protocol: str, wrong: str
) -> None:
    values, words = WRONG[wrong]
    with client_of(server, protocol) as client, attnforge.load(bundles[DIGITS], threads=1) as session:
        run = asking(client, protocol, DIGITS)
        with pytest.raises(InferenceServerException, match=words):
            run(values)
        np.testing.assert_array_equal(run({"image": image()})["output"], session(image()))


@by_protocol
def test_sizes_that_the_profile_does_not_take_are_the_requests_own_error(server: Server, protocol: str) -> None:
    """The configuration has -1 for a dim of any size; the bundle's range is checked by its Session."""
    name, rng = "cross-attention-fp16", np.random.default_rng(0)

    def values(queries: int, keys: int, mask: int) -> dict[str, Array]:
        return {
            "query": rng.standard_normal((1, queries, 256)).astype(np.float16),
            "memory": rng.standard_normal((1, keys, 192)).astype(np.float16),
            "key_padding_mask": np.zeros((1, mask), bool),
        }

    with client_of(server, protocol) as client:
        run = asking(client, protocol, name)
        with pytest.raises(InferenceServerException, match="the profile takes 1 to 64"):
            run(values(129, 5, 5))
        with pytest.raises(InferenceServerException, match="keys is 5 in input 'memory' and 6 in input"):
            run(values(3, 5, 6))
        assert run(values(3, 5, 5))["output"].shape == (1, 3, 256)


def test_requests_at_once_are_joined_and_each_gets_its_own_answer(server: Server, bundles: dict[str, Bundle]) -> None:
    """Requests of different sizes, one of which is invalid."""
    name, rng = "cross-attention-fp16", np.random.default_rng(0)
    requests = [
        {
            "query": rng.standard_normal((1 + i % 3, 7 if i % 2 else 200 if i == 8 else 9, 256)).astype(np.float16),
            "memory": rng.standard_normal((1 + i % 3, 11, 192)).astype(np.float16),
            "key_padding_mask": rng.random((1 + i % 3, 11)) < 0.3,
        }
        for i in range(24)
    ]
    with (
        attnforge.load(bundles[name], threads=1) as session,
        client_of(server, "grpc") as client,
        ThreadPoolExecutor(len(requests)) as threads,
    ):
        before = _statistics(client, name)
        futures = [threads.submit(asking(client, "grpc", name), request) for request in requests]
        for i, (future, request) in enumerate(zip(futures, requests, strict=True)):
            if i == 8:
                with pytest.raises(InferenceServerException, match="the profile takes 1 to 64"):
                    future.result()
            else:
                output = session.run(request)["output"].astype(np.float64)
                np.testing.assert_allclose(future.result()["output"].astype(np.float64), output, rtol=0.02, atol=0.02)
        samples = before["inference_count"] + sum(len(request["query"]) for request in requests) - 3
        end = time.monotonic() + COUNTED
        while (after := _statistics(client, name))["inference_count"] < samples and time.monotonic() < end:
            time.sleep(0.05)
    assert after["inference_count"] >= samples
    assert after["execution_count"] - before["execution_count"] < len(requests)


def _statistics(client: Any, name: str) -> dict[str, int]:
    answer = client.get_inference_statistics(name, as_json=True)
    return {key: int(answer["model_stats"][0].get(key, 0)) for key in ("inference_count", "execution_count")}


def test_under_a_load_every_answer_is_counted_as_what_it_is(server: Server, bundles: dict[str, Bundle]) -> None:
    inputs = [{"image": image(1, seed)} for seed in range(7)]
    with attnforge.load(bundles[DIGITS], threads=1) as session:
        expected = [session.run(feeds)["output"] for feeds in inputs]

    def pressed(model: str, answers: list[Array]) -> tuple[int, int, int]:
        outcome = press(connecting(server, model, inputs), answers, clients=8, requests=10, tolerance=1e-4)
        return len(outcome.milliseconds), outcome.wrong, outcome.errors

    assert pressed(DIGITS, expected) == (80, 0, 0)
    assert pressed(DIGITS, expected[1:] + expected[:1]) == (80, 80, 0)
    assert pressed("nobody", expected) == (0, 0, 80)


def test_an_output_that_is_not_asked_for_is_not_sent(server: Server) -> None:
    with client_of(server, "http") as client:
        wanted = [PROTOCOLS["http"].InferRequestedOutput("nothing")]
        with pytest.raises(InferenceServerException, match="unexpected inference output 'nothing'"):
            client.infer(DIGITS, inputs_of("http", {"image": image()}), outputs=wanted)


def test_warm_up_ran_before_the_model_was_ready(server: Server, bundles: dict[str, Bundle]) -> None:
    ordinary = [case.name for case in bundles[DIGITS].manifest.cases if case.is_ordinary]
    with client_of(server, "http") as client:
        config = client.get_model_config(DIGITS)
    assert [sample["name"] for sample in config["model_warmup"]] == ordinary
    assert config["max_batch_size"] == 32
    assert "Traceback" not in server.text()


def test_the_servers_metrics_have_the_memory_of_every_model(server: Server, bundles: dict[str, Bundle]) -> None:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    with attnforge.load(bundles[DIGITS], "onnxruntime-cpu") as session:
        weights = session.memory.weights
    (line,) = [line for line in lines if line.startswith("attnforge_memory") and DIGITS in line and '"weights"' in line]
    assert 'backend="onnxruntime-cpu"' in line and float(line.split()[-1]) == weights
    assert any(line.startswith(f'nv_inference_exec_count{{model="{DIGITS}"') for line in lines)


# --- versions, and models that do not become ready --------------------------------------------------------------------


def test_a_second_version_answers_alongside_the_first(
    server: Server, bundles: dict[str, Bundle], repository: Path
) -> None:
    first = {file: file.read_bytes() for file in (repository / DIGITS).rglob("*") if file.is_file()}
    package([bundles[DIGITS]], repository, Packaging(preferred=(), threads=1, kind="cpu", version=2))
    assert {file: file.read_bytes() for file in first} == first
    with client_of(server, "grpc") as client:
        client.load_model(DIGITS)
        first_answer, second_answer = (
            asking(client, "grpc", DIGITS, version)({"image": image()})["output"] for version in (1, 2)
        )
    np.testing.assert_array_equal(first_answer, second_answer)


@pytest.fixture
def add(server: Server, copy: Path, repository: Path) -> Iterator[Callable[[str], Path]]:
    """`add(name)`: a model of the small bundle that the server has not loaded; returns its bundle."""
    names: list[str] = []

    def added(name: str) -> Path:
        package([copy], repository, QUICK, name=name)
        names.append(name)
        return repository / name / "1" / FOLDER

    yield added
    for name in names:
        shutil.rmtree(repository / name)


@pytest.mark.parametrize("file", ["onnxruntime/model.onnx", "reference/outputs.safetensors", "manifest.json"])
def test_an_altered_bundle_keeps_its_model_from_ready(server: Server, add: Callable[[str], Path], file: str) -> None:
    altered = add("altered") / file
    data = bytearray(altered.read_bytes())
    data[0 if file == "manifest.json" else len(data) // 2] ^= 1  # no digest covers a digit of the manifest
    altered.write_bytes(data)
    before = len(server.text())
    with client_of(server, "http") as client:
        with pytest.raises(InferenceServerException, match="load failed for model 'altered'"):
            client.load_model("altered")
        assert re.search("BundleError: .*(was altered|is not a valid manifest)", server.text()[before:])
        assert not server.is_ready("altered")
        assert asking(client, "http", "small-fp32")(small_inputs())["output"].shape == (3, 4, 16)


def test_another_backend_of_the_session(server: Server, add: Callable[[str], Path], repository: Path) -> None:
    bundle = add("openvino")
    config = repository / "openvino" / "config.pbtxt"
    config.write_text(config.read_text().replace('string_value: "auto"', 'string_value: "openvino"'))
    with client_of(server, "http") as client:
        client.load_model("openvino")
        report = hold(Bundle(bundle), "openvino", asking(client, "http", "openvino"))
    assert report.passed, report.missed


def test_trust(copy: Path, tmp_path: Path) -> None:
    """If the server's environment names keys, an unsigned bundle is not served, and the log says why."""
    unsigned = Path(shutil.copytree(copy, tmp_path / "unsigned"))
    key = new_key(tmp_path / "maker.key")
    sign(copy, key)
    package([unsigned], tmp_path / "repository", QUICK, name="unsigned")
    package([copy], tmp_path / "repository", QUICK, name="signed", trusted=key.with_suffix(".pub"))
    options = ["--exit-on-error=false", "--strict-readiness=false"]
    variables = {TRUSTED: str(key.with_suffix(".pub"))}
    with Server(tmp_path / "repository", tmp_path / "log", options, variables) as server:
        assert server.is_ready("signed")
        assert not server.is_ready("unsigned")
        assert re.search("SignatureError: .*unsigned/1/bundle has no signature", server.text())
        with client_of(server, "grpc") as client:
            assert asking(client, "grpc", "signed")(small_inputs())["output"].shape == (3, 4, 16)
    assert "successfully unloaded 'signed'" in server.text(), "a clean stop unloads its models"


def test_a_server_that_was_killed_answers_again(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    bundle = bundles["worked-example-fp32"]
    package([bundle], tmp_path / "repository", QUICK)
    for _ in range(2):
        server = Server(tmp_path / "repository", tmp_path / "log")
        server.start()
        try:
            with client_of(server, "http") as client:
                report = hold(bundle, "onnxruntime-cpu", asking(client, "http", "worked-example-fp32"))
        finally:
            server.kill()
        assert report.passed, report.missed
