"""Run the code blocks of README.md and docs/ with sybil: those of one page in order, in one namespace and folder.

| block | how it is tested |
|---|---|
| `python` | is run |
| `sh` | every command is run and must exit with 0; `attnforge` runs in this process, everything else in a shell |
| `console` | the lines after `$` are run, and their output is compared with the lines below them |
| `output` | is compared with the output of the Python block before it |
| `text`, `toml` | is not tested: diagrams, configuration |

Comparisons ignore white space. `...` matches anything, and a decimal number (1.8e-07, 12.5) matches any decimal
number, since these depend on the machine; words and integers must match. A console block whose last command
fails has `# exits with 1` after the command. `<!-- skip: next "why" -->` skips a block;
test_pages.py lists the skipped blocks.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import SkipTest

from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, SkipParser

from attnforge.cli import main

ROOT = Path(__file__).parents[2]
PAGES = sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
LANGUAGES = {"python", "sh", "console", "output", "text", "toml"}
EXITS = re.compile(r"#\s*exits with (\d)\b")
SHELL = {"|", ">", "&&", ";"}
NUMBER = r"-?\d*\.?\d+(?:e[-+]?\d+)?"
DECIMAL = re.compile(r"(?<![\w.])-?\d+(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+)(?![\w.])")


def run_page(page: str) -> list[str]:
    """Run the blocks of a page in the working directory.

    Returns:
        the reason for each skipped block.

    Raises:
        AssertionError: a command failed, or an output differs from the one shown.
    """
    document = Sybil(
        parsers=[
            CodeBlockParser("python", _run_python),
            CodeBlockParser("sh", _run_shell),
            CodeBlockParser("console", _run_console),
            CodeBlockParser("output", _compare_with_last),
            SkipParser(),
        ]
    ).parse(ROOT / page)
    document.namespace["__name__"] = "__main__"
    skipped = []
    for example in document.examples():
        try:
            example.evaluate()
        except SkipTest as reason:
            skipped.append(str(reason))
    return skipped


def languages(page: str) -> list[str]:
    """Return the language of every fenced block of a page, in order, or an empty string for a block without one."""
    fences = re.findall(r"^ *```(.*)$", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(fences) % 2 == 0, f"{page}: a block is not closed"
    return [fence.split(" ")[0] for fence in fences[::2]]


def _run_python(example: Example) -> None:
    source = "\n" * (example.line + example.parsed.line_offset) + example.parsed
    code = compile(source, example.path, "exec", dont_inherit=True)
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(code, example.namespace)
    example.namespace["_printed"] = printed.getvalue()


def _compare_with_last(example: Example) -> None:
    _compare(example, example.namespace.get("_printed", ""), example.parsed)


def _run_shell(example: Example) -> None:
    for command in _commands(str(example.parsed)):
        _run(example, command)


def _run_console(example: Example) -> None:
    parts = re.split(r"^\$ ", str(example.parsed), flags=re.MULTILINE)
    assert not parts[0].strip(), f"{_location(example)}: output before the first command"
    for part in parts[1:]:
        command, _, shown = part.partition("\n")
        _compare(example, _run(example, command), shown)


def _run(example: Example, command: str) -> str:
    """Run a command and return its output on both streams; its exit code must be the annotated one, by default 0."""
    expected = int(annotation.group(1)) if (annotation := EXITS.search(command)) else 0
    words = shlex.split(command, comments=True)
    alone = words[0] == "attnforge" and not SHELL & set(words)
    code, printed = _run_attnforge(words) if alone else _run_in_shell(command)
    assert code == expected, f"{_location(example)}: {command!r} exited with {code}:\n{printed}"
    return printed


def _run_attnforge(words: list[str]) -> tuple[int, str]:
    printed, before = io.StringIO(), sys.argv
    sys.argv = words
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            main()
    except SystemExit as ended:
        return int(ended.code or 0), printed.getvalue()
    finally:
        sys.argv = before
    return 0, printed.getvalue()


def _run_in_shell(command: str) -> tuple[int, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", command], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def _commands(block: str) -> Iterator[str]:
    """Yield the commands of a block: one per line, except for continued lines and here-documents."""
    lines = iter(block.splitlines())
    for line in lines:
        command = line
        while command.endswith("\\"):
            command += "\n" + next(lines)
        if here := re.search(r"<<'(\w+)'", command):
            for line in lines:
                command += "\n" + line
                if line == here.group(1):
                    break
        if command.strip() and not command.lstrip().startswith("#"):
            yield command


def _compare(example: Example, printed: str, shown: str) -> None:
    pattern = r"\s+".join(_as_pattern(word) for word in shown.split())
    assert re.fullmatch(rf"\s*{pattern}\s*", printed, flags=re.DOTALL), (
        f"{_location(example)}: printed:\n{printed}\nshown:\n{shown}"
    )


def _as_pattern(word: str) -> str:
    if word == "...":
        return r"(?:.*\S)?"
    parts = filter(None, re.split(rf"(\.\.\.|{DECIMAL.pattern})", word))
    return "".join(".*" if part == "..." else NUMBER if DECIMAL.fullmatch(part) else re.escape(part) for part in parts)


def _location(example: Example) -> str:
    return f"{example.path}:{example.line}"
