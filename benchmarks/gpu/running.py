"""The processes of the run, one per step: their tasks, failure messages and results files."""

from __future__ import annotations

import os
import re
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from attnforge.atomic import write_whole
from attnforge.machine import cuda_devices
from benchmarks.child import run as run_child
from benchmarks.gpu.gpu_page import page
from benchmarks.gpu.steps import FATAL, WHOLE, GpuResults, Item, Settings, StepResult, claims

LOST = 75
"""Exit code of a process that lost its device."""

NO_TIME, UNDER_WAY = "no time was left", "it was running when the time was over"

LEAST = 2.0
"""Seconds below which no task is started."""

T = TypeVar("T")
Task = tuple[str, Callable[[Item], None]]
"""A task's key, and the function that runs it and records it in an item."""


def read(folder: str | Path) -> GpuResults:
    """Read the results in a folder; empty results if there are none.

    Raises:
        ValueError: the file contains something else.
    """
    file = Path(folder) / "gpu.json"
    return GpuResults.model_validate_json(file.read_bytes()) if file.is_file() else GpuResults()


def write(results: GpuResults, folder: str | Path) -> None:
    """Write figures and page, each atomically."""
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
        """Seconds left."""
        return self.settings.ends - time.time()

    def save(self) -> None:
        """Write the results so far."""
        write(self.results, self.settings.out)


def step(run: GpuRun, name: str, tasks: Callable[[], Sequence[Task]]) -> StepResult:
    """Run a step's tasks one after another while there is time, and record each as it is done.

    Tasks that an earlier process recorded are skipped. A task that raises is recorded with its message, and the next
    one runs, in another process if the device was lost.
    """
    record = run.results.steps.setdefault(name, StepResult())
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
        attempt(item.failed, WHOLE, partial(do, item))
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
    """Call a function that may fail: the error's message, and what was logged meanwhile, go to `failed` under the key
    `what`, and the run continues.

    Returns:
        the result of `do`; None if it failed.
    """
    log, start = _log()
    try:
        return do()
    except Exception as error:
        logged = tail(log.read_bytes()[start:].decode(errors="replace")) if log is not None else ""
        text = f"{type(error).__name__}: {error}" + (f"\nIts log: {logged}" if logged else "")
        failed[what] = shortened(re.sub(r"\x1b\[[0-9;]*m", "", text))
        return None


def _log() -> tuple[Path | None, int]:
    """Return the file of this process's standard error, if it is one, and the file's length. Libraries print details
    there that their errors leave out."""
    about = os.fstat(2)
    return (Path("/proc/self/fd/2"), about.st_size) if stat.S_ISREG(about.st_mode) else (None, 0)


def shortened(text: str, limit: int = 3000) -> str:
    """Return the beginning and the end of a long text, `limit` characters in total."""
    text = text.strip()
    return text if len(text) <= limit else f"{text[: limit // 2]}\n[…]\n{text[-limit // 2 :]}"


def tail(text: str, lines: int = 15) -> str:
    """Return the last lines of a text."""
    return "\n".join(text.strip().splitlines()[-lines:])


def device_lost() -> bool:
    """Return whether a kernel has left an error that makes every later CUDA call of this process fail."""
    driver: Any = sys.modules.get("cuda.bindings.driver")
    if driver is None or cuda_devices() == 0:
        return False
    not_initialized, no_context = 3, 201
    return int(driver.cuCtxSynchronize()[0]) not in (0, not_initialized, no_context)


# --- a process for each step ------------------------------------------------------------------------------------------

RESTARTS, GRACE = 6, 20.0
"""How often a step whose process died continues in a new one; seconds that a task may exceed the time limit by."""


def supervise(settings: Settings, name: str) -> None:
    """Run a step in its own process, and if that dies, run the rest of the step in another.

    Args:
        settings: settings of the step's process.
        name: name of the step.
    """
    log = Path(settings.scratch) / f"{name.replace(':', '-')}.log"
    for _ in range(1 + RESTARTS):
        code = _in_process(settings, name, log) if settings.ends - time.time() >= LEAST else None
        if code is None:
            _leave_out(settings, name, NO_TIME)
        if not code:
            return
        if code != LOST:
            how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            logged = last_words(log.read_text(encoding="utf-8", errors="replace"))
            if not _died(settings, name, f"its process {how}. Its log: {logged}"):
                return
    _leave_out(settings, name, f"its step's process had died {1 + RESTARTS} times")


def _in_process(settings: Settings, name: str, log: Path) -> int | None:
    """Return the exit code of a step's process; None if it was killed because the time was over."""
    variables = {} if settings.threads is None else {"OMP_NUM_THREADS": str(settings.threads)}
    seconds = max(settings.ends + GRACE - time.time(), 1.0)
    ended = run_child(
        "benchmarks.gpu.one_step", name, settings.model_dump_json(), log=log, seconds=seconds, variables=variables
    )
    return ended.code if ended.why is None else None


@contextmanager
def _changing(settings: Settings, name: str) -> Iterator[StepResult]:
    """Read the results of a step whose process is over, let the block change them, and write them; no task is running
    any more."""
    results = read(settings.out)
    record = results.steps.setdefault(name, StepResult())
    yield record
    record.doing = None
    write(results, settings.out)


def _leave_out(settings: Settings, name: str, why: str) -> None:
    """Record the planned tasks that a step did not finish, or the whole step if it had not planned any."""
    with _changing(settings, name) as record:
        if record.doing is not None:
            record.left_out[record.doing] = UNDER_WAY
        for key in record.planned or [WHOLE]:
            if key not in record.items:
                record.left_out.setdefault(key, why)


def _died(settings: Settings, name: str, why: str) -> bool:
    """Record that a step's process died; return whether it was running a task, which is then not run again."""
    with _changing(settings, name) as record:
        task = record.doing
        if task is None:
            record.failed[WHOLE] = why
        else:
            record.items.setdefault(task, Item()).failed[FATAL] = why
    return task is not None


def last_words(log: str) -> str:
    """Return the end of a dead process's log: from a little before its crash report, if it has one."""
    crash = log.rfind("Fatal Python error")
    return shortened(tail(log, 30) if crash < 0 else f"{tail(log[:crash], 10)}\n{log[crash:]}")
