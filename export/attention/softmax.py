"""Restore a decomposed softmax to a Softmax.

Three forms are recognised: `exp(x) / sum(exp(x))`, with or without the maximum subtracted; `exp(log_softmax(x))`; and
the division after the product with the values, `(exp(x) @ v) / sum(exp(x))`. If the maximum is not subtracted, the
graph may overflow where Softmax does not; wherever the graph is finite, both give the same result.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import PassResult

from attnforge.export.graphs.build import insert, like, replace_value
from attnforge.export.graphs.nodes import VIEWS, constant_of, input_of, is_op, maker_of, optional_input

_PASSED = VIEWS | {"Cast", "Mul", "Div", "Dropout"}
"""Operators that may lie between a softmax and a guard against its NaN."""


def restore_softmax(model: ir.Model) -> PassResult:
    """Rewrite every decomposed softmax of `model`, in place."""
    modified = False
    for node in list(model.graph):
        if is_op(node, "Div", "Exp"):
            modified |= _restore(model.graph, node)
    return PassResult(model, modified)


def _restore(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace the decomposed softmax that ends at a Div or Exp; return whether there is one."""
    if node.outputs[0].shape is None:
        return False
    scores = _divided(node) if node.op_type == "Div" else _exponentiated(node)
    if scores is not None:
        replace_value(node.outputs[0], _softmax(graph, node, *scores))
        return True
    product = maker_of(node.inputs[0]) if node.op_type == "Div" else None
    if product is None or (late := _divided_late(node, product)) is None:
        return False
    product.replace_input_with(0, _softmax(graph, product, *late))
    replace_value(node.outputs[0], product.outputs[0])
    return True


def _softmax(graph: ir.Graph, at: ir.Node, source: ir.Value, axis: int) -> ir.Value:
    """Insert a Softmax before `at`, with the metadata of `at`."""
    result = insert(graph, at, lambda op: like(op.Softmax(source, axis=axis), source), stem=f"{at.name}/restored")
    softmax = result.producer()
    assert softmax is not None
    softmax.metadata_props.update(at.metadata_props)
    return result


def _divided(div: ir.Node) -> tuple[ir.Value, int] | None:
    """The scores and axis of the softmax that a Div computes; None if it is not a softmax."""
    exp, (total, axis) = _maker(div.inputs[0]), _sum_over(_maker(div.inputs[1]))
    if exp is None or total is None or exp.op_type != "Exp" or total.op_type != "ReduceSum":
        return None
    source = exp.inputs[0]
    if axis is None or _maker(total.inputs[0]) is not exp or div.outputs[0].dtype != exp.outputs[0].dtype:
        return None
    if source is None or (not _is_shifted(source, axis) and _is_guarded(div.outputs[0])):
        return None
    return source, axis


def _is_shifted(scores: ir.Value, axis: int) -> bool:
    """Whether the maximum of the scores is subtracted from them, so that no quotient is 0/0."""
    node = scores.producer()
    if not is_op(node, "Sub"):
        return False
    largest = _maker(node.inputs[1])
    return (
        largest is not None
        and largest.op_type == "ReduceMax"
        and before_casts(largest.inputs[0]) is before_casts(node.inputs[0])
        and one_axis(largest) == axis
    )


def _is_guarded(weights: ir.Value) -> bool:
    """Whether a node tests the weights for NaN. If the maximum is not subtracted, very low scores give 0/0, which is
    NaN, where Softmax gives numbers."""
    return any(
        use.node.op_type in ("IsNaN", "Equal") or (use.node.op_type in _PASSED and _is_guarded(use.node.outputs[0]))
        for use in weights.uses()
    )


def _exponentiated(exp: ir.Node) -> tuple[ir.Value, int] | None:
    """The same for an Exp: of a LogSoftmax, or of scores minus their log-sum-exp."""
    log = maker_of(exp.inputs[0])
    if not is_op(log, "LogSoftmax", "Sub"):
        return None
    source = input_of(log)
    if log.op_type == "LogSoftmax":
        return source, log.attributes.get_int("axis", -1)
    total = maker_of(log.inputs[1])
    if total is None or total.op_type != "ReduceLogSumExp" or total.inputs[0] is not source:
        return None
    axis = one_axis(total)
    return (source, axis) if axis is not None else None


def _divided_late(div: ir.Node, product: ir.Node) -> tuple[ir.Value, int] | None:
    """The same for a Div of a product of exponentials and values by the sum of the exponentials."""
    exp, total = maker_of(optional_input(product, 0)), _maker(div.inputs[1])
    if not is_op(product, "MatMul") or len(product.outputs[0].uses()) != 1 or product.outputs[0].is_graph_output():
        return None
    if exp is None or total is None or exp.op_type != "Exp" or total.op_type != "ReduceSum":
        return None
    weights, source = exp.outputs[0], exp.inputs[0]
    if before_casts(total.inputs[0]) is not weights or source is None or weights.shape is None:
        return None
    last = len(weights.shape) - 1
    return (source, last) if one_axis(total) == last and last > 0 else None


def by_hand(div: ir.Node) -> tuple[ir.Value, int] | None:
    """The scores and axis of exponentials, some of which may be masked, that a Div divides by their own sum, or by a
    little more; None if it does not."""
    if not is_op(div, "Div"):
        return None
    weights, total = before_casts(div.inputs[0]), _maker(div.inputs[1])
    if is_op(total, "Add", "Clip", "Max"):
        total = next((maker for x in total.inputs if is_op(maker := _maker(x), "ReduceSum", "Unsqueeze")), None)
    total, axis = _sum_over(total)
    if not is_op(total, "ReduceSum") or axis is None or before_casts(total.inputs[0]) is not weights:
        return None
    maker = _maker(weights)
    makers = [maker, *(_maker(x) for x in maker.inputs if is_op(maker, "Mul", "Where"))] if maker else []
    exp = next((node for node in makers if is_op(node, "Exp")), None)
    return None if exp is None or input_of(exp).shape is None else (input_of(exp), axis)


def _sum_over(node: ir.Node | None) -> tuple[ir.Node | None, int | None]:
    """A sum over one axis, whose dim it keeps or an Unsqueeze restores, and the axis."""
    if not is_op(node, "Unsqueeze"):
        return node, one_axis(node) if is_op(node, "ReduceSum") else None
    total, restored = _maker(node.inputs[0]), constant_of(optional_input(node, 1))
    if not is_op(total, "ReduceSum") or restored is None or restored.size != 1:
        return None, None
    axis, rank = one_axis(total, keepdims=0), len(node.outputs[0].shape or ())
    return total, axis if rank and axis == int(restored.item()) % rank else None


def before_casts(value: ir.Value | None) -> ir.Value | None:
    """`value` before casts between floating-point types, which the exporter adds around sums of 16-bit numbers."""
    while value is not None and (node := value.producer()) is not None and node.op_type == "Cast":
        source = node.inputs[0]
        if not all(v is not None and v.dtype is not None and v.dtype.is_floating_point() for v in (source, value)):
            break
        value = source
    return value


def _maker(value: ir.Value | None) -> ir.Node | None:
    """The node that computes `value`, ignoring casts."""
    return maker_of(before_casts(value))


def one_axis(node: ir.Node, keepdims: int = 1) -> int | None:
    """The axis of a reduction over one axis with this `keepdims`; None for other reductions."""
    axes, source = constant_of(optional_input(node, 1)), node.inputs[0]
    if axes is None or axes.size != 1 or node.attributes.get_int("keepdims", 1) != keepdims:
        return None
    if source is None or source.shape is None:
        return None
    return int(axes.item()) % len(source.shape)
