"""Products between Q/DQ and tables behind DQ, as a graph says that they are in 8 bits."""

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


@dataclass(frozen=True)
class Lookup:
    """A lookup of rows of a table that is stored in 8 bits.

    Attributes:
        node: the Gather.
        table: (rows, channels) int8.
        scale: (rows,) float32.
        index: the rows that are looked up.
    """

    node: ir.Node
    table: ir.Value
    scale: ir.Value
    index: ir.Value

    @classmethod
    def of(cls, node: ir.Node) -> Lookup | None:
        """The DQ before a lookup; None of a node that is none, or of a table that is not in 8 bits."""
        if not is_lookup(node):
            return None
        data, index = node.inputs
        dequantise = data.producer() if data is not None else None
        if not _is(dequantise, "DequantizeLinear") or index is None:
            return None
        assert dequantise is not None
        table, scale, *rest = dequantise.inputs
        by_row = dequantise.attributes.get_int("axis", 1) == 0 and not rest
        if table is None or scale is None or not table.is_initializer() or not by_row:
            return None
        return cls(node, table, scale, index)


def lookups_in_8_bits(model: ir.Model) -> list[Lookup]:
    """The lookups of tables in 8 bits, in the order of the graph."""
    return [lookup for node in model.graph if (lookup := Lookup.of(node)) is not None]


def is_lookup(node: ir.Node) -> bool:
    """Whether a node reads rows of a table by their number."""
    return _is(node, "Gather") and node.attributes.get_int("axis", 0) == 0


def _is(node: ir.Node | None, op_type: str) -> bool:
    return node is not None and node.domain == "" and node.op_type == op_type
