"""A CUDA device through cuda-python: its context, its memory and its streams, and a call on arrays in its memory.

Imported only if a backend runs on a GPU.
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
from attnforge.runtime.inputs import ArrayType, Shapes, check_out, on_host, target_text
from attnforge.runtime.pool import Recent

SIZES_KEPT, IDLE_OUTPUTS = 32, 4
"""Number of sizes of output memory kept for later calls, and of idle blocks of each size."""

ALIGNMENT = 256
"""Bytes; TensorRT requires addresses that are multiples of it."""

LEGACY_STREAMS, PER_THREAD_STREAM = (0, 1), 2
"""Addresses of the legacy default stream, on which no graph can be captured and TensorRT halts the device, and of the
per-thread default stream."""

Feed: TypeAlias = StridedMemoryView | Array
"""An input: a view of its memory on the device, or an array on the host."""

STICKY = {
    f"CUDA_ERROR_{name}"
    for name in (
        "ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT", "ASSERT", "HARDWARE_STACK_ERROR", "ILLEGAL_INSTRUCTION",
        "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC", "LAUNCH_FAILED", "ECC_UNCORRECTABLE",
        "CONTEXT_IS_DESTROYED", "DEVICE_UNAVAILABLE",
    )
}  # fmt: skip
"""Errors after which this process can no longer use the device."""


class Gpu:
    """A CUDA device; the only class that turns CUDA's errors into attnforge's.

    Attributes:
        ordinal: number of the device.
        device: cuda.core's device.
        stream: the session's own stream, for callers without one.
        lost: why every further call fails; None as long as calls can succeed.
        allocated: bytes of device memory allocated by the session.
        pinned: bytes of pinned host memory allocated by the session.

    Raises:
        UsageError: there is no such device.
    """

    def __init__(self, ordinal: int = 0) -> None:
        if not 0 <= ordinal < cuda_devices():
            raise UsageError(f"there is no CUDA device {ordinal}; this machine has {cuda_devices()}, counted from 0")
        self.ordinal = ordinal
        self.lost: str | None = None
        self.allocated = self.pinned = 0
        self._lock = threading.RLock()  # a garbage collection may free a block while it is held
        self.device = Device(ordinal)
        before = _value(driver.cuCtxGetCurrent())
        self.device.set_current()
        self._context = _value(driver.cuCtxGetCurrent())
        self.stream: Stream = self.device.create_stream()
        if int(before) != int(self._context):
            driver.cuCtxSetCurrent(before)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the device's context current on this thread for a block, and restore the thread's own afterwards.

        Raises:
            DeviceError: a CUDA call in the block failed, or an earlier failure lost the device.
        """
        if self.lost is not None:
            raise DeviceError(self.lost)
        switch = int(_value(driver.cuCtxGetCurrent())) != int(self._context)
        if switch:
            _value(driver.cuCtxPushCurrent(self._context))
        try:
            yield
        except CUDAError as error:
            raise self.failure(str(error)) from error
        finally:
            if switch:
                driver.cuCtxPopCurrent()

    def check(self, result: tuple[Any, ...]) -> Any:
        """The value that a driver call returned along with its status; None if it returns only a status.

        Raises:
            DeviceError: the call failed.
        """
        return _value(result, self.failure)

    def failure(self, text: str) -> DeviceError:
        """The error to raise for a failure described by `text`. If a kernel's error makes every later call fail, the
        device is marked as lost, and the message says so."""
        # the stream is queried instead of the context, which must not be queried while a graph is captured in it
        status = _name(driver.cuStreamQuery(int(self.stream.handle))[0])
        if status in STICKY or any(name in text for name in STICKY):
            self.lost = (
                f"CUDA device {self.ordinal} is lost to this process: {text}; every later call fails too ({status}). "
                "Earlier results are on the host or lost; start a new process"
            )
            return DeviceError(self.lost)
        if "OUT_OF_MEMORY" in text:
            free, total = ((n or 0) / 2**20 for n in driver.cuMemGetInfo()[1:])  # None if it fails, too
            text += (
                f"; {free:,.0f} of {total:,.0f} MiB are free and this session uses {self.allocated / 2**20:,.0f}: use "
                "smaller inputs, or load with fewer contexts"
            )
        return DeviceError(f"CUDA: {text}")

    # --- memory

    def allocate(self, size: int, *, pinned: bool = False) -> Block:
        """New memory of `size` bytes: on the device, where freeing it waits for whatever still uses it, or `pinned` on
        the host, which the device copies from and to directly."""
        address = self.check((driver.cuMemAllocHost if pinned else driver.cuMemAlloc)(max(size, 1)))
        return self._counted(Block(self, int(address), max(size, 1), pinned))

    def free(self, block: Block) -> None:
        """Free a block's memory; if the device is lost, there is nothing left to free."""
        self._counted(block, -1)
        if self.lost is None:
            with self.current():
                self.check((driver.cuMemFreeHost if block.pinned else driver.cuMemFree)(block.address))

    def _counted(self, block: Block, sign: int = 1) -> Block:
        """Add a block to the allocated bytes, or subtract it (`sign` -1)."""
        with self._lock:
            self.pinned += sign * block.size if block.pinned else 0
            self.allocated += 0 if block.pinned else sign * block.size
        return block

    # --- streams

    @staticmethod
    def stream_of(stream: Any) -> Stream:
        """Convert a stream to cuda.core's.

        Args:
            stream: torch's, CuPy's, one that offers `__cuda_stream__`, as cuda.core's does, or an address.

        Raises:
            UsageError: it is none of these, or the per-thread default stream.
        """
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
            raise UsageError("the per-thread default stream differs from thread to thread; give a stream of your own")
        return LEGACY_DEFAULT_STREAM if handle in LEGACY_STREAMS else Stream.from_handle(handle)

    def current_stream(self, library: str) -> Stream | None:
        """The stream on which a library enqueues its work, by the library's name; None for libraries that expose
        none."""
        if library == "torch":
            return self.stream_of(int(sys.modules["torch"].cuda.current_stream(self.ordinal).cuda_stream))
        if library == "cupy":
            return self.stream_of(int(sys.modules["cupy"].cuda.get_current_stream().ptr))
        return None

    # --- arrays

    def view(self, label: str, value: Any, stream: Stream | None) -> StridedMemoryView:
        """A view of the memory of an array of any library on this device.

        Args:
            label: name of the array in messages.
            value: the array.
            stream: made to wait for what the array's producer enqueued; None if that is waited for otherwise.

        Raises:
            InputError: the array is strided or a negative view, on another device, or offers neither DLPack nor
                version 3 of `__cuda_array_interface__`.
        """
        if is_torch(value):
            if value.is_neg():  # a mark, which neither interface conveys
                raise InputError(f"{label} is a negative view of another tensor; call its resolve_neg() first")
            value = value.detach() if value.requires_grad else value
        try:
            view = StridedMemoryView.from_any_interface(value, stream_ptr=-1 if stream is None else int(stream.handle))
            type_of(view)
        except (BufferError, TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            raise InputError(f"{label} cannot be read on the GPU: {error}") from error
        if view.device_id != self.ordinal:
            raise InputError(
                f"{label} is on CUDA device {view.device_id} and this session on {self.ordinal}; copy it there, or "
                f"load with device={view.device_id}"
            )
        if not is_contiguous(view.shape, view.strides):
            raise InputError(f"{label} is strided; make it contiguous first")
        return view


class Block:
    """Memory on the device, or pinned memory on the host, which is freed once nothing refers to the block.

    Attributes:
        address: address of its first byte.
        size: size in bytes.
        pinned: whether it is on the host.
        bytes: pinned memory as an array `(size,)`, uint8; None on the device.
    """

    def __init__(self, gpu: Gpu, address: int, size: int, pinned: bool) -> None:
        self._gpu, self.address, self.size, self.pinned = gpu, address, size, pinned
        self.bytes: Array | None = (
            np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)) if pinned else None
        )

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """The beginning of pinned memory as an array of the given shape and dtype."""
        assert self.bytes is not None
        return self.bytes[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)

    def __del__(self) -> None:
        with suppress(Exception):  # at interpreter exit the driver may be gone, and the memory with it
            self._gpu.free(self)


class DeviceOutputs:
    """Output memory on the device, reused between calls.

    A block is returned when the caller releases its array, and serves the next output of that size on that stream. So
    calls allocate nothing once blocks exist, and no output is overwritten while a caller refers to it.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._lock = threading.Lock()
        self._idle: Recent[tuple[int, int], list[Block]] = Recent(SIZES_KEPT)

    def lend(self, shape: tuple[int, ...], dtype: np.dtype[Any], stream: Stream | None) -> StridedMemoryView:
        """Memory for an output.

        Args:
            shape: shape of the output.
            dtype: dtype of the output.
            stream: stream on which the caller reads it; if it is None, the memory is not reused.
        """
        size = max(math.prod(shape) * dtype.itemsize, 1)
        owner: Block | _Lease
        if stream is None:
            block = owner = self._allocated(size)
        else:
            key = size, int(stream.handle)
            with self._lock:
                idle = self._idle.get(key)
                if idle is None:
                    self._idle.put(key, idle := [])
            try:
                block = idle.pop()
            except IndexError:
                block = self._allocated(size)
            owner = _Lease(block, idle)
        return StridedMemoryView.from_buffer(Buffer.from_handle(block.address, size, owner=owner), shape, dtype=dtype)

    def _allocated(self, size: int) -> Block:
        try:
            return self._gpu.allocate(size)
        except DeviceError:
            if self._gpu.lost is not None:
                raise
            self.clear()  # memory of other sizes
            return self._gpu.allocate(size)

    def clear(self) -> None:
        """Free idle blocks. Blocks that are lent out are freed when they are returned."""
        with self._lock:
            self._idle.clear()


class _Lease:
    """Output memory that a caller refers to. Returning it only appends to a list, because the caller may release the
    array on any thread, at any time."""

    def __init__(self, block: Block, idle: list[Block]) -> None:
        self._block, self._idle = block, idle

    def __del__(self) -> None:
        if len(self._idle) < IDLE_OUTPUTS:
            self._idle.append(self._block)


class GpuBackend(Protocol):
    """A backend that runs on arrays on the GPU.

    Attributes:
        gpu: the device that it runs on.
        outputs: the memory of its outputs.
    """

    gpu: Gpu
    outputs: DeviceOutputs

    def submit(
        self, feeds: Sequence[Feed], shapes: Shapes, results: Sequence[StridedMemoryView], stream: Stream
    ) -> Event:
        """Enqueue a run, and return an event that completes with the run.

        Args:
            feeds: the inputs, in the manifest's order.
            shapes: shapes of inputs and outputs.
            results: memory for the outputs, in the manifest's order.
            stream: stream on which to enqueue.
        """

    def output_shapes(self, shapes: Shapes) -> Sequence[tuple[int, ...]]:
        """The outputs' shapes, including those that the inputs' sizes alone do not determine."""


def call(
    backend: GpuBackend,
    specs: tuple[Sequence[TensorSpec], Sequence[TensorSpec]],
    values: Sequence[Any],
    out: Mapping[str, Any],
    stream: Any,
    shapes_of: Callable[..., Shapes],
) -> tuple[list[Any], Event]:
    """Enqueue a run on inputs at least one of which is on the GPU; the outputs stay there.

    Args:
        backend: the backend.
        specs: inputs and outputs of the model.
        values: the inputs, in order.
        out: arrays to write outputs to, by name.
        stream: the caller's stream, or None for the current stream of the first GPU input's library.
        shapes_of: checks the inputs' shapes and dtypes, and returns the outputs' shapes.

    Returns:
        the outputs, of the first GPU input's library, and an event that completes when they are ready. If that library
        has no current stream, they are ready already.
    """
    inputs, outputs = specs
    gpu = backend.gpu
    library = library_of(next(value for value in values if on_gpu(value)))
    with gpu.current():
        callers = gpu.current_stream(library) if stream is None else gpu.stream_of(stream)
        run_on = gpu.stream if callers is None or int(callers.handle) in LEGACY_STREAMS else callers
        order = _StreamOrder(gpu, run_on, None if stream is None else callers)
        feeds: list[Feed] = [
            order.view(f"input {spec.name!r}", value) if on_gpu(value) else on_host(spec, value)
            for spec, value in zip(inputs, values, strict=True)
        ]
        shapes = shapes_of(*[type_of(feed) for feed in feeds])
        results: list[StridedMemoryView] = []
        for spec, shape in zip(outputs, backend.output_shapes(shapes), strict=True):
            results.append(
                _target(order, spec, out[spec.name], shape, [*feeds, *results])
                if spec.name in out
                else backend.outputs.lend(shape, np.dtype(spec.dtype), callers)
            )
        order.before()
        event = backend.submit(feeds, shapes, results, run_on)
        order.after(event)
        if callers is None:
            event.sync()
        arrays = [
            out[spec.name] if spec.name in out else from_gpu(view, library)
            for spec, view in zip(outputs, results, strict=True)
        ]
    return arrays, event


class _StreamOrder:
    """The order of a call on the device: after the work that the libraries of its arrays have enqueued, and before the
    work that they enqueue next.

    Args:
        gpu: the device.
        run_on: the stream of the call.
        callers: the stream that the caller named, on which arrays of libraries with streams are ready; or None.
    """

    def __init__(self, gpu: Gpu, run_on: Stream, callers: Stream | None) -> None:
        self._gpu, self._run_on, self._callers = gpu, run_on, callers
        self._others: dict[int, Stream] = {}
        if callers is not None:
            self._add(callers)

    def view(self, label: str, value: Any) -> StridedMemoryView:
        """A view of an array's memory. If the caller named no stream, an array of a library with streams is made
        contiguous on that library's current stream."""
        library = library_of(value)
        stream = self._gpu.current_stream(library)
        if stream is None:
            return self._gpu.view(label, value, self._run_on)
        if self._callers is None:
            self._add(stream)
            value = _contiguous(library, value)
        return self._gpu.view(label, value, None)

    def before(self) -> None:
        """Make the call wait for the other streams; call this once all copies to contiguous arrays are enqueued."""
        for stream in self._others.values():
            self._run_on.wait(stream)

    def after(self, event: Event) -> None:
        """Make the other streams wait for the call's event."""
        for stream in self._others.values():
            stream.wait(event)

    def _add(self, stream: Stream) -> None:
        if int(stream.handle) != int(self._run_on.handle):
            self._others[int(stream.handle)] = stream


def _contiguous(library: str, value: Any) -> Any:
    if library == "cupy":
        return sys.modules["cupy"].ascontiguousarray(value)
    return value.contiguous().resolve_neg()


def _target(
    order: _StreamOrder, spec: TensorSpec, value: Any, shape: tuple[int, ...], others: Sequence[Feed]
) -> StridedMemoryView:
    """A view of the array that output `spec` is to be written to.

    Raises:
        InputError: the output cannot be written there.
    """
    label = target_text(spec)
    if not on_gpu(value):
        raise InputError(f"{label} is on the host, and the inputs are on the GPU; give one on the GPU")
    if is_torch(value) and (value.requires_grad or value.is_neg() or not value.is_contiguous()):
        raise InputError(f"{label} is strided or requires a gradient; give a contiguous one that does not")
    view = order.view(label, value)
    check_out(spec, *type_of(view), shape)
    if view.readonly or view.ptr % ALIGNMENT:
        raise InputError(
            f"{label} is read-only, or its address is not a multiple of {ALIGNMENT} bytes; give one of its own"
        )
    for other in others:
        if (
            not isinstance(other, np.ndarray)
            and view.ptr < other.ptr + bytes_of(other)
            and other.ptr < view.ptr + bytes_of(view)
        ):
            raise InputError(f"{label} shares memory with an input or another output; give one of its own")
    return view


def bytes_of(view: StridedMemoryView) -> int:
    """Size in bytes of an array on the device."""
    return int(view.size) * int(np.dtype(view.dtype).itemsize)


def type_of(array: StridedMemoryView | Array) -> ArrayType:
    """Shape and dtype of an array; dtype object if neither NumPy nor ml_dtypes has it."""
    return tuple(array.shape), array.dtype or np.dtype(object)


def is_contiguous(shape: Sequence[int], strides: Sequence[int] | None) -> bool:
    """Whether elements are in C order without gaps.

    Args:
        shape: shape of the array.
        strides: strides in elements; None for an array in C order without gaps.
    """
    if strides is None or 0 in shape:
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _value(
    result: tuple[Any, ...], failure: Callable[[str], DeviceError] = lambda text: DeviceError(f"CUDA: {text}")
) -> Any:
    """The value that a driver call returned along with its status; None if it returns only a status. By default for
    calls whose failure does not lose the device."""
    if int(status := result[0]) != 0:
        text = driver.cuGetErrorString(status)[1]
        raise failure(f"{_name(status)}: {text.decode() if text else 'no description'}")
    return result[1] if len(result) > 1 else None


def _name(status: Any) -> str:
    name = driver.cuGetErrorName(status)[1]
    return str(name.decode()) if name else f"error {int(status)}"
