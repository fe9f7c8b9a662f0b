"""ONNX files of any size: protobuf holds 2 GiB, so large weights stand in a file of their own beside the graph."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir

from attnforge.bundle import WEIGHTS

LIMIT = 2**31 - 2**26
"""Bytes of weights that one file can hold; the rest of 2 GiB is for the graph itself."""

SHELVED = 2**25
"""Bytes of weights above which the graphs of a bundle share one file of weights. The file is mapped into memory, not
parsed: such a model loads in half the time, and the bundle is half as large."""

_SMALL, _ALIGNED = 1024, 4096


def save(model: ir.Model, file: Path) -> None:
    """Write `model` to `file`, with its weights in `file.data` where one file cannot hold them.

    Args:
        model: its graph is not touched; weights that lie in another file are read into memory.
        file: in a folder that is created where there is none.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    if _bytes_of_weights(model) > LIMIT:
        ir.save(model, file, external_data=f"{file.name}.data")
        return
    ir.external_data.load_to_model(model)  # weights read from another file would still point there
    ir.save(model, file)


def _bytes_of_weights(model: ir.Model) -> int:
    return sum(value.const_value.nbytes for value in _weights(model) if value.const_value is not None)


class Shelf:
    """Saves the graphs of a bundle. The weights of a graph that has more than :data:`SHELVED` bytes of them stand once,
    in one data file, with the graphs that share the file beside it: neither ONNX Runtime nor onnx_ir reads weights
    outside the folder of a model, and both take links, symbolic or hard, for an attack.

    Args:
        folder: of the bundle.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[int, tuple[ir.TensorProtocol, int]] = {}  # the tensor is held so that its id stays its own

    def save(self, model: ir.Model, name: str) -> str:
        """Write `model`, which is not touched.

        Args:
            name: of the file, relative to the folder of the bundle.

        Returns:
            the name of the file that was written: a large model stands in the folder of the bundle itself.
        """
        if _bytes_of_weights(model) <= SHELVED:
            file = self._folder / name
            save(model, file.with_name(f".{file.name}"))
            file.with_name(f".{file.name}").rename(file)  # a builder may be reading an equal one
            return name
        light = model.clone()
        with (self._folder / WEIGHTS).open("ab") as stream:
            for value in _weights(light):
                tensor = value.const_value
                if tensor is None or tensor.nbytes < _SMALL:
                    continue
                if id(tensor) not in self._places:
                    stream.write(b"\0" * (-stream.tell() % _ALIGNED))
                    self._places[id(tensor)] = tensor, stream.tell()
                    stream.write(tensor.tobytes())
                value.const_value = self._external(tensor, WEIGHTS, self._places[id(tensor)][1])
        ir.save(light, self._folder / (name := name.replace("/", ".")))
        return name

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


def _weights(model: ir.Model) -> Iterator[ir.Value]:
    yield from model.graph.initializers.values()


def load_beside(file: Path, other: ir.Model) -> ir.Model:
    """A graph that :meth:`Shelf.save_beside` wrote, with the weights of `other` where it shares them by name.

    Bundles written before it shared them as external data have them as inputs.
    """
    model = ir.load(file)
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
