"""The plots of a benchmark: the times of one model's contenders, their ratios to the picked backend, and the roofline;
as pictures of a page and as files.

Colours distinguish ours from peers, or models and backends from each other; markers and dashes mark the precision.
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
from attnforge.bench.results import Contender, Model, Results, precisions
from attnforge.report import charts
from attnforge.report.render import milliseconds, rounded, with_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kind = Literal["svg", "png"]

MARKERS = {"fp32": "o", "fp16": "^", "bf16": "D", "tf32": "s", "auto": "P"}
DASHES: dict[str, Any] = {"fp32": "-", "fp16": (0, (5, 1.5)), "bf16": (0, (2, 1.5)), "tf32": (0, (6, 1.5, 1, 1.5))}
COLORS = {True: charts.BLUE, False: charts.ORANGE}
"""Colours of ours and of peers."""
OTHERS = (charts.ORANGE, "#7a4fa3", "#2f7d4f", "#b23a5c", "#8a6d3b", "#6b7480")
LONGEST, MOST_NAMED = 26, 8
"""Maximum characters of a label, and maximum contenders named in the text of a picture."""

PNG_DPI = 192

LOGARITHMIC = 8
"""An axis is logarithmic if the largest number is more than this many times the smallest."""


def save_plots(results: Results, folder: str | os.PathLike[str]) -> list[Path]:
    """Write every plot of `results` that is not empty as a PNG.

    Returns:
        the files.
    """
    pictures = [("roofline", roofline(results, "png"))]
    for model in results.models:
        pictures.append((f"{model.name}-latency", latencies(model, "png")))
        pictures.append((f"{model.name}-ratios", ratios(model, "png")))
    return save_pictures(pictures, folder)


def save_pictures(pictures: Iterable[tuple[str, charts.Picture | None]], folder: str | os.PathLike[str]) -> list[Path]:
    """Write PNG pictures that are not None, by name, and return the files."""
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
    """Return a file of this name, numbered if the results contain a model twice."""
    safe = re.sub(r"[^\w.-]+", "-", name).strip(".-") or "plot"
    names = [safe, *(f"{safe}-{i}" for i in range(2, len(written) + 2))]
    return next(file for file in (folder / f"{name}.png" for name in names) if file not in written)


# --- shared parts -----------------------------------------------------------------------------------------------------


def finished(figure: Figure, kind: Kind, alt: str) -> charts.Picture:
    """Return the figure as a picture; a PNG has twice the resolution."""
    return charts.embedded(figure, kind, alt, PNG_DPI if kind == "png" else 96)


def marker_of(precision: str) -> str:
    return MARKERS.get(precision, "X")


def in_words(rows: Sequence[str]) -> str:
    """Return the rows of a picture as text; of many rows only the first ones and the last."""
    if len(rows) <= MOST_NAMED:
        return "; ".join(rows)
    return f"{'; '.join(rows[: MOST_NAMED - 1])}; {len(rows) - MOST_NAMED} more; {rows[-1]}"


def short_label(name: str) -> str:
    return charts.literal(name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…")


def dot(label: str, color: str, marker: str = "o", is_filled: bool = True) -> Any:
    """Return a legend handle."""
    from matplotlib.lines import Line2D

    face = color if is_filled else "white"
    return Line2D([], [], color=color, marker=marker, markerfacecolor=face, linestyle="", label=short_label(label))


def precision_dots(names: Iterable[str]) -> list[Any]:
    """Return grey legend handles of the precisions if there are several."""
    ordered = precisions(names)
    return [dot(name, "#777777", marker_of(name)) for name in ordered] if len(ordered) > 1 else []


def both_logarithmic(axes: Axes) -> None:
    """Make both axes logarithmic, with few plain ticks and a grid."""
    axes.set(xscale="log", yscale="log")
    axes.autoscale_view()
    for axis in (axes.xaxis, axes.yaxis):
        charts.logarithmic_ticks(axis)
    axes.grid(color="#eeeeee")
    axes.set_axisbelow(True)


# --- contenders -------------------------------------------------------------------------------------------------------


def latencies(model: Model, kind: Kind = "svg") -> charts.Picture | None:
    """Draw one row per contender, by median: the distribution of its calls, and the median of every round."""
    contenders = sorted(model.contenders, key=lambda contender: contender.latency.median.value)
    rows = in_words([f"{contender.key} {milliseconds(contender.latency.median)}" for contender in contenders])
    alt = (
        f"Milliseconds per call of {model.name}, one row for each of {len(contenders)} contenders, fastest first. "
        f"Medians: {rows}."
    )

    def draw(axes: Axes) -> None:
        for y, contender in enumerate(contenders):
            _distribution(axes, y, contender)

    ends = [ms for c in contenders for ms in (c.latency.min, c.latency.median.low, c.latency.p99)]
    texts = [rounded(contender.latency.median.value) for contender in contenders]
    return _in_rows(contenders, texts, ends, "milliseconds per call; right: the median", draw, kind, alt)


def _distribution(axes: Axes, y: int, contender: Contender) -> None:
    """Draw a line from the fastest call to p99, a box of the middle half, the rounds' medians and the overall one."""
    latency, color, marker = contender.latency, COLORS[contender.ours], marker_of(contender.precision)
    median = latency.median.value
    low, high = np.quantile([ms for calls in latency.rounds for ms in calls] or [median], [0.25, 0.75])
    axes.plot([latency.min, latency.p99], [y, y], color=color, linewidth=1, alpha=0.7, solid_capstyle="butt")
    axes.barh([y], [high - low], 0.56, left=[low], color=color, alpha=0.25)
    medians = [float(np.median(calls)) for calls in latency.rounds if calls]
    heights = y + np.linspace(-0.24, 0.24, len(medians)) if len(medians) > 1 else [y] * len(medians)
    axes.scatter(medians, heights, s=5, c=color, alpha=0.55, linewidths=0)
    axes.scatter([median], [y], s=28, c=color, marker=marker, edgecolors="white", linewidths=0.6, zorder=4)


def ratios(model: Model, kind: Kind = "svg") -> charts.Picture | None:
    """Draw one row per contender: its time over that of the picked backend at its precision, with the interval."""
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
        axes.axvline(1, color=charts.GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        for y, (contender, ratio) in enumerate(compared):
            color, marker = COLORS[contender.ours], marker_of(contender.precision)
            axes.plot([ratio.low, ratio.high], [y, y], color=color, linewidth=2, solid_capstyle="butt")
            if y and contender.precision != contenders[y - 1].precision:
                axes.axhline(y - 0.5, color="#cccccc", linewidth=0.8)
            axes.scatter([ratio.value], [y], s=34, c=color, marker=marker, zorder=3)

    ends = [1, *(end for _, ratio in compared for end in (ratio.low, ratio.high))]
    return _in_rows(contenders, texts, ends, "times as long as the picked backend", draw, kind, alt)


def _in_rows(
    rows: Sequence[Contender], texts: Sequence[str], numbers: Sequence[float], xlabel: str,
    draw: Callable[[Axes], None], kind: Kind, alt: str,
) -> charts.Picture | None:  # fmt: skip
    """Draw a picture with one row per contender, the first on top; None if there are no contenders.

    Args:
        rows: the contenders.
        texts: labels on the right side.
        numbers: numbers that the x axis must cover.
        xlabel: label of the x axis.
        draw: draws the rows at y of 0, 1, ….
        kind: format of the picture.
        alt: alternative text of the picture.
    """
    if not rows:
        return None
    with charts.drawing(charts.WIDTH, 1.15 + 0.3 * len(rows)) as figure:
        axes = figure.subplots()
        draw(axes)
        _scale(axes, numbers)
        _name_rows(axes, rows, texts)
        axes.set_xlabel(xlabel)
        handles = [dot(label, COLORS[ours]) for label, ours in _whose(rows)]
        charts.legend_above(figure, [*handles, *precision_dots([contender.precision for contender in rows])])
        return finished(figure, kind, alt)


def _whose(contenders: Iterable[Contender]) -> list[tuple[str, bool]]:
    """Return the labels of ours and of peers, those that are among the contenders."""
    present = {contender.ours for contender in contenders}
    return [(label, ours) for label, ours in (("ours", True), ("peers", False)) if ours in present]


def _name_rows(axes: Axes, rows: Sequence[Contender], right: Sequence[str]) -> None:
    """Label the rows with the contenders on the left, the picked ones bold, and with `right` on the right."""
    several = len({c.precision for c in rows}) > 1
    axes.set_yticks(range(len(rows)), [short_label(c.name) + several * f" {c.precision}" for c in rows])
    for tick, contender in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_fontweight("bold" if contender.picked else "normal")
    axes.grid(axis="x", color="#eeeeee")
    axes.set_axisbelow(True)
    right_axes = axes.twinx()
    right_axes.set_yticks(range(len(rows)), [charts.literal(text) for text in right])
    for side in (axes, right_axes):
        side.set_ylim(len(rows) - 0.4, -0.6)
        side.tick_params(axis="y", length=0)
        side.spines[["left", "right"]].set_visible(False)


def _scale(axes: Axes, numbers: Sequence[float]) -> None:
    """Scale the x axis for `numbers`, with few plain ticks, logarithmic if they are far apart."""
    from matplotlib.ticker import MaxNLocator

    low, high = min(numbers), max(numbers)
    if low > 0 and high > LOGARITHMIC * low:
        axes.set_xscale("log")
        axes.set_xlim(low / 1.15, high * 1.15)
        charts.logarithmic_ticks(axes.xaxis)
    else:
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1
        axes.set_xlim(low - room, high + room)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.10g}")


# --- the roofline -----------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """A contender at `intensity` operations per byte, which computes `rate` · 10⁹ of them per second."""

    intensity: float
    rate: float
    model: Model
    contender: Contender


def roofline(results: Results, kind: Kind = "svg") -> charts.Picture | None:
    """Draw the roofline; None if the ceilings or the work of all contenders are unknown.

    The intensity is computed from the least bytes, so it is the same for all contenders of a model at a precision.
    """
    ceilings, points = results.ceilings, _points(results)
    if ceilings is None or not points or ceilings.bandwidth <= 0:
        return None
    with charts.drawing(charts.WIDTH, 4.6) as figure:
        axes = figure.subplots()
        xs = [p.intensity for p in points] + [flops / ceilings.bandwidth for flops in ceilings.flops.values()]
        handles = _draw_roofs(axes, ceilings, (min(xs) / 2.5, max(xs) * 2.5))
        names = dict.fromkeys(point.model.name for point in points)
        colors = dict(zip(names, itertools.cycle((charts.BLUE, *OTHERS)), strict=False))
        for x, y, model, contender in points:
            color, marker = colors[model.name], marker_of(contender.precision)
            face = color if contender.ours else "white"
            axes.scatter([x], [y], s=36, marker=marker, facecolors=face, edgecolors=color, linewidths=1.3, zorder=3)
        both_logarithmic(axes)
        axes.set(xlabel="floating-point operations per byte", ylabel="GFLOP/s")
        handles += [dot(name, color, "s") for name, color in colors.items()]
        handles += [dot(label, "#777777", is_filled=ours) for label, ours in _whose(p.contender for p in points)]
        charts.legend_above(figure, [*handles, *precision_dots(point.contender.precision for point in points)], most=3)
        return finished(figure, kind, _roofline_in_words(ceilings, points))


def _draw_roofs(axes: Axes, ceilings: Ceilings, ends: tuple[float, float]) -> list[Any]:
    """Draw a line for every precision: the memory bandwidth's roof up to that of matrix products."""
    lines = []
    for precision in precisions(ceilings.flops):
        top = ceilings.flops[precision]
        ridge = min(max(top / ceilings.bandwidth, ends[0]), ends[1])
        across = [ends[0], ridge, ends[1]]
        lines += axes.plot(
            across, [min(top, ceilings.bandwidth * x) / 1e9 for x in across], color="#555555", linewidth=1.4,
            linestyle=DASHES.get(precision, ":"), label=charts.literal(f"{precision}: {rounded(top / 1e9)} GFLOP/s"),
        )  # fmt: skip
    return lines


def _points(results: Results) -> list[Point]:
    """Return a point for every contender whose work is known."""
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
    best = {(point.model.name, point.contender.precision): point for point in sorted(points, key=lambda p: p.rate)}
    rows = [
        f"{model.name} has {rounded(x, 2)} operations per byte; its fastest contender is {contender.key} at "
        f"{rounded(y)} GFLOP/s"
        for x, y, model, contender in best.values()
    ]
    return f"Roofline. Ceilings: {roofs}, {rounded(ceilings.bandwidth / 1e9)} GB/s copied. {in_words(rows)}."
