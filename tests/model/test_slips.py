"""S13, mistakes that still run, and what they compute instead."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from attnforge.model.attention import MultiHeadSelfAttention, SelfAttention
from attnforge.model.slips import PostSoftmaxScale, ReshapeWithoutTranspose
from tests.support.tensors import agree, differ, randn, randomized


@pytest.mark.parametrize("num_heads", [None, 1, 2, 4])
def test_s13a_scale_after_the_softmax(num_heads: int | None) -> None:
    slip = randomized(PostSoftmaxScale(10, 8, 12, num_heads))
    right = MultiHeadSelfAttention(10, 8, 12, num_heads or 1).double()
    right.load_state_dict(slip.state_dict())
    x = randn(2, 5, 10)
    head_dim = 8 // (num_heads or 1)
    unscaled = MultiHeadSelfAttention(10, 8, 12, num_heads or 1).double()
    unscaled.load_state_dict(slip.state_dict())
    unscaled.scale = 1.0
    # It is the softmax of unscaled scores, then the factor, which commutes with the product with V.
    agree(slip(x), unscaled(x) / math.sqrt(head_dim))
    # It differs from the correct module by more than a factor.
    assert differ(slip(x), right(x))
    assert differ(slip(x) * math.sqrt(head_dim), right(x))


def test_s13a_rows_of_weights_sum_to_one_over_root_d() -> None:
    slip, x = PostSoftmaxScale(8, 4, 8).double(), randn(2, 5, 8)
    slip.value_proj.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.float64))
    slip.value_proj.bias = nn.Parameter(torch.ones(8, dtype=torch.float64))  # every value is 1: outputs are row sums
    agree(slip(x), torch.full((2, 5, 8), 1 / math.sqrt(4), dtype=torch.float64))
    right = SelfAttention(8, 4, 8).double()
    right.load_state_dict(slip.state_dict(), strict=False)
    right.value_proj = slip.value_proj
    agree(right(x), torch.ones(2, 5, 8, dtype=torch.float64))


def test_s13a_agrees_for_heads_of_size_one() -> None:
    slip, x = randomized(PostSoftmaxScale(10, 4, 8, num_heads=4)), randn(2, 5, 10)
    right = MultiHeadSelfAttention(10, 4, 8, 4).double()
    right.load_state_dict(slip.state_dict())
    agree(slip(x), right(x))


@pytest.mark.parametrize(("batch", "tokens"), [(1, 8), (2, 8), (3, 5)])
def test_s13b_is_exactly_the_reshape(batch: int, tokens: int) -> None:
    slip, x = randomized(ReshapeWithoutTranspose(10, 8, 12, 4)), randn(batch, tokens, 10)
    query, key, value = (p(x).flatten() for p in (slip.query_proj, slip.key_proj, slip.value_proj))
    rows = []
    for run in range(4 * batch):  # the flat buffer is cut into 4 · B sequences of n parts, one after the other
        q, k = (t[run * tokens * 2 : (run + 1) * tokens * 2].reshape(tokens, 2) for t in (query, key))
        v = value[run * tokens * 3 : (run + 1) * tokens * 3].reshape(tokens, 3)
        rows.append(torch.softmax(q @ k.T / math.sqrt(2), -1) @ v)
    agree(slip(x), torch.cat(rows).reshape(batch, tokens, 12))
    right = MultiHeadSelfAttention(10, 8, 12, 4).double()
    right.load_state_dict(slip.state_dict())
    assert differ(slip(x), right(x))


def influence(module: nn.Module, x: Tensor, sample: int, token: int) -> Tensor:
    """Return which (B, n) inputs the output of one token depends on."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(module(x)[sample, token].sum(), x)
    return gradient.abs().amax(-1) > 0


@pytest.mark.parametrize("tokens", [8, 5])
def test_s13b_a_token_attends_only_within_its_run(tokens: int) -> None:
    slip, x = randomized(ReshapeWithoutTranspose(10, 8, 8, 4)), randn(2, tokens, 10)
    right = MultiHeadSelfAttention(10, 8, 8, 4).double()
    right.load_state_dict(slip.state_dict())
    for token in range(tokens):
        runs = {part // tokens for part in range(4 * token, 4 * token + 4)}  # the runs of the token's four parts
        reached = {part // 4 for part in range(4 * tokens) if part // tokens in runs}
        assert len(reached) < tokens
        for sample in range(2):
            seen = influence(slip, x, sample, token)
            assert set(seen[sample].nonzero().flatten().tolist()) == reached
            assert not seen[1 - sample].any()
            assert influence(right, x, sample, token)[sample].all()
    if tokens == 8:
        agree(slip(x)[:, :2], slip(x[:, [0, 1, 7, 6, 5, 4, 3, 2]])[:, :2])  # tokens 0 and 1 are one run
    order = torch.arange(tokens).flip(0).roll(1)
    assert differ(slip(x[:, order]), slip(x)[:, order])  # S11 does not hold


def test_s13b_agrees_with_one_head() -> None:
    slip, x = randomized(ReshapeWithoutTranspose(10, 8, 12, 1)), randn(2, 5, 10)
    right = SelfAttention(10, 8, 12).double()
    right.load_state_dict(slip.state_dict())
    agree(slip(x), right(x))
