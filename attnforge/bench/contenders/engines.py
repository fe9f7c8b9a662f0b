"""Engines: runners of model files, for peers and for measurements in separate processes. Does not import torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnforge.arrays import Array, is_floating
from attnforge.bundle import Bundle
from attnforge.errors import UnavailableError, first_line
from attnforge.runtime.backends.backend import CUDA_PROVIDER, OPENVINO_TYPES
from attnforge.runtime.backends.onnxruntime import OnnxRuntime
from attnforge.runtime.backends.registry import why_not_here
from attnforge.runtime.session import Session, load

Runner = Callable[[dict[str, Array]], dict[str, Array]]
"""Runs a contender on inputs by name; a contender that was compiled for some sizes takes only those sizes."""


@dataclass
class Setup:
    """The bundle, inputs and threads that contenders are loaded for.

    Attributes:
        bundle: bundle of the model that they run.
        feeds: inputs by name, in the bundle's dtypes.
        threads: number of threads that a run may use on a CPU.
    """

    bundle: Bundle
    feeds: dict[str, Array]
    threads: int


def wide(feeds: dict[str, Array]) -> dict[str, Array]:
    """Return the inputs with floating-point ones in fp32, which represents every 16-bit number."""
    return {name: a.astype(np.float32, copy=False) if is_floating(a) else a for name, a in feeds.items()}


def open_backend(name: str, setup: Setup, stack: ExitStack) -> Runner:
    """Load a backend of the bundle."""
    return stack.enter_context(load(setup.bundle, name, threads=setup.threads)).run


def one_operator(op_type: str, shape: Sequence[int], precision: str = "fp32") -> bytes:
    """Return the ONNX model of an operator on `a`, of shape `shape`; a MatMul's other operand is constant ones, like a
    model's weights."""
    from onnx import TensorProto, helper

    kind = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}.get(precision, TensorProto.FLOAT)
    a, c = (helper.make_tensor_value_info(name, kind, shape) for name in ("a", "c"))
    weights = [helper.make_tensor("b", kind, shape, np.ones(shape, np.float32))] if op_type == "MatMul" else []
    node = helper.make_node(op_type, ["a", *(tensor.name for tensor in weights)], ["c"])
    graph = helper.make_graph([node], op_type, [a], [c], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    return bytes(model.SerializeToString())


@functools.cache
def why_no_products(precision: str) -> str | None:
    """Return why ONNX Runtime cannot multiply matrices at a precision on a CPU, in its words, or None; checked before a
    model is exported in vain."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(one_operator("MatMul", (2, 2), precision), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions have no narrower base class
        return first_line(error)
    return None


def _in_onnxruntime(setup: Setup, file: Path, stack: ExitStack) -> Runner:
    """Load a file in ONNX Runtime, with inputs checked and bound as by the bundle's backends."""
    manifest = setup.bundle.manifest
    backend = OnnxRuntime(file.stem, file, manifest.inputs, manifest.outputs, setup.threads)
    return stack.enter_context(Session(setup.bundle, backend)).run


def _on_cuda(setup: Setup, file: Path, stack: ExitStack) -> Runner:
    if (reason := why_not_here("onnxruntime-cuda")) is not None:
        raise UnavailableError(reason)
    import onnxruntime as ort

    ort.preload_dlls()
    tf32 = {"use_tf32": str(int(setup.bundle.manifest.precision == "tf32"))}
    session: Any = ort.InferenceSession(str(file), providers=[(CUDA_PROVIDER, tf32)])
    if CUDA_PROVIDER not in session.get_providers():  # it runs on the CPU instead
        raise UnavailableError(f"ONNX Runtime could not start its {CUDA_PROVIDER}; its log says why")
    names = [spec.name for spec in setup.bundle.manifest.outputs]
    return lambda feeds: dict(zip(names, session.run(names, feeds), strict=True))


def openvino_request(
    model: str | bytes, precision: str, threads: int, shapes: dict[str, list[int]] | None = None
) -> Any:
    """Return an infer request of a model on the CPU at a precision.

    Args:
        model: an ONNX file, or its bytes.
        precision: precision that OpenVINO computes at.
        threads: number of threads that a run may use.
        shapes: input shapes by name, to compile for these only.

    Raises:
        UnavailableError: OpenVINO is not installed, or does not compute at the precision on this processor, or not
            correctly.
    """
    if (reason := why_not_here("openvino")) is not None:
        raise UnavailableError(reason)
    import openvino

    if precision == "fp16":
        raise UnavailableError("OpenVINO's fp16 is wrong on some processors")
    core: Any = openvino.Core()
    ability, hint = OPENVINO_TYPES.get(precision, ("FP32", "f32"))
    if ability not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise UnavailableError(f"OpenVINO has no {ability} arithmetic on this processor")
    graph = core.read_model(model)
    if shapes is not None:
        graph.reshape(shapes)
    asked = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": threads}
    return core.compile_model(graph, "CPU", asked).create_infer_request()


def _in_openvino(setup: Setup, file: Path, stack: ExitStack, static: bool = False) -> Runner:
    shapes = {name: list(array.shape) for name, array in setup.feeds.items()} if static else None
    request = openvino_request(str(file), setup.bundle.manifest.precision, setup.threads, shapes)
    names = [spec.name for spec in setup.bundle.manifest.outputs]
    last: list[dict[str, Array]] = [{}, {}]  # the last call's inputs and their fp32 copies, which take time to make

    def run(feeds: dict[str, Array]) -> dict[str, Array]:
        if feeds is not last[0]:
            last[:] = feeds, wide(feeds)
        request.infer(last[1], share_inputs=True)
        return {name: request.get_tensor(name).data for name in names}

    return run


ENGINES: dict[str, Callable[[Setup, Path, ExitStack], Runner]] = {
    "onnxruntime": _in_onnxruntime,
    "onnxruntime-cuda": _on_cuda,
    "openvino": _in_openvino,
    "openvino-static": functools.partial(_in_openvino, static=True),
}
"""By name; each loads a model's file."""
