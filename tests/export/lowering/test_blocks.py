"""Attention within a band in blocks of queries, and causal attention in causal blocks: the same function at any number
of tokens, only for bands and causal attention; and what TensorRT-RTX fuses of it."""

from __future__ import annotations

import functools
from pathlib import Path
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
from attnforge.export.flops import product_flops
from attnforge.export.graphs.nodes import rank_of
from attnforge.export.lowering import onnxruntime as for_onnxruntime
from attnforge.export.lowering import tensorrt as for_tensorrt
from attnforge.export.lowering.attention import attentions, write
from attnforge.export.lowering.band import Band
from attnforge.export.lowering.blocks import BLOCKS
from attnforge.export.lowering.onnxruntime import GROUP_QUERY, GROUP_QUERY_FIRST, candidates_for
from attnforge.export.lowering.tuning import Tuner
from attnforge.export.sources.torch_module import Captured, capture
from attnforge.precision import precision_named
from benchmarks.experiments.mask_plans import scores_of
from tests.support.idioms.together import session_of
from tests.support.plans import build

NAMES = ("query", "key", "value", "padding", "bias")
SIZE = 8
"""Head size."""


class Windows(nn.Module):
    """Several sites, each with its own mask."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def forward(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor, bias: Tensor) -> dict[str, Tensor]:
        """Attention of `(batch, tokens, features)`, 4 heads on 2; `padding` is `(batch, tokens)`, True for words, and
        `bias` `(1, 4, tokens, tokens)`."""
        index = torch.arange(query.shape[1])
        back = index[:, None] - index
        masks = {
            "before": (back >= 0) & (back < 70),
            "around": (back >= -9) & (back <= 40),
            "added": torch.zeros_like(back, dtype=torch.float32).masked_fill(back.abs() > 20, -torch.inf),
            "itself": back == 0,
            "causal": back >= 0,
            "without itself": (back > 0) & (back < 70),
            "with a hole": (back >= 0) & (back < 70) & (back != 3),
            "padded": ((back >= 0) & (back < 70)) & padding[:, None, None],
            "biased": torch.where((back >= 0) & (back < 70), bias, -torch.inf),
            "chunks": index[:, None] // 48 == index // 48,
            "causal chunks": (index[:, None] // 48 == index // 48) & (back >= 0),
            "chunk before": (index[:, None] // 16 - index // 16 <= 1) & (index[:, None] // 16 >= index // 16),
            "padded chunks": (index[:, None] // 100 == index // 100) & padding[:, None, None],
            "biased chunks": torch.where(index[:, None] // 48 == index // 48, bias, -torch.inf),
            "first token": ((back >= 0) & (back < 70)) | (index == 0),
            "first and chunks": (index[:, None] // 16 == index // 16) | (index < 5),
            "first queries": (back.abs() < 9) | (index[:, None] < 3),
            "global": (back.abs() < 9) | (index < 4) | (index[:, None] < 6),
            "padded global": ((back.abs() < 9) | (index < 4) | (index[:, None] < 4)) & padding[:, None, None],
            "later keys": (back.abs() < 9) | ((index >= 3) & (index < 5)),
            "last queries": (back.abs() < 9) | (index[:, None] > 100),
            "causal and prefix": (back >= 0) | (index < 5),
            "shifted chunks": (index[:, None] + 7) // 16 == (index + 7) // 16,
            "another's chunk": index[:, None] // 16 == index // 16 + 1,
            "chunks with a hole": (index[:, None] // 48 == index // 48) & (back != 5),
            "causal and padded": (back >= 0) & padding[:, None, None],
            "prefix and padded": ((back >= 0) | (index < 70)) & padding[:, None, None],
            "causal and biased": torch.where(back >= 0, bias, -torch.inf),
        }
        return {name: self.attend(query, key, value, masks[name]) for name in self.names}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (x.reshape(*x.shape[:2], -1, SIZE).transpose(1, 2) for x in (query, key, value))
        mask = mask.to(query.dtype) if mask.is_floating_point() else mask
        out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


BANDS = {
    "before": Band(0, 69),
    "around": Band(-9, 40),
    "added": Band(-20, 20),
    "itself": Band(0, 0),
    "padded": Band(0, 69, is_all=False),
    "biased": Band(0, 69, is_all=False),
    "chunks": Band(0, 0, chunk=48),
    "causal chunks": Band(0, 0, chunk=48, inside=(0, None)),
    "chunk before": Band(0, 16, chunk=16),
    "shifted chunks": Band(0, 0, chunk=16, shift=7),
    "padded chunks": Band(0, 0, is_all=False, chunk=100),
    "biased chunks": Band(0, 0, is_all=False, chunk=48),
    "first token": Band(0, 69, first_keys=1),
    "first and chunks": Band(0, 0, chunk=16, first_keys=5),
    "first queries": Band(-8, 8, first_queries=3),
    "global": Band(-8, 8, first_keys=4, first_queries=6),
    "padded global": Band(-8, 8, is_all=False, first_keys=4, first_queries=4),
}
NO_BANDS = (
    *("causal", "without itself", "with a hole", "causal and padded", "causal and biased", "later keys"),
    *("last queries", "causal and prefix", "another's chunk", "chunks with a hole"),
    "prefix and padded",
)
CAUSAL_PREFIXES = {
    "causal": 0, "causal and padded": 0, "causal and biased": 0, "causal and prefix": 5, "prefix and padded": 70,
}  # fmt: skip
"""First keys that all queries see, for those that can be computed in causal blocks."""

TRIANGLES = ("causal", "causal and padded", "causal and biased")


SHARED = ("padded", "biased", "padded chunks", "biased chunks", "first queries", "global", "padded global")
"""Bands whose blocks are samples: their mask differs by sample or head, or the first queries see all keys."""


def inputs(batch: int, tokens: int, key_heads: int = 2) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(batch * 1000 + tokens)
    operands = [torch.randn(batch, tokens, heads * SIZE, generator=generator) for heads in (4, key_heads, key_heads)]
    padding = torch.rand(batch, tokens, generator=generator) < 0.7
    padding[0, tokens // 4 : tokens // 4 + 80] = False  # fully masked rows
    return *operands, padding, torch.randn(1, 4, tokens, tokens, generator=generator)


@functools.cache
def exported(key_heads: int = 2) -> Captured:
    batch, tokens = Dim("batch", min=1, max=4), Dim("tokens", min=1, max=2048)
    shapes = {**{name: {0: batch, 1: tokens} for name in NAMES[:-1]}, "bias": {2: tokens, 3: tokens}}
    captured = capture(Windows(*BANDS, *NO_BANDS), inputs(2, 90, key_heads), shapes, precision_named("fp32"))
    captured.model.graph.sort()
    return captured


@functools.cache
def truth(name: str, batch: int, tokens: int, key_heads: int = 2) -> Array:
    query, key, value, padding, bias = inputs(batch, tokens, key_heads)
    answer: Array = Windows(name)(query.double(), key.double(), value.double(), padding, bias.double())[name].numpy()
    return answer


def test_bands_are_recognised_and_nothing_else() -> None:
    model = exported().model.clone()
    sites = [attention for _, attention in attentions(model, canonicalize(model).sites)]
    assert [attention.band for attention in sites] == [*BANDS.values(), *[None] * len(NO_BANDS)]
    assert [attention.is_triangle for attention in sites] == [name in TRIANGLES for name in (*BANDS, *NO_BANDS)]
    expected = [CAUSAL_PREFIXES.get(name) for name in (*BANDS, *NO_BANDS)]
    assert [attention.causal_prefix for attention in sites] == expected


def form_of(band: Band, nearly: int) -> str:
    """ONNX Runtime's form in blocks of about this many queries."""
    (width,) = band.widths([nearly])
    first = f", {band.first_queries} first queries" if band.first_queries else ""
    return f"Attention, blocks of {width} × {band.first_keys + width + band.span}{first}"


@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("width", BLOCKS)
def test_the_same_function_at_any_number_of_tokens(width: int, key_heads: int) -> None:
    model = exported(key_heads).model.clone()
    for site, attention in list(attentions(model, canonicalize(model).sites)):
        if attention.band is not None:
            form = form_of(attention.band, width)
            (candidate,) = (each for each in candidates_for(site.name, attention) if each.form == form)
            assert not candidate.materialises_scores
            write(model.graph, attention, candidate)
    outputs = {str(value.name): value for value in model.graph.outputs}
    model.graph.outputs[:] = [outputs[name] for name in BANDS]
    RemoveUnusedNodesPass()(model)
    ranks = [rank_of(node.inputs[0]) for node in model.graph if node.op_type == "Attention" and node.metadata_props]
    assert ranks == [3 if key_heads == 2 or name in SHARED else 4 for name in BANDS]
    session = session_of(model)
    for batch, tokens in ((1, 1), (2, 13), (1, width - 1), (3, width), (1, width + 1), (2, 2 * width + 31)):
        feeds = dict(zip(NAMES, map(Tensor.numpy, inputs(batch, tokens, key_heads)), strict=True))
        results = session.run(None, feeds)
        for name, result in zip(BANDS, results, strict=True):
            expected = truth(name, batch, tokens, key_heads)
            assert result.shape == expected.shape
            assert np.linalg.norm(result - expected) <= 1e-6 * np.linalg.norm(expected), (name, batch, tokens)


def test_a_prefix_is_causal_except_for_its_own_queries() -> None:
    model = exported().model.clone()
    nodes = list(attentions(model, canonicalize(model).sites))
    sites = {a.causal_prefix: candidates_for(site.name, a) for site, a in nodes if a.causal_prefix}
    assert [GROUP_QUERY_FIRST in [each.form for each in sites[first]] for first in (5, 70)] == [True, False]
    (candidate,) = (each for each in sites[5] if each.form == GROUP_QUERY_FIRST)
    write(model.graph, next(a for _, a in nodes if a.causal_prefix == 5), candidate)
    model.graph.outputs[:] = [value for value in model.graph.outputs if value.name == "causal and prefix"]
    RemoveUnusedNodesPass()(model)
    session = session_of(model)
    for batch, tokens in ((1, 1), (2, 4), (1, 5), (3, 6), (2, 159)):
        feeds = dict(zip(NAMES, map(Tensor.numpy, inputs(batch, tokens)), strict=True))
        (result,) = session.run(None, feeds)
        expected = truth("causal and prefix", batch, tokens)
        assert np.linalg.norm(result - expected) <= 1e-6 * np.linalg.norm(expected), (batch, tokens)


def test_rules_take_blocks_where_most_keys_are_hidden() -> None:
    def lowered(tokens: int) -> list[str]:
        model = exported().model.clone()
        sites = canonicalize(model).sites
        return [site.form for site in for_onnxruntime.lower(model, sites, {"batch": 1, "tokens": tokens})]

    few, many = lowered(256), lowered(1024)
    assert not any("blocks" in form for form in few)
    bands = list(BANDS.values())
    assert many[: len(BANDS)] == [form_of(band, 128 if band.span == 69 else 64) for band in bands]
    assert many[len(BANDS)] == GROUP_QUERY
    index = len(BANDS) + NO_BANDS.index("causal and prefix")
    assert many[index] == GROUP_QUERY_FIRST != few[index]
    assert not any("blocks" in form for form in many[len(BANDS) :])


def test_a_measured_site_has_the_band() -> None:
    """With another mask the blocks would differ from the products, and no block would be timed."""
    model, sizes = exported().model.clone(), {"batch": 1, "tokens": 160}
    sites = canonicalize(model).sites
    tuner = Tuner(sizes, seconds=1.0)
    first, *_ = for_onnxruntime.lower(model, sites, sizes, tuner=tuner)
    assert {f"Attention, blocks of {width} × {width + 69}" for width in BLOCKS} <= set(first.measured)
    assert not any("differs" in why for why in first.dropped.values())


# --- TensorRT ---------------------------------------------------------------------------------------------------------


def for_rtx(captured: Captured, tokens: int) -> tuple[ir.Model, list[str]]:
    """The model in TensorRT's form for a usual number of tokens, and the form of every site."""
    model, sizes = captured.model.clone(), {"batch": 1, "tokens": tokens}
    sites = for_tensorrt.lower(model, canonicalize(model).sites, sizes=sizes)
    return model, [site.form for site in sites]


def test_tensorrt_gets_blocks_and_steps_where_there_are_many_tokens() -> None:
    usual = "MatMul·Softmax·MatMul"
    _, few = for_rtx(exported(), 256)
    _, many = for_rtx(exported(), 2048)
    assert few == [usual] * len(few)
    widths = [32 if band.chunk == 1 else max(32 // band.chunk, 1) * band.chunk for band in BANDS.values()]
    assert many[: len(BANDS)] == [f"{usual}, blocks of {width}" for width in widths]
    usual_or_blocks = [f"{usual}, 4 blocks" if CAUSAL_PREFIXES.get(name) == 0 else usual for name in NO_BANDS]
    assert many[len(BANDS) :] == usual_or_blocks


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 3), (1, 5), (2, 64), (1, 65), (2, 159)])
def test_tensorrts_graph_is_the_same_function(batch: int, tokens: int) -> None:
    session = of_rtx()
    feeds = dict(zip(NAMES, map(Tensor.numpy, inputs(batch, tokens)), strict=True))
    for name, result in zip((*BANDS, *NO_BANDS), session.run(None, feeds), strict=True):
        expected = truth(name, batch, tokens)
        assert result.shape == expected.shape
        assert np.linalg.norm(result - expected) <= 1e-6 * np.linalg.norm(expected), name


@functools.cache
def of_rtx() -> Any:
    return session_of(for_rtx(exported(), 2048)[0])


def test_a_causal_chunk_is_computed_in_causal_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(for_tensorrt, "MANY_IN_CHUNK", 48)
    model, forms = for_rtx(exported(), 2048)
    index = list(BANDS).index("causal chunks")
    steps = [form for form in forms if form.endswith("4 steps each")]
    assert forms[index] == "MatMul·Softmax·MatMul, blocks of 48, 4 steps each" and steps == [forms[index]]
    session = session_of(model)
    for batch, tokens in ((1, 1), (2, 47), (1, 48), (2, 49), (1, 131)):
        feeds = dict(zip(NAMES, map(Tensor.numpy, inputs(batch, tokens)), strict=True))
        (result,) = session.run(["causal chunks"], feeds)
        expected = truth("causal chunks", batch, tokens)
        assert np.linalg.norm(result - expected) <= 1e-6 * np.linalg.norm(expected)


def test_a_band_of_a_causal_site_is_computed_once() -> None:
    """Blocks apply the flag in their own mask: counted from a block's first key, the flag would hide other keys."""
    model, (batch, tokens) = exported().model.clone(), (1, 159)
    sites = canonicalize(model).sites
    (node,) = (node for node in model.graph if node.name == sites[list(BANDS).index("around")].node)
    node.attributes["is_causal"] = ir.AttrInt64("is_causal", 1)
    (around, *_) = (a for _, a in attentions(model, sites) if a.node is node)
    assert around.band == Band(0, 40) and around.is_causal
    for_tensorrt.lower(model, sites, sizes={"batch": 1, "tokens": 2048})
    feeds = dict(zip(NAMES, map(Tensor.numpy, inputs(batch, tokens)), strict=True))
    result = session_of(model).run(["around"], feeds)[0]
    query, key, value, *_ = (x.double() if x.is_floating_point() else x for x in inputs(batch, tokens))
    back = torch.arange(tokens)[:, None] - torch.arange(tokens)
    expected = Windows().attend(query, key, value, (back >= 0) & (back <= 40)).numpy()
    assert np.linalg.norm(result - expected) <= 1e-6 * np.linalg.norm(expected)


class Attends(nn.Module):
    """Causal attention, and attention to the last 256 keys, on `(1, 8, tokens, 64)`; each without `padding`, `(1,
    tokens)`, and with it."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> tuple[Tensor, ...]:
        index = torch.arange(query.shape[2])
        back = index[:, None] - index
        window = (back >= 0) & (back < 256)
        attend = nn.functional.scaled_dot_product_attention
        return (
            attend(query, key, value, is_causal=True),
            attend(key, value, query, attn_mask=(back >= 0) & padding[:, None, None]),  # other products
            attend(query, key, value, attn_mask=window),
            attend(query, key, value, attn_mask=window & padding[:, None, None]),
        )


@pytest.mark.parametrize("is_dynamic", [True, False])
def test_tensorrt_rtx_fuses_every_block_and_no_more_is_computed_than_is_needed(
    tmp_path: Path, is_dynamic: bool
) -> None:
    tokens = Dim("tokens", min=1, max=8192)
    shapes = {**{name: {2: tokens} for name in NAMES[:3]}, "padding": {1: tokens}} if is_dynamic else None
    args = (*(torch.zeros(1, 8, 4096, 64) for _ in range(3)), torch.ones(1, 4096, dtype=torch.bool))
    captured = capture(Attends(), args, shapes, precision_named("fp16"))
    model, sizes = captured.model, {"tokens": 4096}
    sites = for_tensorrt.lower(model, canonicalize(model).sites, sizes=sizes)
    ir.save(model, tmp_path / "model.onnx")
    plan = build(tmp_path / "model.onnx", "tensorrt_rtx", captured.inputs, "fp16")
    assert [plan.kernel_of(site.node) is not None for site in sites] == [True] * 4
    assert sum(layer.is_fused_attention for layer in plan.layers) == 4 + 4 + 1 + 1
    window = 1.3 * Band(0, 255).pairs(4096) / 4096**2
    for site, share in zip(sites, (0.65, 0.65, window, window), strict=True):
        products = [
            node for node in model.graph if node.op_type == "MatMul" and (node.name or "").startswith(f"{site.site}/")
        ]
        flops = sum(product_flops(node, sizes) for node in products)
        assert 0 < flops <= share * 4 * 8 * 64 * 4096**2
        assert scores_of(plan, site.node) == (None if is_dynamic else flops / (4 * 64))


class Chunks(nn.Module):
    """Attention within chunks of 256 tokens; the same to earlier keys only; and to the 128 keys up to the query and the
    first 16 keys, with the first 16 queries seeing all keys. On `(1, 8, tokens, 64)`; the last with `padding`, `(1,
    tokens)`."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, padding: Tensor) -> tuple[Tensor, ...]:
        index = torch.arange(query.shape[2])
        back = index[:, None] - index
        chunks = index[:, None] // 256 == index // 256
        some = ((back >= 0) & (back < 128)) | (index < 16) | (index[:, None] < 16)
        attend = nn.functional.scaled_dot_product_attention
        return (
            attend(query, key, value, attn_mask=chunks),
            attend(key, value, query, attn_mask=chunks & (back >= 0)),  # other products
            attend(query, key, value, attn_mask=some & padding[:, None, None]),
        )


@pytest.mark.parametrize("is_dynamic", [True, False])
def test_tensorrt_rtx_fuses_chunks_and_what_first_tokens_see(tmp_path: Path, is_dynamic: bool) -> None:
    tokens = Dim("tokens", min=1, max=8192)
    shapes = {**{name: {2: tokens} for name in NAMES[:3]}, "padding": {1: tokens}} if is_dynamic else None
    args = (*(torch.zeros(1, 8, 4096, 64) for _ in range(3)), torch.ones(1, 4096, dtype=torch.bool))
    captured = capture(Chunks(), args, shapes, precision_named("fp16"))
    model, sites = captured.model, canonicalize(captured.model).sites
    bands = [a.band for _, a in attentions(model, sites)]
    assert bands == [
        Band(0, 0, chunk=256),
        Band(0, 0, chunk=256, inside=(0, None)),
        Band(0, 127, is_all=False, first_keys=16, first_queries=16),
    ]
    lowered = for_tensorrt.lower(model, sites, sizes={"tokens": 4096})
    assert [site.form.rpartition(" ")[2] for site in lowered] == ["256", "each", "32"]
    ir.save(model, tmp_path / "model.onnx")
    plan = build(tmp_path / "model.onnx", "tensorrt_rtx", captured.inputs, "fp16")
    assert [plan.kernel_of(site.node) is not None for site in lowered] == [True] * 3
    assert sum(layer.is_fused_attention for layer in plan.layers) == 1 + 4 + 2
    if not is_dynamic:
        for site, band in zip(lowered, bands, strict=True):
            scores = scores_of(plan, site.node)
            assert band is not None and scores is not None and 0 < scores <= 1.3 * 8 * band.pairs(4096)
