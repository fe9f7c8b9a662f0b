"""Files of a model that its bundle keeps: the tokenizer of texts, and the image processor."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

from attnforge.bundle import PROCESSOR
from attnforge.errors import UsageError, first_line

log = logging.getLogger("attnforge")


def check_tokenizer(file: str | os.PathLike[str]) -> None:
    """Check that a file is a tokenizer.

    Raises:
        UsageError: the file does not exist, or is not a tokenizer of the `tokenizers` library.
    """
    if "model" not in _object(file, "a tokenizer", "a tokenizer.json of the tokenizers library"):
        raise UsageError(f"{os.fspath(file)} contains no tokenizer model; give a tokenizer.json")


def check_processor(file: str | os.PathLike[str]) -> None:
    """Check that a file has the settings of an image processor.

    Raises:
        UsageError: the file does not exist, or contains no JSON object that names a processor.
    """
    content = _object(file, "an image processor", f"a {PROCESSOR} of transformers")
    if content.keys().isdisjoint(names := ("image_processor_type", "feature_extractor_type")):
        raise UsageError(f"{os.fspath(file)} has no {' or '.join(names)}; give a {PROCESSOR} of transformers")


def usable(file: Path | None, check: Callable[[Path], None]) -> Path | None:
    """A file that was found in a model's folder; None, with a warning, if it is not one that can be kept.

    Args:
        file: the file, if there is one.
        check: raises a UsageError if it cannot.
    """
    if file is None:
        return None
    try:
        _check_own(file)
        check(file)
    except UsageError as error:
        log.warning("the bundle keeps no %s: %s", file.name, error)
        return None
    return file


def _check_own(file: Path) -> None:
    """Check that a file is one of its folder, or of the hub's cache that the folder is part of, and not a link to
    another file, which a model from elsewhere could take into the bundle."""
    folder, target = file.parent.resolve(), file.resolve()
    blobs = [folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else []
    if not any(map(target.is_relative_to, [folder, *blobs])):
        raise UsageError(f"{file} is a link to a file outside its folder; give that file by name, or copy it")


def _object(file: str | os.PathLike[str], kind: str, advice: str) -> dict[str, object]:
    try:
        content = json.loads(Path(file).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{os.fspath(file)} is not {kind} ({first_line(error)}); give {advice}") from error
    return content if isinstance(content, dict) else {}
