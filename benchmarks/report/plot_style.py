"""What the plots of a benchmark share: colours tell ours from peers, or models and backends apart; the marker and the
dashes are the precision's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from attnforge.benchmarks.report.order import precisions
from attnforge.report.charts import BLUE, ORANGE, Picture, embedded, literal, logarithmic_ticks

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
