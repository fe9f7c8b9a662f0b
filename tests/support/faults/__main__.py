"""Every fault in every subject at every precision."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.support.faults.bench import NEVER, Faults
from tests.support.faults.page import PAGE, refresh, write_results
from tests.support.faults.subjects import PRECISIONS


def main() -> None:
    """Try every fault in every subject at every precision; write the results file and the tables made of it."""
    with tempfile.TemporaryDirectory() as folder:
        faults = Faults(Path(folder))
        rows = [row for name, precisions in PRECISIONS.items() for p in precisions for row in faults.rows(name, p)]
    write_results(rows)
    refresh(PAGE)
    wrong = [row for row in rows if row.verdict in NEVER]
    for row in wrong:
        print(f"{row.verdict}: {row}")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
