"""Products between Q/DQ, as a graph says that they are in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True)
class Between:
    """A product whose input and weight are dequantised.

    Attributes:
        product: the MatMul.
        quantise: the QuantizeLinear of its input.
        dequantise: the DequantizeLinear of that.
        weight: the DequantizeLinear of its weight, which is stored in 8 bits.
    """

    product: ir.Node
    quantise: ir.Node
    dequantise: ir.Node
    weight: ir.Node

    @classmethod
    def of(cls, node: ir.Node) -> Between | None:
        """The Q/DQ around a node; None of a node that has none."""
        if node.op_type != "MatMul" or node.domain != "":
            return None
        dequantise, weight = (value.producer() if value is not None else None for value in node.inputs)
        if not (_is(dequantise, "DequantizeLinear") and _is(weight, "DequantizeLinear")):
            return None
        assert dequantise is not None and weight is not None
        quantise = dequantise.inputs[0].producer() if dequantise.inputs[0] is not None else None
        stored = weight.inputs[0]
        if not _is(quantise, "QuantizeLinear") or stored is None or not stored.is_initializer():
            return None
        assert quantise is not None
        return cls(node, quantise, dequantise, weight)


def products_between(model: ir.Model) -> list[Between]:
    """The products between Q/DQ, in the order of the graph."""
    return [between for node in model.graph if (between := Between.of(node)) is not None]


def _is(node: ir.Node | None, op_type: str) -> bool:
    return node is not None and node.domain == "" and node.op_type == op_type
