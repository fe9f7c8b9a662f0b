"""16-bit storage as in a plan: what a kernel keeps in fp32 is not rounded, and everything else is."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from attnforge.export.graphs.execute import at_own_precision
from attnforge.export.tensorrt.build import Plan
from attnforge.export.tensorrt.process import Layer
from benchmarks.experiments.false_alarms import as_compiled
from tests.support.linear_graph import inputs, linear


def plan(*kernels: list[str]) -> Plan:
    layers = [Layer(name=" ".join(nodes), type="gemm", tactic="", onnx_nodes=nodes) for nodes in kernels]
    return Plan(version="1.0", layers=layers)


def test_a_product_is_rounded_before_its_bias_if_another_kernel_adds_it() -> None:
    model = linear(ir.DataType.BFLOAT16)
    for node, name in zip(model.graph, ("product", "bias"), strict=True):
        node.name = name
    feeds = {"x": inputs(ir.DataType.BFLOAT16)}
    once = at_own_precision(model, unrounded=[model.graph[0].outputs[0]])(feeds)["y"]
    twice = at_own_precision(model)(feeds)["y"]
    assert not np.array_equal(once, twice)
    for compiled, expected in (
        (plan(["product", "bias"]), once),
        (plan(["product"], ["bias"]), twice),
        (None, twice),
    ):
        np.testing.assert_array_equal(as_compiled(model, [], compiled)(feeds)["y"], expected)
