"""Decoding, measured: time to first token, milliseconds a token and memory a step, of a bundle with a cache and of its
peers.

Contenders are opened several times in a run and take turns in an order drawn anew each round, as in
:mod:`attnforge.bench.run`. In each opening, at each context, the logits of every contender are held to the parity
budget before it is timed. A turn goes back to the context, takes a step that is not timed, and then some that are.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
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
from attnforge.bench.experiment import Progress
from attnforge.bench.interval import latency_of, ratio_of
from attnforge.bench.limits.work import work_of
from attnforge.bench.results import Interval
from attnforge.bench.run import environment, load_now
from attnforge.bundle import CANONICAL, PLAIN, Bundle, Case, Decoding, DimSpec, Trusted, open_bundle
from attnforge.errors import UnavailableError, UnknownNameError, UsageError, first_line
from attnforge.export.graphs.execute import as_it_is, in_float64
from attnforge.export.graphs.saving import beside, load_graph
from attnforge.export.sources.named import check_trusted
from attnforge.machine import processors
from attnforge.memory import resident
from attnforge.runtime.backends.registry import BACKENDS, why_not_unasked, why_unavailable
from attnforge.runtime.backends.whole_sequences import STEPPING
from attnforge.runtime.decoding.decoder import Step
from attnforge.runtime.options import check_threads
from attnforge.runtime.parity.budget import budget_precision, judge
from attnforge.runtime.turns import in_turns, seconds_of

ROUNDS, OPENINGS = 20, 3

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
        contexts: tokens before timed steps, ascending.
        prompts: tokens of the prompts whose time to first token is measured, ascending.
    """

    bundle: Bundle
    decoding: Decoding
    contexts: Sequence[int]
    prompts: Sequence[int]
    batch: int
    rounds: int
    openings: int
    threads: int
    progress: Progress

    @property
    def shares(self) -> list[int]:
        """How many rounds each opening has."""
        openings = min(self.openings, self.rounds)
        return [self.rounds // openings + (i < self.rounds % openings) for i in range(openings)]

    @property
    def longest(self) -> int:
        """Tokens of the longest run."""
        return max(self.contexts[-1] + STEPS + 1, self.prompts[-1])


@dataclass
class Entry:
    """A contender.

    Attributes:
        opener: makes what decodes.
        stays: whether it stays open throughout.
        steps, first_tokens: milliseconds of every round, by context and by prompt.
        growth: bytes a step.
    """

    name: str
    ours: bool
    what: str
    opener: Callable[[DecodingJob, ExitStack], Stepper]
    stays: bool
    error: float = 0.0
    budget: float = 0.0
    steps: dict[int, list[list[float]]] = field(default_factory=dict)
    first_tokens: dict[int, list[list[float]]] = field(default_factory=dict)
    growth: float | None = None
    notes: list[str] = field(default_factory=list)
    stepper: Stepper | None = None
    stack: ExitStack | None = None

    @property
    def open_stepper(self) -> Stepper:
        assert self.stepper is not None
        return self.stepper

    def open(self, job: DecodingJob, stack: ExitStack) -> None:
        """Open it anew, until `stack` closes; the last opening is closed once this one is there, as in a :mod:`race
        <attnforge.bench.race>`."""
        own, last = stack.enter_context(ExitStack()), self.stack
        try:
            self.stepper = self.opener(job, own)
        finally:
            if last is not None:
                last.close()
        self.stack = own


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
    command: str = "benchmark_decoding(…)",
    progress: Progress = lambda stage: None,
) -> DecodingResults:
    """Measure how a bundle with a cache decodes, and peers where asked, side by side.

    Args:
        bundle: its folder; deployed with `cache_tokens`.
        backends: by default every one that runs steps here.
        against: names of peers (:data:`DECODING_PEERS`), or `all`.
        contexts: tokens before the timed steps; by default those of 128, 512 and 1,024 that the caches have places for.
        prompts: tokens of the prompts whose time to first token is measured; by default 16, 128 and 512, likewise.
        batch: samples that are decoded at once.
        rounds: how often every contender has a turn at each context and prompt.
        openings: how often every contender is opened anew; by default 3, in a quick run 1.
        threads: of every contender; by default one a processor.
        module: the module that was deployed, where the bundle does not say how to make it again. It is also what the
            logits are held to; without one, the exported graph that the bundle keeps is.
        quick: steps alone, of one opening: no first tokens, memory or limits.
        trust_source: as of :func:`attnforge.benchmark`.
        trusted: files of public keys, one of which must have signed the bundle.
        command: recorded as the one that measures the results again.
        progress: called with the name of each stage as it starts.

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
    peers = expanded(against, lambda: DECODING_PEERS)
    for kind, names, known in (("backend", backends or (), BACKENDS), ("peer", peers, tuple(DECODING_PEERS))):
        if unknown := [name for name in names if name not in known]:
            raise UnknownNameError(kind, unknown[0], known)
    openings = (1 if quick else OPENINGS) if openings is None else openings
    for count, what in ((rounds, "rounds"), (openings, "openings")):
        if count < 1:
            raise UsageError(f"{count} {what} were asked for; give 1 or more")
    check_threads(threads)
    most = Step.of(manifest).most_samples
    if not 1 <= batch <= most:
        raise UsageError(f"{batch} samples were asked for; the bundle takes 1 to {most}")
    in_torch = any(DECODING_PEERS[name].in_torch for name in peers)
    if module is None and in_torch and manifest.source.kind not in ("module", "onnx"):
        check_trusted(manifest.source, trust_source)
    places = manifest.decoding.places
    plan = Plan(
        opened,
        manifest.decoding,
        _fitting("contexts", contexts, CONTEXTS, places - STEPS - 1, places),
        _fitting("prompts", prompts, PROMPTS, places, places),
        batch,
        rounds,
        openings,
        threads or processors(),
        progress,
    )
    return _measured(plan, backends, peers, module, quick, trust_source, command)


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


def _measured(
    plan: Plan,
    backends: Sequence[str] | None,
    peers: Sequence[str],
    module: Any,
    quick: bool,
    trust_source: bool,
    command: str,
) -> DecodingResults:
    start, manifest = time.perf_counter(), plan.bundle.manifest
    surroundings = environment(plan.threads)
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        with_threads(plan.threads, stack)
        job = _job(plan, folder, module, trust_source)
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
            prompts=[] if quick else list(plan.prompts),
            rounds=plan.rounds,
            openings=min(plan.openings, plan.rounds),
            held_to="float64" if truth.is_float64 else "eager",
        )
        entries, copies = _entries(plan, backends, peers, results.skipped), {} if quick else _copies(plan)
        for i, share in enumerate(plan.shares):
            _raced(plan, job, truth, entries, copies, results, stack, share, i)
        if not quick:
            _measure_growth(plan, job, entries)
    results.limits = {context: copy.limit(plan.shares) for context, copy in copies.items()}
    results.contenders = [_contender(plan, entry, results) for entry in entries.values()]
    _compare(plan, results)
    results.environment.load_after = load_now()
    results.seconds = round(time.perf_counter() - start, 1)
    return results


def _job(plan: Plan, folder: Path, module: Any, trust_source: bool) -> DecodingJob:
    spec, vocabulary = plan.bundle.manifest.graph_inputs[0], plan.decoding.vocabulary
    if vocabulary is None or len(spec.dims) != 2:
        raise UsageError(f"{spec.name} is {spec.text()}, and no ids of a table; --decode draws ids, so it takes those")
    ids = np.random.default_rng(TRUTH_SEED).integers(0, vocabulary, (plan.batch, plan.longest), dtype=spec.dtype)
    return DecodingJob(plan.bundle, {spec.name: ids}, plan.threads, folder, module, trust_source)


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
        plan.progress(f"compute what logits are held to, in {'float64' if is_float64 else 'eager mode'}")
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

    def check(self, entry: Entry, bundle: Bundle, got: Array, tokens: slice, where: str) -> None:
        """Hold logits to the budget, and keep the error that is closest to it in the entry.

        Raises:
            WrongLogits: they miss it.
        """
        case = Case(name=where, sizes={}, kind="normal", seed=TRUTH_SEED)
        precision = budget_precision(bundle.manifest, entry.name)
        comparison = judge(case, "logits", got, self.eager[:, tokens], self.exact[:, tokens], precision)
        if comparison.error * entry.budget >= entry.error * comparison.budget:
            entry.error, entry.budget = comparison.error, comparison.budget
        if not comparison.passed:
            raise WrongLogits(f"{where}: {comparison.reason}")


class WrongLogits(Exception):
    """A contender's logits miss the parity budget."""


def is_at_hand(job: DecodingJob) -> bool:
    """Whether the module that was deployed is given, or may be made again."""
    source = job.bundle.manifest.source
    if job.given is not None:
        return True
    own = source.kind == "registered" and source.weights is None
    return own or (job.trust_source and source.kind != "module")


# --- the race ---------------------------------------------------------------------------------------------------------


def _entries(
    plan: Plan, backends: Sequence[str] | None, peers: Sequence[str], skipped: dict[str, str]
) -> dict[str, Entry]:
    """The contenders by name; reasons of backends that cannot run go to `skipped`.

    Raises:
        UnavailableError: a backend that was asked for by name cannot run steps here.
    """
    entries = {}
    for name in backends or STEPPING:
        reason = f"{name} runs no steps" if name not in STEPPING else None
        reason = reason or (why_not_unasked if backends is None else why_unavailable)(plan.bundle, name)
        if reason is None:
            entries[name] = Entry(name, True, f"the bundle on {name}", partial(Ours, name), False)
        elif backends is not None:
            raise UnavailableError(f"{name}: {reason}")
        else:
            skipped[name] = reason
    for name in peers:
        peer = DECODING_PEERS[name]
        entries[name] = Entry(name, False, peer.what, peer.open, peer.stays)
    return entries


def _raced(
    plan: Plan,
    job: DecodingJob,
    truth: Truth,
    entries: dict[str, Entry],
    copies: Mapping[int, Copy],
    results: DecodingResults,
    stack: ExitStack,
    rounds: int,
    opening: int,
) -> None:
    """Open all contenders anew, hold them to the budget at every context, and time them in turns.

    Args:
        entries: by name; those that cannot run or are wrong leave, with their reasons in `results`.
        copies: by context, which take turns with them.
        rounds: of this opening.
        opening: its number, from 0, which seeds the orders.
    """
    ids = job.feeds[plan.decoding.tokens]
    which = f", opening {opening + 1} of {len(plan.shares)}" if len(plan.shares) > 1 else ""

    def each(what: str, act: Callable[[Entry], None]) -> None:
        for entry in random.Random(opening).sample(list(entries.values()), len(entries)):
            plan.progress(f"{what} {entry.name}{which}")
            reasons = results.skipped
            try:
                act(entry)
                continue
            except WrongLogits as wrong:
                reason, reasons = str(wrong), results.wrong
            except Exception as error:  # a peer that cannot run the model is a result, no failure of the benchmark
                reason = first_line(error)
                if entry.ours:
                    reasons = results.wrong
            reasons[entry.name] = reason + (" (before, it was right)" if entry.steps else "")
            if entry.stack is not None:
                entry.stack.close()
            del entries[entry.name]

    def open_(entry: Entry) -> None:
        if not entry.stays or entry.stack is None:
            entry.open(job, stack)
        entry.open_stepper.reset()

    each("open", open_)
    before = 0
    for context in plan.contexts:
        each(f"check at {context:,} tokens", partial(_to_context, plan, truth, ids, before, context))
        plan.progress(f"time steps at {context:,} tokens{which}")
        following = ids[:, context : context + STEPS + 1]
        turns = {name: partial(_steps, entry.open_stepper, following) for name, entry in entries.items()}
        taken = in_turns(turns | _copied(copies, context), rounds, fewest=rounds, seed=opening)
        for name, times in taken.items():
            kept = copies[context].rounds if name == COPY else entries[name].steps.setdefault(context, [])
            kept.extend(times)
        for entry in entries.values():
            entry.open_stepper.rewind()
        before = context
    for prompt in results.prompts:
        each(f"check the prompt of {prompt:,} tokens on", partial(_check_prompt, plan, truth, ids, prompt))
        plan.progress(f"time prompts of {prompt:,} tokens{which}")
        prompts = {name: partial(_first_token, entry.open_stepper, ids[:, :prompt]) for name, entry in entries.items()}
        for name, times in in_turns(prompts, rounds, fewest=rounds, seed=opening).items():
            entries[name].first_tokens.setdefault(prompt, []).extend(times)


def _to_context(plan: Plan, truth: Truth, ids: Array, before: int, context: int, entry: Entry) -> None:
    """Bring a contender to a context, and hold the logits there and of some steps behind it to the budget."""
    stepper, where = entry.open_stepper, f"at {context:,} tokens"
    logits = stepper.extend(ids[:, before:context])
    truth.check(entry, plan.bundle, logits[:, None], slice(context - 1, context), where)
    stepper.mark()
    steps = [stepper.extend(ids[:, i : i + 1]) for i in range(context, context + CHECKED)]
    checked = slice(context, context + CHECKED)
    truth.check(entry, plan.bundle, np.stack(steps, axis=1), checked, f"steps {where}")


def _check_prompt(plan: Plan, truth: Truth, ids: Array, prompt: int, entry: Entry) -> None:
    entry.open_stepper.reset()
    logits = entry.open_stepper.extend(ids[:, :prompt])
    truth.check(entry, plan.bundle, logits[:, None], slice(prompt - 1, prompt), f"prompt of {prompt:,} tokens")


def _steps(stepper: Stepper, tokens: Array) -> list[float]:
    """Milliseconds of every step but the first."""
    stepper.rewind()
    columns = [np.ascontiguousarray(tokens[:, i : i + 1]) for i in range(tokens.shape[1])]
    return [1e3 * seconds_of(partial(stepper.extend, column)) for column in columns][1:]


def _first_token(stepper: Stepper, prompt: Array) -> list[float]:
    stepper.reset()
    return [1e3 * seconds_of(partial(stepper.extend, prompt))]


def _measure_growth(plan: Plan, job: DecodingJob, entries: Mapping[str, Entry]) -> None:
    """Measure by how much the process grows with every step behind the shortest context, one contender after another,
    each in the caches that the race left."""
    context = plan.contexts[0]
    count = min(GROWN, plan.decoding.places - context - STEPS, plan.longest - context)
    ids = job.feeds[plan.decoding.tokens]
    for entry in entries.values():
        plan.progress(f"measure the memory of steps of {entry.name}")
        stepper = entry.open_stepper
        stepper.reset()
        stepper.extend(ids[:, :context])
        for i in range(STEPS):
            stepper.extend(ids[:, i : i + 1])
        if (before := resident()) is None:
            return
        for i in range(count):
            stepper.extend(ids[:, i : i + 1])
        after = resident()
        entry.growth = None if after is None else (after - before) / count


# --- limits and results -----------------------------------------------------------------------------------------------


def _one_token(plan: Plan) -> dict[str, int]:
    """Sizes of a step: one token of every sample."""
    tokens = plan.bundle.manifest.graph_inputs[0]
    sizes = zip(tokens.dims[:2], (plan.batch, 1), strict=True)
    return {dim.symbol: size // dim.factor for dim, size in sizes if isinstance(dim, DimSpec)}


@dataclass
class Copy:
    """As many bytes as a step reads, moved by a copy: half of them read, half written.

    Attributes:
        weights: bytes of weights that a step reads.
        cache: bytes of filled cache.
        rounds: milliseconds of every round.
    """

    weights: int
    cache: int
    rounds: list[list[float]] = field(default_factory=list)

    def turn(self, memory: torch.Tensor) -> list[float]:
        """Milliseconds of every copy but the first.

        Args:
            memory: `(2, numbers)`, float32, from the first half of which is copied to the second.
        """
        source, target = memory[:, : (self.weights + self.cache) // (2 * memory.itemsize)]
        return [1e3 * seconds_of(partial(target.copy_, source)) for _ in range(STEPS + 1)][1:]

    def limit(self, openings: Sequence[int]) -> StepLimit:
        return StepLimit(weights=self.weights, cache=self.cache, latency=latency_of(self.rounds, openings))


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


def _copied(copies: Mapping[int, Copy], context: int) -> dict[str, Callable[[], list[float]]]:
    """The turn of the copy, in memory of its own while it takes turns; none where no limit is measured."""
    if context not in copies:
        return {}
    copy = copies[context]
    return {COPY: partial(copy.turn, torch.ones(2, (copy.weights + copy.cache) // 8 + 1))}


def _contender(plan: Plan, entry: Entry, results: DecodingResults) -> DecodingContender:
    openings = plan.shares
    steps = []
    for context, rounds in entry.steps.items():
        latency, limit = latency_of(rounds, openings), results.limits.get(context)
        median, tokens = latency.median, 1e3 * plan.batch
        rate = Interval(value=tokens / median.value, low=tokens / median.high, high=tokens / median.low)
        share = None if limit is None else ratio_of(limit.latency.rounds, rounds, openings)
        steps.append(StepTime(context=context, latency=latency, per_second=rate, share=share))
    firsts = [
        FirstToken(prompt=prompt, latency=latency_of(rounds, openings)) for prompt, rounds in entry.first_tokens.items()
    ]
    if entry.stays and len(openings) > 1:
        entry.notes.append("it was opened once, for it takes long: its interval does not tell how openings differ")
    return DecodingContender(
        name=entry.name, ours=entry.ours, what=entry.what, error=entry.error, budget=entry.budget, steps=steps,
        first_tokens=firsts, growth=entry.growth, notes=entry.notes,
    )  # fmt: skip


def _compare(plan: Plan, results: DecodingResults) -> None:
    """Compare every contender with the bundle's own best."""
    best, openings = results.best, plan.shares
    if best is None:
        return
    for contender in results.contenders:
        for step, own in zip(contender.steps, best.steps, strict=True):
            step.ratio = ratio_of(step.latency.rounds, own.latency.rounds, openings)
        for first, own_first in zip(contender.first_tokens, best.first_tokens, strict=True):
            first.ratio = ratio_of(first.latency.rounds, own_first.latency.rounds, openings)
