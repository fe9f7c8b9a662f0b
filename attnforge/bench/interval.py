"""Medians with their intervals, and exponents of growth.

Intervals are at 95%. Where contenders were opened several times, the logarithm of each opening's median, or ratio of
medians, is one observation, with Student's t: a model opened twice has two speeds, which it keeps for as long as it is
open (where its memory lies), and repetition is needed on the highest level that varies (Kalibera and Jones 2013). Of a
single opening the interval is by the bootstrap (percentiles; Efron and Tibshirani 1993), and says what that instance
does. Whole rounds are resampled, because the calls of a round share whatever else the machine was doing; for a ratio
the same rounds of both. The draws are seeded: the same data gives the same interval.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import stdev

import numpy as np

from attnforge.arrays import Array
from attnforge.bench.results import Fit, Interval, Latency
from attnforge.errors import UsageError

Rounds = Sequence[Sequence[float]]
"""Milliseconds of each call, by round."""

RESAMPLES = 1000

BLOCK = 2**20
"""How many numbers are in memory at a time, whatever the number of calls."""

NORMAL = 1.959964
"""How many standard deviations a 95% interval of a normal distribution reaches to either side."""

STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
"""The same of Student's t with 1, 2, … degrees of freedom."""


def latency_of(rounds: Rounds, openings: Sequence[int] = ()) -> Latency:
    """The median of a contender's calls with its interval, and their percentiles.

    Args:
        rounds: milliseconds of every call, by round.
        openings: how many of the rounds, in order, were of each opening; by default all are of a single one.

    Raises:
        UsageError: no rounds, a round without calls, a time that is not a positive number, or openings whose rounds are
            more or fewer than `rounds`.
    """
    calls = np.concatenate(_checked(rounds))
    return Latency(
        rounds=[[float(call) for call in calls_of_round] for calls_of_round in rounds],
        openings=list(openings) if len(openings) > 1 else [],
        median=_interval(openings, rounds),
        min=float(calls.min()),
        p90=float(np.percentile(calls, 90)),
        p99=float(np.percentile(calls, 99)),
        samples=calls.size,
    )


def ratio_of(rounds_a: Rounds, rounds_b: Rounds, openings: Sequence[int] = ()) -> Interval:
    """The median of `a` over that of `b`, of contenders that took turns within each round.

    What slows down both at once, in an opening or in a round, cancels.

    Args:
        rounds_a, rounds_b: as many of one as of the other.
        openings: as :func:`latency_of` has it, the same of both.

    Raises:
        UsageError: as :func:`latency_of`.
    """
    return _interval(openings, rounds_a, rounds_b)


def per_second(milliseconds: Interval, count: int = 1) -> Interval:
    """What is done in a second, where `count` together take so many milliseconds."""
    per = 1e3 * count
    return Interval(value=per / milliseconds.value, low=per / milliseconds.high, high=per / milliseconds.low)


def fit_of(sizes: Sequence[float], values: Sequence[float | None]) -> Fit | None:
    """The exponent of the law that `values` follow over `sizes`, which are positive and differ.

    Values that are None or not positive are left out. Two points give an exponent without an interval: its ends are the
    exponent itself.

    Returns:
        None where fewer than two points are left.
    """
    points = [(size, value) for size, value in zip(sizes, values, strict=True) if value is not None and value > 0]
    if len(points) < 2:
        return None
    x, y = np.log(sorted(points)).T
    centred = x - x.mean()
    spread = float(centred @ centred)
    exponent = float(centred @ y) / spread
    half, freedom = 0.0, len(points) - 2
    if freedom:
        residuals = y - y.mean() - exponent * centred
        half = _student(freedom) * math.sqrt(float(residuals @ residuals) / freedom / spread)
    return Fit(
        exponent=Interval(value=exponent, low=exponent - half, high=exponent + half),
        last=float((y[-1] - y[-2]) / (x[-1] - x[-2])),
    )


def _interval(openings: Sequence[int], *contenders: Rounds) -> Interval:
    """The median of a contender, or the first one's over the second one's."""

    def ratio(first: int | None = None, end: int | None = None) -> float:
        medians = [float(np.median(np.concatenate(_checked(rounds[first:end])))) for rounds in contenders]
        return medians[0] / math.prod(medians[1:])

    count, value = len(contenders[0]), ratio()
    if openings and (min(openings) < 1 or sum(openings) != count):
        raise UsageError(f"openings of {', '.join(map(str, openings))} rounds are not the {count} that there are")
    if len(openings) < 2:
        resamples = [resampled_medians(rounds, draws(count)) for rounds in contenders]
        low, high = np.percentile(resamples[0] / np.prod(resamples[1:], axis=0), (2.5, 97.5))
        return Interval(value=value, low=min(value, float(low)), high=max(value, float(high)))
    logs = [math.log(ratio(first, end)) for first, end in pairwise(accumulate(openings, initial=0))]
    half = reach(len(logs)) * stdev(logs) / math.sqrt(len(logs))
    return Interval(value=value, low=value * math.exp(-half), high=value * math.exp(half))


def reach(openings: int) -> float:
    """How many standard errors an interval of so many openings reaches to either side."""
    return _student(openings - 1) if openings > 1 else NORMAL


# --- the bootstrap ----------------------------------------------------------------------------------------------------


@functools.cache
def draws(rounds: int) -> Array:
    """How often each of so many rounds is in each resample, (RESAMPLES, rounds)."""
    drawn = np.random.default_rng(0).multinomial(rounds, np.full(rounds, 1 / rounds), size=RESAMPLES).astype(np.int32)
    drawn.flags.writeable = False  # the cache shares it
    return drawn


def resampled_medians(rounds: Rounds, drawn: Array) -> Array:
    """The median of all calls in each resample, (RESAMPLES,).

    Args:
        drawn: of :func:`draws`, for as many rounds.
    """
    calls = np.concatenate(_checked(rounds))
    order = np.argsort(calls)
    calls = calls[order]
    round_of = np.repeat(np.arange(len(rounds)), [len(calls_of_round) for calls_of_round in rounds])[order]
    blocks = []
    for some in np.array_split(drawn, math.ceil(drawn.shape[0] * calls.size / BLOCK)):
        up_to = np.cumsum(some[:, round_of], axis=1, dtype=np.int32)  # how many of the sorted calls lie up to each
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
                f"round {i} has {calls.tolist()}; every round needs a call or more, each of a positive time"
            )
    return arrays


def _student(freedom: int) -> float:
    """The 97.5% quantile of Student's t; past the table by Cornish and Fisher's series, within 0.1%."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z, v = NORMAL, freedom
    return z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
