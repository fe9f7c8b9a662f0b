"""Terminal output of the command line: consoles, progress, tables and sentences that fit the width, and the answers of
commands, shown as JSON or as text."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer
from rich.console import Console
from rich.markup import escape as rich_escape
from rich.table import Column, Table
from rich.text import Text

from attnforge.cli import ending
from attnforge.errors import plain
from attnforge.report.render import by_reason

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

if not os.environ.get("COLUMNS", "1").strip("0"):  # with 0 columns rich would print nothing
    del os.environ["COLUMNS"]

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


is_printed = is_running = False
"""Whether the command has printed its document, and whether a command is running."""


def begin(*, running: bool = False) -> None:
    """Record that parsing begins, or with `running` the command itself; nothing has been printed yet."""
    global is_printed, is_running
    is_printed, is_running = False, running


def print_json(document: Any) -> None:
    """Print the JSON document of a command with `--json` on standard output. NaN and infinity, which JSON lacks, become
    null."""
    global is_printed
    is_printed = True
    finite = json.loads(json.dumps(document), parse_constant=lambda name: None)
    print(json.dumps(finite, indent=2, allow_nan=False))


def escape(text: str) -> str:
    """Escape untrusted text for rich's markup: markup in it has no effect, and control characters are removed."""
    return rich_escape(plain(text))


def say(text: str, style: str | None = None, indent: int = 0) -> None:
    """Print a sentence without markup, wrapped between words; continuation lines are indented by two more columns."""
    margin, text = " " * indent, plain(" ".join(text.splitlines()))
    lines = textwrap.wrap(
        text, max(out.width, 40), initial_indent=margin, subsequent_indent=f"{margin}  ", break_on_hyphens=False
    )
    for line in lines:
        out.print(line, style=style, markup=False, soft_wrap=True)


def say_reasons(reasons: Mapping[str, str], statement: str, style: str | None = None, indent: int = 0) -> None:
    """Print a statement with its reason; names with the same reason are joined: `eager, openvino did not run: …`."""
    for names, reason in by_reason(reasons):
        say(f"{statement.format(names)}: {reason}", style, indent)


def say_path(label: str, path: object) -> None:
    """Print a label and a path on one line, however long, so that the path can be copied."""
    out.print(f"{label}: {escape(str(path))}", soft_wrap=True)


def print_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1, wraps: int | None = None, gap: int = 2
) -> None:
    """Print a table without rules; columns that are empty in all rows are omitted.

    If the terminal is narrower than the names and numbers, the table keeps its width and the terminal breaks its lines.

    Args:
        head: heading of every column.
        rows: cells, with rich's markup.
        words: number of leading text columns; the others are numbers, aligned right.
        wraps: index of the text column that wraps in the remaining width; cells of the others do not wrap.
        gap: spaces between columns.
    """
    shown = [i for i in range(len(head)) if any(row[i] for row in rows)]
    table = Table(
        box=None, header_style="bold", pad_edge=False, padding=(0, gap, 0, 0), show_edge=False,
        show_header=any(head[i] for i in shown),
    )  # fmt: skip
    width = gap * (len(shown) - 1)
    for i in shown:
        texts = [head[i], *(Text.from_markup(row[i]).plain for row in rows)]
        least = max(len(line) for text in texts for line in text.split("\n"))
        if i == wraps:
            least = min(max(len(word) for text in texts for word in text.split()), 40)
        table.add_column(
            head[i], min_width=least, no_wrap=i != wraps, vertical="bottom" if wraps is None else "top",
            justify="left" if i < words or i == wraps else "right",
        )  # fmt: skip
        width += least
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    width = max(width, out.width)
    Console(file=out.file, width=width, force_terminal=out.is_terminal, highlight=False).print(table)


class StageDisplay:
    """Shows the current stage, an estimate of its remaining seconds, and a bar of all the work done; a
    :class:`attnforge.progress.Progress`, and callable with a stage's name for work without counted stages."""

    def __init__(self, bar: RichProgress) -> None:
        self._bar, self._task = bar, bar.add_task("", total=None, step="")
        self._before, self._start = 0, time.perf_counter()

    def __call__(self, name: str) -> None:
        self._show(f"{name} …", step="")

    def stage(self, name: str, number: int, total: int) -> None:
        self._before, self._start = number - 1, time.perf_counter()
        self._show(f"{number}/{total} {name}", step="", completed=self._before, total=total)

    def step(self, what: str, done: float, total: float | None) -> None:
        if total is None:
            self._show(step=what)
            return
        left = (time.perf_counter() - self._start) * (total - done) / done if done else 0.0
        text = f"{what}, {left:.0f} s left" if left >= 1 else what
        self._show(step=text, completed=self._before + done / max(total, 1))

    def _show(self, description: str | None = None, **fields: Any) -> None:
        ending.check()
        if "step" in fields:
            fields["step"] = escape(fields["step"])
        self._bar.update(self._task, description=None if description is None else escape(description), **fields)


@contextmanager
def stages_shown(quiet: bool) -> Iterator[StageDisplay]:
    """Show stages on standard error if it is a terminal and `quiet` is False.

    The display keeps the current standard error: deploy redirects `sys.stderr` while it exports.
    """
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("[dim]{task.fields[step]}", table_column=Column(max_width=32, no_wrap=True)),
        TimeElapsedColumn(),
    )
    console = Console(file=sys.stderr, highlight=False)
    bar = RichProgress(
        *columns, console=console, transient=True, expand=True, redirect_stdout=False, redirect_stderr=False
    )
    with nullcontext() if quiet or not console.is_terminal else bar:
        yield StageDisplay(bar)


# --- answers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """Result of a command.

    Attributes:
        document: printed with `--json`, as one JSON document.
        view: prints the same as text.
        ok: whether the command succeeded; if not, it exits with 1.
    """

    document: Any
    view: Callable[[], object]
    ok: bool = True


def answering(command: Callable[..., Answer]) -> Callable[..., None]:
    """Wrap a command so that its answer is shown, and its help is its docstring: of each option, the text in `Args`, or
    in a further section, which is the panel that shows the option.

    Args:
        command: takes the option `as_json`, as every command does. Options that several commands share have their help
            in :mod:`attnforge.cli.options`.

    Raises:
        typer.Exit: the answer is not ok.
    """

    @functools.wraps(command)
    def run(*, as_json: bool, **options: Any) -> None:
        answer = command(as_json=as_json, **options)
        if as_json:
            print_json(answer.document)
        else:
            answer.view()
        if not answer.ok:
            raise typer.Exit(1)

    run.__doc__, _, arguments = (inspect.getdoc(command) or "").partition("\n\nArgs:\n")
    signature = inspect.signature(command, eval_str=True)
    parameters = dict(signature.parameters)
    for section in re.split(r"\n\n(?=\S)", f"Args:\n{arguments}"):
        panel, *entries = re.split(r"\n(?=    \S)", section)
        for entry in entries:
            name, _, text = " ".join(entry.split()).partition(": ")
            kind, info = _typed(parameters[name].annotation)
            info.help, info.rich_help_panel = text, None if panel == "Args:" else panel.removesuffix(":")
            parameters[name] = parameters[name].replace(annotation=Annotated[kind, info])
    run.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
    return run


def _typed(annotation: Any) -> tuple[Any, Any]:
    """Return the type of a command's parameter, and what typer knows of it."""
    return get_args(annotation) if get_origin(annotation) is Annotated else (annotation, typer.Option())
