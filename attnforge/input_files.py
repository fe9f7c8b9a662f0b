"""Reading inputs from files, and writing outputs to files."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from attnforge.arrays import BFLOAT16, Array, without_bfloat16
from attnforge.atomic import written_whole
from attnforge.bundle import TensorSpec
from attnforge.errors import InputError, raised_as, shortened
from attnforge.text import IDS, TYPES, check_no_input

LABELS, MOST_LABELS = "labels", 2**24
"""Name of the labels in an `.npz` of real inputs, and their maximum number."""


def read_inputs(
    specs: Sequence[TensorSpec], texts: Sequence[str], ignored: Collection[str] = (), settings: bytes | None = None
) -> dict[str, Array]:
    """Read a model's inputs from files. Nothing is unpickled, and no more is read than the model takes.

    Args:
        specs: the model's inputs.
        texts: one `.npz` with every input by name; `name=file` for each; or files in the order of the inputs.
        ignored: names of further arrays that an `.npz` may contain; they are not read.
        settings: content of the model's `preprocessor_config.json`, for pictures; None if it has none.

    Returns:
        arrays by name. Floating-point arrays have the dtype that the model takes; others are as in their files.

    Raises:
        InputError: a file is missing, of an unknown kind, damaged, or contains no input of the model.
    """
    by_name = {spec.name: spec for spec in specs}
    if len(texts) == 1 and texts[0].endswith(".npz"):
        file = _existing(texts[0])
        with raised_as(InputError, f"{file} cannot be read"):  # NumPy, zipfile and zlib raise many types of errors
            return _of_archive(file, by_name, ignored)
    names = list(by_name)
    named = [text.partition("=") for text in texts if text.partition("=")[0] in names and "=" in text]
    if named and len(named) != len(texts):
        raise InputError("give either every input as name=file, or none")
    if len(texts) > len(names):
        raise InputError(f"{len(texts)} files were given; the model takes {len(names)}: {', '.join(names)}")
    pairs = [(name, file) for name, _, file in named] or list(zip(names, texts, strict=False))
    return {name: _converted(_read(by_name[name], _existing(file), settings), by_name[name]) for name, file in pairs}


def read_labels(file: Path) -> Array | None:
    """Return the array `labels` of an `.npz`, the expected classes of its samples; None if it has none.

    Raises:
        InputError: the file is missing or damaged, or its labels are not numbers.
    """
    existing = _existing(str(file))
    with raised_as(InputError, f"{existing} cannot be read"), zipfile.ZipFile(existing) as archive:
        if (member := f"{LABELS}.npy") not in archive.namelist():
            return None
        with archive.open(member) as stream:
            size = archive.getinfo(member).file_size
            return npy(stream, size, f"{file}, {LABELS}", MOST_LABELS, f"labels are {MOST_LABELS:,} numbers at most")


def write_outputs(file: Path, outputs: Mapping[str, Array]) -> None:
    """Write outputs by name to an `.npz` file, atomically; bfloat16 as float32, because the format has no bfloat16."""
    arrays = {name: without_bfloat16(array) for name, array in outputs.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(file) as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]


def _existing(name: str) -> Path:
    if not os.path.isfile(name):  # False also for an invalid file name
        raise InputError(f"no file {shortened(name)!r}; give an .npy, an .npz or an image")
    return Path(name)


def _read(spec: TensorSpec, file: Path, settings: bytes | None) -> Array:
    with raised_as(InputError, f"{file} cannot be read"):  # as may Pillow
        if file.suffix == ".npy":
            with file.open("rb") as stream:
                return _array(spec, stream, file.stat().st_size, str(file))
        from attnforge.pictures import read_picture  # Pillow is not needed to read arrays

        return read_picture(file, spec, settings)


def _of_archive(file: Path, specs: Mapping[str, TensorSpec], ignored: Collection[str]) -> dict[str, Array]:
    """Read the model's inputs from an `.npz`; any other member that is not in `ignored` is refused unread, except token
    types, which may be left out (:func:`attnforge.text.check_no_input`)."""
    takes, specs = specs, {TYPES: specs[IDS], **specs} if IDS in specs else specs
    with zipfile.ZipFile(file) as archive:
        members = {member.removesuffix(".npy"): member for member in archive.namelist()}
        members = {name: member for name, member in members.items() if name in specs or name not in ignored}
        if unknown := next((name for name in members if name not in specs), None):
            check_no_input(unknown, None, takes)
        arrays = {}
        for name, member in members.items():
            with archive.open(member) as stream:
                size = archive.getinfo(member).file_size
                arrays[name] = _converted(_array(specs[name], stream, size, f"{file}, {name}"), specs[name])
        if TYPES in arrays and TYPES not in takes:
            check_no_input(TYPES, arrays.pop(TYPES), takes)
        return arrays


def _array(spec: TensorSpec, stream: IO[bytes], size: int, where: str) -> Array:
    """Read an `.npy` array after checking that its header fits the file and the size that the model takes.

    Args:
        spec: the model's input.
        stream: the open file.
        size: bytes of the file.
        where: location of the array, for messages.
    """
    most = math.prod(dim if isinstance(dim, int) else dim.max or 0 for dim in spec.dims)
    return npy(stream, size, where, most, f"input {spec.name!r} takes {spec.text()}")


def npy(stream: IO[bytes], size: int, where: str, most: int | None = None, wanted: str = "") -> Array:
    """Read an `.npy` array after checking that its header fits the file. Nothing is unpickled.

    Args:
        stream: the open file.
        size: bytes of the file.
        where: location of the array, for messages.
        most: maximum number of elements.
        wanted: end of the message if it has more.

    Raises:
        InputError: it contains Python objects, has more than `most` elements, or fewer than its header says.
        ValueError: it is not an `.npy`; NumPy raises other types, too.
    """
    version = np.lib.format.read_magic(stream)
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = header(stream)
    if dtype.hasobject:
        raise InputError(f"{where} contains Python objects, which are not unpickled; give numbers")
    numbers = math.prod(shape)
    if most is not None and numbers > most:
        raise InputError(f"{where} is {dtype.name}{list(shape)}; {wanted}")
    if numbers * dtype.itemsize > size:
        raise InputError(f"{where} is truncated: it has {size:,} bytes, and {dtype.name}{list(shape)} takes more")
    array = np.frombuffer(stream.read(numbers * dtype.itemsize), dtype, numbers)
    return array.reshape(shape, order="F" if is_fortran else "C").copy()


def _converted(array: Array, spec: TensorSpec) -> Array:
    wanted = np.dtype(spec.dtype)
    floating = np.issubdtype(array.dtype, np.floating) and (np.issubdtype(wanted, np.floating) or wanted == BFLOAT16)
    return array.astype(wanted) if floating else array
