"""The plots of a benchmark: where the times of one model's contenders lie, who is faster than the picked backend, the
roofline, and how time and memory grow; as pictures of a page and as files.

Colours tell ours from peers, or models and backends apart; the marker and the dashes are the precision's.
"""

from __future__ import annotations

import base64
import itertools
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from attnforge.atomic import write_whole
from attnforge.bench.limits import Ceilings
from attnforge.bench.results import Contender, Fit, Growth, Model, Results, Series, precisions
from attnforge.bench.tables import Measure, growth_tables
from attnforge.report.charts import (
    BLUE,
    GREY,
    ORANGE,
    WIDTH,
    Picture,
    drawing,
    embedded,
    legend_above,
    literal,
    logarithmic_ticks,
    ticks_apart,
)
from attnforge.report.render import interval, milliseconds, rounded, with_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kind = Literal["svg", "png"]

MARKERS = {"fp32": "o", "fp16": "^", "bf16": "D", "tf32": "s", "auto": "P"}
DASHES: dict[str, Any] = {"fp32": "-", "fp16": (0, (5, 1.5)), "bf16": (0, (2, 1.5)), "tf32": (0, (6, 1.5, 1, 1.5))}
BLUES = (BLUE, "#5b9bd5", "#0a3564", "#6f7fc4")
OTHERS = (ORANGE, "#7a4fa3", "#2f7d4f", "#b23a5c", "#8a6d3b", "#6b7480")
LONGEST, MOST_NAMED = 26, 8
"""Characters of a label, and contenders that the text of a picture names."""

PNG_DPI = 192

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
            write_whole(file, base64.b64decode(picture.src.partition(",")[2]))
            written.append(file)
    return written


def _unused(folder: Path, name: str, written: Sequence[Path]) -> Path:
    """A file of this name, with a number where the results have one model twice."""
    safe = re.sub(r"[^\w.-]+", "-", name).strip(".-") or "plot"
    names = [safe, *(f"{safe}-{i}" for i in range(2, len(written) + 2))]
    return next(file for file in (folder / f"{name}.png" for name in names) if file not in written)


# --- what they share --------------------------------------------------------------------------------------------------


def finished(figure: Figure, kind: Kind, alt: str) -> Picture:
    """The figure as a picture, a PNG in twice the resolution."""
    return embedded(figure, kind, alt, PNG_DPI if kind == "png" else 96)


def marker_of(precision: str) -> str:
    return MARKERS.get(precision, "X")


def in_words(rows: Sequence[str]) -> str:
    """The rows of a picture in words; of many rows the first and the last."""
    if len(rows) <= MOST_NAMED:
        return "; ".join(rows)
    return f"{'; '.join(rows[: MOST_NAMED - 1])}; {len(rows) - MOST_NAMED} more; {rows[-1]}"


def short_label(name: str) -> str:
    return literal(name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…")


def dot(label: str, color: str, marker: str = "o", is_filled: bool = True) -> Any:
    """A legend's handle."""
    from matplotlib.lines import Line2D

    face = color if is_filled else "white"
    return Line2D([], [], color=color, marker=marker, markerfacecolor=face, linestyle="", label=short_label(label))


def precision_dots(names: Iterable[str]) -> list[Any]:
    """Grey markers of the precisions, where there are several."""
    ordered = precisions(names)
    return [dot(name, "#777777", marker_of(name)) for name in ordered] if len(ordered) > 1 else []


def both_logarithmic(axes: Axes) -> None:
    """Two logarithmic axes with few plain ticks, and a grid."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.autoscale_view()
    for axis in (axes.xaxis, axes.yaxis):
        logarithmic_ticks(axis)
    axes.grid(color="#eeeeee")
    axes.set_axisbelow(True)


# --- contenders -------------------------------------------------------------------------------------------------------


def latencies(model: Model, kind: Kind = "svg") -> Picture | None:
    """One row a contender, by its median: where its calls lie, and the median of every round."""
    contenders = sorted(model.contenders, key=lambda contender: contender.latency.median.value)
    rows = in_words([f"{contender.key} {milliseconds(contender.latency.median)}" for contender in contenders])
    alt = (
        f"Milliseconds a call of {model.name}, one row for each of {len(contenders)} contenders, the fastest first. "
        f"Medians: {rows}."
    )

    def draw(axes: Axes) -> None:
        for y, contender in enumerate(contenders):
            _distribution(axes, y, contender)

    ends = [ms for c in contenders for ms in (c.latency.min, c.latency.median.low, c.latency.p99)]
    texts = [rounded(contender.latency.median.value) for contender in contenders]
    return _in_rows(contenders, texts, ends, "milliseconds a call; right: the median", draw, kind, alt)


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
    contenders = [contender for contender, _ in compared]
    texts = [with_interval(ratio, 2) for _, ratio in compared]
    rows = in_words([f"{contender.key} {text}" for contender, text in zip(contenders, texts, strict=True)])
    alt = (
        f"Time of the contenders of {model.name} over that of the picked backend at the same precision, with 95% "
        f"intervals; below 1 is faster: {rows}."
    )

    def draw(axes: Axes) -> None:
        axes.axvline(1, color=GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        for y, (contender, ratio) in enumerate(compared):
            color, marker = _color(contender), marker_of(contender.precision)
            axes.plot([ratio.low, ratio.high], [y, y], color=color, linewidth=2, solid_capstyle="butt")
            if y and contender.precision != contenders[y - 1].precision:
                axes.axhline(y - 0.5, color="#cccccc", linewidth=0.8)
            axes.scatter([ratio.value], [y], s=34, c=color, marker=marker, zorder=3)

    ends = [1, *(end for _, ratio in compared for end in (ratio.low, ratio.high))]
    return _in_rows(contenders, texts, ends, "times as long as the picked backend", draw, kind, alt)


def _color(contender: Contender) -> str:
    return BLUE if contender.ours else ORANGE


def _in_rows(
    rows: Sequence[Contender], texts: Sequence[str], numbers: Sequence[float], xlabel: str,
    draw: Callable[[Axes], None], kind: Kind, alt: str,
) -> Picture | None:  # fmt: skip
    """A picture of one row a contender, the first on top; None where there is none.

    Args:
        rows: the contenders.
        texts: down the right side.
        numbers: that the x axis has to hold.
        xlabel: what they are.
        draw: draws the rows at y of 0, 1, ….
        kind: of the picture.
        alt: the picture in words.
    """
    if not rows:
        return None
    with drawing(WIDTH, 1.15 + 0.3 * len(rows)) as figure:
        axes = figure.subplots()
        draw(axes)
        _scale(axes, numbers)
        _name_rows(axes, rows, texts)
        axes.set_xlabel(xlabel)
        handles = [
            dot(label, color=color)
            for label, color, ours in (("ours", BLUE, True), ("peers", ORANGE, False))
            if any(contender.ours == ours for contender in rows)
        ]
        legend_above(figure, [*handles, *precision_dots([contender.precision for contender in rows])])
        return finished(figure, kind, alt)


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


# --- the roofline -----------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """A contender at `intensity` operations a byte, which computes `rate` · 10⁹ of them a second."""

    intensity: float
    rate: float
    model: Model
    contender: Contender


def roofline(results: Results, kind: Kind = "svg") -> Picture | None:
    """Draw the roofline; None where the ceilings or the work of all contenders are unknown.

    The intensity is that of the least bytes, so all contenders of a model at a precision have the same.
    """
    ceilings, points = results.ceilings, _points(results)
    if ceilings is None or not points or ceilings.bandwidth <= 0:
        return None
    with drawing(WIDTH, 4.6) as figure:
        axes = figure.subplots()
        xs = [p.intensity for p in points] + [flops / ceilings.bandwidth for flops in ceilings.flops.values()]
        handles = _draw_roofs(axes, ceilings, (min(xs) / 2.5, max(xs) * 2.5))
        names = dict.fromkeys(point.model.name for point in points)
        colors = dict(zip(names, itertools.cycle((BLUE, *OTHERS)), strict=False))
        for x, y, model, contender in points:
            color, marker = colors[model.name], marker_of(contender.precision)
            face = color if contender.ours else "white"
            axes.scatter([x], [y], s=36, marker=marker, facecolors=face, edgecolors=color, linewidths=1.3, zorder=3)
        both_logarithmic(axes)
        axes.set_xlabel("floating-point operations a byte")
        axes.set_ylabel("GFLOP/s")
        handles += [dot(name, color, "s") for name, color in colors.items()]
        for label, ours in (("ours", True), ("peers", False)):
            if any(point.contender.ours == ours for point in points):
                handles.append(dot(label, "#777777", "o", is_filled=ours))
        legend_above(figure, [*handles, *precision_dots(point.contender.precision for point in points)], most=3)
        return finished(figure, kind, _roofline_in_words(ceilings, points))


def _draw_roofs(axes: Axes, ceilings: Ceilings, ends: tuple[float, float]) -> list[Any]:
    """Draw a line for every precision: what copying allows, up to what products allow."""
    lines = []
    for precision in precisions(ceilings.flops):
        top = ceilings.flops[precision]
        ridge = min(max(top / ceilings.bandwidth, ends[0]), ends[1])
        across = [ends[0], ridge, ends[1]]
        lines += axes.plot(
            across, [min(top, ceilings.bandwidth * x) / 1e9 for x in across], color="#555555", linewidth=1.4,
            linestyle=DASHES.get(precision, ":"), label=literal(f"{precision}: {rounded(top / 1e9)} GFLOP/s"),
        )  # fmt: skip
    return lines


def _points(results: Results) -> list[Point]:
    """A point for every contender whose work is known."""
    return [
        Point(work.intensity, work.flops / (1e6 * contender.latency.median.value), model, contender)
        for model in results.models
        for contender in model.contenders
        if (work := model.work.get(contender.precision)) is not None
        and work.flops
        and contender.latency.median.value > 0
    ]


def _roofline_in_words(ceilings: Ceilings, points: Sequence[Point]) -> str:
    roofs = ", ".join(f"{rounded(flops / 1e9)} GFLOP/s in {name}" for name, flops in ceilings.flops.items())
    best: dict[tuple[str, str], Point] = {}
    for point in sorted(points, key=lambda point: point.rate):
        best[point.model.name, point.contender.precision] = point
    rows = [
        f"{model.name} has {rounded(x, 2)} operations a byte, of its contenders {contender.key} does most, "
        f"{rounded(y)} GFLOP/s"
        for x, y, model, contender in best.values()
    ]
    return f"Roofline. The machine at best: {roofs}, {rounded(ceilings.bandwidth / 1e9)} GB/s copied. {in_words(rows)}."


# --- growth -----------------------------------------------------------------------------------------------------------


def growth_plot(growth: Growth, measure: Measure, kind: Kind = "svg") -> Picture | None:
    """Draw time a call, or the memory that a call adds, over sizes, both logarithmic; None where there is neither."""
    lines = [
        (series, readings, fit)
        for grown in growth_tables(growth)
        if grown.measure == measure
        for series, values, fit in grown.rows
        if (readings := [(size, value) for size, value in zip(growth.sizes, values, strict=True) if (value or 0) > 0])
    ]  # without zeros, which have no logarithm
    if not lines:
        return None
    unit = "milliseconds a call" if measure == "time" else "MiB that one call adds"
    with drawing(WIDTH, 3.1 + 0.19 * len(lines)) as figure:
        axes = figure.subplots()
        colors, handles, words = _colors([series for series, *_ in lines]), [], []
        for series, readings, fit in lines:
            sizes, values = zip(*readings, strict=True)
            handles += axes.plot(
                sizes, values, color=colors[series.name], linestyle=DASHES.get(series.precision, ":"), linewidth=1.7,
                marker=marker_of(series.precision), markersize=5,
                label=f"{short_label(series.name)} {series.precision}{_law(growth.along, fit, True)}",
            )  # fmt: skip
            smallest, largest = (f"{rounded(values[i])} at {sizes[i]:,}" for i in (0, -1))
            law = _law(growth.along, fit, False)
            words.append(f"{series.name} {series.precision} {smallest}, {largest}{law}")
        both_logarithmic(axes)
        ticks = ticks_apart([size for _, readings, _ in lines for size, _ in readings], logarithmic=True)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_xlabel(literal(growth.along))
        axes.set_ylabel(unit)
        legend_above(figure, handles)
        title = f"{unit[0].upper()}{unit[1:]} of {growth.model} over {growth.along}, both axes logarithmic"
        return finished(figure, kind, f"{title}: {in_words(words)}.")


def _law(along: str, fit: Fit | None, is_drawn: bool) -> str:
    """`: ~ tokens^1.98 (1.95–2.01)`, the exponent raised where it is drawn; nothing where there is no fit."""
    if fit is None:
        return ""
    power = f"$^{{{fit.exponent.value:.2f}}}$" if is_drawn else f"^{fit.exponent.value:.2f}"
    ends = interval(fit.exponent, 2)
    return f": ~ {literal(along) if is_drawn else along}{power}" + (f" ({ends})" if ends else "")


def _colors(lines: Sequence[Series]) -> dict[str, str]:
    """A colour by name, whatever the precision: blues for ours, other colours for peers."""
    ours = list(dict.fromkeys(series.name for series in lines if series.ours))
    peers = list(dict.fromkeys(series.name for series in lines if not series.ours))
    palettes = [(ours, BLUES), (peers, OTHERS)]
    return {name: palette[i % len(palette)] for names, palette in palettes for i, name in enumerate(names)}
