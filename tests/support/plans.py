"""Build plans of TensorRT from a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from attnforge.atomic import temporary_folder
from attnforge.bundle import TensorSpec
from attnforge.export.tensorrt import build as engine
from attnforge.export.tensorrt.build import Plan, profiles_of
from attnforge.export.tensorrt.process import Request


def build(
    onnx_file: Path,
    flavour: str,
    inputs: list[TensorSpec],
    precision: str,
    compute_capabilities: Sequence[str] = (),
) -> Plan:
    """Build a plan of a lowered graph; the dynamic dims of its inputs become the optimization profile. Raises what
    :func:`attnforge.export.tensorrt.build.build` raises."""
    with temporary_folder() as folder:
        request = Request(
            onnx_file=onnx_file, plan_file=folder / "engine.plan", flavour=flavour, inputs=inputs, precision=precision,
            compute_capabilities=compute_capabilities, profiles=profiles_of(inputs),
        )  # fmt: skip
        return engine.build(request)
