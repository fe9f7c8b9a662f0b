"""The race: contenders are loaded, checked and timed in turns, several times over.

A model that is loaded twice in one process runs at two speeds, up to 8% apart, each constant until it is closed. So
contenders are loaded several times in a run, each time for a share of the rounds.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Generic

from attnforge.bench.contenders.peers import Peer, PeerJob, T
from attnforge.bench.experiment import Experiment
from attnforge.bench.interval import latency_of
from attnforge.bench.results import Latency
from attnforge.errors import BundleError, UnavailableError, first_line
from attnforge.runtime.backends.registry import why_not_unasked, why_unavailable

Times = dict[str, list[list[float]]]
"""Milliseconds of each call, by contender and round."""


@dataclass
class Entry(Generic[T]):
    """A contender in the race.

    Attributes:
        job: the bundle and inputs that it is loaded for.
        name: name of the backend or peer.
        key: unique name among all contenders.
        ours: whether it is a backend of the bundle.
        peer: describes and loads it.
        error, budget: error closest to its budget over all checks, relative to float64, and that budget.
        notes: what could not be measured, and why.
        opened: the runner, once loaded; closing `stack` closes it.
    """

    job: PeerJob
    name: str
    key: str
    ours: bool
    peer: Peer[T]
    error: float = 0.0
    budget: float = 0.0
    notes: list[str] = field(default_factory=list)
    opened: T = field(init=False)
    stack: ExitStack = field(default_factory=ExitStack)

    def open(self, stack: ExitStack) -> None:
        """Load it again, until `stack` closes, unless it is compiled and stays loaded for all rounds.

        The previous load is closed only after this one: memory freed before would be reused page for page, and the
        speed would repeat with it.
        """
        if self.peer.compiles and hasattr(self, "opened"):
            return
        new = stack.enter_context(ExitStack())
        with self.stack:
            self.opened = self.peer.open(self.job, new)
        self.stack = new

    def keep(self, error: float, budget: float) -> None:
        """Keep an error if it is at least as close to its budget as the worst so far."""
        if error * self.budget >= self.error * budget:
            self.error, self.budget = error, budget


@dataclass
class Workload(ABC, Generic[T]):
    """A task for contenders that is checked and then timed.

    Attributes:
        checking: progress text before a contender's name while it is checked.
        timing: progress text for what is timed.
        times: the times, by key, including those of contenders that were wrong later.
        openings: number of rounds of each load, in order.
        in_last_opening_alone: whether it is timed only in the last load, in rounds of its own.
    """

    in_last_opening_alone: ClassVar[bool] = False

    checking: str
    timing: str
    times: Times = field(default_factory=dict, init=False)
    openings: list[int] = field(default_factory=list, init=False)

    def latency(self, key: str) -> Latency:
        """Return the milliseconds of a contender."""
        return latency_of(self.times[key], self.openings)

    @abstractmethod
    def why_wrong(self, entry: Entry[T]) -> str | None:
        """Prepare a contender for timing; return why its answer is wrong, or None if it is right."""

    @abstractmethod
    def time(self, entries: Mapping[str, Entry[T]], rounds: int, seconds: float, seed: int) -> Times:
        """Time contenders in turns, in a new random order each round.

        Args:
            entries: the contenders, by key.
            rounds: maximum number of rounds.
            seconds: time limit after which no further round starts, where few rounds suffice.
            seed: random seed for the orders.
        """


def run_race(
    experiment: Experiment,
    contenders: Iterable[Entry[T]],
    workloads: Sequence[Workload[T]],
    skipped: dict[str, str],
    stack: ExitStack,
) -> tuple[list[Entry[T]], dict[str, str]]:
    """Load all contenders for every share of the rounds, check them, and time them in turns.

    Args:
        experiment: gives the numbers of rounds and loads.
        contenders: the contenders, in the order of the results.
        workloads: workloads that are timed in every load, one after another; they receive the times.
        skipped: why other contenders cannot run, by key; contenders that fail are added.
        stack: closes what is still open at the end.

    Returns:
        the contenders that were right in every load, and are still open; and why those whose answers are wrong have no
        time, by key.
    """
    entries, wrong = {entry.key: entry for entry in contenders}, dict[str, str]()
    count = len(experiment.shares)

    def each(words: str, act: Callable[[Entry[T]], str | None], opening: int) -> None:
        """Apply `act` to every contender, in a random order per load; those that fail or are wrong leave the race."""
        for entry in random.Random(opening).sample(list(entries.values()), len(entries)):
            experiment.progress(f"{words} {entry.key}")
            try:
                reason, reasons = act(entry), wrong
            except BundleError:
                raise
            except Exception as error:  # a peer that cannot run the model is a result, not a failure of the benchmark
                reason, reasons = first_line(error), wrong if entry.ours else skipped
            if reason is not None:
                if any(entry.key in workload.times for workload in workloads):
                    reason += f" (in load {opening + 1} of {count}; it was right before)"
                reasons[entry.key] = reason
                entry.stack.close()
                del entries[entry.key]

    for i, share in enumerate(experiment.shares):
        each("open", lambda entry: entry.open(stack), i)
        for workload in workloads:
            if workload.in_last_opening_alone and i + 1 < count:
                continue
            each(workload.checking, workload.why_wrong, i)
            experiment.progress(f"time {workload.timing}{f', load {i + 1} of {count}' if count > 1 else ''}")
            times = workload.time(entries, share, experiment.seconds / count, seed=i)
            workload.openings.append(max(map(len, times.values()), default=0))  # of every contender
            for key, rounds in times.items():
                workload.times.setdefault(key, []).extend(rounds)
    for entry in entries.values():
        if entry.peer.compiles and count > 1:
            entry.notes.append(
                "compiled once, because that takes long: its interval does not cover differences between loads"
            )
    return list(entries.values()), wrong


def entries_of(
    experiment: Experiment,
    job: PeerJob,
    known: Sequence[str],
    open_ours: Callable[[str, PeerJob, ExitStack], T],
    peers: Mapping[str, Peer[T]],
    dropped: Mapping[str, str],
    skipped: dict[str, str],
    suffix: str = "",
) -> Iterator[Entry[T]]:
    """Yield the contenders on one bundle: its backends (all if none is named) and the peers.

    Args:
        experiment: names the backends and the peers.
        job: the job that they are loaded for.
        known: all backends.
        open_ours: loads a backend.
        peers: all peers, by name.
        dropped: why other backends are not tried, by name.
        skipped: receives the reasons of backends that cannot run, by key.
        suffix: suffix of the keys.

    Raises:
        UnavailableError: a backend that was requested by name cannot run here.
    """
    why_not = why_not_unasked if experiment.backends is None else why_unavailable
    for name in experiment.backends or known:
        if (reason := dropped.get(name) or why_not(job.bundle, name)) is None:
            ours = Peer(f"the bundle on {name}", "backend", make=partial(open_ours, name))
            yield Entry(job, name, f"{name}{suffix}", True, ours)
        elif experiment.backends is None:
            skipped[f"{name}{suffix}"] = reason
        else:
            raise UnavailableError(f"{name}: {reason}")
    for name in experiment.against:
        yield Entry(job, name, f"{name}{suffix}", False, peers[name])
