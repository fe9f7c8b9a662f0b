"""The general attention model, in columns: features are ``F`` (d_f, n), one column per token.

``K = W_K F``, ``V = W_V F``, ``Q = W_Q F``; a score ``e_ij = score(q_i, k_j)`` for every pair of a query and a key;
an alignment ``a_i = align(e_i)`` of every query's scores; and the context ``c_i = Σ_j a_ij v_j``, so ``C = V aᵀ``
(d_v, n_q). The score and the alignment define the model.

Scores ("general" is also called bilinear; w, W and b are learned):

=============  ====================================  ==========================================================
dot            ``qᵀ k``                              Luong et al. 2015, https://arxiv.org/abs/1508.04025
scaled-dot     ``qᵀ k / √d_k``                       Vaswani et al. 2017, https://arxiv.org/abs/1706.03762
general        ``qᵀ W k``                            Luong et al. 2015
additive       ``wᵀ tanh(W_q q + W_k k + b)``        Bahdanau et al. 2015, https://arxiv.org/abs/1409.0473
concat         ``wᵀ tanh(W [q; k] + b)``             Luong et al. 2015
=============  ====================================  ==========================================================

Alignments: ``softmax`` over the keys, and ``hard``, which is 1 for the first key of the highest score and 0 elsewhere.

Source: Brauwers & Frasincar, A General Survey on Attention Mechanisms in Deep Learning, 2021,
https://arxiv.org/abs/2203.14263
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from einops import rearrange
from torch import Tensor, nn

from attnforge.errors import ShapeError, check_known
from attnforge.model.attention import require_positive, require_width

Score = Callable[[Tensor, Tensor], Tensor]
"""(..., d_q, n_q) queries and (..., d_k, n_k) keys -> (..., n_q, n_k) scores."""

Align = Callable[[Tensor], Tensor]
"""(..., n_q, n_k) scores -> (..., n_q, n_k) weights."""

SCORES = ("dot", "scaled-dot", "general", "additive", "concat")
ALIGNS = ("softmax", "hard")


class GeneralAttention(nn.Module):
    """S5, one head: ``C = V align(score(Q, K))ᵀ`` with ``Q = W_Q F'``, ``K = W_K F``, ``V = W_V F``.

    Shapes, unbatched or with a leading B: features F (d_f, n_k); query_features F' (query_input_dim, n_q), by default
    F; result (d_v, n_q). ``query_dim`` d_q defaults to key_dim, ``query_input_dim`` to feature_dim. ``score`` and
    ``align`` are a name from this module or a callable of the type ``Score`` or ``Align``; a callable that is an
    nn.Module has its own parameters.

    Raises ShapeError for a dot score with d_q ≠ d_k or a width that does not match, UnknownNameError for an unknown
    score or align.
    """

    def __init__(
        self,
        feature_dim: int,
        key_dim: int,
        value_dim: int,
        query_dim: int | None = None,
        score: str | Score = "scaled-dot",
        align: str | Align = "softmax",
        *,
        query_input_dim: int | None = None,
    ) -> None:
        super().__init__()
        query_dim = key_dim if query_dim is None else query_dim
        query_input_dim = feature_dim if query_input_dim is None else query_input_dim
        require_positive(feature_dim=feature_dim, key_dim=key_dim, value_dim=value_dim)
        require_positive(query_dim=query_dim, query_input_dim=query_input_dim)
        self.feature_dim, self.query_input_dim = feature_dim, query_input_dim
        self.query_weight = matrix(query_dim, query_input_dim)  # W_Q
        self.key_weight = matrix(key_dim, feature_dim)  # W_K
        self.value_weight = matrix(value_dim, feature_dim)  # W_V
        self.score = named_score(score, query_dim, key_dim)
        self.align = named_align(align)

    def forward(self, features: Tensor, query_features: Tensor | None = None) -> Tensor:
        query_features = features if query_features is None else query_features
        require_width("features", features, self.feature_dim, dim=-2)
        require_width("query_features", query_features, self.query_input_dim, dim=-2)
        query = self.query_weight @ query_features  # (..., d_q, n_q)
        key = self.key_weight @ features  # (..., d_k, n_k)
        value = self.value_weight @ features  # (..., d_v, n_k)
        weights = self.align(self.score(query, key))  # (..., n_q, n_k)
        return value @ weights.mT  # (..., d_v, n_q)


class GeneralMultiHeadAttention(nn.Module):
    """S6, h heads over one query matrix: ``C = W_O [C⁽¹⁾; ...; C⁽ʰ⁾]`` with ``C⁽ˡ⁾ = V⁽ˡ⁾ align(score(Q⁽ˡ⁾, K⁽ˡ⁾))ᵀ``.

    ``Q = W_Q F'`` as in :class:`GeneralAttention`; head l has its own ``Q⁽ˡ⁾ = W_q⁽ˡ⁾ Q``, ``K⁽ˡ⁾ = W_K⁽ˡ⁾ F``,
    ``V⁽ˡ⁾ = W_V⁽ˡ⁾ F``, and its own parameters of the score.

    Weights: W_q (h, d_q, d_q), W_K (h, d_k, d_f), W_V (h, d_v, d_f), W_O (d_c, h · d_v).
    Shapes, unbatched or with a leading B: features F (d_f, n_k); query_features F' (query_input_dim, n_q), by default
    F; result (d_c, n_q) with d_c = output_dim.
    A callable ``score`` receives queries (..., h, d_q, n_q) and keys (..., h, d_k, n_k).

    Raises as :class:`GeneralAttention` does, and ShapeError for a num_heads or output_dim below 1.
    """

    def __init__(
        self,
        feature_dim: int,
        key_dim: int,
        value_dim: int,
        num_heads: int,
        output_dim: int,
        query_dim: int | None = None,
        score: str | Score = "scaled-dot",
        align: str | Align = "softmax",
        *,
        query_input_dim: int | None = None,
    ) -> None:
        super().__init__()
        query_dim = key_dim if query_dim is None else query_dim
        query_input_dim = feature_dim if query_input_dim is None else query_input_dim
        require_positive(feature_dim=feature_dim, key_dim=key_dim, value_dim=value_dim, num_heads=num_heads)
        require_positive(output_dim=output_dim, query_dim=query_dim, query_input_dim=query_input_dim)
        self.feature_dim, self.query_input_dim = feature_dim, query_input_dim
        self.query_weight = matrix(query_dim, query_input_dim)  # W_Q
        self.head_query_weight = matrix(num_heads, query_dim, query_dim)  # W_q of every head
        self.key_weight = matrix(num_heads, key_dim, feature_dim)  # W_K
        self.value_weight = matrix(num_heads, value_dim, feature_dim)  # W_V
        self.output_weight = matrix(output_dim, num_heads * value_dim)  # W_O
        self.score = named_score(score, query_dim, key_dim, num_heads)
        self.align = named_align(align)

    def forward(self, features: Tensor, query_features: Tensor | None = None) -> Tensor:
        query_features = features if query_features is None else query_features
        require_width("features", features, self.feature_dim, dim=-2)
        require_width("query_features", query_features, self.query_input_dim, dim=-2)
        query = self.head_query_weight @ (self.query_weight @ query_features).unsqueeze(-3)  # (..., h, d_q, n_q)
        key = self.key_weight @ features.unsqueeze(-3)  # (..., h, d_k, n_k)
        value = self.value_weight @ features.unsqueeze(-3)  # (..., h, d_v, n_k)
        weights = self.align(self.score(query, key))  # (..., h, n_q, n_k)
        contexts = rearrange(value @ weights.mT, "... h d n -> ... (h d) n")  # (..., h · d_v, n_q)
        return self.output_weight @ contexts  # (..., d_c, n_q)


def dot(query: Tensor, key: Tensor) -> Tensor:
    """``e = Qᵀ K``: (..., d, n_q) and (..., d, n_k) -> (..., n_q, n_k)."""
    return query.mT @ key


def scaled_dot(query: Tensor, key: Tensor) -> Tensor:
    """``e = Qᵀ K / √d``: (..., d, n_q) and (..., d, n_k) -> (..., n_q, n_k)."""
    return query.mT @ key / math.sqrt(key.shape[-2])


class BilinearScore(nn.Module):
    """``e_ij = q_iᵀ W k_j``, W (d_q, d_k), or (h, d_q, d_k) for one W per head; d_q and d_k may differ."""

    def __init__(self, query_dim: int, key_dim: int, *heads: int) -> None:
        super().__init__()
        self.weight = matrix(*heads, query_dim, key_dim)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return query.mT @ self.weight @ key  # (..., n_q, n_k)


class AdditiveScore(nn.Module):
    """``e_ij = wᵀ tanh(W_q q_i + W_k k_j + b)``, of hidden width d_k, with one set per head if heads are given."""

    def __init__(self, query_dim: int, key_dim: int, *heads: int) -> None:
        super().__init__()
        self.query_weight = matrix(*heads, key_dim, query_dim)
        self.key_weight = matrix(*heads, key_dim, key_dim)
        self.bias = nn.Parameter(torch.zeros(*heads, key_dim, 1))
        self.weight = matrix(*heads, 1, key_dim)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        query = (self.query_weight @ query).mT.unsqueeze(-2)  # (..., n_q, 1, d_k)
        key = (self.key_weight @ key + self.bias).mT.unsqueeze(-3)  # (..., 1, n_k, d_k)
        return (torch.tanh(query + key) @ self.weight.mT.unsqueeze(-3)).squeeze(-1)  # (..., n_q, n_k)


class ConcatScore(nn.Module):
    """``e_ij = wᵀ tanh(W [q_i; k_j] + b)``, W (d_k, d_q + d_k), one set per head if heads are given."""

    def __init__(self, query_dim: int, key_dim: int, *heads: int) -> None:
        super().__init__()
        self.pair_weight = matrix(*heads, key_dim, query_dim + key_dim)
        self.bias = nn.Parameter(torch.zeros(*heads, key_dim, 1))
        self.weight = matrix(*heads, 1, key_dim)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        size = (*key.shape[:-2], query.shape[-1], key.shape[-1])  # (..., n_q, n_k)
        queries = query.mT.unsqueeze(-2).expand(*size, -1)  # (..., n_q, n_k, d_q)
        keys = key.mT.unsqueeze(-3).expand(*size, -1)  # (..., n_q, n_k, d_k)
        pairs = torch.cat([queries, keys], dim=-1) @ self.pair_weight.mT.unsqueeze(-3)  # (..., n_q, n_k, d_k)
        hidden = torch.tanh(pairs + self.bias.mT.unsqueeze(-3))
        return (hidden @ self.weight.mT.unsqueeze(-3)).squeeze(-1)  # (..., n_q, n_k)


def softmax(scores: Tensor) -> Tensor:
    """``a_ij = exp(e_ij) / Σ_j exp(e_ij)``, over the keys."""
    return scores.softmax(-1)


def hard(scores: Tensor) -> Tensor:
    """``a_ij = 1`` where j is the first key of the highest score of query i, else 0."""
    best = scores.argmax(-1, keepdim=True)  # (..., n_q, 1)
    return (torch.arange(scores.shape[-1], device=scores.device) == best).to(scores.dtype)


def named_score(score: str | Score, query_dim: int, key_dim: int, *heads: int) -> Score:
    """Return the named score, with its parameters; a callable is returned unchanged.

    Raises ShapeError for dot and scaled-dot if query_dim and key_dim differ, UnknownNameError for an unknown name.
    """
    if not isinstance(score, str):
        return score
    if score in ("dot", "scaled-dot"):
        if query_dim != key_dim:
            raise ShapeError(f"query_dim {query_dim} and key_dim {key_dim}; {score} needs them equal, general does not")
        return dot if score == "dot" else scaled_dot
    check_known("score", score, SCORES)
    learned = {"general": BilinearScore, "additive": AdditiveScore, "concat": ConcatScore}
    return learned[score](query_dim, key_dim, *heads)


def named_align(align: str | Align) -> Align:
    """Return the named alignment; a callable is returned unchanged. Raises UnknownNameError for an unknown name."""
    if not isinstance(align, str):
        return align
    check_known("align", align, ALIGNS)
    return softmax if align == "softmax" else hard


def matrix(*shape: int) -> nn.Parameter:
    """Return a weight (..., rows, columns) whose product with a column of variance 1 has variance 1."""
    return nn.Parameter(torch.randn(shape) / math.sqrt(shape[-1]))
