"""Diagnose a bundle: first whether its graphs are one function, then which tensor loses what its precision cannot
represent.

Only the bundle is needed. Eager is the exported graph run operator by operator on ONNX Runtime's CPU, each result
stored at the bundle's precision; whether that is the eager that the bundle was checked against is checked too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from attnforge.bundle import REFERENCE_OUTPUTS, Bundle, Case, Quantised, Trusted, open_bundle, used
from attnforge.errors import BundleError, UnavailableError, UnknownNameError, first_line
from attnforge.export.diagnosis.deployed import step_inputs, step_tensors_on, tensors_on
from attnforge.export.diagnosis.findings import Examination, first_finding
from attnforge.export.diagnosis.quantised import unrounded, with_weights
from attnforge.export.diagnosis.rewrites import first_parting
from attnforge.export.diagnosis.stages import line_of, module_of, stages
from attnforge.export.diagnosis.trace import COSTS, Finding, TensorErrors, Trace, error_of, finite, trace
from attnforge.export.graphs.execute import Tensors
from attnforge.export.graphs.float64 import NoDoublePath
from attnforge.keywords import guessable
from attnforge.numbers import scientific
from attnforge.precision import precision_named
from attnforge.records import Record
from attnforge.runtime import cases as reference
from attnforge.runtime.parity.budget import FAR_OFF
from attnforge.runtime.parity.comparison import Comparison
from attnforge.runtime.parity.verify import BackendReport, stored_inputs, verify

SHOWN = 12
"""Maximum number of tensors that a diagnosis lists: those that amplify errors most."""

LARGE = 2**22
"""Number of input elements above which another case is examined, if one is as informative."""


class TensorReport(Record):
    """A tensor and its relative errors; see :class:`~attnforge.export.diagnosis.trace.TensorErrors`. None stands for a
    number that is not finite. `deployed` has the errors on the backends that ran it, if their graphs have the
    tensor."""

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


class Diagnosis(Record):
    """The result of :func:`diagnose`.

    Attributes:
        case, why: the case that was examined, and why this one.
        failing: backends that fail verification.
        error: the final relative error of eager at the bundle's precision, emulated; for a quantised bundle, the error
            that rounding the inputs of products adds to that of their weights.
        eager_error: the same for the eager that the bundle was checked against.
        same_function: names of the graphs that are one function in float64; a quantised bundle's are not compared.
        tensors: the tensors that amplify errors most.
        examined: how many tensors were examined.
        not_traced: backends whose own tensors could not be examined, and why.
        allowed: the relative error that quantising may cost; None if nothing is quantised.
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
    allowed: float | None = None

    def summary(self) -> str:
        """Return what was found, and where in the source."""
        return "\n".join(filter(None, (self.finding.text(), self.finding.line)))

    @property
    def healthy(self) -> bool:
        """Whether every backend passes, the graphs are one function, and nothing is to blame but rounding, or clipping
        whose error is within what quantising may cost."""
        if self.failing:
            return False
        if self.finding.cause != "clipping" or self.eager_error is None or self.allowed is None:
            return self.finding.cause in COSTS
        return self.eager_error <= self.allowed  # the gate only sees real data, and other cases may be far off


@guessable()
def diagnose(
    bundle: str | os.PathLike[str] | Bundle,
    backends: Sequence[str] | None = None,
    *,
    case: str | None = None,
    out: str | os.PathLike[str] | None = None,
    trusted: Trusted = None,
) -> Diagnosis:
    """Find where a deployment first goes wrong, and why; if nothing is wrong, what its precision costs most.

    Args:
        bundle: the bundle, or its folder.
        backends: backends to verify first, by default all that can run here.
        case: the case to examine; by default the one that fails, or that is nearest to its budget.
        out: folder for the files that reproduce a wrong rewrite; by default `BUNDLE.diagnosis` next to the bundle.
        trusted: public key files, one of which must have signed the bundle, as in :func:`attnforge.load`.

    Raises:
        BundleError: there is no complete, unaltered bundle.
        UnknownNameError: no such backend or case.
        UnavailableError: an operator of the model cannot be computed in float64 here.
    """
    opened = open_bundle(bundle, trusted=trusted)
    with used(opened.path, "diagnosed"):
        return _diagnosed(opened, backends, case, out)


def _diagnosed(
    opened: Bundle, backends: Sequence[str] | None, case: str | None, out: str | os.PathLike[str] | None
) -> Diagnosis:
    manifest = opened.manifest
    report = verify(opened, backends)
    chosen, why, position = _choose(manifest.cases, list(report.backends.values()), case)
    feeds = reference.make_inputs(chosen, manifest.inputs, stored_inputs(opened))
    graphs = stages(opened, of_step=position is not None)
    canonical = graphs["canonical"]
    is_quantised = manifest.quantised is not None
    try:
        if position is not None:
            feeds = step_inputs(opened, feeds, position)
        # Targets round what they quantise at different points, so graphs of one function differ where it is quantised.
        parting = None if is_quantised else first_parting(graphs, feeds, manifest.attention)
        # A quantised graph is compared with itself without rounding of products' inputs, both with stored weights.
        model = with_weights(canonical) if is_quantised else canonical
        traced = trace(model, feeds, exact_model=unrounded(model) if is_quantised else None)
    except NoDoublePath as error:
        raise UnavailableError(f"{manifest.name} cannot be examined: {error} cannot be computed in float64") from error
    tensors_of = tensors_on if position is None else step_tensors_on
    on_backends, not_traced = _on_backends(opened, list(report.backends), traced, tensors_of)
    examination = Examination(
        bundle=opened,
        parting=parting,
        trace=traced,
        failing=[name for name, of_backend in report.backends.items() if not of_backend.passed],
        on_backends=on_backends,
        eager_error=_error_against(opened, chosen) if position is None else None,
        export_error=_error_against(opened, chosen, traced) if position is None else None,
        folder=Path(out) if out is not None else opened.path.with_name(f"{opened.path.name}.diagnosis"),
        quantised=canonical if is_quantised else None,
    )
    finding = first_finding(examination)
    names = [] if is_quantised else [*graphs]
    return Diagnosis(
        bundle=str(opened.path),
        name=manifest.name,
        precision=manifest.precision,
        case=chosen.name,
        why=why,
        failing=examination.failing,
        finding=finding,
        error=finite(traced.error),
        eager_error=examination.eager_error,
        same_function=names if parting is None else names[: names.index(parting.finding.stage)],
        tensors=[_reported(tensor, on_backends) for tensor in _telling(traced, finding.tensor)],
        not_traced=not_traced,
        examined=len(traced.tensors),
        allowed=None if manifest.quantised is None else allowed_of(manifest.quantised),
    )


def allowed_of(quantised: Quantised) -> float:
    """The error that quantising may have: the one that was asked for or, if a metric decided, as many floors as for
    precisions."""
    return quantised.max_error or FAR_OFF * precision_named("int8").floor


class Subject(NamedTuple):
    """The subject of a diagnosis.

    Attributes:
        case: a case of the bundle.
        why: why this one.
        position: position of the token whose step is examined; None for whole sequences.
    """

    case: Case
    why: str
    position: int | None = None


def _choose(cases: Sequence[Case], reports: Sequence[BackendReport], named: str | None) -> Subject:
    """The case to examine, and why this one."""
    by_name = {case.name: case for case in cases}
    if named is not None:
        if named not in by_name:
            raise UnknownNameError("case", named, by_name)
        return Subject(by_name[named], "asked for")
    every = [c for report in reports for c in report.comparisons]
    comparisons = [c for c in every if c.schedule is None]
    failing = [c for c in comparisons if not c.passed]
    if not failing and (stepwise := [c for c in every if not c.passed]):
        return _at_a_step(stepwise, by_name)
    candidates = failing or comparisons
    small = {c.case for c in comparisons if c.compared <= LARGE} or set(by_name)
    ordinary = [c for c in candidates if by_name[c.case].is_ordinary and c.case in small] or candidates
    if not cases:
        raise BundleError("the bundle has no reference case to diagnose; deploy the model again")
    if not ordinary:
        return Subject(cases[0], "no backend ran")
    if failing:
        worst = max(ordinary, key=lambda c: c.error / c.budget)
        return Subject(by_name[worst.case], f"it fails: {worst.reason}")
    worst = max(ordinary, key=lambda c: (c.overflowed, c.eager_error))
    if worst.overflowed:
        return Subject(by_name[worst.case], f"eager overflows at {worst.overflowed} positions")
    return Subject(by_name[worst.case], f"nothing fails, and eager's error is largest: {scientific(worst.eager_error)}")


def _at_a_step(failing: Sequence[Comparison], by_name: Mapping[str, Case]) -> Subject:
    """The case to examine if a decoder fails only step by step, and the step with the largest error."""
    worst = max(failing, key=lambda c: c.error / c.budget)
    case = by_name.get(worst.case) or by_name.get(reference.LARGEST) or next(iter(by_name.values()))
    where, position = "", 1
    if worst.worst is not None and len(worst.worst.index) > 1:
        where = f" at token {worst.worst.index[1]} of sample {worst.worst.index[0]}"
        position = max(worst.worst.index[1], position)
    return Subject(case, f"the whole sequence is right, and {worst.where} fails{where}: {worst.reason}", position)


def _error_against(bundle: Bundle, case: Case, traced: Trace | None = None) -> float | None:
    """The largest relative error of an output of the eager that the bundle was checked against, or of a traced graph in
    float64; None if it is not finite."""
    stored = bundle.tensors(REFERENCE_OUTPUTS)
    errors = []
    for spec in bundle.manifest.outputs:
        got, truth = (stored[reference.key(case, spec.name, which)] for which in ("eager", "float64"))
        if traced is not None:
            if spec.name not in traced.exact:  # an output of integers
                continue
            got = reference.sampled(traced.exact[spec.name], case)
        errors.append(error_of(got, truth))
    return finite(max(errors, default=None))


def _on_backends(
    bundle: Bundle, backends: Sequence[str], traced: Trace, tensors_of: Callable[..., Tensors]
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """The relative errors of each backend's own tensors, and why a backend has none."""
    errors: dict[str, dict[str, float]] = {}
    reasons: dict[str, str] = {}
    for backend in backends:
        try:
            tensors = tensors_of(bundle, backend, traced.feeds, list(traced.exact))
        except Exception as error:  # a builder that refuses such outputs must not cost the rest of the diagnosis
            reasons[backend] = first_line(error)
            continue
        alike = {name: array for name, array in tensors.items() if array.shape == traced.exact[name].shape}
        errors[backend] = {name: error_of(array, traced.exact[name]) for name, array in alike.items()}
    return errors, reasons


def _telling(traced: Trace, blamed: str | None) -> list[TensorErrors]:
    """The most informative tensors, in graph order: the one to blame, the first with lost numbers, and those that
    amplify errors."""
    lost = [tensor for tensor in traced.tensors if tensor.lost][: SHOWN // 2]
    larger = sorted((t for t in traced.tensors if not t.lost), key=lambda t: t.error_in - t.explained)
    names = dict.fromkeys([blamed, *(tensor.name for tensor in [*lost, *larger])])
    chosen = [name for name in names if name is not None][:SHOWN]
    return [tensor for tensor in traced.tensors if tensor.name in chosen]


def _reported(tensor: TensorErrors, on_backends: Mapping[str, Mapping[str, float]]) -> TensorReport:
    errors = ("error", "error_in", "explained", "own", "amplification")
    return TensorReport(
        tensor=tensor.name,
        operator=tensor.node.op_type,
        module=module_of(tensor.node),
        line=line_of(tensor.node),
        largest=tensor.largest,
        **{name: finite(getattr(tensor, name)) for name in errors},
        deployed={name: finite(errors[tensor.name]) for name, errors in on_backends.items() if tensor.name in errors},
    )
