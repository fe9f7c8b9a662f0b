"""The module itself, at the bundle's precision: the only backend that imports torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnforge.arrays import Array, to_numpy
from attnforge.bundle import Bundle
from attnforge.eager import at_precision, run, torch_dtype
from attnforge.errors import UsageError
from attnforge.precision import precision_named
from attnforge.runtime.inputs import Shapes
from attnforge.runtime.options import Memory


class Eager:
    """A copy of the module in eval mode, its weights in the bundle's dtype."""

    name = "eager"
    gpu = None

    def __init__(self, bundle: Bundle, module: torch.nn.Module) -> None:
        if not isinstance(module, torch.nn.Module):
            raise UsageError(f"the eager backend runs a torch.nn.Module, and was given {type(module).__name__}")
        chosen = bundle.manifest.mixed is not None  # what a bundle that chose its precisions stands for is fp32
        precision = precision_named("fp32" if chosen else bundle.manifest.precision)
        self._dtype = torch_dtype(precision)
        self._inputs = [spec.name for spec in bundle.manifest.inputs]
        self._module = at_precision(module, precision)

    def run(self, arrays: Sequence[Array], shapes: Shapes, out: Sequence[Array | None] | None = None) -> list[Array]:
        feeds = dict(zip(self._inputs, arrays, strict=True))
        return [to_numpy(name, tensor) for name, tensor in run(self._module, feeds, self._dtype).items()]

    def memory(self) -> Memory:
        tensors = [*self._module.parameters(), *self._module.buffers()]
        return Memory(weights=sum(tensor.numel() * tensor.element_size() for tensor in tensors))

    def keep(self) -> None: ...

    def close(self) -> None:
        del self._module
