"""Small decoders to deploy with a cache, shared by many tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor
from torch.export import Dim

from attnforge.arrays import Array
from attnforge.bundle import Bundle, Decoding
from attnforge.export.graphs.execute import in_float64
from attnforge.model import Example, build_model
from attnforge.model.decoder import Decoder
from attnforge.model.registry import DynamicShapes

PLACES, LONGEST, VOCABULARY = 40, 24, 50
"""Capacity of the caches, maximum tokens of one run, and number of ids."""

KINDS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "learned": {"positions": "learned", "norm": "layer", "feed_forward": "gelu-tanh", "bias": True, "num_kv_heads": 4},
    "window": {"window": 7},
    "capped": {"soft_cap": 5.0, "tied": True},
    "uneven": {"embed_dim": 48},  # heads of size 12, which no grouped-query kernel supports
}
"""Options of the registered decoder, by kind."""


DeployDecoder = Callable[[str, str], Bundle]
"""Deploys a decoder with a cache, by kind and precision."""


def decoder_example(kind: str = "rotary") -> Example:
    """Build a small decoder of a kind."""
    options = {"vocab_size": VOCABULARY, "num_tokens": 9, "max_tokens": PLACES, "max_batch": 4, **KINDS[kind]}
    module, args, _ = build_model("decoder", **options)
    shapes: DynamicShapes = {"input_ids": {0: Dim("batch", min=1, max=4), 1: Dim("tokens", min=1, max=LONGEST)}}
    return Example(module, args, shapes)


def ids(*shape: int, seed: int = 0) -> Array:
    """Return random token ids."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, shape)


def eager(kind: str, tokens: Array) -> Array:
    """Return the logits of the module without a cache, `(batch, tokens, vocabulary)`."""
    module = decoder_example(kind).module
    assert isinstance(module, Decoder)
    with torch.no_grad():
        logits: Array = module(torch.from_numpy(tokens)).numpy()
    return logits


@torch.no_grad()
def generate(
    decoder: Decoder,
    input_ids: Tensor,
    max_new_tokens: int,
    *,
    lengths: Tensor | None = None,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the next tokens of every row in eager, (batch, max_new_tokens), one at a time, greedily at temperature 0
    or sampled.

    Args:
        decoder: the decoder.
        input_ids: the prompts, (batch, n) int64.
        max_new_tokens: number of tokens per row.
        lengths: lengths of the rows, (batch,) int64; the rest of each is padding. By default no row is padded.
        temperature: divides the logits.
        generator: draws the samples.
    """
    batch, tokens = input_ids.shape
    past = torch.full((batch,), tokens) if lengths is None else lengths
    cache = decoder.empty_cache(batch, tokens + max_new_tokens - 1)
    last = decoder.step(input_ids, torch.zeros_like(past), cache)[torch.arange(batch), past - 1]
    written: list[Tensor] = []
    while True:
        if temperature == 0:
            written.append(last.argmax(-1))
        else:
            written.append(torch.multinomial((last / temperature).softmax(-1), 1, generator=generator).squeeze(1))
        if len(written) == max_new_tokens:
            return torch.stack(written, dim=1)
        last = decoder.step(written[-1][:, None], past, cache)[:, -1]
        past = past + 1


def in_pieces(model: ir.Model, ids: Any, ends: Sequence[int], decoding: Decoding) -> Any:
    """The first output for a sequence that is fed in pieces with caches, in float64."""
    run = in_float64(model)
    shapes = {spec.name: [dim for dim in spec.dims[1:] if isinstance(dim, int)] for spec in decoding.tensors}
    caches = {name: np.zeros((len(ids), *shape)) for name, shape in shapes.items()}
    begin, answers = 0, []
    for end in ends:
        past, every = np.full(len(ids), begin), np.arange(end - begin)
        step = {decoding.tokens: ids[:, begin:end], decoding.past: past, str(decoding.kept): every, **caches}
        answer, *following = run(step).values()
        caches = dict(zip(caches, following, strict=True))
        answers.append(answer)
        begin = end
    return np.concatenate(answers, 1)
