"""Processes that attnforge starts of itself: they import nothing from the folder that the user stands in.

`python -m` puts the current folder first on the path of imports, so a `json.py` that lies there would run. A child is
started with `-P`, which leaves it out, and in a folder of its own (:func:`attnforge.atomic.temporary_folder`).
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
    """The command that runs a module of attnforge in a process of its own.

    Args:
        module: its qualified name.
        arguments: for it.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(further: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child, in which its own children leave the current folder out as well, and which finds this
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
    """Let Linux end this process with the one that started it, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_PR_SET_PDEATHSIG = 1
