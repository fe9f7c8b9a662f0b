"""The visible part of attention under a mask, if it is a band: the keys from some distance before a query to some
distance after it, as in a window, or the keys of its own and of neighbouring chunks; optionally with some first tokens
that all see or that see all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from attnforge.export.graphs.attention import SILENT_ROWS
from attnforge.export.masks.at_blocks import why_not_by_blocks, why_not_by_key
from attnforge.export.masks.regions import Interval, PairRegion
from attnforge.export.masks.visibility import Visibility

Residue = Literal["none", "by key", "other"]


@dataclass(frozen=True)
class Band:
    """The pairs that a mask leaves visible: those with `least ≤ query − key ≤ most`, and those of some first keys and
    first queries.

    With chunks, the band is on the first tokens of the query's and the key's chunk: 0 and 0 if a query sees its own
    chunk.

    Attributes:
        is_all: whether exactly these pairs are visible; otherwise the mask still has to be applied inside the band.
        chunk: tokens per chunk, which divides `least` and `most`.
        inside: the least and the most of `query − key`, of the tokens themselves, within chunks; None for an open end.
        first_keys: number of first keys that every query sees.
        first_queries: number of first queries that see every key.
        shift: number of tokens by which the first chunk begins before the first token.
    """

    least: int
    most: int
    is_all: bool = True
    chunk: int = 1
    inside: tuple[int | None, int | None] = (None, None)
    first_keys: int = 0
    first_queries: int = 0
    shift: int = 0

    @property
    def is_window(self) -> bool:
        """Whether only the keys from some distance before a query to some distance after it are visible."""
        return self.chunk == 1 and not (self.first_keys or self.first_queries)

    @property
    def is_causal_chunk(self) -> bool:
        """Whether a query sees only those keys of its own chunk that are not later."""
        return self.is_all and self.chunk > 1 and replace(self, chunk=1) == Band(0, 0, inside=(0, None))

    @property
    def span(self) -> int:
        """Number of keys of the band in a block, less its queries."""
        return self.most - self.least

    def wide(self, width: int) -> int:
        """Keys per block of `width` queries."""
        return self.first_keys + width + self.span

    def widths(self, widths: Sequence[int]) -> list[int]:
        """Queries per block, close to each of `widths` in whole chunks."""
        nearly = (max(width // self.chunk, 1) * self.chunk for width in widths)
        return [width for width in dict.fromkeys(nearly) if width * self.wide(width) <= MOST_PAIRS]

    def products(self, width: int, tokens: int) -> int:
        """Pairs that blocks of `width` queries compute, with as many queries as keys."""
        return -(-(tokens + self.shift) // width) * width * self.wide(width) + self.first_queries * tokens

    def pairs(self, tokens: int) -> int:
        """The number of visible pairs, with as many queries as keys."""
        query = np.arange(tokens)
        chunk = (query + self.shift) // self.chunk * self.chunk - self.shift
        begin, end = chunk - self.most, chunk - self.least
        least, most = self.inside
        start = np.maximum(begin if most is None else np.maximum(begin, query - most), 0)
        stop = end + self.chunk if least is None else np.minimum(end + self.chunk, query - least + 1)
        stop = np.minimum(stop, tokens)
        first = min(self.first_keys, tokens)
        count = stop - start + first - np.maximum(np.minimum(stop, first) - start, 0)
        count[: self.first_queries] = tokens
        return int(count.sum())

    def between(self, query: Any, key: Any) -> Any:
        """Whether pairs are in the band, given the indices of their tokens, which broadcast against one another."""
        first_of_query, first_of_key = ((place + self.shift) // self.chunk * self.chunk for place in (query, key))
        distance, (least, most) = first_of_query - first_of_key, self.inside
        seen = (self.least <= distance) & (distance <= self.most)
        for end, sign in ((least, 1), (most, -1)):
            if end is not None:
                seen &= (query - key - end) * sign >= 0
        return seen


MOST_PAIRS = 2**22
"""Maximum pairs of a block that are listed in the graph."""


def band_of(node: ir.Node, seen: Visibility) -> Band | None:
    """The band that a canonical node's mask is proved to leave visible, with as many queries as keys.

    None if it leaves something else visible; if a query's own key is outside the band; or if the rest of the mask
    cannot be computed in blocks, or leaves fully masked rows that do not get zeros.
    """
    if (parts := _parts(seen)) is None:
        return None
    region, first_keys, first_queries = parts
    band = _band(region)
    if band is None or not band.between(0, 0) or not is_by_blocks(node, seen):
        return None
    return replace(band, is_all=not seen.residue, first_keys=first_keys, first_queries=first_queries)


def _parts(seen: Visibility) -> tuple[PairRegion, int, int] | None:
    """The one region of all queries and keys, how many first keys every query also sees, and how many first queries see
    every key, with as many queries as keys; None if the regions are of other kinds."""
    if seen.n_q != seen.n_k:
        return None
    whole: list[PairRegion] = []
    first = {"keys": 0, "queries": 0}
    for region in seen.regions:
        limits = [name for name in first if not getattr(region, name).is_open]
        if not limits:
            whole.append(region)
            continue
        least, most = _numbers(getattr(region, limits[0])) or (None, None)
        is_alone = len(limits) == 1 and region.band.is_open and region.blocks is None
        if not is_alone or most is None or (least or 0) > 0:
            return None
        first[limits[0]] = max(first[limits[0]], most + 1)
    return (whole[0], first["keys"], first["queries"]) if len(whole) == 1 else None


def _band(region: PairRegion) -> Band | None:
    """The band of a region of all queries and keys that has two ends, or chunks."""
    ends = _numbers(region.band)
    if ends is None:
        return None
    if (blocks := region.blocks) is None:
        least, most = ends
        return None if least is None or most is None else Band(least, most)
    least, most = _numbers(blocks.numbers) or (None, None)
    if least is None or most is None or blocks.query != blocks.key or (shift := blocks.query.constant) is None:
        return None
    size = blocks.size
    return Band(least * size, most * size, chunk=size, inside=ends, shift=shift % size)


def _numbers(interval: Interval) -> tuple[int | None, int | None] | None:
    """The ends of an interval; None if one is not a number."""
    ends = interval.least, interval.most
    if any(end is not None and end.constant is None for end in ends):
        return None
    least, most = (None if end is None else end.constant for end in ends)
    return least, most


def is_by_blocks(node: ir.Node, seen: Visibility) -> bool:
    """Whether what a canonical node's mask does beyond its regions can be computed in blocks, and fully masked rows get
    zeros or do not occur."""
    if not seen.residue:
        return True
    gives_zeros = seen.silent == "empty" and node.metadata_props.get(SILENT_ROWS) != "nan"
    return (gives_zeros or seen.silent == "never") and why_not_by_blocks(node) is None


def is_triangle(seen: Visibility) -> bool:
    """Whether, with as many queries as keys, only pairs whose key is not later than the query may be visible."""
    return _prefix(seen) == 0


def causal_prefix_of(node: ir.Node, seen: Visibility) -> int | None:
    """The number of first keys that every query sees in addition to earlier ones, if a canonical node's attention can
    be computed in causal blocks (:func:`~.blocks.in_causal_blocks`). None if it cannot."""
    return _prefix(seen) if is_by_blocks(node, seen) else None


def residue_of(node: ir.Node, seen: Visibility) -> Residue:
    """The effect of a canonical node's mask beyond its regions: nothing; it hides the same keys from every query, and
    fully masked rows get zeros or, if nothing else is hidden, the mean of all values; or more than that."""
    if not seen.residue:
        return "none"
    gets_zeros = seen.silent == "empty" and node.metadata_props.get(SILENT_ROWS) != "nan"
    is_known = gets_zeros or seen.silent == "never" or (seen.silent == "mean" and seen.is_full)
    below = is_triangle(seen)
    if "bias" in seen.residue or not is_known or not (seen.is_full or below):
        return "other"
    return "other" if why_not_by_key(node, below) is not None else "by key"


def _prefix(seen: Visibility) -> int | None:
    """The number of first keys that every query sees in addition to those that are not later, with as many queries as
    keys; None if it sees others."""
    if (parts := _parts(seen)) is None:
        return None
    region, first_keys, first_queries = parts
    is_triangle = region.blocks is None and _numbers(region.band) == (0, None)
    return first_keys if is_triangle and not first_queries else None
