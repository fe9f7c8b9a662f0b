"""A mask that is the same for every query as one more feature of the keys: the same function, and for no other
masks."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor, nn
from torch.export import Dim

from attnforge.arrays import Array
from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.lowering import onnxruntime as for_onnxruntime
from attnforge.export.lowering import tuning
from attnforge.export.lowering.attention import attentions, write
from attnforge.export.lowering.onnxruntime import CAUSAL_AS_FEATURE, MASK_AS_FEATURE, candidates_for
from attnforge.export.lowering.tuning import Tuner
from attnforge.export.sources.torch_module import Captured, capture
from attnforge.precision import precision_named
from tests.support.idioms.together import session_of

NAMES = ("query", "key", "value", "padding", "bias")
SIZE = 8
"""Head size."""

LEAST = torch.finfo(torch.float32).min


class Padded(nn.Module):
    """Several sites, each with its own mask."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def forward(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor, bias: Tensor) -> dict[str, Tensor]:
        """Attention of `(batch, heads, tokens, features)`, 4 heads on 2; `padding` is `(batch, keys)`, True for words,
        and `bias` `(4, keys)`."""
        queries, keys = torch.arange(query.shape[2]), torch.arange(key.shape[2])
        words = padding[:, None, None]
        for_all = (queries >= 0)[:, None] & words
        masks = {
            "words": words,
            "for every query": for_all,
            "added": torch.zeros(for_all.shape, dtype=query.dtype).masked_fill(~for_all, -torch.inf),
            "least number": torch.where(words, 0.0, LEAST).to(query.dtype),
            "minus ten thousand": (1.0 - words.to(query.dtype)) * -10000.0,
            "by head": bias[:, None].to(query.dtype) + torch.where(words, 0.0, -torch.inf).to(query.dtype),
            "causal": words & (queries[:, None] >= keys),
            "by query": words & (queries[:, None] != 3),
        }
        attend = nn.functional.scaled_dot_product_attention
        return {name: attend(query, key, value, attn_mask=masks[name], enable_gqa=True) for name in self.names}


BY_KEY = ("words", "for every query", "added", "least number")
OTHERS = ("minus ten thousand", "by head", "causal", "by query")


def inputs(batch: int, queries: int, keys: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(100 * queries + keys)
    shapes = (4, queries), (2, keys), (2, keys)
    operands = [torch.randn(batch, *shape, SIZE, generator=generator) for shape in shapes]
    padding = torch.rand(batch, keys, generator=generator) < 0.6
    padding[-1] = False  # no query has a key
    return *operands, padding, torch.randn(4, keys, generator=generator)


@functools.cache
def exported() -> Captured:
    batch, queries, keys = Dim("batch", min=1, max=4), Dim("queries", min=1, max=999), Dim("keys", min=1, max=999)
    shapes = {
        "query": {0: batch, 2: queries}, "key": {0: batch, 2: keys}, "value": {0: batch, 2: keys},
        "padding": {0: batch, 1: keys}, "bias": {1: keys},
    }  # fmt: skip
    captured = capture(Padded(*BY_KEY, *OTHERS), inputs(2, 30, 50), shapes, precision_named("fp32"))
    captured.model.graph.sort()
    return captured


def truth(name: str, *args: Tensor) -> Array:
    wide = [arg.double() if arg.is_floating_point() else arg for arg in args]
    answer: Array = Padded(name)(*wide)[name].numpy()
    return answer


def test_masks_by_key_are_recognised_and_no_others() -> None:
    model = exported().model.clone()
    sites = [attention for _, attention in attentions(model, canonicalize(model).sites)]
    assert [attention.residue for attention in sites] == ["by key"] * len(BY_KEY) + ["other"] * len(OTHERS)


@functools.cache
def as_features() -> tuple[ir.Model, Any]:
    """The sites by key in that form, and a session that runs them."""
    model = exported().model.clone()
    for site, attention in list(attentions(model, canonicalize(model).sites)):
        if attention.residue == "by key":
            (candidate,) = (each for each in candidates_for(site.name, attention) if each.form == MASK_AS_FEATURE)
            assert not candidate.materialises_scores
            write(model.graph, attention, candidate)
    outputs = {str(value.name): value for value in model.graph.outputs}
    model.graph.outputs[:] = [outputs[name] for name in BY_KEY]
    RemoveUnusedNodesPass()(model)
    return model, session_of(model)


@pytest.mark.parametrize(("batch", "queries", "keys"), [(1, 1, 1), (2, 13, 7), (3, 64, 65), (4, 1, 128)])
def test_the_same_function(batch: int, queries: int, keys: int) -> None:
    args = inputs(batch, queries, keys)
    results = as_features()[1].run(None, dict(zip(NAMES, map(Tensor.numpy, args), strict=True)))
    for name, result in zip(BY_KEY, results, strict=True):
        expected = truth(name, *args)
        assert result.shape == expected.shape
        np.testing.assert_allclose(result, expected, rtol=0, atol=2e-6 * np.abs(expected).max(), err_msg=name)


def test_hidden_keys_stay_hidden_next_to_very_large_scores() -> None:
    """Scores of up to 1e37, of either sign, where the softmax takes the largest visible ones."""
    query, key, value, padding, bias = inputs(2, 13, 7)
    padding = torch.arange(7) > torch.tensor([[1], [4]])
    args = query * 1e18, key * 1e18, value, padding, bias
    results = as_features()[1].run(None, dict(zip(NAMES, map(Tensor.numpy, args), strict=True)))
    for name, result in zip(BY_KEY, results, strict=True):
        if name != "least number":  # it is no lower than such scores, so eager sees those keys
            np.testing.assert_allclose(result, truth(name, *args), rtol=0, atol=1e-6, err_msg=name)


def test_no_mask_of_all_pairs_is_left() -> None:
    values = [value for node in as_features()[0].graph for value in node.outputs if value.shape is not None]
    assert values and not any([str(dim) for dim in value.shape or ()][-2:] == ["queries", "keys"] for value in values)


def test_rules_choose_it_with_many_scores_and_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "ROUNDS", 1)

    def forms(queries: int, tuner: Tuner | None = None) -> list[str]:
        model = exported().model.clone()
        sites = canonicalize(model).sites
        sizes = {"batch": 1, "queries": queries, "keys": 512}
        return [site.form for site in for_onnxruntime.lower(model, sites, sizes, tuner=tuner)]

    assert MASK_AS_FEATURE not in forms(256)
    assert [form == MASK_AS_FEATURE for form in forms(1024)] == [name in BY_KEY for name in (*BY_KEY, *OTHERS)]
    tuner = Tuner({"batch": 2, "queries": 64, "keys": 512}, seconds=60.0)
    forms(64, tuner)
    measured = [choice for choice in tuner.chosen.values() if choice.measured]
    assert measured and sum(MASK_AS_FEATURE in choice.measured for choice in measured) == len(BY_KEY)
    assert not any(MASK_AS_FEATURE in choice.dropped for choice in measured)


# --- causal -----------------------------------------------------------------------------------------------------------


class CausalPadded(Padded):
    """Causal sites with as many queries as keys."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor, bias: Tensor) -> dict[str, Tensor]:
        """Attention of `(batch, heads, tokens, features)`, 4 heads on 2."""
        index = torch.arange(query.shape[2])
        words, earlier = padding[:, None, None], index <= index[:, None]
        shown = words & earlier
        masks = {
            "words": shown,
            "added": torch.zeros(shown.shape, dtype=query.dtype).masked_fill(~shown, -torch.inf),
            "words, or not later": earlier & ~(~words & earlier),
            "later words too": words & ((index - 1) <= index[:, None]),
            "the third query sees all": earlier & (words | (index[:, None] == 3)),
            "its own key": earlier & (words | (index[:, None] == index)),
            "biased": torch.where(shown, bias[:, None].to(query.dtype), -torch.inf),
            "least number": torch.where(shown, 0.0, LEAST).to(query.dtype),
        }
        attend = nn.functional.scaled_dot_product_attention
        return {name: attend(query, key, value, attn_mask=masks[name], enable_gqa=True) for name in self.names}


CAUSAL = ("words", "added", "words, or not later")
NOT_CAUSAL = ("later words too", "the third query sees all", "its own key", "biased", "least number")


@functools.cache
def exported_causal() -> Captured:
    batch, tokens = Dim("batch", min=1, max=4), Dim("tokens", min=1, max=999)
    shapes: dict[str, Any] = {name: {0: batch, 2: tokens} for name in NAMES[:3]}
    shapes |= {"padding": {0: batch, 1: tokens}, "bias": {1: tokens}}
    captured = capture(CausalPadded(*CAUSAL, *NOT_CAUSAL), inputs(2, 30, 30), shapes, precision_named("fp32"))
    captured.model.graph.sort()
    return captured


def test_padding_with_causality_is_recognised_and_nothing_else() -> None:
    model, sizes = exported_causal().model.clone(), {"batch": 1, "tokens": 1024}
    lowered = for_onnxruntime.lower(model, canonicalize(model).sites, sizes)
    assert [site.form == CAUSAL_AS_FEATURE for site in lowered] == [True] * len(CAUSAL) + [False] * len(NOT_CAUSAL)


@functools.cache
def causal_session() -> Any:
    model = exported_causal().model.clone()
    for_onnxruntime.lower(model, canonicalize(model).sites, {"batch": 1, "tokens": 1024})
    return session_of(model)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 13), (3, 64), (2, 129)])
def test_causal_ones_are_the_same_function(batch: int, tokens: int) -> None:
    args = inputs(batch, tokens, tokens)
    results = causal_session().run(None, dict(zip(NAMES, map(Tensor.numpy, args), strict=True)))
    for name, result in zip((*CAUSAL, *NOT_CAUSAL), results, strict=True):
        wide = [arg.double() if arg.is_floating_point() else arg for arg in args]
        expected = CausalPadded(name)(*wide)[name].numpy()
        np.testing.assert_allclose(result, expected, rtol=0, atol=2e-6 * np.abs(expected).max(), err_msg=name)


def test_a_causal_one_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "ROUNDS", 1)
    model, sizes = exported_causal().model.clone(), {"batch": 2, "tokens": 64}
    tuner = Tuner(sizes, seconds=60.0)
    for_onnxruntime.lower(model, canonicalize(model).sites, sizes, tuner=tuner)
    chosen = list(tuner.chosen.values())[: len(CAUSAL)]
    assert all(CAUSAL_AS_FEATURE in choice.measured for choice in chosen), chosen
