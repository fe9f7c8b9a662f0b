"""Small decoders to deploy with a cache, shared by many tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.export import Dim

from attnforge.arrays import Array
from attnforge.bundle import Bundle, Decoding
from attnforge.export.graphs.execute import in_float64
from attnforge.model import Decoder, Example, build_model
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
