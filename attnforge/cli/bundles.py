"""The commands that take one bundle: `attnforge run | verify | diagnose | inspect | sign`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import attnforge
from attnforge.atomic import check_writable
from attnforge.cli import printing
from attnforge.cli.options import Backend, Backends, BundleArgument, Force, Json, TrustedKeys
from attnforge.cli.terminal import Answer, escape, out, print_table, say, say_path, say_reasons, stages_shown
from attnforge.errors import UsageError
from attnforge.report.render import check_page, error

if TYPE_CHECKING:
    from attnforge.export.diagnosis.diagnose import Diagnosis
    from attnforge.report.quantising import QuantisingCost
    from attnforge.runtime.parity.verify import Report


def run(
    bundle: BundleArgument,
    inputs: Annotated[list[str], typer.Argument()],
    out_file: Annotated[Path, typer.Option("--out")] = Path("outputs.npz"),
    backend: Backend = "auto",
    force: Force = False,
    rebuild: Annotated[bool, typer.Option("--rebuild")] = False,
    trusted: TrustedKeys = None,
    as_json: Json = False,
) -> Answer:
    """Run a bundle on files and write its outputs.

    An image becomes a batch of one, as the model's image processor prepares it, or if the bundle has none, with values
    from 0 to 1 and the model's channels and size.

    Example: `attnforge run patch-attention-fp32 photograph.jpg --out tokens.npz`

    Example: `attnforge run cross-attention-fp32 query=q.npy memory=m.npy key_padding_mask=mask.npy`

    Args:
        inputs: An .npy file, an image, a .txt file with a text on each line, an .npz of all inputs, or name=file for
            each input.
        out_file: Output file (.npz).
        rebuild: Rebuild the TensorRT plan if this machine cannot load it.
    """
    import numpy as np

    from attnforge.bundle import PROCESSOR
    from attnforge.input_files import read_inputs, write_outputs
    from attnforge.text import read_texts

    check_writable(out_file, force)
    with attnforge.load(bundle, backend, rebuild=rebuild, trusted=trusted) as session:
        if len(inputs) == 1 and inputs[0].endswith(".txt"):
            feeds = session.tokenize(read_texts(Path(inputs[0])))
        else:
            opened = session.bundle
            settings = opened.read(PROCESSOR) if PROCESSOR in opened.manifest.files else None
            feeds = read_inputs(session.inputs, inputs, settings=settings)
        start = time.perf_counter()
        outputs = session.run(feeds)
        seconds = time.perf_counter() - start
    write_outputs(out_file, outputs)
    described = {
        name: {"shape": list(a.shape), "dtype": a.dtype.name, "finite": bool(np.isfinite(a.astype(np.float64)).all())}
        for name, a in outputs.items()
    }
    document = {"backend": session.backend, "seconds": seconds, "outputs": described, "written": str(out_file)}

    def view() -> None:
        for name, output in described.items():
            line = f"{name}: {output['dtype']}{output['shape']}"
            say(line if output["finite"] else f"{line} with NaN or infinity", None if output["finite"] else "red")
        say_path(f"ran on {session.backend} in {1e3 * seconds:.1f} ms; written to", out_file)

    return Answer(document, view)


def verify(
    bundle: BundleArgument,
    backend: Backends = None,
    html: Annotated[Path | None, typer.Option("--html")] = None,
    force: Force = False,
    metric: str | None = None,
    least: float | None = None,
    results: Path | None = None,
    trusted: TrustedKeys = None,
    as_json: Json = False,
) -> Answer:
    """Check every available backend against a float64 reference.

    Needs only the bundle: neither torch nor the model's source. Exits with 1 if a backend exceeds the parity budget or
    none could run. With --results, --backend names the model that Polygraphy ran.

    Example: `attnforge verify vit-fp16 --html vit-fp16.html`

    Example: `attnforge verify vit-fp16 --results run.json`

    Args:
        html: Write a page with charts to this file.
        metric: Task metric on the bundle's data: accuracy or cosine.
        least: Minimum value of the metric (default: about float64's).
        results: Check outputs saved by `polygraphy run --save-outputs` instead of running the bundle.
    """
    if results is not None and len(backend or ()) > 1:
        raise UsageError(f"--results takes one backend, and {len(backend or ())} were given; name one, or none")
    if html is not None:
        check_page(html, force)
    with stages_shown(as_json) as progress:
        progress(f"verify {bundle}")
        if results is not None:
            from attnforge.runtime.parity.results import verify_results

            model = backend[0] if backend else None
            report = verify_results(bundle, results, model, metric=metric, least=least, trusted=trusted)
        else:
            report = attnforge.verify(bundle, backend, metric=metric, least=least, trusted=trusted)
        if html is not None:
            from attnforge.report.verify_page import write_page

            progress(f"write {html}")
            write_page(report, attnforge.Bundle(bundle, trusted=trusted), html, force=force)

    def view() -> None:
        from attnforge.report.quantising import cost_of_quantising

        opened = attnforge.Bundle(bundle, lazily=True, trusted=trusted)
        _print_report(report, cost_of_quantising(report, opened.manifest))
        if html is not None:
            say_path("page", html)

    return Answer(report.model_dump() | ({"page": str(html)} if html is not None else {}), view, report.passed)


def diagnose(
    bundle: BundleArgument,
    backend: Backends = None,
    case: str | None = None,
    out_folder: Annotated[Path | None, typer.Option("--out")] = None,
    trusted: TrustedKeys = None,
    as_json: Json = False,
) -> Answer:
    """Find the rewrite, or the tensor and precision, where a deployment first goes wrong.

    Needs only the bundle. Exits with 1 if a backend fails verification, a rewrite changed the function, or a tensor
    adds more error than rounding explains, even within the budget. Values clipped by a quantised range are only a note
    while all backends pass and clipping costs no more than quantisation may.

    Example: `attnforge diagnose vit-fp16`

    Args:
        case: Reference case to examine (default: the failing one, or the least accurate).
        out_folder: Write files that reproduce a wrong rewrite to this folder.
    """
    with stages_shown(as_json) as progress:
        progress(f"diagnose {bundle}")
        diagnosis = attnforge.diagnose(bundle, backend, case=case, out=out_folder, trusted=trusted)
    return Answer(diagnosis.model_dump(), lambda: _print_diagnosis(diagnosis), diagnosis.healthy)


def inspect(
    bundle: BundleArgument,
    verbose: Annotated[bool, typer.Option("--verbose")] = False,
    trusted: TrustedKeys = None,
    as_json: Json = False,
) -> Answer:
    """Show a bundle's contents and how each attention site was lowered.

    Example: `attnforge inspect vit-fp16 --json`

    Args:
        verbose: Add the cost of each deploy stage.
    """
    opened = attnforge.Bundle(bundle, trusted=trusted)
    return Answer(printing.summary(opened), lambda: printing.print_bundle(opened, verbose=verbose))


def sign(
    bundle: BundleArgument,
    key: Annotated[Path, typer.Option("--key")],
    force: Force = False,
    as_json: Json = False,
) -> Answer:
    """Sign a bundle: write `model.sig` into it.

    Create a private key with `openssl ecparam -name prime256v1 -genkey -noout -out my.key`, and the public key that
    others pass as `--trusted my.pub` with `openssl ec -in my.key -pubout -out my.pub`. Needs `attnforge[signing]`.

    Example: `attnforge sign vit-fp16 --key my.key`

    Args:
        key: Elliptic-curve private key, in PEM format.
    """
    file = attnforge.sign(bundle, key, force=force)
    return Answer({"bundle": str(bundle), "signature": str(file)}, lambda: say_path("signed", file))


# --- what is printed -------------------------------------------------------------------------------------------------


def _print_report(report: Report, cost: QuantisingCost | None) -> None:
    """Print what quantising costs, what a verification measured, one row per backend, and every failure."""
    if cost is not None:
        say(cost.text, "yellow" if cost.exceeds else None)
    head = ("backend", "", "error", "eager's", "budget", "worst case", "cases")
    rows = [
        (
            name,
            "[green]passed[/]" if backend.passed else "[red]FAILED[/]",
            error(backend.error),
            error(backend.eager_error),
            error(backend.budget),
            escape(backend.case),
            str(backend.cases),
        )
        for name, backend in report.backends.items()
    ]
    print_table(head, rows, words=2, wraps=5)
    for name, backend in report.backends.items():
        for output, figures in backend.outputs.items():
            say(f"{name} {figures.text(output)}", "dim")
        if backend.metric is not None:
            say(f"{name} {backend.metric.text()}")
    for name, backend in report.backends.items():
        for failure in backend.failures:
            say(f"{name} {failure.where}, {failure.output}: {failure.reason}", "red")
            if failure.worst is not None:
                say(failure.worst.text(failure.output), indent=2)
        if backend.reason is not None:
            say(f"{name} {backend.reason}", "red")
    for warning in report.warnings:
        say(warning, "yellow")
    say_reasons(report.skipped, "{} did not run", "dim")
    say(f"checked against {report.reference}, and against float64", "dim")


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    """Print where a deployment first goes wrong, and the tensors whose error grows most."""
    finding = diagnosis.finding
    is_note = diagnosis.healthy and finding.cause == "clipping"
    say(f"{'note: ' if is_note else ''}{finding.text()}", "green" if diagnosis.healthy else "red")
    if finding.line is not None:
        say(finding.line, indent=2)
    if finding.error_without is not None and diagnosis.error is not None:
        without, final = error(finding.error_without), error(diagnosis.error)
        say(f"with this tensor exact, the final error is {without}, not {final}", indent=2)
    for file in finding.reproduction:
        out.print(f"  written: {escape(file)}", soft_wrap=True)
    rows = [
        (
            f"{tensor.largest:.3g}",
            _error_or_lost(tensor.error_in),
            _error_or_lost(tensor.error),
            f"{tensor.amplification or 0:.1f}",
            f"{escape(tensor.operator)} {escape(tensor.tensor.removeprefix(f'{tensor.module}/'))}\n"
            f"[dim]{escape(tensor.module)}[/]",
        )
        for tensor in diagnosis.tensors
    ]
    print_table(("largest", "error in", "error", "times", "tensor and module"), rows, words=0, wraps=4)
    say_reasons(diagnosis.not_traced, "intermediate tensors of {} could not be examined", "dim")
    same = "; in float64, " + " = ".join(diagnosis.same_function) if diagnosis.same_function else ""
    say(f"{diagnosis.examined} tensors of case {diagnosis.case} ({diagnosis.why}){same}", "dim")


def _error_or_lost(number: float | None) -> str:
    return "lost" if number is None else error(number)
