"""S1 to S3, attention and its heads, against their formulas and torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnforge.model.attention import (
    CrossAttention,
    MultiHeadAttention,
    MultiHeadSelfAttention,
    SelfAttention,
    attention,
)
from tests.model.from_torch import attention_of
from tests.support.tensors import agree, differ, randn, randomized

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


# The shared function


@pytest.mark.parametrize("mask_shape", [None, (5, 7), (1, 7), (2, 1, 5, 7), (2, 3, 5, 7)])
def test_attention_is_scaled_dot_product_attention(mask_shape: tuple[int, ...] | None) -> None:
    query, key, value = randn(2, 3, 5, 8), randn(2, 3, 7, 8), randn(2, 3, 7, 4)
    mask = None
    if mask_shape is not None:
        mask = torch.rand(mask_shape) < 0.6
        mask[..., 0] = True
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
    agree(attention(query, key, value, scale=0.3, attn_mask=mask), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_that_may_attend_to_nothing_yields_zeros(dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(2, 4, 8).to(dtype) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    output = attention(query, key, value, scale=0.5, attn_mask=mask)
    assert output.dtype == dtype
    assert torch.equal(output[:, 1], torch.zeros_like(output[:, 1]))
    agree(output[:, [0, 2, 3]], attention(query[:, [0, 2, 3]], key, value, scale=0.5), atol=0.01)


# S1 and S2


@pytest.mark.parametrize("value_dim", [None, 6, 8, 20])
@pytest.mark.parametrize("bias", [False, True])
def test_s1_self_attention(value_dim: int | None, bias: bool) -> None:
    module = randomized(SelfAttention(10, 8, value_dim, bias))
    x = randn(3, 5, 10)
    query, key, value = (x @ p.weight.T for p in (module.query_proj, module.key_proj, module.value_proj))
    if bias:
        query, key = query + module.query_proj.bias, key + module.key_proj.bias
        value = value + module.value_proj.bias
    expected = torch.softmax(torch.einsum("bid,bjd->bij", query, key) / math.sqrt(8), dim=2) @ value
    assert expected.shape == (3, 5, value_dim or 8)
    agree(module(x), expected)
    agree(module(x[1]), expected[1])


def test_s1_has_no_bias_by_default_and_takes_masks() -> None:
    module = randomized(SelfAttention(10, 8))
    assert set(dict(module.named_parameters())) == {"query_proj.weight", "key_proj.weight", "value_proj.weight"}
    x = randn(2, 5, 10)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    agree(module(x, causal)[:, :3], module(x[:, :3], causal[:3, :3]))
    agree(module(x, causal.expand(2, 5, 5)), module(x, causal))


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "num_heads"), [(12, 12, 3), (12, 6, 3), (4, 20, 2), (8, 5, 1), (4, 4, 4)]
)
def test_s2_concatenates_heads_of_s1(key_dim: int, value_dim: int, num_heads: int) -> None:
    module = randomized(MultiHeadSelfAttention(10, key_dim, value_dim, num_heads))
    x = randn(3, 5, 10)
    heads = []
    for head in range(num_heads):
        single = SelfAttention(10, key_dim // num_heads, value_dim // num_heads).double()
        for name in ("query_proj", "key_proj", "value_proj"):
            rows = getattr(module, name).weight.chunk(num_heads)[head]
            getattr(single, name).weight = nn.Parameter(rows.detach())
        heads.append(single(x))
    expected = torch.cat(heads, dim=-1)
    assert expected.shape == (3, 5, value_dim)
    agree(module(x), expected)
    agree(module(x[0]), expected[0])


def test_s2_has_the_masks_of_s3() -> None:
    """S2 is S3 with an identity as output projection."""
    module, x = randomized(MultiHeadSelfAttention(12, 12, 12, 3)), randn(2, 5, 12)
    full = MultiHeadAttention(12, 3, bias=False).double()
    for name in ("query_proj", "key_proj", "value_proj"):
        getattr(full, name).load_state_dict(getattr(module, name).state_dict())
    full.output_proj.weight = nn.Parameter(torch.eye(12, dtype=torch.float64))
    padding = torch.tensor([[False] * 5, [False, False, True, True, True]])
    for kwargs in ({"attn_mask": torch.rand(2, 3, 5, 5) < 0.5}, {"key_padding_mask": padding}, {"is_causal": True}):
        agree(module(x, **kwargs), full(x, x, x, **kwargs))
        assert differ(module(x, **kwargs), module(x))


# S3


def mask_cases(num_queries: int, num_keys: int) -> dict[str, dict[str, Tensor | bool]]:
    """Masks in this project's convention for B = 2 and 4 heads; key 0 is always allowed, or torch would give NaN."""
    allowed = torch.rand(2, 4, num_queries, num_keys) < 0.5
    allowed[..., 0] = True
    padding = torch.arange(num_keys) >= torch.tensor([[num_keys], [2]])
    return {
        "none": {},
        "shared": {"attn_mask": allowed[0, 0]},
        "batch": {"attn_mask": allowed[:, 0]},
        "batch-1": {"attn_mask": allowed[:, :1]},
        "heads": {"attn_mask": allowed},
        "padding": {"key_padding_mask": padding},
        "padding-heads": {"attn_mask": allowed, "key_padding_mask": padding},
        "causal": {"is_causal": True},
        "causal-padding": {"is_causal": True, "key_padding_mask": padding},
        "causal-heads": {"is_causal": True, "attn_mask": allowed},
    }


def torch_masks(case: dict[str, Tensor | bool], num_queries: int, num_keys: int) -> dict[str, Tensor]:
    """The same masks for nn.MultiheadAttention, whose bool attn_mask is True where attending is forbidden."""
    allowed = torch.ones(2, 4, num_queries, num_keys, dtype=torch.bool)
    mask = case.get("attn_mask")
    if isinstance(mask, Tensor):
        allowed = allowed & (mask.unsqueeze(1) if mask.ndim == 3 else mask)
    if case.get("is_causal"):
        allowed = allowed & torch.ones(num_queries, num_keys, dtype=torch.bool).tril()
    masks = {"attn_mask": ~allowed.reshape(8, num_queries, num_keys)}
    if isinstance(padding := case.get("key_padding_mask"), Tensor):
        masks["key_padding_mask"] = padding
    return masks


@pytest.mark.parametrize("case", mask_cases(5, 7))
@pytest.mark.parametrize(("bias", "kdim", "vdim"), [(True, None, None), (False, None, None), (True, 10, 6)])
def test_s3_agrees_with_torch(case: str, bias: bool, kdim: int | None, vdim: int | None) -> None:
    theirs = randomized(nn.MultiheadAttention(16, 4, bias=bias, kdim=kdim, vdim=vdim, batch_first=True))
    ours = attention_of(theirs)
    query, key, value = randn(2, 5, 16), randn(2, 7, kdim or 16), randn(2, 7, vdim or 16)
    masks = mask_cases(5, 7)[case]
    expected, _ = theirs(query, key, value, **torch_masks(masks, 5, 7), need_weights=False)
    agree(ours(query, key, value, **masks), expected)


def test_s3_unbatched_and_at_the_size_of_the_paper() -> None:
    theirs = randomized(nn.MultiheadAttention(512, 8, batch_first=True))
    ours = attention_of(theirs)
    assert (ours.embed_dim, ours.num_heads, ours.head_dim) == (512, 8, 64)
    assert sum(p.numel() for p in MultiHeadAttention().parameters()) == 4 * (512 * 512 + 512)
    x = randn(2, 9, 512)
    agree(ours(x, x, x), theirs(x, x, x, need_weights=False)[0])
    padding = torch.arange(9) > 4
    expected, _ = theirs(x[0], x[0], x[0], key_padding_mask=padding, need_weights=False)
    agree(ours(x[0], x[0], x[0], key_padding_mask=padding), expected)


def test_s3_a_sample_that_is_all_padding_yields_the_output_bias() -> None:
    module, x = randomized(MultiHeadAttention(16, 4)), randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [True] * 5])
    output = module(x, x, x, key_padding_mask=padding)
    agree(output[1], module.output_proj.bias.expand(5, 16))
    agree(output[:1], module(x[:1], x[:1], x[:1]))


def test_cross_attention_ignores_padded_memory() -> None:
    module = randomized(CrossAttention(16, 4, memory_dim=6))
    query, memory = randn(2, 5, 16), randn(2, 9, 6)
    padding = torch.arange(9).expand(2, 9) >= 4
    output = module(query, memory, padding)
    assert output.shape == (2, 5, 16)
    agree(output, module(query, memory[:, :4]))
    assert differ(output, module(query, memory))
