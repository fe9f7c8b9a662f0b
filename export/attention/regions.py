"""The pairs of a query and a key that a mask leaves visible, as unions of a few regions: bands, blocks and ranges.

For every query, a region contains consecutive keys, so a lowering reads them in one slice. A union of regions bounds a
set from outside or from inside, and every operation preserves that: what cannot be expressed as few regions is
enlarged in an outer bound and dropped from an inner one (:data:`Bound`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from attnforge.export.attention.affine import ZERO, Affine, Atom, never_negative

MOST_REGIONS = 8
"""Maximum number of regions in a union; a larger one is bounded by fewer."""

Bound = Literal["outer", "inner"]


@dataclass(frozen=True)
class Interval:
    """`least ≤ x ≤ most`; None for an open end."""

    least: Affine | None = None
    most: Affine | None = None

    @property
    def is_open(self) -> bool:
        return self.least is None and self.most is None

    @property
    def is_empty(self) -> bool:
        """Whether it is proved to contain no number."""
        return self.least is not None and self.most is not None and never_negative(self.least - self.most - 1)

    def holds(self, other: Interval) -> bool:
        """Whether all of `other` is proved to be inside."""
        return _before(self.least, other.least) and _after(self.most, other.most)

    def meets(self, other: Interval) -> bool:
        """Whether the two are proved to overlap or to be adjacent, so that their union is one interval."""
        return _touches(self.least, other.most) and _touches(other.least, self.most)

    def hull(self, other: Interval) -> Interval:
        """An interval that contains both: the smallest one, but open at an end where the ends cannot be compared."""
        least = self.least if _before(self.least, other.least) else other.least
        most = self.most if _after(self.most, other.most) else other.most
        return Interval(
            least if _before(least, self.least) and _before(least, other.least) else None,
            most if _after(most, self.most) and _after(most, other.most) else None,
        )

    def both(self, other: Interval, bound: Bound) -> Interval | None:
        """The intersection. If two ends cannot be compared, an outer bound uses one of them, and an inner bound is
        None."""
        least = other.least if _before(self.least, other.least) else self.least
        most = other.most if _after(self.most, other.most) else self.most
        sure = (_before(self.least, least) and _before(other.least, least)) and (
            _after(self.most, most) and _after(other.most, most)
        )
        return Interval(least, most) if sure or bound == "outer" else None

    def shifted(self, by: Affine) -> Interval:
        return Interval(*(end if end is None else end + by for end in (self.least, self.most)))

    def negated(self) -> Interval:
        return Interval(*(end if end is None else -end for end in (self.most, self.least)))

    def text(self) -> str:
        least = "−∞" if self.least is None else self.least.text()
        most = "∞" if self.most is None else self.most.text()
        return f"{least} … {most}"


OPEN = Interval()
SAME = Interval(ZERO, ZERO)


def _before(a: Affine | None, b: Affine | None) -> bool:
    """Whether a lower end is proved not to be above another."""
    return a is None or (b is not None and never_negative(b - a))


def _after(a: Affine | None, b: Affine | None) -> bool:
    """Whether an upper end is proved not to be below another."""
    return a is None or (b is not None and never_negative(a - b))


def _touches(least: Affine | None, most: Affine | None) -> bool:
    return least is None or most is None or never_negative(most - least + 1)


@dataclass(frozen=True)
class Blocks:
    """Blocks of a fixed size along queries and keys, and which of them see one another.

    Attributes:
        size: the size of a block, in tokens.
        query: offset that is added to a query's index before the division.
        key: offset that is added to a key's index before the division.
        numbers: the range of `(query index + query) // size − (key index + key) // size`; 0 for the same block.
    """

    size: int
    query: Affine = ZERO
    key: Affine = ZERO
    numbers: Interval = SAME

    @property
    def band(self) -> Interval:
        """The implied bounds of `query − key`."""
        least, most, rest = self.numbers.least, self.numbers.most, self.size - 1
        return Interval(
            None if least is None else least * self.size - rest, None if most is None else most * self.size + rest
        ).shifted(self.key - self.query)

    def is_like(self, other: Blocks) -> bool:
        return (self.size, self.query, self.key) == (other.size, other.query, other.key)

    def text(self) -> str:
        offsets = (("queries", self.query), ("keys", self.key))
        shifts = [f"{name} + {offset.text()}" for name, offset in offsets if offset != ZERO]
        shifted = f" ({', '.join(shifts)})" if shifts else ""
        several = "" if self.numbers == SAME else f", {self.numbers.negated().text()}"
        return f"blocks of {self.size}{shifted}{several}"


@dataclass(frozen=True)
class Region:
    """The pairs that meet every condition.

    Attributes:
        band: range of `query − key`.
        blocks: condition on blocks, if any.
        queries: range of the query's index.
        keys: range of the key's index.
    """

    band: Interval = OPEN
    blocks: Blocks | None = None
    queries: Interval = OPEN
    keys: Interval = OPEN

    @property
    def is_empty(self) -> bool:
        numbers = self.blocks.numbers if self.blocks is not None else OPEN
        return any(interval.is_empty for interval in (self.band, self.queries, self.keys, numbers))

    def holds(self, other: Region) -> bool:
        """Whether all of `other` is proved to be inside."""
        mine, others = self.blocks, other.blocks
        if mine is not None and (others is None or not mine.is_like(others) or not mine.numbers.holds(others.numbers)):
            return False
        return all(a.holds(b) for a, b in zip(self._ranges(), other._ranges(), strict=True))

    def _ranges(self) -> tuple[Interval, Interval, Interval]:
        return self.band, self.queries, self.keys

    def both(self, other: Region, bound: Bound) -> Region | None:
        """The intersection; an inner bound is None if that is not a region."""
        ranges = [a.both(b, bound) for a, b in zip(self._ranges(), other._ranges(), strict=True)]
        band, queries, keys = ranges
        if band is None or queries is None or keys is None:
            return None
        mine, others = self.blocks, other.blocks
        if mine is None or others is None:
            return Region(band, mine or others, queries, keys)
        if mine.is_like(others):
            numbers = mine.numbers.both(others.numbers, bound)
            return None if numbers is None else Region(band, replace(mine, numbers=numbers), queries, keys)
        if bound == "inner":
            return None
        smaller, larger = sorted((mine, others), key=lambda blocks: blocks.size)
        return Region(band.both(larger.band, bound) or band, smaller, queries, keys)

    def joined(self, other: Region) -> Region | None:
        """The union as one region, if they differ in one range only and leave no gap; else None."""
        differing = [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]
        if len(differing) != 1:
            return None
        a, b = getattr(self, differing[0]), getattr(other, differing[0])
        if isinstance(a, Interval) and isinstance(b, Interval):
            whole = _whole(a, b) if a.meets(b) else None
            return None if whole is None else replace(self, **_changed(differing[0], whole))
        if a is None or b is None or not a.is_like(b) or not a.numbers.meets(b.numbers):
            return None
        numbers = _whole(a.numbers, b.numbers)
        return (
            None if numbers is None else replace(self, blocks=None if numbers.is_open else replace(a, numbers=numbers))
        )

    def hull(self, other: Region) -> Region:
        """A region that contains both."""
        band, queries, keys = (a.hull(b) for a, b in zip(self._ranges(), other._ranges(), strict=True))
        mine, others = self.blocks, other.blocks
        if mine is None or others is None or not mine.is_like(others):
            a, b = (
                r.band if r.blocks is None else r.band.both(r.blocks.band, "outer") or r.band for r in (self, other)
            )
            return Region(a.hull(b), None, queries, keys)
        return Region(band, replace(mine, numbers=mine.numbers.hull(others.numbers)), queries, keys)

    def moved(self, query: Affine, key: Affine) -> Region:
        """The region of pairs that lie in this one after offsets are added to their query and key index."""
        blocks = self.blocks
        if blocks is not None:
            blocks = replace(blocks, query=blocks.query + query, key=blocks.key + key)
        return Region(self.band.shifted(key - query), blocks, self.queries.shifted(-query), self.keys.shifted(-key))

    def keys_of(
        self, queries: NDArray[np.int64], n_k: int, number_of: Callable[[Atom], int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The starts and stops (exclusive) of the keys that queries see.

        Args:
            queries: indices of the queries.
            n_k: the number of keys.
            number_of: gives the number of every size and scalar.
        """

        def value(end: Affine) -> int:
            return end.evaluate(number_of)

        starts, stops = np.zeros_like(queries), np.full_like(queries, n_k)

        def within(least: NDArray[np.int64] | int | None, most: NDArray[np.int64] | int | None) -> None:
            if least is not None:
                np.maximum(starts, least, out=starts)
            if most is not None:
                np.minimum(stops, most + 1, out=stops)

        within(*(None if end is None else value(end) for end in (self.keys.least, self.keys.most)))
        within(*(None if end is None else queries - value(end) for end in (self.band.most, self.band.least)))
        if (blocks := self.blocks) is not None:
            number, shift = (queries + value(blocks.query)) // blocks.size, value(blocks.key)
            least, most = blocks.numbers.least, blocks.numbers.most
            within(
                None if most is None else (number - value(most)) * blocks.size - shift,
                None if least is None else (number - value(least) + 1) * blocks.size - shift - 1,
            )
        for end, sign in ((self.queries.least, 1), (self.queries.most, -1)):
            if end is not None:
                stops[(queries - value(end)) * sign < 0] = 0
        return starts, np.maximum(starts, stops)

    def text(self) -> str:
        parts = [f"band {self.band.negated().text()}"] if not self.band.is_open else []
        parts += [self.blocks.text()] if self.blocks is not None else []
        for name, interval in (("keys", self.keys), ("queries", self.queries)):
            if not interval.is_open:
                parts.append(f"{name} {Interval(interval.least or ZERO, interval.most).text()}")
        return " and ".join(parts) or "all"


def _whole(a: Interval, b: Interval) -> Interval | None:
    """The union of two intervals that meet; None if their ends cannot be compared."""
    hull = a.hull(b)
    ends = {hull.least} <= {a.least, b.least} and {hull.most} <= {a.most, b.most}
    return hull if ends else None


def _changed(name: str, value: Interval | Blocks | None) -> dict[str, Any]:
    return {name: value}


Regions = tuple[Region, ...]
ALL: Regions = (Region(),)
NONE: Regions = ()


def either(a: Regions, b: Regions, bound: Bound) -> Regions:
    """The union of two unions."""
    regions: list[Region] = list(a)
    for region in b:
        _add(regions, region)
    while len(regions) > MOST_REGIONS:
        last = regions.pop()
        if bound == "outer":
            regions[-1] = regions[-1].hull(last)
    return tuple(regions)


def _add(regions: list[Region], region: Region) -> None:
    """Add a region to a list in which no region contains another."""
    if any(other.holds(region) for other in regions):
        return
    regions[:] = [other for other in regions if not region.holds(other)]
    for i, other in enumerate(regions):
        if (joined := other.joined(region)) is not None:
            del regions[i]
            _add(regions, joined)
            return
    regions.append(region)


def both(a: Regions, b: Regions, bound: Bound) -> Regions:
    """The intersection of two unions."""
    result: Regions = ()
    for x in a:
        for y in b:
            region = x.both(y, bound)
            if region is not None and not region.is_empty:
                result = either(result, (region,), bound)
    return result


def without(regions: Regions, bound: Bound) -> Regions:
    """The complement of a union."""
    result = ALL
    for region in regions:
        outside: Regions = ()
        for opposite in _opposites(region):
            outside = either(outside, (opposite,), bound)
        result = both(result, outside, bound)
    return result


def _opposites(region: Region) -> Iterator[Region]:
    """Regions whose union is the complement of a region."""
    for name in ("band", "queries", "keys"):
        for interval in _beyond(getattr(region, name)):
            yield replace(Region(), **_changed(name, interval))
    if (blocks := region.blocks) is not None:
        for interval in _beyond(blocks.numbers):
            yield Region(blocks=replace(blocks, numbers=interval))


def _beyond(interval: Interval) -> Iterator[Interval]:
    if interval.least is not None:
        yield Interval(most=interval.least - 1)
    if interval.most is not None:
        yield Interval(least=interval.most + 1)


def visible(regions: Sequence[Region], queries: NDArray[np.int64], n_k: int, number_of: Callable[[Atom], int]) -> int:
    """Count the pairs of some queries and all keys that are in a union, each once.

    Args:
        queries: indices of the queries.
        n_k: the number of keys.
        number_of: gives the number of every size and scalar.
    """
    spans = [region.keys_of(queries, n_k, number_of) for region in regions]
    return sum(int((stops - starts).sum()) for starts, stops in _apart(spans)) if spans else 0


def _apart(
    spans: Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]],
) -> Iterable[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """The spans of every query, sorted by start, each without what earlier ones cover."""
    starts, stops = (np.stack(ends) for ends in zip(*spans, strict=True))
    order = np.argsort(starts, axis=0, kind="stable")
    starts, stops = np.take_along_axis(starts, order, 0), np.take_along_axis(stops, order, 0)
    reached = np.zeros_like(starts[0])
    for start, stop in zip(starts, stops, strict=True):
        start = np.maximum(start, reached)
        yield start, np.maximum(start, stop)
        reached = np.maximum(reached, stop)
