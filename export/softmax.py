"""A softmax written out by hand, `exp(x) / sum(exp(x))` with or without the maximum taken off, becomes a Softmax.

Without the maximum taken off, what was written overflows where Softmax does not; the result is better, and the same
wherever what was written is finite.
"""

from __future__ import annotations

import onnx_ir as ir

from attnforge.export.layout import VIEWS, Builder, insert, like, replace_value

_PASSED = VIEWS | {"Cast", "Mul", "Div", "Dropout"}
"""What may stand between a softmax and a guard against its NaN."""


def restore_softmax(model: ir.Model) -> bool:
    """Rewrite every hand-written softmax of `model`, in place.

    Returns:
        whether there was any.
    """
    modified = False
    for node in list(model.graph):
        if node.op_type != "Div" or node.domain != "":
            continue
        found = _argument(node)
        if found is None:
            continue
        source, axis = found
        result = insert(model.graph, node, lambda op, x=source, a=axis: _softmax(op, x, a))  # type: ignore[misc]
        softmax = result.producer()
        assert softmax is not None
        softmax.metadata_props.update(node.metadata_props)
        replace_value(node.outputs[0], result)
        modified = True
    return modified


def _softmax(op: Builder, source: ir.Value, axis: int) -> ir.Value:
    return like(op.Softmax(source, axis=axis), source)


def _argument(div: ir.Node) -> tuple[ir.Value, int] | None:
    """What a Div is the softmax of, and along which axis; None where it is none."""
    exp, total = (_maker(value) for value in div.inputs)
    if exp is None or total is None or exp.op_type != "Exp" or total.op_type != "ReduceSum":
        return None
    axis = _one_axis(total)
    if axis is None or _maker(total.inputs[0]) is not exp or div.outputs[0].dtype != exp.outputs[0].dtype:
        return None
    source = exp.inputs[0]
    assert source is not None
    shifted = source.producer()
    if shifted is not None and shifted.op_type == "Sub":
        scores, largest = shifted.inputs[0], _maker(shifted.inputs[1])
        if scores is not None and largest is not None and largest.op_type == "ReduceMax":
            if _before_casts(largest.inputs[0]) is _before_casts(scores) and _one_axis(largest) == axis:
                return scores, axis
            return None
    return None if _is_guarded(div.outputs[0]) else (source, axis)


def _is_guarded(weights: ir.Value) -> bool:
    """Whether something asks for the NaN that a quotient of zeros is: where all scores are very small, without the
    maximum taken off, Softmax would give it numbers instead."""
    return any(
        use.node.op_type in ("IsNaN", "Equal") or (use.node.op_type in _PASSED and _is_guarded(use.node.outputs[0]))
        for use in weights.uses()
    )


def _before_casts(value: ir.Value | None) -> ir.Value | None:
    """`value` before it was cast to a type of more digits, or back: the exporter sums 16-bit numbers so."""
    while value is not None and (node := value.producer()) is not None and node.op_type == "Cast":
        source = node.inputs[0]
        if not all(v is not None and v.dtype is not None and v.dtype.is_floating_point() for v in (source, value)):
            break
        value = source
    return value


def _maker(value: ir.Value | None) -> ir.Node | None:
    """The node that made `value`, casts aside."""
    source = _before_casts(value)
    return source.producer() if source is not None else None


def _one_axis(node: ir.Node) -> int | None:
    """The one axis that a reduction keeps as a dim of size 1."""
    axes = ir.convenience.get_const_tensor(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else None
    source = node.inputs[0]
    if axes is None or axes.size != 1 or node.attributes.get_int("keepdims", 1) != 1:
        return None
    if source is None or source.shape is None:
        return None
    return int(axes.numpy().reshape(())) % len(source.shape)
