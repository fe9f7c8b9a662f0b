"""The walk from a softmax to the attention around it.

Back through what only scales, masks, biases, casts or re-views the scores, to a product of two tensors; forward
through what only casts, scales, drops out, silences or re-views the weights, to a product with a third. Every dim on
the way is known by its axes (:mod:`.layout`), so rows or columns, heads before or after tokens, two dims or five, are
all one case. A new idiom is a new handler for one operator. A walk that ends early raises :class:`NotAttention` with
its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from attnforge.export.layout import (
    ONE,
    Axis,
    Dims,
    Layout,
    LayoutError,
    after_view,
    before_view,
    is_view,
    sizes_of,
    walk_back,
)


class NotAttention(Exception):
    """What stopped a walk, in words a user can act on."""


@dataclass
class Operand:
    """A tensor that takes part, and the axes of its dims."""

    value: ir.Value
    layout: Layout


@dataclass
class Scores:
    """What lies between the product of query and key and the softmax."""

    scale: float = 1.0
    allowed: list[Operand] = field(default_factory=list)  # boolean: True attends
    forbidden: list[Operand] = field(default_factory=list)  # boolean: True is left out
    biases: list[tuple[Operand, float]] = field(default_factory=list)  # added to the scores, with a factor
    query: Operand | None = None
    key: Operand | None = None
    batch: Layout = field(default_factory=lambda: Layout([]))
    queries: Layout = field(default_factory=lambda: Layout([]))  # the axes that number the queries
    features: Layout = field(default_factory=lambda: Layout([]))  # the axes summed over in the product
    path: list[str] = field(default_factory=list)  # operators, as written


@dataclass
class Weights:
    """What lies between the softmax and the product with the values."""

    scale: float = 1.0
    kept_rows: list[Operand] = field(default_factory=list)  # boolean: a False row becomes zeros
    zeroed_rows: list[Operand] = field(default_factory=list)  # boolean: a True row becomes zeros
    nan_rows_zeroed: bool = False
    value: Operand | None = None
    value_features: Layout = field(default_factory=lambda: Layout([]))
    product: ir.Node | None = None
    output: Layout | None = None
    path: list[str] = field(default_factory=list)


@dataclass
class Walk:
    """A value on the way, its layout, and the axis that the softmax runs over."""

    value: ir.Value
    layout: Layout
    softmax_axis: Axis

    @property
    def keys(self) -> Dims:
        return tuple(self.softmax_axis.leaves())


def scalar(value: ir.Value | None) -> float | None:
    """The number that `value` holds, or None where it is not a constant of one element."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    if tensor is None or tensor.size != 1:
        return None
    return float(tensor.numpy().astype(np.float64).reshape(()))


def factor_of(node: ir.Node) -> tuple[float, ir.Value] | None:
    """The number that a Mul or Div applies, and what it applies it to; None where it is no such node."""
    if node.domain != "" or node.op_type not in ("Mul", "Div"):
        return None
    left, right = node.inputs
    if left is not None and (number := scalar(right)):
        return (number if node.op_type == "Mul" else 1.0 / number), left
    if node.op_type == "Mul" and right is not None and (number := scalar(left)):
        return number, right
    return None


def strip_factors(operand: Operand) -> tuple[float, Operand]:
    """Back through views and factors: one number, and what it multiplies."""
    scale = 1.0
    while True:
        operand = Operand(*walk_back(operand.value, operand.layout))
        node = operand.value.producer()
        factor = factor_of(node) if node is not None else None
        if factor is None:
            return scale, operand
        scale *= factor[0]
        operand = Operand(factor[1], operand.layout)


def _aligned(value: ir.Value, layout: Layout) -> Operand:
    """`value` as it broadcasts against a tensor of `layout`."""
    sizes = sizes_of(value)
    if len(sizes) > len(layout):
        raise NotAttention(f"{value.name!r} has more dims than the scores it is combined with")
    dims, full = layout.dims[len(layout) - len(sizes) :], layout.sizes()[len(layout) - len(sizes) :]
    if any(have not in (ONE, want) for have, want in zip(sizes, full, strict=True)):
        raise NotAttention(f"{value.name!r} does not broadcast to the scores it is combined with")
    return Operand(value, Layout(dim if size != ONE else () for dim, size in zip(dims, sizes, strict=True)))


def _only_use(value: ir.Value, what: str) -> ir.Node:
    if value.is_graph_output():
        raise NotAttention(
            f"the {what} {value.name!r} are an output of the model; a fused kernel never has them in memory"
        )
    nodes = [use.node for use in value.uses()]
    if len(nodes) != 1:
        raise NotAttention(
            f"the {what} {value.name!r} are used {len(nodes)} times; a fused kernel never has them in memory"
        )
    return nodes[0]


# --- back from the softmax --------------------------------------------------------------------------------------------


def walk_to_product(walk: Walk, scores: Scores) -> None:
    """Walk back from the scores to the product of query and key; fill `scores`.

    Raises:
        NotAttention: something else than an inner product of two tensors, gently treated, makes the scores.
        LayoutError: a view on the way mixes axes.
    """
    while True:
        node = walk.value.producer()
        if node is None:
            raise NotAttention("the scores are an input of the graph, not a product of a query and a key")
        _only_use(walk.value, "scores")
        scores.path.append(node.op_type)
        if node.domain == "" and node.op_type in ("MatMul", "Gemm"):
            return _score_product(node, walk, scores)
        if node.domain == "" and node.op_type in ("Add", "Sub"):
            return _score_sum(node, walk, scores)
        if is_view(node):
            source = node.inputs[0]
            assert source is not None
            walk = replace(walk, value=source, layout=before_view(node, walk.layout))
            continue
        handler = _BACK.get(node.op_type) if node.domain == "" else None
        if handler is None:
            raise NotAttention(f"the scores come from {node.op_type}, not from an inner product of a query and a key")
        walk = replace(walk, value=_same_size(handler(node, walk, scores), walk, node))


def _same_size(source: ir.Value, walk: Walk, node: ir.Node) -> ir.Value:
    if sizes_of(source) != walk.layout.sizes():
        raise NotAttention(f"{node.op_type} broadcasts the scores to a larger shape")
    return source


def _back_scale(node: ir.Node, walk: Walk, scores: Scores) -> ir.Value:
    factor = factor_of(node)
    if factor is None:
        raise NotAttention(f"{node.op_type} scales the scores by a tensor, not by one number")
    scores.scale *= factor[0]
    return factor[1]


def _back_where(node: ir.Node, walk: Walk, scores: Scores) -> ir.Value:
    condition, if_true, if_false = node.inputs
    assert condition is not None and if_true is not None and if_false is not None
    if scores.scale <= 0:
        raise NotAttention("masked scores are multiplied by a negative number")
    if scalar(if_false) == -np.inf:
        scores.allowed.append(_aligned(condition, walk.layout))
        return if_true
    if scalar(if_true) == -np.inf:
        scores.forbidden.append(_aligned(condition, walk.layout))
        return if_false
    fills = [number for number in (scalar(if_true), scalar(if_false)) if number is not None]
    if not fills:
        raise NotAttention("Where chooses between two tensors of scores")
    raise NotAttention(
        f"masked scores are filled with {fills[0]:g}, so a query that may attend to nothing gets the mean of all "
        "values: fill with -inf"
    )


def _back_cast(node: ir.Node, walk: Walk, scores: Scores) -> ir.Value:
    source = node.inputs[0]
    assert source is not None
    if source.dtype is None or not source.dtype.is_floating_point():
        raise NotAttention(f"the scores are cast from {source.dtype}")
    return source


def _back_through(node: ir.Node, walk: Walk, scores: Scores) -> ir.Value:
    source = node.inputs[0]
    assert source is not None
    return source


_BACK: dict[str, Callable[[ir.Node, Walk, Scores], ir.Value]] = {
    "Mul": _back_scale,
    "Div": _back_scale,
    "Where": _back_where,
    "Cast": _back_cast,
    "Dropout": _back_through,
}


def _score_sum(node: ir.Node, walk: Walk, scores: Scores) -> None:
    """One side holds the scores, the other a bias; which is which shows in where the walk back ends."""
    left, right = node.inputs
    assert left is not None and right is not None
    sides = [(left, right, 1.0 if node.op_type == "Add" else -1.0)]
    if node.op_type == "Add":
        sides.append((right, left, 1.0))
    reasons = []
    for through, bias, sign in sides:
        trial = replace(
            scores,
            path=list(scores.path),
            allowed=list(scores.allowed),
            forbidden=list(scores.forbidden),
            biases=list(scores.biases),
        )
        try:
            trial.biases.append((_aligned(bias, walk.layout), sign * scores.scale))
            walk_to_product(replace(walk, value=_same_size(through, walk, node)), trial)
        except (NotAttention, LayoutError) as error:
            reasons.append(str(error))
            continue
        scores.__dict__.update(trial.__dict__)
        return
    raise NotAttention(f"no side of {node.op_type} is an inner product of a query and a key: " + "; ".join(reasons))


def _score_product(node: ir.Node, walk: Walk, scores: Scores) -> None:
    (left, left_swapped), (right, right_swapped) = _factors(node)
    *batch, rows, columns = walk.layout.dims
    feature = (Axis(sizes_of(left)[-2 if left_swapped else -1]),)
    left_inner = [feature, rows] if left_swapped else [rows, feature]
    right_inner = [columns, feature] if right_swapped else [feature, columns]
    left_operand = Operand(left, Layout([*_batch_of(left, batch), *left_inner]))
    right_operand = Operand(right, Layout([*_batch_of(right, batch), *right_inner]))
    if columns == walk.keys:
        scores.query, scores.key, queries = left_operand, right_operand, rows
    elif rows == walk.keys:
        scores.query, scores.key, queries = right_operand, left_operand, columns
    else:
        raise NotAttention("the softmax does not run over the keys: its axis is no side of the score product")
    scores.batch, scores.queries, scores.features = Layout(batch), Layout([queries]), Layout([feature])


def _factors(node: ir.Node) -> list[tuple[ir.Value, bool]]:
    """The two sides of a matrix product, each with whether its last two dims are swapped."""
    left, right = node.inputs[:2]
    assert left is not None and right is not None
    swapped = (False, False)
    if node.op_type == "Gemm":
        if node.attributes.get_float("alpha", 1.0) != 1.0 or any(v is not None for v in node.inputs[2:]):
            raise NotAttention("a Gemm with a bias or a factor")
        swapped = bool(node.attributes.get_int("transA", 0)), bool(node.attributes.get_int("transB", 0))
    if min(len(sizes_of(left)), len(sizes_of(right))) < 2:
        raise NotAttention("a product with a vector is no inner product of queries and keys")
    return list(zip((left, right), swapped, strict=True))


def _batch_of(value: ir.Value, batch: list[Dims]) -> list[Dims]:
    """The dims of `value` before its last two, as they broadcast in a product whose result has `batch` there."""
    sizes = sizes_of(value)[:-2]
    return [() if size == ONE else dim for size, dim in zip(sizes, batch[len(batch) - len(sizes) :], strict=True)]


# --- forward from the softmax -----------------------------------------------------------------------------------------


def walk_to_output(walk: Walk, weights: Weights) -> None:
    """Walk forward from the attention weights to the product with the values; fill `weights`.

    Raises:
        NotAttention: the weights go elsewhere, or the product does not sum over the keys.
        LayoutError: a view on the way mixes axes.
    """
    while True:
        if guard := _nan_guard(walk.value):
            weights.nan_rows_zeroed = True
            weights.path += ["IsNaN", "Where"]
            walk = replace(walk, value=guard.outputs[0])
            continue
        node = _only_use(walk.value, "attention weights")
        weights.path.append(node.op_type)
        if node.domain == "" and node.op_type in ("MatMul", "Gemm"):
            return _output_product(node, walk, weights)
        layout = after_view(node, walk.layout) if is_view(node) else _forward(node, walk, weights)
        walk = replace(walk, value=node.outputs[0], layout=layout)


def _forward(node: ir.Node, walk: Walk, weights: Weights) -> Layout:
    if factor := factor_of(node):
        weights.scale *= factor[0]
    elif node.domain == "" and node.op_type == "Where":
        condition, if_true, if_false = node.inputs
        assert condition is not None
        kept = if_true is walk.value and scalar(if_false) == 0.0
        zeroed = if_false is walk.value and scalar(if_true) == 0.0
        if not (kept or zeroed):
            raise NotAttention("Where replaces attention weights by something else than zeros")
        rows = _aligned(condition, walk.layout)
        if set(rows.layout.axes) & set(walk.keys):
            raise NotAttention("a mask is applied to the weights after the softmax, so they no longer sum to one")
        (weights.kept_rows if kept else weights.zeroed_rows).append(rows)
    elif node.domain == "" and node.op_type == "Cast" and node.outputs[0].dtype is not None:
        if not node.outputs[0].dtype.is_floating_point():
            raise NotAttention(f"the attention weights are cast to {node.outputs[0].dtype}")
    elif node.op_type != "Dropout":
        raise NotAttention(f"the attention weights go through {node.op_type} before they meet the values")
    if sizes_of(node.outputs[0]) != walk.layout.sizes():
        raise NotAttention(f"{node.op_type} broadcasts the attention weights to a larger shape")
    return walk.layout


def _nan_guard(value: ir.Value) -> ir.Node | None:
    """The Where of `Where(IsNaN(w), 0, w)`, by which a softmax over nothing is made to give zeros."""
    nodes = sorted((use.node for use in value.uses()), key=lambda node: node.op_type)
    if value.is_graph_output() or [node.op_type for node in nodes] != ["IsNaN", "Where"]:
        return None
    is_nan, where = nodes
    guards = where.inputs[0] is is_nan.outputs[0] and scalar(where.inputs[1]) == 0.0 and where.inputs[2] is value
    return where if guards else None


def _output_product(node: ir.Node, walk: Walk, weights: Weights) -> None:
    (left, left_swapped), (right, right_swapped) = _factors(node)
    if left is right:
        raise NotAttention("the attention weights are multiplied with themselves")
    weights_left = left is walk.value
    value, value_swapped = (right, right_swapped) if weights_left else (left, left_swapped)
    weights_swapped = left_swapped if weights_left else right_swapped
    *batch, outer, inner = walk.layout.dims
    contracted, free = (inner, outer) if weights_left != weights_swapped else (outer, inner)
    if contracted != walk.keys:
        raise NotAttention("the product after the softmax does not sum over the keys")
    sizes = sizes_of(node.outputs[0])
    batch = [()] * (len(sizes) - 2 - len(batch)) + batch
    if Layout(batch).sizes() != sizes[:-2]:
        raise NotAttention("the values have a batch axis that the scores lack")
    feature = (Axis(sizes[-1 if weights_left else -2]),)
    value_inner = [contracted, feature] if weights_left != value_swapped else [feature, contracted]
    weights.value = Operand(value, Layout([*_batch_of(value, batch), *value_inner]))
    weights.value_features = Layout([feature])
    weights.output = Layout([*batch, free, feature] if weights_left else [*batch, feature, free])
    weights.product = node
