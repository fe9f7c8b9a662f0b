"""What a contender does to be timed step by step, and the bundle's own decoders, which do so."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Protocol

from attnforge.arrays import Array
from attnforge.bench.contenders.peers import PeerJob
from attnforge.runtime.session import load


class Stepper(Protocol):
    """A model with a cache of some samples, all of one length."""

    def extend(self, tokens: Array) -> Array:
        """Take the next tokens of every sample, `(batch, tokens)`; the logits of the last, `(batch, vocabulary)`."""

    def mark(self) -> None:
        """Remember the tokens that are there now."""

    def rewind(self) -> None:
        """Forget all tokens since the last :meth:`mark`."""

    def reset(self) -> None:
        """Forget all tokens."""


class Counting:
    """How many tokens the caches have, and had at the last :meth:`mark`: all that a cache of a fixed size forgets."""

    def __init__(self) -> None:
        self._past = self._marked = 0

    def mark(self) -> None:
        self._marked = self._past

    def rewind(self) -> None:
        self._past = self._marked

    def reset(self) -> None:
        self._past = 0


class Ours:
    """A decoder of the bundle on one of its backends."""

    def __init__(self, name: str, job: PeerJob, stack: ExitStack) -> None:
        session = stack.enter_context(load(job.bundle, name, threads=job.threads))
        self._decoder, self._output = session.decoder(job.batch), job.output
        self._marked = self._decoder.lengths

    def extend(self, tokens: Array) -> Array:
        one = tokens.shape[1] == 1
        answer = self._decoder.step(tokens[:, 0]) if one else self._decoder.prefill(tokens)
        logits: Array = answer[self._output] if isinstance(answer, dict) else answer
        return logits

    def mark(self) -> None:
        self._marked = self._decoder.lengths

    def rewind(self) -> None:
        self._decoder.crop(self._marked)

    def reset(self) -> None:
        self._decoder.reset()
