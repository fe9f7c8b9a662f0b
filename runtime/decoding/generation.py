"""Text generation with a decoder: the next token is chosen from the model's logits, and becomes the next input."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnforge.arrays import Array
from attnforge.errors import InputError, RunError, UsageError
from attnforge.numbers import whole
from attnforge.runtime.decoding.decoder import Decoder

STOPPED = -1
"""The id of a sample that has stopped."""


@dataclass(frozen=True)
class Sampler:
    """The choice of the next token.

    Attributes:
        temperature: divisor of the logits; 0 takes the most likely token (greedy).
        top_k: number of most likely tokens to choose from; None for all.
        top_p: choose from the fewest most likely tokens that together have this probability (nucleus sampling, Holtzman
            et al. 2020, https://arxiv.org/abs/1904.09751); None for all.
        seed: random seed. A sample's tokens depend only on it, on the sample's number and on the logits.

    Raises:
        UsageError: a number out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature is {self.temperature:g}; give 0 for the most likely token, or more")
        if self.top_k is not None and whole("top_k", self.top_k) < 1:
            raise UsageError(f"top_k is {self.top_k}; give 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p:g}; give more than 0 and at most 1")
        if not 0 <= whole("seed", self.seed) < 2**64:
            raise UsageError(f"the seed is {self.seed}; give an integer from 0 to 2^64 - 1")
        if not self.temperature and (self.top_k is not None or self.top_p is not None):
            raise UsageError("top_k and top_p need a temperature above 0; without one the most likely token is taken")

    def generators(self, samples: int) -> list[np.random.Generator]:
        """The random generator of every sample."""
        return [np.random.Generator(np.random.PCG64([self.seed, sample])) for sample in range(samples)]

    def probabilities(self, logits: Array) -> Array:
        """The probability with which every token is chosen, `(vocabulary,)`, float64.

        Args:
            logits: `(vocabulary,)`.
        """
        scores = logits.astype(np.float64)
        if not self.temperature:
            return np.asarray(np.arange(len(scores)) == scores.argmax(), np.float64)
        scores = (scores - scores.max()) / self.temperature
        order = np.argsort(-scores, kind="stable")
        weights = np.exp(scores[order])
        weights /= weights.sum()
        kept = len(order) if self.top_k is None else min(self.top_k, len(order))
        if self.top_p is not None:
            kept = min(kept, int(np.searchsorted(np.cumsum(weights), self.top_p)) + 1)
        result = np.zeros(len(scores))
        result[order[:kept]] = weights[:kept] / weights[:kept].sum()
        return result

    def choose(self, logits: Array, generators: Sequence[np.random.Generator]) -> Array:
        """Choose the next token of every sample, `(batch,)`, int64.

        Args:
            logits: `(batch, vocabulary)`.
            generators: the generator of every sample.

        Raises:
            RunError: the largest logit of a sample is NaN or infinite.
        """
        if not np.isfinite(largest := logits.max(-1)).all():
            sample = int(np.argmin(np.isfinite(largest)))
            raise RunError(f"sample {sample} has no most likely token: its largest logit is {largest[sample]}")
        if not self.temperature:
            return np.asarray(logits.argmax(-1), np.int64)
        rows = zip(logits, generators, strict=True)
        return np.array([generator.choice(len(row), p=self.probabilities(row)) for row, generator in rows], np.int64)


GREEDY = Sampler()


def generate(
    decoder: Decoder,
    prompts: Any,
    max_new_tokens: int,
    stop: Collection[int] = (),
    sampler: Sampler = GREEDY,
    lengths: Any = None,
) -> Iterator[Array]:
    """Generate the tokens that follow prompts, one after another.

    Args:
        decoder: receives the prompts after its tokens, and then every chosen token but the last.
        prompts: prompts as in :meth:`Decoder.prefill`.
        max_new_tokens: maximum number of new tokens per sample.
        stop: stop token ids, after which a sample ends.
        sampler: chooses the tokens.
        lengths: lengths of the prompts, as in :meth:`Decoder.prefill`.

    Yields:
        The next token of every sample, `(batch,)`, int64; :data:`STOPPED` for a sample that has stopped.

    Raises:
        InputError: as in :meth:`Decoder.prefill`; the caches are too small for the prompts and the new tokens; or a
            stop token id is no whole number.
        UsageError: fewer than one new token, or the model does not return logits.
    """
    if whole("max_new_tokens", max_new_tokens) < 1:
        raise UsageError(f"max_new_tokens is {max_new_tokens}; give 1 or more")
    rows = decoder.rows(prompts, lengths)
    ends = decoder.lengths + [len(row) for row in rows] + (max_new_tokens - 1)
    if (ends > decoder.places).any():
        raise InputError(
            f"the prompt and {max_new_tokens} new tokens are {int(ends.max()) + 1} tokens, and the cache has room for "
            f"{decoder.places + 1}; generate fewer, or deploy with more cache_tokens"
        )
    last = [whole("a stop token id", each) for each in stop]

    def tokens() -> Iterator[Array]:
        generators = sampler.generators(decoder.batch)
        running = np.ones(decoder.batch, bool)
        logits = _logits(decoder.prefill(rows))
        for number in range(max_new_tokens):
            chosen = sampler.choose(logits, generators)
            yield np.where(running, chosen, STOPPED)
            running &= ~np.isin(chosen, last)
            if not running.any() or number == max_new_tokens - 1:
                return
            logits = _logits(decoder.step(chosen))

    return tokens()


def _logits(answer: Any) -> Array:
    """The logits in the model's output: its only output, or the one of that name."""
    array = answer.get("logits") if isinstance(answer, dict) else answer
    if array is None or array.ndim != 2:
        raise UsageError("the model has no output of logits, (batch, vocabulary) per token, so it cannot generate text")
    return np.asarray(array, np.float32) if array.dtype != np.float64 else array
