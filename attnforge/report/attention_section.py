"""The attention section of a verification page: errors of weights, and pictures of maps over queries and keys: of
eager, of the deployed model and of their difference, also of one query over the image if the keys are its patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from attnforge.arrays import Array, is_floating
from attnforge.bundle import Manifest
from attnforge.numbers import scientific
from attnforge.report.attention_maps import AttentionMaps, PatchGrid, SiteMaps, patch_grid
from attnforge.report.charts import Picture, drawing, embedded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_DRAWN = 3
"""Maximum number of sites with drawn maps."""


@dataclass(frozen=True)
class Maps:
    """Pictures of the maps of eager and of the deployed model, and of their difference."""

    label: str
    eager: Picture
    deployed: Picture
    difference: Picture


@dataclass(frozen=True)
class MapsOnImage(Maps):
    """Attention of one query, drawn over the image.

    Attributes:
        image: the image alone.
        is_marked: whether the query is a patch, which the pictures mark.
        after_token: whether the keys begin with a token that is not a patch.
    """

    image: Picture
    is_marked: bool
    after_token: bool


@dataclass
class MeasuredSite:
    """Errors of a site's weights, over all heads, queries and keys of the first sample, and their pictures.

    Attributes:
        samples: number of samples that the site processes independently.
        shape: numbers of heads, queries and keys.
        deployed_off, eager_off: largest difference of a weight from float64; without float64, `deployed_off` is
            relative to eager and `eager_off` is None.
        not_finite: number of deployed weights that are not finite.
        heads: maps of some of its heads, if it is drawn.
        photograph: the attention of one query over the image, if it is drawn and its keys are patches.
    """

    name: str
    form: str
    is_held: bool
    samples: int
    shape: tuple[int, ...]
    deployed_off: float
    eager_off: float | None
    not_finite: int
    heads: list[Maps] = field(default_factory=list)
    photograph: MapsOnImage | None = None

    @property
    def is_pooled(self) -> bool:
        return max(self.shape[1:]) > MOST_CELLS


def attention_section(maps: AttentionMaps, manifest: Manifest) -> list[MeasuredSite]:
    """Measure every site, and draw maps of the least accurate sites, the first and the last."""
    sites = [_measure(site_maps) for site_maps in maps]
    by_distance = sorted(sites, key=lambda site: (site.not_finite, site.deployed_off), reverse=True)
    order = [*by_distance[: MOST_DRAWN - 2], *sites[:1], *sites[-1:], *by_distance]
    names = list(dict.fromkeys(site.name for site in order))[:MOST_DRAWN]
    images = _images(manifest, maps.inputs)
    for site, site_maps in zip(sites, maps, strict=True):
        if site.name in names:
            _draw(site, site_maps, images)
    return sites


def _measure(maps: SiteMaps) -> MeasuredSite:
    truth = maps.eager if maps.exact is None else maps.exact
    return MeasuredSite(
        maps.site,
        maps.form,
        maps.is_held,
        maps.samples,
        maps.eager.shape,
        deployed_off=_largest(maps.deployed - truth),
        eager_off=_largest(maps.eager - truth) if maps.exact is not None else None,
        not_finite=int((~np.isfinite(maps.deployed)).sum()),
    )


def _draw(site: MeasuredSite, maps: SiteMaps, images: tuple[int, Array] | None) -> None:
    eager, deployed = maps.eager.astype(np.float64), maps.deployed.astype(np.float64)
    worst = int(np.argmax([_largest(head) for head in deployed - eager]))
    label = "The one head"
    if len(eager) > 1:
        site.heads.append(_draw_maps("Mean of all heads", site.name, eager.mean(0), deployed.mean(0)))
        label = f"Head {worst + 1} of {len(eager)}, where deployed and eager differ most"
    site.heads.append(_draw_maps(label, site.name, eager[worst], deployed[worst]))
    site.photograph = _draw_on_image(maps, images, eager, deployed)


def _draw_maps(label: str, site: str, eager: Array, deployed: Array) -> Maps:
    difference = deployed - eager
    top, most = _largest(eager, deployed), _largest(difference) or 1e-12
    which = f"{label} of {site}, {eager.shape[0]} queries by {eager.shape[1]} keys"
    return Maps(
        label,
        heatmap(eager, top, f"Attention weights of eager: {which}; the largest is {_largest(eager):.3g}."),
        heatmap(deployed, top, f"Attention weights as deployed: {which}; the largest is {_largest(deployed):.3g}."),
        heatmap(difference, most, f"Deployed minus eager: {which}; at most {scientific(most)} apart.", difference=True),
    )


def _largest(*arrays: Array) -> float:
    """Return the largest finite magnitude."""
    return float(max(np.max(np.abs(array), initial=0, where=np.isfinite(array)) for array in arrays))


# --- over an image ----------------------------------------------------------------------------------------------------


def _images(manifest: Manifest, inputs: Mapping[str, Array]) -> tuple[int, Array] | None:
    """Return the number of input images and the first, (height, width, channels) from 0 to 1; None if the model takes
    no images."""
    for spec in manifest.inputs:
        array = inputs[spec.name]
        if len(spec.dims) == 4 and spec.dims[1] in (1, 3) and is_floating(array) and array.size:
            image = array[0].astype(np.float64).transpose(1, 2, 0)
            image = np.nan_to_num(image, nan=0, posinf=0, neginf=0)
            low, high = image.min(), image.max()
            if low < 0 or high > 1 or high - low < 0.1:
                image = (image - low) / ((high - low) or 1.0)
            return len(array), image
    return None


def _draw_on_image(
    maps: SiteMaps, images: tuple[int, Array] | None, eager: Array, deployed: Array
) -> MapsOnImage | None:
    """Draw the attention of one query, averaged over heads, over the image; None if the keys are not its patches."""
    if images is None or maps.samples != images[0]:
        return None
    pixels = images[1]
    grid = patch_grid(pixels.shape[0], pixels.shape[1], eager.shape[2])
    if grid is None or eager.shape[1] not in (eager.shape[2], 1):
        return None
    query, square, label = _query(grid, eager.shape[1])
    patches = np.stack([array.mean(0)[query][grid.extra :] for array in (eager, deployed)])
    both = patches.reshape(2, grid.rows, grid.columns)
    known = both[np.isfinite(both)] if np.isfinite(both).any() else np.zeros(1)
    ends = float(known.min()), float(known.max()) + 1e-12
    difference = both[1] - both[0]
    most = _largest(difference) or 1e-12
    row, column = np.unravel_index(int(np.argmax(np.nan_to_num(both[0]))), both[0].shape)
    which = f"attention of {label} over the image, {grid.rows} × {grid.columns} patches of {grid.side} pixels, in "
    which += maps.site
    eager_alt = f"Eager: {which}; most to the patch in row {row + 1}, column {column + 1}."
    difference_alt = f"Deployed minus eager: {which}; at most {scientific(most)} apart."
    image_alt = f"The image that the model was given, {pixels.shape[1]} × {pixels.shape[0]}."
    return MapsOnImage(
        f"What {label} attends to",
        overlay(pixels, both[0], ends, eager_alt, square),
        overlay(pixels, both[1], ends, f"Deployed: {which}.", square),
        overlay(pixels, difference, (-most, most), difference_alt, square, difference=True),
        photograph(pixels, image_alt, square),
        square is not None,
        bool(grid.extra),
    )


def _query(grid: PatchGrid, queries: int) -> tuple[int, tuple[int, int, int] | None, str]:
    """Return the index of the query to draw, its square on the image (row, column, side in pixels), and its name."""
    if queries == 1:
        return 0, None, "the one query"
    if grid.extra:
        return 0, None, "the class token"
    row, column = grid.rows // 2, grid.columns // 2
    square = (row * grid.side, column * grid.side, grid.side)
    return row * grid.columns + column, square, f"the patch in row {row + 1}, column {column + 1}"


# --- pictures of maps -------------------------------------------------------------------------------------------------


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
    _show(axes, image[..., 0] if image.shape[2] == 1 else image, (0, 1), image.shape, cmap="gray")
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
