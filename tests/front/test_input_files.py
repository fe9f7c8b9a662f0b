"""Input files: images are read as they look, and every error in a file is reported in one line."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from attnforge.bundle import DimSpec, TensorSpec
from attnforge.errors import InputError
from attnforge.input_files import read_inputs, write_outputs
from attnforge.pictures import image_to_input

GREY = TensorSpec(name="image", dtype="float32", dims=[1, 1, 4, 6])
COLOUR = TensorSpec(name="image", dtype="float32", dims=[1, 3, 4, 6])
ALPHA = TensorSpec(name="image", dtype="float16", dims=[1, 4, 4, 6])
X = TensorSpec(name="x", dtype="float32", dims=[DimSpec(symbol="batch", min=1, opt=2, max=4), 3])
MASK = TensorSpec(name="mask", dtype="bool", dims=[3])


# --- pictures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [GREY, COLOUR, ALPHA], ids=["grey", "colour", "alpha"])
@pytest.mark.parametrize("order", ["<", ">"])
def test_16_bits_are_scaled_by_their_range(tmp_path: Path, spec: TensorSpec, order: str) -> None:
    levels = np.linspace(0, 65535, 24).astype(np.uint16).reshape(4, 6)
    file = tmp_path / "deep.tiff"
    Image.fromarray(levels.astype(f"{order}u2")).save(file)
    array = read_inputs([spec], [str(file)])["image"]
    assert array.dtype.name == spec.dtype and array.shape == tuple(spec.dims)
    np.testing.assert_allclose(array[0, 0], levels / 65535, atol=1e-3)
    if spec is ALPHA:
        assert (array[0, 3] == 1).all()
    np.testing.assert_array_equal(array[0, 0], array[0, min(2, array.shape[1] - 1)])


def test_16_bits_of_a_png_are_resized_within_their_range(tmp_path: Path) -> None:
    levels = np.zeros((40, 60), np.uint16)
    levels[:, 30:] = 65535
    Image.fromarray(levels).save(tmp_path / "edge.png")
    array = read_inputs([GREY], [str(tmp_path / "edge.png")])["image"]
    assert array.min() >= 0 and array.max() <= 1
    np.testing.assert_allclose(array[0, 0, :, [0, 5]], [[0] * 4, [1] * 4], atol=0.01)


@pytest.mark.parametrize("kind", ["int32", "float32"])
def test_numbers_of_no_known_range_are_refused(tmp_path: Path, kind: str) -> None:
    Image.fromarray(np.ones((4, 6), kind)).save(tmp_path / "wide.tiff")
    with pytest.raises(InputError, match="have no defined range"):
        read_inputs([GREY], [str(tmp_path / "wide.tiff")])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_it_says(tmp_path: Path, orientation: int) -> None:
    upright = np.arange(24, dtype=np.uint8).reshape(4, 6) * 10
    turn: dict[int, Callable[[np.ndarray], np.ndarray]] = {
        1: lambda a: a, 2: np.fliplr, 3: lambda a: np.rot90(a, 2), 4: np.flipud,
        5: lambda a: a.T, 6: np.rot90, 7: lambda a: np.rot90(a, 2).T, 8: lambda a: np.rot90(a, -1),
    }  # fmt: skip
    image = Image.fromarray(np.ascontiguousarray(turn[orientation](upright)))
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / "turned.png", exif=exif)
    array = read_inputs([GREY], [str(tmp_path / "turned.png")])["image"]
    np.testing.assert_allclose(array[0, 0], upright / 255, atol=1e-6)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"])
def test_white_is_one_and_black_is_zero(mode: str) -> None:
    for level in (0, 255):
        image = Image.new("RGB", (6, 4), (level,) * 3).convert(mode)
        np.testing.assert_allclose(image_to_input(COLOUR, image), level / 255, atol=0.01)


# --- files that are wrong ---------------------------------------------------------------------------------------------


def npy(array: np.ndarray, **options: bool) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


def declaring(shape: str, kind: str = "<f4") -> bytes:
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + b"\0" * 64


def npz(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return buffer.getvalue()


def png(size: tuple[int, int] = (6, 4)) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", size).save(buffer, "PNG")
    return buffer.getvalue()


def bomb() -> bytes:
    """A picture of 40,000 × 40,000 that takes few bytes."""
    data = bytearray(png())
    data[16:24] = (40_000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
    return bytes(data)


GOOD = npy(np.ones((2, 3), np.float32))
ZIPPED = npz(x=GOOD, mask=npy(np.ones(3, bool)))
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 6 4\n%%EndComments\nshowpage\n"

WRONG: dict[str, bytes] = {
    "empty.npy": b"", "empty.npz": b"", "empty.png": b"", "text.npy": b"text", "text.npz": b"text", "text.png": b"text",
    "objects.npy": npy(np.array([{}], object), allow_pickle=True), "truncated.npy": GOOD[:-5], "header.npy": GOOD[:20],
    "huge.npy": declaring("(100000000000,)"), "overflow.npy": declaring("(4294967296, 4294967296, 4294967296)"),
    "negative.npy": declaring("(-3,)"), "shapeless.npy": declaring("(1.5,)"),
    "strange.npy": declaring("(2, 3)", "|V999999"),
    "no shape.npy": declaring("'x'"), "version.npy": b"\x93NUMPY\x09\x09" + GOOD[8:],
    "truncated.npz": ZIPPED[:-30], "half.npz": ZIPPED[: len(ZIPPED) // 2],
    "checksum.npz": ZIPPED[:45] + bytes([ZIPPED[45] ^ 255]) + ZIPPED[46:],
    "objects.npz": npz(x=npy(np.array([{}], object), allow_pickle=True)),
    "other.npz": npz(z=declaring("(6000000000,)")),
    "huge.npz": npz(x=declaring("(6000000000,)")), "member.npz": npz(x=b"junk"),
    "truncated.png": png((600, 400))[:200], "bomb.png": bomb(), "picture.eps": EPS, "picture.png": EPS,
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_is_wrong_is_one_line(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *args, **options: pytest.fail("a program was started"))
    monkeypatch.setattr("pickle.loads", lambda *args: pytest.fail("it was unpickled"))
    (tmp_path / name).write_bytes(WRONG[name])
    specs = [GREY] if name.endswith(("png", "eps")) else [X, MASK]
    with pytest.raises(InputError) as raised:
        read_inputs(specs, [str(tmp_path / name)])
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1_000


def test_what_is_right_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(GOOD)
    (tmp_path / "f.npy").write_bytes(npy(np.asfortranarray(np.arange(6, dtype=np.float64).reshape(2, 3))))
    (tmp_path / "all.npz").write_bytes(ZIPPED)
    np.testing.assert_array_equal(read_inputs([X], [str(tmp_path / "x.npy")])["x"], 1)
    read = read_inputs([X], [f"x={tmp_path / 'f.npy'}"])["x"]
    np.testing.assert_array_equal(read, np.arange(6).reshape(2, 3))
    assert read.dtype == np.float32
    read[0, 0] = 7  # and may be written to
    assert set(read_inputs([X, MASK], [str(tmp_path / "all.npz")])) == {"x", "mask"}
    scalar = TensorSpec(name="s", dtype="float32", dims=[])
    (tmp_path / "s.npy").write_bytes(npy(np.array(2.0, np.float32)))
    assert read_inputs([scalar], [str(tmp_path / "s.npy")])["s"].shape == ()


@pytest.mark.parametrize("name", ["n" * 5000, "nul\0", "absent.npy"])
def test_a_name_that_is_none_is_one_line(name: str) -> None:
    with pytest.raises(InputError, match="no file") as raised:
        read_inputs([X], [name])
    assert len(str(raised.value)) < 1_000


def test_a_pipe_is_no_input(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.npy")
    with pytest.raises(InputError, match="no file"):
        read_inputs([X], [str(tmp_path / "x.npy")])


def test_outputs_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "outputs.npz"
    write_outputs(file, {"y": np.ones(3)})
    with pytest.raises(AttributeError):
        write_outputs(file, {"y": np.ones(3), "z": None})  # type: ignore[dict-item]
    np.testing.assert_array_equal(np.load(file)["y"], 1)
    assert list(tmp_path.iterdir()) == [file]
