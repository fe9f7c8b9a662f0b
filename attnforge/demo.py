"""The main job on real input: `python -m attnforge.demo [--out FOLDER]`.

Deploys the trained digit classifier and patch attention in fp32 and fp16, verifies every bundle, classifies the held-
out scans of handwritten digits through every backend, runs patch attention on a photograph, and says what came out in
one table.
"""

from __future__ import annotations

import statistics
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

import attnforge
from attnforge.arrays import Array
from attnforge.bundle import Bundle, Source
from attnforge.errors import UnavailableError
from attnforge.input_files import image_to_input
from attnforge.model.digits import load_digits_split
from attnforge.model.registry import build_model
from attnforge.report.verify_page import write_page
from attnforge.runtime.backends.registry import BACKENDS, WITHOUT_TARGET
from attnforge.runtime.parity.verify import Report

console = Console()
COLUMNS = ("model", "backend", "precision", "fused", "error", "budget", "accuracy", "as eager", "median ms", "plan MB")


@dataclass
class Row:
    """A line of the table. Empty cells are what this machine or this model cannot say."""

    model: str
    backend: str
    precision: str
    fused: str = ""
    error: str = ""
    budget: str = ""
    accuracy: str = ""
    agreement: str = ""
    median_ms: str = ""
    plan_mb: str = ""

    def cells(self) -> list[str]:
        return list(vars(self).values())


def main(
    out: Annotated[Path, typer.Option(help="Folder for bundles, pictures and report.")] = Path("build/demo"),
) -> None:
    """Deploy, verify and run the trained digit classifier and patch attention, in fp32 and fp16, on real input."""
    start = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    notes: dict[str, str] = {}
    passed = True
    for precision in ("fp32", "fp16"):
        for name, on_real_input in (("patch-attention-digits", digits), ("patch-attention", photograph)):
            console.print(f"deploy and verify {name} in {precision} …", style="dim")
            bundle = deploy(name, precision, out / f"{name}-{precision}", real_example(name))
            report = attnforge.verify(bundle)
            with suppress(UnavailableError):  # without the extra there are no pages
                write_page(report, bundle, out / f"{name}-{precision}.html", force=True)
            passed = passed and report.passed
            notes |= report.skipped
            rows += on_real_input(bundle, report, out)
    _print(rows)
    _write_report(out / "report.md", rows, notes, passed)
    for backend, reason in notes.items():
        console.print(f"[dim]{backend} did not run: {escape(reason)}[/]", soft_wrap=True)
    verdict = "All bundles verified" if passed else "[red]A bundle FAILED its verification[/]"
    seconds = time.perf_counter() - start
    console.print(f"{verdict} in {seconds:.0f} s. Bundles, pictures, pages and report.md are in {out}.", soft_wrap=True)
    if not passed:
        raise typer.Exit(1)


def real_example(name: str) -> Tensor:
    """Real input as the example, so that the bundle is verified on it too."""
    if name == "patch-attention-digits":
        return load_digits_split().test_images[:32]
    pixels = np.asarray(_sample_photograph(), np.float32) / 255.0
    return torch.from_numpy(pixels.transpose(2, 0, 1)[None].copy())


def deploy(name: str, precision: str, folder: Path, example: Tensor) -> Bundle:
    """Deploy a registered model for every target that this machine can build."""
    module, _, dynamic_shapes = build_model(name)
    source = Source(kind="registered", name=name)
    return attnforge.deploy(module, (example,), folder, dynamic_shapes, precision, name=name, force=True, source=source)


def digits(bundle: Bundle, report: Report, out: Path) -> list[Row]:
    """Classify the held-out scans through every backend."""
    del out
    split = load_digits_split()
    images, labels = split.test_images.numpy(), split.test_labels.numpy()
    reference: Array | None = None
    rows = []
    for row, session in _sessions(bundle, report):
        if session is not None:
            logits, row.median_ms = _timed(session, images.astype(session.inputs[0].dtype))
            predicted = logits.astype(np.float64).argmax(-1)
            reference = predicted if reference is None else reference
            row.accuracy = f"{np.mean(predicted == labels):.2%}"
            row.agreement = f"{np.mean(predicted == reference):.2%}"
        rows.append(row)
    return rows


def photograph(bundle: Bundle, report: Report, out: Path) -> list[Row]:
    """Run patch attention on a photograph, and show how long every token of its output is."""
    picture = _sample_photograph()
    rows = []
    reference: Array | None = None
    for row, session in _sessions(bundle, report):
        if session is not None:
            tokens, row.median_ms = _timed(session, image_to_input(session.inputs[0], picture))
            tokens = tokens[0].astype(np.float64)
            reference = tokens if reference is None else reference
            agreement = np.sum(tokens * reference) / np.linalg.norm(tokens) / np.linalg.norm(reference)
            row.agreement = f"cos {agreement:.6f}"
            _draw(np.linalg.norm(tokens, axis=-1), out / f"photograph-{row.backend}-{row.precision}.png")
        rows.append(row)
    return rows


def _sessions(bundle: Bundle, report: Report) -> Any:
    """Eager, then every backend of the bundle, each as a row and a session; None where this machine cannot run it."""
    manifest, attention = bundle.manifest, bundle.manifest.attention
    module = build_model(manifest.name).module
    worst = next(iter(report.backends.values()), None)
    eager = Row(manifest.name, "eager", manifest.precision, f"– / {attention.sites}")
    if worst is not None:
        eager.error = f"{worst.eager_error:.1e}"
    yield eager, attnforge.load(bundle, "eager", module=module)
    for backend in BACKENDS:
        target = backend.partition("-")[0]
        if backend in WITHOUT_TARGET:  # it runs the canonical graph, and nothing is told of what it fuses
            if (found := report.backends.get(backend)) is not None:
                errors = {"error": f"{found.error:.1e}", "budget": f"{found.budget:.1e}"}
                row = Row(manifest.name, backend, manifest.precision, f"– / {attention.sites}", **errors)
                yield row, attnforge.load(bundle, backend)
            continue
        if target not in manifest.targets or (backend.endswith("cuda") and backend not in report.backends):
            continue
        row = Row(manifest.name, backend, manifest.precision, f"{attention.fused[target]} / {attention.sites}")
        if engines := manifest.targets[target].engines:
            row.plan_mb = f"{engines[0].size / 1e6:.1f}"
        found = report.backends.get(backend)
        if found is None:
            row.error = "needs a GPU"
            yield row, None
            continue
        row.error, row.budget = f"{found.error:.1e}", f"{found.budget:.1e}"
        yield row, attnforge.load(bundle, backend)


def _timed(session: attnforge.Session, feed: Array, rounds: int = 5) -> tuple[Array, str]:
    times = []
    result: Array = session(feed)
    for _ in range(rounds):
        start = time.perf_counter()
        result = session(feed)
        times.append(time.perf_counter() - start)
    return result, f"{1e3 * statistics.median(times):.1f}"


def _sample_photograph() -> Image.Image:
    """The middle of scikit-learn's sample photograph, 224 by 224."""
    try:
        from sklearn.datasets import load_sample_image
    except ImportError as error:
        raise UnavailableError("the demo's photograph is scikit-learn's; pip install attnforge[data]") from error
    picture = Image.fromarray(load_sample_image("china.jpg"))
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    return picture.crop((left, top, left + side, top + side)).resize((224, 224), Image.Resampling.BICUBIC)


def _draw(lengths: Array, file: Path) -> None:
    """One square a token, row by row, from black (shortest) to white (longest)."""
    side = round(len(lengths) ** 0.5)
    grid = lengths.reshape(side, side)
    scaled = (grid - grid.min()) / max(float(np.ptp(grid)), 1e-12)
    Image.fromarray((255 * scaled).astype(np.uint8)).resize((4 * side, 4 * side), Image.Resampling.NEAREST).save(file)


def _print(rows: list[Row]) -> None:
    table = Table(*COLUMNS, box=None, header_style="bold", pad_edge=False)
    for row in rows:
        table.add_row(*row.cells())
    Console(width=max(console.width, 130)).print(table)


def _write_report(file: Path, rows: list[Row], notes: dict[str, str], passed: bool) -> None:
    lines = [
        "# attnforge demo",
        "",
        f"Verification: {'passed' if passed else 'FAILED'}. `error` and `budget` are relative, against the same",
        "weights in float64, for the reference case that came closest to its budget; the real input is one of them.",
        "`as eager` is the share of equal classes, or the cosine of the outputs. `fused` counts compiled kernels.",
        "Times mean something only within this table.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(row.cells()) + " |" for row in rows),
        "",
        *(f"- {backend} did not run: {reason}" for backend, reason in notes.items()),
    ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
