"""What a value of a mask's graph is at every query and key, read backwards through the operators that compute it.

A value is read at an index: for every dim of it, where it is read as an expression of batch, head, query and key
(:mod:`.affine`). So a Transpose, Slice, Expand, Concat or Gather changes the index alone, as in XLA's indexing maps,
and a comparison of two positions is a region of queries and keys. What is not understood is unknown, which is never
wrong: it may be any number, and True or False anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from attnforge.export.attention.affine import Affine, Place, Scalar, never_negative
from attnforge.export.attention.constant_masks import all_of, any_of, truth_of
from attnforge.export.attention.indices import START, Index, broadcast, known, pieces, places_of, reshaped, sliced
from attnforge.export.attention.mask_numbers import (
    UNKNOWN,
    Arithmetic,
    Between,
    Leaf,
    Number,
    Table,
    Whole,
    apply,
    choose,
    constant,
    flags_truth,
    where,
)
from attnforge.export.attention.operands import same_value, scalar
from attnforge.export.attention.truth import ALWAYS, NEVER, Largest, Truth, at_least_zero, kind_of, unknown

Known = Truth | Number
MOST_DEPTH = 150
"""Operators in a row that are read."""

BOOL, INT32, INT64 = ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64
WIDE = frozenset({INT32, INT64, ir.DataType.DOUBLE})
"""Types that hold every position and what is computed of it."""

COUNTING = WIDE | {ir.DataType.FLOAT}
"""Types that hold every position."""


class Reader:
    """Reads values over the scores of a site.

    Args:
        largest: the largest index of queries and of keys.
    """

    def __init__(self, largest: Largest) -> None:
        self.largest = largest
        self.arithmetic = Arithmetic(largest)
        self._read: dict[tuple[ir.Value, Index], Known] = {}
        self._scalars: list[Scalar] = []
        self._depth = 0

    def read(self, value: ir.Value | None, index: Index) -> Known:
        """What `value` is at an index."""
        assert value is not None
        key = value, index
        if key not in self._read:
            self._depth += 1
            known = self._uncached(value, index) if self._depth <= MOST_DEPTH else None
            self._depth -= 1
            self._read[key] = self._data(value, index) if known is None else known
        return self._read[key]

    def _uncached(self, value: ir.Value, index: Index) -> Known | None:
        if value.shape is None or len(value.shape) != len(index):
            return None
        if (number := scalar(value)) is not None:
            return (ALWAYS if number else NEVER) if value.dtype == BOOL else constant(number)
        if (tensor := ir.convenience.get_const_tensor(value)) is not None:
            return _constant(tensor.numpy(), index, self.largest)
        node = value.producer()
        if node is None or node.domain != "" or (handler := HANDLERS.get(node.op_type)) is None:
            return None
        return handler(self, node, index)

    def truth(self, value: ir.Value | None, index: Index) -> Truth:
        known = self.read(value, index)
        return (
            known if isinstance(known, Truth) else ~self.arithmetic.equal(known, constant(0), kind_of(places_of(index)))
        )

    def number(self, value: ir.Value | None, index: Index) -> Number:
        known = self.read(value, index)
        return choose(known, constant(1), constant(0)) if isinstance(known, Truth) else known

    def position(self, value: ir.Value | None, index: Index) -> Affine | None:
        """The one whole number that `value` is at an index, as an expression."""
        number = self.number(value, index)
        return number.single if isinstance(number, Whole) else None

    def elements(self, value: ir.Value | None) -> list[Affine | None] | None:
        """The elements of a vector of known length: of starts, axes, repeats."""
        if value is None or value.shape is None or len(value.shape) != 1 or not isinstance(value.shape[0], int):
            return None
        return [self.position(value, (Affine(i),)) for i in range(value.shape[0])]

    def _data(self, value: ir.Value, index: Index) -> Known:
        """A value of which only a run tells more: an unknown, or an atom where it is a whole number that is the same
        for all queries and keys."""
        places = places_of(index)
        if value.dtype == BOOL:
            return unknown(kind_of(places))
        varies = not known(index) or places & {Place.QUERY, Place.KEY} or value.shape is None
        if value.dtype not in (INT32, INT64) or varies:
            return UNKNOWN
        for other in self._scalars:
            if other.index == index and same_value(other.value, value):
                return Whole((Affine.atom(other),))
        self._scalars.append(Scalar(value, index))
        return Whole((Affine.atom(self._scalars[-1]),))


Handler = Callable[[Reader, ir.Node, Index], Known | None]


# --- constants --------------------------------------------------------------------------------------------------------


def _constant(array: NDArray[np.generic], index: Index, largest: Largest) -> Known | None:
    """An array at an index."""
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        return None
    at = [position.constant if position is not None else None for position in index]
    if all(number is not None and number < size for number, size in zip(at, array.shape, strict=True)):
        number = array[tuple(int(i or 0) for i in at)]
        return (ALWAYS if number else NEVER) if array.dtype == bool else constant(float(number))
    if array.dtype.kind == "i" and (progression := _progression(array, index)) is not None:
        return Whole((progression,))
    grid = _grid(array, index, largest)
    if array.dtype == bool:
        return None if grid is None else grid.flags()
    wide = array.astype(np.float64)
    if np.isnan(wide).any():
        return UNKNOWN
    if grid is None or array.dtype.kind == "u":
        return Between(float(wide.min()), float(wide.max()))
    return _numbers(grid)


def _progression(array: NDArray[np.generic], index: Index) -> Affine | None:
    """Positions that were counted ahead of time: steps along one dim that are equal, or equal after every so many."""
    for axis, position in enumerate(index):
        fixed = position.constant if position is not None and position.constant is not None else 0
        if not 0 <= fixed < array.shape[axis]:
            return None
        first = np.take(array, [fixed], axis)
        is_fixed = position is not None and position.constant is not None
        if is_fixed or (array == first).all():
            array = first
    axes = [axis for axis, size in enumerate(array.shape) if size > 1]
    positions = [index[axis] for axis in axes]
    if len(axes) == 1 and positions[0] is not None:
        return _stairs(array.reshape(-1).astype(np.int64), positions[0])
    return _plane(array.squeeze().astype(np.int64), positions) if len(axes) == 2 else None


def _stairs(numbers: NDArray[np.int64], position: Affine) -> Affine | None:
    steps = np.diff(numbers)
    width = int(np.flatnonzero(steps)[0]) + 1
    step = int(steps[width - 1])
    is_even = np.array_equal(numbers, numbers[0] + step * (np.arange(len(numbers)) // width))
    return position.floor_divided(width) * step + int(numbers[0]) if is_even else None


def _plane(numbers: NDArray[np.int64], positions: Sequence[Affine | None]) -> Affine | None:
    rows, columns = positions
    first, down, right = int(numbers[0, 0]), int(numbers[1, 0] - numbers[0, 0]), int(numbers[0, 1] - numbers[0, 0])
    i, j = np.ogrid[: numbers.shape[0], : numbers.shape[1]]
    if rows is None or columns is None or not np.array_equal(numbers, first + down * i + right * j):
        return None
    return rows * down + columns * right + first


@dataclass(frozen=True)
class _Grid:
    """An array as it is read at queries and keys.

    Attributes:
        array: `(samples and heads, rows or 1, columns or 1)`.
        query: what is added to a query's index to give its row.
        key: to a key's index, to give its column.
    """

    array: NDArray[np.generic]
    query: Affine = START
    key: Affine = START

    def flags(self, flags: NDArray[np.generic] | None = None) -> Truth:
        """The condition of the array, or of flags of its shape."""
        grid = np.asarray(self.array if flags is None else flags, bool)
        if 1 not in grid.shape[1:]:
            return truth_of(grid).moved(self.query, self.key)
        some, every = flags_truth(any_of(grid)), flags_truth(all_of(grid))
        whole = some if some == every else (some & unknown("pattern")) | every
        return whole.moved(self.query, self.key)


def _grid(array: NDArray[np.generic], index: Index, largest: Largest) -> _Grid | None:
    """An array that is read along one dim by query and along another by key, each in steps of one; None for others."""
    order: list[int] = []
    shifts: list[Affine] = []
    index = (*index, Affine(), Affine())
    array = array[..., None, None]
    for place, spare in ((Place.QUERY, array.ndim - 2), (Place.KEY, array.ndim - 1)):
        axes = [axis for axis, position in enumerate(index) if position is None or place in position.places]
        axis = axes[0] if axes else spare
        shift = START if not axes else None if (at := index[axis]) is None else at - Affine.atom(place)
        if len(axes) > 1 or shift is None or shift.places:
            return None
        last, first = largest[place].constant, shift.constant
        if axes and last is not None and first is not None and first >= 0 and first + last < array.shape[axis]:
            array, shift = np.take(array, range(first, first + last + 1), axis), START
        order.append(axis)
        shifts.append(shift)
    for axis, position in enumerate(index):
        if axis not in order and position is not None and position.constant is not None:
            array = np.take(array, [position.constant], axis)
    sizes = [array.shape[axis] for axis in order]
    return _Grid(np.moveaxis(array, order, (-2, -1)).reshape(-1, *sizes), *shifts)


def _numbers(grid: _Grid) -> Number:
    """Numbers of a constant mask or bias: two numbers are a choice, as is what hides keys beside what does not."""
    wide = grid.array.astype(np.float64)
    least, most = float(wide.min()), float(wide.max())
    is_most = wide == most
    if bool((is_most | (wide == least)).all()):
        return choose(grid.flags(is_most), constant(most), constant(least))
    if grid.array.dtype.kind == "i" and len(wide) == 1 and grid.query == grid.key == START:
        return Table(grid.array[0].astype(np.int64))
    shown = wide > HIDDEN
    if shown.all() or not shown.any():
        return Between(least, most)
    return choose(grid.flags(shown), _range(wide[shown]), _range(wide[~shown]))


def _range(numbers: NDArray[np.float64]) -> Number:
    least, most = float(numbers.min()), float(numbers.max())
    return constant(least) if least == most else Between(least, most)


HIDDEN = -9.9e3
"""`masking.NEGLIGIBLE`."""


# --- operators --------------------------------------------------------------------------------------------------------


def _same(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    return reader.read(node.inputs[0], index)


def _cast(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    source, target = node.inputs[0], node.outputs[0].dtype
    assert source is not None and source.dtype is not None
    if target is None or target == BOOL:
        return reader.truth(source, index) if target == BOOL else None
    number = reader.number(source, index)
    if target.is_integer() and source.dtype.is_floating_point():
        number = apply(lambda leaf: leaf if isinstance(leaf, Whole) else UNKNOWN, number)
    return _held(number, target)


def _held(number: Number, dtype: ir.DataType | None) -> Number:
    """A number, or nothing where the type may not hold it: positions are held by the types that count without gaps."""

    def leaf(leaf: Leaf) -> Leaf:
        if dtype in WIDE:
            return leaf
        is_float = dtype is not None and dtype.is_floating_point()
        if isinstance(leaf, Between):
            return leaf if is_float else UNKNOWN
        if not isinstance(leaf, Whole):
            return UNKNOWN
        if is_float and leaf.single is not None and leaf.single.constant is not None:
            return leaf
        if dtype == ir.DataType.FLOAT:
            return leaf if all(_is_counted(option) for option in leaf.options) else UNKNOWN
        return (
            leaf
            if all(option.constant is not None and 0 <= option.number < 128 for option in leaf.options)
            else UNKNOWN
        )

    return apply(leaf, number)


def _is_counted(x: Affine) -> bool:
    """Whether an expression stays below 2^24 for fewer than some millions of tokens."""
    return not x.scalars and abs(x.number) < 2**22 and all(abs(factor) == 1 for _, factor in x.terms)


def _elementwise(op_type: str) -> Handler:
    def handler(reader: Reader, node: ir.Node, index: Index) -> Known | None:
        first, *others = (reader.number(x, broadcast(x, node.outputs[0], index)) for x in node.inputs)
        for other in others:
            first = reader.arithmetic.compute(op_type, first, other)
        return _held(first, node.outputs[0].dtype)

    return handler


def _div(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    a, b = (reader.number(x, broadcast(x, node.outputs[0], index)) for x in node.inputs)
    dtype = node.outputs[0].dtype
    is_float = dtype is not None and dtype.is_floating_point()
    return _held(reader.arithmetic.compute("Ratio" if is_float else "Div", a, b), dtype)


def _mod(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    """Of whole numbers, with the sign of the divisor."""
    if node.outputs[0].dtype not in WIDE or node.attributes.get_int("fmod") == 1:
        return None
    return _elementwise("Mod")(reader, node, index)


def _subtraction(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    if (division := _floored(node)) is not None:
        a, b = (reader.number(x, broadcast(x, node.outputs[0], index)) for x in division.inputs)
        return reader.arithmetic.floored(a, b)
    return _elementwise("Sub")(reader, node, index)


def _floored(node: ir.Node) -> ir.Node | None:
    """The Div of whole numbers that a Sub rounds down, as torch's exporter writes `//`: `a / b` minus one where
    `(a < 0) == (b > 0)` and `a % b` is not 0."""
    quotient, cast_ = (value.producer() if value is not None else None for value in node.inputs)
    offset = _input(cast_, "Cast", 0)
    signs, remainder = _input(offset, "And", 0), _input(_input(offset, "And", 1), "Cast", 0)
    below, above = _input(signs, "Equal", 0), _input(signs, "Equal", 1)
    if quotient is None or quotient.op_type != "Div" or remainder is None or below is None:
        return None
    a, b = quotient.inputs
    if a is None or a.dtype not in (INT32, INT64) or remainder.op_type != "Mod" or below.op_type != "Less":
        return None
    same = same_value(remainder.inputs[0], a) and same_value(remainder.inputs[1], b) and same_value(below.inputs[0], a)
    positive = scalar(b) is not None and (scalar(b) or 0) > 0
    is_true = above is None or (above.op_type == "Greater" and scalar(above.inputs[1]) == 0)
    return quotient if same and positive and is_true and scalar(below.inputs[1]) == 0 else None


def _input(node: ir.Node | None, op_type: str, i: int) -> ir.Node | None:
    """The node that computes an input of a node of this type."""
    if node is None or node.op_type != op_type or node.inputs[i] is None:
        return None
    value = node.inputs[i]
    return value.producer() if value is not None else None


def _floor(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    """Of a quotient of whole numbers, or of a whole number."""
    division = node.inputs[0].producer() if node.inputs[0] is not None else None
    if division is not None and division.op_type == "Div" and node.outputs[0].dtype in COUNTING:
        a, b = (reader.number(x, broadcast(x, division.outputs[0], index)) for x in division.inputs)
        return reader.arithmetic.floored(a, b)
    return apply(lambda leaf: leaf if isinstance(leaf, Whole) else UNKNOWN, reader.number(node.inputs[0], index))


def _neg(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    return reader.arithmetic.compute("Sub", constant(0), reader.number(node.inputs[0], index))


def _abs(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    number = reader.number(node.inputs[0], index)
    return reader.arithmetic.compute("Max", number, reader.arithmetic.compute("Sub", constant(0), number))


def _clip(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    number = reader.number(node.inputs[0], index)
    for op_type, end in zip(("Max", "Min"), node.inputs[1:], strict=False):
        if end is not None:
            number = reader.arithmetic.compute(op_type, number, reader.number(end, ()))
    return number


def _relu(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    return reader.arithmetic.compute("Max", reader.number(node.inputs[0], index), constant(0))


def _compared(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    a, b = ((x, broadcast(x, node.outputs[0], index)) for x in node.inputs)
    if node.op_type == "Equal" and a[0] is not None and a[0].dtype == BOOL:
        x, y = reader.truth(*a), reader.truth(*b)
        return (x & y) | (~x & ~y)
    left, right = reader.number(*a), reader.number(*b)
    arithmetic, kind = reader.arithmetic, kind_of(places_of(index))
    if node.op_type == "Equal":
        return arithmetic.equal(left, right, kind)
    if node.op_type in ("Less", "Greater"):
        return ~(
            arithmetic.at_least(left, right, kind) if node.op_type == "Less" else arithmetic.at_least(right, left, kind)
        )
    return (
        arithmetic.at_least(right, left, kind)
        if node.op_type == "LessOrEqual"
        else arithmetic.at_least(left, right, kind)
    )


def _logical(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    a, b = (reader.truth(x, broadcast(x, node.outputs[0], index)) for x in node.inputs)
    if node.op_type == "Xor":
        return (a & ~b) | (~a & b)
    return a & b if node.op_type == "And" else a | b


def _not(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    return ~reader.truth(node.inputs[0], index)


def _where(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    condition, yes, no = ((x, broadcast(x, node.outputs[0], index)) for x in node.inputs)
    return _chosen(reader, reader.truth(*condition), yes, no, node.outputs[0].dtype)


def _chosen(
    reader: Reader,
    condition: Truth,
    yes: tuple[ir.Value | None, Index],
    no: tuple[ir.Value | None, Index],
    dtype: ir.DataType | None,
) -> Known:
    """One of two values; the other is not read where it is never chosen."""
    if condition.constant is not None:
        return reader.read(*(yes if condition.constant else no))
    if dtype == BOOL:
        return where(condition, reader.truth(*yes), reader.truth(*no))
    return choose(condition, reader.number(*yes), reader.number(*no))


def _range_op(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    start, step = reader.position(node.inputs[0], ()), reader.position(node.inputs[2], ())
    (position,) = index
    if start is None or step is None or step.constant is None or position is None:
        return None
    return Whole((start + position * step.constant,)) if node.outputs[0].dtype in COUNTING else None


def _cumsum(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    """Of a number that is the same everywhere: positions, as people count them by a mask of ones."""
    source, axis = node.inputs[0], scalar(node.inputs[1])
    step = reader.number(source, index)
    if axis is None or not isinstance(step, Whole) or step.single is None or step.single.constant is None:
        return None
    if (position := index[int(axis)]) is None or node.attributes.get_int("reverse") == 1:
        return None
    count = position + (0 if node.attributes.get_int("exclusive") == 1 else 1)
    return Whole((count * step.single.constant,)) if node.outputs[0].dtype in COUNTING else None


def _shape(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    source, (position,) = node.inputs[0], index
    if source is None or source.shape is None or position is None or position.constant is None:
        return None
    dims = list(source.shape)[node.attributes.get_int("start", 0) : node.attributes.get_int("end", None)]
    return Whole((Affine.dim(dims[position.constant]),)) if position.constant < len(dims) else None


def _trilu(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    k = node.inputs[1] if len(node.inputs) > 1 else None
    offset = Affine() if k is None else reader.position(k, (Affine(),) * len(_shape_of(k)))
    row, column = index[-2:]
    if offset is None or row is None or column is None:
        return None
    above = column - row - offset  # the upper part has the columns from row + offset on
    kept = at_least_zero(above if node.attributes.get_int("upper", 1) else -above, reader.largest)
    if node.outputs[0].dtype == BOOL:
        return kept & reader.truth(node.inputs[0], index)
    return choose(kept, reader.number(node.inputs[0], index), constant(0))


def _shape_of(value: ir.Value | None) -> Sequence[object]:
    return list(value.shape) if value is not None and value.shape is not None else []


def _eye(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    row, column = index
    if row is None or column is None:
        return None
    x = column - row - node.attributes.get_int("k", 0)
    diagonal = at_least_zero(x, reader.largest) & at_least_zero(-x, reader.largest)
    return diagonal if node.outputs[0].dtype == BOOL else choose(diagonal, constant(1), constant(0))


# --- what changes the index alone -------------------------------------------------------------------------------------


def _viewed(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    source = reshaped(node, index)
    return None if source is None else reader.read(node.inputs[0], source)


def _expand(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    source, sizes = node.inputs[0], reader.elements(node.inputs[1])
    at = broadcast(source, node.outputs[0], index)
    if sizes is not None and source is not None and source.shape is not None:  # which tell more than the shape may
        wanted = zip(source.shape, sizes[len(sizes) - len(at) :], index[len(index) - len(at) :], at, strict=True)
        at = tuple(
            position if size in (Affine(1), Affine.dim(dim)) and dim != 1 else known
            for dim, size, position, known in wanted
        )
    return reader.read(source, at)


def _unsqueeze(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    axes = reader.elements(node.inputs[1])
    if axes is None or not known(tuple(axes)):
        return None
    new = {axis.number % len(index) for axis in axes if axis is not None}
    return reader.read(node.inputs[0], tuple(position for i, position in enumerate(index) if i not in new))


def _squeeze(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    axes = reader.elements(node.inputs[1]) if len(node.inputs) > 1 else None
    if axes is None or not known(tuple(axes)):
        return _viewed(reader, node, index)
    rank, rest = len(index) + len(axes), iter(index)
    old = {axis.number % rank for axis in axes if axis is not None}
    return reader.read(node.inputs[0], tuple(START if i in old else next(rest) for i in range(rank)))


def _slice(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    starts, axes, steps = (
        reader.elements(node.inputs[i]) if len(node.inputs) > i and node.inputs[i] is not None else None
        for i in (1, 3, 4)
    )
    if any(len(node.inputs) > i and node.inputs[i] is not None and x is None for i, x in ((3, axes), (4, steps))):
        return None
    source = sliced(node.inputs[0], index, starts, axes, steps)
    return None if source is None else reader.read(node.inputs[0], source)


def _concat(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    axis = node.attributes["axis"].as_int() % len(index)
    parts = pieces(list(node.inputs), index[axis], axis)
    if parts is None:
        return None
    result: Known | None = None
    for part, position, size in reversed(parts):
        if at_least_zero(position, reader.largest).constant is False:
            continue  # an earlier part holds it
        at = (*index[:axis], position, *index[axis + 1 :])
        inside = ALWAYS if result is None else at_least_zero(size - position - 1, reader.largest)
        if inside.constant is not False:
            mine = reader.read(part, at)
            result = mine if result is None else _either(inside, mine, result)
    return result


def _either(condition: Truth, yes: Known, no: Known) -> Known | None:
    """One of two values of one type."""
    if isinstance(yes, Truth) and isinstance(no, Truth):
        return where(condition, yes, no)
    return None if isinstance(yes, Truth) or isinstance(no, Truth) else choose(condition, yes, no)


def _gather(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    data, indices = node.inputs
    rank, axis = len(_shape_of(indices)), node.attributes.get_int("axis", 0) or 0
    axis += len(_shape_of(data)) if axis < 0 else 0
    position = reader.position(indices, index[axis : axis + rank])
    return reader.read(data, (*index[:axis], _within(position, data, axis, reader.largest), *index[axis + rank :]))


def _within(position: Affine | None, data: ir.Value | None, axis: int, largest: Largest) -> Affine | None:
    """An index into an axis, counted from its start; None where it may be counted from the end."""
    if position is None or never_negative(position, largest):
        return position
    size = Affine.dim(data.shape[axis]) if data is not None and data.shape is not None else None
    return position + size if size is not None and position.constant is not None else None


def _gather_nd(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    data, indices = node.inputs
    shape = _shape_of(indices)
    if node.attributes.get_int("batch_dims", 0) or not shape or not isinstance(count := shape[-1], int):
        return None
    outer = len(shape) - 1
    positions = (reader.position(indices, (*index[:outer], Affine(i))) for i in range(count))
    at = tuple(_within(position, data, i, reader.largest) for i, position in enumerate(positions))
    return reader.read(data, (*at, *index[outer:]))


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(("Identity",), _same),
    **{name: _elementwise(name) for name in ("Add", "Mul", "Max", "Min")},
    **dict.fromkeys(("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"), _compared),
    **dict.fromkeys(("And", "Or", "Xor"), _logical),
    **dict.fromkeys(("Transpose", "Reshape", "Flatten"), _viewed),
    "Abs": _abs,
    "Cast": _cast,
    "CastLike": _cast,
    "Clip": _clip,
    "Concat": _concat,
    "CumSum": _cumsum,
    "Div": _div,
    "Expand": _expand,
    "EyeLike": _eye,
    "Floor": _floor,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Mod": _mod,
    "Neg": _neg,
    "Not": _not,
    "Range": _range_op,
    "Relu": _relu,
    "Shape": _shape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Sub": _subtraction,
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
    "Where": _where,
}
