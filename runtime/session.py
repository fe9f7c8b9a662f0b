"""A session: a deployed model loaded on one backend. All backends have the same interface."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np

from attnforge.arrays import Array, is_torch, on_gpu, to_torch
from attnforge.bundle import Bundle, TensorSpec, Trusted, open_bundle
from attnforge.errors import (
    AttnforgeError,
    InputError,
    ReplacedError,
    RunError,
    UnavailableError,
    UsageError,
    check_known,
    first_line,
)
from attnforge.keywords import guessable
from attnforge.numbers import whole
from attnforge.runtime import cases as reference
from attnforge.runtime import inputs
from attnforge.runtime.backends.backend import Backend, Memory, Options
from attnforge.runtime.backends.registry import BACKENDS, ON_GPU, REGISTRY, by_preference, open_first
from attnforge.runtime.backends.whole_sequences import WholeSequences
from attnforge.runtime.decoding.decoder import Decoder
from attnforge.runtime.decoding.generation import Sampler, generate
from attnforge.runtime.decoding.schedules import SCHEDULES
from attnforge.text import Tokenizer

if TYPE_CHECKING:
    from cuda.core import Event


log = logging.getLogger("attnforge")

NAMES = ("auto", "eager", "onnxruntime", *BACKENDS)
"""The backends that `load` accepts."""

NEW_TOKENS = 64
"""Default maximum number of new tokens."""

SHAPES_KEPT = 4096
"""Number of combinations of input shapes that a session remembers as checked."""

RUNS_TO_WARM = 3
"""Runs after which nothing is left to prepare: the first compiles, the second captures a CUDA graph if the backend has
graphs, and the third replays it."""


class Session:
    """A deployed model, ready to run, from any number of threads at once.

    On a GPU backend, inputs on the GPU are read in place, and outputs stay on the GPU. A call then returns once the
    work is enqueued: on `stream`, or else on the current stream of the inputs' library (torch, CuPy). Work that this
    library enqueues later runs after it, so the caller need not wait. With arrays of other libraries, and with NumPy
    arrays, a call returns when the outputs are ready.

    Args:
        bundle: the bundle that the backend was opened from.
        backend: runs the model.
        options: the options that the backend was opened with.

    Attributes:
        bundle: the bundle that it was loaded from.
        backend: name of the backend.
        inputs, outputs: the model's, with names, dtypes and dims.
    """

    def __init__(self, bundle: Bundle, backend: Backend, options: Options | None = None) -> None:
        self.bundle = bundle
        self.backend = backend.name
        self.inputs: list[TensorSpec] = bundle.manifest.inputs
        self.outputs: list[TensorSpec] = bundle.manifest.outputs
        self._backend = backend
        self._options = options or Options()
        self._closed = False
        self._names = [spec.name for spec in self.outputs]
        self._shapes = functools.lru_cache(SHAPES_KEPT)(functools.partial(inputs.shapes_of, self.inputs, self.outputs))
        self._indices = [(spec.name, *spec.index) for spec in self.inputs if spec.index is not None]
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        _SESSIONS.add(self)

    def __call__(self, *values: Any, out: Any = None, stream: Any = None, **named: Any) -> Any:
        """Run on inputs by position, or by name as keywords.

        Args:
            values: the inputs: NumPy arrays, torch tensors, or arrays of any library that offers DLPack or, on a GPU,
                `__cuda_array_interface__`.
            out: arrays to write the outputs to: one array, a sequence of arrays, or a mapping by name.
            stream: CUDA stream to run on, as in :meth:`run`.
            named: further inputs by name.

        Returns:
            the output, or a tuple of outputs: torch tensors if an input is one, otherwise NumPy arrays. If an input is
            on a GPU: arrays of the first GPU input's library.

        Raises:
            InputError: the model does not accept an input, or an array to write to.
            UsageError: as in :meth:`run`.
            DeviceError: as in :meth:`run`.
        """
        if named and len(values) <= len(self.inputs):
            first = dict(zip((spec.name for spec in self.inputs), values, strict=False))
            if twice := first.keys() & named.keys():
                raise InputError(f"input {min(twice)!r} was given twice, by position and by name; leave one out")
            values = tuple(inputs.in_order(self.inputs, first | named))
        if len(values) != len(self.inputs):
            inputs.by_name(self.inputs, values)  # raises, and says what the model takes
        self._check_open()
        results = self._run(values, inputs.outs_by_name(self.outputs, out) if out is not None else None, stream)
        return results[0] if len(results) == 1 else tuple(results)

    def run(
        self, values: Mapping[str, Any], *, out: Mapping[str, Any] | None = None, stream: Any = None
    ) -> dict[str, Any]:
        """Run on inputs by name.

        Args:
            values: the inputs, by name, of any kind that a call by position accepts.
            out: arrays to write outputs to, by name; contiguous, of the output's shape and dtype. They are returned.
            stream: CUDA stream on which inputs are ready and outputs will be: an object that offers `__cuda_stream__`,
                such as torch's and CuPy's streams, or its address. Without one, see the class.

        Returns:
            the outputs by name, of the kind that a call by position returns.

        Raises:
            InputError: the model does not accept an input, or an array to write to.
            UsageError: the session is closed, or a stream was given to a backend that runs on the CPU.
            DeviceError: CUDA failed; says how, and whether this process can continue.
        """
        self._check_open()
        return self._named(values, out, stream)

    def run_async(
        self, values: Mapping[str, Any], *, out: Mapping[str, Any] | None = None, stream: Any = None
    ) -> Pending:
        """Start a :meth:`run` and return immediately. The inputs must not be altered until it is done.

        Args:
            values: the inputs, by name.
            out: arrays to write outputs to, by name.
            stream: CUDA stream to run on.

        Raises:
            UsageError: the session is closed. Other errors are raised when the outputs are requested.
        """
        self._check_open()
        if self._backend.gpu is not None and any(on_gpu(value) for value in values.values()):
            results, event = self._on_gpu(inputs.in_order(self.inputs, values), out, stream)
            named = dict(zip(self._names, results, strict=True))

            gpu, kept = self._backend.gpu, list(values.values())

            def result() -> dict[str, Any]:
                with gpu.current():  # turns CUDA's errors into a DeviceError
                    event.sync()
                kept.clear()  # the inputs are kept alive until the run has read them
                return named

            def done() -> bool:
                with gpu.current():
                    return bool(event.is_done)

            return Pending(result, done)
        with self._lock:
            self._check_open()
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._options.contexts, f"attnforge-{self.bundle.manifest.name}")
            future = self._threads.submit(self._named, values, out, stream)
        return Pending(future.result, future.done)

    def decoder(self, batch: int = 1) -> Decoder:
        """The caches of some samples and the model's next step for them, for a bundle that was deployed with
        `cache_tokens`. Any number of decoders may run at once, each in one thread.

        Args:
            batch: number of samples.

        Raises:
            UsageError: the session is closed, or the bundle has no cache.
            InputError: more samples than the bundle supports.
            UnavailableError: there is too little memory for the caches.
        """
        self._check_open()
        if not isinstance(self._backend, WholeSequences):
            raise UsageError(
                f"{self.bundle.manifest.name} on {self.backend} has no cache, so it only runs whole sequences; deploy "
                "it with cache_tokens=… (--cache-tokens)"
            )
        return self._backend.decoder(batch)

    @guessable()
    def generate(
        self,
        prompts: Any,
        max_new_tokens: int | None = None,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: Collection[int] | None = None,
        sampler: Sampler | None = None,
        lengths: Any = None,
    ) -> Iterator[Any]:
        """Generate what follows prompts, with a bundle that was deployed with `cache_tokens`.

        Args:
            prompts: a text, for a bundle with a tokenizer; or token ids, `(batch, tokens)`, or `(tokens,)` for each
                sample, of different lengths.
            max_new_tokens: maximum number of new tokens per sample; by default 64, or what the caches have room for.
            temperature, top_k, top_p, seed: how the next token is chosen
                (:class:`~attnforge.runtime.decoding.generation.Sampler`); by default the most likely one.
            stop: stop token ids, after which a sample ends; by default the bundle's.
            sampler: chooses the next token, in place of the four numbers above.
            lengths: `(batch,)`, how many elements of each row are tokens, if the rest is padding.

        Returns:
            for a text, an iterator over the pieces of the text that follows; for ids, over the next token of every
            sample, `(batch,)`, int64, with -1 for a sample that has stopped.

        Raises:
            InputError: tokens that the model does not accept, or more than the caches have slots for.
            UsageError: as in :meth:`decoder`; the model does not return logits, or the bundle has no tokenizer.
        """
        if is_text := isinstance(prompts, str):
            prompts = [self.tokenizer.ids(prompts)]
        elif not hasattr(prompts, "__len__") or not all(
            np.iterable(row) and not isinstance(row, str) for row in prompts
        ):
            raise InputError("generate takes one text, or the token ids of every sample, as in [[1, 450, 3118]]")
        decoder, decoding = self.decoder(len(prompts)), self.bundle.manifest.decoding
        if max_new_tokens is None:
            most = max(len(row) for row in decoder.rows(prompts, lengths))
            max_new_tokens = max(1, min(NEW_TOKENS, decoder.places - most + 1))
        ends = stop if stop is not None else decoding.stop if decoding is not None else ()
        sampler = sampler or Sampler(temperature, top_k, top_p, seed)
        tokens = generate(decoder, prompts, max_new_tokens, ends, sampler, lengths)
        return self.tokenizer.stream(prompts[0], (int(token[0]) for token in tokens)) if is_text else tokens

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer.

        Raises:
            UsageError: the bundle has none.
            UnavailableError: the `tokenizers` library is not installed.
        """
        return Tokenizer(self.bundle)

    def tokenize(self, texts: Sequence[str]) -> dict[str, Array]:
        """Encode texts to the model's inputs, one per sample, with the bundle's tokenizer: `session.run` takes them.

        Raises:
            InputError: the model takes other inputs than texts become, or these are not texts.
            UsageError: the bundle has no tokenizer.
        """
        return self.tokenizer.inputs([texts] if isinstance(texts, str) else texts, self.inputs)

    @property
    def schedules(self) -> dict[str, Callable[[Mapping[str, Array]], dict[str, Array]]]:
        """Runs of the model by a decoder, from inputs to outputs by name, by the schedule that passes it the tokens;
        empty if the bundle has no cache."""
        if not isinstance(backend := self._backend, WholeSequences):
            return {}
        return {name: functools.partial(backend.by_schedule, name) for name in SCHEDULES}

    def warm_up(self, *sizes: Mapping[str, int]) -> None:
        """Run on random NumPy inputs until nothing is left to prepare: kernels are compiled, memory is allocated, and
        TensorRT's CUDA graphs for such inputs are captured.

        Args:
            sizes: combinations of sizes to prepare for, each a mapping from symbols of dims to sizes; dims without a
                size are as in the example. By default the example's sizes.

        Raises:
            UnknownNameError: no such dim.
            InputError: sizes out of the profile.
        """
        for combination in sizes or ({},):
            case = reference.at(self.inputs, combination)
            forms = ((reference.shape_of(spec, case.sizes), np.dtype(spec.dtype)) for spec in self.inputs)
            inputs.shapes_of(self.inputs, (), *forms)  # refuses sizes before anything is allocated for them
            feeds = reference.make_inputs(case, self.inputs, {})
            for _ in range(RUNS_TO_WARM):
                self.run(feeds)
        self._backend.keep()

    @property
    def memory(self) -> Memory:
        """The memory that the session uses, as far as its backend reports it.

        Raises:
            UsageError: the session is closed.
        """
        self._check_open()
        return self._backend.memory()

    def close(self) -> None:
        """Wait for runs that :meth:`run_async` started, and free everything. The session cannot run after that; closing
        it again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            threads = self._threads
        if threads is not None:
            threads.shutdown()
        self._backend.close()

    def __reduce__(self) -> NoReturn:
        raise UsageError("a session belongs to its process and cannot be pickled or copied; load the bundle in each")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        takes = ", ".join(f"{spec.name}: {spec.text()}" for spec in self.inputs)
        return f"Session({self.bundle.manifest.name} on {self.backend}; {takes})"

    # ---

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"this session of {self.bundle.manifest.name} is closed; load the bundle again")

    def _named(self, values: Mapping[str, Any], out: Mapping[str, Any] | None, stream: Any) -> dict[str, Any]:
        return dict(zip(self._names, self._run(inputs.in_order(self.inputs, values), out, stream), strict=True))

    def _run(self, values: Sequence[Any], out: Mapping[str, Any] | None, stream: Any) -> list[Any]:
        """Run on inputs in order; outputs in order."""
        plain = all([type(value) is np.ndarray for value in values])  # noqa: C419  (half the time of a generator)
        if not plain and self._backend.gpu is not None and any(on_gpu(value) for value in values):
            return self._on_gpu(values, out, stream)[0]
        if stream is not None:
            raise UsageError(
                "a CUDA stream was given, and the inputs are on the host: the call waits for its outputs; leave it out"
                if self.backend in ON_GPU
                else f"a CUDA stream was given, and {self.backend} runs on the CPU; leave it out"
            )
        feeds = {spec.name: inputs.on_host(spec, value) for spec, value in zip(self.inputs, values, strict=True)}
        shapes = self._shapes(*[(array.shape, array.dtype) for array in feeds.values()])
        for name, low, high in self._indices:
            inputs.check_index(name, feeds[name], low, high)
        results: list[Any] = self._into(out, feeds, shapes) if out is not None else self._computed(feeds, shapes, {})
        if not plain and any(is_torch(value) for value in values):
            results = [to_torch(array) for array in results]
        if out is None:
            return results
        return [out.get(name, array) for name, array in zip(self._names, results, strict=True)]

    def _into(self, out: Mapping[str, Any], feeds: dict[str, Array], shapes: inputs.Shapes) -> list[Array]:
        """Run on the host, and write outputs to the caller's arrays, if any."""
        self._check_names(out)
        targets: dict[str, Array] = {}
        for spec, shape in zip(self.outputs, shapes.outputs, strict=True):
            if spec.name in out:
                others = (*feeds.values(), *targets.values())
                targets[spec.name] = inputs.writable(spec, out[spec.name], shape, others)
        results = self._computed(feeds, shapes, targets)
        for spec, array in zip(self.outputs, results, strict=True):
            if (target := targets.get(spec.name, array)) is not array:
                if target.shape != array.shape:  # the inputs' sizes did not determine the output's shape
                    inputs.check_out(spec, target.shape, target.dtype, array.shape)
                np.copyto(target, array)
        return results

    def _computed(self, feeds: dict[str, Array], shapes: inputs.Shapes, targets: Mapping[str, Array]) -> list[Array]:
        """Run the backend; any error of its library becomes a RunError. A torch module's own errors are raised
        unchanged."""
        try:
            return self._backend.run(feeds, shapes, targets)
        except Exception as error:
            if self.backend == "eager" or isinstance(error, AttnforgeError | MemoryError):
                raise
            raise RunError(f"{self.backend} cannot run {self.bundle.manifest.name}: {first_line(error)}") from error

    def _on_gpu(self, values: Sequence[Any], out: Mapping[str, Any] | None, stream: Any) -> tuple[list[Any], Event]:
        """Enqueue a run on inputs of which some are on the GPU; outputs in order, and the event of their completion."""
        from attnforge.runtime import gpu

        self._check_names(out or {})
        specs = (self.inputs, self.outputs)
        return gpu.call(cast(gpu.GpuBackend, self._backend), specs, values, out or {}, stream, self._shapes)

    def _check_names(self, out: Mapping[str, Any]) -> None:
        for name in out:
            check_known("output", name, self._names)


_SESSIONS: weakref.WeakSet[Session] = weakref.WeakSet()


def _after_fork() -> None:
    """Start without threads: a forked child has none of its parent's threads, and would wait for them."""
    for session in list(_SESSIONS):
        session._lock, session._threads = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Pending:
    """A started run, whose outputs can be waited for or awaited.

    Args:
        result: waits for the run, and returns its outputs by name.
        done: returns whether the run is done.
    """

    def __init__(self, result: Callable[[], dict[str, Any]], done: Callable[[], bool]) -> None:
        self._result, self._done = result, done

    def done(self) -> bool:
        """Whether the outputs are ready."""
        return self._done()

    def result(self) -> dict[str, Any]:
        """Wait for the run, and return its outputs by name.

        Raises:
            AttnforgeError: the run failed.
        """
        return self._result()

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        return asyncio.get_running_loop().run_in_executor(None, self._result).__await__()


def load(
    bundle: str | os.PathLike[str] | Bundle,
    backend: str = "auto",
    *,
    module: Any = None,
    threads: int | None = None,
    device: int = 0,
    contexts: int = 4,
    graphs: bool | None = None,
    cache: bool = True,
    trusted: Trusted = None,
) -> Session:
    """Load a bundle as :func:`attnforge.load` does, with the same arguments, except that no plan is built again.

    Raises:
        BundleError: the folder contains no bundle of this schema, or a required file is missing or altered.
        UnknownNameError: no such backend.
        UsageError: no such device, or fewer than one context.
        UnavailableError: this machine or this bundle cannot run it; says what would work.
    """
    check_known("backend", backend, NAMES)
    options = Options(threads, whole("device", device), contexts, graphs, cache)
    for _ in range(0 if isinstance(bundle, Bundle) else TRIES - 1):
        with suppress(ReplacedError):  # the next attempt reads the new one
            return _loaded(bundle, backend, module, options, trusted)
    return _loaded(bundle, backend, module, options, trusted)


TRIES = 5
"""Maximum number of attempts to read a bundle that is replaced while it is read."""


def _loaded(
    bundle: str | os.PathLike[str] | Bundle, backend: str, module: Any, options: Options, trusted: Trusted
) -> Session:
    opened = open_bundle(bundle, lazily=True, trusted=trusted)
    if (doubt := opened.manifest.doubt) is not None and backend != "eager":
        if backend == "auto":
            raise UnavailableError(f"{doubt}; deploy it again, or name a backend to load it anyway")
        log.warning("%s", doubt)
    if backend == "eager":
        runner = _eager(opened, module)
    else:
        # Only the order of preference queries CUDA for its devices, and so initialises it in this process, which must
        # not fork after that.
        named = [name for name, row in REGISTRY.items() if backend in (name, row.family)]  # none for `auto`
        runner = open_first(opened, named or by_preference(opened), options, named=bool(named))
    if options.device and runner.name not in ON_GPU:
        runner.close()
        raise UsageError(
            f"device is {options.device}, and {runner.name} runs on the CPU; leave it out, or name a backend"
        )
    return Session(opened, runner, options)


def _eager(bundle: Bundle, module: Any) -> Backend:
    """The eager backend of a torch module; the only part of the runtime that imports torch."""
    if bundle.manifest.source.kind == "onnx":
        raise UnavailableError(
            f"{bundle.path} was deployed from an ONNX graph; it has no torch module, so there is no eager backend"
        )
    if module is None:
        raise UnavailableError("the eager backend runs the module itself; pass it: load(bundle, 'eager', module=…)")
    from attnforge.runtime.backends.eager import Eager

    return Eager(bundle, module)
