"""A shared deploy cache for the tests of pages and examples."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnforge.cache import VARIABLE


@pytest.fixture(autouse=True)
def one_cache(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deploy a model only once, even if several pages deploy it."""
    monkeypatch.setenv(VARIABLE, str(shared / "cache"))
