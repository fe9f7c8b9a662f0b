"""Masks, biases and attention sinks of a site become the one mask of the canonical node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce

import ml_dtypes
import numpy as np
import onnx_ir as ir

from attnforge.export.attention.canonical import MASK_STEP, SCORES, SiteWriter
from attnforge.export.attention.layout import ONE, Layout, sizes_of
from attnforge.export.attention.operands import NotAttention, Operand, same_value, without_not
from attnforge.export.attention.walk_back import Bias, Fill, ScoreSteps, Sink
from attnforge.export.attention.walk_forward import WeightSteps, Zeroing
from attnforge.export.graphs.build import Builder, broadcast_like, cast, constant, dims_of, like, typed

BOOL, INT32 = ir.DataType.BOOL, ir.DataType.INT32

REPEATS = ("Cast", "Expand", "Identity", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze")
"""Operators whose results have no other numbers than their first inputs."""

NEGLIGIBLE = -9.9e3
"""A score below which a softmax gives a key no weight, where another key has an ordinary score. People write -1e4,
which is -9984 in bfloat16."""


# --- which masks a canonical node can hold ----------------------------------------------------------------------------


def settle_zeroing(scores: ScoreSteps, weights: WeightSteps) -> tuple[ScoreSteps, WeightSteps]:
    """Drop the zeroing of weights whose keys a mask excludes in front of the softmax already.

    The zeroing then matters to queries without keys alone, and the steps returned say how.

    Raises:
        NotAttention: weights of other keys are zeroed as well, so that the rest no longer sums to one.
    """
    fills = scores.fills
    all_infinite = all(fill.number == -np.inf for fill in fills)
    for zeroing in weights.zeroing:
        excluded = any(_same_keys(zeroing, fill) for fill in fills)
        if excluded and len(scores.masking) == 1 and fills[0].number <= NEGLIGIBLE:
            if fills[0].number != -np.inf or not zeroing.nan_stays:
                weights = replace(weights, nan_rows_zeroed=True)
            fills = [replace(fills[0], number=-np.inf)]
            scores = replace(scores, masking=tuple(fills))
            all_infinite = True
        elif excluded and all_infinite:  # a finite number that another mask puts there would count again
            if not zeroing.nan_stays:  # what another step silences stays NaN
                weights = replace(weights, kept_with_keys=(*weights.kept_with_keys, zeroing))
        else:
            raise NotAttention("a mask is applied to the weights after the softmax, so they no longer sum to one")
    return scores, _settle_rows(scores, weights)


def _settle_rows(scores: ScoreSteps, weights: WeightSteps) -> WeightSteps:
    """Drop the zeros for queries without keys, where one mask alone hides keys: the canonical node gives them zeros."""
    if len(scores.masking) != 1 or scores.sink is not None:
        return weights
    fill = scores.masking[0]
    if not isinstance(fill, Fill) or fill.number != -np.inf:
        return weights
    kept = tuple(rows for rows in weights.kept_rows if not _zeroes_rows_without_keys(rows, False, fill))
    zeroed = tuple(rows for rows in weights.zeroed_rows if not _zeroes_rows_without_keys(rows, True, fill))
    if len(kept) + len(zeroed) < len(weights.kept_rows) + len(weights.zeroed_rows):
        weights = replace(weights, kept_rows=kept, zeroed_rows=zeroed, nan_rows_zeroed=True)
    return weights


def _zeroes_rows_without_keys(rows: Operand, where_true: bool, fill: Fill) -> bool:
    """Whether a condition, by which queries get zeros where it is `where_true`, is computed to be so for exactly those
    whose keys `fill` excludes: as the maximum of what it leaves, or the minimum of what it excludes."""
    condition, negated = without_not(rows)
    reduction = _before_casts(condition.value).producer()
    if reduction is None or reduction.domain != "" or reduction.op_type not in ("ReduceMax", "ReduceMin"):
        return False
    if reduction.inputs[0] is None or len(reduction.inputs) < 2 or reduction.attributes.get_int("keepdims", 1) != 1:
        return False
    axes = ir.convenience.get_const_tensor(reduction.inputs[1]) if reduction.inputs[1] is not None else None
    if axes is None or axes.size != 1:
        return False
    counted = reduction.inputs[0]
    inner, inner_negated = without_not(
        Operand(counted if counted.dtype == BOOL else _before_casts(counted), fill.condition.layout)
    )
    before, before_negated = without_not(fill.condition)
    if not same_value(inner.value, before.value):
        return False
    dims = list(fill.condition.layout.dims)
    dims[int(axes.numpy().reshape(()))] = ()
    is_of_left = inner_negated == (before_negated ^ fill.inverted)
    is_any = reduction.op_type == "ReduceMax"
    says_none = (where_true ^ negated) != is_any
    return is_of_left == is_any and says_none and dims == list(rows.layout.dims)


def _before_casts(value: ir.Value) -> ir.Value:
    """The value that was cast; of a condition that was cast to numbers, the condition."""
    while True:
        node = value.producer()
        if node is None or node.domain != "" or node.op_type != "Cast" or node.inputs[0] is None:
            return value
        value = node.inputs[0]
        if value.dtype == BOOL:
            return value


def _same_keys(zeroing: Zeroing, fill: Fill) -> bool:
    """Whether both exclude the same keys."""
    behind, behind_negated = without_not(zeroing.condition)
    before, before_negated = without_not(fill.condition)
    return (
        same_value(behind.value, before.value)
        and behind.layout.dims == before.layout.dims
        and (behind_negated ^ zeroing.inverted) == (before_negated ^ fill.inverted)
    )


def settle_fills_beside_sinks(scores: ScoreSteps) -> ScoreSteps:
    """Replace very low fills by -inf: beside a sink no query is without keys, so both exclude a key alike.

    Raises:
        NotAttention: a mask puts another finite number in the place of scores, or a bias could be as low.
    """
    fills = scores.fills
    for fill in fills:
        if fill.number != -np.inf and (fill.number > NEGLIGIBLE or len(fills) < len(scores.masking)):
            raise NotAttention("beside sinks a mask puts a finite number in the place of scores that are biased too")
    masking = tuple(replace(step, number=-np.inf) if isinstance(step, Fill) else step for step in scores.masking)
    return replace(scores, masking=masking)


# --- one mask out of all ----------------------------------------------------------------------------------------------


def mask_of(writer: SiteWriter, scores: ScoreSteps) -> ir.Value | None:
    """The mask that does what all masks and biases do, in the author's order.

    Returns:
        on four dims, boolean (True attends) where all steps put -inf, else a number to add to the scores; None where
        nothing masks the scores.
    """
    op, dtype = writer.op, writer.dtype
    masking = [step for step in scores.masking if not _is_idle(step)]
    fills = [step for step in masking if isinstance(step, Fill)]
    if len(fills) == len(masking) and all(fill.number == -np.inf for fill in fills):
        conditions = (allowed(writer, fill.condition, fill.inverted) for fill in reversed(fills))
        return all_of(op, conditions) if fills else None
    mask: ir.Value | None = None
    for step in reversed(masking):
        if isinstance(step, Bias):
            bias = _bias(writer, step)
            mask = bias if mask is None else broadcast_like(_step(op, "Add", [mask, bias], "bias"), mask, bias)
        else:
            kept = allowed(writer, step.condition, step.inverted)
            before = constant(op, np.zeros((1, 1, 1, 1)), dtype) if mask is None else mask
            number = constant(op, representable(step.number, dtype), dtype)
            mask = broadcast_like(_step(op, "Where", [kept, before, number], "fill"), before, kept)
    return mask


def _is_idle(step: Bias | Fill) -> bool:
    """Whether a step changes no score."""
    if isinstance(step, Bias):
        return step.floor <= 0 and masks_nothing(step.operand.value, attends=False)
    condition, negated = without_not(step.condition)
    return masks_nothing(condition.value, attends=negated == step.inverted)


def masks_nothing(mask: ir.Value, *, attends: bool) -> bool:
    """Whether a mask is made of a constant that lets every query attend to every key, or adds zero to every score.

    transformers gives images such masks. Without one, kernels are faster and hold no scores.

    Args:
        mask: boolean, or added to the scores.
        attends: whether True lets a query attend; of a mask that is added, False, for zero does.
    """
    value: ir.Value | None = mask
    while value is not None and (node := value.producer()) is not None and node.op_type in REPEATS:
        value = node.inputs[0]
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    if tensor is None:
        return False
    return bool(np.all(tensor.numpy().astype(bool) == attends))


def all_of(op: Builder, conditions: Iterable[ir.Value]) -> ir.Value:
    """The conjunction of conditions, at least one, that broadcast to one another."""
    return reduce(lambda a, b: broadcast_like(op.And(a, b), a, b), conditions)


def allowed(writer: SiteWriter, condition: Operand, inverted: bool) -> ir.Value:
    """A condition on the dims of the scores, True where it lets a query attend to a key."""
    value = cast(writer.op, writer.broadcastable(condition, *SCORES), BOOL)
    return like(writer.op.Not(value), value) if inverted else value


def any_key(op: Builder, mask: ir.Value) -> ir.Value:
    """`(…, 1)`, boolean: whether a mask, boolean or added, lets a query attend to any key."""
    assert mask.dtype is not None
    open_keys = mask
    if mask.dtype != BOOL:
        # Not a reduction of the mask itself: TensorRT would merge that into the softmax, and not fuse the attention.
        open_keys = op.Greater(mask, constant(op, -np.inf, mask.dtype))
    some = op.ReduceMax(op.Cast(open_keys, to=INT32.value), constant(op, [-1]), keepdims=1)
    return typed(op.Cast(some, to=BOOL.value), BOOL, [*dims_of(mask)[:-1], 1])


def _step(op: Builder, op_type: str, inputs: list[ir.Value], kind: str) -> ir.Value:
    return op.op(op_type, inputs, metadata_props={MASK_STEP: kind})


def _bias(writer: SiteWriter, step: Bias) -> ir.Value:
    op, dtype = writer.op, writer.dtype
    bias = cast(op, writer.broadcastable(step.operand, *SCORES), dtype)
    if step.factor != 1.0:
        bias = like(op.Mul(bias, constant(op, step.factor, dtype)), bias)
    for by in step.scales:
        scale = cast(op, writer.broadcastable(by.operand, *SCORES), dtype)
        bias = broadcast_like(op.op(by.op_type, [bias, scale]), bias, scale)
    if step.floor != -np.inf:
        bias = like(op.Max(bias, constant(op, representable(step.floor, dtype), dtype)), bias)
    return bias


def largest(dtype: ir.DataType) -> float:
    """The largest finite number of a floating-point type."""
    return float(ml_dtypes.finfo(dtype.numpy()).max)  # type: ignore[no-untyped-call]


def representable(number: float, dtype: ir.DataType) -> float:
    """`number` within the range of `dtype`: a finite number that became infinite would make NaN of a query without
    keys."""
    return float(np.clip(number, -largest(dtype), largest(dtype))) if np.isfinite(number) else number


# --- attention sinks --------------------------------------------------------------------------------------------------


def with_zeros(op: Builder, x: ir.Value, sink: Sink) -> ir.Value:
    """Keys or values `(B, H', n_k, d)` with zeros for the sinks: the mask alone is their score, and they add nothing to
    the output."""
    pads = [0] * 8
    pads[2 if sink.first else 6] = sink.count
    shape = [*dims_of(x)[:2], sink.joint.size.dim(), dims_of(x)[3]]
    assert x.dtype is not None
    return typed(op.Pad(x, constant(op, pads)), x.dtype, shape)


def with_sinks(writer: SiteWriter, mask: ir.Value | None, sink: Sink) -> ir.Value:
    """The mask over the keys, or none, joined with the scores of the sinks: a number to add, on four dims."""
    op, dtype, layout = writer.op, writer.dtype, writer.axes.layout(*SCORES)
    dims = layout.dims
    if mask is None:
        mask = constant(op, np.zeros((1, 1, 1, 1)), dtype)
    if mask.dtype == BOOL:
        zero, low = constant(op, np.zeros((1, 1, 1, 1)), dtype), constant(op, -np.inf, dtype)
        mask = like(op.Where(mask, zero, low), mask, dtype)
    sizes, column = sizes_of(mask), sink.column
    varies = set(column.layout.axes)
    outer = [dim if size != ONE or varies & set(dim) else () for size, dim in zip(sizes[:3], dims[:3], strict=True)]
    mask_layout = Layout(() if size == ONE else dim for size, dim in zip(sizes, dims, strict=True))
    mask = writer.arranged(Operand(mask, mask_layout), Layout([*outer, dims[3]]))
    sinks = [axis for axis in column.layout.axes if axis not in layout.axes]
    scores = cast(op, writer.arranged(column, Layout([*outer, sinks])), dtype)
    if sink.factor != 1.0:
        scores = like(op.Mul(scores, constant(op, sink.factor, dtype)), scores)
    parts = (scores, mask) if sink.first else (mask, scores)
    return typed(op.Concat(*parts, axis=3), dtype, [*dims_of(mask)[:3], sink.joint.size.dim()])
