"""The possible findings of a diagnosis, and the finders that look for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import onnx_ir as ir

from attnforge.bundle import OPENVINO, Bundle, Manifest
from attnforge.export.diagnosis.causes import first_cause, out_of_range
from attnforge.export.diagnosis.deployed import stored_low
from attnforge.export.diagnosis.quantised import costliest_step, saturated_on
from attnforge.export.diagnosis.rewrites import Parting, write_reproduction
from attnforge.export.diagnosis.trace import COSTS, Finding, Trace
from attnforge.numbers import scientific
from attnforge.precision import precision_named

WORSE = 8.0
"""Factor by which the error of a backend's tensor, or of another eager, must exceed eager's to be wrong."""


@dataclass(frozen=True)
class Examination:
    """The input of the finders: one case of a bundle, run in every way.

    Attributes:
        bundle: the bundle.
        parting: where two graphs of the bundle diverge in float64; None if all are one function.
        trace: the canonical graph, tensor by tensor.
        failing: names of the backends that fail verification.
        on_backends: the relative errors of each backend's own tensors, by backend.
        eager_error: the error of the eager that the bundle was checked against; None if eager is not finite.
        export_error: the same for the canonical graph in float64, which is an error of the export.
        folder: folder for files that reproduce a finding.
        quantised: the canonical graph with weights as they are stored; None if nothing is quantised.
    """

    bundle: Bundle
    parting: Parting | None
    trace: Trace
    failing: list[str]
    on_backends: Mapping[str, Mapping[str, float]]
    eager_error: float | None
    export_error: float | None
    folder: Path
    quantised: ir.Model | None = None

    @cached_property
    def of_precision(self) -> Finding:
        """The effect of the precision on the model as written; it may be only its cost."""
        if (quantised := self.bundle.manifest.quantised) is not None:
            return out_of_range(self.trace) or costliest_step(self.trace, quantised)
        return first_cause(self.trace)


def first_finding(examination: Examination) -> Finding:
    """The finding of the first finder that has one; otherwise the cost of the precision."""
    return (
        _recorded(examination)
        or _wrong_rewrite(examination)
        or _wrong_backend(examination)
        or (None if examination.of_precision.cause in COSTS else examination.of_precision)
        or _wrong_export(examination)
        or another_reference(examination.trace.error, examination.eager_error, examination.bundle.manifest)
        or examination.of_precision
    )


def _recorded(examination: Examination) -> Finding | None:
    """The problem of the export that the deploy, which had the module, found."""
    wrong = examination.bundle.manifest.wrong
    return Finding.model_validate(wrong.model_dump()) if wrong is not None and wrong.cause == "export" else None


def _wrong_rewrite(examination: Examination) -> Finding | None:
    """A graph that differs from the function that it was made from."""
    parting = examination.parting
    if parting is None:
        return None
    files = write_reproduction(parting, examination.trace.feeds, examination.folder)
    return parting.finding.model_copy(update={"reproduction": [str(file) for file in files]})


def _wrong_backend(examination: Examination) -> Finding | None:
    """The first tensor whose error on a failing backend is much larger than that of eager at the bundle's precision."""
    manifest = examination.bundle.manifest
    precision, quantised = precision_named(manifest.precision), manifest.quantised
    for backend in examination.failing:
        errors = examination.on_backends.get(backend, {})
        if examination.quantised is not None:
            saturated = saturated_on(examination.quantised, examination.trace, errors)
            if saturated is not None:
                return Finding.at(saturated[0], "saturation", f"{backend} computes {saturated[1]}", stage=backend)
        for tensor in examination.trace.tensors:
            if errors.get(tensor.name, 0.0) <= max(WORSE * tensor.error, WORSE * precision.unit):
                continue
            low = stored_low(examination.bundle, backend, tensor.name)
            stored = f"; before that it is stored in {low.lower()}" if low is not None and not precision.is_low else ""
            rounds = backend == OPENVINO and quantised is not None and bool(quantised.scores)
            graphs = (
                "and its graph rounds queries and keys" if rounds else "although the graphs are one function in float64"
            )
            evidence = (
                f"{backend} computes {tensor.name} {scientific(errors[tensor.name])} off float64, where eager at "
                f"{precision.name} is {scientific(tensor.error)} off, {graphs}{stored}"
            )
            return Finding.at(tensor, "operator", evidence, stage=backend)
    return None


def _wrong_export(examination: Examination) -> Finding | None:
    """A graph that differs from its module's function in float64."""
    manifest, error, eager = examination.bundle.manifest, examination.export_error, examination.eager_error
    if error is None or eager is None or manifest.quantised is not None:
        return None
    if error <= max(2 * eager, precision_named(manifest.precision).floor):
        return None
    return Finding(
        cause="export",
        stage="canonical",
        evidence=f"in float64, the exported graph is {scientific(error)} off {manifest.reference}, where eager at "
        f"{manifest.precision} is {scientific(eager)} off: the exporter wrote a different function; deploy the model "
        "again to find out where",
    )


def another_reference(error: float, eager_error: float | None, manifest: Manifest) -> Finding | None:
    """A finding if the eager that the bundle was checked against has an error that its graph cannot have.

    Args:
        error: relative error of the graph at the bundle's precision.
        eager_error: the same for the eager that the bundle was checked against; None if it is not known.
        manifest: the bundle's manifest.
    """
    floor = precision_named(manifest.precision).floor
    is_of_parts = manifest.mixed is not None or manifest.quantised is not None  # the graph has no single precision
    if eager_error is None or is_of_parts or eager_error <= max(WORSE * error, floor):
        return None
    return Finding(
        cause="reference",
        evidence=f"the exported graph is {scientific(error)} off its float64 at {manifest.precision}, and "
        f"{manifest.reference} was {scientific(eager_error)} off its own: one of the two computes something else, so "
        "budgets are too wide",
    )
