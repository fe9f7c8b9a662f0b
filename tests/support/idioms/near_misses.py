"""Near misses of attention, each with what its reason must say, and softmaxes that are not attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.idioms.catalogue import HEADS, SCALE, WIDTH, Idiom, OnHeads, takes_on_heads


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
    return scores.softmax(-1) @ value + scores.amax(-1, keepdim=True)


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


def one_of_two_masks_after_the_softmax(
    query: Tensor, key: Tensor, value: Tensor, padding: Tensor, allowed: Tensor
) -> Any:
    """A row that both masks hide has weights for all keys, of which one mask zeroes some."""
    low = torch.finfo(query.dtype).min
    scores = query @ key.mT * SCALE + torch.where(allowed, 0.0, low)
    hidden = padding[:, None, None]
    return scores.masked_fill(hidden, low).softmax(-1).masked_fill(hidden, 0.0) @ value


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


def stable_softmax_with_one_more(query: Tensor, key: Tensor, value: Tensor) -> Any:
    scores = query @ key.mT * SCALE
    largest = scores.amax(-1, keepdim=True).clamp(min=0)
    exponentials = (scores - largest).exp()
    return exponentials / (exponentials.sum(-1, keepdim=True) + (-largest).exp()) @ value


def sigmoid_of_scores(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return (query @ key.mT * SCALE).sigmoid() @ value


def softplus_of_scores(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The exporter chooses the scores themselves where they are large."""
    return nn.functional.softplus(query @ key.mT * SCALE) @ value


def negative_scores_dropped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.mT * SCALE
    return scores.masked_fill(scores < 0, 0) @ value


def relu_of_scores(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Any:
    return ((query @ key.mT * SCALE).relu().square() * allowed / key.shape[-2]) @ value


def squares_of_scores(query: Tensor, key: Tensor, value: Tensor) -> Any:
    scores = query @ key.mT * SCALE
    return scores * scores @ value


def scores_divided_by_their_total(query: Tensor, key: Tensor, value: Tensor) -> Any:
    scores = query @ key.mT * SCALE
    return scores / (9 + scores.sum(-1, keepdim=True)) @ value


def signed_weights(query: Tensor, key: Tensor, value: Tensor) -> Any:
    scores = query @ key.mT * SCALE
    return (scores.abs().softmax(-1) * scores.sign()) @ value


def scale_by_key(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return ((query @ key.mT) * key.mean(-1).unsqueeze(-2).sigmoid()).softmax(-1) @ value


def talking_heads(query: Tensor, key: Tensor, value: Tensor) -> Any:
    mixed = torch.einsum("bhij,gh->bgij", query @ key.mT * SCALE, torch.eye(HEADS, dtype=query.dtype) + 0.1)
    return mixed.softmax(-1) @ value


def additive_score(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return torch.tanh(query[:, :, :, None] + key[:, :, None]).sum(-1).softmax(-1) @ value


def distance_score(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return (-(query[:, :, :, None] - key[:, :, None]).square().sum(-1)).softmax(-1) @ value


def talking_heads_on_both_sides(query: Tensor, key: Tensor, value: Tensor) -> Any:
    mix = torch.eye(HEADS, dtype=query.dtype) + 0.1
    weights = ((query @ key.mT * SCALE).permute(0, 2, 3, 1) @ mix).softmax(-2) @ mix
    return weights.permute(0, 3, 1, 2) @ value


def hard_alignment(query: Tensor, key: Tensor, value: Tensor) -> Any:
    best = (query @ key.mT).argmax(-1, keepdim=True)
    return (torch.arange(key.shape[-2]) == best).to(value.dtype) @ value


def scores_symmetrised(query: Tensor, key: Tensor, value: Tensor) -> Any:
    scores = query @ key.mT * SCALE
    return (scores + scores.mT).softmax(-1) @ value


_REASONS: dict[Callable[..., Any], str] = {
    weights_are_an_output: "attention weights .* are an output of the model|used 2 times",
    mean_weights_are_an_output: "attention weights .* are used 2 times",
    scores_are_an_output: "scores .* are an output of the model|used 2 times",
    scores_used_twice: "scores .* are used 2 times",
    softmax_over_queries: "does not sum over the keys",
    softmax_over_heads: "does not run over the keys",
    weights_transposed: "does not sum over the keys",
    mask_after_the_softmax: "a mask is applied to the weights after the softmax",
    mask_multiplied_after_the_softmax: "no longer sum to one",
    one_of_two_masks_after_the_softmax: "a mask is applied to the weights after the softmax",
    small_weights_dropped: "attention weights",
    large_weights_dropped: "attention weights",
    weights_shrunk: "weights go through Sub",
    weights_renormalised: "used 2 times",
    softmax_with_one_more: "Exp computes the weights",
    stable_softmax_with_one_more: "Exp computes the weights",
    sigmoid_of_scores: "Sigmoid computes the weights",
    relu_of_scores: "Relu computes the weights",
    softplus_of_scores: "Softplus computes the weights",
    negative_scores_dropped: "Less computes the weights",
    squares_of_scores: "Mul computes the weights",
    scores_divided_by_their_total: "Div computes the weights",
    signed_weights: "the scores come from Abs",
    scale_by_key: "by a tensor that differs by key",
    talking_heads: "as in additive scores and talking heads",
    talking_heads_on_both_sides: "MatMul mixes the attention weights",
    additive_score: "inner product|ReduceSum",
    distance_score: "inner product|ReduceSum",
    hard_alignment: r"the alignment is hard \(ArgMax\)",
    scores_symmetrised: "used 2 times",
}

REASONS = {attend.__name__: pattern for attend, pattern in _REASONS.items()}
"""Text that the reason for every near miss must contain."""


def _on_heads(attend: Callable[..., Any]) -> Idiom:
    return Idiom(attend.__name__, lambda: OnHeads(attend), takes_on_heads(attend), ("static",))


MISSES = {attend.__name__: _on_heads(attend) for attend in _REASONS}


def classifier(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return value.flatten(1).softmax(-1)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Any:
        return self.head(x).softmax(-1)


class Experts(nn.Module):
    """Softmax over experts, in a weighted mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        gates = self.gate(x).softmax(-1)
        return sum(gates[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


def logits_of_pairs(query: Tensor, key: Tensor, value: Tensor) -> Any:
    """Sigmoids that weigh no values."""
    return (query @ key.mT).sigmoid()


def linear_attention(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return (query @ key.mT).tril() @ value


class GatedMixture(nn.Module):
    """A mixture, a gate and an activation between products of computed tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        x = x @ (x.mT @ x)
        gates = self.gate(x).softmax(-1)
        mixed = sum(gates[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        x = x + mixed.sigmoid() * nn.functional.gelu(x)
        return x @ (x.mT @ x)


NO_SITES = {
    "logits_of_pairs": _on_heads(logits_of_pairs),
    "linear_attention": _on_heads(linear_attention),
    "GatedMixture": Idiom("GatedMixture", GatedMixture, ("x",), ("static",)),
    "classifier": _on_heads(classifier),
    "Classifier": Idiom("Classifier", Classifier, ("x",), ("static",)),
    "Experts": Idiom("Experts", Experts, ("x",), ("static",)),
}
"""Softmaxes, and other functions of products, that are not attention."""
