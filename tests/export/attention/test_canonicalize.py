"""Attention as people write it: every idiom becomes one canonical node and stays the same function; what is not quite
attention stays as it is, with a reason.

Idioms are exported many at a time, in one module that gives each its own projection: an export costs a second, however
little is in it. Each is a submodule, so its sites bear its name.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from einops import rearrange
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

from attnforge.arrays import Array
from attnforge.bundle import Case
from attnforge.errors import BuildError
from attnforge.export.attention.canonicalize import Site, canonicalize
from attnforge.export.lowering import onnxruntime as for_onnxruntime
from attnforge.export.lowering import tensorrt as for_tensorrt
from attnforge.export.lowering.attention import Lowered
from attnforge.export.sources.torch_module import Captured, capture
from attnforge.export.tensorrt.build import Plan, build
from attnforge.precision import precision_named
from attnforge.runtime.parity.budget import judge

BATCH, TOKENS, MEMORY = 2, 12, 7  # of the examples
HEADS, HEAD_DIM, WIDTH = 4, 16, 64
SCALE = HEAD_DIM**-0.5

# --- on heads: query, key and value are (B, 4, n, 16) -----------------------------------------------------------------


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.transpose(-2, -1) * SCALE).softmax(-1) @ value


def no_scale(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT).softmax(-1) @ value


def scale_on_query(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query = query * SCALE
    return torch.matmul(torch.softmax(torch.matmul(query, key.transpose(2, 3)), dim=-1), value)


def scale_on_values(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT).softmax(-1) @ (value * 0.5)


def scale_as_division(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.softmax(query @ key.transpose(-1, -2) / math.sqrt(key.shape[-1]), dim=-1) @ value


def scale_on_both_by_its_root(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    root = HEAD_DIM**-0.25
    return ((query * root) @ (key * root).mT).softmax(-1) @ value


def scale_after_the_softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return ((query @ key.mT).softmax(-1) / math.sqrt(HEAD_DIM)) @ value


def scale_on_both_sides_of_the_softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return 2.0 * (query @ key.mT * SCALE).softmax(-1) @ value


def scale_as_a_tensor(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT / torch.sqrt(torch.tensor(HEAD_DIM, dtype=query.dtype))).softmax(-1) @ value


def negative_scale(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (-0.25 * (query @ key.mT)).softmax(-1) @ value


def keys_first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (key @ query.mT * SCALE).softmax(dim=-2)  # (B, h, n_k, n_q)
    return weights.mT @ value


def einsum_usual(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (torch.einsum("bhid,bhjd->bhij", query, key) * SCALE).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", weights, value)


def einsum_tokens_before_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    weights = torch.einsum("bnhd,bmhd->bhnm", query * SCALE, key).softmax(-1)
    return torch.einsum("bhnm,bmhd->bnhd", weights, value).flatten(2)


def einsum_keys_last_but_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.einsum("bhqd,bhkd->bhkq", query, key).softmax(2)
    return torch.einsum("bhkq,bhkd->bqhd", weights, value)


def einsum_with_an_ellipsis(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (torch.einsum("...id,...jd->...ij", query, key) * SCALE).softmax(-1)
    return torch.einsum("...ij,...jd->...id", weights, value)


def einsum_heads_last(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (t.permute(0, 2, 3, 1) for t in (query, key, value))  # (B, n, d, h)
    weights = torch.einsum("qidn,qjdn->qijn", query, key).softmax(2)
    return torch.einsum("qijn,qjdn->qidn", weights, value)


def bmm_over_batch_and_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    batch, heads, tokens, dim = query.shape
    query, key, value = (t.reshape(batch * heads, -1, dim) for t in (query, key, value))
    weights = F.softmax(torch.bmm(query, key.transpose(1, 2)) * SCALE, dim=-1)
    output = torch.bmm(weights, value).view(batch, heads, tokens, dim)
    return output.transpose(1, 2).reshape(batch, tokens, heads * dim)


def baddbmm_of_nothing(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    batch, heads, tokens, dim = query.shape
    query, key, value = (t.reshape(batch * heads, -1, dim) for t in (query, key, value))
    nothing = torch.empty(query.shape[0], query.shape[1], key.shape[1], dtype=query.dtype)
    weights = torch.baddbmm(nothing, query, key.mT, beta=0, alpha=SCALE).softmax(-1)
    return torch.bmm(weights, value).reshape(batch, heads, tokens, dim)


def baddbmm_of_a_bias(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    batch, heads, tokens, dim = query.shape
    query, key, value = (t.reshape(batch * heads, -1, dim) for t in (query, key, value))
    bias = bias.repeat(batch, 1, 1)
    weights = torch.baddbmm(bias, query, key.mT, beta=1.0, alpha=SCALE).softmax(-1)
    return torch.bmm(weights, value).reshape(batch, heads, tokens, dim)


def heads_stacked_on_the_batch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    batch = query.shape[0]
    query, key, value = (torch.cat(t.unbind(1), dim=0) for t in (query, key, value))  # (h·B, n, d)
    output = (query @ key.mT * SCALE).softmax(-1) @ value
    return torch.cat([output[i * batch : (i + 1) * batch] for i in range(HEADS)], dim=2)


def heads_merged_after(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    context = (query @ key.mT * SCALE).softmax(-1) @ value
    return context.permute(0, 2, 1, 3).contiguous().view(query.shape[0], -1, WIDTH)


def one_key_head(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key[:, :1].mT * SCALE).softmax(-1) @ value[:, :1]


def one_value_head(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT * SCALE).softmax(-1) @ value[:, :1]


def key_heads_repeated(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = (t[:, :2].repeat_interleave(2, dim=1) for t in (key, value))
    return (query @ key.mT * SCALE).softmax(-1) @ value


def key_heads_expanded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    batch, _, tokens, dim = key.shape
    key, value = (t[:, :2, None].expand(batch, 2, 2, tokens, dim).reshape(batch, 4, tokens, dim) for t in (key, value))
    return (query @ key.mT * SCALE).softmax(-1) @ value


def query_heads_grouped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    grouped = query.unflatten(1, (2, 2))  # (B, 2, 2, n, d)
    weights = torch.einsum("bghnd,bgmd->bghnm", grouped * SCALE, key[:, :2]).softmax(-1)
    return torch.einsum("bghnm,bgmd->bghnd", weights, value[:, :2]).flatten(1, 2)


def channels_attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key = F.normalize(query, dim=-2), F.normalize(key, dim=-2)
    return value @ (query.mT @ key).softmax(-1).mT


def narrower_values(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT * SCALE).softmax(-1) @ value[..., :10]


def wider_values(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT * SCALE).softmax(-1) @ torch.cat([value, value.cos()], dim=-1)


def softmax_in_float32(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = F.softmax(query @ key.mT * SCALE, dim=-1, dtype=torch.float32).to(query.dtype)
    return weights @ value


def scores_and_softmax_in_float32(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = (query @ key.mT).float() * SCALE
    return scores.softmax(-1).type_as(value) @ value


def softmax_minus_maximum(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.mT * SCALE
    return (scores - scores.amax(-1, keepdim=True)).softmax(-1) @ value


def softmax_by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.mT * SCALE
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    return (exponentials / exponentials.sum(-1, keepdim=True)) @ value


def divided_behind_the_values(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    exponentials = (query @ key.mT * SCALE).exp()
    return (exponentials @ value) / exponentials.sum(-1, keepdim=True)


def log_softmax_exponentiated(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT * SCALE).log_softmax(-1).exp() @ value


def dropout(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.dropout(F.softmax(query @ key.mT * SCALE, dim=-1), 0.1, training=False) @ value


def head_by_head(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    heads = [plain(query[:, i], key[:, i], value[:, i]) for i in range(2)]
    return torch.cat(heads, dim=-1)


def capped_scores(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (torch.tanh(query @ key.mT * SCALE / 3.0) * 3.0).softmax(-1) @ value


def capped_scores_and_a_mask(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
    scores = 3.0 * torch.tanh(query @ key.mT * SCALE / 3.0) + bias
    return scores.masked_fill(~allowed, -math.inf).softmax(-1) @ value


def scores_in_float32(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query.float() @ key.float().mT * SCALE
    return scores.softmax(-1).to(value.dtype) @ value


def all_in_float32(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return plain(query.float(), key.float(), value.float()).to(query.dtype)


def a_scale_by_query(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    temperature = 0.5 + query.mean(-1, keepdim=True).sigmoid()
    return ((query @ key.mT + bias) / temperature + bias.cos()).softmax(-1) @ value


def cosine(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT / 0.07).softmax(-1) @ value


def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value)


def sdpa_causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def sdpa_boolean(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)


def sdpa_padding(query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=~padding[:, None, None, :])


def sdpa_float(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)


def sdpa_grouped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key[:, :2], value[:, :2], enable_gqa=True)


# --- with masks: allowed (n, n) and padding (B, n) are boolean and have rows that allow nothing; bias is (4, n, n) ----


def fill_where_forbidden(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    scores = query @ key.mT * SCALE
    return scores.masked_fill(~allowed, -math.inf).softmax(-1) @ value


def fill_before_the_scale(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    scores = (query @ key.mT).masked_fill(~allowed, float("-inf"))
    return (scores * SCALE).softmax(-1) @ value


def fill_where_padding(query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
    scores = query @ key.mT / 4
    return scores.masked_fill(padding[:, None, None, :], float("-inf")).softmax(-1) @ value


def fill_where_zero(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    mask = allowed.to(query.dtype)
    return (query @ key.mT * SCALE).masked_fill(mask == 0, -math.inf).softmax(-1) @ value


def where_allowed(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    scores = query @ key.mT * SCALE
    return torch.where(allowed, scores, -math.inf).softmax(-1) @ value


def where_with_a_full_tensor(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    scores = query @ key.mT * SCALE
    return torch.where(allowed, scores, torch.full_like(scores, -math.inf)).softmax(-1) @ value


def two_masks(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, padding: Tensor) -> Tensor:
    scores = (query @ key.mT * SCALE).masked_fill(~allowed, -math.inf)
    return scores.masked_fill(padding[:, None, None], -math.inf).softmax(-1) @ value


def masks_combined_first(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, padding: Tensor) -> Tensor:
    both = allowed & ~padding[:, None, None]
    return (query @ key.mT * SCALE).masked_fill(~both, -math.inf).softmax(-1) @ value


def bias_after_the_scale(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return (query @ key.mT * SCALE + bias).softmax(-1) @ value


def bias_before_the_scale(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return ((query @ key.mT + bias) * SCALE).softmax(-1) @ value


def bias_first_and_subtracted(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return (bias + query @ key.mT * SCALE - bias[:1].sin()).softmax(-1) @ value


def bias_and_mask(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, allowed: Tensor) -> Tensor:
    scores = query @ key.mT * SCALE + bias
    return scores.masked_fill(~allowed, -math.inf).softmax(-1) @ value


def mask_then_bias(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, padding: Tensor) -> Tensor:
    scores = (query @ key.mT * SCALE).masked_fill(padding[:, None, None], -math.inf)
    return (scores + bias).softmax(-1) @ value


def bias_of_minus_infinity(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    bias = torch.zeros_like(allowed, dtype=query.dtype).masked_fill(~allowed, -math.inf)
    return (query @ key.mT * SCALE + bias).softmax(-1) @ value


def bias_of_minus_ten_thousand(query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
    bias = padding[:, None, None, :].to(query.dtype) * -10000.0
    return (query @ key.mT * SCALE + bias).softmax(-1) @ value


def bias_of_the_smallest_number(query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
    bias = padding[:, None, None, :].to(query.dtype) * torch.finfo(query.dtype).min
    return (query @ key.mT * SCALE + bias).softmax(-1) @ value


def bias_of_the_smallest_float32(query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
    bias = padding[:, None, None, :].float() * torch.finfo(torch.float32).min
    return ((query @ key.mT * SCALE).float() + bias).softmax(-1).to(query.dtype) @ value


def fill_with_a_finite_number(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    return (query @ key.mT * SCALE).masked_fill(~allowed, -1e4).softmax(-1) @ value


def fill_with_the_smallest_number(query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
    scores = query @ key.mT * SCALE
    return scores.masked_fill(padding[:, None, None, :], torch.finfo(scores.dtype).min).softmax(-1) @ value


def fill_in_float32_with_minus_a_billion(query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
    scores = (query @ key.mT * SCALE).float().masked_fill(padding[:, None, None, :], -1e9)
    return scores.softmax(-1).to(query.dtype) @ value


def bias_in_float32(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    scores = (query @ key.mT * SCALE).float() + bias.float()
    return scores.softmax(-1).to(query.dtype) @ value


def two_products_added(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return ((query @ key.mT + query.sin() @ key.cos().mT) * SCALE).softmax(-1) @ value


def causal_by_triu(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mask = torch.triu(torch.full((query.shape[-2], key.shape[-2]), -math.inf, dtype=query.dtype), diagonal=1)
    return (query @ key.mT * SCALE + mask).softmax(-1) @ value


def causal_by_tril(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mask = torch.tril(torch.ones(query.shape[-2], key.shape[-2]))
    return (query @ key.mT * SCALE).masked_fill(mask == 0, -math.inf).softmax(-1) @ value


def silent_rows_zeroed(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    weights = (query @ key.mT * SCALE).masked_fill(~allowed, -math.inf).softmax(-1)
    return weights.masked_fill(~allowed.any(-1, keepdim=True), 0.0) @ value


def nan_weights_zeroed(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    weights = (query @ key.mT * SCALE).masked_fill(~allowed, -math.inf).softmax(-1)
    return torch.where(torch.isnan(weights), 0.0, weights) @ value


def nan_to_num(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    weights = (query @ key.mT * SCALE).masked_fill(~allowed, -math.inf).softmax(-1)
    return torch.nan_to_num(weights, nan=0.0) @ value


def nan_outputs_zeroed(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    output = (query @ key.mT * SCALE).masked_fill(~allowed, -math.inf).softmax(-1) @ value
    return output.masked_fill(output.isnan(), 0.0)


ON_HEADS: tuple[Callable[..., Tensor], ...] = (
    plain, no_scale, scale_on_query, scale_on_values, scale_as_division, scale_on_both_by_its_root,
    scale_after_the_softmax, scale_on_both_sides_of_the_softmax, scale_as_a_tensor,
    negative_scale, keys_first, einsum_usual, einsum_tokens_before_heads, einsum_keys_last_but_one,
    einsum_with_an_ellipsis, einsum_heads_last, bmm_over_batch_and_heads,
    baddbmm_of_nothing, baddbmm_of_a_bias, heads_stacked_on_the_batch, heads_merged_after, one_key_head,
    one_value_head, key_heads_repeated, key_heads_expanded, query_heads_grouped, channels_attend, narrower_values,
    wider_values, softmax_in_float32, scores_and_softmax_in_float32, softmax_minus_maximum, softmax_by_hand,
    divided_behind_the_values, log_softmax_exponentiated, dropout,
    head_by_head, capped_scores, capped_scores_and_a_mask, scores_in_float32, all_in_float32,
    a_scale_by_query, cosine, sdpa, sdpa_causal, sdpa_boolean, sdpa_padding, sdpa_float, sdpa_grouped,
    fill_where_forbidden, fill_before_the_scale, fill_where_padding, fill_where_zero, where_allowed,
    where_with_a_full_tensor, two_masks, masks_combined_first, bias_after_the_scale,
    bias_before_the_scale, bias_first_and_subtracted, bias_and_mask, mask_then_bias, bias_of_minus_infinity,
    bias_of_minus_ten_thousand, bias_of_the_smallest_number, bias_of_the_smallest_float32,
    fill_with_a_finite_number, fill_with_the_smallest_number, fill_in_float32_with_minus_a_billion, bias_in_float32,
    two_products_added, causal_by_triu, causal_by_tril, silent_rows_zeroed,
    nan_weights_zeroed, nan_to_num, nan_outputs_zeroed,
)  # fmt: skip


# --- whole modules: x is (B, n, 64), memory (B, m, 64) ----------------------------------------------------------------


class Takes(nn.Module):
    """A module that takes x and some of what is given."""

    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        raise NotImplementedError


class OnHeads(Takes):
    """One way to attend, behind a projection of its own."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.attend = attend
        self.takes = list(inspect.signature(attend).parameters)[3:]
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        query, key, value = rearrange(self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=HEADS).unbind(0)
        return self.attend(query, key, value, *(given[name] for name in self.takes))


class ChunkedAndViewed(Takes):
    """As in nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn_dropout = nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        k = k.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        q = q.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        v = v.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))  # type: ignore[index]
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class BatchTimesHeads(Takes):
    """As in diffusers: heads folded into the batch, einsum, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        q, k, v = (
            rearrange(to(source), "b n (h d) -> (b h) n d", h=HEADS)
            for to, source in ((self.to_q, x), (self.to_k, given["memory"]), (self.to_v, given["memory"]))
        )
        attn = (torch.einsum("b i d, b j d -> b i j", q, k) * SCALE).softmax(dim=-1)
        return rearrange(torch.einsum("b i j, b j d -> b i d", attn, v), "(b h) n d -> b n (h d)", h=HEADS)


class CrossAttention(Takes):
    """Queries from one sequence, keys and values from another of another length."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        q = rearrange(self.q(x), "b n (h d) -> b h n d", h=HEADS)
        k, v = rearrange(self.kv(given["memory"]), "b m (two h d) -> two b h m d", two=2, h=HEADS)
        return rearrange((q @ k.mT * SCALE).softmax(-1) @ v, "b h n d -> b n (h d)")


class Columns(Takes):
    """Features are rows, tokens columns: as after a 1×1 convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = nn.Conv1d(WIDTH, 3 * WIDTH, 1, bias=False)

    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        q, k, v = (t.unflatten(1, (HEADS, HEAD_DIM)) for t in self.to_qkv(x.mT).chunk(3, dim=1))  # (B, h, d, n)
        attn = (q.transpose(2, 3) @ k / math.sqrt(HEAD_DIM)).softmax(dim=-1)  # (B, h, n, n)
        return (v @ attn.transpose(2, 3)).flatten(1, 2)  # (B, h·d, n)


class WeightsByHead(Takes):
    """A weight a head, and einsum for everything."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Parameter(torch.randn(HEADS, WIDTH, HEAD_DIM) / 8) for _ in range(4))

    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        q, k, v = (torch.einsum("bnc,hcd->bnhd", x, w) for w in (self.q, self.k, self.v))
        attn = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(HEAD_DIM), dim=-1)
        return torch.einsum("bqhd,hcd->bqc", torch.einsum("bhqk,bkhd->bqhd", attn, v), self.o)


class Unbatched(Takes):
    """Two dims: one sequence, one head."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH) / 8)

    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        q, k, v = torch.mm(x[0], self.w).chunk(3, dim=1)
        return torch.mm(torch.softmax(torch.mm(q, k.t()) / math.sqrt(WIDTH), dim=1), v)


class UnbatchedHeads(Takes):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        q, k, v = (t.view(-1, HEADS, HEAD_DIM).transpose(0, 1) for t in self.qkv(x[0]).chunk(3, dim=-1))
        return ((q @ k.mT * SCALE).softmax(-1) @ v).transpose(0, 1).reshape(-1, WIDTH)


class SingleHead(Takes):
    """Three dims and torch.bmm."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        scores = torch.bmm(self.query(x), self.key(x).transpose(1, 2)) / WIDTH**0.5
        return torch.bmm(F.softmax(scores, dim=-1), self.value(x))


class HeadByHead(Takes):
    """A list of heads, each a module of its own size."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(SingleHead() for _ in range(3))

    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        return torch.cat([head(x, given) for head in self.heads], dim=-1)


class SingleHeadWithBias(SingleHead):
    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        scores = torch.bmm(self.query(x), self.key(x).transpose(1, 2)) / WIDTH**0.5
        return torch.bmm(F.softmax(scores + given["bias"][0], dim=-1), self.value(x))


class Latents(Takes):
    """Learned queries, shared by the batch: Perceiver, DETR, attention pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.kv = nn.Parameter(torch.randn(5, WIDTH)), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        q = self.latents.unflatten(-1, (HEADS, HEAD_DIM)).transpose(0, 1)  # (h, 5, d)
        k, v = (t.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for t in self.kv(x).chunk(2, dim=-1))
        return ((q @ k.mT * SCALE).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Pooling(Takes):
    """One score a token."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        return self.score(x).transpose(1, 2).softmax(-1) @ x


class PoolingBySum(Pooling):
    """The same, its product written out."""

    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        return (self.score(x).softmax(dim=1) * x).sum(dim=1)


class ScaleByHead(Takes):
    """A learned temperature a head, on cosines: Swin v2."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.logit_scale = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.randn(HEADS, 1, 1))

    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        q, k, v = (t.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        attn = attn * self.logit_scale.clamp(max=4.6).exp() + given["bias"].unsqueeze(0)
        return (attn.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)


class ClassToken(Takes):
    """n + 1 tokens, two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.layers = nn.ModuleList(OnHeads(heads_merged_after) for _ in range(2))

    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        for layer in self.layers:
            x = x + layer(x, given)
        return x[:, 0]


class TorchMultihead(Takes):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        memory = given["memory"]
        return self.attention(x, memory, memory, need_weights=False)[0]


class TorchMultiheadPadded(TorchMultihead):
    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        padding = given["padding"] & ~given["padding"].all(-1, keepdim=True)  # for nothing else do torch's paths agree
        return self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]


class TorchMultiheadTokensFirst(Takes):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS)

    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        x = x.transpose(0, 1)
        return self.attention(x, x, x, need_weights=False)[0]


class TorchEncoderLayer(Takes):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)

    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        return self.layer(x)


class Windows(Takes):
    """Five dims: windows of four tokens, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        qkv = rearrange(self.qkv(x), "b (w n) (three h d) -> three b w h n d", three=3, h=HEADS, n=4)
        q, k, v = qkv.unbind(0)
        return rearrange((q @ k.mT * SCALE).softmax(-1) @ v, "b w h n d -> b (w n) (h d)")


class ShiftedWindows(Windows):
    """Swin's mask: one a window, added where windows are a dim of their own, which they are before and after not."""

    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        q, k, v = rearrange(self.qkv(x), "b (w n) (three h d) -> three (b w) h n d", three=3, h=HEADS, n=4).unbind(0)
        mask = torch.zeros(3, 4, 4, dtype=x.dtype)
        mask[1, :2, 2:] = -100.0
        attn = q @ k.transpose(-2, -1) * SCALE
        attn = attn.view(-1, 3, HEADS, 4, 4) + mask.unsqueeze(1).unsqueeze(0)
        attn = attn.view(-1, HEADS, 4, 4).softmax(dim=-1)
        return (attn @ v).transpose(1, 2).reshape(-1, 12, WIDTH)


MODULES: tuple[type[Takes], ...] = (
    ChunkedAndViewed, BatchTimesHeads, CrossAttention, Columns, WeightsByHead, Unbatched, UnbatchedHeads, SingleHead,
    HeadByHead, SingleHeadWithBias, Latents, Pooling, PoolingBySum, ScaleByHead, ClassToken,
    TorchMultihead, TorchMultiheadPadded, TorchMultiheadTokensFirst, TorchEncoderLayer, Windows, ShiftedWindows,
)  # fmt: skip


IDIOMS: dict[str, Callable[[], Takes]] = {
    **{attend.__name__: lambda attend=attend: OnHeads(attend) for attend in ON_HEADS},
    **{module.__name__: module for module in MODULES},
}

MOVING = [
    "einsum_heads_last", "bmm_over_batch_and_heads", "baddbmm_of_a_bias", "heads_stacked_on_the_batch",
    "key_heads_expanded", "query_heads_grouped", "sdpa_boolean", "two_masks", "causal_by_triu", "BatchTimesHeads",
    "Columns", "Unbatched", "SingleHeadWithBias", "Latents", "ClassToken",
]  # fmt: skip
"""Idioms whose shapes are computed or whose axes move: exported with dynamic dims, which takes four times as
long."""
STILL = [name for name in IDIOMS if name not in MOVING]

# --- no attention, or not quite ---------------------------------------------------------------------------------------


def weights_are_an_output(query: Tensor, key: Tensor, value: Tensor) -> Any:
    weights = (query @ key.mT * SCALE).softmax(-1)
    return weights @ value, weights


def mean_weights_are_an_output(query: Tensor, key: Tensor, value: Tensor) -> Any:
    weights = (query @ key.mT * SCALE).softmax(-1)
    return weights @ value, weights.mean(1)


def scores_are_an_output(query: Tensor, key: Tensor, value: Tensor) -> Any:
    scores = query @ key.mT * SCALE
    return scores.softmax(-1) @ value, scores


def scores_used_twice(query: Tensor, key: Tensor, value: Tensor) -> Any:
    scores = query @ key.mT * SCALE
    return scores.softmax(-1) @ value + (2 * scores).softmax(-1) @ value.sin()


def softmax_over_queries(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return (query @ key.mT * SCALE).softmax(-2) @ value


def softmax_over_heads(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return (query @ key.mT * SCALE).softmax(1) @ value


def weights_transposed(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return (query @ key.mT * SCALE).softmax(-1).mT @ value


def mask_after_the_softmax(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Any:
    return (query @ key.mT * SCALE).softmax(-1).masked_fill(~allowed, 0.0) @ value


def mask_multiplied_after_the_softmax(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Any:
    return ((query @ key.mT * SCALE).softmax(-1) * allowed) @ value


def small_weights_dropped(query: Tensor, key: Tensor, value: Tensor) -> Any:
    weights = (query @ key.mT * SCALE).softmax(-1)
    return weights.masked_fill(weights < 0.08, 0.0) @ value


def large_weights_dropped(query: Tensor, key: Tensor, value: Tensor) -> Any:
    weights = 4 * (query @ key.mT * SCALE).softmax(-1)
    return torch.where(weights > 1.2, torch.zeros(()), weights) @ value


def weights_shrunk(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return ((query @ key.mT * SCALE).softmax(-1) - 0.05).relu() @ value


def weights_renormalised(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Any:
    weights = (query @ key.mT * SCALE).softmax(-1) * allowed
    return weights / weights.sum(-1, keepdim=True) @ value


def softmax_with_one_more(query: Tensor, key: Tensor, value: Tensor) -> Any:
    exponentials = (query @ key.mT * SCALE).exp()
    return exponentials / (1 + exponentials.sum(-1, keepdim=True)) @ value


def scale_by_key(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return ((query @ key.mT) * key.mean(-1).unsqueeze(-2).sigmoid()).softmax(-1) @ value


def talking_heads(query: Tensor, key: Tensor, value: Tensor) -> Any:
    mixed = torch.einsum("bhij,gh->bgij", query @ key.mT * SCALE, torch.eye(HEADS, dtype=query.dtype) + 0.1)
    return mixed.softmax(-1) @ value


def additive_score(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return torch.tanh(query[:, :, :, None] + key[:, :, None]).sum(-1).softmax(-1) @ value


def distance_score(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return (-(query[:, :, :, None] - key[:, :, None]).square().sum(-1)).softmax(-1) @ value


def hard_alignment(query: Tensor, key: Tensor, value: Tensor) -> Any:
    best = (query @ key.mT).argmax(-1, keepdim=True)
    return (torch.arange(key.shape[-2]) == best).to(value.dtype) @ value


def scores_symmetrised(query: Tensor, key: Tensor, value: Tensor) -> Any:
    scores = query @ key.mT * SCALE
    return (scores + scores.mT).softmax(-1) @ value


MISSES: dict[Callable[..., Any], str] = {
    weights_are_an_output: "attention weights .* are an output of the model|used 2 times",
    mean_weights_are_an_output: "attention weights .* are used 2 times",
    scores_are_an_output: "scores .* are an output of the model|used 2 times",
    scores_used_twice: "scores .* are used 2 times",
    softmax_over_queries: "does not sum over the keys",
    softmax_over_heads: "does not run over the keys",
    weights_transposed: "does not sum over the keys",
    mask_after_the_softmax: "a mask is applied to the weights after the softmax",
    mask_multiplied_after_the_softmax: "no longer sum to one",
    small_weights_dropped: "attention weights",
    large_weights_dropped: "attention weights",
    weights_shrunk: "weights go through Sub",
    weights_renormalised: "used 2 times",
    scale_by_key: "by a tensor that differs by key",
    talking_heads: "Einsum|inner product",
    additive_score: "inner product|ReduceSum",
    distance_score: "inner product|ReduceSum",
    hard_alignment: r"the alignment is hard \(ArgMax\)",
    scores_symmetrised: "used 2 times",
}
"""Each with what its reason must say."""


def classifier(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return value.flatten(1).softmax(-1)


class Classifier(Takes):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        return self.head(x).softmax(-1)


class Experts(Takes):
    """Softmax over experts, each of which has a say."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, 8) for _ in range(3))

    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Any:
        gates = self.gate(x).softmax(-1)
        return sum(gates[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


NO_SITES: dict[str, Callable[[], Takes]] = {
    "classifier": lambda: OnHeads(classifier),
    "softmax_with_one_more": lambda: OnHeads(softmax_with_one_more),
    "Classifier": Classifier,
    "Experts": Experts,
}

# --- exporting them ---------------------------------------------------------------------------------------------------


class Together(nn.Module):
    """All idioms side by side, each a submodule."""

    def __init__(self, idioms: Mapping[str, Callable[[], Takes]]) -> None:
        super().__init__()
        self.idioms = nn.ModuleDict({name: make() for name, make in idioms.items()})

    def forward(self, x: Tensor, memory: Tensor, allowed: Tensor, padding: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        given = {"memory": memory, "allowed": allowed, "padding": padding, "bias": bias}
        return tuple(output for name in self.idioms for output in self.one(name, x, given))

    def one(self, name: str, x: Tensor, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        result = self.idioms[name](x, given)
        return result if isinstance(result, tuple) else (result,)


def inputs(batch: int = BATCH, tokens: int = TOKENS, memory: int = MEMORY, seed: int = 0) -> tuple[Tensor, ...]:
    """Masks have rows that allow nothing and rows that allow everything, wherever there is more than one row."""
    random = torch.Generator().manual_seed(seed)
    allowed = torch.rand(tokens, tokens, generator=random) < 0.7
    padding = torch.rand(batch, tokens, generator=random) < 0.3
    allowed[0], allowed[-1] = False, True
    padding[0], padding[-1] = True, False
    x = 2 * torch.randn(batch, tokens, WIDTH, generator=random)
    return (
        x, torch.randn(batch, memory, WIDTH, generator=random), allowed, padding,
        torch.randn(HEADS, tokens, tokens, generator=random),
    )  # fmt: skip


Outputs = dict[str, list[Array]]


@dataclass
class Exported:
    """Idioms exported together, and what became of them."""

    captured: Captured
    sites: list[Site]

    @property
    def module(self) -> Together:
        assert isinstance(self.captured.module, Together)
        return self.captured.module

    def sites_of(self, idiom: str) -> list[Site]:
        return [site for site in self.sites if f"{site.name}.".replace("#", ".").startswith(f"idioms.{idiom}.")]

    def eager(self, args: Sequence[Tensor], module: Together | None = None) -> Outputs:
        module = module or self.module
        x, *others = args
        given = dict(zip(("memory", "allowed", "padding", "bias"), others, strict=True))
        with torch.no_grad():
            return {name: [o.numpy() for o in module.one(name, x, given)] for name in module.idioms}

    def truth(self, args: Sequence[Tensor]) -> Outputs:
        """Eager in float64, with the same weights."""
        double = copy.deepcopy(self.module).double()
        return self.eager([a.double() if a.is_floating_point() else a for a in args], double)

    def named(self, results: Sequence[Array], args: Sequence[Tensor]) -> Outputs:
        rest = list(results)
        return {name: [rest.pop(0) for _ in outputs] for name, outputs in self.eager(args).items()}

    def feeds(self, args: Sequence[Tensor]) -> dict[str, Array]:
        return {spec.name: arg.numpy() for spec, arg in zip(self.captured.inputs, args, strict=True)}


def export(idioms: Mapping[str, Callable[[], Takes]], precision: str = "fp32", dynamic: bool = False) -> Exported:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = Together(idioms).eval()
    shapes = None
    if dynamic:
        b, n, m = Dim("b", min=1, max=4), Dim("n", min=1, max=32), Dim("m", min=1, max=32)
        x, memory = {0: b, 1: n}, {0: b, 1: m}
        shapes = {"x": x, "memory": memory, "allowed": {0: n, 1: n}, "padding": x, "bias": {1: n, 2: n}}
    captured = capture(module, inputs(), shapes, precision_named(precision))
    return Exported(captured, canonicalize(captured.model).sites)


def session_of(model: ir.Model) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    data = ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def lowered_for_onnxruntime(exported: Exported) -> Any:
    model = exported.captured.model.clone()
    for_onnxruntime.lower(model, exported.sites, {"b": BATCH, "n": TOKENS, "m": MEMORY})
    return session_of(model)


def agree(got: Sequence[Array], expected: Sequence[Array], tolerance: float = 2e-6) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.shape == other.shape
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
        error = np.linalg.norm(np.nan_to_num(one.astype(np.float64)) - np.nan_to_num(other.astype(np.float64)))
        assert error <= tolerance * np.linalg.norm(np.nan_to_num(other))


# --- idioms -----------------------------------------------------------------------------------------------------------

NOT_YET_IN_16_BITS = {
    "head_by_head": "one head a site, its batch static: the builder chooses separate kernels",
    "HeadByHead": "the builder fails in its own optimiser",
    "PoolingBySum": "a lone query of a lone head: the builder chooses separate kernels",
}
"""Idioms that TensorRT does not fuse. Whoever finds a form that it does takes them off this list."""


def some_not_yet(names: Sequence[str], reasons: Mapping[str, str]) -> list[Any]:
    marks = {name: pytest.mark.xfail(strict=True, reason=reason) for name, reason in reasons.items()}
    return [pytest.param(name, marks=marks[name]) if name in marks else name for name in names]


@pytest.fixture(scope="module")
def exact() -> Exported:
    return export({name: IDIOMS[name] for name in STILL})


@pytest.fixture(scope="module")
def half() -> Exported:
    return export(IDIOMS, "fp16")


@pytest.fixture(scope="module")
def moving() -> Exported:
    return export({name: IDIOMS[name] for name in MOVING}, dynamic=True)


@pytest.fixture(scope="module")
def misses() -> Exported:
    on_heads: dict[str, Callable[[], Takes]] = {f.__name__: lambda f=f: OnHeads(f) for f in MISSES}
    return export({**on_heads, **NO_SITES})


@pytest.mark.parametrize("idiom", STILL)
def test_an_idiom_becomes_one_canonical_node(exact: Exported, idiom: str) -> None:
    sites = exact.sites_of(idiom)
    assert len(sites) == {"head_by_head": 2, "HeadByHead": 3}.get(idiom, 1)
    for site in sites:
        assert site.reason is None and site.written_as
        (node,) = (node for node in exact.captured.model.graph if node.name == site.node)
        assert node.op_type == "Attention" and "scale" in node.attributes


@pytest.fixture(scope="module")
def exact_outputs(exact: Exported) -> tuple[Outputs, Outputs]:
    args = inputs(seed=1)
    results = lowered_for_onnxruntime(exact).run(None, exact.feeds(args))
    return exact.named(results, args), exact.eager(args)


@pytest.mark.parametrize("idiom", STILL)
def test_an_idiom_stays_the_same_function(exact_outputs: tuple[Outputs, Outputs], idiom: str) -> None:
    got, expected = exact_outputs
    agree(got[idiom], expected[idiom])


@pytest.fixture(scope="module")
def moving_outputs(moving: Exported) -> list[tuple[Outputs, Outputs]]:
    session = lowered_for_onnxruntime(moving)
    found = []
    for i, (batch, tokens, memory) in enumerate([(1, 1, 1), (3, 7, 32), (4, 32, 5), (2, 13, 13)]):
        args = inputs(batch, tokens, memory, seed=i)
        found.append((moving.named(session.run(None, moving.feeds(args)), args), moving.eager(args)))
    return found


@pytest.mark.parametrize("idiom", MOVING)
def test_at_every_size(moving: Exported, moving_outputs: list[tuple[Outputs, Outputs]], idiom: str) -> None:
    assert len(moving.sites_of(idiom)) == (2 if idiom == "ClassToken" else 1)
    assert [site.reason for site in moving.sites_of(idiom) if site.node is None] == []
    for got, expected in moving_outputs:
        agree(got[idiom], expected[idiom])


# In 16 bits


@dataclass
class Built:
    """The TensorRT form of all idioms, and the plan of each, or the builder's words."""

    lowered: dict[str, Lowered]
    model: ir.Model
    plans: dict[str, Plan | str]


@pytest.fixture(scope="module")
def built(half: Exported, tmp_path_factory: pytest.TempPathFactory) -> Built:
    model = half.captured.model.clone()
    lowered = {one.site: one for one in for_tensorrt.lower(model, half.sites).sites}
    outputs = dict(zip(half.eager(half.captured.args), model.graph.outputs, strict=True))  # every idiom has one
    file = tmp_path_factory.mktemp("idioms") / "model.onnx"

    def plan_of(names: Sequence[str]) -> Plan:
        ir.save(only(model, [str(outputs[name].name) for name in names]), file)
        kept = {value.name for value in ir.load(file).graph.inputs}
        return build(file, "tensorrt_rtx", [spec for spec in half.captured.inputs if spec.name in kept], "fp16")

    plans: dict[str, Plan | str] = {}
    pending = [list(IDIOMS)[i : i + 14] for i in range(0, len(IDIOMS), 14)]
    while pending:
        names = pending.pop()
        try:
            plans |= dict.fromkeys(names, plan_of(names))
        except BuildError as error:  # one of them, or what they are together
            plans[names[0]] = str(error)
            pending += [[name] for name in names] if len(names) > 1 else []
    return Built(lowered, model, plans)


def only(model: ir.Model, outputs: Sequence[str]) -> ir.Model:
    """A copy of `model` with these outputs and what they need."""
    part = model.clone()
    kept = [value for value in part.graph.outputs if value.name in outputs]
    part.graph.outputs.clear()
    part.graph.outputs.extend(kept)
    RemoveUnusedNodesPass()(part)
    unused = [value for value in part.graph.inputs if not value.uses()]
    for value in unused:
        part.graph.inputs.remove(value)
    return part


NEVER_FUSED = {
    "capped_scores": "a soft cap",
    "capped_scores_and_a_mask": "a soft cap",
    "all_in_float32": "no fused attention kernel for float",
}


@pytest.mark.parametrize("idiom", some_not_yet(list(IDIOMS), NOT_YET_IN_16_BITS))
def test_tensorrt_fuses_an_idiom(half: Exported, built: Built, idiom: str) -> None:
    plan = built.plans[idiom]
    assert isinstance(plan, Plan), plan
    assert half.sites_of(idiom)
    for site in half.sites_of(idiom):
        assert site.node is not None, site.reason
        one = built.lowered[site.name]
        if idiom in NEVER_FUSED:
            assert one.unfused is not None and NEVER_FUSED[idiom] in one.unfused
        else:
            assert one.unfused is None
            assert plan.kernel_of(one.node), f"{one.why}; the builder made {plan.layers_of(one.node)}"


def within_budget(idiom: str, got: Sequence[Array], eager: Sequence[Array], truth: Sequence[Array]) -> None:
    case = Case(name=idiom, sizes={}, kind="normal", seed=0)
    for arrays in zip(got, eager, truth, strict=True):
        found = judge(case, "output", *(array.astype(np.float64) for array in arrays), precision_named("fp16"))
        assert found.passed, found


HalfOutputs = dict[str, Outputs]


@pytest.fixture(scope="module")
def half_outputs(half: Exported, built: Built) -> HalfOutputs:
    """ONNX Runtime, which computes in fp32; TensorRT's graph in NumPy, which rounds every result to fp16 as it says."""
    args = [arg.half() if arg.is_floating_point() else arg for arg in inputs(seed=2)]
    onnxruntime = lowered_for_onnxruntime(half).run(None, half.feeds(args))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        tensorrt = ReferenceEvaluator(ir.to_proto(built.model)).run(None, half.feeds(args))
    return {
        "onnxruntime": half.named(onnxruntime, args),
        "tensorrt": half.named(tensorrt, args),
        "eager": half.eager(args),
        "truth": half.truth(args),
    }


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt"])
@pytest.mark.parametrize("idiom", IDIOMS)
def test_an_idiom_keeps_to_the_budget_in_16_bits(half_outputs: HalfOutputs, idiom: str, target: str) -> None:
    within_budget(idiom, half_outputs[target][idiom], half_outputs["eager"][idiom], half_outputs["truth"][idiom])


# --- no attention, or not quite ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def missed_outputs(misses: Exported) -> tuple[Outputs, Outputs]:
    args = inputs(seed=3)
    return misses.named(lowered_for_onnxruntime(misses).run(None, misses.feeds(args)), args), misses.eager(args)


@pytest.mark.parametrize("miss", [miss.__name__ for miss in MISSES])
def test_what_is_not_quite_attention_is_left_and_gets_a_reason(misses: Exported, miss: str) -> None:
    pattern = {f.__name__: pattern for f, pattern in MISSES.items()}[miss]
    sites = misses.sites_of(miss)
    assert sites
    for site in sites:
        assert site.node is None
        assert site.reason is not None and re.search(pattern, site.reason), site.reason


@pytest.mark.parametrize("name", NO_SITES)
def test_a_softmax_that_weighs_nothing_is_no_site(misses: Exported, name: str) -> None:
    assert misses.sites_of(name) == []


def test_nothing_is_attention_where_nothing_was_recognised(misses: Exported) -> None:
    assert [node.name for node in misses.captured.model.graph if node.op_type == "Attention"] == []


@pytest.mark.parametrize("miss", [*(miss.__name__ for miss in MISSES), *NO_SITES])
def test_what_is_not_quite_attention_stays_the_same_function(
    missed_outputs: tuple[Outputs, Outputs], miss: str
) -> None:
    got, expected = missed_outputs
    agree(got[miss], expected[miss])


# --- one at a time ----------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """What PyTorch's own attention makes of queries that may attend to nothing: zeros."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


@pytest.mark.parametrize("kind", ["boolean", "float"])
def test_torchs_attention_over_nothing_is_zero(kind: str) -> None:
    query, key, value = torch.randn(3, 2, 4, 5, 16, generator=torch.Generator().manual_seed(1)).unbind(0)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    mask[2] = False
    given = mask if kind == "boolean" else torch.zeros(5, 5).masked_fill(~mask, -math.inf)
    captured = capture(Masked(), (query, key, value, given), None, precision_named("fp32"))
    sites = canonicalize(captured.model).sites
    assert [site.node for site in sites] == ["Masked/Attention"]
    expected = Masked()(query, key, value, given).numpy()
    assert not expected[:, :, 2].any()
    for lower in (lambda m: for_onnxruntime.lower(m, sites, {}), lambda m: for_tensorrt.lower(m, sites)):
        model = captured.model.clone()
        lower(model)
        feeds = dict(zip(("query", "key", "value", "mask"), (query, key, value, given), strict=True))
        (output,) = session_of(model).run(None, {name: tensor.numpy() for name, tensor in feeds.items()})
        assert not output[:, :, 2].any()
        agree([output], [expected])


class OneHead(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)


@pytest.mark.xfail(strict=True, reason="torch's exporter takes scaled_dot_product_attention on four dims only")
def test_torchs_attention_on_three_dims() -> None:
    captured = capture(OneHead(), (torch.randn(2, 5, 16),) * 3, None, precision_named("fp32"))
    assert [site.node for site in canonicalize(captured.model).sites] == ["OneHead/Attention"]


def test_torchs_attention_over_dynamic_features_is_right_or_left() -> None:
    """The scale is `1/√d` with d only known at run time."""
    shapes = {name: {3: Dim("d", min=2, max=64)} for name in ("query", "key", "value")}
    captured = capture(OneHead(), tuple(torch.randn(3, 2, 4, 5, 16)), shapes, precision_named("fp32"))
    sites = canonicalize(captured.model).sites
    for_onnxruntime.lower(captured.model, sites, {"d": 16})
    args = torch.randn(3, 2, 4, 5, 36, generator=torch.Generator().manual_seed(1))
    feeds = {name: arg.numpy() for name, arg in zip(("query", "key", "value"), args, strict=True)}
    agree(session_of(captured.model).run(None, feeds), [OneHead()(*args).numpy()])


class Shared(nn.Module):
    """One module used twice, and two unnamed places in the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = OnHeads(heads_merged_after)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(self.layer(x, {}), {})
        x = (x @ x.mT).softmax(-1) @ x
        return (x @ x.mT / 8).softmax(-1) @ x


def test_sites_are_named_after_modules_and_numbered() -> None:
    captured = capture(Shared(), (torch.randn(2, 5, WIDTH),), None, precision_named("fp32"))
    sites = canonicalize(captured.model).sites
    assert [site.name for site in sites] == ["layer", "layer#2", "Shared", "Shared#2"]
    assert [site.node for site in sites] == [f"{site.name}/Attention" for site in sites]


class ScaleAsAParameter(nn.Module):
    """One learned number, with more dims than what it multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.temperature = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.full((1, 1, 1, 1), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (t.view(-1, HEADS, HEAD_DIM).transpose(0, 1) for t in self.qkv(x).chunk(3, dim=-1))
        return ((query * self.temperature) @ key.mT).softmax(-1) @ value


def test_a_factor_may_have_more_dims_than_what_it_multiplies() -> None:
    module, x = ScaleAsAParameter(), torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
    captured = capture(module, (x,), None, precision_named("fp32"))
    sites = canonicalize(captured.model).sites
    for_onnxruntime.lower(captured.model, sites, {})
    with torch.no_grad():
        agree(session_of(captured.model).run(None, {"x": x.numpy()}), [module(x).numpy()])
