"""Give bundles plans of TensorRT 8.6, and verify them on the lean runtime: `python -m benchmarks.gpu.lean`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import attnforge
from benchmarks.gpu.lean.plans import add_plan, use_lean_runtime


def main(bundles: Annotated[list[Path], typer.Argument(help="Bundles with a model for TensorRT-RTX.")]) -> None:
    """Give bundles plans of TensorRT 8.6 and verify them on the lean runtime; exit with 1 if one is not right."""
    lean = use_lean_runtime()
    wrong = []
    for path in bundles:
        report = attnforge.verify(add_plan(path), ["tensorrt"])
        print(f"{path} on the lean runtime {lean.__version__}: {report.summary()}")
        wrong += [] if report.passed else [path]
    raise typer.Exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
