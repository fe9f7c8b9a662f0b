"""Throughput: samples a second over batches, and over callers at once, contenders in turns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from attnforge.bench.calls import Caller
from attnforge.bench.experiment import Experiment, case_at
from attnforge.bench.interval import latency_of, per_second
from attnforge.bench.results import Throughput
from attnforge.bundle import Case
from attnforge.errors import InputError, first_line
from attnforge.runtime import cases as reference
from attnforge.runtime.race import in_turns, seconds_of
from attnforge.runtime.session import RUNS_TO_WARM

THROUGHPUT_PEERS = ("onnxruntime-plain", "eager")
"""Peers whose throughput is measured too; that of the others is close to their latency's inverse."""

BATCH = "batch"
"""The symbol of the dim that counts samples."""

BATCHES, CALLERS = (1, 2, 4, 8), (1, 2, 4)

BURST = 0.1
"""Seconds that a turn takes, about."""


def throughputs(experiment: Experiment, entries: Sequence[Caller], case: Case) -> dict[str, list[Throughput]]:
    """Throughput by contender: over batches with one caller, and over callers at the sizes of `case`."""
    experiment.progress("measure throughput")
    batches = []
    for batch in BATCHES if BATCH in case.sizes else ():
        with contextlib.suppress(InputError):  # outside the profile
            case_at(experiment.bundles[0], {**case.sizes, BATCH: batch})
            batches.append(batch)
    points = [(n, 1) for n in batches] or [(case.sizes.get(BATCH, 1), 1)]
    points += [(case.sizes.get(BATCH, 1), n) for n in CALLERS if n > 1]
    loads: list[Load] = []
    for entry in entries:
        if not entry.ours and entry.name not in THROUGHPUT_PEERS:
            continue
        for batch, callers in points:
            if callers > 1 and not entry.ours:
                continue  # peers are opened for one caller
            sizes = {**case.sizes, BATCH: batch} if BATCH in case.sizes else case.sizes
            at_batch = Case(name="throughput", sizes=sizes, kind="normal", seed=1)
            run = partial(entry.opened, reference.make_inputs(at_batch, entry.job.bundle.manifest.inputs, {}))
            try:
                for _ in range(RUNS_TO_WARM):
                    run()
            except Exception as error:  # the rest is measured all the same
                entry.notes.append(f"no throughput at batch {batch}: {first_line(error)}")
            else:
                loads.append(Load(entry.key, run, batch, callers))
    by_contender: dict[str, list[Throughput]] = {}
    for load, rates in zip(loads, bursts(loads), strict=True):
        throughput = Throughput(batch=load.batch, callers=load.callers, per_second=per_second(latency_of(rates).median))
        by_contender.setdefault(load.key, []).append(throughput)
    return by_contender


@dataclass(frozen=True)
class Load:
    """Calls of a contender by several callers at once.

    Attributes:
        key: of the contender.
        run: one call.
        batch: samples of a call.
        callers: threads that call at once.
    """

    key: str
    run: Callable[[], Any]
    batch: int
    callers: int

    def milliseconds(self, lasting: float) -> list[float]:
        """Milliseconds a sample in a burst; a call takes `lasting` seconds, about."""
        calls = max(1, int(BURST / lasting / self.callers))
        return [1e3 * _together(self.run, self.callers, calls) / (self.batch * self.callers * calls)]


def bursts(loads: Sequence[Load], rounds: int = 4) -> list[list[list[float]]]:
    """Milliseconds a sample in every round, of each load."""
    lasting = [min(seconds_of(load.run) for _ in range(2)) for load in loads]
    turns = {str(i): partial(load.milliseconds, lasting[i]) for i, load in enumerate(loads)}
    return list(in_turns(turns, rounds).values())


def _together(run: Callable[[], Any], callers: int, calls: int) -> float:
    """Seconds until `callers` threads have made `calls` calls each."""
    if callers == 1:
        return seconds_of(run, calls)
    with ThreadPoolExecutor(callers) as threads:
        list(threads.map(lambda _: None, range(callers)))  # starts the threads
        return seconds_of(lambda: list(threads.map(lambda _: seconds_of(run, calls), range(callers))))
