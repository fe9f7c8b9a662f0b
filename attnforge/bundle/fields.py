"""Types of manifest fields. A manifest is untrusted, so all of it is validated before anything uses it: names lead to
no path outside the bundle, numbers are finite and in range, texts have a bounded length."""

from __future__ import annotations

from pathlib import PurePosixPath, PureWindowsPath
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints

from attnforge.errors import CONTROL
from attnforge.precision import PRECISIONS
from attnforge.records import Record

LONGEST_NAME, LONGEST_FILE, LONGEST_SIZE = 1024, 512, 4096
"""Maximum length of a name, of a file name, and of an expression of sizes, in characters."""

LARGEST_SIZE = 2**48
"""The largest size of a dim."""

MOST_DIMS = 64
"""Maximum number of dims of a tensor, as in NumPy."""

MOST_THREADS = 1024
"""Maximum number of threads of one run."""

DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64",
)  # fmt: skip
"""Dtypes of inputs and outputs."""


class StoredRecord(Record):
    """A record of the manifest. Its numbers are finite, because JSON has no others."""

    model_config = ConfigDict(allow_inf_nan=False)


def _plain(text: str) -> str:
    if CONTROL.search(text):
        raise ValueError("a name with a control character")
    return text


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or PureWindowsPath(name).drive or ".." in path.parts:
        raise ValueError(f"{name!r} is outside the bundle; do not use it")
    if path.as_posix() != name or "\\" in name or name == ".":
        raise ValueError(f"{name!r} is not a normalised relative path with /")
    return name


def _one_of(kind: str, known: tuple[str, ...]) -> AfterValidator:
    def check(name: str) -> str:
        if name not in known:
            raise ValueError(f"an unknown {kind}; known: {', '.join(known)}")
        return name

    return AfterValidator(check)


Name = Annotated[str, StringConstraints(min_length=1, max_length=LONGEST_NAME), AfterValidator(_plain)]
"""The name of a model, tensor, case or target."""

FileName = Annotated[
    str, StringConstraints(min_length=1, max_length=LONGEST_FILE), AfterValidator(_plain), AfterValidator(_inside)
]
"""The name of a file of the bundle, relative to the bundle, with `/` between folders."""

ModelName = Annotated[FileName, StringConstraints(pattern=r"\.onnx$")]
"""The name of an ONNX file of the bundle."""

OF_PACKAGES = "targets"
"""The folder of a bundle in which each target of another package has one."""

TargetFile = Annotated[FileName, StringConstraints(pattern=rf"\.onnx$|^{OF_PACKAGES}/[^/]+/[^/]+$")]
"""The name of a file that a target runs: an ONNX file, or any one in the folder of a target of another package."""

Expression = Annotated[str, StringConstraints(max_length=LONGEST_SIZE), AfterValidator(_plain)]
"""A symbol, or an expression of symbols."""

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
DType = Annotated[str, _one_of("dtype", DTYPES)]
PrecisionName = Annotated[str, _one_of("precision", tuple(PRECISIONS))]
Size = Annotated[int, Field(ge=0, le=LARGEST_SIZE)]
Count = Annotated[int, Field(ge=0)]
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Seconds = Annotated[float, Field(ge=0, le=LARGEST_SIZE)]
Positive = Annotated[float, Field(ge=0)]
Threads = Annotated[int, Field(ge=1, le=MOST_THREADS)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]
