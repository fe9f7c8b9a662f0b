"""The built site in a browser, opened as files: pages fit a phone and a desktop, axe-core finds no fault,
and the search finds pages."""

from __future__ import annotations

from typing import Any

import pytest
from selenium.webdriver.support.wait import WebDriverWait

from tests.docs.pages import ROOT
from tests.support.html_pages import inaccessible, of_size

SEARCH = """
document.querySelector('#__search').click();
const query = document.querySelector('[name=query]');
query.focus();
query.value = arguments[0];
query.dispatchEvent(new Event('keyup', {bubbles: true}));
"""

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


@pytest.mark.parametrize("page", ["index", "guides/decoding"])
def test_the_search_finds_pages_without_a_server(page: str, browser: Any) -> None:
    browser.get((SITE / f"{page}.html").as_uri())
    browser.execute_script(SEARCH, "softmax")
    waiting = WebDriverWait(browser, 30)
    found = waiting.until(lambda driver: driver.find_elements("css selector", ".md-search-result__item h1"))
    assert "The certificate" in [title.get_property("textContent") for title in found]
