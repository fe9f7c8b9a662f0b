"""Write new nodes into a graph, with the type and shape of every value set, and replace values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
from numpy.typing import ArrayLike, NDArray
from onnx_ir.tape import Tape


class Builder(Tape):
    """A tape on which `op.MatMul(a, b, …)` records a node and returns its output."""

    def __getattr__(self, op_type: str) -> Callable[..., ir.Value]:
        if not op_type[0].isupper():
            raise AttributeError(op_type)
        return lambda *inputs, **attributes: self.op(op_type, inputs, attributes)


def constant(op: Builder, data: ArrayLike, dtype: ir.DataType | None = ir.DataType.INT64) -> ir.Value:
    """Write a Constant node with `data` in `dtype`, which must be known, with its shape and type set."""
    assert dtype is not None
    tensor = ir.tensor(np.asarray(data, dtype=dtype.numpy()), dtype=dtype)
    value = typed(op.Constant(value=tensor), dtype, np.shape(data))
    value.const_value = tensor
    return value


def initializer(graph: ir.Graph, name: str, array: NDArray[Any]) -> ir.Value:
    """Add a weight to `graph`."""
    tensor = ir.tensor(np.asarray(array, order="C"), name=name)
    value = ir.Value(name=name, const_value=tensor)
    graph.register_initializer(typed(value, tensor.dtype, array.shape))
    return value


def cast(op: Builder, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Cast `value` to `dtype`; return `value` itself if it already has that type."""
    return value if value.dtype == dtype else like(op.Cast(value, to=dtype.value), value, dtype)


def typed(value: ir.Value, dtype: ir.DataType | None, dims: Iterable[int | ir.SymbolicDim]) -> ir.Value:
    """Set the type, which must be known, and the shape of `value`, and return it.

    Both objects are new, as values that shared one would change together.
    """
    assert dtype is not None
    value.type, value.shape = ir.TensorType(dtype), ir.Shape(dims)
    return value


def dims_of(value: ir.Value) -> list[int | ir.SymbolicDim]:
    """Copy the dims of a value whose shape is known."""
    assert value.shape is not None
    return [dim if isinstance(dim, int) else ir.SymbolicDim(dim.value) for dim in value.shape]


def like(value: ir.Value, other: ir.Value, dtype: ir.DataType | None = None) -> ir.Value:
    """Set the shape of `value` to that of `other` and its type to `dtype`, by default that of `other`; return it."""
    return typed(value, other.dtype if dtype is None else dtype, dims_of(other))


def resized(value: ir.Value, other: ir.Value, axis: int, dim: int | ir.SymbolicDim) -> ir.Value:
    """Set the type and shape of `value` to those of `other`, but with another dim along an axis; return it."""
    dims = dims_of(other)
    dims[axis] = dim
    return typed(value, other.dtype, dims)


def up_to(op: Builder, x: ir.Value, axis: int, end: ir.Value, dim: int | ir.SymbolicDim) -> ir.Value:
    """Write the part of `x` before index `end`, `(1,)`, along an axis, whose dim it becomes."""
    return resized(op.Slice(x, constant(op, [0]), end, constant(op, [axis])), x, axis, dim)


def filled_up(op: Builder, x: ir.Value, axis: int, missing: ir.Value, rank: int = 4, before: int = 0) -> ir.Value:
    """Write `x`, of `rank` dims, with `before` zeros before it along an axis, and as many after it as `missing`,
    `(1,)`, says; its shape is not set."""
    others = [0] * (rank - 1)
    counts = [constant(op, count) for count in ([*others[:axis], before, *others], others[axis:])]
    return op.Pad(x, op.Concat(counts[0], missing, counts[1], axis=0))


def broadcast_like(value: ir.Value, *others: ir.Value, dtype: ir.DataType | None = None) -> ir.Value:
    """Set the shape of `value` to that of `others`, of equal rank, broadcast to one another, and its type to `dtype`,
    by default that of the first; return it."""
    dims = [next((dim for dim in column if dim != 1), 1) for column in zip(*map(dims_of, others), strict=True)]
    return typed(value, others[0].dtype if dtype is None else dtype, dims)


def numbered(op: Builder, x: ir.Value, axis: int) -> ir.Value:
    """Write `0, 1, …`, int64, as long as axis `axis` of `x`."""
    length = op.Gather(op.Shape(x), constant(op, axis))
    indices = op.Range(constant(op, 0), length, constant(op, 1))
    return indices if x.shape is None else typed(indices, ir.DataType.INT64, [dims_of(x)[axis]])


def drop(op: Builder) -> None:
    """Detach the nodes of a builder that are not inserted: they must not count as users of their inputs."""
    for node in op.nodes:
        for i in range(len(node.inputs)):
            node.replace_input_with(i, None)


Result = TypeVar("Result")


def insert(
    graph: ir.Graph, at: ir.Node, build: Callable[[Builder], Result], after: bool = False, stem: str | None = None
) -> Result:
    """Run `build` with a new builder, insert the recorded nodes next to `at`, and return what `build` returned.

    Args:
        graph: the graph of `at`, changed in place.
        at: the node before which the new nodes are inserted.
        build: records nodes; where it raises, the graph stays as it was.
        after: insert after `at` instead.
        stem: prefix of the new nodes' names, by default the name of `at`. Two insertions at one node need two stems.
    """
    op = Builder()
    try:
        result = build(op)
    except Exception:
        drop(op)
        raise
    stem = stem or at.name or at.op_type
    for i, node in enumerate(op.nodes):
        node.name = node.name or f"{stem}/{node.op_type}_{i}"
        for j, output in enumerate(node.outputs):
            output.name = output.name or f"{node.name}:{j}"
    if after:
        graph.insert_after(at, op.nodes)
    else:
        graph.insert_before(at, op.nodes)
    return result


def read_instead(value: ir.Value, other: ir.Value) -> None:
    """Make all nodes that read `value` read `other`; outputs of the graph stay."""
    for user, index in list(value.uses()):
        user.replace_input_with(index, other)


def replace_value(old: ir.Value, new: ir.Value) -> None:
    """Make every user of `old`, graph outputs included, read `new`, which gets the type, shape and name of `old`.

    If `new` is an input or output of the graph, it keeps its own name.
    """
    like(new, old)
    if old.is_graph_output() or (new.producer() is not None and not new.is_graph_output()):
        old.name, new.name = f"{old.name}/replaced", old.name
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
