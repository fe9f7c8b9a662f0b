"""Experiments: measurements of attnforge, with their tables in the documentation and their claims.

An experiment is a module with an `EXPERIMENT`; :data:`MODULES` lists them all. Its figures are a results file in
`benchmarks/results/`, written atomically, with the command, the machine and the versions.
"""

from __future__ import annotations

import inspect
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from attnforge.atomic import write_whole
from attnforge.bench import results as files
from attnforge.bench.results import Interval, Results, Run
from attnforge.machine import processors, this_machine, tool_versions, versions
from attnforge.report.render import NOTHING, markdown_table

COMMAND = "python -m benchmarks run"
RESULTS = Path("benchmarks/results")

MODULES = {
    **{
        name: f"benchmarks.experiments.{name.replace('-', '_')}"
        for name in (
            "suite", "fusion", "scaling", "overhead", "masks", "mask-plans", "decoding", "eight-bits", "embeddings",
            "real-sizes", "deploy-costs", "false-alarms", "matrix", "triton-models", "triton-load", "ray-load",
        )
    },
    "polygraphy": "tests.support.polygraphy",
    "faults": "tests.support.faults.__main__",
    "export-faults": "tests.support.export_faults",
    "gpu": "benchmarks.gpu.__main__",
}  # fmt: skip
"""The module of every experiment by name. The last three have a `main` that does everything."""

Figures = dict[str, Any]
"""The content of a results file."""

Measured = Figures | Run
"""Figures before they are written; a mapping has no command and machine yet."""

START = time.perf_counter()


def say(stage: str) -> None:
    """Report progress, with the seconds since the start."""
    text = f"{time.perf_counter() - START:6.0f} s  {stage}"
    Console(stderr=True).print(text, style="dim", highlight=False, markup=False, soft_wrap=True)


# --- claims -----------------------------------------------------------------------------------------------------------

Verdict = Literal["yes", "no", "within noise", "not measured"]


def verdict(measured: Interval | float, at_most: float) -> Verdict:
    """Return whether a measurement is at most a limit: `yes`, `no`, or `within noise`.

    The whole 95% interval must lie on one side of the limit; the limit itself is allowed. A single reading has no
    interval and is compared directly.
    """
    low, high = (measured.low, measured.high) if isinstance(measured, Interval) else (measured, measured)
    return "yes" if high <= at_most else "no" if low > at_most else "within noise"


OF_LIMIT = 0.85
"""Share of a limit's speed that is to be reached."""


@dataclass(frozen=True)
class Claim:
    """A figure and its limit.

    Attributes:
        text: the quantity that may be at most `at_most`, and its model.
        measured: an estimate with its interval, or a single reading; None if nothing was measured.
        at_most: the limit.
        against: the contender that it was compared with.
        passed_over: contenders that are faster than the compared one but wrong in a reference case, each with the ratio
            of ours to it.
        wrong: the reference case in which ours is wrong.
    """

    text: str
    measured: Interval | float | None
    at_most: float
    against: str = ""
    passed_over: tuple[str, ...] = ()
    wrong: str | None = None

    @property
    def verdict(self) -> Verdict:
        """Whether the claim holds."""
        if self.wrong is not None:
            return "no"
        return "not measured" if self.measured is None else verdict(self.measured, self.at_most)

    @property
    def holds(self) -> str:
        """The verdict as Markdown."""
        if self.wrong is not None:
            return f"**no**, it is wrong in {self.wrong}"
        return "**no**" if self.verdict == "no" else self.verdict

    def __str__(self) -> str:
        text = f"{self.text} ({self.against})" if self.against else self.text
        if self.wrong is not None or self.measured is None:
            return f"{text}: {self.holds}"
        value = self.measured.value if isinstance(self.measured, Interval) else self.measured
        return f"{text}: {value:.4g}, at most {self.at_most:.4g}"


def claims_table(claims: Iterable[Claim]) -> str:
    """Return claims as a Markdown table."""
    rows = []
    for claim in claims:
        text, measured, interval = claim.text, "–", "–"
        if claim.passed_over:
            text += f"; not compared, because wrong in another case: {', '.join(claim.passed_over)}"
        if isinstance(claim.measured, Interval):
            measured = f"{claim.measured.value:.3g}"
            interval = f"{claim.measured.low:.3g}–{claim.measured.high:.3g}"
        elif claim.measured is not None:
            measured = f"{claim.measured:.3g}"
        rows.append((text, claim.against, f"{claim.at_most:.3g}", measured, interval, claim.holds))
    return markdown_table(("", "against", "at most", "measured", "95%", "holds"), rows)


# --- tables -----------------------------------------------------------------------------------------------------------

Columns = Mapping[str, Callable[[Figures], object]]
"""By heading, the function that formats a cell of a record, such as `"{seconds:.1f}".format_map`."""


def table_of(columns: Columns, records: Iterable[Figures], words: int | None = 1, missing: str = NOTHING) -> str:
    """Return records as a Markdown table.

    Args:
        columns: the columns.
        records: one record per row.
        words: number of leading text columns; the other columns are numbers, aligned right. None for all.
        missing: text of a cell whose record lacks a field.
    """

    def cell(make: Callable[[Figures], object], record: Figures) -> object:
        try:
            return make(record)
        except (KeyError, TypeError):
            return missing

    return markdown_table([*columns], [[cell(make, each) for make in columns.values()] for each in records], words)


def named(records: Mapping[str, Figures]) -> list[Figures]:
    """Return the records, each with its `name`."""
    return [{"name": name, **record} for name, record in records.items()]


# --- experiments ------------------------------------------------------------------------------------------------------


def not_held(claims: Iterable[Claim]) -> list[str]:
    """Return the claims that do not hold, one line each."""
    return [str(claim) for claim in claims if claim.verdict == "no"]


@dataclass(frozen=True)
class Experiment:
    """A measurement, and the tables and claims made from its figures.

    Attributes:
        file: name of the results file.
        measure: function that measures, with the command's options as arguments. With `subjects`, its first argument is
            a subject, and it returns that subject's figures, or results with only those; otherwise it returns all
            figures, or yields them as they grow.
        tables: what makes each Markdown table from the figures, by the name of its marks in a page; or a function that
            makes all of them, if the figures decide their names.
        claims: makes claims from the figures.
        broken: makes lines about failures from the figures; the run exits with 1 if there are any.
        subjects: subjects by name, measured one after another. Figures are written after each; `--only` measures some
            of them again and keeps the others.
        kept: do not measure subjects again that are in the results file, unless `--only` names them.
        variant: option whose value, if given, is appended to the name of the results file.
        threads: number of threads recorded with the figures, unless `measure` takes `threads`.
        packages: packages whose versions are recorded in addition to those of the tools.
    """

    file: str
    measure: Callable[..., Any]
    tables: Mapping[str, Callable[[Figures], str]] | Callable[[Figures], Mapping[str, str]]
    claims: Callable[[Figures], Iterable[Claim]] = lambda figures: ()
    broken: Callable[[Figures], Iterable[str]] | None = None
    subjects: Mapping[str, Any] = field(default_factory=dict)
    kept: bool = False
    variant: str = ""
    threads: Callable[[], int] = processors
    packages: Sequence[str] = ()

    def texts(self, figures: Figures) -> Mapping[str, str]:
        """Return the tables, by the name of their marks."""
        return self.tables(figures) if callable(self.tables) else {n: make(figures) for n, make in self.tables.items()}

    def wrong(self, figures: Figures) -> list[str]:
        """Return lines about failures."""
        return list(not_held(self.claims(figures)) if self.broken is None else self.broken(figures))

    def command(self, words: str) -> Callable[..., None]:
        """Return the function that runs the experiment, with all its options, for typer.

        Args:
            words: the command line, recorded with the figures.
        """
        parameters = list(inspect.signature(self.measure, eval_str=True).parameters.values())
        common: dict[str, Any] = {
            "results": (Path | None, f"Where to write the figures; by default {RESULTS / self.file}.")
        }
        if self.subjects:
            parameters = parameters[1:]
            common["only"] = (list[str] | None, "A subject, or a prefix of some; repeatable. The others are kept.")

        def run(**options: Any):  # type: ignore[no-untyped-def]  # typer reads the signature that is set below
            self.run(words, **options)

        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [parameter.replace(kind=keyword) for parameter in parameters]
        parameters += [
            inspect.Parameter(name, keyword, default=None, annotation=Annotated[kind, typer.Option(help=text)])
            for name, (kind, text) in common.items()
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    def run(self, command: str, results: Path | None, **options: Any) -> None:
        """Measure, write the figures, and print the tables.

        Raises:
            typer.Exit: with 1 if something is wrong.
        """
        only = options.pop("only") if self.subjects else None
        kind = options.get(self.variant)
        results = results or RESULTS / (f"{Path(self.file).stem}_{kind}.json" if kind is not None else self.file)
        threads, code = options.get("threads") or self.threads(), 0
        before = json.loads(results.read_bytes()) if (only or self.kept) and results.is_file() else {}
        try:
            for measured in self._measured(before, only, options):
                _write(measured, results, before.get("command", command), threads, self.packages)
        except typer.Exit as exit:  # from an experiment that has already written its figures
            code = exit.exit_code
        figures = json.loads(results.read_bytes())
        for name, text in self.texts(figures).items():
            print(f"\n{name}\n\n{text}")
        wrong = self.wrong(figures)
        for line in wrong:
            Console().print(line, style="red", markup=False, soft_wrap=True)
        raise typer.Exit(code or bool(wrong))

    def _measured(self, before: Figures, only: Sequence[str] | None, options: Mapping[str, Any]) -> Iterator[Measured]:
        if not self.subjects:
            made = self.measure(**options)
            yield from made if isinstance(made, Iterator) else [made]
            return
        models = before.get("models", {})
        earlier = Results.model_validate(before) if isinstance(models, list) else None
        for name in chosen_of(self.subjects, only):
            if earlier is None and not only and name in models:
                continue
            say(f"{name} …")
            made = self.measure(self.subjects[name], **options)
            if isinstance(made, Results):
                earlier = made if earlier is None else self._merged(earlier, made, name)
                yield earlier
            else:
                models[name] = made
                yield {"models": {name: models[name] for name in self.subjects if name in models}}

    def _merged(self, earlier: Results, made: Results, name: str) -> Results:
        """Return the results of a subject together with the earlier results of the others."""
        names = list(self.subjects)
        others = {*names} - {name}
        models = [model for model in earlier.models if model.name in others] + made.models
        growth = [growth for growth in earlier.growth if growth.model in others] + made.growth
        made.models = sorted(models, key=lambda model: names.index(model.name))
        made.growth = sorted(growth, key=lambda growth: names.index(growth.model))
        made.seconds += earlier.seconds
        return made


def chosen_of(subjects: Iterable[str], only: Sequence[str] | None) -> list[str]:
    """Return the subjects that match the names or prefixes in `only`; all by default.

    Raises:
        typer.BadParameter: a name matches no subject.
    """
    names = list(subjects)
    if not only:
        return names
    by_name = {word: [word] if word in names else [name for name in names if name.startswith(word)] for word in only}
    if unknown := [word for word, matches in by_name.items() if not matches]:
        raise typer.BadParameter(f"no subject {unknown[0]!r}; known: {', '.join(names)}")
    return [name for name in names if any(name in matches for matches in by_name.values())]


def experiment_of(name: str) -> Experiment | None:
    """Return the experiment of that name; None if its module has only a `main`."""
    experiment: Experiment | None = getattr(import_module(MODULES[name]), "EXPERIMENT", None)
    return experiment


def run(name: str, arguments: Sequence[str]) -> None:
    """Run an experiment with the options of a command line.

    Raises:
        typer.BadParameter: there is no such experiment.
        SystemExit: at the end, with 0; with 1 if something is wrong, and with 2 for an invalid option.
    """
    if name not in MODULES:
        raise typer.BadParameter(f"no experiment {name!r}; known: {', '.join(MODULES)}")
    experiment = experiment_of(name)
    app = typer.Typer(add_completion=False)
    if experiment is None:
        sys.argv[1:] = arguments  # as with python -m
        app.command(name)(import_module(MODULES[name]).main)
    else:
        about = inspect.getmodule(experiment.measure).__doc__
        app.command(name, help=about)(experiment.command(shlex.join([*COMMAND.split(), name, *arguments])))
    typer.main.get_command(app)(list(arguments), prog_name=f"{COMMAND} {name}")


# --- results ----------------------------------------------------------------------------------------------------------


def machine(threads: int) -> dict[str, Any]:
    """Return the machine that figures were measured on, and the number of threads."""
    here = this_machine(gpus=False)
    return {"system": here.system, "processor": here.processor, "threads": threads}


def where(figures: Mapping[str, Any]) -> str:
    """Return the machine that figures were measured on, and the command that reproduces them, as text."""
    about = figures["machine"] if "machine" in figures else figures["environment"]
    processor = about["processor"] if "processor" in about else about["machine"]["processor"]
    return f"{processor}, {about['threads']} threads; `{figures['command']}`"


def _write(measured: Measured, results: Path, command: str, threads: int, packages: Sequence[str] = ()) -> None:
    """Write a results file with the command, and with machine and versions if the figures lack them."""
    if isinstance(measured, Run):
        measured.command = measured.command or command
        files.write(measured, results)
        return
    about = {"command": command, "machine": machine(threads), "tools": {**tool_versions(), **versions(packages)}}
    results.parent.mkdir(parents=True, exist_ok=True)
    write_whole(results, f"{json.dumps({**about, **measured}, indent=2)}\n".encode())


# --- the tables of README.md and docs/ --------------------------------------------------------------------------------


def tables() -> Iterator[tuple[str, Path, str]]:
    """Yield every table: the name of its marks, its results file, and its text."""
    for experiment in filter(None, map(experiment_of, MODULES)):
        for file in sorted(RESULTS.glob(f"{Path(experiment.file).stem}*.json")):  # includes other machines and variants
            for name, text in experiment.texts(json.loads(file.read_bytes())).items():
                yield name, file, text


def pages(root: Path) -> list[Path]:
    """Return the pages that may contain tables."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def refresh(root: Path = Path()) -> list[tuple[str, Path]]:
    """Write every table to the pages under `root` that have marks for it.

    Returns:
        the name and the results file of every table that was written.
    """
    return [(name, file) for name, file, text in tables() for page in pages(root) if put(text, name, file, page)]


def put(table: str, name: str, results: Path, page: Path) -> bool:
    """Put a table between a page's marks for `name` and this results file; return whether the page has such marks."""
    start, end = f"<!-- {name}: from {results.as_posix()} -->", f"<!-- /{name} -->"
    head, start_mark, rest = page.read_text(encoding="utf-8").partition(start)
    _, end_mark, tail = rest.partition(end)
    if start_mark and end_mark:
        write_whole(page, f"{head}{start}\n{table}\n{end}{tail}".encode())
    return bool(start_mark and end_mark)
