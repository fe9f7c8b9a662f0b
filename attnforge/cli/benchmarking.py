"""`attnforge bench`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import attnforge
from attnforge.cli import options, printing
from attnforge.cli.answers import Answer
from attnforge.cli.options import Backends, Json, TrustedKeys
from attnforge.cli.terminal import say, say_path, stages_shown
from attnforge.errors import UsageError

if TYPE_CHECKING:
    from attnforge.bench.results import DecodingResults, Results


def bench(
    bundle: Annotated[
        list[Path],
        typer.Argument(help="Folder of a bundle; several of one model at several precisions.", show_default=False),
    ],
    backend: Backends = None,
    against: Annotated[
        list[str] | None,
        typer.Option(help="A peer, such as eager, torch-compile or onnxruntime-plain, or all; repeat."),
    ] = None,
    shapes: Annotated[
        list[str] | None, typer.Option(help="Sizes of the dynamic dims, as name=number,name=number; repeat.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="How often every contender has a turn.")] = 20,
    openings: Annotated[
        int | None,
        typer.Option(
            help="How often every contender is opened anew; the rounds are shared out among the openings. "
            "By default 3, with --quick 1."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads of a CPU contender; by default one for each processor.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Latency alone, of one opening: no throughput, starts, memory, limits or further cases."
        ),
    ] = False,
    decode: Annotated[
        bool,
        typer.Option(
            "--decode",
            help="Of a bundle with a cache: time to first token, milliseconds a token over contexts, memory a step.",
        ),
    ] = False,
    context: Annotated[
        list[int] | None,
        typer.Option(
            help="With --decode: tokens in the cache before the timed steps; repeat. By default 128, 512, 1024."
        ),
    ] = None,
    prompt: Annotated[
        list[int] | None,
        typer.Option(help="With --decode: tokens of a prompt to time; repeat. By default 16, 128, 512."),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="With --decode: samples decoded at once. By default 1.")] = None,
    trust_source: Annotated[
        bool,
        typer.Option(
            "--trust-source",
            help="Let peers import, open and run what the manifest names (a callable, a folder, a file), as a program "
            "of whoever made the bundle.",
        ),
    ] = False,
    out_file: Annotated[Path | None, typer.Option("--out", help="Write the results to this file, as JSON.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with charts to this file.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Write the plots to this folder, as PNG files.")] = None,
    old: Annotated[
        Path | None, typer.Option("--compare", help="Results of an earlier run; exits with 1 on a regression.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the results, the page and the plots.")] = False,
    trusted: TrustedKeys = None,
    as_json: Json = False,
) -> Answer:
    """Measure a bundle's backends, and peers, side by side in one run. Only ratios mean anything elsewhere.

    A contender is held to the parity budget before it is timed: a wrong answer has no time. Ours, and peers that are as
    fast, are then held to it in every reference case. Exits with 1 where one of the bundle's own backends is wrong or
    fails, or none could be timed.

    Example: `attnforge bench patch-attention-fp32 --against all --html bench.html`

    Example: `attnforge bench vit-fp32 vit-bf16 --against eager --against openvino-plain --shapes batch=1`

    Example: `attnforge bench vit-fp32 --against all --compare yesterday.json`

    Example: `attnforge bench my-encoder-fp32 --against eager --trust-source`

    Example: `attnforge bench my-llama-fp32 --decode --against all --context 128 --context 1024 --trust-source`
    """
    from attnforge.atomic import check_writable
    from attnforge.bench import results as files
    from attnforge.bench.compare import compare
    from attnforge.bench.page import write_page
    from attnforge.bench.plots import save_plots
    from attnforge.report.render import check_page

    if decode:
        if len(bundle) > 1:
            raise UsageError("--decode measures one bundle at a time")
        no = {"--shapes": shapes, "--html": html, "--plots": plots, "--compare": old}
        _refuse("with --decode", no, "it has --context, --prompt, --batch, --out and --json")
    else:
        _refuse("without --decode", {"--context": context, "--prompt": prompt, "--batch": batch}, "add --decode")
    options.check_unwritten(out_file, force)
    if html is not None:
        check_page(html, force)
    if plots is not None:
        check_writable(plots / "plot.png")
        if not force and next(plots.glob("*.png"), None) is not None:
            raise UsageError(f"{plots} holds plots; choose another folder with --plots, or overwrite them with --force")
    earlier = files.read(old) if old is not None else None  # an unreadable file is an error before minutes are spent
    benchmark: Callable[..., Results | DecodingResults] = attnforge.benchmark
    with stages_shown(as_json) as progress:
        results = benchmark(
            bundle,
            backend,
            against or (),
            sizes=[options.sizes(text) for text in shapes or ()] or None,
            decode=decode,
            contexts=context,
            prompts=prompt,
            batch=batch,
            rounds=rounds,
            openings=openings,
            threads=threads,
            quick=quick,
            trust_source=trust_source,
            trusted=trusted,
            command=f"attnforge {shlex.join(sys.argv[1:])}",
            progress=progress,
        )
    if out_file is not None:
        files.write(results, out_file)
    document, compared = results.model_dump(mode="json"), list[str]()
    if isinstance(results, files.DecodingResults):
        ok, show = _decodes(results), partial(printing.print_decoding, results)
    else:
        ok, show = _holds(results, backend or ()), partial(printing.print_results, results)
        if earlier is not None:
            differences = compare(earlier, results)
            document["compared"], compared = differences.model_dump(), differences.text().splitlines()
            ok = ok and not differences.regressions
        if html is not None:
            write_page(results, html, force=force, compared=compared)
        if plots is not None:
            save_plots(results, plots)

    def view() -> None:
        show()
        for line in compared:
            say(line)
        for file in filter(None, (out_file, html, plots)):
            say_path("written", file)

    return Answer(document, view, ok)


def _refuse(where: str, given: Mapping[str, object], instead: str) -> None:
    """Refuse options that mean nothing here.

    Raises:
        UsageError: one was given.
    """
    for name, value in given.items():
        if value:
            raise UsageError(f"{name} means nothing {where}; {instead}")


def _decodes(results: DecodingResults) -> bool:
    """Whether a backend of the bundle's was timed, and none is wrong."""
    from attnforge.bench.contenders.decoding.registry import DECODING_PEERS

    return results.best is not None and not results.wrong.keys() - DECODING_PEERS.keys()


def _holds(results: Results, named: Sequence[str]) -> bool:
    """Whether every model has a time of ours, and no backend is wrong that is shipped, named, or loaded by `auto`."""
    from attnforge.runtime.backends.registry import BACKENDS, WITHOUT_TARGET

    wrong, loaded = set(), set()
    for model in results.models:
        ours = [contender for contender in model.contenders if contender.ours]
        if not ours:
            return False
        wrong |= {key.partition(" ")[0] for key in model.wrong}
        wrong |= {contender.name for contender in ours if contender.wrong_in is not None}
        loaded |= {contender.name for contender in model.contenders if contender.picked}
    shipped = {name for name in BACKENDS if name not in WITHOUT_TARGET or name in named}
    return not wrong & (shipped | loaded)
