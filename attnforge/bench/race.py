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
        opener: loads the contender and returns its runner.
        peer: the peer; None for a backend of the bundle.
        error, budget: error closest to its budget over all checks, relative to float64, and that budget.
        notes: what could not be measured, and why.
        opened: the runner, once loaded; closing `stack` closes it.
    """

    job: PeerJob
    name: str
    key: str
    opener: Callable[[ExitStack], T]
    peer: Peer[T] | None = None
    error: float = 0.0
    budget: float = 0.0
    notes: list[str] = field(default_factory=list)
    opened: T = field(init=False)
    stack: ExitStack | None = None

    @property
    def ours(self) -> bool:
        """Whether it is a backend of the bundle."""
        return self.peer is None

    @property
    def what(self) -> str:
        """One-line description."""
        return self.peer.what if self.peer is not None else f"the bundle on {self.name}"

    @property
    def stays(self) -> bool:
        """Whether it stays loaded for all rounds."""
        return self.peer is not None and self.peer.compiles

    def open(self, stack: ExitStack) -> None:
        """Load it again, until `stack` closes, unless it stays loaded.

        The previous load is closed only after this one: memory freed before would be reused page for page, and the
        speed would repeat with it.
        """
        if self.stays and self.stack is not None:
            return
        new, previous = stack.enter_context(ExitStack()), self.stack
        try:
            self.opened = self.opener(new)
        finally:
            if previous is not None:
                previous.close()
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
        in_last_opening_alone: whether it is timed only in the last load, in rounds of its own.
    """

    in_last_opening_alone: ClassVar[bool] = False

    checking: str
    timing: str

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


@dataclass
class Raced(Generic[T]):
    """The outcome of a race.

    Attributes:
        entries: the contenders that were right in every load, and are still open.
        times: times of each workload, by key, including those of contenders that were wrong later.
        openings: number of rounds of each load, in order.
        wrong: why contenders whose answers are wrong have no time, by key.
    """

    entries: list[Entry[T]]
    times: list[Times]
    openings: list[int]
    wrong: dict[str, str]


def run_race(
    experiment: Experiment,
    contenders: Iterable[Entry[T]],
    workloads: Sequence[Workload[T]],
    skipped: dict[str, str],
    stack: ExitStack,
) -> Raced[T]:
    """Load all contenders for every share of the rounds, check them, and time them in turns.

    Args:
        experiment: gives the numbers of rounds and loads.
        contenders: the contenders, in the order of the results.
        workloads: workloads that are timed in every load, one after another; the first one must be timed in all loads.
        skipped: why other contenders cannot run, by key; contenders that fail are added.
        stack: closes what is still open at the end.
    """
    entries, wrong, openings = {entry.key: entry for entry in contenders}, dict[str, str](), list[int]()
    times: list[Times] = [{} for _ in workloads]
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
                if any(entry.key in of_workload for of_workload in times):
                    reason += f" (in load {opening + 1} of {count}; it was right before)"
                reasons[entry.key] = reason
                if entry.stack is not None:
                    entry.stack.close()
                del entries[entry.key]

    for i, share in enumerate(experiment.shares):
        each("open", lambda entry: entry.open(stack), i)
        openings.append(0)
        for workload, so_far in zip(workloads, times, strict=True):
            if workload.in_last_opening_alone and i + 1 < count:
                continue
            each(workload.checking, workload.why_wrong, i)
            experiment.progress(f"time {workload.timing}{f', load {i + 1} of {count}' if count > 1 else ''}")
            for key, rounds in workload.time(entries, share, experiment.seconds / count, seed=i).items():
                so_far.setdefault(key, []).extend(rounds)
                if workload is workloads[0]:
                    openings[i] = len(rounds)  # of every contender
    for entry in entries.values():
        if entry.stays and len(openings) > 1:
            entry.notes.append(
                "compiled once, because that takes long: its interval does not cover differences between loads"
            )
    return Raced(list(entries.values()), times, openings, wrong)


def entries_of(
    experiment: Experiment,
    job: PeerJob,
    known: Sequence[str],
    open_ours: Callable[[str, PeerJob, ExitStack], T],
    peers: Mapping[str, Peer[T]],
    refused: Callable[[str], str | None],
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
        refused: returns why a backend is not tried, or None.
        skipped: receives the reasons of backends that cannot run, by key.
        suffix: suffix of the keys.

    Raises:
        UnavailableError: a backend that was requested by name cannot run here.
    """
    why_not = why_not_unasked if experiment.backends is None else why_unavailable
    for name in experiment.backends or known:
        if (reason := refused(name) or why_not(job.bundle, name)) is None:
            yield Entry(job, name, f"{name}{suffix}", partial(open_ours, name, job))
        elif experiment.backends is None:
            skipped[f"{name}{suffix}"] = reason
        else:
            raise UnavailableError(f"{name}: {reason}")
    for name in experiment.against:
        yield Entry(job, name, f"{name}{suffix}", partial(peers[name].open, job), peers[name])
