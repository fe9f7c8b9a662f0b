"""The scores of a site as an integer set, and what is computed over it: https://libisl.sourceforge.io/manual.pdf.

A condition is an `isl.Set` of pairs of a query and a key, an integer an `isl.PwAff` over them: exact, for all sizes.
Sizes, batch, head and what is known only at run time are parameters of both. Those that nothing is known about, such
as an element of a padding mask, are *opaque*: a pair may be visible if it is for any value of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from functools import cached_property, reduce
from typing import Literal

import islpy as isl

from attnforge.export.masks.affine import Affine, Atom, Dim, Quotient, Variable

Whole = isl.PwAff
"""An integer at every query and key."""

MOST_OPERATIONS = 100_000
"""Maximum number of steps of isl's solvers for a part of a mask: about half a second."""

MOST_PARTS = 12
"""Maximum number of convex parts of a condition, and of pieces of an integer."""

MOST_TOKENS = 2**22
"""Sizes up to which a type must represent every position exactly to count as exact."""

LARGEST_SIZE = 2**63 - 1
"""The largest size that ONNX can represent."""

INDICES, PARAMETERS, DIVISIONS = isl.dim_type.set, isl.dim_type.param, isl.dim_type.div
PAIR = (Variable.QUERY, Variable.KEY)


Kind = Literal["padding", "queries", "condition", "bias", "pattern"]
"""What a mask depends on apart from its regions: data by key (`padding`), by query (`queries`), or by both or neither
(`condition`); numbers that are added to the scores (`bias`); or indices, in a way that regions do not describe
(`pattern`)."""


class Scores:
    """The queries and keys of a site.

    Args:
        n_q, n_k: numbers of queries and of keys.

    All methods raise isl.Error once :data:`MOST_OPERATIONS` are spent.
    """

    def __init__(self, n_q: Affine, n_k: Affine) -> None:
        self.context = isl.Context()
        self._space = isl.Space.set_alloc(self.context, 0, 2)
        self.always, self.never = isl.Set.universe(self._space), isl.Set.empty(self._space)
        self._atoms: dict[str, Atom] = {}
        self._parameters: dict[Atom, isl.Id] = {}
        self.opaque: dict[str, tuple[frozenset[Variable], Kind]] = {}
        self.universe = self.always
        self.query, self.key = (isl.PwAff.var_on_domain(self._space, INDICES, i) for i in range(2))
        for index, count in ((self.query, n_q), (self.key, n_k)):
            self.assume(index.ge_set(self.constant(0)).intersect(index.lt_set(self.whole(count))))
        self.batch, self.head = (self.unknown_position({x}, "pattern") for x in (Variable.BATCH, Variable.HEAD))
        self._atoms |= dict(zip(self.opaque, (Variable.BATCH, Variable.HEAD), strict=True))
        self.context.set_max_operations(MOST_OPERATIONS)

    def assume(self, condition: isl.Set) -> None:
        """Take a condition on indices and sizes to be True."""
        self.universe = self.universe.intersect(condition)
        self.__dict__.pop("_few_tokens", None)

    # --- integers

    def constant(self, number: int | Fraction) -> Whole:
        return isl.PwAff.val_on_domain(self.always, self.value(number))

    def value(self, number: int | Fraction) -> isl.Val:
        return isl.Val(str(number), context=self.context)

    def whole(self, x: Affine) -> Whole:
        """An expression of indices, sizes and run-time scalars."""
        terms = (self._atom(atom).scale_val(self.value(factor)) for atom, factor in x.terms)
        return reduce(isl.PwAff.add, terms, self.constant(x.number))

    def _atom(self, atom: Atom) -> Whole:
        if isinstance(atom, Quotient):
            return self.divided(self.whole(atom.numerator), atom.divisor)
        if isinstance(atom, Variable):
            return {Variable.QUERY: self.query, Variable.KEY: self.key, Variable.BATCH: self.batch}.get(atom, self.head)
        if atom not in self._parameters:
            self._parameters[atom] = self._named(f"{'size' if isinstance(atom, Dim) else 'scalar'} {len(self._atoms)}")
            self._atoms[self._parameters[atom].get_name()] = atom
            if isinstance(atom, Dim):
                size = self._parameter(self._parameters[atom])
                self.assume(size.ge_set(self.constant(0)).intersect(size.le_set(self.constant(LARGEST_SIZE))))
        return self._parameter(self._parameters[atom])

    def _named(self, name: str) -> isl.Id:
        return isl.Id(name, context=self.context)

    def _parameter(self, name: isl.Id) -> Whole:
        return isl.PwAff.param_on_domain_id(self.always, name)

    def unknown(self, variables: Iterable[Variable], kind: Kind | None = None) -> Whole:
        """An integer of which nothing is known at each of these indices."""
        name, by = f"opaque {len(self.opaque)}", frozenset(variables)
        self.opaque[name] = by, kind or _kind_of(by)
        return self._parameter(self._named(name))

    def unknown_position(self, variables: Iterable[Variable] = Variable, kind: Kind | None = None) -> Whole:
        """An index of which nothing is known, by default at each pair of each head."""
        position = self.unknown(variables, kind)
        self.assume(position.ge_set(self.constant(0)))
        return position

    def divided(self, x: Whole, divisor: int) -> Whole:
        """`x // divisor`, rounded down, for a positive divisor."""
        return x.scale_down_val(self.value(divisor)).floor()

    def bounds(self, x: Whole, few_tokens: bool = False) -> tuple[float, float]:
        """The least and the largest value, or infinity; with `few_tokens`, at sizes up to :data:`MOST_TOKENS`."""
        x = x.intersect_domain(self._few_tokens if few_tokens else self.universe)
        least, most = x.min_val(), x.max_val()
        return -_number(least.neg()), _number(most)

    @cached_property
    def _few_tokens(self) -> isl.Set:
        most = self.constant(MOST_TOKENS)
        sizes = [name for atom, name in self._parameters.items() if isinstance(atom, Dim)]
        return reduce(isl.Set.intersect, (self._parameter(name).le_set(most) for name in sizes), self.universe)

    # --- conditions

    def unknown_condition(self, variables: Iterable[Variable], kind: Kind | None = None) -> isl.Set:
        return self.unknown(variables, kind).gt_set(self.constant(0))

    def opposite(self, condition: isl.Set) -> isl.Set:
        return self.simplified(condition.complement())

    def is_never(self, condition: isl.Set) -> bool:
        return condition.intersect(self.universe).is_empty()

    def is_always(self, condition: isl.Set) -> bool:
        return self.universe.is_subset(condition)

    def simplified(self, condition: isl.Set) -> isl.Set:
        """The same pairs in fewer parts; a condition of too many parts is bounded."""
        if condition.n_basic_set() < 2:
            return condition
        condition = condition.gist(self.universe).coalesce().drop_unused_params()
        if condition.n_basic_set() <= MOST_PARTS:
            return condition
        hull = isl.Set.from_basic_set(condition.unshifted_simple_hull())
        return hull.intersect(self.unknown_condition((), "pattern"))

    def short(self, x: Whole) -> Whole:
        """The same integer in fewer pieces; of too many pieces, it is unknown."""
        if x.n_piece() < 2:
            return x
        # in a gist, a quotient may have no floor
        x = x.intersect_domain(self.universe).gist(self.universe).coalesce().floor().drop_unused_params()
        return x if x.n_piece() <= MOST_PARTS else self.unknown((), "pattern").intersect_domain(x.domain())

    def may(self, condition: isl.Set) -> isl.Set:
        """The pairs at which a condition is True for any batch and head and any value of what is opaque."""
        return self._visible(condition.intersect(self.universe)).coalesce()

    def _visible(self, condition: isl.Set) -> isl.Set:
        return reduce(self._without, self.opaque, condition)

    def _without(self, condition: isl.Set, name: str) -> isl.Set:
        """Where a condition is True for some value of an opaque parameter."""
        return condition.project_out_param_id(self._named(name))

    def depends_on(self, condition: isl.Set, name: str) -> bool:
        """Whether a condition depends on an opaque parameter."""
        condition = condition.intersect(self.universe)
        return not self._without(condition, name).intersect(self.universe).is_subset(condition)

    @property
    def pairs(self) -> isl.Set:
        """All pairs of a query and a key."""
        return self._visible(self.universe)

    # --- what an expression depends on

    def variables(self, x: isl.Set | Whole) -> frozenset[Variable]:
        """The indices that an expression depends on."""
        indices = INDICES if isinstance(x, isl.Set) else isl.dim_type.in_
        found = {variable for i, variable in enumerate(PAIR) if x.involves_dims(indices, i, 1)}
        for i in range(x.dim(PARAMETERS)):
            if x.involves_dims(PARAMETERS, i, 1):
                found |= self.opaque.get(str(x.get_dim_name(PARAMETERS, i)), (frozenset[Variable](),))[0]
        return frozenset(found)

    def closed(self, x: Whole | None) -> Affine | None:
        """An integer as a sum; None if it is several, or depends on what is opaque."""
        if x is None:
            return None
        pieces = self.short(x).get_pieces()
        total = self.sum_of(pieces[0][1]) if len(pieces) == 1 else None
        if total is None:
            return None
        for atom, factor in total.terms:
            if isinstance(atom, Quotient):
                least, most = self.bounds(self._atom(atom))
                if least == most:  # such as the head divided by the number of heads
                    total = total + (Affine(int(least)) - Affine.atom(atom)) * factor
        return total

    def sum_of(self, x: isl.Aff) -> Affine | None:
        """An expression of isl as a sum; None if it depends on what is opaque, or is a fraction."""
        if integer(x.get_denominator_val()) != 1:
            return None
        factors: dict[Atom, int] = {}
        for i in range(x.dim(PARAMETERS)):
            if factor := integer(x.get_coefficient_val(PARAMETERS, i)):
                name = str(x.get_dim_name(PARAMETERS, i))
                if name not in self._atoms:
                    return None
                factors[self._atoms[name]] = factor
        for i, variable in enumerate(PAIR):
            factors[variable] = integer(x.get_coefficient_val(isl.dim_type.in_, i))
        result = Affine.of(integer(x.get_constant_val()), factors)
        for i in range(x.dim(DIVISIONS)):
            if factor := integer(x.get_coefficient_val(DIVISIONS, i)):
                division = x.get_div(i)
                numerator = self.sum_of(division.scale_val(division.get_denominator_val()))
                if numerator is None:
                    return None
                result = result + numerator.floor_divided(integer(division.get_denominator_val())) * factor
        return result


def _kind_of(variables: frozenset[Variable]) -> Kind:
    """The kind of data that is read at these indices."""
    if Variable.KEY in variables and Variable.QUERY not in variables:
        return "padding"
    return "queries" if Variable.QUERY in variables and Variable.KEY not in variables else "condition"


def _number(x: isl.Val) -> float:
    """The finite number, infinity, or minus infinity of nothing."""
    return float("inf") if x.is_infty() else float("-inf") if x.is_neginfty() or x.is_nan() else float(integer(x))


def integer(x: isl.Val) -> int:
    """A number of isl that is an integer.

    Raises:
        isl.Error: the operations are spent.
    """
    return int(fraction(x))


def fraction(x: isl.Val) -> Fraction:
    """A number of isl.

    Raises:
        isl.Error: the operations are spent.
    """
    if not (text := x.to_str()):  # islpy reports no error here
        raise isl.Error("the operations are spent")
    return Fraction(text)
