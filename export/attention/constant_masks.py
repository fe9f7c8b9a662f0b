"""The visible pairs of a constant boolean mask, derived from the array in a few passes over it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from math import gcd
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from attnforge.export.attention.affine import Affine, Atom
from attnforge.export.attention.regions import (
    ALL,
    MOST_REGIONS,
    NONE,
    Blocks,
    Interval,
    Region,
    Regions,
    visible,
    without,
)
from attnforge.export.attention.truth import ALWAYS, NEVER, PATTERN, Cover, Truth

Flags = NDArray[np.bool_]
Numbers = NDArray[np.int64]


def any_of(flags: Flags) -> Flags:
    """Where at least one of several arrays is True."""
    return flags[0] if len(flags) == 1 else np.asarray(flags.any(0))


def all_of(flags: Flags) -> Flags:
    """Where all of several arrays are True."""
    return flags[0] if len(flags) == 1 else np.asarray(flags.all(0))


def truth_along(flags: Flags, name: Literal["queries", "keys"]) -> Truth:
    """The condition given by a vector with one flag for each query or each key."""
    last = len(flags) - 1

    def regions(runs: list[tuple[int, int]]) -> Regions:
        intervals = [
            Interval(Affine(start) if start else None, Affine(stop - 1) if stop <= last else None)
            for start, stop in runs
        ]
        return tuple(Region(queries=x) if name == "queries" else Region(keys=x) for x in intervals)

    def cover(flags: Flags) -> Cover:
        runs = _runs(flags)
        if len(runs) <= MOST_REGIONS:
            return Cover(regions(runs), regions(runs))
        return Cover(regions([(runs[0][0], runs[-1][1])]), NONE)

    if flags.all() or not flags.any():
        return ALWAYS if flags.all() else NEVER
    true, false = cover(flags), cover(~flags)
    return Truth(true, false, frozenset() if true.is_exact and false.is_exact else PATTERN)


def truth_of(flags: Flags) -> Truth:
    """The condition given by an array of flags.

    Args:
        flags: `(…, n_q, n_k)`; leading dims are samples and heads.
    """
    flags = flags.reshape(-1, *flags.shape[-2:])
    some, every = any_of(flags), all_of(flags)
    if every.all():
        return ALWAYS
    if not some.any():
        return NEVER
    true = Cover(_outside(some), _inside(every))
    if true.is_exact:
        return Truth(true, _opposite(true))
    false = Cover(_outside(~every), _inside(~some))
    if false.is_exact:
        return Truth(_opposite(false), false)
    return Truth(true, false, PATTERN)


def _opposite(cover: Cover) -> Cover:
    return Cover(without(cover.least, "outer"), without(cover.most, "inner"))


def _inside(flags: Flags) -> Regions:
    """Regions that contain True pairs only: those of :func:`_outside` if they are exact."""
    regions = _outside(flags)
    return regions if _count(regions, flags) == int(flags.sum()) else NONE


def _outside(flags: Flags) -> Regions:
    """The regions with the fewest pairs among all candidates that contain every True pair."""
    if not flags.any():
        return NONE
    if flags.all():
        return ALL
    exact, best, left = int(flags.sum()), ALL, flags.size
    for regions in _ways(flags):
        count = _count(regions, flags)
        if count < left:
            best, left = regions, count
        if count == exact:
            break
    return _shortened(best, flags)


def _count(regions: Regions, flags: Flags) -> int:
    return visible(regions, np.arange(flags.shape[0]), flags.shape[1], _no_number)


def _no_number(atom: Atom) -> int:
    raise TypeError(f"{atom} in a constant mask")


def _shortened(regions: Regions, flags: Flags) -> Regions:
    """The same pairs, without the conditions that exclude nothing."""
    count = _count(regions, flags)
    for i in range(len(regions)):
        for condition in _conditions(regions[i]):
            fewer = (*regions[:i], _without(regions[i], *condition), *regions[i + 1 :])
            if _count(fewer, flags) == count:
                regions = fewer
    return regions


def _conditions(region: Region) -> Iterator[tuple[str, str]]:
    """The conditions of a region: an attribute and one of its ends, or "" for the whole attribute."""
    if region.blocks is not None:
        yield "blocks", ""
        if region.blocks.numbers.least != region.blocks.numbers.most:
            yield from (("blocks", end) for end in ("least", "most"))
    for name in ("band", "keys", "queries"):
        yield from ((name, end) for end in ("least", "most") if getattr(getattr(region, name), end) is not None)


def _without(region: Region, name: str, end: str) -> Region:
    if name == "blocks":
        blocks = region.blocks
        if blocks is None or not end:
            return replace(region, blocks=None)
        return replace(region, blocks=replace(blocks, numbers=replace(blocks.numbers, **{end: None})))
    return replace(region, **{name: replace(getattr(region, name), **{end: None})})


# --- candidate regions ------------------------------------------------------------------------------------------------


def _ways(flags: Flags) -> Iterator[Regions]:
    """Unions of regions that contain every True pair: one region; one per segment; one with global rows and columns."""
    rows = _Rows.of(flags)
    yield from ((_region(rows, blocks),) for blocks in (None, *_blocks(rows)))
    segments = _segments(rows, flags.shape)
    if 1 < len(segments) <= MOST_REGIONS:
        parts = [rows.within(start, stop) for start, stop in segments]
        yield tuple(_region(part) for part in parts if len(part.indices))
    full_columns, full_rows = all_of(flags), all_of(flags.T)
    for columns, queries in (
        (full_columns, full_rows & False),
        (full_columns, full_rows),
        (full_columns & False, full_rows),
    ):
        regions = [Region(keys=_interval(start, stop - 1)) for start, stop in _runs(columns)]
        regions += [Region(queries=_interval(start, stop - 1)) for start, stop in _runs(queries)]
        if 0 < len(regions) < MOST_REGIONS:
            rest = flags & ~columns & ~queries[:, None]
            yield (*regions, *([_region(_Rows.of(rest))] if rest.any() else []))


def _runs(flags: Flags) -> list[tuple[int, int]]:
    """The start and stop of every run of True in a vector."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def _interval(least: int, most: int) -> Interval:
    return Interval(Affine(least), Affine(most))


def _from(first: Numbers, last: Numbers) -> Interval:
    return _interval(int(first.min()), int(last.max()))


@dataclass(frozen=True)
class _Rows:
    """The queries that see at least one key.

    Attributes:
        indices: their indices.
        first: the first key that each query sees.
        last: the last key that each query sees.
    """

    indices: Numbers
    first: Numbers
    last: Numbers

    @classmethod
    def of(cls, flags: Flags) -> _Rows:
        indices = np.flatnonzero(flags.any(1))
        first, last = flags.argmax(1), flags.shape[1] - 1 - flags[:, ::-1].argmax(1)
        return cls(indices, first[indices], last[indices])

    def within(self, start: int, stop: int) -> _Rows:
        kept = (self.indices >= start) & (self.indices < stop)
        return _Rows(self.indices[kept], self.first[kept], self.last[kept])


def _region(rows: _Rows, blocks: Blocks | None = None) -> Region:
    """The smallest region that contains all keys of the queries."""
    band = _from(rows.indices - rows.last, rows.indices - rows.first)
    return Region(band, blocks, _from(rows.indices, rows.indices), _from(rows.first, rows.last))


def _segments(rows: _Rows, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Runs of tokens that see no token outside their run."""
    size = shape[0]
    if size != shape[1]:
        return []
    furthest, nearest = np.full(size, -1), np.full(size, size)
    furthest[rows.indices], nearest[rows.indices] = rows.last, rows.first
    before = np.maximum.accumulate(furthest)[:-1]
    after = np.minimum.accumulate(nearest[::-1])[::-1][1:]
    borders = np.arange(1, size)
    edges = [0, *borders[(before < borders) & (after >= borders)].tolist(), size]
    return list(pairwise(edges))


def _blocks(rows: _Rows) -> Iterator[Blocks]:
    """Blocks of equal size at whose borders the first or the last keys of queries change."""
    for keys, is_first in ((rows.first, True), (rows.last + 1, False)):
        jumps = np.flatnonzero(np.diff(keys))
        if not len(jumps):
            continue
        starts, edges = rows.indices[jumps + 1], keys[jumps + 1 if is_first else jumps]
        size = reduce(gcd, [*np.diff(starts).tolist(), *np.diff(edges).tolist()], 0) or int(starts[0])
        if size < 2:
            continue
        query, key = int(-starts[0] % size), int(-edges[0] % size)
        numbers = (rows.indices + query) // size
        least, most = numbers - (rows.last + key) // size, numbers - (rows.first + key) // size
        shift = int(least.min()) if least.min() == most.max() else 0
        key += shift * size
        yield Blocks(size, Affine(query), Affine(key), _from(least - shift, most - shift))
