"""Throughput: samples a second over batches, and over callers at once, contenders in turns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from attnforge.bench.experiment import Experiment, case_at
from attnforge.bench.interval import latency_of
from attnforge.bench.race import Entry
from attnforge.bench.results import Interval, Throughput
from attnforge.bundle import Case
from attnforge.errors import InputError, first_line
from attnforge.runtime import cases as reference
from attnforge.runtime.session import RUNS_TO_WARM
from attnforge.runtime.turns import in_turns, seconds_of

THROUGHPUT_PEERS = ("onnxruntime-plain", "eager")
"""Peers whose throughput is measured too; that of the others is close to their latency's inverse."""

BATCH = "batch"
"""The symbol of the dim that counts samples."""

BATCHES, CALLERS = (1, 2, 4, 8), (1, 2, 4)

BURST = 0.1
"""Seconds that a turn takes, about."""


def throughputs(experiment: Experiment, entries: Sequence[Entry], case: Case) -> dict[str, list[Throughput]]:
    """Throughput by contender: over batches with one caller, and over callers at the sizes of `case`."""
    experiment.progress("measure throughput")
    batches = []
    for batch in BATCHES if BATCH in case.sizes else ():
        with contextlib.suppress(InputError):  # outside the profile
            case_at(experiment.bundles[0], {**case.sizes, BATCH: batch})
            batches.append(batch)
    points = [(n, 1) for n in batches] or [(case.sizes.get(BATCH, 1), 1)]
    points += [(case.sizes.get(BATCH, 1), n) for n in CALLERS if n > 1]
    runs: dict[str, Callable[[], Any]] = {}
    places: dict[str, tuple[Entry, int, int]] = {}
    for entry in entries:
        if not entry.ours and entry.name not in THROUGHPUT_PEERS:
            continue
        for batch, callers in points:
            if callers > 1 and not entry.ours:
                continue  # peers are opened for one caller
            sizes = {**case.sizes, BATCH: batch} if BATCH in case.sizes else case.sizes
            at_batch = Case(name="throughput", sizes=sizes, kind="normal", seed=1)
            feeds = reference.make_inputs(at_batch, entry.job.bundle.manifest.inputs, {})
            try:
                for _ in range(RUNS_TO_WARM):
                    entry.runner(feeds)
            except Exception as error:  # the rest is measured all the same
                entry.notes.append(f"no throughput at batch {batch}: {first_line(error)}")
                continue
            key = f"{entry.key}, {batch}, {callers}"
            runs[key], places[key] = partial(entry.runner, feeds), (entry, batch, callers)
    rates = bursts(runs, {key: at[2] for key, at in places.items()}, {key: at[1] for key, at in places.items()})
    by_contender: dict[str, list[Throughput]] = {}
    for key, (entry, batch, callers) in places.items():
        rate = latency_of([[1e3 / per_second] for per_second in rates[key]]).median  # seconds of a thousand samples
        interval = Interval(value=1e3 / rate.value, low=1e3 / rate.high, high=1e3 / rate.low)
        throughput = Throughput(batch=batch, callers=callers, per_second=interval)
        by_contender.setdefault(entry.key, []).append(throughput)
    return by_contender


def bursts(
    runs: Mapping[str, Callable[[], Any]], callers: Mapping[str, int], samples: Mapping[str, int], rounds: int = 4
) -> dict[str, list[float]]:
    """Samples a second of every round, by contender.

    Args:
        runs: one call of each contender.
        callers: how many threads call each at once.
        samples: of one call of each.
    """

    def turn(name: str) -> float:
        calls = max(1, int(BURST / lasting[name] / callers[name]))
        return samples[name] * callers[name] * calls / _together(runs[name], callers[name], calls)

    lasting = {name: min(seconds_of(run) for _ in range(2)) for name, run in runs.items()}
    return in_turns({name: partial(turn, name) for name in runs}, rounds)


def _together(run: Callable[[], Any], callers: int, calls: int) -> float:
    """Seconds until `callers` threads have made `calls` calls each."""
    if callers == 1:
        return seconds_of(run, calls)
    with ThreadPoolExecutor(callers) as threads:
        list(threads.map(lambda _: None, range(callers)))  # starts the threads
        return seconds_of(lambda: list(threads.map(lambda _: seconds_of(run, calls), range(callers))))
