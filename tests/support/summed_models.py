"""Random models of long sums and many layers, each drawn from a seed.

Long sums of equal numbers, as the constant inputs of `verify` make them, round in ways that depend on their order.
Batch norms can amplify, and recurrent layers and many layers add rounding errors up.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnforge.model.registry import Example
from tests.support.random_models import (
    PRECISIONS,
    Block,
    Kinds,
    Options,
    Recipe,
    SelfAttention,
    dim_of,
    example_of,
    make,
    sizes_of,
)


def draw_summed(seed: int) -> Recipe:
    """Draw the recipe of a seed."""
    rng = random.Random(f"summed {seed}")
    precision, kind = rng.choice(PRECISIONS), rng.choice(tuple(SUMMED))
    weights = round(0.5 * 4 ** rng.random(), 3)
    return Recipe(seed, kind, precision, weights, SUMMED[kind][0](rng))


def make_summed(recipe: Recipe) -> Example:
    """Build the model of a recipe of :func:`draw_summed`."""
    return make(recipe, SUMMED)


# --- long sums --------------------------------------------------------------------------------------------------------


class Long(nn.Module):
    """Few learned queries attend to many tokens, or the tokens are reduced.

    Args:
        width, heads: size of a token, and number of heads.
        reduced: `attention`, `mean`, `var`, `norm`, or `all` for a product over all numbers of a sample.
        count: number of tokens.
    """

    def __init__(self, width: int, heads: int, reduced: str, count: int) -> None:
        super().__init__()
        self.heads, self.reduced = heads, reduced
        self.queries, self.pair = nn.Parameter(torch.randn(4, width)), nn.Linear(width, 2 * width)
        self.whole = nn.Linear(width * count, width) if reduced == "all" else nn.Identity()
        self.last = nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        if self.reduced == "all":
            y = self.whole(x.flatten(1))
        elif self.reduced == "attention":
            both = (self.queries.expand(x.shape[0], -1, -1), *self.pair(x).chunk(2, -1))
            parts = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in both)
            y = F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        else:
            y = {"mean": x.mean(1), "var": x.var(1), "norm": x.norm(dim=1) / x.shape[1] ** 0.5}[self.reduced]
        result: Tensor = self.last(y)
        return result


def _draw_long(rng: random.Random) -> Options:
    heads = rng.randint(1, 4)
    return {
        "batch": sizes_of(rng)["batch"], "count": rng.choice((2048, 4096, 8192, 16384)), "heads": heads,
        "width": heads * rng.choice((4, 8)), "reduced": rng.choice(("attention", "mean", "var", "norm", "all")),
    }  # fmt: skip


def _long(batch: Any, count: int, width: int, **options: Any) -> Example:
    if options["reduced"] == "all":
        count //= width  # 16,384 numbers at most
    x = torch.randn(batch[0], count, width)
    return example_of(Long(width, count=count, **options), [x], {"x": {0: dim_of("batch", batch)}})


class Attended(nn.Module):
    """Self-attention over many tokens.

    Args:
        width, heads: size of a token, and number of heads.
        is_causal: whether a token sees no later ones.
    """

    def __init__(self, width: int, heads: int, is_causal: bool) -> None:
        super().__init__()
        self.attention = SelfAttention(
            width, width, heads, width // heads, None, bias=True, written="sdpa", scaled=True, is_causal=is_causal
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.attention(x)
        return y


def _draw_attended(rng: random.Random) -> Options:
    heads = rng.randint(1, 2)
    return {
        "count": rng.choice((512, 1024, 2048)), "heads": heads, "width": heads * rng.choice((16, 32)),
        "is_causal": rng.random() < 0.5,
    }  # fmt: skip


def _attended(count: int, width: int, **options: Any) -> Example:
    return example_of(Attended(width, **options), [torch.randn(1, count, width)], {"x": {}})


# --- convolutions and batch norms -------------------------------------------------------------------------------------


class Stem(nn.Module):
    """A convolutional stem with batch norms of random statistics, before attention over its positions.

    Args:
        width, heads: number of channels, and of heads.
        layers: number of convolutions.
        channels: of the image.
        amplifies: whether the variances are small, so that the batch norms amplify.
        activation: between the layers.
    """

    def __init__(self, width: int, heads: int, layers: int, channels: int, amplifies: bool, activation: str) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels if i == 0 else width, width, 3, stride=1 + (i < 2), padding=1) for i in range(layers)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(layers))
        for norm in self.norms:
            assert isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None and norm.running_var is not None
            norm.running_mean.normal_(0, 0.2)
            norm.running_var.uniform_(*((0.02, 0.2) if amplifies else (0.5, 2.0)))
        self.activation = {"relu": F.relu, "silu": F.silu, "hardswish": F.hardswish}[activation]
        self.attention = SelfAttention(width, width, heads, width // heads, None, True, "sdpa", True)
        self.head = nn.Linear(width, 10)

    def forward(self, image: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            image = self.activation(norm(convolution(image)))
        tokens = image.flatten(2).transpose(1, 2)
        result: Tensor = self.head((tokens + self.attention(tokens)).mean(1))
        return result


def _draw_stem(rng: random.Random) -> Options:
    heads = rng.randint(1, 4)
    return {
        "batch": sizes_of(rng)["batch"], "side": rng.choice((16, 32, 48)), "channels": rng.choice((1, 3)),
        "heads": heads, "width": heads * rng.choice((8, 16)), "layers": rng.randint(1, 5),
        "amplifies": rng.random() < 0.4, "activation": rng.choice(("relu", "silu", "hardswish")),
    }  # fmt: skip


def _stem(batch: Any, side: int, channels: int, **options: Any) -> Example:
    image = torch.randn(batch[0], channels, side, side)
    return example_of(Stem(channels=channels, **options), [image], {"image": {0: dim_of("batch", batch)}})


# --- recurrent and deep nets ------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Recurrent layers before attention.

    Args:
        kind: `gru` or `lstm`.
        width, heads: size of a token, and number of heads.
        layers: number of recurrent layers.
        both: whether each also runs backwards.
    """

    def __init__(self, kind: str, width: int, heads: int, layers: int, both: bool) -> None:
        super().__init__()
        make_layer = nn.GRU if kind == "gru" else nn.LSTM
        self.recurrent = make_layer(width, width, layers, batch_first=True, bidirectional=both)
        inner = width * (1 + both)
        self.attention = SelfAttention(inner, inner, heads, width // heads, None, True, "sdpa", True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.recurrent(x)[0]
        result: Tensor = y + self.attention(y)
        return result


def _draw_recurrent(rng: random.Random) -> Options:
    heads = rng.randint(1, 4)
    return {
        "batch": rng.randint(1, 3), "tokens": rng.choice((8, 40, 160)), "kind": rng.choice(("gru", "lstm")),
        "heads": heads, "width": heads * rng.choice((8, 16)), "layers": rng.randint(1, 3), "both": rng.random() < 0.3,
    }  # fmt: skip


def _recurrent(batch: int, tokens: int, width: int, **options: Any) -> Example:
    return example_of(Recurrent(width=width, **options), [torch.randn(batch, tokens, width)], {"x": {}})


class Deep(nn.Module):
    """Many narrow layers.

    Args:
        depth: number of layers.
        width: size of a token.
        layer: options of each.
    """

    def __init__(self, depth: int, width: int, **layer: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, **layer) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, None)
        return x


def _draw_deep(rng: random.Random) -> Options:
    heads, size = rng.randint(1, 2), rng.choice((4, 8))
    return {
        **sizes_of(rng), "depth": rng.choice((12, 24, 36)), "width": heads * size, "heads": heads, "key_size": size,
        "value_size": None, "bias": rng.random() < 0.5, "written": rng.choice(("products", "sdpa")), "scaled": True,
        "norm": rng.choice(("layer", "rms", "rms in fp32")), "norm_first": rng.random() < 0.5,
        "activation": rng.choice(("gelu", "relu", "silu")), "is_causal": rng.random() < 0.3,
    }  # fmt: skip


def _deep(batch: Any, tokens: Any, width: int, **options: Any) -> Example:
    x = torch.randn(batch[0], tokens[0], width)
    return example_of(
        Deep(width=width, **options), [x], {"x": {0: dim_of("batch", batch), 1: dim_of("tokens", tokens)}}
    )


SUMMED: Kinds = {
    "long": (_draw_long, _long),
    "attended": (_draw_attended, _attended),
    "stem": (_draw_stem, _stem),
    "recurrent": (_draw_recurrent, _recurrent),
    "deep": (_draw_deep, _deep),
}
