"""Medians with their intervals.

Intervals are at 95%. Where contenders were loaded several times, the logarithm of each load's median, or ratio of
medians, is one observation, with Student's t: a model that is loaded twice runs at two speeds, each constant until it
is closed (they depend on where its memory lies), and repetition is needed on the highest level that varies (Kalibera
and Jones 2013). For a single load the interval is a bootstrap (percentiles; Efron and Tibshirani 1993), and describes
that instance only. Whole rounds are resampled, because the calls of a round share whatever else the machine was doing;
for a ratio the same rounds of both. The random draws are seeded: the same data gives the same interval.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import stdev

import numpy as np

from attnforge.arrays import Array
from attnforge.bench.results import Interval, Latency
from attnforge.errors import UsageError

Rounds = Sequence[Sequence[float]]
"""Milliseconds of each call, by round."""

RESAMPLES = 1000

BLOCK = 2**20
"""Numbers in memory at a time, independent of the number of calls."""

NORMAL = 1.959964
"""Half-width of a 95% interval of a normal distribution, in standard deviations."""

STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
"""The same for Student's t with 1, 2, … degrees of freedom."""


def latency_of(rounds: Rounds, openings: Sequence[int] = ()) -> Latency:
    """Return the median of a contender's calls with its interval, and their percentiles.

    Args:
        rounds: milliseconds of every call, by round.
        openings: number of rounds of each load, in order; by default all rounds belong to a single load.

    Raises:
        UsageError: no rounds, a round without calls, a time that is not a positive number, or loads whose rounds do not
            add up to `rounds`.
    """
    calls = np.concatenate(_checked(rounds))
    return Latency(
        rounds=[[float(call) for call in calls_of_round] for calls_of_round in rounds],
        openings=list(openings) if len(openings) > 1 else [], median=_interval(openings, rounds),
        min=float(calls.min()), p90=float(np.percentile(calls, 90)), p99=float(np.percentile(calls, 99)),
        samples=calls.size,
    )  # fmt: skip


def ratio_of(rounds_a: Rounds, rounds_b: Rounds, openings: Sequence[int] = ()) -> Interval:
    """Return the median of `a` over that of `b`, for contenders that took turns within each round.

    What slows down both at once, in a load or in a round, cancels.

    Args:
        rounds_a, rounds_b: milliseconds of every call, by round; equally many rounds of both.
        openings: as for :func:`latency_of`, the same for both.

    Raises:
        UsageError: as :func:`latency_of`.
    """
    return _interval(openings, rounds_a, rounds_b)


def per_second(milliseconds: Interval, count: int = 1) -> Interval:
    """Return the rate per second, where `count` items together take `milliseconds`."""
    per = 1e3 * count
    return Interval(value=per / milliseconds.value, low=per / milliseconds.high, high=per / milliseconds.low)


def _interval(openings: Sequence[int], *contenders: Rounds) -> Interval:
    """Return the median of one contender, or the ratio of the medians of two."""

    def ratio(first: int | None = None, end: int | None = None) -> float:
        medians = [float(np.median(np.concatenate(_checked(rounds[first:end])))) for rounds in contenders]
        return medians[0] / math.prod(medians[1:])

    count, value = len(contenders[0]), ratio()
    if openings and (min(openings) < 1 or sum(openings) != count):
        raise UsageError(f"the rounds of the loads, {', '.join(map(str, openings))}, do not add up to {count}")
    if len(openings) < 2:
        resamples = [resampled_medians(rounds, draws(count)) for rounds in contenders]
        low, high = np.percentile(resamples[0] / np.prod(resamples[1:], axis=0), (2.5, 97.5))
        return Interval(value=value, low=min(value, float(low)), high=max(value, float(high)))
    logs = [math.log(ratio(first, end)) for first, end in pairwise(accumulate(openings, initial=0))]
    half = reach(len(logs)) * stdev(logs) / math.sqrt(len(logs))
    return Interval(value=value, low=value * math.exp(-half), high=value * math.exp(half))


def reach(openings: int) -> float:
    """Return the half-width in standard errors of an interval over this many loads."""
    return student(openings - 1) if openings > 1 else NORMAL


# --- the bootstrap ----------------------------------------------------------------------------------------------------


@functools.cache
def draws(rounds: int) -> Array:
    """Return how often each round is in each resample, (RESAMPLES, rounds)."""
    drawn = np.random.default_rng(0).multinomial(rounds, np.full(rounds, 1 / rounds), size=RESAMPLES).astype(np.int32)
    drawn.flags.writeable = False  # the cache shares it
    return drawn


def resampled_medians(rounds: Rounds, drawn: Array) -> Array:
    """Return the median of all calls in each resample, (RESAMPLES,).

    Args:
        rounds: milliseconds of every call, by round.
        drawn: the result of :func:`draws` for as many rounds.
    """
    calls = np.concatenate(_checked(rounds))
    order = np.argsort(calls)
    calls = calls[order]
    round_of = np.repeat(np.arange(len(rounds)), [len(calls_of_round) for calls_of_round in rounds])[order]
    blocks = []
    for block in np.array_split(drawn, math.ceil(drawn.shape[0] * calls.size / BLOCK)):
        up_to = np.cumsum(block[:, round_of], axis=1, dtype=np.int32)  # number of sorted calls up to each
        up_to *= 2
        count = up_to[:, -1:] // 2
        lower, upper = np.count_nonzero(up_to < count, axis=1), np.count_nonzero(up_to <= count, axis=1)
        blocks.append((calls[lower] + calls[upper]) / 2)
    return np.concatenate(blocks)


def _checked(rounds: Rounds) -> list[Array]:
    arrays = [np.asarray(calls, np.float64) for calls in rounds]
    if not arrays:
        raise UsageError("there are no rounds; measure one or more")
    for i, calls in enumerate(arrays):
        if not (calls.size and calls.min() > 0 and calls.max() < math.inf):  # NaN is neither
            raise UsageError(
                f"round {i} has {calls.tolist()}; every round needs one or more calls, each with a positive time"
            )
    return arrays


def student(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t; beyond the table by Cornish and Fisher's series, within 0.1%."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z, v = NORMAL, freedom
    return z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
