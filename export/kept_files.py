"""Files of a model that its bundle keeps: the tokenizer of texts, and the image processor."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from attnforge.bundle import PROCESSOR, TOKENIZER
from attnforge.errors import UsageError, first_line


def keep_tokenizer(file: str | os.PathLike[str], folder: Path) -> None:
    """Copy a tokenizer to the folder of a bundle.

    Raises:
        UsageError: the file does not exist, or is not a tokenizer of the `tokenizers` library.
    """
    if "model" not in _object(file, "a tokenizer", "a tokenizer.json of the tokenizers library"):
        raise UsageError(f"{os.fspath(file)} contains no tokenizer model; give a tokenizer.json")
    shutil.copyfile(file, folder / TOKENIZER)


def keep_processor(file: str | os.PathLike[str], folder: Path) -> None:
    """Copy the settings of an image processor to the folder of a bundle.

    Raises:
        UsageError: the file does not exist, or contains no JSON object.
    """
    _object(file, "an image processor", f"a {PROCESSOR} of transformers")
    shutil.copyfile(file, folder / PROCESSOR)


def _object(file: str | os.PathLike[str], kind: str, advice: str) -> dict[str, object]:
    try:
        content = json.loads(Path(file).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{os.fspath(file)} is not {kind} ({first_line(error)}); give {advice}") from error
    return content if isinstance(content, dict) else {}
