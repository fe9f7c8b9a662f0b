"""Emulation of a TensorRT plan on the CPU: each operator computes in float32 and rounds its result to the type that it
is stored in, except for what a kernel never stores: the scores of fused attention.

This is the only emulation of 16-bit storage in the package. It differs from a GPU in the order of sums, and does not
include the approximations of a GPU's kernels.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from attnforge.export.diagnosis.stages import scores_of
from attnforge.export.graphs.execute import Runner, at_own_precision
from attnforge.export.graphs.types import LOW
from attnforge.export.tensorrt.build import site_of


def emulate(model: ir.Model, fused: Collection[str]) -> Runner:
    """A runner of a graph that was lowered for TensorRT; inputs and outputs that are 16-bit in the graph are float32.
    Every product is rounded before its bias is added, which is stricter than a plan.

    Args:
        model: not modified.
        fused: names of the sites that TensorRT fuses.
    """
    return at_own_precision(model, unrounded=unrounded_in_fused_kernels(model, fused))


def unrounded_in_fused_kernels(model: ir.Model, fused: Collection[str]) -> list[ir.Value]:
    """The 16-bit scores of the sites named `fused`, from the product to the softmax: a fused kernel keeps them in
    float32 and rounds only the attention map."""
    softmaxes = (node for node in model.graph if node.op_type == "Softmax" and site_of(str(node.name)) in fused)
    return [value for softmax in softmaxes for value in scores_of(softmax) if value.dtype in LOW]
