"""Biases by distance (ALiBi, https://arxiv.org/abs/2108.12409): to the scores of visible keys, a mask adds the slope of
the head times the key's position, and nothing else that differs by key.

A softmax over keys does not change if one number is added to all scores of a query. So `slope · key` as in BLOOM,
`slope · (key − last key)` as in MPT, and `−slope · |query − key|` are the same bias, `slope · (key − query)`, which a
step computes from the positions of its tokens and of its cache.

The bias is read from the mask's graph, backwards by the functions of :mod:`~attnforge.export.masks.reader`: every
number in it is a linear expression over the scores, or several of which each holds for some pairs. What is not
recognised has no slopes.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import reduce
from math import inf, isnan

import islpy as isl
import ml_dtypes
import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.errors import UsageError
from attnforge.export.attention.masking import NEGLIGIBLE
from attnforge.export.graphs.build import dims_of
from attnforge.export.graphs.nodes import input_of
from attnforge.export.lowering.attention import ByHead
from attnforge.export.masks.affine import Affine, Dim, Variable
from attnforge.export.masks.indices import MOVES, Index
from attnforge.export.masks.numbers import Number
from attnforge.export.masks.reader import BOOL, Interpreter, Reader
from attnforge.export.masks.regions import fit
from attnforge.export.masks.scores import MOST_OPERATIONS, PAIR
from attnforge.export.masks.visibility import Visibility, scores_index


class NotByDistance(Exception):
    """A mask is not proved to be a bias by distance; the message gives a reason that a user can act on."""


class TooFewPositions(UsageError):
    """A table of biases that ends before the cache does."""


Line = isl.PwAff
"""A number over the scores of a head, which is linear for all pairs or for each of several cases. It is minus infinity
outside of its domain."""


def slopes_of(node: ir.Node, symbol: str, capacity: int) -> tuple[Visibility, ByHead]:
    """The visible pairs and the ALiBi slopes of a canonical Attention node's mask.

    Args:
        node: a canonical node (:mod:`~attnforge.export.attention.canonical`) with an additive mask.
        symbol: the symbol of the number of tokens, which are queries and keys.
        capacity: the largest number of tokens.

    Returns:
        The visible pairs, without residue, and the slopes: the mask adds `slope · (key − query)` to the scores of
        visible pairs, and a number that is the same for all keys of a query.

    Raises:
        NotByDistance: that is not proved.
        TooFewPositions: it is proved only for fewer positions.
    """
    try:
        return _slopes_of(node, symbol, capacity)
    except isl.Error:
        raise NotByDistance("its graph is too large") from None


def _slopes_of(node: ir.Node, symbol: str, capacity: int) -> tuple[Visibility, ByHead]:
    query, key, mask = (input_of(node, i) for i in (0, 1, 3))
    heads = dims_of(query)[1]
    if not isinstance(heads, int):
        raise NotByDistance("the number of heads is dynamic")
    n_q, n_k = (Affine.dim(dims_of(value)[2]) for value in (query, key))
    reader = _Lines(n_q, n_k, symbol, capacity, heads)
    scores = reader.scores
    lines = reader.read(mask, scores_index(scores, mask, query, key))
    shown = [reader.where(line, is_hidden=False) for line in lines]
    seen = reduce(isl.Set.union, (line.domain() for line in shown))
    if node.attributes.get_int("is_causal", 0):
        seen = seen.intersect(scores.query.ge_set(scores.key))
    regions, is_exact = fit(scores, scores.may(seen))
    if not is_exact or not scores.may(scores.opposite(seen)).intersect(scores.may(seen)).is_empty():
        raise NotByDistance("which keys it hides depends on more than positions")
    seen = seen.intersect(scores.universe)
    slopes = [reader.slope(line, seen) for line in shown]
    own = seen.intersect(scores.query.eq_set(scores.key))
    least = min(reader.bounds(line.intersect_domain(own))[0] for line in shown)
    if any(reader.bounds(reader.where(line, is_hidden=True))[1] > least + NEGLIGIBLE for line in lines):
        raise NotByDistance("what it adds to hidden keys is not low enough compared to its bias")
    return Visibility(regions, frozenset(), "never", n_q, n_k), tuple(slopes * (heads // len(slopes)))


# --- reading ----------------------------------------------------------------------------------------------------------


_LINEAR = {*MOVES, "Abs", "Add", "Cast", "Clip", "Div", "Max", "Min", "Mul", "Neg", "Relu", "Sub", "Where"}
"""Operators of which lines give lines."""

MOST_CASES = 16
"""Maximum number of cases of a number; with more, it is unknown."""


class _Lines(Interpreter[list[Line]]):
    """Reads an additive mask as a line for each head, or one for all heads, at positions that may depend on the number
    of tokens, which is bounded by the capacity of the cache. Rounding errors are ignored."""

    refusal = NotByDistance

    def __init__(self, n_q: Affine, n_k: Affine, symbol: str, capacity: int, heads: int) -> None:
        super().__init__(Reader(n_q, n_k))
        self.arithmetic = self
        self.atoms = {*PAIR, Variable.HEAD, Dim(symbol)}
        self.capacity, self.heads = capacity, heads
        self.scores.context.set_max_operations(MOST_OPERATIONS * heads)
        count, head = self.scores.whole(Affine.atom(Dim(symbol))), self.scores.head
        self.scores.assume(count.le_set(self.scores.constant(capacity)))
        self.scores.assume(head.lt_set(self.scores.constant(heads)))

    def _is_line(self, x: Affine) -> bool:
        return self.atoms.issuperset(dict(x.terms))

    def bounds(self, line: Line) -> tuple[float, float]:
        """The least and the largest number, other than minus infinity."""
        least, most = inf, -inf
        for domain, x in line.get_pieces():
            unit = x.get_denominator_val()
            ends = self.scores.bounds(isl.PwAff.from_aff(x.scale_val(unit)).intersect_domain(domain))
            least, most = min(least, ends[0] / unit.to_python()), max(most, ends[1] / unit.to_python())
        return least, most

    def where(self, line: Line, is_hidden: bool) -> Line:
        """The cases in which a line hides keys, or in which it does not."""
        for domain, x in line.get_pieces():
            if (self.bounds(isl.PwAff.from_aff(x).intersect_domain(domain))[1] <= NEGLIGIBLE) != is_hidden:
                line = line.subtract_domain(domain)
        return line

    def slope(self, line: Line, seen: isl.Set) -> float:
        """The slope of a line over the visible pairs.

        Raises:
            NotByDistance: it is not the same for all.
        """
        own = self.scores.query.eq_set(self.scores.key)
        pieces = line.intersect_domain(seen).get_pieces()
        apart = [x for domain, x in pieces if not domain.is_subset(own)] or [x for _, x in pieces]
        if apart and seen.is_subset(line.eq_set(isl.PwAff.from_aff(apart[0]))):
            return float(Fraction(str(apart[0].get_coefficient_val(isl.dim_type.in_, 1))))
        raise NotByDistance("it is not one line over the visible keys")

    def _uncached(self, value: ir.Value, index: Index) -> list[Line]:
        if (tensor := ir.convenience.get_const_tensor(value)) is not None and tensor.dtype != BOOL:
            return self._of_table(value, tensor.numpy(), index)
        if (known := self._of_number(self.reader.number(value, index))) is not None:
            return known
        node = value.producer()
        if node is None:
            raise NotByDistance(f"{value.name!r} is an input")
        if node.domain != "" or node.op_type not in _LINEAR:
            raise NotByDistance(f"{value.name!r} is computed by {node.op_type}")
        if node.op_type in ("Cast", "Div") and (value.dtype is None or not value.dtype.is_floating_point()):
            raise NotByDistance(f"{value.name!r} is rounded to integers")
        return self._handled(node, index)

    def _of_number(self, number: Number) -> list[Line] | None:
        """The lines of a number that is known without a table; None for others."""
        lines = self.constant(-inf)
        for domain, piece in number.whole.get_pieces():
            x = self.scores.sum_of(piece)
            if x is None or not self._is_line(x):
                return None
            lines = self.choose(domain, self._by_head(x), lines)
        for domain, bounds in number.rest:
            if bounds.number is None:
                return None
            lines = self.choose(domain, self.constant(bounds.number), lines)
        return lines

    def _by_head(self, x: Affine) -> list[Line]:
        """An expression for each head, or for all."""
        factor = dict(x.terms).get(Variable.HEAD, 0)
        numbers = range(self.heads if factor else 1)
        return [self.scores.whole(x + (Affine(head) - Affine.atom(Variable.HEAD)) * factor) for head in numbers]

    def _of_table(self, value: ir.Value, table: Array, index: Index) -> list[Line]:
        """The lines of a constant, which may differ by head and is evenly spaced along its other dims, within the
        precision of its type."""
        along: list[Affine] = []
        numbers, by_head = table, False
        for axis, at in reversed(list(enumerate(index))):
            position, size = self.scores.closed(at), table.shape[axis]
            if position is None:
                raise NotByDistance(f"where {value.name!r} is read is not known")
            fixed = position.constant
            if fixed is not None and not 0 <= fixed < size:
                raise NotByDistance(f"{value.name!r} is read beyond its end")
            if fixed is not None or size == 1:
                numbers = np.take(numbers, fixed or 0, axis)
            elif position == Affine.atom(Variable.HEAD) and size == self.heads and not by_head:
                numbers, by_head = np.moveaxis(numbers, axis, -1), True
            else:
                along.insert(0, position)
        if not by_head:
            numbers = numbers[..., None]
        if not along:
            return self.constant(numbers)
        if not all(map(self._is_line, along)):
            raise NotByDistance(f"where {value.name!r} is read is not known")
        kind = table.dtype  # numbers err by up to a unit in the last place of its mantissa
        ulp = 0.0 if kind.kind in "iu" else 2.0 ** -int(ml_dtypes.finfo(kind).nmant)  # type: ignore[no-untyped-call]
        if (fitted := evenly(numbers, ulp)) is None:
            raise NotByDistance(f"{value.name!r} is a table whose steps are not equal")
        lines, steps = self.constant(fitted[0]), fitted[1]
        for position, size, step in zip(along, numbers.shape, steps, strict=False):
            self._check_inside(value, position, size)
            lines = self.compute("Add", lines, self.compute("Mul", self._by_head(position), self.constant(step)))
        return lines

    def _check_inside(self, value: ir.Value, position: Affine, size: int) -> None:
        """Check that a table is read within its bounds up to the capacity of the cache.

        Raises:
            TooFewPositions: it has fewer positions.
        """
        least, most = self.scores.bounds(self.scores.whole(position))
        if most == inf or least < 0:
            raise NotByDistance(f"where {value.name!r} is read is not known")
        if most >= size:
            raise TooFewPositions(
                f"{value.name} has biases for {size} positions and the cache has {self.capacity}; give a smaller "
                "cache_tokens"
            )

    # --- arithmetic, in place of that of numbers (:class:`~attnforge.export.masks.numbers.Arithmetic`)

    def constant(self, numbers: Array | float) -> list[Line]:
        """The same number for all pairs, which may differ by head."""
        lines = []
        for number in np.atleast_1d(np.asarray(numbers, np.float64)).tolist():
            if number == inf or isnan(number):
                raise NotByDistance(f"it adds {number}")
            line = self.scores.constant(0 if number == -inf else Fraction(number))
            lines.append(line.intersect_domain(self.scores.never) if number == -inf else line)
        return lines

    def stored(self, lines: list[Line], dtype: ir.DataType | None) -> list[Line]:
        return lines

    def choose(self, condition: isl.Set, yes: list[Line], no: list[Line]) -> list[Line]:
        """`yes` where a condition is True, else `no`."""

        def chosen(x: Line, y: Line) -> Line:
            return x.intersect_domain(condition).union_add(y.subtract_domain(condition))

        return self._for_each(chosen, yes, no)

    def compute(self, op_type: str, a: list[Line], b: list[Line]) -> list[Line]:
        """Compute Add, Sub, Mul, Ratio, Max or Min.

        Raises:
            NotByDistance: the result is not a line, or one of too many cases.
        """
        functions = {
            "Add": isl.PwAff.add, "Sub": self._difference, "Mul": self._product, "Ratio": self._ratio,
            "Max": isl.PwAff.union_max, "Min": isl.PwAff.min,
        }  # fmt: skip
        return self._for_each(functions[op_type], a, b)

    def _for_each(self, function: Callable[[Line, Line], Line], a: list[Line], b: list[Line]) -> list[Line]:
        """Compute a function of lines for each head."""
        count = max(len(a), len(b))
        lines = [function(a[i % len(a)], b[i % len(b)]) for i in range(count)]
        if any(line.n_piece() > MOST_CASES for line in lines):
            raise NotByDistance("it has too many cases")
        return lines

    def _is_finite(self, line: Line) -> bool:
        return self.scores.is_always(line.domain())

    def _difference(self, a: Line, b: Line) -> Line:
        if not self._is_finite(b):
            raise NotByDistance("it subtracts minus infinity")
        return a.sub(b)

    def _product(self, a: Line, b: Line) -> Line:
        for line, number in ((a, b), (b, a)):
            is_factor = number.is_cst() and self._is_finite(number)
            if is_factor and (self._is_finite(line) or self.bounds(number)[0] > 0):
                return line.mul(number)
        raise NotByDistance("it multiplies two numbers that differ by position")

    def _ratio(self, a: Line, b: Line) -> Line:
        if not b.is_cst() or not self.scores.is_always(b.ne_set(self.scores.constant(0))):
            raise NotByDistance("it divides by a number that differs by position")
        return self._product(a, self.scores.constant(1).div(b))


def evenly(table: Array, ulp: float) -> tuple[Array, list[Array]] | None:
    """The first numbers and the steps of a table that is evenly spaced along all dims except the last.

    Args:
        table: `(…, heads)`.
        ulp: the largest relative rounding error of a number.

    Returns:
        `(heads,)` each; None if no evenly spaced numbers round to these.
    """
    if not np.isfinite(table.astype(np.float64)).all():  # infinity hides some keys
        return None
    sizes = table.shape[:-1]
    anchor = np.unravel_index(int(np.abs(table[..., 0]).argmin()), sizes)  # the numbers with the least rounding error
    near, steps = table[anchor].astype(np.float64), []
    for axis, size in enumerate(sizes):
        along = table[tuple(slice(None) if i == axis else j for i, j in enumerate(anchor))].astype(np.float64)
        far = (np.arange(size) - anchor[axis])[:, None]
        others = far[:, 0] != 0
        slope, off = (along - near)[others] / far[others], ulp * (np.abs(along) + np.abs(near))[others]
        least, most = ((slope + sign * off / np.abs(far[others])) for sign in (-1, 1))
        if (least.max(0, initial=-inf) > most.min(0, initial=inf)).any():
            return None
        steps.append((least.max(0) + most.min(0)) / 2 if others.any() else np.zeros_like(near))
    for head in range(table.shape[-1]):
        numbers, even = table[..., head].astype(np.float64), near[head]
        for axis, (size, step) in enumerate(zip(sizes, steps, strict=True)):
            far = (np.arange(size) - anchor[axis]) * step[head]
            even = even + far.reshape([size if i == axis else 1 for i in range(len(sizes))])
        if not np.all(np.abs(numbers - even) <= 2 * ulp * (np.abs(numbers) + np.abs(near[head]))):
            return None
    return near - sum((i * step for i, step in zip(anchor, steps, strict=True)), np.zeros(1)), steps
