"""Child processes of attnforge: they import nothing from the current folder.

A child is a module that ends in :func:`serve`; :func:`call` runs it, sends it a request and returns its answer. Both
are records: the request is JSON on the child's standard input, and the child writes a line of JSON for each step of its
progress, and finally the answer.

`python -m` puts the current folder first on the import path, so a `json.py` there would run. A child is started with
`-P`, which leaves that folder out, and in its own folder (:func:`attnforge.atomic.temporary_folder`).
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from attnforge.atomic import temporary_folder
from attnforge.progress import Progress, Silent
from attnforge.records import Record

R = TypeVar("R", bound=Record)


class ChildError(Exception):
    """A child process gave no answer; the message says why, as in `failed: no room`."""


class ProgressStep(Record):
    """A step of a child's progress, with the arguments of :meth:`attnforge.progress.Progress.step`."""

    what: str
    done: float
    total: float | None


def call(
    module: str,
    request: Record,
    answer: type[R],
    progress: Progress | None = None,
    *,
    timeout: float = threading.TIMEOUT_MAX,
    variables: Mapping[str, str] | None = None,
    started: Callable[[subprocess.Popen[str]], None] = lambda process: None,
) -> R:
    """Run a module in a child process and return its answer.

    Args:
        module: the module's qualified name.
        request: the request to it.
        answer: type of the answer, which has other fields than :class:`ProgressStep`.
        progress: receives the steps of the child.
        timeout: seconds after which the child is killed.
        variables: environment variables to set.
        started: receives the process.

    Raises:
        ChildError: the child crashed, failed, was killed, or took too long.
    """
    result: R | None = None
    lines: TypeAdapter[Any] = TypeAdapter(cast(Any, ProgressStep | answer))
    with temporary_folder() as folder, tempfile.TemporaryFile("w+", errors="replace") as errors:
        with subprocess.Popen(
            command(module), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=folder,
            env=environment(variables),
        ) as process:  # fmt: skip
            assert process.stdin is not None and process.stdout is not None
            timer = threading.Timer(timeout, process.kill)
            timer.start()
            try:
                started(process)
                with suppress(BrokenPipeError), process.stdin:
                    process.stdin.write(request.model_dump_json())
                for line in process.stdout:
                    try:
                        record = lines.validate_json(line)
                    except ValidationError:  # a library printed it when the child started
                        continue
                    if not isinstance(record, ProgressStep):
                        result = record
                    elif progress is not None:
                        progress.step(record.what, record.done, record.total)
            except BaseException:
                process.kill()
                raise
            finally:
                is_late = timer.finished.is_set()
                timer.cancel()
        if result is not None and process.returncode == 0:
            return result
        errors.seek(0)
        last = (errors.read().strip().splitlines() or ["it printed nothing"])[-1]
    if is_late:
        raise ChildError(f"took more than {timeout:g} s")
    how = f"crashed (signal {-process.returncode})" if process.returncode < 0 else "failed"
    raise ChildError(f"{how}: {last}")


def serve(request: type[R], answer: Callable[[R, Progress], Record]) -> None:
    """Answer the request of the parent process, and end when that ends.

    Args:
        request: type of the request.
        answer: takes the request and a receiver of progress; returns the answer.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # Linux then ends it however the parent ends
    reporter = _Reporter()
    reporter.write(answer(request.model_validate_json(sys.stdin.read()), reporter))


class _Reporter(Silent):
    """Progress, reported to the parent process. What libraries write to standard output goes to standard error."""

    def __init__(self) -> None:
        self._lines = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def step(self, what: str, done: float, total: float | None) -> None:
        self.write(ProgressStep(what=what, done=done, total=total))

    def write(self, record: Record) -> None:
        print(record.model_dump_json(), file=self._lines, flush=True)


def command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of attnforge in a separate process.

    Args:
        module: its qualified name.
        arguments: its arguments.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(further: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child: its own children leave the current folder out as well, and it finds this
    attnforge wherever it was imported from.

    Args:
        further: variables to set.
    """
    paths = [str(Path(path).resolve()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    try:
        importlib.metadata.distribution("attnforge")
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        paths.append(str(Path(__file__).resolve().parent.parent))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", **(further or {})}


_PR_SET_PDEATHSIG = 1
