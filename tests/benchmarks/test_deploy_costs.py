"""The table of what a deploy may cost: every limit that is not kept stands below it."""

from __future__ import annotations

from typing import Any

from attnforge.benchmarks.suites.deploy_costs import LIMITS, bare_causal_attention, table
from attnforge.benchmarks.suites.real_sizes import GIB

ABOUT = {"command": "c", "machine": {"processor": "p", "threads": 2}}


def record(number: int, **steps: dict[str, Any]) -> dict[str, Any]:
    limit = LIMITS[number]
    plain = {"seconds": 10.0, "peak": GIB}
    deploy = {"seconds": 30.0, "peak": GIB, "parameters": GIB // 16, "children": {}, "picked": "onnxruntime-cpu"}
    backends = {"onnxruntime-cpu": {"passed": True}, "openvino": {"passed": False}}
    verify = {"seconds": 5.0, "peak": GIB, "backends": backends}
    whole = {"plain": plain, "deploy": deploy, "again": {"seconds": 10.0}, "verify": verify}
    changed = {step: {**figures, **steps.get(step, {})} for step, figures in whole.items()}
    return {"model": limit.name, "how": limit.how, **changed}


def test_limits_that_are_kept() -> None:
    lines = table({"models": [record(0), record(-1)], **ABOUT}).splitlines()
    kept = "| 30.0 | 10.0 | 3.00 | 6 | 1.00 | 1.50 | – | 0.33 | 1.00 | onnxruntime-cpu | onnxruntime-cpu |"
    assert lines[2] == f"| bert-base-uncased | default {kept}"
    assert "| bare_causal_attention | --target onnxruntime | 30.0 | 10.0 | 3.00 | 60 s | 1.00 | 1.50 |" in lines[3]
    assert "2 deploys, no limits broken." in lines[5]
    assert len(lines) == 6


def test_every_limit_that_is_broken_is_told() -> None:
    slow = record(4, deploy={"seconds": 40.0, "peak": 2 * GIB}, again={"seconds": 20.0})
    large = record(-2, deploy={"seconds": 70.0, "peak": 14 * GIB}, verify={"peak": 9 * GIB})
    failed = record(-1, deploy={"failed": "more than 20 GiB"})
    lines = table({"models": [slow, large, failed], **ABOUT}).splitlines()
    assert [line.partition(": ")[2] for line in lines if line.startswith("- ")] == [
        "4.00 of the plain path's time, 3.00 at most",
        "2.00 GiB, 1.50 at most",
        "0.50 of the first deploy's time, again, 0.33 at most",
        "7.00 of the plain path's time, 6.00 at most",
        "14.00 GiB, 13.00 at most",
        "9.00 GiB of a verification, 8.00 at most",
        "deploy: more than 20 GiB",
    ]


def test_bare_attention_is_causal() -> None:
    module, args, _ = bare_causal_attention()
    query, key, value = (arg[:, :, :3] for arg in args)
    assert module(query, key, value)["out"][:, :, 0].equal(value[:, :, 0])
