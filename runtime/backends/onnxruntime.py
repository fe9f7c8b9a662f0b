"""ONNX Runtime on the CPU."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from attnforge.arrays import BFLOAT16, Array
from attnforge.bundle import WEIGHTS, Bundle, SessionSettings, TensorSpec
from attnforge.errors import BundleError, UnavailableError, UsageError, raised_as
from attnforge.machine import processors, this_machine
from attnforge.memory import available
from attnforge.runtime.backends.backend import Backend, Memory, Options, Registered
from attnforge.runtime.inputs import Shapes

BFLOAT16_ONNX = 16
"""TensorProto.BFLOAT16. NumPy has no such type, so ONNX Runtime receives the bits as uint16 with this type."""


COPIED = 1 << 16
"""Bytes of outputs up to which copying to the caller's arrays is faster than binding them."""


def open_bundle(bundle: Bundle, row: Registered, options: Options) -> OnnxRuntime:
    """The bundle's ONNX Runtime model on the CPU, with the measured settings if they are valid here."""
    manifest, record = bundle.manifest, bundle.manifest.targets["onnxruntime"]
    settings = record.session
    if settings is not None and (settings.version, settings.machine) != (ort.__version__, this_machine(gpus=False)):
        settings = None  # they were measured elsewhere, or with another version
    name = settings.optimized if settings is not None and settings.optimized else record.model
    with bundle.steady(), refusals(f"{bundle.path / name}"):
        model = bundle.model(name)
        return OnnxRuntime(row.name, model, manifest.graph_inputs, manifest.graph_outputs, options.threads, settings)


def refusals(model: str) -> AbstractContextManager[None]:
    """A block in which ONNX Runtime opens a model. Its errors have no class in common, and none names the file.

    Args:
        model: the model that is opened, for the message.

    Raises:
        UnavailableError: ONNX Runtime refuses the model.
    """
    return raised_as(UnavailableError, f"ONNX Runtime cannot open {model}", passing=(OSError,))


class WithSession:
    """A backend's session of ONNX Runtime, until it is closed."""

    gpu: Any
    _session: Any

    def dtype_of(self, name: str) -> np.dtype[Any]:
        """The type of a floating-point or integer input in the model, which ONNX Runtime calls `tensor(float16)`."""
        kind = next(value.type for value in self._open().get_inputs() if value.name == name)
        return np.dtype("float32" if kind == "tensor(float)" else kind.removeprefix("tensor(").removesuffix(")"))

    def _open(self) -> Any:
        if self._session is None:
            raise UsageError("the session was closed; load the bundle again")
        return self._session

    def _binding(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Any:
        """A binding of arrays on the host or rows on the device, without copies, for one thread.

        Args:
            inputs: inputs by name.
            outputs: outputs by name; None for memory that ONNX Runtime allocates.
        """
        binding = self._open().io_binding()
        for name, value in inputs.items():
            if isinstance(value, np.ndarray):
                bind_host_input(binding, name, value)
            else:
                binding.bind_input(name, *self._location(value))
        for name, value in outputs.items():
            if isinstance(value, np.ndarray):
                binding.bind_ortvalue_output(name, host_value(value))
            else:
                binding.bind_output(name, *(() if value is None else self._location(value)))
        return binding

    def _location(self, value: Any) -> tuple[Any, ...]:
        """Where rows on the device are, and what they are."""
        dtype = np.dtype(value.dtype)
        kind = BFLOAT16_ONNX if dtype == BFLOAT16 else dtype.type
        return "cuda", self.gpu.ordinal, kind, list(value.shape), value.ptr


class OnnxRuntime(WithSession, Backend):
    """An ONNX model in a session of ONNX Runtime on the CPU. Any number of threads may run it at once.

    Args:
        name: name of the backend.
        model: the model's file, or its content.
        inputs: inputs of the model.
        outputs: outputs of the model.
        threads: number of threads per run; by default from the settings, or one per processor.
        settings: the settings with which the model was measured to run fastest here.
    """

    new_cache, free_bytes = staticmethod(np.zeros), staticmethod(available)

    def __init__(
        self,
        name: str,
        model: Path | bytes,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        threads: int | None = None,
        settings: SessionSettings | None = None,
    ) -> None:
        self.name = name
        self._session = ort.InferenceSession(model, session_options(threads, settings), ["CPUExecutionProvider"])
        _check_dims(self._session, (*inputs, *outputs))
        self._outputs = [spec.name for spec in outputs]
        self._has_bfloat16 = any(spec.dtype == "bfloat16" for spec in (*inputs, *outputs))
        self._weights = weights_of(model)

    def run(self, feeds: dict[str, Array], shapes: Shapes, out: Mapping[str, Array]) -> list[Array]:
        session = self._open()  # another thread may have closed it since this call began
        small = sum([array.nbytes for array in out.values()]) <= COPIED
        if small and not self._has_bfloat16:
            results: list[Array] = session.run(self._outputs, feeds)
            return results  # in ONNX Runtime's memory, which it frees when the arrays are gone
        targets = {  # ONNX Runtime refuses memory of another shape with its own message
            name: out.get(name) if shape is not None else None
            for name, shape in zip(self._outputs, shapes.outputs, strict=True)
        }
        binding = self._binding(feeds, targets)  # bindings are cheap
        session.run_with_iobinding(binding)
        return [
            copied(value) if target is None else target
            for target, value in zip(targets.values(), binding.get_outputs(), strict=True)
        ]

    def bound(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Callable[[], None]:
        """Bind a run from some arrays to others, which may share memory; the run can be called any number of times.

        Args:
            inputs: inputs by name.
            outputs: outputs by name, with the shapes that follow from the inputs.
        """
        binding = self._binding(inputs, outputs)
        kept = (inputs, outputs)  # the binding only has addresses

        def run() -> None:
            assert kept
            self._open().run_with_iobinding(binding)

        return run

    def memory(self) -> Memory:
        return Memory(weights=self._weights)

    def close(self) -> None:
        self._session = None


def _check_dims(session: ort.InferenceSession, specs: Iterable[TensorSpec]) -> None:
    """Check the manifest's dims against the graph's, before memory is reserved by them.

    Raises:
        BundleError: a dim is another number in the graph.
    """
    shapes = {value.name: value.shape for value in (*session.get_inputs(), *session.get_outputs())}
    for spec in specs:
        for dim, of_graph in zip(spec.dims, shapes.get(spec.name, ()), strict=False):
            if isinstance(dim, int) and isinstance(of_graph, int) and dim != of_graph:
                raise BundleError(
                    f"the manifest says that {spec.name} is {spec.text()}, but its graph has {of_graph} for {dim}; "
                    "deploy the model again"
                )


def session_options(threads: int | None = None, settings: SessionSettings | None = None) -> Any:
    """ONNX Runtime's `SessionOptions`, without 8-bit products that saturate, as AVX2's would.

    Args:
        threads: number of threads per run; by default from the settings, or else one per processor that this process
            may run on (ONNX Runtime's own default counts all of the machine's).
        settings: the measured settings; by default ONNX Runtime's defaults.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.x64quantprecision", "1")
    if settings is not None:
        threads = threads or (settings.threads and min(settings.threads, processors()))  # as the manifest is untrusted
        options.enable_cpu_mem_arena = settings.arena
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(settings.spinning)))
        if settings.optimized is not None:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if threads is None and processors() < (os.cpu_count() or 1):
        threads = processors()
    if threads is not None:
        options.intra_op_num_threads = threads
    return options


def weights_of(file: Path | bytes) -> int:
    """Bytes of a model: its graph, which is nearly all weights, and the file of shared weights next to it, if there is
    one, which may contain weights of other graphs, too."""
    if isinstance(file, bytes):
        return len(file)
    shelf = file.with_name(WEIGHTS)
    return file.stat().st_size + (shelf.stat().st_size if shelf.exists() else 0)


def bind_host_input(binding: Any, name: str, array: Array) -> None:
    """Bind an array on the host as an input, without a copy."""
    if array.dtype == BFLOAT16:
        binding.bind_ortvalue_input(name, host_value(array))
    else:
        binding.bind_cpu_input(name, array)


def host_value(array: Array) -> Any:
    """An OrtValue on the array's memory."""
    if array.dtype == BFLOAT16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), BFLOAT16_ONNX)
    return ort.OrtValue.ortvalue_from_numpy(array)


def copied(value: Any) -> Array:
    """An OrtValue on the host as an array with its own memory."""
    if value.element_type() != BFLOAT16_ONNX:
        return np.asarray(value.numpy())
    shape = tuple(value.shape())
    if 0 in shape:
        return np.empty(shape, BFLOAT16)
    bits = ctypes.cast(value.data_ptr(), ctypes.POINTER(ctypes.c_uint16))
    return np.array(np.ctypeslib.as_array(bits, shape=shape)).view(BFLOAT16)
