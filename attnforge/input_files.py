"""Inputs from files, and outputs to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from attnforge.arrays import BFLOAT16, Array
from attnforge.bundle import DimSpec, TensorSpec
from attnforge.errors import InputError

_CHANNELS = {1: "L", 3: "RGB", 4: "RGBA"}


def read_inputs(specs: Sequence[TensorSpec], texts: Sequence[str]) -> dict[str, Array]:
    """Read a model's inputs from files.

    Args:
        specs: the model's inputs.
        texts: one `.npz` that holds every input by name; `name=file` for each; or files in the order of the inputs.

    Returns:
        arrays by name. Floating-point arrays have the dtype that the model takes; others are as in their files.

    Raises:
        InputError: a file is missing, of an unknown kind, or holds no input of the model.
    """
    if len(texts) == 1 and texts[0].endswith(".npz"):
        with np.load(_existing(texts[0])) as stored:
            return {name: _converted(stored[name], specs, name) for name in stored.files}
    names = [spec.name for spec in specs]
    named = [text.partition("=") for text in texts if text.partition("=")[0] in names and "=" in text]
    if named and len(named) != len(texts):
        raise InputError("either every input is given as name=file, or none is")
    if len(texts) > len(names):
        raise InputError(f"{len(texts)} files were given; the model takes {len(names)}: {', '.join(names)}")
    pairs = [(name, file) for name, _, file in named] or list(zip(names, texts, strict=False))
    by_name = {spec.name: spec for spec in specs}
    return {name: _converted(_read(by_name[name], _existing(file)), specs, name) for name, file in pairs}


def write_outputs(file: Path, outputs: Mapping[str, Array]) -> None:
    """Write outputs by name to an `.npz`; bfloat16 as float32, because the format has no such dtype."""
    arrays = {name: array.astype(np.float32) if array.dtype == BFLOAT16 else array for name, array in outputs.items()}
    with file.open("wb") as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]


def image_to_input(spec: TensorSpec, image: Image.Image) -> Array:
    """An image as a batch of one, `(1, C, H, W)`, values from 0 to 1, resized to what the model takes.

    A dynamic height or width stays the image's own, rounded down to what the model takes.

    Raises:
        InputError: the model's input is no batch of images.
    """
    if len(spec.dims) != 4 or spec.dims[1] not in _CHANNELS or not spec.dtype.endswith(("float16", "float32")):
        raise InputError(f"input {spec.name!r} takes {spec.text()}, which is no batch of images; give an .npy or .npz")
    channels = spec.dims[1]
    assert isinstance(channels, int)
    height, width = (_fitting(dim, size) for dim, size in zip(spec.dims[2:], (image.height, image.width), strict=True))
    image = image.convert(_CHANNELS[channels])
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    pixels = np.asarray(image, np.float32).reshape(height, width, -1) / 255.0
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None]).astype(spec.dtype)


def _fitting(dim: int | DimSpec, size: int) -> int:
    if isinstance(dim, int):
        return dim
    assert dim.min is not None and dim.max is not None
    return min(max(size, dim.min), dim.max) // dim.factor * dim.factor


def _existing(name: str) -> Path:
    file = Path(name)
    if not file.is_file():
        raise InputError(f"no file {name!r}; give an .npy, an .npz or an image")
    return file


def _read(spec: TensorSpec, file: Path) -> Array:
    if file.suffix == ".npy":
        array: Array = np.load(file)
        return array
    try:
        with Image.open(file) as image:
            return image_to_input(spec, image)
    except UnidentifiedImageError as error:
        raise InputError(f"{file} is neither .npy, .npz nor an image that can be read") from error


def _converted(array: Array, specs: Sequence[TensorSpec], name: str) -> Array:
    wanted = next((np.dtype(spec.dtype) for spec in specs if spec.name == name), array.dtype)
    floating = np.issubdtype(array.dtype, np.floating) and (np.issubdtype(wanted, np.floating) or wanted == BFLOAT16)
    return array.astype(wanted) if floating else array
