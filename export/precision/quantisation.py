"""Low-bit products: which products of a graph are quantised, and the Q/DQ nodes around them.

`QuantizeLinear` and `DequantizeLinear` around a product are ONNX's standard representation (ONNX operators, opset 23):
every builder reads it, and a runtime that has no kernel for it computes the same numbers in fp32. There are three
schemes:

- **int8** and **fp8** (E4M3: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433): weights are symmetric, with
  one scale for each output channel, and the input of a product is quantised as well.
- **int4**: the weights alone, symmetric, with a scale for each block of 32 or 128 channels of every output.

An input is quantised in one of two ways:

- *by token*: each token is divided by its largest number, so that a fixed scale fits, and the product is multiplied by
  that number again. Nothing has to be known about the data, and an outlier in one token does not affect the others.
- *by tensor*: one scale, from calibration data. This saves a pass over the input, but numbers beyond the data's range
  are clipped, so it is used for a norm's output and for what weights and activations compute from that token by token:
  its range does not depend on the model's input.

Either way the channels of an input may be *balanced* first: divided by numbers that the rows of the weights are
multiplied by, so that a few large channels do not take up the whole range (SmoothQuant, Xiao et al. 2023,
https://arxiv.org/abs/2211.10438), or so that the weights that large channels read are exact (AWQ, Lin et al. 2024,
https://arxiv.org/abs/2306.00978).

Embedding tables are stored in 8 bits, with one scale for each row, and looked up as fp32: they are most of a small
encoder's weights and take none of its time. Attention, norms, softmax and heads are not changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attnforge.arrays import Array
from attnforge.export.graphs.build import Builder, constant, dims_of, initializer, insert, like, replace_value, typed
from attnforge.export.graphs.nodes import input_of
from attnforge.export.graphs.qdq import FLOAT, SCHEMES, Scheme, is_lookup, rounded_to
from attnforge.runtime.parity.budget import relative_error

INT8 = SCHEMES["int8"]

LEAST_WEIGHTS = 4096
"""Elements of a weight below which quantising gains nothing: the passes over the input take longer than the product."""

SHRUNK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Fractions of the range of a block's numbers that its scale may be made for: in 4 bits, clipping the largest costs
less than coarse steps for all others."""

FOLLOWS = frozenset(
    {
        "Attention", "BatchNormalization", "Conv", "ConvTranspose", "Einsum", "Gemm", "GroupNormalization",
        "InstanceNormalization", "LayerNormalization", "MatMul", "RMSNormalization", "ReduceMean", "Softmax",
    }
)  # fmt: skip
"""A product that feeds one of these operators is not a head."""


@dataclass(frozen=True)
class Quantisation:
    """The quantisation of a product.

    Attributes:
        scale: scale of the whole input, > 0; None by token, and if the input is not quantised.
        balance: `(channels,)`, float32 > 0, the divisor of every channel; None if channels are not balanced.
        error: error of the product on calibration data, relative to the product in fp32.
        scheme: the types.
        block: channels that share a scale; None if all of an output's do.
    """

    scale: float | None = None
    balance: Array | None = None
    error: float = 0.0
    scheme: Scheme = INT8
    block: int | None = None

    def weight(self, weight: Array) -> tuple[Array, Array]:
        """A weight, balanced, in its stored form, and its scales.

        Args:
            weight: `(channels, outputs)`, float32.

        Returns:
            `(channels, outputs)` in the scheme's type and, float32, `(outputs,)` or `(channels / block, outputs)`.
        """
        if self.balance is not None:
            weight = weight * self.balance[:, None]
        if self.block is not None:
            return quantised_blocks(weight, self.scheme, self.block)
        return quantised_weight(weight, self.scheme)

    def fake_weight(self, weight: Array) -> Array:
        """A weight after balancing, quantising and dequantising."""
        numbers, scales = self.weight(weight)
        return numbers.astype(np.float32) * (scales if self.block is None else np.repeat(scales, self.block, axis=0))

    def fake_input(self, rows: Array) -> Array:
        """An input after balancing, quantising and dequantising.

        Args:
            rows: `(tokens, channels)`, float32.
        """
        if self.balance is not None:
            rows = rows / self.balance
        if self.block is not None:
            return rows
        if self.scale is not None:
            return self.scheme.rounded(rows / np.float32(self.scale)).astype(np.float32) * np.float32(self.scale)
        largest = np.maximum(np.abs(rows).max(axis=-1, keepdims=True), np.finfo(np.float32).tiny)
        numbers = self.scheme.rounded(rows / largest * self.scheme.most).astype(np.float32)
        kept: Array = numbers / np.float32(self.scheme.most) * largest
        return kept


@dataclass(frozen=True)
class Product:
    """A product that can be quantised.

    Attributes:
        node: MatMul or Gemm.
        input: `(..., channels)`, float32.
        weight: `(channels, outputs)`, float32.
        bias: bias of a Gemm.
    """

    node: ir.Node
    input: ir.Value
    weight: Array
    bias: ir.Value | None = None

    @property
    def name(self) -> str:
        return str(self.node.name)

    @property
    def is_shared(self) -> bool:
        """Whether other nodes read the weight, too."""
        return len(input_of(self.node, 1).uses()) > 1

    def stored_as(self, form: Quantisation) -> tuple[Any, ...]:
        """Identify a quantised weight among others."""
        turned = self.node.attributes.get_int("transB", 0)
        balance = None if form.balance is None else form.balance.tobytes()
        return self.node.inputs[1], turned, form.scheme, form.block, balance


def products(model: ir.Model, scheme: Scheme = INT8) -> list[Product]:
    """The products of an fp32 graph that are worth quantising: a computed input times weights, and not a head. With
    blocks, only those that have several."""
    every = (_product(node) for node in model.graph)
    fitting = [p for p in every if p is not None and p.weight.size >= LEAST_WEIGHTS and not is_head(p.node)]
    return [p for p in fitting if not scheme.blocks or scheme.fits(len(p.weight), scheme.blocks[0])]


@dataclass(frozen=True)
class Table:
    """Weights whose rows are looked up and that nothing else reads.

    Attributes:
        lookups: Gather nodes of its rows, in graph order.
        stored: `(rows, channels)`, float32.
    """

    lookups: tuple[ir.Node, ...]
    stored: ir.Value

    @property
    def name(self) -> str:
        return str(self.lookups[0].name)

    @property
    def weight(self) -> Array:
        assert self.stored.const_value is not None
        return self.stored.const_value.numpy()


def tables(model: ir.Model) -> list[Table]:
    """The tables of an fp32 graph, in the order of its lookups. Excludes one that a product reads too, as tied heads
    do: it would be stored twice."""
    by_value: dict[ir.Value, list[ir.Node]] = {}
    for node in model.graph:
        if is_lookup(node) and node.inputs[0] is not None and _is_table(node.inputs[0]):
            by_value.setdefault(node.inputs[0], []).append(node)
    return [Table(tuple(nodes), value) for value, nodes in by_value.items() if len(value.uses()) == len(nodes)]


def _is_table(value: ir.Value) -> bool:
    array = value.const_value
    is_large = array is not None and array.dtype == FLOAT and len(array.shape) == 2 and array.size >= LEAST_WEIGHTS
    return is_large and value.is_initializer() and not value.is_graph_input() and not value.is_graph_output()


def is_head(node: ir.Node) -> bool:
    """Whether only moves, sums and activations stand between a node and an output of the graph."""
    values, seen = list(node.outputs), set[ir.Value]()
    while values:
        value = values.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.is_graph_output():
            return True
        values += [output for use in value.uses() if use.node.op_type not in FOLLOWS for output in use.node.outputs]
    return False


def _product(node: ir.Node) -> Product | None:
    if node.domain != "" or node.op_type not in ("MatMul", "Gemm"):
        return None
    x, weight, *rest = node.inputs
    if x is None or weight is None or weight.const_value is None or x.const_value is not None:
        return None
    if x.dtype != FLOAT or x.shape is None or weight.dtype != FLOAT or len(weight.const_value.shape) != 2:
        return None
    factors = (node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0))
    if factors != (1.0, 1.0) or node.attributes.get_int("transA") == 1:
        return None
    array = weight.const_value.numpy()
    return Product(node, x, array.T if node.attributes.get_int("transB") == 1 else array, rest[0] if rest else None)


# --- numbers ----------------------------------------------------------------------------------------------------------


def quantised_weight(weight: Array, scheme: Scheme = INT8) -> tuple[Array, Array]:
    """A weight in a scheme's type and the scale of every output channel.

    Args:
        weight: `(channels, outputs)`, float32.
        scheme: the scheme with the type.

    Returns:
        `(channels, outputs)` from -most to most, and `(outputs,)`, float32; a channel of zeros has the scale 1.
    """
    scale = scale_for(np.abs(weight).max(axis=0), scheme)
    return scheme.rounded(weight / scale), scale


def quantised_blocks(weight: Array, scheme: Scheme, block: int) -> tuple[Array, Array]:
    """A weight in a scheme's type and the scale of every block of channels of an output: the one of :data:`SHRUNK` with
    the smallest error of the block.

    Args:
        weight: `(channels, outputs)`, float32.
        scheme: the scheme with the type.
        block: channels per block; divides the weight's channels.

    Returns:
        `(channels, outputs)` from least to most, and `(channels / block, outputs)`, float32; a block of zeros has the
        scale 1.
    """
    blocks = weight.reshape(-1, block, weight.shape[-1])
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    best, least = scale_for(largest, scheme), np.full_like(largest, np.inf)
    for shrunk in SHRUNK:
        scale = scale_for(largest * np.float32(shrunk), scheme)
        kept = scheme.rounded(blocks / scale).astype(np.float32) * scale
        error = np.square(kept - blocks).sum(axis=1, keepdims=True)
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    return scheme.rounded(blocks / best).reshape(weight.shape), best[:, 0]


def scale_for(largest: Array, scheme: Scheme) -> Array:
    """The scale for numbers of this size; 1 for zeros."""
    scale = largest / np.float32(scheme.most)
    return np.where(scale > 0, scale, 1).astype(np.float32)


def quantised_rows(weight: Array) -> tuple[Array, Array]:
    """A table in int8 and the scale of every row.

    Args:
        weight: `(rows, channels)`, float32.

    Returns:
        `(rows, channels)`, int8, and `(rows,)`, float32; a row of zeros has the scale 1.
    """
    numbers, scales = quantised_weight(weight.T)
    return numbers.T, scales


def error_of(table: Table) -> float:
    """The error of quantising a table, relative to the table."""
    numbers, scales = quantised_rows(table.weight)
    return relative_error(numbers * scales[:, None], table.weight)


# --- the graph --------------------------------------------------------------------------------------------------------


def quantise(model: ir.Model, forms: Mapping[str, Quantisation]) -> None:
    """Put Q/DQ around products of an fp32 graph, or DQ after their weights, and DQ after tables, in place. Products of
    one input in one form share its Q/DQ, and those of one weight share its stored numbers.

    Args:
        model: a canonical fp32 graph.
        forms: form of the input of every product to quantise, by product name; also of tables, by name.
    """
    inputs: dict[tuple[ir.Value, int], tuple[ir.Value, ir.Value | None]] = {}
    stored: dict[tuple[Any, ...], list[ir.Value]] = {}
    for product in [product for product in products(model) if product.name in forms]:
        form = forms[product.name]
        key = (product.input, id(form))
        if key not in inputs:
            write_input = partial(_quantised_input, product=product, form=form)
            inputs[key] = insert(model.graph, product.node, write_input, stem=f"{product.name}/input")
        if (weight := product.stored_as(form)) not in stored:
            stored[weight] = [
                initializer(model.graph, f"{product.name}/{part}", array)
                for part, array in zip(("weight", "weight_scale"), form.weight(product.weight), strict=True)
            ]
        write = partial(_quantised, product=product, form=form, read=inputs[key], stored=stored[weight])
        replace_value(product.node.outputs[0], insert(model.graph, product.node, write, stem=f"{product.name}/product"))
    for table in tables(model):
        if table.name in forms:
            _store_in_8_bits(model.graph, table)
    RemoveUnusedNodesPass()(model)


def _quantised_input(op: Builder, product: Product, form: Quantisation) -> tuple[ir.Value, ir.Value | None]:
    """Write the Q/DQ of a product's input: dequantised, or with blocks, balanced; and the largest number of every
    token, by which the product is multiplied, None by tensor."""
    x, scale, largest = product.input, form.scale, None
    if form.balance is not None:
        x = like(op.Mul(x, constant(op, 1 / form.balance, FLOAT)), x)
    if form.block is not None:
        return x, None
    if scale is None:
        *outer, _ = dims_of(x)
        last, tiny = constant(op, [-1]), constant(op, np.finfo(np.float32).tiny, FLOAT)
        high, low = (typed(reduce(x, last, keepdims=1), FLOAT, [*outer, 1]) for reduce in (op.ReduceMax, op.ReduceMin))
        largest = like(op.Max(high, like(op.Neg(low), low), tiny), high)  # without a tensor of absolute values
        x, scale = like(op.Div(x, largest), x), 1 / form.scheme.most
    result = rounded_to(op, x, scale, form.scheme.dtype)
    _place(op, product.node)
    return result, largest


def _quantised(
    op: Builder, product: Product, form: Quantisation, read: tuple[ir.Value, ir.Value | None], stored: list[ir.Value]
) -> ir.Value:
    """Write a product that reads its input and its weight from Q/DQ, or its weight from DQ.

    Args:
        product: the product.
        form: its form.
        read: what :func:`_quantised_input` wrote.
        stored: the weight in its stored form, and its scales.
    """
    (x, largest), output = read, product.node.outputs[0]
    by = {"axis": 1} if form.block is None else {"axis": 0, "block_size": form.block}
    dequantised = typed(op.op("DequantizeLinear", stored, by), FLOAT, product.weight.shape)
    result = like(op.op("MatMul", [x, dequantised], name=f"{product.name}/{form.scheme.name}"), output)
    if largest is not None:
        result = like(op.Mul(result, largest), output)
    if product.bias is not None:
        result = like(op.Add(result, product.bias), output)
    _place(op, product.node)
    return result


def _place(op: Builder, node: ir.Node) -> None:
    """Note that new nodes belong to a node's module, and to its line of code."""
    for new in op.nodes:
        new.metadata_props.update(node.metadata_props)


def _store_in_8_bits(graph: ir.Graph, table: Table) -> None:
    """Make the lookups of a table read it from int8."""
    numbers, scales = quantised_rows(table.weight)
    parts = {"rows": numbers, "scale": scales}
    stored = [initializer(graph, f"{table.stored.name}/{part}", array) for part, array in parts.items()]

    def write(op: Builder) -> ir.Value:
        rows = typed(op.op("DequantizeLinear", stored, {"axis": 0}), FLOAT, numbers.shape)
        _place(op, table.lookups[0])
        return rows

    dequantised = insert(graph, table.lookups[0], write, stem=f"{table.name}/table")
    for lookup in table.lookups:
        lookup.replace_input_with(0, dequantised)
