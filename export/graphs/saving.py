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
            save(model, self._folder / name)
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
                value.const_value = ir.ExternalTensor(
                    WEIGHTS,
                    self._places[id(tensor)][1],
                    tensor.nbytes,
                    tensor.dtype,
                    shape=ir.Shape(tensor.shape.numpy()),
                    name=value.name or "",
                    base_dir=self._folder,
                )
        ir.save(light, self._folder / (name := name.replace("/", ".")))
        return name


def _weights(model: ir.Model) -> Iterator[ir.Value]:
    yield from model.graph.initializers.values()


def save_beside(model: ir.Model, file: Path, other: ir.Model) -> None:
    """Write `model` to `file` without the large weights that `other` has too, which become inputs by their names.

    Args:
        model: is not touched.
        file: in a folder that is created where there is none.
        other: shares weights with `model`: the same tensors by the same names.
    """
    light = model.clone()
    for name, value in list(light.graph.initializers.items()):
        held = other.graph.initializers.get(name)
        tensor = value.const_value
        if held is None or tensor is None or held.const_value is not tensor or tensor.nbytes < _SMALL:
            continue
        del light.graph.initializers[name]
        value.const_value, value.type = None, ir.TensorType(tensor.dtype)
        value.shape = ir.Shape(tensor.shape.numpy())
        light.graph.inputs.append(value)
    save(light, file)


def load_beside(file: Path, other: ir.Model) -> ir.Model:
    """The model that :func:`save_beside` wrote, with the weights of `other` in place of the inputs."""
    model = ir.load(file)
    for value in list(model.graph.inputs):
        held = other.graph.initializers.get(str(value.name))
        if held is not None:
            model.graph.inputs.remove(value)
            value.const_value = held.const_value
            model.graph.register_initializer(value)
    return model
