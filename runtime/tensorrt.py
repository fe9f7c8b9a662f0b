"""TensorRT and TensorRT-RTX: one implementation for both, on device memory from cuda-bindings.

Written against the API that both share. It runs only where a CUDA device is.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from attnforge.arrays import Array
from attnforge.bundle import Bundle, Engine
from attnforge.errors import BuildError, UnavailableError
from attnforge.runtime.device import cuda_devices


def why_unavailable(bundle: Bundle, backend: str) -> str | None:
    """Why this machine cannot run the bundle's plan for `backend`, or None."""
    if backend not in bundle.manifest.targets:
        skipped = bundle.manifest.skipped.get(backend, f"deploy it again with --target {backend}")
        return f"the bundle holds no plan for {backend}: {skipped}"
    engine = bundle.manifest.targets[backend].engines[0]
    try:
        trt = importlib.import_module(backend)
    except ImportError as error:
        package = "tensorrt_rtx" if backend == "tensorrt_rtx" else "attnforge[tensorrt]"
        return f"{backend} is not installed ({error}); pip install {package}"
    if trt.__version__ != engine.version:
        return (
            f"its plan was built by {backend} {engine.version} and this machine has {trt.__version__}, which may not "
            f"load it; deploy the model again here, or install {backend}=={engine.version}"
        )
    if cuda_devices() == 0:
        return f"no CUDA device: {backend} plans are built and inspected without one, and run only on an NVIDIA GPU"
    return None


class TensorRT:
    """A deserialized plan, one execution context, and device buffers that grow to the largest shape seen."""

    def __init__(self, bundle: Bundle, backend: str, threads: int | None = None) -> None:
        del threads
        self.name = backend
        self._trt: Any = importlib.import_module(backend)
        self._cuda: Any = importlib.import_module("cuda.bindings.runtime")
        engine: Engine = bundle.manifest.targets[backend].engines[0]
        self._logger = self._trt.Logger(self._trt.Logger.ERROR)
        self._runtime = self._trt.Runtime(self._logger)
        self._engine = self._runtime.deserialize_cuda_engine(bundle.file(engine.file).read_bytes())
        if self._engine is None:
            built_for = ", ".join(engine.compute_capabilities)
            raise UnavailableError(
                f"{backend} cannot load the plan on this device (built for {built_for}); deploy the model again here"
            )
        self._context = self._engine.create_execution_context()
        self._stream = self._check(self._cuda.cudaStreamCreate())
        self._buffers: dict[str, tuple[int, int]] = {}  # name → (address, bytes)
        self._dtypes = {spec.name: np.dtype(spec.dtype) for spec in bundle.manifest.outputs}

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        copy = self._cuda.cudaMemcpyKind
        for name, array in feeds.items():
            if not self._context.set_input_shape(name, array.shape):
                raise BuildError(f"{self.name} refused shape {array.shape} for input {name!r}")
            address = self._reserve(name, array.nbytes)
            kind = copy.cudaMemcpyHostToDevice
            self._check(self._cuda.cudaMemcpyAsync(address, array.ctypes.data, array.nbytes, kind, self._stream))
        outputs = {
            name: np.empty(tuple(self._context.get_tensor_shape(name)), dtype) for name, dtype in self._dtypes.items()
        }
        for name, array in outputs.items():
            self._reserve(name, array.nbytes)
        if not self._context.execute_async_v3(int(self._stream)):
            raise BuildError(f"{self.name} could not run the plan")
        for name, array in outputs.items():
            address, kind = self._buffers[name][0], copy.cudaMemcpyDeviceToHost
            self._check(self._cuda.cudaMemcpyAsync(array.ctypes.data, address, array.nbytes, kind, self._stream))
        self._check(self._cuda.cudaStreamSynchronize(self._stream))
        return outputs

    def close(self) -> None:
        for address, _ in self._buffers.values():
            self._check(self._cuda.cudaFree(address))
        self._buffers.clear()
        if self._stream is not None:
            self._check(self._cuda.cudaStreamDestroy(self._stream))
        self._context = self._engine = self._runtime = self._stream = None

    def _reserve(self, name: str, size: int) -> int:
        """Device memory for tensor `name`, at least `size` bytes, at an address that the context knows."""
        address, held = self._buffers.get(name, (0, -1))
        if held < size:
            if held >= 0:
                self._check(self._cuda.cudaFree(address))
            address = int(self._check(self._cuda.cudaMalloc(max(size, 1))))
            self._buffers[name] = (address, size)
            self._context.set_tensor_address(name, address)
        return address

    def _check(self, result: tuple[Any, ...]) -> Any:
        status, *values = result
        if int(status) != 0:
            raise UnavailableError(f"CUDA: {self._cuda.cudaGetErrorString(status)[1].decode()}")
        return values[0] if values else None
