"""Conversion of any library's arrays to NumPy and back, without importing that library."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attnforge.errors import InputError, raised_as

Array = NDArray[Any]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

CUDA_DEVICES = (2, 13)
"""DLPack device types of memory that a GPU computes on: kDLCUDA and kDLCUDAManaged."""


def is_floating(array: Array) -> bool:
    """Whether an array's dtype is floating-point: one of NumPy's own or bfloat16."""
    return np.issubdtype(array.dtype, np.floating) or array.dtype == BFLOAT16


def without_bfloat16(array: Array) -> Array:
    """Return a bfloat16 array as float32, exactly, for formats and libraries without bfloat16; other arrays
    unchanged."""
    return array.astype(np.float32) if array.dtype == BFLOAT16 else array


PIECE = 1 << 20
"""Elements per piece of :func:`pieces`."""


def pieces(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Iterate over arrays of one size, flattened, a piece of each at a time. Intermediate results then need memory for
    one piece only, where an output may have a number for every word of a vocabulary."""
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, PIECE):
        yield tuple(array[start : start + PIECE] for array in flat)


def library_of(value: object) -> str:
    """Return the name of the package that defines an array's type, such as `numpy`, `torch`, `cupy` or `jaxlib`."""
    return "torch" if is_torch(value) else type(value).__module__.partition(".")[0]


def is_torch(value: object) -> bool:
    """Whether a value is a torch tensor; does not import torch."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def on_gpu(value: Any) -> bool:
    """Whether an array of any kind lies in a CUDA device's memory."""
    if isinstance(value, np.ndarray):
        return False
    if hasattr(value, "__dlpack_device__"):
        try:
            return int(value.__dlpack_device__()[0]) in CUDA_DEVICES
        except Exception:  # e.g. a torch tensor without memory, which :func:`to_numpy` refuses
            return False
    return hasattr(value, "__cuda_array_interface__")


def to_numpy(name: str, value: Any) -> Array:
    """Return an input as a NumPy array, without a copy if the memory can be shared.

    Args:
        name: name of the input, for messages.
        value: a NumPy array, a torch tensor, or an array that supports DLPack.

    Raises:
        InputError: it is none of these, has no numbers in memory, or is on a GPU and not a torch tensor.
    """
    kind = type(value).__name__
    # tensors that are sparse, quantized, nested or without memory raise errors of many types
    with raised_as(InputError, f"input {name!r} is {kind}, which NumPy cannot read", "; give a dense one"):
        if isinstance(value, np.ndarray):
            return value
        if is_torch(value):
            torch: Any = sys.modules["torch"]
            # torch marks conjugate and negative views instead of computing them; NumPy has no such marks
            value = value.detach().cpu().resolve_conj().resolve_neg()
            if value.dtype == torch.bfloat16:  # NumPy has no bfloat16 of its own, so DLPack cannot carry it there
                return np.from_dlpack(value.contiguous().view(torch.int16)).view(BFLOAT16)
        elif on_gpu(value):
            raise InputError(
                f"input {name!r} is on a GPU and this backend computes on the CPU; copy it to the host first, or load "
                "the bundle on a backend that runs on the GPU"
            )
        if hasattr(value, "__dlpack__"):
            return np.from_dlpack(value)
    raise InputError(f"input {name!r} is {kind}; give a NumPy array or one that supports DLPack, as torch's do")


def to_torch(array: Array) -> Any:
    """Return a torch tensor that shares the array's memory. The caller must have imported torch."""
    torch: Any = sys.modules["torch"]
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def from_gpu(view: Any, library: str) -> Any:
    """Return an array on a GPU as an array of a library.

    Args:
        view: the array; it supports DLPack.
        library: `torch`, `cupy`, `jax` or `jaxlib`, already imported; for others the view itself is returned.
    """
    name = {"torch": "torch", "cupy": "cupy", "jax": "jax", "jaxlib": "jax"}.get(library)
    if name is None:
        return view
    module: Any = sys.modules[name]
    from_dlpack = module.dlpack.from_dlpack if name == "jax" else module.from_dlpack
    if view.dtype != BFLOAT16:
        return from_dlpack(view)
    # cuda.core exports no bfloat16, so its bits are exported as int16
    return from_dlpack(view.view(dtype=np.dtype(np.int16))).view(module.bfloat16 if name == "torch" else BFLOAT16)
