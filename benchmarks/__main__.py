"""The laboratory's command line: `python -m benchmarks run NAME | list | pages | claims`."""

from __future__ import annotations

import ast
import json
from importlib.util import find_spec
from pathlib import Path

import typer

from benchmarks import experiment
from benchmarks.experiment import MODULES, RESULTS, claims_table, experiment_of, refresh

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Run the experiments that measure attnforge.")


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []})
def run(context: typer.Context, name: str) -> None:
    """Run an experiment and write its results file; `run NAME --help` shows its options."""
    experiment.run(name, context.args)


@app.command("list")
def list_() -> None:
    """List the experiments."""
    for name, module in MODULES.items():
        spec = find_spec(module)
        assert spec is not None and spec.origin is not None
        about = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
        print(f"{name:15}{' '.join(about.partition(chr(10) * 2)[0].split())}")


@app.command()
def pages() -> None:
    """Regenerate the tables of README.md and docs/ from the results files."""
    for name, file in refresh():
        print(f"{name} from {file}")


@app.command()
def claims() -> None:
    """Print the claims of all experiments, checked against the results files."""
    for name, each in {name: each for name in MODULES if (each := experiment_of(name)) is not None}.items():
        file = RESULTS / each.file
        if file.is_file() and (made := list(each.claims(json.loads(file.read_bytes())))):
            print(f"{name}\n\n{claims_table(made)}\n")


if __name__ == "__main__":
    app()
