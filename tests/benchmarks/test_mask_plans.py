"""TensorRT-RTX plans of whole models whose masks hide most scores: every site is fused, without needless scores."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnforge.export.tensorrt.process import Layer
from benchmarks.experiments import mask_plans
from benchmarks.experiments.mask_plans import MODELS, Attended, attended_in, scores_of_layer
from benchmarks.published import Published

pytest.importorskip("tensorrt_rtx")

SMALL = {
    "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 64, "num_hidden_layers": 2,
    "max_position_embeddings": 2048, "pad_token_id": 0,
}  # fmt: skip
MASKS = {
    "ModernBertModel": {"all, residue: padding", "band −64 … 64, residue: padding"},
    "MistralForCausalLM": {"band −511 … 0, residue: padding"},
    "LlamaForCausalLM": {"band −∞ … 0, residue: padding"},
}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.architecture)
def test_two_layers_are_fused_and_compute_what_is_needed(model: Published) -> None:
    own = {name: size for name, size in model.sizes.items() if name not in SMALL}
    if model.architecture == "ModernBertModel":
        own["global_attn_every_n_layers"] = 2
    attended = attended_in(replace(model, sizes={**own, **SMALL}), tokens=2048)
    assert {each.mask for each in attended} == MASKS[model.architecture]
    assert sum(each.sites for each in attended) == 2
    for each in attended:
        assert each.scores is not None and each.fused == each.fused_dynamic == each.sites
        assert each.keeps, each
        if each.limit is not None:
            assert each.needed <= each.scores < each.whole


def test_a_limit_is_of_the_needed_for_windows_and_of_all_for_causal_attention() -> None:
    window = Attended("band −3 … 0", sites=2, fused=2, fused_dynamic=2, scores=129, needed=100, whole=1000)
    assert window.keeps and not replace(window, scores=131).keeps
    assert not replace(window, scores=None).keeps
    assert not replace(window, fused=1).keeps and not replace(window, fused_dynamic=1).keeps
    causal = replace(window, scores=650, needed=501)
    assert causal.keeps and not replace(causal, scores=651).keeps
    whole = replace(window, scores=1000, needed=1000)
    assert whole.keeps and whole.limit is None
    figures = {
        "command": "c",
        "machine": {"processor": "p", "threads": 2},
        "tools": {"tensorrt_rtx": "1"},
        "models": {"m": [{**window.__dict__, "scores": 131}, causal.__dict__]},
    }
    lines = mask_plans.table(figures).splitlines()
    assert lines[2:4] == [
        "| m | band −3 … 0 | 2 | 2 | 2 | 1.31 | 0.131 | **no** |",
        "| m | band −3 … 0 | 2 | 2 | 2 | 1.30 | 0.650 | yes |",
    ]
    assert mask_plans.EXPERIMENT.wrong(figures) == ["m, band −3 … 0: scores: 131, at most 130"]
    figures["models"] = {"m": [replace(window, fused=1, scores=None).__dict__]}
    assert len(mask_plans.EXPERIMENT.wrong(figures)) == 2


@pytest.mark.parametrize(
    ("inputs", "scores"),
    [
        ([[8, 5, 64], [8, 64, 70], [8, 70, 64]], 8 * 5 * 70),
        ([[8, 70, 64], [8, 64, 70], [1, 1, 5, 70], [8, 5, 64]], 8 * 5 * 70),
        ([[2, 70, 64], [2, 64, 70], [8, 5, 64]], 8 * 5 * 70),  # query heads share key heads
        ([[8, 5, 64], [8, 64, -1], [8, -1, 64]], None),
        ([[8, 5, 64], [8, 64, 70]], None),
    ],
)
def test_scores_by_the_shapes_of_a_layer(inputs: list[list[int]], scores: int | None) -> None:
    layer = Layer(name="_gemm_mha_v2", type="kgen", tactic="", onnx_nodes=[], inputs=inputs, outputs=[[8, 5, 64]])
    assert scores_of_layer(layer) == scores
    assert scores_of_layer(layer.model_copy(update={"name": "gemm"})) is None


def test_scores_with_as_many_queries_as_features_are_the_most_that_fit() -> None:
    layer = Layer(
        name="_gemm_mha_v2", type="kgen", tactic="", onnx_nodes=[],
        inputs=[[8, 64, 64], [8, 64, 575], [8, 575, 64]], outputs=[[8, 64, 64]],
    )  # fmt: skip
    assert scores_of_layer(layer) == 8 * 64 * 575
