"""Progress of long work: stages in order, and steps within a stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from attnforge.memory import peak, reset_peak


@runtime_checkable
class Progress(Protocol):
    """Hears of every stage and every step as it begins, in the thread that works.

    :func:`attnforge.deploy` calls `stage` once a stage, `number` rising from 1 to `total`, and during a stage `step`
    any number of times, or never where a stage is one piece of work. A stage ends where the next one begins or where
    `deploy` returns or raises. What a method raises ends the work, and `deploy` leaves nothing behind.

    A display on a terminal takes its stream (`sys.stderr`) before the work begins: while torch exports, `sys.stdout`
    and `sys.stderr` are redirected (:mod:`attnforge.quiet`).
    """

    def stage(self, name: str, number: int, total: int) -> None:
        """The stage `name`, such as "lower and build for onnxruntime", begins, the `number`-th of `total`."""

    def step(self, what: str, done: float, total: float | None) -> None:
        """Work on `what` begins (an attention site, a plan, a reference case, a backend, an assignment of precisions),
        after `done` of the `total` work of this stage: in floating-point operations for reference cases, else in steps.
        The total is the most that there may be; None where nobody knows."""


class Silent:
    """Progress that nobody hears of."""

    def stage(self, name: str, number: int, total: int) -> None: ...

    def step(self, what: str, done: float, total: float | None) -> None: ...


class StageNames(Silent):
    """Progress for a plain function, which hears the names of stages alone."""

    def __init__(self, hear: Callable[[str], None]) -> None:
        self._hear = hear

    def stage(self, name: str, number: int, total: int) -> None:
        self._hear(name)


Listener = Progress | Callable[[str], None] | None
"""Whom a caller may name as the one to hear of progress: a :class:`Progress`, a function of a stage's name, nobody."""


class Stages:
    """The stages of one piece of work: tells a listener of each, and keeps how long each took, and how much memory.

    Args:
        listener: hears of them.
        names: of all stages, in order.
    """

    def __init__(self, listener: Listener, names: Sequence[str]) -> None:
        listener = listener or Silent()
        self.progress = listener if isinstance(listener, Progress) else StageNames(listener)
        self._names = list(names)
        self._begun: dict[str, float] = {}
        self._peaks: dict[str, int] = {}

    def begin(self, name: str) -> Progress:
        """Begin a stage, which ends the one before.

        Returns:
            what hears of the stage's steps.
        """
        self.memory()
        reset_peak()
        self._begun[name] = time.perf_counter()
        self.progress.stage(name, self._names.index(name) + 1, len(self._names))
        return self.progress

    def seconds(self) -> dict[str, float]:
        """Seconds that every stage so far took, the last one up to now."""
        ends = [*list(self._begun.values())[1:], time.perf_counter()]
        return {name: round(end - start, 3) for (name, start), end in zip(self._begun.items(), ends, strict=True)}

    def memory(self) -> dict[str, int]:
        """Bytes that this process had in memory at the peak of every stage so far, the last one up to now.

        Each stage has a peak of its own where the kernel lets a process begin its peak anew (Linux, mostly). Elsewhere
        the peak is that since the process began, an upper bound.
        """
        if self._begun:
            self._peaks[list(self._begun)[-1]] = peak()
        return dict(self._peaks)


class Steps:
    """Counts the steps of one stage, or the work that they are.

    Args:
        progress: hears of each; None where nobody does.
        total: how much work there will be at most, or None where that shows on the way.
    """

    def __init__(self, progress: Progress | None, total: float | None = None) -> None:
        self._progress, self._total = progress or Silent(), total
        self._done: float = 0

    def begin(self, what: str, work: float = 1) -> None:
        """Begin a step, which ends the one before.

        Args:
            what: the step works on.
            work: of the total that it is.
        """
        self._progress.step(what, self._done, self._total)
        self._done += work
