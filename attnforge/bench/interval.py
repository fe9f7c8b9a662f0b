"""Medians with their intervals, and exponents of growth.

Intervals are at 95%, by the bootstrap (percentiles; Efron and Tibshirani 1993). Whole rounds are resampled, because the
calls of a round share whatever else the machine was doing. Where contenders were opened several times, openings are
drawn first, and then rounds of each drawn opening: a model opened twice has two speeds, which it keeps for as long as
it is open (where its memory lies), and repetition is needed on the highest level that varies (Kalibera and Jones 2013).
A few openings show too little of that variation, so intervals are widened for it (:func:`lacking`). The draws are
seeded: the same data gives the same interval.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

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
    resamples = resampled_medians(rounds, draws(len(rounds), tuple(openings)))
    return Latency(
        rounds=[[float(call) for call in calls_of_round] for calls_of_round in rounds],
        openings=list(openings) if len(openings) > 1 else [],
        median=_widened(percentiles(float(np.median(calls)), resamples), lacking(openings, rounds)),
        min=float(calls.min()),
        p90=float(np.percentile(calls, 90)),
        p99=float(np.percentile(calls, 99)),
        samples=calls.size,
    )


def ratio_of(rounds_a: Rounds, rounds_b: Rounds, openings: Sequence[int] = ()) -> Interval:
    """The median of `a` over that of `b`, of contenders that took turns within each round.

    The same openings and rounds are drawn for both, so what slows down both at once cancels.

    Args:
        rounds_a, rounds_b: as many of one as of the other.
        openings: as :func:`latency_of` has it, the same of both.

    Raises:
        UsageError: as :func:`latency_of`.
    """
    a, b = (float(np.median(np.concatenate(_checked(rounds)))) for rounds in (rounds_a, rounds_b))
    drawn = draws(len(rounds_a), tuple(openings))
    ratio = percentiles(a / b, resampled_medians(rounds_a, drawn) / resampled_medians(rounds_b, drawn))
    return _widened(ratio, lacking(openings, rounds_a, rounds_b))


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


# --- the bootstrap ----------------------------------------------------------------------------------------------------


@functools.cache
def draws(rounds: int, openings: tuple[int, ...] = (), seed: int = 0) -> Array:
    """How often each round is in each resample, (RESAMPLES, rounds). Data of different runs needs different seeds.

    Args:
        rounds: how many there are.
        openings: how many of the rounds, in order, were of each opening. Each resample draws as many openings as there
            are, and for every time that an opening is drawn, as many rounds as it has.
        seed: of the random draws.
    """
    if openings and (min(openings) < 1 or sum(openings) != rounds):
        raise UsageError(f"openings of {', '.join(map(str, openings))} rounds are not the {rounds} that there are")
    random = np.random.default_rng(seed)
    if len(openings) > 1:
        times = random.multinomial(len(openings), np.full(len(openings), 1 / len(openings)), size=RESAMPLES)
        drawn = np.hstack([random.multinomial(n * times[:, i], np.full(n, 1 / n)) for i, n in enumerate(openings)])
    else:
        drawn = random.multinomial(rounds, np.full(rounds, 1 / rounds), size=RESAMPLES)
    drawn = drawn.astype(np.int32)
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


def lacking(openings: Sequence[int], *contenders: Rounds) -> float:
    """What to add to the square of an interval's half-width where openings are few, for a median or a ratio of two
    medians, both as logarithms.

    Resamples of k openings show (k - 1)/k of the variance between openings, and a variance estimated from k numbers is
    as often too small as Student's t with k - 1 degrees of freedom says. Both are corrected: t² takes the place of
    NORMAL² (k - 1)/k, for the variance between openings beyond the scatter of their rounds.

    In simulation, of ratios of two contenders whose openings differ by 3% and rounds by 1% (standard deviations),
    intervals for 95% held the truth, with 3, 4 and 5 openings, 67%, 61% and 72% of the time where all rounds were drawn
    as of one opening; 81%, 87% and 93% by the two stages' percentiles alone; and 94%, 96% and 97% with this. Two
    openings tell next to nothing: 91%, by intervals that are four times as wide as those of four.

    Args:
        openings: as :func:`latency_of` has it; fewer than two tell nothing, and 0 is returned.
        contenders: the rounds of one contender, or of the two whose ratio it is.
    """
    count, of_openings, explained = len(openings), [], 0.0
    if count < 2:
        return 0.0
    for first, end in pairwise(accumulate(openings, initial=0)):
        parts = [rounds[first:end] for rounds in contenders]
        logs = [math.log(float(np.median(np.concatenate(_checked(part))))) for part in parts]
        resamples = [np.log(resampled_medians(part, draws(end - first))) for part in parts]
        of_openings.append(logs[0] - sum(logs[1:]))
        explained += float(np.var(resamples[0] - sum(resamples[1:])))
    between = max(float(np.var(of_openings, ddof=1)) / count - explained / count**2, 0.0)
    return (_student(count - 1) ** 2 - NORMAL**2 * (count - 1) / count) * between


def percentiles(value: float, resamples: Array) -> Interval:
    """An estimate, with the interval that 95% of the resamples are in."""
    low, high = np.percentile(resamples, (2.5, 97.5))
    return Interval(value=value, low=min(value, float(low)), high=max(value, float(high)))


def _widened(interval: Interval, by: float) -> Interval:
    """An interval with `by` added to the square of its half-widths, all as logarithms."""
    if not by:
        return interval
    value = interval.value
    low, high = (math.hypot(math.log(value / end), math.sqrt(by)) for end in (interval.low, interval.high))
    return Interval(value=value, low=value * math.exp(-low), high=value * math.exp(high))


def _checked(rounds: Rounds) -> list[Array]:
    arrays = [np.asarray(calls, np.float64) for calls in rounds]
    if not arrays:
        raise UsageError("there are no rounds; measure one or more")
    if all(calls.size for calls in arrays) and _are_times(np.concatenate(arrays)):
        return arrays
    for i, calls in enumerate(arrays):
        if calls.size == 0 or not _are_times(calls):
            raise UsageError(
                f"round {i} has {calls.tolist()}; every round needs a call or more, each of a positive time"
            )
    return arrays


def _are_times(calls: Array) -> bool:
    """Whether all numbers are finite and positive."""
    return bool(calls.min() > 0 and calls.max() < math.inf)  # NaN is neither


def _student(freedom: int) -> float:
    """The 97.5% quantile of Student's t; past the table by Cornish and Fisher's series, within 0.1%."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z, v = NORMAL, freedom
    return z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
