"""The pictures of a benchmark: how the times of every contender lie, who is faster than what is picked, how near to the
machine's limit they come, and how time and memory grow. Drawn as a verification's are (:mod:`attnforge.report.charts`):
colour tells ours from peers, or models or backends apart; the marker is the precision's."""

from __future__ import annotations

import base64
import itertools
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from attnforge.benchmarks.measure.limits import Ceilings
from attnforge.benchmarks.measure.results import Contender, Fit, Growth, Interval, Model, Results, Series
from attnforge.report.charts import (
    BACKEND,
    BUDGET,
    EAGER,
    WIDTH,
    Picture,
    drawing,
    embedded,
    literal,
    ticks_apart,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Kind = Literal["svg", "png"]
Measure = Literal["time", "memory"]
Point = tuple[float, float, Model, Contender]

MARKERS = {"fp32": "o", "fp16": "^", "bf16": "D", "tf32": "s", "auto": "P"}
DASHES: dict[str, Any] = {"fp32": "-", "fp16": (0, (5, 1.5)), "bf16": (0, (2, 1.5)), "tf32": (0, (6, 1.5, 1, 1.5))}
BLUES = (BACKEND, "#5b9bd5", "#0a3564", "#6f7fc4")
OTHERS = (EAGER, "#7a4fa3", "#2f7d4f", "#b23a5c", "#8a6d3b", "#6b7480")
LOGARITHMIC = 8
"""Where the largest number is more than so many times the smallest, an axis is logarithmic."""
LONGEST, MOST_SAID = 26, 8
"""Characters of a label, and contenders that the text of a picture names."""
PNG_DPI = 192


def save_plots(results: Results, folder: str | os.PathLike[str]) -> list[Path]:
    """Write every picture of `results` that there is something to draw for as a PNG, and say which files."""
    drawn = [("roofline", roofline(results, "png"))]
    for model in results.models:
        drawn += [(f"{model.name}-latency", latencies(model, "png")), (f"{model.name}-ratios", ratios(model, "png"))]
    for one in results.growth:
        drawn += [(f"{one.model}-{what}-over-{one.along}", growth(one, what, "png")) for what in ("time", "memory")]
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name, picture in drawn:
        if picture is not None:
            file = _unused(target, name, written)
            file.write_bytes(base64.b64decode(picture.src.partition(",")[2]))
            written.append(file)
    return written


def _finished(figure: Figure, kind: Kind, alt: str) -> Picture:
    return embedded(figure, kind, alt, PNG_DPI if kind == "png" else 96)


def _unused(folder: Path, name: str, written: Sequence[Path]) -> Path:
    """A file of that name, with a number where one model stands in the results twice."""
    safe = re.sub(r"[^\w.-]+", "-", name).strip(".-") or "plot"
    names = [safe, *(f"{safe}-{i}" for i in range(2, len(written) + 2))]
    return next(file for file in (folder / f"{one}.png" for one in names) if file not in written)


# --- numbers in words -------------------------------------------------------------------------------------------------


def places(numbers: Iterable[float | None], digits: int = 3) -> int:
    """Decimals that show the smallest of `numbers` to so many digits, and the largest to no more than two beyond."""
    known = [abs(n) for n in numbers if n]
    if not known:
        return 0
    low, high = (math.floor(math.log10(n)) for n in (min(known), max(known)))
    return max(0, min(digits - 1 - low, digits + 1 - high, 6))


def shown(number: float | None, digits: int = 3) -> str:
    """`number` to so many digits, never as a power of ten."""
    return "–" if number is None else f"{number:,.{places([number], digits)}f}"


def interval(found: Interval, decimals: int | None = None) -> str:
    """`low–high`, by default to as many decimals as :func:`shown` gives the value."""
    decimals = places([found.value]) if decimals is None else decimals
    return f"{found.low:,.{decimals}f}–{found.high:,.{decimals}f}"


def precisions(names: Iterable[str]) -> list[str]:
    """Each of them once, fp32 first, then as they come."""
    return sorted(dict.fromkeys(names), key=lambda name: name != "fp32")


# --- one model --------------------------------------------------------------------------------------------------------


def latencies(model: Model, kind: Kind = "svg") -> Picture | None:
    """One row a contender, by its median: where its calls lie, and the median of every round."""
    rows = sorted(model.contenders, key=lambda c: c.latency.median.value)
    if not rows:
        return None
    said = [f"{c.key} {shown(c.latency.median.value)} ms (95%: {interval(c.latency.median)})" for c in rows]
    alt = (
        f"Milliseconds a call of {model.name}, one row for each of {len(rows)} contenders, the fastest first. Medians: "
        f"{_some(said)}."
    )
    with drawing(WIDTH, 1.15 + 0.3 * len(rows)) as figure:
        axes = figure.subplots()
        for y, one in enumerate(rows):
            _distribution(axes, y, one)
        _scale(axes, [n for c in rows for n in (c.latency.min, c.latency.median.low, c.latency.p99)])
        _name_rows(axes, rows, [shown(c.latency.median.value) for c in rows])
        axes.set_xlabel("milliseconds a call; right: the median")
        _whose(figure, rows)
        return _finished(figure, kind, alt)


def _distribution(axes: Axes, y: int, one: Contender) -> None:
    """A line from the fastest call to p99, a box of the middle half, the medians of the rounds, and of all calls."""
    found, color = one.latency, _color(one)
    calls = [ms for calls in found.rounds for ms in calls] or [found.median.value]
    low, high = np.quantile(calls, [0.25, 0.75])
    axes.plot([found.min, found.p99], [y, y], color=color, linewidth=1, alpha=0.7, solid_capstyle="butt")
    axes.barh([y], [high - low], 0.56, left=[low], color=color, alpha=0.25)
    medians = [float(np.median(calls)) for calls in found.rounds if calls]
    above = y + np.linspace(-0.24, 0.24, len(medians)) if len(medians) > 1 else [y] * len(medians)
    axes.scatter(medians, above, s=5, c=color, alpha=0.55, linewidths=0)
    marker = MARKERS.get(one.precision, "X")
    axes.scatter([found.median.value], [y], s=28, c=color, marker=marker, edgecolors="white", linewidths=0.6, zorder=4)


def ratios(model: Model, kind: Kind = "svg") -> Picture | None:
    """One row a contender: its time over that of the picked backend at its precision, with the interval."""
    order = precisions(c.precision for c in model.contenders)
    held = [(c, c.ratio) for c in model.contenders if c.ratio is not None]
    held.sort(key=lambda one: (order.index(one[0].precision), one[1].value))
    if not held:
        return None
    texts = [f"{ratio.value:.2f} ({interval(ratio, 2)})" for _, ratio in held]
    said = [f"{c.key} {text}" for (c, _), text in zip(held, texts, strict=True)]
    alt = (
        f"Time of the contenders of {model.name} over that of the picked backend at the same precision, with 95% "
        f"intervals; below 1 is faster: {_some(said)}."
    )
    rows = [c for c, _ in held]
    with drawing(WIDTH, 1.15 + 0.3 * len(rows)) as figure:
        axes = figure.subplots()
        axes.axvline(1, color=BUDGET, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        for y, (one, ratio) in enumerate(held):
            color = _color(one)
            axes.plot([ratio.low, ratio.high], [y, y], color=color, linewidth=2, solid_capstyle="butt")
            if y and one.precision != rows[y - 1].precision:
                axes.axhline(y - 0.5, color="#cccccc", linewidth=0.8)
            axes.scatter([ratio.value], [y], s=34, c=color, marker=MARKERS.get(one.precision, "X"), zorder=3)
        _scale(axes, [1, *(n for _, ratio in held for n in (ratio.low, ratio.high))])
        _name_rows(axes, rows, texts)
        axes.set_xlabel("times as long as the picked backend")
        _whose(figure, rows)
        return _finished(figure, kind, alt)


def _color(one: Contender) -> str:
    return BACKEND if one.ours else EAGER


def _some(said: Sequence[str]) -> str:
    """What a picture says in words of its rows; of many rows the first and the last."""
    if len(said) <= MOST_SAID:
        return "; ".join(said)
    return f"{'; '.join(said[: MOST_SAID - 1])}; {len(said) - MOST_SAID} more; {said[-1]}"


def _name_rows(axes: Axes, rows: Sequence[Contender], right: Sequence[str]) -> None:
    """The contenders down the left side, the picked ones bold, and these texts down the right."""
    several = len({c.precision for c in rows}) > 1
    ends = (len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [_label(c.name) + several * f" {c.precision}" for c in rows])
    for tick, one in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_fontweight("bold" if one.picked else "normal")
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


def _label(name: str) -> str:
    return literal(name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…")


def _scale(axes: Axes, numbers: Sequence[float]) -> None:
    """An x axis for `numbers` with few plain ticks, logarithmic where they are far apart."""
    from matplotlib.ticker import MaxNLocator

    low, high = min(numbers), max(numbers)
    if low > 0 and high > LOGARITHMIC * low:
        axes.set_xscale("log")
        axes.set_xlim(low / 1.15, high * 1.15)
        _logarithmic_ticks(axes.xaxis)
    else:
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1
        axes.set_xlim(low - room, high + room)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.10g}")


def _logarithmic_ticks(axis: Axis) -> None:
    """1, 2 and 5 of every decade, or fewer where there are many."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axis.get_view_interval()
    subs = (1, 2, 5) if high < 50 * low else (1, 3) if high < 1000 * low else (1,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda x, _: f"{x:,.10g}")


def _whose(figure: Figure, rows: Sequence[Contender]) -> None:
    """The legend of rows: the colours, and the markers where there are several."""
    handles = [
        _dot(label, color=color)
        for label, color, ours in (("ours", BACKEND, True), ("peers", EAGER, False))
        if any(c.ours == ours for c in rows)
    ]
    _above(figure, [*handles, *_precision_dots([c.precision for c in rows])])


def _precision_dots(names: Iterable[str]) -> list[Any]:
    """Grey markers of the precisions, where there are several."""
    known = precisions(names)
    return [_dot(name, "#777777", MARKERS.get(name, "X")) for name in known] if len(known) > 1 else []


def _dot(label: str, color: str, marker: str = "o", is_filled: bool = True) -> Any:
    from matplotlib.lines import Line2D

    face = color if is_filled else "white"
    return Line2D([], [], color=color, marker=marker, markerfacecolor=face, linestyle="", label=_label(label))


def _above(figure: Figure, handles: Sequence[Any], most: int = 6) -> None:
    """A legend above the axes, in as many columns as its labels leave room for."""
    longest = max((len(re.sub(r"[$^{}\\]", "", str(handle.get_label()))) for handle in handles), default=0)
    figure.legend(
        handles=list(handles),
        loc="outside upper left",
        ncols=max(1, min(most, int(72 / (longest + 6)))),
        handlelength=1.6,
        handletextpad=0.5,
        columnspacing=1.4,
    )


# --- the machine's limit ----------------------------------------------------------------------------------------------


def roofline(results: Results, kind: Kind = "svg") -> Picture | None:
    """What the machine can do at best at every intensity, and what every contender of every model reaches.

    The intensity is that of the least bytes, so all contenders of a model at a precision have the same.
    """
    ceilings, points = results.ceilings, _points(results)
    if ceilings is None or not points or ceilings.bandwidth <= 0:
        return None
    with drawing(WIDTH, 4.6) as figure:
        axes = figure.subplots()
        xs = [x for x, *_ in points] + [flops / ceilings.bandwidth for flops in ceilings.flops.values()]
        handles = _roofs(axes, ceilings, (min(xs) / 2.5, max(xs) * 2.5))
        names = dict.fromkeys(model.name for _, _, model, _ in points)
        colors = dict(zip(names, itertools.cycle((BACKEND, *OTHERS)), strict=False))
        for x, y, model, one in points:
            color, marker = colors[model.name], MARKERS.get(one.precision, "X")
            face = color if one.ours else "white"
            axes.scatter([x], [y], s=36, marker=marker, facecolors=face, edgecolors=color, linewidths=1.3, zorder=3)
        _both_logarithmic(axes)
        axes.set_xlabel("floating-point operations a byte")
        axes.set_ylabel("GFLOP/s")
        handles += [_dot(name, color, "s") for name, color in colors.items()]
        for label, ours in (("ours", True), ("peers", False)):
            if any(one.ours == ours for *_, one in points):
                handles.append(_dot(label, "#777777", "o", is_filled=ours))
        _above(figure, [*handles, *_precision_dots(one.precision for *_, one in points)], most=3)
        return _finished(figure, kind, _roofline_in_words(ceilings, points))


def _roofs(axes: Axes, ceilings: Ceilings, ends: tuple[float, float]) -> list[Any]:
    """A line for every precision: what copying allows, up to what products allow."""
    lines = []
    for precision in precisions(ceilings.flops):
        top = ceilings.flops[precision]
        ridge = min(max(top / ceilings.bandwidth, ends[0]), ends[1])
        across = [ends[0], ridge, ends[1]]
        lines += axes.plot(
            across, [min(top, ceilings.bandwidth * x) / 1e9 for x in across], color="#555555", linewidth=1.4,
            linestyle=DASHES.get(precision, ":"), label=literal(f"{precision}: {shown(top / 1e9)} GFLOP/s"),
        )  # fmt: skip
    return lines


def _points(results: Results) -> list[Point]:
    """Of every contender whose work is known: operations a byte, and 10⁹ of them a second."""
    return [
        (work.intensity, work.flops / (1e6 * one.latency.median.value), model, one)
        for model in results.models
        for one in model.contenders
        if (work := model.work.get(one.precision)) is not None and work.flops and one.latency.median.value > 0
    ]


def _roofline_in_words(ceilings: Ceilings, points: Sequence[Point]) -> str:
    roofs = ", ".join(f"{shown(flops / 1e9)} GFLOP/s in {name}" for name, flops in ceilings.flops.items())
    best: dict[tuple[str, str], Point] = {}
    for point in sorted(points, key=lambda point: point[1]):
        best[point[2].name, point[3].precision] = point
    said = [
        f"{model.name} has {shown(x, 2)} operations a byte, of its contenders {one.key} does most, {shown(y)} GFLOP/s"
        for x, y, model, one in best.values()
    ]
    return f"Roofline. The machine at best: {roofs}, {shown(ceilings.bandwidth / 1e9)} GB/s copied. {_some(said)}."


def _both_logarithmic(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.autoscale_view()
    for axis in (axes.xaxis, axes.yaxis):
        _logarithmic_ticks(axis)
    axes.grid(color="#eeeeee")
    axes.set_axisbelow(True)


# --- growth -----------------------------------------------------------------------------------------------------------


def growth(one: Growth, what: Measure, kind: Kind = "svg") -> Picture | None:
    """Time a call, or the memory that it adds, over sizes, both logarithmic, with the exponents in the legend."""
    lines = [(series, known) for series in one.series if (known := _known(one, series, what))]
    if not lines:
        return None
    unit = "milliseconds a call" if what == "time" else "MiB that one call adds"
    said = [
        f"{series.name} {series.precision} {shown(known[0][1])} at {known[0][0]:,}, {shown(known[-1][1])} at "
        f"{known[-1][0]:,}{_law(one.along, _fit(series, what), False)}"
        for series, known in lines
    ]
    alt = f"{unit[0].upper()}{unit[1:]} of {one.model} over {one.along}, both axes logarithmic: {_some(said)}."
    with drawing(WIDTH, 3.1 + 0.19 * len(lines)) as figure:
        axes = figure.subplots()
        colors, handles = _series_colors([series for series, _ in lines]), []
        for series, known in lines:
            sizes, values = zip(*known, strict=True)
            label = f"{_label(series.name)} {series.precision}{_law(one.along, _fit(series, what), True)}"
            handles += axes.plot(
                sizes, values, color=colors[series.name], linestyle=DASHES.get(series.precision, ":"), linewidth=1.7,
                marker=MARKERS.get(series.precision, "X"), markersize=5, label=label,
            )  # fmt: skip
        _both_logarithmic(axes)
        ticks = ticks_apart([size for _, known in lines for size, _ in known], logarithmic=True)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_xlabel(literal(one.along))
        axes.set_ylabel(unit)
        _above(figure, handles)
        return _finished(figure, kind, alt)


def _known(one: Growth, series: Series, what: Measure) -> list[tuple[int, float]]:
    """Sizes and what was measured there; a logarithm takes no zero."""
    values = series.ms if what == "time" else series.extra_mib
    return [(size, value) for size, value in zip(one.sizes, values, strict=False) if value is not None and value > 0]


def _fit(series: Series, what: Measure) -> Fit | None:
    return series.time if what == "time" else series.memory


def _law(along: str, fit: Fit | None, is_drawn: bool) -> str:
    """`: ~ tokens^1.98 (1.95–2.01)`, the exponent raised where it is drawn; nothing where there is no fit."""
    if fit is None:
        return ""
    power = f"$^{{{fit.exponent.value:.2f}}}$" if is_drawn else f"^{fit.exponent.value:.2f}"
    return f": ~ {literal(along) if is_drawn else along}{power} ({interval(fit.exponent, 2)})"


def _series_colors(lines: Sequence[Series]) -> dict[str, str]:
    """Blue for ours, the others' for peers: one a name, whatever its precision."""
    ours = list(dict.fromkeys(s.name for s in lines if s.ours))
    peers = list(dict.fromkeys(s.name for s in lines if not s.ours))
    named = [(ours, BLUES), (peers, OTHERS)]
    return {name: palette[i % len(palette)] for names, palette in named for i, name in enumerate(names)}
