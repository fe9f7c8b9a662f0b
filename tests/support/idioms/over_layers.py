"""Common ways to write attention, each idiom a few lines of a forward over :class:`Layers`.

All are exported with dynamic dims, and with `static=True` also with static sizes.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from tests.support.idioms.catalogue import HEAD_DIM, HEADS, MAX_TOKENS, WIDTH, Layers, idiom

# --- position of the scale ------------------------------------------------------------------------------------------


@idiom(static=True)
def scale_on_scores(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    return s.merge((q @ k.transpose(-2, -1) * HEAD_DIM**-0.5).softmax(-1) @ v)


@idiom(static=True)
def scale_as_division(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    return s.merge(torch.softmax(q @ k.mT / math.sqrt(q.size(-1)), dim=-1) @ v)


@idiom(static=True)
def scale_on_query(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    return s.merge(((q * 0.25) @ k.mT).softmax(-1) @ v)


@idiom()
def scale_on_key(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    return s.merge((q @ (0.25 * k).mT).softmax(-1) @ v)


@idiom(static=True)
def scale_split_over_both(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    root = HEAD_DIM**-0.25
    return s.merge(((q * root) @ (k * root).mT).softmax(-1) @ v)


@idiom(static=True)
def scale_after_softmax(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    return s.merge((q @ k.mT).softmax(-1) / 4 @ v)


@idiom()
def scale_before_heads(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.split(s.query(x) / 4), s.split(s.key(x)), s.split(s.value(x))
    return s.merge((q @ k.mT).softmax(-1) @ v)


@idiom(static=True)
def no_scale(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    return s.merge((q @ k.mT).softmax(-1) @ v)


@idiom()
def negative_scale(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    return s.merge((-(q @ k.mT) / 4).softmax(-1) @ v)


@idiom()
def learned_temperature(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    return s.merge((q @ k.mT * s.temperature).softmax(-1) @ v)


@idiom()
def cosine_with_scale_per_head(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    return s.merge((F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * s.per_head.exp()).softmax(-1) @ v)


@idiom()
def bias_then_scale_per_head(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    n = x.shape[1]
    return s.merge(((q @ k.mT / 4 + s.table[:, :n, :n]) * s.per_head).softmax(-1) @ v)


@idiom(unfused="soft cap")
def soft_cap(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    return s.merge((8 * torch.tanh(q @ k.mT / 4 / 8)).softmax(-1) @ v)


# --- layout of products and heads -------------------------------------------------------------------------------------


@idiom()
def einsum_heads_after_tokens(s: Layers, x: Tensor) -> Tensor:
    b, n, _ = x.shape
    q, k, v = (t.view(b, n, HEADS, HEAD_DIM) for t in (s.query(x), s.key(x), s.value(x)))
    weights = (torch.einsum("bihd,bjhd->bhij", q, k) / 4).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v).reshape(b, n, WIDTH)


@idiom()
def einsum_in_other_letters(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    weights = torch.einsum("zhqc,zhkc->zhqk", q, k).mul(0.25).softmax(-1)
    return rearrange(torch.einsum("zhqk,zhkc->zqhc", weights, v), "z q h c -> z q (h c)")


@idiom()
def einsum_keys_first(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    weights = (torch.einsum("bhjd,bhid->bhji", k, q) / 4).softmax(2)
    return s.merge(torch.einsum("bhji,bhjd->bhid", weights, v))


@idiom()
def einops_rearranged(s: Layers, x: Tensor) -> Tensor:
    q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=HEADS) for t in s.packed(x).chunk(3, -1))
    return rearrange((q @ rearrange(k, "b h n d -> b h d n") / 4).softmax(-1) @ v, "b h n d -> b n (h d)")


@idiom()
def bmm_heads_folded_into_batch(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.folded(s.query(x)), s.folded(s.key(x)), s.folded(s.value(x))
    return s.unfolded(torch.bmm((torch.bmm(q, k.transpose(1, 2)) / 4).softmax(-1), v), x.shape[0])


@idiom()
def baddbmm_with_bias(s: Layers, x: Tensor) -> Tensor:
    b, n, _ = x.shape
    q, k, v = s.folded(s.query(x)), s.folded(s.key(x)), s.folded(s.value(x))
    bias = s.table[:, :n, :n].repeat(b, 1, 1)
    return s.unfolded(torch.bmm(torch.baddbmm(bias, q, k.transpose(1, 2), alpha=0.25).softmax(-1), v), b)


@idiom()
def scores_unfolded_and_folded_again(s: Layers, x: Tensor) -> Tensor:
    b, n, _ = x.shape
    q, k, v = s.folded(s.query(x)), s.folded(s.key(x)), s.folded(s.value(x))
    scores = torch.bmm(q, k.transpose(1, 2)).view(b, HEADS, n, n) / 4 + s.table[:, :n, :n]
    return s.unfolded(torch.bmm(scores.softmax(-1).view(b * HEADS, n, n), v), b)


@idiom(x="tokens_first")
def tokens_first(s: Layers, x: Tensor) -> Tensor:
    n, b, _ = x.shape
    q, k, v = (t.view(n, b * HEADS, HEAD_DIM).transpose(0, 1) for t in (s.query(x), s.key(x), s.value(x)))
    context = torch.bmm((torch.bmm(q, k.transpose(1, 2)) / 4).softmax(-1), v)
    return context.transpose(0, 1).reshape(n, b, WIDTH)


@idiom()
def heads_first(s: Layers, x: Tensor) -> Tensor:
    b, n, _ = x.shape
    q, k, v = (t.view(b, n, HEADS, HEAD_DIM).permute(2, 0, 1, 3) for t in (s.query(x), s.key(x), s.value(x)))
    return ((q @ k.mT / 4).softmax(-1) @ v).permute(1, 2, 0, 3).reshape(b, n, WIDTH)


@idiom(x="columns")
def columns(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.query.weight @ x, s.key.weight @ x, s.value.weight @ x
    return v @ (q.mT @ k / 8).softmax(-1).mT


@idiom(x="columns")
def columns_softmax_over_rows(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.query.weight @ x, s.key.weight @ x, s.value.weight @ x
    return v @ (k.mT @ q / 8).softmax(1)


@idiom(x="sequence")
def unbatched(s: Layers, x: Tensor) -> Tensor:
    return (s.query(x) @ s.key(x).T / 8).softmax(-1) @ s.value(x)


@idiom(x="seventeen")
def unbatched_and_static(s: Layers, x: Tensor) -> Tensor:
    return torch.mm((torch.mm(s.query(x), s.key(x).t()) / 8).softmax(-1), s.value(x))


@idiom(x="sequence")
def unbatched_and_causal(s: Layers, x: Tensor) -> Tensor:
    later = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).triu(1)
    return (s.query(x) @ s.key(x).T / 8).masked_fill(later, -math.inf).softmax(-1) @ s.value(x)


@idiom()
def single_head(s: Layers, x: Tensor) -> Tensor:
    return torch.softmax(s.query(x) @ s.key(x).transpose(1, 2) / 8, -1) @ s.value(x)


@idiom()
def values_of_another_width(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.split(s.query(x)), s.split(s.key(x)), s.split(s.narrow(x))
    return s.merge((q @ k.mT / 4).softmax(-1) @ v)


@idiom(x="sample")
def batch_of_one(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    return s.merge((q @ k.mT / 4).softmax(-1) @ v)


@idiom(x="pixels")
def windows(s: Layers, x: Tensor) -> Tensor:
    b, _, _, c = x.shape
    parts = x.view(b, 2, 4, 2, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)
    q, k, v = s.qkv(parts)
    context = s.merge((q @ k.mT / 4 + s.table[:, :16, :16]).softmax(-1) @ v)
    return context.view(b, 2, 2, 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(b, 8, 8, c)


@idiom(x="grid")
def along_the_rows_of_a_grid(s: Layers, x: Tensor) -> Tensor:
    q, k, v = (rearrange(t, "b r c (h d) -> b r h c d", h=HEADS) for t in (s.query(x), s.key(x), s.value(x)))
    return rearrange((q @ k.mT / 4).softmax(-1) @ v, "b r h c d -> b r c (h d)")


@idiom(x="grid")
def along_the_columns_of_a_grid(s: Layers, x: Tensor) -> Tensor:
    q, k, v = (rearrange(t, "b r c (h d) -> b h c r d", h=HEADS) for t in (s.query(x), s.key(x), s.value(x)))
    return rearrange((q @ k.mT / 4).softmax(-1) @ v, "b h c r d -> b r c (h d)")


# --- sources of query, key and value ----------------------------------------------------------------------------------


@idiom()
def packed_and_chunked(s: Layers, x: Tensor) -> Tensor:
    q, k, v = (s.split(t) for t in s.packed(x).chunk(3, dim=-1))
    return s.merge((q @ k.mT / 4).softmax(-1) @ v)


@idiom()
def packed_and_split(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.packed(x).split(WIDTH, dim=2)
    return s.merge((s.split(q) @ s.split(k).mT / 4).softmax(-1) @ s.split(v))


@idiom()
def packed_and_unbound(s: Layers, x: Tensor) -> Tensor:
    b, n, _ = x.shape
    q, k, v = s.packed(x).reshape(b, n, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4).unbind(0)
    return ((q * 0.25 @ k.transpose(-2, -1)).softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, WIDTH)


@idiom()
def packed_and_sliced(s: Layers, x: Tensor) -> Tensor:
    qkv = s.packed(x)
    q, k, v = (s.split(qkv[..., i * WIDTH : (i + 1) * WIDTH]) for i in range(3))
    return s.merge((q @ k.mT / 4).softmax(-1) @ v)


@idiom()
def cross_attention(s: Layers, x: Tensor, memory: Tensor) -> Tensor:
    q, k, v = s.split(s.query(x)), s.split(s.key(memory)), s.split(s.value(memory))
    return s.merge((q @ k.mT / 4).softmax(-1) @ v)


@idiom()
def learned_queries(s: Layers, x: Tensor) -> Tensor:
    return (s.latents @ s.key(x).mT / 8).softmax(-1) @ s.value(x)


@idiom()
def learned_queries_with_heads(s: Layers, x: Tensor) -> Tensor:
    q = s.split(s.query(s.latents)).expand(x.shape[0], -1, -1, -1)
    return s.merge((q @ s.split(s.key(x)).mT / 4).softmax(-1) @ s.split(s.value(x)))


@idiom()
def grouped_heads_repeated(s: Layers, x: Tensor) -> Tensor:
    k, v = (s.split(s.few(t), 2).repeat_interleave(2, dim=1) for t in (x, x.flip(-1)))
    return s.merge((s.split(s.query(x)) @ k.mT / 4).softmax(-1) @ v)


@idiom()
def grouped_heads_expanded(s: Layers, x: Tensor) -> Tensor:
    b, n, _ = x.shape

    def repeated(t: Tensor) -> Tensor:
        return s.split(t, 2)[:, :, None].expand(b, 2, 2, n, HEAD_DIM).reshape(b, HEADS, n, HEAD_DIM)

    return s.merge((s.split(s.query(x)) @ repeated(s.few(x)).mT / 4).softmax(-1) @ repeated(s.few(x) + 1))


@idiom()
def one_head_of_keys(s: Layers, x: Tensor) -> Tensor:
    k, v = s.few(x)[:, None, :, :HEAD_DIM], s.few(x)[:, None, :, HEAD_DIM:]
    return s.merge((s.split(s.query(x)) @ k.mT / 4).softmax(-1) @ v)


@idiom()
def rotary_positions(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    angles = torch.arange(x.shape[1]).to(x.dtype)[:, None] * 10.0 ** -torch.arange(8).to(x.dtype)
    angles = torch.cat([angles, angles], -1)

    def turned(t: Tensor) -> Tensor:
        return t * angles.cos() + torch.cat([-t[..., 8:], t[..., :8]], -1) * angles.sin()

    return s.merge((turned(q) @ turned(k).mT / 4).softmax(-1) @ v)


@idiom()
def rotary_positions_as_complex_numbers(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    angles = torch.outer(torch.arange(x.shape[1]).float(), 10.0 ** -torch.arange(8).float())
    turns = torch.polar(torch.ones_like(angles), angles)[None, None]

    def turned(t: Tensor) -> Tensor:
        numbers = torch.view_as_complex(t.float().reshape(*t.shape[:-1], -1, 2))
        return torch.view_as_real(numbers * turns).flatten(3).type_as(t)

    return s.merge((turned(q) @ turned(k).mT / 4).softmax(-1) @ v)


@idiom()
def cached_keys_in_front(s: Layers, x: Tensor, cache: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    k, v = torch.cat([cache, k], 2), torch.cat([cache * 2, v], 2)
    return s.merge((q @ k.mT / 4).softmax(-1) @ v)


# --- masks ------------------------------------------------------------------------------------------------------------


@idiom()
def filled_with_minus_infinity(s: Layers, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    return s.merge((q @ k.mT / 4).masked_fill(~mask[:, None], -math.inf).softmax(-1) @ v)


@idiom()
def fully_masked_rows_set_to_zero(s: Layers, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    weights = (q @ k.mT / 4).masked_fill(~mask[:, None], -math.inf).softmax(-1)
    return s.merge(weights.masked_fill(~mask[:, None].any(-1, keepdim=True), 0) @ v)


@idiom()
def nan_to_num(s: Layers, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    return s.merge((q @ k.mT / 4).masked_fill(~mask[:, None], -math.inf).softmax(-1).nan_to_num(0.0) @ v)


@idiom()
def where_isnan(s: Layers, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    weights = torch.where(mask[:, None], q @ k.mT / 4, -math.inf).softmax(-1)
    return s.merge(torch.where(weights.isnan(), 0.0, weights) @ v)


@idiom()
def filled_with_a_large_number(s: Layers, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    return s.merge((q @ k.mT / 4).masked_fill(mask[:, None] == 0, -1e4).softmax(-1) @ v)


@idiom()
def filled_with_the_smallest_number(s: Layers, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    scores = q @ k.mT / 4
    return s.merge(torch.where(mask[:, None], scores, torch.finfo(scores.dtype).min).softmax(-1) @ v)


@idiom()
def added_large_number(s: Layers, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    return s.merge((q @ k.mT / 4 + (1.0 - mask[:, None].to(x.dtype)) * -10000.0).softmax(-1) @ v)


@idiom()
def mask_before_the_scale(s: Layers, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    return s.merge(((q @ k.mT).masked_fill(~mask[:, None], -math.inf) / 4).softmax(-1) @ v)


@idiom()
def bias_under_a_finite_fill(s: Layers, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    n = x.shape[1]
    return s.merge((q @ k.mT / 4 + s.table[:, :n, :n]).masked_fill(~mask[:, None], -1e4).softmax(-1) @ v)


@idiom()
def two_masks_and_a_bias(s: Layers, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    n = x.shape[1]
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    scores = (q @ k.mT / 4).masked_fill(~causal, -math.inf) + s.table[:, :n, :n]
    return s.merge(scores.masked_fill(~mask[:, None], -math.inf).softmax(-1).nan_to_num() @ v)


@idiom()
def padding_mask(s: Layers, x: Tensor, padding: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    return s.merge((q @ k.mT / 4).masked_fill(padding[:, None, None], -math.inf).softmax(-1) @ v)


@idiom(static=True)
def causal_by_tril(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    n = x.shape[1]
    return s.merge((q @ k.mT / 4).masked_fill(torch.tril(torch.ones(n, n)) == 0, -math.inf).softmax(-1) @ v)


@idiom(static=True)
def causal_by_adding_triu(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    n = x.shape[1]
    return s.merge((q @ k.mT / 4 + torch.full((n, n), -math.inf, dtype=x.dtype).triu(1)).softmax(-1) @ v)


@idiom()
def causal_by_comparison(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    position = torch.arange(x.shape[1])
    return s.merge(torch.where(position[None] <= position[:, None], q @ k.mT / 4, -math.inf).softmax(-1) @ v)


@idiom()
def sliding_window(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    position = torch.arange(x.shape[1])
    far = (position[:, None] - position[None]).abs() > 3
    return s.merge((q @ k.mT / 4).masked_fill(far, -math.inf).softmax(-1) @ v)


# --- biases -----------------------------------------------------------------------------------------------------------


@idiom()
def bias_table(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    n = x.shape[1]
    return s.merge((q @ k.mT / 4 + s.table[:, :n, :n]).softmax(-1) @ v)


@idiom()
def relative_buckets_without_scale(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    position = torch.arange(x.shape[1])
    bias = s.buckets(position[None] - position[:, None] + MAX_TOKENS).permute(2, 0, 1)
    return s.merge((q @ k.mT + bias).softmax(-1) @ v)


@idiom()
def linear_biases(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    position = torch.arange(x.shape[1])
    return s.merge((q @ k.mT / 4 + s.per_head * (position[None] - position[:, None]).to(x.dtype)).softmax(-1) @ v)


@idiom(x="sixteen")
def decomposed_relative_positions(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    grid = q.reshape(-1, HEADS, 4, 4, HEAD_DIM)
    rows = torch.einsum("bhrcd,rsd->bhrcs", grid, s.grid_rows)[..., :, None]
    columns = torch.einsum("bhrcd,csd->bhrcs", grid, s.grid_columns)[..., None, :]
    return s.merge((q @ k.mT / 4 + (rows + columns).reshape(-1, HEADS, 16, 16)).softmax(-1) @ v)


@idiom()
def content_to_position(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    position = torch.arange(x.shape[1])
    positions = s.split(s.out(s.latents.repeat(1, 16, 1)))  # (1, h, 80, d)
    offsets = (position[:, None] - position[None] + MAX_TOKENS).expand(x.shape[0], HEADS, -1, -1)
    return s.merge(((q @ k.mT + torch.gather(q @ positions.mT, -1, offsets)) / 4).softmax(-1) @ v)


# --- the softmax ------------------------------------------------------------------------------------------------------


@idiom()
def masked_again_after_the_softmax(s: Layers, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    hidden = mask[:, None] == 0
    weights = (q @ k.mT / 4).masked_fill(hidden, torch.finfo(x.dtype).min).softmax(-1)
    return s.merge(weights.masked_fill(hidden, 0.0) @ v)


@idiom()
def where_with_a_full_tensor(s: Layers, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    scores = q @ k.mT / 4
    return s.merge(torch.where(mask[:, None], scores, torch.full_like(scores, -1e4)).softmax(-1) @ v)


@idiom(static=True)
def einsum_with_an_ellipsis(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    weights = torch.einsum("...id,...jd->...ij", q, k).div(4).softmax(-1)
    return s.merge(torch.einsum("...ij,...jd->...id", weights, v))


@idiom()
def products_written_as_sums(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    weights = (q[:, :, :, None] * k[:, :, None]).sum(-1).div(4).softmax(-1)
    return s.merge((weights[..., None] * v[:, :, None]).sum(-2))


@idiom(static=True)
def softmax_in_float32(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    return s.merge(F.softmax(q @ k.mT / 4, dim=-1, dtype=torch.float32).to(q.dtype) @ v)


@idiom()
def mask_and_softmax_in_float32(s: Layers, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    scores = (q @ k.mT / 4).float().masked_fill(~mask[:, None], -1e9)
    return s.merge(scores.softmax(-1).type_as(q) @ v)


@idiom()
def exp_over_sum(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    weights = (q @ k.mT / 4).exp()
    return s.merge(weights / weights.sum(-1, keepdim=True) @ v)


@idiom()
def exp_over_sum_less_maximum(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    scores = q @ k.mT / 4
    weights = torch.exp(scores - scores.max(-1, keepdim=True).values)
    return s.merge(weights / weights.sum(-1, keepdim=True) @ v)


@idiom(static=True)
def dropout_left_in(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    return s.merge(F.dropout((q @ k.mT / 4).softmax(-1), 0.1, training=s.training) @ v)


@idiom()
def maximum_taken_off_before_the_softmax(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    scores = q @ k.mT / 4
    return s.merge((scores - scores.amax(-1, keepdim=True).detach()).softmax(-1) @ v)


@idiom()
def cogview_softmax(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    small = q @ k.mT / (4 * 32)
    return s.merge(((small - small.amax(-1, keepdim=True)) * 32).softmax(-1) @ v)


@idiom(static=True)
def log_softmax_exponentiated(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    return s.merge((q @ k.mT / 4).log_softmax(-1).exp() @ v)


@idiom()
def logarithm_of_the_sum_taken_off(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    scores = q @ k.mT / 4
    return s.merge((scores - scores.logsumexp(-1, keepdim=True)).exp() @ v)


@idiom()
def mask_added_and_kept_finite(s: Layers, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    least = torch.finfo(x.dtype).min
    scores = q @ k.mT / 4 + torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, least)[:, None]
    return s.merge(torch.max(scores, torch.tensor(least, dtype=x.dtype)).softmax(-1) @ v)


@idiom()
def multiplied_by_a_causal_table(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    n = x.shape[1]
    below = torch.ones(MAX_TOKENS, MAX_TOKENS).tril()[:n, :n].to(x.dtype)
    return s.merge((q @ k.mT / 4 * below - 1e4 * (1 - below)).softmax(-1) @ v)


@idiom()
def bias_of_queries_and_a_table_first(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    bias = torch.einsum("bhid,hjd->bhij", q, s.table[:, : x.shape[1], :HEAD_DIM])
    return s.merge((bias + q @ k.mT / 4).softmax(-1) @ v)


@idiom(static=True)
def divided_after_the_values(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    weights = (q @ k.mT / 4).exp()
    return s.merge((weights @ v) / weights.sum(-1, keepdim=True))


@idiom(static=True)
def scores_in_float32(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    return s.merge(((q.float() @ k.float().mT) / 4).softmax(-1).to(v.dtype) @ v)


@idiom()
def head_gates_after_the_softmax(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    return s.merge((q @ k.mT / 4).softmax(-1) * s.per_head @ v)


# --- attention sinks --------------------------------------------------------------------------------------------------


@idiom()
def sinks_appended_to_the_scores(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    scores = q @ k.mT / 4
    sinks = s.per_head.expand(x.shape[0], -1, x.shape[1], -1)
    joined = torch.cat([scores, sinks], dim=-1)
    joined = joined - joined.max(dim=-1, keepdim=True).values
    return s.merge(joined.softmax(-1)[..., :-1] @ v)


@idiom()
def sinks_in_front_under_a_causal_mask(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    n = x.shape[1]
    scores = (q @ k.mT / 4).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))
    joined = torch.cat([2 * s.per_head.expand(x.shape[0], -1, n, -1), scores], dim=-1)
    return s.merge(joined.softmax(-1)[..., 1:] @ v)


@idiom()
def zero_key_and_value_appended(s: Layers, x: Tensor) -> Tensor:
    q, k, v = (torch.cat([t, torch.zeros_like(t[:, :, :1])], dim=2) for t in s.qkv(x))
    return s.merge((q[:, :, :-1] @ k.mT / 4).softmax(-1) @ v)


# --- PyTorch's own ----------------------------------------------------------------------------------------------------


@idiom(static=True)
def scaled_dot_product_attention(s: Layers, x: Tensor) -> Tensor:
    return s.merge(F.scaled_dot_product_attention(*s.qkv(x)))


@idiom(static=True)
def scaled_dot_product_attention_causal(s: Layers, x: Tensor) -> Tensor:
    return s.merge(F.scaled_dot_product_attention(*s.qkv(x), is_causal=True))


@idiom()
def scaled_dot_product_attention_boolean(s: Layers, x: Tensor, mask: Tensor) -> Tensor:
    return s.merge(F.scaled_dot_product_attention(*s.qkv(x), attn_mask=mask[:, None]))


@idiom()
def scaled_dot_product_attention_bias(s: Layers, x: Tensor) -> Tensor:
    n = x.shape[1]
    return s.merge(F.scaled_dot_product_attention(*s.qkv(x), attn_mask=s.table[None, :, :n, :n], scale=0.3))


@idiom(static=True)
def scaled_dot_product_attention_grouped(s: Layers, x: Tensor) -> Tensor:
    k, v = s.split(s.few(x), 2), s.split(s.few(x) + 1, 2)
    return s.merge(F.scaled_dot_product_attention(s.split(s.query(x)), k, v, enable_gqa=True))


@idiom()
def multihead_attention_module(s: Layers, x: Tensor) -> Tensor:
    return s.theirs(x, x, x, need_weights=False)[0]


@idiom()
def transformer_encoder_layer(s: Layers, x: Tensor) -> Tensor:
    return s.block(x)
