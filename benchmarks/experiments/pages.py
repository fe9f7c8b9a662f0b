"""The tables of README.md and docs/ that are made of results files.

`python -m benchmarks.experiments.pages` writes them anew from the files, and measures nothing; benchmarks write
the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import typer

from attnforge.bench import results
from attnforge.files import write_whole
from benchmarks.experiments import (
    decoding,
    deploy_costs,
    eight_bits,
    false_alarms,
    fusion,
    mask_plans,
    masks,
    overhead,
    ray_load,
    real_sizes,
    scaling,
    suite,
    triton_load,
    triton_models,
)
from benchmarks.publish import RESULTS

README, RESULTS_PAGE, FAULTS_PAGE, TRITON_PAGE, RAY_PAGE = PAGES = tuple(
    Path(name)
    for name in ("README.md", "docs/results.md", "docs/faults.md", "docs/guides/triton.md", "docs/guides/ray.md")
)

OTHERS = {
    "fusion-coverage": ("fusion_coverage.json", fusion.table),
    "fusion-summary": ("fusion_coverage.json", fusion.summary),
    "real-sizes": ("real_sizes.json", real_sizes.table),
    "real-sizes-growth": ("real_sizes.json", real_sizes.growth),
    "deploy-costs": ("deploy_costs.json", deploy_costs.table),
    "eight-bits": ("eight_bits.json", eight_bits.table),
    "masks": ("masks.json", masks.table),
    "mask-plans": ("mask_plans.json", mask_plans.table),
    "decoding": ("decoding.json", decoding.table),
    "overhead": ("overhead.json", overhead.table),
    "scaling": ("scaling.json", scaling.table),
    "triton-models": ("triton_models.json", triton_models.table),
    "triton-load": ("triton_load.json", triton_load.table),
    "ray-load": ("ray_load.json", ray_load.table),
    "false-alarms": ("false_alarms.json", false_alarms.table),
    "false-alarms-int8": ("false_alarms_int8.json", false_alarms.table),
    "false-alarms-decoder": ("false_alarms_decoder.json", false_alarms.table),
}


UNMEASURED = "Not measured yet."
"""What stands for a table whose results file nobody has written."""


def tables() -> Iterator[tuple[str, Path, str]]:
    """Every table: the name of its place, the results file that it is made of, and its text."""
    for file in sorted(RESULTS.glob("suite*.json")):
        for name, text in suite.tables(results.read(file)).items():
            yield name, file, text
    for name, (file_name, table) in OTHERS.items():
        file = RESULTS / file_name
        yield name, file, table(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else UNMEASURED


def refresh(root: Path = Path()) -> list[tuple[str, Path]]:
    """Write every table to the pages under `root` that have a place for it.

    Returns:
        the places, each its name and results file.
    """
    pages = [root / page for page in PAGES]
    return [(name, file) for name, file, text in tables() for page in pages if put(text, name, file, page)]


def put(table: str, name: str, results: Path, page: Path) -> bool:
    """Put a table between a page's marks for `name` of this results file; returns whether the page has such marks."""
    start, end = f"<!-- {name}: from {results.as_posix()} -->", f"<!-- /{name} -->"
    head, opening, rest = page.read_text(encoding="utf-8").partition(start)
    _, closing, tail = rest.partition(end)
    if opening and closing:
        write_whole(page, f"{head}{start}\n{table}\n{end}{tail}".encode())
    return bool(opening and closing)


def main() -> None:
    """Write every table anew from its results file."""
    for name, file in refresh():
        print(f"{name} from {file}")


if __name__ == "__main__":
    typer.run(main)
