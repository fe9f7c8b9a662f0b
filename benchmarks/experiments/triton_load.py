"""A Triton server under load: requests joined into batches and one per call, a killed server, an altered bundle.

`python -m benchmarks run triton-load` writes `benchmarks/results/triton_load.json`. Thirty-two clients classify
scanned digits, one image per request, with a model whose requests Triton joins and with the same model at one request
per call, in turns on one server. Every answer is compared with that of a Session. It exits with 1 if a request is lost
or answered wrongly; times do not affect the exit code.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import attnforge
from attnforge.atomic import temporary_folder
from attnforge.model.data import load_digits_split
from attnforge.model.registry import build_model
from attnforge.precision import precision_named
from attnforge.runtime.race import in_turns
from attnforge.serving.batching import APART
from attnforge.serving.triton.model import FOLDER
from attnforge.serving.triton.options import Packaging
from attnforge.serving.triton.repository import package
from benchmarks.experiment import Claim, Columns, Experiment, named, say, table_of, where
from benchmarks.load import Load, press, spread
from benchmarks.published import deployed
from benchmarks.servers.triton.client import client_of, connecting
from benchmarks.servers.triton.server import WHEEL, Server, unpack

MODEL = "patch-attention-digits"
ALONE, JOINED = "one request a call", "requests joined"
NAMES = {ALONE: "alone", JOINED: "joined"}


def measure(
    clients: Annotated[int, typer.Option(help="Number of concurrent clients.")] = 32,
    requests: Annotated[int, typer.Option(help="Requests per client.")] = 500,
    rounds: Annotated[int, typer.Option(help="Rounds per way.")] = 5,
) -> dict[str, Any]:
    """Measure every load, a killed server, and an altered bundle."""
    unpack()
    busy, tolerance = os.getloadavg()[0], APART * precision_named("fp32").floor
    with temporary_folder() as folder:
        bundle = deployed(build_model(MODEL), folder / "bundle", MODEL)
        repository = folder / "repository"
        (joined,) = package([bundle], repository, Packaging(threads=1), name=NAMES[JOINED])
        package([bundle], repository, Packaging(threads=1, max_batch=1), name=NAMES[ALONE])
        inputs = [{"image": image[None]} for image in load_digits_split().test_images.numpy()]
        with attnforge.load(bundle) as session:
            backend, expected = session.backend, [session.run(feeds)["output"] for feeds in inputs]
        with Server(repository, folder / "log") as server:

            def pressed(way: str, **options: Any) -> Load:
                connect = connecting(server, NAMES[way], inputs)
                return press(connect, expected, clients, requests, tolerance=tolerance, **options)

            def turn(way: str) -> dict[str, Any]:
                say(f"{way} …")
                before = _counts(server, NAMES[way])
                load = pressed(way).figures()
                samples, calls = (after - was for after, was in zip(_counts(server, NAMES[way]), before, strict=True))
                return {**load, "batch": round(samples / calls, 1)}

            turns = in_turns({way: partial(turn, way) for way in NAMES}, rounds, settle=0)
            say("kill the server under load, and start it again …")
            killed = _killed(server, partial(pressed, JOINED, again=True), clients * requests // 2)
        altered = _altered(repository, folder / "altered.log")
    ways = {
        way: {key: [load[key] for load in loads] for key in ("per_second", "p50_ms", "p99_ms")}
        | {key: sum(load[key] for load in loads) for key in ("answered", "errors", "wrong")}
        | {"batch": loads[-1]["batch"]}
        for way, loads in turns.items()
    }
    return {
        "server": WHEEL, "backend": backend, "clients": clients, "requests": requests, "busy": round(busy, 1),
        "preferred": joined.preferred, "ways": ways, "killed": killed, "altered": altered,
    }  # fmt: skip


def _counts(server: Server, name: str) -> tuple[int, int]:
    """Return how many samples a model has answered, and in how many calls."""
    with client_of(server, "grpc") as client:
        answer = client.get_inference_statistics(name, as_json=True)["model_stats"][0]
    return int(answer.get("inference_count", 0)), int(answer.get("execution_count", 0))


def _killed(server: Server, pressed: Callable[..., Load], half: int) -> dict[str, Any]:
    """Return the figures of a load during which the server is killed and restarted; clients send lost requests again.

    Args:
        server: the server to kill.
        pressed: runs the load.
        half: number of answers after which the server is killed.
    """
    load = Load()
    with ThreadPoolExecutor(1) as thread:
        pressing = thread.submit(pressed, outcome=load)
        while not pressing.done() and len(load.milliseconds) < half:
            time.sleep(0.02)
        in_the_middle = not pressing.done()
        server.kill()
        start = time.perf_counter()
        server.start()
        ready = time.perf_counter() - start
        pressing.result()
    return {**load.figures(), "in_the_middle": in_the_middle, "ready_again_s": round(ready, 1)}


def _altered(repository: Path, log: Path) -> dict[str, Any]:
    """Return whether a model whose bundle had one bit altered is ready, whether the other is, and the log's line."""
    file = repository / NAMES[JOINED] / "1" / FOLDER / "onnxruntime" / "model.onnx"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with Server(repository, log, ["--exit-on-error=false", "--strict-readiness=false"]) as server:
        line = re.search(r"BundleError: \S*?/(\S+ was altered \([^)]*\))", server.text())
        return {
            "ready": server.is_ready(NAMES[JOINED]), "other_ready": server.is_ready(NAMES[ALONE]),
            "log": line.group(1).rpartition("/")[2] if line is not None else None,
        }  # fmt: skip


COLUMNS: Columns = {
    "": "{name}".format_map,
    "requests a second": lambda way: spread(way["per_second"]),
    "p50 ms": lambda way: f"{statistics.median(way['p50_ms']):.1f}",
    "p99 ms": lambda way: f"{statistics.median(way['p99_ms']):.1f}",
    "samples a call": "{batch:.1f}".format_map,
    "answered": "{answered:,}".format_map,
    "errors": "{errors:,}".format_map,
    "wrong": "{wrong:,}".format_map,
}


def table(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    by_round = zip(*(figures["ways"][way]["per_second"] for way in (JOINED, ALONE)), strict=True)
    ratios = [joined / alone for joined, alone in by_round]
    killed, altered = figures["killed"], figures["altered"]
    return "\n\n".join(
        (
            table_of(COLUMNS, named(figures["ways"])),
            f"{figures['clients']} clients × {figures['requests']} requests of one image in each of {len(ratios)} "
            f"rounds, in turns; every answer is compared with a Session's. Joined, {statistics.median(ratios):.1f} "
            f"times as many requests a second (by round {', '.join(f'{ratio:.1f}' for ratio in ratios)}). Other work "
            f"on the machine had a load average of {figures['busy']} before.",
            f"The server killed under load and started again: ready after {killed['ready_again_s']} s; "
            f"{killed['answered']:,} of {figures['clients'] * figures['requests']:,} requests answered, "
            f"{killed['asked_again']} of them sent again, {killed['wrong']} wrong. A bundle altered by one bit: "
            f"{'ready' if altered['ready'] else 'not ready'}, and the log says: {altered['log']}.",
            f"{MODEL} on {figures['backend']}, one thread, {figures['preferred'][0]} samples preferred; the server of "
            f"{figures['server']}; {where(figures)}",
        )
    )


def claims(figures: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims: no request is lost or answered wrongly, and an altered bundle is not served."""
    for way, of in {**figures["ways"], "the killed server": figures["killed"]}.items():
        yield Claim(f"{way}: requests lost", of["errors"], 0)
        yield Claim(f"{way}: wrong answers", of["wrong"], 0)
    yield Claim("altered bundles that are ready", int(figures["altered"]["ready"]), 0)


EXPERIMENT = Experiment("triton_load.json", measure, {"triton-load": table}, claims)
