"""Index maps of operators that move numbers without changing them: the index that is read for an output's index.

An index has, for every dim, an integer over the scores (:mod:`.scores`), as XLA's indexing maps
(https://openxla.org/xla/indexing); a position that is not known is an opaque one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import accumulate
from operator import mul
from typing import Protocol

import islpy as isl
import onnx_ir as ir

from attnforge.export.graphs.build import dims_of
from attnforge.export.graphs.nodes import input_of, optional_input, rank_of
from attnforge.export.graphs.sizes import ONE, Size, product, sizes_of
from attnforge.export.masks.affine import Affine, Variable
from attnforge.export.masks.scores import Scores, Whole

Index = tuple[Whole, ...]


class Positions(Protocol):
    """Reads integers of a graph over the scores of a site."""

    scores: Scores

    def position(self, value: ir.Value | None, index: Index) -> Whole | None: ...

    def elements(self, value: ir.Value | None) -> list[Whole | None] | None: ...


def size_of(scores: Scores, dim: int | ir.SymbolicDim) -> Whole:
    return scores.whole(Affine.dim(dim))


def variables_of(scores: Scores, index: Index) -> frozenset[Variable]:
    """The indices of a score that an index depends on."""
    return frozenset[Variable]().union(*(scores.variables(position) for position in index))


def broadcast(scores: Scores, value: ir.Value | None, output: ir.Value, index: Index) -> Index:
    """The index of an operand that is broadcast to `output`."""
    if value is None or value.shape is None or output.shape is None or len(value.shape) > len(index):
        return tuple(scores.unknown_position() for _ in range(rank_of(value)))
    return aligned(scores, sizes_of(value), sizes_of(output), index)


def aligned(scores: Scores, have: Sequence[Size], want: Sequence[Size], index: Index) -> Index:
    """The index of a tensor with sizes `have` that is broadcast to `want`, of which `index` is an index."""
    first = len(index) - len(have)
    return tuple(  # a dynamic dim of another size may be 1 at run time
        scores.constant(0) if size == ONE else position if size == full else scores.unknown_position()
        for size, full, position in zip(have, want[first:], index[first:], strict=True)
    )


def _viewed(reader: Positions, node: ir.Node, index: Index) -> Index | None:
    """The input index of a Transpose, Reshape or Flatten."""
    if node.op_type == "Transpose":
        perm = list(node.attributes.get_ints("perm") or range(len(index))[::-1])
        return tuple(index[perm.index(i)] for i in range(len(index)))
    scores = reader.scores
    have, want = sizes_of(input_of(node)), sizes_of(node.outputs[0])
    source = [scores.constant(0) if size == ONE else scores.unknown_position() for size in have]
    for ins, outs in _groups(have, want):
        inner, outer = (_strides([sizes[i] for i in dims]) for sizes, dims in ((have, ins), (want, outs)))
        if inner is None or outer is None:
            continue
        terms = (index[i].scale_val(scores.value(stride)) for i, stride in zip(outs, outer, strict=True))
        joined = reduce(isl.PwAff.add, terms)
        for i, stride in zip(ins, inner, strict=True):
            position = scores.divided(joined, stride) if stride > 1 else joined
            source[i] = position if i == ins[0] else position.mod_val(scores.value(have[i].factor))
    return tuple(source)


def _groups(have: Sequence[Size], want: Sequence[Size]) -> Iterator[tuple[list[int], list[int]]]:
    """The fewest consecutive dims before and after a reshape that have the same product, as far as that is known."""
    inputs = [i for i, size in enumerate(have) if size != ONE]
    outputs = [i for i, size in enumerate(want) if size != ONE]
    while inputs and outputs:
        ins, outs = [inputs.pop(0)], [outputs.pop(0)]
        while (a := product(have[i] for i in ins)) != (b := product(want[i] for i in outs)):
            if inputs and b.divide(a) is not None:
                ins.append(inputs.pop(0))
            elif outputs and a.divide(b) is not None:
                outs.append(outputs.pop(0))
            else:
                return
        yield ins, outs


def _strides(sizes: Sequence[Size]) -> list[int] | None:
    """The strides of dims that are flattened into one; None if an inner size is dynamic."""
    if not all(size.is_static for size in sizes[1:]):
        return None
    return list(accumulate((size.factor for size in reversed(sizes[1:])), mul, initial=1))[::-1]


def _expand(reader: Positions, node: ir.Node, index: Index) -> Index | None:
    dims, sizes = dims_of(input_of(node)), reader.elements(node.inputs[1])
    by_shapes = broadcast(reader.scores, input_of(node), node.outputs[0], index)
    if sizes is None or not dims:
        return by_shapes
    count = len(dims)  # the sizes may be known where the output's shape is not
    wanted = zip(dims, sizes[-count:], index[-count:], by_shapes, strict=True)
    closed = reader.scores.closed
    return tuple(
        position if dim != 1 and closed(size) in (Affine(1), Affine.dim(dim)) else other
        for dim, size, position, other in wanted
    )


def _tile(reader: Positions, node: ir.Node, index: Index) -> Index | None:
    source, result, scores = input_of(node), node.outputs[0], reader.scores
    wanted = zip(sizes_of(source), sizes_of(result), index, broadcast(scores, source, result, index), strict=True)
    return tuple(
        position.mod_val(scores.value(size.factor)) if size.is_static and size not in (ONE, whole) else other
        for size, whole, position, other in wanted
    )


def _axes(reader: Positions, value: ir.Value | None, rank: int) -> set[int] | None:
    """The axes that a constant input names."""
    numbers = [reader.scores.closed(axis) for axis in reader.elements(value) or [None]]
    return None if None in numbers else {number.number % rank for number in numbers if number is not None}


def _unsqueeze(reader: Positions, node: ir.Node, index: Index) -> Index | None:
    new = _axes(reader, node.inputs[1], len(index))
    return None if new is None else tuple(position for i, position in enumerate(index) if i not in new)


def _squeeze(reader: Positions, node: ir.Node, index: Index) -> Index | None:
    rank, rest = rank_of(node.inputs[0]), iter(index)
    old = _axes(reader, node.inputs[1], rank) if rank and len(node.inputs) > 1 else None
    if old is None or len(old) != rank - len(index):
        return _viewed(reader, node, index)
    return tuple(reader.scores.constant(0) if i in old else next(rest) for i in range(rank))


def _slice(reader: Positions, node: ir.Node, index: Index) -> Index | None:
    dims, scores = dims_of(input_of(node)), reader.scores
    inputs = [optional_input(node, i) for i in (1, 3, 4)]
    starts, axes, steps = (reader.elements(value) for value in inputs)
    unread = any(v is not None and numbers is None for v, numbers in zip(inputs, (starts, axes, steps), strict=True))
    if starts is None or unread:
        return None
    result = list(index)
    for i, first in enumerate(starts):
        axis = Affine(i) if axes is None else scores.closed(axes[i])
        step = Affine(1) if steps is None else scores.closed(steps[i])
        if axis is None:
            return None
        axis_, by = axis.number % len(index), None if step is None else step.constant
        if first is None or by is None:
            result[axis_] = scores.unknown_position()
            continue
        zero, size = scores.constant(0), size_of(scores, dims[axis_])
        first = from_start(scores, first, size).max(zero).min(size if by > 0 else size.sub(scores.constant(1)))
        result[axis_] = result[axis_].scale_val(scores.value(by)).add(first)
    return tuple(result)


def from_start(scores: Scores, position: Whole, size: Whole) -> Whole:
    """An index into an axis, counted from its start; if it is negative, it is given from the end."""
    negative = position.lt_set(scores.constant(0))
    if scores.is_never(negative):
        return position
    kept = position.intersect_domain(negative.complement())
    return kept.union_add(position.add(size).intersect_domain(negative)).gist(scores.universe)


def _gather(reader: Positions, node: ir.Node, index: Index) -> Index | None:
    data, indices = input_of(node), input_of(node, 1)
    rank, axis = rank_of(indices), node.attributes.get_int("axis", 0) % rank_of(data)
    position = reader.position(indices, index[axis : axis + rank])
    return (*index[:axis], _picked(reader.scores, position, data, axis), *index[axis + rank :])


def _gather_nd(reader: Positions, node: ir.Node, index: Index) -> Index | None:
    data, indices = input_of(node), input_of(node, 1)
    outer = rank_of(indices) - 1
    count = indices.shape[outer] if indices.shape is not None and outer >= 0 else None
    if node.attributes.get_int("batch_dims") or not isinstance(count, int):
        return None
    scores = reader.scores
    positions = [reader.position(indices, (*index[:outer], scores.constant(i))) for i in range(count)]
    return (*(_picked(scores, position, data, i) for i, position in enumerate(positions)), *index[outer:])


def _picked(scores: Scores, position: Whole | None, data: ir.Value, axis: int) -> Whole:
    if position is None:
        return scores.unknown_position()
    return from_start(scores, position, size_of(scores, dims_of(data)[axis]))


def pieces(scores: Scores, node: ir.Node, index: Index) -> Iterator[tuple[ir.Value, Index, Whole, Whole]]:
    """Yield the parts of a Concat that an index may lie in, from the last, each with the index into it, the position
    along the axis of the Concat, and the part's size: the index lies in this part or an earlier one if the position is
    less. Yield none if a shape is not known."""
    axis = node.attributes["axis"].as_int() % len(index)
    position, parts = index[axis], list[tuple[ir.Value, Whole, Whole]]()
    for part in node.inputs:
        if part is None or part.shape is None:
            return
        parts.append((part, position, size := size_of(scores, part.shape[axis])))
        position = position.sub(size)
    is_last = True
    for part, position, size in reversed(parts):
        is_here = is_last or not scores.is_never(position.lt_set(size))
        if is_here and not scores.is_never(position.ge_set(scores.constant(0))):
            yield part, (*index[:axis], position, *index[axis + 1 :]), position, size
            is_last = False


MOVES: dict[str, Callable[[Positions, ir.Node, Index], Index | None]] = {
    "Expand": _expand,
    **dict.fromkeys(("Flatten", "Reshape", "Transpose"), _viewed),
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Identity": lambda reader, node, index: index,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "Unsqueeze": _unsqueeze,
}
"""By operator, a function that gives the index at which it reads its first input; None if that is not known. The shapes
of that input and of the result are known."""
