"""Pictures of attention: maps over queries and keys, and the attention of one query over an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnforge.arrays import Array
from attnforge.numbers import scientific
from attnforge.report.charts import Picture, drawing, embedded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_CELLS = 144
"""Maximum number of rows or columns of a map, each two pixels wide; more are pooled."""


def heatmap(values: Array, top: float, alt: str, difference: bool = False) -> Picture:
    """Draw a map (queries, keys), with colours from 0 to `top`, or from −`top` to `top` for a difference."""
    from matplotlib.ticker import MaxNLocator

    with drawing(3.5, 2.9, layout=None) as figure:
        axes = figure.add_axes((0.19, 0.16, 0.57, 0.8))
        ratio = values.shape[1] / values.shape[0]
        ends = (-top if difference else 0.0, top)
        colours, aspect = "RdBu_r" if difference else "viridis", "equal" if 0.4 < ratio < 2.5 else "auto"
        shown = _show(axes, pooled(values, extreme=difference), ends, values.shape, cmap=colours, aspect=aspect)
        axes.set_facecolor("#bbbbbb")  # shows elements that are not finite
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_xlabel("key")
        axes.set_ylabel("query")
        _colorbar(figure, shown, ends, difference)
        return embedded(figure, "png", alt, dpi=144)


def photograph(image: Array, alt: str, query: tuple[int, int, int] | None = None) -> Picture:
    """Draw the image (height, width, channels); `query` is row, column and side of a square to mark."""
    with drawing(3.5, 2.9, layout=None) as figure:
        _show_image(figure, image, query)
        return embedded(figure, "png", alt)


def overlay(
    image: Array,
    grid: Array,
    ends: tuple[float, float],
    alt: str,
    query: tuple[int, int, int] | None = None,
    difference: bool = False,
) -> Picture:
    """Draw weights (rows, columns), or their difference, over the image; colours span `ends`."""
    with drawing(3.5, 2.9, layout=None) as figure:
        axes = _show_image(figure, image.mean(axis=-1, keepdims=True), query)
        shown = _show(axes, grid, ends, image.shape, cmap="RdBu_r" if difference else "inferno", alpha=0.65)
        _colorbar(figure, shown, ends, difference)
        return embedded(figure, "png", alt)


def pooled(values: Array, extreme: bool = False) -> Array:
    """Pool `values` to at most :data:`MOST_CELLS` rows and columns: means of blocks, or with `extreme` the element of
    each block furthest from zero."""
    rows, columns = (-(-n // MOST_CELLS) for n in values.shape)
    if rows == columns == 1:
        return values
    up, across = (-(-n // f) * f - n for n, f in zip(values.shape, (rows, columns), strict=True))
    padded = np.pad(values.astype(np.float64), ((0, up), (0, across)), constant_values=np.nan)
    blocks = padded.reshape(padded.shape[0] // rows, rows, -1, columns).swapaxes(1, 2)
    flat = blocks.reshape(*blocks.shape[:2], -1)
    if not extreme:
        return np.asarray(np.nansum(flat, axis=-1) / np.maximum(np.sum(~np.isnan(flat), axis=-1), 1))
    furthest = np.argmax(np.nan_to_num(np.abs(flat), nan=-1.0), axis=-1)
    return np.asarray(np.take_along_axis(flat, furthest[..., None], axis=-1)[..., 0])


def _show(axes: Axes, values: Array, ends: tuple[float, float], size: Sequence[int], **style: Any) -> Any:
    """Draw the finite elements as coloured squares over a picture of this height and width."""
    extent = (0, size[1], size[0], 0)
    values = np.ma.masked_invalid(values)
    return axes.imshow(values, vmin=ends[0], vmax=ends[1], interpolation="nearest", extent=extent, **style)


def _show_image(figure: Figure, image: Array, query: tuple[int, int, int] | None) -> Axes:
    axes = figure.add_axes((0.02, 0.04, 0.74, 0.92))
    height, width, channels = image.shape
    _show(axes, image[..., 0] if channels == 1 else image, (0, 1), (height, width), cmap="gray")
    axes.set_axis_off()
    if query is not None:
        row, column, side = query
        around = ([column, column + side, column + side, column, column], [row, row, row + side, row + side, row])
        axes.plot(*around, color="white", linewidth=3.2, clip_on=False)
        axes.plot(*around, color="#d4145a", linewidth=1.6, clip_on=False)
    return axes


def _colorbar(figure: Figure, shown: Any, ends: tuple[float, float], difference: bool) -> None:
    bar = figure.colorbar(shown, cax=figure.add_axes((0.785, 0.18, 0.028, 0.74)))
    ticks = [ends[0], sum(ends) / 2, ends[1]]
    bar.set_ticks(ticks, labels=["0" if t == 0 else scientific(t, 1) if difference else f"{t:.2g}" for t in ticks])
    bar.ax.tick_params(labelsize=9, length=2)
    bar.outline.set_visible(False)
