"""Every code block of README.md and docs/ runs, and prints the output shown: see :mod:`tests.docs.pages`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ray import serve

from tests.docs.pages import LANGUAGES, PAGES, ROOT, languages, run_page

NOT_RUN: dict[str, list[str]] = {
    "README.md": ["the folders have trained weights", "it installs"],
    "docs/guides/decoding.md": ["this decoder has no tokenizer"],
    "docs/guides/gpu.md": ["it needs a GPU", "it needs a GPU"],
    "docs/guides/polygraphy.md": ["it needs a GPU"],
    "docs/guides/ray.md": ["it asks the server of a cluster"],
    "docs/guides/serving.md": ["it installs", "it needs docker"],
    "docs/guides/triton.md": ["it starts a server", "it asks a server"],
}
"""The blocks that the tests skip, with the reason that the page gives."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory from which modules can be imported, as with Python in a shell."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[name]


RAY_PAGE = "docs/guides/ray.md"


@pytest.fixture
def without_proxy(ray_cluster: None) -> Iterator[None]:
    """A cluster in which Serve listens on no port."""
    serve.start(proxy_location="Disabled")
    yield
    serve.shutdown()


@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("without_proxy")
@pytest.mark.filterwarnings("ignore")
def test_every_block_of_the_ray_page_runs(folder: Path) -> None:
    assert run_page(RAY_PAGE) == NOT_RUN[RAY_PAGE]


@pytest.mark.parametrize("page", [page for page in PAGES if page != RAY_PAGE])
@pytest.mark.filterwarnings("ignore")
def test_every_block_of_the_page_runs(page: str, folder: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        assert run_page(page) == NOT_RUN.get(page, [])


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_a_known_language(page: str) -> None:
    """A block in an unknown language would not be tested."""
    assert set(languages(page)) <= LANGUAGES


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_every_file_that_is_named_exists(page: str) -> None:
    """The paths of this repository in the text exist, so that the text follows files that move."""
    rooms = "attnforge|benchmarks|docs|examples|export|model|runtime|serving|tests"
    named = set(re.findall(rf"`((?:{rooms})/[\w./-]*\w/?)`", (ROOT / page).read_text(encoding="utf-8")))
    placeholders = {
        "export/lowering/TARGET.py",
        "export/targets/TARGET.py",
        "runtime/backends/NAME.py",
        "benchmarks/results/gpu.json",
    }
    assert {name for name in named - placeholders if not (ROOT / name).exists()} == set()


def test_every_message_of_troubleshooting_is_one_of_the_code() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)` \|", page, flags=re.MULTILINE)
    rooms = ("attnforge", "export", "model", "runtime", "serving")
    files = [file for room in rooms for file in (ROOT / room).rglob("*.py")]
    # implicitly concatenated literals, as one
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(file.read_text(encoding="utf-8") for file in files))
    assert len(messages) > 20
    assert [message for message in messages if message not in code] == []
