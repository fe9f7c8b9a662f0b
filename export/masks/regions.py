"""Pairs of a query and a key as unions of a few regions: bands, blocks and ranges.

For every query, a region contains consecutive keys, so a lowering reads them in one slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from attnforge.export.masks.affine import ZERO, Affine, Atom

MOST_REGIONS = 8
"""Maximum number of regions in a union; a larger one is bounded by fewer."""


@dataclass(frozen=True)
class Interval:
    """`least ≤ x ≤ most`; None for an open end."""

    least: Affine | None = None
    most: Affine | None = None

    @property
    def is_open(self) -> bool:
        return self.least is None and self.most is None

    def looser(self) -> Iterator[Interval]:
        """The intervals with one end fewer."""
        if self.least is not None:
            yield Interval(most=self.most)
        if self.most is not None:
            yield Interval(least=self.least)

    def negated(self) -> Interval:
        return Interval(*(end if end is None else -end for end in (self.most, self.least)))

    def text(self) -> str:
        least = "−∞" if self.least is None else self.least.text()
        most = "∞" if self.most is None else self.most.text()
        return f"{least} … {most}"


OPEN = Interval()
SAME = Interval(ZERO, ZERO)


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

    def text(self) -> str:
        offsets = (("queries", self.query), ("keys", self.key))
        shifts = [f"{name} + {offset.text()}" for name, offset in offsets if offset != ZERO]
        shifted = f" ({', '.join(shifts)})" if shifts else ""
        several = "" if self.numbers == SAME else f", {self.numbers.negated().text()}"
        return f"blocks of {self.size}{shifted}{several}"


@dataclass(frozen=True)
class PairRegion:
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

    def looser(self) -> Iterator[PairRegion]:
        """The regions with one end or the blocks fewer."""
        if (blocks := self.blocks) is not None:
            yield replace(self, blocks=None)
            if blocks.numbers.least != blocks.numbers.most:
                yield from (replace(self, blocks=replace(blocks, numbers=x)) for x in blocks.numbers.looser())
        yield from (replace(self, band=x) for x in self.band.looser())
        yield from (replace(self, keys=x) for x in self.keys.looser())
        yield from (replace(self, queries=x) for x in self.queries.looser())

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


Regions = tuple[PairRegion, ...]
ALL: Regions = (PairRegion(),)
NONE: Regions = ()


def visible(
    regions: Sequence[PairRegion], queries: NDArray[np.int64], n_k: int, number_of: Callable[[Atom], int]
) -> int:
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
