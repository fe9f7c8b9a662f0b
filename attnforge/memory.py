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


def available(root: Path = Path("/")) -> int | None:
    """Bytes that this process can still take: what the system has available, or less where a cgroup limits it; None
    where the system does not say.

    Args:
        root: of the file system.
    """
    left = [_told(root / "proc/meminfo", "MemAvailable:")]
    for controller, (limit, used) in _GROUP_FILES.items():
        left += [_left(group, limit, used) for group in cgroups(controller, root)]
    return min((size for size in left if size is not None), default=None)


_GROUP_FILES = {"": ("memory.max", "memory.current"), "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}
"""By a cgroup's controller, the files with its limit and its use: version 2, then version 1."""


def cgroups(controller: str, root: Path = Path("/")) -> list[Path]:
    """The folders of this process's cgroup and of those around it, of which each may limit it.

    Args:
        controller: of version 1, such as `cpu`; empty for version 2.
        root: of the file system.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            controllers, name = line.split(":", 2)[1:]
            if controller in controllers.split(","):
                mount = root / "sys/fs/cgroup" / controller
                own = mount / name.lstrip("/")  # absent in a container, which has its own as the mount
                return [group for group in (own, *own.parents) if group.is_relative_to(mount)]
    return []


def _told(file: Path, key: str) -> int | None:
    """Bytes that a file of Linux's /proc says of a key; None on other systems."""
    with suppress(OSError, StopIteration):
        lines = file.read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])
    return None


def _left(group: Path, limit: str, used: str) -> int | None:
    """What the limit of a cgroup leaves; files that the system may drop from memory count as free."""
    with suppress(OSError, ValueError):  # no such cgroup, or no limit ("max")
        most, taken = (int((group / file).read_text(encoding="ascii")) for file in (limit, used))
        stats = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        return max(most - taken + int(stats.get("total_inactive_file", stats.get("inactive_file", 0))), 0)
    return None
