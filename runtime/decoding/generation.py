"""Text from a decoder: the next token is chosen of what the model answers, and taken as the next input."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnforge.arrays import Array
from attnforge.errors import InputError, UsageError
from attnforge.numbers import whole
from attnforge.runtime.decoding.decoder import Decoder

STOPPED = -1
"""What stands in the place of a token of a sample that has stopped."""


@dataclass(frozen=True)
class Sampler:
    """How the next token is chosen.

    Attributes:
        temperature: the logits are divided by it; 0 takes the likeliest token (greedy).
        top_k: of the likeliest tokens so many may be chosen; None for all.
        top_p: of the likeliest tokens as few as together have this probability (nucleus sampling, Holtzman et al. 2020,
            https://arxiv.org/abs/1904.09751); None for all.
        seed: of the choice. A sample's tokens depend on it, on the sample's number and on the logits alone.

    Raises:
        UsageError: a number outside its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature is {self.temperature:g}; give 0 for the likeliest token, or more")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k is {self.top_k}; give 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"top_p is {self.top_p:g}; give more than 0 and at most 1")
        if not 0 <= self.seed < 2**64:
            raise UsageError(f"the seed is {self.seed}; give a whole number from 0 to 2^64 - 1")
        if not self.temperature and (self.top_k is not None or self.top_p is not None):
            raise UsageError("top_k and top_p choose among tokens, and without a temperature the likeliest is taken")

    def generators(self, samples: int) -> list[np.random.Generator]:
        """The source of chance of every sample."""
        return [np.random.Generator(np.random.PCG64([self.seed, sample])) for sample in range(samples)]

    def probabilities(self, logits: Array) -> Array:
        """The probability of every token to be chosen, `(vocabulary,)`, float64.

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
        """The next token of every sample, `(batch,)`, int64.

        Args:
            logits: `(batch, vocabulary)`.
            generators: of every sample.
        """
        if not self.temperature:
            return np.asarray(logits.argmax(-1), np.int64)
        return np.array(
            [
                generator.choice(len(row), p=self.probabilities(row))
                for row, generator in zip(logits, generators, strict=True)
            ],
            np.int64,
        )


GREEDY = Sampler()


def generate(
    decoder: Decoder,
    prompts: Any,
    max_new_tokens: int,
    stop: Collection[int] = (),
    sampler: Sampler = GREEDY,
    lengths: Any = None,
) -> Iterator[Array]:
    """The tokens that a model goes on with, one after another.

    Args:
        decoder: takes the prompts behind what it has, and then every token that is chosen but the last.
        prompts: as :meth:`Decoder.prefill` takes them.
        max_new_tokens: how many tokens a sample gets at most.
        stop: ids behind which a sample gets no more.
        sampler: chooses.
        lengths: of the prompts, as :meth:`Decoder.prefill` takes them.

    Yields:
        The next token of every sample, `(batch,)`, int64; :data:`STOPPED` of a sample that has stopped.

    Raises:
        InputError: as of :meth:`Decoder.prefill`; or the prompts and the new tokens are more than the caches hold.
        UsageError: fewer than one new token, or a model whose answers are no logits.
    """
    if whole("max_new_tokens", max_new_tokens) < 1:
        raise UsageError(f"{max_new_tokens} new tokens were asked for; give 1 or more")
    rows = decoder.rows(prompts, lengths)
    ends = decoder.lengths + [len(row) for row in rows] + (max_new_tokens - 1)
    if (ends > decoder.places).any():
        raise InputError(
            f"the prompt and {max_new_tokens} new tokens are {int(ends.max()) + 1}, and the cache has room for "
            f"{decoder.places + 1}; ask for fewer, or deploy with more cache_tokens"
        )
    return _tokens(decoder, rows, max_new_tokens, frozenset(stop), sampler)


def _tokens(
    decoder: Decoder, rows: Sequence[Array], max_new_tokens: int, stop: Collection[int], sampler: Sampler
) -> Iterator[Array]:
    generators = sampler.generators(decoder.batch)
    running = np.ones(decoder.batch, bool)
    logits = _logits(decoder.prefill(rows))
    for number in range(max_new_tokens):
        chosen = sampler.choose(logits, generators)
        yield np.where(running, chosen, STOPPED)
        running &= ~np.isin(chosen, list(stop))
        if not running.any() or number == max_new_tokens - 1:
            return
        logits = _logits(decoder.step(chosen))


def _logits(answer: Any) -> Array:
    """The logits among what a model answers: its only output, or the one of that name."""
    array = answer.get("logits") if isinstance(answer, dict) else answer
    if array is None or array.ndim != 2:
        raise UsageError("the model has no output of logits, (batch, vocabulary) for a token, so it generates nothing")
    return np.asarray(array, np.float32) if array.dtype != np.float64 else array
