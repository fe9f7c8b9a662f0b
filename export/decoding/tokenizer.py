"""The tokenizer in the bundle of a decoder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from attnforge.bundle import TOKENIZER
from attnforge.errors import UsageError, first_line


def keep_tokenizer(file: str | os.PathLike[str], folder: Path) -> str:
    """Copy a tokenizer to the folder of a bundle, and return its name there.

    Raises:
        UsageError: the file does not exist, or is not a tokenizer of the `tokenizers` library.
    """
    try:
        content = json.loads(Path(file).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{os.fspath(file)} is not a tokenizer ({first_line(error)}); give a tokenizer.json of the tokenizers "
            "library"
        ) from error
    if not isinstance(content, dict) or "model" not in content:
        raise UsageError(f"{os.fspath(file)} contains no tokenizer model; give a tokenizer.json")
    shutil.copyfile(file, folder / TOKENIZER)
    return TOKENIZER
