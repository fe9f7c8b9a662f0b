"""Attention sinks of constant scores keep their place before a cache; sinks that depend on tokens are refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import attnforge
from attnforge.bundle import Decoding
from attnforge.errors import UsageError
from attnforge.export.attention.canonicalize import Site, canonicalize
from attnforge.export.decoding.insert import with_cache
from attnforge.export.decoding.whole import without_past
from attnforge.export.graphs.execute import in_float64
from attnforge.export.lowering.attention import Seen
from attnforge.export.lowering.onnxruntime import lower
from attnforge.export.lowering.tuning import Tuner
from attnforge.export.sources.torch_module import capture
from attnforge.precision import PRECISIONS
from attnforge.report.attention_maps import attention_maps
from attnforge.runtime.backends.registry import why_not_here
from attnforge.runtime.parity.budget import relative_error
from tests.support.decoders import in_pieces

WIDTH, HEADS, SHARED, WORDS, CAPACITY = 32, 4, 2, 40, 40
SCORES = (1.5, -0.5, 3.0, 0.25)
SLOPES = (0.5, 0.25, 0.125, 0.0625)


class Sunk(nn.Module):
    """One layer of causal attention with grouped heads and sinks, whose parts subclasses override."""

    first, factor = False, 1.0

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.query, self.pair = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // HEADS * SHARED * 2)
        self.head = nn.Linear(WIDTH, WORDS)
        self.scores = nn.Parameter(torch.tensor(SCORES))

    def sinks(self, query: Tensor) -> Tensor:
        """Scores of sinks that broadcast to `(batch, heads, tokens, sinks)`."""
        return self.scores.reshape(1, -1, 1, 1)

    def masked(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.words(x)
        query = self.query(embedded).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = (
            part.unflatten(-1, (SHARED, -1)).transpose(1, 2).repeat_interleave(HEADS // SHARED, 1)
            for part in self.pair(embedded).chunk(2, -1)
        )
        result: Tensor = self.head(embedded + self.attended(query, key, value).transpose(1, 2).flatten(2))
        return result

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = self.masked(query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1]))
        sinks = self.sinks(query)
        sinks = sinks.expand(*scores.shape[:-1], sinks.shape[-1])
        joined = torch.cat([sinks, scores] if self.first else [scores, sinks], -1)
        joined = (self.factor * joined.float()).softmax(-1).to(query.dtype)
        weights = joined[..., sinks.shape[-1] :] if self.first else joined[..., : key.shape[2]]
        return weights @ value


class First(Sunk):
    first = True


class OneForAll(Sunk):
    def sinks(self, query: Tensor) -> Tensor:
        return torch.full((1, 1, 1, 1), 0.75)


class Several(First):
    def sinks(self, query: Tensor) -> Tensor:
        return torch.stack([self.scores, self.scores.flip(0), self.scores - 1], -1).detach()[None, :, None]


class Repeated(Sunk):
    """As many equal sinks as there are heads."""

    def sinks(self, query: Tensor) -> Tensor:
        return super().sinks(query).expand(-1, -1, -1, HEADS)


class ScaledWithThem(Sunk):
    factor = 0.5


class OfKeyHeads(Sunk):
    """One score for the query heads that share a key."""

    def sinks(self, query: Tensor) -> Tensor:
        by_key_head = self.scores[:SHARED, None].expand(-1, HEADS // SHARED)
        return by_key_head.reshape(1, -1, 1, 1)


class Capped(Sunk):
    def masked(self, scores: Tensor) -> Tensor:
        return super().masked(3 * torch.tanh(scores / 3))


class RepeatedKeys(Sunk):
    """Padded and joined by hand before a fused operator."""

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (F.pad(x, (0, 0, 0, HEADS)) for x in (key, value))
        mask = self.masked(query.new_zeros(1, 1, query.shape[2], query.shape[2]).expand(query.shape[0], HEADS, -1, -1))
        sinks = self.sinks(query).expand(*mask.shape[:-1], HEADS)
        return F.scaled_dot_product_attention(query, key, value, torch.cat([mask, sinks], -1))


class Windowed(Sunk):
    def masked(self, scores: Tensor) -> Tensor:
        return super().masked(scores).masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).tril(-6), -math.inf)


class Sloped(Sunk):
    def masked(self, scores: Tensor) -> Tensor:
        distance = torch.arange(scores.shape[-1]) - torch.arange(scores.shape[-2])[:, None]
        return super().masked(scores + torch.tensor(SLOPES)[:, None, None] * distance)


TOGETHER = tuple(float(np.logaddexp.reduce([a, b, a - 1])) for a, b in zip(SCORES, SCORES[::-1], strict=True))
FOURFOLD = tuple(score + math.log(HEADS) for score in SCORES)
KINDS: dict[type[Sunk], Seen] = {
    Sunk: Seen(sinks=SCORES),
    First: Seen(sinks=SCORES),
    OneForAll: Seen(sinks=(0.75,) * HEADS),
    Several: Seen(sinks=TOGETHER),
    Repeated: Seen(sinks=FOURFOLD),
    ScaledWithThem: Seen(sinks=tuple(0.5 * score for score in SCORES)),
    OfKeyHeads: Seen(sinks=(SCORES[0], SCORES[0], SCORES[1], SCORES[1])),
    RepeatedKeys: Seen(sinks=FOURFOLD),
    Windowed: Seen(6, sinks=SCORES),
    Sloped: Seen(slopes=SLOPES, sinks=SCORES),
}


def example(kind: type[Sunk]) -> tuple[Sunk, tuple[Tensor], Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shapes = ({0: Dim("batch", min=1, max=4), 1: Dim("tokens", min=2, max=32)},)
        return kind().eval(), (torch.randint(0, WORDS, (2, 9)),), shapes


def step_of(kind: type[Sunk]) -> tuple[Decoding, ir.Model, list[Site], ir.Model]:
    """The record, graph and sites of a step, and the graph for whole sequences."""
    captured = capture(*example(kind), PRECISIONS["fp32"])
    sites = canonicalize(captured.model).sites
    whole = captured.model.clone()
    return with_cache(captured.model, sites, captured.inputs, captured.outputs, CAPACITY), captured.model, sites, whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_with_sinks_is_the_model(kind: type[Sunk]) -> None:
    decoding, step, sites, whole = step_of(kind)
    (node,) = (node for node in step.graph if node.op_type == "Attention")
    (cache,), seen, expected_seen = decoding.caches, Seen.of(node), KINDS[kind]
    assert seen is not None and replace(seen, sinks=None) == replace(expected_seen, sinks=None)
    assert seen.sinks == pytest.approx(expected_seen.sinks, rel=1e-6) and cache.window == expected_seen.window
    assert cache.key.dims[1:] == [SHARED, CAPACITY, WIDTH // HEADS]
    ids = np.random.default_rng(0).integers(0, WORDS, (2, 24))
    with torch.no_grad():
        expected = example(kind)[0].double()(torch.from_numpy(ids)).numpy()
    assert relative_error(next(iter(in_float64(whole)({decoding.tokens: ids}).values())), expected) < 1e-6
    assert relative_error(in_pieces(step, ids, (9, 14, 15, 24), decoding), expected) < 1e-6
    again = step.clone()
    without_past(again, decoding)
    assert relative_error(next(iter(in_float64(again)({decoding.tokens: ids}).values())), expected) < 1e-6
    lower(step, sites, {"batch": 2, "tokens": 9})
    assert [node.op_type for node in step.graph].count("GroupQueryAttention") == 1
    assert relative_error(in_pieces(step, ids, (9, 14, 15, 24), decoding), expected) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_the_forms_that_read_a_cache_agree_on_sinks(kind: type[Sunk]) -> None:
    _, step, sites, _ = step_of(kind)
    (site,) = lower(step, sites, {"batch": 1, "tokens": 9}, tuner=Tuner({"batch": 1, "tokens": 9}, 0.3))
    assert len(site.measured) == 3 and not site.dropped


@pytest.mark.parametrize(
    ("kind", "precision", "backend", "caches"),
    [
        (Windowed, "fp32", "onnxruntime-cpu", None),
        (Capped, "fp32", "onnxruntime-cpu", None),
        (Windowed, "bf16", "openvino", None),
        (Windowed, "fp32", "onnxruntime-cpu", "int8"),
        (RepeatedKeys, "fp16", "openvino", None),
        (RepeatedKeys, "fp32", "onnxruntime-cpu", "int8"),
    ],
)
def test_sinks_on_a_backend(kind: type[Sunk], precision: str, backend: str, caches: str | None, tmp_path: Path) -> None:
    if (why := why_not_here(backend)) is not None:
        pytest.skip(why)
    module, args, shapes = example(kind)
    low: dict[str, Any] = {"cache_precision": caches, "data": [args], "max_error": 0.05} if caches else {}
    bundle = attnforge.deploy(
        module, args, tmp_path / "b", shapes, precision, ["onnxruntime"], tune=False, cache_tokens=CAPACITY, **low
    )
    report = attnforge.verify(bundle, [backend]).backends[backend]
    assert report.passed, report.failures
    assert bundle.manifest.decoding is not None
    assert bundle.manifest.decoding.caches[0].key.dims[1:] == [SHARED, CAPACITY, WIDTH // HEADS]


def test_attention_maps_have_a_column_for_sinks(tmp_path: Path) -> None:
    module, args, shapes = example(Several)
    bundle = attnforge.deploy(
        module, args, tmp_path / "b", shapes, "fp32", ["onnxruntime"], tune=False, cache_tokens=CAPACITY
    )
    (site,) = attention_maps(bundle)
    assert site.exact is not None and site.exact.shape[-1] == 1 + 9
    np.testing.assert_allclose(site.exact.sum(-1), 1, rtol=1e-6)
    for weights in (site.eager, site.deployed):
        assert relative_error(weights, site.exact) < 1e-5


# --- near misses ------------------------------------------------------------------------------------------------------


class OfTokens(Sunk):
    def sinks(self, query: Tensor) -> Tensor:
        return query.mean(-1, keepdim=True)


class OfPositions(Sunk):
    def sinks(self, query: Tensor) -> Tensor:
        return torch.arange(float(CAPACITY))[: query.shape[2], None] / CAPACITY


class Bidirectional(Sunk):
    def masked(self, scores: Tensor) -> Tensor:
        return scores


NEAR: dict[type[Sunk], str] = {
    OfTokens: "OfTokens has no cache: the scores of its attention sinks are not constants of each head",
    OfPositions: "OfPositions has no cache: the scores of its attention sinks are not constants of each head",
    Bidirectional: "Bidirectional is bidirectional",
}


@pytest.mark.parametrize("kind", NEAR)
def test_near_misses_are_refused(kind: type[Sunk]) -> None:
    with pytest.raises(UsageError, match=NEAR[kind]):
        step_of(kind)


def zeros_elsewhere(node: ir.Node) -> None:
    """Zeros before the values, but after the keys."""
    pads = node.inputs[2].producer()  # type: ignore[union-attr]
    assert pads is not None
    pads.replace_input_with(
        1, ir.Value(name="pads", const_value=ir.tensor([0, 0, 1, 0, 0, 0, 0, 0], ir.DataType.INT64))
    )


def test_zeros_in_another_place_are_no_sinks() -> None:
    captured = capture(*example(Sunk), PRECISIONS["fp32"])
    sites = canonicalize(captured.model).sites
    (node,) = (node for node in captured.model.graph if node.op_type == "Attention")
    zeros_elsewhere(node)
    with pytest.raises(UsageError, match="attends from tokens queries to"):
        with_cache(captured.model, sites, captured.inputs, captured.outputs, CAPACITY)
