"""Atomic writing of files and folders, and temporary ones that are cleaned up later: a killed process cannot clean up,
so the next one that writes to the same folder does.

The process that makes a temporary file or folder keeps a lock on it while it is in use; the kernel releases the lock
however the process ends. A temporary name of this user's without a lock is stale.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from attnforge.errors import BundleError, UsageError, first_line, shortened

# --- temporary files and folders --------------------------------------------------------------------------------------


@contextmanager
def scratch(parent: Path, prefix: str, suffix: str) -> Iterator[Path]:
    """An empty folder, locked by this process. At the end of the block, whatever is at its path then is removed.

    Args:
        parent: folder to create it in.
        prefix: prefix of its name.
        suffix: suffix of its name. Stale folders with the same prefix and suffix are removed.
    """
    sweep(parent, prefix, suffix)
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=parent))
        with locked(path) as lock:
            # Another process's sweep may have removed the folder before it was opened or locked.
            if path.exists() if lock is None else _is(path, lock):
                try:
                    yield path
                finally:
                    remove(path)
                return


def temporary_folder() -> AbstractContextManager[Path]:
    """Return a context with a folder in the system's temporary directory, removed at the end of its block, or by a
    later process if this one is killed."""
    return scratch(Path(tempfile.gettempdir()), "attnforge-", ".scratch")


def sweep(parent: Path, prefix: str, suffix: str) -> None:
    """Remove stale files and folders by name.

    Args:
        parent: folder to search.
        prefix, suffix: of their names.
    """
    for path in parent.glob(f"{glob.escape(prefix)}*{glob.escape(suffix)}"):
        with suppress(OSError):
            if os.lstat(path).st_uid == os.getuid():
                with locked(path, wait=False) as lock:
                    if lock is not None and _is(path, lock):
                        remove(path)


def remove(path: Path) -> None:
    """Remove a file, or a folder and its contents, read-only folders included; what cannot be removed stays."""
    if not path.is_dir() or path.is_symlink():
        with suppress(OSError):
            path.unlink()
        return

    with suppress(OSError):
        path.chmod(0o700)
    for parent, folders, _ in os.walk(path):  # top down: a folder is made writable before it is listed
        for folder in (Path(parent, name) for name in folders):
            if not folder.is_symlink():
                with suppress(OSError):
                    folder.chmod(0o700)
    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[int | None]:
    """A block in which this process has the lock on a file or folder, whose number as an open file it receives; None if
    it cannot be locked.

    Args:
        path: the file or folder, not a link.
        wait: whether to wait for another process that has the lock.
    """
    with ExitStack() as stack:
        number = None
        with suppress(OSError):  # it cannot be opened, another process has the lock, or the file system has no locks
            opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            stack.callback(os.close, opened)
            fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            number = opened
        yield number


def _is(path: Path, number: int) -> bool:
    """Whether a path still refers to the open file."""
    with suppress(OSError):
        return os.path.samestat(os.lstat(path), os.fstat(number))
    return False


# --- atomic writing ----------------------------------------------------------------------------------------------


def write_whole(file: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file in a temporary folder next to it and rename it, so that readers see the old file or the new
    one.

    Args:
        file: path of the file; its folder must exist.
        data: its content.
        mode: its permissions.

    Raises:
        OSError: the folder cannot be written to; no temporary file is left.
    """
    with written_whole(file, mode) as stream:
        stream.write(data)


@contextmanager
def written_whole(file: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
    """A stream whose content becomes the file at the end of the block, or is discarded if the block raises.

    Args:
        file: path of the file; its folder must exist.
        mode: its permissions.

    Raises:
        OSError: the folder cannot be written to, its disk is full, or `file` is a device, a pipe or a socket; no
            temporary file is left.
    """
    try:
        with scratch(file.parent, f".{file.name[:200]}.", _SUFFIX) as folder:
            temporary = folder / "file"
            with temporary.open("wb") as stream:
                yield stream
            temporary.chmod(mode)
            _check_replaceable(file)
            os.replace(temporary, file)
    except OSError as error:
        if error.errno in FULL:  # such an error names no file
            raise OSError(error.errno, f"{error.strerror}; {_room_text(file.parent)}", str(file)) from error
        raise


_SUFFIX = ".unfinished"


def _check_replaceable(file: Path) -> None:
    """Raise an OSError for a folder, device, pipe or socket, also at the end of a link: a rename would replace it."""
    if file.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    if file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(file))


def check_writable(file: Path, force: bool = True, flag: str = "--out") -> None:
    """Check that a file can be written, before the work that produces its content. Leaves no file.

    Args:
        file: path in a folder that exists or can be made.
        force: whether an existing file may be overwritten.
        flag: option that names the file, for the message.

    Raises:
        UsageError: its folder cannot be made or written to; it is a folder, a device, a pipe or a socket; its name is
            invalid; or it exists and `force` is False.
    """
    try:
        _check_replaceable(file)
        folder = next(parent for parent in file.absolute().parents if parent.exists())
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        with tempfile.TemporaryDirectory(dir=folder, prefix=".", suffix=_SUFFIX) as probe:
            Path(probe, file.name).touch()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UsageError(f"{shortened(str(file))} cannot be written: {why}; choose another file") from error
    if file.exists() and not force:
        raise UsageError(f"{file} exists; choose another file with {flag}, or overwrite it with --force (force=True)")


def exchange(first: Path, second: Path) -> bool:
    """Exchange two paths atomically.

    Returns:
        whether it was done; False if the system or the file system does not support it.

    Raises:
        OSError: the exchange failed.
    """
    return _renamed(first, second, _EXCHANGE)


def rename_new(old: Path, new: Path) -> None:
    """Rename a folder to a new name, without replacing anything.

    Raises:
        FileExistsError: the name exists.
        OSError: it cannot be renamed.
    """
    if not _renamed(old, new, _NO_REPLACE):
        if os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
        os.rename(old, new)  # replaces at most an empty folder that appears just now


_NO_REPLACE, _EXCHANGE = 1, 2  # RENAME_NOREPLACE and RENAME_EXCHANGE of Linux
_AT_CWD = -100


def _renamed(old: Path, new: Path, how: int) -> bool:
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):  # another system, or an older C library
        return False
    if rename(_AT_CWD, os.fsencode(old), _AT_CWD, os.fsencode(new), how) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(old), None, str(new))  # of EEXIST, a FileExistsError


def give_modes(folder: Path) -> None:
    """Give a folder and its contents the permissions of new files and folders of this user; temporary folders, and
    some libraries' files, are private to the user."""
    probe = folder / ".permissions"
    probe.mkdir()
    mode = probe.stat().st_mode & 0o777
    probe.rmdir()
    for parent, _, files in os.walk(folder):
        for name in files:
            if not os.path.islink(file := os.path.join(parent, name)):
                os.chmod(file, mode & 0o666)
        os.chmod(parent, mode)


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, an exhausted quota, and the file-size limit."""

LEAST_FREE = 2**20
"""A disk with fewer free bytes counts as full, because errors of libraries that write files may not say so."""


def is_full(folder: Path, error: BaseException | None = None) -> bool:
    """Whether the disk of a folder is full, by an error or its causes, or by its free space."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        error = error.__cause__ or error.__context__
    return shutil.disk_usage(folder).free < LEAST_FREE


@contextmanager
def new_folder(target: Path, put: Callable[[Path], object] | None = None, parent: Path | None = None) -> Iterator[Path]:
    """A temporary folder that becomes `target` at the end of the block, or is removed if the block raises.

    Args:
        target: path of the final folder.
        put: moves the temporary folder, or its contents, to the target; by default it is renamed, and `target` must not
            exist.
        parent: folder to make the temporary one in; by default the one that `target` is in.

    Raises:
        UsageError: it cannot be written, or something appeared there meanwhile.
        BundleError: the disk is full.
    """
    with ExitStack() as stack:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(scratch(parent or target.parent, f".{target.name}.", ".partial"))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or first_line(error)
            raise UsageError(f"{shortened(str(target))} cannot be written: {why}; choose another folder") from error
        try:
            yield folder
            give_modes(folder)
            try:
                (put or partial(rename_new, new=target))(folder)
            except FileExistsError as error:
                name = error.filename2 or error.filename
                raise UsageError(f"{name} appeared meanwhile and is left unchanged") from error
        except Exception as error:
            if is_full(target.parent, error):
                raise BundleError(
                    f"the disk of {target.parent} is full, or its quota is; nothing was written; "
                    f"{_room_text(target.parent)}"
                ) from error
            raise


def _room_text(folder: Path) -> str:
    """Say what to do about a full disk, and how much is free: if that is much, a quota or limit was reached."""
    free = shutil.disk_usage(folder).free / 2**20
    return f"make room ({free:,.1f} MiB are free), raise your quota or file-size limit, or choose another folder"
