"""The command line: `attnforge models | deploy | run | verify | diagnose | bench | inspect | doctor`.

Every command takes `--json`: one JSON document on standard output, everything else on standard error. The exit code is
0 where what was asked holds, 1 where a check failed or a build was refused, and 2 for misuse. Importing this package is
light: what a command needs is imported when it runs.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import Annotated

import typer
from rich.markup import escape

from attnforge.cli.benchmarking import bench
from attnforge.cli.bundles import diagnose, inspect, run, verify
from attnforge.cli.deploying import deploy
from attnforge.cli.listing import doctor, models
from attnforge.cli.terminal import err, out
from attnforge.errors import AttnforgeError, UsageError
from attnforge.version import __version__

__all__ = ["app", "main", "out"]

app = typer.Typer(
    name="attnforge",
    help="Attention models from eager PyTorch to ONNX and TensorRT: the same function, still fused, and how fast.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
for command in (models, deploy, run, verify, diagnose, bench, inspect, doctor):
    app.command()(command)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; an error raised on purpose becomes one line and an exit code. Interrupted or told to end,
    it leaves nothing half written and no process behind."""
    in_main = threading.current_thread() is threading.main_thread()  # which alone hears of signals
    before = {number: signal.signal(number, _end) for number in (signal.SIGINT, signal.SIGTERM) if in_main}
    try:
        app()
    except AttnforgeError as error:
        err.print(f"[red]error:[/] {escape(' '.join(str(error).split()))}", soft_wrap=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: object) -> None:
    """End by an exception, so that every block that is open cleans up; the exit code is the shell's for that signal."""
    signal.signal(number, signal.SIG_IGN)  # once is enough, and cleaning up is not to be interrupted
    err.print("[red]interrupted[/]")
    sys.exit(128 + number)
