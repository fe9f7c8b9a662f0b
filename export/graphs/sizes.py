"""Sizes of dims: products of a number and of symbols, and how expressions of symbolic dims are read."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod

import onnx_ir as ir
import sympy

_NAME = re.compile(r"[A-Za-z_][\w.]*")
_FUNCTIONS = frozenset({"floor", "max", "min", "Max", "Min", "Mod"})
"""Functions in the expressions of symbolic dims."""

_UNKNOWN: dict[int, ir.SymbolicDim] = {}
"""Unknown dims that have been given a symbol. They are kept alive, because a later dim could reuse the id of a dim that
was freed."""


class LayoutError(Exception):
    """No sequence of views connects two layouts, a size cannot be read from any value, or a shape is not known."""


@dataclass(frozen=True)
class Size:
    """The size of a dim, as a product.

    Attributes:
        factor: the static part.
        symbols: the dynamic part, sorted: names, and other expressions without factors (`n + 1`).
    """

    factor: int = 1
    symbols: tuple[str, ...] = ()

    @classmethod
    def of(cls, dim: int | ir.SymbolicDim) -> Size:
        """The size of a dim; an unknown dim is a symbol of its own."""
        if isinstance(dim, int):
            return cls(dim)
        if dim.value:
            return _factored(dim.value)
        _UNKNOWN[id(dim)] = dim
        return cls(1, (f"unknown{id(dim)}",))

    @property
    def is_static(self) -> bool:
        return not self.symbols

    @property
    def names(self) -> frozenset[str]:
        """The names in its symbols."""
        return frozenset(name for symbol in self.symbols for name in _NAME.findall(symbol)) - _FUNCTIONS

    def __mul__(self, other: Size) -> Size:
        return Size(self.factor * other.factor, tuple(sorted(self.symbols + other.symbols)))

    def divide(self, other: Size) -> Size | None:
        """`self / other` where `other` divides `self` whatever the symbols are, else None."""
        rest = list(self.symbols)
        for symbol in other.symbols:
            if symbol not in rest:
                return None
            rest.remove(symbol)
        if other.factor == 0 or self.factor % other.factor:
            return None
        return Size(self.factor // other.factor, tuple(rest))

    def plus(self, count: int) -> Size:
        """The size of a dim with `count` more elements."""
        return Size(self.factor + count) if self.is_static else Size.of(ir.SymbolicDim(f"{self.dim()} + {count}"))

    def dim(self) -> int | ir.SymbolicDim:
        """The size as a dim of an onnx_ir shape."""
        if self.is_static:
            return self.factor
        symbols = [symbol if _NAME.fullmatch(symbol) else f"({symbol})" for symbol in self.symbols]
        return ir.SymbolicDim("*".join(([str(self.factor)] if self.factor != 1 else []) + symbols))

    @property
    def text(self) -> str:
        """The size for messages, with `?` for unknown dims."""
        return re.sub(r"unknown\d+", "?", str(self.dim()))


ONE = Size()


def parsed(text: str) -> tuple[sympy.Expr, list[str]]:
    """Parse an expression such as `4*batch*((tokens**2)//tokens)`; return it with symbols `s0`, `s1`, … for its names,
    and the names.

    Raises:
        ValueError: it is not arithmetic. onnx_ir's parser refuses such text; sympy's would execute it.
    """
    names = sorted(set(_NAME.findall(text)) - _FUNCTIONS)
    symbols = {f"s{i}": _symbol(i) for i in range(len(names))}
    by_name = dict(zip(names, symbols, strict=True))
    simple = ir.SymbolicDim(_NAME.sub(lambda m: by_name.get(m[0], m[0]), text)).simplify().value
    return sympy.sympify(simple, locals=symbols), names


def _symbol(i: int) -> sympy.Symbol:
    return sympy.Symbol(f"s{i}", integer=True, positive=True)


@cache
def _factored(text: str) -> Size:
    """The size given by an expression whose symbols are all positive."""
    try:
        expression, names = parsed(text)
        factor, powers = sympy.factor_list(expression)
    except (ValueError, sympy.PolynomialError):
        return Size(1, (text,))  # an expression that cannot be parsed equals itself only
    if not factor.is_Integer:
        return Size(1, (text,))

    def named(base: sympy.Expr) -> str:
        return re.sub(r"\bs(\d+)\b", lambda m: names[int(m[1])], str(base))

    return Size(int(factor), tuple(sorted(named(base) for base, power in powers for _ in range(power))))


@cache
def is_size_of(size: Size, other: Size) -> bool:
    """Whether a dim of `size` that broadcasts against a dim of `other` has `other`'s size: it is never 1 where that is
    larger.

    False for a name that `other` does not have, which may be 1 at run time. An expression of the names in `other`, such
    as `128 - Max(0, 128 - n)` against `n`, is evaluated at some thousand sizes.
    """
    if size == other:
        return True
    if size.is_static or size.names != other.names:
        return False
    try:
        (expression, names), (full, _) = parsed(str(size.dim())), parsed(str(other.dim()))
        numbers = sympy.lambdify([_symbol(i) for i in range(len(names))], [expression, full], "math")
        most = int(4096 ** (1 / len(names)))
        tried = [numbers(*sizes) for sizes in itertools.product(range(1, most + 1), repeat=len(names))]
    except (ValueError, ArithmeticError):
        return False
    return all(have != 1 or want == 1 for have, want in tried)


def sizes_of(value: ir.Value) -> list[Size]:
    """The sizes of `value`'s dims.

    Raises:
        LayoutError: its shape is not known.
    """
    if value.shape is None:
        raise LayoutError(f"the shape of {value.name!r} is not known")
    return [Size.of(dim) for dim in value.shape]


class Unmeasurable(Exception):
    """A size, or the work that depends on it, is not known before the model runs; the message says why."""


def evaluated(size: Size, sizes: Mapping[str, int]) -> int:
    """The number that `size` is, given the size of each symbol.

    Raises:
        Unmeasurable: `sizes` lacks a symbol.
    """
    try:
        factors = [ir.SymbolicDim(symbol).evaluate(sizes) for symbol in size.symbols]
    except ValueError:
        factors = [ir.SymbolicDim(None)]  # an expression of another grammar
    known = [factor for factor in factors if isinstance(factor, int)]
    if len(known) < len(factors):
        raise Unmeasurable(f"the dim {size.dim()} is not known before the model runs")
    return size.factor * prod(known)


def shape_at(value: ir.Value | None, sizes: Mapping[str, int]) -> list[int]:
    """The shape of a value, given the size of each symbol.

    Args:
        value: an operand that is present.
        sizes: the size of each symbolic dim.

    Raises:
        Unmeasurable: it is not known.
    """
    assert value is not None
    try:
        return [evaluated(size, sizes) for size in sizes_of(value)]
    except LayoutError as error:
        raise Unmeasurable(str(error)) from error
    except Unmeasurable as error:
        raise Unmeasurable(f"the shape {value.shape} of {value.name!r} is not known") from error


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes: the size of a dim that flattens several."""
    return prod(sizes, start=ONE)
