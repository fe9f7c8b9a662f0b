"""A decoder's cache in the memory of a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from cuda.bindings import driver

from attnforge.arrays import Array
from attnforge.runtime.gpu import Block, Gpu

LEGACY_DEFAULT_STREAM = 0

Index = tuple[int | Sequence[int] | slice, slice, slice]
"""Samples, all heads, and a range of slots."""


class Rows(NamedTuple):
    """Consecutive samples of a cache, where they are.

    Attributes:
        shape: `(samples, heads, slots, size)`.
        dtype: type of the numbers.
        ptr: address of the first number on the device.
        block: the memory, which is not freed before.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    ptr: int
    block: Block

    @classmethod
    def allocated(cls, gpu: Gpu, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Rows:
        """New memory."""
        block = gpu.allocate(prod(shape) * dtype.itemsize)
        return cls(shape, dtype, block.address, block)


class DeviceCache:
    """Keys or values, `(samples, heads, slots, size)`, zeros at first, with those parts of an array's interface that a
    decoder uses: `cache[samples]` is a view on the device, `cache[samples, :, slots]` a copy on the host, and assigning
    to the latter writes. All copies are complete when they return.

    Raises:
        DeviceError: the device has too little memory, or CUDA failed.
    """

    def __init__(self, gpu: Gpu, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._gpu, self.shape, self.dtype = gpu, shape, dtype
        self.nbytes = prod(shape) * dtype.itemsize
        with gpu.current():
            self._block = gpu.allocate(self.nbytes)
            gpu.check(driver.cuMemsetD8(self._block.address, 0, self.nbytes))
            gpu.check(driver.cuStreamSynchronize(LEGACY_DEFAULT_STREAM))

    def __getitem__(self, index: slice | Index) -> Any:
        if isinstance(index, slice):
            samples = range(self.shape[0])[index]
            address = self._block.address + samples.start * prod(self.shape[1:]) * self.dtype.itemsize
            return Rows((len(samples), *self.shape[1:]), self.dtype, address, self._block)
        chosen, first, count = self._parts(index)
        read = np.empty((len(chosen), self.shape[1], count, self.shape[3]), self.dtype)
        with self._gpu.current():
            for array, address in zip(_heads(read), self._addresses(chosen, first), strict=True):
                self._gpu.check(driver.cuMemcpyDtoH(array.ctypes.data, address, array.nbytes))
        return read[0] if isinstance(index[0], int) else read

    def __setitem__(self, index: Index, value: Array | int) -> None:
        samples, first, count = self._parts(index)
        written = np.empty((len(samples), self.shape[1], count, self.shape[3]), self.dtype)
        written[:] = value
        with self._gpu.current():
            for array, address in zip(_heads(written), self._addresses(samples, first), strict=True):
                self._gpu.check(driver.cuMemcpyHtoD(address, array.ctypes.data, array.nbytes))
            self._gpu.check(driver.cuStreamSynchronize(LEGACY_DEFAULT_STREAM))  # a copy from the host may still run

    def _parts(self, index: Index) -> tuple[Sequence[int], int, int]:
        """The samples, the first slot and the number of slots that an index means."""
        chosen, _, slots = index
        which = range(self.shape[0])[chosen] if isinstance(chosen, slice) else chosen
        covered = range(self.shape[2])[slots]
        return [which] if isinstance(which, int) else which, covered.start, len(covered)

    def _addresses(self, samples: Sequence[int], first: int) -> Iterator[int]:
        """The address of a slot in each head of these samples."""
        _, heads, slots, size = self.shape
        for sample in samples:
            for head in range(heads):
                yield self._block.address + ((sample * heads + head) * slots + first) * size * self.dtype.itemsize


def _heads(array: Array) -> Iterator[Array]:
    """The consecutive numbers of each sample and head."""
    return iter(array.reshape(array.shape[0] * array.shape[1], *array.shape[2:]))
