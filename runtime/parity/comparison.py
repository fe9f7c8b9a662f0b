"""The result of comparing one output with the reference: the verdict, the errors, and where they are largest."""

from __future__ import annotations

import math

import numpy as np

from attnforge.arrays import Array
from attnforge.records import Record

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}

LEAST_DECADE, BINS_A_DECADE, BINS = -12, 2, 28
"""The histogram of errors: bins from 1e-12 to 100 times the output's largest number. Smaller and larger errors are
counted in the first and the last bin."""


class Element(Record):
    """One element of an output, and the same element in the reference and in eager.

    Attributes:
        case: name of the case.
        index: index of the element in the whole output.
        got, eager, float64: the number of the backend, eager and the reference; None if it is not finite.
    """

    case: str
    index: list[int]
    got: float | None
    eager: float | None
    float64: float | None

    @classmethod
    def at(cls, index: int, case: str, got: Array, eager: Array, truth: Array) -> Element:
        """The element at an index of the flattened arrays."""
        numbers = (float(array.reshape(-1)[index]) for array in (got, eager, truth))
        first, second, third = (number if math.isfinite(number) else None for number in numbers)
        return cls(case=case, index=[index], got=first, eager=second, float64=third)

    def text(self, output: str) -> str:
        """One line of human-readable text.

        Args:
            output: name of the output.
        """
        numbers = (self.got, self.float64, self.eager)
        got, exact, eager = ("not finite" if number is None else f"{number:.9g}" for number in numbers)
        where = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return f"{output}{where} is {got}, where float64 has {exact} and eager {eager}"


class Comparison(Record):
    """One output of one case, compared with float64. `error`, `eager_error` and `budget` are relative, in the norm;
    `max_error` and `max_budget` are absolute, of one element.

    Attributes:
        case, output: names.
        schedule: the schedule by which a decoder received the tokens; None if it received all at once.
        size: number of elements of the output, or of those that the bundle stores.
        compared: number of elements that are finite in the backend and in float64, and so count in the errors.
        cosine: cosine of the angle between the output and float64's, as vectors; None if one of them is zero.
        snr_db: signal-to-noise ratio, 20·log10(‖r‖ / ‖b − r‖); None if there is no noise.
        quantiles: quantiles of |b − r| / max|r| over the output's elements.
        errors, eager_errors: number of elements with |b − r| / max|r|, or |e − r| / max|r|, in each histogram bin.
        overflowed: number of eager's elements that are NaN or infinite where float64, rounded to the dtype, is finite.
        worst: the element with the largest error, or the first NaN or infinity that is not allowed.
        reason: why it did not pass.
    """

    case: str
    output: str
    passed: bool
    error: float
    eager_error: float
    budget: float
    max_error: float
    max_budget: float
    size: int = 0
    compared: int = 0
    cosine: float | None = None
    snr_db: float | None = None
    quantiles: dict[str, float] = {}
    errors: list[int] = []
    eager_errors: list[int] = []
    overflowed: int = 0
    worst: Element | None = None
    reason: str | None = None
    schedule: str | None = None

    @property
    def share(self) -> float:
        """The share of the budget that the output uses, in the norm or in the element that is furthest off."""
        return max(self.error / self.budget, self.max_error / self.max_budget if self.max_budget else 0.0)

    @property
    def where(self) -> str:
        """The case, and the schedule by which a decoder received its tokens."""
        return self.case if self.schedule is None else f"{self.case} {self.schedule}"


def cosine_of(got: Array, truth: Array) -> float | None:
    """The cosine of the angle between two arrays of one shape, as vectors; None if one is zero or too large."""
    norms = float(np.linalg.norm(got)) * float(np.linalg.norm(truth))
    return float(np.dot(got.ravel(), truth.ravel())) / norms if 0 < norms < math.inf else None


def quantiles_of(errors: Array) -> dict[str, float]:
    """The :data:`QUANTILES` of errors, by name; empty if there are no errors."""
    if errors.size == 0:
        return {}
    values = np.quantile(errors, [*QUANTILES.values()])
    return {name: float(value) for name, value in zip(QUANTILES, values, strict=True)}


def histogram_of(errors: Array) -> list[int]:
    """The number of errors in each of :data:`BINS` bins."""
    exponents = np.log10(np.maximum(errors, 10.0 ** (LEAST_DECADE - 1)))
    bins = np.clip(np.floor((exponents - LEAST_DECADE) * BINS_A_DECADE), 0, BINS - 1).astype(int)
    return [int(count) for count in np.bincount(bins, minlength=BINS)]
