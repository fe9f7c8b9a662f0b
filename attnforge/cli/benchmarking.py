"""`attnforge bench`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import attnforge
from attnforge.cli import options, printing
from attnforge.cli.options import Backends, Json
from attnforge.cli.terminal import print_json, say, say_path, stages_shown

if TYPE_CHECKING:
    from attnforge.benchmarks.measure.compare import Differences
    from attnforge.benchmarks.measure.results import Results


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
    out_file: Annotated[Path | None, typer.Option("--out", help="Write the results to this file, as JSON.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with charts to this file.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Write the plots to this folder, as PNG files.")] = None,
    old: Annotated[
        Path | None, typer.Option("--compare", help="Results of an earlier run; exits with 1 on a regression.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the results and the page.")] = False,
    as_json: Json = False,
) -> None:
    """Measure a bundle's backends, and peers, side by side in one run. Only ratios mean anything elsewhere.

    A contender is held to the parity budget before it is timed: a wrong answer has no time. Ours, and peers that are as
    fast, are then held to it in every reference case. Exits with 1 where one of the bundle's own backends is wrong or
    fails, or none could be timed.

    Example: `attnforge bench patch-attention-fp32 --against all --html bench.html`

    Example: `attnforge bench vit-fp32 vit-bf16 --against eager --against openvino-plain --shapes batch=1`

    Example: `attnforge bench vit-fp32 --against all --compare yesterday.json`
    """
    _check_files(out_file, html, force)
    earlier = _read_earlier(old)
    with stages_shown(as_json) as progress:
        results = attnforge.benchmark(
            bundle,
            backend,
            _peers(against or ()),
            sizes=[options.sizes(text) for text in shapes or ()] or None,
            rounds=rounds,
            openings=openings,
            threads=threads,
            quick=quick,
            command=f"attnforge {shlex.join(sys.argv[1:])}",
            progress=progress,
        )
    comparison = _compare(earlier, results)
    _write(results, comparison, out_file, html, plots, force)
    if as_json:
        print_json(results.model_dump(mode="json") | ({"compared": comparison.model_dump()} if comparison else {}))
    else:
        printing.print_results(results)
        for line in comparison.text().splitlines() if comparison is not None else ():
            say(line)
        for file in filter(None, (out_file, html, plots)):
            say_path("written", file)
    if not _holds(results, backend or ()) or (comparison is not None and comparison.regressions):
        raise typer.Exit(1)


def _check_files(out_file: Path | None, html: Path | None, force: bool) -> None:
    options.check_unwritten(out_file, force)
    if html is not None:
        from attnforge.report.render import check_page

        check_page(html, force)


def _read_earlier(file: Path | None) -> Results | None:
    if file is None:
        return None
    from attnforge.benchmarks.measure import results

    return results.read(file)


def _peers(against: Sequence[str]) -> Sequence[str]:
    """The peers to measure; `all` stands for every peer that this machine can run."""
    if "all" not in against:
        return against
    from attnforge.benchmarks.contenders.peers import peers_here

    return peers_here()


def _compare(earlier: Results | None, results: Results) -> Differences | None:
    if earlier is None:
        return None
    from attnforge.benchmarks.measure.compare import compare

    return compare(earlier, results)


def _write(
    results: Results,
    comparison: Differences | None,
    out_file: Path | None,
    html: Path | None,
    plots: Path | None,
    force: bool,
) -> None:
    """Write the files that were asked for."""
    if out_file is not None:
        from attnforge.benchmarks.measure.results import write

        write(results, out_file)
    if html is not None:
        from attnforge.benchmarks.report.bench_page import write_page

        sentences = comparison.text().splitlines() if comparison is not None else None
        write_page(results, html, force=force, compared=sentences)
    if plots is not None:
        from attnforge.benchmarks.report.plots import save_plots

        save_plots(results, plots)


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
