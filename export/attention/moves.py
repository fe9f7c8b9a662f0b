"""Index maps of operators that move numbers without changing them: the input index for an output index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import onnx_ir as ir

from attnforge.export.attention.affine import Affine, never_negative
from attnforge.export.attention.indices import START, Elements, Index, broadcast, known, reshaped, sliced
from attnforge.export.attention.truth import Largest
from attnforge.export.graphs.nodes import optional_input, rank_of


class Positions(Protocol):
    """Reads integers of a graph as expressions of indices."""

    largest: Largest

    def position(self, value: ir.Value | None, index: Index) -> Affine | None: ...

    def elements(self, value: ir.Value | None) -> Elements | None: ...


def _same(reader: Positions, node: ir.Node, index: Index) -> Index | None:
    return index


def _viewed(reader: Positions, node: ir.Node, index: Index) -> Index | None:
    return reshaped(node, index)


def _expand(reader: Positions, node: ir.Node, index: Index) -> Index | None:
    source, sizes = node.inputs[0], reader.elements(node.inputs[1])
    by_shapes = broadcast(source, node.outputs[0], index)
    if sizes is None or source is None or source.shape is None:
        return by_shapes
    count = len(source.shape)  # the sizes may be known where the output's shape is not
    wanted = zip(source.shape, sizes[-count:], index[-count:], by_shapes, strict=True) if count else ()
    return tuple(
        position if dim != 1 and size in (Affine(1), Affine.dim(dim)) else other
        for dim, size, position, other in wanted
    )


def _unsqueeze(reader: Positions, node: ir.Node, index: Index) -> Index | None:
    axes = reader.elements(node.inputs[1])
    if axes is None or not known(tuple(axes)):
        return None
    new = {axis.number % len(index) for axis in axes if axis is not None}
    return tuple(position for i, position in enumerate(index) if i not in new)


def _squeeze(reader: Positions, node: ir.Node, index: Index) -> Index | None:
    axes = reader.elements(node.inputs[1]) if len(node.inputs) > 1 else None
    if axes is None or not known(tuple(axes)):
        return reshaped(node, index)
    rank, rest = len(index) + len(axes), iter(index)
    old = {axis.number % rank for axis in axes if axis is not None}
    return tuple(START if i in old else next(rest) for i in range(rank))


def _slice(reader: Positions, node: ir.Node, index: Index) -> Index | None:
    inputs = [optional_input(node, i) for i in (1, 3, 4)]
    starts, axes, steps = (reader.elements(value) for value in inputs)
    if any(value is not None and numbers is None for value, numbers in zip(inputs, (starts, axes, steps), strict=True)):
        return None
    return sliced(node.inputs[0], index, starts, axes, steps)


def _gather(reader: Positions, node: ir.Node, index: Index) -> Index | None:
    data, indices = node.inputs
    rank, axis = rank_of(indices), node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    axis += rank_of(data) if axis < 0 else 0
    position = _from_start(reader, reader.position(indices, index[axis : axis + rank]), data, axis)
    return (*index[:axis], position, *index[axis + rank :])


def _gather_nd(reader: Positions, node: ir.Node, index: Index) -> Index | None:
    data, indices = node.inputs
    outer = rank_of(indices) - 1
    count = indices.shape[outer] if indices is not None and indices.shape is not None and outer >= 0 else None
    if node.attributes.get_int("batch_dims") or not isinstance(count, int):
        return None
    positions = (reader.position(indices, (*index[:outer], Affine(i))) for i in range(count))
    return (*(_from_start(reader, position, data, i) for i, position in enumerate(positions)), *index[outer:])


def _from_start(reader: Positions, position: Affine | None, data: ir.Value | None, axis: int) -> Affine | None:
    """An index into an axis, counted from its start; None if it may be counted from the end."""
    if position is None or never_negative(position, reader.largest):
        return position
    if position.constant is None or data is None or data.shape is None:
        return None
    return position + Affine.dim(data.shape[axis])


MOVES: dict[str, Callable[[Positions, ir.Node, Index], Index | None]] = {
    "Expand": _expand,
    "Flatten": _viewed,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Identity": _same,
    "Reshape": _viewed,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Transpose": _viewed,
    "Unsqueeze": _unsqueeze,
}
"""By operator, a function that gives the index at which it reads its first input; None if that is not known."""
