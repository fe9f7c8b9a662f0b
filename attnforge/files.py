"""Safe reading of files: only regular files, reached without following links, and their sha256."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from io import BufferedReader
from pathlib import Path, PurePosixPath


def sha256(file: Path) -> str:
    """Return the sha256 of a file's bytes, in hexadecimal.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    with open_regular(file, follow=True) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def names_in(folder: Path) -> list[str]:
    """Return the names of all files and links below a folder, sorted."""
    files = (file for file in folder.rglob("*") if file.is_symlink() or not file.is_dir())
    return sorted(file.relative_to(folder).as_posix() for file in files)


_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


def open_regular(file: Path, *, follow: bool = False) -> BufferedReader:
    """Open a regular file for reading; a pipe, which would wait for a writer, or a device is refused.

    Args:
        file: path of the file.
        follow: whether `file` itself may be a link.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    return _regular(os.open(file, _FLAGS | (0 if follow else os.O_NOFOLLOW)), file)


def open_inside(folder: Path, name: str) -> BufferedReader:
    """Open a regular file below a folder without following links, whatever happens to the folder meanwhile.

    Args:
        folder: may be a link itself.
        name: path relative to it, without `..`.

    Raises:
        OSError: it cannot be opened, is not a regular file, or a part of the path is a link.
    """
    *parents, last = PurePosixPath(name).parts
    current = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parents:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=current)
            os.close(current)
            current = below
        return _regular(os.open(last, _FLAGS | os.O_NOFOLLOW, dir_fd=current), folder / name)
    finally:
        os.close(current)


def _regular(number: int, file: Path) -> BufferedReader:
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "it is not a regular file", str(file))
    return open(number, "rb")


def is_own(about: os.stat_result) -> bool:
    """Whether a file or folder belongs to the user or root, and nobody else may write to it."""
    return about.st_uid in (os.getuid(), 0) and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


Identity = tuple[int, ...]
"""Status of a file or folder that changes when it is replaced, altered or moved."""


def identity(about: os.stat_result) -> Identity:
    """Return the identity of a file or folder from its status."""
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns
