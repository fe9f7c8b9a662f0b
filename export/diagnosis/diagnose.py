"""A bundle examined: first whether its graphs are one function, then which tensor loses what its precision cannot hold.

Nothing but the bundle is needed. Eager is the exported graph run operator by operator on ONNX Runtime's CPU, each
result stored in the bundle's precision; that it is the eager that the bundle was held against is checked on the way.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from attnforge.arrays import Array
from attnforge.bundle import REFERENCE_OUTPUTS, Bundle, Case, Manifest
from attnforge.errors import UnavailableError, UnknownNameError, first_line
from attnforge.export.diagnosis.causes import Blame, Cause, blame, error_of
from attnforge.export.diagnosis.deployed import stored_low, tensors_on
from attnforge.export.diagnosis.measure import Measured, Run, measure
from attnforge.export.diagnosis.rewrites import first_parting, write_reproduction
from attnforge.export.diagnosis.stages import line_of, module_of, stages
from attnforge.export.graphs.float64 import NoDoublePath
from attnforge.precision import precision_named
from attnforge.records import Record
from attnforge.runtime import cases as reference
from attnforge.runtime.parity.budget import relative_error
from attnforge.runtime.parity.verify import BackendReport, stored_inputs, verify

SHOWN = 12
"""Tensors that a diagnosis lists, those that make errors largest."""

LARGE = 2**22
"""Numbers of inputs above which another case is examined, where there is one that tells as much."""


class TensorReport(Record):
    """A tensor and its relative errors; see :mod:`attnforge.export.diagnosis.measure`. None for what is not finite.
    `deployed` has those of the backends that ran it, where their graphs have the tensor."""

    tensor: str
    operator: str
    module: str
    line: str | None
    largest: float
    error: float | None
    error_in: float | None
    explained: float | None
    own: float | None
    amplification: float | None
    deployed: dict[str, float | None] = {}


class Finding(Record):
    """Where a deployment first goes wrong, and why.

    Attributes:
        cause: `rewrite`: a graph is another function than the one that it was made from; else what the precision does:
            `overflow`, `underflow`, `norm` (of the squares in a norm), `cancellation`, `softmax` (of scores so large
            that their rounding decides), `conditioning` (of a function that is steep there),
            `accumulation`, `operator` (an operator computes something else), `reference` (what the bundle was held
            against is not this graph), or `rounding`: nothing but what the precision costs.
        stage: the graph or the backend that it is in; `eager` for what the precision does to the model as written.
        tensor, operator, module, line: where; None where it is no single tensor's doing.
        evidence: the numbers that prove it.
        error_without: the final error where this tensor alone is exact.
        rule: of a rewrite, what was rewritten.
        reproduction: files that show it.
    """

    cause: Cause
    stage: str
    evidence: str
    tensor: str | None = None
    operator: str | None = None
    module: str | None = None
    line: str | None = None
    error_without: float | None = None
    rule: str | None = None
    reproduction: list[str] = []

    def text(self) -> str:
        where = f" at {self.module}, {self.operator} {self.tensor}" if self.tensor else ""
        return f"{self.cause}{where}: {self.evidence}"


class Diagnosis(Record):
    """What :func:`diagnose` found.

    Attributes:
        case: that was examined, and why this one.
        failing: backends that fail verification.
        error: the final relative error of eager at the bundle's precision, emulated.
        eager_error: the same of the eager that the bundle was held against.
        same_function: pairs of graphs that are one function in float64.
        tensors: those that make errors largest.
        examined: how many tensors were looked at.
        not_traced: backends whose own tensors could not be looked at, and why.
    """

    bundle: str
    name: str
    precision: str
    case: str
    why: str
    failing: list[str]
    finding: Finding
    error: float | None
    eager_error: float | None
    same_function: list[str]
    tensors: list[TensorReport]
    examined: int
    not_traced: dict[str, str] = {}

    @property
    def healthy(self) -> bool:
        """Whether every backend passes, the graphs are one function, and nothing is to blame but rounding."""
        return not self.failing and self.finding.cause == "rounding"


def diagnose(
    bundle: str | os.PathLike[str] | Bundle,
    backends: Sequence[str] | None = None,
    *,
    case: str | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Diagnosis:
    """Say where a deployment first goes wrong, and why; of one that does not, what its precision costs most.

    Args:
        bundle: its folder.
        backends: to verify first, by default all that can run here.
        case: to examine; by default the one that fails, or is nearest to its budget.
        out: folder for the files that reproduce a wrong rewrite; by default `BUNDLE.diagnosis` beside the bundle.

    Raises:
        BundleError: no whole, unaltered bundle is there.
        UnknownNameError: no such backend or case.
        UnavailableError: an operator of the model is not computed in float64 here.
    """
    opened = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
    manifest = opened.manifest
    report = verify(opened, backends)
    failing = [name for name, one in report.backends.items() if not one.passed]
    chosen, why = _choose(manifest.cases, list(report.backends.values()), case)
    feeds = reference.make_inputs(chosen, manifest.inputs, stored_inputs(opened))
    graphs = stages(opened)
    analysed = next(stage.model for stage in graphs if stage.name == "canonical")
    folder = Path(out) if out is not None else opened.path.with_name(f"{opened.path.name}.diagnosis")
    try:
        parting = first_parting(graphs, feeds, manifest.attention)
        run = measure(analysed, feeds)
    except NoDoublePath as error:
        raise UnavailableError(f"{manifest.name} cannot be examined: {error} is not computed in float64") from error
    if parting is not None:
        files = write_reproduction(parting, feeds, folder)
        finding = Finding(
            cause="rewrite",
            stage=parting.after.name,
            evidence=f"in float64, {parting.tensor} of the {parting.after.name} graph is {parting.difference:.1e} off "
            f"the {parting.before.name} graph's, of the same inputs: {parting.rule}",
            tensor=parting.tensor,
            operator=_operator(parting.after.model, parting.tensor),
            module=parting.module,
            rule=parting.rule,
            reproduction=[str(file) for file in files],
        )
    else:
        finding = _finding(blame(analysed, run, feeds))
    on_backends, not_traced = _on_backends(opened, list(report.backends), feeds, run)
    if parting is None and (wrong := _of_a_backend(opened, failing, on_backends, run)) is not None:
        finding = wrong
    eager_error = _eager_error(opened, chosen)
    if finding.cause == "rounding" and (other := _of_another(run.error, eager_error, manifest)) is not None:
        finding = other
    names = [stage.name for stage in graphs]
    return Diagnosis(
        bundle=str(opened.path),
        name=manifest.name,
        precision=manifest.precision,
        case=chosen.name,
        why=why,
        failing=failing,
        finding=finding,
        error=_finite(run.error),
        eager_error=eager_error,
        same_function=names if parting is None else names[: names.index(parting.after.name)],
        tensors=[_reported(one, on_backends) for one in _telling(run, finding.tensor)],
        not_traced=not_traced,
        examined=len(run.tensors),
    )


def _choose(cases: Sequence[Case], reports: Sequence[BackendReport], named: str | None) -> tuple[Case, str]:
    by_name = {case.name: case for case in cases}
    if named is not None:
        if named not in by_name:
            raise UnknownNameError("case", named, by_name)
        return by_name[named], "asked for"
    found = [c for report in reports for c in report.comparisons]
    small = {c.case for c in found if c.compared <= LARGE} or set(by_name)
    if failing := [c for c in found if not c.passed]:
        ordinary = [c for c in failing if by_name[c.case].is_ordinary and c.case in small] or failing
        worst = max(ordinary, key=lambda c: c.error / c.budget)
        return by_name[worst.case], f"it fails: {worst.reason}"
    ordinary = [c for c in found if by_name[c.case].is_ordinary and c.case in small] or found
    if not ordinary:
        return cases[0], "no backend ran"
    worst = max(ordinary, key=lambda c: (c.overflowed, c.eager_error))
    if worst.overflowed:
        return by_name[worst.case], f"eager overflows at {worst.overflowed} places"
    return by_name[worst.case], f"nothing fails, and eager errs most here: {worst.eager_error:.1e}"


def _finding(found: Blame) -> Finding:
    one = found.measured
    if one is None:
        return Finding(cause=found.cause, stage="eager", evidence=found.evidence)
    return Finding(
        cause=found.cause,
        stage="eager",
        evidence=found.evidence,
        tensor=one.name,
        operator=one.node.op_type,
        module=module_of(one.node),
        line=line_of(one.node),
        error_without=_finite(found.error_without),
    )


def _operator(model: object, tensor: str) -> str | None:
    return next((n.op_type for n in model.graph for v in n.outputs if v.name == tensor), None)  # type: ignore[attr-defined]


def _of_another(error: float, eager_error: float | None, manifest: Manifest) -> Finding | None:
    """That the eager which the bundle was held against errs as this graph cannot."""
    floor = precision_named(manifest.precision).floor
    if eager_error is None or manifest.mixed is not None or eager_error <= max(WORSE * error, floor):
        return None
    return Finding(
        cause="reference",
        stage="eager",
        evidence=f"the exported graph is {error:.1e} off its float64 at {manifest.precision}, and {manifest.reference} "
        f"was {eager_error:.1e} off its own: one of these two computes something else, so budgets are too wide",
    )


def _eager_error(bundle: Bundle, case: Case) -> float | None:
    stored = load_file(bundle.file(REFERENCE_OUTPUTS))
    errors = []
    for spec in bundle.manifest.outputs:
        eager, truth = (stored[reference.key(case, spec.name, which)] for which in ("eager", "float64"))
        finite = np.isfinite(truth)
        if not np.isfinite(eager[finite]).all():
            return None
        errors.append(relative_error(eager[finite].astype(np.float64), truth[finite]))
    return max(errors, default=None)


def _telling(run: Run, blamed: str | None) -> list[Measured]:
    """The tensors that say most, in the order of the graph: the one that is to blame, the first where numbers are lost,
    and those where errors are made larger."""
    lost = [m for m in run.tensors if m.lost][: SHOWN // 2]
    larger = sorted((m for m in run.tensors if not m.lost), key=lambda m: m.error_in - m.explained)
    chosen = [name for name in dict.fromkeys([blamed, *(m.name for m in [*lost, *larger])]) if name is not None][:SHOWN]
    return [m for m in run.tensors if m.name in chosen]


def _on_backends(
    bundle: Bundle, backends: Sequence[str], feeds: Mapping[str, Array], run: Run
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """By backend the relative errors of its own tensors; and why of some there are none."""
    found: dict[str, dict[str, float]] = {}
    reasons: dict[str, str] = {}
    for backend in backends:
        try:
            tensors = tensors_on(bundle, backend, feeds, list(run.exact))
        except Exception as error:  # a builder that takes no such outputs must not cost the rest of the diagnosis
            reasons[backend] = first_line(error)
            continue
        found[backend] = {
            name: error_of(got, run.exact[name]) for name, got in tensors.items() if got.shape == run.exact[name].shape
        }
    return found, reasons


def _of_a_backend(
    bundle: Bundle, failing: Sequence[str], on_backends: Mapping[str, Mapping[str, float]], run: Run
) -> Finding | None:
    """The first tensor that a failing backend computes much worse than eager at the bundle's precision does."""
    precision = precision_named(bundle.manifest.precision)
    for backend in failing:
        errors = on_backends.get(backend, {})
        for one in run.tensors:
            if errors.get(one.name, 0.0) <= max(WORSE * one.error, WORSE * precision.unit):
                continue
            low = stored_low(bundle, backend, one.name)
            stored = f"; on its way it is stored in {low.lower()}" if low is not None and not precision.is_low else ""
            return Finding(
                cause="operator",
                stage=backend,
                evidence=f"{backend} computes {one.name} {errors[one.name]:.1e} off float64, where eager at "
                f"{precision.name} is {one.error:.1e} off, though the graphs are one function in float64{stored}",
                tensor=one.name,
                operator=one.node.op_type,
                module=module_of(one.node),
                line=line_of(one.node),
            )
    return None


WORSE = 8.0
"""How many times eager's error a backend's tensor must have to be the one that it computes wrong."""


def _reported(one: Measured, on_backends: Mapping[str, Mapping[str, float]]) -> TensorReport:
    return TensorReport(
        tensor=one.name,
        operator=one.node.op_type,
        module=module_of(one.node),
        line=line_of(one.node),
        largest=one.largest,
        error=_finite(one.error),
        error_in=_finite(one.error_in),
        explained=_finite(one.explained),
        own=_finite(one.own),
        amplification=_finite(one.amplification),
        deployed={name: _finite(errors[one.name]) for name, errors in on_backends.items() if one.name in errors},
    )


def _finite(number: float | None) -> float | None:
    return None if number is None or not np.isfinite(number) else float(number)
