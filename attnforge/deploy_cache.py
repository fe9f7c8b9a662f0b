"""The cache of deploys: what took long to make (TensorRT plans, reference outputs, measurements), for the next deploy
of the same model.

Every entry is a folder whose name is the sha256 of all that decides its content, so no entry is ever out of date. An
entry is read only where each of its files has the sha256 that was noted when it was written, and where
nobody but its owner may write to it: plans are executable content. Nothing is unpickled.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from attnforge.atomic import Scratch
from attnforge.files import is_own, open_regular, sha256

log = logging.getLogger("attnforge")

VARIABLE = "ATTNFORGE_CACHE"
"""Environment variable: the cache's folder, or `off`."""

LIMIT = 4 * 2**30
"""Bytes of all entries together; the entries that were used longest ago go first."""

_SUMS = "sha256.json"


class DeployCache:
    """Entries by key, in a folder.

    Args:
        folder: of the cache; None for a cache that keeps nothing.
        limit: bytes of all entries together.
    """

    def __init__(self, folder: Path | None, limit: int = LIMIT) -> None:
        self._folder, self._limit = folder, limit

    @property
    def keeps(self) -> bool:
        """Whether anything is kept."""
        return self._folder is not None

    @classmethod
    def of_user(cls, wanted: bool = True) -> DeployCache:
        """The user's cache: the folder that :data:`VARIABLE` names, else `attnforge` in the user's folder of caches.

        Args:
            wanted: whether anything is kept at all.
        """
        named = os.environ.get(VARIABLE)
        if not wanted or named == "off":
            return cls(None)
        if named:
            return cls(Path(named))
        return cls(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "attnforge"))

    def get(self, about: Mapping[str, Any]) -> Path | None:
        """The folder of an entry, whole and unaltered; None where there is none. A damaged entry is removed.

        Args:
            about: all that decides the content, as JSON takes it.
        """
        if self._folder is None:
            return None
        entry = self._folder / key_of(about)
        try:
            if not entry.is_dir() or not _is_own(self._folder) or not _is_own(entry):
                return None
            with open_regular(entry / _SUMS) as stream:
                sums = json.loads(stream.read())
            if {file.name for file in entry.iterdir()} == {_SUMS, *sums} and all(
                sha256(entry / name) == sum for name, sum in sums.items()
            ):
                os.utime(entry)
                return entry
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            log.info("an entry of the cache cannot be read: %s", error)
        shutil.rmtree(entry, ignore_errors=True)
        return None

    def put(self, about: Mapping[str, Any], files: Mapping[str, Path | bytes]) -> None:
        """Keep an entry, whole or not at all; where it cannot be kept, the log says why.

        Args:
            about: all that decides the content, as JSON takes it.
            files: the content, by name: files to copy, or bytes.
        """
        if self._folder is None or sum(map(_size, files.values())) > self._limit:
            return
        scratch: Scratch | None = None
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            scratch = Scratch(self._folder, ".", ".partial")
            folder = scratch.path
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
        finally:
            if scratch is not None:
                scratch.remove()

    def _make_room(self) -> None:
        """Remove the entries that were used longest ago until the limit holds; what is no entry is left alone."""
        assert self._folder is not None
        entries: list[tuple[float, int, Path]] = []
        for entry in self._folder.glob("[0-9a-f]" * 64):
            with suppress(OSError):  # a file, or removed just now by another process
                size = sum(file.lstat().st_size for file in entry.iterdir())
                entries.append((entry.stat().st_mtime, size, entry))
        total = 0
        for _, size, entry in sorted(entries, reverse=True):
            total += size
            if total > self._limit:
                shutil.rmtree(entry, ignore_errors=True)


def key_of(about: Mapping[str, Any]) -> str:
    """The key of an entry: the sha256 of what decides its content, and of attnforge's own code."""
    document = json.dumps({**about, "code": _code()}, sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()


@functools.cache
def _code() -> str:
    """The sha256 of attnforge's own modules, of which any may decide what an entry holds but those that nothing which
    makes one imports."""
    digest = hashlib.sha256()
    for folder, folders, files in os.walk(Path(__file__).parent, followlinks=True):
        folders[:] = sorted(set(folders) - {"bench", "cli", "report", "serving", "__pycache__"})
        for name in sorted(files):
            if name.endswith(".py"):
                digest.update(name.encode() + Path(folder, name).read_bytes())
    return digest.hexdigest()


def _is_own(folder: Path) -> bool:
    """Whether a folder is the user's, or root's, and nobody else may write to it."""
    if is_own(folder.stat()):
        return True
    log.warning("%s is not read, for others may write to it; delete it or take that right away", folder)
    return False


def _size(content: Path | bytes) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size
