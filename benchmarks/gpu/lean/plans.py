"""Plans of TensorRT 8.6 in bundles, their models in opset 17, and the session on TensorRT 10's lean runtime."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor, replace_nodes_and_values
from onnx_ir.tape import Tape

from attnforge.bundle import Bundle, Engine, write_manifest
from attnforge.errors import UnavailableError
from attnforge.files import sha256
from attnforge.machine import compute_capability
from attnforge.runtime.backends import tensorrt as backend
from attnforge.runtime.cases import shape_of
from attnforge.runtime.gpu import Block
from attnforge.runtime.plans import own_code

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


# --- the model in opset 17, the last one that TensorRT 8.6 parses -----------------------------------------------------


def convert(source: Path, target: Path) -> None:
    """Write the model `source`, of opset 23, as one of opset 17 to `target`.

    Raises:
        ValueError: an operator has a form that opset 17 lacks.
    """
    model = ir.external_data.load_to_model(ir.load(source))  # TensorRT would look for weights next to `target`
    for node in list(model.graph):
        tape = Tape()
        result = _older(node, tape)
        if result is not None:
            for i, new in enumerate(tape.nodes):
                new.name = f"{node.outputs[0].name}/{i}"
                new.outputs[0].name = f"{node.outputs[0].name}/{i}"
            replace_nodes_and_values(model.graph, node, [node], tape.nodes, [node.outputs[0]], [result])
        node.metadata_props.clear()
    model.graph.opset_imports[""] = 17
    model.ir_version = 8
    ir.save(model, target)


def _older(node: ir.Node, tape: Tape) -> ir.Value | None:
    """The output of the nodes on `tape` that replace a node; None if it stays, changed where opset 17 differs."""

    def constant(value: float | list[int], dtype: ir.DataType) -> ir.Value:
        return tape.op("Constant", [], {"value": ir.tensor(np.array(value, dtype.numpy()))})

    x = node.inputs[0] if node.inputs else None
    if x is None:
        return None
    dtype = x.dtype or ir.DataType.FLOAT
    if node.op_type == "Gelu":
        if node.attributes.get_string("approximate", "none") != "none":
            raise ValueError(f"{node.outputs[0].name} is an approximation of GELU, which opset 17 lacks")
        bell = tape.op("Erf", [tape.op("Mul", [x, constant(math.sqrt(0.5), dtype)])])
        return tape.op("Mul", [tape.op("Mul", [x, tape.op("Add", [bell, constant(1, dtype)])]), constant(0.5, dtype)])
    if node.op_type == "RMSNormalization":
        if node.attributes.get_int("axis", -1) not in (-1, len(x.shape or ()) - 1):
            raise ValueError(f"{node.outputs[0].name} normalises over more than the last axis")
        wide = tape.op("Cast", [x], {"to": ir.DataType.FLOAT})
        mean = tape.op("ReduceMean", [tape.op("Mul", [wide, wide])], {"axes": [-1]})
        moved = tape.op("Add", [mean, constant(node.attributes.get_float("epsilon", 1e-5), ir.DataType.FLOAT)])
        scaled = tape.op("Cast", [tape.op("Div", [wide, tape.op("Sqrt", [moved])])], {"to": dtype})
        return tape.op("Mul", [scaled, node.inputs[1]])
    if node.op_type == "Shape" and node.attributes:  # which 8.6 ignores
        limits = [node.attributes.get_int("start", 0)], [node.attributes.get_int("end", 2**31 - 1)], [0]
        return tape.op("Slice", [tape.op("Shape", [x]), *(constant(limit, ir.DataType.INT64) for limit in limits)])
    if node.op_type == "Split":
        node.attributes.pop("num_outputs", None)  # equal parts are the default
    if node.op_type.startswith("Reduce") and node.op_type != "ReduceSum" and len(node.inputs) > 1:
        given = node.inputs[1]
        axes = None if given is None else get_const_tensor(given)
        if axes is None:
            raise ValueError(f"the axes of {node.outputs[0].name} ({node.op_type}) are no constant")
        node.attributes["axes"] = ir.AttrInt64s("axes", axes.numpy().tolist())
        node.attributes.pop("noop_with_empty_axes", None)
        node.resize_inputs(1)
    return None
