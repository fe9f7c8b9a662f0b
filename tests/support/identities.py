"""Algebraic and probabilistic identities of attention, as functions to test modules against.

S9: the columns of head i are a product with a 0/1 matrix, ``Q_i = Q W_i``. Since ``Σ_i W_i W_iᵀ = 1``, the heads'
scores sum to the full product, ``Q Kᵀ = Σ_i Q_i K_iᵀ``; with the heads stacked along the tokens, they are the diagonal
blocks of one product. S10: the mean and variance of a dot product of independent entries, which is why scores are
divided by √d_k.

Source: Vaswani et al. 2017, section 3.2 and footnote 4, https://arxiv.org/abs/1706.03762.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor

from attnforge.model.attention import attention, merge_heads, split_heads, split_width


def selection_matrices(width: int, num_heads: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the 0/1 matrices ``W_i`` that select the columns of head i: (h, width, width / h), ``Q W_i = Q_i``.

    Raises ShapeError if num_heads does not divide width.
    """
    head_dim = split_width("width", width, num_heads)
    return rearrange(torch.eye(width, dtype=dtype), "w (h d) -> h w d", d=head_dim)


def multi_head_by_slicing(query: Tensor, key: Tensor, value: Tensor, num_heads: int) -> Tensor:
    """``Concat_i softmax(Q_i K_iᵀ / √(d_k / h)) V_i`` with ``Q_i``, ``K_i``, ``V_i`` as slices of columns.

    Shapes: query (..., n_q, d_k), key (..., n_k, d_k), value (..., n_k, d_v); result (..., n_q, d_v).
    Raises ShapeError if num_heads does not divide d_k and d_v.
    """
    scale = 1 / math.sqrt(split_width("key_dim", key.shape[-1], num_heads))
    split_width("value_dim", value.shape[-1], num_heads)
    query, key, value = (split_heads(x, num_heads).contiguous() for x in (query, key, value))
    return merge_heads(attention(query, key, value, scale=scale))


def multi_head_by_selection(query: Tensor, key: Tensor, value: Tensor, num_heads: int) -> Tensor:
    """The same as :func:`multi_head_by_slicing`, with ``Q W_i``, ``K W_i``, ``V U_i`` in place of slices."""
    scale = 1 / math.sqrt(split_width("key_dim", key.shape[-1], num_heads))
    key_selection = selection_matrices(key.shape[-1], num_heads, key.dtype)  # (h, d_k, d_k / h)
    value_selection = selection_matrices(value.shape[-1], num_heads, value.dtype)
    query, key = query.unsqueeze(-3) @ key_selection, key.unsqueeze(-3) @ key_selection  # (..., h, n, d_k / h)
    return merge_heads(attention(query, key, value.unsqueeze(-3) @ value_selection, scale=scale))


def stacked_scores(query: Tensor, key: Tensor, num_heads: int) -> Tensor:
    """Full attention's scores with the heads stacked along the tokens, before the softmax: (..., h · n_q, h · n_k).

    The diagonal blocks of (n_q, n_k) are the heads' scores ``Q_i K_iᵀ``; multi-head attention is full attention with
    all other blocks masked. Raises ShapeError if num_heads does not divide the width.
    """
    split_width("key_dim", key.shape[-1], num_heads)
    stacked_query = rearrange(query, "... n (h d) -> ... (h n) d", h=num_heads)
    stacked_key = rearrange(key, "... n (h d) -> ... (h n) d", h=num_heads)
    return stacked_query @ stacked_key.transpose(-2, -1)


def dot_product_mean(key_dim: int, query_mean: float, key_mean: float) -> float:
    """``E(q · k) = d_k μ_q μ_k`` for independent entries with means μ."""
    return key_dim * query_mean * key_mean


def dot_product_variance(
    key_dim: int, query_mean: float, query_variance: float, key_mean: float, key_variance: float
) -> float:
    """``Var(q · k) = d_k (σ_q σ_k + σ_q μ_k² + μ_q² σ_k)`` for independent entries with means μ and variances σ.

    At mean 0 and variance 1 this is d_k, so dividing scores by √d_k makes their variance 1.
    """
    return key_dim * (query_variance * key_variance + query_variance * key_mean**2 + query_mean**2 * key_variance)
