"""Index maps of operators that move numbers: the input index that is read for an output index.

An index has, for every dim, an expression of batch, head, query and key (:mod:`.affine`), or None if that is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import onnx_ir as ir

from attnforge.export.attention.affine import ZERO, Affine, Variable, never_negative
from attnforge.export.attention.layout import ONE, LayoutError, Size, product, sizes_of

Index = tuple[Affine | None, ...]
START = ZERO


def known(index: Index) -> bool:
    return all(position is not None for position in index)


def variables_of(index: Index) -> frozenset[Variable]:
    """The variables that an index depends on; all of them if that is not known."""
    if not known(index):
        return frozenset(Variable)
    return frozenset(variable for position in index if position is not None for variable in position.variables)


def broadcast(value: ir.Value | None, output: ir.Value, index: Index) -> Index:
    """The index of an operand that is broadcast to `output`."""
    if value is None or value.shape is None or output.shape is None or len(value.shape) > len(index):
        return (None,) * (len(value.shape) if value is not None and value.shape is not None else 0)
    have, want = sizes_of(value), sizes_of(output)[len(index) - len(value.shape) :]
    # A dynamic dim of another size may be 1 at run time.
    return tuple(
        START if size == ONE else position if size == full else None
        for size, full, position in zip(have, want, index[len(index) - len(have) :], strict=True)
    )


def reshaped(node: ir.Node, index: Index) -> Index | None:
    """The input index of a Transpose, Squeeze, Reshape or Flatten."""
    source = node.inputs[0]
    if source is None or source.shape is None or node.outputs[0].shape is None:
        return None
    if node.op_type == "Transpose":
        perm = node.attributes.get_ints("perm") or list(range(len(index)))[::-1]
        return tuple(index[list(perm).index(i)] for i in range(len(index)))
    try:
        return _regrouped(sizes_of(source), sizes_of(node.outputs[0]), index)
    except LayoutError:
        return None


def _regrouped(have: Sequence[Size], want: Sequence[Size], index: Index) -> Index:
    """The index before a reshape from sizes `have` to `want`: dims may stay, be joined or be split."""
    source: list[Affine | None] = [START if size == ONE else None for size in have]
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
                return tuple(source)
        if len(ins) > 1 and len(outs) > 1:
            continue
        joined = _joined([want[i] for i in outs], [index[i] for i in outs])
        for i, position in zip(ins, _split([have[i] for i in ins], joined), strict=True):
            source[i] = position
    return tuple(source)


def _strides(sizes: Sequence[Size]) -> list[int] | None:
    """The strides of dims that are flattened into one; None if an inner size is dynamic."""
    if not all(size.is_static for size in sizes[1:]):
        return None
    return list(accumulate((size.factor for size in reversed(sizes[1:])), lambda a, b: a * b, initial=1))[::-1]


def _joined(sizes: Sequence[Size], index: Sequence[Affine | None]) -> Affine | None:
    """The index into several dims flattened into one."""
    strides = _strides(sizes)
    if len(index) == 1 or strides is None:
        return index[0] if len(index) == 1 else None
    terms = [None if position is None else position * n for position, n in zip(index, strides, strict=True)]
    return None if None in terms else sum((term for term in terms if term is not None), ZERO)


def _split(sizes: Sequence[Size], position: Affine | None) -> list[Affine | None]:
    """The indices into the dims that one dim is split into."""
    strides = _strides(sizes)
    if len(sizes) == 1:
        return [position]
    if position is None or strides is None:
        return [None] * len(sizes)
    first, *others = [position.floor_divided(stride) if stride > 1 else position for stride in strides]
    return [first, *(part.remainder(size.factor) for part, size in zip(others, sizes[1:], strict=True))]


Elements = Sequence[Affine | None]


def sliced(
    source: ir.Value | None, index: Index, starts: Elements | None, axes: Elements | None, steps: Elements | None
) -> Index | None:
    """The input index of a Slice; None if an axis is not known.

    Args:
        starts, axes, steps: elements of the node's inputs; by default the leading axes, and steps of 1.
    """
    if source is None or source.shape is None or starts is None:
        return None
    result = list(index)
    for i, start in enumerate(starts):
        axis, step = _number(axes, i, i), _number(steps, i, 1)
        if axis is None:
            return None
        axis += len(index) if axis < 0 else 0
        first = None if step is None else _start(start, source.shape[axis], step)
        position = result[axis]
        result[axis] = None if first is None or step is None or position is None else first + position * step
    return tuple(result)


def _number(elements: Elements | None, i: int, default: int) -> int | None:
    if elements is None:
        return default
    element = elements[i]
    return None if element is None else element.constant


def _start(start: Affine | None, dim: int | ir.SymbolicDim, step: int) -> Affine | None:
    """The start of a Slice, counted from the start of an axis and clamped to its end; None if that is not known."""
    if start is None:
        return None
    size, number = Affine.dim(dim), start.constant
    last = size if step > 0 else size - 1
    if number is not None and number < 0:
        start = size + number
        if not never_negative(start):  # it would be clamped to 0 in a shorter axis
            return None
    if start.scalars or not never_negative(start):
        return None
    if never_negative(start - last):
        return last
    # A start beyond the end gives an empty slice, unless the step is negative.
    return start if step > 0 or never_negative(last - start) else None


Piece = tuple[ir.Value | None, Affine, Affine]
"""A part of a Concat, the index into its axis, and its size along that axis."""


def pieces(parts: Sequence[ir.Value | None], position: Affine | None, axis: int) -> list[Piece] | None:
    """The parts of a Concat, each with what the position is in that part, if it lies there."""
    if position is None:
        return None
    result: list[Piece] = []
    for part in parts:
        if part is None or part.shape is None:
            return None
        size = Affine.dim(part.shape[axis])
        result.append((part, position, size))
        position = position - size
    return result
