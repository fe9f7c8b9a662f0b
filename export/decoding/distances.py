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

from collections.abc import Callable, Sequence
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
from attnforge.export.masks.scores import MOST_OPERATIONS, PAIR, fraction, integer
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
            least, most = min(least, ends[0] / integer(unit)), max(most, ends[1] / integer(unit))
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
            return float(fraction(apart[0].get_coefficient_val(isl.dim_type.in_, 1)))
        raise NotByDistance("it is not one line over the visible keys")

    def _uncached(self, value: ir.Value, index: Index) -> list[Line]:
        if (tensor := ir.convenience.get_const_tensor(value)) is not None and tensor.dtype != BOOL:
            closed = [self.scores.closed(position) for position in index]
            positions = [position for position in closed if position is not None]
            if len(positions) < len(index):
                raise NotByDistance(f"where {value.name!r} is read is not known")
            return [self._of_table(value, tensor.numpy(), each) for each in self._by_head(*positions)]
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
            lines = self.choose(domain, [self.scores.whole(each) for (each,) in self._by_head(x)], lines)
        for domain, bounds in number.rest:
            if bounds.number is None:
                return None
            lines = self.choose(domain, self.constant(bounds.number), lines)
        return lines

    def _by_head(self, *expressions: Affine) -> list[list[Affine]]:
        """Expressions for each head, or once if they are the same for all."""
        heads = range(self.heads if any(Variable.HEAD in x.variables for x in expressions) else 1)
        factors = [dict(x.terms).get(Variable.HEAD, 0) for x in expressions]
        less = [x - Affine.atom(Variable.HEAD) * factor for x, factor in zip(expressions, factors, strict=True)]
        return [[x + head * factor for x, factor in zip(less, factors, strict=True)] for head in heads]

    def _of_table(self, value: ir.Value, table: Array, positions: Sequence[Affine]) -> Line:
        """The line of a constant for one head, which is evenly spaced within the precision of its type."""
        along: list[Affine] = []
        ulp = 0.0  # numbers err by up to a unit in the last place of their mantissa
        if table.dtype.kind not in "iu":
            ulp = 2.0 ** -int(ml_dtypes.finfo(table.dtype).nmant)  # type: ignore[no-untyped-call]
        for axis, position in reversed(list(enumerate(positions))):
            fixed, size = position.constant, table.shape[axis]
            if fixed is not None and not 0 <= fixed < size:
                raise NotByDistance(f"{value.name!r} is read beyond its end")
            if fixed is not None or size == 1:
                table = np.take(table, fixed or 0, axis)
            else:
                along.insert(0, position)
        if not along:
            return self._number(float(table))
        if not all(map(self._is_line, along)):
            raise NotByDistance(f"where {value.name!r} is read is not known")
        if (fitted := evenly(table, ulp)) is None:
            raise NotByDistance(f"{value.name!r} is a table whose steps are not equal")
        line = self._number(fitted[0])
        for position, size, step in zip(along, table.shape, fitted[1], strict=True):
            self._check_inside(value, position, size)
            line = line.add(self.scores.whole(position).scale_val(self.scores.value(Fraction(step))))
        return line

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

    def constant(self, number: float) -> list[Line]:
        return [self._number(number)]

    def _number(self, number: float) -> Line:
        """The same number for all pairs."""
        if number == inf or isnan(number):
            raise NotByDistance(f"it adds {number}")
        if number == -inf:
            return self.scores.constant(0).intersect_domain(self.scores.never)
        return self.scores.constant(Fraction(number))

    def stored(self, lines: list[Line], dtype: ir.DataType | None, was_integer: bool = False) -> list[Line]:
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


def evenly(table: Array, ulp: float) -> tuple[float, list[float]] | None:
    """The first number and the steps of a table that is evenly spaced along all dims.

    Args:
        table: the table.
        ulp: the largest relative rounding error of a number.

    Returns:
        The number and the step along each dim; None if no evenly spaced numbers round to these.
    """
    table = table.astype(np.float64)
    if not np.isfinite(table).all():  # infinity hides some keys
        return None
    anchor = np.unravel_index(int(np.abs(table).argmin()), table.shape)  # the number with the least rounding error
    near, steps = float(table[anchor]), list[float]()
    even = np.asarray(near)
    for axis, size in enumerate(table.shape):
        along = table[tuple(slice(None) if i == axis else j for i, j in enumerate(anchor))]
        far = np.arange(size) - anchor[axis]
        others = far != 0
        slope = (along - near)[others] / far[others]
        off = ulp * (np.abs(along) + np.abs(near))[others] / np.abs(far[others])
        least, most = (slope - off).max(), (slope + off).min()
        if least > most:
            return None
        steps.append(float(least + most) / 2)
        even = np.add.outer(even, far * steps[-1])
    if (np.abs(table - even) > 2 * ulp * (np.abs(table) + np.abs(near))).any():
        return None
    return near - sum(i * step for i, step in zip(anchor, steps, strict=True)), steps
