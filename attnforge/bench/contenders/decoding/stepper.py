"""What a contender does to be timed step by step, and the bundle's own decoders, which do so."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from attnforge.arrays import Array
from attnforge.bench.contenders.peers import PeerJob
from attnforge.bundle import Decoding
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


@dataclass
class DecodingJob(PeerJob):
    """What contenders are opened for. Its feeds are the tokens of the longest run, `(batch, tokens)`."""

    @property
    def decoding(self) -> Decoding:
        """What the bundle says of its caches."""
        decoding = self.bundle.manifest.decoding
        assert decoding is not None
        return decoding

    @property
    def batch(self) -> int:
        """How many samples are decoded at once."""
        return len(self.feeds[self.decoding.tokens])

    @property
    def output(self) -> str:
        """The name of the logits: the model's first output."""
        return self.bundle.manifest.outputs[0].name


class Ours:
    """A decoder of the bundle on one of its backends."""

    def __init__(self, name: str, job: DecodingJob, stack: ExitStack) -> None:
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
