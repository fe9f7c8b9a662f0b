"""Specs of the inputs and outputs of a graph, for the manifest."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array, is_floating
from attnforge.bundle import DimSpec, TensorSpec
from attnforge.errors import UsageError
from attnforge.runtime.cases import excluded_by, range_of_setting

LARGEST = 2**31 - 1
"""The largest size of a dynamic dim, a limit of TensorRT."""

Ranges = Mapping[str, tuple[int, int, int]]
"""Least, usual and largest size of dynamic dims, by their names."""

Dims = list[int | DimSpec]
"""The dims of a tensor: a number for a fixed dim, else its symbol and range."""


def spec_of(value: ir.Value, dims: Dims) -> TensorSpec:
    """The spec of an input or output whose name and type are known.

    Args:
        value: the input or output.
        dims: its dims.
    """
    assert value.name is not None and value.dtype is not None
    return TensorSpec(name=value.name, dtype=value.dtype.numpy().name, dims=dims)


def output_spec(value: ir.Value, inputs: list[TensorSpec]) -> TensorSpec:
    """The spec of an output.

    Raises:
        UsageError: the type or shape of the output is not known.
    """
    if value.name is None or value.dtype is None or value.shape is None:
        node = value.producer()
        while node is not None and (unknown := [v for v in node.inputs if v is not None and v.shape is None]):
            if (before := unknown[0].producer()) is None:
                break
            node = before
        where = "" if node is None else f", since that of {node.op_type} ({node.name}) is not known"
        raise UsageError(
            f"the shape of output {value.name!r} cannot be inferred{where}; export the graph without that operator, or "
            "remove the output"
        )
    return spec_of(value, output_dims(value, inputs))


def output_dims(value: ir.Value, inputs: list[TensorSpec]) -> Dims:
    """The dims of an output: a dim that an input has too includes its range, any other only its expression."""
    known = {dim.text: dim for spec in inputs for dim in spec.dims if isinstance(dim, DimSpec)}
    texts = [dim if isinstance(dim, int) else str(dim.value) for dim in value.shape or ()]
    return [text if isinstance(text, int) else known.get(text) or DimSpec(symbol=text) for text in texts]


def note_example(spec: TensorSpec, example: Array) -> None:
    """Add to an input's spec the facts about its example that reference inputs keep: the range of integers, the number
    with which a floating-point mask excludes keys, and the range of a setting."""
    if is_floating(example):
        spec.excludes = excluded_by(example)
        spec.setting = range_of_setting(example)
    elif example.size and example.dtype != np.bool_:
        spec.low, spec.high = int(example.min()), int(example.max())


def check_ranges(ranges: Mapping[str, Sequence[int]], names: Collection[str], of: str) -> None:
    """Check the ranges that a user gives.

    Args:
        ranges: the ranges.
        names: the names of the dynamic dims.
        of: what has these dims.

    Raises:
        UsageError: there is no such dim, or a range is not a least, usual and largest size.
    """
    if unknown := [name for name in ranges if name not in names]:
        raise UsageError(f"{of} has no dynamic dim {unknown[0]!r}; it has {', '.join(names) or 'none'}")
    for name, bounds in ranges.items():
        whole = len(bounds) == 3 and all(isinstance(n, int) and not isinstance(n, bool) for n in bounds)
        if not whole or not 1 <= bounds[0] <= bounds[1] <= bounds[2] <= LARGEST:
            raise UsageError(
                f"the range of {name!r} is {':'.join(map(str, bounds))}; give min:opt:max with 1 <= min <= opt <= max, "
                f"up to {LARGEST:,}"
            )
