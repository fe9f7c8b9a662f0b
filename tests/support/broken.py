"""Models that fail in 16 bits, each in one known way, and one that does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnforge.model import Example

DIM, HEADS, TOKENS = 64, 4, 24


class RMSNorm(nn.Module):
    """RMSNorm as separate operators, so that its squares are stored at the model's precision."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain


class PlainLayerNorm(nn.Module):
    """LayerNorm as separate operators, for the same reason."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = (centred * centred).mean(-1, keepdim=True)
        return centred / torch.sqrt(variance + 1e-5) * self.gain + self.shift


class Attention(nn.Module):
    def __init__(self, dim: int = DIM, heads: int = HEADS, scaled: bool = True) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.heads, self.scale = heads, 1 / math.sqrt(dim // heads) if scaled else 1.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * self.scale).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm, dim: int = DIM, **attention: bool) -> None:
        super().__init__()
        self.norm1, self.attention = norm(dim), Attention(dim, **attention)
        self.norm2 = norm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Stack(nn.Module):
    """A sequence of modules."""

    def __init__(self, *steps: nn.Module) -> None:
        super().__init__()
        self.steps = nn.Sequential(*steps)

    def forward(self, x: Tensor) -> Tensor:
        return self.steps(x)


class Scaled(nn.Module):
    """Multiplies every channel by its own factor."""

    def __init__(self, factors: Tensor) -> None:
        super().__init__()
        self.factors = nn.Parameter(factors)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors


class Shifted(nn.Module):
    """Adds a large common offset, which a later step removes."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.full((DIM,), offset))
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        lifted = self.inner(x) + self.offset
        return lifted - self.offset


class Logits(nn.Module):
    """A classifier that returns probabilities of logits that are large and close to each other."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, 10)
        with torch.no_grad():
            self.head.bias.add_(offset)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.mean(1)).softmax(-1)


class WideHead(nn.Module):
    """Attention with one wide head, without a scale."""

    def __init__(self, dim: int = 512) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(DIM, dim) for _ in range(3))
        self.out = nn.Linear(dim, DIM)
        with torch.no_grad():
            for linear in (self.query, self.key):
                linear.weight *= 2.5 * (512 / dim) ** 0.25

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        return self.out((query @ key.transpose(-2, -1)).softmax(-1) @ value)


class Broken(NamedTuple):
    """A model that fails, with the precision, location and cause.

    Attributes:
        make: builds the model, for inputs `(2, TOKENS, DIM)`.
        precision: the precision in which it fails.
        module: the module of the tensor at fault.
        operator: the operator that computes that tensor.
        cause: the diagnosed cause.
        saved: whether fp32 in some regions fixes it.
    """

    make: Callable[[], nn.Module]
    precision: str
    module: str
    operator: str
    cause: str
    saved: bool = True


def residual_stream() -> nn.Module:
    """Two branches whose sum overflows fp16 although each fits: a massive activation."""
    loud = [Block(), Block()]
    for block in loud:
        with torch.no_grad():
            last = block.mlp[2]
            assert isinstance(last, nn.Linear)
            last.bias[3] += 4e4
    return Stack(Block(), *loud, nn.LayerNorm(DIM))


def outlier_channel() -> nn.Module:
    """An outlier channel that a gain raises above fp16's range before it is scaled down again."""
    factors = torch.ones(DIM)
    factors[5] = 6e4
    return Stack(Block(), Scaled(factors), Scaled(1 / factors.sqrt()), RMSNorm(DIM), Block())


def all_times(factor: float, norm: nn.Module) -> nn.Module:
    return Stack(Scaled(torch.full((DIM,), factor)), norm, Block())


BROKEN = {
    "residual stream": Broken(residual_stream, "fp16", "steps.2", "Add", "overflow"),
    "outlier channel": Broken(outlier_channel, "fp16", "steps.1", "Mul", "overflow"),
    "RMSNorm": Broken(lambda: all_times(300.0, RMSNorm(DIM)), "fp16", "steps.1", "Pow", "norm"),
    "LayerNorm": Broken(lambda: all_times(300.0, PlainLayerNorm(DIM)), "fp16", "steps.1", "Mul", "norm"),
    "RMSNorm of little": Broken(lambda: all_times(1e-4, RMSNorm(DIM)), "fp16", "steps.1", "Pow", "norm"),
    "unscaled, head of 512": Broken(lambda: WideHead(512), "fp16", "WideHead", "Softmax", "softmax"),
    "unscaled, head of 256": Broken(lambda: WideHead(256), "fp16", "WideHead", "Softmax", "softmax"),
    "logits": Broken(lambda: Stack(Block(), Logits(2000.0)), "fp16", "steps.1", "Softmax", "cancellation"),
    "cancellation": Broken(lambda: Stack(Block(), Shifted(100.0), Block()), "bf16", "steps.1", "Sub", "cancellation"),
}


def healthy() -> nn.Module:
    return Stack(Block(), Block(), nn.LayerNorm(DIM))


def made(make: Callable[[], nn.Module], seed: int = 0) -> Example:
    """Build a model with random weights, and its inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Example(make().eval(), (torch.randn(2, TOKENS, DIM),), None)
