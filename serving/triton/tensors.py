"""Tensors of Triton's Python backend as NumPy arrays and back, by DLPack, sharing memory.

The backend's own NumPy conversions are made for NumPy 1: of tensors that they make of NumPy 2's arrays, the sizes are
wrong. NumPy knows no bfloat16, so its numbers cross the border as int16, and their type is set in the DLPack structure.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from attnforge.arrays import BFLOAT16, Array
from attnforge.bundle import TensorSpec

NEW, USED = b"dltensor", b"used_dltensor"
"""DLPack's names of a capsule whose tensor is still to be taken over, and of one whose tensor was."""

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
    """A tensor of bfloat16 whose numbers are given as int16."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._tensor.__dlpack_device__()
        return device

    def __dlpack__(self, **_: object) -> Any:
        return _retyped(self._tensor.__dlpack__(), INT)


def _retyped(capsule: Any, code: int) -> Any:
    _DLTensor.from_address(_pointer(capsule, NEW)).code = code
    return capsule


def array_of(tensor: Any, spec: TensorSpec) -> Array:
    """A tensor of a request as an array on its memory, which must not be written to.

    Args:
        tensor: the backend's, on the CPU.
        spec: the input.
    """
    is_bfloat = spec.dtype == BFLOAT16.name
    array = np.from_dlpack(_AsInt16(tensor)).view(BFLOAT16) if is_bfloat else np.from_dlpack(tensor)
    return array if spec.dims else array.reshape(())  # Triton knows no tensor without dims


def tensor_of(name: str, array: Array, make: Any) -> Any:
    """An array as a tensor of the backend on its memory.

    Args:
        name: of the output.
        array: of any dtype that a bundle's output may have; without dims it gets one.
        make: the backend's `Tensor.from_dlpack`.
    """
    array = np.ascontiguousarray(array)  # of one dim where it has none
    if not array.flags.writeable:  # which DLPack cannot say in the version that the backend reads
        array = array.copy()
    capsule = _retyped(array.view(np.int16).__dlpack__(), BFLOAT) if array.dtype == BFLOAT16 else array.__dlpack__()
    tensor = make(name, capsule)
    _set_name(capsule, USED)  # the backend gives it a name that NumPy does not know, and would complain of
    return tensor
