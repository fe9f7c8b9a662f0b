"""Read the value of a tensor in a mask's graph at every query and key, backwards through the operators that compute it.

A value is read at an index (:mod:`.indices`), so a Transpose, Slice, Expand, Concat or Gather changes the index only,
and a comparison of two positions is a set of queries and keys. What is not recognised is opaque, which is always sound:
it may be any number, and True or False anywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, Generic, TypeVar

import islpy as isl
import onnx_ir as ir

from attnforge.export.attention.operands import same_value, scalar
from attnforge.export.graphs.nodes import input_of, is_op, maker_of, optional_input, rank_of
from attnforge.export.masks.affine import Affine, Scalar, Variable
from attnforge.export.masks.constants import constant_at
from attnforge.export.masks.indices import MOVES, Index, broadcast, pieces, size_of, variables_of
from attnforge.export.masks.numbers import EXACT, INTEGERS, UNKNOWN, Arithmetic, Number
from attnforge.export.masks.scores import Scores, Whole

Known = isl.Set | Number
MOST_DEPTH = 150
"""Maximum depth of operators that are read."""

MOST_READS = 5_000
"""Maximum number of values that are read."""

BOOL = ir.DataType.BOOL


class Reader:
    """Reads values over the scores of a site.

    All methods raise isl.Error if the graph is too large to read (:mod:`.scores`).
    """

    def __init__(self, n_q: Affine, n_k: Affine) -> None:
        self.scores = Scores(n_q, n_k)
        self.arithmetic = Arithmetic(self.scores)
        self._read: dict[tuple[ir.Value, Index], Known] = {}
        self._scalars: list[tuple[ir.Value, Index, Whole]] = []
        self._depth, self._tries = 0, 3

    def read(self, value: ir.Value | None, index: Index) -> Known:
        """Read `value` at an index."""
        assert value is not None
        if (known := self._read.get((value, index))) is not None:  # isl may normalise an index later, and its hash
            return known
        if len(self._read) > MOST_READS:
            raise isl.Error("the graph of the mask is too large")
        self._depth += 1
        try:
            known = self._uncached(value, index) if self._depth <= MOST_DEPTH else None
        except isl.Error:  # opaque, unless others were
            if not self._tries:
                raise
            self._tries -= 1
            self.scores.context.reset_operations()
            known = None
        finally:
            self._depth -= 1
        if isinstance(known, isl.Set):
            known = self.scores.simplified(known)
        known = self._data(value, index) if known is None else known
        self._read[value, index] = known
        return known

    def _uncached(self, value: ir.Value, index: Index) -> Known | None:
        if value.shape is None or len(value.shape) != len(index):
            return None
        if (number := scalar(value)) is not None:
            if value.dtype == BOOL:
                return self.scores.always if number else self.scores.never
            return self.arithmetic.constant(number)
        if (tensor := ir.convenience.get_const_tensor(value)) is not None:
            return constant_at(self.arithmetic, tensor.numpy(), index)
        node = value.producer()
        if node is None or node.domain != "" or (handler := HANDLERS.get(node.op_type)) is None:
            return None
        return handler(self, node, index)

    def truth(self, value: ir.Value | None, index: Index) -> isl.Set:
        known = self.read(value, index)
        if isinstance(known, isl.Set):
            return known
        return self.arithmetic.is_true(known, variables_of(self.scores, index))

    def number(self, value: ir.Value | None, index: Index) -> Number:
        known = self.read(value, index)
        return self.number_of(known) if isinstance(known, isl.Set) else known

    def number_of(self, condition: isl.Set) -> Number:
        """1 where a condition is True, else 0."""
        return self.arithmetic.choose(condition, self.arithmetic.constant(1), self.arithmetic.constant(0))

    def position(self, value: ir.Value | None, index: Index) -> Whole | None:
        """The integer that `value` is at an index; None if it is not known to be one."""
        number = self.number(value, index)
        return None if number.rest else number.whole

    def elements(self, value: ir.Value | None) -> list[Whole | None] | None:
        """The elements of a vector of known length, such as starts, axes or repeats; None for other values."""
        if value is None or value.shape is None or len(value.shape) != 1 or not isinstance(value.shape[0], int):
            return None
        return [self.position(value, (self.scores.constant(i),)) for i in range(value.shape[0])]

    def operands(self, node: ir.Node, index: Index) -> list[tuple[ir.Value | None, Index]]:
        """The inputs of an elementwise operator, with the index of each."""
        return [(value, broadcast(self.scores, value, node.outputs[0], index)) for value in node.inputs]

    def _data(self, value: ir.Value, index: Index) -> Known:
        """A value that is known only at run time: an integer that is the same for all scores by its name, others as
        what is opaque."""
        variables = variables_of(self.scores, index) if value.shape is not None else frozenset(Variable)
        if value.dtype == BOOL:
            return self.scores.unknown_condition(variables)
        if value.dtype not in INTEGERS:
            return self.arithmetic.between(UNKNOWN)
        at = [self.scores.closed(position) for position in index]
        numbers = [position.constant for position in at if position is not None]
        if variables or len(numbers) < len(index) or None in numbers:
            return Number(self.scores.unknown(variables))
        for other, place, known in self._scalars:
            if place == index and same_value(other, value):
                return Number(known)
        scalar_ = Scalar(value, tuple(number for number in numbers if number is not None))
        self._scalars.append((value, index, self.scores.whole(Affine.atom(scalar_))))
        return Number(self._scalars[-1][2])

    def either(self, x: Whole, yes: Known, no: Known | None) -> Known | None:
        """`yes` where `x` is at least 0, else `no`, which is False or 0 by default."""
        if no is None:
            no = self.scores.never if isinstance(yes, isl.Set) else self.arithmetic.constant(0)
        return _either(self, x.ge_set(self.scores.constant(0)), yes, no)


Result = TypeVar("Result")


class Interpreter(ABC, Generic[Result]):
    """Reads values as something other than a :class:`Reader` does, at the same indices and under the same conditions.
    The functions of :data:`HANDLERS` take it like a reader.

    Attributes:
        refusal: the error that is raised for what cannot be read.
    """

    refusal: type[Exception]

    def __init__(self, reader: Reader) -> None:
        self.reader, self.scores = reader, reader.scores
        self.truth, self.operands = reader.truth, reader.operands
        self.position, self.elements = reader.position, reader.elements
        self.number = self.read
        self._results: dict[tuple[ir.Value, Index], Result] = {}
        self._depth = 0

    def read(self, value: ir.Value | None, index: Index) -> Result:
        """Read `value` at an index."""
        assert value is not None
        if (result := self._results.get((value, index))) is None:  # isl may normalise an index later, and its hash
            if value.shape is None or len(value.shape) != len(index) or value.dtype is None:
                raise self.refusal(f"the shape of {value.name!r} is not known")
            if self._depth >= MOST_DEPTH:
                raise self.refusal(f"{value.name!r} is computed by a chain of too many operators")
            self._depth += 1
            self._results[value, index] = result = self._uncached(value, index)
            self._depth -= 1
        return result

    @abstractmethod
    def _uncached(self, value: ir.Value, index: Index) -> Result:
        """Read `value`, whose shape and type are known, at an index."""

    def _handled(self, node: ir.Node, index: Index) -> Result:
        """Read the result of a node by its function of :data:`HANDLERS`."""
        handler: Callable[[Any, ir.Node, Index], Result | None] = HANDLERS[node.op_type]  # type: ignore[assignment]
        if (result := handler(self, node, index)) is None:
            raise self.refusal(f"where {node.op_type} reads the numbers of {node.outputs[0].name!r} is not known")
        return result


Handler = Callable[[Reader, ir.Node, Index], Known | None]


# --- operators --------------------------------------------------------------------------------------------------------


def _moved(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    source = MOVES[node.op_type](reader, node, index) if input_of(node).shape is not None else None
    return None if source is None else reader.read(node.inputs[0], source)


def _cast(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    source, target = input_of(node), node.outputs[0].dtype
    if target is None or source.dtype is None or target == BOOL:
        return reader.truth(source, index) if target == BOOL else None
    number = reader.number(source, index)
    if target.is_integer() and source.dtype.is_floating_point():
        number = reader.arithmetic.truncated(number)
    return reader.arithmetic.stored(number, target, was_integer=source.dtype in INTEGERS)


def _numbers(reader: Reader, node: ir.Node, index: Index) -> list[Number]:
    return [reader.number(*operand) for operand in reader.operands(node, index)]


def _elementwise(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    """Read arithmetic of two or more operands; a Mod only of integers, whose result has the sign of the divisor."""
    op_type, dtype = node.op_type, node.outputs[0].dtype
    if op_type == "Mod" and (dtype not in EXACT or node.attributes.get_int("fmod", 0) == 1):
        return None
    if op_type == "Div" and dtype is not None and dtype.is_floating_point():
        op_type = "Ratio"
    result = reduce(partial(reader.arithmetic.compute, op_type), _numbers(reader, node, index))
    return reader.arithmetic.stored(result, dtype)


def _floor(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    """Read a Floor of a quotient of integers, or of an integer."""
    division = maker_of(node.inputs[0])
    if is_op(division, "Div") and node.outputs[0].dtype in EXACT | {ir.DataType.FLOAT}:
        return reader.arithmetic.compute("Floored", *_numbers(reader, division, index))
    return reader.arithmetic.truncated(reader.number(node.inputs[0], index))


def _signed(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    """Read a Neg, an Abs or a Relu."""
    number, other = reader.number(node.inputs[0], index), reader.arithmetic.constant(0)
    if node.op_type != "Relu":
        other = reader.arithmetic.compute("Sub", other, number)
    return other if node.op_type == "Neg" else reader.arithmetic.compute("Max", number, other)


def _clip(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    number = reader.number(node.inputs[0], index)
    for op_type, end in zip(("Max", "Min"), node.inputs[1:], strict=False):
        if end is not None:
            number = reader.arithmetic.compute(op_type, number, reader.number(end, ()))
    return number


def _compared(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    a, b = reader.operands(node, index)
    if node.op_type == "Equal" and a[0] is not None and a[0].dtype == BOOL:
        return _exclusive(reader, reader.truth(*a), reader.scores.opposite(reader.truth(*b)))
    left, right = reader.number(*a), reader.number(*b)
    arithmetic, variables = reader.arithmetic, variables_of(reader.scores, index)
    if node.op_type == "Equal":
        return arithmetic.compare("Equal", left, right, variables)
    if node.op_type in ("Greater", "LessOrEqual"):
        left, right = right, left
    at_least = arithmetic.compare("GreaterOrEqual", left, right, variables)
    return reader.scores.opposite(at_least) if node.op_type in ("Less", "Greater") else at_least


def _exclusive(reader: Reader, a: isl.Set, b: isl.Set) -> isl.Set:
    return a.subtract(b).union(b.subtract(a)).coalesce()


def _logical(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    a, b = (reader.truth(*operand) for operand in reader.operands(node, index))
    if node.op_type == "Xor":
        return _exclusive(reader, a, b)
    return (a.intersect(b) if node.op_type == "And" else a.union(b)).coalesce()


def _where(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    chooses, yes, no = reader.operands(node, index)
    condition = reader.truth(*chooses)
    for is_other, known in ((reader.scores.is_never(condition), no), (reader.scores.is_always(condition), yes)):
        if is_other:  # the other operand is not read
            return reader.read(*known)
    return _either(reader, condition, reader.read(*yes), reader.read(*no))


def _either(reader: Reader, condition: isl.Set, yes: Known, no: Known) -> Known | None:
    """`yes` where a condition is True, else `no`."""
    if isinstance(yes, isl.Set) and isinstance(no, isl.Set):
        return yes.intersect(condition).union(no.subtract(condition)).coalesce()
    if isinstance(yes, isl.Set) or isinstance(no, isl.Set):
        return None
    return reader.arithmetic.choose(condition, yes, no)


def _range_op(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    first, step = reader.position(node.inputs[0], ()), reader.number(node.inputs[2], ())
    if first is None:
        return None
    number = reader.arithmetic.compute("Add", Number(first), reader.arithmetic.compute("Mul", Number(index[0]), step))
    return reader.arithmetic.stored(number, node.outputs[0].dtype)


def _cumsum(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    """Read a CumSum of a number that is the same everywhere: positions, counted over a mask of ones."""
    axis, reverse = scalar(node.inputs[1]), node.attributes.get_int("reverse", 0) == 1
    shape = input_of(node).shape
    if axis is None or reverse or shape is None:
        return None
    dim = int(axis) % len(index)
    anywhere = reader.scores.unknown_position()
    number = reader.position(node.inputs[0], (*index[:dim], anywhere, *index[dim + 1 :]))
    inside = anywhere.lt_set(size_of(reader.scores, shape[dim]))  # which may be empty, so that is no assumption
    step = reader.scores.closed(None if number is None else number.intersect_domain(inside))
    if step is None or step.constant is None:
        return None
    count = index[dim].add(reader.scores.constant(0 if node.attributes.get_int("exclusive", 0) == 1 else 1))
    return reader.arithmetic.stored(Number(count.scale_val(reader.scores.value(step.number))), node.outputs[0].dtype)


def _shape(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    source, position = node.inputs[0], reader.scores.closed(index[0])
    if source is None or source.shape is None or position is None or position.constant is None:
        return None
    dims = list(source.shape)[node.attributes.get_int("start", 0) : node.attributes.get_int("end", None)]
    return Number(size_of(reader.scores, dims[position.number])) if position.number < len(dims) else None


def _trilu(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    k, scores = optional_input(node, 1), reader.scores
    offset = scores.constant(0) if k is None else reader.position(k, (scores.constant(0),) * rank_of(k))
    if offset is None:
        return None
    above = index[-1].sub(index[-2]).sub(offset)  # the upper part has the columns from row + offset on
    kept = above if node.attributes.get_int("upper", 1) else above.neg()
    return reader.either(kept, reader.read(node.inputs[0], index), None)


def _eye(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    row, column = index
    diagonal = column.eq_set(row.add(reader.scores.constant(node.attributes.get_int("k", 0))))
    return diagonal if node.outputs[0].dtype == BOOL else reader.number_of(diagonal)


def _concat(reader: Reader, node: ir.Node, index: Index) -> Known | None:
    result: Known | None = None
    for part, inner, position, size in pieces(reader.scores, node, index):
        known = reader.read(part, inner)
        before_end = size.sub(position).sub(reader.scores.constant(1))
        result = known if result is None else reader.either(before_end, known, result)
    return result


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(MOVES, _moved),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Mod", "Max", "Min"), _elementwise),
    **dict.fromkeys(("Neg", "Abs", "Relu"), _signed),
    **dict.fromkeys(("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"), _compared),
    **dict.fromkeys(("And", "Or", "Xor"), _logical),
    **dict.fromkeys(("Cast", "CastLike"), _cast),
    "Clip": _clip,
    "Concat": _concat,
    "CumSum": _cumsum,
    "EyeLike": _eye,
    "Floor": _floor,
    "Not": lambda reader, node, index: reader.scores.opposite(reader.truth(node.inputs[0], index)),
    "Range": _range_op,
    "Shape": _shape,
    "Trilu": _trilu,
    "Where": _where,
}
