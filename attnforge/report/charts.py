"""Shared parts of all charts: matplotlib's style, figures embedded in pages, legends, and axes with few plain ticks.

A picture is an SVG or PNG in a data URI, with alternative text. matplotlib is used through its object interface and
imported with the first picture.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY, RED = "#1f5fa8", "#c96a00", "#444444", "#c0202c"
"""Colours of: our backends or the deployed model; peers or eager; budgets and limits; failures."""

STYLE = Path(__file__).parents[1] / "templates" / "charts.mplstyle"
WIDTH = 5.6
"""Width of a chart in inches: it must stay legible at two thirds of that, on a phone."""


@dataclass(frozen=True)
class Picture:
    """A picture for an `<img>`: its data URI, its size in CSS pixels, and its alternative text."""

    src: str
    width: int
    height: int
    alt: str


def literal(text: str) -> str:
    """Escape dollar signs, at which matplotlib would begin a formula."""
    return text.replace("$", r"\$")


@contextmanager
def drawing(width: float, height: float, layout: Literal["constrained"] | None = "constrained") -> Iterator[Figure]:
    """A figure of `width` by `height` inches, drawn in this project's style inside the block."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(matplotlib.rc_params_from_file(STYLE, use_default_template=False)):
        yield Figure(figsize=(width, height), layout=layout)


def embedded(figure: Figure, kind: Literal["svg", "png"], alt: str, dpi: int = 96) -> Picture:
    """Convert a figure to a picture; equal figures give equal bytes."""
    stream = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {}
    figure.savefig(stream, format=kind, dpi=dpi, metadata=metadata)
    if kind == "png":  # 256 colours take a third of the bytes
        from PIL import Image

        with Image.open(stream) as image:
            reduced = image.convert("RGB").quantize(256)
        reduced.save(stream := io.BytesIO(), "png", optimize=True)
    mime = "image/svg+xml" if kind == "svg" else "image/png"
    width, height = figure.get_size_inches()
    data = base64.b64encode(stream.getvalue()).decode("ascii")
    return Picture(f"data:{mime};base64,{data}", round(96 * width), round(96 * height), alt)


def legend_above(figure: Figure, handles: Sequence[Any], most: int = 6) -> None:
    """Add a legend above the axes: in one row, or in as many columns as fit its longest label."""
    labels = [re.sub(r"[$^{}\\]", "", str(handle.get_label())).split("\n")[0] for handle in handles]
    longest = max(map(len, labels), default=0)
    fits_in_a_row = sum(len(label) + 5 for label in labels) <= 72
    figure.legend(
        handles=list(handles), loc="outside upper left",
        ncols=max(1, min(most, len(labels) if fits_in_a_row else int(72 / (longest + 6)))), handlelength=1.4,
        handletextpad=0.5, columnspacing=1.3,
    )  # fmt: skip


# --- axes -------------------------------------------------------------------------------------------------------------


def logarithmic_ticks(axis: Axis) -> None:
    """Set ticks at 1, 2 and 5 of every decade, or fewer over many decades; labels without powers of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 50 * low else (1, 3) if high < 1000 * low else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda x, _: f"{x:,.10g}")
