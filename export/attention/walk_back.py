"""The walk from a softmax back to the product of a query and a key.

The walk passes operators that only scale, mask, bias, cap, cast or re-view the scores, and records them. Every dim on
the way is identified by its axes (:mod:`.layout`), so that rows or columns, heads before or after tokens, two dims or
five are one case. A new idiom is a new handler for one operator (:data:`_HANDLERS`). A walk that ends early returns a
reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from attnforge.export.attention.contraction import Label, Side, contraction_of, is_product
from attnforge.export.attention.layout import Axis, Dims, Layout, before_view, before_views
from attnforge.export.attention.operands import Operand, Position, factor_of, is_zero_or_one, keeps_numbers, scalar
from attnforge.export.attention.softmax import before_casts
from attnforge.export.graphs.attention import NotAttention
from attnforge.export.graphs.nodes import VIEWS, input_of, inputs_of, is_op, upstream
from attnforge.export.graphs.sizes import ONE, LayoutError, sizes_of


@dataclass(frozen=True)
class TensorScale:
    """A tensor that multiplies or divides the scores or the weights, and is the same for all keys."""

    operand: Operand
    op_type: str


@dataclass(frozen=True)
class Bias:
    """A tensor that is multiplied by a factor and by tensors, clamped to a floor, and added to the scores."""

    operand: Operand
    factor: float
    scales: tuple[TensorScale, ...]
    floor: float = -np.inf


@dataclass(frozen=True)
class Fill:
    """A number that replaces scores, or zero that replaces weights, where the condition is False, or True if
    `inverted`.

    Attributes:
        condition: the condition before any Not.
        multiplied: whether they are multiplied by zero instead, so that infinite scores become NaN and NaN stays.
        by_key: whether the condition differs by key, if it is one of weights; otherwise all weights of a query are
            zeroed.
    """

    condition: Operand
    inverted: bool
    number: float = 0.0
    multiplied: bool = False
    by_key: bool = True


@dataclass(frozen=True)
class Sink:
    """Attention sinks: scores that belong to no key, joined with the keys' scores before the softmax and cut off after
    it (https://arxiv.org/abs/2309.17453).

    Attributes:
        column: the sinks' scores, before they are multiplied by `factor`.
        own: the axis of the sinks; empty for one sink.
        count: number of sinks.
        first: whether the sinks come before the keys.
        joint: the axis of keys and sinks together.
        keys: the axis of the keys alone.
    """

    column: Operand
    own: Dims
    factor: float
    count: int
    first: bool
    joint: Axis
    keys: Axis


@dataclass(frozen=True)
class Steps:
    """What a graph does to the scores between the product and the softmax, or to the attention weights between the
    softmax and the product with the values.

    Attributes:
        softcap: `c` in `c·tanh(scores/c)`; 0 for no soft cap.
        floor: lower bound that the scores are clamped to.
        masking: masks and biases of the scores, or the zeroing of weights, the one nearest to the softmax first.
        nan_rows_zeroed: whether fully masked rows get zeros instead of NaN.
        sink: attention sinks that are joined with the scores, or have yet to be cut off from the weights.
        path: the operators as written, the one nearest to the softmax first.
    """

    scale: float = 1.0
    tensor_scales: tuple[TensorScale, ...] = ()
    softcap: float = 0.0
    floor: float = -np.inf
    masking: tuple[Bias | Fill, ...] = ()
    nan_rows_zeroed: bool = False
    sink: Sink | None = None
    path: tuple[str, ...] = ()

    @property
    def fills(self) -> list[Fill]:
        return [step for step in self.masking if isinstance(step, Fill)]

    def scaled(self, node: ir.Node, by: Operand) -> Steps:
        """The steps with a Mul or Div by a tensor added."""
        return replace(self, tensor_scales=(*self.tensor_scales, TensorScale(by, node.op_type)))

    def masked(self, step: Bias | Fill) -> Steps:
        """The steps with a mask, a bias or a zeroing added."""
        return replace(self, masking=(*self.masking, step))


@dataclass(frozen=True)
class Scores:
    """The product that a walk back arrived at, and what the graph does to it.

    Attributes:
        rows: all dims of the product except the keys.
        query_only: the dims of `rows` that the key lacks.
        keys: the axes that the softmax runs over, without sinks, as one dim.
        features: the axes that the product sums over, as one dim.
    """

    steps: Steps
    query: Operand
    key: Operand
    keys: Layout
    rows: Layout
    query_only: Layout
    features: Layout


@dataclass(frozen=True)
class Ended:
    """A walk that ended early.

    Attributes:
        reason: the reason, which a user can act on.
        steps: with the operators that the walk passed, and the one at which it ended.
        operands: query and key, if the walk arrived at a product that is not a score product.
    """

    reason: str
    steps: Steps
    operands: tuple[Operand, ...] = ()


def walk_to_product(position: Position, steps: Steps = Steps()) -> Scores | Ended:
    """Walk from the scores back to the product of query and key.

    Args:
        position: the scores, such as the input of the softmax.
        steps: what the graph does to the scores from here to the softmax; by default nothing.
    """
    try:
        while True:
            node = position.value.producer()
            if node is None:
                raise NotAttention("the scores are an input of the graph, not a product of a query and a key")
            if not _feeds_softmaxes(position.value):
                position.only_user("scores")
            steps = replace(steps, path=(*steps.path, node.op_type))
            if is_product(node):
                return _from_product(node, position, steps)
            if is_op(node, "Concat"):
                return _from_concat(node, position, steps)
            if is_op(node, "Add", "Sub"):
                shift = _shift_by_maximum(node, position, steps)
                if shift is None:
                    return _from_sum(node, position, steps)
                position = replace(position, value=input_of(node), also_used_by=position.also_used_by | shift)
            elif is_op(node, *VIEWS):
                position = replace(position, value=input_of(node), layout=before_view(node, position.layout))
            elif keeps_numbers(node, "scores"):
                position = _before(node, position, input_of(node))
            elif is_op(node, *_HANDLERS):
                source, steps = _HANDLERS[node.op_type](node, position, steps)
                position = _before(node, position, source)
            else:
                raise NotAttention(
                    f"the scores come from {node.op_type}, not from an inner product of a query and a key"
                )
    except (NotAttention, LayoutError) as error:
        return Ended(str(error), steps)


def _feeds_softmaxes(value: ir.Value) -> bool:
    """Whether only softmaxes read scores, through views and single operators: each site then has a product of its own,
    as where one product serves attention in both directions."""
    readers = {use.node for use in value.uses() if use.node.op_type != "Shape"}
    return not value.is_graph_output() and all(
        is_op(node, "Softmax")
        or (is_op(node, *VIEWS, "Cast", "Dropout", *_HANDLERS) and _feeds_softmaxes(node.outputs[0]))
        for node in readers
    )


def both_computed(scores: Scores | Ended) -> bool:
    """Whether neither query nor key is constant, as in attention; the weights of a classifier's last layer are."""
    operands = scores.operands if isinstance(scores, Ended) else (scores.query, scores.key)
    sources = [before_views(operand.value, operand.layout)[0] for operand in operands]
    return bool(sources) and not any(ir.convenience.get_const_tensor(source) is not None for source in sources)


# --- handlers: one for each operator that keeps the shape of the scores -----------------------------------------------


Handler = Callable[[ir.Node, Position, Steps], tuple[ir.Value, Steps]]
"""Returns the scores before an operator, and the steps with this operator's added.

Raises:
    NotAttention: the operator does something that no canonical node does.
"""


def _before(node: ir.Node, position: Position, source: ir.Value) -> Position:
    """The position at a node's input, which must have the shape of its output."""
    if sizes_of(source) != position.layout.sizes():
        raise NotAttention(f"{node.op_type} broadcasts the scores to a larger shape")
    return replace(position, value=source)


def _scale(node: ir.Node, position: Position, steps: Steps) -> tuple[ir.Value, Steps]:
    if factor := factor_of(node):
        return factor[1], replace(steps, scale=steps.scale * factor[0])
    source, by = inputs_of(node)
    # The scores are the larger side, as the tensor that scales them is the same for all keys. A mask may be as large.
    if node.op_type == "Mul" and (sizes_of(source) != position.layout.sizes() or is_zero_or_one(source)):
        source, by = by, source
    scale = position.aligned(by)
    if node.op_type == "Mul" and is_zero_or_one(by) and not steps.tensor_scales and steps.scale > 0:
        return source, steps.masked(Fill(scale, inverted=False, multiplied=True))
    if position.differs_by_key(scale):
        raise NotAttention(f"{node.op_type} scales the scores by a tensor that differs by key")
    if steps.softcap:
        raise NotAttention("a tensor scales the scores before a soft cap")
    return source, steps.scaled(node, scale)


def _tanh(node: ir.Node, position: Position, steps: Steps) -> tuple[ir.Value, Steps]:
    """`a·tanh(b·s)` is a soft cap of `a` on scores scaled by `a·b`."""
    if steps.softcap or steps.tensor_scales or steps.scale <= 0:
        raise NotAttention("a Tanh on the scores that is not a soft cap")
    return input_of(node), replace(steps, softcap=steps.scale)


def _floor(node: ir.Node, position: Position, steps: Steps) -> tuple[ir.Value, Steps]:
    """A Max or Clip near the least number of the type, which only makes masked scores finite."""
    values = [v for v in node.inputs[:2] if v is not None]
    source = next((v for v in values if scalar(v) is None), None)
    floor = next((number for v in values if (number := scalar(v)) is not None), None)
    if source is None or source.dtype is None or floor is None or len(node.inputs) > 2 or steps.scale <= 0:
        raise NotAttention(f"the scores go through {node.op_type}, which does more than keep them finite")
    if floor > max(-1e30, -0.99 * float(source.dtype.max)):
        raise NotAttention(f"the scores are clamped at {floor:g}, which ordinary scores could reach")
    if steps.softcap or steps.tensor_scales:
        raise NotAttention("the scores are capped or scaled by a tensor after a floor")
    return source, replace(steps, floor=max(steps.floor, floor * steps.scale))


def _where(node: ir.Node, position: Position, steps: Steps) -> tuple[ir.Value, Steps]:
    condition, if_true, if_false = inputs_of(node)
    _check_not_multiplied(steps)
    if steps.softcap or steps.tensor_scales or steps.scale <= 0:
        raise NotAttention("masked scores are scaled by a tensor or a negative number, or capped, after the mask")
    for number, source, inverted in ((scalar(if_false), if_true, False), (scalar(if_true), if_false, True)):
        if number is not None:
            if not number < np.inf:
                raise NotAttention(f"Where replaces scores by {number}, which turns every row that has it into NaN")
            number = max(number * steps.scale, steps.floor)
            return source, steps.masked(Fill(*position.condition(condition, inverted), number))
    raise NotAttention("Where chooses between two tensors of scores")


def _check_not_multiplied(steps: Steps) -> None:
    if any(fill.multiplied for fill in steps.fills):
        raise NotAttention(
            "masked or biased scores are multiplied by another mask, which turns infinite scores into NaN"
        )


_HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(("Mul", "Div"), _scale),
    "Neg": lambda node, position, steps: (input_of(node), replace(steps, scale=-steps.scale)),
    "Tanh": _tanh,
    **dict.fromkeys(("Max", "Clip"), _floor),
    "Where": _where,
}


def _shift_by_maximum(node: ir.Node, position: Position, steps: Steps) -> frozenset[ir.Node] | None:
    """The nodes that compute the maximum of the scores, if `node` subtracts it, which does not change a softmax; else
    None.

    If a finite number replaces scores after the shift, the shift does matter: without it, the number would compare
    differently to the other scores.
    """
    left, right = inputs_of(node)
    finite = any(fill.number != -np.inf for fill in steps.fills)
    if node.op_type != "Sub" or steps.softcap or finite or steps.sink is not None:
        return None
    try:
        maximum = position.aligned(right)
    except NotAttention:
        return None
    if position.differs_by_key(maximum):
        return None
    nodes: list[ir.Node] = []
    value: ir.Value | None = right
    while value is not None and value is not before_casts(left):
        maker = value.producer()
        if not is_op(maker, *VIEWS, "ReduceMax", "Cast"):
            return None
        nodes.append(maker)
        value = maker.inputs[0]
    if not any(maker.op_type == "ReduceMax" for maker in nodes):
        return None
    casts = {scores.producer() for scores in upstream([left], lambda scores: scores is value)}
    return frozenset(maker for maker in nodes if maker not in casts)  # without those that the scores go through


# --- forks and ends of the walk ---------------------------------------------------------------------------------------


def _from_sum(node: ir.Node, position: Position, steps: Steps) -> Scores | Ended:
    """Scores on one side of an Add or Sub, a bias on the other. Which is which shows only by walking back from each."""
    left, right = inputs_of(node)
    _check_not_multiplied(steps)
    if steps.softcap:
        raise NotAttention("a bias is added to the scores before a soft cap")
    sides = [(left, right, 1.0 if node.op_type == "Add" else -1.0)]
    if node.op_type == "Add":
        sides.append((right, left, 1.0))
    reasons, arrived = [], []
    for source, added, sign in sides:
        try:
            bias = Bias(position.aligned(added), sign * steps.scale, steps.tensor_scales, steps.floor)
            before = _before(node, position, source)
        except (NotAttention, LayoutError) as error:
            reasons.append(str(error))
            continue
        scores = walk_to_product(before, steps.masked(bias))
        if isinstance(scores, Ended):
            reasons.append(scores.reason)
        elif both_computed(scores):
            return scores
        else:  # a bias may be a product of queries and a table; then the other side is the scores
            arrived.append(scores)
    if arrived:
        return arrived[0]
    raise NotAttention(f"neither side of {node.op_type} is an inner product of a query and a key: {'; '.join(reasons)}")


def _from_concat(node: ir.Node, position: Position, steps: Steps) -> Scores | Ended:
    """Scores of the keys joined with those of attention sinks."""
    axis = node.attributes.get_int("axis", 0) % len(position.layout)
    if position.layout.dims[axis] != position.keys or len(position.keys) != 1 or len(node.inputs) != 2:
        raise NotAttention(
            "the scores are joined with others along an axis that is not that of the keys, or in more than two parts"
        )
    if steps.masking or steps.softcap or steps.tensor_scales or steps.scale <= 0 or steps.sink is not None:
        raise NotAttention("scores are masked, capped or scaled by a tensor together with attention sinks")
    reasons = []
    for i in (0, 1):
        source, column = input_of(node, i), input_of(node, 1 - i)
        count = sizes_of(column)[axis]
        if not count.is_static:
            reasons.append(f"{column.name!r} has a dynamic number of sinks")
            continue
        keys, sinks = Axis(sizes_of(source)[axis]), Axis(count)
        own = (sinks,) if count != ONE else ()
        operand = _before_casts(column, position.layout.with_dim(axis, own))
        sink = Sink(operand, own, steps.scale, count.factor, i == 1, position.softmax_axis, keys)
        before = Position(source, position.layout.with_dim(axis, (keys,)), keys)
        scores = walk_to_product(before, replace(steps, sink=sink))
        if isinstance(scores, Scores):
            return scores
        reasons.append(scores.reason)
    raise NotAttention(f"no part of Concat is an inner product of a query and a key: {'; '.join(reasons)}")


def _before_casts(value: ir.Value, layout: Layout) -> Operand:
    """The value before all views, Expands and casts between floating-point types that lead to `value`."""
    while True:
        value, layout = before_views(value, layout, sized=True)
        node = value.producer()
        if not is_op(node, "Cast") or (dtype := input_of(node).dtype) is None or not dtype.is_floating_point():
            return Operand(value, layout)
        value = input_of(node)


def _from_product(node: ir.Node, position: Position, steps: Steps) -> Scores | Ended:
    product = contraction_of(node)
    dims: dict[Label, Dims] = dict(zip(product.output, position.layout.dims, strict=True))
    keys = next((label for label, dim in dims.items() if dim == position.keys), None)
    key_sides = [side for side in product.sides if keys in side.labels]
    if keys is None or len(key_sides) != 1:
        return Ended(
            "the softmax does not run over the keys: its axis belongs to no side of the score product",
            steps,
            tuple(Operand(side.value, Layout.fresh(side.value)) for side in product.sides),
        )
    (key,) = key_sides
    (query,) = (side for side in product.sides if side is not key)
    features: dict[Label, Dims] = {label: (Axis(size),) for label, size in product.summed.items()}
    axes: dict[Label, Dims] = {None: (), **dims, **features}

    def operand(side: Side) -> Operand:
        return Operand(side.value, Layout(axes[label] for label in side.labels))

    return Scores(
        steps,
        operand(query),
        operand(key),
        keys=Layout([position.keys]),
        rows=Layout(dims[label] for label in product.output if label != keys),
        query_only=Layout(dims[label] for label in product.output if label in query.labels and label not in key.labels),
        features=Layout([tuple(axis for dim in features.values() for axis in dim)]),
    )
