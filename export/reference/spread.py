"""How widely eager's errors spread: the error of a right backend is another draw from the same distribution.

Each output of each case has a :class:`Spread`, which the case records for the budget
(:mod:`attnforge.runtime.parity.budget`):

- on hard inputs, the largest of several draws: on the case, and on its inputs moved to neighbouring numbers;
- on outputs of fewer than :data:`~attnforge.runtime.parity.budget.FEW` elements, the largest over all ordinary cases;
- on ordinary inputs on which eager is far off, the largest over all such cases, up to :data:`FURTHER` times its own:
  the error may be that of a few rows which amplify rounding, such as padded ones of almost equal numbers that are
  normalised, all of which err alike;
- on those of fewer than :data:`~attnforge.runtime.parity.budget.HANDFUL`, draws on ordinary inputs too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from attnforge.arrays import Array, is_floating, pieces
from attnforge.bundle import Case
from attnforge.export.reference.model import ReferenceModel, at_precision
from attnforge.precision import Precision
from attnforge.progress import Steps
from attnforge.runtime.cases import BLOCKS, Cost, blocks, make_inputs, sampled
from attnforge.runtime.parity import budget

NEAR = 4
"""Ratio of the floor to eager's error from which the floor is the budget, whatever inputs are drawn."""

AMPLIFIED, FURTHER = 4, 4
"""Number of floors beyond which eager's error is rounding that the model amplifies, and maximum ratio of two such
errors, each of which is one draw."""

BY_CHANCE = 1000
"""Factor by which an output of a handful of elements may be smaller than usual by chance, on inputs that are not usual
themselves; a model whose outputs shrink with its inputs has far smaller ones on denormal inputs."""


@dataclass(frozen=True)
class Error:
    """Eager's error on one output, over the elements that are finite in eager and in float64.

    Attributes:
        relative: norm of the error over the norm of float64's output.
        absolute: largest error of one element.
        largest: largest absolute value in float64.
        size: number of elements compared.
    """

    relative: float
    absolute: float
    largest: float
    size: int

    @classmethod
    def of(cls, eager: Array, exact: Array) -> Error:
        """Return the error of eager's output."""

        def finite() -> Iterator[tuple[Array, Array]]:
            for array, truth in pieces(eager, exact):
                both = np.isfinite(array) & np.isfinite(truth)
                yield array[both].astype(np.float64), truth[both]

        absolute, largest, size = 0.0, 0.0, 0
        for array, truth in finite():
            absolute = max(absolute, float(np.max(np.abs(array - truth), initial=0.0)))
            largest, size = max(largest, float(np.max(np.abs(truth), initial=0.0))), size + truth.size
        return cls(budget.relative_error_in(finite()), absolute, largest, size)


@dataclass
class Spread:
    """Eager's errors on one output of one case.

    Attributes:
        case: the case, whose `spread` is widened.
        output: name of the output.
        error: eager's error on the case, at the bundle's precision.
        is_drawn: whether further errors are drawn: on hard inputs, and where the floor may not be the budget of an
            output of a handful of elements.
        draws: errors that are drawn, of which the first is on the case itself.
        truth: float64's output on the case, at the elements that the bundle stores; None if its changes do not count.
        moves: how much float64's output changes in each draw.
    """

    case: Case
    output: str
    error: Error
    is_drawn: bool
    draws: list[Error]
    truth: Array | None = None
    moves: list[Error] = field(default_factory=list)

    def may_decide(self, precision: Precision) -> bool:
        """Whether a draw is not far below the floor."""
        return any(
            NEAR * error.relative > precision.floor
            or NEAR * error.absolute > max(4 * precision.ulp(error.largest), precision.floor * error.largest)
            for error in self.draws
        )

    @property
    def agrees(self) -> bool:
        """Whether the largest draw is at most a quarter above the median, in the norm and in the largest element."""
        return all(
            max(numbers) <= 1.25 * statistics.median(numbers)
            for numbers in ([error.relative for error in self.draws], [error.absolute for error in self.draws])
        )

    def widen(self, relative: float, absolute: float) -> None:
        """Raise the case's spread to at least these errors."""
        if not (math.isfinite(relative) and math.isfinite(absolute)):
            return  # the squares overflow float64; such a spread would allow everything
        known = self.case.spread.get(self.output, (0.0, 0.0))
        self.case.spread = {**self.case.spread, self.output: (max(known[0], relative), max(known[1], absolute))}


class Spreads:
    """The spreads of all outputs of all cases.

    Args:
        model: computes float64.
        baseline: computes the eager baseline: the model, or its weights at the precision of attention alone.
    """

    def __init__(self, model: ReferenceModel, baseline: ReferenceModel) -> None:
        self._model, self._baseline = model, baseline
        self._spreads: list[Spread] = []
        self._sums: list[Spread] = []

    def add(
        self, case: Case, eager: Mapping[str, Array], exact: Mapping[str, Array], baseline: Mapping[str, Array]
    ) -> None:
        """Add the outputs of a case.

        Args:
            case: the case.
            eager: outputs of eager at the bundle's precision.
            exact: outputs in float64.
            baseline: outputs of the eager baseline.
        """
        for output, array in eager.items():
            error, first, truth = Error.of(array, exact[output]), None, None
            if not case.is_ordinary:
                first = None if baseline is eager else Error.of(baseline[output], exact[output])
                truth = None if self._baseline.precision.is_low else sampled(exact[output], case)
            self._spreads.append(Spread(case, output, error, not case.is_ordinary, [first or error], truth))
            if self._is_amplified(self._spreads[-1]):
                sums, exactly = blocks(array, case), blocks(exact[output], case)
                if sums is not None and exactly is not None and exactly.any():
                    self._sums.append(Spread(case, output + BLOCKS, Error.of(sums, exactly), False, []))

    def _is_amplified(self, spread: Spread) -> bool:
        precision, error = self._model.precision, spread.error
        if precision.is_quantised or not spread.case.is_ordinary:  # the error of quantised weights is no draw
            return False
        return error.largest > 0 and error.relative > AMPLIFIED * precision.floor

    def pool(self) -> None:
        """Widen the spreads of outputs of few elements to the largest error of an ordinary case on the same output, and
        of ordinary cases on which eager is far off to the largest of these; and add half the floor's share of the usual
        size for a handful of elements that are near zero by chance."""
        floor = self._model.precision.floor
        amplified: dict[str, list[Spread]] = {}
        for spread in [*filter(self._is_amplified, self._spreads), *self._sums]:
            amplified.setdefault(spread.output, []).append(spread)
        for group in amplified.values():
            most = max(spread.error.relative for spread in group)
            share = max(spread.error.absolute / spread.error.largest for spread in group)
            for spread in group:
                error = spread.error
                limit = FURTHER * error.relative, FURTHER * error.absolute
                spread.widen(min(most, limit[0]), min(share * error.largest, limit[1]))
        few: dict[str, list[Spread]] = {}
        for spread in self._spreads:
            if 0 < spread.error.size < budget.FEW:
                few.setdefault(spread.output, []).append(spread)
        for spreads in few.values():
            alike = [spread.error for spread in spreads if spread.case.is_ordinary] or [Error(0.0, 0.0, 0.0, 0)]
            relative = max(error.relative for error in alike)
            share = max(error.absolute / (error.largest or 1) for error in alike)
            usual = statistics.median(error.largest for error in alike)
            for spread in spreads:
                case, error = spread.case, spread.error
                spread.widen(relative, error.largest * share)
                if error.size >= budget.HANDFUL:
                    continue
                spread.is_drawn |= case.kind != "data" and 2 * max(relative, share) > floor
                least = 0.0 if case.is_ordinary else usual / BY_CHANCE
                if least < error.largest < usual and not (case.kind == "scaled" and case.scale < 1):
                    spread.widen(floor / 2 * usual / error.largest, floor / 2 * (usual - error.largest))

    def draw(self, stored: Mapping[str, Array], runs: float, cost: Cost, steps: Steps) -> None:
        """Draw errors of the baseline: first on hard inputs, then on ordinary ones.

        Args:
            stored: the example's inputs, and those of real data.
            runs: the floating-point operations that all draws may cost together.
            cost: the cost of a run.
            steps: receives each draw.
        """
        for is_ordinary in (False, True):
            spreads = [spread for spread in self._spreads if spread.is_drawn and spread.case.is_ordinary == is_ordinary]
            by_case = groupby(spreads, key=lambda spread: spread.case.name)
            draws = [_Draws(list(of_case), self._model, self._baseline, stored) for _, of_case in by_case]
            for of_case in draws:
                if of_case.case.kind == "denormal" and self._baseline.precision.may_flush:
                    of_case.flush()
            while remaining := [of_case for of_case in draws if of_case.is_open and cost(of_case.case.sizes) <= runs]:
                for of_case in remaining:
                    work = cost(of_case.case.sizes)
                    runs -= work
                    if runs < 0:
                        break
                    steps.begin(f"eager's error, {of_case.case.name}", work)
                    of_case.more()
            runs = max(runs, 0.0)
            for spread in spreads:
                errors = [*spread.draws, *spread.moves]
                spread.widen(max(error.relative for error in errors), max(error.absolute for error in errors))


class _Draws:
    """Draws of the baseline's errors on one case, whose inputs are moved to neighbouring numbers.

    On hard inputs (two scores nearly tie, say) and on outputs of a handful of elements, eager's error is one draw from
    a wide distribution, and a backend's is another; a few draws show how wide it is. Beyond 16 bits the change of the
    float64 output counts as well: an answer that is exact for inputs which differ by a rounding is right (the backward
    error of N. Higham, Accuracy and Stability of Numerical Algorithms, 1.5), and eager may sum in an order that happens
    to err far less.

    Where all inputs are equal, the roundings of sums of equal terms add up, and what cancels is zero in one order and
    not in another; below the normal range, products of weights and values are rounded or not, depending on when weights
    are normalised. So float64's sums are moved there as well. In bf16, products flush such numbers to zero or not,
    depending on the processor and on their sizes, in eager too.
    """

    def __init__(
        self, spreads: Sequence[Spread], model: ReferenceModel, baseline: ReferenceModel, stored: Mapping[str, Array]
    ) -> None:
        self.case = spreads[0].case
        self._spreads, self._model, self._baseline = spreads, model, baseline
        self._inputs = at_precision(make_inputs(self.case, model.inputs, stored), baseline.precision)
        self._can_move = any(is_floating(array) and array.any() for array in self._inputs.values())
        has_truth = any(spread.truth is not None for spread in spreads)
        self._moves_sums = has_truth and self.case.kind in ("constant", "denormal")
        self._rng = np.random.Generator(np.random.PCG64([self.case.seed, budget.MOST_DRAWS]))

    def more(self) -> None:
        """Draw another error."""
        moved = {
            name: neighbours(array, self._baseline.precision, self._rng) if is_floating(array) else array
            for name, array in self._inputs.items()
        }
        eager, exact = self._baseline.eager(moved), self._model.exact(moved)
        results = [exact, self._model.exact(self._inputs, noise=self._rng)] if self._moves_sums else [exact]
        for spread in self._spreads:
            spread.draws.append(Error.of(eager[spread.output], exact[spread.output]))
            if spread.truth is not None:
                spread.moves += (
                    Error.of(sampled(result[spread.output], self.case), spread.truth) for result in results
                )

    def flush(self) -> None:
        """Widen the spreads to the error of taking denormal numbers of the inputs for zeros."""
        normal = {
            name: np.where(np.abs(array) < self._baseline.precision.smallest_normal, np.zeros_like(array), array)
            if is_floating(array)
            else array
            for name, array in self._inputs.items()
        }
        eager, exact = self._baseline.eager(normal), self._model.exact(self._inputs)
        for spread in self._spreads:
            error = Error.of(eager[spread.output], exact[spread.output])
            spread.widen(error.relative, error.absolute)

    @property
    def is_open(self) -> bool:
        """Whether another draw may change the budget: the floor does not decide it, or sums are moved, and there are
        fewer than :data:`~attnforge.runtime.parity.budget.LEAST_DRAWS` draws, or they disagree and there are fewer than
        :data:`~attnforge.runtime.parity.budget.MOST_DRAWS`. Integer inputs have no neighbours."""
        precision, count = self._baseline.precision, len(self._spreads[0].draws) - 1
        if count >= budget.MOST_DRAWS or not self._can_move:
            return False
        near = [spread for spread in self._spreads if self.case.is_ordinary or spread.may_decide(precision)]
        if count < (budget.LEAST_LOW_DRAWS if precision.is_low else budget.LEAST_DRAWS):
            return self._moves_sums or bool(near)
        return not all(spread.agrees for spread in near)


def neighbours(array: Array, precision: Precision, rng: np.random.Generator) -> Array:
    """Replace each number by the next larger or smaller one of its dtype, or keep it, at random; zeros are kept.

    In TF32 the next number is that of ten bits of mantissa: nearer ones are rounded to the same operand.
    """
    toward = np.array([-np.inf, np.inf], array.dtype)[rng.integers(0, 2, array.shape)]
    moved = np.nextafter(array, toward, dtype=array.dtype)
    if precision.name == "tf32":
        with np.errstate(over="ignore", invalid="ignore"):
            moved = array + (moved - array) * np.float32(2 ** (23 - precision.mantissa_bits))
    return np.where(~np.isfinite(moved) | (array == 0) | (rng.random(array.shape) < 1 / 3), array, moved)
