"""Integers as sums, such as `2·query − key + past + 1`: for regions, texts and new nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache

import onnx_ir as ir
import sympy

from attnforge.export.graphs.sizes import Size, parsed


class Variable(Enum):
    """An index variable of a score, counted from 0."""

    BATCH = "batch"
    HEAD = "head"
    QUERY = "query"
    KEY = "key"


@dataclass(frozen=True)
class Dim:
    """A symbolic size of the graph, ≥ 0: a name, or an expression that is not a sum."""

    name: str


@dataclass(frozen=True)
class Scalar:
    """An integer that is known only at run time: an element of a tensor.

    Attributes:
        value: the tensor.
        index: the index of the element.
    """

    value: ir.Value
    index: tuple[int, ...] = ()


@dataclass(frozen=True)
class Quotient:
    """`numerator // divisor`, rounded down; the divisor is positive."""

    numerator: Affine
    divisor: int


Atom = Variable | Dim | Scalar | Quotient


@dataclass(frozen=True)
class Affine:
    """`number` plus the sum of all atoms times their factors; no factor is 0."""

    number: int = 0
    terms: frozenset[tuple[Atom, int]] = field(default=frozenset())

    @classmethod
    def of(cls, number: int, factors: Mapping[Atom, int]) -> Affine:
        return cls(number, frozenset((atom, factor) for atom, factor in factors.items() if factor))

    @classmethod
    def atom(cls, atom: Atom) -> Affine:
        return cls(0, frozenset({(atom, 1)}))

    @classmethod
    def dim(cls, dim: int | ir.SymbolicDim) -> Affine:
        """The size of a dim; an unknown dim is an atom of its own."""
        size = Size.of(dim).dim()
        return cls(size) if isinstance(size, int) else _sum(str(size.value))

    @property
    def constant(self) -> int | None:
        """The number that it is; None if it has any terms."""
        return None if self.terms else self.number

    @property
    def variables(self) -> frozenset[Variable]:
        """The variables that it depends on, including those in quotients."""
        inner = (atom.numerator.variables for atom, _ in self.terms if isinstance(atom, Quotient))
        return frozenset(atom for atom, _ in self.terms if isinstance(atom, Variable)).union(*inner)

    def __add__(self, other: Affine | int) -> Affine:
        if isinstance(other, int):
            return Affine(self.number + other, self.terms)
        factors = dict(self.terms)
        for atom, factor in other.terms:
            factors[atom] = factors.get(atom, 0) + factor
        return Affine.of(self.number + other.number, factors)

    def __neg__(self) -> Affine:
        return self * -1

    def __sub__(self, other: Affine | int) -> Affine:
        return self + -other

    def __mul__(self, factor: int) -> Affine:
        return Affine.of(self.number * factor, {atom: n * factor for atom, n in self.terms})

    def floor_divided(self, divisor: int) -> Affine:
        """`self // divisor`, for a positive divisor."""
        whole = Affine.of(self.number // divisor, {atom: n // divisor for atom, n in self.terms if n % divisor == 0})
        rest = {atom: n for atom, n in self.terms if n % divisor}
        return whole + Affine.atom(Quotient(Affine.of(self.number % divisor, rest), divisor)) if rest else whole

    def evaluate(self, number_of: Callable[[Atom], int]) -> int:
        """Evaluate it, given the number of every atom that is not a quotient."""
        return self.number + sum(
            factor
            * (atom.numerator.evaluate(number_of) // atom.divisor if isinstance(atom, Quotient) else number_of(atom))
            for atom, factor in self.terms
        )

    def text(self) -> str:
        """Format it as in `past + 1`."""
        if not self.terms:
            return f"{self.number}".replace("-", "−")
        terms = ((_text(atom), factor) for atom, factor in self.terms)
        ordered = sorted(terms, key=lambda term: (term[1] < 0, term[0]))
        parts = [(factor < 0, (f"{abs(factor)}·" if abs(factor) != 1 else "") + name) for name, factor in ordered]
        parts += [(self.number < 0, str(abs(self.number)))] if self.number else []
        first, *others = parts
        return ("−" if first[0] else "") + first[1] + "".join(f" {'−' if neg else '+'} {name}" for neg, name in others)


ZERO = Affine()


def _text(atom: Atom) -> str:
    if isinstance(atom, Quotient):
        return f"({atom.numerator.text()}) // {atom.divisor}"
    if isinstance(atom, Scalar):
        return atom.value.name or "a run-time number"
    return atom.name if isinstance(atom, Dim) else atom.value


@cache
def _sum(text: str) -> Affine:
    """A size as a sum of names; what is none counts as one name."""
    try:
        expression, names = parsed(text)
    except ValueError:
        return Affine.atom(Dim(text))
    factors = sympy.expand(expression).as_coefficients_dict()
    if any(not factor.is_Integer or not (term.is_Symbol or term == 1) for term, factor in factors.items()):
        return Affine.atom(Dim(text))
    number = int(factors.pop(sympy.Integer(1), 0))
    return Affine.of(number, {Dim(names[int(str(term)[1:])]): int(factor) for term, factor in factors.items()})
