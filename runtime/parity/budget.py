"""The parity budget: how far one output may be from float64, and whether it is.

`r` are the outputs of the same weights in float64, `e` those of eager at the bundle's precision, `b` the backend's.
`error(t) = ‖t − r‖ / ‖r‖`, in float64. An output passes where `error(b) ≤ max(2·error(e), floor)` and `max|b − r| ≤
2·max|e − r| + max(4 ulp(max|r|), floor·max|r|)`: a kernel may err about as much as the plain arithmetic of its own
precision does, and no more. The rule is that of FlashAttention's own tests
(https://github.com/Dao-AILab/flash-attention). What one number may always be off by is no less, relative to the
largest, than what all are in the norm; 4 ulp are less than that in fp32 alone. On inputs that try a model rather than
serve it, eager's error is the largest of a few, on neighbouring inputs, and of outputs of few numbers the largest over
all ordinary inputs (`Case.spread`). Where all of `r` is below the dtype's normal numbers, whose spacing no longer
shrinks with them, the 4 ulp of every element are what the norm has, too.

NaN and infinity are compared by position, and each number must be eager's or float64's, rounded to the output's dtype:

- where both are finite the backend must be;
- where eager overflowed and float64 does not (it has NaN or infinity and float64, rounded, a number), the backend may
  have overflowed too, in whichever way, or have a number, which is then held to float64. On ordinary inputs it may not:
  what eager's precision cannot hold is no model to deploy, however faithfully;
- where float64 has NaN or infinity, the backend has the same, or what eager has.

A backend whose attention alone is computed at a lower precision than the bundle's (`attention_precision`) is held to
the floor and the ulp of that precision, and `e` is eager of the whole module at it: fp32 eager says nothing about what
16 bits do to large scores, and no eager module can be told to compute its attention alone so. Where NaN and infinity
may be is still fp32 eager's to say, and a case in which the lower eager overflows and fp32 does not is held to the
error of fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from attnforge.arrays import Array
from attnforge.bundle import Case
from attnforge.precision import PRECISIONS, Precision
from attnforge.records import Record

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}

FAR_OFF = 10
"""How many floors eager may be off before its precision is said to drift."""

LEAST_DECADE, BINS_A_DECADE, BINS = -12, 2, 28
"""The histogram of errors: from 1e-12 to 100 times the output's largest number. What is outside is in the last bins."""


class Element(Record):
    """The number that is furthest from float64's, and where it stands; None for what is not finite."""

    case: str
    index: list[int]
    got: float | None
    eager: float | None
    float64: float | None

    def text(self, output: str) -> str:
        numbers = ("not finite" if one is None else f"{one:.9g}" for one in (self.got, self.float64, self.eager))
        got, exact, eager = numbers
        where = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return f"{output}{where} is {got}, where float64 has {exact} and eager {eager}"


class Comparison(Record):
    """One output of one case. `error`, `eager_error` and `budget` are relative; `max_…` are absolute.

    Attributes:
        compared: how many numbers are finite in the backend and in float64, and so in the errors.
        cosine: of the angle between the outputs and float64's, as vectors.
        snr_db: signal to noise: 20·log10(‖r‖ / ‖b − r‖); None where there is no noise.
        quantiles: of |b − r| / max|r|, over the output's numbers.
        errors, eager_errors: how many numbers have |b − r| / max|r|, or |e − r| / max|r|, in each bin of the histogram.
        overflowed: of eager's numbers, how many are NaN or infinite where float64, rounded, is finite.
        worst: the element that is off most, or the first that is not finite where eager's is, or the reverse.
    """

    case: str
    output: str
    passed: bool
    error: float
    eager_error: float
    budget: float
    max_error: float
    max_budget: float
    compared: int = 0
    cosine: float | None = None
    snr_db: float | None = None
    quantiles: dict[str, float] = {}
    errors: list[int] = []
    eager_errors: list[int] = []
    overflowed: int = 0
    worst: Element | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Allowed:
    """What a deployment that chose its own precisions may err by on ordinary inputs.

    Attributes:
        error: the most, relative, whatever eager's is; of one number twice that, relative to the largest.
        exactly: this is the budget; else it only bounds it, and takes its place where eager overflows.
    """

    error: float
    exactly: bool


def judge(
    case: Case,
    output: str,
    got: Array,
    eager: Array,
    truth: Array,
    precision: Precision,
    yardstick: Array | None = None,
    allowed: Allowed | None = None,
) -> Comparison:
    """One output against eager and float64, all as float64 arrays of one shape.

    Args:
        case: which it is of.
        output: its name.
        got: the backend's.
        eager: at the bundle's precision.
        truth: in float64.
        precision: whose floor and ulp to allow.
        yardstick: whose error to allow twice, by default eager's.
        allowed: on ordinary inputs in place of the budget.
    """
    if got.shape != truth.shape:
        return of_another_form(case, output, precision, f"{got.size} numbers where float64 eager has {truth.size}")
    places = _Places.of(got, eager, truth, precision)
    reason, first = places.why(precision, case)
    worst = _element(case, first, got, eager, truth) if first is not None else None
    if yardstick is not None and np.isfinite(yardstick[np.isfinite(eager)]).all():
        eager = np.where(np.isfinite(eager), yardstick, eager).astype(np.float64)
    both = np.isfinite(got) & np.isfinite(truth)
    if worst is None and both.any():
        off = np.abs(np.subtract(got, truth, where=both, out=np.zeros_like(truth)))
        worst = _element(case, int(np.argmax(off)), got, eager, truth)
    in_eager = both & np.isfinite(eager)
    eager_off = np.abs(np.subtract(eager, truth, where=in_eager, out=np.zeros_like(truth)))
    eager_error = relative_error(eager[in_eager], truth[in_eager])
    off, truth = np.abs(got[both] - truth[both]), truth[both]
    error = relative_error(got[both], truth)
    largest = float(np.max(np.abs(truth), initial=0.0))
    max_error, least = float(np.max(off, initial=0.0)), max(4 * precision.ulp(largest), precision.floor * largest)
    drawn, max_drawn = case.spread.get(output, (0.0, 0.0))
    budget = max(2 * eager_error, 2 * drawn, precision.floor)
    max_budget = 2 * max(float(np.max(eager_off, initial=0.0)), max_drawn) + least
    if 0 < largest < precision.smallest_normal:
        budget = max(budget, least * math.sqrt(truth.size) / float(np.linalg.norm(truth)))
    if allowed is not None and case.is_ordinary and (allowed.exactly or places.overflowed or budget > allowed.error):
        budget, max_budget = allowed.error, 2 * allowed.error * largest + least
    if reason is None and error > budget:
        reason = f"error {error:.2e} is over the budget of {budget:.2e}"
    if reason is None and max_error > max_budget:
        reason = f"one element is off by {max_error:.2e}, over the budget of {max_budget:.2e}"
    unit = largest or 1.0
    return Comparison(
        case=case.name, output=output, passed=reason is None, error=error, eager_error=eager_error, budget=budget,
        max_error=max_error, max_budget=max_budget, compared=int(both.sum()), cosine=_cosine(got[both], truth),
        snr_db=-20 * math.log10(error) if error > 0 and truth.any() else None, quantiles=_quantiles(off / unit),
        errors=_histogram(off / unit), eager_errors=_histogram(eager_off[in_eager] / unit),
        overflowed=places.overflowed, worst=worst, reason=reason,
    )  # fmt: skip


def of_another_form(case: Case, output: str, precision: Precision, reason: str) -> Comparison:
    """Of an output that cannot be compared, for it has another shape or dtype."""
    return Comparison(
        case=case.name, output=output, passed=False, error=1.0, eager_error=0.0, budget=precision.floor,
        max_error=0.0, max_budget=0.0, reason=reason,
    )  # fmt: skip


def judge_whole(case: Case, output: str, got: Array, eager: Array, truth: Array) -> Comparison:
    """An output of whole numbers or booleans, such as indices: they are right or wrong, not near. On ordinary inputs
    twice as many may be neither eager's nor float64's as eager has others than float64; on trials, where ties are many,
    any may. The errors are shares of the numbers."""
    if got.shape != truth.shape:
        return of_another_form(case, output, PRECISIONS["fp32"], f"{got.size} numbers, and there are {truth.size}")
    wrong, differ = (got != truth) & (got != eager), int((eager != truth).sum())
    count, size = int(wrong.sum()), max(got.size, 1)
    passed = count <= 2 * differ or not case.is_ordinary
    return Comparison(
        case=case.name, output=output, passed=passed, error=count / size, eager_error=differ / size,
        budget=max(2 * differ, 1) / size, max_error=0.0, max_budget=0.0, compared=got.size,
        worst=_element(case, _first(wrong), got, eager, truth) if count else None,
        reason=None if passed else f"{count} of {got.size} are neither eager's nor float64's, and {2 * differ} may be",
    )  # fmt: skip


@dataclass(frozen=True)
class _Places:
    """Where numbers are that may not be there, and where eager overflowed."""

    wrong: dict[str, Array]
    overflowed: int
    given_up: Array
    """Where eager overflowed, and the backend too."""

    @classmethod
    def of(cls, got: Array, eager: Array, truth: Array, precision: Precision) -> _Places:
        rounded = np.where(np.abs(truth) > precision.largest, np.copysign(np.inf, truth), truth)
        in_reach = np.isfinite(rounded)
        overflowed = in_reach & ~np.isfinite(eager)
        either_finite = np.isfinite(eager) | np.isfinite(truth)
        wrong = {}
        for what, test in (("NaN", np.isnan), ("+infinity", np.isposinf), ("-infinity", np.isneginf)):
            wrong[what] = test(got) & ~test(eager) & ~test(rounded) & ~overflowed
        wrong["a number"] = np.isfinite(got) & ~either_finite
        return cls(wrong, int(overflowed.sum()), overflowed & ~np.isfinite(got))

    def why(self, precision: Precision, case: Case) -> tuple[str | None, int | None]:
        """What is wrong, and at which place first."""
        for what, at in self.wrong.items():
            if at.any():
                return f"{what} at {int(at.sum())} places where neither eager nor float64 has it", _first(at)
        if case.is_ordinary and self.given_up.any():
            return (
                f"{precision.name} does not hold this model: NaN or infinity at {int(self.given_up.sum())} places "
                "where float64 has numbers, in eager too",
                _first(self.given_up),
            )
        return None, None


def _first(at: Array) -> int:
    return int(np.flatnonzero(at)[0])


def _element(case: Case, flat: int, got: Array, eager: Array, truth: Array) -> Element:
    numbers = (float(array.reshape(-1)[flat]) for array in (got, eager, truth))
    first, second, third = (number if math.isfinite(number) else None for number in numbers)
    return Element(case=case.name, index=[flat], got=first, eager=second, float64=third)


def _cosine(got: Array, truth: Array) -> float | None:
    norms = float(np.linalg.norm(got)) * float(np.linalg.norm(truth))
    return float(np.dot(got.ravel(), truth.ravel())) / norms if 0 < norms < math.inf else None


def _quantiles(errors: Array) -> dict[str, float]:
    if errors.size == 0:
        return {}
    return {
        name: float(value) for name, value in zip(QUANTILES, np.quantile(errors, [*QUANTILES.values()]), strict=True)
    }


def _histogram(errors: Array) -> list[int]:
    exponents = np.log10(np.maximum(errors, 10.0 ** (LEAST_DECADE - 1)))
    places = np.clip(np.floor((exponents - LEAST_DECADE) * BINS_A_DECADE), 0, BINS - 1).astype(int)
    return [int(count) for count in np.bincount(places, minlength=BINS)]


def relative_error(got: Array, truth: Array) -> float:
    """`‖got − truth‖ / ‖truth‖`; the absolute norm where the truth is all zeros."""
    norm = float(np.linalg.norm(truth))
    return float(np.linalg.norm(got - truth)) / (norm or 1.0)
