"""Caches of expensive results, and the user's key, by which attnforge recognises files that this user wrote.

The cache of the bundle NAME is the folder `NAME.cache` next to it: kernels that TensorRT compiled and timings that it
measured, kept for the next start. A file's name states what it is valid for: the builder, its version, the device and,
for kernels, the plan. Kernels are executable content, so a file is read only if no other user may write to it and this
user wrote it: each ends with its HMAC by the user's key, wherever the folder was copied from.

The cache of deploys keeps expensive results (TensorRT plans, reference outputs, measurements) for the next deploy of
the same model. Every entry is a folder whose name is the sha256 of all that decides its content, so no entry is ever
out of date. An entry is read only if each of its files has the sha256 recorded when it was written and only its owner
may write to it: plans are executable content. Nothing is unpickled.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from attnforge.atomic import locked, scratch, write_whole
from attnforge.files import is_own, open_inside, open_regular, sha256

log = logging.getLogger("attnforge")


def _are_own(path: Path, *about: os.stat_result) -> bool:
    """Whether the files on the way to `path` belong to the user or root, and nobody else may write to them; if not, log
    it."""
    if all(map(is_own, about)):
        return True
    log.warning("%s is not read because others may write to it; delete it or remove that permission", path)
    return False


# --- the user's key ---------------------------------------------------------------------------------------------------
# Files that can run code (TensorRT's plans and kernels) are stored with an HMAC by a key that only this user can read.
# Nobody else can make that code, and nobody else needs to: it tells users which files they made themselves.

LENGTH = 32
"""Bytes of a key, and of a code (HMAC-SHA256)."""


def code_of(name: str, data: bytes) -> bytes:
    """Return the user's code of `data` under a name that states its purpose; codes of different names differ.

    Raises:
        OSError: the key cannot be stored, or others could read or write it.
    """
    return hmac.digest(_key(), name.encode() + b"\0" + data, "sha256")


def is_made_by_user(name: str, data: bytes, code: bytes) -> bool:
    """Whether `code` is the user's code of `data` under that name; False if the user has no trustworthy key."""
    try:
        return hmac.compare_digest(code, code_of(name, data))
    except OSError:
        return False


def _key() -> bytes:
    """Return the user's key, created at first use.

    Raises:
        OSError: it cannot be stored, or others could read or write it.
    """
    file = Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")) / "attnforge/cache.key"
    if not file.exists():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(file.parent.resolve()):  # another process may be creating it
            if not file.exists():
                write_whole(file, secrets.token_bytes(LENGTH), mode=0o600)
    with open_regular(file) as stream:
        about = os.fstat(stream.fileno())
        key = stream.read(LENGTH + 1)
    if len(key) != LENGTH or not is_own(about) or about.st_mode & 0o077:
        raise OSError(errno.EPERM, "it is not private to this user; delete it", str(file))
    return key


# --- the cache of a bundle --------------------------------------------------------------------------------------------


def runtime_cache_file(bundle: Path, version: str, device: str, plan_sha256: str) -> Path:
    """Return the path of the kernels that TensorRT-RTX compiled.

    Args:
        bundle: the bundle's folder.
        version: version of TensorRT-RTX.
        device: name of the CUDA device.
        plan_sha256: sha256 of the plan that the kernels belong to.
    """
    return cache_folder(bundle) / f"tensorrt_rtx-{version}-{_plain(device)}-{plan_sha256[:16]}.kernels"


def timing_cache_file(bundle: Path, version: str, device: str) -> Path:
    """Return the path of the timings that TensorRT measured.

    Args:
        bundle: the bundle's folder.
        version: version of TensorRT.
        device: name of the CUDA device.
    """
    return cache_folder(bundle) / f"tensorrt-{version}-{_plain(device)}.timings"


def cache_folder(bundle: Path) -> Path:
    """Return the path of a bundle's cache."""
    folder = bundle.resolve()
    return folder.with_name(f"{folder.name}.cache")


def read(file: Path) -> bytes | None:
    """Return the bytes of a file of the cache. Return None if it does not exist, if it or its folder is a link, if
    anyone but its owner may write to it or its folder, or if this user did not write it. The checks are made on the
    opened file."""
    try:
        with open_inside(file.parent.parent, f"{file.parent.name}/{file.name}") as stream:
            if not _are_own(file, os.lstat(file.parent), os.fstat(stream.fileno())):
                return None
            content = stream.read()
    except OSError:
        return None
    data, code = content[:-LENGTH], content[-LENGTH:]
    if not is_made_by_user(file.name, data, code):
        log.info("%s is not read because this user did not write it", file)
        return None
    return data


def write(file: Path, data: bytes) -> bool:
    """Write a file of the cache atomically.

    Returns:
        Whether it was written; if not, the log says why.
    """
    try:
        file.parent.mkdir(exist_ok=True, mode=0o700)
        if file.parent.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(file.parent))
        write_whole(file, data + code_of(file.name, data), mode=0o600)
    except OSError as error:
        log.info("nothing is kept in the cache %s: %s", file.parent, error)
        return False
    return True


def own_folder(bundle: Path, name: str) -> Path | None:
    """Return a folder of the cache for a library that reads and writes files itself; None if none can be trusted.

    Its name ends with a code that only this user can make, so a folder that came with a bundle is never used.

    Args:
        bundle: the bundle's folder.
        name: name of the library.
    """
    cache = cache_folder(bundle)
    try:
        folder = cache / f"{name}-{code_of(name, os.fsencode(cache))[:8].hex()}"
        cache.mkdir(exist_ok=True, mode=0o700)
        folder.mkdir(exist_ok=True, mode=0o700)
        if not all(is_own(os.lstat(part)) and not part.is_symlink() for part in (cache, folder)):
            raise OSError(errno.EPERM, "others may write to it", str(folder))
    except OSError as error:
        log.info("nothing is kept in the cache %s: %s", cache, error)
        return None
    return folder


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-").lower()


# --- the cache of deploys ---------------------------------------------------------------------------------------------

VARIABLE = "ATTNFORGE_CACHE"
"""Environment variable: the cache's folder, or `off`."""

LIMIT = 4 * 2**30
"""Maximum bytes of all entries together; the least recently used are removed first."""

_SUMS = "sha256.json"


class DeployCache:
    """Entries by key, in a folder.

    Args:
        folder: folder of the cache; None for a cache that keeps nothing.
        limit: maximum bytes of all entries together.
    """

    def __init__(self, folder: Path | None, limit: int = LIMIT) -> None:
        self._folder, self._limit = folder, limit

    @property
    def keeps(self) -> bool:
        """Whether the cache keeps anything."""
        return self._folder is not None

    @classmethod
    def of_user(cls, wanted: bool = True) -> DeployCache:
        """Return the user's cache: the folder named by :data:`VARIABLE`, else `attnforge` in the user's cache folder.

        Args:
            wanted: whether to keep anything.
        """
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = os.environ.get(VARIABLE) or os.path.join(home, "attnforge")
        return cls(Path(folder) if wanted and folder != "off" else None)

    def get(self, about: Mapping[str, Any]) -> Path | None:
        """Return the folder of a complete, unaltered entry; None if there is none. A damaged entry is removed.

        Args:
            about: all that decides the content, serialisable as JSON.
        """
        if self._folder is None:
            return None
        entry = self._folder / key_of(about)
        try:
            if not entry.is_dir() or not _are_own(entry, self._folder.stat(), entry.stat()):
                return None
            with open_regular(entry / _SUMS) as stream:
                sums = json.loads(stream.read())
            if {file.name: sha256(file) for file in entry.iterdir() if file.name != _SUMS} == sums:
                os.utime(entry)
                return entry
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            log.info("an entry of the cache cannot be read: %s", error)
        shutil.rmtree(entry, ignore_errors=True)
        return None

    def put(self, about: Mapping[str, Any], files: Mapping[str, Path | bytes]) -> None:
        """Keep an entry atomically; if it cannot be kept, the log says why.

        Args:
            about: all that decides the content, serialisable as JSON.
            files: the content, by name: files to copy, or bytes.
        """
        sizes = (len(file) if isinstance(file, bytes) else file.stat().st_size for file in files.values())
        if self._folder is None or sum(sizes) > self._limit:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with scratch(self._folder, ".", ".partial") as folder:
                for name, content in files.items():
                    if isinstance(content, bytes):
                        (folder / name).write_bytes(content)
                    else:
                        shutil.copyfile(content, folder / name)
                sums = {name: sha256(folder / name) for name in files}
                (folder / _SUMS).write_text(json.dumps(sums), encoding="ascii")
                folder.rename(self._folder / key_of(about))
            self._make_room()
        except OSError as error:  # a full disk, or another process that kept the same entry first
            log.info("nothing is kept in the cache %s: %s", self._folder, error)

    def _make_room(self) -> None:
        """Remove the least recently used entries until the rest fit the limit; other files are left alone."""
        assert self._folder is not None
        entries: list[tuple[float, int, Path]] = []
        for entry in self._folder.glob("[0-9a-f]" * 64):
            with suppress(OSError):  # not a folder, or just removed by another process
                size = sum(file.lstat().st_size for file in entry.iterdir())
                entries.append((entry.stat().st_mtime, size, entry))
        total = 0
        for _, size, entry in sorted(entries, reverse=True):
            total += size
            if total > self._limit:
                shutil.rmtree(entry, ignore_errors=True)


def key_of(about: Mapping[str, Any]) -> str:
    """Return the key of an entry: the sha256 of all that decides its content, attnforge's own code included."""
    document = json.dumps({**about, "code": _own_code()}, sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()


@functools.cache
def _own_code() -> str:
    """Return the sha256 of attnforge's own modules, except those that are never imported to make an entry."""
    digest = hashlib.sha256()
    for folder, folders, files in os.walk(Path(__file__).parent, followlinks=True):
        folders[:] = sorted(set(folders) - {"bench", "cli", "report", "serving", "__pycache__"})
        for name in sorted(files):
            if name.endswith(".py"):
                digest.update(name.encode() + Path(folder, name).read_bytes())
    return digest.hexdigest()
