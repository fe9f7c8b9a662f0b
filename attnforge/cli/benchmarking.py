"""`attnforge bench`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import attnforge
from attnforge.cli import options, printing
from attnforge.cli.options import Backends, Force, Json, TrustedKeys
from attnforge.cli.terminal import Answer, say, say_path, stages_shown
from attnforge.errors import UsageError

if TYPE_CHECKING:
    from attnforge.bench.results import DecodingResults, Results


def bench(
    bundle: Annotated[list[Path], typer.Argument(show_default=False)],
    backend: Backends = None,
    against: list[str] | None = None,
    out_file: Annotated[Path | None, typer.Option("--out")] = None,
    html: Path | None = None,
    plots: Path | None = None,
    old: Annotated[Path | None, typer.Option("--compare")] = None,
    trust_source: Annotated[bool, typer.Option("--trust-source")] = False,
    force: Force = False,
    trusted: TrustedKeys = None,
    as_json: Json = False,
    quick: Annotated[bool, typer.Option("--quick")] = False,
    shapes: list[str] | None = None,
    rounds: int = 20,
    openings: int | None = None,
    threads: int | None = None,
    decode: Annotated[bool, typer.Option("--decode")] = False,
    context: list[int] | None = None,
    prompt: list[int] | None = None,
    batch: int | None = None,
) -> Answer:
    """Time a bundle's backends and their peers side by side.

    Each contender's outputs are checked against the parity budget before it is timed; the bundle's own backends, and
    peers as fast as they are, are then checked in every reference case. Only ratios carry over to other machines.
    Exits with 1 if one of the bundle's backends is wrong or fails, or none could be timed.

    Example: `attnforge bench vit-fp32 vit-bf16 --against all --html bench.html`

    Example: `attnforge bench my-llama-fp32 --decode --against all --context 128 --context 1024 --trust-source`

    Args:
        bundle: Bundle folders: one, or one model at several precisions.
        against: Peer to compare with: eager, torch-compile, onnxruntime-plain, …, all or none; repeatable (default:
            eager and onnxruntime-plain, without --decode).
        out_file: Write the results to this file, as JSON.
        html: Write a page with charts to this file.
        plots: Write the plots to this folder, as PNG files.
        old: Earlier results (JSON) to compare with; exit 1 on a regression.
        trust_source: Allow peers to run the source code named in the manifest, with your permissions.

    Timing:
        quick: Measure only latency, and check outputs only on the timed inputs.
        shapes: Sizes of the dynamic dims, as name=number,name=number; repeatable.
        rounds: Timed rounds per contender.
        openings: Loads of each contender, between which the rounds are split (default: 3, or 1 with --quick).
        threads: Threads of each CPU contender (default: one per processor).

    Decoding:
        decode: Time a decoder bundle: first token, each further token, and memory added per step.
        context: Tokens in the cache before the timed steps; repeatable (default: 128, 512, 1024).
        prompt: Prompt length to time, in tokens; repeatable (default: 16, 128, 512).
        batch: Samples decoded at once (default: 1).
    """
    from attnforge.atomic import check_writable
    from attnforge.bench import results as files
    from attnforge.bench.compare import compare
    from attnforge.bench.contenders.decoding.registry import DECODING_PEERS
    from attnforge.bench.page import write_page
    from attnforge.bench.plots import save_plots
    from attnforge.report.render import check_page

    if decode and len(bundle) > 1:
        raise UsageError("--decode measures one bundle at a time")
    refused: dict[str, object] = {"--context": context, "--prompt": prompt, "--batch": batch}
    where, instead = "without --decode", "add --decode"
    if decode:
        refused = {"--shapes": shapes, "--html": html, "--plots": plots, "--compare": old}
        where, instead = "with --decode", "it has --context, --prompt, --batch, --out and --json"
    if given := next((name for name, value in refused.items() if value), None):
        raise UsageError(f"{given} means nothing {where}; {instead}")
    if "none" in (against or ()) and len(against or ()) > 1:
        raise UsageError("--against none leaves out all peers, and others were named; give none alone, or the others")
    if out_file is not None:
        check_writable(out_file, force)
    if html is not None:
        check_page(html, force)
    if plots is not None:
        check_writable(plots / "plot.png")
        if not force and next(plots.glob("*.png"), None) is not None:
            raise UsageError(
                f"{plots} contains plots; choose another folder with --plots, or overwrite them with --force"
            )
    earlier = files.read(old) if old is not None else None  # an unreadable file is an error before minutes are spent
    benchmark: Callable[..., Results | DecodingResults] = attnforge.benchmark
    with stages_shown(as_json) as progress:
        results = benchmark(
            bundle, backend, () if against == ["none"] else against,
            sizes=[options.sizes(text) for text in shapes or ()] or None, decode=decode, contexts=context,
            prompts=prompt, batch=batch, rounds=rounds, openings=openings, threads=threads, quick=quick,
            trust_source=trust_source, trusted=trusted, command=f"attnforge {shlex.join(sys.argv[1:])}",
            progress=progress,
        )  # fmt: skip
    if out_file is not None:
        files.write(results, out_file)
    document, compared = results.model_dump(mode="json"), list[str]()
    if isinstance(results, files.DecodingResults):
        ok = results.best is not None and not results.wrong.keys() - DECODING_PEERS.keys()
        show = partial(printing.print_decoding, results)
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


def _holds(results: Results, named: Sequence[str]) -> bool:
    """Whether one of our backends was timed for every model, and none that is shipped, named or loaded by `auto` is
    wrong."""
    from attnforge.runtime.backends.registry import REGISTRY

    contenders = [contender for model in results.models for contender in model.contenders]
    wrong = {key.partition(" ")[0] for model in results.models for key in model.wrong}
    wrong |= {contender.name for contender in contenders if contender.ours and contender.wrong_in is not None}
    counted = {contender.name for contender in contenders if contender.picked}
    counted |= {name for name, row in REGISTRY.items() if row.targets or name in named}
    are_timed = all(any(contender.ours for contender in model.contenders) for model in results.models)
    return are_timed and not wrong & counted
