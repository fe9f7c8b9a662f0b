"""An emulated backend for a bundle's TensorRT plan, so that tests can check it against the budget without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.bundle import Bundle
from attnforge.export.precision.assign import emulate
from attnforge.runtime.inputs import Shapes
from attnforge.runtime.options import Memory


class Emulated:
    """An emulated backend for the plan of a bundle.

    Args:
        bundle: a bundle deployed for `target`.
        target: `tensorrt_rtx` or `tensorrt`.
    """

    gpu = None

    def __init__(self, bundle: Bundle, target: str = "tensorrt_rtx") -> None:
        manifest = bundle.manifest
        self.name = target  # selects the budget of the backend of this name
        details = manifest.attention.details
        fused = [d.site for d in details if target in d.targets and d.targets[target].kernel is not None]
        self._run = emulate(ir.load(bundle.file(manifest.targets[target].model)), fused)
        self._names = [spec.name for spec in manifest.inputs]
        self._dtypes = [(spec.name, spec.dtype) for spec in manifest.outputs]

    def run(self, arrays: Sequence[Array], shapes: Shapes, out: Sequence[Array | None] | None = None) -> list[Array]:
        results = self._run(dict(zip(self._names, arrays, strict=True)))
        return [results[name].astype(dtype) for name, dtype in self._dtypes]

    def memory(self) -> Memory:
        return Memory(weights=0)

    def keep(self) -> None: ...

    def close(self) -> None: ...
