"""Attention over rows: tokens are rows, ``x`` is (n, d) or (B, n, d).

``attention(Q, K, V) = softmax(scale · Q Kᵀ) V`` is implemented once, here, and every module of this file is that
function between projections. Sources: Vaswani et al., Attention Is All You Need, 2017,
https://arxiv.org/abs/1706.03762, section 3.2; and, for the meaning of masks, the PyTorch documentation of
``torch.nn.functional.scaled_dot_product_attention`` and ``torch.nn.MultiheadAttention``.

Masks: ``attn_mask`` is bool and True where a query may attend; ``key_padding_mask`` is bool and True where a key is
padding. A query that may attend to nothing yields zeros, not NaN.

Every module supports float64, float32, float16 and bfloat16, and computes in the dtype of its weights.
"""

from __future__ import annotations

import math
from functools import reduce

import torch
from einops import rearrange
from torch import Tensor, nn

from attnforge.errors import ShapeError, UsageError


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    attn_mask: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """``softmax(scale · Q Kᵀ) V`` over the last two axes.

    Shapes: query (..., n_q, d_k), key (..., n_k, d_k), value (..., n_k, d_v), attn_mask broadcastable to
    (..., n_q, n_k), bool, True = may attend; result (..., n_q, d_v) in the dtype of the arguments.
    ``scale`` is a number, 1 / √d_k in the paper and 1 for plain dot products. With ``soft_cap`` c the softmax is over
    c · tanh(scale · Q Kᵀ / c), which lies between -c and c.

    Source: Vaswani et al. 2017, equation 1, https://arxiv.org/abs/1706.03762; soft cap: Gemma 2,
    https://arxiv.org/abs/2408.00118, section 2.
    """
    scores = query @ key.transpose(-2, -1) * scale  # (..., n_q, n_k)
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    if attn_mask is None:
        return scores.softmax(-1) @ value
    weights = scores.masked_fill(~attn_mask, -math.inf).softmax(-1)
    # A fully masked row is softmax(-inf, ..., -inf) = NaN.
    weights = weights.masked_fill(~attn_mask.any(-1, keepdim=True), 0.0)
    return weights @ value


def merge_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor
) -> Tensor | None:
    """Combine all given masks into one over heads, which allows what every one of them allows; None if none is given.

    Shapes: attn_mask (n_q, n_k), (B, n_q, n_k) or (B, 1 or h, n_q, n_k); key_padding_mask (B, n_k), or (n_k,) for
    unbatched tokens; query (..., n_q, d) and key (..., n_k, d) give the sizes of the causal mask, in which query i sees
    keys 0 ... i. The result broadcasts to (B, h, n_q, n_k).

    Raises UsageError for a mask that is not bool, ShapeError for any other rank.
    """
    masks = []
    if attn_mask is not None:
        require_bool("attn_mask", attn_mask)
        if attn_mask.ndim not in (2, 3, 4):
            raise ShapeError(
                f"attn_mask has {attn_mask.ndim} axes; give (n_q, n_k), (B, n_q, n_k) or (B, num_heads, n_q, n_k)"
            )
        masks.append(attn_mask.unsqueeze(1) if attn_mask.ndim == 3 else attn_mask)
    if key_padding_mask is not None:
        require_bool("key_padding_mask", key_padding_mask)
        if key_padding_mask.ndim != key.ndim - 1:
            raise ShapeError(f"key_padding_mask has {key_padding_mask.ndim} axes; give (B, n_k), one entry per key")
        masks.append(~key_padding_mask[..., None, None, :])
    if is_causal:
        ones = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
        masks.append(ones.tril())
    return reduce(torch.logical_and, masks) if masks else None


def require_bool(name: str, mask: Tensor) -> None:
    """Raise UsageError unless ``mask`` is bool."""
    if mask.dtype != torch.bool:
        raise UsageError(f"{name} is {mask.dtype}; only torch.bool is allowed, so compare or invert to get one")


def require_width(name: str, tensor: Tensor, width: int, dim: int = -1) -> None:
    """Raise ShapeError unless ``tensor`` has ``width`` features along ``dim``."""
    if tensor.ndim < -dim or tensor.shape[dim] != width:
        raise ShapeError(f"{name} is {tuple(tensor.shape)}; its axis {dim} must be {width}, the width it was built for")


def require_positive(**sizes: int) -> None:
    """Raise ShapeError for a size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ShapeError(f"{name} is {size}; sizes must be at least 1, so give a positive whole number")


def split_width(name: str, width: int, num_heads: int) -> int:
    """Return ``width / num_heads``, the width of one head; raise ShapeError if it is not a positive integer."""
    if num_heads < 1 or width < 1 or width % num_heads:
        raise ShapeError(f"{name} {width} with num_heads {num_heads}; choose a {name} that num_heads divides")
    return width // num_heads


class SelfAttention(nn.Module):
    """S1, one head: ``softmax(Q Kᵀ / √d_k) V`` with ``Q = X Wq``, ``K = X Wk``, ``V = X Wv``.

    Shapes: x (n, d_in) or (B, n, d_in); Wq, Wk (d_in, d_k), Wv (d_in, d_v); attn_mask (n, n) or (B, n, n);
    result (n, d_v) or (B, n, d_v). ``value_dim`` defaults to ``key_dim``; ``query_dim``, if given, must equal
    ``key_dim``, because of the dot product.

    Raises ShapeError if query_dim and key_dim differ, a size is below 1, or x is not d_in wide, UsageError for a mask
    that is not bool.

    Source: Vaswani et al. 2017, section 3.2.1, https://arxiv.org/abs/1706.03762.
    """

    def __init__(
        self,
        input_dim: int,
        key_dim: int,
        value_dim: int | None = None,
        bias: bool = False,
        *,
        query_dim: int | None = None,
    ) -> None:
        super().__init__()
        if query_dim is not None and query_dim != key_dim:
            raise ShapeError(f"query_dim {query_dim} and key_dim {key_dim}; dot products need them equal, so drop one")
        value_dim = key_dim if value_dim is None else value_dim
        require_positive(input_dim=input_dim, key_dim=key_dim, value_dim=value_dim)
        self.input_dim = input_dim
        self.scale = 1 / math.sqrt(key_dim)
        self.query_proj = nn.Linear(input_dim, key_dim, bias=bias)
        self.key_proj = nn.Linear(input_dim, key_dim, bias=bias)
        self.value_proj = nn.Linear(input_dim, value_dim, bias=bias)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        require_width("x", x, self.input_dim)
        if attn_mask is not None:
            require_bool("attn_mask", attn_mask)
        query, key, value = self.query_proj(x), self.key_proj(x), self.value_proj(x)
        return attention(query, key, value, scale=self.scale, attn_mask=attn_mask)  # (..., n, d_v)


class MultiHeadSelfAttention(SelfAttention):
    """S2, S1 in heads, without an output projection: ``Concat_i softmax(Q_i K_iᵀ / √(d_k / h)) V_i``.

    ``Q_i``, ``K_i``, ``V_i`` are the i-th of h equal parts of the columns of ``X Wq``, ``X Wk``, ``X Wv``.
    Shapes: x (n, d_in) or (B, n, d_in); masks as in :func:`merge_masks`; result (n, d_v) or (B, n, d_v).

    Raises ShapeError if num_heads does not divide key_dim and value_dim or x is not d_in wide.

    Source: Vaswani et al. 2017, section 3.2.2, https://arxiv.org/abs/1706.03762, without the output projection.
    """

    def __init__(self, input_dim: int, key_dim: int, value_dim: int, num_heads: int, bias: bool = False) -> None:
        head_dim = split_width("key_dim", key_dim, num_heads)
        split_width("value_dim", value_dim, num_heads)
        super().__init__(input_dim, key_dim, value_dim, bias)
        self.num_heads = num_heads
        self.scale = 1 / math.sqrt(head_dim)

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        require_width("x", x, self.input_dim)
        mask = merge_masks(attn_mask, key_padding_mask, is_causal, x, x)
        query = split_heads(self.query_proj(x), self.num_heads)  # (..., h, n, d_k / h)
        key = split_heads(self.key_proj(x), self.num_heads)
        value = split_heads(self.value_proj(x), self.num_heads)  # (..., h, n, d_v / h)
        return merge_heads(attention(query, key, value, scale=self.scale, attn_mask=mask))  # (..., n, d_v)


class MultiHeadAttention(nn.Module):
    """S3, heads and an output projection: ``Concat(head_1 ... head_h) Wᴼ + b``, like ``torch.nn.MultiheadAttention``.

    Shapes: query (B, n_q, embed_dim), key (B, n_k, kdim), value (B, n_k, vdim), or all unbatched; masks as in
    :func:`merge_masks`; result (B, n_q, embed_dim). ``is_causal`` adds a causal mask, aligned at the first key.

    Raises ShapeError if num_heads does not divide embed_dim or a width does not match.

    Source: Vaswani et al. 2017, section 3.2.2, https://arxiv.org/abs/1706.03762; its sizes are the defaults.
    """

    def __init__(
        self,
        embed_dim: int = 512,
        num_heads: int = 8,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        require_positive(kdim=self.kdim, vdim=self.vdim)
        self.num_heads = num_heads
        self.head_dim = split_width("embed_dim", embed_dim, num_heads)
        self.query_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.key_proj = nn.Linear(self.kdim, embed_dim, bias=bias)
        self.value_proj = nn.Linear(self.vdim, embed_dim, bias=bias)
        self.output_proj = nn.Linear(embed_dim, embed_dim, bias=bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        require_width("query", query, self.embed_dim)
        require_width("key", key, self.kdim)
        require_width("value", value, self.vdim)
        mask = merge_masks(attn_mask, key_padding_mask, is_causal, query, key)
        q = split_heads(self.query_proj(query), self.num_heads)  # (B, h, n_q, head_dim)
        k = split_heads(self.key_proj(key), self.num_heads)  # (B, h, n_k, head_dim)
        v = split_heads(self.value_proj(value), self.num_heads)
        context = attention(q, k, v, scale=1 / math.sqrt(self.head_dim), attn_mask=mask)
        return self.output_proj(merge_heads(context))  # (B, n_q, embed_dim)


class CrossAttention(nn.Module):
    """Queries from one sequence, keys and values from another: multi-head attention with ``K = V = memory``.

    Shapes: query (B, n_q, embed_dim), memory (B, n_k, memory_dim), key_padding_mask (B, n_k) over the memory; result
    (B, n_q, embed_dim). n_q and n_k are independent. Raises as :class:`MultiHeadAttention` does.

    Source: Vaswani et al. 2017, section 3.2.3 (encoder-decoder attention), https://arxiv.org/abs/1706.03762.
    """

    def __init__(self, embed_dim: int, num_heads: int, memory_dim: int | None = None, bias: bool = True) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(embed_dim, num_heads, bias, kdim=memory_dim, vdim=memory_dim)

    def forward(self, query: Tensor, memory: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return self.attention(query, memory, memory, key_padding_mask=key_padding_mask)


class ParameterFreeAttention(nn.Module):
    """S7, self-attention without projections: ``softmax(X Xᵀ) X``, or ``softmax(X Xᵀ / √d) X`` if scaled.

    Shapes: x (n, d) or (B, n, d); result the same. Every row of the result is a convex combination of the rows of x.

    Source: equation 1 of Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, with identity projections.
    """

    def __init__(self, scaled: bool = False) -> None:
        super().__init__()
        self.scaled = scaled

    def forward(self, x: Tensor) -> Tensor:
        return attention(x, x, x, scale=1 / math.sqrt(x.shape[-1]) if self.scaled else 1.0)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(..., n, h · d) -> (..., h, n, d): split the columns into h equal parts."""
    return rearrange(x, "... n (h d) -> ... h n d", h=num_heads)


def merge_heads(x: Tensor) -> Tensor:
    """(..., h, n, d) -> (..., n, h · d): the inverse of :func:`split_heads`."""
    return rearrange(x, "... h n d -> ... n (h d)")
