"""Random models, each drawn from a seed: kind, sizes, masks, norms, weights and precision.

They cover common code: attention and cross-attention with every sort of mask, encoders, the column
convention, and patches of images, at many sizes, static and dynamic.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

from attnforge.model.attention import merge_heads, split_heads
from attnforge.model.general import GeneralAttention, GeneralMultiHeadAttention
from attnforge.model.patch import PatchAttention, PatchAttentionClassifier
from attnforge.model.registry import Example
from attnforge.model.transformer import VisionTransformer

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")

Options = dict[str, Any]

Kinds = Mapping[str, tuple[Callable[[random.Random], Options], Callable[..., Example]]]
"""For each kind of models, the functions that draw its options and that build a model."""


# --- recipes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """A model and its precision.

    Attributes:
        seed: determines the recipe and its random numbers.
        kind: one of :data:`KINDS`.
        precision: one of :data:`PRECISIONS`, or `int8`.
        weights: factor for every parameter with two or more dims.
        options: arguments of the kind.
    """

    seed: int
    kind: str
    precision: str
    weights: float
    options: dict[str, Any]


def draw(seed: int) -> Recipe:
    """Draw the recipe of a seed."""
    rng = random.Random(seed)
    precision, kind = rng.choice(PRECISIONS), rng.choice(("attention", "attention", "encoder", "columns", "patches"))
    weights = round(0.3 * 10 ** rng.random(), 3)
    return Recipe(seed, kind, precision, weights, KINDS[kind][0](rng))


def make(recipe: Recipe, kinds: Kinds | None = None) -> Example:
    """Build the model of a recipe, with random weights, example inputs and dynamic shapes.

    Args:
        recipe: the recipe.
        kinds: the known kinds; :data:`KINDS` by default.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        example = (kinds or KINDS)[recipe.kind][1](**recipe.options)
        with torch.no_grad():
            for parameter in example.module.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(recipe.weights)
    return Example(example.module.eval(), example.args, example.dynamic_shapes)


def sizes_of(rng: random.Random) -> Options:
    """Draw batch and tokens, each as the example's and the largest size; None if the size is static."""
    batch, tokens = rng.randint(1, 4), rng.randint(2, 40)
    return {
        "batch": (batch, rng.choice((None, batch + rng.randint(1, 4)))),
        "tokens": (tokens, rng.choice((None, tokens + rng.randint(1, 40)))),
    }


def _heads(rng: random.Random) -> Options:
    return {
        "heads": rng.randint(1, 6),
        "key_size": rng.choice((4, 8, 13, 16, 24, 32, 64)),
        "value_size": rng.choice((None, 6, 16, 32, 40)),
        "bias": rng.random() < 0.6,
        "written": rng.choice(("products", "sdpa")),
        "scaled": rng.random() < 0.75,
    }


def _draw_attention(rng: random.Random) -> Options:
    options = sizes_of(rng) | _heads(rng)
    mask = rng.choice((None, "padding", "keep", "rows", "numbers", "-inf", "-10000.0"))
    cross = rng.random() < 0.4
    return options | {
        "width": rng.randint(3, 80),
        "memory": (rng.randint(3, 80), rng.randint(2, 40)) if cross else None,
        "mask": mask,
        "is_causal": not cross and mask in (None, "padding", "keep") and rng.random() < 0.4,
        "softcap": rng.choice((None, None, 5.0, 30.0)) if options["written"] == "products" else None,
        "output": rng.random() < 0.6,
    }


def _draw_encoder(rng: random.Random) -> Options:
    options = sizes_of(rng) | _heads(rng)
    return options | {
        "layers": rng.randint(1, 2),
        "width": rng.randint(8, 96),
        "mask": rng.choice((None, "padding", "keep")),
        "is_causal": rng.random() < 0.3,
        "norm": rng.choice(("layer", "rms", "rms in fp32")),
        "norm_first": rng.random() < 0.5,
        "activation": rng.choice(("gelu", "gelu-tanh", "relu", "silu")),
        "vocabulary": rng.choice((None, 50, 400)),
        "outputs": rng.choice((1, 2)),
    }


def _draw_columns(rng: random.Random) -> Options:
    options = sizes_of(rng)
    batch, most = options["batch"]
    return options | {
        "batch": (max(batch, 2), most),  # torch.export treats a batch of one as a special case
        "heads": rng.choice((None, 2, 3, 5)),
        "score": rng.choice(("dot", "scaled-dot", "general")),
        "feature_dim": rng.randint(4, 64),
        "key_dim": rng.choice((7, 16, 32)),
        "value_dim": rng.choice((7, 16, 40)),
    }


def _draw_patches(rng: random.Random) -> Options:
    head, heads = rng.choice((8, 16, 32)), rng.randint(1, 4)
    return {
        "model": rng.choice(("patches", "classifier", "vit")),
        "batch": (rng.randint(1, 3), rng.choice((None, 5))),
        "patch": rng.choice((2, 4)),
        "grid": rng.randint(3, 7),
        "grows": rng.random() < 0.5,
        "channels": rng.choice((1, 3)),
        "width": head * heads,
        "heads": heads,
    }


# --- the models -------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention from `x` (B, n_q, width) to a memory (B, n_k, memory width), written in one of many ways.

    Args:
        width, memory_width: sizes of a token of `x` and of the memory.
        heads, key_size, value_size: number of heads, and sizes per head; value_size defaults to key_size.
        bias: whether the projections have a bias.
        written: `products` or `sdpa`.
        scaled: whether scores are divided by √key_size.
        output: whether heads are projected to width.
        softcap: scores are c·tanh(s/c).
        is_causal: whether a query only sees keys up to its own position.
        mask: meaning of the mask: `padding` (B, n_k), True for keys that are excluded; `keep` (B, n_k), True for keys
            that are kept; `rows` (n_q, n_k), True where a query may attend; `numbers` (B, n_k), integers, 1 for keys
            that are kept; `-inf` and `-10000.0` (B, n_k) are added to the scores.
    """

    def __init__(
        self,
        width: int,
        memory_width: int,
        heads: int,
        key_size: int,
        value_size: int | None,
        bias: bool,
        written: str,
        scaled: bool,
        output: bool = True,
        softcap: float | None = None,
        is_causal: bool = False,
        mask: str | None = None,
    ) -> None:
        super().__init__()
        value_size = key_size if value_size is None else value_size
        self.heads, self.written, self.softcap = heads, written, softcap
        self.is_causal, self.mask = is_causal, mask
        self.scale = 1 / math.sqrt(key_size) if scaled else 1.0
        self.query = nn.Linear(width, heads * key_size, bias=bias)
        self.key = nn.Linear(memory_width, heads * key_size, bias=bias)
        self.value = nn.Linear(memory_width, heads * value_size, bias=bias)
        self.output = nn.Linear(heads * value_size, width, bias=bias) if output else nn.Identity()

    def attend(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        query, key = split_heads(self.query(x), self.heads), split_heads(self.key(memory), self.heads)
        value = split_heads(self.value(memory), self.heads)
        allowed, added = self.masks(x, memory, mask)
        if self.written == "sdpa":
            both = added if added is not None else allowed
            context = F.scaled_dot_product_attention(query, key, value, both, scale=self.scale)
        else:
            scores = query @ key.mT * self.scale
            if self.softcap is not None:
                scores = torch.tanh(scores / self.softcap) * self.softcap
            if added is not None:
                scores = scores + added
            if allowed is not None:
                scores = scores.masked_fill(~allowed, -math.inf)
            weights = scores.softmax(-1)
            if allowed is not None:
                weights = weights.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
            context = weights @ value
        attended: Tensor = self.output(merge_heads(context))
        return attended

    def masks(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return where a query may attend, and what is added to its scores."""
        allowed, added = None, None
        if mask is not None and self.mask == "padding":
            allowed = ~mask[:, None, None, :]
        elif mask is not None and self.mask == "keep":
            allowed = mask[:, None, None, :]
        elif mask is not None and self.mask == "rows":
            allowed = mask[None, None]
        elif mask is not None and self.mask == "numbers":
            added = (1 - mask[:, None, None, :]).to(x.dtype) * -10000.0
        elif mask is not None:
            added = mask[:, None, None, :]
        if self.is_causal:
            causal = torch.ones(x.shape[1], memory.shape[1], dtype=torch.bool).tril()
            allowed = causal if allowed is None else allowed & causal
        return allowed, added


class SelfAttention(Attention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, x, mask)


class CrossAttention(Attention):
    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, memory, mask)


class RMSNorm(nn.Module):
    """`x / √(mean(x²) + ε) · g` as separate operators; in fp32 if `upcast`, as in LLaMA."""

    def __init__(self, width: int, upcast: bool) -> None:
        super().__init__()
        self.gain, self.upcast = nn.Parameter(torch.ones(width)), upcast

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() if self.upcast and x.dtype != torch.float64 else x
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return y.to(x.dtype) * self.gain


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a residual and a norm before or after it."""

    def __init__(self, width: int, norm: str, norm_first: bool, activation: str, **attention: Any) -> None:
        super().__init__()
        self.attention = SelfAttention(width, width, **attention)
        self.norms = nn.ModuleList(
            nn.LayerNorm(width) if norm == "layer" else RMSNorm(width, norm == "rms in fp32") for _ in range(2)
        )
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm_first, self.activation = norm_first, ACTIVATIONS[activation]

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        first, second = self.norms
        if self.norm_first:
            x = x + self.attention(first(x), mask)
            return x + self.feed(second(x))
        x = first(x + self.attention(x, mask))
        normed: Tensor = second(x + self.feed(x))
        return normed

    def feed(self, x: Tensor) -> Tensor:
        fed: Tensor = self.down(self.activation(self.up(x)))
        return fed


class Encoder(nn.Module):
    """Layers, on token ids if there is a vocabulary; a second output is the mean over tokens."""

    def __init__(self, layers: int, width: int, vocabulary: int | None, outputs: int, **layer: Any) -> None:
        super().__init__()
        self.embedding = nn.Identity() if vocabulary is None else nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, **layer) for _ in range(layers))
        self.outputs = outputs

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, mask)
        return x if self.outputs == 1 else (x, x.mean(1))


Sizes = tuple[int, int | None]


def _attention(
    batch: Sizes, tokens: Sizes, memory: tuple[int, int] | None, width: int, mask: str | None, **options: Any
) -> Example:
    x, queries = torch.randn(batch[0], tokens[0], width), dim_of("queries", tokens)
    args, shapes = [x], [{0: dim_of("batch", batch), 1: queries}]
    if memory is None:
        keys, length, memory_width = queries, tokens[0], width
    else:
        memory_width, length = memory
        keys = dim_of("keys", (length, None if tokens[1] is None else length + 7))
        args.append(torch.randn(batch[0], length, memory_width))
        shapes.append({0: dim_of("batch", batch), 1: keys})
    if mask is not None:
        args.append(_mask(mask, batch[0], tokens[0], length))
        shapes.append({0: queries, 1: keys} if mask == "rows" else {0: dim_of("batch", batch), 1: keys})
    kind = SelfAttention if memory is None else CrossAttention
    names = ("x", "mask") if memory is None else ("x", "memory", "mask")
    module = kind(width, memory_width, mask=mask, **options)
    return example_of(module, args, dict(zip(names, shapes, strict=False)))


def _encoder(
    batch: Sizes, tokens: Sizes, mask: str | None, vocabulary: int | None, width: int, **options: Any
) -> Example:
    size = (batch[0], tokens[0])
    args = [torch.randn(*size, width) if vocabulary is None else torch.randint(0, vocabulary, size)]
    if mask is not None:
        args.append(_mask(mask, batch[0], tokens[0], tokens[0]))
    shape = {0: dim_of("batch", batch), 1: dim_of("tokens", tokens)}
    module = Encoder(width=width, vocabulary=vocabulary, mask=mask, **options)
    return example_of(module, args, {name: dict(shape) for name, _ in zip(("x", "mask"), args, strict=False)})


def _columns(
    batch: Sizes, tokens: Sizes, heads: int | None, feature_dim: int, key_dim: int, value_dim: int, score: str
) -> Example:
    features = torch.randn(batch[0], feature_dim, tokens[0])
    module: nn.Module
    if heads is None:
        module = GeneralAttention(feature_dim, key_dim, value_dim, score=score)
    else:
        module = GeneralMultiHeadAttention(feature_dim, key_dim, value_dim, heads, 2 * value_dim, score=score)
    return example_of(module, [features], {"features": {0: dim_of("batch", batch), 2: dim_of("tokens", tokens)}})


def _patches(
    model: str, batch: Sizes, patch: int, grid: int, grows: bool, channels: int, width: int, heads: int
) -> Example:
    side = patch * grid
    shapes = {0: dim_of("batch", batch)}
    module: nn.Module
    if model == "patches":
        module = PatchAttention(channels, patch, width, heads)
        if grows:
            rows, columns = (Dim(name, min=2, max=grid + 4) for name in ("rows", "columns"))
            shapes |= {2: patch * rows, 3: patch * columns}
    elif model == "classifier":
        module = PatchAttentionClassifier(channels, side, patch, width, heads, num_layers=1)
    else:
        module = VisionTransformer(side, patch, 10, width, heads, num_layers=1, channels=channels)
    return example_of(module, [torch.rand(batch[0], channels, side, side)], {"image": shapes})


def dim_of(name: str, sizes: Sizes) -> Any:
    return Dim(name, min=1, max=sizes[1]) if sizes[1] is not None else None


def example_of(module: nn.Module, args: Sequence[Tensor], shapes: Mapping[str, Mapping[int, Any]]) -> Example:
    dynamic = {name: {i: dim for i, dim in dims.items() if dim is not None} for name, dims in shapes.items()}
    specs = {name: dims or None for name, dims in dynamic.items()} if any(dynamic.values()) else None
    return Example(module, tuple(args), specs)


def _mask(mask: str, batch: int, queries: int, keys: int) -> Tensor:
    """Return an example mask that excludes some keys but not all, if there is more than one."""
    if mask == "rows":
        kept = torch.rand(queries, keys) < 0.7
        kept[:, 0] = True
        return kept
    kept = torch.arange(keys) < torch.randint(1, keys + 1, (batch, 1))
    kept[:, -1] = False
    kept[:, 0] = True
    if mask == "padding":
        return ~kept
    if mask == "keep":
        return kept
    if mask == "numbers":
        return kept.long()
    return torch.zeros(batch, keys).masked_fill(~kept, float(mask))


KINDS: Kinds = {
    "attention": (_draw_attention, _attention),
    "encoder": (_draw_encoder, _encoder),
    "columns": (_draw_columns, _columns),
    "patches": (_draw_patches, _patches),
}
