"""A local Ray cluster: rows and requests are right and complete, even if an actor or a replica is killed; invalid
requests; unsigned bundles, of which the Ray guide shows an actor; metrics."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray import serve

import attnforge
from attnforge.arrays import Array
from attnforge.bundle import TRUSTED, Bundle, sign
from attnforge.errors import InputError
from attnforge.serving.ray import Handle, PredictorDeployment
from benchmarks.load import Load, press
from benchmarks.servers.ray.cluster import descendants, killing
from benchmarks.servers.ray.rows import asking, busy_after, in_actors
from benchmarks.servers.ray.tiles import batches_of, outcome_of, write_tiles
from tests.support.bundles import Deploy
from tests.support.keys import new_key

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("ray_cluster")]

SAMPLES, TILES = 8, 1600

REPLICA = "ray::ServeReplica"


@pytest.fixture(scope="module")
def unsigned(registered: Deploy) -> Bundle:
    """A bundle of a model that takes 1 to 8 images (3, 32, 32)."""
    return registered("vit", "fp32")


@pytest.fixture(scope="module")
def signed(unsigned: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    """The same bundle, signed by the key that all these tests trust."""
    folder = tmp_path_factory.mktemp("signed")
    copy = Bundle(shutil.copytree(unsigned.path, folder / "vit"))
    key = new_key(folder / "maker.key")
    sign(copy.path, key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TRUSTED, str(key.with_suffix(".pub")))
        yield copy


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_tiles(tmp_path_factory.mktemp("tiles"), TILES, rows=150)


@pytest.fixture(scope="module")
def expected(signed: Bundle, files: list[Path]) -> Array:
    """The answers of one Session to all tiles."""
    with attnforge.load(signed, "onnxruntime-cpu", threads=1) as session:
        return np.concatenate([session(rows["image"]) for rows in batches_of(files, SAMPLES)])


def test_ray_listens_and_reports_nowhere_else() -> None:
    from ray._common.usage import usage_lib

    assert ray.util.get_node_ip_address() == "127.0.0.1"
    assert not usage_lib.usage_stats_enabled()


def test_nothing_is_reported_unless_it_is_asked_for() -> None:
    program = "import os, attnforge.serving.ray; print(os.environ['RAY_USAGE_STATS_ENABLED'])"
    for given, then in ((None, "0"), ("1", "1")):
        variables = {name: value for name, value in os.environ.items() if name != "RAY_USAGE_STATS_ENABLED"}
        variables |= {"RAY_USAGE_STATS_ENABLED": given} if given is not None else {}
        done = subprocess.run(
            [sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == then


# --- rows -------------------------------------------------------------------------------------------------------------


def test_a_killed_actor_loses_no_row_and_repeats_none(
    signed: Bundle, files: list[Path], expected: Array, tmp_path: Path
) -> None:
    progress = tmp_path / "progress"
    with killing(lambda: busy_after(progress, 20)) as killed:
        rows = in_actors(signed.path, files, SAMPLES, 2, progress, backend="onnxruntime-cpu")
    assert killed
    assert outcome_of([rows], expected) == {"lost": 0, "twice": 0, "equal": True}
    assert len(np.unique(rows["process"])) >= 2


# --- requests ---------------------------------------------------------------------------------------------------------

Answer = tuple[int, dict[str, Any]]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The port of Ray Serve on 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = int(free.getsockname()[1])
    serve.start(http_options={"host": "127.0.0.1", "port": number})
    yield number
    serve.shutdown()


@pytest.fixture(scope="module")
def handle(signed: Bundle, port: int) -> Any:
    """A handle of two replicas."""
    application = PredictorDeployment.options(
        num_replicas=2, health_check_period_s=1, ray_actor_options={"num_cpus": 0.5}
    )
    return serve.run(application.bind(Handle(signed.path, "onnxruntime-cpu")), name="vit")


@pytest.fixture
def post(handle: Any, port: int) -> Callable[[Any], Answer]:
    """`post(document)` returns the answer's status code and document."""

    def ask(document: Any) -> Answer:
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v2/models/vit/infer", data=body)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    return ask


def images(files: list[Path], count: int) -> Array:
    return next(batches_of(files[:1], count))["image"]


def test_what_is_wrong_with_a_request_is_its_own_error(handle: Any, files: list[Path], expected: Array) -> None:
    """Concurrent requests are joined; each gets its own answer."""
    image = images(files, 12)
    good = [handle.predict.remote({"image": image[place : place + 1]}) for place in range(12)]
    wrong = [
        (handle.predict.remote(given), words)
        for given, words in (
            ({"image": image[:1].astype(np.float64)}, "input 'image' is float64; the model takes .*: convert it first"),
            ({"picture": image[:1]}, "input 'image' is missing; the model takes image"),
            ({"image": image[:9]}, r"dim 0 of input 'image' \(batch\) is 9; the profile takes 1 to 8"),
            ({"image": image[0]}, "input 'image' has 3 dims"),
            ({"image": [[1.0]]}, "input 'image' is list"),
            (7, "inputs are of type int; give a mapping"),
        )
    ]
    for place, response in enumerate(good):
        np.testing.assert_allclose(response.result(timeout_s=60)["output"][0], expected[place], rtol=1e-4, atol=1e-5)
    for response, words in wrong:
        with pytest.raises(InputError, match=words):
            response.result(timeout_s=60)


def test_answers_over_http(post: Callable[[Any], Answer], files: list[Path], expected: Array) -> None:
    image = images(files, 2)
    tensor = {"name": "image", "shape": list(image.shape), "datatype": "FP32", "data": image.ravel().tolist()}
    code, answer = post({"inputs": [tensor]})
    assert code == 200 and answer["model_name"] == "vit"
    (output,) = answer["outputs"]
    assert (output["name"], output["shape"], output["datatype"]) == ("output", [2, 10], "FP32")
    np.testing.assert_allclose(np.reshape(output["data"], (2, 10)), expected[:2], rtol=1e-4, atol=1e-5)
    for document, words in (
        (b"\xff", "not a valid inference request"),
        ({"inputs": [tensor | {"datatype": "FP64"}]}, "input 'image' is float64; the model takes"),
        ({"inputs": [tensor | {"shape": [2, 3]}]}, r"input 'image' has 6144 numbers; its shape \[2, 3\] takes 6"),
    ):
        code, answer = post(document)
        assert code == 400 and re.search(words, answer["error"]), answer


def test_a_replica_killed_under_load_loses_only_its_requests(handle: Any, files: list[Path], expected: Array) -> None:
    inputs = [{"image": image[None]} for image in images(files, 100)]
    answers = [row[None] for row in expected[:100]]
    load = Load()
    with killing(lambda: descendants(REPLICA)[0] if len(load.milliseconds) > 100 else None) as killed:
        press(lambda: asking(handle, inputs), answers, 16, 25, tolerance=1e-4, again=True, outcome=load)
    assert killed
    assert (len(load.milliseconds), load.errors, load.wrong) == (400, 0, 0), load.error
    assert load.asked_again <= 16
    end = time.monotonic() + 60
    while len(descendants(REPLICA)) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    assert len(descendants(REPLICA)) == 2


def test_the_clusters_metrics_have_the_sessions(handle: Any, files: list[Path]) -> None:
    handle.predict.remote({"image": images(files, 2)}).result(timeout_s=60)
    labels = ('backend="onnxruntime-cpu"', 'model="vit"', 'precision="fp32"')
    end = time.monotonic() + 30
    while time.monotonic() < end:
        with urllib.request.urlopen(f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        named = {line.partition("{")[0] for line in lines if all(label in line for label in labels)}
        if named >= {"ray_attnforge_calls_total", "ray_attnforge_call_seconds_sum", "ray_attnforge_memory_bytes"}:
            break
        time.sleep(0.5)
    assert named >= {"ray_attnforge_calls_total", "ray_attnforge_call_samples_count", "ray_attnforge_memory_bytes"}


def test_an_unsigned_bundles_replica_does_not_start(unsigned: Bundle, handle: Any) -> None:
    with pytest.raises(RuntimeError, match="Deploying application unsigned failed"):
        serve.run(
            PredictorDeployment.options(
                max_constructor_retry_count=1, ray_actor_options={"num_cpus": 0.5}
            ).bind(Handle(unsigned.path)),
            name="unsigned", route_prefix="/unsigned",
        )  # fmt: skip
    (deployment,) = serve.status().applications["unsigned"].deployments.values()
    assert re.search("SignatureError: .*vit-fp32 has no signature", deployment.message)
    serve.delete("unsigned")
