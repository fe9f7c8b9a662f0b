"""The commands that take one bundle: `attnforge run | verify | diagnose | inspect | sign`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

import attnforge
from attnforge.cli import printing
from attnforge.cli.answers import Answer
from attnforge.cli.options import Backends, BundleArgument, Json, TrustedKeys, check_unwritten
from attnforge.cli.terminal import say_path, stages_shown
from attnforge.errors import UsageError


def run(
    bundle: BundleArgument,
    inputs: Annotated[
        list[str],
        typer.Argument(help="One .npy, an image, or an .npz with every input by name; or name=file for each."),
    ],
    out_file: Annotated[Path, typer.Option("--out", help="Where to write the outputs, as .npz.")] = Path("outputs.npz"),
    backend: Annotated[str, typer.Option("--backend", "-b", help="auto, or a backend by name.")] = "auto",
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Build the TensorRT plan again where this machine cannot load it.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the outputs.")] = False,
    trusted: TrustedKeys = None,
    as_json: Json = False,
) -> Answer:
    """Run a bundle on files and write its outputs.

    An image becomes a batch of one with values from 0 to 1, in the channels the model takes, resized to the size it
    takes.

    Example: `attnforge run patch-attention-fp32 photograph.jpg --out tokens.npz`

    Example: `attnforge run cross-attention-fp32 query=q.npy memory=m.npy key_padding_mask=mask.npy`
    """
    import numpy as np

    from attnforge.input_files import read_inputs, write_outputs

    check_unwritten(out_file, force)
    with attnforge.load(bundle, backend, rebuild=rebuild, trusted=trusted) as session:
        feeds = read_inputs(session.inputs, inputs)
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
        printing.print_outputs(described)
        say_path(f"ran on {session.backend} in {1e3 * seconds:.1f} ms; written to", out_file)

    return Answer(document, view)


def verify(
    bundle: BundleArgument,
    backend: Backends = None,
    metric: Annotated[
        str | None, typer.Option(help="Measure the task too, on the bundle's real data: accuracy or cosine.")
    ] = None,
    least: Annotated[float | None, typer.Option(help="What the metric must reach; by default about float64's.")] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            help="Run nothing, and judge what this file of polygraphy run --save-outputs holds, whose inputs were "
            "those of package --for polygraphy. A --backend says whose model was run."
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with charts to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the page.")] = False,
    trusted: TrustedKeys = None,
    as_json: Json = False,
) -> Answer:
    """Hold every backend that this machine can run to the parity budget, against eager in float64.

    Needs the bundle alone: no torch, no source. Exits with 1 where a backend misses the budget or none could run.

    Example: `attnforge verify vit-fp16`

    Example: `attnforge verify vit-fp16 --html vit-fp16.html`

    Example: `attnforge verify vit-fp16 --results run.json`
    """
    if results is not None and len(backend or ()) > 1:
        raise UsageError(f"results are of one model, and {len(backend or ())} backends are named; name one, or none")
    if html is not None:
        from attnforge.report.render import check_page

        check_page(html, force)
    with stages_shown(as_json) as progress:
        progress(f"verify {bundle}")
        if results is not None:
            from attnforge.runtime.parity.results import verify_results

            one = backend[0] if backend else None
            report = verify_results(bundle, results, one, metric=metric, least=least, trusted=trusted)
        else:
            report = attnforge.verify(bundle, backend, metric=metric, least=least, trusted=trusted)
        if html is not None:
            from attnforge.report.verify_page import write_page

            progress(f"write {html}")
            write_page(report, attnforge.Bundle(bundle, trusted=trusted), html, force=force)

    def view() -> None:
        printing.print_report(report)
        if html is not None:
            say_path("page", html)

    return Answer(report.model_dump() | ({"page": str(html)} if html is not None else {}), view, report.passed)


def diagnose(
    bundle: BundleArgument,
    backend: Backends = None,
    case: Annotated[
        str | None, typer.Option(help="The case to examine; by default the one that fails, or errs most.")
    ] = None,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Where to write the files that reproduce a wrong rewrite.")
    ] = None,
    trusted: TrustedKeys = None,
    as_json: Json = False,
) -> Answer:
    """Say where a deployment first goes wrong, and why: which rewrite, or which tensor at which precision.

    Needs the bundle alone. Exits with 1 where a backend fails verification, a graph is not the function that it was
    made from, or a tensor is to blame for more than rounding, even if all of it is within the budget. Numbers that a
    quantised range clips are a note where all backends pass and it costs no more than quantising may.

    Example: `attnforge diagnose vit-fp16`
    """
    with stages_shown(as_json) as progress:
        progress(f"diagnose {bundle}")
        diagnosis = attnforge.diagnose(bundle, backend, case=case, out=out_folder, trusted=trusted)
    return Answer(diagnosis.model_dump(), lambda: printing.print_diagnosis(diagnosis), diagnosis.healthy)


def inspect(bundle: BundleArgument, trusted: TrustedKeys = None, as_json: Json = False) -> Answer:
    """Show what a bundle holds, and what became of every attention site.

    Example: `attnforge inspect vit-fp16 --json`
    """
    opened = attnforge.Bundle(bundle, trusted=trusted)
    return Answer(printing.summary(opened), lambda: printing.print_bundle(opened))


def sign(
    bundle: BundleArgument,
    key: Annotated[Path, typer.Option("--key", help="A .pem file with a private key of an elliptic curve.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite a signature.")] = False,
    as_json: Json = False,
) -> Answer:
    """Sign a bundle, so that others can tell whose it is: writes `model.sig` into it.

    `openssl ecparam -name prime256v1 -genkey -noout -out my.key` makes a key, and `openssl ec -in my.key -pubout -out
    my.pub` the public one, which others pass as `--trusted my.pub`. Needs `attnforge[signing]`, and no network.

    Example: `attnforge sign vit-fp16 --key my.key`
    """
    file = attnforge.sign(bundle, key, force=force)
    return Answer({"bundle": str(bundle), "signature": str(file)}, lambda: say_path("signed", file))
