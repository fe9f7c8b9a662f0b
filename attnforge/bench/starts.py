"""Start-up time and memory of contenders, each in its own process (:mod:`.alone`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attnforge.bench import alone
from attnforge.bench.calls import Caller
from attnforge.bench.experiment import Experiment
from attnforge.bench.results import Cold, Contender
from attnforge.bundle import Case
from attnforge.children import ChildError

LONG_START = 0.3
"""Seconds of loading above which a contender is loaded in a second process, and the shorter time counts.

A virtual machine's memory is slow when it is first touched, and the first process pays for that.
"""


def measure_starts_and_memory(experiment: Experiment, pairs: Sequence[tuple[Caller, Contender]], case: Case) -> None:
    """Measure starts, one after another, and then memory, two processes at a time, which do not disturb each other.

    A process that starts a model of fixed sizes measures its memory too. Other models take a second process, which
    first runs at other sizes, and measures a second load.
    """
    if not (experiment.starts or experiment.memory):
        return
    subjects, runs = list(_subjects(experiment, pairs, case)), dict[str, alone.FreshRun]()
    for contender, order in subjects if experiment.starts else ():
        experiment.progress(f"start {contender.key} in a new process")
        with _noted(contender, "start"):
            run = alone.measured(order)
            contender.cold = run.cold
            if not (order.any_sizes and order.sizes):
                runs[contender.key] = run
                if run.cold.load_s > LONG_START:
                    with contextlib.suppress(ChildError):
                        _take_lesser_load(run.cold, alone.measured(order))
    if not experiment.memory:
        return
    experiment.progress("measure memory")
    with ThreadPoolExecutor(2) as threads:
        futures = {
            contender.key: threads.submit(alone.measured, order.model_copy(update={"warm": True}))
            for contender, order in subjects
            if contender.key not in runs
        }
    for contender, _ in subjects:
        with _noted(contender, "memory"):
            run = runs.get(contender.key) or futures[contender.key].result()
            contender.memory = run.memory
            if contender.cold is not None:
                _take_lesser_load(contender.cold, run)


def _take_lesser_load(cold: Cold, run: alone.FreshRun) -> None:
    if cold.load_s > LONG_START:
        cold.load_s = min(cold.load_s, run.cold.load_s)


@contextlib.contextmanager
def _noted(contender: Contender, what: str) -> Iterator[None]:
    """Turn the failure of a process inside the block into a note of the contender."""
    try:
        yield
    except ChildError as error:
        contender.notes.append(f"its {what} is not measured: its process {error}")


def _subjects(
    experiment: Experiment, pairs: Sequence[tuple[Caller, Contender]], case: Case
) -> Iterator[tuple[Contender, alone.RunRequest]]:
    """Yield the contenders to measure, each with the request to its process; a contender that no process can run gets a
    note with the reason."""
    for entry, contender in pairs:
        peer, bundle = entry.peer, entry.job.bundle
        if not entry.ours and experiment.fresh_peers is not None and entry.name not in experiment.fresh_peers:
            continue
        if peer.compiles:
            contender.notes.append(
                "its start and memory are not measured: compiled code is cached on disk, so no start is cold"
            )
        elif not entry.ours and peer.file is None and bundle.manifest.source.kind in ("module", "onnx"):
            contender.notes.append("its start and memory are not measured: another process cannot rebuild the module")
        else:
            request = alone.RunRequest(
                bundle=str(bundle.path.absolute()), contender=entry.name, engine=peer.engine,
                file=str(peer.file(entry.job).absolute()) if peer.file is not None else None,
                sizes=case.sizes, threads=experiment.threads, folder=str(entry.job.folder.absolute()),
                any_sizes=peer.any_sizes, warm=False, trust_source=experiment.trust_source,
                stands=str(Path.cwd()), trusted=[str(key) for key in bundle.trusted],
            )  # fmt: skip
            yield contender, request
