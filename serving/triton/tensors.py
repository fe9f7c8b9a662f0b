"""Conversion between tensors of Triton's Python backend and NumPy arrays, by DLPack, sharing memory.

The backend's own NumPy conversions are built for NumPy 1: tensors made from NumPy 2 arrays have wrong sizes. NumPy has
no bfloat16, so such data is passed as int16, and its type is set in the DLPack structure.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from attnforge.arrays import BFLOAT16, Array
from attnforge.bundle import TensorSpec

NEW, USED = b"dltensor", b"used_dltensor"
"""DLPack's names of a capsule whose tensor is not consumed yet, and of one whose tensor is consumed."""

INT, BFLOAT = 0, 4
"""DLPack's kDLInt and kDLBfloat."""


class _DLTensor(ctypes.Structure):
    """The beginning of DLPack's DLManagedTensor (https://github.com/dmlc/dlpack, `include/dlpack/dlpack.h`)."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
    )


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_set_name = ctypes.pythonapi.PyCapsule_SetName
_set_name.restype, _set_name.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)


class _AsInt16:
    """A bfloat16 tensor that exports its data as int16."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.__dlpack_device__()  # type: ignore[no-any-return]

    def __dlpack__(self, **_: object) -> Any:
        return _retyped(self._tensor.__dlpack__(), INT)


def _retyped(capsule: Any, code: int) -> Any:
    _DLTensor.from_address(_pointer(capsule, NEW)).code = code
    return capsule


def array_of(tensor: Any, spec: TensorSpec) -> Array:
    """Return a tensor of a request as an array that shares its memory, which must not be written to.

    Args:
        tensor: the backend's tensor, on the CPU.
        spec: the input.
    """
    is_bfloat = spec.dtype == BFLOAT16.name
    array = np.from_dlpack(_AsInt16(tensor)).view(BFLOAT16) if is_bfloat else np.from_dlpack(tensor)
    return array if spec.dims else array.reshape(())  # Triton has no tensors without dims


def tensor_of(name: str, array: Array, make: Any) -> Any:
    """Return an array as a tensor of the backend that shares its memory.

    Args:
        name: name of the output.
        array: array of any dtype that a bundle's output may have; an array without dims gets one.
        make: the backend's `Tensor.from_dlpack`.
    """
    array = np.ascontiguousarray(array)  # adds a dim if it has none
    if not array.flags.writeable:  # the DLPack version that the backend reads cannot express read-only
        array = array.copy()
    capsule = _retyped(array.view(np.int16).__dlpack__(), BFLOAT) if array.dtype == BFLOAT16 else array.__dlpack__()
    tensor = make(name, capsule)
    _set_name(capsule, USED)  # the backend sets a name that NumPy does not know and would reject
    return tensor
