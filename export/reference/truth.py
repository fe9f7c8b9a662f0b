"""The outputs that a deployed model is verified against: its source's, at the bundle's precision and in float64, for
every reference case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from safetensors.numpy import save_file

from attnforge.arrays import BFLOAT16, Array, is_floating
from attnforge.bundle import REFERENCE_EXAMPLE, REFERENCE_OUTPUTS, Case, DimSpec, TensorSpec
from attnforge.errors import CaptureError
from attnforge.export.expected_caches import ExpectedCaches
from attnforge.export.flops import run_cost
from attnforge.export.reference.model import ReferenceModel, at_precision
from attnforge.export.reference.scale import Evaluator
from attnforge.export.reference.spread import Spreads
from attnforge.precision import Precision, precision_named
from attnforge.progress import Progress, Steps
from attnforge.runtime import cases as reference
from attnforge.runtime.inputs import shapes_of
from attnforge.runtime.parity.budget import LEAST_DRAWS, SWAPPED, relative_error

SAME = 16 * precision_named("fp32").floor
"""Error that eager may have against itself on one input: its kernels may add in another order the next time."""


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

    Raises:
        CaptureError: eager refuses the inputs of a case, or does not compute the same whenever it runs.
    """
    cost = run_cost(graph)
    stored, cases = inputs_and_cases(model, data or Data(), cost)
    if caches is not None:
        cases += _whole_cache(model.inputs[0], caches.capacity, len(cases))
    low = model.at(attention) if attention is not None else None
    outputs: dict[str, Array] = {}
    evaluator, spreads = Evaluator(model, low, stored), Spreads(model, low or model)
    for_draws = _left(cases, cost)
    steps = Steps(progress, sum(cost(case.sizes) for case in cases) + for_draws)
    for case in sorted(cases, key=lambda case: case.name != reference.LARGEST):  # it needs memory before results do
        steps.begin(case.name, cost(case.sizes))
        try:
            results = evaluator.results(case)
        except CaptureError as error:
            evaluator.results(cases[0])  # raises where the module does not run on the example either
            if case.kind == "data":
                raise
            raise CaptureError(
                f"{error}; the inputs of case {case.name} are random, and a model must accept all of its dtypes "
                "and sizes: leave checks of data out of forward, and sizes that it does not take out of its Dims"
            ) from error
        if results is None:
            cases.remove(case)
            continue
        inputs, eager, exact = results
        outputs |= _sampled(case, eager, "eager") | _sampled(case, exact, "float64")
        baseline = eager
        if low is not None:
            baseline = low.eager(at_precision(inputs, low.precision))
            outputs |= _sampled(case, baseline, low.precision.name)
        spreads.add(case, eager, exact, baseline)
    if caches is not None:
        steps.begin("keys and values of caches")
        outputs |= _expected_caches(caches, model, cases, stored)
    spreads.pool()
    spreads.draw(stored, for_draws, cost, steps)
    _check_same(model, cases[0], stored, outputs)
    (folder / "reference").mkdir()
    save_file(outputs, folder / REFERENCE_OUTPUTS)
    # contiguous, and bfloat16 as float32, because safetensors does not know NumPy's
    known = {name: a.astype(np.float32) if a.dtype == BFLOAT16 else a for name, a in stored.items()}
    save_file({name: np.asarray(array, order="C") for name, array in known.items()}, folder / REFERENCE_EXAMPLE)
    return cases


def _check_same(
    model: ReferenceModel, example: Case, stored: Mapping[str, Array], outputs: Mapping[str, Array]
) -> None:
    """Check that eager computes of the example what it did before all other cases. If it does not, neither are its
    errors on these, which set the budgets, those of one function.

    Raises:
        CaptureError: it does not.
    """
    for name, array in model.eager(reference.make_inputs(example, model.inputs, stored)).items():
        for key, again in kept(array, example, reference.key(example, name, "eager")).items():
            if not _is_same(outputs[key], again, max(SAME, model.precision.floor)):
                raise CaptureError(
                    f"{model.reference} returns a different {name} after other inputs than before them: it draws "
                    "random numbers or keeps state between calls; disable dropout outside training"
                )


def _is_same(first: Array, last: Array, error: float) -> bool:
    """Whether two answers are the same up to an error, or of whole numbers, up to what near ties may swap."""
    if first.shape != last.shape:
        return False
    if not is_floating(first):
        return int(np.count_nonzero(first != last)) <= SWAPPED
    seen = np.isfinite(first) & np.isfinite(last)
    others = np.array_equal(first[~seen], last[~seen], equal_nan=True)
    return others and relative_error(last[seen].astype(np.float64), first[seen].astype(np.float64)) <= error


def _expected_caches(
    caches: ExpectedCaches, model: ReferenceModel, cases: Sequence[Case], stored: Mapping[str, Array]
) -> dict[str, Array]:
    """The stored arrays of a decoder's caches, whose errors are added to the spreads of their cases."""
    arrays = {reference.scale_key(name): scale for name, scale in caches.scales.items()}
    stepped = {case.name: case for case in cases if case.name in reference.STEPPED}
    inputs = {name: reference.make_inputs(case, model.inputs, stored) for name, case in stepped.items()}
    spreads = Spreads(model, model)
    for name, (eager, exact) in caches.computed(inputs).items():
        case = stepped[name]
        case.caches = True
        arrays |= _sampled(case, eager, "eager") | _sampled(case, exact, "float64")
        spreads.add(case, eager, exact, eager)
    spreads.pool()
    return arrays


def inputs_and_cases(model: ReferenceModel, data: Data, cost: reference.Cost) -> tuple[dict[str, Array], list[Case]]:
    """The inputs that the bundle stores (the example, and real data with its labels), and all cases.

    Args:
        model: the model.
        data: real inputs.
        cost: the cost of a run.
    """
    stored, cases = dict(model.example), reference.cases(model.inputs, cost)
    for i, inputs in enumerate(data.inputs):
        shapes = shapes_of(model.inputs, (), *((array.shape, array.dtype) for array in inputs.values()))
        case = Case(name=f"data-{i}", sizes=dict(shapes.sizes), kind="data", seed=len(cases))
        cases.append(case)
        stored |= {reference.data_key(case, name): array for name, array in inputs.items()}
        if data.labels:
            stored[reference.labels_key(case)] = data.labels[i]
    return stored, cases


def _whole_cache(tokens: TensorSpec, capacity: int, seed: int) -> list[Case]:
    """The case of one sample that fills a decoder's caches; none if a call may have as many tokens."""
    batch, count, *_ = tokens.dims
    assert isinstance(count, DimSpec)
    if count.max == capacity:
        return []
    sizes = {count.symbol: capacity} | ({batch.symbol: 1} if isinstance(batch, DimSpec) else {})
    return [Case(name=reference.WHOLE_CACHE, sizes=sizes, kind="normal", seed=seed)]


def _left(cases: Sequence[Case], cost: reference.Cost) -> float:
    """Floating-point operations that are left for draws after every case has run once, not counting real data and the
    largest sizes; at least as many as :data:`LEAST_DRAWS` runs take."""
    run = reference.run_of_example(cases[0].sizes, cost)
    seeded = [case for case in cases if case.kind != "data" and case.name != reference.LARGEST]
    return max(reference.PASSES * run - sum(cost(case.sizes) for case in seeded), LEAST_DRAWS * run)


def _sampled(case: Case, outputs: Mapping[str, Array], which: str) -> dict[str, Array]:
    """The stored arrays of all outputs of a case, by key."""
    arrays: dict[str, Array] = {}
    for output, array in outputs.items():
        arrays |= kept(array, case, reference.key(case, output, which))
    return arrays


def kept(array: Array, case: Case, name: str) -> dict[str, Array]:
    """The stored arrays of one output: all of it under `name`, or sampled elements and block sums."""
    sums = reference.blocks(array, case)
    numbers = {name: np.ascontiguousarray(reference.sampled(array, case))}
    return numbers if sums is None else {**numbers, name + reference.BLOCKS: sums}
