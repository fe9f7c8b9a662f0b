"""The pictures of a verification's page: charts as SVG, maps as PNG, each in a data URI with a text that says what it
shows. matplotlib draws them through its object interface; it is imported with the first picture."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from attnforge.arrays import Array
from attnforge.runtime.parity.comparison import BINS, BINS_A_DECADE, LEAST_DECADE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BACKEND, EAGER, BUDGET, FAILED, FAINT = "#1f5fa8", "#c96a00", "#444444", "#c0202c", "#9db8d6"
OVER, UNUSUAL = "FAILED: over budget", "unusual inputs"
STYLE: Any = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#222222",
    "text.color": "#222222",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "legend.fontsize": 10,
    "svg.hashsalt": "attnforge",
}
WIDTH = 5.6
"""Inches of a chart: on a telephone it is shown at two thirds of that, and has to stay legible."""


@dataclass(frozen=True)
class Picture:
    """A picture for an `<img>`: its data URI, its size in CSS pixels, and what it says to who does not see it."""

    src: str
    width: int
    height: int
    alt: str


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


def literal(text: str) -> str:
    """`text` as it is: a dollar sign would begin a formula."""
    return text.replace("$", r"\$")


@contextmanager
def drawing(width: float, height: float, layout: Literal["constrained"] | None = "constrained") -> Iterator[Figure]:
    """A figure of so many inches, in this library's style for as long as it is drawn on."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        yield Figure(figsize=(width, height), layout=layout)


def embedded(figure: Figure, kind: str, alt: str, dpi: int = 96) -> Picture:
    """A figure as `svg` or `png`, the same bytes for the same figure."""
    stream = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {}
    figure.savefig(stream, format=kind, dpi=dpi, metadata=metadata)
    mime = "image/svg+xml" if kind == "svg" else "image/png"
    width, height = figure.get_size_inches()
    data = base64.b64encode(stream.getvalue()).decode("ascii")
    return Picture(f"data:{mime};base64,{data}", round(96 * width), round(96 * height), alt)


# --- errors -----------------------------------------------------------------------------------------------------------


def histogram(
    backend: str, errors: Sequence[int], eager_errors: Sequence[int], allowed: tuple[float, float] | None, alt: str
) -> Picture:
    """How many numbers of an output are off by how much, the backend's beside eager's.

    Args:
        backend: its name.
        errors: counts in the bins of :mod:`attnforge.runtime.parity.budget`.
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
        axes.bar(places + 0.5, counts[first:last], 0.92, color=BACKEND, alpha=0.75, label=backend)
        axes.stairs(eager[first:last], np.arange(first, last + 1), color=EAGER, linewidth=2, label="eager")
        has_exact = bool(counts[0] or eager[0])
        if has_exact:
            axes.bar([exact], counts[:1], 0.92, color=BACKEND, alpha=0.75)
            axes.stairs(eager[:1], [exact - 0.5, exact + 0.5], color=EAGER, linewidth=2)
        if allowed is not None:
            low, high = (_place(a) for a in allowed)
            if high - low < 0.1:
                axes.axvline(high, color=BUDGET, linestyle="--", label="allowed for one number")
            else:
                axes.axvspan(low, high, color=BUDGET, alpha=0.12, label="allowed for one number,\nby the case")
        decades = [i for i in range(first, last + 1) if i % BINS_A_DECADE == 0]
        decades = decades[:: 1 + len(decades) // 8]
        ticks = [(float(i), f"$10^{{{LEAST_DECADE + i // BINS_A_DECADE}}}$") for i in decades]
        if has_exact:
            ticks.insert(0, (exact, "none"))
        axes.set_xticks([x for x, _ in ticks], [text for _, text in ticks])
        axes.set_xlim(exact - 0.7 if has_exact else first - 0.2, last + 0.2)
        axes.set_yscale("log")
        axes.set_ylim(0.6, 3 * max(1, int(counts.max(initial=1)), int(eager.max(initial=1))))
        axes.set_xlabel("how far off one number is, as a share of the largest")
        axes.set_ylabel("how many numbers")
        _legend(figure, axes, [backend, "eager"])
        return embedded(figure, "svg", alt)


def _legend(figure: Figure, axes: Axes, first: Sequence[str]) -> None:
    """Above the axes, these labels first."""
    found = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    labels = sorted(found, key=lambda label: (*first, label).index(label))
    figure.legend(
        [found[label] for label in labels],
        labels,
        loc="outside upper left",
        ncols=4 if sum(map(len, labels)) < 45 else 3,
        handlelength=1.2,
        handletextpad=0.5,
        columnspacing=1.2,
    )


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
        axes.scatter([m.budget for m in marks], rows, s=90, c=BUDGET, marker="|", linewidths=2, label="budget")
        _scatter(axes, backend, marks, [max(m.error, least) for m in marks], list(rows), least, sideways=True)
        axes.set_yticks(rows, [literal(m.label) for m in marks])
        for tick, mark in zip(axes.get_yticklabels(), marks, strict=True):
            if not mark.passed:
                tick.set_color(FAILED)
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
        axes.scatter(sizes, [m.budget for m in marks], s=110, c=BUDGET, marker="_", linewidths=1.6, label="budget")
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


def ticks_apart(sizes: Sequence[int], logarithmic: bool) -> list[int]:
    """Some of `sizes`, far enough from one another for their labels; the smallest and the largest among them."""
    place = np.log if logarithmic else np.asarray
    known = sorted(set(sizes))
    room = 0.16 * float(place(known[-1]) - place(known[0]))
    kept = known[:1]
    for size in known[1:-1]:
        if min(place(size) - place(kept[-1]), place(known[-1]) - place(size)) >= room:
            kept.append(size)
    return kept + known[1:][-1:]


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
    axes.scatter(xs, ys, s=46, facecolors="none", edgecolors=EAGER, linewidths=1.6, label="eager", **place)
    kinds = (
        (backend, BACKEND, "o", [m.passed and (m.is_ordinary or sideways) for m in marks]),
        (UNUSUAL, FAINT, "o", [m.passed and not (m.is_ordinary or sideways) for m in marks]),
        (OVER, FAILED, "X", [not m.passed for m in marks]),
    )
    for label, color, marker, chosen in kinds:
        if any(chosen):
            at = [[n for n, one in zip(numbers, chosen, strict=True) if one] for numbers in (x, y)]
            size = 60 if marker == "X" else 26
            axes.scatter(at[0], at[1], s=size, c=color, marker=marker, label=label, **place)


# --- attention --------------------------------------------------------------------------------------------------------

MOST_CELLS = 512
"""Rows or columns of a map: beyond them several are drawn as one."""


def heatmap(values: Array, top: float, alt: str, difference: bool = False) -> Picture:
    """A map of (queries, keys), from 0 to `top`, or from −`top` to `top` where it is a difference."""
    from matplotlib.ticker import MaxNLocator

    with drawing(3.5, 2.9, layout=None) as figure:
        axes = figure.add_axes((0.19, 0.16, 0.57, 0.8))
        ratio = values.shape[1] / values.shape[0]
        ends = (-top if difference else 0.0, top)
        shown = axes.imshow(
            np.ma.masked_invalid(pooled(values, extreme=difference)),
            cmap="RdBu_r" if difference else "viridis",
            vmin=ends[0],
            vmax=ends[1],
            aspect="equal" if 0.4 < ratio < 2.5 else "auto",
            interpolation="nearest",
            extent=(0, values.shape[1], values.shape[0], 0),
        )
        axes.set_facecolor("#bbbbbb")  # what is not finite
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_xlabel("key")
        axes.set_ylabel("query")
        _colorbar(figure, shown, ends, difference)
        return embedded(figure, "png", alt, dpi=144)


def photograph(image: Array, alt: str, query: tuple[int, int, int] | None = None) -> Picture:
    """The image (height, width, channels) itself; `query` is row, column and side of a square to mark."""
    with drawing(3.5, 2.9, layout=None) as figure:
        _show_image(figure, image, query)
        return embedded(figure, "png", alt, dpi=144)


def overlay(
    image: Array,
    grid: Array,
    ends: tuple[float, float],
    alt: str,
    query: tuple[int, int, int] | None = None,
    difference: bool = False,
) -> Picture:
    """Weights (rows, columns), or a difference of two, over the image that they are of; colours span `ends`."""
    with drawing(3.5, 2.9, layout=None) as figure:
        axes = _show_image(figure, image.mean(axis=-1, keepdims=True), query)
        shown = axes.imshow(
            np.ma.masked_invalid(grid),
            cmap="RdBu_r" if difference else "inferno",
            vmin=ends[0],
            vmax=ends[1],
            alpha=0.65,
            interpolation="nearest",
            extent=(0, image.shape[1], image.shape[0], 0),
        )
        _colorbar(figure, shown, ends, difference)
        return embedded(figure, "png", alt, dpi=144)


def pooled(values: Array, extreme: bool = False) -> Array:
    """`values` with at most :data:`MOST_CELLS` rows and columns: means of blocks, or where `extreme` the number of each
    block that is furthest from zero."""
    rows, columns = (-(-n // MOST_CELLS) for n in values.shape)
    if rows == columns == 1:
        return values
    up, across = (-(-n // f) * f - n for n, f in zip(values.shape, (rows, columns), strict=True))
    padded = np.pad(values.astype(np.float64), ((0, up), (0, across)), constant_values=np.nan)
    blocks = padded.reshape(padded.shape[0] // rows, rows, -1, columns).swapaxes(1, 2)
    flat = blocks.reshape(*blocks.shape[:2], -1)
    if not extreme:
        return np.asarray(np.nansum(flat, axis=-1) / np.maximum(np.sum(~np.isnan(flat), axis=-1), 1))
    furthest = np.argmax(np.nan_to_num(np.abs(flat), nan=-1.0), axis=-1)
    return np.asarray(np.take_along_axis(flat, furthest[..., None], axis=-1)[..., 0])


def _show_image(figure: Figure, image: Array, query: tuple[int, int, int] | None) -> Axes:
    axes = figure.add_axes((0.02, 0.04, 0.74, 0.92))
    height, width, channels = image.shape
    pixels = image[..., 0] if channels == 1 else image
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest", extent=(0, width, height, 0))
    axes.set_axis_off()
    if query is not None:
        row, column, side = query
        around = ([column, column + side, column + side, column, column], [row, row, row + side, row + side, row])
        axes.plot(*around, color="white", linewidth=3.2, clip_on=False)
        axes.plot(*around, color="#d4145a", linewidth=1.6, clip_on=False)
    return axes


def _colorbar(figure: Figure, shown: Any, ends: tuple[float, float], difference: bool) -> None:
    bar = figure.colorbar(shown, cax=figure.add_axes((0.785, 0.18, 0.028, 0.74)))
    ticks = [ends[0], sum(ends) / 2, ends[1]]
    bar.set_ticks(ticks, labels=["0" if t == 0 else f"{t:.0e}" if difference else f"{t:.2g}" for t in ticks])
    bar.ax.tick_params(labelsize=9, length=2)
    bar.outline.set_visible(False)
