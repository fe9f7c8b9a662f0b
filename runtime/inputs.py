"""Inputs and outputs of a session, checked before anything runs."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnforge.arrays import Array, is_torch, on_gpu, to_numpy
from attnforge.bundle import TensorSpec
from attnforge.errors import InputError, UsageError, shortened
from attnforge.text import check_no_input

ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}

ArrayType = tuple[tuple[int, ...], "np.dtype[Any]"]
"""Shape and dtype of an array."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """One combination of input shapes that a model accepts.

    Attributes:
        inputs: the inputs' shapes, in the manifest's order.
        sizes: the size of every symbol.
        outputs: the outputs' shapes; None for an output whose shape the inputs' sizes do not determine.
    """

    inputs: tuple[tuple[int, ...], ...]
    sizes: Mapping[str, int]
    outputs: tuple[tuple[int, ...] | None, ...]


def by_name(specs: Sequence[TensorSpec], values: Sequence[Any]) -> dict[str, Any]:
    """Map inputs given by position to their names.

    Raises:
        InputError: there are more or fewer inputs than the model takes.
    """
    names = [spec.name for spec in specs]
    if len(values) != len(names):
        raise InputError(f"{len(values)} inputs were given; the model takes {len(names)}: {', '.join(names)}")
    return dict(zip(names, values, strict=True))


def in_order(specs: Sequence[TensorSpec], values: Mapping[str, Any]) -> list[Any]:
    """Put inputs given by name into the order of `specs`.

    Raises:
        InputError: an input is missing, or the model has none with that name.
    """
    try:
        ordered = [values[spec.name] for spec in specs]
    except (TypeError, IndexError) as error:
        given = type(values).__name__
        raise InputError(f"inputs by name must be a mapping, not {given}; call the session to give a list") from error
    except KeyError as error:
        known, given = ", ".join(spec.name for spec in specs), ", ".join(map(str, values)) or "none"
        raise InputError(
            f"input {error.args[0]!r} is missing; the model takes {known}, and {shortened(given)} was given"
        ) from None
    if len(values) != len(ordered):
        names = [spec.name for spec in specs]
        for name in values:
            if name not in names:
                check_no_input(name, values[name], names)
    return ordered


def on_host(spec: TensorSpec, value: Any) -> Array:
    """`value` as a contiguous array in this machine's byte order."""
    if type(value) is np.ndarray and value.flags.c_contiguous and value.dtype.isnative:
        return value
    array = to_numpy(spec.name, value)
    return np.asarray(array, array.dtype.newbyteorder("="), order="C")


def shapes_of(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], *types: ArrayType) -> Shapes:
    """Derive the sizes and the outputs' shapes from the inputs' shapes.

    Args:
        inputs: the model's inputs.
        outputs: the model's outputs.
        types: shape and dtype of every input, in the order of `inputs`.

    Raises:
        InputError: the deployed model does not accept a dtype, rank or dim; says what it accepts.
    """
    seen: dict[str, tuple[int, str]] = {}
    for spec, (shape, dtype) in zip(inputs, types, strict=True):
        _check(spec, shape, dtype, seen)
    sizes = {symbol: size for symbol, (size, _) in seen.items()}
    return Shapes(tuple(shape for shape, _ in types), sizes, tuple(output_shape(spec, sizes) for spec in outputs))


def output_shape(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    """The shape of an output with these sizes of the inputs' symbols; None if they do not determine it."""
    try:
        return tuple(dim if isinstance(dim, int) else dim.factor * _size(dim.symbol, sizes) for dim in spec.dims)
    except (KeyError, NotImplementedError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None  # also if an expression is nested deeper than Python supports


def _size(expression: str | ast.expr, sizes: Mapping[str, int]) -> int:
    """The size of a symbol, or the value of an expression of symbols such as `rows*columns`.

    Raises:
        KeyError: no input has a symbol.
        SyntaxError: it is no expression.
        NotImplementedError: an expression with more than integers, symbols and arithmetic.
    """
    match expression:
        case str(symbol):
            return sizes[symbol] if symbol in sizes else _size(ast.parse(symbol, mode="eval").body, sizes)
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return sizes[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_size(operand, sizes)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            return ARITHMETIC[type(op)](_size(left, sizes), _size(right, sizes))
    raise NotImplementedError(ast.dump(expression))


def check_index(name: str, array: Array, low: int, high: int) -> None:
    """Check that integers are indices into a table.

    Args:
        name: name of the input.
        array: the integers, on the host.
        low, high: the least and the largest index.

    Raises:
        InputError: one is out of range.
    """
    if array.size and not (array.min() >= low and array.max() <= high):
        wrong = array[(array < low) | (array > high)].flat[0]
        raise InputError(f"{name} has the id {wrong}; the table's ids are {low} to {high}")


def _check(spec: TensorSpec, shape: tuple[int, ...], dtype: Any, seen: dict[str, tuple[int, str]]) -> None:
    label = f"input {spec.name!r}"
    if dtype.name != spec.dtype:
        raise InputError(f"{label} is {dtype.name}; the model takes {spec.text()}: convert it first")
    if len(shape) != len(spec.dims):
        raise InputError(f"{label} has {len(shape)} dims {shape}; the model takes {spec.text()}")
    for i, (size, dim) in enumerate(zip(shape, spec.dims, strict=True)):
        if isinstance(dim, int):
            if size != dim:
                raise InputError(f"dim {i} of {label} is {size}; the model takes {dim}: {spec.text()}")
            continue
        assert dim.min is not None and dim.max is not None
        if not dim.min <= size <= dim.max:
            is_usual = size > dim.max and dim.symbol in ("batch", "tokens")
            of_names = f" (or -o max_{dim.symbol}=… for hf: models)" if is_usual else ""
            advice = f": deploy again with a wider torch.export.Dim{of_names}" if size else ""
            raise InputError(
                f"dim {i} of {label} ({dim.text}) is {size}; the profile takes {dim.min} to {dim.max}{advice}"
            )
        if size % dim.factor:
            raise InputError(f"dim {i} of {label} is {size}; it must be a multiple of {dim.factor} ({dim.text})")
        count, earlier = seen.setdefault(dim.symbol, (size // dim.factor, spec.name))
        if count * dim.factor != size:
            raise InputError(f"{dim.symbol} is {count} in input {earlier!r} and {size // dim.factor} in {label}")


# --- outputs in the caller's arrays -----------------------------------------------------------------------------------


def outs_by_name(specs: Sequence[TensorSpec], out: Any) -> dict[str, Any]:
    """The arrays to write outputs to, by name.

    Args:
        specs: the model's outputs.
        out: one array, a sequence of as many as there are outputs, or a mapping by name.

    Raises:
        UsageError: there are more or fewer arrays than outputs.
    """
    if isinstance(out, Mapping):
        return dict(out)
    values = list(out) if isinstance(out, (tuple, list)) else [out]
    if len(values) != len(specs):
        names = ", ".join(spec.name for spec in specs)
        raise UsageError(f"{len(values)} arrays were given to write to; the model has {len(specs)} outputs: {names}")
    return {spec.name: value for spec, value in zip(specs, values, strict=True)}


def writable(
    spec: TensorSpec, value: Any, shape: tuple[int, ...] | None, others: Iterable[Array] = (), *, strided: bool = False
) -> Array:
    """The caller's array for output `spec`, as a NumPy array on the same memory.

    Args:
        spec: the output.
        value: the caller's array.
        shape: shape that the output will have; None if it is not known before the run.
        others: inputs and other outputs, whose memory it may not share.
        strided: whether it may be strided.

    Raises:
        InputError: the array's shape or dtype differs from the output's, or the output cannot be written to its memory.
    """
    label = target_text(spec)
    if on_gpu(value):
        raise InputError(f"{label} is on a GPU, and the inputs are not; give one on the host")
    if is_torch(value) and (value.requires_grad or value.is_neg() or not value.is_contiguous()):
        raise InputError(f"{label} is strided, or requires a gradient; give a contiguous one that does not")
    array = value if type(value) is np.ndarray else to_numpy(spec.name, value)
    check_out(spec, array.shape, array.dtype, shape)
    if not (array.flags.carray or (strided and array.flags.writeable)):
        raise InputError(f"{label} is strided or read-only; give a contiguous one that can be written to")
    for other in others:
        if np.may_share_memory(array, other):
            raise InputError(f"{label} shares memory with an input or another output; give one of its own")
    return array


def target_text(spec: TensorSpec) -> str:
    """The name, in messages, of the array that an output is to be written to."""
    return f"the array to write output {spec.name!r} to"


def check_out(spec: TensorSpec, shape: tuple[int, ...], dtype: Any, expected: tuple[int, ...] | None) -> None:
    """Check that an array of this shape and dtype can store output `spec`.

    Args:
        spec: the output.
        shape: shape of the array.
        dtype: dtype of the array.
        expected: the output's shape; None if it is not known yet.

    Raises:
        InputError: it cannot; says which shape and dtype are required.
    """
    if dtype != np.dtype(spec.dtype) or (expected is not None and shape != expected):
        needed = f"{spec.dtype}{list(expected)}" if expected is not None else spec.text()
        raise InputError(f"{target_text(spec)} is {dtype.name}{list(shape)}; it must be {needed}")
