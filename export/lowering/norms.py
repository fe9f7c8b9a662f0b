"""Group normalisation for ONNX Runtime, which computes the variance as a difference of large numbers.

It runs `GroupNormalization` as the specification's function, with the variance E[x²] - E[x]². For a signal that hardly
varies, such as silence with an offset, rounding can make that negative, and its root is NaN.
"""

from __future__ import annotations

import onnx_ir as ir

from attnforge.export.graphs.build import Builder, cast, constant, dims_of, insert, replace_value
from attnforge.export.graphs.nodes import input_of, is_op

FLOAT, DOUBLE = ir.DataType.FLOAT, ir.DataType.DOUBLE


def centre_group_norms(model: ir.Model) -> None:
    """Rewrite every GroupNormalization of `model`, in place, with the variance E[(x - E[x])²], never negative."""
    for node in [node for node in model.graph if is_op(node, "GroupNormalization")]:
        replace_value(node.outputs[0], insert(model.graph, node, lambda op, node=node: _centred(op, node)))  # type: ignore[misc]
        model.graph.remove(node, safe=True)


def _centred(op: Builder, node: ir.Node) -> ir.Value:
    x, scale, shift = (input_of(node, i) for i in range(3))
    assert x.dtype is not None
    wide, dims = DOUBLE if x.dtype == DOUBLE else FLOAT, dims_of(x)
    groups, epsilon = node.attributes.get_int("num_groups", 1), node.attributes.get_float("epsilon", 1e-5)
    channels, last = dims[1], dims[-1]
    rows = [channels // groups if isinstance(channels, int) else 1, -1]
    if len(dims) > 3 and isinstance(last, int):
        rows = [-1, last]

    def mean(of: ir.Value) -> ir.Value:  # in two steps, as long sums that are added one by one err by far more
        return op.ReduceMean(op.ReduceMean(of, constant(op, [3]), keepdims=1), constant(op, [2]), keepdims=1)

    centred = op.Reshape(cast(op, x, wide), constant(op, [0, groups, *rows]))
    for _ in range(2):  # subtracting the mean again removes the rounding error of the first mean
        centred = op.Sub(centred, mean(centred))
    variance = mean(op.Mul(centred, centred))
    normal = op.Div(centred, op.Sqrt(op.Add(variance, constant(op, epsilon, wide))))
    normal = op.Cast(op.Reshape(normal, op.Shape(x)), to=x.dtype.value)
    by_channel = constant(op, [-1, *[1] * (len(dims) - 2)])
    return op.Add(op.Mul(normal, op.Reshape(scale, by_channel)), op.Reshape(shift, by_channel))
