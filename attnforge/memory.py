"""Resident memory of this process, at its peak and stage by stage, and the memory that is left for it."""

from __future__ import annotations

import ctypes
import gc
import resource
from contextlib import suppress
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak() -> int:
    """Bytes that this process had in memory at its peak, since the last :func:`reset_peak` or else since it began.

    The kernel tells it of the process alone (`VmHWM`). Where a container hides that, it is `ru_maxrss`, which never
    falls and which a process may inherit from the one that started it, so it is an upper bound.
    """
    size = _told(_STATUS, "VmHWM:")
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if size is None else size


def resident() -> int | None:
    """Bytes that this process has in memory now; None where the system does not say (Linux does)."""
    return _told(_STATUS, "VmRSS:")


def reset_peak() -> bool:
    """Let the peak of memory begin anew at what is in memory now; `ru_maxrss` begins anew with it.

    Returns:
        whether the kernel allowed that: Linux does, by `/proc/self/clear_refs`, except in some containers.
    """
    try:
        _CLEAR.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def give_back() -> None:
    """Free what only circles of references hold, and let the C library give freed memory back to the system, which
    glibc does by itself only at the end of its heap."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def available() -> int | None:
    """Bytes that this process can still take: what the system has available, or less where a cgroup limits it; None
    where the system does not say."""
    left = [_told(Path("/proc/meminfo"), "MemAvailable:"), *(_of_group(*files) for files in _GROUP_FILES)]
    return min((size for size in left if size is not None), default=None)


_GROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "memory"),
)
"""The limit, the use and the statistics of a cgroup, and its controller: version 2, then version 1."""


def _told(file: Path, key: str) -> int | None:
    """Bytes that a file of Linux's /proc says of a key; None on other systems."""
    with suppress(OSError, StopIteration):
        lines = file.read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])
    return None


def _of_group(limit: str, used: str, statistics: str, controller: str) -> int | None:
    """What the limit of this process's cgroup leaves; files that the system may drop from memory count as free."""
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()]
        name = next(path for _, controllers, path in groups if controller in controllers.split(","))
        root = Path("/sys/fs/cgroup", controller)
        folder = root / name.lstrip("/") if (root / name.lstrip("/") / limit).exists() else root  # in a container
        most, taken = (int((folder / file).read_text(encoding="ascii")) for file in (limit, used))
        stats = dict(line.split() for line in (folder / statistics).read_text(encoding="ascii").splitlines())
        return max(most - taken + int(stats.get("total_inactive_file", stats.get("inactive_file", 0))), 0)
    except (OSError, ValueError, StopIteration):  # no such controller, or no limit ("max")
        return None
