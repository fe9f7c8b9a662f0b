"""What a backend is, and the names of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from attnforge.arrays import Array
from attnforge.runtime.inputs import Shapes
from attnforge.runtime.options import Memory

if TYPE_CHECKING:
    from attnforge.runtime.gpu import Gpu

BACKENDS = ("tensorrt", "tensorrt_rtx", "onnxruntime-tensorrt", "onnxruntime-cuda", "onnxruntime-cpu", "openvino")
"""The one that `auto` likes best first, where nothing was measured."""

ON_GPU = BACKENDS[:4]
WITHOUT_TARGET = ("openvino",)
"""Backends that run the canonical graph: no bundle is lowered for them, so one that misses the budget is no fault of a
bundle's."""

LIBRARIES = {
    "tensorrt": ("tensorrt",),
    "tensorrt_rtx": ("tensorrt_rtx",),
    "onnxruntime-tensorrt": ("onnxruntime", "onnxruntime-gpu", "tensorrt"),
    "onnxruntime-cuda": ("onnxruntime", "onnxruntime-gpu"),
    "onnxruntime-cpu": ("onnxruntime", "onnxruntime-gpu"),
    "openvino": ("openvino",),
}
"""The packages whose versions a backend's speed depends on."""

PROVIDERS = {"onnxruntime-tensorrt": "TensorrtExecutionProvider", "onnxruntime-cuda": "CUDAExecutionProvider"}


class Backend(Protocol):
    """Runs a deployed model on arrays that have been checked; from several threads at once.

    Attributes:
        name: of the backend.
    """

    name: str

    @property
    def gpu(self) -> Gpu | None:
        """The device that it computes on; such a backend is a :class:`~attnforge.runtime.gpu.GpuBackend` too."""

    def run(self, arrays: Sequence[Array], shapes: Shapes, out: Sequence[Array | None] | None = None) -> list[Array]:
        """Outputs for host arrays, in order; they may be written to the arrays of `out` where it has one and `shapes`
        says the output's shape, and are new ones else."""

    def memory(self) -> Memory: ...

    def keep(self) -> None:
        """Write what was compiled to disk, for the next start."""

    def close(self) -> None: ...
