"""The estimated seconds of an operator in 16 bits and in fp32."""

from __future__ import annotations

import onnx_ir as ir

from attnforge.export.flops import known_flops
from attnforge.export.graphs.nodes import inputs_of
from attnforge.export.room import Numbers

RATE_16, RATE_32, BANDWIDTH = 312e12, 19.5e12, 1.6e12
"""Operations per second of 16-bit and fp32 products, and bytes per second, of an A100 (NVIDIA A100 datasheet). Only
their ratios matter here."""


def cost_of(node: ir.Node, numbers: Numbers, is_high: bool) -> float:
    """Estimated seconds of an operator, from its products and the memory that it reads and writes.

    Args:
        node: the operator; inputs and outputs whose shape is not known do not count.
        numbers: counts the elements of inputs and outputs.
        is_high: whether it computes in fp32 rather than in 16 bits.
    """
    moved = sum(map(numbers, (*inputs_of(node), *node.outputs))) * (4 if is_high else 2)
    return known_flops(node, numbers.sizes) / (RATE_32 if is_high else RATE_16) + moved / BANDWIDTH
