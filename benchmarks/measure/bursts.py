"""Throughput in turns: how much many callers get out of a contender at once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from attnforge.runtime.turns import SETTLE, seconds_of

BURST = 0.1
"""Seconds of a turn of throughput, about."""


def bursts(
    runs: Mapping[str, Callable[[], Any]], callers: Mapping[str, int], samples: Mapping[str, int], rounds: int = 4
) -> dict[str, list[float]]:
    """Samples a second of every round, by contender.

    Args:
        callers: how many threads call each at once.
        samples: of one call of each.
    """
    usual = {name: min(seconds_of(run) for _ in range(2)) for name, run in runs.items()}
    found: dict[str, list[float]] = {name: [] for name in runs}
    shuffle = random.Random(0)
    for _ in range(rounds):
        for name in shuffle.sample(list(runs), len(runs)):
            time.sleep(SETTLE)
            calls = max(1, int(BURST / usual[name] / callers[name]))
            seconds = _together(runs[name], callers[name], calls)
            found[name].append(samples[name] * callers[name] * calls / seconds)
    return found


def _together(run: Callable[[], Any], callers: int, calls: int) -> float:
    """Seconds until all of so many threads have made so many calls each."""
    if callers == 1:
        return seconds_of(run, calls)
    with ThreadPoolExecutor(callers) as threads:
        list(threads.map(lambda _: None, range(callers)))  # the threads are there
        start = time.perf_counter()
        list(threads.map(lambda _: seconds_of(run, calls), range(callers)))
        return time.perf_counter() - start
