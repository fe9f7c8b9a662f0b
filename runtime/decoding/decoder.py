"""A decoder: the caches of some samples and the model's next step for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NoReturn, Protocol

import numpy as np

from attnforge.arrays import Array, is_torch, to_numpy, to_torch
from attnforge.bundle import NEXT, Manifest, TensorSpec
from attnforge.errors import DeviceError, InputError, RunError, UnavailableError, UsageError, raised_as
from attnforge.memory import ROOM
from attnforge.numbers import whole
from attnforge.runtime.inputs import check_index, writable


class Stepping(Protocol):
    """A backend whose graph is a step.

    Attributes:
        name: name of the backend.
    """

    name: str

    def bound(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Callable[[], None]:
        """Bind a run from these arrays to these, which can be called any number of times. A cache, or samples of one,
        is among both.

        Args:
            inputs: inputs by name, contiguous.
            outputs: outputs by name.
        """

    def dtype_of(self, name: str) -> np.dtype[Any]:
        """The type of an input: a backend may store caches in a wider type than the bundle says."""

    def new_cache(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """A cache of zeros where the backend computes: an array, or what is indexed like one."""

    def free_bytes(self) -> int | None:
        """The free memory there; None if unknown."""


class Decoder:
    """The caches of some samples, where the backend computes, and the model's next step for them.

    Every sample has its own length. A decoder is for one thread at a time; several decoders of one session can run
    at once, each in its own thread.

    Args:
        backend: runs steps.
        step: manifest of the bundle whose graph is a step.
        batch: number of samples.

    Raises:
        InputError: more samples than the bundle supports.
        UnavailableError: there is too little memory for caches and outputs; says how much they take.

    Attributes:
        batch: number of samples.
        places: capacity of the caches, in tokens per sample.
    """

    def __init__(self, backend: Stepping, step: Manifest, batch: int = 1) -> None:
        assert step.decoding is not None
        self._backend, self._manifest = backend, step
        self._decoding, self._tokens, self._outputs = step.decoding, step.inputs[0], step.outputs
        (_, most), (_, self._longest) = self._tokens.range_of(0), self._tokens.range_of(1)
        if not 1 <= (batch := whole("batch", batch)) <= most:
            raise InputError(f"batch is {batch}; the bundle supports 1 to {most} samples")
        self.batch, self.places = batch, self._decoding.places
        self._busy = threading.Lock()
        self._past = np.zeros(batch, np.int64)
        shapes = {spec.name: (batch, *_fixed(spec, 1)) for spec in self._decoding.tensors}
        answers = {spec.name: (batch, 1, *_fixed(spec, 2)) for spec in self._outputs}
        needed = sum(prod(shape) * backend.dtype_of(name).itemsize for name, shape in shapes.items())
        needed += sum(prod(answers[spec.name]) * np.dtype(spec.dtype).itemsize for spec in self._outputs)
        left = backend.free_bytes() if needed > ROOM else None
        if left is not None and needed > left:
            raise UnavailableError(
                f"caches and outputs of {batch} samples with {self.places} tokens each take {needed / 2**30:,.2f} GiB, "
                f"and {left / 2**30:,.2f} GiB are free; decode fewer samples at once, or deploy with fewer cache_tokens"
            )
        try:
            self._caches = {name: backend.new_cache(shape, backend.dtype_of(name)) for name, shape in shapes.items()}
        except DeviceError as error:
            raise UnavailableError(f"the caches of {batch} samples, {needed / 2**30:,.2f} GiB: {error}") from error
        self._of_token = _fixed(self._tokens, 2)
        self._token = np.zeros((batch, 1, *self._of_token), self._tokens.dtype)
        self._answers = {spec.name: np.zeros(answers[spec.name], spec.dtype) for spec in self._outputs}
        self._first = np.zeros(1, np.int64)
        self._next: Callable[[], None] | None = None

    # --- public interface ---------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> Array:
        """`(batch,)`, int64: number of tokens of every sample in the caches."""
        return self._past.copy()

    @property
    def nbytes(self) -> int:
        """Bytes of the caches."""
        return sum(cache.nbytes for cache in self._caches.values())

    def cached(self, sample: int) -> dict[str, Array]:
        """Keys and values of a sample's tokens, `(key heads, tokens, size)`, by cache name; copies.

        Raises:
            InputError: no such sample.
            UsageError: another thread runs this decoder.
        """
        (chosen,) = self._samples([sample])
        with self._running():
            filled = int(self._past[chosen])
            return {name: cache[chosen, :, :filled].copy() for name, cache in self._caches.items()}

    def prefill(self, tokens: Any, lengths: Any = None) -> Any:
        """Append tokens of every sample to the caches: a prompt, or any number of tokens after earlier ones.

        Args:
            tokens: `(batch, tokens, …)`, or one `(tokens, …)` for each sample, of different lengths.
            lengths: `(batch,)`, how many elements of each row are tokens; the rest is padding, which is not read. By
                default all are.

        Returns:
            the model's output for each sample's last token, `(batch, …)`; by name, if it has several outputs. A torch
            tensor if `tokens` is one, otherwise an array.

        Raises:
            InputError: tokens of the wrong type, shape or number, no token for a sample, ids out of the vocabulary, or
                more tokens than the caches have free slots for; then nothing is written.
            UsageError: another thread runs this decoder.
        """
        rows = self.rows(tokens, lengths)
        if empty := [i for i, row in enumerate(rows) if not len(row)]:
            raise InputError(f"sample {empty[0]} has no token; give one or more")
        answers = self._extended(rows, only_last=True)
        last = {name: np.stack([sample[-1] for sample in samples]) for name, samples in answers.items()}
        return self._handed(last, tokens)

    def step(self, tokens: Any, out: Any = None) -> Any:
        """Append the next token of every sample.

        Args:
            tokens: `(batch, …)`, one token each.
            out: array for the output of a model with one output, `(batch, …)` and of its dtype; by default a new array.

        Returns:
            the model's output, as in :meth:`prefill`.

        Raises:
            InputError: as in :meth:`prefill`; or the output cannot be written to `out`.
            UsageError: another thread runs this decoder.
        """
        array = self._checked(tokens, (self.batch, *self._of_token))
        target: Array | None = None
        if out is not None:
            if len(self._outputs) != 1:
                raise InputError(f"the model has {len(self._outputs)} outputs; leave `out` out, and read them by name")
            target = writable(self._outputs[0], out, (self.batch, *_fixed(self._outputs[0], 2)), strided=True)
        with self._running():
            self._check_capacity(np.ones(self.batch, np.int64))
            self._token[:, 0] = array
            self._run_one()
            self._past += 1
        if target is not None:
            np.copyto(target, next(iter(self._answers.values()))[:, 0])
            return out
        return self._handed({name: answer[:, 0].copy() for name, answer in self._answers.items()}, tokens)

    def extend(self, tokens: Any, lengths: Any = None) -> dict[str, list[Array]]:
        """Like :meth:`prefill`, but return the outputs for every token: by output, `(tokens, …)` for each sample."""
        return self._extended(self.rows(tokens, lengths), only_last=False)

    def reset(self) -> None:
        """Remove all tokens."""
        self.crop(0)

    def crop(self, lengths: Any) -> None:
        """Remove the tokens of every sample after a length.

        Args:
            lengths: one for all samples, or `(batch,)`; at most the current lengths.

        Raises:
            InputError: a length that exceeds the sample's.
            UsageError: another thread runs this decoder.
        """
        wanted = self._lengths(lengths)
        with self._running():
            if (wrong := (wanted > self._past) | (wanted < 0)).any():
                sample = int(np.argmax(wrong))
                raise InputError(
                    f"sample {sample} has {self._past[sample]} tokens, so {wanted[sample]} cannot be kept; give 0 to "
                    f"{self._past[sample]}"
                )
            for sample, (keep, had) in enumerate(zip(wanted, self._past, strict=True)):
                for cache in self._caches.values():
                    cache[sample, :, keep:had] = 0  # a NaN there would reach others through products with zero
            self._past[:] = wanted

    def fork(self, samples: Sequence[int] | None = None) -> Decoder:
        """Make another decoder with the tokens of some of this one's samples: one prompt, several continuations.

        Args:
            samples: the sample that each new one starts from; by default every sample once.

        Raises:
            InputError: no such sample, or more than the bundle supports.
            UnavailableError: there is too little memory for more caches.
            UsageError: another thread runs this decoder.
        """
        chosen = self._samples(range(self.batch) if samples is None else samples)
        with self._running():
            copy = type(self)(self._backend, self._manifest, len(chosen))
            filled = int(self._past.max(initial=0))
            for name, cache in self._caches.items():
                copy._caches[name][:, :, :filled] = cache[chosen, :, :filled]
            copy._past[:] = self._past[chosen]
        return copy

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a decoder belongs to its process and cannot be pickled or copied; fork() makes another one here"
        )

    def __repr__(self) -> str:
        return f"Decoder({self.batch} samples, lengths {self._past.tolist()} of {self.places})"

    # --- checks -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _running(self) -> Iterator[None]:
        """A block in which no other thread runs this decoder."""
        if not self._busy.acquire(blocking=False):
            raise UsageError("this decoder runs in another thread; wait for it, or give every thread its own decoder")
        try:
            with raised_as(RunError, f"{self._backend.name} cannot run this step"):
                yield
        finally:
            self._busy.release()

    def rows(self, tokens: Any, lengths: Any = None) -> list[Array]:
        """The tokens of every sample, checked, from the arguments of :meth:`prefill`."""
        if isinstance(tokens, (list, tuple)) and all(hasattr(row, "shape") or isinstance(row, list) for row in tokens):
            if lengths is not None:
                raise InputError("tokens were given as one array per sample, which have lengths; leave lengths out")
            if len(tokens) != self.batch:
                raise InputError(f"tokens of {len(tokens)} samples were given; this decoder has {self.batch}")
            return [self._checked(row, (None, *self._of_token)) for row in tokens]
        array = self._checked(tokens, (self.batch, None, *self._of_token))
        if lengths is None:
            return list(array)
        counts = self._lengths(lengths)
        if (counts < 0).any() or (counts > array.shape[1]).any():
            raise InputError(
                f"lengths are {counts.tolist()}, of rows of {array.shape[1]} tokens; give 0 to that for each"
            )
        return [row[:count] for row, count in zip(array, counts, strict=True)]

    def _samples(self, samples: Iterable[int]) -> list[int]:
        chosen = [whole("a sample's number", sample) for sample in samples]
        if unknown := [sample for sample in chosen if not 0 <= sample < self.batch]:
            raise InputError(f"there is no sample {unknown[0]}; samples are 0 to {self.batch - 1}")
        return chosen

    def _lengths(self, lengths: Any) -> Array:
        array = _as_array("lengths", lengths)
        if array.dtype.kind not in "iu" or array.shape not in ((), (self.batch,)):
            raise InputError(
                f"lengths are {array.dtype.name}{list(array.shape)}; give integers, one for all or {self.batch}"
            )
        return np.broadcast_to(array, (self.batch,)).astype(np.int64)

    def _checked(self, tokens: Any, dims: Sequence[int | None]) -> Array:
        """Tokens as an array of the bundle's type and of these dims, of which None may have any size."""
        spec, vocabulary = self._tokens, self._decoding.vocabulary
        wanted = np.dtype(spec.dtype)
        array = _as_array(spec.name, tokens)
        if not array.size and isinstance(tokens, list):
            array = array.astype(wanted)  # an empty list has no type
        if array.dtype != wanted and (array.dtype.kind not in "iu" or wanted.kind not in "iu"):
            raise InputError(f"{spec.name} is {array.dtype.name}; the model takes {spec.dtype}: convert it first")
        if array.ndim != len(dims) or any(w not in (None, s) for s, w in zip(array.shape, dims, strict=True)):
            shape = ", ".join("tokens" if dim is None else str(dim) for dim in dims)
            raise InputError(f"{spec.name} has the shape {list(array.shape)}; give ({shape})")
        if vocabulary is not None:
            check_index(spec.name, array, 0, vocabulary - 1)
        return array.astype(wanted, copy=False)

    def _check_capacity(self, counts: Array) -> None:
        ends = self._past + counts
        if (ends > self.places).any():
            sample = int(np.argmax(ends))
            raise InputError(
                f"sample {sample} has {self._past[sample]} tokens in the cache and {counts[sample]} more were given; "
                f"its capacity is {self.places}: crop or reset it, or deploy with more cache_tokens"
            )

    def _handed(self, answers: Mapping[str, Array], like: Any) -> Any:
        """Outputs as the kind of array that `like` is."""
        values = {name: to_torch(array) if is_torch(like) else array for name, array in answers.items()}
        return next(iter(values.values())) if len(values) == 1 else values

    # --- runs ---------------------------------------------------------------------------------------------------------

    def _extended(self, rows: Sequence[Array], only_last: bool) -> dict[str, list[Array]]:
        """Run the next tokens of every sample: in one run if all have one, otherwise sample by sample, in pieces of at
        most as many tokens as the bundle supports. Lengths change only at the end: a run that fails changes nothing.

        Args:
            rows: the tokens.
            only_last: keep only the output for each sample's last token.
        """
        counts = np.array([len(row) for row in rows], np.int64)
        with self._running():
            self._check_capacity(counts)
            if (counts == 1).all():
                self._token[:, 0] = np.stack([row[0] for row in rows])
                self._run_one()
                answers = {name: list(answer.copy()) for name, answer in self._answers.items()}
            else:
                answers = self._sample_by_sample(rows, only_last)
            self._past += counts
        return answers

    def _run_one(self) -> None:
        """Run one token of every sample; the arrays are bound only once."""
        if self._next is None:
            self._next = self._bound(self._token, self._past, self._first, self._answers, slice(None))
        self._next()

    def _sample_by_sample(self, rows: Sequence[Array], only_last: bool) -> dict[str, list[Array]]:
        answers: dict[str, list[Array]] = {spec.name: [] for spec in self._outputs}
        for sample, row in enumerate(rows):
            pieces: dict[str, list[Array]] = {name: [] for name in answers}
            for first in range(0, len(row), self._longest):
                part = np.ascontiguousarray(row[None, first : first + self._longest])
                past = np.array([self._past[sample] + first], np.int64)
                count = part.shape[1]
                kept = np.arange(count - 1 if only_last and self._decoding.kept is not None else 0, count)
                outputs = {s.name: np.empty((1, len(kept), *_fixed(s, 2)), s.dtype) for s in self._outputs}
                self._bound(part, past, kept, outputs, slice(sample, sample + 1))()
                for name, array in outputs.items():
                    pieces[name] = [array[0, -1:].copy()] if only_last else [*pieces[name], array[0]]
            for spec in self._outputs:
                none = np.empty((0, *_fixed(spec, 2)), spec.dtype)
                parts = pieces[spec.name]
                answers[spec.name].append(parts[0] if len(parts) == 1 else np.concatenate([none, *parts]))
        return answers

    def _bound(
        self, tokens: Array, past: Array, kept: Array, outputs: Mapping[str, Array], samples: slice
    ) -> Callable[[], None]:
        """A run on some samples' caches, which it reads and writes in place, with the outputs of the tokens `kept`."""
        caches = {name: cache[samples] for name, cache in self._caches.items()}
        inputs = {self._tokens.name: tokens, self._decoding.past: past, **caches}
        if self._decoding.kept is not None:
            inputs[self._decoding.kept] = kept
        return self._backend.bound(inputs, {**outputs, **{f"{name}{NEXT}": cache for name, cache in caches.items()}})


def _as_array(name: str, value: Any) -> Array:
    """Convert an array, or numbers in lists, to a NumPy array."""
    if hasattr(value, "__dlpack__"):
        return to_numpy(name, value)
    with raised_as(InputError, f"{name} cannot be converted to an array", "; give rows of one length"):
        return np.asarray(value)


def _fixed(spec: TensorSpec, first: int) -> tuple[int, ...]:
    """The fixed dims of a tensor from a position on: those of one sample (1), or of one token (2)."""
    return tuple(dim for dim in spec.dims[first:] if isinstance(dim, int))
