"""An emulated backend for a bundle's TensorRT plan, so that tests can check it against the budget without a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.bundle import Bundle
from attnforge.export.precision.assign import emulate
from attnforge.runtime.backends.backend import Backend, Memory
from attnforge.runtime.inputs import Shapes


class Emulated(Backend):
    """An emulated backend for the plan of a bundle.

    Args:
        bundle: a bundle deployed for `target`.
        target: `tensorrt_rtx` or `tensorrt`.
    """

    def __init__(self, bundle: Bundle, target: str = "tensorrt_rtx") -> None:
        manifest = bundle.manifest
        self.name = target  # selects the budget of the backend of this name
        details = manifest.attention.details
        fused = [d.site for d in details if target in d.targets and d.targets[target].kernel is not None]
        self._run = emulate(ir.load(bundle.file(manifest.targets[target].model)), fused)
        self._dtypes = [(spec.name, spec.dtype) for spec in manifest.outputs]

    def run(self, feeds: dict[str, Array], shapes: Shapes, out: Mapping[str, Array]) -> list[Array]:
        results = self._run(feeds)
        return [results[name].astype(dtype) for name, dtype in self._dtypes]

    def memory(self) -> Memory:
        return Memory(weights=0)

    def close(self) -> None: ...
