"""The built site in a browser: no page is wider than a phone or a desktop, and axe-core finds no fault."""

from __future__ import annotations

from typing import Any

import pytest

from tests.docs.pages import ROOT
from tests.support.html_pages import inaccessible, of_size

SITE = ROOT / "build/site"

pytestmark = pytest.mark.skipif(not SITE.is_dir(), reason="there is no site: make docs builds it")


@pytest.mark.parametrize("page", ["index", "gallery", "overview", "guides/decoding"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (400, 844)])
def test_a_browser_shows_the_site(page: str, width: int, height: int, browser: Any) -> None:
    of_size(browser, width, height)
    browser.get((SITE / f"{page}.html").as_uri())
    wide, across = browser.execute_script("const e = document.documentElement; return [e.scrollWidth, e.clientWidth]")
    assert wide <= across
    assert inaccessible(browser) == []
    pictures = browser.execute_script("return [...document.images].map(i => i.naturalWidth && i.alt ? '' : i.src)")
    assert not any(pictures)
