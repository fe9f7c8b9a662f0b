"""Child processes of attnforge: they import nothing from the current folder.

`python -m` puts the current folder first on the import path, so a `json.py` there would run. A child is started with
`-P`, which leaves that folder out, and in its own folder (:func:`attnforge.atomic.temporary_folder`).
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path


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


def end_with_parent() -> None:
    """Make Linux end this process when its parent ends, however that happens."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_PR_SET_PDEATHSIG = 1
