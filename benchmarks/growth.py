"""Growth of time and memory with a quantity such as tokens or layers: exponents, tables, plots, the comparison of two
runs, and the page of results that contain it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jinja2
import numpy as np

from attnforge.bench import compare as bench_compare
from attnforge.bench import plots
from attnforge.bench.compare import MEMORY_MIB, Differences, move
from attnforge.bench.interval import student
from attnforge.bench.page import page_values
from attnforge.bench.plots import DASHES, OTHERS, both_logarithmic, finished, in_words, marker_of, short_label
from attnforge.bench.results import Contender, Fit, Growth, Interval, Results, Series
from attnforge.report import render
from attnforge.report.charts import BLUE, WIDTH, Picture, drawing, legend_above, literal

Measure = Literal["time", "memory"]
MEASURES: tuple[Measure, ...] = ("time", "memory")

BLUES = (BLUE, "#5b9bd5", "#0a3564", "#6f7fc4")

EXPONENT = 0.15
"""Increase of an exponent that is not a regression yet."""


def fit_of(sizes: Sequence[float], values: Sequence[float | None]) -> Fit | None:
    """Fit the exponent of the power law that `values` follow over `sizes`, which are positive and distinct.

    Values that are None or not positive are left out. Two points give an exponent without an interval: its ends are the
    exponent itself.

    Returns:
        the fit; None if fewer than two points are left.
    """
    points = [(size, value) for size, value in zip(sizes, values, strict=True) if value is not None and value > 0]
    if len(points) < 2:
        return None
    x, y = np.log(sorted(points)).T
    centred = x - x.mean()
    spread = float(centred @ centred)
    exponent = float(centred @ y) / spread
    half, freedom = 0.0, len(points) - 2
    if freedom:
        residuals = y - y.mean() - exponent * centred
        half = student(freedom) * math.sqrt(float(residuals @ residuals) / freedom / spread)
    return Fit(
        exponent=Interval(value=exponent, low=exponent - half, high=exponent + half),
        last=float((y[-1] - y[-2]) / (x[-1] - x[-2])),
    )


# --- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GrowthTable:
    """Time or memory of every series over the sizes, and its fitted law; None where a series was not measured."""

    measure: Measure
    unit: str
    rows: list[tuple[Series, list[float | None], Fit | None]]
    decimals: int


def growth_tables(growth: Growth) -> list[GrowthTable]:
    """Return the table of time, and that of memory if any was measured."""
    count = len(growth.sizes)
    tables = []
    for measure, unit in zip(MEASURES, ("ms per call", "MiB added per call"), strict=True):
        is_time = measure == "time"
        rows = [
            (s, [*(s.ms if is_time else s.extra_mib), *[None] * count][:count], s.time if is_time else s.memory)
            for s in growth.series
        ]
        numbers = [number for _, values, _ in rows for number in values]
        if any(number is not None for number in numbers):
            tables.append(GrowthTable(measure, unit, rows, render.places(numbers, 2)))
    return tables


def growth_table(growth: Growth) -> str:
    """Return time over the sizes as Markdown, followed by memory if any was measured."""
    tables = []
    for grown in growth_tables(growth):
        head = (
            *(grown.unit, "precision"),
            *(f"{size:,} {growth.along}" for size in growth.sizes),
            *(f"~ {growth.along}^ (95%)", "between the last two"),
        )
        rows = [
            (
                named(series),
                series.precision,
                *(render.fixed(value, grown.decimals) for value in values),
                render.with_interval(fit.exponent, 2) if fit else render.NOTHING,
                f"{fit.last:.2f}" if fit else render.NOTHING,
            )
            for series, values, fit in grown.rows
        ]
        tables.append(render.markdown_table(head, rows, words=2))
    return "\n\n".join(tables)


def named(contender: Contender | Series) -> str:
    """Return a name as Markdown, ours in bold."""
    return f"**{contender.name}**" if contender.ours else contender.name


# --- pictures ---------------------------------------------------------------------------------------------------------


def growth_plot(growth: Growth, measure: Measure, kind: plots.Kind = "svg") -> Picture | None:
    """Draw time per call, or memory added per call, over sizes, both logarithmic; None if there are no readings."""
    lines = [
        (series, readings, fit)
        for grown in growth_tables(growth)
        if grown.measure == measure
        for series, values, fit in grown.rows
        if (readings := [(size, value) for size, value in zip(growth.sizes, values, strict=True) if (value or 0) > 0])
    ]  # without zeros, which have no logarithm
    if not lines:
        return None
    unit = "milliseconds per call" if measure == "time" else "MiB added per call"
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
            smallest, largest = (f"{render.rounded(values[i])} at {sizes[i]:,}" for i in (0, -1))
            words.append(f"{series.name} {series.precision} {smallest}, {largest}{_law(growth.along, fit, False)}")
        both_logarithmic(axes)
        ticks = ticks_apart([size for _, readings, _ in lines for size, _ in readings])
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_xlabel(literal(growth.along))
        axes.set_ylabel(unit)
        legend_above(figure, handles)
        title = f"{unit[0].upper()}{unit[1:]} of {growth.model} over {growth.along}, both axes logarithmic"
        return finished(figure, kind, f"{title}: {in_words(words)}.")


def _law(along: str, fit: Fit | None, is_drawn: bool) -> str:
    """Return `: ~ tokens^1.98 (1.95–2.01)`, with the exponent as superscript in a drawing; empty without a fit."""
    if fit is None:
        return ""
    power = f"$^{{{fit.exponent.value:.2f}}}$" if is_drawn else f"^{fit.exponent.value:.2f}"
    ends = render.interval(fit.exponent, 2)
    return f": ~ {literal(along) if is_drawn else along}{power}" + (f" ({ends})" if ends else "")


def _colors(lines: Sequence[Series]) -> dict[str, str]:
    """Return a colour for every name, independent of the precision: blues for ours, other colours for peers."""
    ours = list(dict.fromkeys(series.name for series in lines if series.ours))
    peers = list(dict.fromkeys(series.name for series in lines if not series.ours))
    palettes = [(ours, BLUES), (peers, OTHERS)]
    return {name: palette[i % len(palette)] for names, palette in palettes for i, name in enumerate(names)}


def ticks_apart(sizes: Sequence[int]) -> list[int]:
    """Select sizes that are far enough apart for their labels on a logarithmic axis, including the smallest and the
    largest."""
    known = sorted(set(sizes))
    room = (known[-1] / known[0]) ** 0.16
    kept = known[:1]
    for size in known[1:-1]:
        if min(size / kept[-1], known[-1] / size) >= room:
            kept.append(size)
    return kept + known[1:][-1:]


# --- comparing two runs -----------------------------------------------------------------------------------------------


def compare(old: Results, new: Results) -> Differences:
    """Return what changed from the old run to the new one, with the exponents of series that are in both."""
    differences = bench_compare.compare(old, new)
    before, after = ({f"{g.model} over {g.along}": g for g in run.growth} for run in (old, new))
    for label, now in after.items():
        if label in before:
            _growth(label, before[label], now, differences)
    return differences


def _growth(label: str, before: Growth, after: Growth, differences: Differences) -> None:
    if before.sizes != after.sizes:
        sizes = [", ".join(map(str, growth.sizes)) for growth in (before, after)]
        differences.notes.append(f"{label}: not compared; sizes {sizes[0]} before, {sizes[1]} now")
        return
    was, now = ({f"{series.name} {series.precision}": series for series in growth.series} for growth in (before, after))
    differences.notes += [f"{label}, {key}: only in the new run" for key in now if key not in was]
    for key, series in was.items():
        if key in now:
            _exponents(after, key, series, now[key], differences)
        elif series.ours:
            what, reason = f"growth over {after.along}, gone", "missing from the new run"
            differences.moved.append(move(after.model, key, what, None, None, regression=True, reason=reason))
        else:
            differences.notes.append(f"{label}, {key}: only in the old run")


def _exponents(growth: Growth, key: str, before: Series, after: Series, differences: Differences) -> None:
    """Add the exponents that differ beyond their intervals, and between the two largest sizes too. A few MiB have no
    reliable exponent."""
    for kind, was, now, values, least in (
        ("time", before.time, after.time, (before.ms, after.ms), 0.0),
        ("memory", before.memory, after.memory, (before.extra_mib, after.extra_mib), MEMORY_MIB),
    ):
        at = [[i for i, value in enumerate(series) if value is not None] for series in values]
        if at[0] != at[1]:
            why = "; ".join(after.notes) or "the new run gives no reason"
            label = f"{growth.model} over {growth.along}, {key}"
            differences.notes.append(f"{label}: {kind} was measured at other sizes than before: {why}")
        elif was is not None and now is not None:
            more = now.exponent.value - was.exponent.value, now.last - was.last
            largest = max((value for series in values for value in series if value is not None), default=0.0)
            low, high = sorted((was.exponent, now.exponent), key=lambda exponent: exponent.value)
            if largest > least and high.low > low.high and (min(more) > EXPONENT or max(more) < -EXPONENT):
                grown = move(
                    growth.model, key, f"exponent of {kind} over {growth.along}", was.exponent.value,
                    now.exponent.value, regression=after.ours and min(more) > 0,
                    reason=f"between the two largest sizes {was.last:.2f} before, {now.last:.2f} now",
                )  # fmt: skip
                differences.moved.append(grown)


# --- the page ---------------------------------------------------------------------------------------------------------


def write_page(results: Results, path: Path, compared: Sequence[str] | None = None) -> None:
    """Write the page of results, overwriting the file; `compared` has differences from an earlier run, one sentence
    each."""
    templates = render.environment()
    own = jinja2.FileSystemLoader(Path(__file__).parent)
    templates.loader = jinja2.ChoiceLoader([own, jinja2.PackageLoader("attnforge", "templates")])
    values = page_values(results, compared)
    render.write_template(
        templates.get_template("growth.html"), path, growth_tables=growth_tables, growth_plot=growth_plot, **values
    )


def save_plots(results: Results, folder: Path) -> list[Path]:
    """Write every plot of `results` that is not empty as a PNG, and return the files."""
    pictures = [
        (f"{growth.model}-{measure}-over-{growth.along}", growth_plot(growth, measure, "png"))
        for growth in results.growth
        for measure in MEASURES
    ]
    return [*plots.save_plots(results, folder), *plots.save_pictures(pictures, folder)]
