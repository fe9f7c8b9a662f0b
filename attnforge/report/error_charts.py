"""Charts of a verification's errors: of single numbers, of cases, and by size. The backend is blue, eager orange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnforge.report.charts import (
    BLUE,
    GREY,
    ORANGE,
    PALE,
    RED,
    WIDTH,
    Picture,
    drawing,
    embedded,
    legend_above,
    literal,
    ticks_apart,
)
from attnforge.runtime.parity.comparison import BINS, BINS_A_DECADE, LEAST_DECADE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OVER, UNUSUAL = "FAILED: over budget", "unusual inputs"


@dataclass(frozen=True)
class Mark:
    """One case of one backend: its errors and its budget, relative to float64.

    Attributes:
        label: the case, as an axis names it.
        is_ordinary: whether the model is meant to take such inputs.
    """

    label: str
    error: float
    eager_error: float
    budget: float
    passed: bool
    is_ordinary: bool


def histogram(
    backend: str, errors: Sequence[int], eager_errors: Sequence[int], allowed: tuple[float, float] | None, alt: str
) -> Picture:
    """How many numbers of an output are off by how much, the backend's beside eager's.

    Args:
        backend: its name.
        errors: counts in the bins of :mod:`attnforge.runtime.parity.comparison`.
        eager_errors: the same of eager.
        allowed: the least and the most that one number may be off in any case, in the unit of the bins.
        alt: what the picture says.
    """
    counts, eager = np.asarray(errors), np.asarray(eager_errors)
    inside = np.flatnonzero((counts + eager)[1:]) + 1
    ends = [*(int(i) for i in inside), *(min(max(_bin(a), 1), BINS - 1) for a in allowed or ())] or [BINS // 2]
    first, last = max(min(ends) - 1, 1), max(ends) + 1
    exact = first - 2.0
    backend = literal(backend)
    with drawing(WIDTH, 3.5) as figure:
        axes = figure.subplots()
        places = np.arange(first, last)
        axes.bar(places + 0.5, counts[first:last], 0.92, color=BLUE, alpha=0.75, label=backend)
        axes.stairs(eager[first:last], np.arange(first, last + 1), color=ORANGE, linewidth=2, label="eager")
        has_exact = bool(counts[0] or eager[0])
        if has_exact:
            axes.bar([exact], counts[:1], 0.92, color=BLUE, alpha=0.75)
            axes.stairs(eager[:1], [exact - 0.5, exact + 0.5], color=ORANGE, linewidth=2)
        if allowed is not None:
            low, high = (_place(a) for a in allowed)
            if high - low < 0.1:
                axes.axvline(high, color=GREY, linestyle="--", label="allowed for one number")
            else:
                axes.axvspan(low, high, color=GREY, alpha=0.12, label="allowed for one number,\nby the case")
        ticks = [*([(exact, "none")] if has_exact else []), *_decade_ticks(first, last)]
        axes.set_xticks([place for place, _ in ticks], [text for _, text in ticks])
        axes.set_xlim(exact - 0.7 if has_exact else first - 0.2, last + 0.2)
        axes.set_yscale("log")
        axes.set_ylim(0.6, 3 * max(1, int(counts.max(initial=1)), int(eager.max(initial=1))))
        axes.set_xlabel("how far off one number is, as a share of the largest")
        axes.set_ylabel("how many numbers")
        _legend(figure, axes, [backend, "eager"])
        return embedded(figure, "svg", alt)


def _decade_ticks(first: int, last: int) -> list[tuple[float, str]]:
    """Bins at which a power of ten begins, at most nine of them, and how an axis names it."""
    decades = [i for i in range(first, last + 1) if i % BINS_A_DECADE == 0]
    decades = decades[:: 1 + len(decades) // 8]
    return [(float(i), f"$10^{{{LEAST_DECADE + i // BINS_A_DECADE}}}$") for i in decades]


def _legend(figure: Figure, axes: Axes, first: Sequence[str]) -> None:
    """A legend above the axes, these labels first."""
    handles, _ = axes.get_legend_handles_labels()
    order = [*first, *(str(handle.get_label()) for handle in handles)]
    legend_above(figure, sorted(handles, key=lambda handle: order.index(str(handle.get_label()))))


def _place(error: float) -> float:
    return float((np.log10(max(error, 10.0**LEAST_DECADE)) - LEAST_DECADE) * BINS_A_DECADE)


def _bin(error: float) -> int:
    return int(np.floor(_place(error)))


def by_case(backend: str, marks: Sequence[Mark], alt: str) -> Picture:
    """One row a case: the backend's error, eager's, and the budget as the end of a bar."""
    backend = literal(backend)
    with drawing(WIDTH, 1.3 + 0.27 * len(marks)) as figure:
        axes = figure.subplots()
        least, most = _decades(marks)
        rows = np.arange(len(marks))
        axes.barh(rows, [m.budget - least for m in marks], 0.7, left=least, color="#e9e9e9")
        axes.scatter([m.budget for m in marks], rows, s=90, c=GREY, marker="|", linewidths=2, label="budget")
        _scatter(axes, backend, marks, [max(m.error, least) for m in marks], list(rows), least, sideways=True)
        axes.set_yticks(rows, [literal(m.label) for m in marks])
        for tick, mark in zip(axes.get_yticklabels(), marks, strict=True):
            if not mark.passed:
                tick.set_color(RED)
                tick.set_fontweight("bold")
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(marks) - 0.4, -0.6)
        axes.set_xscale("log")
        axes.set_xlim(least, most)
        axes.set_xlabel("error, relative to float64")
        _legend(figure, axes, [backend, UNUSUAL, OVER, "eager"])
        return embedded(figure, "svg", alt)


def by_size(backend: str, marks: Sequence[Mark], sizes: Sequence[int], what: str, alt: str) -> Picture:
    """Error, eager's and the budget against a size; cases that only try the model are fainter."""
    backend = literal(backend)
    with drawing(WIDTH, 3.3) as figure:
        axes = figure.subplots()
        least, most = _decades(marks)
        axes.scatter(sizes, [m.budget for m in marks], s=110, c=GREY, marker="_", linewidths=1.6, label="budget")
        _scatter(axes, backend, marks, list(sizes), [max(m.error, least) for m in marks], least, sideways=False)
        axes.set_yscale("log")
        axes.set_ylim(least, most)
        if max(sizes) > 20 * min(sizes):
            axes.set_xscale("log")
        axes.margins(x=0.08)
        ticks = ticks_apart(sizes, logarithmic=max(sizes) > 20 * min(sizes))
        axes.set_xticks([], minor=True)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_xlabel(literal(what))
        axes.set_ylabel("error, relative to float64")
        _legend(figure, axes, [backend, UNUSUAL, OVER, "eager"])
        return embedded(figure, "svg", alt)


def _decades(marks: Sequence[Mark]) -> tuple[float, float]:
    """Powers of ten between which all errors and budgets lie; what is zero is drawn at the lower one."""
    numbers = [n for m in marks for n in (m.error, m.eager_error, m.budget) if 0 < n < np.inf] or [1e-7]
    return 10.0 ** np.floor(np.log10(min(numbers)) - 0.2), 10.0 ** np.ceil(np.log10(max(numbers)) + 0.02)


def _scatter(
    axes: Axes,
    backend: str,
    marks: Sequence[Mark],
    x: Sequence[float],
    y: Sequence[float],
    least: float,
    sideways: bool,
) -> None:
    eager = [max(m.eager_error, least) for m in marks]
    place: dict[str, Any] = {"clip_on": False, "zorder": 3}
    xs, ys = (eager, list(y)) if sideways else (list(x), eager)
    axes.scatter(xs, ys, s=46, facecolors="none", edgecolors=ORANGE, linewidths=1.6, label="eager", **place)
    kinds = (
        (backend, BLUE, "o", [m.passed and (m.is_ordinary or sideways) for m in marks]),
        (UNUSUAL, PALE, "o", [m.passed and not (m.is_ordinary or sideways) for m in marks]),
        (OVER, RED, "X", [not m.passed for m in marks]),
    )
    for label, color, marker, chosen in kinds:
        if any(chosen):
            at = [[number for number, drawn in zip(numbers, chosen, strict=True) if drawn] for numbers in (x, y)]
            size = 60 if marker == "X" else 26
            axes.scatter(at[0], at[1], s=size, c=color, marker=marker, label=label, **place)
