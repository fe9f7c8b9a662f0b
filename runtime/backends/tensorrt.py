"""TensorRT and TensorRT-RTX: one backend for both.

A call borrows a lane: activation memory, a stream, staging memory for NumPy arrays, an execution context for shapes
that occur once, and captured CUDA graphs. A context from which a graph was captured must not be touched again (NVIDIA's
TensorRT Developer Guide, "CUDA Graphs"), so every graph has its own context. A lane runs one call at a time, so
all its contexts share its activation memory. The event that a lane records after each call orders calls on several
streams.

Only TensorRT-RTX (`is_rtx`) has a runtime cache, checks a plan before it is loaded, and lets the caller decide when
kernels are specialized for a shape.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from math import prod
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from cuda.bindings import driver
from cuda.core import Event, Stream
from cuda.core._utils.cuda_utils import CUDAError
from cuda.core.utils import StridedMemoryView

from attnforge import cache
from attnforge.arrays import Array
from attnforge.bundle import Bundle, Engine
from attnforge.errors import DeviceError, InputError, UnavailableError
from attnforge.machine import compute_capability, device_name
from attnforge.runtime.backends.backend import Memory, Options, Registered
from attnforge.runtime.gpu import ALIGNMENT, Block, DeviceOutputs, Feed, Gpu, bytes_of
from attnforge.runtime.inputs import Shapes
from attnforge.runtime.plans import engine_for, profile_for
from attnforge.runtime.pool import Pool, Recent

log = logging.getLogger("attnforge.tensorrt")

GRAPHS_KEPT = 16
"""Number of CUDA graphs that a lane keeps; the least recently used one is evicted."""

CALLS_REMEMBERED = 1024
"""Number of calls, by shapes and addresses, that a lane counts."""

CAPTURED_AT = {2 * 8**n for n in range(10)}
"""Counts of a call at which its graph is captured: the second time and, if that graph has been evicted since, at ever
larger counts, because a capture costs more than many calls."""

FAILURES = 3
"""Number of captures that may fail before no more are attempted."""

INVALID = {
    1: "it was built by another version",
    2: "it was built for other compute capabilities than this device's",
    4: "it needs a newer CUDA driver",
    8: "it needs a newer CUDA runtime",
    16: "the device has too little memory",
    32: "the file is not a plan, or is truncated",
    64: "CUDA failed during the check",
}
"""Bits of nvinfer1::EngineInvalidityDiagnostics."""


class Call(NamedTuple):
    """All arguments of the enqueued work: equal calls can share a CUDA graph.

    Attributes:
        profile: number of the optimization profile.
        shapes: shapes of the inputs, in order.
        inputs: the inputs' addresses on the device.
        outputs: the outputs' addresses on the device.
        uploads: (to, from, bytes) of copies from pinned memory, before the run.
        moves: (to, from, bytes) of copies on the device, before the run.
        downloads: (to, from, bytes) of copies to pinned memory, after the run.
    """

    profile: int
    shapes: tuple[tuple[int, ...], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    uploads: tuple[tuple[int, int, int], ...] = ()
    moves: tuple[tuple[int, int, int], ...] = ()
    downloads: tuple[tuple[int, int, int], ...] = ()


class TensorRT:
    """A plan on a GPU, run by any number of threads.

    Args:
        bundle: the bundle whose plan for this GPU to load.
        row: `tensorrt` or `tensorrt_rtx`.
        options: options of the session.

    Raises:
        UnavailableError: the bundle has no plan that this TensorRT can load on this GPU.
        UsageError: there is no such CUDA device.
        DeviceError: CUDA failed.
    """

    def __init__(self, bundle: Bundle, row: Registered, options: Options) -> None:
        self.name = row.name
        trt = self._trt = importlib.import_module(self.name)
        self.is_rtx = self.name == "tensorrt_rtx"
        engines = bundle.manifest.targets[self.name].engines
        record = engine_for(engines, trt.__version__, compute_capability(options.device))
        if isinstance(record, str):
            raise UnavailableError(record)
        manifest = bundle.manifest
        self.inputs = [spec.name for spec in manifest.graph_inputs]
        self.results = [(spec.name, np.dtype(spec.dtype)) for spec in manifest.graph_outputs]
        self.tensors = [*self.inputs, *(name for name, _ in self.results)]
        self.profiles = record.profiles
        self.graphs = options.graphs is not False
        self.captures_failed = 0
        self.gpu = Gpu(options.device)
        self.outputs = DeviceOutputs(self.gpu)
        # TensorRT's own logger and an error recorder, because a Python logger would be called for every message of all
        # threads, and wait for the GIL each time
        self.errors = _recorder(trt)
        self._logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
        self._shaping = threading.Lock()
        self._cache_file = cache.runtime_cache_file(
            bundle.path, trt.__version__, device_name(options.device), manifest.files[record.file]
        )
        with self.gpu.current():
            self._runtime = trt.Runtime(self._logger)
            self._runtime.error_recorder = self.errors
            self._engine = self._deserialized(bundle, record)
            self._runtime_cache = self._opened_cache() if self.is_rtx and options.cache else None
            self._shaper: Any = None
        self._inferred = functools.lru_cache(maxsize=4096)(self._infer)
        self._lanes = Pool(lambda: _Lane(self), options.contexts)

    # --- running

    def run(self, feeds: dict[str, Array], shapes: Shapes, out: Mapping[str, Array]) -> list[Array]:
        with self.gpu.current(), self._lanes.borrow() as lane:
            results = lane.run(feeds, shapes, self.output_shapes(shapes))
            named = zip(self.results, results, strict=True)
            copies = [out[name] if name in out else np.empty_like(result) for (name, _), result in named]
            for copy, result in zip(copies, results, strict=True):  # the lane's next call overwrites its memory
                np.copyto(copy, result)
            return copies

    def submit(
        self, feeds: Sequence[Feed], shapes: Shapes, results: Sequence[StridedMemoryView], stream: Stream
    ) -> Event:
        with self._lanes.borrow(lambda lane: lane.last_stream == int(stream.handle)) as lane:
            return lane.submit(feeds, shapes, results, stream)

    def output_shapes(self, shapes: Shapes) -> tuple[tuple[int, ...], ...]:
        known = tuple(shape for shape in shapes.outputs if shape is not None)
        if len(known) == len(shapes.outputs):
            return known
        return self._inferred(profile_for(self.profiles, shapes.sizes), shapes.inputs)

    def _infer(self, profile: int, inputs: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        with self._shaping:
            if self._shaper is None:
                self._shaper = self.new_context(None)
            context = self._shaper
            self.set_shapes(context, profile, inputs, self.gpu.stream)
            inferred = tuple(tuple(context.get_tensor_shape(name)) for name, _ in self.results)
        if any(size < 0 for shape in inferred for size in shape):
            raise UnavailableError(
                f"{self.name} cannot infer the shape of every output before the run, because values determine it, "
                "which this runtime does not support: load the bundle on onnxruntime-cuda or onnxruntime-cpu"
            )
        return inferred

    # --- contexts

    def new_context(self, activations: Block | None, specialized: bool = False) -> Any:
        """A new execution context.

        Args:
            activations: the activation memory to run in; None for a context that only infers shapes.
            specialized: whether a shape's kernels are compiled when it is first run rather than in the background. A
                captured graph keeps the kernels that it was captured with.
        """
        trt = self._trt
        runtime_config = self._engine.create_runtime_config()
        runtime_config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if self.is_rtx:
            strategy = trt.DynamicShapesKernelSpecializationStrategy
            runtime_config.dynamic_shapes_kernel_specialization_strategy = (
                strategy.EAGER if specialized else strategy.LAZY
            )
            runtime_config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED  # graphs are captured here
            if self._runtime_cache is not None:
                runtime_config.set_runtime_cache(self._runtime_cache)
        context = self._engine.create_execution_context(runtime_config)
        if context is None:
            raise self.failure("it created no execution context")
        context.error_recorder = self.errors
        if activations is not None:
            context.set_device_memory(activations.address, activations.size)
        return context

    def set_shapes(self, context: Any, profile: int, shapes: Sequence[tuple[int, ...]], stream: Stream) -> None:
        """Select an optimization profile, and set the inputs' shapes.

        Raises:
            InputError: TensorRT refuses a shape.
        """
        if context.active_optimization_profile != profile:
            try:
                selected = context.set_optimization_profile_async(profile, int(stream.handle))
            except RuntimeError:  # the bindings raise it without the reason, which the recorder has
                selected = False
            if not selected:
                raise self.failure(f"it refused optimization profile {profile}")
        for name, shape in zip(self.inputs, shapes, strict=True):
            if not context.set_input_shape(name, shape):
                raise InputError(f"{self.name} refused shape {shape} for input {name!r}: {self.errors.last()}")

    @property
    def activation_size(self) -> int:
        """Bytes of activation memory of a context, at the largest sizes."""
        return int(self._engine.device_memory_size_v2)

    @property
    def weights_size(self) -> int:
        """Bytes of the plan's weights."""
        return int(self._engine.get_engine_stat(self._trt.EngineStat.TOTAL_WEIGHTS_SIZE))

    def failure(self, text: str) -> DeviceError:
        """The error to raise when a TensorRT call only reports that it failed."""
        return self.gpu.failure(f"{self.name}: {text}: {self.errors.last()}")

    # --- the rest

    def memory(self) -> Memory:
        activations = self._lanes.made * max(self.activation_size, 1)
        return Memory(
            weights=self.weights_size,
            activations=activations,
            buffers=self.gpu.allocated - activations,
            pinned=self.gpu.pinned,
            contexts=self._lanes.made,
            graphs=sum(len(lane.graphs) for lane in self._lanes.items()),
        )

    def close(self) -> None:
        """Free everything; if the device is lost, nothing is left to free."""
        with self.gpu.current() if self.gpu.lost is None else nullcontext():
            self._lanes.close(lambda lane: lane.close())
            self._save_cache()
            self.outputs.clear()
            self._shaper = self._runtime_cache = self._engine = self._runtime = None

    def keep(self) -> None:
        """Write the kernels compiled so far to disk, for the next start."""
        with self.gpu.current():
            self._save_cache()

    def _deserialized(self, bundle: Bundle, record: Engine) -> Any:
        data = bundle.read(record.file)
        remedy = f"build it again with load(…, {self.name!r}, rebuild=True)"
        if self.is_rtx:
            validity, bits = self._runtime.get_engine_validity(data)
            if validity == self._trt.EngineValidity.INVALID:
                reasons = "; ".join(invalid(int(bits))) or self.errors.last()
                raise UnavailableError(f"{self.name} cannot load {bundle.path / record.file} here: {reasons}; {remedy}")
        engine = self._runtime.deserialize_cuda_engine(data)
        if engine is None:
            built_for = ", ".join(record.compute_capabilities)
            raise UnavailableError(
                f"{self.name} cannot load {bundle.path / record.file} (built for {built_for}) on "
                f"{device_name(self.gpu.ordinal)}: {self.errors.last()}; {remedy}"
            )
        engine.error_recorder = self.errors
        return engine

    def _opened_cache(self) -> Any:
        runtime_cache = self._engine.create_runtime_config().create_runtime_cache()
        self._kept = cache.read(self._cache_file)
        if self._kept and not runtime_cache.deserialize(self._kept):
            log.info("%s is from another machine or version; kernels are compiled again", self._cache_file)
        return runtime_cache

    def _save_cache(self) -> None:
        if self._runtime_cache is None or self.gpu.lost is not None:
            return
        data = bytes(self._runtime_cache.serialize())
        if data != self._kept:
            cache.write(self._cache_file, data)
            self._kept = data


class _Lane:
    """The resources that one call at a time runs on."""

    def __init__(self, owner: TensorRT) -> None:
        gpu = self._gpu = owner.gpu
        self._owner = owner
        self._stream: Stream = gpu.device.create_stream()
        self._done: Event = gpu.device.create_event()
        self._activations = gpu.allocate(owner.activation_size)
        self._context = owner.new_context(self._activations)
        self._shapes: tuple[tuple[int, ...], ...] | None = None  # the context's
        self._device: dict[str, Block] = {}
        self._pinned: dict[str, Block] = {}
        self._counts: Recent[Call, int] = Recent(CALLS_REMEMBERED)
        self.graphs: Recent[Call, _Graph] = Recent(GRAPHS_KEPT, self._drop)
        self.last_stream: int | None = None

    def run(self, feeds: dict[str, Array], shapes: Shapes, expected: Sequence[tuple[int, ...]]) -> list[Array]:
        """Run on host arrays. The outputs are in pinned memory that the lane's next call overwrites."""
        uploads = [self._upload(name, array) for name, array in feeds.items()]
        results, downloads = [], []
        for (name, dtype), shape in zip(self._owner.results, expected, strict=True):
            size = prod(shape) * dtype.itemsize
            pinned = self._block(self._pinned, name, size)
            results.append(pinned.array(shape, dtype))
            downloads.append((pinned.address, self._block(self._device, name, size).address, size))
        profile = profile_for(self._owner.profiles, shapes.sizes)
        inputs, outputs = tuple(to for to, _, _ in uploads), tuple(source for _, source, _ in downloads)
        call = Call(profile, shapes.inputs, inputs, outputs, tuple(uploads), downloads=tuple(downloads))
        self._execute(call, self._stream)
        self._done.sync()
        return results

    def submit(
        self, feeds: Sequence[Feed], shapes: Shapes, results: Sequence[StridedMemoryView], stream: Stream
    ) -> Event:
        """Enqueue a run on `stream`, with outputs in the memory of `results`; the event completes with the run."""
        uploads, moves, addresses = [], [], []
        for name, feed in zip(self._owner.inputs, feeds, strict=True):
            if isinstance(feed, np.ndarray):
                uploads.append(self._upload(name, feed))
                addresses.append(uploads[-1][0])
            elif feed.ptr % ALIGNMENT:
                size = bytes_of(feed)
                addresses.append(self._block(self._device, name, size).address)
                moves.append((addresses[-1], feed.ptr, size))
            else:
                addresses.append(feed.ptr)
        profile = profile_for(self._owner.profiles, shapes.sizes)
        outputs = tuple(view.ptr for view in results)
        self._execute(Call(profile, shapes.inputs, tuple(addresses), outputs, tuple(uploads), tuple(moves)), stream)
        return stream.record()

    def close(self) -> None:
        if self._gpu.lost is None:
            self._done.sync()
            self.graphs.clear()
        self._context = None
        self._device.clear()
        self._pinned.clear()
        del self._activations

    # ---

    def _execute(self, call: Call, stream: Stream) -> None:
        stream.wait(self._done)
        self.last_stream = int(stream.handle)
        try:
            graph = self.graphs.get(call)
            if graph is None and self._owner.graphs:
                count = (self._counts.get(call) or 0) + 1
                self._counts.put(call, count)
                if count in CAPTURED_AT:
                    graph = self._capture(call, stream)
            if graph is not None:
                graph.graph.launch(stream)
                return
            if self._shapes != call.shapes or self._context.active_optimization_profile != call.profile:
                self._shapes = None
                self._owner.set_shapes(self._context, call.profile, call.shapes, stream)
                self._shapes = call.shapes
            self._enqueue(self._context, call, stream)
        finally:
            if self._gpu.lost is None:
                stream.record(self._done)

    def _enqueue(self, context: Any, call: Call, stream: Stream) -> None:
        owner, check, handle = self._owner, self._gpu.check, int(stream.handle)
        for to, source, size in call.uploads:
            check(driver.cuMemcpyHtoDAsync(to, source, size, handle))
        for to, source, size in call.moves:
            check(driver.cuMemcpyDtoDAsync(to, source, size, handle))
        for name, address in zip(owner.tensors, (*call.inputs, *call.outputs), strict=True):
            if not context.set_tensor_address(name, address):
                raise owner.failure(f"it refused the address of {name!r}")
        if not context.execute_async_v3(handle):
            raise owner.failure("the plan could not be run")
        for to, source, size in call.downloads:
            check(driver.cuMemcpyDtoHAsync(to, source, size, handle))

    def _capture(self, call: Call, callers: Stream) -> _Graph | None:
        """A CUDA graph of `call`, or None if it cannot be captured."""
        owner, stream = self._owner, self._stream
        stream.wait(callers)  # the first run reads the inputs
        context = owner.new_context(self._activations, specialized=True)
        owner.set_shapes(context, call.profile, call.shapes, stream)
        try:
            self._enqueue(context, call, stream)  # compiles and allocates, which is not allowed in a capture
            stream.sync()
        except BaseException:
            callers.wait(stream)  # the run may have been enqueued in part
            raise
        if owner.is_rtx and not context.is_stream_capturable(int(stream.handle)):
            log.info("%s cannot be captured in a CUDA graph; it is enqueued at every call", owner.name)
            owner.graphs = False
            return None
        recorder = stream.create_graph_builder()
        try:
            recorder.begin_building("relaxed")
            self._enqueue(context, call, recorder.stream)
            graph = recorder.end_building().complete()
        except (CUDAError, DeviceError, RuntimeError) as error:
            if self._gpu.lost is not None:
                raise
            log.warning("%s: a CUDA graph could not be captured, calls are enqueued without: %s", owner.name, error)
            owner.captures_failed += 1
            owner.graphs = owner.captures_failed < FAILURES
            return None
        finally:
            with suppress(CUDAError):  # a failed capture is reported above
                recorder.close()
        captured = _Graph(graph, context)
        self.graphs.put(call, captured)
        return captured

    def _drop(self, graph: _Graph) -> None:
        self._done.sync()
        graph.graph.close()

    def _upload(self, name: str, array: Array) -> tuple[int, int, int]:
        """Copy an array to pinned memory; returns the (to, from, bytes) of the copy to enqueue."""
        self._done.sync()  # the previous call may still read the pinned memory
        pinned = self._block(self._pinned, name, array.nbytes)
        np.copyto(pinned.array(array.shape, array.dtype), array)
        return self._block(self._device, name, array.nbytes).address, pinned.address, array.nbytes

    def _block(self, blocks: dict[str, Block], name: str, size: int) -> Block:
        """Staging memory for tensor `name`, as large as the largest that it has needed."""
        block = blocks.get(name)
        if block is None or block.size < size:
            self._done.sync()
            blocks.pop(name, None)
            block = blocks[name] = self._gpu.allocate(size, pinned=blocks is self._pinned)
        return block


class _Graph(NamedTuple):
    """A captured CUDA graph, and the context that it was captured from, which it needs as long as it may be
    launched."""

    graph: Any
    context: Any


def invalid(bits: int) -> Iterator[str]:
    """The reasons why TensorRT-RTX refuses a plan, from the bits of its diagnostics."""
    return (text for bit, text in INVALID.items() if bits & bit)


def _recorder(trt: ModuleType) -> Any:
    """An error recorder, of a class derived from this TensorRT's own."""

    class Recorder(trt.IErrorRecorder):  # type: ignore[name-defined, misc]
        """Keeps the last errors of all threads, because TensorRT's calls only return False."""

        def __init__(self) -> None:
            trt.IErrorRecorder.__init__(self)
            self._errors: deque[tuple[Any, str]] = deque(maxlen=16)

        def report_error(self, code: Any, description: str) -> bool:
            self._errors.append((code, description.strip()))
            log.error("%s", description.strip())
            return True

        def clear(self) -> None:
            self._errors.clear()

        def get_num_errors(self) -> int:  # TensorRT calls this, although its bindings offer `num_errors`
            return len(self._errors)

        def get_error_code(self, index: int) -> Any:
            return self._errors[index][0]

        def get_error_desc(self, index: int) -> str:
            return self._errors[index][1]

        def has_overflowed(self) -> bool:
            return False

        def last(self) -> str:
            return self._errors[-1][1] if self._errors else "it gave no reason, except possibly on standard error"

    return Recorder()
