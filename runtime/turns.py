"""Timing ways of doing the same in turns: round by round, in an order shuffled anew each round, so that drift hits all
alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

SETTLE = 0.02
"""Seconds before each turn: the threads of whoever ran last go on spinning for a while, on processors not theirs."""

TURN = 0.01
"""Seconds that a turn takes at least: what is quick runs several times, each call timed."""

MOST_CALLS = 32
"""How many calls a turn has at most."""

LONG = 0.1
"""Seconds of a call from which it need not run once more, untimed, before it is timed: what others left in caches and
threads is a small part of it."""

APART = 2
"""How many times as long a call takes of which nobody minds that it had no untimed run and the next quicker one had."""

FEWEST_ROUNDS = 3

ALIKE = 1.03
"""Times within this ratio of the best are called the same, where one has to be chosen."""


def race(
    runs: Mapping[str, Callable[[], Any]], rounds: int, seconds: float = float("inf"), *, seed: int = 0
) -> dict[str, list[list[float]]]:
    """Milliseconds of every call, by name and round.

    Args:
        runs: that have run before, so that nothing is left to prepare.
        rounds: how many.
        seconds: after which no further round begins, once there are :data:`FEWEST_ROUNDS`.
        seed: of the orders.
    """
    usual = {name: _usual(run) for name, run in runs.items()}
    warmed = _warmed(usual.values())
    times: dict[str, list[list[float]]] = {name: [] for name in runs}
    shuffle, end = random.Random(seed), time.perf_counter() + seconds
    for done in range(rounds):
        if done >= FEWEST_ROUNDS and time.perf_counter() > end:
            break
        for name in shuffle.sample(list(runs), len(runs)):
            run = runs[name]
            time.sleep(SETTLE)
            if usual[name] <= warmed:
                run()
            calls = max(1, min(MOST_CALLS, int(TURN / usual[name])))
            times[name].append([1e3 * seconds_of(run) for _ in range(calls)])
    return times


def _usual(run: Callable[[], Any]) -> float:
    """About how many seconds a call takes."""
    once = seconds_of(run)
    return once if once >= LONG else min(once, seconds_of(run))


def _warmed(seconds: Iterable[float]) -> float:
    """The longest call that runs once more, untimed. No two that are nearly as long are treated differently, for it is
    such ones that are compared."""
    longest = 0.0
    for one in sorted(seconds):
        if one >= max(LONG, APART * longest):
            break
        longest = one
    return longest


def medians(runs: Mapping[str, Callable[[], Any]], rounds: int, seconds: float) -> dict[str, float]:
    """The median of all calls of each, in milliseconds; as :func:`race`."""
    found = race(runs, rounds, seconds)
    return {name: round(statistics.median(ms for one in calls for ms in one), 4) for name, calls in found.items()}


def seconds_of(run: Callable[[], Any], repeats: int = 1) -> float:
    """Seconds that so many runs take."""
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return time.perf_counter() - start
