"""Parsed HTML pages, and a browser to show them."""

from __future__ import annotations

import html.parser
import importlib.resources
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--window-size=1280,900"),
)

AXE = """
const done = arguments[0];
axe.run({runOnly: ["wcag2a", "wcag2aa"], rules: {"scrollable-region-focusable": {enabled: false}}}).then(
  found => done(found.violations.flatMap(rule => rule.nodes.map(
    node => `${rule.id}: ${node.target.join(" ")}: ${(node.any[0] || node.all[0] || node.none[0]).message}`))));
"""
"""Chromium makes regions that scroll focusable, whatever the page says, so that rule is left out."""


def inaccessible(browser: Any) -> list[str]:
    """What breaks WCAG 2 at levels A and AA on the page that the browser shows, contrast included, as axe-core finds
    it (https://github.com/dequelabs/axe-core)."""
    browser.execute_script((importlib.resources.files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8"))
    found: list[str] = browser.execute_async_script(AXE)
    return found


def of_size(browser: Any, width: int, height: int) -> None:
    """Give the browser's pages this size, in CSS pixels."""
    screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)


class Parsed(html.parser.HTMLParser):
    """Tags with their attributes, the text between them, and the rows of every table by its class."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.tables: dict[str, list[list[str]]] = {}
        self._rows: list[list[str]] = []
        self._in_cell = False
        self.feed(text)
        for rows in self.tables.values():
            rows[:] = [[cell.strip() for cell in row] for row in rows]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        if tag == "table":
            self._rows = self.tables.setdefault(given.get("class") or "", [])
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("th", "td"):
            self._rows[-1].append("")
            self._in_cell = True
        elif tag == "data" and self._in_cell:
            self._rows[-1][-1] += f"={given['value']} "

    def handle_endtag(self, tag: str) -> None:
        if tag in ("th", "td"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._in_cell:
            self._rows[-1][-1] += data


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if CHROMIUM is None or CHROMEDRIVER is None:
        pytest.skip("chromium and chromedriver are not installed (apt-get install chromium chromium-driver)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(CHROMEDRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium: Any) -> Any:
    """Headless Chromium, shared by all tests of a worker, on an empty page and with empty logs."""
    chromium.get("about:blank")
    for log in ("browser", "performance"):
        chromium.get_log(log)
    return chromium
