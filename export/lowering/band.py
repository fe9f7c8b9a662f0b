"""What a mask leaves of attention, where that is a band: the keys from some distance behind a query to some distance
ahead of it, as a window does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from attnforge.export.attention.canonical import SILENT_ROWS
from attnforge.export.attention.mask_blocks import why_not_by_blocks, why_not_by_key
from attnforge.export.attention.visibility import Visibility

Residue = Literal["none", "by key", "other"]


@dataclass(frozen=True)
class Band:
    """What a mask leaves: pairs with `least ≤ query − key ≤ most`, by the tokens' indices.

    Attributes:
        is_all: whether exactly these pairs are visible; else the mask still has to be applied inside.
    """

    least: int
    most: int
    is_all: bool = True

    @property
    def span(self) -> int:
        """How many more keys than queries a block has."""
        return self.most - self.least

    def pairs(self, tokens: int) -> int:
        """How many pairs there are, of as many queries as keys."""
        index = np.arange(tokens)
        return int((np.minimum(index - self.least, tokens - 1) - np.maximum(index - self.most, 0) + 1).sum())

    def holds(self, queries: int, keys: int) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        """`(queries, keys)`, whether each pair is visible."""
        distance = np.arange(queries)[:, None] - np.arange(keys)
        return (self.least <= distance) & (distance <= self.most)


def band_of(node: ir.Node, seen: Visibility) -> Band | None:
    """The band that a canonical node's mask is proved to leave, of as many queries as keys.

    None where it leaves something else; where a query is not in reach of its own key; and where the rest of the mask
    cannot be computed in blocks, or leaves queries without keys that do not get zeros.
    """
    least, most = _ends(seen)
    if least is None or most is None or not least <= 0 <= most:
        return None
    if not is_by_blocks(node, seen):
        return None
    return Band(least, most, is_all=not seen.residue)


def is_by_blocks(node: ir.Node, seen: Visibility) -> bool:
    """Whether what a canonical node's mask does beside its regions can be computed in blocks, and queries without keys
    get zeros, or there are none."""
    if not seen.residue:
        return True
    gives_zeros = seen.silent == "empty" and node.metadata_props.get(SILENT_ROWS) != "nan"
    return (gives_zeros or seen.silent == "never") and why_not_by_blocks(node) is None


def is_triangle(seen: Visibility) -> bool:
    """Whether no other pairs may be visible than those of a query and a key that is not later, of as many queries as
    keys."""
    return _ends(seen) == (0, None)


def is_staircase(node: ir.Node, seen: Visibility) -> bool:
    """Whether a canonical node's attention can be computed in steps (:mod:`.stairs`): within a triangle, of which a
    mask may hide more, but to whose scores it adds no numbers."""
    return is_triangle(seen) and "bias" not in seen.residue and is_by_blocks(node, seen)


def residue_of(node: ir.Node, seen: Visibility) -> Residue:
    """What a canonical node's mask does beside its regions: nothing; or it hides the same keys from every query, and
    queries without keys get zeros, or, if nothing else is hidden, the mean of all values; or more than that."""
    if not seen.residue:
        return "none"
    gets_zeros = seen.silent == "empty" and node.metadata_props.get(SILENT_ROWS) != "nan"
    is_known = gets_zeros or seen.silent == "never" or (seen.silent == "mean" and seen.is_full)
    below = is_triangle(seen)
    if "bias" in seen.residue or not is_known or not (seen.is_full or below):
        return "other"
    return "other" if why_not_by_key(node, below) is not None else "by key"


def _ends(seen: Visibility) -> tuple[int | None, int | None]:
    """Least and most of `query − key`, each None where there is no such end; two of None where more or less than one
    band of as many queries as keys is left, or an end is not a number."""
    if len(seen.regions) != 1 or seen.n_q != seen.n_k:
        return None, None
    (region,) = seen.regions
    is_band = region.blocks is None and region.queries.is_open and region.keys.is_open
    ends = (region.band.least, region.band.most)
    if not is_band or any(end is not None and end.constant is None for end in ends):
        return None, None
    least, most = (None if end is None else end.constant for end in ends)
    return least, most
