"""What a TensorRT plan of a bundle computes, emulated on the CPU: each operator in fp32 and its result rounded to what
it is stored in, but for the scores of fused attention, which its kernel holds in fp32.

It is no GPU: the order of sums is another, and so are kernels' own approximations.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.bundle import Bundle
from attnforge.export.graphs.execute import Runner, at_own_precision, held_by_fused_kernels
from attnforge.export.tensorrt.build import softmax_of
from attnforge.runtime.inputs import Shapes
from attnforge.runtime.options import Memory


def emulate(model: ir.Model, fused: Collection[str]) -> Runner:
    """A graph lowered for TensorRT, from its inputs to its outputs, which are as they are stored.

    Args:
        model: is not touched.
        fused: names of the sites that TensorRT fuses.
    """
    held = held_by_fused_kernels(model, {softmax_of(site) for site in fused})
    return at_own_precision(model, [str(value.name) for value in model.graph.outputs], unrounded=held)


class Emulated:
    """The plan of a bundle as a backend.

    Args:
        bundle: that has one.
        target: `tensorrt_rtx` or `tensorrt`.
    """

    gpu = None

    def __init__(self, bundle: Bundle, target: str = "tensorrt_rtx") -> None:
        manifest = bundle.manifest
        self.name = target  # whose budget it has
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
