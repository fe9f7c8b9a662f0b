"""A child process of the laboratory, limited in time and memory, and ended together with all its descendants."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

GIB = 2**30
STEP = 0.1
"""Seconds between two checks of a process."""


@dataclass(frozen=True)
class Ended:
    """The outcome of a process.

    Attributes:
        code: its exit code, or minus the signal that killed it.
        why: the limit that it exceeded, so that it was killed; None if it ended by itself.
        seconds: its wall time.
        cpu: CPU seconds of the process and the processes that it waited for, provided that no other child of this
            process ended meanwhile.
    """

    code: int
    why: str | None
    seconds: float
    cpu: float


def run(
    module: str,
    *arguments: str,
    log: Path,
    seconds: float,
    memory: float = inf,
    variables: Mapping[str, str] | None = None,
) -> Ended:
    """Run a module in a new process group, wait until it has ended, and kill what is left of the group.

    Args:
        module: qualified name of the module.
        arguments: its arguments.
        log: file for the output of the process.
        seconds: limit of wall time.
        memory: limit of the resident bytes of the process and its children together.
        variables: environment variables, in addition to this process's.
    """
    start, used, why = time.perf_counter(), _cpu(), None
    with log.open("wb") as stream:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdin=subprocess.DEVNULL, stdout=stream,
            stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(variables or {})},  # an error is the last line of the log
        )  # fmt: skip
    try:
        while why is None and child.poll() is None:
            if time.perf_counter() - start > seconds:
                why = f"more than {seconds:.0f} s"
            elif memory < inf and _resident(child.pid) > memory:
                why = f"more than {memory / GIB:.0f} GiB"
            else:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(STEP)
    finally:  # also on an interrupt, which a separate session does not receive
        with suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    return Ended(child.returncode, why, time.perf_counter() - start, _cpu() - used)


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _resident(group: int) -> int:
    """Return the resident bytes of all processes of a group together."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):  # a process that has ended meanwhile
            fields = status.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
            total += int(fields[21]) * os.sysconf("SC_PAGE_SIZE") if int(fields[2]) == group else 0
    return total
