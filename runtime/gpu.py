"""A CUDA device: its context, its memory and its streams, through cuda-python.

Imported only where a backend runs on a GPU.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeAlias

import numpy as np
from cuda.bindings import driver
from cuda.core import LEGACY_DEFAULT_STREAM, Buffer, Device, Event, Stream
from cuda.core._utils.cuda_utils import CUDAError
from cuda.core.utils import StridedMemoryView

from attnforge.arrays import Array, from_gpu, is_torch, library_of, on_gpu
from attnforge.bundle import TensorSpec
from attnforge.errors import DeviceError, InputError, UsageError
from attnforge.machine import cuda_devices
from attnforge.runtime.inputs import Form, Shapes, check_out, on_host
from attnforge.runtime.pool import Recent

SIZES_KEPT, IDLE_OUTPUTS = 32, 4
"""Of how many sizes output memory is kept for the next call, and how many blocks of each."""

ALIGNMENT = 256
"""Bytes that TensorRT wants addresses to be multiples of."""

LEGACY_STREAMS, PER_THREAD_STREAM = (0, 1), 2
"""Addresses of the legacy default stream: no graph can be captured on it, and TensorRT halts the device there."""


Feed: TypeAlias = StridedMemoryView | Array
"""An input: where it lies on the device, or an array of the host."""

STICKY = {
    f"CUDA_ERROR_{name}"
    for name in (
        "ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT", "ASSERT", "HARDWARE_STACK_ERROR", "ILLEGAL_INSTRUCTION",
        "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC", "LAUNCH_FAILED", "ECC_UNCORRECTABLE",
        "CONTEXT_IS_DESTROYED", "DEVICE_UNAVAILABLE",
    )
}  # fmt: skip
"""After these a process can do nothing more with the device."""


class Gpu:
    """A CUDA device, and the one place where CUDA's errors become ours.

    Attributes:
        ordinal: of the device.
        device: of cuda.core.
        stream: the session's own, for callers without one.
        lost: why no call can succeed any more, once that is so.
        allocated: bytes of device memory that are held.
        pinned: bytes of pinned host memory that are held.

    Raises:
        UsageError: there is no such device.
    """

    def __init__(self, ordinal: int = 0) -> None:
        if not 0 <= ordinal < cuda_devices():
            raise UsageError(f"there is no CUDA device {ordinal}; this machine has {cuda_devices()}, counted from 0")
        self.ordinal = ordinal
        self.lost: str | None = None
        self.allocated = self.pinned = 0
        self._lock = threading.Lock()
        self.device = Device(ordinal)
        before = _of(driver.cuCtxGetCurrent())
        self.device.set_current()
        self._context = _of(driver.cuCtxGetCurrent())
        self.stream: Stream = self.device.create_stream()
        if int(before) != int(self._context):
            driver.cuCtxSetCurrent(before)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the device's context this thread's, and leave the thread as it was.

        Raises:
            DeviceError: a CUDA call in the block failed, or one before left nothing to go on with.
        """
        if self.lost is not None:
            raise DeviceError(self.lost)
        other = int(_of(driver.cuCtxGetCurrent())) != int(self._context)
        if other:
            _of(driver.cuCtxPushCurrent(self._context))
        try:
            yield
        except CUDAError as error:
            raise self.failure(str(error)) from error
        finally:
            if other:
                driver.cuCtxPopCurrent()

    def check(self, result: tuple[Any, ...]) -> Any:
        """What a call of the driver returned beside its status.

        Raises:
            DeviceError: it failed.
        """
        if int(result[0]) != 0:
            raise self.failure(_described(result[0]))
        return result[1] if len(result) > 1 else None

    def failure(self, what: str) -> DeviceError:
        """The error to raise for `what`; an error that a kernel left makes every later call fail, and is told so."""
        # a stream is asked, for the whole context must not be while a graph is captured in it
        status = _name(driver.cuStreamQuery(int(self.stream.handle))[0])
        if status in STICKY or any(name in what for name in STICKY):
            self.lost = (
                f"CUDA device {self.ordinal} is lost to this process: {what}; every later call fails too ({status}). "
                "What was computed before is on the host or gone; start a new process"
            )
            return DeviceError(self.lost)
        if "OUT_OF_MEMORY" in what:
            free, total = (n / 2**20 for n in driver.cuMemGetInfo()[1:])
            what += (
                f"; {free:,.0f} of {total:,.0f} MiB are free and this session holds {self.allocated / 2**20:,.0f}: use "
                "smaller inputs, or load with fewer contexts"
            )
        return DeviceError(f"CUDA: {what}")

    # --- memory

    def allocate(self, size: int) -> Block:
        """Device memory of its own. Freeing it waits for whatever still uses it."""
        size = max(size, 1)
        block = Block(self, int(self.check(driver.cuMemAlloc(size))), size, pinned=False)
        with self._lock:
            self.allocated += size
        return block

    def allocate_pinned(self, size: int) -> Block:
        """Host memory that the device copies from and to by itself."""
        size = max(size, 1)
        block = Block(self, int(self.check(driver.cuMemAllocHost(size))), size, pinned=True)
        with self._lock:
            self.pinned += size
        return block

    def free(self, block: Block) -> None:
        with self._lock:
            self.pinned -= block.size if block.pinned else 0
            self.allocated -= 0 if block.pinned else block.size
        if self.lost is None:
            with self.current():
                self.check((driver.cuMemFreeHost if block.pinned else driver.cuMemFree)(block.address))

    # --- streams

    def stream_of(self, stream: Any) -> Stream:
        """A stream of any library: one that offers `__cuda_stream__`, torch's, CuPy's, or an address.

        Raises:
            UsageError: it is none.
        """
        if isinstance(stream, Stream):
            return stream
        if isinstance(stream, int):
            handle = stream
        elif hasattr(stream, "__cuda_stream__"):
            handle = int(stream.__cuda_stream__()[1])
        elif hasattr(stream, "cuda_stream"):
            handle = int(stream.cuda_stream)
        elif hasattr(stream, "ptr"):
            handle = int(stream.ptr)
        else:
            raise UsageError(
                f"the stream is {type(stream).__name__}; give one that offers __cuda_stream__, as torch's and CuPy's do"
            )
        if handle == PER_THREAD_STREAM:
            raise UsageError("the per-thread default stream is another one on every thread; give a stream of your own")
        return LEGACY_DEFAULT_STREAM if handle in LEGACY_STREAMS else Stream.from_handle(handle)

    def is_legacy(self, stream: Stream) -> bool:
        return int(stream.handle) in LEGACY_STREAMS

    def current_stream(self, library: str) -> Stream | None:
        """The stream that a library enqueues its work on; None where it is not told."""
        if library == "torch":
            return self.stream_of(int(sys.modules["torch"].cuda.current_stream(self.ordinal).cuda_stream))
        if library == "cupy":
            return self.stream_of(int(sys.modules["cupy"].cuda.get_current_stream().ptr))
        return None

    # --- arrays

    def view(self, what: str, value: Any, stream: Stream | None) -> StridedMemoryView:
        """Where an array of any library lies on this device; after what its producer enqueued, on `stream` if given.

        Raises:
            InputError: it is strided, on another device, or offers neither DLPack nor version 3 of
                `__cuda_array_interface__`.
        """
        if is_torch(value) and value.requires_grad:
            value = value.detach()
        try:
            view = StridedMemoryView.from_any_interface(value, stream_ptr=-1 if stream is None else int(stream.handle))
            form_of(view)
        except (BufferError, TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            raise InputError(f"{what} cannot be read on the GPU: {error}") from error
        if view.device_id != self.ordinal:
            raise InputError(
                f"{what} is on CUDA device {view.device_id} and this session on {self.ordinal}; copy it there, or load "
                f"with device={view.device_id}"
            )
        if not is_contiguous(view.shape, view.strides):
            raise InputError(f"{what} is strided; make it contiguous first")
        return view


class Block:
    """Memory that is freed when nobody refers to it."""

    def __init__(self, gpu: Gpu, address: int, size: int, pinned: bool) -> None:
        self._gpu, self.address, self.size, self.pinned = gpu, address, size, pinned
        self.bytes: Array | None = (
            np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)) if pinned else None
        )

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """The beginning of pinned memory as an array."""
        assert self.bytes is not None
        return self.bytes[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)

    def __del__(self) -> None:
        with suppress(Exception):  # at the interpreter's end the driver may be gone, and with it the memory
            self._gpu.free(self)


class Outputs:
    """Output memory on the device. Blocks come back when the caller lets go of the array, and serve the next output of
    that size on that stream: neither is anything allocated at every call, nor overwritten while it is held."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._lock = threading.Lock()
        self._idle: Recent[tuple[int, int], list[Block]] = Recent(SIZES_KEPT)

    def lend(self, shape: tuple[int, ...], dtype: np.dtype[Any], stream: Stream | None) -> StridedMemoryView:
        """Memory for an output that is read on `stream`; where that is not known, memory that nobody gets again."""
        size = max(math.prod(shape) * dtype.itemsize, 1)
        if stream is None:
            alone = self._allocated(size)
            return StridedMemoryView.from_buffer(
                Buffer.from_handle(alone.address, size, owner=alone), shape, dtype=dtype
            )
        key = size, int(stream.handle)
        with self._lock:
            idle = self._idle.get(key)
            if idle is None:
                self._idle.put(key, idle := [])
        try:
            block = idle.pop()
        except IndexError:
            block = self._allocated(size)
        buffer = Buffer.from_handle(block.address, size, owner=_Lease(block, idle))
        return StridedMemoryView.from_buffer(buffer, shape, dtype=dtype)

    def _allocated(self, size: int) -> Block:
        try:
            return self._gpu.allocate(size)
        except DeviceError:
            if self._gpu.lost is not None:
                raise
            self.clear()  # memory of other sizes
            return self._gpu.allocate(size)

    def clear(self) -> None:
        """Let go of what is idle; what is lent is freed when it comes back."""
        with self._lock:
            self._idle.clear()


class _Lease:
    """Output memory in a caller's hands. A list is all that is touched when it comes back, for that may be anywhere."""

    def __init__(self, block: Block, idle: list[Block]) -> None:
        self._block, self._idle = block, idle

    def __del__(self) -> None:
        if len(self._idle) < IDLE_OUTPUTS:
            self._idle.append(self._block)


class GpuBackend(Protocol):
    """Runs on arrays that lie on the GPU."""

    @property
    def gpu(self) -> Gpu: ...

    @property
    def outputs(self) -> Outputs: ...

    def submit(
        self, feeds: Sequence[Feed], shapes: Shapes, results: Sequence[StridedMemoryView], stream: Stream
    ) -> Event:
        """Enqueue a run on `stream`; the event is done when it is."""

    def output_shapes(self, shapes: Shapes) -> Sequence[tuple[int, ...]]:
        """The outputs' shapes, also where the inputs' sizes alone do not tell them."""


def call(
    backend: GpuBackend,
    specs: tuple[Sequence[TensorSpec], Sequence[TensorSpec]],
    given: Sequence[Any],
    out: Mapping[str, Any],
    stream: Any,
    shapes_of: Callable[..., Shapes],
) -> tuple[list[Any], Event]:
    """Run on arrays of which some lie on the GPU; the outputs stay there.

    Args:
        backend: that runs.
        specs: inputs and outputs of the model.
        given: the inputs, in order.
        out: arrays to write outputs to, by name.
        stream: the caller's, or None.
        shapes_of: checks the inputs' shapes and dtypes.
    """
    inputs, outputs = specs
    gpu = backend.gpu
    library = library_of(next(value for value in given if on_gpu(value)))
    with gpu.current():
        own = gpu.current_stream(library) if stream is None else gpu.stream_of(stream)
        run_on = gpu.stream if own is None or gpu.is_legacy(own) else own
        order = _Order(gpu, run_on, None if stream is None else own)
        feeds: list[Feed] = [
            order.view(f"input {spec.name!r}", value) if on_gpu(value) else on_host(spec, value)
            for spec, value in zip(inputs, given, strict=True)
        ]
        shapes = shapes_of(*[form_of(feed) for feed in feeds])
        results = [
            _target(order, spec, out[spec.name], shape, feeds)
            if spec.name in out
            else backend.outputs.lend(shape, np.dtype(spec.dtype), own)
            for spec, shape in zip(outputs, backend.output_shapes(shapes), strict=True)
        ]
        order.before()
        event = backend.submit(feeds, shapes, results, run_on)
        order.behind(event)
        if own is None:
            event.sync()
        kept = [
            out[spec.name] if spec.name in out else from_gpu(view, library)
            for spec, view in zip(outputs, results, strict=True)
        ]
    return kept, event


class _Order:
    """Puts a call behind what the libraries of its arrays have enqueued, and what they enqueue next behind the call.

    Args:
        gpu: the device.
        run_on: stream of the call.
        callers: the stream that the caller gave, on which the arrays of libraries with streams are ready.
    """

    def __init__(self, gpu: Gpu, run_on: Stream, callers: Stream | None) -> None:
        self._gpu, self._run_on, self._callers = gpu, run_on, callers
        self._others: dict[int, Stream] = {}
        if callers is not None:
            self._add(callers)

    def view(self, what: str, value: Any) -> StridedMemoryView:
        """Where an array lies; one of a library with streams is made contiguous there, where nobody gave another."""
        library = library_of(value)
        stream = self._gpu.current_stream(library)
        if stream is None:
            return self._gpu.view(what, value, self._run_on)
        if self._callers is None:
            self._add(stream)
            value = _contiguous(library, value)
        return self._gpu.view(what, value, None)

    def before(self) -> None:
        """Once all copies are enqueued."""
        for stream in self._others.values():
            self._run_on.wait(stream)

    def behind(self, event: Event) -> None:
        for stream in self._others.values():
            stream.wait(event)

    def _add(self, stream: Stream) -> None:
        if int(stream.handle) != int(self._run_on.handle):
            self._others[int(stream.handle)] = stream


def _contiguous(library: str, value: Any) -> Any:
    if library == "cupy":
        return sys.modules["cupy"].ascontiguousarray(value)
    return value if value.is_contiguous() else value.contiguous()


def _target(
    order: _Order, spec: TensorSpec, value: Any, shape: tuple[int, ...], feeds: Sequence[Feed]
) -> StridedMemoryView:
    what = f"the array to write output {spec.name!r} to"
    if not on_gpu(value):
        raise InputError(f"{what} is on the host, and the inputs are on the GPU; give one on the GPU")
    if is_torch(value) and (value.requires_grad or not value.is_contiguous()):
        raise InputError(f"{what} is strided or requires a gradient; give a contiguous one that does not")
    view = order.view(what, value)
    check_out(spec, *form_of(view), shape)
    if view.readonly or view.ptr % ALIGNMENT:
        raise InputError(
            f"{what} is read-only, or its address is no multiple of {ALIGNMENT} bytes; give one of its own"
        )
    for feed in feeds:
        if (
            not isinstance(feed, np.ndarray)
            and view.ptr < feed.ptr + bytes_of(feed)
            and feed.ptr < view.ptr + bytes_of(view)
        ):
            raise InputError(f"{what} shares memory with an input; give one of its own")
    return view


def bytes_of(view: StridedMemoryView) -> int:
    return int(view.size) * int(np.dtype(view.dtype).itemsize)


def form_of(array: StridedMemoryView | Array) -> Form:
    return tuple(array.shape), array.dtype or np.dtype(object)  # no dtype that NumPy or ml_dtypes know


def is_contiguous(shape: Sequence[int], strides: Sequence[int] | None) -> bool:
    """Whether elements lie in C order without gaps; `strides` in elements, None where they do."""
    if strides is None or 0 in shape:
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _of(result: tuple[Any, ...]) -> Any:
    if int(result[0]) != 0:
        raise DeviceError(f"CUDA: {_described(result[0])}")
    return result[1] if len(result) > 1 else None


def _described(status: Any) -> str:
    text = driver.cuGetErrorString(status)[1]
    return f"{_name(status)}: {text.decode() if text else 'no description'}"


def _name(status: Any) -> str:
    name = driver.cuGetErrorName(status)[1]
    return str(name.decode()) if name else f"error {int(status)}"
