"""The command line: `attnforge models | deploy | run | verify | diagnose | bench | inspect | doctor`.

Every command takes `--json`: one JSON document on standard output, everything else on standard error. The exit code is
0 only where what was asked holds, 1 where a check failed or a build was refused, and 2 where what was asked cannot be
meant.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import attnforge
from attnforge.errors import AttnforgeError, UnfusedError, UsageError

if TYPE_CHECKING:
    from attnforge.benchmarks.measure.results import Model
    from attnforge.bundle import Bundle, Certificate, Mixed, SiteTarget
    from attnforge.export.diagnosis.diagnose import Diagnosis

app = typer.Typer(
    name="attnforge",
    help="Attention models from eager PyTorch to ONNX and TensorRT: the same function, still fused, and how fast.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
out = Console()
err = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
BundleArgument = Annotated[Path, typer.Argument(help="Folder of a bundle.", show_default=False)]
Backends = Annotated[list[str] | None, typer.Option("--backend", "-b", help="A backend; repeat for several.")]
Options = Annotated[
    list[str] | None, typer.Option("--option", "-o", help="An option of the model, as name=value; repeat.")
]
Weights = Annotated[Path | None, typer.Option(help="A safetensors file with the model's weights.")]


def main() -> None:
    """Run the command line; errors raised on purpose become one line and an exit code."""
    try:
        app()
    except AttnforgeError as error:
        err.print(f"[red]error:[/] {escape(' '.join(str(error).split()))}", soft_wrap=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(attnforge.__version__)
        raise typer.Exit


@app.command()
def models(as_json: Json = False) -> None:
    """List the registered models, their inputs and their options.

    Example: `attnforge models`
    """
    import inspect

    from attnforge.model.registry import MODELS

    options = {name: list(inspect.signature(model.make).parameters) for name, model in MODELS.items()}
    if as_json:
        _print_json({n: {"system": m.system, "summary": m.summary, "options": options[n]} for n, m in MODELS.items()})
        return
    table = Table("model", "system", "what it is", "options", box=None, header_style="bold")
    table.columns[0].no_wrap = True
    for name, model in MODELS.items():
        table.add_row(name, model.system, model.summary, ", ".join(options[name]))
    out.print(table)


@app.command()
def deploy(
    model: Annotated[
        str,
        typer.Argument(
            help="A registered name, package.module:function, hf:FOLDER, or an .onnx or .pt2 file.",
            show_default=False,
        ),
    ],
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Folder to write; by default MODEL-PRECISION.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="fp32, tf32, fp16, bf16, or auto to have it chosen; by default fp32, and a file's own."),
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="onnxruntime, tensorrt or tensorrt_rtx; repeat. All by default.")
    ] = None,
    option: Options = None,
    dim: Annotated[
        list[str] | None, typer.Option(help="Range of a file's dynamic dim, as name=min:opt:max; repeat.")
    ] = None,
    weights: Weights = None,
    compute_capability: Annotated[
        list[str] | None,
        typer.Option(help="What the TensorRT-RTX plan is for (SM89, CURRENT, …); repeat. Portable by default."),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(help="A further TensorRT profile, as name=min:opt:max,name=…; repeat."),
    ] = None,
    attention_precision: Annotated[
        str | None, typer.Option(help="fp16 or bf16: of attention alone, in TensorRT plans of fp32 and tf32 models.")
    ] = None,
    require_fused: Annotated[
        list[str] | None,
        typer.Option(help="A target that must run every attention site fused; repeat. Else nothing is written."),
    ] = None,
    max_error: Annotated[
        float | None,
        typer.Option(help="For precision auto, the relative error allowed; by default twice fp16 eager's."),
    ] = None,
    data: Annotated[
        bool, typer.Option(help="Keep real inputs, where the model has some, as cases to be verified too.")
    ] = True,
    metric: Annotated[
        str | None, typer.Option(help="accuracy or cosine: what the task is measured by on that data.")
    ] = None,
    least: Annotated[float | None, typer.Option(help="What the metric must reach.")] = None,
    tune: Annotated[
        bool,
        typer.Option(help="Measure here which form of attention ONNX Runtime's CPU runs fastest; else rules choose."),
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a bundle.")] = False,
    as_json: Json = False,
) -> None:
    """Export a model, lower it for every target and write a bundle.

    The callable of package.module:function returns `(module, args, dynamic_shapes)`.

    Example: `attnforge deploy vit --precision fp16 --out vit.bundle`

    Example: `attnforge deploy my_models:encoder -o num_layers=6 --target onnxruntime`

    Example: `attnforge deploy vit --precision auto --require-fused tensorrt_rtx`

    Example: `attnforge deploy patch-attention-digits --precision auto --metric accuracy`

    Example: `attnforge deploy vit --profile batch=1:1:1 --profile batch=8:8:8`

    Example: `attnforge deploy hf:all-MiniLM-L6-v2 -o attention=eager -o max_tokens=128`

    Example: `attnforge deploy model.onnx --dim batch=1:4:16 --dim tokens=1:128:512 --precision fp16`
    """
    from attnforge.export.deploy import deploy as deploy_model
    from attnforge.export.sources.named import given
    from attnforge.model.data import Real, real_data
    from attnforge.model.registry import MODELS

    with _stages(as_json) as progress:
        progress(f"build {model}")
        example, source = given(model, _options(option), weights, _ranges(dim))
        real = real_data(model, example.args or ()) if data and model in MODELS else Real()
        name, default = (
            (Path(model).stem, "own") if source is None else (Path(model.rpartition(":")[2]).resolve().name, "fp32")
        )
        try:
            bundle = deploy_model(
                example.module,
                example.args,
                out_folder or Path(f"{name}-{precision or default}"),
                example.dynamic_shapes,
                precision,
                target,
                name,
                compute_capabilities=compute_capability or (),
                profiles=[_ranges(text.split(","), "--profile") for text in profile or ()],
                attention_precision=attention_precision,
                require_fused=require_fused or (),
                data=real.inputs,
                labels=real.labels,
                metric=metric,
                least=least,
                max_error=max_error,
                tune=tune,
                force=force,
                source=source,
                progress=progress,
            )
        except UnfusedError as error:
            if as_json:
                _print_json({"error": str(error), "attention": error.certificate.model_dump()})
            else:
                _print_sites(error.certificate)
            raise
    if as_json:
        _print_json({"bundle": str(bundle.path), **_summary(bundle)})
        return
    _print_bundle(bundle)


@app.command()
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
    as_json: Json = False,
) -> None:
    """Run a bundle on files and write its outputs.

    An image becomes a batch of one with values from 0 to 1, in the channels the model takes, resized to the size it
    takes.

    Example: `attnforge run patch-attention-fp32 photograph.jpg --out tokens.npz`

    Example: `attnforge run cross-attention-fp32 query=q.npy memory=m.npy key_padding_mask=mask.npy`
    """
    import numpy as np

    from attnforge.input_files import read_inputs, write_outputs

    if out_file.exists() and not force:
        raise UsageError(f"{out_file} exists; choose another file with --out, or overwrite it with --force")
    with attnforge.load(bundle, backend, rebuild=rebuild) as session:
        feeds = read_inputs(session.inputs, inputs)
        start = time.perf_counter()
        results = session.run(feeds)
        seconds = time.perf_counter() - start
    write_outputs(out_file, results)
    described = {
        name: {"shape": list(a.shape), "dtype": a.dtype.name, "finite": bool(np.isfinite(a.astype(np.float64)).all())}
        for name, a in results.items()
    }
    if as_json:
        _print_json({"backend": session.backend, "seconds": seconds, "outputs": described, "written": str(out_file)})
        return
    for name, what in described.items():
        out.print(
            f"{name}: {what['dtype']}{what['shape']}" + ("" if what["finite"] else " [red]with NaN or infinity[/]")
        )
    out.print(f"ran on {session.backend} in {1e3 * seconds:.1f} ms; written to {out_file}")


@app.command()
def verify(
    bundle: BundleArgument,
    backend: Backends = None,
    metric: Annotated[
        str | None, typer.Option(help="Measure the task too, on the bundle's real data: accuracy or cosine.")
    ] = None,
    least: Annotated[float | None, typer.Option(help="What the metric must reach; by default about float64's.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with charts to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the page.")] = False,
    as_json: Json = False,
) -> None:
    """Hold every backend that this machine can run to the parity budget, against eager in float64.

    Needs the bundle alone: no torch, no source. Exits with 1 where a backend misses the budget or none could run.

    Example: `attnforge verify vit-fp16`

    Example: `attnforge verify vit-fp16 --html vit-fp16.html`
    """
    if html is not None:
        from attnforge.report.verify_page import check_page

        check_page(html, force)
    with _stages(as_json) as progress:
        progress(f"verify {bundle}")
        report = attnforge.verify(bundle, backend, metric=metric, least=least)
        if html is not None:
            from attnforge.report.verify_page import write_page

            progress(f"write {html}")
            write_page(report, bundle, html, force=force)
    if as_json:
        _print_json(report.model_dump() | ({"page": str(html)} if html is not None else {}))
    else:
        table = Table("backend", "", "error", "eager's", "budget", "worst case", "cases", box=None, header_style="bold")
        for name, r in report.backends.items():
            mark = "[green]passed[/]" if r.passed else "[red]FAILED[/]"
            table.add_row(name, mark, f"{r.error:.1e}", f"{r.eager_error:.1e}", f"{r.budget:.1e}", r.case, str(r.cases))
        out.print(table)
        for name, r in report.backends.items():
            for output, one in r.outputs.items():
                out.print(f"[dim]{name} {escape(one.text(output))}[/]", soft_wrap=True)
            if r.metric is not None:
                out.print(f"{name} {escape(r.metric.text())}", soft_wrap=True)
        for name, r in report.backends.items():
            for failure in r.failures:
                out.print(f"[red]{name}[/] {failure.case}, {failure.output}: {failure.reason}")
                if failure.worst is not None:
                    out.print(f"  {escape(failure.worst.text(failure.output))}", soft_wrap=True)
            if r.reason is not None:
                out.print(f"[red]{name}[/] {escape(r.reason)}", soft_wrap=True)
        for warning in report.warnings:
            out.print(f"[yellow]{escape(warning)}[/]", soft_wrap=True)
        for name, reason in report.skipped.items():
            out.print(f"[dim]{name} did not run: {escape(reason)}[/]", soft_wrap=True)
        out.print(f"[dim]held against {escape(report.reference)}, and against float64[/]", soft_wrap=True)
        if html is not None:
            out.print(f"page: {escape(str(html))}", soft_wrap=True)
    if not report.passed:
        raise typer.Exit(1)


@app.command()
def diagnose(
    bundle: BundleArgument,
    backend: Backends = None,
    case: Annotated[
        str | None, typer.Option(help="The case to examine; by default the one that fails, or errs most.")
    ] = None,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Where to write what reproduces a wrong rewrite.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say where a deployment first goes wrong, and why: which rewrite, or which tensor at which precision.

    Needs the bundle alone. Exits with 1 where a backend fails verification, a graph is not the function that it was
    made from, or a tensor is to blame for more than rounding, even if all of it is within the budget.

    Example: `attnforge diagnose vit-fp16`
    """
    with _stages(as_json) as progress:
        progress(f"diagnose {bundle}")
        found = attnforge.diagnose(bundle, backend, case=case, out=out_folder)
    if as_json:
        _print_json(found.model_dump())
    else:
        _print_diagnosis(found)
    if not found.healthy:
        raise typer.Exit(1)


@app.command()
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
    threads: Annotated[int | None, typer.Option(help="Of CPU contenders; by default one a processor.")] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Latency alone, of one opening: no throughput, starts, memory, limits or other cases."
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
    from attnforge.benchmarks.contenders.peers import peers_here
    from attnforge.benchmarks.measure import results
    from attnforge.benchmarks.measure.compare import compare
    from attnforge.runtime.backends.registry import BACKENDS, WITHOUT_TARGET

    if out_file is not None and out_file.exists() and not force:
        raise UsageError(f"{out_file} exists; choose another file with --out, or overwrite it with --force")
    if html is not None:
        from attnforge.report.verify_page import check_page

        check_page(html, force)
    earlier = results.read(old) if old is not None else None
    sizes = [{name: _integer(name, value) for name, value in _options(one.split(",")).items()} for one in shapes or ()]
    named = peers_here() if "all" in (against or ()) else against or ()
    command = "attnforge " + shlex.join(sys.argv[1:])
    with _stages(as_json) as progress:
        taken = attnforge.benchmark(
            bundle,
            backend,
            named,
            sizes=sizes or None,
            rounds=rounds,
            openings=openings,
            threads=threads,
            quick=quick,
            command=command,
            progress=progress,
        )
    compared = compare(earlier, taken) if earlier is not None else None
    if out_file is not None:
        results.write(taken, out_file)
    if html is not None:
        from attnforge.benchmarks.report.bench_page import write_page

        write_page(taken, html, force=force, compared=compared.text().splitlines() if compared is not None else None)
    if plots is not None:
        from attnforge.benchmarks.report.plots import save_plots

        save_plots(taken, plots)
    if as_json:
        _print_json(taken.model_dump(mode="json") | ({"compared": compared.model_dump()} if compared else {}))
    else:
        for model in taken.models:
            _print_measured(model)
        about = taken.environment
        out.print(f"[dim]{about.threads} threads; {about.machine.processor}; {about.machine.processors} processors[/]")
        for line in compared.text().splitlines() if compared is not None else ():
            out.print(escape(line), soft_wrap=True, highlight=False)
        for file in filter(None, (out_file, html, plots)):
            out.print(f"written: {escape(str(file))}", soft_wrap=True)
    ours = [{one.name for one in model.contenders if one.ours} for model in taken.models]
    shipped = [name for name in BACKENDS if name not in WITHOUT_TARGET or name in (backend or ())]
    wrong = {key.partition(" ")[0] for model in taken.models for key in model.wrong}
    wrong |= {one.name for model in taken.models for one in model.contenders if one.ours and one.wrong_in is not None}
    loaded = {one.name for model in taken.models for one in model.contenders if one.picked}
    if wrong & {*shipped, *loaded} or not all(ours) or (compared is not None and compared.regressions):
        raise typer.Exit(1)


@app.command()
def inspect(bundle: BundleArgument, as_json: Json = False) -> None:
    """Show what a bundle holds, and what became of every attention site.

    Example: `attnforge inspect vit-fp16 --json`
    """
    opened = attnforge.Bundle(bundle)
    if as_json:
        _print_json(_summary(opened))
        return
    _print_bundle(opened)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what this machine can build and run, and what to install for the rest.

    Example: `attnforge doctor`
    """
    from attnforge.doctor import examine

    report = examine()
    if as_json:
        _print_json(report)
        return
    out.print(f"attnforge {attnforge.__version__}, Python {report['python']}, {report['machine']}")
    table = Table("", "", "", box=None, show_header=False)
    table.columns[0].no_wrap = True
    for what in ("build", "run"):
        for name, reason in report[what].items():
            table.add_row(
                f"{what} {name}", "[green]yes[/]" if reason is None else "[yellow]no[/]", escape(reason or "")
            )
    out.print(table)
    out.print(
        "packages: " + ", ".join(f"{name} {version}" for name, version in report["packages"].items()), soft_wrap=True
    )


# --- what the commands share ------------------------------------------------------------------------------------------


def _options(given: list[str] | None) -> dict[str, str]:
    pairs = [text.partition("=") for text in given or ()]
    if wrong := [name for name, equals, _ in pairs if not equals]:
        raise UsageError(f"{wrong[0]!r} is no option; write name=value")
    return {name: value for name, _, value in pairs}


def _ranges(given: list[str] | None, flag: str = "--dim") -> dict[str, tuple[int, int, int]]:
    ranges = {}
    for name, text in _options(given).items():
        bounds = text.split(":")
        if len(bounds) != 3 or not all(bound.isdecimal() for bound in bounds):
            raise UsageError(f"the range of {name} is {text!r}; write {flag} {name}=min:opt:max, as 1:128:512")
        ranges[name] = (int(bounds[0]), int(bounds[1]), int(bounds[2]))
    return ranges


def _integer(name: str, value: str) -> int:
    if not value.isdecimal():
        raise UsageError(f"size {name} is {value!r}; give a number")
    return int(value)


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


@contextmanager
def _stages(quiet: bool) -> Iterator[Any]:
    """A callback that shows the stage at work on standard error, on a terminal only."""
    with err.status("") if err.is_terminal and not quiet else _Silent() as status:
        yield lambda stage: status.update(f"{stage} …")


class _Silent:
    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: object) -> None: ...

    def update(self, _: str) -> None: ...


def _summary(bundle: Bundle) -> dict[str, Any]:
    manifest = bundle.manifest.model_dump(exclude={"cases", "files"})
    return {**manifest, "cases": len(bundle.manifest.cases), "files": list(bundle.manifest.files)}


def _print_bundle(bundle: Bundle) -> None:
    manifest, attention = bundle.manifest, bundle.manifest.attention
    out.print(f"[bold]{manifest.name}[/] {manifest.precision} in {bundle.path}", soft_wrap=True)
    for kind, specs in (("in", manifest.inputs), ("out", manifest.outputs)):
        for spec in specs:
            out.print(f"  {kind:<3} {spec.name}: {escape(spec.text())}")
    for record in manifest.targets.values():
        for engine in record.engines:
            what = f"{engine.layers} layers, {engine.size / 1e6:.1f} MB, for {', '.join(engine.compute_capabilities)}"
            what += "" if engine.activation_memory is None else f"; activations {_megabytes(engine.activation_memory)}"
            out.print(f"  {engine.file}: {engine.flavour} {engine.version}, {what}", soft_wrap=True)
        if record.attention_precision is not None and record.without is not None:
            plain = f"{record.without.layers} layers, activations {_megabytes(record.without.activation_memory)}"
            out.print(f"  attention alone in {record.attention_precision}; without that {plain}")
    out.print(f"reference: {escape(manifest.reference)}, and float64", soft_wrap=True)
    if manifest.mixed is not None:
        _print_mixed(manifest.mixed)
    _print_sites(attention)
    for name, record in manifest.targets.items():
        if record.tuning is not None:
            at = ", ".join(f"{symbol} {size}" for symbol, size in record.tuning.sizes.items()) or "fixed sizes"
            out.print(f"[dim]{name}: forms measured at {at}, on {record.tuning.processors} processors[/]")
    if (choice := manifest.choice) is not None:
        times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in choice.milliseconds.items())
        where = f"on the {choice.machine.processor} that deployed it"
        out.print(f"auto loads {choice.picked or 'by rule'} {where}: {times}", soft_wrap=True, highlight=False)
        for name, reason in choice.dropped.items():
            out.print(f"[dim]not {name}: {escape(reason)}[/]", soft_wrap=True)
    for target, reason in manifest.skipped.items():
        out.print(f"[dim]not built for {target}: {escape(reason)}[/]", soft_wrap=True)


def _print_measured(model: Model) -> None:
    at = ", ".join(f"{name} {value}" for name, value in model.sizes.items()) or "fixed sizes"
    turns = f"{model.rounds} rounds" + (f" in {model.openings} openings" if model.openings > 1 else "")
    out.print(f"[bold]{escape(model.name)}[/] at {at}, {turns}", highlight=False)
    columns = ("contender", "median ms", "95%", "p90", "p99", "ratio", "of limit", "error", "start s", "extra MiB")
    table = Table(*columns, box=None, header_style="bold")
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    table.columns[0].justify = "left"
    for one in sorted(model.contenders, key=lambda one: one.latency.median.value):
        times, ratio = one.latency, one.ratio
        marks = (" ←" if one.picked else "") + (" †" if one.wrong_in is not None else "")
        table.add_row(
            f"{'[bold]' if one.ours else '[dim]'}{one.key}[/]{marks}",
            f"{times.median.value:.3f}",
            f"{times.median.low:.3f}–{times.median.high:.3f}",
            f"{times.p90:.3f}",
            f"{times.p99:.3f}",
            "" if ratio is None else f"{ratio.value:.2f}",
            "" if one.share is None else f"{one.share:.0%}",
            f"{one.error:.0e}",
            "" if one.cold is None else f"{one.cold.load_s + one.cold.first_s:.2f}",
            "" if one.memory is None else f"{one.memory.extra_mib:.0f}",
        )
    whole = out.measure(table, options=out.options.update(width=1000)).maximum
    wide = Console(file=out.file, width=max(whole, out.width), height=out.height)
    wide.print(table)  # rather broken by a terminal than without names
    out.print("[dim]← what auto loads; ratios are to it, at the same precision[/]")
    for name, reason in model.wrong.items():
        out.print(f"[red]{escape(name)} was not timed, for its answer is wrong:[/] {escape(reason)}", soft_wrap=True)
    for one in model.contenders:
        if one.wrong_in is not None:
            out.print(f"[yellow]† {one.key} is wrong in {escape(one.wrong_in)}[/]", soft_wrap=True)
        elif one.partly is not None:
            out.print(f"[dim]{one.key} was {one.partly}[/]", soft_wrap=True)
    for name, reason in model.skipped.items():
        out.print(f"[dim]{escape(name)} did not run: {escape(reason)}[/]", soft_wrap=True)


def _print_mixed(mixed: Mixed) -> None:
    share = f"{mixed.low_flops:.1%} of the operations of products in {mixed.low}"
    out.print(f"precisions chosen: {share}; error {mixed.error:.1e}, {mixed.trials} assignments tried")
    for region in mixed.regions:
        out.print(f"  fp32 in {escape(region.module)}: {escape(', '.join(region.nodes))}", soft_wrap=True)
        out.print(f"[dim]    {escape(region.why)}[/]", soft_wrap=True)


def _megabytes(size: int | None) -> str:
    return "not told" if size is None else f"{size / 1e6:.1f} MB"


def _print_diagnosis(found: Diagnosis) -> None:
    colour = "green" if found.healthy else "red"
    out.print(f"[{colour}]{escape(found.finding.text())}[/]", soft_wrap=True)
    if found.finding.line is not None:
        out.print(f"  {escape(found.finding.line)}", soft_wrap=True)
    if found.finding.error_without is not None and found.error is not None:
        out.print(
            f"  with this tensor exact, the final error is {found.finding.error_without:.1e}, not {found.error:.1e}"
        )
    for file in found.finding.reproduction:
        out.print(f"  written: {escape(file)}", soft_wrap=True)
    table = Table("tensor", "module", "largest", "error in", "error", "times", box=None, header_style="bold")
    for one in found.tensors:
        numbers = (f"{one.largest:.3g}", _error(one.error_in), _error(one.error))
        table.add_row(f"{one.operator} {one.tensor}", one.module, *numbers, f"{one.amplification or 0:.1f}")
    out.print(table)
    for backend, reason in found.not_traced.items():
        out.print(f"[dim]{backend}'s own tensors could not be looked at: {escape(reason)}[/]", soft_wrap=True)
    same = " = ".join(found.same_function)
    out.print(
        f"[dim]{found.examined} tensors of case {found.case} ({escape(found.why)}); in float64, {same}[/]",
        soft_wrap=True,
    )


def _error(error: float | None) -> str:
    return "lost" if error is None else f"{error:.1e}"


def _print_sites(attention: Certificate) -> None:
    fused = ", ".join(f"{count} of {attention.sites} fused by {name}" for name, count in attention.fused.items())
    out.print(f"attention: {attention.sites} sites, {attention.canonical} canonical; {fused}")
    if not attention.details:
        return
    table = Table(
        "site, written as, became", "target", "lowered to", "kernel, or why there is none", header_style="bold"
    )
    for column in table.columns:
        column.overflow = "fold"
    table.columns[1].no_wrap = True
    for site in attention.details:
        became = escape(site.form or "") if site.canonical else "[yellow]left as it is[/]"
        described = f"[bold]{escape(site.site)}[/]\n{escape(site.written_as)}\n→ {became}"
        if not site.targets:
            table.add_row(described, "", "", f"[yellow]{escape(site.reason or '')}[/]")
        for i, (target, made) in enumerate(site.targets.items()):
            table.add_row("" if i else described, target, escape(made.form), _outcome(made))
        table.add_section()
    out.print(table)


def _outcome(made: SiteTarget) -> str:
    kernel = f"[green]{escape(made.kernel)}[/]" if made.kernel else f"[yellow]{escape(made.reason or '')}[/]"
    return kernel if made.kernel is None else f"{kernel}\n[dim]{escape(made.why)}[/]"
