"""ONNX Runtime on a GPU: its CUDA and TensorRT providers, on device memory through I/O binding."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
from cuda.bindings import driver
from cuda.core import Event, Stream
from cuda.core.utils import StridedMemoryView

from attnforge import cache
from attnforge.arrays import Array
from attnforge.bundle import Bundle, TensorSpec
from attnforge.errors import UnavailableError, UsageError
from attnforge.runtime.backends.backend import Backend, Memory, Options, Registered
from attnforge.runtime.backends.onnxruntime import WithSession, bind_host_input, refusals, session_options, weights_of
from attnforge.runtime.cases import shape_of, sizes_at
from attnforge.runtime.gpu import Block, DeviceOutputs, Feed, Gpu, bytes_of
from attnforge.runtime.inputs import Shapes

GRAPHS_KEPT = 16
"""Number of combinations of shapes that get a CUDA graph. ONNX Runtime cannot free a graph, so later shapes run
without."""

NO_GRAPH = "-1"
"""The `gpu_graph_id` of a run that is neither captured nor replayed."""


class OnnxRuntimeGpu(WithSession, Backend):
    """The bundle's ONNX Runtime model on CUDA, or its TensorRT model under ONNX Runtime's TensorRT provider.

    One run is enqueued at a time, on the session's own stream, which waits for the caller's.

    Args:
        bundle: the bundle whose model to load.
        row: `onnxruntime-cuda` or `onnxruntime-tensorrt`.
        options: options of the session.

    Raises:
        UnavailableError: ONNX Runtime could not start the provider.
        UsageError: there is no such CUDA device.
        DeviceError: CUDA failed.
    """

    def __init__(self, bundle: Bundle, row: Registered, options: Options) -> None:
        self.name = row.name
        self.gpu = Gpu(options.device)
        self.outputs = DeviceOutputs(self.gpu)
        self._inputs = bundle.manifest.graph_inputs
        self._outputs = bundle.manifest.graph_outputs
        self._lock = threading.Lock()
        self._graphs = options.graphs is True
        if self._graphs and bundle.manifest.decoding is not None:
            raise UsageError("graphs=True was given, and steps of a decoder are not captured; leave it out")
        # ONNX Runtime replays a graph only on the thread that captured it, so one thread captures and replays all
        self._replays = ThreadPoolExecutor(1, "attnforge-replays")
        self._static: dict[tuple[tuple[int, ...], ...], _Static] = {}
        file = row.model(bundle.manifest)
        self._weights = weights_of(bundle.file(file))
        ort.preload_dlls()  # the CUDA libraries of torch's or NVIDIA's wheels, if installed
        with self.gpu.current(), bundle.steady(), refusals(f"{bundle.path / file}"):
            # a separate stream: while ONNX Runtime captures a graph on it, nothing else may use it
            self._stream: Stream = self.gpu.device.create_stream()
            providers = provider_options(bundle, row.name, options, int(self._stream.handle))
            model, settings = bundle.model(file), session_options(options.threads)
            self._session = ort.InferenceSession(model, settings, [*providers, "CPUExecutionProvider"])
        if row.provider not in self._session.get_providers():
            raise UnavailableError(
                f"ONNX Runtime could not start its {row.provider}; its log says which library is missing"
            )

    def run(self, feeds: dict[str, Array], shapes: Shapes, out: Mapping[str, Array]) -> list[Array]:
        with self._lock, self.gpu.current():
            results = {
                spec.name: out[spec.name] if spec.name in out else np.empty(shape, spec.dtype)
                for spec, shape in zip(self._outputs, self.output_shapes(shapes), strict=True)
            }
            self._execute(self._binding(feeds, results), NO_GRAPH)
        return list(results.values())

    def submit(
        self, feeds: Sequence[Feed], shapes: Shapes, results: Sequence[StridedMemoryView], stream: Stream
    ) -> Event:
        run_on = self._stream
        # the caller's memory on the host may be pinned, which the device would read after the call has returned
        feeds = [feed.copy() if isinstance(feed, np.ndarray) else feed for feed in feeds]
        with self._lock:
            run_on.wait(stream)
            static = self._static_of(shapes) if self._graphs else None
            if static is None:
                binding = self._binding(_named(self._inputs, feeds), _named(self._outputs, results))
                self._execute(binding, NO_GRAPH, wait=False)
            else:
                self._replays.submit(self._replay, static, feeds, results).result()
            event = run_on.record()
        stream.wait(event)
        return event

    def bound(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Callable[[], None]:
        """Bind a run from some arrays to others; those on the device, which are among both, are written in place. The
        run can be called any number of times, and its outputs are complete when it returns.

        Args:
            inputs: inputs by name: arrays on the host, which are read again in each run, or rows of a cache.
            outputs: outputs by name, likewise.
        """
        on_host = {name: value for name, value in inputs.items() if isinstance(value, np.ndarray)}
        binding = self._binding({name: value for name, value in inputs.items() if name not in on_host}, outputs)
        kept = (inputs, outputs)  # the binding only has addresses

        def run() -> None:
            assert kept
            with self._lock, self.gpu.current():
                self._open()
                for name, array in on_host.items():  # a binding copies it to the device at once
                    bind_host_input(binding, name, array)
                self._execute(binding, NO_GRAPH)

        return run

    def new_cache(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceCache:
        """A cache of zeros on the device."""
        return DeviceCache(self.gpu, shape, dtype)

    def free_bytes(self) -> int:
        """The device's free memory."""
        with self.gpu.current():
            return int(self.gpu.check(driver.cuMemGetInfo()[:2]))

    def output_shapes(self, shapes: Shapes) -> Sequence[tuple[int, ...]]:
        for spec, shape in zip(self._outputs, shapes.outputs, strict=True):
            if shape is None:
                raise UnavailableError(
                    f"the inputs' sizes do not determine the shape of output {spec.name!r} ({spec.text()}), which "
                    f"{self.name} needs; load the bundle on onnxruntime-cpu"
                )
        return [shape for shape in shapes.outputs if shape is not None]

    def memory(self) -> Memory:
        return Memory(weights=self._weights, buffers=self.gpu.allocated, graphs=len(self._static))

    def close(self) -> None:
        with self._lock:
            self._replays.shutdown()
            self._session = None
            self._static.clear()
            self.outputs.clear()

    # ---

    def _execute(self, binding: Any, graph: str, wait: bool = True) -> None:
        options = ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", graph)
        if not wait:
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        try:
            self._session.run_with_iobinding(binding, options)
        except Exception as error:  # ONNX Runtime's errors have no class in common
            raise self.gpu.failure(f"{self.name}: {error}") from error

    def _replay(self, static: _Static, feeds: Sequence[Feed], results: Sequence[StridedMemoryView]) -> None:
        check, handle = self.gpu.check, int(self._stream.handle)
        with self.gpu.current():
            for feed, rows in zip(feeds, static.inputs, strict=True):
                if isinstance(feed, np.ndarray):
                    check(driver.cuMemcpyHtoDAsync(rows.ptr, feed.ctypes.data, feed.nbytes, handle))
                else:
                    check(driver.cuMemcpyDtoDAsync(rows.ptr, feed.ptr, bytes_of(feed), handle))
            self._execute(static.binding, static.id, wait=False)
            for view, rows in zip(results, static.outputs, strict=True):
                check(driver.cuMemcpyDtoDAsync(view.ptr, rows.ptr, bytes_of(view), handle))

    def _static_of(self, shapes: Shapes) -> _Static | None:
        """Memory at fixed addresses for these shapes, which a CUDA graph needs; None for shapes that come after the
        first :data:`GRAPHS_KEPT`."""
        if (known := self._static.get(shapes.inputs)) is not None:
            return known
        if len(self._static) >= GRAPHS_KEPT:
            return None
        inputs, outputs = (
            [Rows.allocated(self.gpu, shape, np.dtype(spec.dtype)) for spec, shape in zip(specs, sizes, strict=True)]
            for specs, sizes in ((self._inputs, shapes.inputs), (self._outputs, self.output_shapes(shapes)))
        )
        binding = self._binding(_named(self._inputs, inputs), _named(self._outputs, outputs))
        static = self._static[shapes.inputs] = _Static(str(len(self._static) + 1), binding, inputs, outputs)
        return static


def _named(specs: Sequence[TensorSpec], values: Sequence[Any]) -> dict[str, Any]:
    return {spec.name: value for spec, value in zip(specs, values, strict=True)}


class _Static(NamedTuple):
    """A CUDA graph's inputs and outputs, which are bound once.

    Attributes:
        id: the graph's `gpu_graph_id`.
        binding: ONNX Runtime's I/O binding.
        inputs, outputs: their memory.
    """

    id: str
    binding: Any
    inputs: list[Rows]
    outputs: list[Rows]


def provider_options(bundle: Bundle, backend: str, options: Options, stream: int) -> list[tuple[str, dict[str, str]]]:
    """ONNX Runtime's providers and their options, the preferred provider first.

    Args:
        bundle: the bundle.
        backend: `onnxruntime-cuda` or `onnxruntime-tensorrt`.
        options: options of the session.
        stream: address of the CUDA stream to run on.
    """
    manifest = bundle.manifest
    graphs = "1" if options.graphs else "0"
    cuda = {
        "device_id": str(options.device),
        "user_compute_stream": str(stream),
        # TF32 is ONNX Runtime's default on CUDA, so fp32 must disable it.
        "use_tf32": "1" if manifest.precision == "tf32" else "0",
        "enable_cuda_graph": graphs if backend == "onnxruntime-cuda" else "0",
    }
    providers = [("CUDAExecutionProvider", cuda)]
    if backend == "onnxruntime-tensorrt":
        tensorrt = {"device_id": cuda["device_id"], "user_compute_stream": cuda["user_compute_stream"]}
        tensorrt["trt_cuda_graph_enable"] = graphs
        tensorrt |= profile_options(manifest.graph_inputs)
        if options.cache and (folder := cache.own_folder(bundle.path, "onnxruntime")) is not None:
            tensorrt |= {"trt_engine_cache_enable": "1", "trt_engine_cache_path": str(folder)}
            tensorrt |= {"trt_timing_cache_enable": "1", "trt_timing_cache_path": str(folder)}
        providers.insert(0, ("TensorrtExecutionProvider", tensorrt))
    return providers


def profile_options(inputs: list[TensorSpec]) -> dict[str, str]:
    """The optimization profile as options of ONNX Runtime's TensorRT provider: `name:2x64,…` for min, opt and max."""
    bounds = {which: sizes_at(inputs, which) for which in ("min", "opt", "max")}
    if not any(bounds["opt"]):
        return {}
    return {
        f"trt_profile_{which}_shapes": ",".join(
            f"{spec.name}:{'x'.join(map(str, shape_of(spec, sizes)))}" for spec in inputs
        )
        for which, sizes in bounds.items()
    }


# --- caches of decoders -----------------------------------------------------------------------------------------------


LEGACY_DEFAULT_STREAM = 0

Index = tuple[int | Sequence[int] | slice, slice, slice]
"""Samples, all heads, and a range of slots."""


class Rows(NamedTuple):
    """Consecutive samples of a cache, where they are.

    Attributes:
        shape: `(samples, heads, slots, size)`.
        dtype: type of the numbers.
        ptr: address of the first number on the device.
        block: the memory, which is not freed before.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    ptr: int
    block: Block

    @classmethod
    def allocated(cls, gpu: Gpu, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Rows:
        """New memory."""
        block = gpu.allocate(prod(shape) * dtype.itemsize)
        return cls(shape, dtype, block.address, block)


class DeviceCache:
    """Keys or values, `(samples, heads, slots, size)`, zeros at first, with those parts of an array's interface that a
    decoder uses: `cache[samples]` is a view on the device, `cache[samples, :, slots]` a copy on the host, and assigning
    to the latter writes. All copies are complete when they return.

    Raises:
        DeviceError: the device has too little memory, or CUDA failed.
    """

    def __init__(self, gpu: Gpu, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._gpu, self.shape, self.dtype = gpu, shape, dtype
        self.nbytes = prod(shape) * dtype.itemsize
        with gpu.current():
            self._block = gpu.allocate(self.nbytes)
            gpu.check(driver.cuMemsetD8(self._block.address, 0, self.nbytes))
            gpu.check(driver.cuStreamSynchronize(LEGACY_DEFAULT_STREAM))

    def __getitem__(self, index: slice | Index) -> Any:
        if isinstance(index, slice):
            samples = range(self.shape[0])[index]
            address = self._block.address + samples.start * prod(self.shape[1:]) * self.dtype.itemsize
            return Rows((len(samples), *self.shape[1:]), self.dtype, address, self._block)
        read, addresses = self._host_copy(index)
        with self._gpu.current():
            for array, address in zip(_heads(read), addresses, strict=True):
                self._gpu.check(driver.cuMemcpyDtoH(array.ctypes.data, address, array.nbytes))
        return read[0] if isinstance(index[0], int) else read

    def __setitem__(self, index: Index, value: Array | int) -> None:
        written, addresses = self._host_copy(index)
        written[:] = value
        with self._gpu.current():
            for array, address in zip(_heads(written), addresses, strict=True):
                self._gpu.check(driver.cuMemcpyHtoD(address, array.ctypes.data, array.nbytes))
            self._gpu.check(driver.cuStreamSynchronize(LEGACY_DEFAULT_STREAM))  # a copy from the host may still run

    def _host_copy(self, index: Index) -> tuple[Array, list[int]]:
        """An uninitialised array on the host for the slots that an index means, and the address of the first slot in
        each head of each sample."""
        chosen, _, slots = index
        _, heads, capacity, size = self.shape
        which = range(self.shape[0])[chosen] if isinstance(chosen, slice) else chosen
        samples, covered = [which] if isinstance(which, int) else which, range(capacity)[slots]
        firsts = [(sample * heads + head) * capacity + covered.start for sample in samples for head in range(heads)]
        addresses = [self._block.address + first * size * self.dtype.itemsize for first in firsts]
        return np.empty((len(samples), heads, len(covered), size), self.dtype), addresses


def _heads(array: Array) -> Iterator[Array]:
    """The consecutive numbers of each sample and head."""
    return iter(array.reshape(array.shape[0] * array.shape[1], *array.shape[2:]))
