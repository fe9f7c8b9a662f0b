"""Faults of 8-bit products: in the quantisation of inputs, in weights, scales, zero points and biases."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.export.graphs.build import Builder, constant
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

BY_TOKEN, CALIBRATED = "by-token", "calibrated"
BOTH = (CALIBRATED, BY_TOKEN)

QUERY, KEY, OUTPUT, UP, DOWN = 0, 1, 3, 4, 5
"""Products of a layer, in the order of the graph."""


class Product:
    """The parts of an 8-bit product.

    Attributes:
        node: the product, which takes: input, weight, their scales, and the input's zero point.
        quantise: the QuantizeLinear of its input.
        weight: (channels, outputs) int8.
        scale: the input's scale, which `quantise` uses too.
        scales: (outputs,), the weight's scales.
    """

    def __init__(self, g: Graph, i: int) -> None:
        self.node = g.node("MatMulIntegerToFloat", i)
        self.quantise = producer(self.node.inputs[0])
        self.weight, self.scale, self.scales = (required(value) for value in self.node.inputs[1:4])

    def largest(self) -> ir.Node:
        """Return the Mul by the largest number of every token."""
        for use in self.node.outputs[0].uses():
            if use.node.op_type == "Mul":
                return use.node
        raise NotThere("a product by token")

    def balance(self) -> ir.Value:
        """Return the factors of the input's channels."""
        mul = producer(self.quantise.inputs[0])
        if mul.op_type == "Div":  # by token
            mul = producer(mul.inputs[0])
        if mul.op_type != "Mul" or not is_constant(mul.inputs[1]):
            raise NotThere("a balanced input")
        return required(mul.inputs[1])


def weight(i: int, change: Callable[[Array], Array]) -> Alter:
    """Change the int8 numbers of a weight."""

    def alter(g: Graph) -> None:
        value = Product(g, i).weight
        g.set(value, np.clip(change(numbers(value).astype(np.int32)), -128, 127))

    return alter


def scales(i: int, change: Callable[[Array], Array]) -> Alter:
    """Change the scales of a weight."""

    def alter(g: Graph) -> None:
        value = Product(g, i).scales
        g.set(value, change(numbers(value).copy()))

    return alter


def balance(i: int, change: Callable[[Array], Array]) -> Alter:
    """Change the factors of an input's channels."""

    def alter(g: Graph) -> None:
        value = Product(g, i).balance()
        g.set(value, change(numbers(value)))

    return alter


def range_of(i: int, factor: float, where: str = "both") -> Alter:
    """Multiply the scale of an input by a factor: in the quantisation, in the product, or both."""

    def alter(g: Graph) -> None:
        product = Product(g, i)
        by: Build = lambda op, x: op.Mul(x, float_constant(op, x, factor))  # noqa: E731
        if where != "product":
            g.before(product.quantise, 1, by)
        if where != "quantise":
            g.before(product.node, 2, by)

    return alter


def zero_point(i: int, number: int, where: str) -> Alter:
    """Use another zero point in the quantisation of the input, or in the product."""

    def alter(g: Graph) -> None:
        product = Product(g, i)
        node, index = (product.quantise, 2) if where == "quantise" else (product.node, 4)
        g.before(node, index, lambda op, x: constant(op, number, ir.DataType.UINT8))

    return alter


def of_another(i: int, j: int, index: int) -> Alter:
    """Give a product an operand of another: 0 the input, 1 the weight, 2 the input's scale, 3 the weight's scales."""

    def alter(g: Graph) -> None:
        node, other = (Product(g, k).node for k in (i, j))
        if node.inputs[index] is other.inputs[index]:
            raise NotThere("another operand")
        operand = required(other.inputs[index])
        if operand.is_initializer():  # with its own name, as the lowering does
            tensor = operand.const_value
            operand = ir.Value(name=f"{operand.name}/again", type=operand.type, shape=operand.shape, const_value=tensor)
            g.graph.register_initializer(operand)
        node.replace_input_with(index, operand)
        g.graph.sort()

    return alter


def bias(i: int, factor: float) -> Alter:
    """Multiply the fp32 bias by a factor."""

    def alter(g: Graph) -> None:
        node = Product(g, i).node
        if len(node.inputs) > 6:
            value = required(node.inputs[6])
            return g.set(value, numbers(value) * factor)
        (use,) = Product(g, i).largest().outputs[0].uses()
        value = required(use.node.inputs[1 - use.idx])
        return g.set(value, numbers(value) * factor)

    return alter


def largest(i: int, build: Build, everywhere: bool = False) -> Alter:
    """Apply `build` to every token's largest number, only in the product, or also where the token is divided."""

    def alter(g: Graph) -> None:
        mul = Product(g, i).largest()
        if everywhere:
            g.after(required(mul.inputs[1]), build)
        else:
            g.before(mul, 1, build)

    return alter


def signed_largest(g: Graph) -> None:
    """Use the largest number of every token, not the largest absolute value."""
    for node in g.nodes("Neg"):
        least = required(node.inputs[0])
        if producer(least).op_type == "ReduceMin":
            g.replace(node.outputs[0], least)


def rounded_down(i: int) -> Alter:
    """Round an input down instead of to nearest."""

    def alter(g: Graph) -> None:
        quantise = Product(g, i).quantise
        step = required(quantise.inputs[1])
        half: Build = lambda op, x: op.Sub(x, op.Mul(step, float_constant(op, x, 0.4999)))  # noqa: E731
        g.before(quantise, 0, half)

    return alter


def one(index: int | tuple[int, ...], factor: float) -> Callable[[Array], Array]:
    """Multiply one element by a factor."""

    def change(array: Array) -> Array:
        array[index] *= factor
        return array

    return change


def swapped(array: Array) -> Array:
    """Exchange the smallest and the largest scale."""
    low, high = np.argmin(array), np.argmax(array)
    array[[low, high]] = array[[high, low]]
    return array


def channels_swapped(array: Array) -> Array:
    """Exchange the first two output channels."""
    array[:, [0, 1]] = array[:, [1, 0]]
    return array


def negated(array: Array) -> Array:
    """Negate one output channel."""
    array[:, 0] *= -1
    return array


def row_lost(array: Array) -> Array:
    """Set one input channel to zeros."""
    array[np.abs(array).sum(axis=1).argmax()] = 0
    return array


def twice(op: Builder, x: ir.Value) -> ir.Value:
    return op.Add(x, x)


def half(op: Builder, x: ir.Value) -> ir.Value:
    return op.Mul(x, float_constant(op, x, 0.5))


def ones(op: Builder, x: ir.Value) -> ir.Value:
    return op.Div(x, x)


def next_token(op: Builder, x: ir.Value) -> ir.Value:
    return rolled(op, x, 1)


IN_EIGHT_BITS: Family = [
    ("input-scale-1%", "the product's scale of its input 1% too large", range_of(QUERY, 1.01, "product"), BOTH),
    ("input-scale-doubled", "the product's scale of its input doubled", range_of(UP, 2.0, "product"), BOTH),
    ("input-scale-10%", "the product's scale of its input 10% too large", range_of(OUTPUT, 1.1, "product"), BOTH),
    ("quantise-scale-5%", "an input quantised with a scale 5% too large", range_of(DOWN, 1.05, "quantise"), BOTH),
    ("quantise-scale-halved", "an input quantised with half the scale", range_of(UP, 0.5, "quantise"), BOTH),
    ("range-halved", "an input is clipped at half its range", range_of(OUTPUT, 0.5), BOTH),
    ("range-quartered", "an input is clipped at a quarter of its range", range_of(UP, 0.25), BOTH),
    ("range-tenfold", "an input has a range ten times too wide", range_of(DOWN, 10.0), BOTH),
    ("range-hundredfold", "an input has a range a hundred times too wide", range_of(OUTPUT, 100.0), BOTH),
    ("zero-point-127", "quantised about 127, multiplied about 128", zero_point(QUERY, 127, "quantise"), BOTH),
    ("zero-point-129", "quantised about 128, multiplied about 129", zero_point(DOWN, 129, "product"), BOTH),
    ("zero-point-0", "the product ignores the zero point", zero_point(UP, 0, "product"), BOTH),
    ("zero-point-quantise-0", "negative inputs are clipped", zero_point(OUTPUT, 0, "quantise"), BOTH),
    ("input-of-another", "the product has the input of another", of_another(UP, QUERY, 0), BOTH),
    ("input-scale-of-another", "the product has the input's scale of another", of_another(UP, QUERY, 2), CALIBRATED),
    ("weight-of-another", "keys have the weights of queries", of_another(KEY, QUERY, 1), BOTH),
    ("scales-of-another", "queries have the scales of keys", of_another(QUERY, KEY, 3), BOTH),
    ("scales-1%", "all scales of a weight 1% too large", scales(UP, lambda s: s * 1.01), BOTH),
    ("scales-doubled", "all scales of a weight doubled", scales(DOWN, lambda s: s * 2), BOTH),
    ("scale-doubled", "one channel's scale doubled", scales(OUTPUT, one(0, 2.0)), BOTH),
    ("scale-zero", "one channel's scale is zero", scales(DOWN, one(0, 0.0)), BOTH),
    ("scale-negative", "one channel's scale is negative", scales(UP, one(3, -1.0)), BOTH),
    ("scales-swapped", "two channels have each other's scales", scales(DOWN, swapped), BOTH),
    ("scales-rolled", "every channel has the scale of the next", scales(DOWN, lambda s: np.roll(s, 1)), BOTH),
    ("scales-reversed", "the scales of all channels reversed", scales(OUTPUT, lambda s: s[::-1]), BOTH),
    ("scales-mean", "every channel has the mean scale", scales(UP, lambda s: np.full_like(s, s.mean())), BOTH),
    ("scales-256", "scales for 255 steps a side", scales(OUTPUT, lambda s: s * 127 / 255), BOTH),
    ("weight-plus-one", "every number of a weight one larger", weight(DOWN, lambda w: w + 1), BOTH),
    ("weight-unsigned", "a weight stored as unsigned", weight(UP, lambda w: w ^ -128), BOTH),
    ("weight-4-bits", "the low four bits of a weight lost", weight(OUTPUT, lambda w: w // 16 * 16), BOTH),
    ("weight-7-bits", "the lowest bit of a weight lost", weight(UP, lambda w: w // 2 * 2), BOTH),
    ("weight-clipped", "numbers of a weight beyond 63 clipped", weight(DOWN, lambda w: np.clip(w, -63, 63)), BOTH),
    ("weight-channels-swapped", "two output channels exchanged", weight(OUTPUT, channels_swapped), BOTH),
    ("weight-channel-negated", "one output channel negated", weight(DOWN, negated), BOTH),
    ("weight-row-lost", "one input channel is not read", weight(UP, row_lost), BOTH),
    ("weight-rolled", "input channels have the next one's numbers", weight(DOWN, lambda w: np.roll(w, 1, 0)), BOTH),
    ("weight-reversed", "output channels reversed", weight(OUTPUT, lambda w: w[:, ::-1]), BOTH),
    ("bias-doubled", "the bias is added twice", bias(UP, 2.0), BOTH),
    ("bias-dropped", "the bias is left out", bias(DOWN, 0.0), BOTH),
    ("bias-negated", "the bias is subtracted", bias(OUTPUT, -1.0), BOTH),
    ("rounded-down", "inputs are rounded down", rounded_down(UP), BOTH),
    ("balance-dropped", "channels are not divided", balance(QUERY, np.ones_like), CALIBRATED),
    ("balance-inverted", "channels multiplied, not divided", balance(UP, lambda b: 1 / b), CALIBRATED),
    ("balance-squared", "channels are divided twice", balance(QUERY, np.square), CALIBRATED),
    ("balance-rolled", "channels divided by the next one's", balance(UP, lambda b: np.roll(b, 1)), CALIBRATED),
    ("largest-dropped", "products not multiplied by their token's largest", largest(UP, ones), BY_TOKEN),
    ("largest-twice", "twice as much as each token's largest", largest(DOWN, twice), BY_TOKEN),
    ("largest-of-first", "every token has the first one's largest", largest(UP, first_along(1)), BY_TOKEN),
    ("largest-of-next", "every token has the next one's largest", largest(OUTPUT, next_token), BY_TOKEN),
    ("largest-of-sample", "every sample has the first one's largest", largest(DOWN, first_along(0)), BY_TOKEN),
    ("largest-halved", "tokens divided by half their largest", largest(UP, half, everywhere=True), BY_TOKEN),
    ("largest-signed", "the largest number of a token, whatever its lowest", signed_largest, BY_TOKEN),
]  # fmt: skip
