"""S12, a decoder: causal attention over tokens, with and without a cache of keys and values.

:class:`Decoder` is the pre-norm Transformer of current language models: token embedding, layers of causal attention and
a feed-forward network, a final norm, and a head. Its sizes select the usual parts: Llama's (rotary positions, RMSNorm,
SwiGLU, fewer key heads than query heads), GPT-2's (learned positions, LayerNorm, GELU), Mistral's window and Gemma 2's
soft cap. ``forward`` is the function of the whole sequence, and is what gets exported; :meth:`Decoder.step` computes
the same logits a few tokens at a time.

Sources: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; Radford et al. 2019 (GPT-2); Touvron et al. 2023
(Llama), https://arxiv.org/abs/2302.13971; and those named at the parts. Style: gpt-fast's ``model.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnforge.errors import ShapeError, UsageError, check_known
from attnforge.model.attention import attention, merge_heads, require_positive, split_heads, split_width
from attnforge.model.transformer import FeedForward


@dataclass(frozen=True)
class DecoderSizes:
    """The sizes of a decoder and which parts it has.

    Attributes:
        vocab_size: number of token ids, which are 0 ... vocab_size - 1.
        embed_dim: features per token.
        num_heads: query heads, each embed_dim / num_heads wide.
        num_layers: number of layers.
        max_tokens: number of positions; no sequence is longer.
        num_kv_heads: heads of keys and values, each shared by num_heads / num_kv_heads consecutive query heads; None
            means num_heads (multi-head attention), 1 is multi-query attention.
        hidden_dim: width of the feed-forward network; None means 4 · embed_dim, and for SwiGLU, which has three
            matrices instead of two, two thirds of that, rounded up to a multiple of 16.
        positions: "rotary" (queries and keys are rotated) or "learned" (a table is added to the embedding).
        norm: "rms" (RMSNorm) or "layer" (LayerNorm), before attention, before the feed-forward network, and at the end.
        feed_forward: "swiglu", "gelu" (exact) or "gelu-tanh" (GPT-2's approximation).
        bias: whether the projections, the feed-forward network and LayerNorm have a bias; the head has none.
        window: a token sees the last ``window`` tokens, including itself; None means all earlier ones.
        soft_cap: scores s become soft_cap · tanh(s / soft_cap); None leaves them unchanged.
        tied: whether the head uses the embedding's matrix.

    Raises ShapeError for a size below 1 and for numbers of heads that do not divide, UnknownNameError for an unknown
    part.

    Sources: grouped-query attention: Ainslie et al. 2023, https://arxiv.org/abs/2305.13245; window: Jiang et al. 2023
    (Mistral), https://arxiv.org/abs/2310.06825; soft cap: Gemma 2, https://arxiv.org/abs/2408.00118, section 2.
    """

    vocab_size: int
    embed_dim: int
    num_heads: int
    num_layers: int
    max_tokens: int
    num_kv_heads: int | None = None
    hidden_dim: int | None = None
    positions: str = "rotary"
    norm: str = "rms"
    feed_forward: str = "swiglu"
    bias: bool = False
    window: int | None = None
    soft_cap: float | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        check_known("positions", self.positions, ("rotary", "learned"))
        check_known("norm", self.norm, ("rms", "layer"))
        check_known("feed_forward", self.feed_forward, ("swiglu", "gelu", "gelu-tanh"))
        require_positive(vocab_size=self.vocab_size, num_layers=self.num_layers, max_tokens=self.max_tokens)
        require_positive(kv_heads=self.kv_heads, feed_forward_dim=self.feed_forward_dim)
        if self.window is not None:
            require_positive(window=self.window)
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ShapeError(f"soft_cap is {self.soft_cap}; give a positive number, or None for no cap")
        if self.num_heads % self.kv_heads:
            raise ShapeError(
                f"num_heads {self.num_heads} with num_kv_heads {self.kv_heads}; choose num_kv_heads that divide it"
            )
        if self.positions == "rotary" and self.head_dim % 2:
            raise ShapeError(f"head_dim {self.head_dim}; rotary positions rotate pairs of features, so it must be even")

    @property
    def head_dim(self) -> int:
        """Features of a head; raises ShapeError if num_heads does not divide embed_dim."""
        return split_width("embed_dim", self.embed_dim, self.num_heads)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def feed_forward_dim(self) -> int:
        """Hidden features of the feed-forward network."""
        if self.hidden_dim is not None:
            return self.hidden_dim
        return -(-8 * self.embed_dim // 3 // 16) * 16 if self.feed_forward == "swiglu" else 4 * self.embed_dim


@dataclass(frozen=True)
class KeyValueCache:
    """Keys and values of the tokens so far: for every layer one tensor of fixed size, which steps update in place.

    Shapes: each (batch, kv_heads, cache_tokens, head_dim). The token at position p of a row is at index p; keys are
    stored with their rotary positions applied. Slots after a row's tokens are masked, but must be finite.

    Attributes:
        keys: one tensor per layer.
        values: one tensor per layer.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


class RotaryPositions(nn.Module):
    """Cosine and sine of the angles by which queries and keys are rotated: ``θ[p, i] = p / 10000^(2i/d)``.

    Shapes: positions (batch or 1, n) int64 below max_tokens; result two tensors (batch or 1, 1, n, head_dim), whose
    second half repeats the first. The tables are buffers: they follow ``.to`` and are not in the state dict.

    Source: Su et al. 2021 (RoFormer), https://arxiv.org/abs/2104.09864, section 3.2.2; features i and i + d/2 are a
    pair, as in GPT-NeoX and transformers' Llama, while the paper pairs 2i and 2i + 1.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_tokens: int) -> None:
        super().__init__()
        rate = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angle = (torch.arange(max_tokens, dtype=torch.float64)[:, None] * rate).repeat(1, 2)  # (max_tokens, head_dim)
        self.register_buffer("cos", angle.cos().to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("sin", angle.sin().to(torch.get_default_dtype()), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every pair (x1, x2) of features by its angle: ``(x1 cos - x2 sin, x2 cos + x1 sin)``.

    Shapes: x (batch, heads, n, d), cos and sin broadcastable to it; feature i is paired with feature i + d/2.

    Source: Su et al. 2021 (RoFormer), https://arxiv.org/abs/2104.09864, equation 34.
    """
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-x2, x1], dim=-1) * sin


def may_attend(query_positions: Tensor, key_positions: Tensor, window: int | None = None) -> Tensor:
    """Return True where a query may attend: to keys up to its own position, and with a window only to the last of them.

    Shapes: query_positions (batch or 1, n), key_positions (batch or 1, m), int64; result (batch or 1, 1, n, m), bool.
    """
    distance = query_positions[:, None, :, None] - key_positions[:, None, None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


class CausalAttention(nn.Module):
    """Grouped-query attention: ``Concat_i softmax(Q_i K_jᵀ / √d) V_j Wᴼ`` with j = ⌊i · kv_heads / num_heads⌋.

    Shapes: x (batch, n, embed_dim); mask (batch or 1, 1, n, m), bool, True = may attend; rotation as
    :class:`RotaryPositions` returns it, or None; result like x. Without a cache m = n. A cache consists of this layer's
    keys and values (batch, kv_heads, cache_tokens, head_dim) and the positions (batch, n) of the new tokens; the new
    keys and values are written to it first, and m = cache_tokens.

    Source: Ainslie et al. 2023, https://arxiv.org/abs/2305.13245, section 2.2.
    """

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.num_heads, self.kv_heads, self.soft_cap = sizes.num_heads, sizes.kv_heads, sizes.soft_cap
        self.scale = 1 / math.sqrt(sizes.head_dim)
        self.query_proj = nn.Linear(sizes.embed_dim, sizes.embed_dim, bias=sizes.bias)
        self.key_proj = nn.Linear(sizes.embed_dim, sizes.kv_heads * sizes.head_dim, bias=sizes.bias)
        self.value_proj = nn.Linear(sizes.embed_dim, sizes.kv_heads * sizes.head_dim, bias=sizes.bias)
        self.output_proj = nn.Linear(sizes.embed_dim, sizes.embed_dim, bias=sizes.bias)

    def forward(
        self,
        x: Tensor,
        mask: Tensor,
        rotation: tuple[Tensor, Tensor] | None = None,
        cache: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:
        query = split_heads(self.query_proj(x), self.num_heads)  # (batch, num_heads, n, head_dim)
        key = split_heads(self.key_proj(x), self.kv_heads)  # (batch, kv_heads, n, head_dim)
        value = split_heads(self.value_proj(x), self.kv_heads)
        if rotation is not None:
            query, key = rotate(query, *rotation), rotate(key, *rotation)
        if cache is not None:
            keys, values, positions = cache
            key, value = write(keys, key, positions), write(values, value, positions)  # m = cache_tokens
        if self.kv_heads < self.num_heads:
            groups = self.num_heads // self.kv_heads
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        context = attention(query, key, value, scale=self.scale, attn_mask=mask, soft_cap=self.soft_cap)
        return self.output_proj(merge_heads(context))  # (batch, n, embed_dim)


def write(cache: Tensor, new: Tensor, positions: Tensor) -> Tensor:
    """Write ``new`` (batch, heads, n, d) into ``cache`` (batch, heads, cache_tokens, d) at ``positions`` (batch, n)."""
    rows = torch.arange(len(cache), device=cache.device)[:, None]  # (batch, 1)
    cache[rows, :, positions] = new.transpose(1, 2)
    return cache


class SwiGLU(nn.Module):
    """The gated feed-forward network ``(swish(x W1) ⊙ x W3) W2`` with ``swish(z) = z · sigmoid(z)``.

    Shapes: x (..., embed_dim); result the same.

    Source: Shazeer 2020, https://arxiv.org/abs/2002.05202, equation 6.
    """

    def __init__(self, embed_dim: int, hidden_dim: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(embed_dim, hidden_dim, bias=bias)
        self.up_proj = nn.Linear(embed_dim, hidden_dim, bias=bias)
        self.down_proj = nn.Linear(hidden_dim, embed_dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """``x = x + attention(norm1(x))``, ``x = x + feed_forward(norm2(x))``; arguments as in :class:`CausalAttention`."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.norm1, self.norm2 = named_norm(sizes), named_norm(sizes)
        self.attention = CausalAttention(sizes)
        self.feed_forward: SwiGLU | FeedForward
        if sizes.feed_forward == "swiglu":
            self.feed_forward = SwiGLU(sizes.embed_dim, sizes.feed_forward_dim, sizes.bias)
        else:
            self.feed_forward = FeedForward(
                sizes.embed_dim, sizes.feed_forward_dim, sizes.feed_forward, bias=sizes.bias
            )

    def forward(
        self,
        x: Tensor,
        mask: Tensor,
        rotation: tuple[Tensor, Tensor] | None = None,
        cache: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:
        x = x + self.attention(self.norm1(x), mask, rotation, cache)
        return x + self.feed_forward(self.norm2(x))


def named_norm(sizes: DecoderSizes) -> nn.RMSNorm | nn.LayerNorm:
    """RMSNorm ``x / √(mean(x²) + ε) ⊙ g`` (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, equation 4), or
    LayerNorm (Ba et al. 2016, https://arxiv.org/abs/1607.06450)."""
    if sizes.norm == "rms":
        return nn.RMSNorm(sizes.embed_dim, eps=1e-5)
    return nn.LayerNorm(sizes.embed_dim, bias=sizes.bias)


class Decoder(nn.Module):
    """Next-token logits for every token: embedding, layers, norm, head.

    Shapes: input_ids (batch, tokens) int64, tokens up to max_tokens; result (batch, tokens, vocab_size).

    Raises UsageError for ids of another dtype, ShapeError for ids of another rank and for more tokens than positions.
    """

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.embed_dim)
        is_rotary = sizes.positions == "rotary"
        self.rotary = RotaryPositions(sizes.head_dim, sizes.max_tokens) if is_rotary else None
        self.position_embedding = None if is_rotary else nn.Embedding(sizes.max_tokens, sizes.embed_dim)
        self.layers = nn.ModuleList(DecoderLayer(sizes) for _ in range(sizes.num_layers))
        self.norm = named_norm(sizes)
        self.head = None if sizes.tied else nn.Linear(sizes.embed_dim, sizes.vocab_size, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        self.require_ids(input_ids)
        tokens = input_ids.shape[1]
        if tokens > self.sizes.max_tokens:
            raise ShapeError(f"{tokens} tokens; the decoder has {self.sizes.max_tokens} positions, so give fewer")
        positions = torch.arange(tokens, device=input_ids.device).unsqueeze(0)  # (1, tokens)
        return self.logits(input_ids, positions)

    def logits(self, input_ids: Tensor, positions: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Return the logits (batch, n, vocab_size) of ``input_ids`` (batch, n) at ``positions`` (batch or 1, n).

        Without a cache, these are all tokens. With one, it holds the earlier tokens; the new ones are written to it.
        """
        x = self.embedding(input_ids)  # (batch, n, embed_dim)
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)
        rotation = None if self.rotary is None else self.rotary(positions)
        key_positions = positions  # (batch or 1, m)
        if cache is not None:
            key_positions = torch.arange(cache.keys[0].shape[2], device=positions.device).unsqueeze(0)
        mask = may_attend(positions, key_positions, self.sizes.window)
        for i, layer in enumerate(self.layers):
            x = layer(x, mask, rotation, None if cache is None else (cache.keys[i], cache.values[i], positions))
        x = self.norm(x)
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)  # (batch, n, vocab_size)

    def empty_cache(self, batch: int, cache_tokens: int | None = None) -> KeyValueCache:
        """Return a cache of zeros in the dtype and on the device of the weights; cache_tokens defaults to max_tokens.

        Raises ShapeError for a size below 1.
        """
        cache_tokens = self.sizes.max_tokens if cache_tokens is None else cache_tokens
        require_positive(batch=batch, cache_tokens=cache_tokens)
        shape = (batch, self.sizes.kv_heads, cache_tokens, self.sizes.head_dim)
        like = self.embedding.weight
        keys, values = (tuple(like.new_zeros(shape) for _ in self.layers) for _ in range(2))
        return KeyValueCache(keys, values)

    @torch.no_grad()
    def step(self, input_ids: Tensor, past: Tensor, cache: KeyValueCache) -> Tensor:
        """Return the logits of new tokens, and write their keys and values to ``cache``.

        Shapes: input_ids (batch, n) int64; past (batch,) int64, how many tokens of each row the cache already holds:
        the new ones are at positions past, past + 1, ...; cache (batch, kv_heads, cache_tokens, head_dim) per layer;
        result (batch, n, vocab_size). A row that ends early may be padded with any tokens: their logits are
        meaningless, and a later step with that row's own ``past`` overwrites them before they are read.

        Raises ShapeError for a cache of another shape and for tokens beyond its capacity or beyond the positions,
        UsageError for other dtypes and for ids or pasts outside their range; each before anything is written.
        """
        self.require_ids(input_ids)
        self.require_cache(cache, len(input_ids))
        if past.dtype != torch.int64 or past.shape != input_ids.shape[:1]:
            raise UsageError(f"past is {past.dtype} {tuple(past.shape)}; give int64 ({len(input_ids)},), one per row")
        if input_ids.numel() and not 0 <= int(input_ids.min()) <= int(input_ids.max()) < self.sizes.vocab_size:
            raise UsageError(
                f"ids are {int(input_ids.min())} to {int(input_ids.max())}; give 0 to {self.sizes.vocab_size - 1}"
            )
        tokens, room = input_ids.shape[1], min(cache.keys[0].shape[2], self.sizes.max_tokens)
        if int(past.min()) < 0:
            raise UsageError(f"past is {int(past.min())} in one row; give 0 or more")
        if int(past.max()) + tokens > room:
            raise ShapeError(
                f"{tokens} tokens after {int(past.max())}; cache and positions have room for {room}, so give fewer"
            )
        return self.logits(input_ids, past[:, None] + torch.arange(tokens, device=past.device), cache)

    def require_ids(self, input_ids: Tensor) -> None:
        """Check the ids; raises as the class does."""
        if input_ids.ndim != 2:
            raise ShapeError(f"input_ids are {tuple(input_ids.shape)}; give (batch, tokens)")
        if input_ids.dtype != torch.int64:
            raise UsageError(f"input_ids are {input_ids.dtype}; give torch.int64")

    def require_cache(self, cache: KeyValueCache, batch: int) -> None:
        """Raise ShapeError unless ``cache`` fits this decoder and ``batch`` rows."""
        tensors = (*cache.keys, *cache.values)
        layers, heads, head_dim = self.sizes.num_layers, self.sizes.kv_heads, self.sizes.head_dim
        cache_tokens = tensors[0].shape[2] if tensors and tensors[0].ndim == 4 else 0
        if len(cache.keys) != layers or len(cache.values) != layers:
            raise ShapeError(f"the cache has {len(cache.keys)} layers; the decoder has {layers}, so make another")
        for tensor in tensors:
            if tensor.shape != (batch, heads, cache_tokens, head_dim):
                raise ShapeError(
                    f"the cache is {tuple(tensor.shape)} per layer; give ({batch}, {heads}, cache_tokens, {head_dim})"
                )
