"""Options that several commands take, and how their texts are read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from attnforge.atomic import check_writable
from attnforge.errors import UsageError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
BundleArgument = Annotated[Path, typer.Argument(help="Bundle folder.", show_default=False)]
Backend = Annotated[str, typer.Option("--backend", "-b", help="auto, or a backend by name.")]
Backends = Annotated[list[str] | None, typer.Option("--backend", "-b", help="Backend by name; repeatable.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing output.")]

TrustedKeys = Annotated[
    list[Path] | None,
    typer.Option(
        "--trusted",
        metavar="KEY",
        help="Public key that must have signed the bundle; repeatable (default: those of ATTNFORGE_TRUSTED).",
    ),
]


def pairs(texts: Iterable[str] | None) -> dict[str, str]:
    """Names and values of texts like `num_layers=6`.

    Raises:
        UsageError: a text without an equals sign.
    """
    split = [text.partition("=") for text in texts or ()]
    for name, equals, _ in split:
        if not equals:
            raise UsageError(f"{name!r} is no option; write name=value")
    return {name: value for name, _, value in split}


def ranges(texts: Iterable[str] | None, flag: str) -> dict[str, tuple[int, int, int]]:
    """Least, usual and largest size by dim, of texts like `tokens=1:128:512`.

    Raises:
        UsageError: a text of another form; the message names the flag.
    """
    sizes = {}
    for name, text in pairs(texts).items():
        bounds = text.split(":")
        if len(bounds) != 3 or not all(bound.isdecimal() for bound in bounds):
            raise UsageError(f"the range of {name} is {text!r}; write {flag} {name}=min:opt:max, as 1:128:512")
        sizes[name] = (int(bounds[0]), int(bounds[1]), int(bounds[2]))
    return sizes


def sizes(text: str) -> dict[str, int]:
    """Sizes by dim, of a text like `batch=1,tokens=128`.

    Raises:
        UsageError: a text of another form.
    """
    values = pairs(text.split(","))
    for name, value in values.items():
        if not value.isdecimal():
            raise UsageError(f"size {name} is {value!r}; give a number")
    return {name: int(value) for name, value in values.items()}


def whole_numbers(text: str, flag: str) -> list[int]:
    """Whole numbers, given with commas between them, as `1,2,3`.

    Raises:
        UsageError: one is none; the message names the flag.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if wrong := [part for part in parts if not part.isdecimal() or len(part) > 18]:
        raise UsageError(f"{flag} has {wrong[0][:40]!r}; give whole numbers with commas between them, as 1,2,3")
    return [int(part) for part in parts]


def archives(paths: Iterable[Path]) -> list[Path]:
    """Files of real inputs: those named, and all `.npz` of the folders named, in the order of their names.

    Raises:
        UsageError: a path that is neither, or a folder without any.
    """
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob("*.npz")) if path.is_dir() else [path]
        if not found or any(file.suffix != ".npz" or not file.is_file() for file in found):
            raise UsageError(f"{path} holds no real inputs; give an .npz with every input by name, or a folder of such")
        files += found
    return files


def check_unwritten(file: Path | None, force: bool) -> None:
    """Check that a file can be written before the work whose result it holds.

    Raises:
        UsageError: the file exists and `force` is not given, or it cannot be written.
    """
    if file is not None:
        check_writable(file, force)
