"""Inputs, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attnforge.arrays import Array, to_numpy
from attnforge.bundle import DimSpec, TensorSpec
from attnforge.errors import InputError


def by_name(specs: Sequence[TensorSpec], values: Sequence[Any]) -> dict[str, Any]:
    names = [spec.name for spec in specs]
    if len(values) != len(names):
        raise InputError(f"{len(values)} inputs were given; the model takes {len(names)}: {', '.join(names)}")
    return dict(zip(names, values, strict=True))


def checked(specs: Sequence[TensorSpec], values: Mapping[str, Any]) -> dict[str, Array]:
    """`values` as contiguous arrays in the order of `specs`.

    Raises:
        InputError: a name, dtype, rank or dim that the deployed model does not take; says what it takes.
    """
    names = [spec.name for spec in specs]
    if missing := [name for name in names if name not in values]:
        raise InputError(f"input {missing[0]!r} is missing; the model takes {', '.join(names)}")
    if unknown := [name for name in values if name not in names]:
        raise InputError(f"the model has no input {unknown[0]!r}; it takes {', '.join(names)}")
    sizes: dict[str, tuple[int, str]] = {}
    return {spec.name: _checked(spec, to_numpy(spec.name, values[spec.name]), sizes) for spec in specs}


def _checked(spec: TensorSpec, array: Array, sizes: dict[str, tuple[int, str]]) -> Array:
    if array.dtype.name != spec.dtype:
        raise InputError(f"input {spec.name!r} is {array.dtype.name}; the model takes {spec.text()}: convert it first")
    if array.ndim != len(spec.dims):
        raise InputError(f"input {spec.name!r} has {array.ndim} dims {array.shape}; the model takes {spec.text()}")
    for i, (size, dim) in enumerate(zip(array.shape, spec.dims, strict=True)):
        if isinstance(dim, int):
            if size != dim:
                raise InputError(f"dim {i} of input {spec.name!r} is {size}; the model takes {dim}: {spec.text()}")
            continue
        _check_dim(spec, i, size, dim)
        count, seen = sizes.setdefault(dim.symbol, (size // dim.factor, spec.name))
        if count * dim.factor != size:
            raise InputError(
                f"{dim.symbol} is {count} in input {seen!r} and {size // dim.factor} in input {spec.name!r}"
            )
    return np.ascontiguousarray(array, array.dtype.newbyteorder("="))


def _check_dim(spec: TensorSpec, i: int, size: int, dim: DimSpec) -> None:
    assert dim.min is not None and dim.max is not None
    if not dim.min <= size <= dim.max:
        raise InputError(
            f"dim {i} of input {spec.name!r} ({dim.text}) is {size}; the profile takes {dim.min} to {dim.max}: "
            "deploy again with a wider torch.export.Dim"
        )
    if size % dim.factor:
        raise InputError(
            f"dim {i} of input {spec.name!r} is {size}; it must be a multiple of {dim.factor} ({dim.text})"
        )
