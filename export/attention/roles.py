"""The roles of a graph's inputs, as far as reference inputs and a session's checks depend on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import onnx_ir as ir

from attnforge.bundle import TensorSpec
from attnforge.export.graphs.nodes import VIEWS

INDICES = (ir.DataType.INT64, ir.DataType.INT32)
"""Types of indices."""

ARITHMETIC = ("Add", "Div", "Mod", "Mul", "Sub")

SHAPE_INPUTS = {
    "ConstantOfShape": {0}, "Expand": {1}, "Pad": {1, 3}, "Range": {0, 1, 2}, "Reshape": {1}, "Resize": {1, 2, 3},
    "Slice": {1, 2, 3, 4}, "Split": {1}, "Squeeze": {1}, "Tile": {1}, "TopK": {1}, "Unsqueeze": {1},
}  # fmt: skip
"""Inputs that are sizes or axes, by operator: they may be computed from the number of tokens."""


def note_roles(graph: ir.Graph, inputs: Sequence[TensorSpec], negative: bool) -> None:
    """Set the role of every input, and let reference inputs index all rows of tables, of which an example may have few
    (token types are often all 0, and positions end at the example's length).

    Args:
        graph: a canonical graph.
        inputs: the specs of its inputs, changed in position.
        negative: whether the source's Gather counts negative indices from the end.
    """
    by_name = {value.name: value for value in graph.inputs}
    for spec in inputs:
        value = by_name[spec.name]
        assert value.dtype is not None
        if value.dtype.is_integer():
            spec.index = index_range(value, negative)
            if spec.index is not None:
                spec.low, spec.high = min(spec.low or 0, 0), spec.index[1]
            else:
                spec.role = "shape" if _decides_shapes(value) else "number" if _is_computed_with(value) else None
        elif value.dtype.is_floating_point():
            spec.role = "scores" if _is_added_to_scores(value) else None


def index_range(value: ir.Value, negative: bool = False) -> tuple[int, int] | None:
    """The least and the largest index of the smallest table that an input indexes, through views and casts alone; None
    if it indexes no table of known size.

    torch exports `x[ids]`, which counts negative indices from the end as ONNX does, as GatherND; `embedding`,
    `index_select` and `gather`, which refuse them, as Gather and GatherElements.

    Args:
        value: the input.
        negative: whether the source's Gather counts negative indices from the end.
    """
    ranges: list[tuple[int, int]] = []
    for node, position in _uses(value, _is_view):
        table, axis, counts_back = node.inputs[0], None, negative
        if position == 1 and node.op_type in ("Gather", "GatherElements"):
            axis = node.attributes.get_int("axis", 0)
        elif position == 1 and node.op_type == "GatherND" and not node.attributes.get_int("batch_dims", 0):
            indices, counts_back = node.inputs[1], True
            axis = 0 if indices is not None and indices.shape is not None and indices.shape[-1] == 1 else None
        elif position in (0, 1) and node.op_type == "EmbedLayerNormalization":
            table, axis, counts_back = node.inputs[4 if position else 2], 0, False
        shape = table.shape if table is not None else None
        if axis is not None and shape is not None and isinstance(rows := shape[axis], int):
            ranges.append((-rows if counts_back else 0, rows - 1))
    return (max(low for low, _ in ranges), min(high for _, high in ranges)) if ranges else None


def _uses(value: ir.Value, passes: Callable[[ir.Node, int], bool]) -> Iterator[tuple[ir.Node, int]]:
    """The uses of a value, as nodes and input positions, and those of the results of nodes that pass it on."""
    seen, todo = {value}, [value]
    while todo:
        for node, position in todo.pop().uses():
            yield node, position
            if passes(node, position):
                results = [result for result in node.outputs if result not in seen]
                seen.update(results)
                todo += results


def _is_view(node: ir.Node, position: int) -> bool:
    """Whether a node passes on all numbers of its first input unchanged."""
    is_cast = node.op_type == "Cast" and node.outputs[0].dtype in INDICES
    return position == 0 and (is_cast or node.op_type in VIEWS or node.op_type == "Expand")


def _decides_shapes(value: ir.Value) -> bool:
    """Whether an input's numbers decide the shape of a result."""
    uses = _uses(value, lambda node, _: node.op_type not in ("Shape", "Size"))
    return any(position in SHAPE_INPUTS.get(node.op_type, ()) for node, position in uses)


def _is_computed_with(value: ir.Value) -> bool:
    """Whether an input is used in integer arithmetic."""
    uses = _uses(value, _is_view)
    return any(node.op_type in ARITHMETIC and node.outputs[0].dtype == value.dtype for node, _ in uses)


def _is_added_to_scores(value: ir.Value) -> bool:
    """Whether an input, through views, casts and sums alone, is the mask of an Attention or the input of a Softmax."""
    uses = _uses(value, lambda node, position: _is_view(node, position) or node.op_type in ("Add", "Cast"))
    return any((node.op_type, position) in (("Attention", 3), ("Softmax", 0)) for node, position in uses)
