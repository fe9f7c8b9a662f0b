"""A local Ray cluster: rows through two actors compared with two plain processes, a killed actor, a killed replica, and
unsigned bundles.

`python -m benchmarks run ray-load` writes `benchmarks/results/ray_load.json`. The rows are tiles of
scikit-learn's photographs in Parquet; both sides read them, and predict the same batches with one thread per process,
in turns. All outputs are compared bit for bit with those of one Session, and all row numbers with those that were
written. It exits with 1 if a row or a request is lost or wrong; times do not affect the exit code.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import attnforge
from attnforge.arrays import Array
from attnforge.atomic import temporary_folder
from attnforge.bundle import TRUSTED, Bundle, sign
from attnforge.errors import first_line
from attnforge.model.registry import build_model
from attnforge.precision import precision_named
from attnforge.runtime.race import in_turns
from attnforge.serving.batching import APART
from benchmarks.experiment import Claim, Columns, Experiment, named, say, table_of, where
from benchmarks.load import Load, press, spread
from benchmarks.published import deployed
from benchmarks.servers.ray.cluster import descendants, killing, local_cluster
from benchmarks.servers.ray.rows import asking, busy_after, in_actors
from benchmarks.servers.ray.tiles import Rows, batches_of, in_plain_processes, outcome_of, write_tiles
from tests.support.keys import new_key

MODEL = "vit"
SAMPLES = 64
ACTORS = 2
RAY, PLAIN = "two actors of Ray", "two plain processes"
REPLICA = "ray::ServeReplica"
"""Ray's name of a replica's process."""


def measure(
    tiles: Annotated[int, typer.Option(help="Number of rows to predict.")] = 20_000,
    rounds: Annotated[int, typer.Option(help="Rounds per side.")] = 3,
    clients: Annotated[int, typer.Option(help="Number of concurrent clients of the deployment.")] = 16,
    requests: Annotated[int, typer.Option(help="Requests per client.")] = 500,
) -> dict[str, Any]:
    """Measure rows, a deployment, killed processes, and unsigned bundles."""
    busy = os.getloadavg()[0]
    with temporary_folder() as folder:
        bundle = deployed(build_model(MODEL, max_batch=SAMPLES), folder / "bundle", MODEL)
        (folder / "tiles").mkdir()
        files = write_tiles(folder / "tiles", tiles)
        with attnforge.load(bundle, threads=1) as session:
            backend = session.backend
            expected = np.concatenate([session(rows["image"]) for rows in batches_of(files, SAMPLES)])
        with local_cluster(cpus=ACTORS + 2):
            ways: dict[str, Callable[[], list[Rows]]] = {
                RAY: lambda: [in_actors(bundle.path, files, SAMPLES, ACTORS, folder / "progress")],
                PLAIN: lambda: list(in_plain_processes(bundle.path, files, SAMPLES, ACTORS)),
            }
            turns = in_turns({way: partial(_turn, run, expected) for way, run in ways.items()}, rounds, settle=0)
            say("kill an actor in the middle …")
            progress = folder / "killed"
            with killing(lambda: busy_after(progress, tiles // SAMPLES // 2)) as victims:
                killed = _turn(lambda: [in_actors(bundle.path, files, SAMPLES, ACTORS, progress)], expected)
            killed["in_the_middle"] = bool(victims)
            say("clients of two replicas, one of which is killed …")
            served, replica = _served(bundle, files, expected, clients, requests)
            say("unsigned bundles …")
            trust = _trust(bundle, files, folder)
    return {
        "backend": backend, "tiles": tiles, "samples": SAMPLES, "clients": clients, "requests": requests,
        "busy": round(busy, 1),
        "ways": {way: {key: [turn[key] for turn in of] for key in of[0]} for way, of in turns.items()},
        "killed_actor": killed, "served": served, "killed_replica": replica, "trust": trust,
    }  # fmt: skip


# --- rows -------------------------------------------------------------------------------------------------------------


def _turn(run: Callable[[], Sequence[Rows]], expected: Array) -> dict[str, Any]:
    """Run a turn; return whether all rows are present and right, the rows per second, the number of processes, and the
    share of a processor that their calls had, which other work on the machine reduces.

    Args:
        run: predicts the rows.
        expected: the outputs of one Session, by `id`.
    """
    start = time.perf_counter()
    parts = run()
    seconds = time.perf_counter() - start
    say(f"{len(expected)} rows in {seconds:.1f} s")
    process, began, ended, cpu = (
        np.concatenate([part[name] for part in parts]) for name in ("process", "began", "ended", "cpu")
    )
    _, calls = np.unique(np.stack([process, began]), axis=1, return_index=True)
    return {
        "per_second": round(len(began) / float(ended.max() - began.min()), 1),
        "seconds": round(seconds, 1),
        "processes": len(np.unique(process)),
        "cpu_share": round(float(cpu.sum() / (ended - began)[calls].sum()), 2),
        **outcome_of(parts, expected),
    }


# --- a deployment -----------------------------------------------------------------------------------------------------


def _served(
    bundle: Bundle, files: Sequence[Path], expected: Array, clients: int, requests: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the figures of a load on two replicas, and of one during which a replica is killed."""
    from ray import serve

    from attnforge.serving.ray import Handle, PredictorDeployment

    images = next(batches_of(files[:1], 512))["image"]
    inputs = [{"image": image[None]} for image in images]
    answers = [row[None] for row in expected[: len(images)]]
    tolerance = APART * precision_named("fp32").floor
    application = PredictorDeployment.options(num_replicas=ACTORS, health_check_period_s=1).bind(Handle(bundle.path))
    handle = serve.run(application, name="tiles", route_prefix=None)

    def pressed(load: Load) -> None:
        press(lambda: asking(handle, inputs), answers, clients, requests, tolerance=tolerance, again=True, outcome=load)

    def victim() -> int | None:
        return descendants(REPLICA)[0] if len(load.milliseconds) > clients * requests // 2 else None

    calm, load = Load(), Load()
    try:
        pressed(calm)
        with killing(victim) as killed:
            pressed(load)
        in_the_middle = bool(killed)
        end = time.monotonic() + 60
        while (replicas := len(descendants(REPLICA))) < ACTORS and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        serve.shutdown()
    return calm.figures(), {**load.figures(), "in_the_middle": in_the_middle, "replicas": replicas}


# --- trust ------------------------------------------------------------------------------------------------------------


def _trust(bundle: Bundle, files: Sequence[Path], folder: Path) -> dict[str, dict[str, str | None]]:
    """Return how actors and replicas respond to an unsigned and a signed bundle if the environment names a key: None if
    they answer, otherwise the error that the driver gets."""
    signed = Bundle(shutil.copytree(bundle.path, folder / "signed"))
    key = new_key(folder / "maker.key")
    sign(signed.path, key)
    os.environ[TRUSTED] = str(key.with_suffix(".pub"))
    try:
        return {
            name: {"unsigned": _said(run, bundle), "signed": _said(run, signed)}
            for name, run in (
                ("actor", lambda made: in_actors(made.path, files[:1], SAMPLES, 1, folder / "trust")),
                ("replica", _asked_once),
            )
        }
    finally:
        del os.environ[TRUSTED]


def _asked_once(bundle: Bundle) -> None:
    from ray import serve

    from attnforge.serving.ray import Handle, PredictorDeployment

    try:
        handle: Any = serve.run(PredictorDeployment.bind(Handle(bundle.path)), name="trust", route_prefix=None)
        handle.predict.remote({"image": np.zeros((1, 3, 32, 32), np.float32)}).result(timeout_s=60)
    except RuntimeError as error:
        status = serve.status().applications["trust"]
        raise RuntimeError("\n".join(of.message for of in status.deployments.values())) from error
    finally:
        serve.shutdown()


def _said(run: Callable[[Bundle], Any], bundle: Bundle) -> str | None:
    """Return the line about the signature in the driver's error; None if nothing failed."""
    try:
        run(bundle)
    except Exception as error:  # of Ray's kinds
        lines = [line.strip() for line in str(error).splitlines() if "SignatureError" in line]
        text = lines[-1] if lines else f"{type(error).__name__}: {first_line(error)}"
        return text.removeprefix("attnforge.errors.").replace(f"{bundle.path.parent}{os.sep}", "")
    return None


# --- the page ---------------------------------------------------------------------------------------------------------


ROWS: Columns = {
    "": "{name}".format_map,
    "tiles a second": lambda way: spread(way["per_second"]),
    "seconds with the start": lambda way: spread(way["seconds"]),
    "share of a processor": lambda way: spread(way["cpu_share"]),
    "rows": lambda way: f"{way['tiles'] * len(way['lost']):,}",
    "lost": lambda way: sum(way["lost"]),
    "twice": lambda way: sum(way["twice"]),
    "equal to one Session": lambda way: "yes" if all(way["equal"]) else "no",
}
REQUESTS: Columns = {
    "": "{name}".format_map,
    "requests a second": "{per_second:,.0f}".format_map,
    "p50 ms": "{p50_ms:.1f}".format_map,
    "p99 ms": "{p99_ms:.1f}".format_map,
    "answered": "{answered:,}".format_map,
    "sent again": "{asked_again}".format_map,
    "errors": "{errors}".format_map,
    "wrong": "{wrong}".format_map,
}


def _ways(figures: dict[str, Any]) -> dict[str, dict[str, list[Any]]]:
    """Return the figures of all rounds, by way; the run with a killed actor is one."""
    return {**figures["ways"], "an actor killed": {key: [value] for key, value in figures["killed_actor"].items()}}


def table(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    tiles, ways, replica = figures["tiles"], figures["ways"], figures["killed_replica"]
    ratios = [ray / plain for ray, plain in zip(ways[RAY]["per_second"], ways[PLAIN]["per_second"], strict=True)]
    whole = [plain / ray for ray, plain in zip(ways[RAY]["seconds"], ways[PLAIN]["seconds"], strict=True)]
    loads = {"two replicas": figures["served"], "a replica killed under load": replica}
    return "\n\n".join(
        (
            table_of(ROWS, [{**way, "tiles": tiles} for way in named(_ways(figures))]),
            f"{tiles:,} tiles in each of {len(ratios)} rounds, in turns, {figures['samples']} in a call; seconds count "
            f"from the start of the first call to the end of the last. Ray's actors reach "
            f"{statistics.median(ratios):.2f} of the plain processes' tiles a second (by round "
            f"{', '.join(f'{ratio:.2f}' for ratio in ratios)}), and {statistics.median(whole):.2f} where the start of "
            "the processes counts. Where calls had less than a whole processor, other work on the machine had the "
            f"rest (its load average was {figures['busy']} before). An actor was killed when half of the rows were "
            "predicted; Ray started another.",
            table_of(REQUESTS, named(loads)),
            f"{figures['clients']} clients × {figures['requests']} requests of one tile, over a handle; every answer "
            "is compared with a Session's. Requests at the killed replica were sent again; "
            f"{replica['replicas']} replicas were running again after the load.",
            f"With `{TRUSTED}` set, a signed bundle answers. With an unsigned one no actor starts, and the driver "
            f"gets: {figures['trust']['actor']['unsigned']}.",
            f"{MODEL} on {figures['backend']}, one thread a process; {where(figures)}",
        )
    )


def claims(figures: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claims: no row or request is lost or wrong, and unsigned bundles do not answer."""
    killed, replica, trust = figures["killed_actor"], figures["killed_replica"], figures["trust"]
    for way, of in _ways(figures).items():
        if way in figures["ways"]:
            yield Claim(
                f"{way}: rounds with a different number of processes", sum(n != ACTORS for n in of["processes"]), 0
            )
        for key in ("lost", "twice"):
            yield Claim(f"{way}: rows {key}", sum(of[key]), 0)
        yield Claim(f"{way}: rounds with other outputs than a Session's", of["equal"].count(False), 0)
    for load, of in {"two replicas": figures["served"], "a replica killed": replica}.items():
        yield Claim(f"{load}: requests lost", of["errors"], 0)
        yield Claim(f"{load}: wrong answers", of["wrong"], 0)
    late = [of for of in (killed, replica) if not of["in_the_middle"]]
    yield Claim("processes that were not killed in the middle", len(late), 0)
    # a client has one request at a time
    yield Claim("requests sent again", replica["asked_again"], figures["clients"])
    yield Claim("unsigned bundles that answer", sum(not of["unsigned"] for of in trust.values()), 0)
    yield Claim("signed bundles that do not answer", sum(bool(of["signed"]) for of in trust.values()), 0)


EXPERIMENT = Experiment("ray_load.json", measure, {"ray-load": table}, claims)
