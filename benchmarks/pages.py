"""The tables of README.md and docs/ that are made of results files.

`python -m benchmarks pages` writes them anew from the files, and measures nothing; experiments write the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from attnforge.atomic import write_whole
from benchmarks.experiment import MODULES, RESULTS, experiment_of


def tables() -> Iterator[tuple[str, Path, str]]:
    """Every table: the name of its place, the results file that it is made of, and its text."""
    for experiment in filter(None, map(experiment_of, MODULES)):
        for file in sorted(RESULTS.glob(f"{Path(experiment.file).stem}*.json")):  # of other machines and variants too
            for name, text in experiment.tables(json.loads(file.read_bytes())).items():
                yield name, file, text


def pages(root: Path) -> list[Path]:
    """The pages that may have places for tables."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def refresh(root: Path = Path()) -> list[tuple[str, Path]]:
    """Write every table to the pages under `root` that have a place for it.

    Returns:
        the places, each its name and results file.
    """
    return [(name, file) for name, file, text in tables() for page in pages(root) if put(text, name, file, page)]


def put(table: str, name: str, results: Path, page: Path) -> bool:
    """Put a table between a page's marks for `name` of this results file; returns whether the page has such marks."""
    start, end = f"<!-- {name}: from {results.as_posix()} -->", f"<!-- /{name} -->"
    head, opening, rest = page.read_text(encoding="utf-8").partition(start)
    _, closing, tail = rest.partition(end)
    if opening and closing:
        write_whole(page, f"{head}{start}\n{table}\n{end}{tail}".encode())
    return bool(opening and closing)
