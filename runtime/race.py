"""Timing in shuffled turns: contenders run round by round, in an order shuffled again for each round, so that drift of
a machine (clocks, temperature, other processes) affects all of them alike.

- :func:`medians` gives one number per contender: for choosing the fastest of several ways to do the same.
- :func:`race` gives the time of every call, by contender and round: for statistics over paired rounds.
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

SETTLE = 0.1
"""Maximum seconds of pause before each turn. Threads of the previous contender go on spinning for a while, and would
take processors from the next one: those of ONNX Runtime spin for 40 ms, and a call of OpenVINO that takes 113 ms took
155 right after one of ONNX Runtime."""

IDLE = 0.005
"""Seconds in which no thread runs before a pause ends."""

TURN = 0.01
"""Minimum seconds of a turn of :func:`race`: a quick contender is called several times, each call timed."""

MOST_CALLS = 32
"""Maximum number of calls in a turn of :func:`race`."""

LONG = 0.1
"""Seconds: calls longer than this skip the warm-up call before each turn; the cold caches and threads that others left
are a small part of such a call."""

APART = 2
"""Ratio between a call and the next quicker one from which the longer may skip the warm-up call although the quicker
one has it. Contenders that are closer are compared, so they are treated alike."""

FEWEST_ROUNDS = 3
"""Rounds that are run even if time is up before."""

ALIKE = 1.03
"""Times within this ratio of the best count as equal when one contender has to be chosen."""


def in_turns(
    turns: Mapping[str, Callable[[], T]],
    rounds: int,
    seconds: float = float("inf"),
    *,
    fewest: int = FEWEST_ROUNDS,
    settle: float = SETTLE,
    seed: int = 0,
) -> dict[str, list[T]]:
    """Run turns and return the result of every turn, by contender, in the order of rounds: the i-th results of all
    belong to one round.

    Args:
        turns: for each contender, a function that runs one turn and returns its measurement. It warms up and repeats
            its calls as needed; an error that it raises ends the race.
        rounds: maximum number of rounds.
        seconds: no further round begins after this time, once `fewest` rounds are done.
        fewest: rounds that are run whatever time they take.
        settle: maximum seconds of pause before each turn; 0 if contenders leave no threads of this process running.
        seed: seed of the orders.
    """
    results: dict[str, list[T]] = {name: [] for name in turns}
    shuffle, end = random.Random(seed), time.perf_counter() + seconds
    for done in range(rounds if turns else 0):
        if done >= fewest and time.perf_counter() > end:
            break
        for name in shuffle.sample(list(turns), len(turns)):
            _pause(settle)
            results[name].append(turns[name]())
    return results


def _pause(most: float) -> None:
    """Wait until the threads of this process have been idle for :data:`IDLE` seconds, for at most `most` seconds."""
    end = time.perf_counter() + most
    while time.perf_counter() < end:
        used = time.process_time()
        time.sleep(IDLE)
        if time.process_time() - used < IDLE / 10:
            break


def race(
    runs: Mapping[str, Callable[[], Any]], rounds: int, seconds: float = float("inf"), *, seed: int = 0
) -> dict[str, list[list[float]]]:
    """Milliseconds of every call, by contender and round.

    Before the first round each contender is called once or twice, to learn how long a call takes.

    Args:
        runs: for each contender, one call. Each has run before, so that nothing is left to prepare.
        rounds: maximum number of rounds.
        seconds: no further round begins after this time, once :data:`FEWEST_ROUNDS` are done.
        seed: seed of the orders.
    """
    lasting = {name: _seconds_a_call(run) for name, run in runs.items()}
    longest = longest_warmed_up(lasting.values())
    turns = {name: partial(_turn, run, lasting[name], lasting[name] <= longest) for name, run in runs.items()}
    return in_turns(turns, rounds, seconds, seed=seed)


def medians(runs: Mapping[str, Callable[[], Any]], rounds: int, seconds: float) -> dict[str, float]:
    """The median milliseconds of all calls, by contender; takes the arguments of :func:`race`."""
    times = race(runs, rounds, seconds)
    return {name: round(statistics.median(ms for turn in turns for ms in turn), 4) for name, turns in times.items()}


def seconds_of(run: Callable[[], Any], repeats: int = 1) -> float:
    """Seconds that `repeats` calls take together."""
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return time.perf_counter() - start


def longest_warmed_up(seconds: Iterable[float]) -> float:
    """Seconds of the longest call that gets a warm-up call before each turn; 0 if none does.

    Calls shorter than :data:`LONG` all get one. A longer call gets one if it takes less than :data:`APART` times as
    long as another call that does.

    Args:
        seconds: time of one call of every contender.
    """
    longest = 0.0
    for length in sorted(seconds):
        if length >= max(LONG, APART * longest):
            break
        longest = length
    return longest


def _seconds_a_call(run: Callable[[], Any]) -> float:
    """Approximate seconds of a call: for a quick one, the better of two."""
    once = seconds_of(run)
    return once if once >= LONG else min(once, seconds_of(run))


def _turn(run: Callable[[], Any], seconds: float, warm_up: bool) -> list[float]:
    """Milliseconds of every call of a turn.

    Args:
        run: one call.
        seconds: approximate time of a call.
        warm_up: whether an untimed call comes first.
    """
    if warm_up:
        run()
    return [1e3 * seconds_of(run) for _ in range(max(1, min(MOST_CALLS, int(TURN / seconds))))]
