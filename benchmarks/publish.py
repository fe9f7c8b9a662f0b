"""What every benchmark of the project's own figures shares: the machine, the results file, the README's table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attnforge.machine import this_machine

RESULTS = Path("benchmarks/results")


def machine(threads: int) -> dict[str, Any]:
    """What was measured on."""
    here = this_machine(gpus=False)
    return {"system": here.system, "processor": here.processor, "threads": threads}


def publish(figures: dict[str, Any], table: str, name: str, results: Path, readme: Path | None) -> None:
    """Write `figures` to the results file, and put `table` between the README's marks for `name`."""
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if readme is not None and readme.name:
        publish_table(table, name, results, readme)


def has_place(name: str, results: Path, readme: Path) -> bool:
    """Whether the README has marks for `name` of this results file."""
    return _start(name, results) in readme.read_text(encoding="utf-8")


def _start(name: str, results: Path) -> str:
    return f"<!-- {name}: from {results.as_posix()} -->"


def publish_table(table: str, name: str, results: Path, readme: Path) -> None:
    """Put `table` between the README's marks for `name`."""
    start, end = _start(name, results), f"<!-- /{name} -->"
    page = readme.read_text(encoding="utf-8")
    head, found, rest = page.partition(start)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise SystemExit(f"{readme} has no place for the table: put {start} and {end} where it belongs")
    readme.write_text(f"{head}{start}\n{table}\n{end}{tail}", encoding="utf-8")
