"""Timing in shuffled turns: contenders run round by round, in an order shuffled anew each round, so that what drifts
on a machine (clocks, temperature, other processes) hits all of them alike.

- :func:`medians` gives one number a contender: for choosing the fastest of some ways to do the same.
- :func:`race` gives every call's time, by contender and round: for statistics over rounds that pair.
- :func:`in_turns` keeps whatever a turn returns: for turns that are measured in another way, such as calls on a GPU
  (device and wall time), loops of many calls, or calls from several threads at once.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

SETTLE = 0.02
"""Seconds of pause before each turn: threads of the contender before go on spinning for a while, and would take
processors from the next one."""

TURN = 0.01
"""Seconds that a turn of :func:`race` takes at least: a quick contender is called several times, each call timed."""

MOST_CALLS = 32
"""How many calls a turn of :func:`race` has at most."""

LONG = 0.1
"""Seconds: calls longer than this skip the warm-up call before each turn; the caches and threads that others left cold
are a small part of such a call."""

APART = 2
"""Ratio between a call and the next quicker one from which the longer may skip the warm-up call that the quicker one
has. Contenders that are closer are compared, so they are treated alike."""

FEWEST_ROUNDS = 3
"""Rounds that are run even where time is up before."""

ALIKE = 1.03
"""Times within this ratio of the best count as equal where one contender has to be chosen."""


def in_turns(
    turns: Mapping[str, Callable[[], T]],
    rounds: int,
    seconds: float = float("inf"),
    *,
    fewest: int = FEWEST_ROUNDS,
    settle: float = SETTLE,
    seed: int = 0,
) -> dict[str, list[T]]:
    """What every turn returned, by contender, in the order of rounds: the i-th results of all belong to one round.

    Args:
        turns: by contender, a function that runs one turn and returns its measurement. It warms up and repeats its
            calls as it needs; an error that it raises ends the race.
        rounds: the most rounds.
        seconds: no further round begins after these, once `fewest` rounds are done.
        fewest: rounds that are run whatever time they take.
        settle: seconds of pause before each turn; 0 where contenders leave no threads behind.
        seed: of the orders.
    """
    results: dict[str, list[T]] = {name: [] for name in turns}
    shuffle, end = random.Random(seed), time.perf_counter() + seconds
    for done in range(rounds if turns else 0):
        if done >= fewest and time.perf_counter() > end:
            break
        for name in shuffle.sample(list(turns), len(turns)):
            time.sleep(settle)
            results[name].append(turns[name]())
    return results


def race(
    runs: Mapping[str, Callable[[], Any]], rounds: int, seconds: float = float("inf"), *, seed: int = 0
) -> dict[str, list[list[float]]]:
    """Milliseconds of every call, by contender and round.

    Before the first round each contender is called once or twice, to learn how long a call takes.

    Args:
        runs: by contender, one call of it. Each has run before, so that nothing is left to prepare.
        rounds: the most rounds.
        seconds: no further round begins after these, once :data:`FEWEST_ROUNDS` are done.
        seed: of the orders.
    """
    lasting = {name: _seconds_a_call(run) for name, run in runs.items()}
    longest = longest_warmed_up(lasting.values())
    turns = {name: partial(_turn, run, lasting[name], lasting[name] <= longest) for name, run in runs.items()}
    return in_turns(turns, rounds, seconds, seed=seed)


def medians(runs: Mapping[str, Callable[[], Any]], rounds: int, seconds: float) -> dict[str, float]:
    """The median milliseconds of all calls, by contender; arguments as :func:`race` takes them."""
    times = race(runs, rounds, seconds)
    return {name: round(statistics.median(ms for turn in turns for ms in turn), 4) for name, turns in times.items()}


def seconds_of(run: Callable[[], Any], repeats: int = 1) -> float:
    """Seconds that `repeats` calls take together."""
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return time.perf_counter() - start


def longest_warmed_up(seconds: Iterable[float]) -> float:
    """Seconds of the longest call that gets a warm-up call before each turn; 0 where none does.

    Calls shorter than :data:`LONG` all get one. A longer call gets one where another that does is close to it: it takes
    less than :data:`APART` times as long.

    Args:
        seconds: of one call, of every contender.
    """
    longest = 0.0
    for length in sorted(seconds):
        if length >= max(LONG, APART * longest):
            break
        longest = length
    return longest


def _seconds_a_call(run: Callable[[], Any]) -> float:
    """About how many seconds a call takes: of a quick one, the better of two."""
    once = seconds_of(run)
    return once if once >= LONG else min(once, seconds_of(run))


def _turn(run: Callable[[], Any], seconds: float, warm_up: bool) -> list[float]:
    """Milliseconds of every call of a turn.

    Args:
        run: one call.
        seconds: that a call takes, about.
        warm_up: whether an untimed call comes first.
    """
    if warm_up:
        run()
    calls = max(1, min(MOST_CALLS, int(TURN / seconds)))
    return [1e3 * seconds_of(run) for _ in range(calls)]
