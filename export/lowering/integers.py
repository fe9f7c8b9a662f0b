"""Q/DQ as what ONNX Runtime runs fastest: integer products, 4-bit weights, and lookups of 8-bit rows.

`com.microsoft::MatMulIntegerToFloat` multiplies uint8 by int8 into int32 and scales the sums, which AVX512-VNNI and
AMX do without saturation. ONNX Runtime's own fusion of Q/DQ produces the same for uint8 inputs, and for int8 ones a
product four times as slow (BERT-base's size, 128 tokens: 52 and 206 ms, 136 in fp32). So the input becomes uint8 with a
zero point of 128, which is the same number.

`com.microsoft::MatMulNBits` reads 4-bit weights in blocks. Its inputs are quantised to 8 bits in blocks of the same
length (`accuracy_level` 4), which makes one token 3 to 4 times as fast as inputs in fp32 (768 by 3,072 weights: 0.14
and 0.58 ms, 0.20 with weights in fp32) with an error far below that of the weights.

ONNX Runtime has no fp8 products. It refuses some graphs with fp8 Q/DQ that its own rewriting makes, so these become
casts and products, which is equivalent.

A table followed by DQ would be dequantised as a whole, on every call or once into fp32 memory. So its rows are looked
up first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx_ir as ir

from attnforge.export.graphs.build import (
    Builder,
    cast,
    constant,
    dims_of,
    initializer,
    insert,
    like,
    replace_value,
    typed,
)
from attnforge.export.graphs.nodes import input_of
from attnforge.export.graphs.qdq import FP8, Between, Lookup, is_of_fp8, lookups_in_8_bits, products_between

FLOAT, INT8, UINT8 = ir.DataType.FLOAT, ir.DataType.INT8, ir.DataType.UINT8

CONTRIB, PRODUCT = "com.microsoft", "MatMulIntegerToFloat"
INT4 = ir.DataType.INT4
NIBBLES = "MatMulNBits"
KERNELS = frozenset({f"{CONTRIB}::{PRODUCT}", f"{CONTRIB}::{NIBBLES}"})
"""Operators that read quantised weights as they are stored."""

HALF = 128
"""The uint8 zero point that corresponds to int8's zero."""

IN_8_BITS = 4
"""The `accuracy_level` of `MatMulNBits` that quantises inputs."""


def integer_products(model: ir.Model) -> None:
    """Rewrite every product between Q/DQ of `model`, in place, as an integer product, including a bias that follows."""
    quantised: dict[ir.Value, ir.Value] = {}

    def write(op: Builder, between: Between, bias: ir.Value | None) -> ir.Value:
        quantise, stored = between.quantise, _unshared(model.graph, between)
        assert quantise is not None
        key = quantise.outputs[0]
        if key not in quantised:
            quantised[key] = insert(model.graph, quantise, partial(_unsigned, quantise=quantise))
        inputs = [quantised[key], stored, quantise.inputs[1], between.weight.inputs[1], constant(op, HALF, UINT8)]
        inputs += [None, bias] if bias is not None else []
        return like(op.op(PRODUCT, inputs, domain=CONTRIB, name=between.product.name), between.product.outputs[0])

    _with_kernels(model, INT8, write)


def _with_kernels(model: ir.Model, dtype: ir.DataType, write: Callable[..., ir.Value]) -> None:
    """Replace every product with a weight of a type, and the bias that follows it, by what `write` makes of both."""
    for between in (products := products_between(model, dtype)):
        last, bias = between.with_bias
        replace_value(last.outputs[0], insert(model.graph, last, partial(write, between=between, bias=bias)))
    if products:
        model.graph.opset_imports[CONTRIB] = 1


def _unshared(graph: ir.Graph, between: Between) -> ir.Value:
    """The weight of a product under a separate name, because ONNX Runtime cannot load one that two products read when
    it makes weights unsigned (:func:`~attnforge.runtime.backends.onnxruntime.session_options`). A bundle stores it
    once."""
    if len(between.stored.uses()) == 1:
        return between.stored
    copy = ir.Value(name=f"{between.stored.name}/{between.product.name}", const_value=between.stored.const_value)
    graph.register_initializer(like(copy, between.stored))
    return copy


def products_of_nibbles(model: ir.Model) -> None:
    """Rewrite every product of `model` with a 4-bit weight, in place, as one that reads it packed, including its
    bias."""
    stored: dict[ir.Value, list[ir.Value]] = {}

    def write(op: Builder, between: Between, bias: ir.Value | None) -> ir.Value:
        if between.stored not in stored:
            stored[between.stored] = _nibbles(model.graph, between)
        product, shape, block = between.product, between.stored.shape, between.weight.attributes["block_size"].as_int()
        assert shape is not None
        channels, outputs = shape.numpy()
        sizes = {"K": channels, "N": outputs, "bits": 4, "block_size": block, "accuracy_level": IN_8_BITS}
        inputs = [product.inputs[0], *stored[between.stored], *([None, None, bias] if bias is not None else [])]
        return like(op.op(NIBBLES, inputs, sizes, domain=CONTRIB, name=product.name), product.outputs[0])

    _with_kernels(model, INT4, write)


def _nibbles(graph: ir.Graph, between: Between) -> list[ir.Value]:
    """A weight in the operator's format, `(outputs, blocks, block / 2)` of two numbers each, with a zero point of 8,
    and its scales, `(outputs, blocks)`."""
    scale = between.weight.inputs[1]
    assert between.stored.const_value is not None and scale is not None and scale.const_value is not None
    numbers, scales = between.stored.const_value.numpy().astype(np.int8), scale.const_value.numpy()
    halves = (numbers.T + 8).astype(np.uint8).reshape(numbers.shape[1], len(scales), -1)
    return [
        initializer(graph, f"{between.stored.name}/nibbles", halves[..., ::2] | halves[..., 1::2] << 4),
        initializer(graph, f"{scale.name}/nibbles", scales.T),
    ]


def casts_for_fp8(model: ir.Model) -> None:
    """Rewrite every fp8 Q/DQ in `model`, in place, as a cast and a product."""
    for node in list(filter(is_of_fp8, model.graph)):
        replace_value(node.outputs[0], insert(model.graph, node, partial(_by_cast, node=node)))


def _by_cast(op: Builder, node: ir.Node) -> ir.Value:
    x, scale = input_of(node), node.inputs[1]
    if node.op_type == "QuantizeLinear":
        return cast(op, like(op.Div(x, scale), x), FP8)
    return like(op.Mul(cast(op, x, FLOAT), scale), node.outputs[0])


def rows_first(model: ir.Model) -> None:
    """Look up rows of 8-bit tables before they are dequantised, in `model`, in place."""
    for lookup in lookups_in_8_bits(model):
        result = insert(model.graph, lookup.node, partial(_dequantised_rows, lookup=lookup))
        replace_value(lookup.node.outputs[0], result)


def _dequantised_rows(op: Builder, lookup: Lookup) -> ir.Value:
    rows = lookup.node.outputs[0]
    *outer, _ = dims_of(rows)
    numbers = cast(op, like(op.Gather(lookup.table, lookup.index), rows, INT8), FLOAT)
    scale = typed(op.Gather(lookup.scale, lookup.index), FLOAT, outer)
    return like(op.Mul(numbers, typed(op.Unsqueeze(scale, constant(op, [-1])), FLOAT, [*outer, 1])), rows)


def _unsigned(op: Builder, quantise: ir.Node) -> ir.Value:
    x, scale, *_ = quantise.inputs
    return like(op.QuantizeLinear(x, scale, constant(op, HALF, UINT8)), quantise.outputs[0], UINT8)
