"""What a TensorRT plan computes, emulated on the CPU: each operator in float32 and its result rounded to the type that
it is stored in, but for what a kernel never stores: the scores of fused attention, and a product whose bias is added by
the kernel of the product.

This is the only emulation of 16-bit storage in the house. It is no GPU: the order of sums is another, and the
approximations of a GPU's kernels are not in it.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from attnforge.export.diagnosis.stages import scores_of
from attnforge.export.graphs.execute import Runner, at_own_precision
from attnforge.export.graphs.types import LOW
from attnforge.export.tensorrt.build import Plan, site_of


def emulate(model: ir.Model, fused: Collection[str], plan: Plan | None = None) -> Runner:
    """A graph that was lowered for TensorRT, from its inputs to its outputs, both float32 where they are 16-bit.

    Args:
        model: is not touched.
        fused: names of the sites that TensorRT fuses.
        plan: compiled from `model`, tells which kernels add the bias to their product. Without a plan every product is
            rounded before its bias is added, which is stricter than a plan.
    """
    held = held_by_fused_kernels(model, fused)
    if plan is not None:
        held += _held_before_bias(model, plan)
    return at_own_precision(model, unrounded=held)


def held_by_fused_kernels(model: ir.Model, fused: Collection[str]) -> list[ir.Value]:
    """The 16-bit scores of the sites named `fused`, from the product to the softmax: a fused kernel holds them in
    float32 and rounds the attention map alone."""
    held: list[ir.Value] = []
    for node in model.graph:
        if node.op_type == "Softmax" and site_of(str(node.name)) in fused:
            held += [value for value in scores_of(node) if value.dtype in LOW]
    return held


def _held_before_bias(model: ir.Model, plan: Plan) -> list[ir.Value]:
    """The 16-bit products that a kernel of `plan` holds in float32 until it has added the bias, as eager does."""
    held: list[ir.Value] = []
    for node in model.graph:
        if node.op_type != "Add" or not any(value is not None and value.is_initializer() for value in node.inputs):
            continue
        for value in node.inputs:
            product = value.producer() if value is not None else None
            if value is None or product is None or product.op_type != "MatMul" or value.dtype not in LOW:
                continue
            if not {*plan.layers_of(str(product.name))}.isdisjoint(plan.layers_of(str(node.name))):
                held.append(value)
    return held
