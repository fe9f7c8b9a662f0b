"""Arrays of any kind to NumPy, and back to torch, without importing torch."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attnforge.errors import InputError

Array = NDArray[Any]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def is_torch(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"


def to_numpy(name: str, value: Any) -> Array:
    """`value` as a NumPy array, without a copy where its memory can be shared.

    Raises:
        InputError: it is neither a NumPy array nor offers DLPack.
    """
    if isinstance(value, np.ndarray):
        return value
    if is_torch(value):
        torch: Any = sys.modules["torch"]
        value = (
            value.detach().cpu().resolve_conj().resolve_neg()
        )  # views that are conjugate or negative by a mark alone
        if value.dtype == torch.bfloat16:  # NumPy has no bfloat16 of its own, so DLPack cannot carry it there
            return np.from_dlpack(value.contiguous().view(torch.int16)).view(BFLOAT16)
    if hasattr(value, "__dlpack__"):
        return np.from_dlpack(value)
    raise InputError(
        f"input {name!r} is {type(value).__name__}; give a NumPy array or one that offers DLPack, as torch's do"
    )


def to_torch(array: Array) -> Any:
    """A torch tensor that shares the array's memory; torch is there already, since one came in."""
    torch: Any = sys.modules["torch"]
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
