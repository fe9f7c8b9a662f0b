"""Progress of long work: stages in order, and steps within a stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from attnforge.memory import peak, reset_peak


@runtime_checkable
class Progress(Protocol):
    """Receives every stage and every step as it begins, in the working thread.

    :func:`attnforge.deploy` calls `stage` once per stage, with `number` rising from 1 to `total`, and `step` any number
    of times during a stage, or never if the stage is one piece of work. A stage ends when the next one begins or
    `deploy` returns or raises. An exception raised by a method ends the work, and `deploy` writes nothing.

    A terminal display must take its stream (`sys.stderr`) before the work begins: while torch exports, `sys.stdout` and
    `sys.stderr` are redirected (:mod:`attnforge.quiet`).
    """

    def stage(self, name: str, number: int, total: int) -> None:
        """Called when a stage begins, with its name, such as "lower and build for onnxruntime", and its number."""

    def step(self, what: str, done: float, total: float | None) -> None:
        """Called when work on `what` begins (an attention site, a plan, a reference case, a backend, an assignment of
        precisions), after `done` of the `total` work of this stage: in floating-point operations for reference cases,
        else in steps. The total is an upper bound; None if unknown."""


class Silent:
    """Progress that reports nothing."""

    def stage(self, name: str, number: int, total: int) -> None: ...

    def step(self, what: str, done: float, total: float | None) -> None: ...


class StageNames(Silent):
    """Progress that calls a function with the name of every stage."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report

    def stage(self, name: str, number: int, total: int) -> None:
        self._report(name)


Listener = Progress | Callable[[str], None] | None
"""Receiver of progress: a :class:`Progress`, a function of a stage's name, or none."""


class Stages:
    """The stages of one piece of work: reports each to a listener, and records its time and memory.

    Args:
        listener: receives the progress.
        names: names of all stages, in order.
    """

    def __init__(self, listener: Listener, names: Sequence[str]) -> None:
        listener = listener or Silent()
        self.progress = listener if isinstance(listener, Progress) else StageNames(listener)
        self._names = list(names)
        self._starts: dict[str, float] = {}
        self._peaks: dict[str, int] = {}

    def begin(self, name: str) -> Progress:
        """Begin a stage, which ends the previous one.

        Returns:
            the receiver of the stage's steps.
        """
        self.memory()
        reset_peak()
        self._starts[name] = time.perf_counter()
        self.progress.stage(name, self._names.index(name) + 1, len(self._names))
        return self.progress

    def seconds(self) -> dict[str, float]:
        """Return the seconds of every stage so far, the last one up to now."""
        ends = [*list(self._starts.values())[1:], time.perf_counter()]
        return {name: round(end - start, 3) for (name, start), end in zip(self._starts.items(), ends, strict=True)}

    def memory(self) -> dict[str, int]:
        """Return the peak memory of every stage so far, in bytes, the last one up to now.

        If the kernel lets a process reset its peak (Linux, mostly), each stage has its own. Otherwise it is the peak
        since the start of the process, an upper bound.
        """
        if self._starts:
            self._peaks[list(self._starts)[-1]] = peak()
        return dict(self._peaks)


class Steps:
    """Counts the steps of one stage, or their work.

    Args:
        progress: receives each step; None to report nothing.
        total: upper bound of the work, or None if unknown.
    """

    def __init__(self, progress: Progress | None, total: float | None = None) -> None:
        self._progress, self._total = progress or Silent(), total
        self._done: float = 0

    def begin(self, what: str, work: float = 1) -> None:
        """Begin a step, which ends the previous one.

        Args:
            what: subject of the step.
            work: its share of the total.
        """
        self._progress.step(what, self._done, self._total)
        self._done += work
