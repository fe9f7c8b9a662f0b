"""Latency, throughput, memory and starts of a bundle's backends and of its peers, side by side in one run.

Machines drift, so only ratios within a run mean anything (:mod:`attnforge.runtime.race`). Every contender is held to
the parity budget before it is timed, on the very inputs that are timed: a wrong answer has no time. Ours, and peers
that are as fast, are then held to it in every reference case of the bundle.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, overload

from attnforge.atomic import temporary_folder
from attnforge.bench.calls import Caller, Calls, Yardstick, callers, check_all_cases
from attnforge.bench.contenders.decoding.registry import DECODING_PEERS
from attnforge.bench.contenders.engines import Runner
from attnforge.bench.contenders.peers import with_threads
from attnforge.bench.contenders.registry import ON_GPU as GPU_PEERS
from attnforge.bench.contenders.registry import PEERS, expanded, peers_here
from attnforge.bench.decoding import measure_decoding
from attnforge.bench.experiment import ROUNDS, Experiment, Progress, begun, case_at, source_text
from attnforge.bench.experiment import finished as finished
from attnforge.bench.interval import latency_of, per_second, ratio_of
from attnforge.bench.limits import Ceilings, limit_seconds
from attnforge.bench.limits.ceilings import measure_ceilings
from attnforge.bench.limits.work import work_of
from attnforge.bench.race import Raced, Workload, run_race
from attnforge.bench.results import Contender, DecodingResults, Deployed, Model, Results, Throughput
from attnforge.bench.starts import measure_starts_and_memory
from attnforge.bench.throughput import Load, loads
from attnforge.bundle import CANONICAL, FLAVOURS, OPENVINO, WEIGHTS, Bundle, Trusted, open_bundle
from attnforge.errors import UsageError
from attnforge.export.decoding.whole import whole_graph
from attnforge.export.sources.named import check_trusted
from attnforge.machine import processors
from attnforge.runtime import cases as reference
from attnforge.runtime.backends.openvino import graph_of
from attnforge.runtime.backends.registry import ON_GPU, why_not_unasked
from attnforge.runtime.preference import by_preference

Bundles = str | os.PathLike[str] | Bundle | Sequence[str | os.PathLike[str] | Bundle]
Sizes = Mapping[str, int] | Sequence[Mapping[str, int]] | None


@overload
def benchmark(
    bundle: Bundles, backends: Sequence[str] | None = None, against: Sequence[str] = (), *, sizes: Sizes = None,
    decode: Literal[False] = False, contexts: None = None, prompts: None = None, batch: None = None,
    rounds: int = ROUNDS, openings: int | None = None, threads: int | None = None, module: Any = None,
    quick: bool = False, trust_source: bool = False, trusted: Trusted = None, command: str = ...,
    progress: Progress = ...,
) -> Results: ...  # fmt: skip


@overload
def benchmark(
    bundle: Bundles, backends: Sequence[str] | None = None, against: Sequence[str] = (), *, sizes: None = None,
    decode: Literal[True], contexts: Sequence[int] | None = None, prompts: Sequence[int] | None = None,
    batch: int | None = None, rounds: int = ROUNDS, openings: int | None = None, threads: int | None = None,
    module: Any = None, quick: bool = False, trust_source: bool = False, trusted: Trusted = None, command: str = ...,
    progress: Progress = ...,
) -> DecodingResults: ...  # fmt: skip


def benchmark(
    bundle: Bundles,
    backends: Sequence[str] | None = None,
    against: Sequence[str] = (),
    *,
    sizes: Sizes = None,
    decode: bool = False,
    contexts: Sequence[int] | None = None,
    prompts: Sequence[int] | None = None,
    batch: int | None = None,
    rounds: int = ROUNDS,
    openings: int | None = None,
    threads: int | None = None,
    module: Any = None,
    quick: bool = False,
    trust_source: bool = False,
    trusted: Trusted = None,
    command: str = "attnforge.benchmark(…)",
    progress: Progress = lambda stage: None,
) -> Results | DecodingResults:
    """Measure a bundle's backends, and peers where asked, side by side.

    Args:
        bundle: a bundle or its folder; or several of one model at several precisions, measured in one run.
        backends: by default every deployed one that this machine can run.
        against: names of peers (`attnforge.bench.contenders.registry`, of `decode` those of
            `attnforge.bench.contenders.decoding.registry`), or `all` that can run here; peers in
            torch need the module.
        sizes: of the dynamic dims, by symbol; or a sequence of such, each measured for itself. By default the
            example's.
        decode: of one bundle that was deployed with `cache_tokens`: measure how it decodes, and return
            :class:`~attnforge.bench.results.DecodingResults`. Logits are held to the module where it is given,
            registered or trusted, else to the exported graph that the bundle keeps.
        contexts: of `decode`, tokens before the timed steps; by default those of 128, 512 and 1,024 that the caches
            have places for.
        prompts: of `decode`, tokens of the prompts whose time to first token is measured; by default 16, 128 and 512,
            likewise.
        batch: of `decode`, samples that are decoded at once; by default 1.
        rounds: how often every contender has a turn.
        openings: how often every contender is opened anew. The rounds are shared out among the openings, so there are
            no more openings than rounds. By default 3; in a quick run 1, whose intervals do not tell how openings
            differ.
        threads: of CPU contenders; by default one a processor.
        module: the module that was deployed, where the bundle does not say how to make it again.
        quick: latency alone, of one opening: no throughput, starts, memory or limits, and parity on the timed inputs
            alone; of `decode` steps alone.
        trust_source: whether you trust whoever made the bundles as you would a program's maker: peers run the model
            that was deployed, so what the manifest names (a callable, a Hugging Face folder, a file) is imported,
            opened and run with all your rights.
        trusted: files of public keys, one of which must have signed each bundle, as :func:`attnforge.load` takes them.
        command: recorded as the one that measures the results again.
        progress: called with the name of each stage as it starts.

    Raises:
        UnknownNameError: no such backend, peer or dim.
        UntrustedError: a peer needs what a manifest names, and neither `module` nor `trust_source` was given.
        UsageError: fewer than one round or opening, bundles of different models, a module is needed and not at hand, or
            of `decode` a bundle without a cache, or a context or prompt that does not fit in it.
        InputError: a size outside the profile.
        UnavailableError: a backend that was asked for by name cannot run here.
        BundleError: a bundle is not whole, or was altered.
    """
    start = time.perf_counter()
    paths = [bundle] if isinstance(bundle, str | os.PathLike | Bundle) else list(bundle)
    if decode and (sizes is not None or len(paths) != 1):
        raise UsageError("decode=True measures one bundle at a time, by contexts, prompts and batch; give no sizes")
    for name, given in (("contexts", contexts), ("prompts", prompts), ("batch", batch)):
        if given is not None and not decode:
            raise UsageError(f"{name} means nothing without decode=True")
    bundles = [open_bundle(path, lazily=True, trusted=trusted) for path in paths]

    def every() -> Iterable[str]:
        return DECODING_PEERS if decode else peers_here({opened.manifest.precision for opened in bundles})

    against = expanded(against, every)
    experiment = Experiment(
        bundles, backends, against, rounds, threads or processors(), module,
        openings=openings if openings is not None else 1 if quick else 3, trust_source=trust_source, progress=progress,
    )  # fmt: skip
    experiment.throughput = experiment.starts = experiment.memory = experiment.cases = not quick
    experiment.check(DECODING_PEERS if decode else PEERS, threads)
    if decode:
        return measure_decoding(experiment, contexts, prompts, 1 if batch is None else batch, command)
    for opened in bundles if against and module is None else ():
        check_trusted(opened.manifest.source, trust_source)
    every_sizes = [sizes or {}] if sizes is None or isinstance(sizes, Mapping) else list(sizes)
    for dims in every_sizes:
        case_at(bundles[0], dims)  # sizes that cannot be measured are an error before any others are
    results = new_results(command, experiment.threads, progress, with_ceilings=not quick)
    results.models = [measure(experiment, dims, results.ceilings) for dims in every_sizes]
    return finished(results, start)


def new_results(command: str, threads: int, progress: Progress, with_ceilings: bool = True) -> Results:
    """Results without models yet: when, on which machine, and what that can do at best.

    Args:
        command: that measures them again.
        threads: of every CPU contender.
        progress: called with the name of each stage as it starts.
        with_ceilings: whether the machine's limits are measured.
    """
    results = Results(**begun(command, threads), models=[])
    if with_ceilings:
        progress("measure the machine's limits")
        results.ceilings = measure_ceilings(threads)
    return results


def measure(experiment: Experiment, sizes: Mapping[str, int], ceilings: Ceilings | None) -> Model:
    """Every contender on one model at one set of sizes.

    Args:
        sizes: of the dynamic dims; the example's where they are not named.
        ceilings: of the machine, to hold times against; None for none.
    """
    manifest = experiment.bundles[0].manifest
    case = case_at(experiment.bundles[0], sizes)  # the sizes of the other bundles are the same
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        with_threads(experiment.threads, stack)  # closing a contender restores torch's threads, so set them out here
        yardsticks = [Yardstick(bundle, sizes, experiment, folder) for bundle in experiment.bundles]
        at = ", ".join(f"{name} {size}" for name, size in case.sizes.items())
        calls = Calls("check", f"{manifest.name} at {at}" if at else manifest.name, yardsticks)
        workloads = [calls, *(loads(experiment.bundles[0], case) if experiment.throughput else ())]
        skipped: dict[str, str] = {}
        entries = (entry for yardstick in yardsticks for entry in callers(experiment, yardstick, skipped))
        raced = run_race(experiment, entries, workloads, skipped, stack)
        contenders = [_contender(entry, raced, workloads) for entry in raced.entries]
        _compare(experiment, contenders)
        pairs = list(zip(raced.entries, contenders, strict=True))
        measure_starts_and_memory(experiment, pairs, case)
        if experiment.cases:
            check_all_cases(experiment, yardsticks, pairs)
    model = Model(
        name=manifest.name,
        sizes=case.sizes,
        inputs={spec.name: f"{spec.dtype}{list(reference.shape_of(spec, case.sizes))}" for spec in manifest.inputs},
        rounds=sum(raced.openings),
        deployed=[_deployed(bundle) for bundle in experiment.bundles],
        contenders=contenders,
        wrong=raced.wrong,
        skipped=raced.skipped,
    )
    if ceilings is not None:
        _hold_to_limits(experiment.bundles, model, ceilings)
    return model


def _contender(entry: Caller, raced: Raced[Runner], workloads: Sequence[Workload[Runner]]) -> Contender:
    rates = [
        Throughput(batch=load.batch, callers=load.callers, per_second=per_second(latency_of(times[entry.key]).median))
        for load, times in zip(workloads, raced.times, strict=True)
        if isinstance(load, Load) and entry.key in times
    ]
    return Contender(
        name=entry.name, precision=entry.job.precision.name, ours=entry.ours, what=entry.what, error=entry.error,
        budget=entry.budget, latency=latency_of(raced.times[0][entry.key], raced.openings), throughput=rates,
        size_mb=_size_mb(entry), notes=entry.notes,
    )  # fmt: skip


def _compare(experiment: Experiment, contenders: Sequence[Contender]) -> None:
    """Mark the backend that `auto` picks at each precision, and compare all others of that precision with it; with our
    fastest where that backend was not timed."""
    for bundle in experiment.bundles:
        same = [contender for contender in contenders if contender.precision == bundle.manifest.precision]
        ours = {contender.name: contender for contender in same if contender.ours}
        loaded = next((name for name in by_preference(bundle) if why_not_unasked(bundle, name) is None), None)
        if loaded in ours:
            ours[loaded].picked = True
        best = ours.get(loaded or "") or min(ours.values(), key=lambda c: c.latency.median.value, default=None)
        if best is None:
            continue
        for contender in same:
            contender.ratio = ratio_of(contender.latency.rounds, best.latency.rounds, best.latency.openings)


def _size_mb(entry: Caller) -> float | None:
    """MB of the files that a contender is made of; None for a peer in torch."""
    bundle, manifest = entry.job.bundle, entry.job.bundle.manifest
    record = manifest.targets.get(entry.name)
    if entry.peer is not None:
        file = entry.peer.file(entry.job) if entry.peer.file is not None else None
        files = [] if file is None else [file, *file.parent.glob(f"{file.name}.data")]
    elif record is not None and record.engines:
        files = [bundle.path / record.engines[0].file]
    else:
        targets = FLAVOURS if entry.name == "onnxruntime-tensorrt" else ("onnxruntime",)
        records = [manifest.targets[target] for target in targets if target in manifest.targets]
        name = graph_of(manifest) if entry.name == OPENVINO else records[0].model if records else CANONICAL
        files = [bundle.path / name, *([bundle.path / WEIGHTS] if WEIGHTS in manifest.files else [])]
    return sum(file.stat().st_size for file in files) / 1e6 if files else None


def _hold_to_limits(bundles: Sequence[Bundle], model: Model, ceilings: Ceilings) -> None:
    """Record the work and the least time of every precision, and which share of it each CPU contender reaches."""
    for bundle in bundles:
        precision = bundle.manifest.precision
        work = work_of(whole_graph(bundle, CANONICAL), model.sizes)
        model.work[precision] = work
        model.limit[precision] = limit = limit_seconds(work, ceilings)
        for contender in model.contenders:
            if contender.precision == precision and contender.name not in (*ON_GPU, *GPU_PEERS):
                contender.share = limit.share(contender.latency.median.value / 1e3)


def _deployed(bundle: Bundle) -> Deployed:
    manifest = bundle.manifest
    return Deployed(
        precision=manifest.precision,
        bundle=bundle.path.name,
        source=source_text(manifest.source),
        seconds=manifest.seconds,
        size_mb=sum(file.stat().st_size for file in bundle.path.rglob("*") if file.is_file()) / 1e6,
    )
