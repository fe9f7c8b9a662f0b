"""The attention section of a verification page: maps of eager, of the deployed model and of their difference, also over
the image if the keys are its patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from attnforge.arrays import Array, is_floating
from attnforge.bundle import Manifest
from attnforge.numbers import scientific
from attnforge.report import map_pictures
from attnforge.report.attention_maps import AttentionMaps, PatchGrid, SiteMaps, patch_grid
from attnforge.report.charts import Picture

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


@dataclass(frozen=True)
class MeasuredSite:
    """Errors of a site's weights, over all heads, queries and keys of the first sample.

    Attributes:
        samples: number of samples that the site processes independently.
        deployed_off, eager_off: largest difference of a weight from float64; without float64, `deployed_off` is
            relative to eager and `eager_off` is None.
        not_finite: number of deployed weights that are not finite.
    """

    name: str
    form: str
    is_held: bool
    samples: int
    heads: int
    queries: int
    keys: int
    deployed_off: float
    eager_off: float | None
    not_finite: int

    @property
    def is_pooled(self) -> bool:
        return max(self.queries, self.keys) > map_pictures.MOST_CELLS


@dataclass(frozen=True)
class DrawnSite:
    """A site with maps of its heads, and over the image if its keys are patches."""

    site: MeasuredSite
    heads: list[Maps]
    photograph: MapsOnImage | None


def attention_section(maps: AttentionMaps, manifest: Manifest) -> tuple[list[MeasuredSite], list[DrawnSite]]:
    """Measure every site, and draw maps of the least accurate sites, the first and the last."""
    sites = [_measure(site_maps) for site_maps in maps]
    by_distance = sorted(sites, key=lambda site: (site.not_finite, site.deployed_off), reverse=True)
    order = [*by_distance[: MOST_DRAWN - 2], *sites[:1], *sites[-1:], *by_distance]
    names = list(dict.fromkeys(site.name for site in order))[:MOST_DRAWN]
    images = _images(manifest, maps.inputs)
    drawn = [_draw(site, site_maps, images) for site, site_maps in zip(sites, maps, strict=True) if site.name in names]
    return sites, drawn


def _measure(maps: SiteMaps) -> MeasuredSite:
    truth = maps.eager if maps.exact is None else maps.exact
    return MeasuredSite(
        maps.site,
        maps.form,
        maps.is_held,
        maps.samples,
        *maps.eager.shape,
        deployed_off=float(_largest_by_head(maps.deployed - truth).max(initial=0)),
        eager_off=float(_largest_by_head(maps.eager - truth).max(initial=0)) if maps.exact is not None else None,
        not_finite=int((~np.isfinite(maps.deployed)).sum()),
    )


def _draw(site: MeasuredSite, maps: SiteMaps, images: tuple[int, Array] | None) -> DrawnSite:
    eager, deployed = maps.eager.astype(np.float64), maps.deployed.astype(np.float64)
    worst = int(np.argmax(_largest_by_head(deployed - eager)))
    heads = []
    label = "The one head"
    if site.heads > 1:
        heads.append(_draw_maps("Mean of all heads", site.name, eager.mean(0), deployed.mean(0)))
        label = f"Head {worst + 1} of {site.heads}, where deployed and eager differ most"
    heads.append(_draw_maps(label, site.name, eager[worst], deployed[worst]))
    return DrawnSite(site, heads, _draw_on_image(maps, images, eager, deployed))


def _draw_maps(label: str, site: str, eager: Array, deployed: Array) -> Maps:
    difference = deployed - eager
    top, most = _largest(eager, deployed), _largest(difference) or 1e-12
    which = f"{label} of {site}, {eager.shape[0]} queries by {eager.shape[1]} keys"
    draw = map_pictures.heatmap
    return Maps(
        label,
        draw(eager, top, f"Attention weights of eager: {which}; the largest is {_largest(eager):.3g}."),
        draw(deployed, top, f"Attention weights as deployed: {which}; the largest is {_largest(deployed):.3g}."),
        draw(difference, most, f"Deployed minus eager: {which}; at most {scientific(most)} apart.", difference=True),
    )


def _largest_by_head(difference: Array) -> Array:
    """Return the largest finite magnitude per head."""
    sizes = np.nan_to_num(np.abs(difference), nan=0, posinf=0)
    return np.asarray(sizes.reshape(len(difference), -1).max(axis=-1, initial=0))


def _largest(*arrays: Array) -> float:
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
    patches = [
        np.asarray(array.mean(0)[query][grid.extra :].reshape(grid.rows, grid.columns)) for array in (eager, deployed)
    ]
    both = np.stack(patches)
    known = both[np.isfinite(both)] if np.isfinite(both).any() else np.zeros(1)
    ends = float(known.min()), float(known.max()) + 1e-12
    difference = patches[1] - patches[0]
    most = _largest(difference) or 1e-12
    row, column = np.unravel_index(int(np.argmax(np.nan_to_num(patches[0]))), patches[0].shape)
    which = f"attention of {label} over the image, {grid.rows} × {grid.columns} patches of {grid.side} pixels, in "
    which += maps.site
    eager_alt = f"Eager: {which}; most to the patch in row {row + 1}, column {column + 1}."
    difference_alt = f"Deployed minus eager: {which}; at most {scientific(most)} apart."
    image_alt = f"The image that the model was given, {pixels.shape[1]} × {pixels.shape[0]}."
    return MapsOnImage(
        f"What {label} attends to",
        map_pictures.overlay(pixels, patches[0], ends, eager_alt, square),
        map_pictures.overlay(pixels, patches[1], ends, f"Deployed: {which}.", square),
        map_pictures.overlay(pixels, difference, (-most, most), difference_alt, square, difference=True),
        map_pictures.photograph(pixels, image_alt, square),
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
