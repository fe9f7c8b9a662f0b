"""The page of a verification: one HTML file without scripts or network access, for readers new to the project."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from attnforge.bundle import Bundle, Case, used
from attnforge.numbers import scientific
from attnforge.precision import precision_named
from attnforge.report import error_charts
from attnforge.report.attention_maps import attention_maps
from attnforge.report.attention_section import attention_section
from attnforge.report.charts import Picture
from attnforge.report.quantising import QuantisingCost, cost_of_quantising
from attnforge.report.render import check_page, error, write_template
from attnforge.runtime.parity.budget import budget_precision
from attnforge.runtime.parity.comparison import BINS_A_DECADE, LEAST_DECADE, Comparison
from attnforge.runtime.parity.verify import BackendReport, OutputReport, Report

TEMPLATE = "verify.html"

MOST_ROWS, MOST_OUTPUTS = 40, 4
"""Maximum number of cases and outputs of a backend that are drawn."""


def write_page(
    report: Report, bundle: str | os.PathLike[str] | Bundle, path: str | os.PathLike[str], *, force: bool = False
) -> Path:
    """Write the results of :func:`attnforge.verify` to one HTML file, with charts and maps of attention weights.

    Args:
        report: report of this bundle.
        bundle: the bundle or its folder; its graphs are run on one case for the attention weights.
        path: path of the page.
        force: whether to overwrite the file.

    Returns:
        path of the page.

    Raises:
        UnavailableError: the packages that a page needs are not installed: `pip install 'attnforge[report]'`.
        UsageError: `path` is a folder, or exists and `force` is False.
        BundleError: no page can be made of the bundle's content.
    """
    check_page(path, force)
    opened = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
    with used(opened.path, "shown on a page"):
        manifest = opened.manifest
        attention = attention_maps(opened)
        sites = attention_section(attention, manifest)
        cases = {case.name: case for case in report.cases}
        cost = cost_of_quantising(report, manifest)
        floors = [budget_precision(manifest, name).floor for name in report.backends]
        return write_template(
            TEMPLATE,
            path,
            report=report,
            manifest=manifest,
            floors=floors or [precision_named(manifest.precision).floor],
            verdict=_verdict(report, cost),
            tone="bad" if not report.passed else "warn" if cost is not None and cost.exceeds else "good",
            cases=cases,
            charts={name: _charts(name, backend, cases) for name, backend in report.backends.items()},
            worst_first=_worst_first,
            furthest=_furthest,
            attention=attention,
            sites=sites,
            records={record.site: record for record in manifest.attention.details},
        )


def _verdict(report: Report, cost: QuantisingCost | None) -> str:
    """Summarise the report in a few sentences; of a quantised model, what quantising costs comes first."""
    if not report.backends:
        return "No backend could run on this machine, so nothing was verified."
    failed = {name: backend for name, backend in report.backends.items() if not backend.passed}
    if not failed:
        names, verb = " and ".join(report.backends), "stays" if len(report.backends) == 1 else "stay"
        if cost is not None:
            return (
                f"{cost.text} The backends add nothing to that: in every case, {names} {verb} within the error that "
                "arithmetic on the quantised model explains."
            )
        return (
            f"The deployed model computes the same function as the original: in every case, {names} {verb} within the "
            f"error that {report.precision} arithmetic explains."
        )
    sentences = ["The deployed model does not compute the same function as the original."]
    for name, backend in failed.items():
        cases = list(dict.fromkeys(failure.where for failure in backend.failures))
        if cases:
            more = f" and {len(cases) - 4} more" if len(cases) > 4 else ""
            sentences.append(f"{name} fails {len(cases)} of {backend.cases} cases: {', '.join(cases[:4])}{more}.")
        if backend.reason or not cases:
            sentences.append(f"{name}: {backend.reason or backend.case}.")
    return " ".join(sentences)


# --- backends ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Charts:
    """The charts of one backend: its cases, some of which may be left out, and its outputs by name."""

    by_case: Picture | None = None
    cases_left_out: int = 0
    histograms: Mapping[str, Picture] = field(default_factory=dict)


def _charts(name: str, report: BackendReport, cases: Mapping[str, Case]) -> _Charts:
    known = [comparison for comparison in report.comparisons if comparison.case in cases]
    if not known:
        return _Charts()
    label = name if name != "eager" else "eager on this machine"
    worst: dict[str, Comparison] = {}  # by case, the output closest to its budget
    for comparison in sorted(known, key=lambda c: c.share if c.passed else math.inf, reverse=True):
        worst.setdefault(comparison.where, comparison)
    shown = list(worst)[:MOST_ROWS]
    drawn = [worst[where] for where in dict.fromkeys(c.where for c in known) if where in shown]
    outputs = [(output, figures) for output, figures in report.outputs.items() if sum(figures.errors)]
    return _Charts(
        error_charts.by_case(label, drawn, _cases_in_words(name, report, len(drawn))),
        len(worst) - len(drawn),
        {output: _histogram(label, output, figures, report) for output, figures in outputs[:MOST_OUTPUTS]},
    )


def _worst_first(report: BackendReport) -> list[Comparison]:
    """Return the failed comparisons, furthest over the budget first."""
    return sorted(report.failures, key=lambda c: c.error / (c.budget or 1), reverse=True)


def _furthest(report: BackendReport) -> Comparison | None:
    """Return the comparison with the largest error of one element, relative to the budget of its case."""
    known = (comparison for comparison in report.comparisons if comparison.worst is not None)
    return max(known, key=lambda c: (not c.passed, c.max_error / c.max_budget if c.max_budget else 0.0), default=None)


def _cases_in_words(name: str, report: BackendReport, drawn: int) -> str:
    failed = dict.fromkeys(failure.where for failure in report.failures)
    return (
        f"Error of {name} in {drawn} cases, one row each. "
        + (f"Over budget: {', '.join(failed)}. " if failed else "Every case is within its budget. ")
        + f"Closest to the budget, or furthest over it: {report.case}, with an error of {error(report.error)} "
        f"where {error(report.budget)} is allowed and eager has {error(report.eager_error)}."
    )


def _histogram(label: str, output: str, figures: OutputReport, report: BackendReport) -> Picture:
    allowed = []  # error allowed for one element, as a share of the largest; unknown without errors
    for c in report.comparisons:
        most = c.quantiles.get("max", 0.0)
        if c.output == output and most and c.max_error and c.max_budget:
            allowed.append(c.max_budget * most / c.max_error)
    alt = (
        f"Histogram of the errors of output {output}. {label}: {_in_words(figures.errors)}. "
        f"Eager: {_in_words(figures.eager_errors)}."
    )
    ends = (min(allowed), max(allowed)) if allowed else None
    return error_charts.histogram(label, figures.errors, figures.eager_errors, ends, alt)


def _in_words(errors: Sequence[int]) -> str:
    total = sum(errors)
    if not total:
        return "nothing to compare"
    typical, largest = int(np.searchsorted(np.cumsum(errors), total / 2)), int(np.flatnonzero(errors)[-1])
    return (
        f"half of {total} numbers are off by less than {_edge(typical)} of the largest, "
        f"all by less than {_edge(largest)}"
    )


def _edge(bin: int) -> str:
    return scientific(10 ** (LEAST_DECADE + (bin + 1) / BINS_A_DECADE), 1)
