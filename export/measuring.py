"""The measurements to choose by, in a separate process: `python -m attnforge.export.measuring FOLDER SECONDS`.

Like the process that will load the bundle it imports no torch and has no module, so that the times are those of a
deployment, the weights of the deploying process and of every backend are not in memory at once, and a backend that
crashes takes down nothing else. It writes a line of JSON for every step, and finally the measurements; to the folder it
writes the model as ONNX Runtime's optimizer leaves it, and the manifest with the session's settings.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from pydantic import TypeAdapter

from attnforge.atomic import temporary_folder
from attnforge.bundle import Bundle, Choice, Cost, Manifest, SessionSettings, write_manifest
from attnforge.children import command, end_with_parent, environment
from attnforge.errors import BuildError
from attnforge.memory import peak
from attnforge.progress import Progress
from attnforge.records import Record
from attnforge.runtime.choose import choose_backend, tune_session

SECONDS = 20.0
"""Seconds for all measurements to choose by: forms of attention sites (at most half), settings of ONNX Runtime's
session, and backends, including the time to load them. What one leaves, the next may use."""

SETTINGS = 4.0
"""Maximum seconds of these for settings."""

MEASURING = "measure backends"
"""The name of the stage, and of the process."""


class Measured(Record):
    """The measurements of the process.

    Attributes:
        session: settings of ONNX Runtime's session; None if the bundle has no model for it, or it cannot run it.
        choice: the fastest backend within the budget; None if fewer than two can run.
        memory: peak memory of the process, in bytes.
    """

    session: SessionSettings | None
    choice: Choice | None
    memory: int


class Step(Record):
    """The backend that is measured next, with the arguments of :meth:`attnforge.progress.Progress.step`."""

    what: str
    done: float
    total: float | None


_LINE: TypeAdapter[Step | Measured] = TypeAdapter(Step | Measured)


def measure(folder: Path, manifest: Manifest, progress: Progress) -> None:
    """Add to a manifest the fastest session settings of ONNX Runtime here, and the fastest backend.

    Args:
        folder: the bundle's folder, with its manifest written.
        manifest: modified.
        progress: receives each backend.

    Raises:
        BuildError: the process crashed.
    """
    start = time.perf_counter()
    target = manifest.targets.get("onnxruntime")
    left = SECONDS - sum(record.tuning.seconds for record in manifest.targets.values() if record.tuning is not None)
    with temporary_folder() as cwd, tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command(__name__, str(folder.absolute()), str(left)),
            stdout=subprocess.PIPE, stderr=errors, text=True, cwd=cwd, env=environment(),
        ) as process:  # fmt: skip
            result: Measured | None = None
            try:
                for line in process.stdout or ():
                    record = _LINE.validate_json(line)
                    if isinstance(record, Measured):
                        result = record
                    else:
                        progress.step(record.what, record.done, record.total)
            except BaseException:
                process.kill()
                raise
        if result is None or process.returncode != 0:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or [f"exit status {process.returncode}"])[-1]
            raise BuildError(f"measuring backends failed: {last}; deploy without it (tune=False, --no-tune)")
    if target is not None:
        target.session = result.session
    manifest.choice = result.choice
    manifest.children[MEASURING] = Cost(seconds=round(time.perf_counter() - start, 3), memory=result.memory)


class _Reporter:
    """Progress, reported to the parent process as lines of JSON."""

    def __init__(self) -> None:
        self._lines = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # backends write to standard output, too

    def stage(self, name: str, number: int, total: int) -> None: ...

    def step(self, what: str, done: float, total: float | None) -> None:
        self.write(Step(what=what, done=done, total=total))

    def write(self, record: Record) -> None:
        print(record.model_dump_json(), file=self._lines, flush=True)


def measured(folder: Path, seconds: float, progress: Progress) -> Measured:
    """Measure the bundle in a folder for about this many seconds."""
    end = time.perf_counter() + seconds
    bundle = Bundle(folder, lazily=True, trusted=False)
    if (target := bundle.manifest.targets.get("onnxruntime")) is not None:
        with suppress(Exception):  # verify reports what ONNX Runtime cannot run
            target.session = tune_session(bundle, min(SETTINGS, seconds))
        write_manifest(folder, bundle.manifest, only_new=True)  # the backends run with these settings
    choice = choose_backend(Bundle(folder, lazily=True, trusted=False), end - time.perf_counter(), progress)
    return Measured(session=target.session if target is not None else None, choice=choice, memory=peak())


def main(folder: Path, seconds: float) -> None:
    """Measure, and report to the parent process."""
    end_with_parent()
    reporter = _Reporter()
    reporter.write(measured(folder, seconds, reporter))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
