"""What every benchmark of the project's own figures shares: the machine and the results file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from attnforge.atomic import write_whole
from attnforge.machine import this_machine, tool_versions

RESULTS = Path("benchmarks/results")


def machine(threads: int) -> dict[str, Any]:
    """The machine that figures were measured on, and on how many of its threads."""
    here = this_machine(gpus=False)
    return {"system": here.system, "processor": here.processor, "threads": threads}


def where(figures: dict[str, Any]) -> str:
    """On which machine figures were measured, and the command that measures them again."""
    about = figures["machine"]
    return f"{about['processor']}, {about['threads']} threads; `{figures['command']}`"


def write_figures(command: str, threads: int, results: Path, **measured: Any) -> None:
    """Write what was measured to a results file, with command, machine and versions.

    Args:
        command: that measures it again.
        threads: that it was measured on.
        results: the file.
        measured: what a JSON document can hold.
    """
    figures = {"command": command, "machine": machine(threads), "tools": tool_versions(), **measured}
    results.parent.mkdir(parents=True, exist_ok=True)
    write_whole(results, f"{json.dumps(figures, indent=2)}\n".encode())


def show(results: Path, table: Callable[[dict[str, Any]], str]) -> None:
    """Print a results file as a table."""
    Console().print(table(json.loads(results.read_bytes())), markup=False)
