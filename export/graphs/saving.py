"""ONNX files of any size: protobuf is limited to 2 GiB, so large weights are stored in a separate file next to it."""

from __future__ import annotations

import os
from pathlib import Path
from weakref import WeakKeyDictionary

import onnx
import onnx_ir as ir

from attnforge.bundle import WEIGHTS, Bundle
from attnforge.errors import BundleError, raised_as

LIMIT = 2**31 - 2**26
"""Maximum bytes of weights in the ONNX file itself; the rest of 2 GiB is for the graph."""

SHELVED = 2**24
"""Bytes of weights above which the graphs of a bundle share one data file. The file is mapped into memory, not parsed:
such a model loads in half the time, and the bundle is half as large."""

_SMALL, _ALIGNED = 1024, 4096


def save(model: ir.Model, file: Path, limit: int = LIMIT) -> None:
    """Write `model` to `file`, with its weights in `file.data` if they exceed a limit.

    Args:
        model: its graph is not changed; if it is written to one file, external weights are read into memory.
        file: the file; its folder is created if it does not exist.
        limit: bytes of weights above which they are stored in `file.data`. Readers map that file, so that weights are
            in memory once, and not a second time as part of the graph.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    if bytes_of_weights(model) > limit:
        ir.save(model, file, external_data=f"{file.name}.data", alignment=_ALIGNED)
        return
    ir.external_data.load_to_model(model)  # weights read from another file would still point there
    ir.save(model, file)


def bytes_of_weights(model: ir.Model) -> int:
    """The bytes of all weights of a graph."""
    return sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)


class Shelf:
    """Saves the graphs of a bundle. Weights of a graph with more than :data:`SHELVED` bytes of them are stored once, in
    one data file, in the same folder as the graphs that share it: neither ONNX Runtime nor onnx_ir reads weights
    outside the folder of a model, and both reject symbolic and hard links as attacks.

    Args:
        folder: the folder of the bundle.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shelved: WeakKeyDictionary[ir.TensorProtocol, ir.ExternalTensor] = WeakKeyDictionary()

    def save(self, model: ir.Model, name: str) -> str:
        """Write `model`. Weights that go to the data file become external tensors of it, in `model` as well: they are
        mapped when they are read, and no copy stays in memory.

        Args:
            model: computes the same function afterwards.
            name: name of the file, relative to the folder of the bundle.

        Returns:
            The name of the file that was written; a large model is written to the folder of the bundle itself.
        """
        if bytes_of_weights(model) <= SHELVED:
            file = self._folder / name
            save(model, file.with_name(f".{file.name}"))
            file.with_name(f".{file.name}").rename(file)  # a builder may be reading an equal file
            return name
        self._take(model)
        ir.save(model, self._folder / (name := name.replace("/", ".")))
        return name

    def _take(self, model: ir.Model) -> None:
        """Replace the large weights of `model` by external tensors of the data file, adding those that it lacks."""
        weights = self._folder / WEIGHTS
        weights.touch()
        with weights.open("r+b") as stream:  # not append mode, with which the kernel's copying fails
            stream.seek(0, os.SEEK_END)
            for value in model.graph.initializers.values():
                tensor = value.const_value
                if tensor is None or tensor.nbytes < _SMALL:
                    continue
                if tensor not in self._shelved:
                    stream.write(b"\0" * (-stream.tell() % _ALIGNED))
                    external = self._external(tensor, WEIGHTS, stream.tell())
                    tensor.tofile(stream)  # type: ignore[attr-defined]
                    self._shelved[tensor] = self._shelved[external] = external
                value.const_value = self._shelved[tensor]

    def share(self, model: ir.Model) -> None:
        """Replace the weights of `model` that are in the data file by its external tensors, so that memory is freed."""
        for value in model.graph.initializers.values():
            if value.const_value is not None:
                value.const_value = self._shelved.get(value.const_value, value.const_value)

    def save_sharing(self, model: ir.Model, name: str, other: ir.Model, other_name: str) -> None:
        """Write `model` without a second copy of the weights that it shares with `other`: they are external data, in
        the data file or at their offsets in the file of `other`.

        Args:
            model: a model with weights of `other`, under the same names; is not changed.
            name: name of its file in the bundle's folder.
            other: a model that is already saved as `other_name` in the bundle's folder.
        """
        if bytes_of_weights(model) > SHELVED:
            self.save(model, name)
            return
        light, shared = model.clone(), other.graph.initializers
        data, end = (self._folder / other_name).read_bytes(), 0
        for weight, value in light.graph.initializers.items():
            tensor = value.const_value
            if tensor is None or tensor.nbytes < _SMALL or weight not in shared:
                continue
            if shared[weight].const_value is tensor:
                numbers = tensor.tobytes()  # as in the file, where one weight follows another
                if (start := data.find(numbers, end)) < 0:
                    start = data.find(numbers)
                if start >= 0:
                    end = start + len(numbers)
                    value.const_value = self._external(tensor, other_name, start)
        ir.save(light, self._folder / name)

    def _external(self, tensor: ir.TensorProtocol, file: str, offset: int) -> ir.ExternalTensor:
        shape = ir.Shape(tensor.shape.numpy())
        return ir.ExternalTensor(
            file, offset, tensor.nbytes, tensor.dtype, shape=shape, name=tensor.name or "", base_dir=self._folder
        )


def load_graph(bundle: Bundle, name: str) -> ir.Model:
    """Load a graph of a bundle and check it.

    Args:
        bundle: the bundle.
        name: name of the file, as listed in the manifest.

    Raises:
        BundleError: the file is missing, altered, or not an ONNX model.
    """
    message = f"{bundle.path / name} is not an ONNX model"
    with raised_as(BundleError, message, "; deploy the model again"), bundle.steady():
        model = bundle.model(name)
        return ir.from_proto(onnx.load_model_from_string(model)) if isinstance(model, bytes) else ir.load(model)


def with_weights_of(model: ir.Model, other: ir.Model) -> ir.Model:
    """Give a graph that :meth:`Shelf.save_sharing` wrote the weights of `other` that it shares by name; return it.

    In older bundles, the shared weights are inputs instead of external data.
    """
    for value in list(model.graph.inputs):
        if str(value.name) in other.graph.initializers:
            model.graph.inputs.remove(value)
            value.const_value = other.graph.initializers[str(value.name)].const_value
            model.graph.register_initializer(value)
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and tensor.location != WEIGHTS and name in other.graph.initializers:
            value.const_value = other.graph.initializers[name].const_value
    return model
