"""The cache beside a bundle: kernels that TensorRT compiled and times that it measured, kept for the next start.

The cache of the bundle NAME is the folder `NAME.cache` beside it. A file's name says what it holds for: the builder,
its version, the device and, for kernels, the plan. Kernels are executable content, so a file that others may write to
is not read, nor one that this user did not write: each ends with its HMAC by a key of the user's own, wherever the
folder was copied from.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import re
import secrets
from pathlib import Path

from attnforge.files import is_own, open_inside, open_regular, write_whole

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
        key = _key()
    except OSError:
        return None
    data, code = content[:-_CODE], content[-_CODE:]
    if not hmac.compare_digest(code, _code(key, file, data)):
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
        write_whole(file, data + _code(_key(), file, data), mode=0o600)
    except OSError as error:
        log.info("nothing is kept in the cache %s: %s", file.parent, error)
        return False
    return True


_CODE = 32
"""Bytes of a code."""


def _code(key: bytes, file: Path, data: bytes) -> bytes:
    """Who wrote the file, and for what: its name is in the code."""
    return hmac.digest(key, file.name.encode() + b"\0" + data, "sha256")


def _key() -> bytes:
    """The user's key, which is made when it is first used.

    Raises:
        OSError: it cannot be kept, or others could read or have written it.
    """
    file = Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")) / "attnforge/cache.key"
    if not file.exists():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(file, secrets.token_bytes(_CODE), mode=0o600)
    with open_regular(file) as stream:
        about = os.fstat(stream.fileno())
        key = stream.read(_CODE + 1)
    if len(key) != _CODE or not is_own(about) or (os.name == "posix" and about.st_mode & 0o077):
        raise OSError(errno.EPERM, "it is not for this user alone; delete it", str(file))
    return key


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-").lower()
