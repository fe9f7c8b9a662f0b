"""TensorRT plans, and what the builder says it compiled.

`tensorrt_rtx` is the real builder and needs no GPU; the full `tensorrt` builds for the GPU at hand. Both know strongly
typed networks only: every tensor's type is the graph's.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnforge.bundle import TensorSpec
from attnforge.errors import BuildError, UnavailableError, UsageError
from attnforge.export.builder import Answer, Layer, Request

FLAVOURS = ("tensorrt", "tensorrt_rtx")
PORTABLE = "portable"
"""What a TensorRT-RTX plan is built for unless told otherwise: every NVIDIA GPU from Ampere on."""


@dataclass(frozen=True)
class Plan:
    """A serialized engine.

    Attributes:
        data: the plan itself.
        version: of the TensorRT that built it, the only one sure to load it.
        layers: what was compiled, as the builder listed it.
        seconds: how long building took.
        activation_memory: bytes on the device for everything between inputs and outputs, at the largest sizes; None
            where the builder does not say.
    """

    data: bytes
    version: str
    layers: list[Layer]
    seconds: float
    activation_memory: int | None = None

    def kernel_of(self, onnx_node: str) -> str | None:
        """Name of the fused attention layer that does the work of `onnx_node`, or None."""
        return next((la.name for la in self.layers if la.is_fused_attention and onnx_node in la.onnx_nodes), None)

    def layers_of(self, onnx_node: str) -> list[str]:
        return [layer.name for layer in self.layers if onnx_node in layer.onnx_nodes]


def load_tensorrt(flavour: str) -> Any:
    """The `tensorrt` or `tensorrt_rtx` module.

    Raises:
        UnavailableError: it is not installed, or its libraries do not load; says what to install.
    """
    try:
        return importlib.import_module(flavour)
    except ImportError as error:
        package = "tensorrt_rtx" if flavour == "tensorrt_rtx" else "attnforge[tensorrt]"
        raise UnavailableError(f"{flavour} cannot be used here ({error}); pip install {package}") from error


def build(
    onnx_file: Path, flavour: str, inputs: list[TensorSpec], precision: str, compute_capabilities: tuple[str, ...] = ()
) -> Plan:
    """Build a plan from `onnx_file`, in a process of its own.

    Args:
        onnx_file: the lowered graph.
        flavour: `tensorrt` or `tensorrt_rtx`.
        inputs: their dynamic dims become one optimization profile.
        precision: `tf32` lets fp32 products round their factors to TF32; all else is in the graph.
        compute_capabilities: for TensorRT-RTX, such as `("SM89", "SM120")` or `("CURRENT",)`; by default portable.

    Raises:
        UnavailableError: the flavour is not installed here.
        UsageError: a compute capability that it does not know.
        BuildError: the parser or the builder refused, in its own words, or crashed.
    """
    load_tensorrt(flavour)
    with tempfile.TemporaryDirectory() as folder:
        plan_file = Path(folder) / "engine.plan"
        request = Request(
            onnx_file=str(onnx_file),
            plan_file=str(plan_file),
            flavour=flavour,
            inputs=inputs,
            precision=precision,
            compute_capabilities=list(compute_capabilities),
        )
        done = subprocess.run(
            [sys.executable, "-m", "attnforge.export.builder"],
            input=request.model_dump_json(),
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            how = f"crashed (signal {-done.returncode})" if done.returncode < 0 else "failed"
            raise BuildError(f"{flavour}'s builder {how} on {onnx_file.name}: {last}")
        answer = Answer.model_validate_json(done.stdout.splitlines()[-1])
        if answer.refusal is not None:
            kind = UsageError if answer.misuse else BuildError
            raise kind(answer.refusal)
        return Plan(plan_file.read_bytes(), answer.version, answer.layers, answer.seconds, answer.activation_memory)
