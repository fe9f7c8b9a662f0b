"""Charts of a verification's errors: by element, and by case. The backend is blue, eager orange."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnforge.report.charts import BLUE, GREY, ORANGE, RED, WIDTH, Picture, drawing, embedded, legend_above, literal
from attnforge.runtime.parity.comparison import BINS, BINS_A_DECADE, LEAST_DECADE, Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OVER = "FAILED: over budget"

LARGEST = 1e30
"""Larger errors are drawn at the edge, because matplotlib's axes do not cover the whole range of floats."""


def histogram(
    backend: str, errors: Sequence[int], eager_errors: Sequence[int], allowed: tuple[float, float] | None, alt: str
) -> Picture:
    """Draw a histogram of an output's errors by element, the backend's and eager's.

    Args:
        backend: name of the backend.
        errors: counts in the bins of :mod:`attnforge.runtime.parity.comparison`.
        eager_errors: the same for eager.
        allowed: smallest and largest error allowed for one element over the cases, in the unit of the bins.
        alt: alternative text.
    """
    counts, eager = np.asarray(errors), np.asarray(eager_errors)
    inside = np.flatnonzero((counts + eager)[1:]) + 1
    ends = [*(int(i) for i in inside), *(min(max(math.floor(_position(a)), 1), BINS - 1) for a in allowed or ())] or [
        BINS // 2
    ]
    first, last = max(min(ends) - 1, 1), max(ends) + 1
    exact = first - 2.0
    backend = literal(backend)
    with drawing(WIDTH, 3.5) as figure:
        axes = figure.subplots()
        axes.bar(np.arange(first, last) + 0.5, counts[first:last], 0.92, color=BLUE, alpha=0.75, label=backend)
        axes.stairs(eager[first:last], np.arange(first, last + 1), color=ORANGE, linewidth=2, label="eager")
        has_exact = bool(counts[0] or eager[0])
        if has_exact:
            axes.bar([exact], counts[:1], 0.92, color=BLUE, alpha=0.75)
            axes.stairs(eager[:1], [exact - 0.5, exact + 0.5], color=ORANGE, linewidth=2)
        if allowed is not None:
            low, high = (_position(a) for a in allowed)
            if high - low < 0.1:
                axes.axvline(high, color=GREY, linestyle="--", label="allowed for one number")
            else:
                axes.axvspan(low, high, color=GREY, alpha=0.12, label="allowed for one number,\nby the case")
        ticks = [*([(exact, "none")] if has_exact else []), *_decade_ticks(first, last)]
        axes.set_xticks([position for position, _ in ticks], [text for _, text in ticks])
        axes.set_xlim(exact - 0.7 if has_exact else first - 0.2, last + 0.2)
        axes.set_yscale("log")
        axes.set_ylim(0.6, 3 * max(1, int(counts.max(initial=1)), int(eager.max(initial=1))))
        axes.set_xlabel("error of one number, as a share of the largest")
        axes.set_ylabel("count")
        _legend(figure, axes, [backend, "eager"])
        return embedded(figure, "svg", alt)


def _decade_ticks(first: int, last: int) -> list[tuple[float, str]]:
    """Return the bins at which a power of ten begins, at most nine of them, with their labels."""
    decades = [i for i in range(first, last + 1) if i % BINS_A_DECADE == 0]
    decades = decades[:: 1 + len(decades) // 8]
    return [(float(i), f"$10^{{{LEAST_DECADE + i // BINS_A_DECADE}}}$") for i in decades]


def _legend(figure: Figure, axes: Axes, first: Sequence[str]) -> None:
    """Add a legend above the axes, with these labels first."""
    handles, _ = axes.get_legend_handles_labels()
    order = [*first, *(str(handle.get_label()) for handle in handles)]
    legend_above(figure, sorted(handles, key=lambda handle: order.index(str(handle.get_label()))))


def _position(error: float) -> float:
    return float((np.log10(np.clip(error, 10.0**LEAST_DECADE, LARGEST)) - LEAST_DECADE) * BINS_A_DECADE)


def by_case(backend: str, cases: Sequence[Comparison], alt: str) -> Picture:
    """Draw one row per case: the backend's error, eager's, and the budget as the end of a bar."""
    backend = literal(backend)
    numbers = [n for c in cases for n in (c.error, c.eager_error, c.budget) if 0 < n < LARGEST] or [1e-7]
    least, most = 10.0 ** np.floor(np.log10(min(numbers)) - 0.2), 10.0 ** np.ceil(np.log10(max(numbers)) + 0.02)
    rows = np.arange(len(cases))
    budgets, eager = (np.clip(of, least, most) for of in ([c.budget for c in cases], [c.eager_error for c in cases]))
    with drawing(WIDTH, 1.3 + 0.27 * len(cases)) as figure:
        axes = figure.subplots()
        axes.barh(rows, budgets - least, 0.7, left=least, color="#e9e9e9")
        axes.scatter(budgets, rows, s=90, color=GREY, marker="|", linewidths=2, label="budget")
        on_axis: dict[str, Any] = {"clip_on": False, "zorder": 3}  # errors of zero are drawn on the axis
        axes.scatter(eager, rows, s=46, facecolors="none", edgecolors=ORANGE, linewidths=1.6, label="eager", **on_axis)
        for label, color, marker, size, passed in ((backend, BLUE, "o", 26, True), (OVER, RED, "X", 60, False)):
            drawn = [i for i, c in enumerate(cases) if c.passed == passed]
            if drawn:
                errors = np.clip([cases[i].error for i in drawn], least, most)
                axes.scatter(errors, drawn, s=size, color=color, marker=marker, label=label, **on_axis)
        axes.set_yticks(rows, [literal(c.where) for c in cases])
        for tick, comparison in zip(axes.get_yticklabels(), cases, strict=True):
            if not comparison.passed:
                tick.set_color(RED)
                tick.set_fontweight("bold")
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(cases) - 0.4, -0.6)
        axes.set_xscale("log")
        axes.set_xlim(least, most)
        axes.set_xlabel("error, relative to float64")
        _legend(figure, axes, [backend, OVER, "eager"])
        return embedded(figure, "svg", alt)
