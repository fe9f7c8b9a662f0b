"""Files written whole or not at all, and their sha256."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path


def sha256(file: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_whole(file: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file under a temporary name beside it and rename it, so that a reader sees the old file or the new one.

    Args:
        file: to write; its folder must exist.
        data: its content.
        mode: its permissions.

    Raises:
        OSError: the folder cannot be written to; no temporary file is left.
    """
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.", delete=False) as stream:
        temporary = Path(stream.name)
        try:
            stream.write(data)
            stream.close()
            temporary.chmod(mode)
            os.replace(temporary, file)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
