"""The estimated seconds of an operator in 16 bits and in fp32."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from attnforge.export.flops import known_flops
from attnforge.runtime.inputs import size_of

RATE_16, RATE_32, BANDWIDTH = 312e12, 19.5e12, 1.6e12
"""Operations per second of 16-bit and fp32 products, and bytes per second, of an A100 (NVIDIA A100 datasheet). Only
their ratios matter here."""


def cost_of(node: ir.Node, sizes: Mapping[str, int], is_high: bool) -> float:
    """Estimated seconds of an operator, from its products and the memory that it reads and writes.

    Args:
        node: a node whose inputs and outputs have shapes.
        sizes: sizes of the symbols in them.
        is_high: whether it computes in fp32 rather than in 16 bits.
    """
    numbers = sum(math.prod(_shape_of(v, sizes)) for v in (*node.inputs, *node.outputs) if v is not None)
    return known_flops(node, sizes) / (RATE_32 if is_high else RATE_16) + numbers * (4 if is_high else 2) / BANDWIDTH


def _shape_of(value: ir.Value, sizes: Mapping[str, int]) -> list[int]:
    """The shape of a value at these sizes; a dim that they do not determine counts as 1."""
    shape = []
    for dim in value.shape or ():
        try:
            shape.append(dim if isinstance(dim, int) else size_of(str(dim.value), sizes))
        except (KeyError, NotImplementedError, ZeroDivisionError):
            shape.append(1)
    return shape
