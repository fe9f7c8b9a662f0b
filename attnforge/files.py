"""Files written whole or not at all, and their sha256."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
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


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The numbers of errors of a disk that takes no more: it is full, or the user's quota or limit of a file's size is."""

LEAST_FREE = 2**20
"""Bytes; a disk with fewer is full. Libraries that write by themselves say what went wrong in words of their own."""


def is_full(folder: Path, error: BaseException | None = None) -> bool:
    """Whether the disk of a folder takes no more, by an error or its causes, or by what is free."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        error = error.__cause__ or error.__context__
    return shutil.disk_usage(folder).free < LEAST_FREE
