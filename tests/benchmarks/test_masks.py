"""The claims about masks: every limit is compared with the fastest peer that is right."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from attnforge.bench.contenders.peers import PeerJob
from attnforge.bench.contenders.registry import PEERS
from attnforge.bench.results import Fit, Growth, Results, Series
from attnforge.errors import UnavailableError
from attnforge.records import Interval
from benchmarks.experiments import masks
from benchmarks.published import Published


def contender(name: str, ratio: float | None, *, ours: bool = False, wrong: str | None = None) -> dict[str, Any]:
    exactly = {"value": 1.0, "low": 1.0, "high": 1.0}
    latency = {"rounds": [[1.0]], "median": exactly, "min": 1.0, "p90": 1.0, "p99": 1.0, "samples": 1}
    return {
        "name": name, "precision": "fp32", "ours": ours, "picked": ours, "what": "", "error": 0.0, "budget": 1.0,
        "latency": latency, "ratio": ratio and {"value": ratio, "low": ratio, "high": ratio},
        "cases": wrong and {"held": 1, "of": 1, "wrong": wrong},
    }  # fmt: skip


def model(name: str, tokens: int, contenders: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": name,
        "sizes": {"tokens": tokens},
        "inputs": {},
        "rounds": 1,
        "deployed": [],
        "contenders": contenders,
    }


def growth(name: str, time: float, memory: float, extra_mib: float) -> Growth:
    laws = [Fit(exponent=Interval(value=law, low=law, high=law), last=law) for law in (time, memory)]
    series = Series(
        name="onnxruntime-cpu", precision="fp32", ours=True, ms=[1.0] * 5, extra_mib=[1.0, 1.0, 1.0, 1.0, extra_mib],
        time=laws[0], memory=laws[1],
    )  # fmt: skip
    return Growth(model=name, along="tokens", sizes=list(masks.TOKENS), series=[series])


def results(models: list[dict[str, Any]], grown: list[Growth]) -> dict[str, Any]:
    machine = {"system": "s", "processor": "p", "processors": 2, "instructions": [], "gpus": []}
    environment = {"machine": machine, "versions": {}, "threads": 2, "governor": "g", "load_before": 0, "load_after": 0}
    return {
        "command": "c", "created": "now", "seconds": 1, "environment": environment,
        "ceilings": None, "models": models, "growth": [each.model_dump() for each in grown],
    }  # fmt: skip


def test_the_fastest_right_peer_counts_and_exceeded_limits_are_reported() -> None:
    ours, wrong = contender("onnxruntime-cpu", 1.0, ours=True), contender("torch-compile", 1.0, wrong="extremes")
    peers = [contender("eager", 5.0), contender("openvino-plain", 4.0), contender("ort-fusions", None), wrong]
    kept = model("window", 4096, [ours, contender("openvino", 0.9, ours=True), *peers])
    slow = model("causal", 16384, [ours, contender("eager", 1.0)])
    grown = [growth("window", 1.2, 1.0, 100.0), growth("causal", 2.0, 1.05, 65.0)]
    figures = results([kept, slow], grown)
    lines = masks.table(figures).splitlines()
    assert lines[2] == "| window, 4,096 tokens: time, of the fastest peer's | openvino-plain | 0.85 | 0.25 | – | yes |"
    assert lines[3] == "| window: p of time ~ tokensᵖ |  | 1.15 | 1.2 | – | **no** |"
    assert masks.EXPERIMENT.wrong(figures) == [
        "window: p of time ~ tokensᵖ: 1.2, at most 1.15",
        "causal, 16,384 tokens: time, of the fastest peer's (eager): 1, at most 0.9",
        "causal, 16,384 tokens: MiB added per call: 65, at most 64",
    ]


@pytest.mark.parametrize("mask", masks.MASKS)
def test_both_forms_see_the_same_keys(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("WINDOW", 6), ("CHUNK", 4), ("PREFIX", 3)):
        monkeypatch.setattr(masks, name, size)
    module, args, _ = masks.bare(mask)
    index = torch.arange(12)
    seen = masks.MASKS[mask](index[:, None], index)
    query, key, value = (arg[:, :, :12] for arg in args)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
    assert torch.allclose(module(query, key, value)["out"], expected, atol=1e-6)
    visible = {"window": 57, "both sides": 72, "chunks": 48, "prefix": 81, "causal": 78, "no mask": 144}
    assert seen.sum() == visible[mask]


def test_the_limit_is_the_speed_without_a_mask() -> None:
    """Half of the pairs, and one more for each query, at the speed of the fastest contender."""
    ours, slower = contender("onnxruntime-cpu", 1.0, ours=True), contender("eager", 2.0)
    slower["latency"] = {**slower["latency"], "median": {"value": 4.0, "low": 4.0, "high": 4.0}}
    figures = results([model("no mask", 4096, [slower, ours]), model("causal", 4096, [ours])], [])
    (claim,) = masks.claims(figures)
    assert claim.text == "causal, 4,096 tokens: time, of the limit's"
    assert claim.measured == pytest.approx(2 / (1 + 1 / 4096)) and claim.at_most == 1 / 0.85


def test_a_module_without_a_form_for_flex_attention_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerJob, "torch_module", lambda job: torch.nn.Identity())
    job = PeerJob.__new__(PeerJob)
    job.threads = torch.get_num_threads()
    with ExitStack() as stack, pytest.raises(UnavailableError, match="no method with_flex_attention"):
        PEERS["flex-attention"].open(job, stack)


def test_results_name_no_temporary_folder() -> None:
    sizes = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 16, "sliding_window": 4, "max_position_embeddings": 8,
    }  # fmt: skip
    options = {"batch": 1, "tokens": 8, "max_tokens": 8, "dynamic": "tokens"}
    tiny = Published("tiny", "decoder", "MistralForCausalLM", sizes, options)
    measured = masks.measure(masks.Subject(tiny, {8: 1.0}, {8: ("eager",)}), 1)
    sources = [made.source for found in measured.models for made in found.deployed]
    assert sources == ["hf:model batch=1 tokens=8 max_tokens=8 dynamic=tokens"]
    assert {contender.name for contender in measured.models[0].contenders} > {"eager"}


def test_figures_of_other_subjects_are_kept() -> None:
    before = results([model("window", 4096, []), model("causal", 4096, [])], [growth("window", 1, 1, 1)])
    made = Results.model_validate(results([model("window", 8192, [])], [growth("window", 2, 2, 2)]))
    kept = masks.EXPERIMENT._merged(Results.model_validate(before), made, "window")
    assert [(of.name, of.sizes["tokens"]) for of in kept.models] == [("window", 8192), ("causal", 4096)]
    assert [of.series[0].extra_mib[-1] for of in kept.growth] == [2] and kept.seconds == 2
