"""Decoding, measured: time to first token, milliseconds a token and memory a step, of a bundle with a cache and of its
peers.

Contenders are opened several times in a run and take turns in an order drawn anew each round, as in
:mod:`attnforge.bench.run`. In each opening, at each context, the logits of every contender are held to the parity
budget before it is timed. A turn goes back to the context, takes a step that is not timed, and then some that are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnforge.arrays import Array
from attnforge.atomic import temporary_folder
from attnforge.bench.contenders.decoding.registry import DECODING_PEERS
from attnforge.bench.contenders.decoding.stepper import DecodingJob, Ours, Stepper
from attnforge.bench.contenders.peers import expected, with_threads
from attnforge.bench.contenders.registry import expanded
from attnforge.bench.decoding.results import (
    DecodingContender,
    DecodingResults,
    FirstToken,
    StepLimit,
    StepTime,
)
from attnforge.bench.experiment import ROUNDS, Experiment, Progress, default_openings, environment, finished
from attnforge.bench.interval import latency_of, per_second, ratio_of
from attnforge.bench.limits.work import work_of
from attnforge.bench.race import Entry, Raced, Times, Workload, backends_of, run_race
from attnforge.bundle import CANONICAL, PLAIN, Bundle, Case, Decoding, DimSpec, Trusted, open_bundle
from attnforge.errors import UsageError
from attnforge.export.graphs.execute import as_it_is, in_float64
from attnforge.export.graphs.saving import beside, load_graph
from attnforge.export.sources.named import check_trusted
from attnforge.machine import processors
from attnforge.memory import resident
from attnforge.runtime.backends.whole_sequences import STEPPING
from attnforge.runtime.decoding.decoder import Step
from attnforge.runtime.parity.budget import budget_precision, judge
from attnforge.runtime.race import in_turns, seconds_of

CONTEXTS = (128, 512, 1024)
"""Tokens before the timed steps, of which those are measured that the caches have places for."""

PROMPTS = (16, 128, 512)

STEPS = 8
"""Timed steps of a turn. One more is taken before, untimed: going back and other contenders leave caches cold."""

CHECKED = 4
"""Steps whose logits are held to the budget, at every context and in every opening."""

GROWN = 64
"""Steps over which the growth of memory is measured, where the caches have as many places left."""

COPY = "a copy of the bytes of a step"
"""The name under which the limit takes turns with contenders."""

DEAR = 4e12
"""Operations from which no float64 reference is computed: weights times tokens times two. It would take minutes."""

TRUTH_SEED = 0


@dataclass
class Plan:
    """What is measured, and how.

    Attributes:
        experiment: of one bundle.
        decoding: what the bundle says of its caches.
        contexts: tokens before timed steps, ascending.
        prompts: tokens of the prompts whose time to first token is measured, ascending.
        batch: samples that are decoded at once.
        quick: whether steps alone are measured.
    """

    experiment: Experiment
    decoding: Decoding
    contexts: Sequence[int]
    prompts: Sequence[int]
    batch: int
    quick: bool

    @property
    def bundle(self) -> Bundle:
        """The one that is measured."""
        return self.experiment.bundles[0]

    @property
    def longest(self) -> int:
        """Tokens of the longest run."""
        return max(self.contexts[-1] + STEPS + 1, self.prompts[-1])


def benchmark_decoding(
    bundle: str | os.PathLike[str] | Bundle,
    backends: Sequence[str] | None = None,
    against: Sequence[str] = (),
    *,
    contexts: Sequence[int] | None = None,
    prompts: Sequence[int] | None = None,
    batch: int = 1,
    rounds: int = ROUNDS,
    openings: int | None = None,
    threads: int | None = None,
    module: Any = None,
    quick: bool = False,
    trust_source: bool = False,
    trusted: Trusted = None,
    command: str = "attnforge.benchmark(…, decode=True)",
    progress: Progress = lambda stage: None,
) -> DecodingResults:
    """Measure how a bundle with a cache decodes, and peers where asked, side by side; what
    :func:`attnforge.benchmark` does with `decode=True`, which explains the arguments.

    Args:
        bundle: its folder; deployed with `cache_tokens`.
        backends: by default every one that runs steps here.
        against: names of peers (:data:`DECODING_PEERS`), or `all`.
        contexts: tokens before the timed steps; by default those of 128, 512 and 1,024 that the caches have places for.
        prompts: tokens of the prompts whose time to first token is measured; by default 16, 128 and 512, likewise.
        batch: samples that are decoded at once.
        module: the module that was deployed, where the bundle does not say how to make it again. It is also what the
            logits are held to; without one, the exported graph that the bundle keeps is.
        quick: steps alone, of one opening: no first tokens, memory or limits.

    Raises:
        UsageError: the bundle has no cache, a context or prompt does not fit in it, or fewer than one round or opening.
        UnknownNameError: no such backend or peer.
        UntrustedError: a peer needs what the manifest names, and neither `module` nor `trust_source` was given.
        UnavailableError: a backend that was asked for by name cannot run steps here.
        BundleError: the bundle is not whole, or was altered.
    """
    opened = open_bundle(bundle, lazily=True, trusted=trusted)
    manifest = opened.manifest
    if manifest.decoding is None:
        raise UsageError(
            f"{manifest.name} has no cache, so there is no step to time; deploy it with cache_tokens=… (--cache-tokens)"
        )
    experiment = Experiment(
        [opened], backends, expanded(against, lambda: DECODING_PEERS), rounds, threads or processors(), module,
        openings=default_openings(openings, quick), trust_source=trust_source, progress=progress,
    )  # fmt: skip
    experiment.check(DECODING_PEERS, threads)
    most = Step.of(manifest).most_samples
    if not 1 <= batch <= most:
        raise UsageError(f"{batch} samples were asked for; the bundle takes 1 to {most}")
    in_torch = any(DECODING_PEERS[name].in_torch for name in experiment.against)
    if module is None and in_torch and manifest.source.kind not in ("module", "onnx"):
        check_trusted(manifest.source, trust_source)
    places = manifest.decoding.places
    contexts = _fitting("contexts", contexts, CONTEXTS, places - STEPS - 1, places)
    prompts = _fitting("prompts", prompts, PROMPTS, places, places)
    return _measured(Plan(experiment, manifest.decoding, contexts, prompts, batch, quick), command)


def _fitting(what: str, asked: Sequence[int] | None, usual: Sequence[int], most: int, places: int) -> list[int]:
    """Numbers of tokens that the caches have places for, ascending.

    Raises:
        UsageError: a number that was asked for does not fit, or none does.
    """
    if most < 1:
        raise UsageError(f"the caches hold {places} tokens, too few to time {STEPS + 1} steps behind others")
    if asked is None:
        return [tokens for tokens in usual if tokens <= most] or [most]
    if not asked or min(asked) < 1 or max(asked) > most:
        wrong = next((tokens for tokens in asked if not 1 <= tokens <= most), "none")
        raise UsageError(f"{what} are {wrong}; the caches hold {places} tokens, so give 1 to {most}")
    return sorted(set(asked))


def _measured(plan: Plan, command: str) -> DecodingResults:
    experiment, manifest = plan.experiment, plan.bundle.manifest
    start, surroundings = time.perf_counter(), environment(experiment.threads)
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        with_threads(experiment.threads, stack)
        job = _job(plan, folder)
        truth = Truth.of(plan, job)
        results = DecodingResults(
            command=command,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=0,
            environment=surroundings,
            model=manifest.name,
            precision=manifest.precision,
            source=" ".join(
                [manifest.source.name, *(f"{name}={value}" for name, value in manifest.source.options.items())]
            ),
            batch=plan.batch,
            places=plan.decoding.places,
            steps=STEPS,
            contexts=list(plan.contexts),
            prompts=[] if plan.quick else list(plan.prompts),
            rounds=experiment.rounds,
            openings=len(experiment.shares),
            held_to="float64" if truth.is_float64 else "eager",
        )
        ids = job.feeds[plan.decoding.tokens]
        copies = {} if plan.quick else _copies(plan)
        workloads: list[Workload[Stepper]] = [
            Steps(f"check at {at:,} tokens", f"steps at {at:,} tokens", truth, ids, before, at, copies.get(at))
            for before, at in zip([0, *plan.contexts], plan.contexts, strict=False)
        ]
        for tokens in results.prompts:
            what = f"{tokens:,} tokens"
            workloads.append(Prompt(f"check the prompt of {what} on", f"prompts of {what}", truth, ids[:, :tokens]))
        raced = run_race(experiment, _entries(plan, job, results.skipped), workloads, results.skipped, stack)
        results.wrong = raced.wrong
        growths = {} if plan.quick else {entry.key: _growth(plan, ids, entry) for entry in raced.entries}
    for context, copy in copies.items():
        latency = latency_of(raced.times[plan.contexts.index(context)][COPY], raced.openings)
        results.limits[context] = StepLimit(weights=copy.weights, cache=copy.cache, latency=latency)
    results.contenders = [_contender(entry, raced, results, growths.get(entry.key)) for entry in raced.entries]
    _compare(results, raced.openings)
    return finished(results, start)


def _job(plan: Plan, folder: Path) -> DecodingJob:
    experiment, spec, vocabulary = plan.experiment, plan.bundle.manifest.graph_inputs[0], plan.decoding.vocabulary
    if vocabulary is None or len(spec.dims) != 2:
        raise UsageError(f"{spec.name} is {spec.text()}, and no ids of a table; --decode draws ids, so it takes those")
    ids = np.random.default_rng(TRUTH_SEED).integers(0, vocabulary, (plan.batch, plan.longest), dtype=spec.dtype)
    given = experiment.module, experiment.trust_source
    return DecodingJob(plan.bundle, {spec.name: ids}, experiment.threads, folder, *given)


# --- what contenders are held to --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """The logits of every token of the longest run, by a model without a cache.

    Attributes:
        eager: at the bundle's precision, `(batch, tokens, vocabulary)`, as float64.
        exact: in float64; eager's own where that would be too dear.
    """

    eager: Array
    exact: Array
    is_float64: bool

    @classmethod
    def of(cls, plan: Plan, job: DecodingJob) -> Truth:
        """Computed by the module where it is at hand, else by the exported graph that the bundle keeps.

        Raises:
            UsageError: neither is there.
        """
        manifest = plan.bundle.manifest
        weights = work_of(load_graph(plan.bundle, CANONICAL), _one_token(plan)).weights
        operations = 2.0 * weights / job.precision.dtype.itemsize * plan.batch * plan.longest
        is_float64 = operations < DEAR
        plan.experiment.progress(f"compute what logits are held to, in {'float64' if is_float64 else 'eager mode'}")
        shape = (plan.batch, plan.longest, -1)
        if is_at_hand(job):
            if is_float64:
                eager, exact = (a.reshape(shape) for a in expected(job.module, job.precision, job.feeds)[job.output])
                return cls(eager, exact, True)
            from attnforge.runtime.backends.eager import run, torch_dtype

            logits = run(job.torch_module(), job.feeds, torch_dtype(job.precision))[job.output]
            eager = logits.double().numpy().reshape(shape)
            return cls(eager, eager, False)
        if PLAIN not in manifest.files:
            raise UsageError(f"{manifest.name} keeps no exported graph to hold logits to; pass its module (module=…)")
        plain = beside(load_graph(plan.bundle, PLAIN), load_graph(plan.bundle, CANONICAL))
        eager = as_it_is(plain)(job.feeds)[job.output].astype(np.float64).reshape(shape)
        exact = in_float64(plain)(job.feeds)[job.output].reshape(shape) if is_float64 else eager
        return cls(eager, exact, is_float64)

    def why_wrong(self, entry: Entry[Stepper], got: Array, tokens: slice, where: str) -> str | None:
        """Why logits miss the budget, or None; the error that is closest to it is kept in the entry."""
        case = Case(name=where, sizes={}, kind="normal", seed=TRUTH_SEED)
        precision = budget_precision(entry.job.bundle.manifest, entry.name)
        comparison = judge(case, "logits", got, self.eager[:, tokens], self.exact[:, tokens], precision)
        entry.keep(comparison.error, comparison.budget)
        return None if comparison.passed else f"{where}: {comparison.reason}"


def is_at_hand(job: DecodingJob) -> bool:
    """Whether the module that was deployed is given, or may be made again."""
    source = job.bundle.manifest.source
    if job.given is not None:
        return True
    own = source.kind == "registered" and source.weights is None
    return own or (job.trust_source and source.kind != "module")


# --- the race ---------------------------------------------------------------------------------------------------------


def _entries(plan: Plan, job: DecodingJob, skipped: dict[str, str]) -> Iterator[Entry[Stepper]]:
    """The contenders; reasons of backends that cannot run go to `skipped`.

    Raises:
        UnavailableError: a backend that was asked for by name cannot run steps here.
    """

    def refused(name: str) -> str | None:
        return None if name in STEPPING else f"{name} runs no steps"

    for name, reason in backends_of(plan.experiment, plan.bundle, STEPPING, refused):
        if reason is None:
            yield Entry(job, name, name, True, f"the bundle on {name}", partial(Ours, name, job))
        else:
            skipped[name] = reason
    for name in plan.experiment.against:
        peer = DECODING_PEERS[name]
        yield Entry(job, name, name, False, peer.what, partial(peer.open, job), peer.stays)


@dataclass
class Steps(Workload[Stepper]):
    """Steps of one token behind a context, and the copy that is their limit.

    Attributes:
        truth: of all logits.
        ids: of the longest run, `(batch, tokens)`.
        before: tokens that contenders have been brought to, 0 for none.
        context: tokens before the timed steps.
        copy: takes turns with the contenders; None where no limit is measured.
    """

    truth: Truth
    ids: Array
    before: int
    context: int
    copy: Copy | None

    def why_wrong(self, entry: Entry[Stepper]) -> str | None:
        """Bring a contender to the context, and judge the logits there and of some steps behind it."""
        stepper, at, where = entry.opened, self.context, f"at {self.context:,} tokens"
        stepper.rewind() if self.before else stepper.reset()
        logits = stepper.extend(self.ids[:, self.before : at])
        if (reason := self.truth.why_wrong(entry, logits[:, None], slice(at - 1, at), where)) is not None:
            return reason
        stepper.mark()
        steps = [stepper.extend(self.ids[:, i : i + 1]) for i in range(at, at + CHECKED)]
        return self.truth.why_wrong(entry, np.stack(steps, axis=1), slice(at, at + CHECKED), f"steps {where}")

    def time(self, entries: Mapping[str, Entry[Stepper]], rounds: int, seconds: float, seed: int) -> Times:
        """Milliseconds of every step of a turn but the first, of all contenders and of :data:`COPY`."""
        tokens = [np.ascontiguousarray(self.ids[:, i : i + 1]) for i in range(self.context, self.context + STEPS + 1)]

        def turn(stepper: Stepper) -> list[float]:
            stepper.rewind()
            return [1e3 * seconds_of(partial(stepper.extend, token)) for token in tokens][1:]

        turns: dict[str, Callable[[], list[float]]] = {key: partial(turn, e.opened) for key, e in entries.items()}
        if self.copy is not None:
            turns[COPY] = self.copy.turn()
        return in_turns(turns, rounds, fewest=rounds, seed=seed)


@dataclass
class Prompt(Workload[Stepper]):
    """A prompt into an empty cache.

    Attributes:
        truth: of all logits.
        ids: of the prompt, `(batch, tokens)`.
    """

    truth: Truth
    ids: Array

    def why_wrong(self, entry: Entry[Stepper]) -> str | None:
        """Judge the logits of the prompt's last token."""
        entry.opened.reset()
        logits, count = entry.opened.extend(self.ids), self.ids.shape[1]
        return self.truth.why_wrong(entry, logits[:, None], slice(count - 1, count), f"prompt of {count:,} tokens")

    def time(self, entries: Mapping[str, Entry[Stepper]], rounds: int, seconds: float, seed: int) -> Times:
        """Milliseconds until the logits are there, once a turn."""

        def turn(stepper: Stepper) -> list[float]:
            stepper.reset()
            return [1e3 * seconds_of(partial(stepper.extend, self.ids))]

        turns = {key: partial(turn, entry.opened) for key, entry in entries.items()}
        return in_turns(turns, rounds, fewest=rounds, seed=seed)


def _growth(plan: Plan, ids: Array, entry: Entry[Stepper]) -> float | None:
    """By how many bytes the process grows with every step behind the shortest context, in the caches that the race
    left; None where the system does not tell."""
    plan.experiment.progress(f"measure the memory of steps of {entry.name}")
    context, stepper = plan.contexts[0], entry.opened
    count = min(GROWN, plan.decoding.places - context - STEPS, plan.longest - context)
    stepper.reset()
    stepper.extend(ids[:, :context])
    for i in range(STEPS):
        stepper.extend(ids[:, i : i + 1])
    before = resident()
    for i in range(count):
        stepper.extend(ids[:, i : i + 1])
    after = resident()
    return None if before is None or after is None else (after - before) / count


# --- limits and results -----------------------------------------------------------------------------------------------


def _one_token(plan: Plan) -> dict[str, int]:
    """Sizes of a step: one token of every sample."""
    tokens = plan.bundle.manifest.graph_inputs[0]
    sizes = zip(tokens.dims[:2], (plan.batch, 1), strict=True)
    return {dim.symbol: size // dim.factor for dim, size in sizes if isinstance(dim, DimSpec)}


@dataclass(frozen=True)
class Copy:
    """As many bytes as a step reads, moved by a copy: half of them read, half written.

    Attributes:
        weights: bytes of weights that a step reads.
        cache: bytes of filled cache.
    """

    weights: int
    cache: int

    def turn(self) -> Callable[[], list[float]]:
        """What gives the milliseconds of every copy of a turn but the first, in memory of its own."""
        memory = torch.ones(2, (self.weights + self.cache) // 8 + 1)
        source, target = memory[:, : (self.weights + self.cache) // (2 * memory.itemsize)]
        return lambda: [1e3 * seconds_of(partial(target.copy_, source)) for _ in range(STEPS + 1)][1:]


def _copies(plan: Plan) -> dict[int, Copy]:
    """The bytes that a step reads at least, by context."""
    weights = work_of(load_graph(plan.bundle, CANONICAL), _one_token(plan)).weights
    copies = {}
    for context in plan.contexts:
        cache = 0
        for site in plan.decoding.caches:
            seen = min(context, site.window or context)
            for spec in (site.key, site.value):
                heads, _, size = (dim for dim in spec.dims[1:] if isinstance(dim, int))
                cache += plan.batch * heads * seen * size * np.dtype(spec.dtype).itemsize
        copies[context] = Copy(weights, cache)
    return copies


def _contender(
    entry: Entry[Stepper], raced: Raced[Stepper], results: DecodingResults, growth: float | None
) -> DecodingContender:
    times = [of_workload[entry.key] for of_workload in raced.times]
    steps = []
    for context, rounds in zip(results.contexts, times, strict=False):
        latency, limit = latency_of(rounds, raced.openings), results.limits.get(context)
        share = None if limit is None else ratio_of(limit.latency.rounds, rounds, raced.openings)
        rate = per_second(latency.median, results.batch)
        steps.append(StepTime(context=context, latency=latency, per_second=rate, share=share))
    firsts = [
        FirstToken(prompt=prompt, latency=latency_of(rounds, raced.openings))
        for prompt, rounds in zip(results.prompts, times[len(steps) :], strict=True)
    ]
    if entry.stays and len(raced.openings) > 1:
        entry.notes.append("it was opened once, for it takes long: its interval does not tell how openings differ")
    return DecodingContender(
        name=entry.name, ours=entry.ours, what=entry.what, error=entry.error, budget=entry.budget, steps=steps,
        first_tokens=firsts, growth=growth, notes=entry.notes,
    )  # fmt: skip


def _compare(results: DecodingResults, openings: Sequence[int]) -> None:
    """Compare every contender with the bundle's own best."""
    if (best := results.best) is None:
        return
    for contender in results.contenders:
        for step, own in zip(contender.steps, best.steps, strict=True):
            step.ratio = ratio_of(step.latency.rounds, own.latency.rounds, openings)
        for first, own_first in zip(contender.first_tokens, best.first_tokens, strict=True):
            first.ratio = ratio_of(first.latency.rounds, own_first.latency.rounds, openings)
