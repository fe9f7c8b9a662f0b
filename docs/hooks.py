"""Site pages generated from other files: README, CONTRIBUTING, CHANGELOG, examples/, the CLI's help, and llms.txt; and
the table of tested versions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from attnforge.cli import app

ROOT = Path(__file__).parent.parent
MOVED = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples": "examples.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not files in docs/."""
    for source, page in MOVED.items():
        text = _examples() if source == "examples" else _of_root(source)
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "reference/cli.md", content="\n".join(_command_line())))
    files.append(File.generated(config, "llms.txt", content="\n".join(_for_models(files, config.nav or []))))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Insert the table of tested versions."""
    return markdown.replace("<!-- versions -->", "\n".join(_versions()))


def on_page_content(html: str, **_: object) -> str:
    """Remove Sphinx roles (`:meth:`) from docstrings, since Markdown does not support them."""
    return re.sub(r":(?:attr|class|data|func|meth|mod):(?=<code>)", "", html)


def on_post_page(output: str, page: Page, **_: object) -> str:
    """Check that the page loads nothing from a network.

    Raises:
        PluginError: a script, style sheet or image of the page has an external URL.
    """
    if fetched := re.findall(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]+"', output):
        raise PluginError(f"{page.file.src_uri} fetches from a network: {fetched[0]}")
    return output


def _of_root(name: str) -> str:
    """Return a file of the repository root as a page, with links that point to pages of the site."""

    def target(link: re.Match[str]) -> str:
        path, _, anchor = link.group(1).partition("#")
        path = MOVED.get(path.rstrip("/"), path.removeprefix("docs/"))
        return f"]({path}{'#' + anchor if anchor else ''})"

    text = (ROOT / name).read_text(encoding="utf-8")
    return re.sub(r"\]\((?!https?://)([^)]+)\)", target, text).replace('src="docs/', 'src="')


def _for_models(files: Files, nav: list[Any]) -> Iterator[str]:
    """Yield the lines of llms.txt (https://llmstxt.org): what this is, and the first sentence of every page."""
    about = _first_sentence(files.src_uris["index.md"])
    yield f"# attnforge\n\n> {about}\n\n## Pages\n"
    for entry in nav:
        for title, page in entry.items():
            for child in page if isinstance(page, list) else [{title: page}]:
                file = files.src_uris[next(iter(child.values()))]
                yield f"- [{next(iter(child))}]({file.url}): {_first_sentence(file)}"


def _first_sentence(file: File) -> str:
    """Return the first sentence of a page's first paragraph; empty if it has none."""
    parts = file.content_string.split("\n\n")[1:]
    paragraph = next((part for part in parts if re.match(r"[\w`*\[]", part) and "```" not in part), "")
    words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split())).replace("*", "")
    return re.split(r"(?<=[.:])\s", words)[0]


def _examples() -> str:
    """Return a page with every script in examples/, each titled with the first sentence of its docstring."""
    parts = [
        "# Examples",
        "Scripts to copy from `examples/`, and the notebook `examples/digits.ipynb`. The tests run them.",
        "",
    ]
    for file in sorted((ROOT / "examples").glob("*.py")):
        source = file.read_text(encoding="utf-8")
        title = (ast.get_docstring(ast.parse(source)) or file.stem).split(".")[0].split("\n")[0]
        parts += [f"## {title}", "", f"`examples/{file.name}`", "", "```python", source.rstrip(), "```", ""]
    return "\n".join(parts)


def _versions() -> Iterator[str]:
    """Yield the lines of a table of every dependency: its lowest tested version, and that of this environment."""
    yield "| package | lowest | installed |\n|---|---|---|"
    for line in (ROOT / "tests/release/lowest.txt").read_text(encoding="utf-8").splitlines():
        name, _, lowest = line.partition("==")
        if lowest:
            yield f"| {name} | {lowest} | {_installed(name)} |"


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "–"


def _command_line() -> Iterator[str]:
    """Yield the lines of the command-line reference, from typer's help."""
    group: Any = typer.main.get_command(app)  # from click or from typer's own copy of it, depending on typer's version
    yield f"# Command line\n\n{group.help}\n"
    yield "Every command takes `--json`: one JSON document on standard output, everything else on standard error. Exit "
    yield "codes: 0 for success, 1 if a check failed or a builder refused the model, 2 for misuse.\n"
    yield "`attnforge --install-completion` completes commands and flags in your shell.\n"
    for name, command in group.commands.items():
        usage = typer.Context(command, info_name=f"attnforge {name}").get_usage()
        yield f"## attnforge {name}\n\n```text\n{usage}\n```\n\n{command.help}\n"
        yield "| argument or option | | default |\n|---|---|---|"
        yield from map(_row, command.params)
        yield ""


def _row(parameter: Any) -> str:
    names = " ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    default = "" if parameter.default in (None, False) else f"`{parameter.default}`"
    return f"| {names} | {getattr(parameter, 'help', None) or ''} | {default} |".replace("\n", " ")
