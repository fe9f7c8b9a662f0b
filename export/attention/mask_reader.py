"""Read the value of a tensor in a mask's graph at every query and key, backwards through the operators that compute it.

A value is read at an index: for every dim, an expression of batch, head, query and key (:mod:`.affine`). So a
Transpose, Slice, Expand, Concat or Gather changes the index only, as in XLA's indexing maps, and a comparison of two
positions is a region of queries and keys. What is not recognised is unknown, which is always sound: it may be any
number, and True or False anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce

import numpy as np
import onnx_ir as ir

from attnforge.export.attention.affine import Affine, Scalar, Variable
from attnforge.export.attention.constant_values import constant_at
from attnforge.export.attention.indices import Index, broadcast, known, pieces, variables_of
from attnforge.export.attention.mask_numbers import (
    UNKNOWN,
    Arithmetic,
    Between,
    Leaf,
    Number,
    Whole,
    apply,
    bounds,
    choose,
    constant,
    where,
)
from attnforge.export.attention.moves import MOVES
from attnforge.export.attention.operands import same_value, scalar
from attnforge.export.attention.truth import ALWAYS, NEVER, Largest, Truth, at_least_zero, kind_of, unknown
from attnforge.export.graphs.nodes import input_of, is_op, maker_of, optional_input, rank_of

Known = Truth | Number
MOST_DEPTH = 150
"""Maximum depth of operators that are read."""

BOOL, INT32, INT64 = ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.INT64
WIDE = frozenset({INT32, INT64, ir.DataType.DOUBLE})
"""Types that represent every position, and what is computed from it, exactly."""

COUNTING = WIDE | {ir.DataType.FLOAT}
"""Types that represent every position exactly."""


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
        """Read `value` at an index."""
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
            return constant_at(tensor.numpy(), index, self.largest)
        node = value.producer()
        if node is None or node.domain != "" or (handler := HANDLERS.get(node.op_type)) is None:
            return None
        return handler(self, node, index)

    def truth(self, value: ir.Value | None, index: Index) -> Truth:
        known = self.read(value, index)
        return (
            known
            if isinstance(known, Truth)
            else ~self.arithmetic.equal(known, constant(0), kind_of(variables_of(index)))
        )

    def number(self, value: ir.Value | None, index: Index) -> Number:
        known = self.read(value, index)
        return choose(known, constant(1), constant(0)) if isinstance(known, Truth) else known

    def position(self, value: ir.Value | None, index: Index) -> Affine | None:
        """The integer that `value` is at an index, as an expression; None if it is not a single one."""
        number = self.number(value, index)
        return number.single if isinstance(number, Whole) else None

    def elements(self, value: ir.Value | None) -> list[Affine | None] | None:
        """The elements of a vector of known length, such as starts, axes or repeats; None for other values."""
        if value is None or value.shape is None or len(value.shape) != 1 or not isinstance(value.shape[0], int):
            return None
        return [self.position(value, (Affine(i),)) for i in range(value.shape[0])]

    def _data(self, value: ir.Value, index: Index) -> Known:
        """A value that is known only at run time: an unknown, or an atom if it is an integer that is the same for all
        queries and keys."""
        variables = variables_of(index)
        if value.dtype == BOOL:
            return unknown(kind_of(variables))
        varies = not known(index) or variables & {Variable.QUERY, Variable.KEY} or value.shape is None
        is_whole = value.dtype in (INT32, INT64)
        if not is_whole or varies:
            return Between(is_number=is_whole)
        for known_scalar in self._scalars:
            if known_scalar.index == index and same_value(known_scalar.value, value):
                return Whole((Affine.atom(known_scalar),))
        self._scalars.append(Scalar(value, index))
        return Whole((Affine.atom(self._scalars[-1]),))


Handler = Callable[[Reader, ir.Node, Index], Known | None]


# --- operators --------------------------------------------------------------------------------------------------------


def _moved(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    source = MOVES[node.op_type](reader, node, index)
    return None if source is None else reader.read(node.inputs[0], source)


def _cast(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    source, target = input_of(node), node.outputs[0].dtype
    assert source.dtype is not None
    if target is None or target == BOOL:
        return reader.truth(source, index) if target == BOOL else None
    number = reader.number(source, index)
    if target.is_integer() and source.dtype.is_floating_point():
        number = apply(lambda leaf: leaf if isinstance(leaf, Whole) else UNKNOWN, number)
    return _stored(number, target)


def _stored(number: Number, dtype: ir.DataType | None) -> Number:
    """A number as a type stores it; unknown if the type may not represent it exactly, as with large positions."""

    def leaf(leaf: Leaf) -> Leaf:
        if dtype in WIDE:
            return leaf
        is_float = dtype is not None and dtype.is_floating_point()
        if isinstance(leaf, Between):
            return _rounded(leaf, dtype) if is_float else UNKNOWN
        if not isinstance(leaf, Whole):
            return UNKNOWN
        if is_float and leaf.single is not None and leaf.single.constant is not None:
            return constant(_rounded(bounds(leaf), dtype).least)
        if dtype == ir.DataType.FLOAT:
            return leaf if all(_is_counted(option) for option in leaf.options) else UNKNOWN
        return (
            leaf
            if all(option.constant is not None and 0 <= option.number < 128 for option in leaf.options)
            else UNKNOWN
        )

    return apply(leaf, number)


def _rounded(ends: Between, dtype: ir.DataType | None) -> Between:
    """Bounds rounded to a floating-point type: rounding keeps the order of numbers."""
    assert dtype is not None
    with np.errstate(over="ignore"):
        least, most = np.array([ends.least, ends.most]).astype(dtype.numpy()).astype(np.float64)
    return Between(float(least), float(most), ends.is_number)


def _is_counted(x: Affine) -> bool:
    """Whether an expression stays below 2^24 for up to a few million tokens."""
    return not x.scalars and abs(x.number) < 2**22 and all(abs(factor) == 1 for _, factor in x.terms)


def _elementwise(op_type: str) -> Handler:
    def handler(reader: Reader, node: ir.Node, index: Index) -> Known | None:
        numbers = _operands(reader, node, index)
        return _stored(reduce(partial(reader.arithmetic.compute, op_type), numbers), node.outputs[0].dtype)

    return handler


def _operands(reader: Reader, node: ir.Node, index: Index) -> list[Number]:
    return [reader.number(x, broadcast(x, node.outputs[0], index)) for x in node.inputs]


def _div(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    a, b = _operands(reader, node, index)
    dtype = node.outputs[0].dtype
    is_float = dtype is not None and dtype.is_floating_point()
    return _stored(reader.arithmetic.compute("Ratio" if is_float else "Div", a, b), dtype)


def _mod(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    """Read a Mod of integers, whose result has the sign of the divisor."""
    if node.outputs[0].dtype not in WIDE or node.attributes.get_int("fmod") == 1:
        return None
    return _elementwise("Mod")(reader, node, index)


def _subtraction(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    if (division := _floored(node)) is not None:
        a, b = (reader.number(x, broadcast(x, node.outputs[0], index)) for x in division.inputs)
        return reader.arithmetic.floored(a, b)
    return _elementwise("Sub")(reader, node, index)


def _floored(node: ir.Node) -> ir.Node | None:
    """The integer Div that a Sub rounds down, as torch's exporter writes `//`: `a / b` minus one where
    `(a < 0) == (b > 0)` and `a % b` is not 0."""
    quotient, cast_ = (maker_of(value) for value in node.inputs)
    offset = _maker(cast_, "Cast", 0)
    signs, remainder = _maker(offset, "And", 0), _maker(_maker(offset, "And", 1), "Cast", 0)
    below, above = _maker(signs, "Equal", 0), _maker(signs, "Equal", 1)
    if not (is_op(quotient, "Div") and is_op(remainder, "Mod") and is_op(below, "Less")):
        return None
    a, b = quotient.inputs
    if a is None or a.dtype not in (INT32, INT64):
        return None
    same = same_value(remainder.inputs[0], a) and same_value(remainder.inputs[1], b) and same_value(below.inputs[0], a)
    positive = scalar(b) is not None and (scalar(b) or 0) > 0
    is_true = above is None or (above.op_type == "Greater" and scalar(above.inputs[1]) == 0)
    return quotient if same and positive and is_true and scalar(below.inputs[1]) == 0 else None


def _maker(node: ir.Node | None, op_type: str, i: int) -> ir.Node | None:
    """The node that computes input `i` of a node of this type; None for other nodes."""
    return maker_of(node.inputs[i]) if is_op(node, op_type) else None


def _floor(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    """Read a Floor of a quotient of integers, or of an integer."""
    division = maker_of(node.inputs[0])
    if is_op(division, "Div") and node.outputs[0].dtype in COUNTING:
        return reader.arithmetic.floored(*_operands(reader, division, index))
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
    arithmetic, kind = reader.arithmetic, kind_of(variables_of(index))
    if node.op_type == "Equal":
        return arithmetic.equal(left, right, kind)
    if node.op_type in ("Greater", "LessOrEqual"):
        left, right = right, left
    at_least = arithmetic.at_least(left, right, kind)
    return ~at_least if node.op_type in ("Less", "Greater") else at_least


def _logical(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    a, b = (reader.truth(x, broadcast(x, node.outputs[0], index)) for x in node.inputs)
    if node.op_type == "Xor":
        return (a & ~b) | (~a & b)
    return a & b if node.op_type == "And" else a | b


def _not(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    return ~reader.truth(node.inputs[0], index)


def _where(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    chooses, yes, no = ((x, broadcast(x, node.outputs[0], index)) for x in node.inputs)
    condition = reader.truth(*chooses)
    if condition.constant is not None:  # the other operand is not read
        return reader.read(*(yes if condition.constant else no))
    if node.outputs[0].dtype == BOOL:
        return where(condition, reader.truth(*yes), reader.truth(*no))
    return choose(condition, reader.number(*yes), reader.number(*no))


def _range_op(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    start, step = reader.position(node.inputs[0], ()), reader.position(node.inputs[2], ())
    (position,) = index
    if start is None or step is None or step.constant is None or position is None:
        return None
    return _stored(Whole((start + position * step.constant,)), node.outputs[0].dtype)


def _cumsum(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    """Read a CumSum of a number that is the same everywhere: positions, counted over a mask of ones."""
    axis, reverse = scalar(node.inputs[1]), node.attributes.get_int("reverse") == 1
    if axis is None or reverse or (position := index[int(axis)]) is None:
        return None
    dim = int(axis) % len(index)
    # A number that is constant over all queries or keys is constant over all summands; at any other position, the
    # number must be constant along the whole axis.
    along = position if any(position == Affine.atom(variable) for variable in (Variable.QUERY, Variable.KEY)) else None
    step = reader.number(node.inputs[0], (*index[:dim], along, *index[dim + 1 :]))
    if not isinstance(step, Whole) or step.single is None or step.single.constant is None:
        return None
    count = position + (0 if node.attributes.get_int("exclusive") == 1 else 1)
    return _stored(Whole((count * step.single.constant,)), node.outputs[0].dtype)


def _shape(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    source, (position,) = node.inputs[0], index
    if source is None or source.shape is None or position is None or position.constant is None:
        return None
    dims = list(source.shape)[node.attributes.get_int("start", 0) : node.attributes.get_int("end", None)]
    return Whole((Affine.dim(dims[position.constant]),)) if position.constant < len(dims) else None


def _trilu(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    k = optional_input(node, 1)
    offset = Affine() if k is None else reader.position(k, (Affine(),) * rank_of(k))
    row, column = index[-2:]
    if offset is None or row is None or column is None:
        return None
    above = column - row - offset  # the upper part has the columns from row + offset on
    kept = at_least_zero(above if node.attributes.get_int("upper", 1) else -above, reader.largest)
    if node.outputs[0].dtype == BOOL:
        return kept & reader.truth(node.inputs[0], index)
    return choose(kept, reader.number(node.inputs[0], index), constant(0))


def _eye(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    row, column = index
    if row is None or column is None:
        return None
    x = column - row - node.attributes.get_int("k", 0)
    diagonal = at_least_zero(x, reader.largest) & at_least_zero(-x, reader.largest)
    return diagonal if node.outputs[0].dtype == BOOL else choose(diagonal, constant(1), constant(0))


def _concat(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    axis = node.attributes["axis"].as_int() % len(index)
    parts = pieces(list(node.inputs), index[axis], axis)
    if parts is None:
        return None
    result: Known | None = None
    for part, position, size in reversed(parts):
        if at_least_zero(position, reader.largest).constant is False:
            continue  # it lies in an earlier part
        source = (*index[:axis], position, *index[axis + 1 :])
        inside = ALWAYS if result is None else at_least_zero(size - position - 1, reader.largest)
        if inside.constant is not False:
            known_part = reader.read(part, source)
            result = known_part if result is None else _either(inside, known_part, result)
    return result


def _either(condition: Truth, yes: Known, no: Known) -> Known | None:
    """`yes` where a condition is True, else `no`; None if their types differ."""
    if isinstance(yes, Truth) and isinstance(no, Truth):
        return where(condition, yes, no)
    return None if isinstance(yes, Truth) or isinstance(no, Truth) else choose(condition, yes, no)


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(MOVES, _moved),
    **{name: _elementwise(name) for name in ("Add", "Mul", "Max", "Min")},
    **dict.fromkeys(("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"), _compared),
    **dict.fromkeys(("And", "Or", "Xor"), _logical),
    "Abs": _abs,
    "Cast": _cast,
    "CastLike": _cast,
    "Clip": _clip,
    "Concat": _concat,
    "CumSum": _cumsum,
    "Div": _div,
    "EyeLike": _eye,
    "Floor": _floor,
    "Mod": _mod,
    "Neg": _neg,
    "Not": _not,
    "Range": _range_op,
    "Relu": _relu,
    "Shape": _shape,
    "Sub": _subtraction,
    "Trilu": _trilu,
    "Where": _where,
}
