"""What a diagnosis may find, and the finders that look for it.

:data:`FINDERS` are asked in turn; the first that finds something is right, and the last always does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.bundle import OPENVINO, Bundle, Manifest, Wrong
from attnforge.export.diagnosis.causes import COSTS, Blame, Cause, blame, out_of_range
from attnforge.export.diagnosis.deployed import stored_low
from attnforge.export.diagnosis.quantised import blame_step, saturated_on
from attnforge.export.diagnosis.rewrites import Parting, write_reproduction
from attnforge.export.diagnosis.stages import line_of, module_of
from attnforge.export.diagnosis.trace import TensorErrors, Trace
from attnforge.export.graphs.parts import values_of
from attnforge.numbers import scientific
from attnforge.precision import precision_named

WORSE = 8.0
"""How many times eager's error a backend's tensor, or an eager of another kind, must have to be wrong."""


class Finding(Wrong):
    """Where a deployment first goes wrong, and why.

    Attributes:
        cause: `export`: the graph is another function than the module; `rewrite`: a graph is another function than the
            one that it was made from; else what the precision does:
            `overflow`, `underflow`, `norm` (of the squares in a norm), `cancellation`, `softmax` (of scores so large
            that their rounding decides), `conditioning` (of a function that is steep there),
            `accumulation`, `clipping` (of numbers beyond a quantised range), `outlier channel` (that takes a range),
            `operator` (an operator computes something else), `saturation` (of sums of 8-bit products, in a backend),
            `reference` (what the bundle was held against is not this graph), or `rounding` or `quantisation`: nothing
            but what the precision costs.
        stage: the graph or the backend that it is in; `eager` for what the precision does to the model as written.
        tensor, operator, module, line: where; None where it is not the doing of a single tensor.
        evidence: the numbers that prove it.
        error_without: the final error where this tensor alone is exact.
        rule: of a rewrite, what was rewritten.
        reproduction: files that show it.
    """

    cause: Cause
    error_without: float | None = None
    rule: str | None = None
    reproduction: list[str] = []


@dataclass(frozen=True)
class Examination:
    """What the finders look at: one case of a bundle, run in every way.

    Attributes:
        bundle: the bundle.
        feeds: inputs of the case by name.
        parting: where two graphs of the bundle part in float64; None where all are one function.
        trace: the canonical graph, tensor by tensor.
        failing: names of the backends that fail verification.
        on_backends: by backend the relative errors of its own tensors.
        eager_error: the error of the eager that the bundle was held against; None where eager is not finite.
        export_error: the same of the canonical graph in float64, which is an error of the export.
        folder: for files that reproduce a finding.
        quantised: the canonical graph with weights as they are stored; None where nothing is quantised.
    """

    bundle: Bundle
    feeds: Mapping[str, Array]
    parting: Parting | None
    trace: Trace
    failing: Sequence[str]
    on_backends: Mapping[str, Mapping[str, float]]
    eager_error: float | None
    export_error: float | None
    folder: Path
    quantised: ir.Model | None = None

    @cached_property
    def blame(self) -> Blame:
        """What the precision does to the model as written."""
        if (quantised := self.bundle.manifest.quantised) is not None:
            return out_of_range(self.trace) or blame_step(self.trace, quantised)
        return blame(self.trace)


def first_finding(examination: Examination) -> Finding:
    """The finding of the first finder that has one."""
    return next(finding for find in FINDERS if (finding := find(examination)) is not None)


def _recorded(examination: Examination) -> Finding | None:
    """What the deploy found to be wrong with the export, which had the module."""
    wrong = examination.bundle.manifest.wrong
    return Finding.model_validate(wrong.model_dump()) if wrong is not None and wrong.cause == "export" else None


def _wrong_rewrite(examination: Examination) -> Finding | None:
    """A graph that is not the function that it was made from."""
    parting = examination.parting
    if parting is None:
        return None
    node = values_of(parting.after.model)[parting.tensor].producer()
    return Finding(
        cause="rewrite",
        stage=parting.after.name,
        evidence=f"in float64, {parting.tensor} of the {parting.after.name} graph is {scientific(parting.difference)} "
        f"off the {parting.before.name} graph's, of the same inputs: {parting.rule}",
        tensor=parting.tensor,
        operator=node.op_type if node is not None else None,
        module=parting.module,
        rule=parting.rule,
        reproduction=[str(file) for file in write_reproduction(parting, examination.feeds, examination.folder)],
    )


def _wrong_backend(examination: Examination) -> Finding | None:
    """The first tensor that a failing backend computes much worse than eager at the bundle's precision does."""
    manifest = examination.bundle.manifest
    precision, quantised = precision_named(manifest.precision), manifest.quantised
    for backend in examination.failing:
        errors = examination.on_backends.get(backend, {})
        if examination.quantised is not None:
            saturated = saturated_on(examination.quantised, examination.trace, errors)
            if saturated is not None:
                return _at(saturated[0], "saturation", backend, f"{backend} computes {saturated[1]}")
        for tensor in examination.trace.tensors:
            if errors.get(tensor.name, 0.0) <= max(WORSE * tensor.error, WORSE * precision.unit):
                continue
            low = stored_low(examination.bundle, backend, tensor.name)
            stored = f"; on its way it is stored in {low.lower()}" if low is not None and not precision.is_low else ""
            rounds = backend == OPENVINO and quantised is not None and bool(quantised.scores)
            graphs = (
                "and its graph rounds queries and keys" if rounds else "though the graphs are one function in float64"
            )
            evidence = (
                f"{backend} computes {tensor.name} {scientific(errors[tensor.name])} off float64, where eager at "
                f"{precision.name} is {scientific(tensor.error)} off, {graphs}{stored}"
            )
            return _at(tensor, "operator", backend, evidence)
    return None


def _precision(examination: Examination) -> Finding | None:
    """What the precision does to the model, where that is more than rounding."""
    return _of_blame(examination.blame) if examination.blame.cause not in COSTS else None


def _wrong_export(examination: Examination) -> Finding | None:
    """A graph that in float64 is not the function of its module."""
    manifest, error, eager = examination.bundle.manifest, examination.export_error, examination.eager_error
    if error is None or eager is None or manifest.quantised is not None:
        return None
    if error <= max(2 * eager, precision_named(manifest.precision).floor):
        return None
    return Finding(
        cause="export",
        stage="canonical",
        evidence=f"in float64, the exported graph is {scientific(error)} off {manifest.reference}, where eager at "
        f"{manifest.precision} is {scientific(eager)} off: the exporter wrote another function; deploy the model again "
        "to be told where",
    )


def _wrong_reference(examination: Examination) -> Finding | None:
    return another_reference(examination.trace.error, examination.eager_error, examination.bundle.manifest)


def another_reference(error: float, eager_error: float | None, manifest: Manifest) -> Finding | None:
    """That the eager which the bundle was held against errs as its graph cannot.

    Args:
        error: relative error of the graph at the bundle's precision.
        eager_error: the same of the eager that the bundle was held against; None where it is not known.
        manifest: of the bundle.
    """
    floor = precision_named(manifest.precision).floor
    is_of_parts = manifest.mixed is not None or manifest.quantised is not None  # whose graph has no single precision
    if eager_error is None or is_of_parts or eager_error <= max(WORSE * error, floor):
        return None
    return Finding(
        cause="reference",
        stage="eager",
        evidence=f"the exported graph is {scientific(error)} off its float64 at {manifest.precision}, and "
        f"{manifest.reference} was {scientific(eager_error)} off its own: one of these two computes something else, so "
        "budgets are too wide",
    )


def _rounding(examination: Examination) -> Finding:
    return _of_blame(examination.blame)


def _of_blame(blame: Blame) -> Finding:
    if blame.tensor is None:
        return Finding(cause=blame.cause, stage="eager", evidence=blame.evidence)
    finding = _at(blame.tensor, blame.cause, "eager", blame.evidence, finite(blame.error_without))
    return finding if blame.module is None else finding.model_copy(update={"module": blame.module})


def _at(tensor: TensorErrors, cause: Cause, stage: str, evidence: str, error_without: float | None = None) -> Finding:
    return Finding(
        cause=cause,
        stage=stage,
        evidence=evidence,
        tensor=tensor.name,
        operator=tensor.node.op_type,
        module=module_of(tensor.node),
        line=line_of(tensor.node),
        error_without=error_without,
    )


def finite(number: float | None) -> float | None:
    """A finite number, else None, which JSON can hold."""
    return None if number is None or not np.isfinite(number) else float(number)


Finder = Callable[[Examination], Finding | None]

FINDERS: tuple[Finder, ...] = (
    _recorded, _wrong_rewrite, _wrong_backend, _precision, _wrong_export, _wrong_reference, _rounding,
)  # fmt: skip
"""Asked in this order."""
