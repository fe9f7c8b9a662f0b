"""The value of a constant in a mask's graph at every query and key; of boolean ones, derived in a few passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from math import gcd

import islpy as isl
import numpy as np
from numpy.typing import NDArray

from attnforge.export.attention.masking import NEGLIGIBLE
from attnforge.export.masks.affine import Affine, Atom, Variable
from attnforge.export.masks.indices import Index
from attnforge.export.masks.numbers import UNKNOWN, Arithmetic, Between, Number
from attnforge.export.masks.regions import ALL, MOST_REGIONS, Blocks, Interval, PairRegion, Regions, pairs_of, visible
from attnforge.export.masks.scores import PAIR, Scores, Whole

Flags = NDArray[np.bool_]
Numbers = NDArray[np.int64]

MOST_RUNS = 32
"""Maximum number of runs of a vector that are distinguished."""

MOST_LEVELS = 4
"""Maximum number of different numbers of a constant whose places are distinguished."""


def constant_at(arithmetic: Arithmetic, array: NDArray[np.generic], index: Index) -> isl.Set | Number | None:
    """The value of an array at an index; None for a type that is not read."""
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        return None
    scores = arithmetic.scores
    array, index = _within(scores, array, index)
    if not array.size:
        return None
    if array.dtype == bool:
        return _truth(scores, array.astype(bool), index)
    if array.dtype.kind == "i" and (progression := _progression(scores, array.astype(np.int64), index)) is not None:
        return Number(progression)
    wide = array.astype(np.float64)
    if np.isnan(wide).any():
        return arithmetic.between(UNKNOWN)
    levels = np.unique(wide)
    if len(levels) > MOST_LEVELS:
        levels, parts = levels[:0], [wide > NEGLIGIBLE, wide <= NEGLIGIBLE]
    else:
        parts = [wide == level for level in levels]
    result: Number | None = None
    for part in (part for part in parts if part.any()):
        number = arithmetic.between(Between(float(wide[part].min()), float(wide[part].max())))
        result = number if result is None else arithmetic.choose(_truth(scores, part, index), number, result)
    return result


def _within(scores: Scores, array: NDArray[np.generic], index: Index) -> tuple[NDArray[np.generic], Index]:
    """The part of an array that is read, without dims that are read at one index only, and the index into it."""
    kept: list[Whole] = []
    for axis, position in reversed(list(enumerate(index))):
        size = array.shape[axis]
        least, most = scores.bounds(position)
        first, last = (int(min(max(end, 0), size - 1)) for end in (least, most))
        array = np.take(array, range(first, last + 1), axis) if last - first + 1 < size else array
        if array.shape[axis] == 1:
            array = array.squeeze(axis)
        else:
            kept.insert(0, position.sub(scores.constant(first)) if first else position)
    return array, tuple(kept)


def _progression(scores: Scores, array: NDArray[np.int64], index: Index) -> Whole | None:
    """Positions that were counted ahead of time: equal steps along one or two dims, or equal steps after every run of
    equal numbers."""
    for axis in range(array.ndim):
        if (array == (first := array.take([0], axis))).all():
            array = first
    index = tuple(position for size, position in zip(array.shape, index, strict=True) if size > 1)
    array = array.squeeze()
    widths = [int(np.flatnonzero(np.diff(array))[0]) + 1] if array.ndim == 1 else [1] * array.ndim
    if array.ndim > 2:
        return None
    starts = array[(0,) * array.ndim]
    result, even = scores.constant(int(starts)), np.asarray(starts)
    for axis, (position, width) in enumerate(zip(index, widths, strict=True)):
        step = int(array[tuple(width if i == axis else 0 for i in range(array.ndim))] - starts)
        along = np.arange(array.shape[axis]) // width * step
        even = even + along.reshape([-1 if i == axis else 1 for i in range(array.ndim)])
        position = scores.divided(position, width) if width > 1 else position
        result = result.add(position.scale_val(scores.value(step)))
    return result if np.array_equal(array, even) else None


# --- conditions -------------------------------------------------------------------------------------------------------


def _truth(scores: Scores, flags: Flags, index: Index) -> isl.Set:
    """The condition given by an array of flags at an index."""
    known = [axis for axis, position in enumerate(index) if scores.variables(position).issubset(PAIR)]
    known = known if len(known) <= 2 else []
    flags = np.moveaxis(flags, known, range(-len(known), 0)).reshape(-1, *(flags.shape[axis] for axis in known))
    some, every = np.asarray(flags.any(0)), np.asarray(flags.all(0))
    positions = [index[axis] for axis in known]
    may = _condition(scores, some, positions)
    if np.array_equal(some, every):
        return may
    return _condition(scores, every, positions).union(may.intersect(scores.unknown_condition(Variable, "pattern")))


def _condition(scores: Scores, flags: Flags, positions: Sequence[Whole]) -> isl.Set:
    if flags.all() or not flags.any():
        return scores.always if flags.all() else scores.never
    if len(positions) == 1:
        return _along(scores, flags, positions[0])
    bounds: list[isl.Set] = []
    for shown in (flags, ~flags):
        regions = _outside(shown)
        pairs = [pairs_of(scores, region, *positions) for region in _shortened(regions, shown)]
        outside = reduce(isl.Set.union, pairs, scores.never)
        if _count(regions, shown) == int(shown.sum()):
            return outside if shown is flags else scores.opposite(outside)
        bounds.append(outside)
    most, least = bounds[0], scores.opposite(bounds[1])
    return least.union(most.intersect(scores.unknown_condition((), "pattern")))


def _along(scores: Scores, flags: Flags, position: Whole) -> isl.Set:
    runs, last, result = _runs(flags), len(flags) - 1, scores.never
    is_exact = len(runs) <= MOST_RUNS
    for start, stop in runs if is_exact else [(runs[0][0], runs[-1][1])]:
        after = position.ge_set(scores.constant(start)) if start else scores.always
        result = result.union(after.intersect(position.lt_set(scores.constant(stop))) if stop <= last else after)
    return result if is_exact else result.intersect(scores.unknown_condition((), "pattern"))


def _outside(flags: Flags) -> Regions:
    """The regions with the fewest pairs among all candidates that contain every True pair, of which there are some."""
    exact, best, left = int(flags.sum()), ALL, flags.size
    for regions in _ways(flags):
        count = _count(regions, flags)
        if count < left:
            best, left = regions, count
        if count == exact:
            break
    return best


def _count(regions: Regions, flags: Flags) -> int:
    nothing_else: dict[Atom, int] = {}
    return visible(regions, np.arange(flags.shape[0]), flags.shape[1], nothing_else.__getitem__)


def _shortened(regions: Regions, flags: Flags) -> Regions:
    """The same pairs, without the conditions that exclude nothing."""
    count = _count(regions, flags)
    for i in range(len(regions)):
        wider = True
        while wider:
            options = ((*regions[:i], looser, *regions[i + 1 :]) for looser in regions[i].looser())
            found = next((option for option in options if _count(option, flags) == count), None)
            regions, wider = found or regions, found is not None
    return regions


# --- candidate regions ------------------------------------------------------------------------------------------------


def _ways(flags: Flags) -> Iterator[Regions]:
    """Unions of regions that contain every True pair: one region; one per segment; one with global rows and columns."""
    rows = _Rows.of(flags)
    yield from ((_region(rows, blocks),) for blocks in (None, *_blocks(rows)))
    segments = _segments(rows, flags.shape)
    if 1 < len(segments) <= MOST_REGIONS:
        index = np.arange(len(flags))[:, None]
        parts = [flags & (index >= start) & (index < stop) for start, stop in segments]
        yield tuple(_region(_Rows.of(part)) for part in parts if part.any())
    full_columns, full_rows = np.asarray(flags.all(0)), np.asarray(flags.all(1))
    for has_columns, has_rows in ((True, False), (True, True), (False, True)):
        columns, queries = full_columns & has_columns, full_rows & has_rows
        regions = [PairRegion(keys=_interval(start, stop - 1)) for start, stop in _runs(columns)]
        regions += [PairRegion(queries=_interval(start, stop - 1)) for start, stop in _runs(queries)]
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


def _region(rows: _Rows, blocks: Blocks | None = None) -> PairRegion:
    """The smallest region that contains all keys of the queries."""
    band = _from(rows.indices - rows.last, rows.indices - rows.first)
    return PairRegion(band, blocks, _from(rows.indices, rows.indices), _from(rows.first, rows.last))


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
    return list(pairwise([0, *borders[(before < borders) & (after >= borders)].tolist(), size]))


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
