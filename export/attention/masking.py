"""Combine the masks, biases and attention sinks of a site into the one mask of the canonical node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.export.attention.canonical import MASK_STEP, ROWS, SCORES, SiteWriter
from attnforge.export.attention.layout import Layout, before_views
from attnforge.export.attention.operands import Operand, factor_of, same_value, without_not
from attnforge.export.attention.softmax import one_axis
from attnforge.export.attention.walk_back import Bias, Fill, Sink, Steps
from attnforge.export.graphs.attention import NotAttention, Reading, reach
from attnforge.export.graphs.build import Builder, broadcast_like, cast, constant, dims_of, like, resized, typed
from attnforge.export.graphs.nodes import REPEATS, constant_of, input_of, is_op, maker_of, optional_input
from attnforge.export.graphs.sizes import ONE, Size, sizes_of

BOOL, INT32 = ir.DataType.BOOL, ir.DataType.INT32

NEGLIGIBLE = -9.9e3
"""A score at or below which a softmax gives a key no weight if another key has an ordinary score. -1e4, which is
common, is -9984 in bfloat16."""


# --- masks that a canonical node can represent ------------------------------------------------------------------------


def settled(scores: Steps, weights: Steps) -> tuple[Steps, Steps]:
    """The steps without the zeroing of weights whose keys a mask already excludes before the softmax.

    The zeroing then matters only to fully masked rows, and the returned steps record how.

    Raises:
        NotAttention: weights of other keys are zeroed too, so that the rest no longer sums to one; with attention
            sinks, a mask replaces scores by a finite number that is not very low, or a bias could be as low.
    """
    fills = scores.fills
    all_infinite = all(fill.number == -np.inf for fill in fills)
    left: list[Fill] = []
    for zeroing in weights.fills:
        excluded = any(_same_keys(zeroing, fill) for fill in fills)
        if not zeroing.by_key:
            left.append(zeroing)
        elif excluded and fills[0].number <= NEGLIGIBLE and all(map(_is_a_score, scores.masking[1:])):
            if fills[0].number != -np.inf or not zeroing.multiplied:
                weights = replace(weights, nan_rows_zeroed=True)
            fills = [replace(fills[0], number=-np.inf)]
            scores = replace(scores, masking=(fills[0], *scores.masking[1:]))
            all_infinite = True
        elif excluded and all_infinite:  # a finite fill of another mask would make these keys count again
            if not zeroing.multiplied:  # a row that another step masks fully stays NaN
                left.append(zeroing)
        else:
            raise NotAttention("a mask is applied to the weights after the softmax, so they no longer sum to one")
    weights = _settle_rows(scores, replace(weights, masking=tuple(left)))
    return (scores if scores.sink is None else _settle_fills_with_sinks(scores)), weights


def _is_a_score(step: Bias | Fill) -> bool:
    """Whether a step adds products, such as those of queries and relative positions, which are no lower than the
    scores."""
    pending: list[ir.Value | None] = [step.operand.value if isinstance(step, Bias) else None]
    while pending:
        node = maker_of(pending.pop())
        if not is_op(node, *REPEATS, "Add", "Div", "Gather", "GatherElements", "MatMul", "Mul"):
            return False
        if node.op_type == "Add":
            pending += node.inputs
        elif node.op_type in ("Div", "Mul"):
            factor = factor_of(node)
            pending.append(factor[1] if factor is not None and abs(factor[0]) <= -NEGLIGIBLE else None)
        elif node.op_type != "MatMul":
            pending.append(node.inputs[0])
    return True


def _settle_rows(scores: Steps, weights: Steps) -> Steps:
    """Drop the zeros for fully masked rows if only one mask hides keys: the canonical node gives them zeros."""
    if len(scores.masking) != 1 or scores.sink is not None:
        return weights
    fill = scores.masking[0]
    if not isinstance(fill, Fill) or fill.number != -np.inf:
        return weights
    left = tuple(zeroing for zeroing in weights.fills if not _zeroes_rows_without_keys(zeroing, fill))
    return weights if left == weights.masking else replace(weights, masking=left, nan_rows_zeroed=True)


def _zeroes_rows_without_keys(rows: Fill, fill: Fill) -> bool:
    """Whether the condition that gives queries zeros is computed to hold for exactly the rows that `fill` masks fully:
    as the maximum of what it leaves, or the minimum of what it excludes."""
    reduction = _before_casts(rows.condition.value).producer()
    if rows.by_key or not is_op(reduction, "ReduceMax", "ReduceMin"):
        return False
    if (axis := one_axis(reduction)) is None:
        return False
    counted = input_of(reduction)
    counted = counted if counted.dtype == BOOL else _before_casts(counted)
    inner, inner_negated = without_not(Operand(counted, fill.condition.layout))
    if not same_value(inner.value, fill.condition.value):
        return False
    is_any = reduction.op_type == "ReduceMax"
    is_of_left, says_none = inner_negated == fill.inverted, rows.inverted != is_any
    dims = fill.condition.layout.with_dim(axis, ()).dims
    return is_of_left == is_any and says_none and dims == rows.condition.layout.dims


def _before_casts(value: ir.Value) -> ir.Value:
    """`value` before casts; for a condition that was cast to numbers, the condition."""
    while is_op(node := value.producer(), "Cast"):
        value = input_of(node)
        if value.dtype == BOOL:
            break
    return value


def _same_keys(zeroing: Fill, fill: Fill) -> bool:
    """Whether both exclude the same keys."""
    a, b = zeroing.condition, fill.condition
    return zeroing.inverted == fill.inverted and a.layout.dims == b.layout.dims and same_value(a.value, b.value)


def _settle_fills_with_sinks(scores: Steps) -> Steps:
    """Replace very low fills by -inf: with a sink no row is fully masked, so both exclude a key alike."""
    fills = scores.fills
    for fill in fills:
        if fill.number != -np.inf and (fill.number > NEGLIGIBLE or len(fills) < len(scores.masking)):
            raise NotAttention("with sinks, a mask fills scores with a finite number that is high or biased too")
    masking = tuple(replace(step, number=-np.inf) if isinstance(step, Fill) else step for step in scores.masking)
    return replace(scores, masking=masking)


# --- one combined mask ------------------------------------------------------------------------------------------------


def mask_of(writer: SiteWriter, scores: Steps) -> ir.Value | None:
    """Write the mask that combines all masks and biases, in the author's order.

    Returns:
        A mask on four dims: boolean (True attends) if all steps fill with -inf, else a number to add to the scores.
        None if nothing masks the scores.
    """
    op, dtype = writer.op, writer.dtype
    masking = [step for step in scores.masking if not _changes_nothing(step)]
    fills = [step for step in masking if isinstance(step, Fill)]
    if len(fills) == len(masking) and all(fill.number == -np.inf for fill in fills):
        return all_of(op, (allowed(writer, fill) for fill in reversed(fills))) if fills else None
    mask: ir.Value | None = None
    for step in reversed(masking):
        if isinstance(step, Bias):
            bias = _bias(writer, step)
            mask = bias if mask is None else broadcast_like(_step(op, "Add", [mask, bias], "bias"), mask, bias)
        else:
            kept = allowed(writer, step)
            before = constant(op, np.zeros((1, 1, 1, 1)), dtype) if mask is None else mask
            number = constant(op, representable(step.number, dtype), dtype)
            mask = broadcast_like(_step(op, "Where", [kept, before, number], "fill"), before, kept)
    return mask


def with_one_mask(op: Builder, reading: Reading) -> tuple[Reading, ir.Value | None]:
    """Join the masks of a reading, its causality and its window into one mask; None if causality alone, or nothing,
    masks the scores."""
    masks = [mask for mask in reading.masks if not is_idle(mask)]
    # With a mask, causality becomes part of it: both together may mask a row fully that neither masks alone.
    plain_causal = reading.is_causal and reading.offset is None and not reading.is_windowed and not masks
    if (reading.is_causal and not plain_causal) or reading.is_windowed:
        masks.append(all_of(op, reach(op, reading)))
    are_nan = reading.silent_rows_are_nan and bool(masks)
    conditions = [mask for mask in masks if mask.dtype == BOOL]
    joined = None
    for bias in (mask for mask in masks if mask.dtype != BOOL):
        joined = bias if joined is None else broadcast_like(op.Add(joined, bias), joined, bias)
    if conditions:
        joined = within(op, all_of(op, conditions), joined)
    return replace(reading, is_causal=plain_causal, silent_rows_are_nan=are_nan), joined


def _changes_nothing(step: Bias | Fill) -> bool:
    """Whether a step changes no score."""
    if isinstance(step, Bias):
        return step.floor <= 0 and is_idle(step.operand.value, attends=False)
    return is_idle(step.condition.value, attends=not step.inverted)


def is_idle(mask: ir.Value, attends: bool | None = None) -> bool:
    """Whether a mask repeats a constant that lets every query attend to every key, or adds zero to every score.

    transformers creates such masks for images. Without them, kernels are faster and do not materialise the scores.

    Args:
        mask: boolean, or added to the scores.
        attends: whether True lets a query attend; False for an additive mask, where zero does. By default, whether
            the mask is boolean.
    """
    attends = mask.dtype == BOOL if attends is None else attends
    value: ir.Value | None = mask
    while value is not None and (node := value.producer()) is not None and node.op_type in REPEATS:
        value = node.inputs[0]
    numbers = constant_of(value)
    return numbers is not None and bool(np.all(numbers.astype(bool) == attends))


def all_of(op: Builder, conditions: Iterable[ir.Value]) -> ir.Value:
    """The conjunction of one or more conditions that broadcast to one another."""
    return reduce(lambda a, b: broadcast_like(op.And(a, b), a, b), conditions)


def within(op: Builder, region: ir.Value, rest: ir.Value | None) -> ir.Value:
    """Restrict a mask to a region; boolean, or additive with minus infinity for pairs outside.

    Args:
        region: boolean.
        rest: the mask itself, boolean or additive, with dims that broadcast to the region's; None if there is none.
    """
    if rest is None:
        return region
    if rest.dtype == BOOL:
        return broadcast_like(op.And(rest, region), rest, region)
    return broadcast_like(op.Where(region, rest, constant(op, -np.inf, rest.dtype)), rest, region)


def allowed(writer: SiteWriter, step: Fill) -> ir.Value:
    """The condition of a step on the dims of the scores, True where a query may attend to a key."""
    value = cast(writer.op, writer.broadcastable(step.condition, *SCORES), BOOL)
    return like(writer.op.Not(value), value) if step.inverted else value


def any_key(op: Builder, mask: ir.Value) -> ir.Value:
    """`(…, 1)`, boolean: whether a mask, boolean or additive, lets a query attend to any key."""
    open_keys = mask
    if mask.dtype != BOOL:
        # Not a reduction of the mask itself: TensorRT would merge that into the softmax and not fuse the attention.
        open_keys = op.Greater(mask, constant(op, -np.inf, mask.dtype))
    some = op.ReduceMax(op.Cast(open_keys, to=INT32.value), constant(op, [-1]), keepdims=1)
    return typed(op.Cast(some, to=BOOL.value), BOOL, [*dims_of(mask)[:-1], 1])


def zeroed(writer: SiteWriter, result: ir.Value, steps: Steps) -> ir.Value:
    """The output with zeros for the queries that the graph zeroes after the softmax."""
    op = writer.op
    zeros = constant(op, 0.0, writer.dtype)
    for zeroing in steps.fills:
        if zeroing.by_key:  # zero where it excludes all keys of a query
            result = like(op.Where(any_key(op, allowed(writer, zeroing)), result, zeros), result)
        else:
            rows = writer.broadcastable(zeroing.condition, *ROWS)
            result = like(op.Where(rows, *((zeros, result) if zeroing.inverted else (result, zeros))), result)
    return result


def _step(op: Builder, op_type: str, inputs: list[ir.Value], kind: str) -> ir.Value:
    return op.op(op_type, inputs, metadata_props={MASK_STEP: kind})


def _bias(writer: SiteWriter, step: Bias) -> ir.Value:
    op, dtype = writer.op, writer.dtype
    bias = cast(op, writer.broadcastable(step.operand, *SCORES), dtype)
    if step.factor != 1.0:
        bias = like(op.Mul(bias, constant(op, step.factor, dtype)), bias)
    bias = writer.scaled(bias, step.scales, *SCORES)
    if step.floor != -np.inf:
        bias = like(op.Max(bias, constant(op, representable(step.floor, dtype), dtype)), bias)
    return bias


def representable(number: float, dtype: ir.DataType) -> float:
    """`number` clipped to the range of `dtype`: a finite number that became infinite would turn a fully masked row into
    NaN."""
    return float(np.clip(number, float(dtype.min), float(dtype.max))) if np.isfinite(number) else number


# --- attention sinks --------------------------------------------------------------------------------------------------

# A key of zeros has the score that the mask adds, and a value of zeros adds nothing to the output. So sinks are tokens
# of zeros in keys and values, and their scores are columns of the mask.

TOKENS = 2
"""The dim of keys and values in which zeros stand for sinks."""


def with_zeros(op: Builder, x: ir.Value, count: int, *, first: bool) -> ir.Value:
    """Write keys or values with zeros for sinks.

    Args:
        op: records the nodes.
        x: `(B, H', n_k, d)`.
        count: number of sinks.
        first: whether the sinks come before the keys.
    """
    pads = [0] * 8
    pads[TOKENS if first else TOKENS + 4] = count
    return resized(op.Pad(x, constant(op, pads)), x, TOKENS, sizes_of(x)[TOKENS].plus(count).dim())


def with_sinks(writer: SiteWriter, mask: ir.Value | None, sink: Sink) -> ir.Value:
    """The mask over the keys, if any, joined with the scores of the sinks: an additive mask on four dims."""
    op, dtype, dims, column = writer.op, writer.dtype, writer.axes.layout(*SCORES).dims, sink.column
    if mask is None:
        mask = constant(op, np.zeros((1, 1, 1, 1)), dtype)
    if mask.dtype == BOOL:
        zero, low = constant(op, np.zeros((1, 1, 1, 1)), dtype), constant(op, -np.inf, dtype)
        mask = like(op.Where(mask, zero, low), mask, dtype)
    if (numbers := constant_of(column.value)) is not None:
        column = Operand(constant(op, np.asarray(numbers, np.float64) * sink.factor, dtype), column.layout)
    sizes, of_column = sizes_of(mask), set(column.layout.axes)
    outer = [dim if size != ONE or of_column & set(dim) else () for size, dim in zip(sizes[:3], dims[:3], strict=True)]
    mask_layout = Layout(() if size == ONE else dim for size, dim in zip(sizes, dims, strict=True))
    mask = writer.arranged(Operand(mask, mask_layout), Layout([*outer, dims[3]]))
    scores = cast(op, writer.arranged(column, Layout([*outer, sink.own])), dtype)
    if sink.factor != 1.0 and numbers is None:
        scores = like(op.Mul(scores, constant(op, sink.factor, dtype)), scores)
    parts = (scores, mask) if sink.first else (mask, scores)
    return typed(op.Concat(*parts, axis=3), dtype, [*dims_of(mask)[:3], sizes_of(mask)[3].plus(sink.count).dim()])


@dataclass(frozen=True)
class Zeros:
    """Keys or values with zeros for sinks.

    Attributes:
        before: the keys or values without them.
        count: number of sinks.
        first: whether the sinks come before the keys.
    """

    before: ir.Value
    count: int
    first: bool

    @classmethod
    def of(cls, x: ir.Value) -> Zeros | None:
        """The zeros that a Pad adds to the tokens of `x`, `(B, H', n_k, d)`; None if there are none."""
        node = x.producer()
        if not is_op(node, "Pad") or len(node.inputs) > 2:
            return None
        if node.attributes.get_string("mode", "constant") != "constant":
            return None
        pads = constant_of(node.inputs[1])
        if pads is None or pads.size != 8 or np.count_nonzero(pads) != 1 or pads.max() <= 0:
            return None
        (place,) = np.flatnonzero(pads)
        return cls(input_of(node), int(pads.max()), place == TOKENS) if place % 4 == TOKENS else None


def before_sinks(x: ir.Value) -> ir.Value:
    """Keys or values of a canonical node without the zeros for sinks; `x` itself if it has none."""
    zeros = Zeros.of(x)
    return x if zeros is None else zeros.before


def take_sinks(node: ir.Node) -> tuple[float, ...] | None:
    """Remove the sinks of a canonical node, in place.

    Returns:
        The score of each head's sinks together, which is the logarithm of the sum of their exponentials; None if the
        node has no sinks.

    Raises:
        NotAttention: the scores are not constants, or differ by query or sample.
        LayoutError: their shape is not known.
    """
    keys, values = (Zeros.of(input_of(node, i)) for i in (1, 2))
    joint = maker_of(optional_input(node, 3))
    if keys is None or values is None or not is_op(joint, "Concat") or len(joint.inputs) != 2:
        return None
    column, mask = (input_of(joint, i) for i in ((0, 1) if keys.first else (1, 0)))
    is_last = joint.attributes.get_int("axis", 0) in (3, -1) and sizes_of(column)[3] == Size(keys.count)
    if not is_last or (values.count, values.first) != (keys.count, keys.first):
        return None
    scores = _constant_scores(column)
    if scores is None:
        raise NotAttention("the scores of its attention sinks are not constants of each head")
    for i, x in enumerate((keys.before, values.before, mask), start=1):
        node.replace_input_with(i, x)
    return tuple(np.broadcast_to(np.logaddexp.reduce(scores, axis=1), sizes_of(input_of(node))[1].factor).tolist())


def _constant_scores(column: ir.Value) -> Array | None:
    """`(H or 1, sinks)`: the scores of sinks in columns of a mask; None if they are not constants of each head."""
    layout = Layout.fresh(column)
    source, of_source = before_views(column, layout, sized=True)
    numbers, axes = constant_of(source), [*of_source.axes]
    every = [axis for dim in (1, 3) for axis in layout.dims[dim]]
    if numbers is None or not set(axes) <= set(every):
        return None
    if source.dtype == BOOL:
        numbers = np.where(numbers, 0.0, -np.inf)
    by_axis = np.asarray(numbers, np.float64).reshape([axis.size.factor for axis in axes])
    ordered = by_axis.transpose([axes.index(axis) for axis in every if axis in axes])
    ordered = ordered.reshape([axis.size.factor if axis in axes else 1 for axis in every])
    return np.broadcast_to(ordered, [axis.size.factor for axis in every]).reshape(-1, sizes_of(column)[3].factor)
