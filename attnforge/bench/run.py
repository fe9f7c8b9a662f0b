"""Latency, throughput, memory and start-up of a bundle's backends and its peers, measured together in one run.

Machines drift, so only ratios within a run mean anything (:mod:`attnforge.runtime.race`). Every contender is checked
against the parity budget before it is timed, on the inputs that are timed: a wrong answer has no time. Ours, and peers
that are as fast, are then checked in every reference case of the bundle.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, overload

from attnforge.atomic import temporary_folder
from attnforge.bench import alone
from attnforge.bench.calls import Baseline, Caller, Calls, Load, callers, check_all_cases, loads
from attnforge.bench.contenders.decoding.registry import DECODING_PEERS
from attnforge.bench.contenders.peers import why_no_module, with_threads
from attnforge.bench.contenders.registry import ON_GPU as GPU_PEERS
from attnforge.bench.contenders.registry import PEERS, expanded, peers_here
from attnforge.bench.decoding import measure_decoding
from attnforge.bench.experiment import ROUNDS, Experiment, StageCallback, case_at, finished, new_run, source_text
from attnforge.bench.interval import per_second, ratio_of
from attnforge.bench.limits import Ceilings, limit_seconds
from attnforge.bench.limits.ceilings import measure_ceilings
from attnforge.bench.limits.work import work_of
from attnforge.bench.race import run_race
from attnforge.bench.results import Contender, DecodingResults, Deployed, Model, Results, Throughput
from attnforge.bundle import CANONICAL, Bundle, Case, Trusted, open_bundle
from attnforge.children import ChildError
from attnforge.errors import UsageError
from attnforge.export.decoding.whole import whole_graph
from attnforge.export.sources.named import check_trusted
from attnforge.keywords import guessable
from attnforge.machine import processors
from attnforge.runtime import cases as reference
from attnforge.runtime.backends.onnxruntime import weights_of
from attnforge.runtime.backends.registry import ON_GPU, REGISTRY, by_preference, why_not_unasked

Bundles = str | os.PathLike[str] | Bundle | Sequence[str | os.PathLike[str] | Bundle]
Sizes = Mapping[str, int] | Sequence[Mapping[str, int]] | None

BASELINES = ["eager", "onnxruntime-plain"]
"""The peers of `attnforge bench` if none is named."""

LONG_START = 0.3
"""Seconds of loading above which a contender is loaded in a second process, and the shorter time counts.

A virtual machine's memory is slow when it is first touched, and the first process pays for that.
"""


@overload
def benchmark(
    bundle: Bundles, backends: Sequence[str] | None = None, against: Sequence[str] | None = (), *, sizes: Sizes = None,
    decode: Literal[False] = False, contexts: None = None, prompts: None = None, batch: None = None,
    rounds: int = ROUNDS, openings: int | None = None, threads: int | None = None, module: Any = None,
    quick: bool = False, trust_source: bool = False, trusted: Trusted = None, command: str = ...,
    progress: StageCallback = ...,
) -> Results: ...  # fmt: skip


@overload
def benchmark(
    bundle: Bundles, backends: Sequence[str] | None = None, against: Sequence[str] | None = (), *, sizes: None = None,
    decode: Literal[True], contexts: Sequence[int] | None = None, prompts: Sequence[int] | None = None,
    batch: int | None = None, rounds: int = ROUNDS, openings: int | None = None, threads: int | None = None,
    module: Any = None, quick: bool = False, trust_source: bool = False, trusted: Trusted = None, command: str = ...,
    progress: StageCallback = ...,
) -> DecodingResults: ...  # fmt: skip


@guessable()
def benchmark(
    bundle: Bundles, backends: Sequence[str] | None = None, against: Sequence[str] | None = (), *, sizes: Sizes = None,
    decode: bool = False, contexts: Sequence[int] | None = None, prompts: Sequence[int] | None = None,
    batch: int | None = None, rounds: int = ROUNDS, openings: int | None = None, threads: int | None = None,
    module: Any = None, quick: bool = False, trust_source: bool = False, trusted: Trusted = None,
    command: str = "attnforge.benchmark(…)", progress: StageCallback = lambda stage: None,
) -> Results | DecodingResults:  # fmt: skip
    """Measure a bundle's backends, and peers if requested, in one run.

    Args:
        bundle: a bundle or its folder; or several of one model at several precisions, measured in one run.
        backends: backends to measure; by default every deployed backend that this machine can run.
        against: names of peers (:mod:`attnforge.bench.contenders.registry`, with `decode`
            :mod:`attnforge.bench.contenders.decoding.registry`), or `all` for every peer that can run here; peers in
            torch need the module. None for :data:`BASELINES`, which are skipped where the module of a bundle is missing
            or not trusted, and with `decode`.
        sizes: sizes of the dynamic dims, by symbol; or a sequence of such mappings, each measured separately. By
            default the example's.
        decode: measure decoding of one bundle that was deployed with `cache_tokens`, and return
            :class:`~attnforge.bench.results.DecodingResults`. Logits are checked against the module if it is given,
            registered or trusted, otherwise against the exported graph in the bundle.
        contexts: with `decode`, numbers of tokens before the timed steps; by default those of 128, 512 and 1,024 that
            fit in the caches.
        prompts: with `decode`, lengths in tokens of the prompts whose time to first token is measured; by default those
            of 16, 128 and 512 that fit in the caches.
        batch: with `decode`, number of samples decoded at once; by default 1.
        rounds: number of timed rounds per contender.
        openings: how often each contender is loaded. Rounds are split between loads, so there are at most as many loads
            as rounds. By default 3, in a quick run 1; the intervals of a single load do not cover differences between
            loads.
        threads: number of threads of CPU contenders; by default one per processor.
        module: the module that was deployed, if the bundle does not say how to rebuild it.
        quick: measure latency only, with one load: no throughput, starts, memory or limits, and parity on the timed
            inputs only; with `decode`, steps only.
        trust_source: whether to trust the source that the manifests name: peers run the model that was deployed, so
            that callable, Hugging Face folder or file is imported, opened and run with your permissions.
        trusted: files of public keys, one of which must have signed each bundle, as in :func:`attnforge.load`.
        command: recorded as the command that reproduces the results.
        progress: called with the name of each stage as it starts.

    Raises:
        UnknownNameError: no such backend, peer or dim.
        UntrustedError: a peer needs the source that a manifest names, but neither `module` nor `trust_source` is given.
        UsageError: fewer than one round or load, bundles of different models, a required module is missing, or with
            `decode` a bundle without a cache, or a context or prompt that does not fit in it.
        InputError: a size is outside the profile.
        UnavailableError: a backend that was requested by name cannot run here.
        BundleError: a bundle is incomplete, or was altered.
    """
    start = time.perf_counter()
    paths = [bundle] if isinstance(bundle, str | os.PathLike | Bundle) else list(bundle)
    if decode and (sizes is not None or len(paths) != 1):
        raise UsageError("decode=True measures one bundle at a time, by contexts, prompts and batch; omit sizes")
    for name, given in (("contexts", contexts), ("prompts", prompts), ("batch", batch)):
        if given is not None and not decode:
            raise UsageError(f"{name} means nothing without decode=True")
    bundles = [open_bundle(path, lazily=True, trusted=trusted) for path in paths]

    def every() -> Iterable[str]:
        return DECODING_PEERS if decode else peers_here({opened.manifest.precision for opened in bundles})

    skipped: dict[str, str] = {}
    if against is None:
        against = [] if decode else BASELINES
        missing = (why_no_module(opened.manifest.source, trust_source) for opened in bundles if module is None)
        if against and (reason := next(filter(None, missing), None)) is not None:
            against = []
            skipped = {f"{name} {b.manifest.precision}": reason for b in bundles for name in BASELINES}
    against = expanded(against, every)
    experiment = Experiment(
        bundles, backends, against, rounds, threads or processors(), module, skipped=skipped,
        openings=openings if openings is not None else 1 if quick else 3, trust_source=trust_source, progress=progress,
    )  # fmt: skip
    experiment.throughput = experiment.starts = experiment.memory = experiment.cases = not quick
    experiment.check(DECODING_PEERS if decode else PEERS, threads)
    if decode:
        decoded = measure_decoding(experiment, contexts, prompts, 1 if batch is None else batch, command)
        return finished(decoded, start)
    for opened in bundles if against and module is None else ():
        check_trusted(opened.manifest.source, trust_source)
    every_sizes = [sizes or {}] if sizes is None or isinstance(sizes, Mapping) else list(sizes)
    for dims in every_sizes:
        case_at(bundles[0], dims)  # invalid sizes raise before anything is measured
    results = new_results(command, experiment.threads, progress, with_ceilings=not quick)
    results.models = [measure(experiment, dims, results.ceilings) for dims in every_sizes]
    return finished(results, start)


def new_results(command: str, threads: int, progress: StageCallback, with_ceilings: bool = True) -> Results:
    """Return results without models: time, machine and the machine's ceilings.

    Args:
        command: command that reproduces the results.
        threads: number of threads of every CPU contender.
        progress: called with the name of each stage as it starts.
        with_ceilings: whether the machine's limits are measured.
    """
    results = Results(**new_run(command, threads), models=[])
    if with_ceilings:
        progress("measure the machine's limits")
        results.ceilings = measure_ceilings(threads)
    return results


def measure(experiment: Experiment, sizes: Mapping[str, int], ceilings: Ceilings | None) -> Model:
    """Measure every contender on one model at one set of sizes.

    Args:
        experiment: the bundles, contenders and settings.
        sizes: sizes of the dynamic dims; a dim that is not named has the example's size.
        ceilings: ceilings of the machine, to compare times with; None to skip that.
    """
    manifest = experiment.bundles[0].manifest
    case = case_at(experiment.bundles[0], sizes)  # the sizes of the other bundles are the same
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        with_threads(experiment.threads, stack)  # closing a contender restores torch's threads, so set them here
        baselines = [Baseline(bundle, sizes, experiment, folder) for bundle in experiment.bundles]
        dims = ", ".join(f"{name} {size}" for name, size in case.sizes.items())
        calls = Calls("check", f"{manifest.name} at {dims}" if dims else manifest.name)
        throughputs = list(loads(experiment.bundles[0], case)) if experiment.throughput else []
        skipped = dict(experiment.skipped)
        every = (entry for baseline in baselines for entry in callers(experiment, baseline, skipped))
        entries, wrong = run_race(experiment, every, [calls, *throughputs], skipped, stack)
        contenders = [_contender(entry, calls, throughputs) for entry in entries]
        _compare(experiment, contenders)
        pairs = list(zip(entries, contenders, strict=True))
        if experiment.starts or experiment.memory:
            _measure_starts_and_memory(experiment, pairs, case)
        if experiment.cases:
            check_all_cases(experiment, pairs)
    model = Model(
        name=manifest.name, sizes=case.sizes,
        inputs={spec.name: f"{spec.dtype}{list(reference.shape_of(spec, case.sizes))}" for spec in manifest.inputs},
        rounds=sum(calls.openings), deployed=[_deployed(bundle) for bundle in experiment.bundles],
        contenders=contenders, wrong=wrong, skipped=skipped,
    )  # fmt: skip
    if ceilings is not None:
        _compare_with_limits(experiment.bundles, model, ceilings)
    return model


def _contender(entry: Caller, calls: Calls, throughputs: Sequence[Load]) -> Contender:
    rates = [
        Throughput(batch=load.batch, callers=load.callers, per_second=per_second(load.latency(entry.key).median))
        for load in throughputs
        if entry.key in load.times
    ]
    return Contender(
        name=entry.name, precision=entry.job.precision.name, ours=entry.ours, what=entry.peer.what, error=entry.error,
        budget=entry.budget, latency=calls.latency(entry.key), throughput=rates, size_mb=_size_mb(entry),
        notes=entry.notes,
    )  # fmt: skip


def _compare(experiment: Experiment, contenders: Sequence[Contender]) -> None:
    """Mark the backend that `auto` picks at each precision, and compare all contenders of that precision with it, or
    with our fastest if that backend was not timed."""
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
    """Return the MB of the files that a contender loads; None for a peer in torch."""
    bundle, manifest = entry.job.bundle, entry.job.bundle.manifest
    record = manifest.targets.get(entry.name)
    if not entry.ours:
        file = entry.peer.file(entry.job) if entry.peer.file is not None else None
        files = [] if file is None else [file, *file.parent.glob(f"{file.name}.data")]
    elif record is not None and record.engines:
        files = [bundle.path / record.engines[0].file]
    else:
        return weights_of(bundle.path / REGISTRY[entry.name].model(manifest)) / 1e6
    return sum(file.stat().st_size for file in files) / 1e6 if files else None


def _compare_with_limits(bundles: Sequence[Bundle], model: Model, ceilings: Ceilings) -> None:
    """Record the work and the limit of every precision, and the share of the limit that each CPU contender reaches."""
    for bundle in bundles:
        precision = bundle.manifest.precision
        model.work[precision] = work = work_of(whole_graph(bundle, CANONICAL), model.sizes)
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


# --- starts and memory ------------------------------------------------------------------------------------------------


def _measure_starts_and_memory(experiment: Experiment, pairs: Sequence[tuple[Caller, Contender]], case: Case) -> None:
    """Measure starts, one after another, and then memory, two processes at a time, which do not disturb each other.

    A process that starts a model of fixed sizes measures its memory too. Other models take a second process, which
    first runs at other sizes, and measures a second load.
    """
    subjects, runs = list(_subjects(experiment, pairs, case)), dict[str, alone.FreshRun]()
    for contender, order in subjects if experiment.starts else ():
        experiment.progress(f"start {contender.key} in a new process")
        with _noted(contender, "start"):
            run = alone.measured(order)
            contender.cold = run.cold
            if not (order.any_sizes and order.sizes):
                runs[contender.key] = run
                if run.cold.load_s > LONG_START:
                    with contextlib.suppress(ChildError):
                        run.cold.load_s = min(run.cold.load_s, alone.measured(order).cold.load_s)
    if not experiment.memory:
        return
    experiment.progress("measure memory")
    with ThreadPoolExecutor(2) as threads:
        futures = {
            contender.key: threads.submit(alone.measured, order.model_copy(update={"warm": True}))
            for contender, order in subjects
            if contender.key not in runs
        }
    for contender, _ in subjects:
        with _noted(contender, "memory"):
            run, cold = runs.get(contender.key) or futures[contender.key].result(), contender.cold
            contender.memory = run.memory
            if cold is not None and cold.load_s > LONG_START:
                cold.load_s = min(cold.load_s, run.cold.load_s)


@contextlib.contextmanager
def _noted(contender: Contender, what: str) -> Iterator[None]:
    """Turn the failure of a process inside the block into a note of the contender."""
    try:
        yield
    except ChildError as error:
        contender.notes.append(f"its {what} is not measured: its process {error}")


def _subjects(
    experiment: Experiment, pairs: Sequence[tuple[Caller, Contender]], case: Case
) -> Iterator[tuple[Contender, alone.RunRequest]]:
    """Yield the contenders to measure, each with the request to its process; a contender that no process can run gets a
    note with the reason."""
    for entry, contender in pairs:
        peer, bundle = entry.peer, entry.job.bundle
        if not entry.ours and experiment.fresh_peers is not None and entry.name not in experiment.fresh_peers:
            continue
        if peer.compiles:
            contender.notes.append(
                "its start and memory are not measured: compiled code is cached on disk, so no start is cold"
            )
        elif not entry.ours and peer.file is None and bundle.manifest.source.kind in ("module", "onnx"):
            contender.notes.append("its start and memory are not measured: another process cannot rebuild the module")
        else:
            request = alone.RunRequest(
                bundle=str(bundle.path.absolute()), contender=entry.name, engine=peer.engine,
                file=str(peer.file(entry.job).absolute()) if peer.file is not None else None,
                sizes=case.sizes, threads=experiment.threads, folder=str(entry.job.folder.absolute()),
                any_sizes=peer.any_sizes, warm=False, trust_source=experiment.trust_source,
                stands=str(Path.cwd()), trusted=[str(key) for key in bundle.trusted],
            )  # fmt: skip
            yield contender, request
