"""Pictures as inputs of a model: as transformers' image processor prepares them, if the model came with its settings,
or else with values from 0 to 1."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from pydantic import BaseModel, Field, ValidationError

from attnforge.arrays import Array
from attnforge.bundle import PROCESSOR, DimSpec, TensorSpec
from attnforge.errors import InputError, raised_as, shortened

_CHANNELS = {1: "L", 3: "RGB", 4: "RGBA"}

_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "AVIF", "BMP", "GIF", "TIFF", "PPM", "TGA", "ICO", "JPEG2000", "QOI", "DIB")
"""Formats that Pillow reads by itself; for others, such as EPS, it starts programs."""

SUFFIXES = {".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
"""Of files in a folder that are taken for pictures."""

_FAMILIES = {"ViT": True, "DeiT": True, "Beit": True, "Siglip": True, "CLIP": False, "Bit": False}
"""Image processors that only resize, crop, rescale and normalise, and whether one number as size is that of a square,
or of the shorter edge."""

_KIND = ("image_processor_type", "feature_extractor_type")
_WITHOUT_EFFECT = {*_KIND, "processor_class", "do_convert_rgb", "input_data_format"}

_NEEDED = {
    "do_resize": ("size", "resample"),
    "do_center_crop": ("crop_size",),
    "do_normalize": ("image_mean", "image_std"),
}
"""The settings without which a step is not defined."""

_Edge = Annotated[int, Field(ge=1, le=2**14)]
_Edges = dict[Literal["height", "width", "shortest_edge"], _Edge] | _Edge
_Number = Annotated[float, Field(ge=-1e6, le=1e6)]
_Positive = Annotated[float, Field(ge=1e-6, le=1e6)]

MOST_PIXELS = 2**24
"""Of a picture while it is prepared: a narrow one whose shorter edge becomes long would take all memory."""


class ImageProcessor(BaseModel, frozen=True, extra="allow", strict=True):
    """The settings of an image processor of transformers, and what it does with a picture.

    Attributes:
        do_resize, size, resample: whether and how a picture is resized; `resample` is Pillow's number.
        do_center_crop, crop_size: whether the middle of it is cut out.
        do_rescale, rescale_factor: whether pixels, from 0 to 255, are multiplied.
        do_normalize, image_mean, image_std: whether each channel has a mean subtracted and is divided.
    """

    do_resize: bool
    size: _Edges = {}
    resample: Literal[0, 1, 2, 3, 4, 5] = 2
    do_center_crop: bool = False
    crop_size: _Edges = {}
    do_rescale: bool = True
    rescale_factor: _Positive = 1 / 255
    do_normalize: bool
    image_mean: tuple[_Number, _Number, _Number] = (0.0, 0.0, 0.0)
    image_std: tuple[_Positive, _Positive, _Positive] = (1.0, 1.0, 1.0)

    @classmethod
    def of(cls, settings: bytes) -> ImageProcessor:
        """The processor of a `preprocessor_config.json`.

        Raises:
            InputError: it does something else than these steps, or the file does not say how.
        """
        advice = "give an .npz with the pixel values of transformers' AutoImageProcessor"
        with raised_as(InputError, f"{PROCESSOR} cannot be read"):
            given = {name: value for name, value in dict(json.loads(settings)).items() if value is not None}
        kind = next((str(given[name]) for name in _KIND if name in given), "no image_processor_type")
        try:
            processor = cls.model_validate_json(json.dumps(given))
        except ValidationError as error:
            name = error.errors()[0]["loc"][0]
            said = f"says {shortened(str(given[name]), 60)} for" if name in given else "does not say"
            raise InputError(f"{PROCESSOR} of {kind} {said} {name}; {advice}") from error
        more: dict[str, Any] = processor.model_extra or {}
        usual = {"default_to_square": processor._is_square(), "data_format": "channels_first"}
        others = [n for n, value in more.items() if value and n not in _WITHOUT_EFFECT and value != usual.get(n)]
        needed = [name for step, names in _NEEDED.items() if getattr(processor, step) for name in names]
        missing = [name for name in needed if name not in processor.model_fields_set]
        if processor._is_square() is None or others or missing:
            why = f"has {', '.join(others)}" if others else f"does not say {', '.join(missing)}" if missing else ""
            raise InputError(f"{PROCESSOR} of {kind} {why or 'is of another processor'}; {advice}")
        return processor

    def _is_square(self) -> bool | None:
        """Whether one number as size is that of a square; None for a processor that is not known."""
        more = self.model_extra or {}
        kind = str(more.get(_KIND[0]) or more.get(_KIND[1]))
        return _FAMILIES.get(re.sub(r"(ImageProcessor|FeatureExtractor)(Fast|Pil)?$", "", kind))

    def pixels(self, image: Image.Image) -> Array:
        """Prepare an 8-bit picture of any mode; returns `(3, H, W)`, float32."""
        image = image.convert("RGB")
        if self.do_resize:
            image = image.resize(_bounded(self._resized(image)), Image.Resampling(self.resample))
        if self.do_center_crop:
            width, height = _bounded(_width_and_height(self.crop_size))
            left, top = (image.width - width) // 2, (image.height - height) // 2
            image = image.crop((left, top, left + width, top + height))  # black beyond the picture
        array: Array = np.asarray(image, np.float32)
        if self.do_rescale:
            array = array * np.float32(self.rescale_factor)
        if self.do_normalize:
            array = (array - np.asarray(self.image_mean, np.float32)) / np.asarray(self.image_std, np.float32)
        return np.ascontiguousarray(array.transpose(2, 0, 1))

    def _resized(self, image: Image.Image) -> tuple[int, int]:
        """Width and height after resizing."""
        edge = (
            self.size.get("shortest_edge") if isinstance(self.size, dict) else None if self._is_square() else self.size
        )
        if edge is None:
            return _width_and_height(self.size)
        longer = int(edge * max(image.size) / min(image.size))
        return (edge, longer) if image.width <= image.height else (longer, edge)


def _bounded(size: tuple[int, int]) -> tuple[int, int]:
    width, height = size
    if width * height > MOST_PIXELS:
        raise InputError(f"{PROCESSOR} makes {width} × {height} pixels of a picture; {MOST_PIXELS:,} are allowed")
    return size


def _width_and_height(edges: _Edges) -> tuple[int, int]:
    if isinstance(edges, int):
        return edges, edges
    if not edges.keys() >= {"height", "width"}:
        raise InputError(f"{PROCESSOR} has a size with {', '.join(edges)}; height and width are needed")
    return edges["width"], edges["height"]


def pictures_of(path: Path) -> list[Path]:
    """Return a picture, or the pictures in a folder, sorted by name; nothing for any other file."""
    files = path.iterdir() if path.is_dir() else [path]
    return sorted(file for file in files if file.suffix.lower() in SUFFIXES and file.is_file())


def read_picture(file: Path, spec: TensorSpec, settings: bytes | None) -> Array:
    """Read a picture as a batch of one, `(1, C, H, W)`, of the input's dtype.

    Args:
        file: a picture in a format that Pillow reads by itself.
        spec: the model's input.
        settings: content of the model's `preprocessor_config.json`; None if it has none.

    Raises:
        InputError: the input is not a batch of images, or the picture does not become one.
        OSError: the picture is damaged; Pillow raises other types, too.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        Image.init()  # registers the formats of this Pillow
        try:
            image = Image.open(file, formats=[name for name in _FORMATS if name in Image.OPEN])
        except UnidentifiedImageError as error:
            raise InputError(f"{file} is neither .npy, .npz nor a readable image") from error
        with image:
            return image_to_input(spec, image, settings)


def image_to_input(spec: TensorSpec, image: Image.Image, settings: bytes | None = None) -> Array:
    """Convert an image to a batch of one, `(1, C, H, W)`, rotated by its EXIF orientation.

    Without settings of an image processor its values are from 0 (black) to 1 (white), in 8-bit and 16-bit images, and
    it is resized to what the model takes; a dynamic height or width stays the image's own, rounded down to a size that
    the model takes.

    Raises:
        InputError: the model's input is not a batch of images, or the image's values have no defined range; or the
            image processor does more than :class:`ImageProcessor`, or makes an image of another size.
    """
    if len(spec.dims) != 4 or spec.dims[1] not in _CHANNELS or not spec.dtype.endswith(("float16", "float32")):
        raise InputError(f"input {spec.name!r} takes {spec.text()}, not a batch of images; give an .npy or .npz")
    channels = spec.dims[1]
    assert isinstance(channels, int)
    image = ImageOps.exif_transpose(image)
    deep = image.mode.startswith("I;16")
    if image.mode in ("I", "F"):
        raise InputError(f"32-bit images (mode {image.mode}) have no defined range; scale it yourself and pass an .npy")
    if deep and settings is not None:
        raise InputError(
            f"image processors take 8-bit pictures, and this one is {image.mode}; convert it, or give an .npz"
        )
    if settings is not None:
        pixels = ImageProcessor.of(settings).pixels(image)
        if any(_fitting(dim, size) != size for dim, size in zip(spec.dims[1:], pixels.shape, strict=True)):
            raise InputError(f"{PROCESSOR} makes {list(pixels.shape)} of a picture; the model takes {spec.text()}")
        return pixels[None].astype(spec.dtype)
    height, width = (_fitting(dim, size) for dim, size in zip(spec.dims[2:], (image.height, image.width), strict=True))
    image = Image.fromarray(np.asarray(image).astype(np.float32)) if deep else image.convert(_CHANNELS[channels])
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    pixels = np.asarray(image, np.float32).reshape(height, width, -1) / (65535.0 if deep else 255.0)
    if deep:  # one channel; bicubic resizing overshoots
        pixels = np.repeat(np.clip(pixels, 0, 1), channels, axis=-1)
        pixels[..., 3:] = 1.0
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None]).astype(spec.dtype)


def _fitting(dim: int | DimSpec, size: int) -> int:
    """The size closest to `size`, rounded down, that a dim takes."""
    if isinstance(dim, int):
        return dim
    assert dim.min is not None and dim.max is not None
    return min(max(size, dim.min), dim.max) // dim.factor * dim.factor
