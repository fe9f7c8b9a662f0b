"""The tensor at which an error begins, and the cause of the error, which is named only if the numbers prove it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.export.attention.operands import scalar
from attnforge.export.diagnosis.trace import Cause, Finding, TensorErrors, Trace
from attnforge.export.graphs.nodes import constant_of, inputs_of, upstream
from attnforge.export.graphs.types import FLOATS
from attnforge.numbers import scientific

AMPLIFIES = 4.0
"""Factor from which an operator is said to amplify an error rather than to pass it on."""

OWN = 16.0
"""Unit roundoffs between a result and the operator's own float64 above which the operator, not rounding, is wrong."""

HALVED = 0.5
"""Share of the final error that may remain when a tensor is made exact, for the error to begin at that tensor."""

SATURATED = 0.9
"""Mean of the largest probabilities from which a softmax is considered nearly one-hot."""

BEGINS = 0.1
"""Share of the final error that a tensor must have for the error to begin there."""

TRIED = 12
"""Maximum number of tensors that are made exact to see whether the error begins there."""

FEW_UNITS = 32.0
"""Unit roundoffs that a deep model may accumulate without any tensor at fault."""


def first_cause(trace: Trace) -> Finding:
    """The first tensor whose error its inputs do not explain, or that amplifies its inputs' error.

    The first finder that proves a cause decides, and the last always has one.
    """
    return out_of_range(trace) or _wrong_in_itself(trace) or _amplified(trace) or _of_rounding(trace)


# --- out of range -----------------------------------------------------------------------------------------------------


def out_of_range(trace: Trace) -> Finding | None:
    """The weights, or the first tensor, with numbers beyond the range of their type."""
    for name, value in trace.model.graph.initializers.items():
        weights = value.const_value
        if weights is None or weights.dtype not in FLOATS or not value.uses():
            continue
        numbers = weights.numpy().astype(np.float32)
        lost = ~np.isfinite(numbers)
        if not np.isneginf(numbers[lost]).all():
            evidence = f"{lost.sum()} numbers of the weights {name} are beyond the range of their type"
            return Finding(cause="overflow", evidence=evidence)
    tensor = next((tensor for tensor in trace.tensors if tensor.lost), None)
    if tensor is None:
        return None
    if tensor.own == np.inf and tensor.explained < np.inf:  # the operator's result, not its inputs
        reach = max(tensor.largest, float(np.max(np.abs(trace.explained[tensor.name]), initial=0.0)))
        evidence = (
            f"{tensor.name} reaches {reach:.3g}, and its type ends at {tensor.limit:.3g}: {tensor.lost} numbers are "
            "lost"
        )
        if in_norm(tensor.node):
            return Finding.at(tensor, "norm", f"{evidence}. It is the square whose mean a norm takes")
        return Finding.at(tensor, "overflow", evidence)
    names = {other.name for other in trace.tensors}
    ancestors = {value.name for value in upstream(inputs_of(tensor.node), lambda value: value.name not in names)}
    zero = next((other for other in trace.tensors if other.name in ancestors and other.zeroed > 0), None)
    if zero is not None:
        return Finding.at(
            zero,
            _norm_or_underflow(zero),
            f"{zero.zeroed:.0%} of {zero.name} are below the range of its type and become zero; {tensor.name} divides "
            f"by them: {tensor.lost} numbers are lost",
        )
    evidence = f"{tensor.name} has {tensor.lost} numbers that are not finite, although its inputs are"
    return Finding.at(tensor, "operator", evidence)


def _norm_or_underflow(tensor: TensorErrors) -> Cause:
    return "norm" if in_norm(tensor.node) else "underflow"


def in_norm(node: ir.Node) -> bool:
    """Whether a node computes the squares in a norm, or their mean."""
    if node.op_type in ("ReduceMean", "ReduceSum", "ReduceSumSquare"):
        return _to_root(node.outputs[0], 6)
    if not _is_square(node):
        return False
    means = ("ReduceMean", "ReduceSum")
    return any(user.op_type in means and _to_root(user.outputs[0], 6) for user in node.outputs[0].consumers())


def _is_square(node: ir.Node) -> bool:
    if node.op_type == "Pow":
        return scalar(node.inputs[1]) == 2
    return node.op_type == "Mul" and node.inputs[0] is node.inputs[1]


def _to_root(value: ir.Value, steps: int) -> bool:
    """Whether a root is taken of `value`, after at most `steps` simple operators."""
    if steps == 0:
        return False
    for user in value.consumers():
        if user.op_type == "Sqrt" or (user.op_type == "Pow" and abs(scalar(user.inputs[1]) or 0) == 0.5):
            return True
        plain = ("Add", "Mul", "Div", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Identity", "Max", "Clip")
        if user.op_type in plain and _to_root(user.outputs[0], steps - 1):
            return True
    return False


# --- wrong in itself --------------------------------------------------------------------------------------------------


def _wrong_in_itself(trace: Trace) -> Finding | None:
    """The first tensor to whose error the operator itself adds more than rounding, and enough to matter at the end;
    one with numbers that became zero comes before all others."""
    least = BEGINS * min(trace.error, 1.0)
    begins = [tensor for tensor in trace.tensors if tensor.own > OWN * tensor.unit and tensor.error > least]
    tensor = min(begins, key=lambda tensor: tensor.zeroed == 0, default=None)
    if tensor is None:
        return None
    if tensor.zeroed > 0:
        evidence = (
            f"{tensor.zeroed:.0%} of the numbers of {tensor.name} are below the range of its type and become zero"
        )
        return Finding.at(tensor, _norm_or_underflow(tensor), evidence)
    units = tensor.own / tensor.unit
    terms = _terms(tensor.node, trace)
    if terms is not None and units <= terms:
        evidence = (
            f"{tensor.name} sums {terms} terms and is {units:.0f} unit roundoffs off their sum in float64: the "
            "accumulator has too few bits"
        )
        return Finding.at(tensor, "accumulation", evidence)
    evidence = (
        f"{tensor.name} is {scientific(tensor.own)} off the result of {tensor.node.op_type} in float64 on the same "
        f"inputs, which is {units:.0f} unit roundoffs: more than rounding"
    )
    return Finding.at(tensor, "operator", evidence)


def _terms(node: ir.Node, trace: Trace) -> int | None:
    """The number of terms in each result of a node; None if the node is not a sum."""
    source = trace.exact.get(str(node.inputs[0].name)) if node.inputs and node.inputs[0] is not None else None
    if source is None:
        return None
    if node.op_type in ("MatMul", "Gemm"):
        return int(source.shape[0 if node.attributes.get_int("transA") == 1 else -1])
    if node.op_type in ("ReduceSum", "ReduceMean"):
        return source.size // max(trace.exact[str(node.outputs[0].name)].size, 1)
    return None


# --- made larger ------------------------------------------------------------------------------------------------------


def _amplified(trace: Trace) -> Finding | None:
    suspects = [
        tensor
        for tensor in trace.tensors
        if tensor.amplification >= AMPLIFIES and tensor.error >= BEGINS * trace.error and tensor.error_in > 0
    ]
    for tensor in suspects[:TRIED]:
        without = trace.error_with_exact(tensor.name)
        if without <= HALVED * trace.error:
            cause, evidence = _why_amplified(tensor, trace)
            return Finding.at(tensor, cause, evidence, error_without=without)
    return None


def _why_amplified(tensor: TensorErrors, trace: Trace) -> tuple[Cause, str]:
    node, result = tensor.node, trace.exact[tensor.name]
    inputs = [trace.exact[str(v.name)] for v in node.inputs if v is not None and v.name in trace.exact]
    grew = (
        f"the error of {scientific(tensor.error_in)} in its inputs becomes {scientific(tensor.explained)}, "
        f"{tensor.amplification:.0f} times it"
    )
    if node.op_type == "Softmax":
        return _why_softmax(tensor, trace, inputs[0], grew)
    norm = float(np.linalg.norm(result[np.isfinite(result)]))
    if node.op_type in ("Add", "Sub") and inputs:
        condition = max(float(np.linalg.norm(np.broadcast_to(array, result.shape))) for array in inputs) / (norm or 1.0)
        if condition >= AMPLIFIES:
            return "cancellation", f"{tensor.name} is a difference of numbers {condition:.0f} times as large: {grew}"
    if (terms := _sum_of_magnitudes(tensor, trace)) is not None and terms >= AMPLIFIES * norm:
        times = terms / (norm or 1)
        return "cancellation", f"{tensor.name} sums terms {times:.0f} times as large, which cancel: {grew}"
    return "conditioning", f"{node.op_type} is steep where {tensor.name} is: {grew}"


def _sum_of_magnitudes(tensor: TensorErrors, trace: Trace) -> float | None:
    """The norm that a sum would have if none of its terms were negative; None if the operator is not a known sum."""
    node, result = tensor.node, trace.exact[tensor.name]
    arrays = [numbers_of(value, trace.exact) for value in node.inputs]
    if not arrays or arrays[0] is None:
        return None
    if node.op_type == "MatMul" and arrays[1] is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            return float(np.linalg.norm(np.abs(arrays[0]) @ np.abs(arrays[1])))
    if node.op_type in ("ReduceSum", "ReduceMean"):
        terms = arrays[0].size / max(result.size, 1)
        total = float(np.linalg.norm(np.abs(arrays[0]))) * math.sqrt(terms)
        return total / (terms if node.op_type == "ReduceMean" else 1.0)
    if node.op_type == "LayerNormalization":  # the terms are those of the difference from the mean
        spread = float(np.linalg.norm(arrays[0] - arrays[0].mean(-1, keepdims=True))) or 1.0
        return float(np.linalg.norm(arrays[0])) / spread * float(np.linalg.norm(result))
    return None


def numbers_of(value: ir.Value | None, computed: Mapping[str, Array] | None = None) -> Array | None:
    """The numbers of a tensor in float64, if it is constant or among the computed ones."""
    if value is not None and computed and value.name in computed:
        return computed[str(value.name)]
    constant = constant_of(value)
    return constant.astype(np.float64) if constant is not None else None


def _why_softmax(tensor: TensorErrors, trace: Trace, scores: Array, grew: str) -> tuple[Cause, str]:
    reach = float(np.max(np.abs(scores[np.isfinite(scores)]), initial=0.0))
    spacing = 2 * tensor.unit * 2.0 ** np.floor(np.log2(reach)) if reach > 0 else 0.0
    axis = tensor.node.attributes.get_int("axis", -1) or 0
    peak = float(np.nanmean(np.max(trace.exact[tensor.name], axis=axis)))
    rows = np.where(np.isfinite(scores), scores, np.nan)
    spread = float(np.nanmean(np.nanmax(rows, axis=axis) - np.nanmin(rows, axis=axis)))
    text = f"its scores reach {reach:.3g}, where numbers of its type are {spacing:.2g} apart"
    if peak < SATURATED and reach > AMPLIFIES * max(spread, 1e-30):
        return "cancellation", (
            f"{text}, and differ by only {spread:.2g}: the softmax subtracts the largest, and what remains is "
            f"rounding; {grew}"
        )
    one_hot = f"the largest weight is {peak:.2f} on average"
    return "softmax", f"{text}, so rounding changes weights by a factor of e to that power; {one_hot}: {grew}"


# --- nothing but rounding ---------------------------------------------------------------------------------------------


def _of_rounding(trace: Trace) -> Finding:
    """Roundings that add up to much, or else only the cost of the precision."""
    half = next((tensor for tensor in trace.tensors if tensor.error >= trace.error / 2), None)
    if half is None:
        return Finding(cause="rounding", evidence="no tensor has as much as half of the final error")
    units = [tensor.unit for tensor in trace.tensors if tensor.own > 0]
    unit = max(units or [tensor.unit for tensor in trace.tensors])
    if trace.error > FEW_UNITS * unit:
        evidence = (
            f"{len(units)} roundings add up to {trace.error / unit:.0f} unit roundoffs, and no tensor amplifies an "
            f"error much; half of it is reached at {half.name}"
        )
        return Finding.at(half, "accumulation", evidence)
    evidence = (
        f"the final error of {scientific(trace.error)} is {trace.error / unit:.0f} unit roundoffs after {len(units)} "
        "roundings: the cost of this precision, and no tensor is to blame"
    )
    return Finding(cause="rounding", evidence=evidence)
