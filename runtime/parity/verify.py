"""Verification: is the deployed model still the same function?

There are three levels: :func:`verify` checks a bundle on every backend, :func:`hold` checks one backend against the
budget over reference cases, and :func:`~attnforge.runtime.parity.budget.judge` checks one output of one case. If the
bundle has real data with labels, the task's metric is measured in the same runs (:mod:`.metrics`).
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attnforge.arrays import Array, is_floating
from attnforge.bundle import (
    REFERENCE_EXAMPLE,
    REFERENCE_OUTPUTS,
    Bundle,
    Case,
    Manifest,
    TensorSpec,
    Trusted,
    open_bundle,
    unlisted_text,
    used,
)
from attnforge.errors import BundleError, DeviceError, RunError, UnavailableError, check_known
from attnforge.keywords import guessable
from attnforge.numbers import scientific
from attnforge.precision import precision_named
from attnforge.records import Record
from attnforge.runtime import cases as reference
from attnforge.runtime.backends.registry import BACKENDS, REGISTRY, chosen_here, why_not_unasked
from attnforge.runtime.inputs import output_shape
from attnforge.runtime.parity.budget import FAR_OFF, Allowed, budget_precision, incomparable, judge, relative_error
from attnforge.runtime.parity.comparison import QUANTILES, Comparison, Element
from attnforge.runtime.parity.metrics import MeasuredMetric, Metric, MetricReport, chosen_metric
from attnforge.runtime.session import load

Run = Callable[[dict[str, Array]], Mapping[str, Array]]
"""Maps inputs to outputs, both by name."""


class OutputReport(Record):
    """The result of one output over all cases.

    Attributes:
        cosine, snr_db: the smallest over all cases.
        quantiles: quantiles of the error, each the largest over all cases.
        errors, eager_errors: the histograms, summed over all cases.
        worst: the element with the largest error, relative to the budget of its case.
    """

    cosine: float | None
    snr_db: float | None
    quantiles: dict[str, float]
    errors: list[int] = []
    eager_errors: list[int] = []
    worst: Element | None

    @classmethod
    def of(cls, comparisons: Sequence[Comparison]) -> OutputReport:
        """The report on one output, from its comparisons."""
        furthest = max(comparisons, key=lambda c: (not c.passed, c.max_error / c.max_budget if c.max_budget else 0.0))
        return cls(
            cosine=min((c.cosine for c in comparisons if c.cosine is not None), default=None),
            snr_db=min((c.snr_db for c in comparisons if c.snr_db is not None), default=None),
            quantiles={name: max(c.quantiles.get(name, 0.0) for c in comparisons) for name in QUANTILES},
            errors=[sum(counts) for counts in zip(*(c.errors for c in comparisons), strict=False)],
            eager_errors=[sum(counts) for counts in zip(*(c.eager_errors for c in comparisons), strict=False)],
            worst=furthest.worst,
        )

    def text(self, output: str) -> str:
        """One line of human-readable text.

        Args:
            output: name of the output.
        """
        noise = f"signal to noise {self.snr_db:.0f} dB" if self.snr_db is not None else "no error"
        cosine = f", cosine {self.cosine:.9f}" if self.cosine is not None else ""
        worst = f"; furthest off in {self.worst.case}: {self.worst.text(output)}" if self.worst is not None else ""
        return f"{output}: {noise}{cosine}{worst}"


class BackendReport(Record):
    """The result of a backend over all cases.

    Attributes:
        error, eager_error, budget, case: those of the comparison that is closest to its budget, or exceeds it most.
        cases: number of cases run.
        comparisons: those of every output of every case; `failures` are the ones that did not pass.
        outputs: the result of each output, by name.
        metric: the result of the task's metric; None if none was measured.
        reason: why the backend did not pass although no comparison failed.
    """

    passed: bool
    error: float = 0.0
    eager_error: float = 0.0
    budget: float = 0.0
    case: str = "no case was compared"
    cases: int = 0
    failures: list[Comparison] = []
    comparisons: list[Comparison] = []
    outputs: dict[str, OutputReport] = {}
    metric: MetricReport | None = None
    reason: str | None = None

    @property
    def missed(self) -> str | None:
        """The first case and output that did not pass, and why, on one line; None if all passed."""
        if self.passed:
            return None
        first = next((f"{failure.where}, {failure.output}: {failure.reason}" for failure in self.failures), None)
        return first or self.reason or "it did not pass"


class Report(Record):
    """The result of :func:`verify`. It passes if at least one backend ran and every backend that ran passed.

    Attributes:
        bundle: the bundle's folder.
        reference: what float64 and eager ran: the torch module, or the graph that the bundle was deployed from.
        backends: the result of each backend, by name.
        skipped: why a backend did not run, by name.
        cases: the reference cases, with sizes and seeds.
        warnings: problems that the bundle's precision causes in eager, however faithfully the model was deployed.
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

    def summary(self) -> str:
        """Return the verdict on every backend, a line each."""
        lines = [f"{self.name} {self.precision}: {'passed' if self.passed else 'FAILED'}"]
        for name, backend in self.backends.items():
            error, budget = scientific(backend.error), scientific(backend.budget)
            verdict = "passed" if backend.passed else f"FAILED: {backend.missed}"
            lines.append(f"{name}: error {error} of {budget} in {backend.case}, {backend.cases} cases; {verdict}")
        lines += [f"{name} did not run: {reason}" for name, reason in self.skipped.items()]
        return "\n".join([*lines, *self.warnings])


@guessable()
def verify(
    bundle: str | os.PathLike[str] | Bundle,
    backends: Sequence[str] | None = None,
    *,
    module: Any = None,
    metric: str | Metric | None = None,
    least: float | None = None,
    trusted: Trusted = None,
) -> Report:
    """Run every reference case on every available backend, and check the outputs against the parity budget.

    Args:
        bundle: the bundle, or its folder. Nothing else is needed: no torch, no source.
        backends: by default every backend that this machine can run and `auto` might load. OpenVINO, which runs the
            canonical graph, is included only if it met the budget when the bundle was deployed here.
        module: the torch module, to check eager on this machine against the budget as well.
        metric: the task's metric, over the real data that the bundle was deployed with: `accuracy`, `cosine`, or a
            function from outputs by name and labels to a number, where larger is better. By default the bundle's own,
            if it has one.
        least: the required value of the metric; by default it may fall short of float64's by twice as much as eager's.
        trusted: public key files, one of which must have signed the bundle, as in :func:`attnforge.load`.

    Raises:
        BundleError: there is no complete, unaltered bundle.
        UnknownNameError: no such backend.
        UnavailableError: a backend that was named cannot run here.
        RunError, DeviceError: a run of a backend that was named failed. Otherwise the backend does not pass, and its
            report has the error as its reason.
    """
    opened = open_bundle(bundle, trusted=trusted)
    for name in backends or ():
        check_known("backend", name, (*BACKENDS, "eager"))
    scores = chosen_metric(opened, metric, least)
    skipped = _skipped(opened) if backends is None else {}
    wanted = list(backends or BACKENDS) + (["eager"] if module is not None and not backends else [])
    references, reports = References.of(opened), dict[str, BackendReport]()
    for name in wanted:
        if name in skipped:
            continue
        try:
            session = load(opened, name, module=module)
        except UnavailableError as error:  # whether a plan can be loaded is known only once it is tried
            if backends is not None:
                raise
            skipped[name] = str(error)
            continue
        foreign = name == "eager" or callable(metric)  # whose errors are their author's
        try:
            with session, nullcontext() if foreign else used(opened.path, "verified"):
                reports[name] = hold(
                    opened, name, session.run, references=references, scores=scores, schedules=session.schedules
                )
        except (RunError, DeviceError) as error:  # of this backend, and the reports on others are kept
            if backends is not None:
                raise
            reports[name] = BackendReport(passed=False, reason=str(error))
    return reported(opened, reports, skipped)


def reported(bundle: Bundle, reports: dict[str, BackendReport], skipped: dict[str, str] | None = None) -> Report:
    """The report on a bundle, from the reports on its backends.

    Args:
        bundle: the verified bundle.
        reports: reports by backend.
        skipped: why other backends did not run.
    """
    manifest, others = bundle.manifest, bundle.unlisted()
    return Report(
        passed=bool(reports) and all(report.passed for report in reports.values()),
        bundle=str(bundle.path),
        name=manifest.name,
        precision=manifest.precision,
        reference=manifest.reference,
        backends=reports,
        skipped=skipped or {},
        cases=every_case(manifest),
        warnings=[*_warnings(manifest, reports), *([unlisted_text(bundle.path, others)] if others else [])],
    )


def _skipped(bundle: Bundle) -> dict[str, str]:
    """The backends that are not verified unless they are named, and why: those that cannot run here, those with
    an untrusted plan, and those without a separate model in the bundle that `auto` does not load."""
    choice = chosen_here(bundle)
    measured, dropped = (choice.milliseconds, choice.dropped) if choice is not None else ({}, {})
    unknown = "it was not checked against the budget on this machine when the bundle was deployed; verify it by name"
    skipped = {}
    for name, row in REGISTRY.items():
        if (reason := why_not_unasked(bundle, name)) is not None:
            skipped[name] = reason
        elif not row.targets and name not in measured:
            skipped[name] = dropped.get(name, unknown)
    return skipped


def _warnings(manifest: Manifest, reports: Mapping[str, BackendReport]) -> list[str]:
    """Problems that eager's own precision causes in the model, from the ordinary cases."""
    ordinary = {case.name for case in every_case(manifest) if case.is_ordinary}
    every = [c for report in reports.values() for c in report.comparisons if c.case in ordinary]
    precision, warnings = precision_named(manifest.precision), []
    if manifest.decoding is not None and not any(case.caches for case in every_case(manifest)):
        warnings.append(
            "the contents of caches are not compared, only the outputs after them, because the bundle stores no "
            "reference for them; deploy the model again"
        )
    remedy = "attnforge diagnose says where it begins, and deploy --precision auto keeps in fp32 what needs it"
    if lost := next((c for c in every if c.overflowed), None):
        warnings.append(
            f"{precision.name} overflows: in {lost.case}, eager has NaN or infinity at {lost.overflowed} positions of "
            f"{lost.output} where float64 has numbers; {remedy}"
        )
    poor = max(every, key=lambda c: c.eager_error, default=None)
    is_its_own = manifest.eager_precision == precision.name and manifest.quantised is None
    if poor is not None and poor.eager_error > FAR_OFF * precision.floor and is_its_own:
        warnings.append(
            f"{precision.name} drifts: in {poor.case}, eager itself is {scientific(poor.eager_error)} off float64 in "
            f"{poor.output}, and a backend may be twice as far off; {remedy}"
        )
    return warnings


def every_case(manifest: Manifest) -> list[Case]:
    """The reference cases, including those of a decoder that only steps reach."""
    return [*manifest.cases, *(manifest.decoding.cases if manifest.decoding is not None else [])]


# --- one backend ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class References:
    """The inputs of cases and the outputs that they are checked against.

    Attributes:
        inputs: the inputs that cannot be made from a seed: the example's by name, real data's by
            :func:`~attnforge.runtime.cases.data_key`.
        outputs: eager's and float64's outputs by :func:`~attnforge.runtime.cases.key`; for large outputs, the stored
            elements, and sums under the same key with `/blocks` appended.
    """

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]

    @classmethod
    def of(cls, bundle: Bundle) -> References:
        """The references that a bundle stores.

        Raises:
            BundleError: a file is missing or altered, or the scale of an int8 cache is invalid.
        """
        outputs, manifest = bundle.tensors(REFERENCE_OUTPUTS), bundle.manifest
        cases, caches = every_case(manifest), manifest.decoding.tensors if manifest.decoding is not None else []
        keys = [
            reference.key(case, spec.name, which)
            for case in cases
            for spec in (*manifest.outputs, *(caches if case.caches else ()))
            for which in ("eager", "float64")
        ]
        in_int8 = [spec for spec in caches if spec.dtype == "int8" and any(case.caches for case in cases)]
        keys += [reference.scale_key(spec.name) for spec in in_int8]
        check_keys(bundle, REFERENCE_OUTPUTS, outputs, keys)
        for spec in in_int8:
            scale, shape = outputs[reference.scale_key(spec.name)], (spec.dims[1], 1, spec.dims[3])
            if scale.shape != shape or scale.dtype != np.float32 or not (np.isfinite(scale) & (scale > 0)).all():
                raise BundleError(
                    f"{bundle.path / REFERENCE_OUTPUTS} has a scale of {spec.name} that is not positive "
                    f"float32{list(shape)}; deploy the model again"
                )
        return cls(stored_inputs(bundle), outputs)

    def of_output(self, case: Case, output: str, suffix: str = "") -> tuple[Array, Array]:
        """Eager's and float64's output of a case, or its sums (`/blocks`)."""
        eager, truth = (self.outputs[reference.key(case, output, which) + suffix] for which in ("eager", "float64"))
        return eager, truth


def hold(
    bundle: Bundle,
    backend: str,
    run: Run,
    cases: Sequence[Case] | None = None,
    references: References | None = None,
    scores: MeasuredMetric | None = None,
    schedules: Mapping[str, Run] | None = None,
) -> BackendReport:
    """Check anything that runs a bundle's model against the parity budget.

    Args:
        bundle: the bundle of the model.
        backend: name of the backend, which determines the budget's precision. Outputs of `eager` may also have the
            dtype of the bundle's precision, because a bundle that chose its precisions may have others.
        run: runs the model on one case's inputs.
        cases: the cases to run, by default the bundle's. Without any, nothing is proved and the report does not pass.
        references: the references to check against, by default those that the bundle stores.
        scores: a metric to measure over the cases of real data.
        schedules: runs of a decoder, by the schedule with which it receives the tokens; each must give the outputs of
            the whole model, on the cases of :func:`_scheduled`.
    """
    manifest = bundle.manifest
    proving = [case for case in cases or manifest.cases if case.is_ordinary]
    if cases is not None and not proving:  # the caller only tries hard inputs
        proving = list(cases)
    cases = manifest.cases if cases is None else cases
    references = references or References.of(bundle)
    runs: list[tuple[Case, str | None, Run]] = [(case, None, run) for case in cases]
    if schedules:
        assert manifest.decoding is not None
        runs += _scheduled(schedules, [*cases, *manifest.decoding.cases])
    scores = replace(scores, measured=[]) if scores is not None else None
    comparisons: list[Comparison] = []
    for case, schedule, compute in runs:
        results = compute(reference.make_inputs(case, manifest.inputs, references.inputs))
        judged = _CaseOnBackend(manifest, backend, case, references)
        if schedule is None and scores is not None:
            scores.add(case, results, references.outputs)
        of_run = [judged.comparison(spec, results[spec.name]) for spec in manifest.outputs]
        of_run += [] if schedule is None else _of_caches(judged, results)
        for comparison in of_run:
            comparison.schedule = schedule
        comparisons += of_run
    if not comparisons:
        return BackendReport(passed=False)
    metric, doubt = scores.report() if scores is not None else None, unproved(manifest, proving, references)
    worst = max(comparisons, key=lambda c: (not c.passed, c.error / c.budget))
    reason = doubt or (metric.reason if metric is not None else None)
    outputs = dict.fromkeys(c.output for c in comparisons)
    return BackendReport(
        passed=reason is None and all(c.passed for c in comparisons),
        error=worst.error,
        eager_error=worst.eager_error,
        budget=worst.budget,
        case=worst.where,
        cases=len({(c.case, c.schedule) for c in comparisons}),
        failures=[c for c in comparisons if not c.passed],
        comparisons=comparisons,
        outputs={name: OutputReport.of([c for c in comparisons if c.output == name]) for name in outputs},
        metric=metric,
        reason=reason,
    )


def _scheduled(schedules: Mapping[str, Run], cases: Iterable[Case]) -> Iterator[tuple[Case, str, Run]]:
    """The runs of a decoder that receives the tokens by several schedules: all schedules on the example and on
    prime sizes, token by token on the largest sizes, and that and in pieces up to the caches' capacity. Caches are
    compared as well, in the cases for which the bundle stores their expected contents."""
    every = list(schedules)
    wanted = dict.fromkeys(reference.STEPPED, every)
    wanted |= {reference.LARGEST: every[:1], reference.WHOLE_CACHE: every[:2]}
    for case in cases:
        for schedule in wanted.get(case.name, ()):
            yield case, schedule, schedules[schedule]


CACHES = "caches"
"""The name under which all caches of a decoder that match their expected contents are reported."""


def _of_caches(judged: _CaseOnBackend, results: Mapping[str, Array]) -> list[Comparison]:
    """The comparisons of a decoder's caches: all that fail, or else the one that is closest to its budget."""
    decoding = judged.manifest.decoding
    if decoding is None or not judged.case.caches:
        return []
    every = []
    for spec in decoding.tensors:
        cache = results[spec.name]
        if spec.dtype == "int8":
            cache = cache * judged.references.outputs[reference.scale_key(spec.name)]
        every.append(judged.kept(spec.name, cache, None))  # the error allowed to outputs does not apply to keys
    if failed := [comparison for comparison in every if not comparison.passed]:
        return failed
    closest = max(every, key=lambda c: c.error / c.budget)
    closest.output = CACHES
    return [closest]


UNPROVED = 0.1
"""Relative error of eager, in the median of ordinary cases, beyond which nothing is proved unless another limit was
set: a backend's error might be twice as large. `docs/concepts/parity.md` lists eager's errors on ordinary models."""


def unproved(manifest: Manifest, cases: Sequence[Case], references: References) -> str | None:
    """Why nothing is proved for some output, whatever a backend's result: it has no finite element in these cases, or
    on ordinary inputs eager itself is far from float64, and a backend's error may be twice as large. The median of
    these decides: a small output may be near zero by chance, and masks that hide everything are not ordinary inputs.
    The error of chosen precisions and quantising was asked for explicitly, and limits the budget.

    Args:
        manifest: the bundle's manifest; its author may have set another limit than
            :data:`UNPROVED`.
        cases: the cases that are to prove something.
        references: the outputs of eager and float64.
    """
    if not cases:
        return "nothing is proved: there is no ordinary case"
    precision, limit = precision_named(manifest.precision), manifest.max_eager_error or UNPROVED
    has_own_limit = manifest.mixed is not None or manifest.quantised is not None
    for spec in manifest.outputs:
        pairs = [references.of_output(case, spec.name) for case in cases]
        truths = [truth for _, truth in pairs if truth.size]
        if truths and not any((np.abs(truth) <= precision.largest).any() for truth in truths):
            return (
                f"nothing is proved: {spec.name} has no number in the range of {precision.name} in any ordinary case, "
                "not even in float64; look for NaN and infinity in the weights and in the example"
            )
        usual = [case.is_ordinary and case.masks == "random" and not has_own_limit for case in cases]
        errors = [_eager_error(*pair) for pair, counts in zip(pairs, usual, strict=True) if counts and pair[1].size]
        if errors and (error := statistics.median(errors)) > limit:
            return (
                f"nothing is proved: eager at {precision.name} is itself {scientific(error)} off float64 in "
                f"{spec.name}, in the median of ordinary cases, with {limit:g} allowed (max_eager_error, "
                "--max-eager-error)"
            )
    return None


def _eager_error(eager: Array, truth: Array) -> float:
    """The relative error of eager's finite elements; for integers the share that differs."""
    if not is_floating(eager):
        return float((eager != truth).mean())
    finite = np.isfinite(eager) & np.isfinite(truth)
    return relative_error(eager[finite].astype(np.float64), truth[finite])


@dataclass(frozen=True)
class _CaseOnBackend:
    """One case on one backend, whose outputs are judged one by one."""

    manifest: Manifest
    backend: str
    case: Case
    references: References

    def comparison(self, spec: TensorSpec, array: Array) -> Comparison:
        """The comparison of one output with the array that the backend gives."""
        shape, dtypes = output_shape(spec, self.case.sizes), [spec.dtype]
        if self.backend == "eager":
            dtypes.append(precision_named(self.manifest.precision).dtype.name)
        if (shape is not None and array.shape != shape) or array.dtype.name not in dtypes:
            actual, expected = f"{array.dtype.name}{list(array.shape)}", f"{spec.dtype}{list(shape or ('…',))}"
            precision = budget_precision(self.manifest, self.backend)
            return incomparable(self.case, spec.name, precision, f"it is {actual} and must be {expected}")
        return self.kept(spec.name, array, Allowed.by(self.manifest), reference.channels(array.shape, self.case))

    def kept(self, output: str, array: Array, allowed: Allowed | None, channels: Sequence[Array] = ()) -> Comparison:
        """The comparison of the elements that the bundle stores of an output or a cache, and of the sums of the others.

        Args:
            output: its name.
            array: of any floating-point type; for a cache, its contents for all tokens.
            allowed: the error that a deployment that chose its precisions may have.
            channels: the index of every stored element along each axis of which parts may be much smaller than others.
        """
        comparison = self._against(output, reference.sampled(array, self.case), allowed, channels=channels)
        if comparison.worst is not None and comparison.worst.index:  # among the compared elements
            indices, (index,) = reference.stored_indices(array.size, self.case), comparison.worst.index
            place = np.unravel_index(index if indices is None else int(indices[index]), array.shape)
            comparison.worst.index = [int(i) for i in place]
        sums = reference.blocks(array, self.case) if comparison.passed and is_floating(array) else None
        if sums is not None and not (summed := self._against(output, sums, allowed, reference.BLOCKS)).passed:
            first = summed.worst.index[0] * reference.BLOCK if summed.worst is not None else 0
            numbers = f"{first} to {first + reference.BLOCK - 1}"
            comparison.passed = False
            comparison.reason = f"among elements {numbers}, by their signed sum: {summed.reason}"
        return comparison

    def _against(
        self, output: str, got: Array, allowed: Allowed | None, suffix: str = "", channels: Sequence[Array] = ()
    ) -> Comparison:
        """The comparison of an output's stored elements, or of its sums, with those of the reference."""
        case, precision = self.case, budget_precision(self.manifest, self.backend)
        eager, truth = self.references.of_output(case, output, suffix)
        is_own = precision.name == self.manifest.precision
        baseline = None if is_own else self.references.outputs.get(reference.key(case, output, precision.name) + suffix)
        terms = reference.BLOCK if suffix else 1
        return judge(case, output, got, eager, truth, precision, baseline, allowed, terms, channels)


def stored_inputs(bundle: Bundle) -> dict[str, Array]:
    """The inputs that a model was deployed with, in the model's dtypes: the example's by name, real data's by
    :func:`~attnforge.runtime.cases.data_key`.

    Raises:
        BundleError: the file is missing or altered.
    """
    stored, inputs = bundle.tensors(REFERENCE_EXAMPLE), bundle.manifest.inputs
    wanted = {spec.name: spec.dtype for spec in inputs}
    for case in bundle.manifest.cases:
        if case.kind == "data":
            wanted |= {reference.data_key(case, spec.name): spec.dtype for spec in inputs}
    check_keys(bundle, REFERENCE_EXAMPLE, stored, wanted)
    return {key: stored[key].astype(dtype) for key, dtype in wanted.items()}


def check_keys(bundle: Bundle, name: str, stored: Mapping[str, Array], wanted: Iterable[str]) -> None:
    """Check that a file of the bundle contains every array that the manifest's cases need.

    Raises:
        BundleError: it lacks one.
    """
    if (missing := next((key for key in wanted if key not in stored), None)) is not None:
        raise BundleError(f"{bundle.path / name} has no {missing!r}, which a case needs; deploy the model again")
