"""Demo on real input, for `attnforge demo`.

Deploys the trained digit classifier and patch attention in fp32 and fp16, verifies every bundle, classifies the test
set of handwritten digits with every backend, runs patch attention on a photograph, and prints a table of results per
backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor

import attnforge
from attnforge.arrays import Array
from attnforge.atomic import write_whole
from attnforge.bundle import Bundle, Source
from attnforge.errors import UnavailableError
from attnforge.model.data import load_digits_split, photographs
from attnforge.model.registry import build_model
from attnforge.report import render
from attnforge.report.render import markdown_table
from attnforge.report.verify_page import write_page
from attnforge.runtime.backends.registry import BACKENDS, fused_by
from attnforge.runtime.parity.verify import Report
from attnforge.runtime.race import medians

console = Console(highlight=False)
TITLES = ("backend", "fused", "error", "budget", "accuracy", "as eager", "median\nms", "plan\nMB")

SIDE = 112
"""Height and width of the photograph: 784 tokens. Of 224, attention in fp16 on a CPU would take minutes."""

DIGITS = "patch-attention-digits"
MODELS: dict[str, dict[str, Any]] = {
    DIGITS: {},
    "patch-attention": {"image_size": SIDE, "max_image_size": SIDE},
}
"""The demo's models, with their options."""


@dataclass
class Row:
    """The row of a backend for a model at a precision. A cell is empty if this machine or model has no such figure."""

    model: str
    precision: str
    backend: str
    fused: str = render.NOTHING
    error: str = ""
    budget: str = ""
    accuracy: str = ""
    agreement: str = ""
    median_ms: str = ""
    plan_mb: str = ""


@dataclass(frozen=True)
class Demo:
    """Result of the demo.

    Attributes:
        passed: whether every bundle was verified.
        page: path of the first bundle's page.
        seconds: duration.
        notes: why backends did not run.
        rows: rows of the table, those of a model at a precision together.
    """

    passed: bool
    page: str
    seconds: float
    notes: list[str]
    rows: list[Row]

    def show(self) -> None:
        """Print a table with a section per model and precision, the verdict and where the pages are."""
        table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
        for i, title in enumerate(TITLES):
            table.add_column(title, justify="right" if i else "left", vertical="bottom", no_wrap=True)
        for (name, precision), section in groupby(self.rows, lambda row: (row.model, row.precision)):
            table.add_row(f"\n[bold]{name}\nin {precision}[/]")
            for row in section:
                table.add_row(*astuple(row)[2:])
        console.print(table)
        console.print()
        for note in self.notes:
            console.print(note, style="dim", markup=False)
        verdict = "All bundles verified" if self.passed else "[red]A bundle FAILED its verification[/]"
        console.print(
            f"{verdict} in {self.seconds:.0f} s. Bundles, pictures, pages and report.md are in the folder of this page:"
        )
        console.print(self.page, soft_wrap=True, markup=False)


def run(out: Path, progress: Callable[[str], None]) -> Demo:
    """Deploy, verify and run the trained digit classifier and patch attention, in fp32 and fp16, on real input.

    Args:
        out: folder for bundles, pictures, pages and report; files of an earlier demo are replaced.
        progress: receives what is being done.

    Raises:
        UnavailableError: the packages with the images or for pages are not installed.
    """
    if missing := [name for name in ("sklearn", "jinja2", "matplotlib") if find_spec(name) is None]:
        raise UnavailableError(f"the demo needs {', '.join(missing)}; pip install 'attnforge[data,report]'")
    start = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    skipped: list[tuple[str, str]] = []
    pages: list[Path] = []
    passed = True
    for precision in ("fp32", "fp16"):
        for name in MODELS:
            progress(f"deploy and verify {name} in {precision}")
            module, _, dynamic_shapes = build_model(name, **MODELS[name])
            bundle = attnforge.deploy(
                module, (real_example(name),), out / f"{name}-{precision}", dynamic_shapes, precision, name=name,
                force=True, source=Source(kind="registered", name=name, options=dict(MODELS[name])),
            )  # fmt: skip
            report = attnforge.verify(bundle)
            pages.append(write_page(report, bundle, out / f"{name}-{precision}.html", force=True))
            passed = passed and report.passed
            reasons = render.by_reason(report.skipped)
            skipped += [(f"{name} in {precision}", f"{names} did not run: {reason}") for names, reason in reasons]
            rows += rows_of(bundle, report, out)
    notes = [f"{', '.join(bundles)}: {note}" for note, bundles in render.grouped(skipped).items()]
    _write_report(out / "report.md", rows, notes, passed)
    return Demo(passed, str(pages[0]), time.perf_counter() - start, notes, rows)


def real_example(name: str) -> Tensor:
    """Return real input as the example, so that the bundle is verified on it too: (32, 1, 8, 8) digits or
    (1, 3, 112, 112) pixels, float32 from 0 to 1."""
    return _real_images(name)[:32]


def _real_images(name: str) -> Tensor:
    return load_digits_split().test_images if name == DIGITS else photographs(SIDE, SIDE)[:1]


def rows_of(bundle: Bundle, report: Report, out: Path) -> list[Row]:
    """Run a bundle on real input, in eager and on every verified backend.

    Args:
        bundle: bundle of one of the demo's models.
        report: its verification.
        out: folder for pictures of the outputs.

    Returns:
        eager's row, then a row for every backend that ran here or has a plan in the bundle.
    """
    name = bundle.manifest.name
    images = _real_images(name).numpy()
    rows = list(_rows(bundle, report))
    reference: Array | None = None
    for row in rows:
        if row.backend == "eager" or row.backend in report.backends:
            module = build_model(name, **MODELS[name]).module if row.backend == "eager" else None
            with attnforge.load(bundle, row.backend, module=module) as session:
                feed = images.astype(session.inputs[0].dtype)
                output = session(feed).astype(np.float64)
                times = medians({row.backend: partial(session, feed)}, rounds=5, seconds=float("inf"))
            row.median_ms = f"{times[row.backend]:.1f}"
            answer = output.argmax(-1) if name == DIGITS else output[0]
            reference = answer if reference is None else reference  # eager is the first
            _compare(row, answer, reference, out)
    return rows


def _rows(bundle: Bundle, report: Report) -> Iterator[Row]:
    """Yield a row for eager, with its error in the case where a backend failed or came closest to its budget, for every
    verified backend, and for every backend that has a plan but did not run."""
    manifest = bundle.manifest
    new_row = partial(Row, manifest.name, manifest.precision)
    errors = [(not b.passed, b.error / b.budget if b.budget else 0.0, b.eager_error) for b in report.backends.values()]
    yield new_row("eager", error=render.error(max(errors)[-1]) if errors else "")
    for backend in BACKENDS:
        verified = report.backends.get(backend)
        engines = manifest.targets[backend].engines if backend in manifest.targets else []
        if verified is None and not engines:
            continue
        fused = fused_by(manifest.attention, backend)
        row = new_row(backend, render.NOTHING if isinstance(fused, str) else f"{fused} of {manifest.attention.sites}")
        if engines:
            row.plan_mb = f"{engines[0].size / 1e6:.1f}"
        if verified is None:
            row.error = "not run"  # the notes say why
        else:
            row.error, row.budget = render.error(verified.error), render.error(verified.budget)
        yield row


def _compare(row: Row, answer: Array, reference: Array, out: Path) -> None:
    """Compare a backend's answer with eager's: the classes of the test set, (n,) int64, with its labels too; or the
    tokens of the photograph, (tokens, features), whose norms are drawn."""
    if row.model == DIGITS:
        row.accuracy = f"{np.mean(answer == load_digits_split().test_labels.numpy()):.2%}"
        row.agreement = f"{np.mean(answer == reference):.2%}"
    else:
        cosine = np.sum(answer * reference) / np.linalg.norm(answer) / np.linalg.norm(reference)
        row.agreement = f"cos {cosine:.6f}"
        _draw(np.linalg.norm(answer, axis=-1), out / f"photograph-{row.backend}-{row.precision}.png")


def _draw(lengths: Array, file: Path) -> None:
    """Draw one square per token, row by row, from black (smallest norm) to white (largest)."""
    side = round(len(lengths) ** 0.5)
    grid = lengths.reshape(side, side)
    scaled = (grid - grid.min()) / max(float(np.ptp(grid)), 1e-12)
    Image.fromarray((255 * scaled).astype(np.uint8)).resize((4 * side, 4 * side), Image.Resampling.NEAREST).save(file)


def _write_report(file: Path, rows: Sequence[Row], notes: Sequence[str], passed: bool) -> None:
    lines = [
        "# attnforge demo",
        "",
        f"Verification: {'passed' if passed else 'FAILED'}. `error` and `budget` are relative, against the same",
        "weights in float64, for the reference case that came closest to its budget; the real input is one of the",
        "cases. `fused` counts attention sites that the backend compiled to one kernel each; – if unknown.",
        "`as eager` is the share of equal classes, or the outputs' cosine. Compare times only within this table.",
        "",
        markdown_table(["model", "precision", *(title.replace("\n", " ") for title in TITLES)], map(astuple, rows)),
        "",
        *(f"- {note}" for note in notes),
    ]
    write_whole(file, ("\n".join(lines) + "\n").encode())
