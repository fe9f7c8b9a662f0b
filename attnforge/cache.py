"""The cache beside a bundle: kernels that TensorRT compiled and times that it measured, kept for the next start.

The cache of the bundle NAME is the folder `NAME.cache` beside it. A file's name says what it holds for: the builder,
its version, the device and, for kernels, the plan. Kernels are executable content, so a file that others may write to
is not read, nor one that this user did not write: each ends with its HMAC by a key of the user's own, wherever the
folder was copied from.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from pathlib import Path

from attnforge.atomic import write_whole
from attnforge.files import is_own, open_inside
from attnforge.user_key import LENGTH, code_of, is_made_by_user

log = logging.getLogger("attnforge")


def runtime_cache_file(bundle: Path, version: str, device: str, plan_sha256: str) -> Path:
    """The file for kernels that TensorRT-RTX compiled.

    Args:
        bundle: its folder.
        version: of TensorRT-RTX.
        device: name of the CUDA device.
        plan_sha256: of the plan that the kernels are for.
    """
    return cache_folder(bundle) / f"tensorrt_rtx-{version}-{_plain(device)}-{plan_sha256[:16]}.kernels"


def timing_cache_file(bundle: Path, version: str, device: str) -> Path:
    """The file for times that TensorRT measured.

    Args:
        bundle: its folder.
        version: of TensorRT.
        device: name of the CUDA device.
    """
    return cache_folder(bundle) / f"tensorrt-{version}-{_plain(device)}.timings"


def cache_folder(bundle: Path) -> Path:
    """The cache's folder of a bundle's folder."""
    folder = bundle.resolve()
    return folder.with_name(f"{folder.name}.cache")


def read(file: Path) -> bytes | None:
    """The bytes of a file of the cache; None where there is none, where it or its folder is a link, where others than
    its owner may write to it or to its folder, and where this user did not write it. What is looked at is the file that
    was opened."""
    try:
        with open_inside(file.parent.parent, f"{file.parent.name}/{file.name}") as stream:
            if not is_own(os.lstat(file.parent)) or not is_own(os.fstat(stream.fileno())):
                log.warning("%s is not read, for others may write to it; delete it or take that right away", file)
                return None
            content = stream.read()
    except OSError:
        return None
    data, code = content[:-LENGTH], content[-LENGTH:]
    if not is_made_by_user(file.name, data, code):
        log.info("%s is not read, for this user did not write it", file)
        return None
    return data


def write(file: Path, data: bytes) -> bool:
    """Write a file of the cache, whole or not at all.

    Returns:
        Whether it was written; where it cannot be, the log says why.
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
    """A folder of the cache for a library that reads and writes files by itself; None where none can be trusted.

    Its name ends with a code that this user alone can make, so no folder that came along with a bundle is it.

    Args:
        bundle: its folder.
        name: of the library.
    """
    where = cache_folder(bundle)
    try:
        code = code_of(name, os.fsencode(where))[:8].hex()
        folder = where / f"{name}-{code}"
        where.mkdir(exist_ok=True, mode=0o700)
        folder.mkdir(exist_ok=True, mode=0o700)
        if not all(is_own(os.lstat(part)) and not part.is_symlink() for part in (where, folder)):
            raise OSError(errno.EPERM, "others may write to it", str(folder))
    except OSError as error:
        log.info("nothing is kept in the cache %s: %s", where, error)
        return None
    return folder


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-").lower()
