"""What all charts share: matplotlib's style, figures as pictures of a page, legends, and axes with few plain ticks.

A picture is an SVG or PNG in a data URI, with a text for readers who do not see it. matplotlib draws through its object
interface; it is imported with the first picture.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY, RED = "#1f5fa8", "#c96a00", "#444444", "#c0202c"
"""Ours or the deployed model; peers or eager; budgets and limits; failures."""

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
"""Inches of a chart: a telephone shows it at two thirds of that, where it has to stay legible."""


@dataclass(frozen=True)
class Picture:
    """A picture for an `<img>`: its data URI, its size in CSS pixels, and what it says in words."""

    src: str
    width: int
    height: int
    alt: str


def literal(text: str) -> str:
    """`text` as it is: matplotlib would begin a formula at a dollar sign."""
    return text.replace("$", r"\$")


@contextmanager
def drawing(width: float, height: float, layout: Literal["constrained"] | None = "constrained") -> Iterator[Figure]:
    """A figure of `width` by `height` inches, in this project's style as long as the block draws on it."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        yield Figure(figsize=(width, height), layout=layout)


def embedded(figure: Figure, kind: Literal["svg", "png"], alt: str, dpi: int = 96) -> Picture:
    """A figure as a picture: the same bytes for the same figure."""
    stream = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {}
    figure.savefig(stream, format=kind, dpi=dpi, metadata=metadata)
    mime = "image/svg+xml" if kind == "svg" else "image/png"
    width, height = figure.get_size_inches()
    data = base64.b64encode(stream.getvalue()).decode("ascii")
    return Picture(f"data:{mime};base64,{data}", round(96 * width), round(96 * height), alt)


def legend_above(figure: Figure, handles: Sequence[Any], most: int = 6) -> None:
    """A legend above the axes: in one row, or in as many columns as its longest label leaves room for."""
    labels = [re.sub(r"[$^{}\\]", "", str(handle.get_label())).split("\n")[0] for handle in handles]
    longest = max(map(len, labels), default=0)
    fits_in_a_row = sum(len(label) + 5 for label in labels) <= 72
    figure.legend(
        handles=list(handles),
        loc="outside upper left",
        ncols=max(1, min(most, len(labels) if fits_in_a_row else int(72 / (longest + 6)))),
        handlelength=1.4,
        handletextpad=0.5,
        columnspacing=1.3,
    )


# --- axes -------------------------------------------------------------------------------------------------------------


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


def logarithmic_ticks(axis: Axis) -> None:
    """Ticks at 1, 2 and 5 of every decade, or fewer where there are many decades; numbers without powers of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axis.get_view_interval()
    subs = (1, 2, 5) if high < 50 * low else (1, 3) if high < 1000 * low else (1,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda x, _: f"{x:,.10g}")
