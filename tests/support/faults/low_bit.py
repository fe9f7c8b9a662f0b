"""Faults of fp8 products and attention, of products with 4-bit weights, and of 8-bit tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.export.graphs.build import Builder
from tests.support.faults.eight_bits import BOTH, negated, next_token, one, ones, row_lost, swapped, twice
from tests.support.faults.graph import (
    Alter,
    Build,
    Family,
    Graph,
    NotThere,
    first_along,
    float_constant,
    is_constant,
    numbers,
    producer,
    required,
    rolled,
)

STATIC, IN_BLOCKS_OF_4_BITS = "static", "blocks-of-4-bits"

QUERY, KEY, OUTPUT, UP, DOWN = 0, 1, 3, 4, 5
"""Products of a layer, in the order of the graph."""

E4M3, E5M2 = ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT8E5M2


def times(factor: float) -> Build:
    return lambda op, x: op.Mul(x, float_constant(op, x, factor))


# --- fp8 --------------------------------------------------------------------------------------------------------------


class Rounding:
    """The nodes that round a value to fp8: it is divided by a scale, cast, cast back, and multiplied by the scale.

    Attributes:
        multiply: the final Mul.
        narrow: the Cast to fp8.
        divide: the Div.
    """

    def __init__(self, value: ir.Value | None) -> None:
        self.multiply = producer(value)
        self.narrow = producer(producer(self.multiply.inputs[0]).inputs[0])
        self.divide = producer(self.narrow.inputs[0])
        if [n.op_type for n in (self.multiply, self.narrow, self.divide)] != ["Mul", "Cast", "Div"]:
            raise NotThere("a value that is rounded to fp8")


Rounded = Callable[[Graph], Rounding]


def products(g: Graph) -> list[ir.Node]:
    """Return the products with fp8 weights."""
    return [node for node in g.nodes("MatMul") if _stored(node) is not None]


def _stored(product: ir.Node) -> ir.Value | None:
    scaled = product.inputs[1].producer() if product.inputs[1] is not None else None
    cast = scaled.inputs[0].producer() if scaled is not None and scaled.inputs[0] is not None else None
    value = cast.inputs[0] if cast is not None and cast.op_type == "Cast" else None
    return value if value is not None and value.is_initializer() and value.dtype == E4M3 else None


def input_of(i: int) -> Rounded:
    return lambda g: Rounding(products(g)[i].inputs[0])


def query(g: Graph) -> Rounding:
    return Rounding(g.sites[0].scores.inputs[0])


def key(g: Graph) -> Rounding:
    return Rounding(g.sites[0].scores.inputs[1])


def value(g: Graph) -> Rounding:
    return Rounding(_mix(g).inputs[1])


def weights(g: Graph) -> Rounding:
    """The rounding of the softmax output."""
    return Rounding(_mix(g).inputs[0])


def _mix(g: Graph) -> ir.Node:
    """Return the product of the softmax output and the values."""
    node = g.sites[0].context
    while node.op_type != "MatMul":
        (use,) = node.outputs[0].uses()
        node = use.node
    return node


def scaled(rounded: Rounded, factor: float, where: str = "both") -> Alter:
    """Multiply the scale by a factor: in the division, in the multiplication, or both."""

    def alter(g: Graph) -> None:
        rounding = rounded(g)
        if where != "multiply":
            g.before(rounding.divide, 1, times(factor))
        if where != "divide":
            g.before(rounding.multiply, 1, times(factor))

    return alter


def in_e5m2(rounded: Rounded) -> Alter:
    """Round to E5M2, which has one mantissa bit less."""

    def alter(g: Graph) -> None:
        narrow = rounded(g).narrow
        narrow.attributes["to"] = ir.AttrInt64("to", E5M2.value)
        narrow.outputs[0].type = ir.TensorType(E5M2)

    return alter


def overflowing(rounded: Rounded) -> Alter:
    """Halve the range, and convert numbers outside it to NaN."""

    def alter(g: Graph) -> None:
        scaled(rounded, 0.5)(g)
        rounded(g).narrow.attributes["saturate"] = ir.AttrInt64("saturate", 0)

    return alter


def unrounded(rounded: Rounded) -> Alter:
    def alter(g: Graph) -> None:
        rounding = rounded(g)
        g.replace(rounding.multiply.outputs[0], required(rounding.divide.inputs[0]))

    return alter


def scale_of(rounded: Rounded, another: Rounded) -> Alter:
    """Multiply a value by the scale of another."""

    def alter(g: Graph) -> None:
        scale = another(g).multiply.inputs[1]
        rounded(g).multiply.replace_input_with(1, scale)
        g.graph.sort()

    return alter


def operand_of(i: int, j: int, index: int) -> Alter:
    """Give a product the input (0) or the weight (1) of another."""

    def alter(g: Graph) -> None:
        node, instead = (products(g)[k] for k in (i, j))
        if node.inputs[index] is instead.inputs[index]:
            raise NotThere("another operand")
        node.replace_input_with(index, instead.inputs[index])
        g.graph.sort()

    return alter


def fp8_weight(i: int, change: Callable[[Array], Array]) -> Alter:
    """Change the numbers of a weight, clipped to fp8's range."""

    def alter(g: Graph) -> None:
        stored = required(_stored(products(g)[i]))
        g.set(stored, np.clip(change(numbers(stored).astype(np.float32)), -448, 448))

    return alter


def fp8_bits(i: int, change: Callable[[Array], Array]) -> Alter:
    """Change the bits of a weight, as uint8."""

    def alter(g: Graph) -> None:
        stored = required(_stored(products(g)[i]))
        before = numbers(stored)
        g.set(stored, change(before.view(np.uint8)).view(before.dtype))

    return alter


def fp8_scales(i: int, change: Callable[[Array], Array]) -> Alter:
    """Change the scales of the output channels."""

    def alter(g: Graph) -> None:
        scales = required(producer(products(g)[i].inputs[1]).inputs[1])
        g.set(scales, change(numbers(scales).copy()))

    return alter


def doubled_exponent(bits: Array) -> Array:
    """Double the numbers below 128, by their exponent."""
    return np.where((bits & 0x78) < 0x70, bits + np.uint8(8), bits)


def following(product: ir.Node, op_type: str) -> ir.Node:
    """Return the node of a type after a product, with only Mul nodes in between."""
    node = product
    while True:
        uses = list(node.outputs[0].uses())
        node = uses[0].node
        if node.op_type == op_type:
            return node
        if node.op_type != "Mul" or len(uses) > 1:
            raise NotThere(f"{op_type} after a product")


def fp8_bias(i: int, factor: float) -> Alter:
    def alter(g: Graph) -> None:
        add = following(products(g)[i], "Add")
        bias = next((v for v in add.inputs if v is not None and v.is_initializer()), None)
        g.set(required(bias), numbers(required(bias)) * factor)

    return alter


def fp8_largest(i: int, build: Build) -> Alter:
    """Apply `build` to every token's largest number, only in the product."""

    def alter(g: Graph) -> None:
        g.before(following(products(g)[i], "Mul"), 1, build)

    return alter


_IN_FP8: list[tuple[str, str, Alter]] = [
    ("fp8-input-scale-10%", "an input multiplied by a scale 10% too large", scaled(input_of(UP), 1.1, "multiply")),
    ("fp8-input-scale-doubled", "an input multiplied by twice its scale", scaled(input_of(QUERY), 2, "multiply")),
    ("fp8-input-divided-5%", "an input divided by a scale 5% too large", scaled(input_of(DOWN), 1.05, "divide")),
    ("fp8-input-divided-halved", "an input divided by half its scale", scaled(input_of(UP), 0.5, "divide")),
    ("fp8-range-halved", "an input is clipped at half its range", scaled(input_of(UP), 0.5)),
    ("fp8-range-quartered", "an input is clipped at a quarter of its range", scaled(input_of(DOWN), 0.25)),
    ("fp8-range-thousandfold", "an input has a range a thousand times too wide", scaled(input_of(UP), 1e3)),
    ("fp8-range-millionfold", "an input has a range a million times too wide", scaled(input_of(QUERY), 1e6)),
    ("fp8-overflow", "inputs beyond their range become NaN", overflowing(input_of(UP))),
    ("fp8-input-e5m2", "an input is rounded to E5M2", in_e5m2(input_of(DOWN))),
    ("fp8-input-of-another", "the product has the input of another", operand_of(UP, QUERY, 0)),
    ("fp8-weight-of-another", "keys have the weights of queries", operand_of(KEY, QUERY, 1)),
    ("fp8-scales-1%", "all scales of a weight 1% too large", fp8_scales(UP, lambda s: s * 1.01)),
    ("fp8-scales-doubled", "all scales of a weight doubled", fp8_scales(DOWN, lambda s: s * 2)),
    ("fp8-scale-zero", "one channel's scale is zero", fp8_scales(DOWN, one(0, 0.0))),
    ("fp8-scale-negative", "one channel's scale is negative", fp8_scales(OUTPUT, one(3, -1.0))),
    ("fp8-scales-swapped", "two channels have each other's scales", fp8_scales(DOWN, swapped)),
    ("fp8-scales-rolled", "every channel has the scale of the next", fp8_scales(UP, lambda s: np.roll(s, 1))),
    ("fp8-scales-240", "scales for numbers up to 240", fp8_scales(UP, lambda s: s * 448 / 240)),
    ("fp8-weight-clipped", "numbers of a weight beyond 240 clipped", fp8_weight(DOWN, lambda w: np.clip(w, -240, 240))),
    ("fp8-weight-reversed", "output channels reversed", fp8_weight(OUTPUT, lambda w: w[:, ::-1])),
    ("fp8-weight-rolled", "input channels have the next one's numbers", fp8_weight(DOWN, lambda w: np.roll(w, 1, 0))),
    ("fp8-weight-negated", "one output channel negated", fp8_weight(DOWN, negated)),
    ("fp8-weight-row-lost", "one input channel is not read", fp8_weight(UP, row_lost)),
    ("fp8-weight-low-bit", "the lowest bit of a weight lost", fp8_bits(UP, lambda b: b & 0xFE)),
    ("fp8-weight-mantissa", "the mantissa of a weight lost", fp8_bits(DOWN, lambda b: b & 0xF8)),
    ("fp8-weight-sign", "the sign of a weight lost", fp8_bits(OUTPUT, lambda b: b & 0x7F)),
    ("fp8-weight-exponent", "the exponent of weights below 128 one larger", fp8_bits(UP, doubled_exponent)),
    ("fp8-bias-doubled", "the bias is added twice", fp8_bias(UP, 2.0)),
    ("fp8-bias-dropped", "the bias is left out", fp8_bias(DOWN, 0.0)),
    ("fp8-largest-dropped", "products not multiplied by their token's largest", fp8_largest(OUTPUT, ones)),
    ("fp8-largest-twice", "twice as much as each token's largest", fp8_largest(OUTPUT, twice)),
    ("fp8-largest-of-first", "every token has the first one's largest", fp8_largest(OUTPUT, first_along(1))),
    ("fp8-largest-of-next", "every token has the next one's largest", fp8_largest(OUTPUT, next_token)),
    ("fp8-query-scale-10%", "attention's query multiplied by a scale 10% too large", scaled(query, 1.1, "multiply")),
    ("fp8-query-range-tenth", "attention's query is clipped at a tenth of its range", scaled(query, 0.1)),
    ("fp8-query-scale-late", "attention's scale is in the query's range twice", scaled(query, 0.125, "multiply")),
    ("fp8-key-scale-of-query", "attention's key multiplied by the query's scale", scale_of(key, query)),
    ("fp8-key-range-quartered", "attention's key is clipped at a quarter of its range", scaled(key, 0.25)),
    ("fp8-key-overflow", "attention's keys beyond their range become NaN", overflowing(key)),
    ("fp8-value-scale-doubled", "attention's value multiplied by twice its scale", scaled(value, 2, "multiply")),
    ("fp8-value-range-quartered", "attention's value is clipped at a quarter of its range", scaled(value, 0.25)),
    ("fp8-value-scale-of-key", "attention's value multiplied by the key's scale", scale_of(value, key)),
    ("fp8-softmax-multiplied-twice", "the softmax output multiplied by 1/224", scaled(weights, 2, "multiply")),
    ("fp8-softmax-of-240", "the softmax output divided by 1/240", scaled(weights, 448 / 240, "divide")),
    ("fp8-softmax-clipped", "the softmax output beyond 1/64 clipped", scaled(weights, 1 / 64)),
    ("fp8-softmax-unscaled", "the softmax output cast without a scale", scaled(weights, 448.0)),
    ("fp8-softmax-e5m2", "the softmax output rounded to E5M2", in_e5m2(weights)),
    ("fp8-softmax-unrounded", "the softmax output not rounded", unrounded(weights)),
]  # fmt: skip
IN_FP8: Family = [(name, what, alter, STATIC) for name, what, alter in _IN_FP8]


# --- 4 bits -----------------------------------------------------------------------------------------------------------


class Nibbles:
    """The parts of a product with a 4-bit weight.

    Attributes:
        node: the product, which takes: input, weight, scales, and, as the last, a bias.
        weight: (outputs, blocks, block / 2) uint8, two numbers with zero point 8 per byte, the first in the low bits.
        scales: (outputs, blocks).
    """

    def __init__(self, g: Graph, i: int) -> None:
        self.node = g.node("MatMulNBits", i)
        self.weight, self.scales = (required(x) for x in self.node.inputs[1:3])


def whole_bytes(i: int, change: Callable[[Array], Array]) -> Alter:
    """Change the bytes of a weight."""

    def alter(g: Graph) -> None:
        stored = Nibbles(g, i).weight
        g.set(stored, change(numbers(stored)))

    return alter


def nibbles(i: int, change: Callable[[Array], Array]) -> Alter:
    """Change the numbers of a weight, (outputs, channels), clipped to -8 ... 7."""

    def of(stored: Array) -> Array:
        low, high = (stored & 15).astype(np.int32) - 8, (stored >> 4).astype(np.int32) - 8
        array = np.clip(change(np.stack([low, high], axis=-1).reshape(len(stored), -1)), -8, 7) + 8
        pairs = array.reshape(*stored.shape, 2).astype(np.uint8)
        return pairs[..., 0] | pairs[..., 1] << 4

    return whole_bytes(i, of)


def block_scales(i: int, change: Callable[[Array], Array]) -> Alter:
    """Change the scales of a weight, (outputs, blocks)."""

    def alter(g: Graph) -> None:
        scales = Nibbles(g, i).scales
        g.set(scales, change(numbers(scales).copy()))

    return alter


def nibbles_of(i: int, j: int, index: int) -> Alter:
    """Give a product the weight (1) or the scales (2) of another."""

    def alter(g: Graph) -> None:
        node, instead = (Nibbles(g, k).node for k in (i, j))
        node.replace_input_with(index, instead.inputs[index])

    return alter


def nibbles_bias(i: int, factor: float) -> Alter:
    def alter(g: Graph) -> None:
        node = Nibbles(g, i).node
        bias = required(node.inputs[5] if len(node.inputs) > 5 else None)
        g.set(bias, numbers(bias) * factor)

    return alter


def nibbles_balance(i: int, change: Callable[[Array], Array]) -> Alter:
    """Change the factors of an input's channels."""

    def alter(g: Graph) -> None:
        mul = producer(Nibbles(g, i).node.inputs[0])
        if mul.op_type != "Mul" or not is_constant(mul.inputs[1]):
            raise NotThere("a balanced input")
        factors = required(mul.inputs[1])
        g.set(factors, change(numbers(factors)))

    return alter


def first_block_lost(array: Array) -> Array:
    array[:, :32] = 0
    return array


def first_block_of(array: Array) -> Array:
    """Give every block the scale of its output's first block."""
    return np.broadcast_to(array[:, :1], array.shape)


def transposed(array: Array) -> Array:
    """Read the scales in block-major order."""
    return array.T.reshape(array.shape)


_IN_4_BITS: list[tuple[str, str, Alter]] = [
    ("int4-order", "the high bits of a byte read first", whole_bytes(UP, lambda b: b << 4 | b >> 4)),
    ("int4-signed", "the zero point 0 instead of 8", whole_bytes(DOWN, lambda b: b ^ 0x88)),
    ("int4-plus-one", "every number of a weight one larger", nibbles(UP, lambda w: w + 1)),
    ("int4-minus-one", "every number of a weight one smaller", nibbles(OUTPUT, lambda w: w - 1)),
    ("int4-low-bit", "the lowest bit of a weight lost", nibbles(DOWN, lambda w: w // 2 * 2)),
    ("int4-clipped", "numbers of a weight beyond 3 clipped", nibbles(UP, lambda w: np.clip(w, -3, 3))),
    ("int4-sign", "the sign of a weight lost", nibbles(OUTPUT, np.abs)),
    ("int4-rolled", "channels have the next one's numbers", nibbles(DOWN, lambda w: np.roll(w, 1, 1))),
    ("int4-blocks-rolled", "blocks have the next one's numbers", nibbles(UP, lambda w: np.roll(w, 32, 1))),
    ("int4-outputs-reversed", "outputs reversed", nibbles(OUTPUT, lambda w: w[::-1])),
    ("int4-output-negated", "one output negated", nibbles(DOWN, lambda w: negated(w.T).T)),
    ("int4-channel-lost", "one channel is not read", nibbles(UP, lambda w: row_lost(w.T).T)),
    ("int4-block-lost", "one block of channels is not read", nibbles(DOWN, first_block_lost)),
    ("int4-weight-of-another", "keys have the weights of queries", nibbles_of(KEY, QUERY, 1)),
    ("int4-scales-of-another", "queries have the scales of keys", nibbles_of(QUERY, KEY, 2)),
    ("int4-scales-1%", "all scales 1% too large", block_scales(UP, lambda s: s * 1.01)),
    ("int4-scales-10%", "all scales 10% too large", block_scales(OUTPUT, lambda s: s * 1.1)),
    ("int4-scales-doubled", "all scales doubled", block_scales(DOWN, lambda s: s * 2)),
    ("int4-scales-for-8", "scales for 8 steps a side", block_scales(UP, lambda s: s * 7 / 8)),
    ("int4-scales-for-15", "scales for 15 steps a side", block_scales(DOWN, lambda s: s * 7 / 15)),
    ("int4-scale-zero", "one block's scale is zero", block_scales(UP, one((0, 0), 0.0))),
    ("int4-scale-negative", "one block's scale is negative", block_scales(DOWN, one((3, 0), -1.0))),
    ("int4-scales-next-block", "every block has the scale of the next", block_scales(UP, lambda s: np.roll(s, 1, 1))),
    ("int4-scales-next-output", "every output has the next one's scales", block_scales(UP, lambda s: np.roll(s, 1, 0))),
    ("int4-scales-first-block", "every block has its output's first scale", block_scales(DOWN, first_block_of)),
    ("int4-scales-transposed", "scales read block by block", block_scales(DOWN, transposed)),
    ("int4-scales-mean", "every block has the mean scale", block_scales(UP, lambda s: np.full_like(s, s.mean()))),
    ("int4-bias-doubled", "the bias is added twice", nibbles_bias(UP, 2.0)),
    ("int4-bias-dropped", "the bias is left out", nibbles_bias(DOWN, 0.0)),
    ("int4-bias-negated", "the bias is subtracted", nibbles_bias(OUTPUT, -1.0)),
    ("int4-balance-dropped", "channels are not divided", nibbles_balance(QUERY, np.ones_like)),
    ("int4-balance-squared", "channels are divided twice", nibbles_balance(UP, np.square)),
    ("int4-balance-rolled", "channels divided by the next one's", nibbles_balance(UP, partial(np.roll, shift=1))),
]  # fmt: skip
IN_4_BITS: Family = [(name, what, alter, IN_BLOCKS_OF_4_BITS) for name, what, alter in _IN_4_BITS]


# --- tables -----------------------------------------------------------------------------------------------------------


class Lookups:
    """The lookup of 8-bit rows, and of their scales.

    Attributes:
        rows, scale: the Gather of the rows and of the scales.
    """

    def __init__(self, g: Graph) -> None:
        by_dtype = {node.inputs[0].dtype: node for node in g.nodes("Gather") if node.inputs[0] is not None}
        if ir.DataType.INT8 not in by_dtype:
            raise NotThere("a table in 8 bits")
        self.rows = by_dtype[ir.DataType.INT8]
        self.scale = next(node for node in g.nodes("Gather") if node is not self.rows and self._has_index(node))

    def _has_index(self, node: ir.Node) -> bool:
        return node.inputs[1] is self.rows.inputs[1] and required(node.inputs[0]).is_initializer()


def table(change: Callable[[Array], Array]) -> Alter:
    """Change the int8 numbers of a table, (rows, channels), clipped to int8."""

    def alter(g: Graph) -> None:
        rows = required(Lookups(g).rows.inputs[0])
        g.set(rows, np.clip(change(numbers(rows).astype(np.int32)), -128, 127))

    return alter


def row_scales(change: Callable[[Array], Array]) -> Alter:
    """Change the scales of the rows."""

    def alter(g: Graph) -> None:
        scale = required(Lookups(g).scale.inputs[0])
        g.set(scale, change(numbers(scale).copy()))

    return alter


def index(of: str, build: Build) -> Alter:
    """Apply `build` to the index of the row that is looked up, for the row, for its scale, or both."""

    def alter(g: Graph) -> None:
        lookups = Lookups(g)
        for node in {"rows": [lookups.rows], "scale": [lookups.scale], "both": [lookups.rows, lookups.scale]}[of]:
            g.before(node, 1, build)

    return alter


def unscaled(g: Graph) -> None:
    """Divide the numbers of a row by 127 instead of applying their scale."""
    unsqueeze = next(iter(Lookups(g).scale.outputs[0].uses())).node
    g.after(unsqueeze.outputs[0], lambda op, x: op.Add(op.Sub(x, x), float_constant(op, x, 1 / 127)))


def every_other(factor: float) -> Callable[[Array], Array]:
    """Multiply every second row by a factor."""

    def change(array: Array) -> Array:
        array[::2] = array[::2] * factor
        return array

    return change


def one_less(op: Builder, x: ir.Value) -> ir.Value:
    """Look up the previous row; for the first one, the last."""
    return op.Sub(x, float_constant(op, x, 1))


def never(op: Builder, x: ir.Value) -> ir.Value:
    """Look up row 0."""
    return op.Sub(x, x)


def next_in_sample(op: Builder, x: ir.Value) -> ir.Value:
    """Look up the row of the next token."""
    return rolled(op, x, 1)


IN_TABLES: Family = [
    ("table-scales-1%", "all rows' scales 1% too large", row_scales(lambda s: s * 1.01), BOTH),
    ("table-scales-10%", "all rows' scales 10% too large", row_scales(lambda s: s * 1.1), BOTH),
    ("table-scales-doubled", "all rows' scales doubled", row_scales(lambda s: s * 2), BOTH),
    ("table-scales-256", "scales for 255 steps a side", row_scales(lambda s: s * 127 / 255), BOTH),
    ("table-scales-zero", "every other row's scale is zero", row_scales(every_other(0.0)), BOTH),
    ("table-scales-negative", "every other row's scale is negative", row_scales(every_other(-1.0)), BOTH),
    ("table-scales-rolled", "every row has the scale of the next", row_scales(lambda s: np.roll(s, 1)), BOTH),
    ("table-scales-reversed", "the scales of all rows reversed", row_scales(lambda s: s[::-1]), BOTH),
    ("table-scales-mean", "every row has the mean scale", row_scales(lambda s: np.full_like(s, s.mean())), BOTH),
    ("table-scales-tenfold", "every other row's scale ten times too large", row_scales(every_other(10.0)), BOTH),
    ("table-unscaled", "rows without their scales", unscaled, BOTH),
    ("table-plus-one", "every number of a table one larger", table(lambda w: w + 1), BOTH),
    ("table-unsigned", "a table stored as unsigned", table(lambda w: w ^ -128), BOTH),
    ("table-7-bits", "the lowest bit of a table lost", table(lambda w: w // 2 * 2), BOTH),
    ("table-4-bits", "the low four bits of a table lost", table(lambda w: w // 16 * 16), BOTH),
    ("table-clipped", "numbers of a table beyond 63 clipped", table(lambda w: np.clip(w, -63, 63)), BOTH),
    ("table-sign", "the sign of a table lost", table(np.abs), BOTH),
    ("table-negated", "every other row negated", table(every_other(-1)), BOTH),
    ("table-channels-rolled", "channels have the next one's numbers", table(lambda w: np.roll(w, 1, 1)), BOTH),
    ("table-channels-reversed", "channels reversed", table(lambda w: w[:, ::-1]), BOTH),
    ("table-channel-lost", "one channel is zeros", table(lambda w: row_lost(w.T).T), BOTH),
    ("table-rows-rolled", "every row has the next one's numbers", table(lambda w: np.roll(w, 1, 0)), BOTH),
    ("table-row-before", "every token has the row before its own", index("both", one_less), BOTH),
    ("table-scale-of-row-before", "a row with the scale of the one before", index("scale", one_less), BOTH),
    ("table-scale-of-next-token", "a row with the scale of the next token's", index("scale", next_in_sample), BOTH),
    ("table-row-of-next-token", "a scale with the row of the next token", index("rows", next_in_sample), BOTH),
    ("table-first-row", "every token has the first row", index("rows", never), BOTH),
    ("table-first-scale", "every token has the first row's scale", index("scale", never), BOTH),
    ("table-scale-of-first-sample", "every sample has the first one's scales", index("scale", first_along(0)), BOTH),
]  # fmt: skip
