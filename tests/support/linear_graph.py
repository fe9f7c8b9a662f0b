"""A graph with one product and one sum, in any floating-point type."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array

ROWS = 64


def linear(dtype: ir.DataType) -> ir.Model:
    """`y = (x · weight) + bias`, with `x` as a second output; the product is `product`."""

    def value(name: str, array: Array) -> ir.Value:
        tensor = ir.tensor(array.astype(dtype.numpy()), dtype=dtype, name=name)
        return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(array.shape), const_value=tensor)

    x = ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape([ROWS, 3]))
    weight, bias = value("weight", np.arange(6).reshape(3, 2) / 7), value("bias", np.array([0.3, 0.7]))
    product = ir.node("MatMul", [x, weight])
    total = ir.node("Add", [product.outputs[0], bias])
    for node, name in ((product, "product"), (total, "y")):
        node.outputs[0].name, node.outputs[0].type = name, ir.TensorType(dtype)
        node.outputs[0].shape = ir.Shape([ROWS, 2])
    graph = ir.Graph(
        [x],
        [total.outputs[0], x],
        nodes=[product, total],
        initializers=[weight, bias],
        opset_imports={"": 20},
        name="g",
    )
    return ir.Model(graph, ir_version=10)


def inputs(dtype: ir.DataType) -> Array:
    return np.random.default_rng(0).standard_normal((ROWS, 3)).astype(dtype.numpy())
