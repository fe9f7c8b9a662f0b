"""The race: contenders are opened, checked, and timed in turns, several times over.

One model opened twice in one process has two speeds, up to 8% apart, which it keeps for as long as it is open. So
contenders are opened several times in a run, each time for a share of the rounds.
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
        job: the bundle and inputs that it is opened for.
        name: of the backend or peer.
        key: its name among all contenders.
        opener: makes what runs it.
        peer: that it is; None for a backend of the bundle.
        error, budget: the worst of all checks, relative to float64.
        notes: what could not be measured, and why.
        opened: what runs it, once it is open; closing `stack` closes it.
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
        """A line about it."""
        return self.peer.what if self.peer is not None else f"the bundle on {self.name}"

    @property
    def stays(self) -> bool:
        """Whether it stays open for all rounds."""
        return self.peer is not None and self.peer.compiles

    def open(self, stack: ExitStack) -> None:
        """Open it anew, until `stack` closes, unless it stays open.

        The last opening is closed once this one is there: memory that was given back first would be taken again, page
        for page, and with it the same speed.
        """
        if self.stays and self.stack is not None:
            return
        own, last = stack.enter_context(ExitStack()), self.stack
        try:
            self.opened = self.opener(own)
        finally:
            if last is not None:
                last.close()
        self.stack = own

    def keep(self, error: float, budget: float) -> None:
        """Keep an error if it is as close to its budget as the worst so far."""
        if error * self.budget >= self.error * budget:
            self.error, self.budget = error, budget


@dataclass
class Workload(ABC, Generic[T]):
    """Something that contenders do, which is checked and then timed.

    Attributes:
        checking: the words before a contender's name while it is checked.
        timing: the words for what is timed.
        in_last_opening_alone: whether it is timed there alone, in rounds of its own.
    """

    in_last_opening_alone: ClassVar[bool] = False

    checking: str
    timing: str

    @abstractmethod
    def why_wrong(self, entry: Entry[T]) -> str | None:
        """Make a contender ready to be timed; why its answer is wrong, or None where it is right."""

    @abstractmethod
    def time(self, entries: Mapping[str, Entry[T]], rounds: int, seconds: float, seed: int) -> Times:
        """Time contenders in turns, in an order drawn anew each round.

        Args:
            entries: the contenders, by key.
            rounds: the most rounds.
            seconds: after which no further round begins, where few rounds do.
            seed: of the orders.
        """


@dataclass
class Raced(Generic[T]):
    """What came of a race.

    Attributes:
        entries: the contenders that were right in every opening, and are still open.
        times: of each workload, by key; also of contenders that were wrong later.
        openings: how many of the rounds, in order, were of each opening.
        wrong, skipped: why other contenders have no time, by key.
    """

    entries: list[Entry[T]]
    times: list[Times]
    openings: list[int]
    wrong: dict[str, str]
    skipped: dict[str, str]


def run_race(
    experiment: Experiment,
    contenders: Iterable[Entry[T]],
    workloads: Sequence[Workload[T]],
    skipped: dict[str, str],
    stack: ExitStack,
) -> Raced[T]:
    """Open all contenders anew for every share of the rounds, check them, and time them in turns.

    Args:
        experiment: how many rounds and openings there are.
        contenders: in the order of the results.
        workloads: that are timed in every opening, one after another; the first one in all of them.
        skipped: why other contenders cannot run, by key; gets those that fail.
        stack: closes what is open in the end.
    """
    entries, wrong, openings = {entry.key: entry for entry in contenders}, dict[str, str](), list[int]()
    times: list[Times] = [{} for _ in workloads]
    count = len(experiment.shares)

    def each(words: str, act: Callable[[Entry[T]], str | None], opening: int) -> None:
        """Let every contender act, in an order of the opening's own; those that fail or are wrong leave the race."""
        for entry in random.Random(opening).sample(list(entries.values()), len(entries)):
            experiment.progress(f"{words} {entry.key}")
            try:
                reason, reasons = act(entry), wrong
            except BundleError:
                raise
            except Exception as error:  # a peer that cannot run the model is a result, no failure of the benchmark
                reason, reasons = first_line(error), wrong if entry.ours else skipped
            if reason is not None:
                if any(entry.key in of_workload for of_workload in times):
                    reason += f" (in opening {opening + 1} of {count}; before, it was right)"
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
            experiment.progress(f"time {workload.timing}{f', opening {i + 1} of {count}' if count > 1 else ''}")
            taken = workload.time(entries, share, experiment.seconds / count, seed=i)
            for key, rounds in taken.items():
                so_far.setdefault(key, []).extend(rounds)
                if workload is workloads[0]:
                    openings[i] = len(rounds)  # of every contender
    for entry in entries.values():
        if entry.stays and len(openings) > 1:
            entry.notes.append(
                "what is compiled was opened once, for it takes long: its interval does not tell how openings differ"
            )
    return Raced(list(entries.values()), times, openings, wrong, skipped)


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
    """The contenders on one bundle: its backends, all where none is asked for, and the peers.

    Args:
        experiment: names the backends and the peers.
        job: that they are opened for.
        known: all backends.
        open_ours: makes what runs a backend.
        peers: all of them, by name.
        refused: why a backend is not tried; None where it is.
        skipped: gets the reasons of backends that cannot run, by key.
        suffix: of the keys.

    Raises:
        UnavailableError: a backend that was asked for by name cannot run here.
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
