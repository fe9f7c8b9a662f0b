"""The table of models at published sizes: every failure has its reason, and a step beyond its limits is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.child import GIB
from benchmarks.deploy_steps import DeployRequest, in_a_process
from benchmarks.experiments.real_sizes import growth, table
from benchmarks.published import GROWTH, PUBLISHED

ABOUT = {"command": "c", "machine": {"processor": "p", "threads": 2}, "tools": {"transformers": "5"}}
PLAIN = {"seconds": 10.0, "cpu": 15.0, "peak": GIB, "difference": 1e-6}


def deployed(**changes: Any) -> dict[str, Any]:
    return {
        "parameters": 2_000_000, "sites": 3, "canonical": 3, "reasons": [], "skipped": {}, "seconds": 30.0, "cpu": 60.0,
        "stages": {"export": 4.6, "reference": 11.0, "measure backends": 8.0}, "peak": 2 * GIB,
        "children": {
            "tensorrt_rtx": {"seconds": 2.0, "memory": GIB // 2},
            "measure backends": {"seconds": 8.0, "memory": 3 * GIB},
        }, **changes,
    }  # fmt: skip


def test_a_row_and_the_reasons_below_the_table() -> None:
    passed = {"passed": True, "missed": None}
    good = {
        "kind": "encoder", "plain": PLAIN, "deploy": deployed(), "fused": {"fused": 3, "precision": "fp16"},
        "verify": {"passed": True, "backends": {"onnxruntime-cpu": passed}},
    }  # fmt: skip
    flawed = {
        "kind": "cross", "plain": PLAIN, "deploy": deployed(canonical=2, reasons=["a convolution"]),
        "fused": {"fused": 2, "precision": "bf16", "without": "no fp16", "unfused": ["a soft cap"]},
        "verify": {"passed": False, "backends": {"openvino": {"passed": False, "missed": "normal, logits: off"}}},
    }  # fmt: skip
    failed = {"kind": "audio", "plain": PLAIN, "deploy": {"failed": "more than 9 GiB"}, "fused": {"failed": "no"}}
    text = table({"models": {"good": good, "flawed": flawed, "failed": failed}, **ABOUT})
    rows = [line.split(" | ") for line in text.splitlines()]
    assert rows[2][2:] == ["2", "3", "3", "3", "yes", "5", "11", "8", "30", "10", "3.0", "4.0", "3.0", "0.5", "1.0 |"]
    assert rows[3][4:7] == ["2", "2 (bf16)", "no"]
    assert rows[4][2:] == [*9 * ["–"], "10", *4 * ["–"], "1.0 |"]
    assert "3 models: 2 are deployed, 5 of their 6 sites are canonical, and 1 are verified." in text
    assert [line for line in text.splitlines() if line.startswith("- ")] == [
        "- flawed: not canonical: a convolution",
        "- flawed: fp16: no fp16",
        "- flawed: TensorRT-RTX, fp16: a soft cap",
        "- flawed: openvino: normal, logits: off",
        "- failed: deploy: more than 9 GiB",
        "- failed: fused: no",
    ]


def test_growth_is_fitted_over_parameters() -> None:
    models: dict[str, Any] = {}
    for i, model in enumerate(GROWTH["depth"]):
        deploy = deployed(parameters=10**7 * 2**i, seconds=20.0 * 2**i, cpu=30.0 * 4**i)
        models[model.name] = {"kind": "growth", "plain": PLAIN, "deploy": deploy}
    lines = growth({"models": models}).splitlines()
    assert lines[2] == "| 6 layers, 768 wide | 10 | 20 | 30 | 3.0 | 10 | 15 | 1.0 |"
    assert lines[6] == "| **over depth, parameters to the power of** |  | 1.00 | 2.00 | 0.00 | 0.00 | 0.00 | 0.00 |"
    assert growth({"models": {}}) == "Not measured."


def test_names_are_unique_and_kinds_are_those_that_are_documented() -> None:
    assert len({model.name for model in PUBLISHED}) == len(PUBLISHED) >= 25
    assert {model.kind for model in PUBLISHED} == {"encoder", "decoder", "vision", "audio", "cross"}


def test_a_step_is_ended_at_its_limits_and_says_why_it_failed(tmp_path: Path) -> None:
    order = DeployRequest(model=f"hf:{tmp_path}", options={}, folder=tmp_path, tune=False)
    assert in_a_process(order, "plain", 0.0, GIB)["failed"] == "more than 0 s"
    assert in_a_process(order, "plain", 60.0, 1.0)["failed"] == "more than 0 GiB"
    assert "no Hugging Face configuration at" in in_a_process(order, "plain", 200.0, 9 * GIB)["failed"]
