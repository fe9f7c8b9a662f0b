"""Options shared by several commands, and parsers of their values."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from attnforge.errors import UsageError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
BundleArgument = Annotated[Path, typer.Argument(help="Bundle folder.", show_default=False)]
Backend = Annotated[str, typer.Option("--backend", "-b", help="Backend by name, or auto.")]
Backends = Annotated[list[str] | None, typer.Option("--backend", "-b", help="Backend by name; repeatable.")]
Options = Annotated[list[str] | None, typer.Option("--option", "-o", help="Model option, as name=value; repeatable.")]
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
    """Parse texts like `num_layers=6` into values by name.

    Raises:
        UsageError: a text has no equals sign.
    """
    split = [text.partition("=") for text in texts or ()]
    for name, equals, _ in split:
        if not equals:
            raise UsageError(f"{name!r} is not an option; write name=value")
    return {name: value for name, _, value in split}


def ranges(texts: Iterable[str] | None, flag: str) -> dict[str, tuple[int, int, int]]:
    """Parse texts like `tokens=1:128:512` into minimum, optimum and maximum size by dim.

    Raises:
        UsageError: a text has another form; the message names the flag.
    """
    sizes = {}
    for name, text in pairs(texts).items():
        bounds = text.split(":")
        if len(bounds) != 3 or not all(bound.isdecimal() for bound in bounds):
            raise UsageError(f"the range of {name} is {text!r}; write {flag} {name}=min:opt:max, as 1:128:512")
        sizes[name] = (int(bounds[0]), int(bounds[1]), int(bounds[2]))
    return sizes


def sizes(text: str) -> dict[str, int]:
    """Parse a text like `batch=1,tokens=128` into sizes by dim.

    Raises:
        UsageError: the text has another form.
    """
    values = pairs(text.split(","))
    for name, value in values.items():
        if not value.isdecimal():
            raise UsageError(f"size {name} is {value!r}; give a number")
    return {name: int(value) for name, value in values.items()}


def whole_numbers(text: str, flag: str) -> list[int]:
    """Parse comma-separated whole numbers such as `1,2,3`.

    Raises:
        UsageError: an item is not a whole number; the message names the flag.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if wrong := [part for part in parts if not part.isdecimal() or len(part) > 18]:
        raise UsageError(f"{flag} has {wrong[0][:40]!r}; give whole numbers with commas between them, as 1,2,3")
    return [int(part) for part in parts]


def archives(paths: Iterable[Path]) -> list[Path]:
    """Return the files of real inputs: the .npz files, .txt files of texts, pictures and folders of pictures given, and
    all .npz files in the folders given, sorted by name.

    Raises:
        UsageError: a path is none of these.
    """
    from attnforge.pictures import pictures_of

    files: list[Path] = []
    for path in paths:
        inputs = sorted(path.glob("*.npz"))
        if not inputs and (pictures_of(path) or (path.suffix in (".npz", ".txt") and path.is_file())):
            inputs = [path]
        if not inputs:
            raise UsageError(
                f"{path} has no real inputs; give an .npz with every input by name, a .txt file with a text on each "
                "line, a picture, or a folder of .npz files or pictures"
            )
        files += inputs
    return files
