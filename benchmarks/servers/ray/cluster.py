"""A Ray cluster on this machine only: on 127.0.0.1, with its own token, and without usage reports.

Ray reads some of its settings when it is imported, so import this module before Ray.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on any system: the node's address is 127.0.0.1
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",  # the niceness of the processes that actors are compared with; Ray's default is 15 more
}
os.environ.update(SETTINGS)

MEMORY = 200 * 2**20
"""Bytes of the shared object store."""

PATIENCE = 15.0
"""Seconds until processes that have not ended are killed."""


@contextmanager
def local_cluster(cpus: int) -> Iterator[None]:
    """Run a cluster for the duration of the block; afterwards none of its processes is left.

    Args:
        cpus: number of logical processors.
    """
    import ray

    # Without this token, Ray would write one to the home folder.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        ray.init(
            "local", num_cpus=cpus, include_dashboard=False, object_store_memory=MEMORY, _temp_dir=folder,
            log_to_driver=False, logging_level=logging.WARNING,
        )  # fmt: skip
        try:
            yield
        finally:
            actors = descendants("ray::")
            started = actors + [process for process in descendants() if folder in _command(process)]
            ray.shutdown()
            _end(started)


def _end(processes: list[int]) -> None:
    """Wait until processes have ended; kill those that have not in time."""
    end = time.monotonic() + PATIENCE
    while any(map(_is_running, processes)) and time.monotonic() < end:
        time.sleep(0.05)
    for process in filter(_is_running, processes):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _is_running(process: int) -> bool:
    with suppress(OSError, IndexError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def descendants(title: str = "") -> list[int]:
    """Return all descendants of this process whose command starts with `title`.

    Args:
        title: such as `ray::ServeReplica`, Ray's name of an actor.
    """
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(folder.name))
    every, new = [], [os.getpid()]
    while new:
        new = [child for process in new for child in parents.get(process, ())]
        every += new
    return [process for process in every if _command(process).startswith(title)]


@contextmanager
def killing(victim: Callable[[], int | None]) -> Iterator[list[int]]:
    """Kill one of the cluster's processes during the block; yields a list that receives its id.

    Args:
        victim: returns the process once it is time to kill it, otherwise None.
    """
    killed: list[int] = []
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.005):
            process = victim()
            if process is not None:
                os.kill(process, signal.SIGKILL)
                killed.append(process)
                return

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


def _command(process: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""
