"""A target from outside attnforge: the ONNX project's reference implementation, which is slow and simple."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx.reference import ReferenceEvaluator

from attnforge import Target


def build(canonical: Path, folder: Path) -> str:
    """Write the canonical graph in one file, with its weights."""
    model = onnx.load(canonical)
    if any(node.op_type == "Attention" and len(node.input) > 4 for node in model.graph.node):
        raise ValueError("attention over a cache")
    onnx.save(model, folder / "model.onnx")
    return "model.onnx"


def open_file(file: Path, threads: int | None) -> Any:
    """Return a function from inputs to outputs, by name."""
    evaluator = ReferenceEvaluator(onnx.load(file))

    def run(inputs: Mapping[str, Any]) -> dict[str, Any]:
        return dict(zip(evaluator.output_names, evaluator.run(None, dict(inputs)), strict=True))

    return run


TARGET = Target("onnx-reference", open_file, build, runs_code=False, libraries=("onnx",))
