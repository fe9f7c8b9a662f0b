"""The interface of every backend to a session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from attnforge.arrays import Array
from attnforge.runtime.inputs import Shapes
from attnforge.runtime.options import Memory

if TYPE_CHECKING:
    from attnforge.runtime.gpu import Gpu


PROVIDERS = {"onnxruntime-tensorrt": "TensorrtExecutionProvider", "onnxruntime-cuda": "CUDAExecutionProvider"}
"""ONNX Runtime's execution providers that compute on a GPU, by backend."""


class Backend(Protocol):
    """Runs a deployed model on arrays that have been checked; from several threads at once.

    A new backend is one file in this folder and one row of :data:`attnforge.runtime.backends.registry.REGISTRY`.

    Attributes:
        name: name of the backend.
    """

    name: str

    @property
    def gpu(self) -> Gpu | None:
        """The device that it computes on; such a backend is a :class:`~attnforge.runtime.gpu.GpuBackend` too. None on
        the CPU."""

    def run(self, arrays: Sequence[Array], shapes: Shapes, out: Sequence[Array | None] | None = None) -> list[Array]:
        """The model's outputs for host arrays, both in the order of the manifest.

        Args:
            arrays: the inputs, contiguous, of the manifest's dtypes.
            shapes: shapes of inputs and outputs; an output's shape is None if the inputs' sizes do not determine it.
            out: for each output, an array that the backend may write it to, or None. The backend returns a new array if
                it does not write there, and if `shapes` does not have the output's shape.
        """

    def memory(self) -> Memory:
        """The memory that the backend uses, as far as its library reports it."""

    def keep(self) -> None:
        """Write compiled kernels to disk, for the next start."""

    def close(self) -> None:
        """Free everything. Later runs raise a UsageError."""
