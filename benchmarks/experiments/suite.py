"""The standard suite of `make bench`, on this machine's CPU.

`python -m benchmarks run suite` writes `benchmarks/results/suite.json`, a page and pictures. `--results`
names another file, for example for another machine. `--compare OLD.json` reports what changed since an earlier run and
exits with 1 if something became worse.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from attnforge.atomic import temporary_folder
from attnforge.bench import results as files
from attnforge.bench.contenders.registry import peers_here
from attnforge.bench.experiment import Experiment as Bench
from attnforge.bench.experiment import finished
from attnforge.bench.interval import ratio_of
from attnforge.bench.limits import Ceilings, limit_seconds
from attnforge.bench.page import decimals_of
from attnforge.bench.results import Growth, Interval, Model, Results, Series
from attnforge.bench.run import measure as measure_bundles
from attnforge.bench.run import new_results
from attnforge.bundle import Bundle
from attnforge.export.sources.named import build
from attnforge.machine import processors
from attnforge.report.render import NOTHING, error, fixed, markdown_table, percent, with_interval
from benchmarks.experiment import OF_LIMIT, Claim, Experiment, claims_table, say, where
from benchmarks.growth import compare, fit_of, growth_table, named, save_plots, write_page
from benchmarks.published import deployed


@dataclass(frozen=True)
class Subject:
    """A measured model.

    Attributes:
        name: name of the model in the results.
        model: name of the registered model.
        options: options of the registered model.
        precisions: precisions to deploy in.
        peers: peers to compare with; by default all.
        bench: further attributes of the benchmark, such as what is not measured.
    """

    name: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    precisions: Sequence[str] = ("fp32", "bf16")
    peers: Sequence[str] | None = None
    bench: Mapping[str, Any] = field(default_factory=dict)


BASE: Mapping[str, Any] = {"num_layers": 12, "embed_dim": 768, "num_heads": 12, "batch_size": 1, "max_batch": 1}
USUAL = ("eager", "onnxruntime-plain", "openvino-plain")
"""Peers of a small model, and of models of which only growth is measured."""
LARGE: Mapping[str, Any] = {"throughput": False, "fresh_peers": ("onnxruntime-plain", "openvino-plain")}
"""For models dominated by their weights, starts and memory are measured for these peers only."""
GROWING: Mapping[str, Any] = {"throughput": False, "starts": False, "cases": False}

SUBJECTS = (
    Subject("patch-attention", "patch-attention", {"max_image_size": 224, "max_batch": 1}),
    Subject("vit", "vit", {}, ("fp32",), USUAL, {"starts": False, "memory": False}),
    Subject(
        "vit-b-16", "vit", {**BASE, "image_size": 224, "patch_size": 16, "num_classes": 1000}, ("fp32",), bench=LARGE
    ),
    Subject("bert-base", "transformer-encoder", {**BASE, "vocab_size": 30522, "num_tokens": 128}, bench=LARGE),
)
"""Patch attention of 3136 tokens, a small ViT, a ViT-B/16, and an encoder of BERT-base's size at 128 tokens."""

TITLES = {
    "patch-attention": "patch attention, 3,136 tokens",
    "vit-b-16": "ViT-B/16, one image",
    "bert-base": "BERT-base's size, 128 tokens",
}
SUMMARISED = {
    "eager": "PyTorch eager",
    "torch-compile": "torch.compile",
    "onnxruntime-plain": "ONNX Runtime, torch's export",
    "openvino-plain": "OpenVINO, torch's export",
}
"""The models of the README's table, and the peers."""

ROUNDS, OPENINGS, SECONDS = 21, 3, 22
"""Timed rounds per contender, loads per contender, and the seconds after which no further round starts. Models of the
growth series are loaded once per point."""

SIDES = (14, 28, 56, 112)
"""Patches per side: 196, 784, 3136 and 12544 tokens."""

LAYERS = (1, 4, 12, 24)
TOKEN_PEERS = ("eager", "eager-sdpa", "onnxruntime-plain", "ort-fusions", "openvino-plain")


def measure(
    html: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("build/bench/index.html"),
    old: Annotated[Path | None, typer.Option("--compare", help="Results of an earlier run to compare with.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="A model, tokens or layers; repeatable.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of CPU contenders.")] = None,
) -> Iterator[Results]:
    """Measure all figures, write the page and the pictures, and compare with an earlier run."""
    earlier = files.read(old) if old is not None else None  # an unreadable file is an error before minutes are spent
    start = time.perf_counter()
    with temporary_folder() as folder:
        measured = finished(run_suite(folder, threads or processors(), only), start)
    yield measured
    measured = Results.model_validate(files.to_five_digits(measured.model_dump(mode="json")))  # as it is written
    differences = compare(earlier, measured) if earlier is not None else None
    write_page(measured, html, differences.text().splitlines() if differences else None)
    save_plots(measured, html.parent)
    say(f"the page is {html}")
    if differences is not None:
        print(differences.text())
        raise typer.Exit(bool(differences.regressions))


def broken(figures: dict[str, Any]) -> list[str]:
    """Return our contenders that are wrong, and the parts that failed."""
    measured = Results.model_validate(figures)
    ours = [(model.name, contender) for model in measured.models for contender in model.contenders if contender.ours]
    wrong = [f"{model}, {c.key} is wrong in {c.wrong_in}" for model, c in ours if c.wrong_in is not None]
    return wrong + [f"{name} failed: {reason}" for name, reason in measured.left_out.items()]


def run_suite(folder: Path, threads: int, only: Sequence[str] | None) -> Results:
    """Deploy all measured models to `folder`, and measure them."""
    results = new_results("", threads, say)

    def measure_subject(subject: Subject) -> None:
        bundles = [deployed_at(folder, subject, precision) for precision in subject.precisions]
        against = peers_here() if subject.peers is None else subject.peers
        bench = Bench(
            bundles, None, against, ROUNDS, threads, seconds=SECONDS, openings=OPENINGS, progress=say, **subject.bench
        )
        results.models.append(measure_bundles(bench, {}, results.ceilings))

    steps: dict[str, Callable[[], None]] = {subject.name: partial(measure_subject, subject) for subject in SUBJECTS}
    steps["tokens"] = lambda: results.growth.append(over_tokens(folder, threads))
    steps["layers"] = lambda: results.growth.append(over_layers(folder, threads))
    for name, step in steps.items():
        if name in (only or steps):
            try:
                step()
            except Exception as error:  # the results say what is missing
                results.left_out[name] = f"{type(error).__name__}: {error}"
                say(f"{name} failed: {error}")
    return results


def deployed_at(folder: Path, subject: Subject, precision: str, tune: bool = True) -> Bundle:
    """Deploy a subject as `attnforge deploy` does, without the cache, because its seconds are reported."""
    example, source = build(subject.model, subject.options, None)
    target = folder / f"{subject.name}-{precision}"
    return deployed(example, target, subject.name, precision=precision, tune=tune, cache=False, source=source)


Points = Mapping[int, tuple[Bundle, Mapping[str, int]]]
"""By number of tokens, layers or another quantity: a bundle, and sizes of its dims; a dim that is not named has the
example's size."""


def measured_growth(bench: Bench, along: str, points: Points) -> Growth:
    """Measure how time and memory grow.

    Args:
        bench: the benchmark; its bundles are replaced.
        along: the quantity that grows, such as `tokens`.
        points: the points to measure. Deploy times are recorded if every point has its own bundle.
    """
    models: dict[int, Model] = {}
    for size, (bundle, dims) in points.items():
        bench.bundles = [bundle]
        models[size] = measure_bundles(bench, dims, None)
    bundles = {bundle.path: bundle for bundle, _ in points.values()}.values()
    sizes, series = list(models), []
    for key, contender in {c.key: c for model in models.values() for c in model.contenders}.items():
        measured = [next((c for c in model.contenders if c.key == key), None) for model in models.values()]
        ms = [None if c is None else c.latency.median.value for c in measured]
        mib = [None if c is None or c.memory is None else c.memory.extra_mib for c in measured]
        reasons = {size: (model.wrong | model.skipped).get(key) for size, model in models.items()}
        notes = [f"{along} {size}: {reason}" for size, reason in reasons.items() if reason]
        series.append(
            Series(
                name=contender.name, precision=contender.precision, ours=contender.ours, ms=ms, extra_mib=mib,
                time=fit_of(sizes, ms), memory=fit_of(sizes, mib), notes=notes,
            )
        )  # fmt: skip
    seconds = [bundle.manifest.seconds for bundle in bundles] if len(bundles) > 1 else []
    name = next(iter(models.values())).name
    return Growth(model=name, along=along, sizes=sizes, series=series, deploy_seconds=seconds)


def over_tokens(folder: Path, threads: int) -> Growth:
    """Measure patch attention over its tokens, with one bundle for all of them."""
    subject = Subject("patch-attention", "patch-attention", {"max_image_size": 4 * max(SIDES), "max_batch": 1})
    bundle = deployed_at(folder / "tokens", subject, "fp32")
    bench = Bench([bundle], None, TOKEN_PEERS, 7, threads, seconds=12, progress=say, **GROWING)
    return measured_growth(bench, "tokens", {side**2: (bundle, {"rows": side, "cols": side}) for side in SIDES})


def over_layers(folder: Path, threads: int) -> Growth:
    """Measure a transformer encoder over its layers, with a bundle each."""
    bundles: dict[int, tuple[Bundle, dict[str, int]]] = {}
    for layers in LAYERS:
        options = {"num_layers": layers, "num_tokens": 128, "batch_size": 1, "max_batch": 1}
        subject = Subject(f"encoder-{layers}", "transformer-encoder", options)
        bundles[layers] = deployed_at(folder, subject, "fp32", tune=False), {}
    bench = Bench([], None, USUAL, 7, threads, seconds=10, progress=say, **GROWING)
    grown = measured_growth(bench, "layers", bundles)
    grown.model = "transformer-encoder"
    return grown


def table(model: Model) -> str:
    """Return one model's contenders as Markdown, ours in bold. † marks contenders that are wrong in another case."""
    contenders = [contender for group in model.by_precision.values() for contender in group]
    decimals = decimals_of(contenders)
    head = (
        *("contender", "precision", "median ms (95%)", "ratio to what is picked (95%)", "share of the limit"),
        *("extra MiB", "error"),
    )
    rows = [
        (
            named(contender) + (" †" if contender.wrong_in is not None else ""),
            contender.precision,
            with_interval(contender.latency.median, decimals["ms"]),
            with_interval(contender.ratio, 2) if contender.ratio else NOTHING,
            percent(contender.share),
            fixed(contender.memory.extra_mib if contender.memory else None, decimals["extra"]),
            error(contender.error),
        )
        for contender in contenders
    ]
    wrong = [f"† {c.key} is wrong in {c.wrong_in}." for c in model.contenders if c.wrong_in is not None]
    return "\n\n".join([markdown_table(head, rows, words=2), *wrong])


def summary(measured: Results) -> str:
    """Return, for every model and precision, the backend that `auto` picks, and how many times as long peers take."""
    rows = []
    for model in measured.models:
        for picked in (c for c in model.contenders if c.picked and model.name in TITLES):
            ratios = {c.name: c.ratio for c in model.contenders if c.precision == picked.precision}
            others = ["–" if (ratio := ratios.get(name)) is None else f"{ratio.value:.2f} ×" for name in SUMMARISED]
            ours = f"{picked.latency.median.value:.1f} ms, {picked.name}"
            rows.append((TITLES[model.name], picked.precision, ours, *others))
    return markdown_table(("model", "precision", "attnforge", *SUMMARISED.values()), rows, words=3)


def tables(figures: dict[str, Any]) -> dict[str, str]:
    """Return the tables of the documentation, by the names of their marks."""
    measured = Results.model_validate(figures)
    texts = {model.name: table(model) for model in measured.models}
    texts["claims"] = claims_table(measured_claims(measured))
    texts["summary"] = summary(measured)
    texts |= {f"growth-{growth.along}": growth_table(growth) for growth in measured.growth}
    return {name: f"{text}\n\n{where(figures)}" for name, text in texts.items()}


# --- claims: ratios of times within one run, memory, and how memory grows ---------------------------------------------

MIB_AT_MOST, TOKENS = 64, 12544
EXPONENT_AT_MOST = 1.1


@dataclass(frozen=True)
class Ratio:
    """The claim that one contender takes at most `at_most` times as long as another.

    Attributes:
        model: name of the model in the results.
        ours: key of a contender; or a precision, for the backend that `auto` picks at it.
        peer: key of the other contender; or a precision, for the fastest of all others at it that is not known to be
            wrong in a reference case of the bundle.
        at_most: the limit of the ratio.
    """

    model: str
    ours: str
    peer: str
    at_most: float

    def measured_on(self, model: Model | None) -> Claim:
        """Return the claim as measured on `model`; None means that the results lack the model."""
        name, _, precision = self.peer.partition(" ")
        claim = f"{self.model}: {self.ours} to {name if precision else f'any {name} contender'}"
        contenders = model.contenders if model is not None else []
        ours = next((c for c in contenders if c.key == self.ours or (c.picked and c.precision == self.ours)), None)
        if ours is None:
            return Claim(claim, None, self.at_most)
        others = [c for c in contenders if c is not ours and self.peer in (c.key, c.precision)]
        others.sort(key=lambda c: c.latency.median.value)
        first = next((i for i, c in enumerate(others) if precision or not c.wrong_in), len(others))
        ratios = [ratio_of(ours.latency.rounds, c.latency.rounds, ours.latency.openings) for c in others[: first + 1]]
        over = tuple(f"{c.key} ({ratio.value:.2f})" for c, ratio in zip(others[:first], ratios, strict=False))
        if first == len(others):
            return Claim(claim, None, self.at_most, "", over, ours.wrong_in)
        partly = f", {others[first].partly}" if others[first].partly is not None else ""
        against = "" if precision else f"{ours.key} to {others[first].key}{partly}"
        return Claim(claim, ratios[first], self.at_most, against, over, ours.wrong_in)


RATIOS = (
    Ratio("patch-attention", "onnxruntime-cpu fp32", "onnxruntime-plain fp32", 0.75),
    Ratio("patch-attention", "onnxruntime-cpu fp32", "ort-fusions fp32", 0.70),
    Ratio("patch-attention", "onnxruntime-cpu fp32", "eager-sdpa fp32", 0.95),
    Ratio("patch-attention", "onnxruntime-cpu fp32", "openvino-plain fp32", 1.05),
    Ratio("patch-attention", "bf16", "fp32", 0.40),
    Ratio("patch-attention", "fp32", "fp32", 1.05),
    Ratio("patch-attention", "bf16", "bf16", 1.05),
    Ratio("vit-b-16", "fp32", "fp32", 1.05),
    Ratio("bert-base", "fp32", "fp32", 1.05),
    Ratio("bert-base", "bf16", "bf16", 1.05),
)


def measured_claims(results: Results) -> list[Claim]:
    """Return every claim with its measurement."""
    models = {model.name: model for model in results.models}
    ratios = (claim.measured_on(models.get(claim.model)) for claim in RATIOS)
    return [*ratios, *_of_limit(models.get("patch-attention"), results.ceilings), *_of_memory(results.growth)]


def _of_limit(model: Model | None, ceilings: Ceilings | None) -> Iterator[Claim]:
    ours = next((c for c in model.contenders if c.picked and c.precision == "fp32"), None) if model else None
    if ours is not None and model is not None and ceilings is not None:
        limit = limit_seconds(model.work["fp32"], ceilings).seconds
        took = ours.latency.median.model_dump()
        measured = Interval(**{name: 1e-3 * ms / limit for name, ms in took.items()})
        yield Claim(f"patch-attention: {ours.key}, of the limit's time", measured, 1 / OF_LIMIT)


def _of_memory(growth: Sequence[Growth]) -> Iterator[Claim]:
    over = next((each for each in growth if each.along == "tokens"), None)
    series = next((s for s in over.series if s.name == "onnxruntime-cpu"), None) if over is not None else None
    mib = dict(zip(over.sizes, series.extra_mib, strict=True)).get(TOKENS) if over and series else None
    yield Claim(f"patch-attention: MiB that {TOKENS} tokens add on onnxruntime-cpu", mib, MIB_AT_MOST)
    exponent = series.memory.exponent if series is not None and series.memory is not None else None
    yield Claim("patch-attention: p of memory ~ tokensᵖ on onnxruntime-cpu", exponent, EXPONENT_AT_MOST)


# claims do not affect the exit code: machines differ
EXPERIMENT = Experiment(
    "suite.json", measure, tables, lambda figures: measured_claims(Results.model_validate(figures)), broken
)
