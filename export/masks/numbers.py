"""Numbers as functions of the query and key index: integers, known exactly, and numbers between two bounds."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from itertools import product
from math import floor, inf, isfinite, isnan

import islpy as isl
import ml_dtypes
import numpy as np
import onnx_ir as ir

from attnforge.export.attention.masking import NEGLIGIBLE
from attnforge.export.masks.affine import Variable
from attnforge.export.masks.scores import Scores, Whole, integer

MOST_PARTS = 16
"""Maximum number of parts of a number that are bounded only; of more, those of one kind are merged."""

DISTANT = 2**10
"""The magnitude from which on a factor of a bias, such as a distance, may make it hide keys."""

LARGEST = float(np.finfo(np.float64).max)
INTEGERS = frozenset({ir.DataType.INT32, ir.DataType.INT64})
EXACT = INTEGERS | {ir.DataType.DOUBLE}
"""Types that represent every position, and what is computed from it, exactly."""


@dataclass(frozen=True)
class Between:
    """A number between two bounds, inclusive; it may be NaN unless `is_number`."""

    least: float = -inf
    most: float = inf
    is_number: bool = True

    @property
    def number(self) -> float | None:
        """The only number that it may be; None if there are others."""
        return self.least if self.is_number and self.least == self.most else None


UNKNOWN = Between(is_number=False)
Part = tuple[isl.Set, Between]


@dataclass(frozen=True)
class Number:
    """A number at every query and key.

    Attributes:
        whole: where it is an integer, and which.
        rest: where it is between bounds. All domains are apart, and together they are everywhere.
    """

    whole: Whole
    rest: tuple[Part, ...] = ()


class Arithmetic:
    """Arithmetic and comparisons of numbers over the scores of a site."""

    def __init__(self, scores: Scores) -> None:
        self.scores = scores
        self._nowhere = scores.constant(0).intersect_domain(scores.never)

    def of(self, parts: Sequence[Part], whole: Whole | None = None) -> Number:
        """The number that is between these bounds, and else an integer; with wider bounds if it has too many parts."""
        rest: dict[Between, isl.Set] = {}
        whole = self._nowhere if whole is None else whole
        for domain, bounds in parts:
            if self.scores.is_never(domain):
                continue
            number = bounds.number
            if number is not None and isfinite(number) and number == floor(number) and abs(number) < 2**53:
                whole = whole.union_add(self.scores.constant(int(number)).intersect_domain(domain))
            else:
                rest[bounds] = rest[bounds].union(domain) if bounds in rest else domain
        if len(rest) > MOST_PARTS:
            rest = self._in_fewer_parts(rest)
        return Number(self.scores.short(whole), tuple((domain.coalesce(), bounds) for bounds, domain in rest.items()))

    @staticmethod
    def _in_fewer_parts(parts: Mapping[Between, isl.Set]) -> dict[Between, isl.Set]:
        """At most one part for numbers that hide a key, one for those that do not, and one for the rest."""
        groups: dict[tuple[bool, ...], list[Between]] = {}
        for x in parts:
            groups.setdefault((x.least > NEGLIGIBLE, x.most > NEGLIGIBLE, x.is_number), []).append(x)
        return {
            Between(min(x.least for x in group), max(x.most for x in group), is_number): reduce(
                isl.Set.union, (parts[x] for x in group)
            )
            for (*_, is_number), group in groups.items()
        }

    def between(self, bounds: Between) -> Number:
        return self.of([(self.scores.always, bounds)])

    def constant(self, number: float) -> Number:
        return self.between(UNKNOWN if isnan(number) else Between(number, number))

    def choose(self, condition: isl.Set, yes: Number, no: Number) -> Number:
        """`yes` where a condition is True, else `no`."""
        opposite = self.scores.opposite(condition)
        parts = [(domain.intersect(within), bounds) for within, number in ((condition, yes), (opposite, no))
                 for domain, bounds in number.rest]  # fmt: skip
        return self.of(parts, yes.whole.intersect_domain(condition).union_add(no.whole.intersect_domain(opposite)))

    def parts(self, number: Number) -> list[Part]:
        """The bounds of a number, everywhere."""
        return [*self._bounded(number.whole), *number.rest]

    def _bounded(self, whole: Whole, zero_apart: bool = False) -> list[Part]:
        """The bounds of an integer; with `zero_apart`, 0 is a part of its own if the integer may be far from it: the
        distance of a query from its own key, whose product with any slope is 0."""
        parts = []
        for domain, x in whole.get_pieces():
            if x.is_cst():
                least = most = float(integer(x.get_constant_val()))
            else:  # an integer is finite
                number = isl.PwAff.from_aff(x).intersect_domain(domain)
                ends = self.scores.bounds(number)
                least, most = max(ends[0], -LARGEST), min(ends[1], LARGEST)
                if zero_apart and least <= 0 <= most and most - least >= DISTANT:
                    zero = number.eq_set(self.scores.constant(0))
                    parts.append((zero, Between(0, 0)))
                    domain = domain.subtract(zero)
            if least <= most:
                parts.append((domain, Between(least, most)))
        return parts

    def compute(self, op_type: str, a: Number, b: Number) -> Number:
        """Compute Add, Sub, Mul, Div (of integers, towards zero), Floored (rounded down), Ratio
        (of any numbers), Mod, Max or Min."""
        whole = _exactly(op_type, a.whole, b.whole)
        if whole is not None and not a.rest and not b.rest:
            return Number(self.scores.short(whole))
        left, right = (self._bounded(x.whole, zero_apart=op_type == "Mul") for x in (a, b))
        every = [*right, *b.rest]
        pairs = [*product(a.rest, every), *product(left, b.rest if whole is not None else every)]
        return self.of([(domain.intersect(other), _between(op_type, x, y)) for (domain, x), (other, y) in pairs], whole)

    # --- comparisons

    def compare(self, op_type: str, a: Number, b: Number, variables: frozenset[Variable]) -> isl.Set:
        """Compute Equal or GreaterOrEqual; what is not known depends on `variables`."""
        exactly = isl.PwAff.eq_set if op_type == "Equal" else isl.PwAff.ge_set
        by_bounds = _equal if op_type == "Equal" else _at_least
        result = exactly(a.whole, b.whole)
        pairs = [(left, right) for left in a.rest for right in b.rest]
        for whole, rest, is_left in ((a.whole, b.rest, True), (b.whole, a.rest, False)):
            for domain, bounds in rest:
                if bounds.number is not None and isfinite(bounds.number):
                    number = self.scores.constant(Fraction(bounds.number)).intersect_domain(domain)
                    result = result.union(exactly(whole, number) if is_left else exactly(number, whole))
                else:
                    mine = domain, bounds
                    pairs += [(part, mine) if is_left else (mine, part) for part in self._bounded(whole)]
        for (domain, x), (other, y) in pairs:
            answer, both = by_bounds(x, y), domain.intersect(other)
            if answer is not False and not self.scores.is_never(both):
                known = self.scores.always if answer else self.scores.unknown_condition(variables)
                result = result.union(both.intersect(known))
        return result

    def is_true(self, number: Number, variables: frozenset[Variable]) -> isl.Set:
        """Where a number is not 0."""
        return self.scores.opposite(self.compare("Equal", number, self.constant(0), variables))

    def stored(self, number: Number, dtype: ir.DataType | None, was_integer: bool = False) -> Number:
        """A number as a type stores it, bounded if the type may not represent it exactly, as with large positions.

        Args:
            number: the number.
            dtype: the type.
            was_integer: whether the number was stored as an integer before.
        """
        if dtype in INTEGERS:
            return self._wrapped(number, dtype)
        if dtype in EXACT:
            return number
        if dtype is None or not (dtype.is_floating_point() or dtype.is_integer()):
            return self.between(UNKNOWN)
        least, most, is_float = 0.0, 127.0, dtype.is_floating_point()
        if is_float:
            most = 2.0 ** (ml_dtypes.finfo(dtype.numpy()).nmant + 1)  # type: ignore[no-untyped-call]
            least = -most

        def rounded(parts: Iterable[Part]) -> list[Part]:
            known = ((domain, _in_range(x, ir.DataType.INT64) if was_integer else x) for domain, x in parts)
            return [(domain, _rounded(x, dtype) if is_float else UNKNOWN) for domain, x in known]

        ends = self.scores.bounds(number.whole, few_tokens=True)
        if (least <= ends[0] and ends[1] <= most) or ends[0] > ends[1]:
            return self.of(rounded(number.rest), number.whole)
        return self.of(rounded([*self._bounded(number.whole, zero_apart=True), *number.rest]))

    def _wrapped(self, number: Number, dtype: ir.DataType) -> Number:
        """A number as a type of integers stores it; one that is constant or bounded wraps around."""
        parts, whole = [(domain, _in_range(bounds, dtype)) for domain, bounds in number.rest], self._nowhere
        for domain, x in number.whole.get_pieces():
            constant = float(integer(x.get_constant_val())) if x.is_cst() else 0.0
            bounds = Between(constant, constant)
            if (stored := _in_range(bounds, dtype)) == bounds:
                whole = whole.union_add(isl.PwAff.from_aff(x).intersect_domain(domain))
            else:
                parts.append((domain, stored))
        return number if not parts else self.of(parts, whole)

    def truncated(self, number: Number) -> Number:
        """A number cast to integers."""
        return self.of([(domain, UNKNOWN) for domain, _ in number.rest], number.whole)


def _in_range(ends: Between, dtype: ir.DataType) -> Between:
    """Bounds as a type of integers stores them: those of the type if a number is beyond them, and wraps around."""
    limits = np.iinfo(dtype.numpy())
    least, most = float(limits.min), float(limits.max)
    return replace(ends, is_number=True) if least <= ends.least and ends.most <= most else Between(least, most)


def _rounded(ends: Between, dtype: ir.DataType) -> Between:
    """Bounds rounded to a floating-point type: rounding keeps the order of numbers."""
    with np.errstate(over="ignore"):
        least, most = np.array([ends.least, ends.most]).astype(dtype.numpy()).astype(np.float64)
    return Between(float(least), float(most), ends.is_number)


_ON_WHOLE: Mapping[str, Callable[[Whole, Whole], Whole]] = {
    "Add": isl.PwAff.add,
    "Sub": isl.PwAff.sub,
    "Mul": isl.PwAff.mul,
    "Max": isl.PwAff.max,
    "Min": isl.PwAff.min,
    "Div": isl.PwAff.tdiv_q,
}


def _exactly(op_type: str, a: Whole, b: Whole) -> Whole | None:
    """The result for integers; None if it is not known to be an integer that isl can represent."""
    if op_type == "Ratio" or (op_type == "Mul" and not (a.is_cst() or b.is_cst())):
        return None
    if op_type in ("Div", "Floored", "Mod"):
        divisors = {integer(piece.get_constant_val()) if piece.is_cst() else 0 for _, piece in b.get_pieces()}
        if len(divisors) != 1 or min(divisors) <= 0:
            return None
        if op_type != "Div":
            divisor, a = b.get_pieces()[0][1].get_constant_val(), a.intersect_domain(b.domain())
            return a.mod_val(divisor) if op_type == "Mod" else a.scale_down_val(divisor).floor()
    return _ON_WHOLE[op_type](a, b)


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


def _at_least(a: Between, b: Between) -> bool | None:
    if not (a.is_number and b.is_number):  # with NaN, a comparison and its opposite are both False
        return None
    if a.least >= b.most and isfinite(b.most):
        return True
    return False if a.most < b.least else None


def _equal(a: Between, b: Between) -> bool | None:
    if a.least > b.most or a.most < b.least:
        return False
    return True if a.number is not None and a.number == b.number else None
