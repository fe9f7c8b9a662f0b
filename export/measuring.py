"""What is measured to choose by, in a process of its own: `python -m attnforge.export.measuring FOLDER SECONDS`.

Like the process that will load the bundle it holds no torch and no module, so that the times are those of a deployment,
the weights of the deploying process and of every backend are not in memory at once, and a backend that crashes ends
nothing else. It writes a line of JSON for every step, and last what was measured; and to the folder the model as ONNX
Runtime's optimizer leaves it, and the manifest with the session's settings.
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
"""Seconds for all that is measured to choose by: forms of attention sites (at most half), settings of ONNX Runtime's
session, and backends, whose opening counts as well. What one leaves, the next may use."""

SETTINGS = 4.0
"""How many of these seconds are for settings, at most."""

MEASURING = "measure backends"
"""The name of the stage, and of the process."""


class Measured(Record):
    """What the process measured.

    Attributes:
        session: settings of ONNX Runtime's session; None where the bundle has no model for it, or it cannot run it.
        choice: of the fastest backend within the budget; None where fewer than two can run.
        memory: bytes at the process's peak.
    """

    session: SessionSettings | None
    choice: Choice | None
    memory: int


class Step(Record):
    """A backend that is measured next, as :meth:`attnforge.progress.Progress.step` takes it."""

    what: str
    done: float
    total: float | None


_SAID: TypeAdapter[Step | Measured] = TypeAdapter(Step | Measured)


def measure(folder: Path, manifest: Manifest, progress: Progress) -> None:
    """Add to a manifest how ONNX Runtime's session runs the model fastest here, and which backend is fastest.

    Args:
        folder: of the bundle, its manifest written.
        manifest: is changed.
        progress: hears of every backend.

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
            heard: Measured | None = None
            try:
                for line in process.stdout or ():
                    said = _SAID.validate_json(line)
                    if isinstance(said, Measured):
                        heard = said
                    else:
                        progress.step(said.what, said.done, said.total)
            except BaseException:
                process.kill()
                raise
        if heard is None or process.returncode != 0:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or [f"exit status {process.returncode}"])[-1]
            raise BuildError(f"measuring backends failed: {last}; deploy without it (tune=False, --no-tune)")
    if target is not None:
        target.session = heard.session
    manifest.choice = heard.choice
    manifest.children[MEASURING] = Cost(seconds=round(time.perf_counter() - start, 3), memory=heard.memory)


class _Told:
    """Progress of which the process that waits is told."""

    def __init__(self) -> None:
        self._lines = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # backends write to standard output, too

    def stage(self, name: str, number: int, total: int) -> None: ...

    def step(self, what: str, done: float, total: float | None) -> None:
        self.say(Step(what=what, done=done, total=total))

    def say(self, record: Record) -> None:
        print(record.model_dump_json(), file=self._lines, flush=True)


def measured(folder: Path, seconds: float, progress: Progress) -> Measured:
    """Measure the bundle in a folder for about so many seconds."""
    end = time.perf_counter() + seconds
    bundle = Bundle(folder, lazily=True, trusted=False)
    if (target := bundle.manifest.targets.get("onnxruntime")) is not None:
        with suppress(Exception):  # verify reports what ONNX Runtime does not run
            target.session = tune_session(bundle, min(SETTINGS, seconds))
        write_manifest(folder, bundle.manifest, only_new=True)  # the backends run with these settings
    choice = choose_backend(Bundle(folder, lazily=True, trusted=False), end - time.perf_counter(), progress)
    return Measured(session=target.session if target is not None else None, choice=choice, memory=peak())


def main(folder: Path, seconds: float) -> None:
    """Measure, and tell the process that waits."""
    end_with_parent()
    told = _Told()
    told.say(measured(folder, seconds, told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
