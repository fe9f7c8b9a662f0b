"""Parity: is what was deployed the same function?

`r` are the outputs of the same weights in float64, `e` those of eager at the bundle's precision, `b` the backend's.
`error(t) = ‖t − r‖ / ‖r‖`, in float64. A backend passes where `error(b) ≤ max(2·error(e), floor)` and `max|b − r| ≤
2·max|e − r| + 4 ulp(max|r|)`, and where its NaN and infinity positions are eager's: a kernel may err about as much as
the plain arithmetic of its own precision does, and no more. The rule is that of FlashAttention's own tests
(https://github.com/Dao-AILab/flash-attention).

A backend whose attention alone is computed at a lower precision than the bundle's (`attention_precision`) is held to
the floor and the ulp of that precision, and `e` is eager of the whole module at it: fp32 eager says nothing about what
16 bits do to large scores, and no eager module can be told to compute its attention alone so. Where NaN and infinity
may be is still fp32 eager's to say, and a case in which the lower eager overflows and fp32 does not is held to the
error of fp32.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from attnforge import reference
from attnforge.arrays import Array
from attnforge.bundle import REFERENCE_EXAMPLE, REFERENCE_OUTPUTS, Bundle, Case, Manifest, Record
from attnforge.errors import UnknownNameError
from attnforge.precision import Precision, precision_named
from attnforge.runtime.backends import BACKENDS, why_unavailable
from attnforge.runtime.session import Session, load

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


class Element(Record):
    """The number that is furthest from float64's, and where it stands; None for what is not finite."""

    case: str
    index: list[int]
    got: float | None
    eager: float | None
    float64: float | None

    def text(self, output: str) -> str:
        numbers = ("not finite" if one is None else f"{one:.9g}" for one in (self.got, self.float64, self.eager))
        got, exact, eager = numbers
        where = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return f"{output}{where} is {got}, where float64 has {exact} and eager {eager}"


class Comparison(Record):
    """One output of one case. `error`, `eager_error` and `budget` are relative; `max_…` are absolute.

    Attributes:
        cosine: of the angle between the outputs and float64's, as vectors.
        snr_db: signal to noise: 20·log10(‖r‖ / ‖b − r‖); None where there is no noise.
        quantiles: of |b − r| / max|r|, over the output's numbers.
        worst: the element that is off most, or the first that is not finite where eager's is, or the reverse.
    """

    case: str
    output: str
    passed: bool
    error: float
    eager_error: float
    budget: float
    max_error: float
    max_budget: float
    cosine: float | None = None
    snr_db: float | None = None
    quantiles: dict[str, float] = {}  # noqa: RUF012  (pydantic copies defaults)
    worst: Element | None = None
    reason: str | None = None


class OutputReport(Record):
    """How one output did over all cases: the least cosine and signal to noise, the largest quantiles of the error, and
    the element that is furthest off for the budget of its case."""

    cosine: float | None
    snr_db: float | None
    quantiles: dict[str, float]
    worst: Element | None

    def text(self, output: str) -> str:
        noise = f"signal to noise {self.snr_db:.0f} dB" if self.snr_db is not None else "no error"
        cosine = f", cosine {self.cosine:.9f}" if self.cosine is not None else ""
        worst = f"; furthest off in {self.worst.case}: {self.worst.text(output)}" if self.worst is not None else ""
        return f"{output}: {noise}{cosine}{worst}"


class BackendReport(Record):
    """How a backend did over all cases; the errors are those of the case closest to its budget, or furthest over it."""

    passed: bool
    error: float
    eager_error: float
    budget: float
    case: str
    cases: int
    failures: list[Comparison]
    outputs: dict[str, OutputReport] = {}  # noqa: RUF012


class Report(Record):
    """What :func:`verify` found. It passes where some backend ran and every one that ran passed.

    `reference` says what float64 and "eager" are: the torch module, or the graph that a bundle was deployed from.
    """

    passed: bool
    bundle: str
    name: str
    precision: str
    reference: str
    backends: dict[str, BackendReport]
    skipped: dict[str, str]


def verify(
    bundle: str | os.PathLike[str] | Bundle, backends: Sequence[str] | None = None, *, module: Any = None
) -> Report:
    """Run every reference case on every backend that this machine can run, and hold the outputs to the parity budget.

    Args:
        bundle: its folder. Nothing else is needed: no torch, no source.
        backends: by default every deployed one that this machine can run.
        module: the torch module, to hold eager on this machine to the budget as well.

    Raises:
        BundleError: no whole, unaltered bundle is there.
        UnknownNameError: no such backend.
        UnavailableError: a backend that was asked for by name cannot run here.
    """
    opened = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
    for name in backends or ():
        if name not in (*BACKENDS, "eager"):
            raise UnknownNameError("backend", name, (*BACKENDS, "eager"))
    reports: dict[str, BackendReport] = {}
    skipped: dict[str, str] = {}
    wanted = list(backends or BACKENDS) + (["eager"] if module is not None and not backends else [])
    for name in wanted:
        reason = None if name == "eager" else why_unavailable(opened, name)
        if reason is not None and backends is None:
            skipped[name] = reason
            continue
        with load(opened, name, module=module) as session:
            reports[name] = compare(session)
    return Report(
        passed=bool(reports) and all(report.passed for report in reports.values()),
        bundle=str(opened.path),
        name=opened.manifest.name,
        precision=opened.manifest.precision,
        reference=opened.manifest.reference,
        backends=reports,
        skipped=skipped,
    )


def compare(session: Session) -> BackendReport:
    """Hold one session to the budget over every reference case of its bundle."""
    bundle = session.bundle
    manifest, precision = bundle.manifest, budget_precision(bundle.manifest, session.backend)
    outputs = load_file(bundle.file(REFERENCE_OUTPUTS))
    example = example_inputs(bundle)
    found: list[Comparison] = []
    for case in manifest.cases:
        results = session.run(reference.make_inputs(case, manifest.inputs, example))
        for name, array in results.items():
            got = reference.sampled(array, case).astype(np.float64)
            eager, truth = (outputs[reference.key(case, name, which)] for which in ("eager", "float64"))
            low = outputs[reference.key(case, name, precision.name)] if precision.name != manifest.precision else None
            verdict = judge(case, name, got, eager.astype(np.float64), truth, precision, low)
            found.append(_placed(verdict, case, array.shape))
    if not found:
        return BackendReport(
            passed=False, error=0, eager_error=0, budget=0, case="no case was run", cases=0, failures=[]
        )
    worst = max(found, key=lambda c: (not c.passed, c.error / c.budget))
    return BackendReport(
        passed=all(c.passed for c in found),
        error=worst.error,
        eager_error=worst.eager_error,
        budget=worst.budget,
        case=worst.case,
        cases=len(manifest.cases),
        failures=[c for c in found if not c.passed],
        outputs={name: _summary([c for c in found if c.output == name]) for name in {c.output: None for c in found}},
    )


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
        worst=furthest.worst,
    )


def budget_precision(manifest: Manifest, backend: str) -> Precision:
    """The precision whose budget a backend has: the bundle's, or that which its attention alone is computed in."""
    record = manifest.targets.get(backend)
    return precision_named((record and record.attention_precision) or manifest.precision)


def example_inputs(bundle: Bundle) -> dict[str, Array]:
    """The inputs that the model was deployed with."""
    stored = load_file(bundle.file(REFERENCE_EXAMPLE))
    return {spec.name: stored[spec.name].astype(spec.dtype) for spec in bundle.manifest.inputs}


def judge(
    case: Case,
    output: str,
    got: Array,
    eager: Array,
    truth: Array,
    precision: Precision,
    yardstick: Array | None = None,
) -> Comparison:
    """One output against eager and float64, all as float64 arrays of one shape.

    `yardstick` is whose error to allow twice, by default eager's.
    """
    reason = worst = None
    if got.shape != truth.shape:
        shape = f"{got.size} numbers where float64 eager has {truth.size}"
        return Comparison(
            case=case.name, output=output, passed=False, error=1.0, eager_error=0.0, budget=precision.floor,
            max_error=0.0, max_budget=0.0, reason=shape,
        )  # fmt: skip
    for what, test in (("NaN", np.isnan), ("+infinity", np.isposinf), ("-infinity", np.isneginf)):
        differ = np.flatnonzero(test(got) != test(eager))
        if differ.size and reason is None:
            reason = f"{what} at {differ.size} places where eager has none, or the other way round"
            worst = _element(case, int(differ[0]), got, eager, truth)
    if yardstick is not None and np.isfinite(yardstick[np.isfinite(eager)]).all():
        eager = np.where(np.isfinite(eager), yardstick, eager).astype(np.float64)
    finite = np.isfinite(got) & np.isfinite(eager) & np.isfinite(truth)
    if worst is None and finite.any():
        off = np.abs(np.subtract(got, truth, where=finite, out=np.zeros_like(truth)))
        worst = _element(case, int(np.argmax(off)), got, eager, truth)
    got, eager, truth = got[finite], eager[finite], truth[finite]
    error, eager_error = relative_error(got, truth), relative_error(eager, truth)
    budget = max(2 * eager_error, precision.floor)
    largest = float(np.max(np.abs(truth), initial=0.0))
    max_error = float(np.max(np.abs(got - truth), initial=0.0))
    max_budget = 2 * float(np.max(np.abs(eager - truth), initial=0.0)) + 4 * precision.ulp(largest)
    if reason is None and error > budget:
        reason = f"error {error:.2e} is over the budget of {budget:.2e}"
    if reason is None and max_error > max_budget:
        reason = f"one element is off by {max_error:.2e}, over the budget of {max_budget:.2e}"
    return Comparison(
        case=case.name, output=output, passed=reason is None, error=error, eager_error=eager_error, budget=budget,
        max_error=max_error, max_budget=max_budget, cosine=_cosine(got, truth),
        snr_db=-20 * math.log10(error) if error > 0 and truth.any() else None,
        quantiles=_quantiles(np.abs(got - truth) / (largest or 1.0)), worst=worst, reason=reason,
    )  # fmt: skip


def _element(case: Case, flat: int, got: Array, eager: Array, truth: Array) -> Element:
    numbers = (float(array.reshape(-1)[flat]) for array in (got, eager, truth))
    first, second, third = (number if math.isfinite(number) else None for number in numbers)
    return Element(case=case.name, index=[flat], got=first, eager=second, float64=third)


def _cosine(got: Array, truth: Array) -> float | None:
    norms = float(np.linalg.norm(got)) * float(np.linalg.norm(truth))
    return float(np.dot(got.ravel(), truth.ravel())) / norms if norms > 0 else None


def _quantiles(errors: Array) -> dict[str, float]:
    if errors.size == 0:
        return {}
    return {
        name: float(value) for name, value in zip(QUANTILES, np.quantile(errors, [*QUANTILES.values()]), strict=True)
    }


def relative_error(got: Array, truth: Array) -> float:
    """`‖got − truth‖ / ‖truth‖`; the absolute norm where the truth is all zeros."""
    norm = float(np.linalg.norm(truth))
    return float(np.linalg.norm(got - truth)) / (norm or 1.0)
