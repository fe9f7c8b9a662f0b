"""The command line: `attnforge models | deploy | run | generate | verify | diagnose | bench | inspect | sign |
package | demo | doctor`.

Every command takes `--json`: one JSON document on standard output, everything else on standard error. The exit code is
0 for success, 1 for a failed check or a refused build, and 2 for misuse. Importing this package is cheap: each command
imports what it needs when it runs.
"""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from attnforge.cli import ending, terminal
from attnforge.cli.benchmarking import bench
from attnforge.cli.bundles import diagnose, generate, inspect, run, sign, verify
from attnforge.cli.deploying import deploy, package
from attnforge.cli.listing import demo, doctor, models
from attnforge.cli.refusing import report_error
from attnforge.cli.terminal import answering, out
from attnforge.version import __version__

__all__ = ["app", "main", "out"]

FIRST_STEPS = """\
attnforge demo          deploy and verify two small models on real input, in a few minutes
attnforge deploy MODEL  deploy a model of your own; attnforge deploy --help says what MODEL can be
attnforge doctor        show what this machine can build and run, and how to install the rest"""

app = typer.Typer(
    name="attnforge",
    help="Deploy PyTorch attention models to ONNX Runtime, OpenVINO and TensorRT, and verify accuracy, fusion and "
    "speed.",
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


class _Command(TyperCommand):
    """A command whose help, with `--json`, is a JSON document: `{"help": …}`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if "--json" in sys.argv[1:]:
            with redirect_stdout(io.StringIO()) as text:
                super().format_help(ctx, formatter)
            terminal.print_json({"help": text.getvalue()})
        else:
            super().format_help(ctx, formatter)


for command in (models, deploy, run, generate, verify, diagnose, bench, inspect, sign, package, demo, doctor):
    app.command(cls=_Command)(answering(command))


@app.callback(invoke_without_command=True)
def _without_command(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    terminal.begin(running=True)
    if version:
        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(FIRST_STEPS)


def main() -> None:
    """Run the command line. Any exception becomes one line, one exit code and, with `--json`, a document. When it is
    interrupted or terminated, no half-written file and no child process remains."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # the terminal's encoding may lack characters
    terminal.begin()
    try:
        with ending.orderly():
            status = app(standalone_mode=False)
    except BaseException as error:
        status = report_error(error)
    sys.exit(status if isinstance(status, int) else 0)
