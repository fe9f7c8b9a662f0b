"""The tables of README.md and docs/ match their results files."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from benchmarks.experiment import RESULTS, pages, refresh
from tests.docs.pages import ROOT
from tests.support.faults import page as faults

MARK = re.compile(r"<!-- ([\w-]+): from (\S+) -->")


def test_every_table_matches_its_results_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for page in pages(Path()):
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, tmp_path / page)
    tables = refresh(tmp_path)
    faults.refresh(tmp_path / faults.PAGE)
    for page in pages(Path()):
        assert (tmp_path / page).read_text(encoding="utf-8") == page.read_text(encoding="utf-8"), (
            "run python -m benchmarks pages"
        )
        marks = MARK.findall(page.read_text(encoding="utf-8"))
        assert {name for name, _ in marks} <= {name for name, _ in tables} | {"faults"}
    assert {file for _, file in tables} == {*RESULTS.glob("*.json")} - {*RESULTS.glob("gpu*.json")}
