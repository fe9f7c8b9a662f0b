"""The tables of README.md and docs/ that are generated from results files.

`python -m benchmarks pages` regenerates them from the files without measuring; experiments write the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from attnforge.atomic import write_whole
from benchmarks.experiment import MODULES, RESULTS, experiment_of


def tables() -> Iterator[tuple[str, Path, str]]:
    """Yield every table: the name of its marks, its results file, and its text."""
    for experiment in filter(None, map(experiment_of, MODULES)):
        for file in sorted(RESULTS.glob(f"{Path(experiment.file).stem}*.json")):  # includes other machines and variants
            for name, text in experiment.tables(json.loads(file.read_bytes())).items():
                yield name, file, text


def pages(root: Path) -> list[Path]:
    """Return the pages that may contain tables."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def refresh(root: Path = Path()) -> list[tuple[str, Path]]:
    """Write every table to the pages under `root` that have marks for it.

    Returns:
        the name and the results file of every table that was written.
    """
    return [(name, file) for name, file, text in tables() for page in pages(root) if put(text, name, file, page)]


def put(table: str, name: str, results: Path, page: Path) -> bool:
    """Put a table between a page's marks for `name` and this results file; return whether the page has such marks."""
    start, end = f"<!-- {name}: from {results.as_posix()} -->", f"<!-- /{name} -->"
    head, start_mark, rest = page.read_text(encoding="utf-8").partition(start)
    _, end_mark, tail = rest.partition(end)
    if start_mark and end_mark:
        write_whole(page, f"{head}{start}\n{table}\n{end}{tail}".encode())
    return bool(start_mark and end_mark)
