"""ONNX Runtime, on the CPU and on CUDA, through I/O binding."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from attnforge.arrays import BFLOAT16, Array
from attnforge.bundle import Bundle, TensorSpec
from attnforge.errors import UnavailableError
from attnforge.runtime.device import cuda_devices

BFLOAT16_ONNX = 16
"""TensorProto.BFLOAT16: NumPy has no such type, so ONNX Runtime is handed the bits and told what they are."""


def why_unavailable(bundle: Bundle, backend: str) -> str | None:
    """Why ONNX Runtime cannot run `bundle` as `backend`, or None."""
    if "onnxruntime" not in bundle.manifest.targets:
        return "the bundle was not deployed for onnxruntime; deploy it again with --target onnxruntime"
    if backend == "onnxruntime-cuda":
        if "CUDAExecutionProvider" not in ort.get_available_providers():
            return "this onnxruntime has no CUDA provider; pip install onnxruntime-gpu"
        if cuda_devices() == 0:
            return "no CUDA device"
    return None


def open_bundle(bundle: Bundle, backend: str, threads: int | None) -> OnnxRuntime:
    """The bundle's ONNX Runtime model, on the CPU or on CUDA as `backend` says."""
    target = bundle.manifest.targets["onnxruntime"]
    on_cuda = backend == "onnxruntime-cuda"
    file = bundle.file(target.cuda_model if on_cuda and target.cuda_model else target.model)
    # TF32 is ONNX Runtime's default on CUDA, so fp32 must say no.
    cuda = {"use_tf32": "1" if bundle.manifest.precision == "tf32" else "0"} if on_cuda else None
    return OnnxRuntime(backend, file, bundle.manifest.outputs, threads, cuda)


class OnnxRuntime:
    """An ONNX model in a session of ONNX Runtime.

    Args:
        name: of the backend.
        file: the model.
        outputs: what it gives.
        threads: of the CPU; by default one a processor.
        cuda: options of the CUDA provider; None runs on the CPU. Without a device, asking for it prints errors.
    """

    def __init__(
        self,
        name: str,
        file: Path,
        outputs: Sequence[TensorSpec],
        threads: int | None = None,
        cuda: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        options = ort.SessionOptions()
        options.log_severity_level = 3
        if threads is not None:
            options.intra_op_num_threads = threads
        providers: list[Any] = [] if cuda is None else [("CUDAExecutionProvider", dict(cuda))]
        self._session: Any = ort.InferenceSession(str(file), options, providers=[*providers, "CPUExecutionProvider"])
        if cuda is not None and "CUDAExecutionProvider" not in self._session.get_providers():
            raise UnavailableError(
                "ONNX Runtime could not start its CUDA provider; its log says which library it misses"
            )
        self._outputs = [spec.name for spec in outputs]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        binding = self._session.io_binding()
        for name, array in feeds.items():
            binding.bind_ortvalue_input(name, _to_ort(array))
        for name in self._outputs:
            binding.bind_output(name)
        self._session.run_with_iobinding(binding)
        return {name: _from_ort(value) for name, value in zip(self._outputs, binding.get_outputs(), strict=True)}

    def close(self) -> None:
        self._session = None


def _to_ort(array: Array) -> Any:
    if array.dtype == BFLOAT16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), BFLOAT16_ONNX)
    return ort.OrtValue.ortvalue_from_numpy(array)


def _from_ort(value: Any) -> Array:
    if value.element_type() != BFLOAT16_ONNX:
        result: Array = value.numpy()
        return result
    shape = tuple(value.shape())
    if 0 in shape:
        return np.empty(shape, BFLOAT16)
    bits = ctypes.cast(value.data_ptr(), ctypes.POINTER(ctypes.c_uint16))
    return np.array(np.ctypeslib.as_array(bits, shape=shape)).view(BFLOAT16)  # a copy: the memory is the OrtValue's own
