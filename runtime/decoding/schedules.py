"""Schedules by which a decoder may receive a sequence. With each, its outputs must equal those of the model without a
cache for the whole sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from attnforge.arrays import Array
from attnforge.runtime.decoding.decoder import Decoder

STEPS = 64
"""Number of single-token steps at the end of a sequence; what comes before is a prompt."""

Answers = dict[str, list[Array]]
"""Outputs by name, `(tokens, …)` for every sample."""

Tokens = Array
"""`(batch, tokens, …)`."""

Taken = tuple[Answers, Decoder]
"""The outputs for all tokens, and the decoder that has them in its caches."""


def token_by_token(decoder: Decoder, tokens: Tokens) -> Taken:
    """The last :data:`STEPS` tokens one by one, after a prompt of those before; all of them if the sequence is
    shorter."""
    prompt = max(tokens.shape[1] - STEPS, 0)
    answers = decoder.extend(tokens[:, :prompt])
    for position in range(prompt, tokens.shape[1]):
        answers = _joined(answers, decoder.extend(tokens[:, position : position + 1]))
    return answers, decoder


def in_pieces(decoder: Decoder, tokens: Tokens) -> Taken:
    """Pieces of growing, odd lengths: 1, 3, 7, 15, … tokens. The outputs for the very last token are those of a fork
    that receives the last piece as a prompt, for which no other outputs are computed."""
    answers, first, length = decoder.extend(tokens[:, :0]), 0, 1
    last: Any = None
    while first < tokens.shape[1]:
        piece = tokens[:, first : first + length]
        first, length = first + length, 2 * length + 1
        if first >= tokens.shape[1]:
            last = decoder.fork().prefill(piece)
        answers = _joined(answers, decoder.extend(piece))
    for name, samples in answers.items():
        for sample, answer in zip(samples, last[name] if isinstance(last, dict) else last, strict=True):
            sample[-1] = answer
    return answers, decoder


def ragged(decoder: Decoder, tokens: Tokens) -> Taken:
    """Prompts of different lengths, so that every sample is at another position; then steps for all together. A sample
    that is done is cropped by one token, and receives it again."""
    batch, count = tokens.shape[:2]
    lengths = np.array([max(1, (sample + 1) * count // (batch + 1)) for sample in range(batch)])
    lengths = np.maximum(lengths, count - STEPS)
    answers = decoder.extend([row[:n] for row, n in zip(tokens, lengths, strict=True)])
    while (lengths < count).any():
        kept = np.minimum(lengths, count - 1)
        if (kept < lengths).any():  # otherwise wrong lengths of the decoder would be corrected here
            decoder.crop(kept)
        following = np.stack([row[n] for row, n in zip(tokens, kept, strict=True)])
        for name, samples in decoder.extend(following[:, None]).items():
            before = [answer[:n] for answer, n in zip(answers[name], kept, strict=True)]
            answers[name] = [np.concatenate(pair) for pair in zip(before, samples, strict=True)]
        lengths = kept + 1
    return answers, decoder


def cut_and_forked(decoder: Decoder, tokens: Tokens) -> Taken:
    """Another sequence, which is removed; half of the sequence and the end of another one, which is cropped again; then
    the rest in a fork of the decoder."""
    count = tokens.shape[1]
    half = (count + 1) // 2
    decoder.extend(tokens[:, ::-1])
    decoder.reset()
    answers = decoder.extend(tokens[:, :half])
    if half < count:
        decoder.extend(tokens[:, : count - half])
        decoder.crop(half)
        copy = decoder.fork()
        decoder.reset()
        decoder.extend(tokens[:, ::-1])
        answers, decoder = _joined(answers, copy.extend(tokens[:, half:])), copy
    return answers, decoder


SCHEDULES: Mapping[str, Callable[[Decoder, Tokens], Taken]] = {
    "token by token": token_by_token,
    "in pieces": in_pieces,
    "ragged": ragged,
    "cut and forked": cut_and_forked,
}
"""Every schedule by its name, as verification reports it."""


def _joined(first: Answers, second: Answers) -> Answers:
    """The outputs for some tokens and for those after them."""
    return {
        name: [np.concatenate(pair) for pair in zip(samples, second[name], strict=True)]
        for name, samples in first.items()
    }
