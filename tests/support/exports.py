"""Share exports between the tests of a run. torch's exporter takes half of the time of all tests, and many of them
deploy the same module. Exports are kept in a folder that the workers of the run share, by the sha256 of the
pickled module, example inputs, dynamic shapes and precision.

A module whose pickle differs each time is exported each time. Tests of the export itself call `capture`, which always
exports.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import onnx
import onnx_ir as ir
import torch
from filelock import FileLock
from torch import Tensor, nn

from attnforge.bundle import TensorSpec
from attnforge.export.sources.torch_module import Captured, DynamicShapes, capture
from attnforge.precision import Precision
from attnforge.runtime.backends.eager import at_precision, torch_dtype

LARGEST = 32 * 2**20
"""Bytes of weights above which storing an export takes as long as making it."""

Capture = Callable[[nn.Module, Sequence[Tensor], DynamicShapes, Precision], Captured]


def shared_in(folder: Path) -> Capture:
    """Return a :func:`capture` that reuses exports that any worker wrote to `folder`."""
    folder.mkdir(exist_ok=True)

    def captured(
        module: nn.Module, args: Sequence[Tensor], dynamic_shapes: DynamicShapes, precision: Precision
    ) -> Captured:
        key = _key(module, args, dynamic_shapes, precision)
        if key is None:
            return capture(module, args, dynamic_shapes, precision)
        file = folder / key
        with FileLock(f"{file}.lock"):
            if not file.exists():
                made = capture(module, args, dynamic_shapes, precision)
                data = (
                    ir.to_proto(made.model).SerializeToString(),
                    made.inputs,
                    made.outputs,
                    made.without_effect,
                    made.lost,
                )
                file.write_bytes(pickle.dumps(data))
                return made
        return _read(file, module, args, precision)

    return captured


def _read(file: Path, module: nn.Module, args: Sequence[Tensor], precision: Precision) -> Captured:
    graph: bytes
    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    graph, inputs, outputs, without_effect, lost = pickle.loads(file.read_bytes())
    dtype = torch_dtype(precision)
    cast = tuple(arg.to(dtype) if arg.is_floating_point() else arg for arg in args)
    model = ir.from_proto(onnx.load_from_string(graph))
    return Captured(
        model, at_precision(module, precision), cast, inputs, outputs, precision, None, without_effect, lost
    )


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles tensors by their values and by which of them share memory; torch's own pickles contain addresses."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._storages: dict[int, int] = {}

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, Tensor):
            return super().reducer_override(value)
        storage = self._storages.setdefault(value.untyped_storage().data_ptr(), len(self._storages))
        memory = storage, value.storage_offset(), value.stride(), value.requires_grad
        numbers = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return str, (f"{type(value)} {value.dtype} {[*value.shape]} {memory} {hashlib.sha256(numbers).hexdigest()}",)


def _key(module: nn.Module, args: Sequence[Tensor], dynamic_shapes: DynamicShapes, precision: Precision) -> str | None:
    """Return the sha256 of everything that affects an export, or None for large modules and unpicklable ones."""
    if sum(weight.nbytes for weight in module.state_dict().values() if isinstance(weight, Tensor)) > LARGEST:
        return None
    dims = _plain(dynamic_shapes)
    buffer = io.BytesIO()
    try:
        everything = module, tuple(args), dims, precision.name, torch.is_grad_enabled()
        _Pickler(buffer).dump(everything)
    except Exception:  # any error from pickling the module's state
        return None
    return hashlib.sha256(buffer.getvalue()).hexdigest()


def _plain(shapes: object) -> object:
    """Return dynamic shapes as text, because each Dim is a new class."""
    if isinstance(shapes, dict):
        return {name: _plain(dims) for name, dims in shapes.items()}
    if isinstance(shapes, list | tuple):
        return [_plain(dims) for dims in shapes]
    return f"{shapes!r} {getattr(shapes, 'min', '')} {getattr(shapes, 'max', '')}"
