"""How time and memory grow: every series over the sizes, with its exponent."""

from __future__ import annotations

from collections.abc import Sequence

from attnforge.benchmarks.measure.results import Fit, Growth, Series
from attnforge.benchmarks.report.plot_style import (
    BLUES,
    DASHES,
    OTHERS,
    Kind,
    both_logarithmic,
    finished,
    in_words,
    marker_of,
    short_label,
)
from attnforge.benchmarks.report.tables import Measure
from attnforge.report.charts import WIDTH, Picture, drawing, legend_above, literal, ticks_apart
from attnforge.report.render import interval, rounded

Reading = tuple[int, float]


def growth_plot(growth: Growth, measure: Measure, kind: Kind = "svg") -> Picture | None:
    """Draw time a call, or the memory that a call adds, over sizes, both logarithmic; None where there is neither."""
    lines = [(series, readings) for series in growth.series if (readings := _readings(growth, series, measure))]
    if not lines:
        return None
    unit = "milliseconds a call" if measure == "time" else "MiB that one call adds"
    with drawing(WIDTH, 3.1 + 0.19 * len(lines)) as figure:
        axes = figure.subplots()
        colors, handles = _colors([series for series, _ in lines]), []
        for series, readings in lines:
            sizes, values = zip(*readings, strict=True)
            label = f"{short_label(series.name)} {series.precision}{_law(growth.along, _fit(series, measure), True)}"
            handles += axes.plot(
                sizes, values, color=colors[series.name], linestyle=DASHES.get(series.precision, ":"), linewidth=1.7,
                marker=marker_of(series.precision), markersize=5, label=label,
            )  # fmt: skip
        both_logarithmic(axes)
        ticks = ticks_apart([size for _, readings in lines for size, _ in readings], logarithmic=True)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_xlabel(literal(growth.along))
        axes.set_ylabel(unit)
        legend_above(figure, handles)
        return finished(figure, kind, _in_words(growth, measure, unit, lines))


def _in_words(growth: Growth, measure: Measure, unit: str, lines: Sequence[tuple[Series, list[Reading]]]) -> str:
    rows = [
        f"{series.name} {series.precision} {rounded(first)} at {smallest:,}, {rounded(last)} at {largest:,}"
        f"{_law(growth.along, _fit(series, measure), False)}"
        for series, ((smallest, first), *_, (largest, last)) in (
            (series, [*readings[:1], *readings]) for series, readings in lines
        )
    ]
    title = f"{unit[0].upper()}{unit[1:]} of {growth.model} over {growth.along}, both axes logarithmic"
    return f"{title}: {in_words(rows)}."


def _readings(growth: Growth, series: Series, measure: Measure) -> list[Reading]:
    """Sizes and what was measured there, without zeros, which have no logarithm."""
    values = series.ms if measure == "time" else series.extra_mib
    return [(size, value) for size, value in zip(growth.sizes, values, strict=False) if value is not None and value > 0]


def _fit(series: Series, measure: Measure) -> Fit | None:
    return series.time if measure == "time" else series.memory


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
