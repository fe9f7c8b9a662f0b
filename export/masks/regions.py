"""Pairs of a query and a key as unions of a few regions: bands, blocks and ranges.

For every query, a region contains consecutive keys, so a lowering reads them in one slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import islpy as isl
import numpy as np
from numpy.typing import NDArray

from attnforge.export.masks.affine import ZERO, Affine, Atom, Quotient, Variable
from attnforge.export.masks.scores import PAIR, Scores, Whole

MOST_REGIONS = 8
"""Maximum number of regions in a union; a larger one is bounded by fewer."""


class Interval(NamedTuple):
    """`least ≤ x ≤ most`; None for an open end."""

    least: Affine | None = None
    most: Affine | None = None

    @property
    def is_open(self) -> bool:
        return self == OPEN

    def looser(self) -> Iterator[Interval]:
        """The intervals with one end fewer."""
        if self.least is not None:
            yield Interval(most=self.most)
        if self.most is not None:
            yield Interval(least=self.least)

    def negated(self) -> Interval:
        return Interval(*(end and -end for end in reversed(self)))

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

        within(*(None if end is None else value(end) for end in self.keys))
        within(*(None if end is None else queries - value(end) for end in reversed(self.band)))
        if (blocks := self.blocks) is not None:
            number, shift = (queries + value(blocks.query)) // blocks.size, value(blocks.key)
            least, most = blocks.numbers.least, blocks.numbers.most
            within(
                None if most is None else (number - value(most)) * blocks.size - shift,
                None if least is None else (number - value(least) + 1) * blocks.size - shift - 1,
            )
        for end, sign in zip(self.queries, (1, -1), strict=True):
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


# --- regions of a set -------------------------------------------------------------------------------------------------

# Regions that describe a set of queries and keys: exactly, where there are few.


def pairs_of(scores: Scores, region: PairRegion, query: Whole | None = None, key: Whole | None = None) -> isl.Set:
    """The pairs of a region; by default of the scores' own indices."""
    query, key = scores.query if query is None else query, scores.key if key is None else key
    ranges = [(query.sub(key), region.band), (query, region.queries), (key, region.keys)]
    if (blocks := region.blocks) is not None:
        numbers = (scores.divided(x.add(scores.whole(shift)), blocks.size)
                   for x, shift in ((query, blocks.query), (key, blocks.key)))  # fmt: skip
        ranges.append((isl.PwAff.sub(*numbers), blocks.numbers))
    result = scores.always
    for x, interval in ranges:
        if interval.least is not None:
            result = result.intersect(x.ge_set(scores.whole(interval.least)))
        if interval.most is not None:
            result = result.intersect(x.le_set(scores.whole(interval.most)))
    return result


def fit(scores: Scores, may: isl.Set) -> tuple[Regions, bool]:
    """Regions that contain all pairs of a set, and whether they contain no others.

    Each part of the set is a region, widened as far as the set allows.
    """
    pairs = scores.pairs
    if may.is_empty():
        return NONE, True
    simple = may.gist(pairs).coalesce().compute_divs()
    parts = [_region(scores, part) for part in simple.get_basic_sets()]
    union = _union(scores, parts, pairs).union(may)
    is_exact = union.is_subset(may)
    hull = _region(scores, simple.unshifted_simple_hull())
    if len(parts) > 4 * MOST_REGIONS or not is_exact:
        parts, union = [hull], pairs_of(scores, hull).intersect(pairs)
    regions = list(dict.fromkeys(_widened(scores, part, union, pairs) for part in parts))
    for region in sorted(regions, key=_size):
        others = [other for other in regions if other != region]
        if others and pairs_of(scores, region).intersect(pairs).is_subset(_union(scores, others, pairs)):
            regions = others
    if len(regions) > MOST_REGIONS:
        regions = [_widened(scores, hull, pairs_of(scores, hull), pairs)]
    regions = sorted((_closed(scores, region, pairs) for region in regions), key=_order)
    found = _union(scores, regions, pairs)
    return (tuple(regions), found.is_subset(may)) if may.is_subset(found) else (ALL, False)


def _union(scores: Scores, regions: Sequence[PairRegion], pairs: isl.Set) -> isl.Set:
    return reduce(isl.Set.union, (pairs_of(scores, region) for region in regions)).intersect(pairs)


def _widened(scores: Scores, region: PairRegion, union: isl.Set, pairs: isl.Set) -> PairRegion:
    """A region without the ends that are not needed for it to stay within a set."""
    for looser in region.looser():
        if pairs_of(scores, looser).intersect(pairs).is_subset(union):
            return _widened(scores, looser, union, pairs)
    return region


def _closed(scores: Scores, region: PairRegion, pairs: isl.Set) -> PairRegion:
    """A region whose blocks have both ends, if its other ranges leave only the same blocks."""
    blocks = region.blocks
    if blocks is None or (blocks.numbers.least is None) == (blocks.numbers.most is None):
        return region
    end = blocks.numbers.least or blocks.numbers.most
    same = replace(region, blocks=replace(blocks, numbers=Interval(end, end)))
    return same if pairs_of(scores, region).intersect(pairs).is_subset(pairs_of(scores, same)) else region


def _size(region: PairRegion) -> int:
    """Fewer for regions with more ends."""
    return -sum(1 for _ in region.looser())


def _order(region: PairRegion) -> tuple[bool, bool, str]:
    return not region.queries.is_open, not region.keys.is_open, region.text()


# --- regions of isl's constraints -------------------------------------------------------------------------------------


_End = tuple[str | Blocks, Interval]
"""A range with one end: of `band`, `queries`, `keys`, or of the numbers of blocks."""


def _region(scores: Scores, part: isl.BasicSet) -> PairRegion:
    """The smallest region that contains a set, by its constraints; those that are no end of a region are dropped."""
    ranges: dict[str | Blocks, Interval] = {}
    for constraint in part.get_constraints():
        x = scores.sum_of(constraint.get_aff())
        sides = () if x is None else (x, -x)[: 1 + constraint.is_equality()]
        for of, end in filter(None, map(_end, sides)):
            known = ranges.get(of, OPEN)
            ranges[of] = Interval(known.least or end.least, known.most or end.most)
    blocks = next((replace(of, numbers=ranges[of]) for of in ranges if isinstance(of, Blocks)), None)
    band, queries, keys = (ranges.get(of, OPEN) for of in ("band", "queries", "keys"))
    return PairRegion(band, blocks, queries, keys)


def _end(x: Affine) -> _End | None:
    """`x ≥ 0` as a range with one end; None if it is none."""
    factors = dict(x.terms)
    query, key = factors.pop(Variable.QUERY, 0), factors.pop(Variable.KEY, 0)
    quotients = {atom: factors.pop(atom) for atom in list(factors) if Affine.atom(atom).variables}
    rest = Affine.of(x.number, factors)
    if not quotients:
        if (query and key and query + key) or not (query or key):
            return None
        factor, of = query or key, "band" if query and key else "queries" if query else "keys"
        return of, _range(factor, rest)
    # isl gives the number of a query's block by the keys of a block, or the other way round: by one quotient
    return _of_quotient(*quotients.popitem(), query, key, rest) if len(quotients) == 1 else None


def _range(factor: int, rest: Affine) -> Interval:
    """The integers `x` with `factor · x + rest ≥ 0`."""
    end = rest.floor_divided(abs(factor))
    return Interval(least=-end) if factor > 0 else Interval(most=end)


def _of_quotient(quotient: Atom, factor: int, query: int, key: int, rest: Affine) -> _End | None:
    """`factor · quotient + query · its index + key · its index + rest ≥ 0` as a range with one end."""
    if not isinstance(quotient, Quotient):
        return None
    size, factors = quotient.divisor, dict(quotient.numerator.terms)
    counted = [(variable, factors.pop(variable)) for variable in PAIR if variable in factors]
    shift = Affine.of(quotient.numerator.number, factors)
    if len(counted) != 1 or counted[0][1] != 1 or shift.variables:
        return None
    is_query = counted[0][0] is Variable.QUERY
    own, other = (query, key) if is_query else (key, query)
    if not own and not other:
        first, last = _range(factor, rest)
        ends = first and first * size - shift, last and last * size + (size - 1) - shift
        return "queries" if is_query else "keys", Interval(*ends)
    if own or abs(other) != 1 or factor != -other * size:
        return None
    # other index + rest ≥ size·number, or other index − rest − 1 < size·number
    other_shift, apart = (rest, ZERO) if other > 0 else (-rest - 1, Affine(-1))
    if is_query:
        return _of_blocks(size, shift, other_shift, _range(-other, apart))
    return _of_blocks(size, other_shift, shift, _range(other, apart))


def _of_blocks(size: int, query: Affine, key: Affine, numbers: Interval) -> _End:
    """A range of the numbers of blocks, with shifts that are less than a block."""
    whole = query.number // size - key.number // size
    query, key = (Affine(shift.number % size, shift.terms) for shift in (query, key))
    return Blocks(size, query, key), Interval(*(end and end - whole for end in numbers))
