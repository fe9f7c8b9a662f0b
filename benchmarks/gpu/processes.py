"""Processes: every step runs in one of its own; where that dies, another goes on with what is left of the step."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from benchmarks.child import run
from benchmarks.gpu.running import LEAST, LOST, NO_TIME, UNDER_WAY, read, shortened, tail, write
from benchmarks.gpu.steps import FATAL, WHOLE, Item, Settings, Step

TAKE = "--take"
RESTARTS, GRACE = 6, 20.0
"""How often a step whose process died goes on in a new one; seconds that a task may go on beyond the time."""


def supervise(settings: Settings, name: str, group: bool = True) -> None:
    """Run a step in a process of its own, and where that dies, what is left of the step in another.

    Args:
        settings: of the step's process.
        name: of the step.
        group: when the step's process ends, end every process that it started.
    """
    log = Path(settings.scratch) / f"{name.replace(':', '-')}.log"
    for _ in range(1 + RESTARTS):
        if settings.ends - time.time() < LEAST:
            _leave_out(settings, name, NO_TIME)
            return
        code = _in_process(settings, name, log, group)
        if code == 0:
            return
        if code is None:
            _leave_out(settings, name, NO_TIME)
            return
        said = last_words(log.read_text(encoding="utf-8", errors="replace"))
        record = read(settings.out).steps.get(name, Step())
        if code != LOST:
            how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            _died(settings, name, f"its process {how}. Its log: {said}")
            if record.doing is None:
                return
    _leave_out(settings, name, f"its step's process had died {1 + RESTARTS} times")


def _in_process(settings: Settings, name: str, log: Path, group: bool) -> int | None:
    """Exit code of a step's process; None where it was killed because the time was over."""
    variables = {} if settings.threads is None else {"OMP_NUM_THREADS": str(settings.threads)}
    seconds = max(settings.ends + (GRACE if group else GRACE / 2) - time.time(), 1.0)
    words = TAKE, name, settings.model_dump_json()
    ended = run("benchmarks.gpu", *words, log=log, seconds=seconds, variables=variables, group=group)
    return ended.code if ended.why is None else None


def _leave_out(settings: Settings, name: str, why: str) -> None:
    """Note the planned tasks that a step did not finish; the whole step where it had not planned any."""
    results = read(settings.out)
    record = results.steps.setdefault(name, Step())
    if record.doing is not None:
        record.left_out[record.doing] = UNDER_WAY
    for key in record.planned or [WHOLE]:
        if key not in record.items:
            record.left_out.setdefault(key, why)
    record.doing = None
    write(results, settings.out)


def _died(settings: Settings, name: str, why: str) -> None:
    """Note that a step's process died, with the task that it was at."""
    results = read(settings.out)
    record = results.steps.setdefault(name, Step())
    if record.doing is None:
        record.failed[WHOLE] = why
    else:
        record.items.setdefault(record.doing, Item()).failed[FATAL] = why
        record.doing = None
    write(results, settings.out)


def last_words(log: str) -> str:
    """The end of a dead process's log: from a little before its crash report, if it has one."""
    place = log.rfind("Fatal Python error")
    return shortened(tail(log, 30) if place < 0 else f"{tail(log[:place], 10)}\n{log[place:]}")
