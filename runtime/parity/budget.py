"""The parity budget: how far an output of a deployed model may be from that of the original model.

Three results are compared, number by number, in float64:

- `r`, the reference: the same weights, computed in float64;
- `e`, eager: the torch module at the bundle's precision;
- `b`, the backend.

The error of a result `t` is `error(t) = ‖t − r‖ / ‖r‖`, over the numbers that are finite in `b` and `r`; where `r` is
all zeros it is `‖t − r‖`. `ulp(x)` is the distance between neighbouring numbers of the precision at `x`.

## The rule

An output passes if all three hold:

1. `error(b) ≤ max(2 · error(e), floor)`;
2. no element is off by more than `2 · max|e − r| + max(4 ulp(max|r|), floor · max|r|)`;
3. NaN and infinity occur only where they may (below).

So a backend's error may be about that of the plain arithmetic of its precision, and no more. FlashAttention's own tests
use the same rule (https://github.com/Dao-AILab/flash-attention).

The floor is allowed however exact eager is, because kernels sum in a different order: 4e-6 for fp32, 1e-3 for tf32 and
fp16, 8e-3 for bf16 (`attnforge.precision`).

Everything else that is allowed, and every case, is in `docs/concepts/parity.md`: draws of eager's error on hard inputs,
outputs of few elements, attention at a lower precision, very small outputs, deployments that chose their precisions,
integers, NaN and infinity, and which elements of a large output are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnforge.arrays import Array, is_floating, pieces
from attnforge.bundle import Case, Manifest
from attnforge.numbers import scientific
from attnforge.precision import Precision, precision_named
from attnforge.runtime.cases import BLOCKS
from attnforge.runtime.parity.comparison import Comparison, Element, cosine_of, histogram_of, quantiles_of

LEAST_DRAWS = 3
"""Number of draws of eager's rounding on hard inputs after which draws that agree are enough."""

LEAST_LOW_DRAWS = 8
"""The same for a 16-bit precision, whose rounding is so coarse that scores tie in one draw of ten or twenty."""

MOST_DRAWS = 32
"""Maximum number of draws, if they disagree."""

FEW = 1024
"""Outputs of fewer elements than this get eager's largest error over all ordinary cases: with ten elements, two errors
from one distribution differ by more than a factor of two one time in fifty."""

SWAPPED = 2
"""Number of integers that may differ, up to half of an output's, if products round coarsely: two scores that tie to
rounding swap their order."""

COARSE = 10
"""Mantissa bits up to which products are considered to round coarsely."""

FAR_OFF = 10
"""Maximum ratio of eager's error to the floor, above which its precision is reported to drift."""

HANDFUL = 16
"""Outputs of fewer elements than this may be near zero by chance, and eager right by chance."""

GAP = 100
"""How many times larger than others some numbers of an output are whose size would hide the errors of the others."""

FILL, ALIKE = 1e3, 1.01
"""Numbers from :data:`FILL` on that are :data:`GAP` times as large as all others, and within a factor of :data:`ALIKE`
of one another, are considered a fill, such as the -1e9 of words that must not be chosen."""


@dataclass(frozen=True)
class Allowed:
    """The error that a deployment that chose its own precisions may have on ordinary inputs.

    Attributes:
        error: the maximum relative error, whatever eager's is.
        exactly: whether `error` was asked for and is the budget; otherwise it limits the budget, and replaces it where
            eager overflows.
    """

    error: float
    exactly: bool

    @classmethod
    def by(cls, manifest: Manifest) -> Allowed | None:
        """The errors that a bundle is allowed; None if it did not choose its precisions."""
        return cls(manifest.mixed.max_error, manifest.mixed.exactly) if manifest.mixed is not None else None


def budget_precision(manifest: Manifest, backend: str) -> Precision:
    """The precision whose floor and ulp apply to a backend: that of its attention alone, if it differs, otherwise the
    bundle's. With 8-bit products, 16-bit attention does not count."""
    record = manifest.targets.get(backend)
    alone = record.attention_precision if record is not None and manifest.quantised is None else None
    return precision_named(alone or manifest.precision)


def judge(
    case: Case,
    output: str,
    got: Array,
    eager: Array,
    truth: Array,
    precision: Precision,
    baseline: Array | None = None,
    allowed: Allowed | None = None,
    terms: int = 1,
    channels: Sequence[Array] = (),
) -> Comparison:
    """Check one output of one case against the budget, and numbers whose errors larger ones would hide on their own.

    Args:
        case: the case.
        output: name of the output.
        got: the backend's output, of any dtype and shape.
        eager: eager's output at the bundle's precision, of the same shape.
        truth: the reference's output, of the same shape.
        precision: the precision whose floor and ulp are allowed.
        baseline: eager's output at `precision`, if that differs from the bundle's.
        allowed: the error that a deployment that chose its precisions may have.
        terms: how many of the output's elements each number is a signed sum of.
        channels: the index of every number along each axis of the output, where some may be small everywhere.

    Returns:
        the comparison of the output, or of the numbers that are checked on their own if it is closer to its budget.
    """
    if got.shape != truth.shape:
        return incomparable(case, output, precision, f"{got.size} elements, where float64 eager has {truth.size}")
    if not is_floating(got):
        return _judge_integers(case, output, got, eager, truth, precision)
    got, eager, truth = (np.asarray(array, np.float64) for array in (got, eager, truth))
    if not case.is_ordinary:
        truth = np.where(np.abs(truth) <= precision.largest, truth, np.nan)
    overflowed = (np.abs(truth) <= precision.largest) & ~np.isfinite(eager)
    count = int(overflowed.sum())
    standard = eager
    # the baseline's error is allowed twice, unless it overflows where eager at the bundle's precision does not
    if baseline is not None and np.isfinite(baseline[np.isfinite(eager)]).all():
        standard = np.where(np.isfinite(eager), baseline, eager).astype(np.float64)
    errors = _Errors.of(got, standard, truth)
    drawn = case.spread.get(output, (0.0, 0.0))  # of other draws and other cases
    if terms > 1:
        drawn = case.spread.get(output + BLOCKS, (drawn[0], math.sqrt(terms) * drawn[1]))
    budget, max_budget = errors.budget(precision, drawn, allowed if case.is_ordinary else None, count > 0, terms)
    reason = errors.over(budget, max_budget)
    worst = None if errors.furthest is None else Element.at(errors.furthest, case.name, got, standard, truth)
    if (misplaced := _misplaced(case, got, eager, truth, precision, overflowed)) is not None:
        reason, worst = misplaced[0], Element.at(_first(misplaced[1]), case.name, got, eager, truth)
    unit = errors.largest or 1.0
    comparison = Comparison(
        case=case.name, output=output, passed=reason is None, reason=reason, worst=worst,
        error=errors.error, eager_error=errors.eager_error, budget=budget,
        max_error=_max(errors.off), max_budget=max_budget,
        size=truth.size, compared=errors.off.size, overflowed=count,
        cosine=cosine_of(errors.got, errors.truth),
        snr_db=-20 * math.log10(errors.error) if errors.error > 0 and errors.truth.any() else None,
        quantiles=quantiles_of(errors.off / unit),
        errors=histogram_of(errors.off / unit), eager_errors=histogram_of(errors.eager_off / unit),
    )  # fmt: skip
    if reason is not None or not case.is_ordinary or count or allowed is not None:
        return comparison
    if (hidden := _hidden(standard, truth, precision, channels)) is None:
        return comparison
    few = replace(precision, floor=FAR_OFF * min(precision.floor, precision_named(precision.name).floor))
    parts = [channel[hidden] for channel in channels]
    alone = case.model_copy(update={"spread": {}})  # which is that of all numbers
    rest = judge(alone, output, got[hidden], standard[hidden], truth[hidden], few, terms=terms, channels=parts)
    if rest.worst is not None:
        rest.worst.index = [int(np.flatnonzero(hidden)[rest.worst.index[0]])]
    return max(rest, comparison, key=lambda c: (not c.passed, c.error / c.budget))


def incomparable(case: Case, output: str, precision: Precision, reason: str) -> Comparison:
    """The verdict on an output that cannot be compared, because its shape or dtype differs from the reference's."""
    return Comparison(
        case=case.name, output=output, passed=False, error=1.0, eager_error=0.0, budget=precision.floor,
        max_error=0.0, max_budget=0.0, size=1, reason=reason,
    )  # fmt: skip


def relative_error(got: Array, truth: Array) -> float:
    """`‖got − truth‖ / ‖truth‖`, for arrays of one shape; the absolute norm if the truth is all zeros. Infinity if that
    is NaN, which would pass as the smaller of any two errors."""
    return relative_error_in(pieces(got, truth))


def relative_error_in(arrays: Iterable[tuple[Array, ...]]) -> float:
    """The relative error of arrays that are given in pieces of both."""
    off = norm = 0.0
    for got, truth in arrays:
        off, norm = math.hypot(off, np.linalg.norm(got - truth)), math.hypot(norm, np.linalg.norm(truth))
    error = off / (norm or 1.0)
    return math.inf if math.isnan(error) else error


# --- errors and budgets -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Errors:
    """The errors of a backend and of eager.

    Attributes:
        got, truth: the elements that are finite in the backend and in the reference, flattened.
        off: |b − r| of these elements.
        eager_off: |e − r| of those that are finite in eager, too.
        error, eager_error: relative errors, in the norm.
        furthest: the flat index of the element with the largest error; None if no element is compared.
    """

    got: Array
    truth: Array
    off: Array
    eager_off: Array
    error: float
    eager_error: float
    furthest: int | None

    @classmethod
    def of(cls, got: Array, eager: Array, truth: Array) -> _Errors:
        """The errors of float64 arrays of one shape."""
        finite = np.isfinite(got) & np.isfinite(truth)
        b, r = got[finite], truth[finite]
        in_eager = finite & np.isfinite(eager)
        e, r_of_e = eager[in_eager], truth[in_eager]
        off = np.abs(b - r)
        furthest = int(np.flatnonzero(finite)[np.argmax(off)]) if off.size else None
        return cls(b, r, off, np.abs(e - r_of_e), relative_error(b, r), relative_error(e, r_of_e), furthest)

    @property
    def largest(self) -> float:
        """max|r|."""
        return _max(np.abs(self.truth))

    def budget(
        self, precision: Precision, drawn: tuple[float, float], allowed: Allowed | None, overflowed: bool, terms: int
    ) -> tuple[float, float]:
        """The error that rules 1 and 2 allow, relative in the norm and absolute in any one element, with everything
        else that the module's docstring allows."""
        is_tiny = 0 < self.largest < precision.smallest_normal  # a sum is spaced as its terms are
        spacing = precision.ulp(self.largest) * (math.sqrt(terms) if is_tiny else 1.0)
        rounding = max(4 * spacing, precision.floor * self.largest)
        error = max(2 * self.eager_error, 2 * drawn[0], precision.floor)
        max_error = 2 * max(_max(self.eager_off), drawn[1]) + rounding
        if is_tiny:
            norm = self.largest * float(np.linalg.norm(self.truth / self.largest))  # squares may be 0
            error = max(error, rounding * math.sqrt(self.off.size) / norm)
        if allowed is not None and (allowed.exactly or overflowed or error > allowed.error):
            return allowed.error, 2 * allowed.error * self.largest + rounding
        return error, max_error

    def over(self, error: float, max_error: float) -> str | None:
        """Why the errors exceed a budget, relative in the norm and absolute in any one element, or None."""
        if not self.error <= error:  # so that NaN does not pass
            return f"error {scientific(self.error, 3)} is over the budget of {scientific(error, 3)}"
        if not (off := _max(self.off)) <= max_error:
            return f"one element is off by {scientific(off, 3)}, over the budget of {scientific(max_error, 3)}"
        return None


def _max(numbers: Array) -> float:
    return float(np.max(numbers, initial=0.0))


def _hidden(eager: Array, truth: Array, precision: Precision, channels: Sequence[Array]) -> Array | None:
    """Where an output has numbers whose errors vanish next to much larger ones: all but a fill, or channels along an
    axis that are small everywhere. None if there are none, too few to compare, or if they are noise in eager too."""
    size = np.where(np.isfinite(truth), np.abs(truth), 0.0)
    is_fill = size >= max(_max(size) / ALIKE, FILL)
    smaller = [~is_fill] if is_fill.any() and GAP * _max(size[~is_fill]) <= size[is_fill].min() else []
    for channel in channels:
        peaks = np.zeros(int(channel.max(initial=0)) + 1)
        np.maximum.at(peaks, channel, size)
        are_many = np.bincount(channel, minlength=peaks.size) >= HANDFUL  # a few are small by chance
        smaller.append((are_many & (peaks > 0) & (GAP * peaks < _max(peaks)))[channel])
    for others in smaller:
        seen = others & np.isfinite(truth) & np.isfinite(eager)
        if np.count_nonzero(seen) >= HANDFUL and relative_error(eager[seen], truth[seen]) <= FAR_OFF * precision.floor:
            return np.asarray(others)
    return None


# --- NaN and infinity -------------------------------------------------------------------------------------------------


def _misplaced(
    case: Case, got: Array, eager: Array, truth: Array, precision: Precision, overflowed: Array
) -> tuple[str, Array] | None:
    """Why a NaN, infinity or number is not allowed where it is, and the elements with it; None if all are allowed.

    Args:
        case: the case.
        got, eager, truth: float64 arrays of one shape.
        precision: the precision of eager.
        overflowed: the elements that are not finite in eager although float64's, rounded, are.
    """
    rounded = np.where(np.abs(truth) > precision.largest, np.copysign(np.inf, truth), truth)
    decided = ~overflowed if case.is_ordinary else np.isfinite(truth) & ~overflowed
    for kind, test, exact in (
        ("NaN", np.isnan, rounded),
        ("+infinity", np.isposinf, rounded),
        ("-infinity", np.isneginf, rounded),
        ("a number", np.isfinite, truth),
    ):
        if (wrong := test(got) & ~test(eager) & ~test(exact) & decided).any():
            return f"{kind} at {int(wrong.sum())} positions where neither eager nor float64 has it", wrong
    given_up = overflowed & ~np.isfinite(got)
    if case.is_ordinary and given_up.any():
        where = f"at {int(given_up.sum())} positions where float64 has numbers, in eager too"
        return f"{precision.name} overflows: NaN or infinity {where}", given_up
    return None


def _first(positions: Array) -> int:
    return int(np.flatnonzero(positions)[0])


# --- integers ---------------------------------------------------------------------------------------------------------


def _judge_integers(
    case: Case, output: str, got: Array, eager: Array, truth: Array, precision: Precision
) -> Comparison:
    """Check an output of integers or booleans, such as indices. The errors are shares of its elements."""
    got, eager, truth = (np.asarray(array, np.float64) for array in (got, eager, truth))
    wrong, differ = (got != truth) & (got != eager), int((eager != truth).sum())
    count, size = int(wrong.sum()), max(got.size, 1)
    may_differ = max(2 * differ, min(SWAPPED, size // 2) if precision.mantissa_bits <= COARSE else 0)
    passed = count <= may_differ or not (case.is_ordinary or case.kind == "large")
    return Comparison(
        case=case.name, output=output, passed=passed, error=count / size, eager_error=differ / size,
        budget=max(may_differ, 1) / size, max_error=0.0, max_budget=0.0, size=got.size, compared=got.size,
        worst=Element.at(_first(wrong), case.name, got, eager, truth) if count else None,
        reason=None if passed else f"{count} of {got.size} are neither eager's nor float64's; {may_differ} are allowed",
    )  # fmt: skip
