"""The graphs of a decoder: the canonical and the deployed step are the same function in float64, and a step without a
past is the model."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import attnforge
from attnforge.bundle import CANONICAL, PLAIN, Bundle
from attnforge.export.decoding.whole import whole_graph
from attnforge.export.graphs.build import Builder, constant, insert
from attnforge.export.graphs.execute import as_it_is, in_float64
from attnforge.export.graphs.saving import load_graph, with_weights_of
from attnforge.report.attention_maps import attention_maps
from attnforge.report.verify_page import write_page
from attnforge.runtime.parity.budget import relative_error
from tests.support.bundles import rewrite
from tests.support.decoders import KINDS, PLACES, DeployDecoder, ids


@pytest.mark.parametrize("kind", ["rotary", "learned", "window", "uneven"])  # capped has no fused form in float64
def test_both_steps_are_the_same_function(decoders: DeployDecoder, kind: str) -> None:
    bundle = decoders(kind, "fp32")
    decoding, rng = bundle.manifest.decoding, np.random.default_rng(0)
    assert decoding is not None
    past = np.array([30, 0, 17])
    caches = {
        spec.name: rng.standard_normal((3, *(dim for dim in spec.dims[1:] if isinstance(dim, int))))
        for spec in decoding.tensors
    }
    feeds = {"input_ids": ids(3, 1), "past": past, "kept": np.zeros(1, np.int64), **caches}
    canonical, deployed = (
        in_float64(load_graph(bundle, name))(feeds)
        for name in (CANONICAL, bundle.manifest.targets["onnxruntime"].model)
    )
    assert list(canonical) == list(deployed)
    for name, array in canonical.items():
        assert relative_error(deployed[name], array) < 1e-12, name
    slots = np.arange(PLACES)[:, None]
    for spec in decoding.tensors:  # a step writes one slot of each sample, and no other
        changed = (canonical[f"{spec.name}.next"] != feeds[spec.name]).any(axis=(1, 3))
        assert np.array_equal(changed, (slots == past).T)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_a_past_is_the_model(decoders: DeployDecoder, kind: str) -> None:
    bundle = decoders(kind, "fp32")
    feeds = {"input_ids": ids(2, 19)}
    plain = with_weights_of(load_graph(bundle, PLAIN), load_graph(bundle, CANONICAL))
    expected = as_it_is(plain)(feeds)
    for name in (CANONICAL, bundle.manifest.targets["onnxruntime"].model):
        model = whole_graph(bundle, name)
        assert [value.name for value in model.graph.inputs] == ["input_ids"]
        answers = as_it_is(model)(feeds)
        assert answers.keys() == expected.keys()
        assert relative_error(answers["output"], expected["output"]) < 2e-6


@pytest.mark.parametrize("kind", ["window", "capped", "uneven"])
def test_diagnose_examines_the_model(decoders: DeployDecoder, kind: str) -> None:
    diagnosis = attnforge.diagnose(decoders(kind, "fp16"), ["onnxruntime-cpu"])
    assert diagnosis.same_function == ["plain", "canonical", "onnxruntime", "tensorrt_rtx"]
    assert diagnosis.failing == [] and diagnosis.finding.cause == "rounding"


@pytest.mark.parametrize("kind", KINDS)
def test_attention_maps_show_what_the_model_attends_to(decoders: DeployDecoder, kind: str, tmp_path: Path) -> None:
    bundle = decoders(kind, "fp32")
    maps = attention_maps(bundle)
    assert maps.left_out == {} and maps.no_exact is None
    for site in maps:
        assert site.exact is not None
        for weights in (site.eager, site.deployed):
            assert relative_error(weights, site.exact) < 1e-5
        distance = np.arange(9)[:, None] - np.arange(9)
        hidden = (distance < 0) | (distance >= 7 if kind == "window" else False)
        assert not site.exact[:, hidden].any() and site.exact[:, ~hidden].all()
    if kind == "window":
        page = write_page(attnforge.verify(bundle), bundle, tmp_path / "page.html")
        assert "example token by token" in page.read_text() and "normal-prime cut and forked" in page.read_text()


def after_a_past(op: Builder, last: ir.Value, past: ir.Value) -> ir.Value:
    """Lengths that are one too small for samples with a past."""
    fewer = op.Cast(op.Greater(past, constant(op, [0])), to=ir.DataType.INT32.value)
    return op.Sub(last, fewer)


def test_diagnose_names_the_layer_where_steps_alone_are_wrong(decoders: DeployDecoder, tmp_path: Path) -> None:
    """One layer of a step is wrong after a past, so the whole sequence, which has none, is right."""
    bundle = Bundle(Path(shutil.copytree(decoders("window", "fp32").path, tmp_path / "wrong")))
    model = load_graph(bundle, bundle.manifest.targets["onnxruntime"].model)
    node = [node for node in model.graph if node.op_type == "GroupQueryAttention"][1]
    past = next(value for value in model.graph.inputs if value.name == "past")
    last = node.inputs[5]
    assert last is not None
    node.replace_input_with(5, insert(model.graph, node, lambda op: after_a_past(op, last, past)))
    ir.save(model, bundle.path / bundle.manifest.targets["onnxruntime"].model)
    diagnosis = attnforge.diagnose(rewrite(bundle.path), ["onnxruntime-cpu"], out=tmp_path / "out")
    assert diagnosis.failing == ["onnxruntime-cpu"] and diagnosis.same_function == ["canonical"]
    assert diagnosis.why.startswith("the whole sequence is right, and ") and " fails at token " in diagnosis.why
    assert diagnosis.finding.cause == "rewrite" and diagnosis.finding.stage == "onnxruntime"
    assert diagnosis.finding.module == "layers.1.attention"
    assert diagnosis.finding.rule is not None and "GroupQueryAttention, cache in place" in diagnosis.finding.rule
    inputs = np.load(tmp_path / "out" / "inputs.npz")
    assert "past" in inputs and any(name.startswith("key_cache.1") for name in inputs)
