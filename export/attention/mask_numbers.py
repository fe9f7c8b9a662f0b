"""Numbers as functions of the query and key index: what is proved of them, their arithmetic and comparisons.

A number is an integer expression of the indices (:class:`Whole`), a number between two bounds (:class:`Between`), an
integer from a constant table (:class:`Table`), or one of two numbers, chosen by a condition (:class:`Choice`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, floor, inf, isfinite, isnan

import numpy as np
from numpy.typing import NDArray

from attnforge.export.attention.affine import KEY, QUERY, Affine, Variable, never_negative
from attnforge.export.attention.constant_masks import truth_along, truth_of
from attnforge.export.attention.truth import ALWAYS, NEVER, Kind, Largest, Truth, at_least_zero, unknown, zero

MOST_LEAVES = 16
"""Maximum number of leaves of a choice; a larger choice is unknown."""

LARGEST_TABLE = 2**26
"""Maximum number of elements of a computed table."""


@dataclass(frozen=True)
class Whole:
    """The largest or the least of several integers; with one option, that integer."""

    options: tuple[Affine, ...]
    is_largest: bool = True

    @property
    def single(self) -> Affine | None:
        return self.options[0] if len(self.options) == 1 else None


@dataclass(frozen=True)
class Between:
    """A number between two bounds, inclusive; it may be NaN unless `is_number`."""

    least: float = -inf
    most: float = inf
    is_number: bool = True


@dataclass(frozen=True, eq=False)
class Table:
    """Integers by query and key: `(n_q or 1, n_k or 1)`."""

    numbers: NDArray[np.int64]


@dataclass(frozen=True)
class Choice:
    """`yes` where a condition is True, else `no`."""

    condition: Truth
    yes: Number
    no: Number


Leaf = Whole | Between | Table
Number = Leaf | Choice
UNKNOWN = Between(is_number=False)


def constant(number: float) -> Leaf:
    if isnan(number):
        return UNKNOWN
    is_whole = isfinite(number) and abs(number) < 2**53 and number == floor(number)
    return Whole((Affine(int(number)),)) if is_whole else Between(number, number)


def choose(condition: Truth, yes: Number, no: Number) -> Number:
    """`yes` where a condition is True, else `no`."""
    if condition.constant is not None:
        return yes if condition.constant else no
    if yes == no:
        return yes
    result = Choice(condition, yes, no)
    return result if _leaves(result) <= MOST_LEAVES else UNKNOWN


def _leaves(number: Number) -> int:
    return _leaves(number.yes) + _leaves(number.no) if isinstance(number, Choice) else 1


def apply(function: Callable[[Leaf], Number], number: Number) -> Number:
    if isinstance(number, Choice):
        return choose(number.condition, apply(function, number.yes), apply(function, number.no))
    return function(number)


def combine(function: Callable[[Leaf, Leaf], Number], a: Number, b: Number) -> Number:
    """Apply a function of two numbers to every choice of each."""
    # Two inexact conditions that compare equal may still be different conditions.
    if isinstance(a, Choice) and isinstance(b, Choice) and a.condition == b.condition and a.condition.is_exact:
        return choose(a.condition, combine(function, a.yes, b.yes), combine(function, a.no, b.no))
    if isinstance(a, Choice):
        return choose(a.condition, combine(function, a.yes, b), combine(function, a.no, b))
    return apply(lambda leaf: function(a, leaf), b)


def bounds(leaf: Leaf) -> Between:
    """The bounds of a leaf."""
    if isinstance(leaf, Between):
        return leaf
    if isinstance(leaf, Table):
        return Between(float(leaf.numbers.min()), float(leaf.numbers.max()))
    number = leaf.single.constant if leaf.single is not None else None
    return UNKNOWN if number is None else Between(float(number), float(number))


# --- arithmetic -------------------------------------------------------------------------------------------------------


class Arithmetic:
    """Arithmetic and comparisons of numbers over the scores of a site.

    Args:
        largest: the largest index of queries and of keys.
    """

    def __init__(self, largest: Largest) -> None:
        self._largest = largest

    def compute(self, op_type: str, a: Number, b: Number) -> Number:
        """Compute Add, Sub, Mul, Div (of integers, towards zero), Ratio (of any numbers), Mod, Max or Min."""
        return combine(lambda x, y: self._leaf(op_type, x, y), a, b)

    def floored(self, a: Number, b: Number) -> Number:
        """`a / b`, rounded down."""

        def leaf(x: Leaf, y: Leaf) -> Leaf:
            divisor = _positive(y)
            if isinstance(x, Whole) and x.single is not None and divisor:
                return Whole((x.single.floor_divided(divisor),))
            return self._leaf("Div", x, y)

        return combine(leaf, a, b)

    def _leaf(self, op_type: str, a: Leaf, b: Leaf) -> Leaf:
        if isinstance(a, Whole) and isinstance(b, Whole):
            whole = self._whole(op_type, a, b)
            if whole is not None:
                return whole
        if isinstance(a, Table) or isinstance(b, Table):
            x, y, function = self._table(a), self._table(b), _ON_TABLES.get(op_type)
            if function is None or x is None or y is None or not _fits(x, y):
                return UNKNOWN
            return Table(function(x, y))
        return _between(op_type, bounds(a), bounds(b))

    def _whole(self, op_type: str, a: Whole, b: Whole) -> Whole | None:
        x, y = a.single, b.single
        if op_type == "Sub":
            return self._whole("Add", a, negated(b))
        if op_type == "Add" and (x is not None or y is not None):
            several, single = (b, x) if x is not None else (a, y)
            assert single is not None
            return Whole(tuple(option + single for option in several.options), several.is_largest)
        if op_type in ("Max", "Min"):
            largest = op_type == "Max"
            if all(number.single is not None or number.is_largest == largest for number in (a, b)):
                return Whole(a.options + b.options, largest)
        if op_type == "Mul" and x is not None and y is not None:
            factor, term = (y.constant, x) if y.constant is not None else (x.constant, y)
            return None if factor is None else Whole((term * factor,))
        divisor = _positive(b)
        if op_type in ("Div", "Mod") and x is not None and divisor:
            if op_type == "Mod":
                return Whole((x.remainder(divisor),))
            return Whole((x.floor_divided(divisor),)) if never_negative(x, self._largest) else None
        return None

    def _table(self, leaf: Leaf) -> NDArray[np.int64] | None:
        """A leaf as a table; None unless it depends on indices alone and their counts are known."""
        if isinstance(leaf, Table):
            return leaf.numbers
        if isinstance(leaf, Between) or leaf.single is None:
            return None
        x, variables = leaf.single, (Variable.QUERY, Variable.KEY)
        query, key = (x.factors.get(variable, 0) for variable in variables)
        rest = (x - QUERY * query - KEY * key).constant
        counts = [self._largest[variable].constant for variable in variables]
        if rest is None or any(n is None and factor for n, factor in zip(counts, (query, key), strict=True)):
            return None
        i, j = (
            np.arange(n + 1 if factor and n is not None else 1) for n, factor in zip(counts, (query, key), strict=True)
        )
        return (i[:, None] * query + j * key + rest) if len(i) * len(j) <= LARGEST_TABLE else None

    # --- comparisons

    def at_least(self, a: Number, b: Number, kind: Kind) -> Truth:
        """`a ≥ b`.

        Args:
            kind: the kind of the condition, if it is not proved.
        """
        return self._compared(a, b, lambda x, y: self._leaf_at_least(x, y, kind))

    def equal(self, a: Number, b: Number, kind: Kind) -> Truth:
        return self._compared(a, b, lambda x, y: self._leaf_equal(x, y, kind))

    def _compared(self, a: Number, b: Number, compare: Callable[[Leaf, Leaf], Truth]) -> Truth:
        for number, other, swapped in ((a, b, False), (b, a, True)):
            if isinstance(number, Choice):
                yes, no = (
                    self._compared(*((other, part) if swapped else (part, other)), compare)
                    for part in (number.yes, number.no)
                )
                return where(number.condition, yes, no)
        assert not isinstance(a, Choice) and not isinstance(b, Choice)
        return compare(a, b)

    def _leaf_at_least(self, a: Leaf, b: Leaf, kind: Kind) -> Truth:
        if isinstance(a, Whole) and (isinstance(b, Whole) or b == _finite(b)):
            b = b if isinstance(b, Whole) else Whole((Affine(ceil(bounds(b).least)),))
            return _over(a, True, lambda x: _over(b, False, lambda y: at_least_zero(x - y, self._largest)))
        if isinstance(b, Whole) and a == _finite(a):
            return self._leaf_at_least(Whole((Affine(floor(bounds(a).least)),)), b, kind)
        return self._by_tables(a, b, np.greater_equal) or _by_bounds(bounds(a), bounds(b)) or unknown(kind)

    def _leaf_equal(self, a: Leaf, b: Leaf, kind: Kind) -> Truth:
        if isinstance(a, Whole) and isinstance(b, Whole):
            if a.single is not None and b.single is not None:
                return zero(a.single - b.single, self._largest)
            return self._leaf_at_least(a, b, kind) & self._leaf_at_least(b, a, kind)
        tables = self._by_tables(a, b, np.equal)
        if tables is not None:
            return tables
        x, y = bounds(a), bounds(b)
        if x.least > y.most or x.most < y.least:
            return NEVER
        return ALWAYS if x == y and x.least == x.most and x.is_number else unknown(kind)

    def _by_tables(
        self, a: Leaf, b: Leaf, compare: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]]
    ) -> Truth | None:
        if not isinstance(a, Table) and not isinstance(b, Table):
            return None
        x, y = self._table(a), self._table(b)
        return flags_truth(compare(x, y)) if x is not None and y is not None and _fits(x, y) else None


def negated(number: Whole) -> Whole:
    several = len(number.options) > 1
    return Whole(tuple(-option for option in number.options), number.is_largest != several)


def where(condition: Truth, yes: Truth, no: Truth) -> Truth:
    """`yes` where a condition is True, else `no`."""
    if condition.constant is not None:
        return yes if condition.constant else no
    return yes if yes == no else (condition & yes) | (~condition & no)


def flags_truth(flags: NDArray[np.bool_]) -> Truth:
    """The condition given by flags `(n_q or 1, n_k or 1)`."""
    if flags.size == 1:
        return ALWAYS if flags.item() else NEVER
    if 1 in flags.shape[-2:]:
        return truth_along(flags.reshape(-1), "keys" if flags.shape[-2] == 1 else "queries")
    return truth_of(flags)


def _over(number: Whole, above: bool, compare: Callable[[Affine], Truth]) -> Truth:
    """Compare the largest or least of several numbers, by comparing any or all of them.

    Args:
        above: whether the number is on the larger side of the comparison.
    """
    result, *others = (compare(option) for option in number.options)
    for other in others:
        result = result | other if number.is_largest == above else result & other
    return result


def _by_bounds(a: Between, b: Between) -> Truth | None:
    if not (a.is_number and b.is_number):  # with NaN, a comparison and its opposite are both False
        return None
    if a.least >= b.most and isfinite(b.most):
        return ALWAYS
    return NEVER if a.most < b.least else None


def _finite(leaf: Leaf) -> Leaf | None:
    """The leaf itself if it is one finite number, else None."""
    is_one = isinstance(leaf, Between) and leaf.is_number and leaf.least == leaf.most and isfinite(leaf.least)
    return leaf if is_one else None


def _positive(leaf: Leaf) -> int | None:
    """The positive integer that a leaf is; None for other leaves."""
    number = leaf.single.constant if isinstance(leaf, Whole) and leaf.single is not None else None
    return number if number is not None and number > 0 else None


def _fits(a: NDArray[np.int64], b: NDArray[np.int64]) -> bool:
    rows, columns = (max(x, y) for x, y in zip(a.shape, b.shape, strict=True))
    return bool(rows * columns <= LARGEST_TABLE)


_ON_TABLES: Mapping[str, Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Max": np.maximum,
    "Min": np.minimum,
}


_ON_BOUNDS: Mapping[str, Callable[[float, float], float]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Max": max,
    "Min": min,
}


def _between(op_type: str, a: Between, b: Between) -> Between:
    """The bounds of a result; for Add, Sub, Mul, Max and Min they are computed from the operands' bounds.

    Minus infinity stays minus infinity, whatever is added: a bias of infinity or NaN does not make a hidden key
    visible.
    """
    if op_type == "Add" and -inf in (a.most, b.most):
        return Between(-inf, -inf, is_number=False)
    function = _ON_BOUNDS.get(op_type)
    if op_type == "Ratio" and b.least == b.most and b.least not in (0, inf, -inf):
        ends = [a.least / b.least, a.most / b.least]
    elif function is not None:
        ends = [float(function(x, y)) for x in (a.least, a.most) for y in (b.least, b.most)]
    else:
        return UNKNOWN
    is_defined = op_type in ("Max", "Min") or all(map(isfinite, (a.least, a.most, b.least, b.most)))
    is_number = a.is_number and b.is_number and is_defined
    return UNKNOWN if any(map(isnan, ends)) else Between(min(ends), max(ends), is_number)
