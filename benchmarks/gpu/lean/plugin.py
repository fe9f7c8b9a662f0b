"""Plugin for pytest: `tests/runtime/test_gpu.py` on TensorRT 10's lean runtime, with plans of TensorRT 8.6."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import attnforge
from attnforge.arrays import Array
from attnforge.bundle import Bundle
from attnforge.model.registry import Example
from benchmarks.gpu.lean.plans import add_plan, use_lean_runtime


def pytest_configure() -> None:
    """Let deploys add a plan, and the tests' integers be int32, the only ones that TensorRT 8.6 takes."""
    import tests.support.bundles as tested

    use_lean_runtime()
    deploy, small_example, small_inputs = attnforge.deploy, tested.small_example, tested.small_inputs

    def with_plan(*args: Any, **options: Any) -> Bundle:
        bundle = deploy(*args, **{**options, "targets": ["onnxruntime", "tensorrt_rtx"]})
        return bundle if bundle.manifest.precision == "bf16" else add_plan(bundle.path)

    def example() -> Example:
        made = small_example()
        return made._replace(args=(*made.args[:3], made.args[3].to(torch.int32)))

    def inputs(*sizes: int, **options: int) -> dict[str, Array]:
        made = small_inputs(*sizes, **options)
        return {**made, "kinds": made["kinds"].astype(np.int32)}

    attnforge.deploy, tested.small_example, tested.small_inputs = with_plan, example, inputs
