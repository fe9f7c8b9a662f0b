"""The outputs that a deployed model is verified against: its source's, at the bundle's precision and in float64, for
every reference case."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np
import onnx_ir as ir
from safetensors.numpy import save_file

from attnforge.arrays import BFLOAT16, Array, is_floating, pieces
from attnforge.bundle import REFERENCE_EXAMPLE, REFERENCE_OUTPUTS, Case, DimSpec, TensorSpec
from attnforge.errors import CaptureError
from attnforge.export.expected_caches import ExpectedCaches
from attnforge.export.flops import run_cost
from attnforge.precision import Precision
from attnforge.progress import Progress, Steps
from attnforge.runtime.cases import (
    LARGEST,
    OUTLIERS,
    PASSES,
    STEPPED,
    WHOLE_CACHE,
    Cost,
    blocks,
    data_key,
    key,
    labels_key,
    lower_most,
    make_inputs,
    run_of_example,
    sampled,
    scale_key,
)
from attnforge.runtime.cases import cases as seeded_cases
from attnforge.runtime.inputs import shapes_of
from attnforge.runtime.parity.budget import (
    FAR_OFF,
    FEW,
    HANDFUL,
    LEAST_DRAWS,
    LEAST_LOW_DRAWS,
    MOST_DRAWS,
    relative_error_in,
)

NEAR = 4
"""Ratio of the floor to eager's error from which the floor is the budget, whatever inputs are drawn."""

BY_CHANCE = 1000
"""Factor by which such an output may be smaller than usual by chance, on inputs that are not usual themselves; a model
whose outputs shrink with its inputs has far smaller ones on denormal inputs."""

MARGIN = 16
"""Ratio of the largest inputs that eager supports to the extremes: other summation orders overflow sooner."""


class ReferenceModel(Protocol):
    """A model that answers twice: at the bundle's precision, and in float64 with the same weights.

    Attributes:
        inputs: name, dtype and dims of each input.
        precision: the precision at which :meth:`eager` computes.
    """

    inputs: list[TensorSpec]
    precision: Precision

    @property
    def reference(self) -> str:
        """Description of what computes the outputs, for the manifest."""

    @property
    def example(self) -> dict[str, Array]:
        """The example inputs by name, in the dtypes of `inputs`."""

    def eager(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name at the precision; 16-bit ones as float32, which represents them exactly."""

    def exact(self, inputs: Mapping[str, Array], peaks: list[float] | None = None) -> dict[str, Array]:
        """Outputs by name in float64.

        Args:
            inputs: inputs by name.
            peaks: receives the largest absolute value of every operator's results, in execution order, if the model
                knows them; otherwise unchanged.
        """

    def at(self, precision: Precision) -> ReferenceModel:
        """The same weights rounded to another precision."""


class Derived:
    """A model whose eager is another model's, and whose float64 is its own.

    Args:
        whole: the model.
        precision: the other model's precision.
    """

    def __init__(self, whole: ReferenceModel, precision: Precision) -> None:
        self._whole, self.precision = whole, precision
        self.inputs: list[TensorSpec] = whole.inputs

    @property
    def example(self) -> dict[str, Array]:
        return self._whole.example

    def exact(self, inputs: Mapping[str, Array], peaks: list[float] | None = None) -> dict[str, Array]:
        return self._whole.exact(inputs, peaks)

    def at(self, precision: Precision) -> ReferenceModel:
        return self._whole.at(precision)


@dataclass(frozen=True)
class Data:
    """Real inputs, one case each, and labels if the task has some.

    Attributes:
        inputs: arrays by name, for every case.
        labels: labels of the samples of each case; empty if there are none.
    """

    inputs: Sequence[Mapping[str, Array]] = ()
    labels: Sequence[Array] = ()


def write_reference(
    folder: Path,
    model: ReferenceModel,
    graph: ir.Model,
    attention: Precision | None = None,
    data: Data | None = None,
    progress: Progress | None = None,
    caches: ExpectedCaches | None = None,
) -> list[Case]:
    """Run every case through the model at the bundle's precision and in float64, and write inputs and outputs.

    Args:
        folder: the bundle's folder.
        model: computes the outputs.
        graph: the canonical graph, from which the cost of a run is counted (:func:`~attnforge.runtime.cases.cases`).
        attention: precision of attention alone, if it is not the bundle's. Eager cannot compute attention alone at
            another precision, so the whole model runs at it: the eager baseline of
            :mod:`attnforge.runtime.parity.budget`.
        data: real inputs, which become cases after the seeded ones.
        progress: receives each case.
        caches: for a decoder, the expected contents of its caches.

    Returns:
        the cases, with the scale of their inputs and the spread of eager's error.
    """
    cost = run_cost(graph)
    stored, cases = stored_inputs(model, data or Data(), cost)
    if caches is not None:
        cases += _whole_cache(model.inputs[0], caches.capacity, len(cases))
    low = model.at(attention) if attention is not None else None
    outputs: dict[str, Array] = {}
    few, few_in_caches = _FewNumbers(), _FewNumbers()
    draws: list[_Draws] = []
    reach = _Reach(model.precision.largest)
    for_draws = _left(cases, cost)
    steps = Steps(progress, sum(cost(case.sizes) for case in cases) + for_draws)
    for case in sorted(cases, key=lambda case: case.name != LARGEST):  # it needs its memory before results accumulate
        steps.begin(case.name, cost(case.sizes))
        if (results := _bounded(case, model, low, stored, reach)) is None:
            cases.remove(case)
            continue
        inputs, eager, exact = results
        outputs |= _sampled(case, eager, "eager") | _sampled(case, exact, "float64")
        baseline = eager
        if low is not None and attention is not None:
            baseline = low.eager(at_precision(inputs, attention))
            outputs |= _sampled(case, baseline, attention.name)
        if not case.is_ordinary:
            errors = {output: _Error.of(array, exact[output]) for output, array in baseline.items()}
            truth = {output: sampled(array, case) for output, array in exact.items()}
            draws.append(_Draws(case, inputs, model, low or model, errors, truth))
        few.add(case, eager, exact)
    if caches is not None:
        steps.begin("keys and values of caches")
        outputs |= {scale_key(name): scale for name, scale in caches.scales.items()}
        stepped = {case.name: case for case in cases if case.name in STEPPED}
        inputs_of = {name: make_inputs(case, model.inputs, stored) for name, case in stepped.items()}
        for name, (eager, exact) in caches.computed(inputs_of).items():
            stepped[name].caches = True
            outputs |= _sampled(stepped[name], eager, "eager") | _sampled(stepped[name], exact, "float64")
            few_in_caches.add(stepped[name], eager, exact)
        few_in_caches.widen_spreads(model.precision.floor)
    few.widen_spreads(model.precision.floor)
    left = _draw(draws, for_draws, cost, steps)
    handfuls = few.handfuls(model.precision)
    again = [_Draws(c, make_inputs(c, model.inputs, stored), model, low or model, e) for c, e in handfuls]
    _draw(again, left, cost, steps)
    (folder / "reference").mkdir()
    save_file(outputs, folder / REFERENCE_OUTPUTS)
    save_file({name: _storable(array) for name, array in stored.items()}, folder / REFERENCE_EXAMPLE)
    return cases


def stored_inputs(model: ReferenceModel, data: Data, cost: Cost) -> tuple[dict[str, Array], list[Case]]:
    """The inputs that the bundle stores (the example, and real data with its labels), and all cases.

    Args:
        model: the model.
        data: real inputs.
        cost: the cost of a run.
    """
    stored, cases = dict(model.example), seeded_cases(model.inputs, cost)
    for i, inputs in enumerate(data.inputs):
        shapes = shapes_of(model.inputs, (), *((array.shape, array.dtype) for array in inputs.values()))
        case = Case(name=f"data-{i}", sizes=dict(shapes.sizes), kind="data", seed=len(cases))
        cases.append(case)
        stored |= {data_key(case, name): array for name, array in inputs.items()}
        if data.labels:
            stored[labels_key(case)] = data.labels[i]
    return stored, cases


def _whole_cache(tokens: TensorSpec, capacity: int, seed: int) -> list[Case]:
    """The case of one sample that fills a decoder's caches; none if a call may have as many tokens."""
    batch, count, *_ = tokens.dims
    assert isinstance(count, DimSpec)
    if count.max == capacity:
        return []
    sizes = {count.symbol: capacity} | ({batch.symbol: 1} if isinstance(batch, DimSpec) else {})
    return [Case(name=WHOLE_CACHE, sizes=sizes, kind="normal", seed=seed)]


Results = tuple[dict[str, Array], dict[str, Array], dict[str, Array]]
"""Inputs, eager outputs and float64 outputs of a case."""


def _bounded(
    case: Case, model: ReferenceModel, low: ReferenceModel | None, stored: Mapping[str, Array], reach: _Reach
) -> Results | None:
    """Results of :func:`_run`, with the scale of hard inputs set. If eager refuses integers, such as token positions in
    an input that is shorter than the example, the largest is halved until eager accepts them. None if it can take
    neither zeros nor large numbers, or is not near float64 for these: then the case proves nothing."""
    while True:
        try:
            _set_scale(case, model, low, reach)
            inputs, eager, exact = _run(case, model, stored, reach)
        except CaptureError:
            if lower_most(case, model.inputs):
                continue
            if case.kind in ("zeros", "large"):
                return None
            raise
        is_right = case.kind != "large" or all(_is_right(a, exact[name], model.precision) for name, a in eager.items())
        return (inputs, eager, exact) if is_right else None


def _run(case: Case, model: ReferenceModel, stored: Mapping[str, Array], reach: _Reach) -> Results:
    """Inputs, eager outputs and float64 outputs of a case. If its inputs are large, its scale is halved until eager no
    longer overflows and no intermediate result is beyond the precision's range: an overflow says nothing about a
    backend."""
    while True:
        inputs = make_inputs(case, model.inputs, stored)
        peaks: list[float] = []
        is_large = case.kind in ("scaled", "outliers") and case.scale > 1 / OUTLIERS
        eager = model.eager(inputs)
        exact = model.exact(inputs, peaks if case.is_ordinary or is_large else None)
        if case.is_ordinary:
            reach.note(peaks)
        overflows = is_large and any(_overflows(array, exact[name], model.precision) for name, array in eager.items())
        if not (overflows or (is_large and reach.is_left(peaks))):
            return inputs, eager, exact
        case.scale /= 2


def _sampled(case: Case, outputs: Mapping[str, Array], which: str) -> dict[str, Array]:
    """The stored arrays of all outputs of a case, by key."""
    arrays: dict[str, Array] = {}
    for output, array in outputs.items():
        arrays |= kept(array, case, key(case, output, which))
    return arrays


def kept(array: Array, case: Case, name: str) -> dict[str, Array]:
    """The stored arrays of one output: all of it under `name`, or sampled elements and block sums."""
    sums = blocks(array, case)
    numbers = {name: np.ascontiguousarray(sampled(array, case))}
    return numbers if sums is None else {**numbers, f"{name}/blocks": sums}


def _storable(array: Array) -> Array:
    """An array as safetensors stores it: contiguous, and bfloat16 as float32, because it does not know NumPy's."""
    return np.asarray(array.astype(np.float32) if array.dtype == BFLOAT16 else array, order="C")


def at_precision(inputs: Mapping[str, Array], precision: Precision) -> dict[str, Array]:
    """Inputs by name, floating-point ones rounded to the precision's dtype."""
    with np.errstate(over="ignore"):
        return {name: a.astype(precision.dtype) if is_floating(a) else a for name, a in inputs.items()}


# --- how large inputs may be ------------------------------------------------------------------------------------------


class _Reach:
    """Whether a model's intermediate results stay within the range of its precision: beyond it, one order of operators
    overflows and another does not. Results that are beyond it on ordinary inputs too, as in a mask, do not count.

    Args:
        largest: largest number of the precision.
    """

    def __init__(self, largest: float) -> None:
        self._largest = largest
        self._usual: list[bool] | None = None

    def note(self, peaks: Sequence[float]) -> None:
        """Note the peaks of every operator's results on ordinary inputs."""
        beyond = self._beyond(peaks)
        if self._usual is None or len(self._usual) != len(beyond):
            self._usual = beyond
        else:
            self._usual = [known or now for known, now in zip(self._usual, beyond, strict=True)]

    def is_left(self, peaks: Sequence[float]) -> bool:
        """Whether an operator's results are beyond the range; False if the model runs other operators than usual."""
        beyond = self._beyond(peaks)
        if self._usual is None or len(self._usual) != len(beyond):
            return False
        return any(now and not usual for now, usual in zip(beyond, self._usual, strict=True))

    def _beyond(self, peaks: Sequence[float]) -> list[bool]:
        return [not peak <= self._largest for peak in peaks]


def _set_scale(case: Case, model: ReferenceModel, low: ReferenceModel | None, reach: _Reach) -> None:
    """Set the scale of inputs that are as small as the precision's denormals or as large as the model can take."""
    if case.kind == "denormal":
        case.scale = model.precision.smallest_normal / _limit(model, "smallest_normal")
    if case.kind == "extremes":
        case.scale = min(_largest_scale(case, computed, reach) for computed in (model, low) if computed is not None)


def _largest_scale(case: Case, model: ReferenceModel, reach: _Reach) -> float:
    """The maximum size of the extremes, relative to the largest number of the inputs' dtype, for eager to be right and
    for all intermediate results to be within the range. If eager overflows on the way, its output depends on its
    summation order and says nothing about a backend."""
    precision, largest = model.precision, _limit(model, "max")
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
        is_right = all(_is_right(array, exact[output], precision) for output, array in eager.items())
        return is_right and not reach.is_left(peaks)

    first = _first(scales, is_supported)
    return scales[first] / MARGIN if first < count else scales[-1] / step


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


def _limit(model: ReferenceModel, which: str) -> float:
    """A limit of the inputs' floating-point dtype, by its name in `finfo`."""
    dtype = next(spec.dtype for spec in model.inputs if "float" in spec.dtype)
    return float(getattr(ml_dtypes.finfo(dtype), which))  # type: ignore[no-untyped-call]


def _overflows(eager: Array, exact: Array, precision: Precision) -> bool:
    """Whether eager has NaN or infinity where the precision can represent float64's number."""
    return not all(np.isfinite(array).all() for array, _ in _representable(eager, exact, precision))


def _is_right(eager: Array, exact: Array, precision: Precision) -> bool:
    """Whether eager is finite and near float64 wherever the precision can represent float64's number."""
    if _overflows(eager, exact, precision):
        return False
    return relative_error_in(_representable(eager, exact, precision)) <= FAR_OFF * precision.floor


def _representable(eager: Array, exact: Array, precision: Precision) -> Iterator[tuple[Array, Array]]:
    """The numbers of both, in float64, where the precision can represent float64's: finite and within its range."""
    for array, truth in pieces(eager, exact):
        inside = np.isfinite(truth) & (np.abs(truth) <= precision.largest)
        yield array[inside].astype(np.float64), truth[inside]


# --- how widely eager's error spreads ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Error:
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
    def of(cls, eager: Array, exact: Array) -> _Error:
        """The error of eager's output."""

        def finite() -> Iterator[tuple[Array, Array]]:
            for array, truth in pieces(eager, exact):
                both = np.isfinite(array) & np.isfinite(truth)
                yield array[both].astype(np.float64), truth[both]

        absolute, largest, size = 0.0, 0.0, 0
        for array, truth in finite():
            absolute = max(absolute, float(np.max(np.abs(array - truth), initial=0.0)))
            largest, size = max(largest, float(np.max(np.abs(truth), initial=0.0))), size + truth.size
        return cls(relative_error_in(finite()), absolute, largest, size)


class _Draws:
    """The errors of the eager baseline on one case, and on the same inputs moved to neighbouring numbers.

    On hard inputs (two scores nearly tie, say) and on outputs of a handful of elements, eager's error is one draw from
    a wide distribution, and a backend's is another; a few draws show how wide it is. Beyond 16 bits the change of the
    float64 output counts as well: an answer that is exact for inputs which differ by a rounding is right (the backward
    error of N. Higham, Accuracy and Stability of Numerical Algorithms, 1.5), and eager may sum in an order that happens
    to err far less.

    Args:
        case: the case whose spread to find.
        inputs: inputs of the case.
        model: computes float64.
        baseline: computes eager's outputs.
        errors: errors of the baseline on the case itself, by the outputs to draw.
        truth: float64's output for the case itself, by output, at the elements that the bundle stores.
    """

    def __init__(
        self,
        case: Case,
        inputs: Mapping[str, Array],
        model: ReferenceModel,
        baseline: ReferenceModel,
        errors: Mapping[str, _Error],
        truth: Mapping[str, Array] | None = None,
    ) -> None:
        self.case = case
        self._truth = {} if truth is None or baseline.precision.is_low else truth
        self._moves: dict[str, list[_Error]] = {output: [] for output in errors}
        self._model, self._baseline = model, baseline
        self._inputs = at_precision(inputs, baseline.precision)
        self._can_move = any(is_floating(array) and array.any() for array in self._inputs.values())
        self._rng = np.random.Generator(np.random.PCG64([case.seed, MOST_DRAWS]))
        self._errors = {output: [error] for output, error in errors.items()}
        self._count = 0

    def more(self) -> None:
        """Draw another error."""
        moved = {
            name: _neighbours(array, self._baseline.precision, self._rng) if is_floating(array) else array
            for name, array in self._inputs.items()
        }
        eager, exact = self._baseline.eager(moved), self._model.exact(moved)
        for output, errors in self._errors.items():
            errors.append(_Error.of(eager[output], exact[output]))
            if output in self._truth:
                self._moves[output].append(_Error.of(sampled(exact[output], self.case), self._truth[output]))
        self._count += 1

    @property
    def is_open(self) -> bool:
        """Whether another draw may change the budget: the floor does not decide it, and there are fewer than
        :data:`LEAST_DRAWS` draws (:data:`LEAST_LOW_DRAWS` at 16 bits), or they disagree and there are fewer than
        :data:`MOST_DRAWS`. Integer inputs have no neighbours."""
        least = LEAST_LOW_DRAWS if self._baseline.precision.is_low else LEAST_DRAWS
        if self._count >= MOST_DRAWS or not self._can_move:
            return False
        near = [errors for errors in self._errors.values() if self.case.is_ordinary or self._may_decide(errors)]
        return bool(near) and (self._count < least or not all(map(_agree, near)))

    def _may_decide(self, errors: Sequence[_Error]) -> bool:
        """Whether eager's error on an output is not far below the floor."""
        precision = self._baseline.precision
        return any(
            NEAR * error.relative > precision.floor
            or NEAR * error.absolute > max(4 * precision.ulp(error.largest), precision.floor * error.largest)
            for error in errors
        )

    def widen_spread(self) -> None:
        """Raise the case's spread to at least the largest relative and absolute error, by output."""
        for output, errors in self._errors.items():
            every = [*errors, *self._moves[output]]
            _widen(self.case, output, max(e.relative for e in every), max(e.absolute for e in every))


def _widen(case: Case, output: str, relative: float, absolute: float) -> None:
    """Raise the spread of one output of a case to at least these errors."""
    if not (math.isfinite(relative) and math.isfinite(absolute)):
        return  # the squares overflow float64; such a spread would allow everything
    known = case.spread.get(output, (0.0, 0.0))
    case.spread = {**case.spread, output: (max(known[0], relative), max(known[1], absolute))}


def _agree(errors: Sequence[_Error]) -> bool:
    """Whether the largest error is at most a quarter above the median, in the norm and in the largest element."""
    return all(
        max(numbers) <= 1.25 * statistics.median(numbers)
        for numbers in ([error.relative for error in errors], [error.absolute for error in errors])
    )


def _draw(draws: Sequence[_Draws], runs: float, cost: Cost, steps: Steps) -> float:
    """Draw in turns, a case at a time, while draws may change a budget and their cost is within `runs`; returns what
    remains of it."""
    while remaining := [of_case for of_case in draws if of_case.is_open and cost(of_case.case.sizes) <= runs]:
        for of_case in remaining:
            work = cost(of_case.case.sizes)
            runs -= work
            if runs < 0:
                break
            steps.begin(f"eager's error, {of_case.case.name}", work)
            of_case.more()
    for of_case in draws:
        of_case.widen_spread()
    return max(runs, 0.0)


def _left(cases: Sequence[Case], cost: Cost) -> float:
    """Floating-point operations that are left for draws after every case has run once, not counting real data and the
    largest sizes; at least as many as :data:`LEAST_DRAWS` runs take."""
    run = run_of_example(cases[0].sizes, cost)
    seeded = [case for case in cases if case.kind != "data" and case.name != LARGEST]
    return max(PASSES * run - sum(cost(case.sizes) for case in seeded), LEAST_DRAWS * run)


def _neighbours(array: Array, precision: Precision, rng: np.random.Generator) -> Array:
    """Replace each number by the next larger or smaller one of its dtype, or keep it, at random; zeros are kept.

    In TF32 the next number is that of ten bits of mantissa: nearer ones are rounded to the same operand.
    """
    toward = np.array([-np.inf, np.inf], array.dtype)[rng.integers(0, 2, array.shape)]
    moved = np.nextafter(array, toward, dtype=array.dtype)
    if precision.name == "tf32":
        with np.errstate(over="ignore", invalid="ignore"):
            moved = array + (moved - array) * np.float32(2 ** (23 - precision.mantissa_bits))
    keep = ~np.isfinite(moved) | (array == 0) | (rng.random(array.shape) < 1 / 3)
    return np.where(keep, array, moved)


class _FewNumbers:
    """Eager's errors on outputs of few elements: on ordinary inputs they are draws from one distribution."""

    def __init__(self) -> None:
        self._errors: list[tuple[Case, str, _Error]] = []

    def add(self, case: Case, eager: Mapping[str, Array], exact: Mapping[str, Array]) -> None:
        """Note the errors of a case."""
        errors = ((output, _Error.of(array, exact[output])) for output, array in eager.items())
        self._errors += [(case, output, error) for output, error in errors if 0 < error.size < FEW]

    def widen_spreads(self, floor: float) -> None:
        """Raise every case's spread to at least the largest error of an ordinary case on the same output; and add half
        the floor's share of the usual size for a handful of elements that are near zero by chance.

        Args:
            floor: the precision's floor.
        """
        for case, output, error in self._errors:
            relative, share = self._largest(output)
            _widen(case, output, relative, error.largest * share)
            usual = self._usual_size(output)
            least = 0.0 if case.is_ordinary else usual / BY_CHANCE
            is_made_small = case.kind == "scaled" and case.scale < 1
            if error.size < HANDFUL and least < error.largest < usual and not is_made_small:
                _widen(case, output, floor / 2 * usual / error.largest, floor / 2 * (usual - error.largest))

    def _usual_size(self, output: str) -> float:
        """The median, over ordinary cases, of the largest absolute value of an output."""
        sizes = [error.largest for case, name, error in self._errors if name == output and case.is_ordinary]
        return statistics.median(sizes) if sizes else 0.0

    def _largest(self, output: str) -> tuple[float, float]:
        """The largest relative error of an ordinary case on an output, and the largest share of one element."""
        alike = [error for case, name, error in self._errors if name == output and case.is_ordinary]
        share = max((error.absolute / (error.largest or 1) for error in alike), default=0.0)
        return max((error.relative for error in alike), default=0.0), share

    def handfuls(self, precision: Precision) -> list[tuple[Case, dict[str, _Error]]]:
        """The ordinary seeded cases, and their errors on outputs of fewer than :data:`HANDFUL` elements, where the
        floor may not be the budget."""
        errors: dict[str, tuple[Case, dict[str, _Error]]] = {}
        for case, output, error in self._errors:
            is_drawn = case.is_ordinary and case.kind != "data" and error.size < HANDFUL
            if is_drawn and 2 * max(self._largest(output)) > precision.floor:
                errors.setdefault(case.name, (case, {}))[1][output] = error
        return list(errors.values())
