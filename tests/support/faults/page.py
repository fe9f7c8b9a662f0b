"""The results file of all faults, and the tables that are generated from it."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from benchmarks.experiment import put
from tests.support.faults.bench import NEVER, VERDICTS, Row
from tests.support.faults.catalogue import FAULTS, INERT

PAGE, RESULTS = Path("docs/faults.md"), Path("benchmarks/results/faults.csv")
COLUMNS = ("kind", "fault", "what", "model", "precision", "effect", "allowed", "verdict", "case")

Line = dict[str, str]
"""A row of the results file, by :data:`COLUMNS`."""


def page_of(lines: list[Line]) -> str:
    """Return the tables: verdicts by precision and by kind of fault, and each fault that passes somewhere."""
    parts = [f"{len({line['fault'] for line in lines})} faults, put in {len(lines)} times:", ""]
    by_precision = sorted(
        lines, key=lambda line: ("fp32", "fp16", "bf16", "int8", "fp8", "int4").index(line["precision"])
    )
    parts += _counts(by_precision, "precision", (*VERDICTS, *NEVER))
    parts += ["", "By kind:", "", *_counts(lines, "kind", VERDICTS)]
    parts += ["", "Faults that pass somewhere, and the largest share of the budget that they take up:", ""]
    parts += ["| kind | fault | passes in | share of the budget | why |", "|---|---|---|---:|---|"]
    passed = [line for line in lines if line["verdict"] != "caught"]
    for fault in {line["fault"]: None for line in passed}:
        same = [line for line in passed if line["fault"] == fault]
        share = max(float(line["effect"]) / float(line["allowed"]) for line in same)
        first, where = same[0], ", ".join(f"{line['model']} {line['precision']}" for line in same)
        parts.append(f"| {first['kind']} | {first['what']} | {where} | {share:.0%} | {INERT.get(fault, 'rounding')} |")
    return "\n".join(parts)


def _counts(lines: list[Line], column: str, verdicts: tuple[str, ...]) -> list[str]:
    table = [f"| {column} | " + " | ".join(verdicts) + " |", "|---|" + "---:|" * len(verdicts)]
    for value in {line[column]: None for line in lines}:
        counted = [line["verdict"] for line in lines if line[column] == value]
        table.append(f"| {value} | " + " | ".join(str(counted.count(verdict)) for verdict in verdicts) + " |")
    return table


def write_results(rows: Sequence[Row], kept: Sequence[Line] = ()) -> None:
    """Write the rows in the order of :data:`FAULTS`, together with lines kept from the existing file."""
    order = [fault.name for fault in FAULTS]
    with RESULTS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        lines = [*kept, *map(_line, rows)]
        writer.writerows(sorted(lines, key=lambda line: order.index(line["fault"])))


def _line(row: Row) -> Line:
    fault = (row.fault.family, row.fault.name, row.fault.what, row.subject, row.precision)
    numbers = (f"{row.effect:.1e}", f"{row.allowed:.1e}")
    return dict(zip(COLUMNS, (*fault, *numbers, row.verdict, row.case), strict=True))


def read_results() -> list[Line]:
    """Return the rows of the results file."""
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def refresh(page: Path) -> None:
    """Update the tables of a page from the results file.

    Raises:
        SystemExit: the page has no marks for them.
    """
    if not put(page_of(read_results()), "faults", RESULTS, page):
        raise SystemExit(f"{page} has no marks for the tables; add <!-- faults: from {RESULTS} --> where they belong")
