"""Check that `polygraphy run` agrees with `attnforge verify` on every seeded fault, and on every
unaltered registered model.

`python -m benchmarks run polygraphy` packages the unaltered bundles, runs these and every faulty one with Polygraphy's
command, the `attnforge` runner and the packaged inputs, float64 outputs and comparison, and passes what the runs
saved to `attnforge verify --results`. It writes the results file and the table in `docs/guides/polygraphy.md`, and
exits with 1 if two of the three differ.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polygraphy.logger import G_LOGGER
from polygraphy.tools import main as polygraphy_main

import attnforge
from attnforge.atomic import temporary_folder
from attnforge.bundle import Bundle
from attnforge.errors import AttnforgeError, InputError, RunError
from attnforge.model.registry import MODELS
from attnforge.report.render import markdown_table
from attnforge.runtime.parity.results import verify_results
from attnforge.runtime.parity.verify import BackendReport
from attnforge.serving.polygraphy.folder import BUDGET, BUNDLE, FLOAT64, INPUTS, package
from benchmarks.experiment import Claim, Experiment, say, where
from tests.support.bundles import example_of
from tests.support.faults.bench import Bench, verified
from tests.support.faults.catalogue import FAULTS
from tests.support.faults.subjects import DECODERS, PRECISIONS, deploy

BACKEND = "onnxruntime-cpu"


@dataclass(frozen=True)
class Verdicts:
    """The three verdicts on one bundle.

    Attributes:
        model, precision: those of the bundle.
        fault: the fault that was put into it, or None.
        verify: whether `attnforge verify` passes it.
        run: whether `polygraphy run` does.
        results: whether `attnforge verify --results` passes the saved outputs of that run.
        alike: whether verify and verify --results agree on every output of every case.
    """

    model: str
    precision: str
    fault: str | None
    verify: bool
    run: bool
    results: bool
    alike: bool

    @property
    def agree(self) -> bool:
        return self.verify == self.run == self.results and self.alike


def polygraphy(*words: object) -> tuple[int, str]:
    """Run a Polygraphy command in this process, and return its exit code and output."""
    printed = io.StringIO()
    G_LOGGER.once_logged.clear()  # messages that it logs once per process are logged for every command
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = polygraphy_main([str(word) for word in words])
    return int(code or 0), printed.getvalue()


def budget_options(folder: Path) -> list[object]:
    """Return the options of a run that is checked against the budget of a packaged bundle."""
    inputs = ["--load-inputs", folder / INPUTS, "--load-outputs", folder / FLOAT64]
    return [*inputs, "--compare-func-script", folder / BUDGET]


def verdicts(
    bundle: Bundle, packaged: Path, scratch: Path, report: BackendReport | None, fault: str | None = None
) -> Verdicts:
    """Return the three verdicts on a bundle.

    Args:
        bundle: the bundle to run.
        packaged: the folder to which the unaltered bundle was packaged.
        scratch: folder for the run's results.
        report: verify's report; None if the bundle does not run, which Polygraphy must find, too.
        fault: the bundle's fault.
    """
    manifest = bundle.manifest
    saved = scratch / "run.json"
    saved.unlink(missing_ok=True)
    runner = ["--attnforge", bundle.path, "--attnforge-backend", BACKEND, "--save-outputs", saved]
    try:
        code, printed = polygraphy("run", packaged / BUNDLE / "canonical.onnx", *runner, *budget_options(packaged))
    except RunError as error:
        code, printed = 1, str(error)
    if report is None:
        passed = False
        with contextlib.suppress(AttnforgeError):
            passed = verify_results(packaged / BUNDLE, saved, BACKEND).passed
        return Verdicts(manifest.name, manifest.precision, fault, False, code == 0, passed, True)
    assert saved.exists(), printed
    (judged,) = verify_results(packaged / BUNDLE, saved, BACKEND).backends.values()
    alike = [(c.case, c.output, c.passed) for c in report.comparisons] == [
        (c.case, c.output, c.passed) for c in judged.comparisons
    ]
    return Verdicts(manifest.name, manifest.precision, fault, report.passed, code == 0, judged.passed, alike)


def of_faults(name: str, precision: str, folder: Path, faults: set[str] | None = None) -> Iterator[Verdicts]:
    """Yield the three verdicts on an unaltered subject, and on every fault in it.

    Args:
        name, precision: those of the subject.
        folder: folder to write to.
        faults: names of the faults, by default all.
    """
    bundle = deploy(name, precision, folder / f"{name}-{precision}")
    bench = Bench(bundle, name, folder / f"{name}-{precision}-altered")
    packaged = folder / f"{name}-{precision}-packaged"
    package(bundle, packaged)
    yield verdicts(bundle, packaged, folder, bench.unaltered)
    for fault in FAULTS:
        if name in fault.subjects and precision not in fault.not_in and (faults is None or fault.name in faults):
            _, altered = bench.altered(fault)
            report = None
            with contextlib.suppress(InputError, RunError):
                report = verified(altered)
            yield verdicts(altered, packaged, folder, report, fault.name)


def of_registered(name: str, precision: str, folder: Path) -> Verdicts:
    """Return the three verdicts on an unaltered registered model."""
    module, args, shapes = example_of(name)
    to = folder / f"{name}-{precision}"
    bundle = attnforge.deploy(module, args, to, shapes, precision, ["onnxruntime"], name, tune=False, cache=False)
    package(bundle, folder / f"{to.name}-packaged")
    return verdicts(bundle, folder / f"{to.name}-packaged", folder, verified(bundle))


def table(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    rows = [Verdicts(**row) for row in figures["verdicts"]]
    kinds = {"as deployed": [r for r in rows if r.fault is None], "with a fault": [r for r in rows if r.fault]}
    lines = []
    for kind, of_kind in kinds.items():
        for precision in dict.fromkeys(row.precision for row in of_kind):
            same = [row for row in of_kind if row.precision == precision]
            passed = [sum(getattr(row, what) for row in same) for what in ("verify", "run", "results")]
            lines.append((kind, precision, len(same), *passed, sum(not row.agree for row in same)))
    header = ("bundles", "precision", "number", "verify passes", "polygraphy run", "verify --results", "disagree")
    return f"{markdown_table(header, lines, words=2)}\n\n{where(figures)}"


def claims(figures: dict[str, Any]) -> Iterator[Claim]:
    """Yield the claim that all three agree on every bundle."""
    apart = [row for each in figures["verdicts"] if not (row := Verdicts(**each)).agree]
    yield Claim("bundles on which the three differ", len(apart), 0, "; ".join(map(str, apart)))


def measure() -> dict[str, Any]:
    """Measure the three verdicts on every fault and on every registered model."""
    rows = []
    with temporary_folder() as folder:
        (folder / "registered").mkdir()
        for name in MODELS:
            for precision in ("fp32", "fp16", "bf16"):
                say(f"{name} {precision}")
                rows.append(of_registered(name, precision, folder / "registered"))
        for name, precisions in PRECISIONS.items():
            for precision in precisions if name not in DECODERS else ():  # Polygraphy cannot run their steps
                say(f"faults in {name} {precision}")
                rows += of_faults(name, precision, folder)
    return {"verdicts": [asdict(row) for row in rows]}


EXPERIMENT = Experiment("polygraphy.json", measure, {"polygraphy": table}, claims, threads=lambda: 1)
