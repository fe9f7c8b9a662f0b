"""What the tests of pages and examples share: the cache, as the pages of one reader would."""

from __future__ import annotations

from pathlib import Path

import pytest

from attnforge.cache import VARIABLE


@pytest.fixture(autouse=True)
def one_cache(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same model on another page is not made anew."""
    monkeypatch.setenv(VARIABLE, str(shared / "cache"))
