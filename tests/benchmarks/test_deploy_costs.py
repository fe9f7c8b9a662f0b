"""The table of deploy costs: every exceeded limit is listed below it."""

from __future__ import annotations

from typing import Any

from benchmarks.child import GIB
from benchmarks.experiments.deploy_costs import LIMITS, bare_causal_attention, table

ABOUT = {"command": "c", "machine": {"processor": "p", "threads": 2}}


def record(**steps: dict[str, Any]) -> dict[str, Any]:
    plain = {"seconds": 10.0, "peak": GIB}
    deploy = {"seconds": 30.0, "peak": GIB, "parameters": GIB // 16, "children": {}, "picked": "onnxruntime-cpu"}
    deploy["stages"], again = {"export": 5.0, "reference": 10.0}, {"seconds": 10.0, "stages": {"export": 4.5}}
    backends = {"onnxruntime-cpu": {"passed": True}, "openvino": {"passed": False}}
    verify = {"seconds": 5.0, "peak": GIB, "backends": backends}
    whole: dict[str, dict[str, Any]] = {"plain": plain, "deploy": deploy, "again": again, "verify": verify}
    return {step: {**figures, **steps.get(step, {})} for step, figures in whole.items()}


def test_limits_that_are_kept() -> None:
    models = {LIMITS[0].title: record(), LIMITS[-1].title: record()}
    lines = table({"models": models, **ABOUT}).splitlines()
    kept = "| 30.0 | 10.0 | 3.00 | 6 | 1.00 | 1.50 | – | 10.0 | 0.30 | 1.00 | onnxruntime-cpu | onnxruntime-cpu |"
    assert lines[2] == f"| bert-base-uncased | default {kept}"
    assert "| bare_causal_attention | --target onnxruntime | 30.0 | 10.0 | 3.00 | 60 s | 1.00 | 1.50 |" in lines[3]
    assert "2 deploys, no limits broken." in lines[5]
    assert len(lines) == 6


def test_every_exceeded_limit_is_reported() -> None:
    again = {"stages": {"export": 7.5}}
    slow = record(deploy={"seconds": 40.0, "peak": 2 * GIB}, again=again)
    large = record(deploy={"seconds": 70.0, "peak": 14 * GIB}, verify={"peak": 9 * GIB})
    usual = record(again=again)
    failed = record(deploy={"failed": "more than 20 GiB"})
    models = dict(zip([LIMITS[i].title for i in (0, 4, -2, -1)], [usual, slow, large, failed], strict=True))
    lines = table({"models": models, **ABOUT}).splitlines()
    assert [line.partition(": ")[2] for line in lines if line.startswith("- ")] == [
        "deploy: more than 20 GiB",
        "the first deploy's time, again: 0.5, at most 0.3333",
        "the plain path's time: 4, at most 3",
        "GiB: 2, at most 1.5",
        "the plain path's time: 7, at most 6",
        "GiB: 14, at most 13",
        "GiB of a verification: 9, at most 8",
    ]


def test_bare_attention_is_causal() -> None:
    module, args, _ = bare_causal_attention()
    query, key, value = (arg[:, :, :3] for arg in args)
    assert module(query, key, value)["out"][:, :, 0].equal(value[:, :, 0])
