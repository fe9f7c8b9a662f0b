"""The effect of quantising on a model, step by step: which low-bit rounding costs the outputs most, and why.

A step is a Q/DQ of a computed tensor: the input of products, or query, key or value of fp8 attention. Weights are
low-bit in both graphs, because a bundle has no others; their cost is the rest of the error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attnforge.arrays import Array
from attnforge.bundle import Quantised
from attnforge.export.diagnosis.causes import HALVED, TRIED, numbers_of
from attnforge.export.diagnosis.stages import module_of
from attnforge.export.diagnosis.trace import Cause, Finding, TensorErrors, Trace, error_of
from attnforge.export.graphs.build import initializer, like
from attnforge.export.graphs.execute import as_it_is
from attnforge.export.graphs.nodes import constant_of, input_of, is_op, maker_of
from attnforge.export.graphs.qdq import INT8, SCHEMES, Between, Scheme, products_between
from attnforge.numbers import scientific

FEW = 16
"""An input must have this many channels per outlier channel."""

OUTLIER = 4.0
"""Ratio to all other channels from which a channel takes up the range."""

LISTED = 4
"""Maximum number of channels that are named."""

SATURATES = 2**15
"""Limit of the sum of two neighbouring 8-bit products on processors without VNNI."""

MUCH = 4.0
"""Minimum ratio of the error of saturated sums to the graph's own error, to distinguish the two."""

ALIKE = 0.25
"""Maximum relative difference between the error of a backend's tensor and that of saturated sums, to be attributed to
these."""


@dataclass(frozen=True)
class Rounding:
    """A low-bit rounding of a computed tensor.

    Attributes:
        tensor: name of its output.
        source: name of its input.
        scale: scale of all its numbers.
        scheme: type of its low-bit numbers.
        module: module of the first product that reads it.
        users: names of the nodes that read it.
        is_input: whether it is the input of products, whose last dim is channels.
    """

    tensor: str
    source: str
    scale: float
    scheme: Scheme
    module: str
    users: tuple[str, ...]
    is_input: bool


def with_weights(model: ir.Model) -> ir.Model:
    """A copy of a quantised graph whose weights and tables are dequantised, so that only steps have Q/DQ."""
    copy = model.clone()
    dequantised = [node for node in copy.graph if is_op(node, "DequantizeLinear")]
    stored = [node for node in dequantised if input_of(node).is_initializer()]
    names = [str(node.outputs[0].name) for node in stored]
    arrays = as_it_is(copy, names)({}) if names else {}
    for node, name in zip(stored, names, strict=True):
        node.outputs[0].name = f"{name}/stored"
        ir.convenience.replace_all_uses_with(node.outputs[0], initializer(copy.graph, name, arrays[name]))
    RemoveUnusedNodesPass()(copy)
    return copy


def unrounded(model: ir.Model, tensors: Sequence[str] | None = None) -> ir.Model:
    """A copy of a graph whose steps do not round: all of them, or those that compute `tensors`."""
    copy = model.clone()
    for node, quantise in _pairs(copy):
        if tensors is not None and node.outputs[0].name not in tensors:
            continue
        name, source = str(node.outputs[0].name), input_of(quantise)
        identity = ir.node("Identity", [source], name=f"{node.name}/unrounded")
        copy.graph.insert_before(node, identity)
        node.outputs[0].name = f"{name}/rounded"
        like(identity.outputs[0], node.outputs[0]).name = name
        ir.convenience.replace_all_uses_with(node.outputs[0], identity.outputs[0])
    RemoveUnusedNodesPass()(copy)
    return copy


def _pairs(model: ir.Model) -> list[tuple[ir.Node, ir.Node]]:
    """Every DequantizeLinear of a computed tensor, with its QuantizeLinear."""
    dequantised = [node for node in model.graph if is_op(node, "DequantizeLinear")]
    pairs = [(node, maker_of(node.inputs[0])) for node in dequantised]
    return [(node, quantise) for node, quantise in pairs if is_op(quantise, "QuantizeLinear")]


def steps_of(model: ir.Model) -> Iterator[Rounding]:
    """Yield the steps of a graph that :func:`with_weights` made, in graph order."""
    for node, quantise in _pairs(model):
        scale, readers = constant_of(quantise.inputs[1]), [use.node for use in node.outputs[0].uses()]
        if scale is None or scale.size != 1 or not readers:
            continue
        yield Rounding(
            tensor=str(node.outputs[0].name),
            source=str(input_of(quantise).name),
            scale=float(scale.item()),
            scheme=SCHEMES["int8" if quantise.outputs[0].dtype == INT8 else "fp8"],
            module=module_of(next((reader for reader in readers if reader.op_type == "MatMul"), readers[0])),
            users=tuple(str(reader.name) for reader in readers),
            is_input=all(reader.op_type == "MatMul" and input_of(reader, 1).is_initializer() for reader in readers),
        )


def costliest_step(trace: Trace, quantised: Quantised) -> Finding:
    """The step whose rounding costs the outputs most, and why; or a finding at no single step.

    Args:
        trace: trace of the quantised graph, whose float64 does not round.
        quantised: the manifest's record.
    """
    by_name = {tensor.name: tensor for tensor in trace.tensors}
    steps = [step for step in steps_of(trace.model) if step.tensor in by_name]
    largest = sorted(steps, key=lambda step: -by_name[step.tensor].own)[:TRIED]
    without = {step.tensor: error_without(trace, step.tensor) for step in largest}
    costliest = min(largest, key=lambda step: without[step.tensor], default=None)
    product, worst = max(quantised.products, key=lambda p: p.error, default=None), "no product is quantised"
    if product is not None:
        worst = f"{product.module} has the largest error by itself, weights and input: {scientific(product.error)}"
    if costliest is None:
        return Finding(cause="quantisation", evidence=f"no input of a product is rounded; {worst}")
    tensor, left = by_name[costliest.tensor], without[costliest.tensor]
    only_rounding: tuple[Cause, str] = ("quantisation", f"rounding it has an error of {scientific(tensor.own)}")
    cause, why = why_costly(costliest, trace.stored[costliest.source]) or only_rounding
    module = _modules(costliest, quantised)
    if not costliest.is_input:  # a module's attention has several operands
        why = f"of {costliest.source}, {why}"
    evidence = (
        f"{why}. Rounding inputs costs the outputs {scientific(trace.error)}, and {scientific(left)} without that of "
        f"{module}, which costs most; {worst}"
    )
    if cause == "quantisation" and left > HALVED * trace.error:
        return Finding(cause=cause, evidence=f"{module}: {evidence}")
    return Finding.at(tensor, cause, evidence, module=module, error_without=left)


def _modules(step: Rounding, quantised: Quantised) -> str:
    """The modules whose products read a step's output."""
    by_product = {f"{product.name}/{quantised.type}": product.module for product in quantised.products}
    modules = dict.fromkeys(by_product[user] for user in step.users if user in by_product)
    return ", ".join([*modules][:LISTED]) + (", …" if len(modules) > LISTED else "") if modules else step.module


def error_without(trace: Trace, tensor: str) -> float:
    """The error of the outputs if one step does not round."""
    results = as_it_is(unrounded(trace.model, [tensor]), trace.outputs)(trace.feeds)
    return max(error_of(results[output], trace.exact[output]) for output in trace.outputs)


# --- why --------------------------------------------------------------------------------------------------------------


def why_costly(step: Rounding, source: Array) -> tuple[Cause, str] | None:
    """Why a step costs what it does; None if it is only the rounding.

    Args:
        step: the step.
        source: `(…, channels)`, its input.
    """
    return _clipped(step, source) or _outliers(step, source)


def rounded(step: Rounding, source: Array, scale: float | Array) -> Array:
    """Numbers after a step's rounding with a given scale."""
    return step.scheme.rounded(source / scale).astype(np.float64) * scale


def _clipped(step: Rounding, source: Array) -> tuple[Cause, str] | None:
    """Clipping, if most of the error comes from numbers beyond the range."""
    numbers = source[np.isfinite(source)]
    limit = step.scale * step.scheme.most
    beyond = np.abs(numbers) > limit * (1 + 1 / 256)  # by token, a number may exceed it by a rounding
    lost = float(np.square(np.abs(numbers[beyond]) - limit).sum())
    total = float(np.square(rounded(step, numbers, step.scale) - numbers).sum())
    if lost <= HALVED * total or not beyond.any():
        return None
    return "clipping", (
        f"{beyond.mean():.2%} of its numbers are beyond its range of ±{limit:.3g}, up to "
        f"{np.abs(numbers).max():.3g}, and clipped, which is {lost / total:.0%} of the squared error there; calibrate "
        "with data like this, or quantise by token"
    )


def _outliers(step: Rounding, source: Array) -> tuple[Cause, str] | None:
    """Outlier channels, if a few take up the range and the others would have a far smaller error without them."""
    if not step.is_input or step.scheme.dtype != INT8:  # floating-point steps are as fine for small numbers
        return None
    rows = source.reshape(-1, source.shape[-1])
    rows = rows[np.isfinite(rows).all(axis=-1)]
    peaks = np.abs(rows).max(axis=0, initial=0.0)
    order = np.argsort(-peaks)
    few = max(len(peaks) // FEW, 1)
    count = next(
        (k for k in range(1, few + 1) if len(peaks) > k and peaks[order[k]] * OUTLIER <= peaks[order[k - 1]]), None
    )
    if count is None or not peaks[order[count]]:
        return None
    others = np.sort(order[count:])
    rest = rows[:, others]
    range_of_rest = peaks[others].max() / step.scheme.most
    error, alone = (float(np.linalg.norm(rounded(step, rest, scale) - rest)) for scale in (step.scale, range_of_rest))
    if alone > HALVED * error:
        return None
    channels = sorted(int(channel) for channel in order[:count])
    named = ", ".join(map(str, channels[:LISTED])) + (", …" if count > LISTED else "")
    noun, verb = ("channel", "takes") if count == 1 else ("channels", "take")
    return "outlier channel", (
        f"{noun} {named} {verb} up the range: at most {peaks[order[0]]:.3g}, where all others are at "
        f"most {peaks[others].max():.3g}, and so have {peaks[others].max() / step.scale:.0f} steps on each side; "
        f"with a range of their own their error would be {error / alone:.0f} times smaller. Real data allows balancing "
        "channels"
    )


# --- saturation -------------------------------------------------------------------------------------------------------


def saturated_product(between: Between, inputs: Array) -> Array | None:
    """An 8-bit product whose neighbouring pairs are added in 16 bits, dequantised; None if that changes nothing.

    Args:
        between: the product, in a graph with weights as they are stored.
        inputs: `(…, channels)`, float, the numbers before its input is quantised.
    """
    if between.quantise is None or between.stored.dtype != INT8 or between.stored.const_value is None:
        return None
    step, scales = numbers_of(between.quantise.inputs[1]), numbers_of(between.weight.inputs[1])
    if step is None or scales is None:
        return None
    weight = between.stored.const_value.numpy().astype(np.int64)
    numbers = SCHEMES["int8"].rounded(inputs / step).astype(np.int64) + 128  # unsigned, as processors multiply
    total = np.zeros((*numbers.shape[:-1], weight.shape[1]), np.int64)
    saturates = False
    for i in range(0, len(weight), 2):  # an odd last channel has no neighbour
        pair = numbers[..., i : i + 2] @ weight[i : i + 2]
        kept = np.clip(pair, -SATURATES, SATURATES - 1)
        saturates |= bool((kept != pair).any())
        total += kept
    total -= 128 * weight.sum(axis=0)
    return total * (step * scales) if saturates else None


def saturated_on(canonical: ir.Model, trace: Trace, errors: Mapping[str, float]) -> tuple[TensorErrors, str] | None:
    """The first product of a backend whose error is that of saturated sums, and the numbers that prove it.

    Args:
        canonical: the quantised graph, with weights as they are stored.
        trace: its trace.
        errors: errors of the backend's tensors, relative to float64.
    """
    for between in products_between(canonical):
        source = between.quantise.inputs[0] if between.quantise is not None else None
        product = saturated_product(between, trace.stored[str(source.name)]) if source is not None else None
        if product is None:
            continue
        last, bias = between.with_bias  # backends add it in the same kernel
        name, added = str(last.outputs[0].name), numbers_of(bias)
        tensor = next((tensor for tensor in trace.tensors if tensor.name == name), None)
        if tensor is None or name not in errors:
            continue
        expected = error_of(product if added is None else product + added, trace.exact[name])
        if expected > MUCH * tensor.error and abs(errors[name] - expected) <= ALIKE * expected:
            return tensor, (
                f"{name} {scientific(errors[name])} off float64, where the graph is {scientific(tensor.error)} off, "
                f"and sums of pairs that saturate at 16 bits would be {scientific(expected)} off: so the backend adds "
                "8-bit products as processors without VNNI do"
            )
    return None
