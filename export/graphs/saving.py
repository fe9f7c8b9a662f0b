"""ONNX files of any size: protobuf holds 2 GiB, so large weights stand in a file of their own beside the graph."""

from __future__ import annotations

import os
from pathlib import Path
from weakref import WeakKeyDictionary

import onnx
import onnx_ir as ir

from attnforge.bundle import WEIGHTS, Bundle
from attnforge.errors import BundleError, raised_as

LIMIT = 2**31 - 2**26
"""Bytes of weights that one file can hold; the rest of 2 GiB is for the graph itself."""

SHELVED = 2**24
"""Bytes of weights above which the graphs of a bundle share one file of weights. The file is mapped into memory, not
parsed: such a model loads in half the time, and the bundle is half as large."""

_SMALL, _ALIGNED = 1024, 4096


def save(model: ir.Model, file: Path, limit: int = LIMIT) -> None:
    """Write `model` to `file`, with its weights in `file.data` where there are many.

    Args:
        model: its graph is not touched; where it is written to one file, weights that lie in another are read into
            memory.
        file: in a folder that is created where there is none.
        limit: bytes of weights above which they stand in `file.data`. What reads that file maps it, so that weights
            are in memory once, and not as parts of the graph as well.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    if _bytes_of_weights(model) > limit:
        ir.save(model, file, external_data=f"{file.name}.data", alignment=_ALIGNED)
        return
    ir.external_data.load_to_model(model)  # weights read from another file would still point there
    ir.save(model, file)


def _bytes_of_weights(model: ir.Model) -> int:
    weights = model.graph.initializers.values()
    return sum(value.const_value.nbytes for value in weights if value.const_value is not None)


class Shelf:
    """Saves the graphs of a bundle. The weights of a graph that has more than :data:`SHELVED` bytes of them stand once,
    in one data file, with the graphs that share the file beside it: neither ONNX Runtime nor onnx_ir reads weights
    outside the folder of a model, and both take links, symbolic or hard, for an attack.

    Args:
        folder: of the bundle.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shelved: WeakKeyDictionary[ir.TensorProtocol, ir.ExternalTensor] = WeakKeyDictionary()

    def save(self, model: ir.Model, name: str) -> str:
        """Write `model`. Weights that are written to the data file are that file's from then on, in `model` as well:
        they are mapped when they are read, and no copy of them is held in memory.

        Args:
            model: is the same function afterwards.
            name: of the file, relative to the folder of the bundle.

        Returns:
            the name of the file that was written: a large model stands in the folder of the bundle itself.
        """
        if _bytes_of_weights(model) <= SHELVED:
            file = self._folder / name
            save(model, file.with_name(f".{file.name}"))
            file.with_name(f".{file.name}").rename(file)  # a builder may be reading an equal one
            return name
        self._take(model)
        ir.save(model, self._folder / (name := name.replace("/", ".")))
        return name

    def _take(self, model: ir.Model) -> None:
        """Let the large weights of `model` be those of the data file, which gets those that it lacks."""
        weights = self._folder / WEIGHTS
        weights.touch()
        with weights.open("r+b") as stream:  # not for appending, which the kernel's own copying refuses
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
        """Let those weights of `model` that the data file holds be that file's, so that they leave memory."""
        for value in model.graph.initializers.values():
            if value.const_value is not None:
                value.const_value = self._shelved.get(value.const_value, value.const_value)

    def save_beside(self, model: ir.Model, name: str, other: ir.Model, other_name: str) -> None:
        """Write `model`, which is not touched, without a second copy of the weights that it shares with `other`: they
        are external data, in the data file or at their places in the file of `other`.

        Args:
            model: has weights of `other`, under the same names.
            name: of its file, in the bundle's folder.
            other: was saved before, as `other_name`, in the bundle's folder.
        """
        if _bytes_of_weights(model) > SHELVED:
            self.save(model, name)
            return
        light, shared = model.clone(), other.graph.initializers
        data, end = (self._folder / other_name).read_bytes(), 0
        for weight, value in light.graph.initializers.items():
            tensor = value.const_value
            if tensor is None or tensor.nbytes < _SMALL or weight not in shared:
                continue
            if shared[weight].const_value is tensor:
                numbers = tensor.tobytes()  # as they stand in the file, one weight behind the other
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
    """A graph of a bundle, checked.

    Args:
        bundle: the bundle.
        name: of the file, as the manifest lists it.

    Raises:
        BundleError: the file is missing, altered, or no ONNX model.
    """
    with raised_as(BundleError, f"{bundle.path / name} is no ONNX model", "; deploy the model again"), bundle.steady():
        model = bundle.model(name)
        return ir.from_proto(onnx.load_model_from_string(model)) if isinstance(model, bytes) else ir.load(model)


def beside(model: ir.Model, other: ir.Model) -> ir.Model:
    """A graph that :meth:`Shelf.save_beside` wrote, which gets the weights of `other` that it shares by name.

    Bundles written before it shared them as external data have them as inputs.
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
