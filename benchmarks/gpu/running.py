"""One process of the run: its tasks in turn, failures in their own words, and the files of results."""

from __future__ import annotations

import os
import re
import stat
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from attnforge.atomic import write_whole
from attnforge.machine import cuda_devices
from benchmarks.gpu.conclusions import claims
from benchmarks.gpu.gpu_page import page
from benchmarks.gpu.steps import FATAL, WHOLE, GpuResults, Item, Settings, Step

LOST = 75
"""Exit code of a process that lost its device."""

NO_TIME, UNDER_WAY = "no time was left", "it was under way when the time was over"

LEAST = 2.0
"""Seconds below which no task is started."""

T = TypeVar("T")
Task = tuple[str, Callable[[Item], None]]
"""A task's key, and what does it and records it in an item."""


class OutOfTime(Exception):
    """A task could not begin in time."""


def read(folder: str | Path) -> GpuResults:
    """The results in a folder; empty ones where there are none.

    Raises:
        ValueError: the file holds something else.
    """
    file = Path(folder) / "gpu.json"
    return GpuResults.model_validate_json(file.read_bytes()) if file.is_file() else GpuResults()


def write(results: GpuResults, folder: str | Path) -> None:
    """Write figures and page, each whole or not at all."""
    results.claims = claims(results)
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_whole(Path(folder) / "gpu.json", f"{results.model_dump_json(indent=2)}\n".encode())
    write_whole(Path(folder) / "gpu.md", page(results).encode())


@dataclass
class GpuRun:
    """One process of the run: its settings, and the results so far."""

    settings: Settings
    results: GpuResults

    @property
    def left(self) -> float:
        """Seconds until the time is over."""
        return self.settings.ends - time.time()

    def save(self) -> None:
        """Write the results so far."""
        write(self.results, self.settings.out)


def step(run: GpuRun, name: str, tasks: Callable[[], Sequence[Task]]) -> Step:
    """Run a step's tasks in turn while there is time, and record each as it is done.

    Tasks that an earlier process recorded are passed over. A task that raises is recorded in its own words, and the
    next one runs; in another process if the device was lost.
    """
    record = run.results.steps.setdefault(name, Step())
    todo = attempt(record.failed, WHOLE, tasks) or ()
    record.planned = [key for key, _ in todo]
    for key, do in todo:
        if key in record.items:
            continue
        if run.left < LEAST:
            record.left_out[key] = NO_TIME
            continue
        item = record.items[key] = Item()
        record.doing = key
        run.save()
        try:
            attempt(item.failed, WHOLE, partial(do, item))
        except OutOfTime as why:
            del record.items[key]
            record.left_out[key] = str(why)
        lost = bool(item.failed) and device_lost()
        if lost:
            item.failed[FATAL] = "the device was lost to its process"
        record.doing = None
        run.save()
        if lost:
            os._exit(LOST)
    run.save()
    return record


def attempt(failed: dict[str, str], what: str, do: Callable[[], T]) -> T | None:
    """Do something that may fail: the failure's message, and what was logged meanwhile, go to `failed` under the key
    `what`, and the run goes on.

    Returns:
        the result of `do`; None where it failed.

    Raises:
        OutOfTime: `do` did.
    """
    log, place = _log()
    try:
        return do()
    except OutOfTime:
        raise
    except Exception as error:
        said = tail(log.read_bytes()[place:].decode(errors="replace")) if log is not None else ""
        text = f"{type(error).__name__}: {error}" + (f"\nIts log: {said}" if said else "")
        failed[what] = shortened(re.sub(r"\x1b\[[0-9;]*m", "", text))
        return None


def _log() -> tuple[Path | None, int]:
    """The file that this process's standard error goes to, if it goes to one, and the file's length. Libraries print
    there what their errors leave out."""
    about = os.fstat(2)
    return (Path("/proc/self/fd/2"), about.st_size) if stat.S_ISREG(about.st_mode) else (None, 0)


def shortened(text: str, limit: int = 3000) -> str:
    """The beginning and the end of a long text, `limit` characters together."""
    text = text.strip()
    return text if len(text) <= limit else f"{text[: limit // 2]}\n[…]\n{text[-limit // 2 :]}"


def tail(text: str, lines: int = 15) -> str:
    """The last lines of a text."""
    return "\n".join(text.strip().splitlines()[-lines:])


def device_lost() -> bool:
    """Whether a kernel has left an error that makes every later CUDA call of this process fail."""
    driver: Any = sys.modules.get("cuda.bindings.driver")
    if driver is None or cuda_devices() == 0:
        return False
    not_initialized, no_context = 3, 201
    return int(driver.cuCtxSynchronize()[0]) not in (0, not_initialized, no_context)
