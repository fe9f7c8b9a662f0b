"""The tables of README.md and docs/ are those that their results files make."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.experiments import pages
from benchmarks.experiments.pages import FAULTS_PAGE, PAGES
from tests.docs.pages import ROOT
from tests.support import polygraphy
from tests.support.faults import page as faults


def test_every_table_is_what_its_results_file_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    pages_of_tests = (*PAGES, polygraphy.PAGE)
    for page in pages_of_tests:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, tmp_path / page)
    places = pages.refresh(tmp_path)
    faults.refresh(tmp_path / FAULTS_PAGE)
    polygraphy.refresh(tmp_path)
    for page in pages_of_tests:
        assert (tmp_path / page).read_text(encoding="utf-8") == page.read_text(encoding="utf-8"), (
            "run python -m benchmarks.experiments.pages"
        )
    assert {name for name, _ in places} >= {*pages.OTHERS, "summary", "claims", "growth-tokens", "growth-layers"}
