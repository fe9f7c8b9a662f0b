"""Resident memory of this process, at its peak and stage by stage, and the memory that is left for it."""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak() -> int:
    """Bytes that this process had in memory at its peak, since the last :func:`reset_peak` or else since it began.

    Linux tells it of the process alone (`VmHWM`). Elsewhere it is `ru_maxrss`, which never falls and which a process
    may inherit from the one that started it, so it is an upper bound; 0 where the system has neither.
    """
    with suppress(OSError, StopIteration):
        lines = _STATUS.read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    try:
        import resource
    except ImportError:  # Windows
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


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
