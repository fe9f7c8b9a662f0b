"""What a command answers, and the runner that shows it: as JSON or for people, and as the exit code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer

from attnforge.cli.terminal import print_json


@dataclass(frozen=True)
class Answer:
    """What a command found.

    Attributes:
        document: printed with `--json`, as one JSON document.
        view: prints the same for people.
        ok: whether what was asked holds; else the command exits with 1.
    """

    document: Any
    view: Callable[[], object]
    ok: bool = True


def answering(command: Callable[..., Answer]) -> Callable[..., None]:
    """The command that shows what `command` answers.

    Args:
        command: takes the option `as_json`, as every command does.

    Raises:
        typer.Exit: what was asked does not hold.
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
