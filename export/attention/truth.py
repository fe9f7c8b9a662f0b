"""Conditions on the query and key index, with proved bounds: the pairs for which they are True at most, and at least.

Both bounds are kept for a condition and for its opposite, so that Not costs nothing. If the two bounds of a condition
are equal, it is known exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from math import gcd
from typing import Literal

from attnforge.export.attention.affine import KEY, QUERY, Affine, Quotient, Variable, never_negative
from attnforge.export.attention.regions import ALL, NONE, Blocks, Interval, Region, Regions, both, either

Kind = Literal["padding", "queries", "condition", "bias", "pattern"]
"""What a mask depends on apart from its regions: data by key (`padding`), by query (`queries`), or by both or neither
(`condition`); numbers that are added to the scores (`bias`); or indices, in a way that regions do not describe
(`pattern`)."""

PATTERN: frozenset[Kind] = frozenset({"pattern"})


@dataclass(frozen=True)
class Cover:
    """Bounds of a set of pairs of a query and a key.

    Attributes:
        most: the set is a subset of these regions.
        least: the set is a superset of these regions.
    """

    most: Regions
    least: Regions

    @property
    def is_exact(self) -> bool:
        return set(self.most) == set(self.least)

    def moved(self, query: Affine, key: Affine) -> Cover:
        return Cover(*(tuple(region.moved(query, key) for region in side) for side in (self.most, self.least)))

    def __and__(self, other: Cover) -> Cover:
        return Cover(both(self.most, other.most, "outer"), both(self.least, other.least, "inner"))

    def __or__(self, other: Cover) -> Cover:
        return Cover(either(self.most, other.most, "outer"), either(self.least, other.least, "inner"))


@dataclass(frozen=True)
class Truth:
    """A condition.

    Attributes:
        true: where it is True.
        false: where it is False.
        kinds: what else it depends on; empty if it is exact.
    """

    true: Cover
    false: Cover
    kinds: frozenset[Kind] = frozenset()

    @property
    def is_exact(self) -> bool:
        return self.true.is_exact

    @property
    def constant(self) -> bool | None:
        """Its value for all pairs; None if it differs between pairs or is not proved."""
        return False if not self.true.most else True if not self.false.most else None

    def moved(self, query: Affine, key: Affine) -> Truth:
        """The condition with offsets added to the query and key index."""
        return Truth(self.true.moved(query, key), self.false.moved(query, key), self.kinds)

    def __invert__(self) -> Truth:
        return Truth(self.false, self.true, self.kinds)

    def __and__(self, other: Truth) -> Truth:
        return _combined(self, other, self.true & other.true, self.false | other.false)

    def __or__(self, other: Truth) -> Truth:
        return _combined(self, other, self.true | other.true, self.false & other.false)


def _combined(a: Truth, b: Truth, true: Cover, false: Cover) -> Truth:
    if not true.most:
        return NEVER
    if not false.most:
        return ALWAYS
    exact = true.is_exact and false.is_exact
    return Truth(true, false, frozenset() if exact else (a.kinds | b.kinds or PATTERN))


ALWAYS = Truth(Cover(ALL, ALL), Cover(NONE, NONE))
NEVER = ~ALWAYS


def unknown(kind: Kind) -> Truth:
    return Truth(Cover(ALL, NONE), Cover(ALL, NONE), frozenset({kind}))


def kind_of(variables: frozenset[Variable]) -> Kind:
    """The kind of a condition on data that is read at these indices."""
    if Variable.KEY in variables and Variable.QUERY not in variables:
        return "padding"
    return "queries" if Variable.QUERY in variables and Variable.KEY not in variables else "condition"


# --- comparisons ------------------------------------------------------------------------------------------------------

Largest = Mapping[Variable, Affine]
"""The largest index of queries and keys."""


def at_least_zero(x: Affine, largest: Largest) -> Truth:
    """`x ≥ 0`."""
    true, false = _region(x, largest), _region(-x - 1, largest)
    kinds = (
        PATTERN if not x.scalars and x.variables & {Variable.QUERY, Variable.KEY} else frozenset({kind_of(x.variables)})
    )
    if true is None or false is None:
        return Truth(Cover(ALL, NONE), Cover(ALL, NONE), kinds)
    return _combined(Truth(true, false, kinds), ALWAYS, true, false)


def zero(x: Affine, largest: Largest) -> Truth:
    """`x = 0`."""
    if x.constant is not None:
        return NEVER if x.constant else ALWAYS
    return at_least_zero(x, largest) & at_least_zero(-x, largest)


def _region(x: Affine, largest: Largest) -> Cover | None:
    """Where `x ≥ 0`; None if regions cannot bound it."""
    x = _without_factor(x)
    if never_negative(x, largest):
        return ALWAYS.true
    if never_negative(-x - 1, largest):
        return NEVER.true
    quotients = {atom: n for atom, n in x.terms if isinstance(atom, Quotient) and atom.numerator.variables}
    if quotients:
        return _of_quotients(x, quotients, largest)
    query, key = x.factors.get(Variable.QUERY, 0), x.factors.get(Variable.KEY, 0)
    rest = x - QUERY * query - KEY * key
    if rest.variables or (query + key and query and key) or not (query or key):  # by sample, or not a band
        return None
    step, sign = abs(query or key), 1 if (query or key) > 0 else -1
    end = rest.floor_divided(step) * -sign  # sign·index ≥ −rest/step
    interval = Interval(least=end) if sign > 0 else Interval(most=end)
    region = Region(band=interval) if query and key else Region(queries=interval) if query else Region(keys=interval)
    return _exactly(region, largest)


def _without_factor(x: Affine) -> Affine:
    """`x` divided by the greatest common divisor of its factors, rounded down, which keeps whether it is ≥ 0."""
    divisor = reduce(gcd, (n for _, n in x.terms), 0)
    return x.floor_divided(divisor) if divisor > 1 else x


def _exactly(region: Region, largest: Largest) -> Cover:
    """The exact cover of one region, without the ends that exclude nothing."""
    query, key = largest[Variable.QUERY], largest[Variable.KEY]
    ranges = {"band": Interval(-key, query), "queries": Interval(Affine(), query), "keys": Interval(Affine(), key)}
    for name, whole in ranges.items():
        interval: Interval = getattr(region, name)
        least = None if interval.least is not None and Interval(interval.least).holds(whole) else interval.least
        most = None if interval.most is not None and Interval(most=interval.most).holds(whole) else interval.most
        if Interval(least, most) != interval:
            return _exactly(Region(**{**vars(region), name: Interval(least, most)}), largest)
        if Interval(interval.least, whole.most).is_empty or Interval(whole.least, interval.most).is_empty:
            return NEVER.true
    return Cover((region,), (region,))


def _of_quotients(x: Affine, quotients: Mapping[Quotient, int], largest: Largest) -> Cover | None:
    """Where `x ≥ 0`, for sums with one or two quotients of indices."""
    (first, n), *others = quotients.items()
    rest = x - Affine.atom(first) * n
    if abs(n) > 1:  # n·q + r ≥ 0 where q + r//n ≥ 0, and −n·q + r ≥ 0 where −q + r//n ≥ 0
        return _region(Affine.atom(first) * (n // abs(n)) + rest.floor_divided(abs(n)), largest)
    if not others:  # q ≥ −r where the numerator is ≥ −r·d; q ≤ r where it is ≤ r·d + d − 1
        scaled = rest * first.divisor
        return _region(first.numerator + scaled if n > 0 else scaled + (first.divisor - 1) - first.numerator, largest)
    second, m = others[0]
    if len(others) > 1 or n + m or second.divisor != first.divisor:
        return None
    plus, minus = (first, second) if n > 0 else (second, first)
    return _of_blocks(plus, minus, rest - Affine.atom(second) * m, largest)


def _of_blocks(plus: Quotient, minus: Quotient, rest: Affine, largest: Largest) -> Cover | None:
    """Where `plus − minus + rest ≥ 0`."""
    size = plus.divisor
    shifts = plus.numerator - QUERY, minus.numerator - KEY
    swapped = plus.numerator - KEY, minus.numerator - QUERY
    if rest.constant is not None and not any(shift.variables for shift in shifts):
        return _exactly_blocks(Blocks(size, *shifts, Interval(least=-rest)), largest)
    if rest.constant is not None and not any(shift.variables for shift in swapped):
        return _exactly_blocks(Blocks(size, swapped[1], swapped[0], Interval(most=rest)), largest)
    difference = plus.numerator - minus.numerator + rest * size
    outer, inner = _region(difference + (size - 1), largest), _region(difference, largest)
    if outer is None or inner is None:
        return None
    return Cover(outer.most, inner.least)


def _exactly_blocks(blocks: Blocks, largest: Largest) -> Cover:
    if blocks.query == blocks.key and blocks.query.constant is not None:  # drop whole blocks from equal shifts
        shift = Affine(blocks.query.constant % blocks.size)
        blocks = Blocks(blocks.size, shift, shift, blocks.numbers)
    region = Region(blocks=blocks)
    return Cover((region,), (region,))
