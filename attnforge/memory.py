"""Resident memory of this process, now and at its peak, and the memory still available to it."""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak() -> int:
    """Return the peak resident memory of this process, in bytes, since the last :func:`reset_peak` or its start.

    The kernel reports it for the process alone (`VmHWM`). If a container hides that, `ru_maxrss` is returned, which
    never falls and which a process may inherit from its parent, so it is an upper bound.
    """
    size = _kilobytes(_STATUS, "VmHWM")
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if size is None else size


def resident() -> int | None:
    """Return the current resident memory of this process, in bytes; None if the system does not report it (Linux
    does)."""
    return _kilobytes(_STATUS, "VmRSS")


def reset_peak() -> bool:
    """Reset the peak memory, and `ru_maxrss` with it, to the memory in use now.

    Returns:
        whether the kernel allowed it: Linux does, by `/proc/self/clear_refs`, except in some containers.
    """
    with suppress(OSError):
        _CLEAR.write_text("5", encoding="ascii")
        return True
    return False


def give_back() -> None:
    """Collect reference cycles, and return freed memory to the system, which glibc does by itself only at the end of
    its heap."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


ROOM = 2**26
"""Bytes that are reserved without a look at what is available, which reads a dozen files."""


def available(root: Path = Path("/")) -> int | None:
    """Return how many bytes this process can still use: the system's available memory, or less if a cgroup limits it;
    None if the system does not report it.

    Args:
        root: root of the file system.
    """
    left = [_kilobytes(root / "proc/meminfo", "MemAvailable")]
    for group, most, taken in cgroup_numbers(_GROUP_FILES, root):
        with suppress(OSError, ValueError):
            stats = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            droppable = int(stats.get("total_inactive_file", stats.get("inactive_file", 0)))  # cached files
            left.append(max(most - taken + droppable, 0))
    return min((size for size in left if size is not None), default=None)


_GROUP_FILES = {"": ["memory.max", "memory.current"], "memory": ["memory.limit_in_bytes", "memory.usage_in_bytes"]}
"""Files with a cgroup's limit and its use, by controller: version 2, then version 1."""


def cgroup_numbers(files: Mapping[str, Sequence[str]], root: Path = Path("/")) -> Iterator[tuple[Path, int, int]]:
    """Yield this process's cgroups with the two numbers in their files, such as a limit and its use. A cgroup without a
    limit, which has "max" in place of it, is left out.

    Args:
        files: names of the files, by controller as for :func:`cgroups`.
        root: root of the file system.
    """
    for controller, names in files.items():
        for group in cgroups(controller, root):
            with suppress(OSError, ValueError):
                texts = [(group / name).read_text(encoding="ascii") for name in names]
                first, second = map(int, " ".join(texts).split())
                yield group, first, second


def cgroups(controller: str, root: Path = Path("/")) -> list[Path]:
    """Return the folders of this process's cgroup and its parents, each of which may limit it.

    Args:
        controller: controller of version 1, such as `cpu`; empty for version 2.
        root: root of the file system.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            controllers, name = line.split(":", 2)[1:]
            if controller in controllers.split(","):
                mount = root / "sys/fs/cgroup" / controller
                innermost = mount / name.lstrip("/")  # absent in a container, where the mount is its own cgroup
                return [group for group in (innermost, *innermost.parents) if group.is_relative_to(mount)]
    return []


def entries(file: Path) -> dict[str, str]:
    """Return the entries of a file in Linux's /proc, up to the first empty line; none on other systems."""
    with suppress(OSError):
        lines = file.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
        return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return {}


def _kilobytes(file: Path, key: str) -> int | None:
    """Return an entry in kB of a file in Linux's /proc, in bytes; None on other systems."""
    entry = entries(file).get(key)
    return None if entry is None else 1024 * int(entry.split()[0])
