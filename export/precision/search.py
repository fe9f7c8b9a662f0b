"""The search for the parts of a graph that have to stay in fp32 for a requirement to be met, and no others.

Parts are raised to fp32 until the requirement is met, in one of two ways: :func:`by_error`, if the errors of parts are
known, or :func:`by_culprits`, which a trace of the failing graph names. Then :func:`lower_again` lowers those that
prove unneeded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from attnforge.export.precision.culprits import NOTHING_LEFT, Culprits
from attnforge.export.precision.judge import Assignment, Judge, Part, Trial

RAISES, TRIALS = 16, 64
"""Maximum number of times that culprits are raised, and of assignments that are judged."""


def by_error(judge: Judge, parts: Sequence[Part]) -> Sequence[Part]:
    """The fewest parts to raise, those with the largest errors first, by bisection; all parts if fewer do not pass."""
    if judge(frozenset()).passed:
        return []
    ordered = sorted(parts, key=lambda part: -part.error)

    def fails(low: int) -> bool:
        """Whether so many parts may not have fewer bits."""
        return not judge(frozenset(part.name for part in ordered[: len(parts) - low])).passed

    return ordered[: len(parts) - bisect_left(range(1, len(parts)), True, key=fails)]


def by_culprits(
    judge: Judge, blame: Callable[[Assignment, Trial], Culprits | None], everything: Assignment
) -> Sequence[Culprits]:
    """The parts to raise, step by step, until the requirement is met; in the end all, if nothing is left to blame.

    Args:
        judge: judges assignments.
        blame: names the parts to raise next, given an assignment that fails and its trial; None if nothing is left.
        everything: all parts.
    """
    raised: list[Culprits] = []
    high: Assignment = frozenset()
    while not (trial := judge(high)).passed and high != everything:
        culprits = blame(high, trial) if len(raised) < RAISES else None
        raised.append(culprits or Culprits(everything - high, NOTHING_LEFT))
        high |= raised[-1].names
    return raised


def lower_again(judge: Judge, high: Assignment, groups: Iterable[Collection[str]]) -> Iterator[Assignment]:
    """Yield assignments that still pass, each with another of these groups lowered as well.

    Args:
        judge: judges assignments; at most :data:`TRIALS` in all.
        high: an assignment that passes.
        groups: parts to lower together, in the order in which to try them.
    """
    for group in groups:
        less = high.difference(group)
        if less != high and len(judge.trials) < TRIALS and judge(less).passed:
            high = less
            yield high
