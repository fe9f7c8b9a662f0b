"""Plans of TensorRT 8.6 in bundles, and the session on TensorRT 10's lean runtime."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from attnforge.bundle import Bundle, Engine, write_manifest
from attnforge.errors import UnavailableError
from attnforge.files import sha256
from attnforge.machine import compute_capability
from attnforge.runtime.backends import tensorrt as backend
from attnforge.runtime.cases import shape_of
from attnforge.runtime.gpu import Block
from attnforge.runtime.plans import own_code
from benchmarks.gpu.lean.opset17 import convert

PYTHON = "ATTNFORGE_TENSORRT_8"
"""Environment variable: the Python of the environment that has TensorRT 8.6."""

PLAN = "tensorrt/engine.tensorrt.plan"


class LeanTensorRT(backend.TensorRT):
    """The backend, on plans that have only the functions of TensorRT 8.6: no runtime configuration, no size of the
    activation memory in a call, no statistics."""

    def _deserialized(self, bundle: Bundle, record: Engine) -> Any:
        self._runtime.engine_host_code_allowed = True  # for the lean runtime in the plan
        return super()._deserialized(bundle, record)

    def new_context(self, activations: Block | None, specialized: bool = False) -> Any:
        context = self._engine.create_execution_context_without_device_memory()
        if context is None:
            raise self.failure("it created no execution context")
        context.error_recorder = self.errors
        if activations is not None:
            context.device_memory = activations.address
        return context

    @property
    def activation_size(self) -> int:
        return int(self._engine.device_memory_size)

    @property
    def weights_size(self) -> int:
        return 0


def use_lean_runtime() -> ModuleType:
    """Let this process use TensorRT 10's lean runtime as `tensorrt`."""
    import tensorrt_lean_bindings as lean  # type: ignore[import-not-found]

    sys.modules["tensorrt"] = lean
    backend.TensorRT = LeanTensorRT  # type: ignore[misc]
    module: ModuleType = lean
    return module


def in_use() -> bool:
    """Return whether this process uses the lean runtime."""
    return backend.TensorRT is LeanTensorRT


def add_plan(path: Path) -> Bundle:
    """Build a plan of the bundle's model for `tensorrt_rtx` with TensorRT 8.6, and add it as target `tensorrt`.

    If the model takes int64, the manifest then says int32, and the bundle's other backends no longer fit: use a copy.

    Raises:
        UnavailableError: 8.6 is not there, or refuses the model.
    """
    if (python := os.environ.get(PYTHON)) is None:
        raise UnavailableError(f"set {PYTHON} to the Python of an environment with tensorrt 8.6")
    manifest = Bundle(path, check_plans=False).manifest
    rtx = manifest.targets["tensorrt_rtx"]
    profiles = rtx.engines[0].profiles
    shapes = [
        {
            spec.name: [shape_of(spec, {symbol: bounds[i] for symbol, bounds in one.items()}) for i in range(3)]
            for spec in manifest.graph_inputs
        }
        for one in profiles or ({},)
    ]
    words = {"fp16": ["fp16"], "tf32": ["tf32"]}.get(manifest.precision, [])
    with tempfile.TemporaryDirectory() as folder:
        convert(path / rtx.model, model := Path(folder) / "model.onnx")
        builder = [python, str(Path(__file__).with_name("builder.py")), str(model), json.dumps(shapes)]
        ran = subprocess.run([*builder, str(path / PLAN), *words], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise UnavailableError(f"TensorRT 8.6 built no plan of {path}: {(ran.stdout + ran.stderr).strip()[-500:]}")
    for spec in manifest.inputs:
        spec.dtype = "int32" if spec.dtype == "int64" else spec.dtype
    manifest.files[PLAN] = digest = sha256(path / PLAN)
    engine = rtx.engines[0].model_copy(
        update={
            "file": PLAN,
            "flavour": "tensorrt",
            "version": sys.modules["tensorrt"].__version__,
            "compute_capabilities": [compute_capability(0)],
            "code": own_code(digest),
        }
    )
    manifest.targets["tensorrt"] = rtx.model_copy(update={"engines": [engine]})
    write_manifest(path, manifest)
    return Bundle(path)
