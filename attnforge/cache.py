"""What TensorRT compiled or timed, kept on disk beside the bundle, so that the next start need not do it again.

`NAME.cache` stands beside the folder NAME. A file's name says what it is good for: the builder, its version, the device
and, for kernels, the plan. Kernels are executable content, so a file that others may write to is not read.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from pathlib import Path

from attnforge.files import write_whole

log = logging.getLogger("attnforge")


def runtime_cache_file(bundle: Path, version: str, device: str, plan_sha256: str) -> Path:
    """Where the kernels that TensorRT-RTX compiled for a plan on a device are kept."""
    return cache_folder(bundle) / f"tensorrt_rtx-{version}-{_plain(device)}-{plan_sha256[:16]}.kernels"


def timing_cache_file(bundle: Path, version: str, device: str) -> Path:
    """Where what TensorRT timed on a device is kept."""
    return cache_folder(bundle) / f"tensorrt-{version}-{_plain(device)}.timings"


def cache_folder(bundle: Path) -> Path:
    whole = bundle.resolve()
    return whole.with_name(f"{whole.name}.cache")


def read(file: Path) -> bytes | None:
    """What is kept, or None where nothing is or where others than its owner could have written it."""
    try:
        about = file.stat()
        if os.name == "posix" and (
            about.st_uid not in (os.getuid(), 0) or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        ):
            log.warning("%s is not read, for others may write to it; delete it or take that right away", file)
            return None
        return file.read_bytes()
    except OSError:
        return None


def write(file: Path, data: bytes) -> bool:
    """Keep `data`, whole or not at all; where that cannot be done, say so and go on."""
    try:
        file.parent.mkdir(exist_ok=True)
        write_whole(file, data, mode=0o600)
    except OSError as error:
        log.info("what was compiled is not kept in %s: %s", file.parent, error)
        return False
    return True


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-").lower()
