"""A square matrix product by each library at hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch

from attnforge.arrays import Array
from attnforge.runtime.backends.onnxruntime import session_options
from attnforge.runtime.backends.openvino import CAPABILITIES
from attnforge.runtime.backends.registry import why_not_here

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}

Product = Callable[[], object]


def by_torch(precision: str, size: int, threads: int) -> Product | None:
    """On as many threads as torch has."""
    a, b, out = torch.ones(3, size, size, dtype=DTYPES[precision])
    return partial(torch.mm, a, b, out=out)


def by_onnxruntime(precision: str, size: int, threads: int) -> Product | None:
    """In fp32 alone: on a CPU it has no 16-bit products."""
    if precision != "fp32":
        return None
    session = ort.InferenceSession(_model(size), session_options(threads), ["CPUExecutionProvider"])
    return partial(session.run, None, {"a": _ones(size)})


def by_openvino(precision: str, size: int, threads: int) -> Product | None:
    """In fp32, and in the 16-bit types that it computes in on this processor."""
    if why_not_here("openvino") is not None or precision not in ("fp32", *CAPABILITIES):
        return None
    from openvino import Core

    core = Core()
    capability, hint = CAPABILITIES.get(precision, ("FP32", "f32"))
    if capability not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        return None
    asked = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": threads}
    request = core.compile_model(core.read_model(_model(size)), "CPU", asked).create_infer_request()
    request.get_input_tensor().data[:] = 1
    return request.infer  # type: ignore[no-any-return]


LIBRARIES: dict[str, Callable[[str, int, int], Product | None]] = {
    "torch": by_torch,
    "onnxruntime": by_onnxruntime,
    "openvino": by_openvino,
}
"""By name; each makes a product at a precision, of so many rows, on so many threads, or None where it has none."""


def _ones(size: int) -> Array:
    return np.ones((size, size), np.float32)


def _model(size: int) -> bytes:
    """The ONNX model of a product with a constant, as models have it."""
    a = ir.Value(name="a", shape=ir.Shape([size, size]), type=ir.TensorType(ir.DataType.FLOAT))
    b = ir.Value(name="b", const_value=ir.tensor(_ones(size), name="b"))
    node = ir.node("MatMul", [a, b])
    node.outputs[0].name = "c"
    graph = ir.Graph([a], node.outputs, nodes=[node], initializers=[b], opset_imports={"": 20}, name="product")
    data: bytes = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    return data
