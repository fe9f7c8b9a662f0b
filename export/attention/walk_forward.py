"""The walk from a softmax forward to the products of its weights with values.

The walk passes operators that only cast, scale, drop out, zero, guard or re-view the weights, and records them. Every
dim on the way is identified by its axes, as in :mod:`.walk_back`. A walk that ends early returns a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from attnforge.export.attention.contraction import Label, contraction_of, is_product, sum_of
from attnforge.export.attention.layout import Axis, Dims, Layout, after_view
from attnforge.export.attention.operands import Operand, Position, factor_of, keeps_numbers, scalar
from attnforge.export.attention.walk_back import Ended, Fill, Sink, Steps
from attnforge.export.graphs.attention import NotAttention
from attnforge.export.graphs.nodes import VIEWS, constant_input, constant_of, inputs_of, is_op
from attnforge.export.graphs.sizes import LayoutError, sizes_of


@dataclass(frozen=True)
class Weights:
    """A product of weights and values that a walk forward arrived at, and what the graph does to the weights before it.

    Attributes:
        value_features: the dim of the values that the output keeps; empty if values are single numbers.
        product: the node that multiplies weights and values.
        output: the layout of its output.
    """

    steps: Steps
    value: Operand
    value_features: Layout
    product: ir.Node
    output: Layout


def walk_to_outputs(position: Position, steps: Steps) -> list[Weights] | Ended:
    """Walk from the output of a softmax to every product with values.

    Args:
        position: the attention weights.
        steps: what the graph does to the weights from the softmax to here.

    Returns:
        One record for each product, ordered by the name of the node at which their paths fork.
    """
    try:
        while True:
            if steps.scale > 0 and not steps.tensor_scales and (guard := _nan_guard(position.value)) is not None:
                result, zeroes_nan = guard
                position = replace(position, value=result)
                if zeroes_nan:
                    steps = replace(steps, nan_rows_zeroed=True, path=(*steps.path, "guard"))
                continue
            users = {use.node for use in position.value.uses() if use.node.op_type != "Shape"} - position.also_used_by
            if len(users) > 1 and not position.value.is_graph_output():
                return [*_every_output(position, steps, users)]
            node = position.only_user("attention weights")
            steps = replace(steps, path=(*steps.path, node.op_type))
            product = node if is_product(node) else sum_of(node) if node.op_type == "Mul" else None
            if product is not None:
                return [_from_product(product, position, steps)]
            position, steps = _past(node, position, steps)
    except (NotAttention, LayoutError) as error:
        return Ended(str(error), steps)


def _every_output(position: Position, steps: Steps, users: set[ir.Node]) -> Iterator[Weights]:
    """Follow weights that several nodes read: each product is a separate attention over the same scores."""
    for node in sorted(users, key=lambda user: user.name or ""):
        weights = walk_to_outputs(replace(position, also_used_by=frozenset(users - {node})), steps)
        if isinstance(weights, Ended):
            raise NotAttention(
                f"the attention weights {position.value.name!r} are used {len(users)} times, not only for values "
                f"({weights.reason}); a fused kernel never stores them"
            )
        yield from weights


def _from_product(node: ir.Node, position: Position, steps: Steps) -> Weights:
    product = contraction_of(node)
    if steps.sink is not None:
        raise NotAttention("the scores are joined with others that are not cut off after the softmax")
    left, right = product.sides
    if left.value is right.value:
        raise NotAttention("the attention weights are multiplied by themselves")
    weights, value = (left, right) if left.value is position.value else (right, left)
    axes: dict[Label, Dims] = dict(zip(weights.labels, position.layout.dims, strict=True))
    if [axes[label] for label in product.summed] != [position.keys]:
        raise NotAttention(
            f"{node.op_type} mixes the attention weights, as in talking heads: a fused kernel never stores them"
            if constant_of(value.value) is not None
            else "the product after the softmax does not sum over the keys"
        )
    features = [label for label in product.output if label in value.labels and label not in weights.labels]
    if any(label.startswith("MatMul batch") for label in features):
        raise NotAttention("the values have a batch axis that the scores lack")
    feature = tuple(Axis(sizes_of(value.value)[value.labels.index(label)]) for label in features)
    axes[None] = ()
    axes.update((label, (axis,)) for label, axis in zip(features, feature, strict=True))
    return Weights(
        steps,
        Operand(value.value, Layout(axes[label] for label in value.labels)),
        value_features=Layout([feature]),
        product=node,
        output=Layout(axes.get(label, ()) for label in product.output),  # a label that neither side has: size 1
    )


# --- handlers: one for each operator that keeps the shape of the weights ----------------------------------------------


def _past(node: ir.Node, position: Position, steps: Steps) -> tuple[Position, Steps]:
    """The position after `node`, and the steps with this operator's added."""
    result, layout, axis = node.outputs[0], position.layout, position.softmax_axis
    if is_op(node, *VIEWS):
        return Position(result, after_view(node, layout), axis), steps
    if is_op(node, "Slice"):
        axis, layout = _without_sinks(node, position, steps.sink)
        return Position(result, layout, axis), replace(steps, sink=None)
    if is_op(node, *_HANDLERS):
        steps = _HANDLERS[node.op_type](node, position, steps)
    elif not keeps_numbers(node, "attention weights"):
        raise NotAttention(f"the attention weights go through {node.op_type} before they meet the values")
    if sizes_of(result) != layout.sizes():
        raise NotAttention(f"{node.op_type} broadcasts the attention weights to a larger shape")
    return Position(result, layout, axis), steps


def _where(node: ir.Node, position: Position, steps: Steps) -> Steps:
    condition, if_true, if_false = inputs_of(node)
    kept = if_true is position.value and scalar(if_false) == 0.0
    if not (kept or (if_false is position.value and scalar(if_true) == 0.0)):
        raise NotAttention("Where replaces attention weights by something other than zeros")
    where, inverted = position.condition(condition, inverted=not kept)
    return steps.masked(Fill(where, inverted, by_key=position.differs_by_key(where)))


def _scale(node: ir.Node, position: Position, steps: Steps) -> Steps:
    """Record a factor, a tensor that is the same for all keys, or a condition that was cast to ones and zeros."""
    if factor := factor_of(node):
        return replace(steps, scale=steps.scale * factor[0])
    left, right = inputs_of(node)
    other = right if left is position.value else left
    if not np.isfinite(scalar(other) or 0.0):
        raise NotAttention("the attention weights are multiplied by an infinite number")
    by = position.aligned(other)
    if not position.differs_by_key(by):
        if node.op_type == "Div" and left is not position.value:
            raise NotAttention("a tensor is divided by the attention weights")
        return steps.scaled(node, by)
    cast = other.producer()
    condition = cast.inputs[0] if is_op(cast, "Cast") else None
    if node.op_type == "Div" or condition is None or condition.dtype != ir.DataType.BOOL:
        raise NotAttention("the attention weights are multiplied by a tensor, so they no longer sum to one")
    return steps.masked(Fill(*position.condition(condition), multiplied=True))


_HANDLERS: dict[str, Callable[[ir.Node, Position, Steps], Steps]] = {
    **dict.fromkeys(("Mul", "Div"), _scale),
    "Where": _where,
}


def _without_sinks(node: ir.Node, position: Position, sink: Sink | None) -> tuple[Axis, Layout]:
    """The axis of the keys alone, and the layout after a Slice that cuts off the attention sinks."""
    starts, axes, step = (constant_input(node, i) for i in (1, 3, 4))
    sizes, dims = sizes_of(node.outputs[0]), position.layout.dims
    axis = dims.index((sink.joint,)) if sink is not None and (sink.joint,) in dims else None
    sliced = "the attention weights are sliced before they meet the values"
    if sink is None or axis is None or starts is None or axes is None or axes.size != 1:
        raise NotAttention(sliced)
    if step is None and len(node.inputs) > 4:
        raise NotAttention(f"{sliced}, by steps that are not constant")
    start, wanted, joint = int(starts.item()), sink.count if sink.first else 0, sink.joint.size
    if start < 0 and joint.is_static:
        start += joint.factor
    is_of_keys = int(axes.item()) % len(sizes) == axis and start == wanted and sizes[axis] == sink.keys.size
    if not is_of_keys or (step is not None and int(step.item()) != 1):
        raise NotAttention(sliced)
    return sink.keys, position.layout.with_dim(axis, (sink.keys,))


# --- guards against the NaN of fully masked rows ----------------------------------------------------------------------

_PROBE = np.array([0.0, 0.25, 1.0, np.nan])
"""All kinds of numbers that a softmax can return: from 0 to 1, and NaN."""

_ELEMENTWISE: dict[str, Callable[..., NDArray[Any]]] = {
    "Cast": lambda x: x,
    "IsNaN": np.isnan,
    "IsInf": np.isinf,
    "Less": np.less,
    "Greater": np.greater,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Not": np.logical_not,
    "Where": np.where,
}


def _nan_guard(weights: ir.Value) -> tuple[ir.Value, bool] | None:
    """The guard against NaN that all readers of `weights` belong to, such as `Where(IsNaN(w), 0, w)` or `nan_to_num`:
    the value that replaces the weights, and whether it has zero instead of NaN; None if other nodes read the weights.

    The guard is evaluated on :data:`_PROBE` to see what it does.
    """
    if weights.is_graph_output():
        return None
    results = _probed(weights)
    nodes = {value.producer() for value in results if value is not weights}
    leaving = [v for v in results if v.is_graph_output() or any(use.node not in nodes for use in v.uses())]
    if not nodes or len(leaving) != 1 or leaving[0] is weights or leaving[0].is_graph_output():
        return None
    numbers = results[leaving[0]]
    if numbers.dtype == bool or not np.array_equal(numbers[:3], _PROBE[:3]):
        return None
    if not (numbers[3] == 0 or np.isnan(numbers[3])):
        return None  # another number instead of NaN, which no attention kernel returns
    return leaving[0], bool(numbers[3] == 0)


def _probed(weights: ir.Value) -> dict[ir.Value, NDArray[Any]]:
    """Evaluate every value that elementwise operators compute from `weights` and constants alone, with :data:`_PROBE`
    as weights."""
    results: dict[ir.Value, NDArray[Any]] = {weights: _PROBE}
    pending = [use.node for use in weights.uses()]
    while pending:
        node = pending.pop(0)
        function = _ELEMENTWISE.get(node.op_type) if node.domain == "" else None
        if function is None or node.outputs[0] in results:
            continue
        if node.op_type == "Cast" and not (node.outputs[0].dtype or ir.DataType.BOOL).is_floating_point():
            continue
        operands = [results.get(v) if v in results else scalar(v) for v in node.inputs if v is not None]
        if any(operand is None for operand in operands):
            continue
        if node.op_type in ("Less", "Greater") and any(isinstance(o, float) and o != 0 for o in operands):
            continue  # a threshold on the weights, which the probe could miss
        with np.errstate(invalid="ignore"):
            results[node.outputs[0]] = np.asarray(function(*operands)) + np.zeros_like(_PROBE, dtype=bool)
        pending += [use.node for use in node.outputs[0].uses()]
    return results
