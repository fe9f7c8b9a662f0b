"""The measurements to choose by, in a separate process (:mod:`attnforge.children`).

Like the process that will load the bundle it imports no torch and has no module, so that the times are those of a
deployment, the weights of the deploying process and of every backend are not in memory at once, and a backend that
crashes takes down nothing else. To the bundle's folder it writes the model as ONNX Runtime's optimizer leaves it, and
the manifest with the session's settings.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from attnforge.bundle import Bundle, Choice, Cost, Manifest, SessionSettings, write_manifest
from attnforge.children import ChildError, call, serve
from attnforge.errors import BuildError
from attnforge.memory import peak
from attnforge.progress import Progress, Silent
from attnforge.records import Record
from attnforge.runtime.backends.registry import CRASHED
from attnforge.runtime.choose import choose_backend, tune_session

SECONDS = 20.0
"""Seconds for all measurements to choose by: forms of attention sites (at most half), settings of ONNX Runtime's
session, and backends, including the time to load them. What one leaves, the next may use."""

SETTINGS = 4.0
"""Maximum seconds of these for settings."""

MEASURING = "measure backends"
"""The name of the stage, and of the process."""


class MeasureRequest(Record):
    """A request to measure the bundle in a folder, with its manifest written, for about this many seconds, without the
    backends that crashed."""

    folder: Path
    seconds: float
    crashed: dict[str, str] = {}


class _LastStep(Silent):
    """Progress that remembers the last step."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.what: str | None = None

    def step(self, what: str, done: float, total: float | None) -> None:
        self.what = what
        self._progress.step(what, done, total)


class Measured(Record):
    """The measurements of the process.

    Attributes:
        session: settings of ONNX Runtime's session; None if the bundle has no model for it, or it cannot run it.
        choice: the fastest backend within the budget; None if fewer than two can run.
        memory: peak memory of the process, in bytes; 0 if unknown.
    """

    session: SessionSettings | None
    choice: Choice | None
    memory: int = 0


def measure(folder: Path, manifest: Manifest, progress: Progress) -> None:
    """Add to a manifest the fastest session settings of ONNX Runtime here, and the fastest backend.

    Args:
        folder: the bundle's folder, with its manifest written.
        manifest: modified.
        progress: receives each backend.

    Raises:
        BuildError: the process crashed before the first backend.
    """
    start = time.perf_counter()
    target = manifest.targets.get("onnxruntime")
    left = SECONDS - sum(record.tuning.seconds for record in manifest.targets.values() if record.tuning is not None)
    request = MeasureRequest(folder=folder.absolute(), seconds=left)
    result = None
    while result is None:
        last = _LastStep(progress)
        try:
            result = call(__name__, request, Measured, last)
        except ChildError as error:
            if last.what is None or last.what in request.crashed:
                raise BuildError(f"measuring backends {error}; deploy without it (tune=False, --no-tune)") from error
            request.crashed[last.what] = f"{CRASHED} {error}"
    if target is not None:
        target.session = result.session
    manifest.choice = result.choice
    manifest.children[MEASURING] = Cost(seconds=round(time.perf_counter() - start, 3), memory=result.memory)


def measured(request: MeasureRequest, progress: Progress) -> Measured:
    """Answer a request."""
    folder, end = request.folder, time.perf_counter() + request.seconds
    bundle = Bundle(folder, lazily=True, trusted=False)
    target = bundle.manifest.targets.get("onnxruntime")
    if target is not None and target.session is None:
        with suppress(Exception):  # verify reports what ONNX Runtime cannot run
            target.session = tune_session(bundle, min(SETTINGS, request.seconds))
        write_manifest(folder, bundle.manifest, only_new=True)  # the backends run with these settings
    bundle = Bundle(folder, lazily=True, trusted=False)
    choice = choose_backend(bundle, end - time.perf_counter(), progress, request.crashed)
    return Measured(session=target.session if target is not None else None, choice=choice, memory=peak())


if __name__ == "__main__":
    serve(MeasureRequest, measured)
