"""What every benchmark of the project's own figures shares: the machine, the results file, the tables of the pages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attnforge.files import write_whole
from attnforge.machine import this_machine

RESULTS = Path("benchmarks/results")
RESULTS_PAGE = Path("docs/results.md")
README = Path("README.md")
FAULTS_PAGE = Path("docs/faults.md")


def machine(threads: int) -> dict[str, Any]:
    """The machine that figures were measured on, and on how many of its threads."""
    here = this_machine(gpus=False)
    return {"system": here.system, "processor": here.processor, "threads": threads}


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]], words: int | None = None) -> str:
    """A table in Markdown.

    Args:
        header: heading of every column.
        rows: cells of every row; a bar in one is escaped, and lines are joined.
        words: how many of the first columns are text, the others being numbers that are aligned right; None for all.
    """
    numbers = 0 if words is None else len(header) - words
    rule = "|" + "---|" * (len(header) - numbers) + "---:|" * numbers
    lines = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in (header, *rows)]
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, rule, *body])


def publish(figures: dict[str, Any], table: str, name: str, results: Path, page: Path | None) -> None:
    """Write `figures` to the results file, and put `table` between the marks for `name` on a page.

    Args:
        figures: what a JSON document can hold.
        page: the page; None, or a path without a name, for none.
    """
    results.parent.mkdir(parents=True, exist_ok=True)
    write_whole(results, f"{json.dumps(figures, indent=2)}\n".encode())
    if page is not None and page.name:
        publish_table(table, name, results, page)


def has_place(name: str, results: Path, page: Path) -> bool:
    """Whether a page has marks for `name` of this results file."""
    return _start(name, results) in page.read_text(encoding="utf-8")


def _start(name: str, results: Path) -> str:
    return f"<!-- {name}: from {results.as_posix()} -->"


def publish_table(table: str, name: str, results: Path, page: Path) -> None:
    """Put `table` between a page's marks for `name`.

    Raises:
        SystemExit: the page has no such marks.
    """
    start, end = _start(name, results), f"<!-- /{name} -->"
    head, opening, rest = page.read_text(encoding="utf-8").partition(start)
    _, closing, tail = rest.partition(end)
    if not (opening and closing):
        raise SystemExit(f"{page} has no place for the table: put {start} and {end} where it belongs")
    write_whole(page, f"{head}{start}\n{table}\n{end}{tail}".encode())
