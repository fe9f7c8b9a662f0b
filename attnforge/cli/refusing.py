"""Error reporting of the command line: any exception becomes one line, one exit code, and with `--json` one
document."""

from __future__ import annotations

import sys
import tempfile
from contextlib import suppress
from typing import Any

import typer
from rich.text import Text

from attnforge.atomic import FULL
from attnforge.cli import ending, terminal
from attnforge.errors import AttnforgeError, UnfusedError, UsageError, plain, shortened

EXPORTER = ("PIL", "einops", "islpy", "onnx", "onnx_ir", "onnxscript", "polygraphy", "sympy", "torch")
"""Modules that attnforge requires and an environment that only runs bundles lacks."""


def report_error(error: BaseException) -> int:
    """Print what a command raised, in one line on standard error, and with `--json` on standard output as well.

    Returns:
        The exit code: 2 for misuse, 128 plus the number of a signal, 1 for anything else.
    """
    if (code := ending.status()) is not None:
        _print_document("Interrupted", "the command was interrupted")
        return code
    if isinstance(error, SystemExit):
        if terminal.is_running and not isinstance(error.__context__, BrokenPipeError):  # those two are typer's own
            return _say("UsageError", f"the model's code called sys.exit({error.code!r}); remove that call", 2)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, AttnforgeError):
        further = {"attention": error.certificate.model_dump()} if isinstance(error, UnfusedError) else {}
        return _say(type(error).__name__, str(error), 2 if isinstance(error, UsageError) else 1, further)
    if isinstance(error, OSError):
        files = [str(file) for file in (error.filename, error.filename2) if file is not None]
        if error.errno in FULL and not files:
            files = [f"standard output, or a temporary file (TMPDIR, now {tempfile.gettempdir()})"]
        return _say(type(error).__name__, ": ".join([*files[:1], error.strerror or str(error)]), 1)
    if isinstance(error, MemoryError):
        return _say("MemoryError", f"out of memory: {error or 'an allocation failed'}", 1)
    if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] in EXPORTER:
        text = f"this command needs {error.name}, which is not installed: this environment only runs bundles"
        return _say("UnavailableError", f"{text}; pip install attnforge", 1)
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # typer's errors in arguments
        from typer.rich_utils import rich_format_error

        rich_format_error(error)  # type: ignore[arg-type]
        _print_document("UsageError", error.format_message())
        return int(error.exit_code)
    if isinstance(error, typer.Abort):
        return _say("Abort", "aborted", 1)
    _print_document(type(error).__name__, str(error))
    raise error  # a bug in attnforge, shown with its traceback


def _say(kind: str, message: str, code: int, further: dict[str, Any] | None = None) -> int:
    line = shortened(plain(" ".join(message.split())), 4_000)
    terminal.err.print(Text.assemble(("error:", "red"), f" {line}"), soft_wrap=True)
    _print_document(kind, line, further)
    return code


def _print_document(kind: str, message: str, further: dict[str, Any] | None = None) -> None:
    if "--json" in sys.argv[1:] and not terminal.is_printed:
        with suppress(OSError):  # standard output is full or closed; standard error reports that
            terminal.print_json({"error": {"kind": kind, "message": plain(message)}, **(further or {})})
