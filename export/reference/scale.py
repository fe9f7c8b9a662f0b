"""How large the inputs of hard cases may be, for eager to be right on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from attnforge.arrays import Array, pieces
from attnforge.bundle import Case
from attnforge.errors import CaptureError
from attnforge.export.reference.model import ReferenceModel, at_precision
from attnforge.precision import Precision
from attnforge.runtime.cases import OUTLIERS, lower_most, make_inputs
from attnforge.runtime.parity.budget import FAR_OFF, relative_error_in

MARGIN = 16
"""Ratio of the largest inputs that eager supports to the extremes: other summation orders overflow sooner."""


class Results(NamedTuple):
    """Inputs, eager outputs and float64 outputs of a case, by name."""

    inputs: dict[str, Array]
    eager: dict[str, Array]
    exact: dict[str, Array]


class Evaluator:
    """Computes the outputs of cases, with hard inputs as large as the model supports.

    An output that overflows on the way depends on the order of operators, and says nothing about a backend. So the
    intermediate results of large inputs stay within the precision's range too, except where they are beyond it on
    ordinary inputs as well, as in a mask: run ordinary cases first.

    Args:
        model: computes eager and float64.
        low: the same weights at the precision of attention alone, if that is not the model's.
        stored: the example's inputs, and those of real data.
    """

    def __init__(self, model: ReferenceModel, low: ReferenceModel | None, stored: Mapping[str, Array]) -> None:
        self._model, self._low, self._stored = model, low, stored
        self._largest = model.precision.largest
        self._usual: list[bool] = []

    def results(self, case: Case) -> Results | None:
        """Run a case, and set the scale of its inputs. If eager refuses integers, such as token positions in an input
        that is shorter than the example, the largest is halved until eager accepts them.

        Args:
            case: its scale and its largest integer may be modified.

        Returns:
            None if the model can take neither zeros nor large numbers, or is not near float64 for these: then the case
            proves nothing.

        Raises:
            CaptureError: eager refuses the inputs.
        """
        while True:
            try:
                self._set_scale(case)
                results = self._in_range(case)
            except CaptureError:
                if lower_most(case, self._model.inputs):
                    continue
                if case.kind in ("zeros", "large"):
                    return None
                raise
            is_right = _is_right(results, self._model.precision) if case.kind == "large" or case.reach else True
            if case.kind == "large":
                return results if is_right else None
            if is_right and (case.reach is None or all(np.isfinite(array).all() for array in results.eager.values())):
                return results
            lower_most(case, self._model.inputs)  # the integers that it reaches

    def _set_scale(self, case: Case) -> None:
        """Set the scale of inputs that are as small as the precision's denormals or as large as the model can take."""
        if case.kind == "denormal":
            case.scale = self._model.precision.smallest_normal / self._limit("smallest_normal")
        if case.kind == "extremes":
            models = [self._model] if self._low is None else [self._model, self._low]
            case.scale = min(self._largest_scale(case, model) for model in models)

    def _in_range(self, case: Case) -> Results:
        """Run a case. If its inputs are large, its scale is halved until neither outputs nor intermediate results leave
        the precision's range."""
        while True:
            inputs = make_inputs(case, self._model.inputs, self._stored)
            peaks: list[float] = []
            is_large = case.kind in ("scaled", "outliers") and case.scale > 1 / OUTLIERS
            eager = self._model.eager(inputs)
            exact = self._model.exact(inputs, peaks if case.is_ordinary or is_large else None)
            if case.is_ordinary:  # note which operators' results are beyond the range on ordinary inputs
                beyond = [not peak <= self._largest for peak in peaks]
                known = self._usual if len(self._usual) == len(beyond) else [False] * len(beyond)
                self._usual = [was or now for was, now in zip(known, beyond, strict=True)]
            overflows = (_overflows(array, exact[name], self._model.precision) for name, array in eager.items())
            if not (is_large and (any(overflows) or self._leaves_range(peaks))):
                return Results(inputs, eager, exact)
            case.scale /= 2

    def _largest_scale(self, case: Case, model: ReferenceModel) -> float:
        """The maximum size of the extremes, relative to the largest number of the inputs' dtype, for eager to be right
        and for all intermediate results to be within the range."""
        precision, largest = model.precision, self._limit("max")
        step = 4.0 if precision.largest < 1e5 else 256.0
        count = max(math.ceil(math.log(precision.largest, step)), 0)  # down to inputs of 1
        scales = [precision.largest / largest / step**i for i in range(count)]

        def is_supported(scale: float) -> bool:
            inputs = make_inputs(case.model_copy(update={"scale": scale}), model.inputs, {})
            eager = model.eager(at_precision(inputs, precision))
            if not any(np.isfinite(array).any() for array in eager.values()):
                return False
            peaks: list[float] = []
            exact = model.exact(inputs, peaks)
            return _is_right(Results(inputs, eager, exact), precision) and not self._leaves_range(peaks)

        first = _first(scales, is_supported)
        return scales[first] / MARGIN if first < count else scales[-1] / step

    def _leaves_range(self, peaks: Sequence[float]) -> bool:
        """Whether results are beyond the range that are not on ordinary inputs; False if other operators ran then."""
        if len(self._usual) != len(peaks):
            return False
        return any(not peak <= self._largest and not usual for peak, usual in zip(peaks, self._usual, strict=True))

    def _limit(self, which: str) -> float:
        """A limit of the inputs' floating-point dtype, by its name in `finfo`."""
        dtype = next(spec.dtype for spec in self._model.inputs if "float" in spec.dtype)
        return float(getattr(ml_dtypes.finfo(dtype), which))  # type: ignore[no-untyped-call]


def _first(scales: Sequence[float], is_supported: Callable[[float], bool]) -> int:
    """Index of the first scale that the model can take, as it can all after it; their number if there is none. The
    search starts in the middle: a model that normalises squares its inputs, and overflows in the middle of a
    precision's range."""
    low, high, step = -1, len(scales), 1
    probe = high // 2
    while high - low > 1:
        probe = probe if low < probe < high else (low + high) // 2
        if is_supported(scales[probe]):
            high, probe = probe, probe - step
        else:
            low, probe = probe, probe + step
        step *= 2
    return high


def _overflows(eager: Array, exact: Array, precision: Precision) -> bool:
    """Whether eager has NaN or infinity where the precision can represent float64's number."""
    return not all(np.isfinite(array).all() for array, _ in _representable(eager, exact, precision))


def _is_right(results: Results, precision: Precision) -> bool:
    """Whether eager is finite and near float64 wherever the precision can represent float64's number."""
    limit = FAR_OFF * precision.floor
    return all(
        not _overflows(eager, results.exact[name], precision)
        and relative_error_in(_representable(eager, results.exact[name], precision)) <= limit
        for name, eager in results.eager.items()
    )


def _representable(eager: Array, exact: Array, precision: Precision) -> Iterator[tuple[Array, Array]]:
    """The numbers of both, in float64, where the precision can represent float64's: finite and within its range."""
    for array, truth in pieces(eager, exact):
        inside = np.isfinite(truth) & (np.abs(truth) <= precision.largest)
        yield array[inside].astype(np.float64), truth[inside]
