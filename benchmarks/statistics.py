"""Medians with their intervals, and exponents of growth.

Intervals are at 95%, by the bootstrap (percentiles; Efron and Tibshirani 1993). What is resampled are whole rounds,
since calls of one round share what else the machine was doing. The draws are seeded: the same data gives the same
interval.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from attnforge.arrays import Array
from attnforge.benchmarks.results import Fit, Interval, Latency
from attnforge.errors import UsageError

Rounds = Sequence[Sequence[float]]
"""Milliseconds of each call, by round."""

RESAMPLES = 1000

BLOCK = 2**20
"""How many numbers are worked on at a time, so that very many calls take time and not memory."""

NORMAL = 1.959964
"""How many standard deviations a 95% interval of a normal distribution reaches to either side."""

STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
"""The same of Student's t with 1, 2, … degrees of freedom."""


def latency_of(rounds: Rounds) -> Latency:
    """What is said of a contender's calls.

    Raises:
        UsageError: no rounds, a round without calls, or a time that is not a positive number.
    """
    calls = np.concatenate(_checked(rounds))
    return Latency(
        rounds=[[float(call) for call in one] for one in rounds],
        median=percentiles(float(np.median(calls)), resampled_medians(rounds, draws(len(rounds)))),
        min=float(calls.min()),
        p90=float(np.percentile(calls, 90)),
        p99=float(np.percentile(calls, 99)),
        samples=calls.size,
    )


def ratio_of(rounds_a: Rounds, rounds_b: Rounds) -> Interval:
    """The median of `a` over that of `b`, of contenders that took turns within each round.

    The same rounds are drawn for both, so what slows down both at once cancels.

    Raises:
        UsageError: as many rounds are not there of both, or as :func:`latency_of`.
    """
    if len(rounds_a) != len(rounds_b):
        raise UsageError(f"{len(rounds_a)} rounds cannot be paired with {len(rounds_b)}; give those of one run")
    a, b = (float(np.median(np.concatenate(_checked(rounds)))) for rounds in (rounds_a, rounds_b))
    drawn = draws(len(rounds_a))
    return percentiles(a / b, resampled_medians(rounds_a, drawn) / resampled_medians(rounds_b, drawn))


def fit_of(sizes: Sequence[float], values: Sequence[float | None]) -> Fit | None:
    """The exponent of the law that `values` follow over `sizes`.

    What is None or not positive is left out. Of two points the interval is the exponent itself.

    Returns:
        None where fewer than two points are left.

    Raises:
        UsageError: sizes that are not positive, that repeat, or of which there are not as many as values.
    """
    if len(sizes) != len(values):
        raise UsageError(
            f"there are {len(values)} values for {len(sizes)} sizes; give one for each, None where none is"
        )
    if min(sizes, default=1) <= 0 or len(set(sizes)) < len(sizes):
        raise UsageError(f"the sizes are {', '.join(map(str, sizes))}; give positive ones, each once")
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
def draws(rounds: int, seed: int = 0) -> Array:
    """How often each round is in each resample, (RESAMPLES, rounds). Data of different runs needs different seeds."""
    if rounds < 1:
        raise UsageError("there are no rounds; measure one or more")
    drawn = (
        np.random.default_rng(seed).multinomial(rounds, np.full(rounds, 1 / rounds), size=RESAMPLES).astype(np.int32)
    )
    drawn.flags.writeable = False  # it is shared by all that have as many rounds
    return drawn


def resampled_medians(rounds: Rounds, drawn: Array) -> Array:
    """The median of all calls in each resample, (RESAMPLES,).

    Args:
        drawn: of :func:`draws`, for as many rounds.
    """
    calls = np.concatenate(_checked(rounds))
    order = np.argsort(calls)
    calls = calls[order]
    round_of = np.repeat(np.arange(len(rounds)), [len(one) for one in rounds])[order]
    blocks = []
    for some in np.array_split(drawn, math.ceil(drawn.shape[0] * calls.size / BLOCK)):
        up_to = np.cumsum(some[:, round_of], axis=1)  # of the sorted calls, how many there are up to each
        half = up_to[:, -1:] / 2
        lower, upper = np.argmax(up_to >= half, axis=1), np.argmax(up_to > half, axis=1)
        blocks.append((calls[lower] + calls[upper]) / 2)
    return np.concatenate(blocks)


def percentiles(value: float, resamples: Array) -> Interval:
    """An estimate, with the interval that 95% of the resamples are in."""
    low, high = np.percentile(resamples, (2.5, 97.5))
    return Interval(value=value, low=min(value, float(low)), high=max(value, float(high)))


def _checked(rounds: Rounds) -> list[Array]:
    arrays = [np.asarray(one, np.float64) for one in rounds]
    if not arrays:
        raise UsageError("there are no rounds; measure one or more")
    for i, one in enumerate(arrays):
        if one.size == 0 or not (np.isfinite(one) & (one > 0)).all():
            raise UsageError(f"round {i} has {one.tolist()}; every round needs a call or more, each of a positive time")
    return arrays


def _student(freedom: int) -> float:
    """The 97.5% quantile of Student's t; past the table by Cornish and Fisher's series, within 0.1%."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z, v = NORMAL, freedom
    return z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
