"""Decoding benchmark: time to first token, milliseconds per token and memory per step, of a bundle with a cache and of
its peers.

Contenders are loaded several times in a run and take turns in a new random order each round (:mod:`.race`). In each
load, at each context, the logits of every contender are checked against the parity budget before it is timed. A turn
rewinds to the context, takes an untimed step, and then the timed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from attnforge.arrays import Array
from attnforge.atomic import temporary_folder
from attnforge.bench.contenders.decoding.registry import DECODING_PEERS
from attnforge.bench.contenders.decoding.stepper import Stepper, ours
from attnforge.bench.contenders.peers import PeerJob, expected, why_no_module, with_threads
from attnforge.bench.experiment import Experiment, new_run, source_text
from attnforge.bench.interval import per_second, ratio_of
from attnforge.bench.limits.work import work_of
from attnforge.bench.race import Entry, Times, Workload, entries_of, run_race
from attnforge.bench.results import DecodingContender, DecodingResults, FirstToken, StepLimit, StepTime
from attnforge.bundle import CANONICAL, PLAIN, Case, DimSpec
from attnforge.errors import UsageError
from attnforge.export.graphs.execute import as_it_is, in_float64
from attnforge.export.graphs.saving import load_graph, with_weights_of
from attnforge.export.sources.named import check_trusted
from attnforge.memory import resident
from attnforge.runtime.backends.eager import run, torch_dtype
from attnforge.runtime.backends.registry import BACKENDS, ON_GPU, STEPPING
from attnforge.runtime.parity.budget import budget_precision, judge
from attnforge.runtime.race import in_turns, seconds_of

CONTEXTS = (128, 512, 1024)
"""Tokens before the timed steps; those that do not fit in the caches are left out."""

PROMPTS = (16, 128, 512)

STEPS = 8
"""Timed steps of a turn. One untimed step comes first: the rewind and other contenders leave processor caches cold."""

CHECKED = 4
"""Steps whose logits are checked against the budget, at every context and in every load."""

GROWN = 64
"""Steps over which the growth of memory is measured, if the caches have that much capacity left."""

COPY = "a copy of the bytes of a step"
"""Key of the limit's copy, which takes turns with the contenders."""

MOST_OPERATIONS = 4e12
"""Operations (weights times tokens times two) from which no float64 reference is computed: it would take minutes."""

TRUTH_SEED = 0


def measure_decoding(
    experiment: Experiment, contexts: Sequence[int] | None, prompts: Sequence[int] | None, batch: int, command: str
) -> DecodingResults:
    """Measure how a bundle with a cache decodes, and its peers.

    Args:
        experiment: an experiment with one bundle. Without `memory` only steps are measured.
        contexts: tokens before the timed steps; by default those of :data:`CONTEXTS` that fit in the caches.
        prompts: tokens of the prompts whose time to first token is measured; by default those of :data:`PROMPTS` that
            fit in the caches.
        batch: number of samples decoded at once.
        command: recorded as the command that reproduces the results.

    Raises:
        UsageError: the bundle has no cache, or a context, a prompt or the samples do not fit in it.
        UntrustedError: a peer needs the source that the manifest names, which is not trusted.
        UnavailableError: a backend that was requested by name cannot run steps here.
    """
    (bundle,) = experiment.bundles
    manifest, decoding = bundle.manifest, bundle.manifest.decoding
    if decoding is None:
        raise UsageError(
            f"{manifest.name} has no cache, so there is no step to time; deploy it with cache_tokens=… (--cache-tokens)"
        )
    _, most = manifest.inputs[0].range_of(0)
    if not 1 <= batch <= most:
        raise UsageError(f"{batch} samples were asked for; the bundle takes 1 to {most}")
    in_torch = any(DECODING_PEERS[name].engine == "torch" for name in experiment.against)
    if experiment.module is None and in_torch and manifest.source.kind not in ("module", "onnx"):
        check_trusted(manifest.source, experiment.trust_source)
    contexts = _fitting("contexts", contexts, CONTEXTS, decoding.places - STEPS - 1, decoding.places)
    prompts = _fitting("prompts", prompts, PROMPTS, decoding.places, decoding.places)
    spec = manifest.graph_inputs[0]
    if decoding.vocabulary is None or len(spec.dims) != 2:
        raise UsageError(f"{spec.name} is {spec.text()}, not token ids; --decode measures models of token ids only")
    run_of = new_run(command, experiment.threads)
    shape = batch, max(contexts[-1] + STEPS + 1, prompts[-1])
    ids = np.random.default_rng(TRUTH_SEED).integers(0, decoding.vocabulary, shape, dtype=spec.dtype)
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        with_threads(experiment.threads, stack)
        job = PeerJob(bundle, {spec.name: ids}, experiment.threads, folder, experiment.module, experiment.trust_source)
        weights, cached = _weights(job), {context: _cached(job, context) for context in contexts}
        truth = ReferenceLogits.of(experiment, job, weights)
        results = DecodingResults(
            **run_of, model=manifest.name, precision=manifest.precision, source=source_text(manifest.source),
            batch=batch, places=decoding.places, steps=STEPS, contexts=contexts,
            prompts=prompts if experiment.memory else [], rounds=experiment.rounds, openings=len(experiment.shares),
            held_to="float64" if truth.is_float64 else "eager",
        )  # fmt: skip
        steps, firsts = list[Steps](), list[Prompt]()
        for before, context in zip([0, *contexts], contexts, strict=False):
            at = f"at {context:,} tokens"
            copied = weights + cached[context] if experiment.memory else None
            steps.append(Steps(f"check {at}", f"steps {at}", truth, ids, context, at, before, copied))
        for count in results.prompts:
            of = f"of {count:,} tokens"
            firsts.append(Prompt(f"check the prompt {of} on", f"prompts {of}", truth, ids, count, f"prompt {of}"))
        others = {name: f"{name} cannot run steps" for name in BACKENDS if name not in STEPPING}
        contenders = entries_of(experiment, job, STEPPING, ours, DECODING_PEERS, others, results.skipped)
        entries, results.wrong = run_race(experiment, contenders, [*steps, *firsts], results.skipped, stack)
        for step in steps if experiment.memory else ():
            limit = StepLimit(weights=weights, cache=cached[step.count], latency=step.latency(COPY))
            results.limits[step.count] = limit
        results.contenders = [_contender(entry, steps, firsts, results) for entry in entries]
        for entry, contender in zip(entries, results.contenders, strict=True):
            if experiment.memory:
                experiment.progress(f"measure the memory of steps of {entry.name}")
                contender.growth = _growth(entry, ids, contexts[0])
    if (best := results.best) is not None:
        for contender in results.contenders:
            of_best = [*best.steps, *best.first_tokens]
            for timed, fastest in zip([*contender.steps, *contender.first_tokens], of_best, strict=True):
                timed.ratio = ratio_of(timed.latency.rounds, fastest.latency.rounds, timed.latency.openings)
    return results


def _fitting(what: str, asked: Sequence[int] | None, usual: Sequence[int], most: int, capacity: int) -> list[int]:
    """Return the numbers of tokens that fit in the caches, ascending.

    Raises:
        UsageError: a requested number does not fit, or none does.
    """
    if most < 1:
        raise UsageError(f"the caches hold {capacity} tokens, too few to time {STEPS + 1} steps after a context")
    if asked is None:
        return [tokens for tokens in usual if tokens <= most] or [most]
    if not asked or min(asked) < 1 or max(asked) > most:
        wrong = next((tokens for tokens in asked if not 1 <= tokens <= most), "none")
        raise UsageError(f"{what}: {wrong} given; the caches hold {capacity} tokens, so give 1 to {most}")
    return sorted(set(asked))


# --- reference logits -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReferenceLogits:
    """The logits of every token of the longest run, by a model without a cache.

    Attributes:
        eager: at the bundle's precision, `(batch, tokens, vocabulary)`, as float64.
        exact: in float64; eager's where that would take too long.
        is_float64: whether `exact` was computed in float64.
    """

    eager: Array
    exact: Array
    is_float64: bool

    @classmethod
    def of(cls, experiment: Experiment, job: PeerJob, weights: int) -> ReferenceLogits:
        """Compute the logits with the module if it is available, otherwise with the exported graph in the bundle.

        Args:
            experiment: receives the progress.
            job: gives the token ids and the module.
            weights: bytes of weights that a step reads.

        Raises:
            UsageError: neither is available.
        """
        manifest = job.bundle.manifest
        (ids,) = job.feeds.values()
        is_float64 = 2.0 * weights / job.precision.dtype.itemsize * ids.size < MOST_OPERATIONS
        experiment.progress(f"compute reference logits, in {'float64' if is_float64 else 'eager mode'}")
        if is_at_hand(job) and is_float64:
            eager, exact = expected(job.module, job.precision, job.feeds)[job.output]
        elif is_at_hand(job):
            eager = exact = run(job.torch_module(), job.feeds, torch_dtype(job.precision))[job.output].double().numpy()
        elif PLAIN in manifest.files:
            plain = with_weights_of(load_graph(job.bundle, PLAIN), load_graph(job.bundle, CANONICAL))
            eager = as_it_is(plain)(job.feeds)[job.output].astype(np.float64)
            exact = in_float64(plain)(job.feeds)[job.output] if is_float64 else eager
        else:
            raise UsageError(
                f"{manifest.name} has no exported graph to check logits against; pass its module (module=…)"
            )
        return cls(eager.reshape(*ids.shape, -1), exact.reshape(*ids.shape, -1), is_float64)

    def why_wrong(self, entry: Entry[Stepper], got: Sequence[Array], first: int, where: str) -> str | None:
        """Return why the logits of successive tokens from the `first` on miss the budget, or None; the error closest to
        the budget is kept in the entry."""
        case, tokens = Case(name=where, sizes={}, kind="normal", seed=TRUTH_SEED), slice(first, first + len(got))
        precision = budget_precision(entry.job.bundle.manifest, entry.name)
        logits = np.stack(got, axis=1)
        comparison = judge(case, "logits", logits, self.eager[:, tokens], self.exact[:, tokens], precision)
        entry.keep(comparison.error, comparison.budget)
        return None if comparison.passed else f"{where}: {comparison.reason}"


def is_at_hand(job: PeerJob) -> bool:
    """Return whether the module that was deployed is given, or may be rebuilt."""
    return job.given is not None or why_no_module(job.bundle.manifest.source, job.trust_source) is None


# --- workloads --------------------------------------------------------------------------------------------------------


@dataclass
class Prompt(Workload[Stepper]):
    """A prompt into an empty cache.

    Attributes:
        truth: reference logits.
        ids: token ids of the longest run, `(batch, tokens)`.
        count: tokens of the prompt.
        where: name of the checked logits.
        before: tokens already in the contenders' caches when they are checked.
        copied: bytes of the copy that takes turns with the contenders; None where no limit is measured.
    """

    truth: ReferenceLogits
    ids: Array
    count: int
    where: str
    before: int = 0
    copied: int | None = None

    def why_wrong(self, entry: Entry[Stepper]) -> str | None:
        """Check the logits of the prompt's last token."""
        entry.opened.rewind() if self.before else entry.opened.reset()
        logits = entry.opened.extend(self.ids[:, self.before : self.count])
        return self.truth.why_wrong(entry, [logits], self.count - 1, self.where)

    def time(self, entries: Mapping[str, Entry[Stepper]], rounds: int, seconds: float, seed: int) -> Times:
        """Return the milliseconds of a turn's calls, of all contenders and of :data:`COPY`."""
        turns: dict[str, Callable[[], list[float]]] = {key: partial(self.turn, e.opened) for key, e in entries.items()}
        if self.copied is not None:
            turns[COPY] = _copying(self.copied)
        return in_turns(turns, rounds, fewest=rounds, seed=seed)

    def turn(self, stepper: Stepper) -> list[float]:
        """Return the milliseconds until the logits are available."""
        stepper.reset()
        return [1e3 * seconds_of(partial(stepper.extend, self.ids[:, : self.count]))]


@dataclass
class Steps(Prompt):
    """Steps of one token after a context of `count` tokens."""

    def why_wrong(self, entry: Entry[Stepper]) -> str | None:
        """Bring a contender to the context, and check the logits there and of some steps after it."""
        if (reason := super().why_wrong(entry)) is not None:
            return reason
        entry.opened.mark()
        steps = [entry.opened.extend(self.ids[:, i : i + 1]) for i in range(self.count, self.count + CHECKED)]
        return self.truth.why_wrong(entry, steps, self.count, f"steps {self.where}")

    def turn(self, stepper: Stepper) -> list[float]:
        """Return the milliseconds of every step but the first."""
        tokens = [np.ascontiguousarray(self.ids[:, i : i + 1]) for i in range(self.count, self.count + STEPS + 1)]
        stepper.rewind()
        return [1e3 * seconds_of(partial(stepper.extend, token)) for token in tokens][1:]


def _copying(size: int) -> Callable[[], list[float]]:
    """Return a function that makes copies in its own memory and returns their milliseconds, without the first. A copy
    moves `size` bytes, as many as a step reads: half of them read, half written."""
    memory = torch.ones(2, size // 8 + 1)
    source, target = memory[:, : size // (2 * memory.itemsize)]
    return lambda: [1e3 * seconds_of(partial(target.copy_, source)) for _ in range(STEPS + 1)][1:]


def _cached(job: PeerJob, context: int) -> int:
    """Return the bytes of filled cache that a step reads."""
    size = 0
    for site in job.decoding.caches:
        seen = min(context, site.window or context)
        for spec in (site.key, site.value):
            heads, _, head_dim = (dim for dim in spec.dims[1:] if isinstance(dim, int))
            size += job.batch * heads * seen * head_dim * np.dtype(spec.dtype).itemsize
    return size


def _weights(job: PeerJob) -> int:
    """Return the bytes of weights that a step of one token per sample reads."""
    dims = zip(job.bundle.manifest.graph_inputs[0].dims[:2], (job.batch, 1), strict=True)
    sizes = {dim.symbol: size // dim.factor for dim, size in dims if isinstance(dim, DimSpec)}
    return work_of(load_graph(job.bundle, CANONICAL), sizes).weights


def _growth(entry: Entry[Stepper], ids: Array, context: int) -> float | None:
    """Return by how many bytes the process grows with every step after the shortest context, in the caches left by the
    race; None where the system does not report it."""
    stepper = entry.opened
    count = min(GROWN, entry.job.decoding.places - context - STEPS, ids.shape[1] - context)
    stepper.reset()
    stepper.extend(ids[:, :context])
    for i in range(STEPS):
        stepper.extend(ids[:, i : i + 1])
    before = resident()
    for i in range(count):
        stepper.extend(ids[:, i : i + 1])
    after = resident()
    return None if before is None or after is None else (after - before) / count


def _contender(
    entry: Entry[Stepper], steps: Sequence[Steps], firsts: Sequence[Prompt], results: DecodingResults
) -> DecodingContender:
    times = []
    for step in steps:
        latency, limit = step.latency(entry.key), results.limits.get(step.count)
        is_elsewhere = entry.name in ON_GPU  # the limit is a copy in the host's memory
        share = None if limit is None or is_elsewhere else ratio_of(limit.latency.rounds, latency.rounds, step.openings)
        rate = per_second(latency.median, results.batch)
        times.append(StepTime(context=step.count, latency=latency, per_second=rate, share=share))
    return DecodingContender(
        name=entry.name, ours=entry.ours, what=entry.peer.what, error=entry.error, budget=entry.budget,
        notes=entry.notes, steps=times,
        first_tokens=[FirstToken(prompt=first.count, latency=first.latency(entry.key)) for first in firsts],
    )  # fmt: skip
