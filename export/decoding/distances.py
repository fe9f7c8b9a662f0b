"""Biases by distance (ALiBi, https://arxiv.org/abs/2108.12409): to the scores of visible keys, a mask adds the slope of
the head times the key's position, and nothing else that differs by key.

A softmax over keys does not change if one number is added to all scores of a query. So `slope · key` as in BLOOM,
`slope · (key − last key)` as in MPT, and `−slope · |query − key|` are the same bias, `slope · (key − query)`, which a
step computes from the positions of its tokens and of its cache.

The bias is read from the mask's graph, backwards by the functions of :mod:`~attnforge.export.masks.reader`: every
number in it is a line (:class:`Line`), the same one for all pairs or one per condition on them. What is not recognised
has no slopes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from math import inf

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
from attnforge.export.masks.affine import Affine, Atom, Dim, Variable
from attnforge.export.masks.indices import MOVES, Index
from attnforge.export.masks.numbers import Number
from attnforge.export.masks.reader import BOOL, Interpreter, Reader
from attnforge.export.masks.regions import fit
from attnforge.export.masks.scores import PAIR, Scores
from attnforge.export.masks.visibility import Visibility, scores_index


class NotByDistance(Exception):
    """A mask is not proved to be a bias by distance; the message gives a reason that a user can act on."""


class TooFewPositions(UsageError):
    """A table of biases that ends before the cache does."""


Line = Array
"""A number over the scores of a site, `(4, heads)` or `(4, 1)`: its constant term, and its factors of the query's
index, of the key's index and of the number of tokens."""

CONSTANT, QUERY, KEY, COUNT = range(4)


def constant(number: Array | float) -> Line:
    """The line that is the same number for all pairs, which may differ by head."""
    line = np.zeros((4, np.size(number)))
    line[CONSTANT] = number
    return line


def number_of(line: Line) -> Array | None:
    """The value of a line for all pairs, by head; None if it differs between pairs."""
    return None if line[QUERY:].any() else line[CONSTANT]


Cases = list[tuple[isl.Set, Line]]
"""Lines with the conditions under which each applies. For every pair, one condition is True."""


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
    cases = reader.read(mask, scores_index(scores, mask, query, key))
    shown = [(case, line) for case, line in cases if not reader.is_hidden(line)]
    seen = reduce(isl.Set.union, (case for case, _ in shown), scores.never)
    if node.attributes.get_int("is_causal", 0):
        seen = seen.intersect(scores.query.ge_set(scores.key))
    regions, is_exact = fit(scores, scores.may(seen))
    if not is_exact or not scores.may(scores.opposite(seen)).intersect(scores.may(seen)).is_empty():
        raise NotByDistance("which keys it hides depends on more than positions")
    bias = reader.arithmetic.common([(case.intersect(seen), line) for case, line in shown])
    least = reader.bounds(_at_own_key(bias))[0]
    if any(reader.bounds(line)[1] > least + NEGLIGIBLE for _, line in cases if reader.is_hidden(line)):
        raise NotByDistance("what it adds to hidden keys is not low enough compared to its bias")
    slopes = np.broadcast_to(bias[KEY], heads)
    return Visibility(regions, frozenset(), "never", n_q, n_k), tuple(float(slope) for slope in slopes)


def _at_own_key(line: Line) -> Line:
    """The value of a line at the query's own key."""
    result = line.copy()
    result[QUERY], result[KEY] = line[QUERY] + line[KEY], 0
    return result


# --- reading ----------------------------------------------------------------------------------------------------------


_LINEAR = {*MOVES, "Abs", "Add", "Cast", "Clip", "Div", "Max", "Min", "Mul", "Neg", "Relu", "Sub", "Where"}
"""Operators of which lines give lines, or one for each of several cases."""


class _Lines(Interpreter[Cases]):
    """Reads an additive mask as lines, at positions that may depend on the number of tokens, which is bounded by the
    capacity of the cache."""

    refusal = NotByDistance

    def __init__(self, n_q: Affine, n_k: Affine, symbol: str, capacity: int, heads: int) -> None:
        super().__init__(Reader(n_q, n_k))
        self.arithmetic = _Arithmetic(self.scores, (*PAIR, Dim(symbol)))
        self.capacity, self.heads = capacity, heads
        count, head = self.scores.whole(Affine.atom(Dim(symbol))), self.scores.head
        self.scores.assume(count.le_set(self.scores.constant(capacity)))
        self.scores.assume(head.lt_set(self.scores.constant(heads)))

    def bounds(self, line: Line) -> tuple[float, float]:
        """The bounds of a line over all heads and numbers of tokens."""
        ends = []
        for count in (1, self.capacity):
            first, last = line.T * (1, 0, 0, count), line.T * (1, count - 1, count - 1, count)
            ends += [np.minimum(first, last).sum(1).min(), np.maximum(first, last).sum(1).max()]
        return float(min(ends)), float(max(ends))

    def is_hidden(self, line: Line) -> bool:
        return self.bounds(line)[1] <= NEGLIGIBLE

    def _uncached(self, value: ir.Value, index: Index) -> Cases:
        if (tensor := ir.convenience.get_const_tensor(value)) is not None and tensor.dtype != BOOL:
            return [(self.scores.always, self._of_table(value, tensor.numpy(), index))]
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

    def _of_number(self, number: Number) -> Cases | None:
        """The cases of a number that is known without a table; None for others."""
        sums = [(domain, self.scores.sum_of(x)) for domain, x in number.whole.get_pieces()]
        lines = [(domain, None if x is None else self._of_expression(x)) for domain, x in sums]
        numbers = [(domain, bounds.number) for domain, bounds in number.rest]
        lines += [(domain, None if x is None else constant(x)) for domain, x in numbers]
        known = [(domain, line) for domain, line in lines if line is not None]
        return known if len(known) == len(lines) else None

    def _of_expression(self, x: Affine) -> Line | None:
        """An integer as a line; None if it depends on more than heads, queries, keys and the number of tokens."""
        line = np.zeros((4, self.heads))
        line[CONSTANT] = x.number
        for atom, factor in x.terms:
            if atom == Variable.HEAD:
                line[CONSTANT] += factor * np.arange(self.heads)
            elif atom in self.arithmetic.atoms:
                line[QUERY + self.arithmetic.atoms.index(atom)] = factor
            else:
                return None
        return line

    def _of_table(self, value: ir.Value, table: Array, index: Index) -> Line:
        """The line of a constant, which may differ by head and is evenly spaced along its other dims, within the
        precision of its type."""
        along: list[Affine] = []
        ends: list[int] = []
        numbers, by_head = table, False
        for axis, at in reversed(list(enumerate(index))):
            position = self.scores.closed(at)
            if position is None:
                raise NotByDistance(f"where {value.name!r} is read is not known")
            fixed, size = position.constant, table.shape[axis]
            if fixed is not None and not 0 <= fixed < size:
                raise NotByDistance(f"{value.name!r} is read beyond its end")
            if fixed is not None or size == 1:
                numbers = np.take(numbers, fixed or 0, axis)
            elif position == Affine.atom(Variable.HEAD) and size == self.heads and not by_head:
                numbers, by_head = np.moveaxis(numbers, axis, -1), True
            else:
                along.insert(0, position)
                ends.insert(0, size)
        if not by_head:
            numbers = numbers[..., None]
        if not along:
            return constant(numbers.astype(np.float64))
        lines = [line for position in along if (line := self._of_expression(position)) is not None]
        if len(lines) < len(along):
            raise NotByDistance(f"where {value.name!r} is read is not known")
        kind = table.dtype  # numbers err by up to a unit in the last place of its mantissa
        ulp = 0.0 if kind.kind in "iu" else 2.0 ** -int(ml_dtypes.finfo(kind).nmant)  # type: ignore[no-untyped-call]
        if (fitted := evenly(numbers, ulp)) is None:
            raise NotByDistance(f"{value.name!r} is a table whose steps are not equal")
        for position, size in zip(along, ends, strict=True):
            self._check_inside(value, position, size)
        first, steps = fitted
        return sum((line * step for line, step in zip(lines, steps, strict=True)), constant(first))

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


# --- arithmetic -------------------------------------------------------------------------------------------------------

MOST_CASES = 16
"""Maximum number of cases of a number; with more, it is unknown."""


@dataclass(frozen=True)
class _Arithmetic:
    """Arithmetic of lines, in place of that of numbers (:class:`~attnforge.export.masks.numbers.Arithmetic`)."""

    scores: Scores
    atoms: tuple[Atom, ...]

    def constant(self, number: float) -> Cases:
        return [(self.scores.always, constant(number))]

    def stored(self, cases: Cases, dtype: ir.DataType | None) -> Cases:
        """The same numbers: rounding errors are ignored."""
        return cases

    def compute(self, op_type: str, a: Cases, b: Cases) -> Cases:
        """Compute Add, Sub, Mul, Ratio, Max or Min.

        Raises:
            NotByDistance: the result is not a line, or one of too many.
        """
        if op_type in ("Max", "Min"):
            return self._extreme(a, b, 1.0 if op_type == "Max" else -1.0)
        function = _ON_LINES[op_type]
        cases = self._possible([(x.intersect(y), function(line, other)) for x, line in a for y, other in b])
        if len(cases) > MOST_CASES:
            raise NotByDistance("it has too many cases")
        return cases

    def common(self, cases: Cases) -> Line:
        """The line that all cases are. A case of queries and their own keys alone has to agree only there: at a
        distance of 0, `|key − query|` may be read with either sign.

        Raises:
            NotByDistance: there is no such line.
        """
        cases = self._possible(cases)
        own = self.scores.query.eq_set(self.scores.key)
        apart = self._possible([(case.subtract(own), line) for case, line in cases]) or cases
        is_close = partial(np.allclose, rtol=1e-12, atol=0)
        if cases and all(is_close(line, apart[0][1]) for _, line in apart):
            at_own, *others = (_at_own_key(line) for _, line in apart[:1] + cases)
            if all(is_close(line, at_own) for line in others):
                return apart[0][1]
        raise NotByDistance("it is not one line over the visible keys")

    def _extreme(self, a: Cases, b: Cases, sign: float) -> Cases:
        """The larger of two numbers, or with a sign of -1 the smaller."""
        result: Cases = []
        for first, x in a:
            for second, y in b:
                both = first.intersect(second)
                above = self._not_negative((x - y) * sign)
                result += [(both.intersect(above), x), (both.subtract(above), y)]
        return self._possible(result)

    def _possible(self, cases: Cases) -> Cases:
        return [(case, line) for case, line in cases if not self.scores.is_never(case)]

    def choose(self, condition: isl.Set, yes: Cases, no: Cases) -> Cases:
        """`yes` where a condition is True, else `no`."""
        cases = [(case.intersect(condition), line) for case, line in yes]
        return self._possible(cases + [(case.subtract(condition), line) for case, line in no])

    def _not_negative(self, line: Line) -> isl.Set:
        """Where a line is at least 0, which must be the same for all heads."""
        if not line.any():
            return self.scores.always
        unit = next(line[row] for row in (QUERY, KEY, COUNT, CONSTANT) if line[row].any())
        if (unit == 0).any() or (np.sign(unit) != np.sign(unit[0])).any():
            raise NotByDistance("which of two numbers is larger differs by head")
        ratios = line / np.abs(unit)
        if not np.isfinite(ratios).all() or not np.allclose(ratios, np.rint(ratios[:, :1]), rtol=1e-12, atol=1e-12):
            raise NotByDistance("which of two numbers is larger is not known")
        number, *factors = (int(ratio) for ratio in np.rint(ratios[:, 0]))
        x = Affine.of(number, dict(zip(self.atoms, factors, strict=True)))
        return self.scores.whole(x).ge_set(self.scores.constant(0))


def _product(a: Line, b: Line) -> Line:
    """A line times a number, by head; factors of 0 stay 0, also times infinity."""
    for line, other in ((a, b), (b, a)):
        if (number := number_of(other)) is not None:
            rows = np.asarray(line.any(1))
            rows[CONSTANT] = True
            result = np.zeros((4, max(line.shape[1], len(number))))
            result[rows] = line[rows] * number
            return result
    raise NotByDistance("it multiplies two numbers that differ by position")


def _ratio(a: Line, b: Line) -> Line:
    if (number := number_of(b)) is None or not number.all():
        raise NotByDistance("it divides by a number that differs by position")
    return a * (1 / number)


_ON_LINES: Mapping[str, Callable[[Line, Line], Line]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": _product,
    "Ratio": _ratio,
}
