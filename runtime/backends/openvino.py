"""OpenVINO on the CPU: the bundle's canonical graph, or its own graph with attention in blocks or with queries and keys
in int8, at the bundle's precision.

This backend uses a processor's bf16 units (AMX, AVX512-BF16); ONNX Runtime's CPU kernels compute 16-bit bundles in
fp32. So does this backend with fp16: OpenVINO's fp16, on a processor with AVX512-FP16, had errors of 4 to 40% in models
whose masks leave rows fully masked, and whether that cause persists has not been measured on such a processor. By
default OpenVINO would compute fp32 models in 16 bits as well; that is disabled here.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import openvino

from attnforge.arrays import BFLOAT16, Array
from attnforge.bundle import NEXT, Bundle, DimSpec, Manifest
from attnforge.errors import InputError, UnavailableError, UsageError, first_line, raised_as
from attnforge.machine import cpu_quota, processors
from attnforge.memory import available
from attnforge.runtime.backends.backend import OPENVINO_TYPES, Backend, Memory, Options, Registered
from attnforge.runtime.backends.openvino_graph import prepared, properties_for
from attnforge.runtime.backends.openvino_steps import read_step, write_rows
from attnforge.runtime.cases import shape_of, sizes_at
from attnforge.runtime.inputs import Shapes
from attnforge.runtime.pool import HostOutputs, Pool, Recent

log = logging.getLogger("attnforge")

Shape = tuple[tuple[int, ...], ...]
"""The shapes of all inputs."""

WIDE = ("int64", "uint32", "uint64")
"""Integers that OpenVINO computes as signed 32-bit without warning."""

SPECIALIZED, SPECIALIZED_BYTES = 8, 2**28
"""Maximum number of combinations of input shapes that get their own compiled model, and maximum bytes of weights
of these models (the first is always compiled). Fixed shapes save a tenth of the time if attention is most of it."""

OFTEN = 16
"""Calls after which a combination of shapes gets its own compiled model, if its calls do not follow one another. In
manual measurements of batches of sentences, fixed shapes saved up to 8% of a call and took 0.1 (bf16) to 1.2 calls
(int8) to compile."""

WIDENED_BYTES = 2**26
"""Bytes of weights up to which a graph's bf16 weights are also stored in fp32, in each compiled model. In manual
measurements this made patch attention in bf16 8 to 11% faster and BERT-base's size 4 to 7%, at twice the memory. With a
hint of fp32, OpenVINO stores 16-bit weights in fp32 in any case: 1,577 MiB for 384 MiB of fp16, either way."""

KERNELS_OF_STEPS = 64
"""Number of kernels, each for certain shapes, that OpenVINO keeps for a step, whose shapes differ for every number of
filled slots. It would keep 5,000: a Llama of 100 million parameters used 3.4 GiB more after 1,000 steps. With 64 it
used 0.2 GiB more, at the same time per token; with 32 that took a sixth longer, and with none half as long again."""


class OpenVino(Backend):
    """The bundle's graph for OpenVINO on the CPU, or the canonical graph if there is none. Any number of threads may
    call it; it runs one call after another, each on all its threads.

    The model is compiled once for all sizes that the bundle supports, and once more for each of the first combinations
    of shapes that occur in two successive calls, or :data:`OFTEN`.

    Args:
        bundle: the bundle whose graph to load.
        row: `openvino`.
        options: options of the session.

    Raises:
        UnavailableError: OpenVINO refuses the graph.
    """

    name = "openvino"
    new_cache, free_bytes = staticmethod(np.zeros), staticmethod(available)

    def __init__(self, bundle: Bundle, row: Registered, options: Options) -> None:
        manifest = bundle.manifest
        self._core: Any = openvino.Core()
        self._decoding = manifest.decoding
        self._inputs, self._outputs = manifest.graph_inputs, manifest.graph_outputs
        if same := {spec.name for spec in self._inputs} & {spec.name for spec in self._outputs}:
            raise UnavailableError(
                f"{min(same)!r} is an input and an output, for which OpenVINO has one buffer: it would write to the "
                "input; load the bundle on onnxruntime-cpu, or deploy a graph without this output"
            )
        self._contexts = options.contexts
        self._properties: dict[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": _precision(self._core, manifest),
        }
        if manifest.decoding is not None:
            self._properties["CPU_RUNTIME_CACHE_CAPACITY"] = KERNELS_OF_STEPS
        # OpenVINO respects affinities, but not quotas
        if threads := options.threads or (processors() if cpu_quota() < (os.cpu_count() or 1) else None):
            self._properties["INFERENCE_NUM_THREADS"] = threads
        self._results = HostOutputs()
        self._lock = threading.Lock()
        self._seen: Recent[Shape, int] = Recent(4096)
        self._last: Shape | None = None
        self._special: dict[Shape, _Compiled | None] = {}  # None while it is being compiled
        self._general: _Compiled | None
        with bundle.steady(), raised_as(UnavailableError, "OpenVINO cannot compile this model", passing=(OSError,)):
            self._model, self._general = self._opened(bundle.model(row.model(manifest)), manifest)
        self._limit = min(SPECIALIZED, max(1, SPECIALIZED_BYTES // max(self._weights, 1)))
        is_fixed = not any(isinstance(dim, DimSpec) for spec in self._inputs for dim in spec.dims)
        if is_fixed or manifest.decoding is not None:  # steps are bound to the model for all shapes
            self._limit, self._model = 0, None
        else:
            self._run_once(self._general)

    def run(self, feeds: dict[str, Array], shapes: Shapes, out: Mapping[str, Array]) -> list[Array]:
        for spec in self._inputs:
            array = feeds[spec.name]
            if spec.dtype in WIDE and spec.index is None and array.size:  # an index into a table is checked already
                for number in (int(array.min()), int(array.max())):
                    if not -(2**31) <= number < 2**31:
                        raise InputError(
                            f"input {spec.name!r} has {number}, and OpenVINO computes {spec.dtype} in 32 bits; load "
                            "the bundle on onnxruntime-cpu"
                        )
        compiled = self._for_shapes(shapes.inputs) or self._compiled()
        targets = {
            spec.name: out[spec.name] if spec.name in out else self._results.empty(shape, spec.dtype)
            for spec, shape in zip(self._outputs, shapes.outputs, strict=True)
            if shape is not None
        }
        return compiled.run(feeds, targets)

    def bound(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Callable[[], None]:
        """Bind a run from some arrays to others, see :class:`~attnforge.runtime.decoding.decoder.Stepping`."""
        assert self._decoding is not None
        caches = {name: cache for name, cache in outputs.items() if name.endswith(NEXT)}
        count, past = inputs[self._decoding.tokens].shape[1], inputs[self._decoding.past]
        rows = {
            name: np.empty((*cache.shape[:2], count, cache.shape[3]), cache.dtype) for name, cache in caches.items()
        }
        infer = self._compiled().bound({**inputs, **outputs, **rows})

        def run() -> None:
            self._compiled()
            infer()
            write_rows(caches, rows, past)

        return run

    def _compiled(self) -> _Compiled:
        """The model for all shapes.

        Raises:
            UsageError: the session was closed.
        """
        if (general := self._general) is None:
            raise UsageError("the session was closed; load the bundle again")
        return general

    def dtype_of(self, name: str) -> np.dtype[Any]:
        """The type of an input."""
        return np.dtype(next(spec.dtype for spec in self._inputs if spec.name == name))

    def memory(self) -> Memory:
        general = self._general
        return Memory(
            weights=self._weights * (1 + len(self._special)), contexts=0 if general is None else general.requests.made
        )

    def close(self) -> None:
        with self._lock:
            self._special, self._limit = {}, 0
            self._general = self._model = None

    def _opened(self, file: Path | bytes, manifest: Manifest) -> tuple[Any, _Compiled]:
        """The model, rewritten if OpenVINO accepts that, and the compiled model."""
        model = self._read(file)
        self._weights = sum(node.get_byte_size() for node in model.get_ops() if node.get_type_name() == "Constant")
        if manifest.mixed is None:  # a bundle that chose its precisions keeps every type unchanged
            try:
                scores = manifest.quantised is not None and bool(manifest.quantised.scores)
                in_fp32 = self._properties["INFERENCE_PRECISION_HINT"] == "f32"
                model = prepared(model, in_fp32 or self._weights <= WIDENED_BYTES, scores)
                return model, self._compile(model)
            except RuntimeError as error:  # the original graph is as right, only slower
                log.warning("OpenVINO does not accept %s rewritten: %s", manifest.name, first_line(error))
                model = self._read(file)
        return model, self._compile(model)

    def _read(self, file: Path | bytes) -> Any:
        """The graph; for a step, one that returns only the new rows of caches."""
        if self._decoding is None:
            return self._core.read_model(file)
        return read_step(openvino.Core(), file)

    def _run_once(self, compiled: _Compiled) -> None:
        """Run the model for all shapes with every size that may be two set to two, others to the nearest allowed.

        If the first run of a compiled model has one query and one key, OpenVINO 2026.4's kernel of attention without a
        mask is wrong by factors in later runs with more.
        """
        low, high = (sizes_at(self._inputs, bound) for bound in ("min", "max"))
        sizes = {symbol: min(max(2, low[symbol]), high[symbol]) for symbol in low}
        feeds = {spec.name: np.full(shape_of(spec, sizes), spec.low or 1, spec.dtype) for spec in self._inputs}
        try:
            compiled.run(feeds, {})
        except RuntimeError as error:  # it may run at other sizes
            log.warning("OpenVINO cannot run the model with every dim set to two: %s", first_line(error))

    def _for_shapes(self, key: Shape) -> _Compiled | None:
        """The model that is compiled for these shapes, or else the one for all shapes; None if the session is
        closed."""
        with self._lock:
            general = self._general
            special = self._special.get(key)
            if special is not None or self._limit == 0:
                return special or general
            calls, follows = (self._seen.get(key) or 0) + 1, key == self._last
            self._seen.put(key, calls)
            self._last = key
            if not (follows or calls >= OFTEN) or len(self._special) >= self._limit or key in self._special:
                return general
            self._special[key] = None
            model = self._model.clone()
        try:  # without the lock, so that calls with other shapes continue
            model.reshape({spec.name: list(shape) for spec, shape in zip(self._inputs, key, strict=True)})
            special = self._compile(model)
        except RuntimeError as error:  # the model for all shapes is used for these, too
            log.warning("OpenVINO cannot compile the model for %s alone: %s", key, first_line(error))
            special = general
        with self._lock:
            if self._general is not None:
                self._special[key] = special
        return special

    def _compile(self, model: Any) -> _Compiled:
        compiled = self._core.compile_model(model, "CPU", properties_for(model, self._properties))
        return _Compiled(compiled, [spec.name for spec in self._outputs], self._contexts)


class _Compiled:
    """A compiled model, and the pool of OpenVINO's requests that run it."""

    def __init__(self, compiled: Any, outputs: Sequence[str], contexts: int) -> None:
        self._outputs = outputs
        self._new_request: Callable[[], Any] = compiled.create_infer_request
        self.requests: Pool[Any] = Pool(self._new_request, contexts)
        self._taken = {name for port in compiled.inputs for name in port.get_names()}  # it may drop unused inputs

    def run(self, feeds: Mapping[str, Array], targets: Mapping[str, Array]) -> list[Array]:
        # OpenVINO refuses memory that is not writable, and keeps no reference to an array that it reads: `feeds` does
        feeds = {name: array if array.flags.writeable else array.copy() for name, array in feeds.items()}
        with self.requests.borrow() as request:
            self._bind(request, {name: feeds[name] for name in feeds if name in self._taken} | {**targets})
            request.infer()
            return [targets[name] if name in targets else _copied(request.get_tensor(name)) for name in self._outputs]

    def bound(self, arrays: Mapping[str, Array]) -> Callable[[], object]:
        """Bind a run from and to arrays, in a separate request."""
        request = self._new_request()
        self._bind(request, arrays)
        infer: Callable[[], object] = request.infer
        return infer

    def _bind(self, request: Any, arrays: Mapping[str, Array]) -> None:
        """Make a request read and write the memory of arrays, which must be writable."""
        for name, array in arrays.items():
            if array.dtype == BFLOAT16:
                tensor = openvino.Tensor(array.view(np.uint16), list(array.shape), openvino.Type.bf16)
            else:
                tensor = openvino.Tensor(array, shared_memory=True)
            request.set_tensor(name, tensor)


def _copied(tensor: Any) -> Array:
    array: Array = np.array(tensor.data)
    if tensor.element_type.get_type_name() == "bf16":
        array = array.view(BFLOAT16).reshape(tuple(tensor.shape))
    return array


def _precision(core: Any, manifest: Manifest) -> str:
    """The type that OpenVINO should compute in: the bundle's 16-bit type if it is in `OPENVINO_TYPES` and the
    processor has it, otherwise fp32, which is never less exact. For a bundle that chose its precisions it is fp32,
    because OpenVINO would make all of it 16-bit."""
    if manifest.mixed is not None or manifest.precision not in OPENVINO_TYPES:
        return "f32"
    capability, hint = OPENVINO_TYPES[manifest.precision]
    with suppress(RuntimeError):
        if capability in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            return hint
    return "f32"
