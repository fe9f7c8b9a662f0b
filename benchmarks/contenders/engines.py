"""Engines: what runs a model's file, for peers and in processes of their own. Imports no torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnforge.arrays import Array, is_floating
from attnforge.bundle import Bundle
from attnforge.errors import UnavailableError, first_line
from attnforge.runtime.backends.onnxruntime import OnnxRuntime
from attnforge.runtime.backends.openvino import CAPABILITIES
from attnforge.runtime.backends.registry import why_not_here
from attnforge.runtime.session import Session, load

Runner = Callable[[dict[str, Array]], dict[str, Array]]
"""Runs a contender on inputs by name; a contender that was compiled for some sizes takes these sizes alone."""


@dataclass
class Setup:
    """What contenders are opened for.

    Attributes:
        bundle: the bundle of the model that they run.
        feeds: inputs by name, in the bundle's dtypes.
        threads: that a run may use on a CPU.
    """

    bundle: Bundle
    feeds: dict[str, Array]
    threads: int


def wide(feeds: dict[str, Array]) -> dict[str, Array]:
    """Inputs with floating-point ones in fp32, which has room for every 16-bit number."""
    return {name: a.astype(np.float32, copy=False) if is_floating(a) else a for name, a in feeds.items()}


def open_backend(name: str, setup: Setup, stack: ExitStack) -> Runner:
    """A backend of the bundle itself."""
    return stack.enter_context(load(setup.bundle, name, threads=setup.threads)).run


@functools.cache
def why_no_products(precision: str) -> str | None:
    """Why ONNX Runtime's CPU cannot multiply matrices at a precision, in its words, or None; asked before a model is
    exported for nothing."""
    import onnxruntime as ort
    from onnx import TensorProto, helper

    kind = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}.get(precision, TensorProto.FLOAT)
    values = [helper.make_tensor_value_info(name, kind, [2, 2]) for name in ("a", "b", "c")]
    graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["c"])], "product", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's own kinds derive from nothing narrower
        return first_line(error)
    return None


def _in_onnxruntime(setup: Setup, file: Path, stack: ExitStack) -> Runner:
    """A file in ONNX Runtime, with inputs checked and bound as the bundle's own backends do it."""
    manifest = setup.bundle.manifest
    backend = OnnxRuntime(file.stem, file, manifest.inputs, manifest.outputs, setup.threads)
    return stack.enter_context(Session(setup.bundle, backend)).run


def _on_cuda(setup: Setup, file: Path, stack: ExitStack) -> Runner:
    if (reason := why_not_here("onnxruntime-cuda")) is not None:
        raise UnavailableError(reason)
    import onnxruntime as ort

    session: Any = ort.InferenceSession(str(file), providers=["CUDAExecutionProvider"])
    names = [spec.name for spec in setup.bundle.manifest.outputs]
    return lambda feeds: dict(zip(names, session.run(names, feeds), strict=True))


def _in_openvino(setup: Setup, file: Path, stack: ExitStack, static: bool = False) -> Runner:
    if (reason := why_not_here("openvino")) is not None:
        raise UnavailableError(reason)
    import openvino

    core: Any = openvino.Core()
    ability, hint = CAPABILITIES.get(setup.bundle.manifest.precision, ("FP32", "f32"))
    if ability not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise UnavailableError(f"this processor has no {ability} arithmetic that OpenVINO uses")
    model = core.read_model(str(file))
    if static:
        model.reshape({name: list(array.shape) for name, array in setup.feeds.items()})
    properties = {
        "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": setup.threads
    }  # fmt: skip
    request = core.compile_model(model, "CPU", properties).create_infer_request()
    names = [spec.name for spec in setup.bundle.manifest.outputs]
    held: list[dict[str, Array]] = [{}, {}]  # the last call's inputs and their fp32 copies, which take time to make

    def run(feeds: dict[str, Array]) -> dict[str, Array]:
        if feeds is not held[0]:
            held[:] = feeds, wide(feeds)
        request.infer(held[1], share_inputs=True)
        return {name: request.get_tensor(name).data for name in names}

    return run


def _in_openvino_for_these_sizes(setup: Setup, file: Path, stack: ExitStack) -> Runner:
    return _in_openvino(setup, file, stack, static=True)


ENGINES: dict[str, Callable[[Setup, Path, ExitStack], Runner]] = {
    "onnxruntime": _in_onnxruntime,
    "onnxruntime-cuda": _on_cuda,
    "openvino": _in_openvino,
    "openvino-static": _in_openvino_for_these_sizes,
}
"""By name; each opens a model's file."""
