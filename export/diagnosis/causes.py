"""Which tensor an error begins at, and what makes it: named only where the numbers prove it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.export.attention.operands import scalar
from attnforge.export.diagnosis.measure import Measured, Run
from attnforge.export.graphs.execute import at_own_precision
from attnforge.export.graphs.types import FLOATS

Cause = Literal[
    "overflow",
    "underflow",
    "norm",
    "cancellation",
    "softmax",
    "conditioning",
    "accumulation",
    "operator",
    "rewrite",
    "reference",
    "rounding",
]

AMPLIFIES = 4.0
"""How many times larger an operator makes an error before that is more than passing it on."""

OWN = 16.0
"""How many unit roundoffs a result may be off the operator's own float64 before the operator, not rounding, is said to
be wrong."""

HALVED = 0.5
"""What has to be left of the error, at most, when a tensor is made exact, for the error to be said to begin there."""

SATURATED = 0.9
"""Mean largest weight from which a softmax is nearly one-hot."""

BEGINS = 0.1
"""Share of the final error that a tensor must have for the error to begin there."""

TRIED = 12
"""How many tensors are made exact, at most, to see whether the error begins there."""


@dataclass(frozen=True)
class Blame:
    """Where an error begins and what makes it.

    Attributes:
        measured: of the tensor; None where it is no single one's doing.
        cause: what makes it.
        evidence: the numbers that prove it.
        error_without: the final error where this tensor alone is exact; None where that was not tried.
    """

    measured: Measured | None
    cause: Cause
    evidence: str
    error_without: float | None = None


def blame(model: ir.Model, run: Run, feeds: Mapping[str, Array]) -> Blame:
    """The first tensor whose error its inputs do not explain, or at which they explain more than they bring.

    Args:
        model: what was run.
        run: of it.
        feeds: on which.
    """
    return (
        _weights(model)
        or _out_of_range(run)
        or _lost_to_zero(run)
        or _of_the_operator(run)
        or _amplified(model, run, feeds)
    )


# --- out of range -----------------------------------------------------------------------------------------------------


def _weights(model: ir.Model) -> Blame | None:
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or tensor.dtype not in FLOATS or not value.uses():
            continue
        numbers = tensor.numpy().astype(np.float32)
        if not np.isfinite(numbers).all() and not np.isneginf(numbers[~np.isfinite(numbers)]).all():
            lost = int((~np.isfinite(numbers)).sum())
            return Blame(None, "overflow", f"{lost} numbers of the weights {name} are more than their type holds")
    return None


def _out_of_range(run: Run) -> Blame | None:
    for one in run.tensors:
        if one.lost == 0:
            continue
        if one.own == np.inf and one.explained < np.inf:  # the operator's result, and not what it was given
            reach = max(one.largest, float(np.max(np.abs(run.explained[one.name]), initial=0.0)))
            evidence = (
                f"{one.name} reaches {reach:.3g}, and its type holds {one.limit:.3g}: {one.lost} numbers are lost"
            )
            if in_norm(one.node):
                return Blame(one, "norm", f"{evidence}. It is the square that a norm takes the mean of")
            return Blame(one, "overflow", evidence)
        if (zero := _zero_before(one, run)) is not None:
            return Blame(
                zero,
                _of_norm_or(zero, "underflow"),
                f"{zero.zeroed:.0%} of {zero.name} are below what its type holds and become zero; {one.name} divides "
                f"by them: {one.lost} numbers are lost",
            )
        return Blame(one, "operator", f"{one.name} has {one.lost} numbers that are not finite, of inputs that are")
    return None


def _zero_before(one: Measured, run: Run) -> Measured | None:
    """What became zero among all that `one` is made of."""
    by_name = {m.name: m for m in run.tensors}
    seen: set[str] = set()
    todo = [one.node]
    found: list[Measured] = []
    while todo:
        for value in todo.pop().inputs:
            name = str(value.name) if value is not None else ""
            if name in by_name and name not in seen:
                seen.add(name)
                todo.append(by_name[name].node)
                if by_name[name].zeroed > 0:
                    found.append(by_name[name])
    order = {m.name: i for i, m in enumerate(run.tensors)}
    return min(found, key=lambda m: order[m.name], default=None)


def _lost_to_zero(run: Run) -> Blame | None:
    for one in run.tensors:
        if one.zeroed > 0 and one.own > OWN * one.unit and one.error > BEGINS * min(run.error, 1.0):
            evidence = f"{one.zeroed:.0%} of the numbers of {one.name} are below what its type holds and become zero"
            return Blame(one, _of_norm_or(one, "underflow"), evidence)
    return None


def _of_norm_or(one: Measured, cause: Cause) -> Cause:
    return "norm" if in_norm(one.node) else cause


def in_norm(node: ir.Node) -> bool:
    """Whether a node squares what a norm takes the root of the mean of, or is that mean."""
    if node.op_type in ("ReduceMean", "ReduceSum", "ReduceSumSquare"):
        return _to_root(node.outputs[0], 6)
    if not _is_square(node):
        return False
    means = ("ReduceMean", "ReduceSum")
    return any(user.op_type in means and _to_root(user.outputs[0], 6) for user in _users(node.outputs[0]))


def _is_square(node: ir.Node) -> bool:
    if node.op_type == "Pow":
        return scalar(node.inputs[1]) == 2
    return node.op_type == "Mul" and node.inputs[0] is node.inputs[1]


def _to_root(value: ir.Value, steps: int) -> bool:
    if steps == 0:
        return False
    for user in _users(value):
        if user.op_type == "Sqrt" or (user.op_type == "Pow" and abs(scalar(user.inputs[1]) or 0) == 0.5):
            return True
        plain = ("Add", "Mul", "Div", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Identity", "Max", "Clip")
        if user.op_type in plain and _to_root(user.outputs[0], steps - 1):
            return True
    return False


def _users(value: ir.Value) -> Iterator[ir.Node]:
    yield from (use.node for use in value.uses())


# --- wrong in itself --------------------------------------------------------------------------------------------------


def _of_the_operator(run: Run) -> Blame | None:
    for one in run.tensors:
        if one.own > OWN * one.unit and one.zeroed == 0 and one.error > BEGINS * min(run.error, 1.0):
            terms = _terms(one.node, run)
            if terms is not None and one.own <= terms * one.unit:
                evidence = (
                    f"{one.name} sums {terms} terms and is {one.own / one.unit:.0f} unit roundoffs off their sum in "
                    "float64: they are added up in too few bits"
                )
                return Blame(one, "accumulation", evidence)
            return Blame(
                one,
                "operator",
                f"{one.name} is {one.own:.1e} off what {one.node.op_type} gives in float64 on the same inputs, which "
                f"is {one.own / one.unit:.0f} unit roundoffs: no rounding",
            )
    return None


def _numbers(value: ir.Value | None, run: Run) -> Array | None:
    """A tensor's numbers in float64, where it is computed or constant."""
    if value is None or value.name in run.exact:
        return run.exact[str(value.name)] if value is not None else None
    constant = ir.convenience.get_const_tensor(value)
    return constant.numpy().astype(np.float64) if constant is not None else None


def _terms(node: ir.Node, run: Run) -> int | None:
    """How many numbers each result of a node is the sum of."""
    source = run.exact.get(str(node.inputs[0].name)) if node.inputs and node.inputs[0] is not None else None
    if source is None:
        return None
    if node.op_type in ("MatMul", "Gemm"):
        return int(source.shape[0 if node.attributes.get_int("transA") == 1 else -1])
    if node.op_type in ("ReduceSum", "ReduceMean"):
        return source.size // max(run.exact[str(node.outputs[0].name)].size, 1)
    return None


# --- made larger ------------------------------------------------------------------------------------------------------


def _amplified(model: ir.Model, run: Run, feeds: Mapping[str, Array]) -> Blame:
    suspects = [
        m for m in run.tensors if m.amplification >= AMPLIFIES and m.error >= BEGINS * run.error and m.error_in > 0
    ]
    for one in suspects[:TRIED]:
        without = error_with_exact(model, run, feeds, one.name)
        if without > HALVED * run.error:
            continue
        cause, evidence = _why_amplified(one, run)
        return Blame(one, cause, evidence, without)
    return _accumulated(run)


def error_with_exact(model: ir.Model, run: Run, feeds: Mapping[str, Array], name: str) -> float:
    """The final error where one tensor is float64's."""
    if name in run.outputs:
        return 0.0
    results = at_own_precision(model, run.outputs, [name])({**feeds, name: run.exact[name]})
    return max(error_of(results[output].astype(np.float64), run.exact[output]) for output in run.outputs)


def error_of(got: Array, exact: Array) -> float:
    """Relative error over what is finite in float64; infinite where something there is not."""
    finite = np.isfinite(exact)
    if not np.isfinite(got[finite]).all():
        return np.inf
    return float(np.linalg.norm(got[finite] - exact[finite])) / (float(np.linalg.norm(exact[finite])) or 1.0)


def _why_amplified(one: Measured, run: Run) -> tuple[Cause, str]:
    node = one.node
    inputs = [run.exact[str(v.name)] for v in node.inputs if v is not None and v.name in run.exact]
    grew = (
        f"the error of {one.error_in:.1e} in its inputs becomes {one.explained:.1e}, {one.amplification:.0f} times it"
    )
    if node.op_type == "Softmax":
        return _why_softmax(one, run, inputs[0], grew)
    norm = float(np.linalg.norm(run.exact[one.name][np.isfinite(run.exact[one.name])]))
    if node.op_type in ("Add", "Sub") and inputs:
        operand = max(float(np.linalg.norm(np.broadcast_to(x, run.exact[one.name].shape))) for x in inputs)
        condition = operand / (norm or 1.0)
        if condition >= AMPLIFIES:
            return "cancellation", f"{one.name} is a difference of numbers {condition:.0f} times as large, so {grew}"
    if (terms := _sum_of_magnitudes(node, run)) is not None and terms >= AMPLIFIES * norm:
        return "cancellation", f"{one.name} sums terms {terms / (norm or 1):.0f} times as large, which cancel: {grew}"
    return "conditioning", f"{node.op_type} is steep where {one.name} is: {grew}"


def _sum_of_magnitudes(node: ir.Node, run: Run) -> float | None:
    """Norm of what a sum would be if none of its terms were negative; None for what is no sum that is known."""
    arrays = [_numbers(v, run) for v in node.inputs]
    if node.op_type == "MatMul" and arrays[0] is not None and arrays[1] is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            return float(np.linalg.norm(np.abs(arrays[0]) @ np.abs(arrays[1])))
    if node.op_type in ("ReduceSum", "ReduceMean") and arrays[0] is not None:
        result = run.exact[str(node.outputs[0].name)]
        terms = arrays[0].size / max(result.size, 1)
        total = float(np.linalg.norm(np.abs(arrays[0]))) * math.sqrt(terms)
        return total / (terms if node.op_type == "ReduceMean" else 1.0)
    if node.op_type == "LayerNormalization" and arrays[0] is not None:  # of the difference with the mean
        centred = arrays[0] - arrays[0].mean(-1, keepdims=True)
        spread = float(np.linalg.norm(centred)) or 1.0
        return float(np.linalg.norm(arrays[0])) / spread * float(np.linalg.norm(run.exact[str(node.outputs[0].name)]))
    return None


def _why_softmax(one: Measured, run: Run, scores: Array, grew: str) -> tuple[Cause, str]:
    weights = run.exact[one.name]
    finite = scores[np.isfinite(scores)]
    reach = float(np.max(np.abs(finite), initial=0.0))
    spacing = 2 * one.unit * 2.0 ** np.floor(np.log2(reach)) if reach > 0 else 0.0
    axis = one.node.attributes.get_int("axis", -1) or 0
    peak = float(np.nanmean(np.max(weights, axis=axis)))
    rows = np.where(np.isfinite(scores), scores, np.nan)
    spread = float(np.nanmean(np.nanmax(rows, axis=axis) - np.nanmin(rows, axis=axis)))
    text = f"its scores reach {reach:.3g}, where its type's numbers are {spacing:.2g} apart"
    if peak < SATURATED and reach > AMPLIFIES * max(spread, 1e-30):
        return "cancellation", (
            f"{text}, and differ by {spread:.2g} only: the softmax subtracts the largest, and what is left is "
            f"rounding; {grew}"
        )
    one_hot = f"the largest weight is {peak:.2f} on average"
    return "softmax", f"{text}, and weights change by that factor of e; {one_hot}: {grew}"


def _accumulated(run: Run) -> Blame:
    half = next((m for m in run.tensors if m.error >= run.error / 2), None)
    if half is None:
        return Blame(None, "rounding", "no tensor has as much as half of the final error")
    rounded = [m for m in run.tensors if m.own > 0]
    unit = max((m.unit for m in rounded), default=half.unit)
    if run.error <= FEW_UNITS * unit:
        return Blame(
            None,
            "rounding",
            f"the final error of {run.error:.1e} is {run.error / unit:.0f} unit roundoffs after {len(rounded)} "
            "roundings: what this precision costs, and no tensor is to blame",
        )
    return Blame(
        half,
        "accumulation",
        f"{len(rounded)} roundings add up to {run.error / unit:.0f} unit roundoffs, and no tensor makes an error "
        f"much larger; half of it is there at {half.name}",
    )


FEW_UNITS = 32.0
"""Unit roundoffs that a deep model has at its end without any fault of its own."""
