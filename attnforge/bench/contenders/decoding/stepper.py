"""The interface of contenders that are timed step by step, and the bundle's decoders."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Generic, Protocol, TypeVar

from attnforge.arrays import Array
from attnforge.bench.contenders.peers import PeerJob
from attnforge.runtime.decoding.decoder import Decoder
from attnforge.runtime.session import load

S = TypeVar("S")


class Stepper(Protocol):
    """A model with a cache of a batch of samples, all of the same length."""

    def extend(self, tokens: Array) -> Array:
        """Append tokens of every sample, `(batch, tokens)`; return the logits of the last, `(batch, vocabulary)`."""

    def mark(self) -> None:
        """Mark the current tokens for :meth:`rewind`."""

    def rewind(self) -> None:
        """Discard all tokens since the last :meth:`mark`."""

    def reset(self) -> None:
        """Discard all tokens."""


class Marking(Generic[S]):
    """The state of the caches: now, at the last :meth:`mark`, and without tokens."""

    def __init__(self, empty: S) -> None:
        self._now = self._marked = self._empty = empty

    def mark(self) -> None:
        self._marked = self._now

    def rewind(self) -> None:
        self._now = self._marked

    def reset(self) -> None:
        self._now = self._empty


def ours(name: str, job: PeerJob, stack: ExitStack) -> Stepper:
    """A decoder of the bundle on one of its backends."""
    session = stack.enter_context(load(job.bundle, name, threads=job.threads))
    return OfDecoder(session.decoder(job.batch), job.output)


class OfDecoder:
    """A decoder of a bundle.

    Args:
        decoder: the decoder.
        output: name of the output with logits.
    """

    def __init__(self, decoder: Decoder, output: str) -> None:
        self._decoder, self._output = decoder, output
        self._marked = decoder.lengths

    def extend(self, tokens: Array) -> Array:
        is_step = tokens.shape[1] == 1
        answer = self._decoder.step(tokens[:, 0]) if is_step else self._decoder.prefill(tokens)
        logits: Array = answer[self._output] if isinstance(answer, dict) else answer
        return logits

    def mark(self) -> None:
        self._marked = self._decoder.lengths

    def rewind(self) -> None:
        self._decoder.crop(self._marked)

    def reset(self) -> None:
        self._decoder.reset()
