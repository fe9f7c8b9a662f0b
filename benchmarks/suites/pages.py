"""The tables of README.md and docs/ that are made of results files.

`python -m attnforge.benchmarks.suites.pages` writes them anew from the files, and measures nothing; each benchmark does
so for its own once it has measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import typer

from attnforge.benchmarks.measure import results
from attnforge.benchmarks.publish import FAULTS_PAGE, README, RESULTS, RESULTS_PAGE, has_place, publish_table
from attnforge.benchmarks.suites import false_alarms, fusion, overhead, real_sizes, scaling, suite

OTHERS = {
    "fusion-coverage": ("fusion_coverage.json", fusion.table),
    "fusion-summary": ("fusion_coverage.json", fusion.summary),
    "real-sizes": ("real_sizes.json", real_sizes.table),
    "real-sizes-growth": ("real_sizes.json", real_sizes.growth),
    "overhead": ("overhead.json", overhead.table),
    "scaling": ("scaling.json", scaling.table),
    "false-alarms": ("false_alarms.json", false_alarms.table),
}


def tables() -> Iterator[tuple[str, Path, str]]:
    """Every table: the name of its place, the results file that it is made of, and its text."""
    for file in sorted(RESULTS.glob("suite*.json")):
        for name, text in suite.tables(results.read(file)).items():
            yield name, file, text
    for name, (file_name, table) in OTHERS.items():
        file = RESULTS / file_name
        yield name, file, table(json.loads(file.read_text(encoding="utf-8")))


def refresh(root: Path = Path()) -> list[tuple[str, Path]]:
    """Write every table to the pages under `root` that have a place for it.

    Returns:
        the places, each its name and results file.
    """
    places = []
    for name, file, text in tables():
        for page in (root / page for page in (README, RESULTS_PAGE, FAULTS_PAGE)):
            if has_place(name, file, page):
                publish_table(text, name, file, page)
                places.append((name, file))
    return places


def main() -> None:
    """Write every table anew from its results file."""
    for name, file in refresh():
        print(f"{name} from {file}")


if __name__ == "__main__":
    typer.run(main)
