"""Attention in blocks on OpenVINO: the same function at any number of tokens, if a mask is proved to hide enough. Other
sites keep their canonical node."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor

from attnforge.arrays import Array
from attnforge.export.attention.canonicalize import Site, canonicalize
from attnforge.export.lowering import blocks
from attnforge.export.lowering import openvino as for_openvino
from attnforge.export.lowering.attention import attentions, write
from attnforge.export.lowering.band import Band
from attnforge.export.lowering.blocks import BLOCKS
from attnforge.export.lowering.openvino import CANONICAL_FORM, LIBRARY, STEPS, candidates_for, lower
from attnforge.export.lowering.tuning import Tuner, by_rules
from attnforge.runtime.backends.openvino_graph import prepared, properties_for
from attnforge.runtime.backends.registry import why_not_here
from tests.export.lowering.test_blocks import BANDS, CAUSAL_PREFIXES, NAMES, NO_BANDS, exported, inputs, truth
from tests.export.lowering.test_blocks_properties import bands, causal_prefix, drawn, graph_of, visible
from tests.export.lowering.test_blocks_properties import truth as truth_of_mask

pytestmark = [
    pytest.mark.skipif(why_not_here("openvino") is not None, reason=str(why_not_here("openvino"))),
    pytest.mark.xdist_group("openvino"),
]


def compiled(model: ir.Model) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
    """Compile a graph as the backend does, for all sizes; a run returns outputs by name. The first run must have
    several tokens (:meth:`attnforge.runtime.backends.openvino.OpenVino._run_once`)."""
    import openvino

    core = openvino.Core()
    graph = prepared(core.read_model(ir.to_proto(model).SerializeToString()), widen=True)
    properties = properties_for(graph, {"INFERENCE_PRECISION_HINT": "f32"})
    request = core.compile_model(graph, "CPU", properties).create_infer_request()
    taken = {name for port in graph.inputs for name in port.get_names()}

    def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
        request.infer({name: np.ascontiguousarray(array) for name, array in feeds.items() if name in taken})
        return {value.name: request.get_tensor(value.name).data.copy() for value in model.graph.outputs}  # type: ignore[misc]

    return run


def form_of(band: Band, nearly: int) -> str:
    (width,) = band.widths([nearly])
    return f"MatMul·Softmax·MatMul, blocks of {width} × {band.wide(width)}"


@functools.cache
def in_form(nearly: int) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
    """Bands in blocks of about this many queries, and causal attention in causal blocks; nothing else."""
    model, count = exported().model.clone(), dict(zip(BLOCKS, (4, 8, 32), strict=True))[nearly]
    steps = f"MatMul·Softmax·MatMul, {count} blocks"
    for site, a in list(attentions(model, canonicalize(model).sites)):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(for_openvino, "STEPS", (count,))
            candidates = candidates_for(site.name, a)
        if len(candidates) > 1:
            form = steps if a.band is None else form_of(a.band, nearly)
            (candidate,) = (each for each in candidates if each.form == form)
            write(model.graph, a, candidate)
    outputs = {str(value.name): value for value in model.graph.outputs}
    model.graph.outputs[:] = [outputs[name] for name in (*BANDS, *CAUSAL_PREFIXES)]
    RemoveUnusedNodesPass()(model)
    return compiled(model)


@pytest.mark.parametrize("width", BLOCKS)
def test_the_same_function_at_any_number_of_tokens(width: int) -> None:
    """Four query heads on two key heads; windows wider than the text, fully masked rows, one token."""
    run = in_form(width)
    for batch, tokens in ((2, 13), (1, 1), (1, width - 1), (3, width), (1, width + 1), (2, 2 * width + 31)):
        results = run(dict(zip(NAMES, map(Tensor.numpy, inputs(batch, tokens)), strict=True)))
        for name, result in results.items():
            expected = truth(name, batch, tokens)
            assert result.shape == expected.shape
            assert np.linalg.norm(result - expected) <= 1e-6 * np.linalg.norm(expected), (name, batch, tokens)


def test_a_site_without_proof_keeps_its_node() -> None:
    model = exported().model.clone()
    sites = list(attentions(model, canonicalize(model).sites))
    have = [len(candidates_for(site.name, a)) > 1 for site, a in sites]
    assert have == [name in (*BANDS, *CAUSAL_PREFIXES) for name in (*BANDS, *NO_BANDS)]


def lowered(tokens: int, tuner: Tuner | None = None) -> list[str]:
    model = exported().model.clone()
    sites = lower(model, canonicalize(model).sites, {"batch": 1, "tokens": tokens}, tuner)
    kept = sum(node.op_type == "Attention" for node in model.graph)
    forms = [site.form for site in sites]
    blocks = sum(form != CANONICAL_FORM for form in forms)
    assert kept == len((*BANDS, *NO_BANDS)) - blocks
    return forms


def test_rules_take_blocks_where_most_keys_are_hidden() -> None:
    assert lowered(256) == [CANONICAL_FORM] * len((*BANDS, *CAUSAL_PREFIXES))
    blocks = [form_of(band, 128 if band.span == 69 else 64) for band in BANDS.values()]
    assert lowered(1024) == blocks + [f"MatMul·Softmax·MatMul, {STEPS[0]} blocks"] * len(CAUSAL_PREFIXES)


def test_forms_are_measured_on_openvino() -> None:
    """In whatever else a mask hides than the keys outside a band, or later ones."""
    model, sizes = exported().model.clone(), {"batch": 1, "tokens": 160}
    (windowed,) = lower(model, canonicalize(model).sites[:1], sizes, Tuner(sizes, 20.0, library=LIBRARY))
    forms = {CANONICAL_FORM, *(form_of(BANDS["before"], width) for width in BLOCKS)}
    assert set(windowed.measured) == forms
    causal = {CANONICAL_FORM, *(f"MatMul·Softmax·MatMul, {steps} blocks" for steps in STEPS[:2])}
    spent = Tuner(sizes, 60.0, library=LIBRARY)
    model = exported().model.clone()
    nodes = list(attentions(model, canonicalize(model).sites))
    for name in CAUSAL_PREFIXES:
        site, a = nodes[[*BANDS, *NO_BANDS].index(name)]
        offered = candidates_for(site.name, a, None, sizes)
        choice = spent.choose(model, a, offered, by_rules(offered))
        assert set(choice.measured) == causal and not choice.dropped


# --- at random --------------------------------------------------------------------------------------------------------


def in_blocks(mask: Array, tokens: int, nearly: int) -> tuple[Site, Any, ir.Model] | None:
    """A site under a mask in blocks of about this many queries, or in causal blocks; None if nothing is proved about
    it."""
    model, sites = graph_of(mask, tokens)
    ((site, a),) = attentions(model, sites)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(blocks, "BLOCKS", (nearly,))
        patched.setattr(for_openvino, "STEPS", (nearly,))
        _, *candidates = candidates_for(site.name, a)
    if not candidates:
        return None
    write(model.graph, a, candidates[0])
    RemoveUnusedNodesPass()(model)
    return site, a, model


FEW_OR_MANY = st.integers(1, 9) | st.sampled_from([16, 32])


@settings(max_examples=30)
@given(bands(), st.sampled_from([1, 2, 3, 7, 13, 16, 17, 31, 48]), FEW_OR_MANY, st.data())
def test_blocks_equal_float64(band: Band, tokens: int, nearly: int, data: st.DataObject) -> None:
    mask, feeds = visible(band, tokens), drawn(tokens)
    if data.draw(st.booleans(), label="causal"):
        mask = visible(causal_prefix(data.draw(st.sampled_from([0, 1, 7, 30]))), tokens)
    if data.draw(st.booleans(), label="a pair too few or too many"):
        q, k = (data.draw(st.integers(0, tokens - 1)) for _ in range(2))
        if q != k:
            mask[q, k] = ~mask[q, k]
    if (written := in_blocks(mask, tokens, nearly)) is not None:
        result = compiled(written[2])(feeds)["y"]
        np.testing.assert_allclose(result, truth_of_mask(feeds, mask), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "band",
    [Band(0, 4), Band(-4, 4, chunk=4), Band(0, 0, chunk=8), Band(0, 4, first_keys=3), Band(0, 4, first_queries=2)],
)
def test_a_nan_key_reaches_only_the_blocks_that_it_is_in(band: Band) -> None:
    tokens, width, key = 48, 8, 21
    mask, feeds = visible(band, tokens), drawn(tokens)
    written = in_blocks(mask, tokens, width)
    assert written is not None
    expected = truth_of_mask(feeds, mask)
    feeds["key"][..., key, :] = feeds["value"][..., key, :] = np.nan
    result = compiled(written[2])(feeds)["y"]
    begin = np.arange(0, tokens, width)
    reached = np.repeat((begin - band.most <= key) & (key < begin + width - band.least), width)
    reached |= np.arange(tokens) < band.first_queries
    assert reached.sum() < tokens
    np.testing.assert_allclose(result[:, :, ~reached], expected[:, :, ~reached], rtol=1e-5, atol=1e-6)


def test_no_block_reads_later_keys() -> None:
    tokens, steps, key = 48, 4, 40
    mask, feeds = np.tri(tokens, dtype=bool), drawn(tokens)
    written = in_blocks(mask, tokens, steps)
    assert written is not None
    expected = truth_of_mask(feeds, mask)
    feeds["key"][..., key, :] = feeds["value"][..., key, :] = np.nan
    result, before = compiled(written[2])(feeds)["y"], tokens * (steps - 1) // steps
    np.testing.assert_allclose(result[:, :, :before], expected[:, :, :before], rtol=1e-5, atol=1e-6)
