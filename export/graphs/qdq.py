"""The quantised parts of a graph: products and attention with Q/DQ, and tables with DQ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.export.graphs.build import Builder, constant, like
from attnforge.export.graphs.nodes import constant_input, constant_of, input_of, is_op, maker_of

FP8, MOST_FP8 = ir.DataType.FLOAT8E4M3FN, 448
"""E4M3 and its largest number."""

FLOAT, INT8 = ir.DataType.FLOAT, ir.DataType.INT8

CACHE_IN_INT8 = "attnforge.cache_in_int8"
"""Metadata of the products that :class:`InInt8` writes, which distinguishes its rounding from the model author's."""


@dataclass(frozen=True)
class Scheme:
    """A type that products are quantised to.

    Attributes:
        name: name of the precision.
        dtype: type of the weights, and of quantised inputs.
        most: the largest number that a scale is made for.
        blocks: lengths of blocks of channels that share a scale; empty if a scale is for all channels of an output.
            With blocks, inputs are not quantised.
    """

    name: str
    dtype: ir.DataType
    most: int
    blocks: tuple[int, ...] = ()

    def fits(self, channels: int, block: int) -> bool:
        """Whether a weight with this many channels has several blocks; TensorRT-RTX dequantises a single one ahead."""
        return channels % block == 0 and channels > block

    @property
    def least(self) -> int:
        """The lowest number; weights do not use -128, and inputs only if they are clipped."""
        return -self.most - int(self.dtype.is_integer())

    def rounded(self, numbers: Array) -> Array:
        """Numbers, already divided by their scale, in the scheme's type; those beyond its range are clipped."""
        whole = np.rint(numbers) if self.dtype.is_integer() else numbers
        return np.clip(whole, self.least, self.most).astype(self.dtype.numpy())


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("int8", INT8, 127),
        Scheme("fp8", FP8, MOST_FP8),
        Scheme("int4", ir.DataType.INT4, 7, blocks=(32, 128)),
    )
}


@dataclass(frozen=True)
class Between:
    """A product whose weight is dequantised, and in most cases its input too.

    Attributes:
        product: the MatMul.
        weight: the DequantizeLinear of its low-bit weight.
        quantise: the QuantizeLinear of its input; None if the input is not quantised.
        dequantise: the DequantizeLinear of its input; None if the input is not quantised.
    """

    product: ir.Node
    weight: ir.Node
    quantise: ir.Node | None
    dequantise: ir.Node | None

    @property
    def stored(self) -> ir.Value:
        """The weight as it is stored."""
        return input_of(self.weight)

    @property
    def with_bias(self) -> tuple[ir.Node, ir.Value | None]:
        """The last node of the product and its bias: the Add of one number per output channel, or else the product
        itself."""
        output = self.product.outputs[0]
        users = [use.node for use in output.uses()]
        if len(users) != 1 or users[0].op_type != "Add" or output.is_graph_output():
            return self.product, None
        bias = next((value for value in users[0].inputs if value is not output), None)
        if bias is None or not bias.is_initializer() or output.shape is None or bias.shape != [output.shape[-1]]:
            return self.product, None
        return users[0], bias

    @classmethod
    def of(cls, node: ir.Node) -> Between | None:
        """The Q/DQ around a node; None for a node without Q/DQ."""
        if not is_op(node, "MatMul"):
            return None
        dequantise, weight = (maker_of(value) for value in node.inputs)
        if not is_op(weight, "DequantizeLinear") or not input_of(weight).is_initializer():
            return None
        if not is_op(dequantise, "DequantizeLinear"):
            return cls(node, weight, None, None)
        quantise = maker_of(dequantise.inputs[0])
        return cls(node, weight, quantise, dequantise) if is_op(quantise, "QuantizeLinear") else None


def products_between(model: ir.Model, dtype: ir.DataType | None = None) -> list[Between]:
    """The products with Q/DQ, in graph order.

    Args:
        model: is not changed.
        dtype: type of the stored weight; by default any.
    """
    products = [between for node in model.graph if (between := Between.of(node)) is not None]
    return [between for between in products if dtype in (None, between.stored.dtype)]


@dataclass(frozen=True)
class Lookup:
    """A lookup of rows in a table that is stored in 8 bits.

    Attributes:
        node: the Gather.
        table: `(rows, channels)`, int8.
        scale: `(rows,)`, float32.
        index: the rows that are looked up.
    """

    node: ir.Node
    table: ir.Value
    scale: ir.Value
    index: ir.Value

    @classmethod
    def of(cls, node: ir.Node) -> Lookup | None:
        """The lookup with the DQ before it; None for other nodes, or if the table is not in 8 bits."""
        dequantise = maker_of(node.inputs[0]) if is_lookup(node) else None
        if not is_op(dequantise, "DequantizeLinear"):
            return None
        table, scale, *rest = dequantise.inputs
        by_row = dequantise.attributes.get_int("axis", 1) == 0 and not rest
        if table is None or scale is None or not table.is_initializer() or not by_row:
            return None
        return cls(node, table, scale, input_of(node, 1))


def lookups_in_8_bits(model: ir.Model) -> list[Lookup]:
    """The lookups in tables in 8 bits, in graph order."""
    return [lookup for node in model.graph if (lookup := Lookup.of(node)) is not None]


def before_fp8(*values: ir.Value) -> tuple[list[ir.Value], tuple[float, ...]] | None:
    """The inputs of the fp8 Q/DQ that give these values, and their scales; None if a value has no such Q/DQ."""
    sources, scales = [], []
    for value in values:
        dequantise = value.producer()
        narrow = dequantise.inputs[0] if is_op(dequantise, "DequantizeLinear") else None
        quantise = narrow.producer() if narrow is not None and narrow.dtype == FP8 else None
        if not is_op(quantise, "QuantizeLinear"):
            return None
        number = constant_of(quantise.inputs[1])
        if number is None or number.size != 1:
            return None
        sources.append(input_of(quantise))
        scales.append(float(number.item()))
    return sources, tuple(scales)


@dataclass(frozen=True)
class InInt8:
    """Keys or values that are rounded to int8, with a scale for every channel of every head.

    Attributes:
        source: `(batch, key heads, tokens, size)`, before rounding.
        stored: the same in int8.
        scale: `(key heads, 1, size)`, float32 > 0.
    """

    source: ir.Value
    stored: ir.Value
    scale: Array

    @classmethod
    def of(cls, op: Builder, source: ir.Value, scale: Array) -> InInt8:
        """Round to int8.

        Args:
            op: records the nodes.
            source: the values to round, float32.
            scale: the scale.
        """
        divided = _multiplied(op, source, 1 / scale)
        stored = like(op.QuantizeLinear(divided, constant(op, 1, FLOAT), constant(op, 0, INT8)), source, INT8)
        return cls(source, stored, scale)

    def restored(self, op: Builder, stored: ir.Value | None = None) -> ir.Value:
        """Write the dequantised numbers, float32.

        Args:
            op: records the nodes.
            stored: int8 numbers, perhaps of another number of tokens; by default those that were rounded.
        """
        stored = self.stored if stored is None else stored
        wide = like(op.DequantizeLinear(stored, constant(op, 1, FLOAT), constant(op, 0, INT8)), stored, FLOAT)
        return _multiplied(op, wide, self.scale)

    @classmethod
    def before(cls, value: ir.Value) -> InInt8 | None:
        """The rounding that gives a value; None if it is not the result of one."""
        return cls.of_stored(stored_before(value), value)

    @classmethod
    def of_stored(cls, stored: ir.Value | None, restored: ir.Value | None) -> InInt8 | None:
        """The rounding that gives int8 numbers; None if something else computes them.

        Args:
            stored: the numbers.
            restored: numbers that were dequantised with the same scale, perhaps of another number of tokens.
        """
        quantise = maker_of(stored)
        if stored is None or not is_op(quantise, "QuantizeLinear"):
            return None
        divided, multiplied = maker_of(quantise.inputs[0]), maker_of(restored)
        if not _is_marked(divided) or multiplied is None:
            return None
        scale = constant_input(multiplied, 1)
        return cls(input_of(divided), stored, scale) if scale is not None else None


def _multiplied(op: Builder, value: ir.Value, factor: Array) -> ir.Value:
    return like(op.op("Mul", [value, constant(op, factor, FLOAT)], metadata_props={CACHE_IN_INT8: "1"}), value)


def _is_marked(node: ir.Node | None) -> TypeGuard[ir.Node]:
    return is_op(node, "Mul") and CACHE_IN_INT8 in node.metadata_props


def stored_before(value: ir.Value) -> ir.Value | None:
    """The int8 numbers that :meth:`InInt8.restored` dequantised to a value; None for other values."""
    scaled = value.producer()
    if not _is_marked(scaled) or constant_of(scaled.inputs[1]) is None:
        return None
    wide = maker_of(scaled.inputs[0])
    if not is_op(wide, "DequantizeLinear"):
        return None
    stored = input_of(wide)
    return stored if stored.dtype == INT8 and not stored.is_initializer() else None


def rounded_to(op: Builder, x: ir.Value, scale: float, dtype: ir.DataType, name: str | None = None) -> ir.Value:
    """Round `x`, of any shape, to a low-bit type with Q/DQ of one scale.

    Args:
        op: records the nodes.
        x: of a floating-point type.
        scale: scale of its numbers, > 0.
        dtype: the low-bit type.
        name: for the QuantizeLinear.
    """
    step, zero = constant(op, scale, x.dtype), constant(op, 0, dtype)
    low = like(op.op("QuantizeLinear", [x, step, zero], name=name), x, dtype)
    return like(op.DequantizeLinear(low, step, zero), x)


def rounding_of(softmax: str) -> str:
    """The name of the QuantizeLinear after the softmax of attention in fp8, given the name of the softmax."""
    return f"{softmax}/fp8"


def is_of_fp8(node: ir.Node) -> bool:
    """Whether a node quantises to fp8 or dequantises from it."""
    if is_op(node, "QuantizeLinear"):
        return node.outputs[0].dtype == FP8
    return is_op(node, "DequantizeLinear") and input_of(node).dtype == FP8


def is_lookup(node: ir.Node) -> bool:
    """Whether a node looks up rows of a table by index."""
    return is_op(node, "Gather") and node.attributes.get_int("axis", 0) == 0
