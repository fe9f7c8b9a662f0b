"""What a deployed model is to answer: its source's outputs, at the bundle's precision and in float64, by case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from attnforge.arrays import BFLOAT16, Array, is_floating
from attnforge.bundle import REFERENCE_EXAMPLE, REFERENCE_OUTPUTS, Case, TensorSpec
from attnforge.precision import Precision
from attnforge.progress import Progress, Steps
from attnforge.runtime import cases as reference
from attnforge.runtime.cases import OUTLIERS
from attnforge.runtime.inputs import shapes_of
from attnforge.runtime.parity.budget import DRAWS, FAR_OFF, FEW, relative_error


class ReferenceModel(Protocol):
    """What was captured or imported, as far as the reference goes: inputs, and outputs by name.

    `eager` computes at the bundle's precision, `exact` in float64 with the same weights; `reference` says what does.
    """

    inputs: list[TensorSpec]
    precision: Precision

    @property
    def reference(self) -> str: ...

    @property
    def example(self) -> dict[str, Array]: ...

    def eager(self, inputs: Mapping[str, Array]) -> dict[str, Array]: ...

    def exact(self, inputs: Mapping[str, Array]) -> dict[str, Array]: ...

    def at(self, precision: Precision) -> ReferenceModel: ...


@dataclass(frozen=True)
class Data:
    """Real inputs, a case each, and labels where the task has some.

    Attributes:
        inputs: by name.
        labels: of each case's samples.
    """

    inputs: Sequence[Mapping[str, Array]] = ()
    labels: Sequence[Array] = ()


def write_reference(
    folder: Path,
    source: ReferenceModel,
    attention: Precision | None = None,
    data: Data | None = None,
    progress: Progress | None = None,
) -> list[Case]:
    """Run every case through the source at the bundle's precision and in float64; keep the outputs.

    Args:
        folder: of the bundle.
        source: what the outputs are of.
        attention: the precision of attention alone, where it is another. Eager cannot be told to compute attention
            alone so; all of it runs at that precision, as the yardstick of :mod:`attnforge.runtime.parity.budget`.
        data: what else to run, after the cases that are made from seeds.
        progress: hears of every case.

    Returns:
        the cases.
    """
    stored, cases = stored_of(source, data or Data())
    low = source.at(attention) if attention is not None else None
    outputs: dict[str, Array] = {}
    few = _Few([])
    steps = Steps(progress, len(cases))
    for case in cases:
        steps.begin(case.name)
        if case.kind == "denormal":  # at the precision, where that is less than the inputs'
            case.scale = source.precision.smallest_normal / _limits(source, "smallest_normal")
        if case.kind == "extremes":
            case.scale = min(_borne(case, one) for one in (source, low) if one is not None)
        inputs = reference.make_inputs(case, source.inputs, stored)
        eager, truth = source.eager(inputs), source.exact(inputs)
        while case.kind in ("scaled", "outliers") and case.scale > 1 / OUTLIERS and _overflows(eager, truth, source):
            case.scale /= 2  # what overflows eager says nothing about a backend
            inputs = reference.make_inputs(case, source.inputs, stored)
            eager, truth = source.eager(inputs), source.exact(inputs)
        for output, value in eager.items():
            for which, array in (("eager", value), ("float64", truth[output])):
                outputs |= kept(array, case, reference.key(case, output, which))
        if not case.is_ordinary:
            case.spread = _spread(case, inputs, source, low or source)
        few.add(case, eager, truth)
        if low is not None and attention is not None:
            for output, value in low.eager(at_precision(inputs, attention)).items():
                outputs |= kept(value, case, reference.key(case, output, attention.name))
    few.spread()
    (folder / "reference").mkdir()
    save_file(outputs, folder / REFERENCE_OUTPUTS)
    # Every bfloat16 is a float32, and the file format has no word for NumPy's bfloat16.
    held = {name: array.astype(np.float32) if array.dtype == BFLOAT16 else array for name, array in stored.items()}
    save_file({name: np.asarray(array, order="C") for name, array in held.items()}, folder / REFERENCE_EXAMPLE)
    return cases


def kept(array: Array, case: Case, key: str) -> dict[str, Array]:
    """What is kept of an output, by key: all of it, or the numbers at some places and sums of all."""
    sums = reference.blocks(array, case)
    numbers = {key: np.ascontiguousarray(reference.sampled(array, case))}
    return numbers if sums is None else {**numbers, f"{key}/blocks": sums}


def stored_of(source: ReferenceModel, data: Data) -> tuple[dict[str, Array], list[Case]]:
    """What the bundle keeps of inputs, the example and real data with its labels, and all cases."""
    stored, cases = dict(source.example), reference.cases(source.inputs)
    for i, inputs in enumerate(data.inputs):
        shapes = shapes_of(source.inputs, (), *((array.shape, array.dtype) for array in inputs.values()))
        case = Case(name=f"data-{i}", sizes=dict(shapes.sizes), kind="data", seed=len(cases))
        cases.append(case)
        stored |= {reference.data_key(case, name): array for name, array in inputs.items()}
        if data.labels:
            stored[reference.labels_key(case)] = data.labels[i]
    return stored, cases


def _spread(
    case: Case, inputs: Mapping[str, Array], source: ReferenceModel, yardstick: ReferenceModel
) -> dict[str, tuple[float, float]]:
    """The largest errors of the yardstick's eager on the same inputs moved to neighbouring numbers. Where inputs are
    hard, so that two scores nearly tie, say, eager's error is one draw from a wide distribution, and a backend's
    another; a few draws show how wide."""
    rng = np.random.Generator(np.random.PCG64([case.seed, DRAWS]))
    rounded = at_precision(inputs, yardstick.precision)
    found: dict[str, tuple[float, float]] = {}
    for _ in range(DRAWS):
        moved = {name: _neighbours(array, rng) if is_floating(array) else array for name, array in rounded.items()}
        eager, truth = yardstick.eager(moved), source.exact(moved)
        for output, value in eager.items():
            finite = np.isfinite(value) & np.isfinite(truth[output])
            given, exact = value[finite].astype(np.float64), truth[output][finite]
            before = found.get(output, (0.0, 0.0))
            largest = float(np.max(np.abs(given - exact), initial=0.0))
            found[output] = max(before[0], relative_error(given, exact)), max(before[1], largest)
    return found


@dataclass(frozen=True)
class _Few:
    """Eager's errors of outputs of few numbers, which on ordinary inputs are draws of one kind: case, output, relative
    error, absolute error, largest number."""

    found: list[tuple[Case, str, float, float, float]]

    def add(self, case: Case, eager: Mapping[str, Array], truth: Mapping[str, Array]) -> None:
        for output, value in eager.items():
            finite = np.isfinite(value) & np.isfinite(truth[output])
            given, exact = value[finite].astype(np.float64), truth[output][finite]
            if 0 < exact.size < FEW:
                off, largest = np.max(np.abs(given - exact)), np.max(np.abs(exact))
                self.found.append((case, output, relative_error(given, exact), float(off), float(largest)))

    def spread(self) -> None:
        """Let every case have at least the largest of the ordinary ones."""
        for case, output, *_, largest in self.found:
            same = [one for one in self.found if one[1] == output and one[0].is_ordinary]
            error = max((one[2] for one in same), default=0.0)
            share = max((one[3] / (one[4] or 1) for one in same), default=0.0)
            drawn, off = case.spread.get(output, (0.0, 0.0))
            case.spread = {**case.spread, output: (max(drawn, error), max(off, largest * share))}


def at_precision(inputs: Mapping[str, Array], precision: Precision) -> dict[str, Array]:
    """Inputs at another precision."""
    with np.errstate(over="ignore"):
        return {name: a.astype(precision.dtype) if is_floating(a) else a for name, a in inputs.items()}


def _neighbours(array: Array, rng: np.random.Generator) -> Array:
    """Each number replaced by the next larger or smaller one of its dtype, or left, at random; zeros are left."""
    toward = np.array([-np.inf, np.inf], array.dtype)[rng.integers(0, 2, array.shape)]
    moved = np.nextafter(array, toward, dtype=array.dtype)
    keep = ~np.isfinite(moved) | (array == 0) | (rng.random(array.shape) < 1 / 3)
    return np.where(keep, array, moved)


MARGIN = 16
"""How far below what the model bears in eager its extremes are: another order of the same sums overflows sooner."""


def _borne(case: Case, source: ReferenceModel) -> float:
    """How large the extremes may be, relative to the largest number of the inputs' dtype, for eager to be right; where
    it overflows on the way, what comes out depends on the order of its sums, and says nothing about a backend."""
    largest = _limits(source, "max")
    scale, step = source.precision.largest / largest, 4.0 if source.precision.largest < 1e5 else 256.0
    while scale * largest > 1:
        inputs = reference.make_inputs(case.model_copy(update={"scale": scale}), source.inputs, {})
        eager, truth = source.eager(at_precision(inputs, source.precision)), source.exact(inputs)
        if all(_sound(value, truth[output], source.precision) for output, value in eager.items()):
            return scale / MARGIN
        scale /= step
    return scale


def _limits(source: ReferenceModel, which: str) -> float:
    """A limit of the inputs' floating-point dtype."""
    dtype = next(spec.dtype for spec in source.inputs if "float" in spec.dtype)
    return float(getattr(ml_dtypes.finfo(dtype), which))  # type: ignore[no-untyped-call]


def _overflows(eager: Mapping[str, Array], truth: Mapping[str, Array], source: ReferenceModel) -> bool:
    largest = source.precision.largest
    return any(
        not np.isfinite(value[np.isfinite(truth[output]) & (np.abs(truth[output]) <= largest)]).all()
        for output, value in eager.items()
    )


def _sound(eager: Array, truth: Array, precision: Precision) -> bool:
    finite = np.isfinite(truth) & (np.abs(truth) <= precision.largest)
    return bool(np.isfinite(eager[finite]).all()) and (
        relative_error(eager[finite].astype(np.float64), truth[finite]) <= FAR_OFF * precision.floor
    )
