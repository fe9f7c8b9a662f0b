"""The first jobs of a new user, as scripts of at most 18 lines. An own module is README's first block, which is run
too."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

LINES = 18


def run_job(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a script in a folder, and return its variables.

    Raises:
        AssertionError: it has more than :data:`LINES` lines.
    """
    script = Path(__file__).parent / f"{name}.py"
    assert len(script.read_text().splitlines()) <= LINES
    monkeypatch.chdir(folder)
    return runpy.run_path(str(script))
