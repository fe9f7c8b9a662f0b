"""Attention in blocks equals float64 for bands of every kind, drawn at random, and for their near misses."""

from __future__ import annotations

import sys

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attnforge.arrays import Array
from attnforge.export.attention.canonicalize import Site, canonicalize
from attnforge.export.lowering import tensorrt as for_tensorrt
from attnforge.export.lowering.attention import attentions, write
from attnforge.export.lowering.band import Band
from attnforge.export.lowering.onnxruntime import candidates_for
from tests.support.idioms.together import session_of

HEADS, SIZE = 2, 4


@st.composite
def bands(draw: st.DrawFn) -> Band:
    """A band in which every query sees itself."""
    chunk = draw(st.sampled_from([1, 1, 3, 4, 16]))
    most, least = (draw(st.integers(0, 12 if chunk == 1 else 2)) * chunk for _ in range(2))
    ends = st.one_of(st.none(), st.integers(0, 5))
    before, after = (draw(ends), draw(ends)) if chunk > 1 else (None, None)
    return Band(
        -least,
        most,
        chunk=chunk,
        inside=(None if after is None else -after, before),
        first_keys=draw(st.sampled_from([0, 0, 1, 7])),
        first_queries=draw(st.sampled_from([0, 0, 1, 5])),
        shift=draw(st.integers(0, chunk - 1)),
    )


def causal_prefix(first_keys: int) -> Band:
    """Earlier keys, and some first keys that every query sees."""
    return Band(0, sys.maxsize, first_keys=first_keys)


def graph_of(mask: Array, tokens: int) -> tuple[ir.Model, list[Site]]:
    """Attention of `(1, heads, tokens, size)` under a constant mask of all pairs."""
    shape = f"float[1,{HEADS},{tokens},{SIZE}]"
    text = f"g ({shape} query, {shape} key, {shape} value) => ({shape} y) <bool[{tokens},{tokens}] mask>"
    model = ir.from_onnx_text(
        f'<ir_version: 10, opset_import: ["" : 23]> {text} {{ y = Attention(query, key, value, mask) }}'
    )
    (node,) = model.graph
    weight = ir.Value(name="visible", const_value=ir.tensor(mask, name="visible"))
    weight.type, weight.shape = ir.TensorType(ir.DataType.BOOL), ir.Shape(mask.shape)
    node.replace_input_with(3, weight)
    model.graph.register_initializer(weight)
    return model, canonicalize(model).sites


def truth(feeds: dict[str, Array], mask: Array) -> Array:
    query, key, value = (feeds[name].astype(np.float64) for name in ("query", "key", "value"))
    scores = np.where(mask, query @ key.swapaxes(-1, -2) / SIZE**0.5, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    result: Array = weights / weights.sum(-1, keepdims=True) @ value
    return result


def computed(model: ir.Model, feeds: dict[str, Array]) -> Array:
    RemoveUnusedNodesPass()(model)
    result: Array = session_of(model).run(None, feeds)[0]
    return result


def visible(band: Band, tokens: int) -> Array:
    """Return `(tokens, tokens)`, whether each pair of a query and a key is visible."""
    query, key = np.arange(tokens)[:, None], np.arange(tokens)
    seen: Array = band.between(query, key)
    return seen | (key < band.first_keys) | (query < band.first_queries)


def drawn(tokens: int) -> dict[str, Array]:
    random = np.random.default_rng(tokens)
    return {name: random.standard_normal((1, HEADS, tokens, SIZE), np.float32) for name in ("query", "key", "value")}


@settings(max_examples=60)
@given(bands(), st.sampled_from([1, 2, 3, 7, 13, 16, 17, 31, 48]), st.integers(1, 9), st.data())
def test_blocks_equal_float64(band: Band, tokens: int, nearly: int, data: st.DataObject) -> None:
    mask = visible(band, tokens)
    assert band.pairs(tokens) == mask.sum()
    if data.draw(st.booleans(), label="a pair too few or too many"):
        q, k = (data.draw(st.integers(0, tokens - 1)) for _ in range(2))
        if q != k:
            mask[q, k] = ~mask[q, k]
    feeds = drawn(tokens)
    model, sites = graph_of(mask, tokens)
    ((site, attention),) = attentions(model, sites)
    proved = attention.band
    if proved is None:
        return
    assert not (mask & ~visible(proved, tokens)).any()
    assert not proved.is_all or np.array_equal(mask, visible(proved, tokens))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("attnforge.export.lowering.blocks.BLOCKS", (nearly,))
        (candidate,) = (each for each in candidates_for(site.name, attention) if "blocks" in each.form)
    write(model.graph, attention, candidate)
    np.testing.assert_allclose(computed(model, feeds), truth(feeds, mask), rtol=1e-5, atol=1e-6)


@settings(max_examples=25)
@given(st.one_of(bands(), st.builds(causal_prefix, st.integers(0, 60))), st.sampled_from([29, 48]))
def test_tensorrts_graph_equals_float64(band: Band, tokens: int) -> None:
    mask, feeds = visible(band, tokens), drawn(tokens)
    model, sites = graph_of(mask, tokens)
    with pytest.MonkeyPatch.context() as patched:
        for name, value in (("BLOCKS", (4,)), ("MANY_SCORES", 1), ("MANY_TOKENS", 1), ("MANY_IN_CHUNK", 8)):
            patched.setattr(for_tensorrt, name, value)
        for_tensorrt.lower(model, sites)
    np.testing.assert_allclose(computed(model, feeds), truth(feeds, mask), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "band",
    [
        Band(0, 4),
        Band(-4, 4, chunk=4),
        Band(0, 0, chunk=8),
        Band(0, 0, chunk=8, shift=3),
        Band(0, 4, first_keys=3),
        Band(0, 4, first_queries=2),
    ],
)
def test_a_nan_key_reaches_only_the_blocks_that_it_is_in(band: Band) -> None:
    """Blocks hide it from more queries than a mask, which does not hide it at all: 0 · NaN is NaN."""
    tokens, width = 48, 8
    mask, feeds = visible(band, tokens), drawn(tokens)
    model, sites = graph_of(mask, tokens)
    ((site, attention),) = attentions(model, sites)
    assert attention.band == band
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("attnforge.export.lowering.blocks.BLOCKS", (width,))
        (candidate,) = (each for each in candidates_for(site.name, attention) if "blocks" in each.form)
    write(model.graph, attention, candidate)
    expected, key = truth(feeds, mask), 21
    feeds["key"][..., key, :] = feeds["value"][..., key, :] = np.nan
    result = computed(model, feeds)
    begin = np.arange(-band.shift, tokens, width)
    block = (begin - band.most <= key) & (key < begin + width - band.least)
    reached = np.repeat(block, width)[band.shift :][:tokens] | (np.arange(tokens) < band.first_queries)
    assert reached.sum() < tokens
    np.testing.assert_allclose(result[:, :, ~reached], expected[:, :, ~reached], rtol=1e-5, atol=1e-6)
    assert np.isnan(result[:, :, mask[:, key]]).all()
