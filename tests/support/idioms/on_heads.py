"""Ways to attend on query, key and value of (B, 4, n, 16), after a projection that splits the heads.

`allowed` (n, n) and `padding` (B, n) are boolean and have fully masked rows; `bias` is (4, n, n). All are
exported with static sizes, and with `dynamic=True`, for those that compute shapes or move axes, also with dynamic dims.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.idioms.catalogue import EXAMPLE, HEAD_DIM, HEADS, SCALE, SUMS_IN_16_BITS, WIDTH, on_heads


@on_heads()
def scale_on_values(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT).softmax(-1) @ (value * 0.5)


@on_heads()
def scale_on_both_sides_of_the_softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return 2.0 * (query @ key.mT * SCALE).softmax(-1) @ value


@on_heads()
def scale_as_a_tensor(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT / torch.sqrt(torch.tensor(HEAD_DIM, dtype=query.dtype))).softmax(-1) @ value


@on_heads()
def negative_factor(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (-0.25 * (query @ key.mT)).softmax(-1) @ value


@on_heads()
def keys_first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (key @ query.mT * SCALE).softmax(dim=-2)  # (B, h, n_k, n_q)
    return weights.mT @ value


@on_heads()
def einsum_usual(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (torch.einsum("bhid,bhjd->bhij", query, key) * SCALE).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", weights, value)


@on_heads()
def einsum_tokens_before_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    weights = torch.einsum("bnhd,bmhd->bhnm", query * SCALE, key).softmax(-1)
    return torch.einsum("bhnm,bmhd->bnhd", weights, value).flatten(2)


@on_heads()
def einsum_keys_last_but_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.einsum("bhqd,bhkd->bhkq", query, key).softmax(2)
    return torch.einsum("bhkq,bhkd->bqhd", weights, value)


@on_heads(dynamic=True)
def einsum_heads_last(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (t.permute(0, 2, 3, 1) for t in (query, key, value))  # (B, n, d, h)
    weights = torch.einsum("qidn,qjdn->qijn", query, key).softmax(2)
    return torch.einsum("qijn,qjdn->qidn", weights, value)


@on_heads(dynamic=True)
def bmm_over_batch_and_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    batch, heads, tokens, dim = query.shape
    query, key, value = (t.reshape(batch * heads, -1, dim) for t in (query, key, value))
    weights = F.softmax(torch.bmm(query, key.transpose(1, 2)) * SCALE, dim=-1)
    output = torch.bmm(weights, value).view(batch, heads, tokens, dim)
    return output.transpose(1, 2).reshape(batch, tokens, heads * dim)


@on_heads()
def einsum_with_a_scale(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.einsum("bhid,bhjd,->bhij", query, key, torch.tensor(SCALE, dtype=query.dtype)).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", weights, value)


@on_heads(dynamic=True)
def baddbmm_of_nothing(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    batch, heads, tokens, dim = query.shape
    query, key, value = (t.reshape(batch * heads, -1, dim) for t in (query, key, value))
    nothing = torch.empty(query.shape[0], query.shape[1], key.shape[1], dtype=query.dtype)
    weights = torch.baddbmm(nothing, query, key.mT, beta=0, alpha=SCALE).softmax(-1)
    return torch.bmm(weights, value).reshape(batch, heads, tokens, dim)


@on_heads(dynamic=True)
def baddbmm_of_a_bias(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    batch, heads, tokens, dim = query.shape
    query, key, value = (t.reshape(batch * heads, -1, dim) for t in (query, key, value))
    bias = bias.repeat(batch, 1, 1)
    weights = torch.baddbmm(bias, query, key.mT, beta=1.0, alpha=SCALE).softmax(-1)
    return torch.bmm(weights, value).reshape(batch, heads, tokens, dim)


@on_heads(dynamic=True)
def heads_stacked_on_the_batch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    batch = query.shape[0]
    query, key, value = (torch.cat(t.unbind(1), dim=0) for t in (query, key, value))  # (h·B, n, d)
    output = (query @ key.mT * SCALE).softmax(-1) @ value
    return torch.cat([output[i * batch : (i + 1) * batch] for i in range(HEADS)], dim=2)


@on_heads()
def heads_merged_after(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    context = (query @ key.mT * SCALE).softmax(-1) @ value
    return context.permute(0, 2, 1, 3).contiguous().view(query.shape[0], -1, WIDTH)


@on_heads()
def one_key_head(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key[:, :1].mT * SCALE).softmax(-1) @ value[:, :1]


@on_heads()
def one_value_head(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT * SCALE).softmax(-1) @ value[:, :1]


@on_heads()
def key_heads_repeated(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = (t[:, :2].repeat_interleave(2, dim=1) for t in (key, value))
    return (query @ key.mT * SCALE).softmax(-1) @ value


@on_heads(dynamic=True)
def key_heads_expanded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    batch, _, tokens, dim = key.shape
    key, value = (t[:, :2, None].expand(batch, 2, 2, tokens, dim).reshape(batch, 4, tokens, dim) for t in (key, value))
    return (query @ key.mT * SCALE).softmax(-1) @ value


@on_heads(dynamic=True)
def query_heads_grouped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    grouped = torch.unflatten(query, 1, (2, 2))  # (B, 2, 2, n, d)
    weights = torch.einsum("bghnd,bgmd->bghnm", grouped * SCALE, key[:, :2]).softmax(-1)
    return torch.einsum("bghnm,bgmd->bghnd", weights, value[:, :2]).flatten(1, 2)


@on_heads()
def channels_attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key = F.normalize(query, dim=-2), F.normalize(key, dim=-2)
    return value @ (query.mT @ key).softmax(-1).mT


@on_heads()
def narrower_values(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT * SCALE).softmax(-1) @ value[..., :10]


@on_heads()
def wider_values(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (query @ key.mT * SCALE).softmax(-1) @ torch.cat([value, value.cos()], dim=-1)


@on_heads()
def scores_and_softmax_in_float32(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = (query @ key.mT).float() * SCALE
    return scores.softmax(-1).type_as(value) @ value


@on_heads()
def softmax_minus_maximum(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.mT * SCALE
    return (scores - scores.amax(-1, keepdim=True)).softmax(-1) @ value


@on_heads()
def softmax_by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.mT * SCALE
    exponentials = (scores - scores.amax(-1, keepdim=True)).exp()
    return (exponentials / exponentials.sum(-1, keepdim=True)) @ value


@on_heads(sites=2, not_yet={"static": "one head a site, its batch static: the builder chooses separate kernels"})
def head_by_head(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    heads = [(query[:, i] @ key[:, i].mT * SCALE).softmax(-1) @ value[:, i] for i in range(2)]
    return torch.cat(heads, dim=-1)


@on_heads(unfused="a soft cap")
def capped_scores(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (torch.tanh(query @ key.mT * SCALE / 3.0) * 3.0).softmax(-1) @ value


@on_heads(unfused="a soft cap")
def capped_scores_and_a_mask(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
    scores = 3.0 * torch.tanh(query @ key.mT * SCALE / 3.0) + bias
    return scores.masked_fill(~allowed, -math.inf).softmax(-1) @ value


@on_heads(unfused="no fused attention kernel for float")
def all_in_float32(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    context = (query.float() @ key.float().mT * SCALE).softmax(-1) @ value.float()
    return context.to(query.dtype)


@on_heads()
def a_scale_by_query(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    temperature = 0.5 + query.mean(-1, keepdim=True).sigmoid()
    return ((query @ key.mT + bias) / temperature + bias.cos()).softmax(-1) @ value


@on_heads()
def cosine(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT / 0.07).softmax(-1) @ value


@on_heads(dynamic=True)
def sdpa_boolean(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)


@on_heads()
def sdpa_padding(query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=~padding[:, None, None, :])


@on_heads()
def sdpa_float(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)


# --- with masks: allowed (n, n) and padding (B, n) are boolean and have fully masked rows; bias is (4, n, n) ----------


@on_heads()
def fill_where_forbidden(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    scores = query @ key.mT * SCALE
    return scores.masked_fill(~allowed, -math.inf).softmax(-1) @ value


@on_heads()
def fill_before_the_scale(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    scores = (query @ key.mT).masked_fill(~allowed, float("-inf"))
    return (scores * SCALE).softmax(-1) @ value


@on_heads()
def fill_where_padding(query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
    scores = query @ key.mT / 4
    return scores.masked_fill(padding[:, None, None, :], float("-inf")).softmax(-1) @ value


@on_heads()
def fill_where_zero(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    mask = allowed.to(query.dtype)
    return (query @ key.mT * SCALE).masked_fill(mask == 0, -math.inf).softmax(-1) @ value


@on_heads()
def where_allowed(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    scores = query @ key.mT * SCALE
    return torch.where(allowed, scores, -math.inf).softmax(-1) @ value


@on_heads(dynamic=True)
def masked_through_data(query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
    scores = query @ key.mT * SCALE
    scores.data.masked_fill_(padding[:, None, None], -math.inf)
    return scores.softmax(-1) @ value


@on_heads(dynamic=True, not_yet=dict.fromkeys(EXAMPLE, SUMS_IN_16_BITS))
def sums_of_expanded_products(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    keys = key.unsqueeze(2).expand(-1, -1, query.shape[2], -1, -1)
    weights = ((query.unsqueeze(3).expand_as(keys) * keys).sum(-1) * SCALE).softmax(-1)
    values = value.unsqueeze(2).expand_as(keys)
    return (weights.unsqueeze(-1).expand_as(values) * values).sum(-2)


@on_heads(dynamic=True)
def where_with_ones_times_a_number(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    scores = query @ key.mT * SCALE
    return torch.where(allowed, scores, -1e4 * torch.ones_like(scores)).softmax(-1) @ value


@on_heads()
def where_with_a_full_tensor_of_minus_infinity(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    scores = query @ key.mT * SCALE
    return torch.where(allowed, scores, torch.full_like(scores, -math.inf)).softmax(-1) @ value


@on_heads(dynamic=True)
def two_masks(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, padding: Tensor) -> Tensor:
    scores = (query @ key.mT * SCALE).masked_fill(~allowed, -math.inf)
    return scores.masked_fill(padding[:, None, None], -math.inf).softmax(-1) @ value


@on_heads()
def masks_combined_first(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, padding: Tensor) -> Tensor:
    both = allowed & ~padding[:, None, None]
    return (query @ key.mT * SCALE).masked_fill(~both, -math.inf).softmax(-1) @ value


@on_heads()
def bias_after_the_scale(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return (query @ key.mT * SCALE + bias).softmax(-1) @ value


@on_heads()
def bias_before_the_scale(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return ((query @ key.mT + bias) * SCALE).softmax(-1) @ value


@on_heads()
def bias_first_and_subtracted(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return (bias + query @ key.mT * SCALE - bias[:1].sin()).softmax(-1) @ value


@on_heads()
def bias_and_mask(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, allowed: Tensor) -> Tensor:
    scores = query @ key.mT * SCALE + bias
    return scores.masked_fill(~allowed, -math.inf).softmax(-1) @ value


@on_heads()
def mask_then_bias(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, padding: Tensor) -> Tensor:
    scores = (query @ key.mT * SCALE).masked_fill(padding[:, None, None], -math.inf)
    return (scores + bias).softmax(-1) @ value


@on_heads()
def bias_of_minus_infinity(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    bias = torch.zeros_like(allowed, dtype=query.dtype).masked_fill(~allowed, -math.inf)
    return (query @ key.mT * SCALE + bias).softmax(-1) @ value


@on_heads()
def bias_of_minus_ten_thousand(query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
    bias = padding[:, None, None, :].to(query.dtype) * -10000.0
    return (query @ key.mT * SCALE + bias).softmax(-1) @ value


@on_heads()
def bias_of_the_smallest_number(query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
    bias = padding[:, None, None, :].to(query.dtype) * torch.finfo(query.dtype).min
    return (query @ key.mT * SCALE + bias).softmax(-1) @ value


@on_heads()
def bias_of_the_smallest_float32(query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
    bias = padding[:, None, None, :].float() * torch.finfo(torch.float32).min
    return ((query @ key.mT * SCALE).float() + bias).softmax(-1).to(query.dtype) @ value


@on_heads()
def fill_with_a_finite_number(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    return (query @ key.mT * SCALE).masked_fill(~allowed, -1e4).softmax(-1) @ value


@on_heads()
def fill_with_the_smallest_number(query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
    scores = query @ key.mT * SCALE
    return scores.masked_fill(padding[:, None, None, :], torch.finfo(scores.dtype).min).softmax(-1) @ value


@on_heads()
def fill_in_float32_with_minus_a_billion(query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> Tensor:
    scores = (query @ key.mT * SCALE).float().masked_fill(padding[:, None, None, :], -1e9)
    return scores.softmax(-1).to(query.dtype) @ value


@on_heads()
def bias_in_float32(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    scores = (query @ key.mT * SCALE).float() + bias.float()
    return scores.softmax(-1).to(query.dtype) @ value


@on_heads()
def two_products_added(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return ((query @ key.mT + query.sin() @ key.cos().mT) * SCALE).softmax(-1) @ value


@on_heads(sites=2, dynamic=True)
def one_product_in_both_directions(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.mT
    return (scores * SCALE).softmax(-1) @ value + (scores.mT * SCALE).softmax(-1) @ query


@on_heads(dynamic=True)
def values_of_two_axes(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (query @ key.mT * SCALE).softmax(-1)
    return torch.einsum("bhij,bhjwd->bhiwd", weights, torch.unflatten(value, -1, (2, 8)).sin()).flatten(-2)


@on_heads()
def fully_masked_rows_zeroed(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    weights = (query @ key.mT * SCALE).masked_fill(~allowed, -math.inf).softmax(-1)
    return weights.masked_fill(~allowed.any(-1, keepdim=True), 0.0) @ value


@on_heads()
def nan_weights_zeroed(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    weights = (query @ key.mT * SCALE).masked_fill(~allowed, -math.inf).softmax(-1)
    return torch.where(torch.isnan(weights), 0.0, weights) @ value


@on_heads()
def nan_to_num_under_one_mask(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    weights = (query @ key.mT * SCALE).masked_fill(~allowed, -math.inf).softmax(-1)
    return torch.nan_to_num(weights, nan=0.0) @ value


@on_heads()
def nan_outputs_zeroed(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    output = (query @ key.mT * SCALE).masked_fill(~allowed, -math.inf).softmax(-1) @ value
    return output.masked_fill(output.isnan(), 0.0)
