"""The value of a constant in a mask's graph at every query and key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnforge.export.attention.affine import Affine, Variable
from attnforge.export.attention.constant_masks import all_of, any_of, truth_of
from attnforge.export.attention.indices import START, Index
from attnforge.export.attention.mask_numbers import (
    UNKNOWN,
    Between,
    Number,
    Table,
    Whole,
    choose,
    constant,
    flags_truth,
)
from attnforge.export.attention.masking import NEGLIGIBLE
from attnforge.export.attention.truth import ALWAYS, NEVER, Largest, Truth, unknown


def constant_at(array: NDArray[np.generic], index: Index, largest: Largest) -> Truth | Number | None:
    """The value of an array at an index; None for a type that is not read."""
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        return None
    numbers = [position.constant if position is not None else None for position in index]
    if all(number is not None and number < size for number, size in zip(numbers, array.shape, strict=True)):
        number = array[tuple(int(i or 0) for i in numbers)]
        return (ALWAYS if number else NEVER) if array.dtype == bool else constant(float(number))
    if array.dtype.kind == "i" and (progression := _progression(array, index)) is not None:
        return Whole((progression,))
    grid = _grid(array, index, largest)
    if array.dtype == bool:
        return None if grid is None else grid.flags()
    wide = array.astype(np.float64)
    if np.isnan(wide).any():
        return UNKNOWN
    if grid is None or array.dtype.kind == "u":
        return Between(float(wide.min()), float(wide.max()))
    return _numbers(grid)


def _progression(array: NDArray[np.generic], index: Index) -> Affine | None:
    """Positions that were counted ahead of time: equal steps along one or two dims, or equal steps after every run of
    equal numbers."""
    for axis, position in enumerate(index):
        if position is not None and (fixed := position.constant) is not None:
            if not 0 <= fixed < array.shape[axis]:
                return None
            array = np.take(array, [fixed], axis)
    if not array.size:
        return None
    for axis in range(array.ndim):
        if (array == (first := array.take([0], axis))).all():
            array = first
    axes = [axis for axis, size in enumerate(array.shape) if size > 1]
    if not axes:
        return Affine(int(array.flat[0]))
    positions = [index[axis] for axis in axes]
    if len(axes) == 1 and positions[0] is not None:
        return _stepped(array.reshape(-1).astype(np.int64), positions[0])
    return _plane(array.squeeze().astype(np.int64), positions) if len(axes) == 2 else None


def _stepped(numbers: NDArray[np.int64], position: Affine) -> Affine | None:
    steps = np.diff(numbers)
    width = int(np.flatnonzero(steps)[0]) + 1
    step = int(steps[width - 1])
    is_even = np.array_equal(numbers, numbers[0] + step * (np.arange(len(numbers)) // width))
    return position.floor_divided(width) * step + int(numbers[0]) if is_even else None


def _plane(numbers: NDArray[np.int64], positions: Sequence[Affine | None]) -> Affine | None:
    rows, columns = positions
    first, down, right = int(numbers[0, 0]), int(numbers[1, 0] - numbers[0, 0]), int(numbers[0, 1] - numbers[0, 0])
    i, j = np.ogrid[: numbers.shape[0], : numbers.shape[1]]
    if rows is None or columns is None or not np.array_equal(numbers, first + down * i + right * j):
        return None
    return rows * down + columns * right + first


@dataclass(frozen=True)
class _Grid:
    """An array that is read by query and key.

    Attributes:
        array: `(samples and heads, rows or 1, columns or 1)`.
        query: offset from a query's index to its row.
        key: offset from a key's index to its column.
    """

    array: NDArray[np.generic]
    query: Affine = START
    key: Affine = START

    def flags(self, flags: NDArray[np.generic] | None = None) -> Truth:
        """The condition given by the array, or by flags of its shape."""
        grid = np.asarray(self.array if flags is None else flags, bool)
        if 1 not in grid.shape[1:]:
            return truth_of(grid).moved(self.query, self.key)
        some, every = flags_truth(any_of(grid)), flags_truth(all_of(grid))
        whole = some if some == every else (some & unknown("pattern")) | every
        return whole.moved(self.query, self.key)


def _grid(array: NDArray[np.generic], index: Index, largest: Largest) -> _Grid | None:
    """The grid of an array whose dims are read by query and by key in steps of one, each along one dim; else None."""
    order: list[int] = []
    shifts: list[Affine] = []
    index = (*index, Affine(), Affine())
    array = array[..., None, None]
    for variable, spare in ((Variable.QUERY, array.ndim - 2), (Variable.KEY, array.ndim - 1)):
        axes = [axis for axis, position in enumerate(index) if position is None or variable in position.variables]
        axis = axes[0] if axes else spare
        shift = START if not axes else None if (position := index[axis]) is None else position - Affine.atom(variable)
        if len(axes) > 1 or shift is None or shift.variables:
            return None
        last, first = largest[variable].constant, shift.constant
        if axes and last is not None and first is not None and first >= 0 and first + last < array.shape[axis]:
            array, shift = np.take(array, range(first, first + last + 1), axis), START
        order.append(axis)
        shifts.append(shift)
    for axis, position in enumerate(index):
        if axis not in order and position is not None and position.constant is not None:
            array = np.take(array, [position.constant], axis)
    sizes = [array.shape[axis] for axis in order]
    return _Grid(np.moveaxis(array, order, (-2, -1)).reshape(-1, *sizes), *shifts)


def _numbers(grid: _Grid) -> Number:
    """The numbers of a constant mask or bias: a choice if there are two numbers, or if some hide keys and some do
    not."""
    wide = grid.array.astype(np.float64)
    least, most = float(wide.min()), float(wide.max())
    is_most = wide == most
    if bool((is_most | (wide == least)).all()):
        return choose(grid.flags(is_most), constant(most), constant(least))
    if grid.array.dtype.kind == "i" and len(wide) == 1 and grid.query == grid.key == START:
        return Table(grid.array[0].astype(np.int64))
    shown = wide > NEGLIGIBLE
    if shown.all() or not shown.any():
        return Between(least, most)
    return choose(grid.flags(shown), _range(wide[shown]), _range(wide[~shown]))


def _range(numbers: NDArray[np.float64]) -> Number:
    least, most = float(numbers.min()), float(numbers.max())
    return constant(least) if least == most else Between(least, most)
