"""Random models whose inputs divide, scale, index or are summed, each drawn from a seed.

They cover common code around attention: temperatures and guidance scales, timesteps, float masks and
gates, norms and logarithms of inputs, cumulative sums, lengths, positions and token types; outputs of one number, of
indices, in tuples and dicts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnforge.model.registry import Example
from tests.support.random_models import (
    PRECISIONS,
    Kinds,
    Options,
    Recipe,
    SelfAttention,
    Sizes,
    dim_of,
    example_of,
    make,
    sizes_of,
)


def draw_hostile(seed: int) -> Recipe:
    """Draw the recipe of a seed."""
    rng = random.Random(f"hostile {seed}")
    precision, kind = rng.choice(PRECISIONS), rng.choice(tuple(HOSTILE))
    weights = round(0.5 * 4 ** rng.random(), 3)
    return Recipe(seed, kind, precision, weights, _common(rng) | HOSTILE[kind][0](rng))


def make_hostile(recipe: Recipe) -> Example:
    """Build the model of a recipe of :func:`draw_hostile`."""
    return make(recipe, HOSTILE)


def _common(rng: random.Random) -> Options:
    heads, head_dim = rng.randint(1, 4), rng.choice((4, 8, 16, 32))
    return {**sizes_of(rng), "heads": heads, "width": heads * head_dim, "written": rng.choice(("products", "sdpa"))}


class _Block(SelfAttention):
    """Self-attention of the model's width."""

    def __init__(self, width: int, heads: int, written: str) -> None:
        super().__init__(width, width, heads, width // heads, None, bias=True, written=written, scaled=True)


# --- temperatures -----------------------------------------------------------------------------------------------------


HOW: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "divides": lambda x, t: x / t,
    "multiplies": lambda x, t: x * t,
    "exponentiates": lambda x, t: x * t.exp(),
    "exponentiates, bounded": lambda x, t: x * t.exp().clamp(max=100.0),  # like CLIP's logit scale
    "is divided": lambda x, t: x * (1 / t),
    "divides, bounded": lambda x, t: x / t.clamp(min=1e-2),
}
"""How a temperature scales numbers."""


class Temperature(nn.Module):
    """Attention whose scores, or a classifier whose logits, are scaled by an input.

    Args:
        where: `scores` or `logits`.
        how: one of :data:`HOW`.
        outputs: `logits`; `probabilities`; `dict`, with the probabilities, the classes and the entropy; `loss`, one
            number.
    """

    def __init__(self, width: int, heads: int, written: str, where: str, how: str, outputs: str) -> None:
        super().__init__()
        self.block = _Block(width, heads, written)
        self.head = nn.Linear(width, 10)
        self.where, self.scale, self.outputs = where, HOW[how], outputs

    def forward(self, x: Tensor, temperature: Tensor) -> Tensor | dict[str, Tensor]:
        logits: Tensor
        if self.where == "scores":
            block = self.block
            query, key, value = (
                part(x).unflatten(-1, (block.heads, -1)).transpose(1, 2)
                for part in (block.query, block.key, block.value)
            )
            weights = self.scale(query @ key.mT * block.scale, temperature).softmax(-1)
            logits = self.head(block.output((weights @ value).transpose(1, 2).flatten(2)).mean(1))
        else:
            scale = temperature.flatten(1) if temperature.ndim == 4 else temperature
            logits = self.scale(self.head(self.block(x, None).mean(1)), scale)
        if self.outputs == "logits":
            return logits
        if self.outputs == "loss":
            return torch.logsumexp(logits, -1).mean()
        probabilities: Tensor = logits.softmax(-1)
        if self.outputs == "probabilities":
            return probabilities
        entropy = -(probabilities * (probabilities + 1e-6).log()).sum(-1)
        return {"probabilities": probabilities, "class": logits.argmax(-1), "entropy": entropy}


def _draw_temperature(rng: random.Random) -> Options:
    return {
        "shape": rng.choice(("number", "one", "sample")),
        "where": rng.choice(("scores", "scores", "logits")),
        "how": rng.choice(tuple(HOW)),
        "outputs": rng.choice(("logits", "probabilities", "dict", "loss")),
    }


def _temperature(batch: Sizes, tokens: Sizes, width: int, shape: str, **options: Any) -> Example:
    x = torch.randn(batch[0], tokens[0], width)
    temperature = torch.rand({"number": (), "one": (1,), "sample": (batch[0], 1, 1, 1)}[shape]) + 0.5
    dims = {"x": _sequence(batch, tokens), "temperature": {0: dim_of("batch", batch)} if shape == "sample" else {}}
    return example_of(Temperature(width, **options), [x, temperature], dims)


# --- guidance ---------------------------------------------------------------------------------------------------------


class Guidance(nn.Module):
    """Classifier-free guidance: `u + g (c − u)`, optionally rescaled to the deviation of `c`."""

    def __init__(self, width: int, heads: int, written: str, rescales: bool, number: bool) -> None:
        super().__init__()
        self.block = _Block(width, heads, written)
        self.condition = nn.Linear(width, width)
        self.rescales, self.number = rescales, number

    def forward(self, x: Tensor, condition: Tensor, guidance: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        free = self.block(x, None)
        bound = self.block(x + self.condition(condition)[:, None], None)
        guided = free + guidance * (bound - free)
        if self.rescales:
            guided = guided * (bound.std((1, 2), keepdim=True) / guided.std((1, 2), keepdim=True))
        return (guided, (guided - free).pow(2).mean()) if self.number else guided


def _draw_guidance(rng: random.Random) -> Options:
    return {"rescales": rng.random() < 0.4, "number": rng.random() < 0.5, "shape": rng.choice(("number", "sample"))}


def _guidance(batch: Sizes, tokens: Sizes, width: int, shape: str, **options: Any) -> Example:
    x, condition = torch.randn(batch[0], tokens[0], width), torch.randn(batch[0], width)
    guidance = torch.rand(() if shape == "number" else (batch[0], 1, 1)) * 7 + 1
    samples = {0: dim_of("batch", batch)}
    dims = {"x": _sequence(batch, tokens), "condition": samples, "guidance": samples if shape == "sample" else {}}
    return example_of(Guidance(width, **options), [x, condition, guidance], dims)


# --- timesteps --------------------------------------------------------------------------------------------------------


class Modulated(nn.Module):
    """A block of a diffusion transformer: a norm's shift and scale, and a gate, follow from a timestep.

    Args:
        time: `float` from 0 to 1, times a thousand, or `index` up to 999.
        gated: whether a gate per token is an input too: `sigmoid`, `times` or None.
    """

    def __init__(self, width: int, heads: int, written: str, time: str, gated: str | None) -> None:
        super().__init__()
        self.block = _Block(width, heads, written)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, 3 * width))
        self.time, self.gated = time, gated

    def forward(self, x: Tensor, time: Tensor, gate: Tensor | None = None) -> Tensor:
        frequency = torch.exp(torch.arange(8, dtype=torch.float32) * (-math.log(10_000) / 8))
        time = time.float() * 1000 if self.time == "float" else time.float()
        angle = time[:, None] * frequency
        embedded = torch.cat((angle.cos(), angle.sin()), -1).to(x.dtype)
        shift, scale, gain = self.modulation(embedded)[:, None].chunk(3, -1)
        y: Tensor = gain * self.block(self.norm(x) * (1 + scale) + shift, None)
        if gate is not None:
            y = y * (gate.sigmoid() if self.gated == "sigmoid" else gate)
        return x + y


def _draw_modulated(rng: random.Random) -> Options:
    return {"time": rng.choice(("float", "index")), "gated": rng.choice((None, "sigmoid", "times"))}


def _modulated(batch: Sizes, tokens: Sizes, width: int, time: str, gated: str | None, **options: Any) -> Example:
    x = torch.randn(batch[0], tokens[0], width)
    times = torch.rand(batch[0]) if time == "float" else torch.randint(0, 1000, (batch[0],))
    args, dims = [x, times], {"x": _sequence(batch, tokens), "time": {0: dim_of("batch", batch)}}
    if gated is not None:
        args.append(torch.rand(batch[0], tokens[0], 1))
        dims["gate"] = _sequence(batch, tokens)
    return example_of(Modulated(width, time=time, gated=gated, **options), args, dims)


# --- pooling ----------------------------------------------------------------------------------------------------------


class Pooled(nn.Module):
    """Sentence embeddings: tokens pooled under a float mask, normalised.

    Args:
        pooling: `mean` over the mask; `max`; `weighted` by a softmax over a score of each token.
        normalised: `norm`, by F.normalize; `plain`, by the norm itself; None.
        smallest: lower bound of the number of tokens.
        outputs: `embedding`; `tuple`, with the tokens; `similarity`, to the batch's first, one number per sample.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        written: str,
        pooling: str,
        normalised: str | None,
        smallest: float,
        outputs: str,
    ) -> None:
        super().__init__()
        self.block, self.score = _Block(width, heads, written), nn.Linear(width, 1)
        self.pooling, self.normalised, self.smallest, self.outputs = pooling, normalised, smallest, outputs

    def forward(self, x: Tensor, mask: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        tokens: Tensor = self.block(x, None)
        weights = mask[..., None]
        if self.pooling == "mean":
            pooled = (tokens * weights).sum(1) / weights.sum(1).clamp(min=self.smallest)
        elif self.pooling == "max":
            pooled = (tokens + (1 - weights) * -100.0).amax(1)
        else:
            pooled = (tokens * (self.score(tokens) + (1 - weights) * -100.0).softmax(1)).sum(1)
        if self.normalised == "norm":
            pooled = F.normalize(pooled, dim=-1)
        elif self.normalised == "plain":
            pooled = pooled / pooled.norm(dim=-1, keepdim=True)
        if self.outputs == "similarity":
            return pooled @ pooled[0]
        return pooled if self.outputs == "embedding" else (tokens, pooled)


def _draw_pooled(rng: random.Random) -> Options:
    return {
        "pooling": rng.choice(("mean", "mean", "max", "weighted")),
        "normalised": rng.choice(("norm", "plain", None)),
        "smallest": rng.choice((1e-9, 1e-3, 1.0)),
        "outputs": rng.choice(("embedding", "tuple", "similarity")),
    }


def _pooled(batch: Sizes, tokens: Sizes, width: int, **options: Any) -> Example:
    kept = torch.arange(tokens[0]) < torch.randint(1, tokens[0] + 1, (batch[0], 1))
    kept[:, -1] = tokens[0] == 1
    args = [torch.randn(batch[0], tokens[0], width), kept.float()]
    return example_of(Pooled(width, **options), args, {"x": _sequence(batch, tokens), "mask": _sequence(batch, tokens)})


# --- integer inputs ---------------------------------------------------------------------------------------------------


class Indexed(nn.Module):
    """An encoder of token ids, positions, token types and lengths; an index selects one of its tokens.

    Args:
        positions: `learned`, `sines` or `rotary`.
        picked: `index`, an input; `last`, the token before the length; `first`.
        outputs: `logits`; `dict`, of logits, the class and the tokens; `top`, the three best classes and logits;
            `sure`, whether a class has more than half of the probability, and its probability.
    """

    def __init__(self, width: int, heads: int, written: str, positions: str, picked: str, outputs: str) -> None:
        super().__init__()
        self.words, self.types = nn.Embedding(50, width), nn.Embedding(2, width)
        self.places, self.block = nn.Embedding(64, width), _Block(width, heads, written)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 12)
        self.block.mask = "keep"
        self.positions, self.picked, self.outputs = positions, picked, outputs

    def forward(
        self, ids: Tensor, positions: Tensor, types: Tensor, lengths: Tensor, index: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor] | dict[str, Tensor]:
        x = self.words(ids) + self.types(types)
        if self.positions == "learned":
            x = x + self.places(positions)
        else:
            half = x.shape[-1] // 2
            frequency = torch.exp(torch.arange(half, dtype=torch.float32) * (-math.log(10_000) / half))
            angle = positions[..., None].float() * frequency
            sine, cosine = angle.sin().to(x.dtype), angle.cos().to(x.dtype)
            if self.positions == "sines":
                x = x + torch.cat((sine, cosine), -1)
            else:
                first, second = x.chunk(2, -1)
                x = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
        tokens = self.norm(x + self.block(x, torch.arange(ids.shape[1]) < lengths[:, None]))
        last = ids.shape[1] - 1
        if index is not None:
            picked = tokens.gather(1, index.clamp(max=last)[:, None, None].expand(-1, 1, tokens.shape[-1]))[:, 0]
        elif self.picked == "last":
            picked = tokens[torch.arange(ids.shape[0]), (lengths - 1).clamp(0, last)]
        else:
            picked = tokens[:, 0]
        logits: Tensor = self.head(picked)
        if self.outputs == "dict":
            return {"logits": logits, "class": logits.argmax(-1), "tokens": tokens}
        if self.outputs == "top":
            best, classes = logits.topk(3, -1)
            return best, classes
        if self.outputs == "sure":
            likeliest = logits.softmax(-1).amax(-1)
            return likeliest > 0.5, likeliest
        return logits


def _draw_indexed(rng: random.Random) -> Options:
    return {
        "positions": rng.choice(("learned", "sines", "rotary")),
        "picked": rng.choice(("index", "last", "first")),
        "outputs": rng.choice(("logits", "dict", "top", "sure")),
    }


def _indexed(batch: Sizes, tokens: Sizes, picked: str, **options: Any) -> Example:
    size = (batch[0], tokens[0])
    args = [
        torch.randint(0, 50, size),
        torch.arange(tokens[0]).repeat(batch[0], 1),
        torch.randint(0, 2, size),
        torch.randint(1, tokens[0] + 1, batch[:1]),
    ]
    dims: dict[str, Any] = {name: _sequence(batch, tokens) for name in ("ids", "positions", "types")}
    dims["lengths"] = {0: dim_of("batch", batch)}
    if picked == "index":
        args.append(torch.randint(0, tokens[0], batch[:1]))
        dims["index"] = {0: dim_of("batch", batch)}
    return example_of(Indexed(picked=picked, **options), args, dims)


# --- running sums -----------------------------------------------------------------------------------------------------


class Decayed(nn.Module):
    """Attention with a mixer that sums over the tokens so far: linear attention, a decayed state, or ALiBi's bias
    from the running sum of a mask."""

    def __init__(self, width: int, heads: int, written: str, mixer: str) -> None:
        super().__init__()
        self.block, self.mixer = _Block(width, heads, written), mixer
        self.value = nn.Linear(width, width)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        value = self.value(x)
        if self.mixer == "decay":  # Σ exp(Σ −softplus(steps)) v
            decay = (-F.softplus(steps)).cumsum(1)[..., None]
            mixed = (value * (-decay).clamp(max=8.0).exp()).cumsum(1) * decay.clamp(min=-8.0).exp()
        elif self.mixer == "linear":
            weights = F.elu(steps)[..., None] + 1
            mixed = (value * weights).cumsum(1) / (weights.cumsum(1) + 1e-3)
        elif self.mixer == "mean":
            count = torch.ones_like(steps).cumsum(1)[..., None]
            mixed = (value * steps[..., None]).cumsum(1) / count
        else:
            mixed = value * torch.exp(-steps.abs().cumsum(1))[..., None]
        result: Tensor = x + self.block(x, None) + mixed
        return result


def _draw_decayed(rng: random.Random) -> Options:
    return {"mixer": rng.choice(("decay", "linear", "mean", "exponential"))}


def _decayed(batch: Sizes, tokens: Sizes, width: int, **options: Any) -> Example:
    args = [torch.randn(batch[0], tokens[0], width), torch.rand(batch[0], tokens[0])]
    return example_of(
        Decayed(width, **options), args, {"x": _sequence(batch, tokens), "steps": _sequence(batch, tokens)}
    )


# --- functions of the input -------------------------------------------------------------------------------------------


OF_INPUT: dict[str, Callable[[Tensor], Tensor]] = {
    "log": lambda x: (x.abs() + 1e-3).log(),
    "log, bounded": lambda x: x.clamp(min=1e-3).log(),  # like log-mel spectrograms
    "log1p": lambda x: x.abs().log1p(),
    "exp": torch.exp,
    "sqrt": lambda x: x.abs().sqrt(),
    "reciprocal": lambda x: 1 / (x.abs() + 0.1),
    "square": lambda x: x * x,
    "cube": lambda x: x**3,
    "normalize": lambda x: F.normalize(x, dim=-1),
    "norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "rms": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "standard": lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5),
    "share": lambda x: x.abs() / (x.abs().sum(-1, keepdim=True) + 1e-3),
    "largest": lambda x: x / x.abs().amax((1, 2), keepdim=True),
}
"""Functions applied to the input first."""


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda y: y.mean(),
    "energy": lambda y: y.pow(2).sum(),
    "logsumexp": lambda y: y.exp().sum().log(),
}
"""Reductions to one number."""


class OfInput(nn.Module):
    """Attention on a function of the input, with one number as an additional, or only, output."""

    def __init__(self, width: int, heads: int, written: str, function: str, outputs: str) -> None:
        super().__init__()
        self.block, self.function, self.outputs = _Block(width, heads, written), OF_INPUT[function], outputs

    def forward(self, x: Tensor, offset: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y: Tensor = self.block(self.function(x) + offset, None)
        if self.outputs == "tokens":
            return y
        return y, NUMBERS[self.outputs](y)


def _draw_of_input(rng: random.Random) -> Options:
    return {
        "function": rng.choice(tuple(OF_INPUT)),
        "outputs": rng.choice(("tokens", *NUMBERS)),
        "offset": rng.choice(("width", "number")),
    }


def _of_input(batch: Sizes, tokens: Sizes, width: int, offset: str, **options: Any) -> Example:
    args = [torch.randn(batch[0], tokens[0], width), torch.randn(width if offset == "width" else ())]
    return example_of(OfInput(width, **options), args, {"x": _sequence(batch, tokens), "offset": {}})


def _sequence(batch: Sizes, tokens: Sizes) -> dict[int, Any]:
    return {0: dim_of("batch", batch), 1: dim_of("tokens", tokens)}


HOSTILE: Kinds = {
    "temperature": (_draw_temperature, _temperature),
    "guidance": (_draw_guidance, _guidance),
    "modulated": (_draw_modulated, _modulated),
    "pooled": (_draw_pooled, _pooled),
    "indexed": (_draw_indexed, _indexed),
    "decayed": (_draw_decayed, _decayed),
    "of input": (_draw_of_input, _of_input),
}
