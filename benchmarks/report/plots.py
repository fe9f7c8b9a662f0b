"""The plots of a benchmark as files, and those of one model's contenders: where their times lie, and who is faster than
the picked backend."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from attnforge.benchmarks.measure.results import Contender, Model, Results
from attnforge.benchmarks.report.growth_plot import growth_plot
from attnforge.benchmarks.report.order import precisions
from attnforge.benchmarks.report.plot_style import (
    Kind,
    dot,
    finished,
    in_words,
    marker_of,
    precision_dots,
    short_label,
)
from attnforge.benchmarks.report.roofline import roofline
from attnforge.report.charts import (
    BLUE,
    GREY,
    ORANGE,
    WIDTH,
    Picture,
    drawing,
    legend_above,
    literal,
    logarithmic_ticks,
)
from attnforge.report.render import milliseconds, rounded, with_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOGARITHMIC = 8
"""An axis is logarithmic where the largest number is more than this many times the smallest."""


def save_plots(results: Results, folder: str | os.PathLike[str]) -> list[Path]:
    """Write every plot of `results` that has something to show as a PNG.

    Returns:
        the files.
    """
    pictures = [("roofline", roofline(results, "png"))]
    for model in results.models:
        pictures.append((f"{model.name}-latency", latencies(model, "png")))
        pictures.append((f"{model.name}-ratios", ratios(model, "png")))
    for growth in results.growth:
        pictures.append((f"{growth.model}-time-over-{growth.along}", growth_plot(growth, "time", "png")))
        pictures.append((f"{growth.model}-memory-over-{growth.along}", growth_plot(growth, "memory", "png")))
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name, picture in pictures:
        if picture is not None:
            file = _unused(target, name, written)
            file.write_bytes(base64.b64decode(picture.src.partition(",")[2]))
            written.append(file)
    return written


def _unused(folder: Path, name: str, written: Sequence[Path]) -> Path:
    """A file of this name, with a number where the results have one model twice."""
    safe = re.sub(r"[^\w.-]+", "-", name).strip(".-") or "plot"
    names = [safe, *(f"{safe}-{i}" for i in range(2, len(written) + 2))]
    return next(file for file in (folder / f"{name}.png" for name in names) if file not in written)


# --- contenders -------------------------------------------------------------------------------------------------------


def latencies(model: Model, kind: Kind = "svg") -> Picture | None:
    """One row a contender, by its median: where its calls lie, and the median of every round."""
    contenders = sorted(model.contenders, key=lambda contender: contender.latency.median.value)
    if not contenders:
        return None
    rows = in_words([f"{contender.key} {milliseconds(contender.latency.median)}" for contender in contenders])
    alt = (
        f"Milliseconds a call of {model.name}, one row for each of {len(contenders)} contenders, the fastest first. "
        f"Medians: {rows}."
    )
    with drawing(WIDTH, 1.15 + 0.3 * len(contenders)) as figure:
        axes = figure.subplots()
        for y, contender in enumerate(contenders):
            _distribution(axes, y, contender)
        _scale(axes, [ms for c in contenders for ms in (c.latency.min, c.latency.median.low, c.latency.p99)])
        _name_rows(axes, contenders, [rounded(contender.latency.median.value) for contender in contenders])
        axes.set_xlabel("milliseconds a call; right: the median")
        _legend(figure, contenders)
        return finished(figure, kind, alt)


def _distribution(axes: Axes, y: int, contender: Contender) -> None:
    """A line from the fastest call to p99, a box of the middle half, the medians of the rounds, and of all calls."""
    latency, color, marker = contender.latency, _color(contender), marker_of(contender.precision)
    median = latency.median.value
    low, high = np.quantile([ms for calls in latency.rounds for ms in calls] or [median], [0.25, 0.75])
    axes.plot([latency.min, latency.p99], [y, y], color=color, linewidth=1, alpha=0.7, solid_capstyle="butt")
    axes.barh([y], [high - low], 0.56, left=[low], color=color, alpha=0.25)
    medians = [float(np.median(calls)) for calls in latency.rounds if calls]
    heights = y + np.linspace(-0.24, 0.24, len(medians)) if len(medians) > 1 else [y] * len(medians)
    axes.scatter(medians, heights, s=5, c=color, alpha=0.55, linewidths=0)
    axes.scatter([median], [y], s=28, c=color, marker=marker, edgecolors="white", linewidths=0.6, zorder=4)


def ratios(model: Model, kind: Kind = "svg") -> Picture | None:
    """One row a contender: its time over that of the picked backend at its precision, with the interval."""
    order = precisions(contender.precision for contender in model.contenders)
    compared = [(contender, contender.ratio) for contender in model.contenders if contender.ratio is not None]
    compared.sort(key=lambda pair: (order.index(pair[0].precision), pair[1].value))
    if not compared:
        return None
    contenders = [contender for contender, _ in compared]
    texts = [with_interval(ratio, 2) for _, ratio in compared]
    rows = in_words([f"{contender.key} {text}" for contender, text in zip(contenders, texts, strict=True)])
    alt = (
        f"Time of the contenders of {model.name} over that of the picked backend at the same precision, with 95% "
        f"intervals; below 1 is faster: {rows}."
    )
    with drawing(WIDTH, 1.15 + 0.3 * len(contenders)) as figure:
        axes = figure.subplots()
        axes.axvline(1, color=GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        for y, (contender, ratio) in enumerate(compared):
            color, marker = _color(contender), marker_of(contender.precision)
            axes.plot([ratio.low, ratio.high], [y, y], color=color, linewidth=2, solid_capstyle="butt")
            if y and contender.precision != contenders[y - 1].precision:
                axes.axhline(y - 0.5, color="#cccccc", linewidth=0.8)
            axes.scatter([ratio.value], [y], s=34, c=color, marker=marker, zorder=3)
        _scale(axes, [1, *(end for _, ratio in compared for end in (ratio.low, ratio.high))])
        _name_rows(axes, contenders, texts)
        axes.set_xlabel("times as long as the picked backend")
        _legend(figure, contenders)
        return finished(figure, kind, alt)


def _color(contender: Contender) -> str:
    return BLUE if contender.ours else ORANGE


def _name_rows(axes: Axes, rows: Sequence[Contender], right: Sequence[str]) -> None:
    """The contenders down the left side, the picked ones bold, and these texts down the right."""
    several = len({c.precision for c in rows}) > 1
    ends = (len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [short_label(c.name) + several * f" {c.precision}" for c in rows])
    for tick, contender in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_fontweight("bold" if contender.picked else "normal")
    axes.set_ylim(*ends)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#eeeeee")
    axes.set_axisbelow(True)
    other = axes.twinx()
    other.set_ylim(*ends)
    other.set_yticks(range(len(rows)), [literal(text) for text in right])
    other.tick_params(axis="y", length=0)
    for side in ("left", "right"):
        axes.spines[side].set_visible(False)
        other.spines[side].set_visible(False)


def _scale(axes: Axes, numbers: Sequence[float]) -> None:
    """An x axis for `numbers` with few plain ticks, logarithmic where they are far apart."""
    from matplotlib.ticker import MaxNLocator

    low, high = min(numbers), max(numbers)
    if low > 0 and high > LOGARITHMIC * low:
        axes.set_xscale("log")
        axes.set_xlim(low / 1.15, high * 1.15)
        logarithmic_ticks(axes.xaxis)
    else:
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1
        axes.set_xlim(low - room, high + room)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.10g}")


def _legend(figure: Figure, rows: Sequence[Contender]) -> None:
    """The legend of rows: the colours, and the markers where there are several."""
    handles = [
        dot(label, color=color)
        for label, color, ours in (("ours", BLUE, True), ("peers", ORANGE, False))
        if any(c.ours == ours for c in rows)
    ]
    legend_above(figure, [*handles, *precision_dots([c.precision for c in rows])])
