"""Starts and memory of contenders, each in a process of its own (:mod:`.alone`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from attnforge.bench import alone
from attnforge.bench.contenders.registry import PEERS
from attnforge.bench.experiment import Experiment
from attnforge.bench.race import Entry
from attnforge.bench.results import Cold, Contender
from attnforge.bundle import Case

LONG_START = 0.3
"""Seconds of loading from which another process is worth it, to tell how long loading really takes.

A virtual machine's memory is slow where it is touched for the first time, and the first process pays; so contenders
that load longer than this are loaded twice, and the lesser time counts.
"""


@dataclass
class _Subject:
    """A contender that a process can be told to run."""

    contender: Contender
    order: alone.Order
    run: alone.FreshRun | None = None
    """Of its start, where that tells its memory too."""


def measure_starts_and_memory(experiment: Experiment, pairs: Sequence[tuple[Entry, Contender]], case: Case) -> None:
    """Measure starts, one after another, and then memory, two processes at a time, which do not disturb each other."""
    if not (experiment.starts or experiment.memory):
        return
    subjects = list(_subjects(experiment, pairs, case))
    for subject in subjects if experiment.starts else ():
        experiment.progress(f"start {subject.contender.key} anew")
        with _noted(subject.contender, "start"):
            _measure_start(subject)
    if experiment.memory:
        experiment.progress("measure memory")
        _measure_memory(subjects)


def _subjects(experiment: Experiment, pairs: Sequence[tuple[Entry, Contender]], case: Case) -> Iterator[_Subject]:
    """The contenders to be measured; one that no process can run gets a note that says why."""
    for entry, contender in pairs:
        if entry.ours or experiment.fresh_peers is None or entry.name in experiment.fresh_peers:
            order = _order(experiment, entry, case)
            if isinstance(order, str):
                contender.notes.append(order)
            else:
                yield _Subject(contender, order)


def _measure_start(subject: _Subject) -> None:
    run = alone.measured(subject.order)
    subject.contender.cold = run.cold
    if subject.order.any_sizes and subject.order.sizes:
        return  # its memory takes another process, which first runs at other sizes; that tells a second load, too
    subject.run = run
    if run.cold.load_s > LONG_START:
        with contextlib.suppress(alone.FailedError):
            _take_lesser_load(run.cold, alone.measured(subject.order))


def _measure_memory(subjects: Sequence[_Subject]) -> None:
    with ThreadPoolExecutor(2) as threads:
        futures = {
            subject.contender.key: threads.submit(alone.measured, subject.order.model_copy(update={"warm": True}))
            for subject in subjects
            if subject.run is None
        }
    for subject in subjects:
        with _noted(subject.contender, "memory"):
            run = subject.run or futures[subject.contender.key].result()
            subject.contender.memory = run.memory
            if subject.contender.cold is not None:
                _take_lesser_load(subject.contender.cold, run)


def _take_lesser_load(cold: Cold, run: alone.FreshRun) -> None:
    if cold.load_s > LONG_START:
        cold.load_s = min(cold.load_s, run.cold.load_s)


@contextlib.contextmanager
def _noted(contender: Contender, what: str) -> Iterator[None]:
    """A process that fails inside the block is a note of the contender's."""
    try:
        yield
    except alone.FailedError as error:
        contender.notes.append(f"its {what} is not measured: {error}")


def _order(experiment: Experiment, entry: Entry, case: Case) -> alone.Order | str:
    """What a process has to be told to run a contender, or why none can."""
    peer = PEERS.get(entry.name) if not entry.ours else None
    bundle = entry.job.bundle
    if peer is not None and peer.compiles:
        return "its start and memory are not measured: what it compiled is kept on disk, so no start of it is a first"
    if peer is not None and peer.file is None and bundle.manifest.source.kind in ("module", "onnx"):
        return "its start and memory are not measured: another process cannot make the module again"
    return alone.Order(
        bundle=str(bundle.path.absolute()),
        contender=entry.name,
        engine="backend" if peer is None else peer.engine,
        file=str(peer.file(entry.job).absolute()) if peer is not None and peer.file is not None else None,
        sizes=case.sizes,
        threads=experiment.threads,
        folder=str(entry.job.folder.absolute()),
        any_sizes=peer is None or peer.any_sizes,
        warm=False,
        trust_source=experiment.trust_source,
        stands=str(Path.cwd()),
        trusted=[str(key) for key in bundle.trusted],
    )
