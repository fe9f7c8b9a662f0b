"""The roofline: what the machine can do at best at every intensity, and what every contender of every model reaches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from attnforge.benchmarks.measure.limits import Ceilings
from attnforge.benchmarks.measure.results import Contender, Model, Results
from attnforge.benchmarks.report.order import precisions
from attnforge.benchmarks.report.plot_style import (
    DASHES,
    OTHERS,
    Kind,
    both_logarithmic,
    dot,
    finished,
    in_words,
    marker_of,
    precision_dots,
)
from attnforge.report.charts import BLUE, WIDTH, Picture, drawing, legend_above, literal
from attnforge.report.render import rounded

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        return finished(figure, kind, _in_words(ceilings, points))


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


def _in_words(ceilings: Ceilings, points: Sequence[Point]) -> str:
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
