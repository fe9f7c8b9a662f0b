"""Temporary files and folders that do not stay behind for long: a process that is killed cannot clean up, so the next
one that writes to the same place does.

Who makes one holds a lock on it for as long as it is in use, which the kernel releases however the process ends. One
of this user's whose name says that it is temporary, and that nobody holds, is stale.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Scratch:
    """An empty folder, made and held by this process until it is released.

    Args:
        parent: folder to make it in.
        prefix: of its name.
        suffix: of its name; one with the same prefix and suffix is swept where it is stale.

    Attributes:
        path: the folder.
    """

    def __init__(self, parent: Path, prefix: str, suffix: str) -> None:
        sweep(parent, prefix, suffix)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=parent))
            self._lock = _lock(self.path, wait=True)
            # A sweep may have removed the folder before it was opened, or before it was locked.
            if self.path.exists() if self._lock is None else _is(self.path, self._lock):
                break
            self.release()

    def release(self) -> None:
        """Hold the folder no more; it stays where it is."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def remove(self) -> None:
        """Remove what stands at the folder's path now, and hold it no more."""
        remove(self.path)
        self.release()


@contextmanager
def temporary_folder(prefix: str = "attnforge-") -> Iterator[Path]:
    """A folder in the system's place for temporary ones, removed where the block ends, or by a later process where this
    one is killed.

    Args:
        prefix: of its name.
    """
    scratch = Scratch(Path(tempfile.gettempdir()), prefix, SUFFIX)
    try:
        yield scratch.path
    finally:
        scratch.remove()


SUFFIX = ".scratch"


def sweep(parent: Path, prefix: str, suffix: str) -> None:
    """Remove the stale files and folders of a place, by their names.

    Args:
        parent: folder that they are in.
        prefix, suffix: of their names.
    """
    with suppress(OSError):
        with os.scandir(parent) as entries:
            names = [e.name for e in entries if e.name.startswith(prefix) and e.name.endswith(suffix)]
        for name in names:
            path = parent / name
            with suppress(OSError):
                if os.lstat(path).st_uid == os.getuid() and (lock := _lock(path, wait=False)) is not None:
                    try:
                        if _is(path, lock):
                            remove(path)
                    finally:
                        os.close(lock)


def remove(path: Path) -> None:
    """Remove a file or a folder with all that is in it, folders that are read-only as well; what cannot be removed
    stays."""
    if not path.is_dir() or path.is_symlink():
        with suppress(OSError):
            path.unlink()
        return

    def again(function: object, name: str, error: object) -> None:
        with suppress(OSError):
            for folder in (Path(name).parent, Path(name)):
                if folder.is_dir() and not folder.is_symlink() and folder.is_relative_to(path):
                    folder.chmod(0o700)
            shutil.rmtree(name, ignore_errors=True) if Path(name).is_dir() else os.unlink(name)

    if not os.access(path, os.W_OK | os.X_OK):
        with suppress(OSError):
            path.chmod(0o700)
    shutil.rmtree(path, onerror=again)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A block that no two processes are in at once for one folder, where the file system has locks.

    Args:
        folder: that the block changes.
    """
    lock = _lock(folder.resolve(), wait=True)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def hold(number: int) -> None:
    """Hold a file that this process has open, so that nobody takes it for stale.

    Args:
        number: of the open file.
    """
    with suppress(OSError):
        fcntl.flock(number, fcntl.LOCK_EX)


def _lock(path: Path, wait: bool) -> int | None:
    """An open file that holds a lock on a file or folder; None where that cannot be had."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # somebody holds it, or this file system has no locks
        os.close(number)
        return None
    return number


def _is(path: Path, number: int) -> bool:
    """Whether a path still leads to the file that is open."""
    try:
        there, held = os.lstat(path), os.fstat(number)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino) and not stat.S_ISLNK(there.st_mode)
