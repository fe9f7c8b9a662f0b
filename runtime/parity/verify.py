"""Parity: is what was deployed the same function? Every backend over every reference case, held to the budget
(:mod:`.budget`), and where there is real data with labels, the task's metric (:mod:`.metrics`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from attnforge.arrays import Array, is_floating
from attnforge.bundle import REFERENCE_EXAMPLE, REFERENCE_OUTPUTS, Bundle, Case, Manifest
from attnforge.errors import UnknownNameError
from attnforge.precision import Precision, precision_named
from attnforge.records import Record
from attnforge.runtime import cases as reference
from attnforge.runtime.backends.registry import BACKENDS, WITHOUT_TARGET, why_unavailable
from attnforge.runtime.inputs import shapes_of
from attnforge.runtime.parity.budget import (
    FAR_OFF,
    QUANTILES,
    Allowed,
    Comparison,
    Element,
    judge,
    judge_whole,
    of_another_form,
)
from attnforge.runtime.parity.metrics import Metric, MetricReport, Scores, chosen_metric
from attnforge.runtime.preference import chosen_here
from attnforge.runtime.session import Session, load


class OutputReport(Record):
    """How one output did over all cases: the least cosine and signal to noise, the largest quantiles of the error,
    how many numbers are off by how much, and the element that is furthest off for the budget of its case."""

    cosine: float | None
    snr_db: float | None
    quantiles: dict[str, float]
    errors: list[int] = []
    eager_errors: list[int] = []
    worst: Element | None

    def text(self, output: str) -> str:
        noise = f"signal to noise {self.snr_db:.0f} dB" if self.snr_db is not None else "no error"
        cosine = f", cosine {self.cosine:.9f}" if self.cosine is not None else ""
        worst = f"; furthest off in {self.worst.case}: {self.worst.text(output)}" if self.worst is not None else ""
        return f"{output}: {noise}{cosine}{worst}"


class BackendReport(Record):
    """How a backend did over all cases; the errors are those of the case closest to its budget, or furthest over it.

    Attributes:
        comparisons: of every output of every case, `failures` those that did not pass.
        reason: why it did not pass though no case failed.
    """

    passed: bool
    error: float
    eager_error: float
    budget: float
    case: str
    cases: int
    failures: list[Comparison]
    comparisons: list[Comparison] = []
    outputs: dict[str, OutputReport] = {}
    metric: MetricReport | None = None
    reason: str | None = None

    @property
    def missed(self) -> str | None:
        """The first case and output that did not pass, and why, in a line; None where all did."""
        if self.passed:
            return None
        first = next((f"{one.case}, {one.output}: {one.reason}" for one in self.failures), None)
        return first or self.reason or "it did not pass"


class Report(Record):
    """What :func:`verify` found. It passes where some backend ran and every one that ran passed.

    Attributes:
        reference: what float64 and "eager" are: the torch module, or the graph that a bundle was deployed from.
        cases: what was run, with sizes and seeds.
        warnings: what holds of the model at this precision, however faithfully it was deployed.
    """

    passed: bool
    bundle: str
    name: str
    precision: str
    reference: str
    backends: dict[str, BackendReport]
    skipped: dict[str, str]
    cases: list[Case] = []
    warnings: list[str] = []


def verify(
    bundle: str | os.PathLike[str] | Bundle,
    backends: Sequence[str] | None = None,
    *,
    module: Any = None,
    metric: str | Metric | None = None,
    least: float | None = None,
) -> Report:
    """Run every reference case on every backend that this machine can run, and hold the outputs to the parity budget.

    Args:
        bundle: its folder. Nothing else is needed: no torch, no source.
        backends: by default every one that this machine can run and `auto` might load: OpenVINO, which runs the
            canonical graph, only where it was found within the budget when the bundle was deployed here.
        module: the torch module, to hold eager on this machine to the budget as well.
        metric: what the task is measured by, over the real data that the bundle was deployed with: `accuracy`,
            `cosine`, or a function from outputs by name and labels to a number, the larger the better. By default the
            bundle's own, if it has one.
        least: what the metric must reach; by default it may fall short of float64's twice as far as eager does.

    Raises:
        BundleError: no whole, unaltered bundle is there.
        UnknownNameError: no such backend.
        UnavailableError: a backend that was asked for by name cannot run here.
    """
    opened = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
    for name in backends or ():
        if name not in (*BACKENDS, "eager"):
            raise UnknownNameError("backend", name, (*BACKENDS, "eager"))
    scores = chosen_metric(opened, metric, least)
    reports: dict[str, BackendReport] = {}
    skipped: dict[str, str] = {}
    unasked = _unasked(opened) if backends is None else {}
    wanted = list(backends or BACKENDS) + (["eager"] if module is not None and not backends else [])
    for name in wanted:
        reason = None if name == "eager" else why_unavailable(opened, name) or unasked.get(name)
        if reason is not None and backends is None:
            skipped[name] = reason
            continue
        with load(opened, name, module=module) as session:
            reports[name] = compare(session, replace(scores, found=[]) if scores is not None else None)
    return Report(
        passed=bool(reports) and all(report.passed for report in reports.values()),
        bundle=str(opened.path),
        name=opened.manifest.name,
        precision=opened.manifest.precision,
        reference=opened.manifest.reference,
        backends=reports,
        skipped=skipped,
        cases=opened.manifest.cases,
        warnings=_warnings(opened.manifest, reports),
    )


def _unasked(bundle: Bundle) -> dict[str, str]:
    """Backends without a model of their own in the bundle that `auto` does not load: those that were not found to be
    within the budget when it was deployed here."""
    choice = chosen_here(bundle)
    measured, dropped = (choice.milliseconds, choice.dropped) if choice is not None else ({}, {})
    unknown = "it was not held to the budget on this machine when the bundle was deployed; verify it by name"
    return {name: dropped.get(name, unknown) for name in WITHOUT_TARGET if name not in measured}


def compare(session: Session, scores: Scores | None = None) -> BackendReport:
    """Hold one session to the budget over every reference case of its bundle, and to a metric over those of data."""
    bundle = session.bundle
    return hold(bundle, session.backend, session.run, bundle.manifest.cases, scores, _of_eager(session))


def hold(
    bundle: Bundle,
    backend: str,
    run: Callable[[dict[str, Array]], Mapping[str, Array]],
    cases: Sequence[Case],
    scores: Scores | None = None,
    also: str = "",
) -> BackendReport:
    """Hold whatever runs a bundle's model to the budget over some of its reference cases.

    Args:
        bundle: whose model it is.
        backend: whose budget it has.
        run: gives outputs by name.
        cases: in which it is run; in none of them, it does not pass.
        scores: a metric over those of data.
        also: a dtype that outputs may have, besides their own.
    """
    manifest, precision = bundle.manifest, budget_precision(bundle.manifest, backend)
    outputs = load_file(bundle.file(REFERENCE_OUTPUTS))
    stored = stored_inputs(bundle)
    found: list[Comparison] = []
    for case in cases:
        feeds = reference.make_inputs(case, manifest.inputs, stored)
        results = run(feeds)
        if scores is not None:
            scores.add(case, results, outputs)
        found += judged(manifest, precision, case, feeds, results, outputs, also)
    if not found:
        return BackendReport(
            passed=False, error=0, eager_error=0, budget=0, case="no case was run", cases=0, failures=[]
        )
    worst = max(found, key=lambda c: (not c.passed, c.error / c.budget))
    measured = scores.report() if scores is not None else None
    reason = _no_proof(found) or (measured.reason if measured is not None else None)
    return BackendReport(
        passed=reason is None and all(c.passed for c in found),
        error=worst.error,
        eager_error=worst.eager_error,
        budget=worst.budget,
        case=worst.case,
        cases=len(cases),
        failures=[c for c in found if not c.passed],
        comparisons=found,
        outputs={name: _summary([c for c in found if c.output == name]) for name in {c.output: None for c in found}},
        metric=measured,
        reason=reason,
    )


def judged(
    manifest: Manifest,
    precision: Precision,
    case: Case,
    feeds: Mapping[str, Array],
    results: Mapping[str, Array],
    outputs: Mapping[str, Array],
    also: str = "",
) -> list[Comparison]:
    """Hold what a backend answered in one case to the budget.

    Args:
        manifest: of the bundle.
        precision: whose budget the backend has.
        feeds: the inputs.
        results: its outputs by name.
        outputs: eager's and float64's, as :func:`attnforge.runtime.cases.key` names them.
        also: a dtype that outputs may have, besides their own.
    """
    allowed, found = allowed_by(manifest), []
    shapes = shapes_of(manifest.inputs, manifest.outputs, *((array.shape, array.dtype) for array in feeds.values()))
    for spec, shape in zip(manifest.outputs, shapes.outputs, strict=True):
        name, array = spec.name, results[spec.name]
        eager, truth = (outputs[reference.key(case, name, which)] for which in ("eager", "float64"))
        if (shape is not None and array.shape != shape) or array.dtype.name not in (spec.dtype, also):
            is_, was = f"{array.dtype.name}{list(array.shape)}", f"{spec.dtype}{list(shape or ('…',))}"
            found.append(of_another_form(case, name, precision, f"it is {is_}, and has to be {was}"))
            continue
        got = reference.sampled(array, case).astype(np.float64)
        truth = truth.astype(np.float64)
        if not is_floating(array):
            found.append(_placed(judge_whole(case, name, got, eager.astype(np.float64), truth), case, array.shape))
            continue
        low = outputs[reference.key(case, name, precision.name)] if precision.name != manifest.precision else None
        verdict = judge(case, name, got, eager.astype(np.float64), truth, precision, low, allowed)
        verdict = _placed(verdict, case, array.shape)
        if verdict.passed and (sums := reference.blocks(array, case)) is not None:
            which = ("eager", "float64", precision.name)
            kept = [outputs.get(f"{reference.key(case, name, one)}/blocks") for one in which]
            assert kept[0] is not None and kept[1] is not None
            low = kept[2] if precision.name != manifest.precision else None
            verdict = _by_blocks(verdict, judge(case, name, sums, kept[0], kept[1], precision, low, allowed))
        found.append(verdict)
    return found


def _no_proof(found: Sequence[Comparison]) -> str | None:
    """Of an output that has no finite number in any case nothing is known."""
    for output in {c.output: None for c in found}:
        if not any(c.compared for c in found if c.output == output) and any(c.max_budget for c in found):
            return f"of {output} no finite number was compared in any case"
    return None


def _warnings(manifest: Manifest, reports: Mapping[str, BackendReport]) -> list[str]:
    """What eager's own precision does to the model, by the ordinary cases."""
    ordinary = {case.name for case in manifest.cases if case.is_ordinary}
    every = [c for report in reports.values() for c in report.comparisons if c.case in ordinary]
    precision, found = precision_named(manifest.precision), []
    remedy = "attnforge diagnose says where it begins, and deploy --precision auto what has to stay fp32"
    if lost := next((c for c in every if c.overflowed), None):
        found.append(
            f"{precision.name} does not hold this model: in {lost.case}, eager has NaN or infinity at "
            f"{lost.overflowed} places of {lost.output} where float64 has numbers; {remedy}"
        )
    poor = max(every, key=lambda c: c.eager_error, default=None)
    if poor is not None and poor.eager_error > FAR_OFF * precision.floor and manifest.mixed is None:
        found.append(
            f"{precision.name} drifts: in {poor.case}, eager itself is {poor.eager_error:.1e} off float64 in "
            f"{poor.output}, and a backend may be twice that; {remedy}"
        )
    return found


def _of_eager(session: Session) -> str:
    """What eager's outputs may be: of a bundle that chose its precisions they need not be as deployed."""
    return precision_named(session.bundle.manifest.precision).dtype.name if session.backend == "eager" else ""


def _by_blocks(found: Comparison, sums: Comparison) -> Comparison:
    """A comparison of an output that is kept in part, with what sums over all of it say."""
    if not sums.passed:
        first = sums.worst.index[0] * reference.BLOCK if sums.worst is not None else 0
        found.passed = False
        found.reason = f"among the numbers {first} to {first + reference.BLOCK - 1}, by their signed sum: {sums.reason}"
    return found


def _placed(found: Comparison, case: Case, shape: tuple[int, ...]) -> Comparison:
    """With the worst element's place in the whole output, of which some may be compared only."""
    if found.worst is not None and found.worst.index:
        chosen = reference.places(int(np.prod(shape)), case)
        flat = found.worst.index[0] if chosen is None else int(chosen[found.worst.index[0]])
        found.worst.index = [int(i) for i in np.unravel_index(flat, shape)]
    return found


def _summary(found: Sequence[Comparison]) -> OutputReport:
    furthest = max(found, key=lambda c: (not c.passed, c.max_error / c.max_budget if c.max_budget else 0.0))
    return OutputReport(
        cosine=min((c.cosine for c in found if c.cosine is not None), default=None),
        snr_db=min((c.snr_db for c in found if c.snr_db is not None), default=None),
        quantiles={name: max(c.quantiles.get(name, 0.0) for c in found) for name in QUANTILES},
        errors=[sum(bin) for bin in zip(*(c.errors for c in found), strict=False)],
        eager_errors=[sum(bin) for bin in zip(*(c.eager_errors for c in found), strict=False)],
        worst=furthest.worst,
    )


def budget_precision(manifest: Manifest, backend: str) -> Precision:
    """The precision whose budget a backend has: the bundle's, or that which its attention alone is computed in."""
    record = manifest.targets.get(backend)
    return precision_named((record and record.attention_precision) or manifest.precision)


def allowed_by(manifest: Manifest) -> Allowed | None:
    """What a bundle that chose its own precisions may err by."""
    return Allowed(manifest.mixed.max_error, manifest.mixed.exactly) if manifest.mixed is not None else None


def stored_inputs(bundle: Bundle) -> dict[str, Array]:
    """The inputs that the model was deployed with: its example's by name, real data's by case and name."""
    stored = load_file(bundle.file(REFERENCE_EXAMPLE))
    dtypes = {spec.name: spec.dtype for spec in bundle.manifest.inputs}
    data = {
        reference.data_key(case, name): dtype
        for case in bundle.manifest.cases
        if case.kind == "data"
        for name, dtype in dtypes.items()
    }
    return {key: stored[key].astype(dtype) for key, dtype in {**dtypes, **data}.items()}
