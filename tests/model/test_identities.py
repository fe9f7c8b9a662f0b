"""S9 and S10, identities of heads and moments of scores."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from attnforge.model.attention import attention
from tests.support import identities
from tests.support.tensors import agree, randn

# S9


@pytest.mark.parametrize(("key_dim", "value_dim", "num_heads"), [(12, 12, 3), (12, 20, 4), (8, 4, 1), (6, 6, 6)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_s9_selection_is_slicing_exactly(key_dim: int, value_dim: int, num_heads: int, dtype: torch.dtype) -> None:
    query, key, value = randn(2, 5, key_dim).to(dtype), randn(2, 7, key_dim).to(dtype), randn(2, 7, value_dim).to(dtype)
    selection = identities.selection_matrices(key_dim, num_heads, dtype)
    assert set(selection.flatten().tolist()) <= {0.0, 1.0}
    for matrix, part in zip(selection, query.chunk(num_heads, dim=-1), strict=True):
        assert torch.equal(query @ matrix, part)
    assert torch.equal((selection @ selection.mT).sum(0), torch.eye(key_dim, dtype=dtype))
    by_slicing = identities.multi_head_by_slicing(query, key, value, num_heads)
    assert torch.equal(by_slicing, identities.multi_head_by_selection(query, key, value, num_heads))
    q, k, v = (torch.stack(x.chunk(num_heads, dim=-1), dim=1) for x in (query, key, value))  # (B, h, n, d / h)
    expected = F.scaled_dot_product_attention(q, k, v)
    agree(by_slicing, torch.cat(expected.unbind(1), dim=-1), atol=1e-12 if dtype == torch.float64 else 1e-6)


def test_s9_heads_are_the_diagonal_blocks_of_the_full_product() -> None:
    query, key, value = randn(2, 5, 12), randn(2, 7, 12), randn(2, 7, 6)
    blocks = identities.stacked_scores(query, key, 3).reshape(2, 3, 5, 3, 7)  # (B, h, n_q, h, n_k)
    heads = [q @ k.mT for q, k in zip(query.chunk(3, -1), key.chunk(3, -1), strict=True)]
    for head in range(3):
        agree(blocks[:, head, :, head], heads[head])
    agree(sum(heads[1:], heads[0]), query @ key.mT)
    # Multi-head attention is full attention over the stacked heads with all other blocks masked.
    q, k, v = (torch.cat(x.chunk(3, -1), dim=1) for x in (query, key, value))
    mask = torch.eye(3).repeat_interleave(5, 0).repeat_interleave(7, 1).bool()
    full = attention(q, k, v, scale=1 / 2, attn_mask=mask)  # (B, 3 · 5, 2)
    agree(torch.cat(full.chunk(3, dim=1), dim=-1), identities.multi_head_by_slicing(query, key, value, 3))


# S10


def test_s10_moments_of_a_dot_product() -> None:
    samples, key_dim = 400_000, 6
    query_mean, query_variance, key_mean, key_variance = 0.7, 1.5, -0.4, 0.6
    uniform = (
        torch.rand(samples, key_dim, dtype=torch.float64) - 0.5
    )  # variance 1/12: the identity does not assume normal entries
    query = query_mean + uniform * math.sqrt(12 * query_variance)
    key = key_mean + randn(samples, key_dim) * math.sqrt(key_variance)
    products = (query * key).sum(-1)
    mean, variance = products.mean().item(), products.var().item()
    mean_error = math.sqrt(variance / samples)
    kurtosis = ((products - mean) ** 4).mean().item() / variance**2
    variance_error = variance * math.sqrt((kurtosis - 1) / samples)

    arguments = (key_dim, query_mean, query_variance, key_mean, key_variance)
    assert abs(mean - identities.dot_product_mean(key_dim, query_mean, key_mean)) < 4 * mean_error
    assert abs(variance - identities.dot_product_variance(*arguments)) < 4 * variance_error
    # There are enough samples to reject every near miss.
    both = query_variance * key_variance
    left, right = query_variance * key_mean**2, query_mean**2 * key_variance
    near_misses = {
        "no means": key_dim * both,
        "one mean only": key_dim * (both + left),
        "the other mean only": key_dim * (both + right),
        "means swapped": key_dim * (both + query_variance * query_mean**2 + key_mean**2 * key_variance),
        "means not squared": key_dim * (both + query_variance * key_mean + query_mean * key_variance),
        "deviations for variances": key_dim * (math.sqrt(both) + left + right),
        "d_k + 1": identities.dot_product_variance(key_dim + 1, *arguments[1:]),
    }
    for name, wrong in near_misses.items():
        assert abs(variance - wrong) > 10 * variance_error, name
    assert abs(mean - key_dim * (query_mean + key_mean)) > 10 * mean_error


@pytest.mark.parametrize("key_dim", [1, 16, 256])
def test_s10_scaled_scores_have_variance_one(key_dim: int) -> None:
    samples = 100_000
    scores = (randn(samples, key_dim) * randn(samples, key_dim)).sum(-1)
    scaled = scores / math.sqrt(key_dim)
    error = math.sqrt((3 + 6 / key_dim - 1) / samples)  # the kurtosis of a sum of d products of normals is 3 + 6 / d
    assert abs(scaled.var().item() - 1) < 4 * error
    assert identities.dot_product_variance(key_dim, 0, 1, 0, 1) == key_dim
    if key_dim > 1:
        assert abs(scores.var().item() - 1) > 10 * error


def test_s10_unscaled_half_precision_scores_saturate() -> None:
    tokens, key_dim = 64, 4096
    query, key = torch.randn(2, tokens, key_dim).half()
    values = torch.eye(tokens).half()  # so that the outputs are the weights
    unscaled = attention(query, key, values, scale=1.0)
    scaled = attention(query, key, values, scale=1 / math.sqrt(key_dim))
    assert (unscaled.amax(-1) > 0.99).float().mean() > 0.8  # nearly every query attends to one key
    assert (unscaled == 0).float().mean() > 0.5  # and gives the others a weight of zero
    assert scaled.amax() < 0.5
    assert (scaled > 0).all()
    huge = torch.full((1, key_dim), 5.0).half()  # 4096 · 25 is beyond 65504, the largest float16
    assert (huge @ huge.mT).isinf().all()
    assert not ((huge / math.sqrt(key_dim)) @ huge.mT).isinf().any()
