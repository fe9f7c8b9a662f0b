"""Altered input files."""

from __future__ import annotations

import io
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, note
from hypothesis import strategies as st
from PIL import Image

from attnforge.bundle import DimSpec, TensorSpec
from tests.fuzz.budget import tries
from tests.fuzz.changes import changed_bytes
from tests.fuzz.subject import Subject

BATCH = DimSpec(symbol="batch", min=1, opt=2, max=4)
X = TensorSpec(name="x", dtype="float32", dims=[BATCH, 3])
KINDS = TensorSpec(name="kinds", dtype="int64", dims=[BATCH])
IMAGES = TensorSpec(
    name="image", dtype="float32", dims=[BATCH, 3, 6, DimSpec(symbol="w", factor=2, min=2, opt=6, max=64)]
)

_PICTURE = Image.fromarray((np.arange(8 * 6 * 3, dtype=np.uint8) * 7).reshape(6, 8, 3))


def _saved(save: Any, *arguments: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    save(stream, *arguments, **options)
    return stream.getvalue()


FILES: dict[str, tuple[TensorSpec, bytes]] = {
    "x.npy": (X, _saved(np.save, np.ones((2, 3), np.float32))),
    "turned.npy": (X, _saved(np.save, np.asfortranarray(np.ones((2, 3), ">f8")))),
    "kinds.npy": (KINDS, _saved(np.save, np.arange(2))),
    "x.npz": (X, _saved(np.savez, x=np.ones((2, 3), np.float32))),
    "small.npz": (X, _saved(np.savez_compressed, x=np.ones((2, 3), np.float16))),
    "picture.png": (IMAGES, _saved(_PICTURE.save, "png")),
    "grey.png": (IMAGES, _saved(Image.fromarray(np.arange(48, dtype=np.uint16).reshape(6, 8) * 1000).save, "png")),
    "picture.jpg": (IMAGES, _saved(_PICTURE.save, "jpeg")),
    "picture.tiff": (IMAGES, _saved(_PICTURE.save, "tiff", compression="tiff_lzw")),
    "picture.gif": (IMAGES, _saved(_PICTURE.save, "gif")),
    "picture.bmp": (IMAGES, _saved(_PICTURE.save, "bmp")),
    "picture.webp": (IMAGES, _saved(_PICTURE.save, "webp")),
    "picture.ppm": (IMAGES, _saved(_PICTURE.save, "ppm")),
    "picture.ico": (IMAGES, _saved(_PICTURE.save, "ico")),
    "picture.jp2": (IMAGES, _saved(_PICTURE.save, "jpeg2000")),
}


@pytest.mark.parametrize("name", FILES)
def test_the_file_unchanged_is_accepted(name: str, subject: Subject, tmp_path: Path) -> None:
    spec, data = FILES[name]
    (tmp_path / name).write_bytes(data)
    assert subject.ask("read_files", [spec], [str(tmp_path / name)]).kind == "accepted"


@tries(few=200, many=1_000)
@given(data=st.data())
def test_a_file_is_accepted_rightly_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, subject: Subject, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(list(FILES)))
    spec, whole = FILES[name]
    kind = data.draw(st.sampled_from([name] * 4 + list(FILES)))  # sometimes with another file's extension
    file = tmp_path_factory.getbasetemp() / f"wrong{Path(kind).suffix}"
    changed = data.draw(changed_bytes(whole))
    note(f"base64: {b64encode(changed).decode()}")
    file.write_bytes(changed)
    answer = subject.ask("read_files", [spec], [str(file)])
    event(f"{name}: {answer.kind}")
