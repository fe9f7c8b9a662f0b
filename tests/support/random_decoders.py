"""Random decoders, each drawn from a seed: causal models that take only tokens, so that a cache can be added.

They cover common architectures: grouped heads of many sizes, rotary or learned positions, windows, soft caps, norms
before or after, norms of queries and keys, gated and plain feed-forward layers; on ids and on features.
"""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

from attnforge.model.attention import merge_heads, split_heads
from attnforge.model.registry import Example
from tests.support.random_models import ACTIVATIONS, Kinds, Options, Recipe, RMSNorm
from tests.support.random_models import make as make_of

PRECISIONS = ("fp32", "fp16", "bf16")

BASE = 10_000.0
"""Base of the rotary frequencies."""


def draw_decoder(seed: int) -> Recipe:
    """Draw the recipe of a seed."""
    rng = random.Random(seed)
    weights, kind = round(0.3 * 10 ** rng.random(), 3), rng.choice(tuple(KINDS))
    return Recipe(seed, kind, rng.choice(PRECISIONS), weights, KINDS[kind][0](rng))


def make_decoder(recipe: Recipe) -> Example:
    """Build the decoder of a recipe, with random weights, example tokens and dynamic shapes."""
    return make_of(recipe, KINDS)


def places_of(recipe: Recipe) -> int | None:
    """Return the cache capacity for a recipe's decoder, or None for other models."""
    if recipe.kind not in KINDS:
        return None
    return int(recipe.options["tokens"][1] + recipe.options["spare"])


def _options(rng: random.Random) -> Options:
    key_heads, tokens, batch = rng.randint(1, 3), rng.randint(2, 24), rng.randint(1, 3)
    options: Options = {
        "batch": (batch, rng.choice((batch, batch + rng.randint(1, 3)))),
        "tokens": (tokens, tokens + rng.randint(1, 24)),
        "spare": rng.choice((0, 0, 1, 9)),
        "vocabulary": rng.choice((50, 50, 200, None)),
        "width": rng.randint(8, 64),
        "layers": rng.randint(1, 2),
        "heads": key_heads * rng.randint(1, 3),
        "key_heads": key_heads,
        "head_size": rng.choice((4, 6, 8, 8, 12, 16, 16, 24, 32, 40)),
        "window": rng.choice((None, None, 1, 2, 3, 5, 8, 64)),
        "softcap": None,
        "scale": rng.choice((None, None, 0.25, 1.0)),
        "norm": rng.choice(("layer", "rms", "rms in fp32")),
        "norm_first": rng.random() < 0.8,
        "normed_heads": rng.random() < 0.25,
        "activation": rng.choice(tuple(ACTIVATIONS)),
        "gated": rng.random() < 0.5,
        "bias": rng.random() < 0.5,
        "written": rng.choice(("products", "sdpa", "grouped sdpa")),
        "outputs": rng.choice((1, 1, 1, 2)),
    }
    if options["written"] == "products":
        options["softcap"] = rng.choice((None, 2.0, 10.0, 50.0))
    return options


class CausalAttention(nn.Module):
    """Attention of every token to itself and earlier ones.

    Args:
        width: size of a token.
        heads, key_heads: of queries, and of keys and values.
        head_size: size of every head; even with rotary positions.
        positions: `rotary` rotates the halves of a head against each other, `interleaved` neighbours, and `half-rotary`
            the first half of a head alone; `slopes` adds a bias by distance to scores; others are added to the tokens.
        window: how many tokens a query sees, including its own; None for all earlier ones.
        softcap: scores are c·tanh(s/c).
        scale: scale of the scores; 1/√head_size by default.
        normed_heads: whether queries and keys are normalised, as in Qwen3.
        bias: whether the projections have a bias.
        written: `products`, `sdpa`, or `grouped sdpa`, which repeats keys and values itself.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        key_heads: int,
        head_size: int,
        positions: str = "rotary",
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        normed_heads: bool = False,
        bias: bool = False,
        written: str = "sdpa",
    ) -> None:
        super().__init__()
        self.heads, self.key_heads, self.positions, self.window = heads, key_heads, positions, window
        self.softcap, self.scale, self.written = softcap, scale or 1 / math.sqrt(head_size), written
        self.query = nn.Linear(width, heads * head_size, bias=bias)
        self.key = nn.Linear(width, key_heads * head_size, bias=bias)
        self.value = nn.Linear(width, key_heads * head_size, bias=bias)
        self.output = nn.Linear(heads * head_size, width, bias=bias)
        self.norms = nn.ModuleList(RMSNorm(head_size, False) for _ in range(2 if normed_heads else 0))

    def forward(self, x: Tensor) -> Tensor:
        query = split_heads(self.query(x), self.heads)  # (B, H, n, d)
        key = split_heads(self.key(x), self.key_heads)
        value = split_heads(self.value(x), self.key_heads)
        if len(self.norms):
            query, key = self.norms[0](query), self.norms[1](key)
        query, key = rotated(query, self.positions), rotated(key, self.positions)
        attended: Tensor = self.output(merge_heads(self.attend(query, key, value)))
        return attended

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen = self.seen(query.shape[2])
        if self.positions == "slopes":
            distance = torch.arange(seen.shape[0])[:, None] - torch.arange(seen.shape[1])
            slopes = 2.0 ** -torch.arange(1.0, self.heads + 1)
            bias = (-slopes[:, None, None] * distance).masked_fill(~seen, -math.inf).to(query.dtype)
            groups = self.heads // self.key_heads
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            return F.scaled_dot_product_attention(query, key, value, bias, scale=self.scale)
        if self.written == "grouped sdpa":
            mask = None if self.window is None else seen
            grouped = self.heads != self.key_heads
            return F.scaled_dot_product_attention(
                query, key, value, mask, is_causal=mask is None, scale=self.scale, enable_gqa=grouped
            )
        groups = self.heads // self.key_heads
        key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
        if self.written == "sdpa":
            return F.scaled_dot_product_attention(query, key, value, seen, scale=self.scale)
        scores = query @ key.mT * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        return scores.masked_fill(~seen, -math.inf).softmax(-1) @ value

    def seen(self, tokens: int) -> Tensor:
        """Return `(tokens, tokens)`, True where a query sees a key."""
        positions = torch.arange(tokens)
        distance = positions[:, None] - positions
        seen = distance >= 0
        return seen if self.window is None else seen & (distance < self.window)


def rotated(x: Tensor, positions: str) -> Tensor:
    """Rotate heads `(B, H, n, d)` by the positions of their tokens, if positions are rotary."""
    if positions == "half-rotary":
        size = x.shape[-1] // 4 * 2
        return torch.cat((rotated(x[..., :size], "rotary"), x[..., size:]), -1)
    if positions not in ("rotary", "interleaved"):
        return x
    angles = angles_of(x.shape[2], x.shape[-1], x.dtype)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    if positions == "rotary":
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)


def angles_of(tokens: int, size: int, dtype: torch.dtype) -> Tensor:
    """`(tokens, size / 2)`, in fp32 at least: RoFormer's frequencies (https://arxiv.org/abs/2104.09864)."""
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    frequencies = BASE ** (-torch.arange(0, size, 2, dtype=dtype) / size)
    return torch.arange(tokens, dtype=dtype)[:, None] * frequencies


class CausalBlock(nn.Module):
    """Attention and a feed-forward layer, each with a residual and a norm before or after it."""

    def __init__(self, width: int, norm: str, norm_first: bool, activation: str, gated: bool, **attention: Any) -> None:
        super().__init__()
        self.attention = CausalAttention(width, **attention)
        self.norms = nn.ModuleList(norm_of(norm, width) for _ in range(2))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gate = nn.Linear(width, 2 * width) if gated else None
        self.norm_first, self.activation = norm_first, ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norms
        if self.norm_first:
            x = x + self.attention(first(x))
            return x + self.feed(second(x))
        x = first(x + self.attention(x))
        normed: Tensor = second(x + self.feed(x))
        return normed

    def feed(self, x: Tensor) -> Tensor:
        up = self.activation(self.up(x))
        fed: Tensor = self.down(up if self.gate is None else up * self.gate(x))
        return fed


def norm_of(name: str, width: int) -> nn.Module:
    return nn.LayerNorm(width) if name == "layer" else RMSNorm(width, name == "rms in fp32")


class CausalModel(nn.Module):
    """Layers on ids, `(B, n)`, or on features, `(B, n, width)`. A second output is the layers' output.

    Args:
        most_tokens: number of learned positions.
        vocabulary: number of ids; None if tokens are features.
        positions: `learned` and `sinusoids` are added to the tokens; others belong to attention, or there are none.
        outputs: one or two.
    """

    def __init__(
        self,
        width: int,
        layers: int,
        vocabulary: int | None,
        positions: str,
        most_tokens: int,
        outputs: int,
        **layer: Any,
    ) -> None:
        super().__init__()
        self.embedding = nn.Linear(width, width) if vocabulary is None else nn.Embedding(vocabulary, width)
        self.learned = nn.Embedding(most_tokens, width) if positions == "learned" else None
        self.has_sinusoids, self.outputs = positions == "sinusoids", outputs
        self.layers = nn.ModuleList(CausalBlock(width, positions=positions, **layer) for _ in range(layers))
        self.norm, self.head = norm_of(layer["norm"], width), nn.Linear(width, vocabulary or width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x: Tensor = self.embedding(tokens)  # (B, n, width)
        if self.learned is not None:
            x = x + self.learned(torch.arange(tokens.shape[1]))
        if self.has_sinusoids:
            angles = angles_of(tokens.shape[1], x.shape[-1], x.dtype)
            x = x + torch.cat((angles.sin(), angles.cos()), -1)[:, : x.shape[-1]].to(x.dtype)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits if self.outputs == 1 else (logits, x)


def _decoder(
    batch: tuple[int, int], tokens: tuple[int, int], spare: int, vocabulary: int | None, width: int, **options: Any
) -> Example:
    size = (batch[0], tokens[0])
    given = torch.randn(*size, width) if vocabulary is None else torch.randint(0, vocabulary, size)
    module = CausalModel(width=width, vocabulary=vocabulary, most_tokens=tokens[1] + spare, **options)
    samples = Dim("batch", min=1, max=max(batch[1], 2))
    return Example(module, (given,), {"tokens": {0: samples, 1: Dim("tokens", min=1, max=tokens[1])}})


KINDS: Kinds = {
    positions: (_options, partial(_decoder, positions=positions))
    for positions in ("rotary", "interleaved", "half-rotary", "learned", "sinusoids", "no-positions")
}
"""Decoders by their kind of positions."""
