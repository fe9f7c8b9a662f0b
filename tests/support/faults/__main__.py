"""Test every fault in every subject at every precision, or in the named subjects."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tests.support.faults.bench import NEVER, Faults
from tests.support.faults.page import PAGE, read_results, refresh, write_results
from tests.support.faults.subjects import PRECISIONS


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Subjects to test again (default: all).")] = None,
) -> None:
    """Test every fault in every subject at every precision, and write the results file and its tables."""
    subjects = {name: PRECISIONS[name] for name in names or PRECISIONS}
    with tempfile.TemporaryDirectory() as folder:
        faults = Faults(Path(folder))
        rows = [row for name, precisions in subjects.items() for p in precisions for row in faults.rows(name, p)]
    write_results(rows, [line for line in read_results() if line["model"] not in subjects])
    refresh(PAGE)
    wrong = [row for row in rows if row.verdict in NEVER]
    for row in wrong:
        print(f"{row.verdict}: {row}")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
