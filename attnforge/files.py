"""Files written whole or not at all, and their sha256."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

from attnforge import scratch
from attnforge.errors import BundleError, UsageError, first_line, shortened


def sha256(file: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal.

    Raises:
        OSError: it cannot be read, or is no regular file.
    """
    with open_regular(file, follow=True) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def names_in(folder: Path) -> list[str]:
    """The names of all files and links below a folder, sorted."""
    files = (file for file in folder.rglob("*") if file.is_symlink() or not file.is_dir())
    return sorted(file.relative_to(folder).as_posix() for file in files)


_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


def open_regular(file: Path, *, follow: bool = False) -> BufferedReader:
    """Open a regular file to read it: no pipe, which would wait for a writer, and no device.

    Args:
        file: to open.
        follow: whether `file` itself may be a link.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    return _regular(os.open(file, _FLAGS | (0 if follow else os.O_NOFOLLOW)), file)


def open_inside(folder: Path, name: str) -> BufferedReader:
    """Open a regular file below a folder, following no link on the way, whatever happens to the folder meanwhile.

    Args:
        folder: may be a link itself.
        name: relative to it, without `..`.

    Raises:
        OSError: it cannot be opened, is no regular file, or a part of the way is a link.
    """
    *way, last = PurePosixPath(name).parts
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in way:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=here)
            os.close(here)
            here = below
        return _regular(os.open(last, _FLAGS | os.O_NOFOLLOW, dir_fd=here), folder / name)
    finally:
        os.close(here)


def _regular(number: int, file: Path) -> BufferedReader:
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "it is no regular file", str(file))
    return open(number, "rb")


def is_own(about: os.stat_result) -> bool:
    """Whether a file or folder is the user's, or root's, and nobody else may write to it."""
    return about.st_uid in (os.getuid(), 0) and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


Identity = tuple[int, ...]
"""What changes wherever a file or folder is replaced, altered or moved: compare two of them."""


def identity(about: os.stat_result) -> Identity:
    """The identity of a file or folder by its status."""
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


def write_whole(file: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file under a temporary name beside it and rename it, so that a reader sees the old file or the new one.

    Args:
        file: to write; its folder must exist.
        data: its content.
        mode: its permissions.

    Raises:
        OSError: the folder cannot be written to; no temporary file is left.
    """
    with written_whole(file, mode) as stream:
        stream.write(data)


@contextmanager
def written_whole(file: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
    """A stream whose content becomes a file where the block ends, and is gone where it raises.

    Args:
        file: to write; its folder must exist.
        mode: its permissions.

    Raises:
        OSError: the folder cannot be written to, its disk is full, or `file` is a device, a pipe or a socket; no
            temporary file is left.
    """
    prefix = f".{file.name[:200]}."
    scratch.sweep(file.parent, prefix, _SUFFIX)
    with (
        _named_when_full(file),
        tempfile.NamedTemporaryFile(dir=file.parent, prefix=prefix, suffix=_SUFFIX, delete=False) as stream,
    ):
        temporary = Path(stream.name)
        scratch.hold(stream.fileno())
        try:
            yield cast(BinaryIO, stream)
            stream.flush()
            temporary.chmod(mode)
            _check_replaceable(file)
            os.replace(temporary, file)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


_SUFFIX = ".unfinished"


def _check_replaceable(file: Path) -> None:
    """Raise an OSError for what a rename would remove, at the end of a link as well: a device, a pipe or a socket."""
    if file.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    if file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(file))


def check_writable(file: Path) -> None:
    """Check that a file can be written, before the work whose result it is to hold. Nothing is left behind.

    Args:
        file: in a folder that is there, or can be made.

    Raises:
        UsageError: its folder cannot be made or written to, it is a folder, a device, a pipe or a socket itself, or its
            name is none.
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
        raise UsageError(f"{shortened(str(file))} cannot be written: {why}; choose another place") from error


def exchange(one: Path, other: Path) -> bool:
    """Let two paths exchange what they lead to, at one instant.

    Returns:
        whether it was done; the system or the file system may not know how.

    Raises:
        OSError: it cannot be done, whoever asks.
    """
    return _renamed(one, other, _EXCHANGE)


def rename_new(old: Path, new: Path) -> None:
    """Rename a folder to a name that nothing has.

    Raises:
        FileExistsError: something has that name.
        OSError: it cannot be renamed.
    """
    if not _renamed(old, new, _NO_REPLACE):
        if os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
        os.rename(old, new)  # over what appears just now: an empty folder at most


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
    kind = FileExistsError if number == errno.EEXIST else OSError
    raise kind(number, os.strerror(number), str(old), None, str(new))


def give_modes(folder: Path) -> None:
    """Give a folder and all that is in it the permissions that new files and folders of this user have: libraries, and
    what makes temporary ones, make them for this user alone."""
    mask = _umask()
    for place, _, files in os.walk(folder):
        for name in files:
            if not os.path.islink(file := os.path.join(place, name)):
                os.chmod(file, 0o666 & ~mask)
        os.chmod(place, 0o777 & ~mask)


def _umask() -> int:
    """The user's mask of permissions, which Linux tells without changing it."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


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


@contextmanager
def told_when_full(folder: Path) -> Iterator[None]:
    """A block that writes to a new place on the disk of a folder, and whose errors say so where that disk is full.

    Raises:
        BundleError: the disk is full.
    """
    try:
        yield
    except Exception as error:
        if is_full(folder, error):
            raise BundleError(
                f"the disk of {folder} is full, or its quota is; nothing was written; {_room_text(folder)}"
            ) from error
        raise


@contextmanager
def new_folder(target: Path, put: Callable[[Path], object], parent: Path | None = None) -> Iterator[Path]:
    """A temporary folder that is put to its place where the block ends, or else removed.

    Args:
        target: the place.
        put: moves the temporary folder, or what is in it, to its place.
        parent: folder to make the temporary one in; by default the one that `target` is in.

    Raises:
        UsageError: it cannot be written.
        BundleError: the disk is full.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = scratch.Scratch(parent or target.parent, f".{target.name}.", ".partial")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise UsageError(f"{shortened(str(target))} cannot be written: {why}; choose another folder") from error
    try:
        with told_when_full(target.parent):
            yield temporary.path
            give_modes(temporary.path)
            put(temporary.path)
    finally:
        temporary.remove()


@contextmanager
def _named_when_full(file: Path) -> Iterator[None]:
    """A block that writes to a stream, whose errors of a full disk name no file; here they name this one."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise OSError(error.errno, f"{error.strerror}; {_room_text(file.parent)}", str(file)) from error
        raise


def _room_text(folder: Path) -> str:
    """What to do about a full disk, and how much is free: where that is much, a quota or limit was reached."""
    free = shutil.disk_usage(folder).free / 2**20
    return f"make room ({free:,.1f} MiB are free), raise your quota or file-size limit, or choose another folder"
