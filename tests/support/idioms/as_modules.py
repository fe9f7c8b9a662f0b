"""Whole attention modules, as in well-known code bases.

x is (B, n, 64), memory (B, m, 64). All are exported with static sizes, and with `dynamic=True` also with dynamic dims.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.idioms.catalogue import HEAD_DIM, HEADS, SCALE, SUMS_IN_16_BITS, WIDTH, OnHeads, as_module
from tests.support.idioms.on_heads import heads_merged_after


@as_module()
class ChunkedAndViewed(nn.Module):
    """As in nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn_dropout = nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, x: Tensor) -> Any:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        k = k.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        q = q.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        v = v.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))  # type: ignore[index]
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


@as_module(dynamic=True)
class BatchTimesHeads(nn.Module):
    """As in diffusers: heads folded into the batch, einsum, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor) -> Any:
        q, k, v = (
            rearrange(to(source), "b n (h d) -> (b h) n d", h=HEADS)
            for to, source in ((self.to_q, x), (self.to_k, memory), (self.to_v, memory))
        )
        attn = (torch.einsum("b i d, b j d -> b i j", q, k) * SCALE).softmax(dim=-1)
        return rearrange(torch.einsum("b i j, b j d -> b i d", attn, v), "(b h) n d -> b n (h d)", h=HEADS)


@as_module()
class CrossAttention(nn.Module):
    """Queries from one sequence, keys and values from another one of different length."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Any:
        q = rearrange(self.q(x), "b n (h d) -> b h n d", h=HEADS)
        k, v = rearrange(self.kv(memory), "b m (two h d) -> two b h m d", two=2, h=HEADS)
        return rearrange((q @ k.mT * SCALE).softmax(-1) @ v, "b h n d -> b n (h d)")


@as_module(dynamic=True)
class Columns(nn.Module):
    """Features are rows and tokens columns, as after a 1×1 convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = nn.Conv1d(WIDTH, 3 * WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Any:
        q, k, v = (t.unflatten(1, (HEADS, HEAD_DIM)) for t in self.to_qkv(x.mT).chunk(3, dim=1))  # (B, h, d, n)
        attn = (q.transpose(2, 3) @ k / math.sqrt(HEAD_DIM)).softmax(dim=-1)  # (B, h, n, n)
        return (v @ attn.transpose(2, 3)).flatten(1, 2)  # (B, h·d, n)


@as_module()
class WeightsByHead(nn.Module):
    """One weight per head, and einsum for everything."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Parameter(torch.randn(HEADS, WIDTH, HEAD_DIM) / 8) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        q, k, v = (torch.einsum("bnc,hcd->bnhd", x, w) for w in (self.q, self.k, self.v))
        attn = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(HEAD_DIM), dim=-1)
        return torch.einsum("bqhd,hcd->bqc", torch.einsum("bhqk,bkhd->bqhd", attn, v), self.o)


@as_module(dynamic=True)
class Unbatched(nn.Module):
    """Two dims: one sequence, one head."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH) / 8)

    def forward(self, x: Tensor) -> Any:
        q, k, v = torch.mm(x[0], self.w).chunk(3, dim=1)
        return torch.mm(torch.softmax(torch.mm(q, k.t()) / math.sqrt(WIDTH), dim=1), v)


@as_module()
class UnbatchedHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Any:
        q, k, v = (t.view(-1, HEADS, HEAD_DIM).transpose(0, 1) for t in self.qkv(x[0]).chunk(3, dim=-1))
        return ((q @ k.mT * SCALE).softmax(-1) @ v).transpose(0, 1).reshape(-1, WIDTH)


@as_module()
class SingleHead(nn.Module):
    """Three dims and torch.bmm."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        scores = torch.bmm(self.query(x), self.key(x).transpose(1, 2)) / WIDTH**0.5
        return torch.bmm(F.softmax(scores, dim=-1), self.value(x))


@as_module(sites=3, not_yet={"static": "the builder fails in its own optimiser"})
class HeadByHead(nn.Module):
    """A list of heads, each a separate module."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(SingleHead() for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        return torch.cat([head(x) for head in self.heads], dim=-1)


@as_module(
    dynamic=True,
    not_yet={"dynamic": "one head and a bias: the builder merges the check for queries without keys into the softmax"},
)
class SingleHeadWithBias(SingleHead):
    def forward(self, x: Tensor, bias: Tensor) -> Any:  # type: ignore[override]
        scores = torch.bmm(self.query(x), self.key(x).transpose(1, 2)) / WIDTH**0.5
        return torch.bmm(F.softmax(scores + bias[0], dim=-1), self.value(x))


@as_module(dynamic=True)
class Latents(nn.Module):
    """Learned queries, shared by the batch: Perceiver, DETR, attention pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.kv = nn.Parameter(torch.randn(5, WIDTH)), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Any:
        q = torch.unflatten(self.latents, -1, (HEADS, HEAD_DIM)).transpose(0, 1)  # (h, 5, d)
        k, v = (t.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for t in self.kv(x).chunk(2, dim=-1))
        return ((q @ k.mT * SCALE).softmax(-1) @ v).transpose(1, 2).flatten(2)


@as_module()
class Pooling(nn.Module):
    """One score per token."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Any:
        return self.score(x).transpose(1, 2).softmax(-1) @ x


@as_module(not_yet={"static": SUMS_IN_16_BITS})
class PoolingBySum(Pooling):
    """The same, with the product as a sum."""

    def forward(self, x: Tensor) -> Any:
        return (self.score(x).softmax(dim=1) * x).sum(dim=1)


@as_module()
class ScaleByHead(nn.Module):
    """A learned temperature per head, on cosines: Swin v2."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.logit_scale = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.randn(HEADS, 1, 1))

    def forward(self, x: Tensor, bias: Tensor) -> Any:
        q, k, v = (t.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        attn = attn * self.logit_scale.clamp(max=4.6).exp() + bias.unsqueeze(0)
        return (attn.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)


@as_module(dynamic=True, sites=2)
class ClassToken(nn.Module):
    """n + 1 tokens, two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.layers = nn.ModuleList(OnHeads(heads_merged_after) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        for layer in self.layers:
            x = x + layer(x)
        return x[:, 0]


@as_module()
class TorchMultihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Any:
        return self.attention(x, memory, memory, need_weights=False)[0]


@as_module()
class TorchMultiheadPadded(TorchMultihead):
    def forward(self, x: Tensor, padding: Tensor) -> Any:
        padding = padding & ~padding.all(-1, keepdim=True)  # torch's code paths agree only for this
        return self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]


@as_module()
class TorchMultiheadTokensFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Any:
        x = x.transpose(0, 1)
        return self.attention(x, x, x, need_weights=False)[0]


@as_module()
class TorchEncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


@as_module()
class Windows(nn.Module):
    """Five dims: windows of four tokens, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Any:
        qkv = rearrange(self.qkv(x), "b (w n) (three h d) -> three b w h n d", three=3, h=HEADS, n=4)
        q, k, v = qkv.unbind(0)
        return rearrange((q @ k.mT * SCALE).softmax(-1) @ v, "b w h n d -> b (w n) (h d)")


@as_module()
class ShiftedWindows(Windows):
    """Swin's mask: one per window, added while windows have a separate dim."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = rearrange(self.qkv(x), "b (w n) (three h d) -> three (b w) h n d", three=3, h=HEADS, n=4).unbind(0)
        mask = torch.zeros(3, 4, 4, dtype=x.dtype)
        mask[1, :2, 2:] = -100.0
        attn = q @ k.transpose(-2, -1) * SCALE
        attn = attn.view(-1, 3, HEADS, 4, 4) + mask.unsqueeze(1).unsqueeze(0)
        attn = attn.view(-1, HEADS, 4, 4).softmax(dim=-1)
        return (attn @ v).transpose(1, 2).reshape(-1, 12, WIDTH)
