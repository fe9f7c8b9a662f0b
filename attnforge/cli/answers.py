"""The result of a command, and the runner that shows it as JSON or as text and sets the exit code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer

from attnforge.cli.terminal import print_json


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
    """Wrap a command so that its answer is shown.

    Args:
        command: takes the option `as_json`, as every command does.

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

    return run
