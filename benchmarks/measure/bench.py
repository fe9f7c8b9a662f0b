"""Latency, throughput, memory and starts of a bundle's backends and of its peers, side by side in one run.

Machines drift, so only ratios within a run mean anything (:mod:`attnforge.runtime.turns`). Every contender is held to
the parity budget before it is timed, on the very inputs that are timed: a wrong answer has no time. Ours, and peers
that are as fast, are then held to it in every reference case of the bundle.

One model opened twice in one process has two speeds, up to 8% apart, which it keeps for as long as it is open. So
contenders are opened several times in a run, each time for a share of the rounds.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from safetensors.numpy import load_file

from attnforge.arrays import Array, is_floating
from attnforge.benchmarks.contenders.engines import Runner, open_backend, why_no_products
from attnforge.benchmarks.contenders.peers import ON_GPU as GPU_PEERS
from attnforge.benchmarks.contenders.peers import PEERS, Job, expected, with_threads
from attnforge.benchmarks.measure import fresh
from attnforge.benchmarks.measure import results as found
from attnforge.benchmarks.measure.bursts import bursts
from attnforge.benchmarks.measure.limits import Ceilings, limit_seconds, measure_ceilings, work_of
from attnforge.benchmarks.measure.statistics import latency_of, ratio_of
from attnforge.bundle import CANONICAL, FLAVOURS, REFERENCE_EXAMPLE, REFERENCE_OUTPUTS, WEIGHTS, Bundle, Case
from attnforge.errors import BundleError, InputError, UnavailableError, UnknownNameError, UsageError
from attnforge.export.reference import kept
from attnforge.machine import processors, this_machine, tool_versions
from attnforge.precision import precision_named
from attnforge.runtime import cases as reference
from attnforge.runtime.backends.registry import BACKENDS, ON_GPU, WITHOUT_TARGET, why_unavailable
from attnforge.runtime.inputs import shapes_of
from attnforge.runtime.parity.budget import budget_precision
from attnforge.runtime.parity.verify import References, hold
from attnforge.runtime.preference import by_preference, chosen_here
from attnforge.runtime.session import RUNS_TO_WARM
from attnforge.runtime.turns import race

Progress = Callable[[str], None]

THROUGHPUT_PEERS = ("onnxruntime-plain", "eager")
"""Peers whose throughput is measured too; the others' is near to their latency's inverse."""

BATCH = "batch"
"""The symbol of the dim that counts samples."""

BATCHES, CALLERS = (1, 2, 4, 8), (1, 2, 4)

ROUNDS, OPENINGS = 20, 3

LONG_START = 0.3
"""Seconds of loading from which it is worth another process to tell how long it really takes."""


def benchmark(
    bundle: str | os.PathLike[str] | Bundle | Sequence[str | os.PathLike[str] | Bundle],
    backends: Sequence[str] | None = None,
    against: Sequence[str] = (),
    *,
    sizes: Mapping[str, int] | Sequence[Mapping[str, int]] | None = None,
    rounds: int = ROUNDS,
    openings: int | None = None,
    threads: int | None = None,
    module: Any = None,
    quick: bool = False,
    command: str = "attnforge.benchmark(…)",
    progress: Progress = lambda stage: None,
) -> found.Results:
    """Measure a bundle's backends, and peers where asked, side by side.

    Args:
        bundle: its folder; or several of one model at several precisions, which are measured in one run.
        backends: by default every deployed one that this machine can run.
        against: peers by name (:data:`attnforge.benchmarks.contenders.peers.PEERS`); those of torch need the module.
        sizes: of the dynamic dims, or several such, each measured for itself; by default the example's.
        rounds: how often every contender has a turn.
        openings: how often every contender is opened anew; the rounds are shared out among the openings, of which there
            are no more than rounds. By default 3, and where it has to be quick 1, of which no interval tells how one
            opening differs from another.
        threads: of CPU contenders; by default one a processor.
        module: the module that was deployed, where the bundle does not say how to make it again.
        quick: latency alone, of one opening: no throughput, no processes of their own for starts and memory, no limits,
            and parity on the inputs that are timed alone.
        command: that is recorded as giving the results.
        progress: called with the name of each stage as it starts.

    Raises:
        UnknownNameError: no such backend, peer or dim.
        UsageError: fewer than one round or opening, bundles of different models, or a module is needed and not at hand.
        InputError: a size outside the profile.
        UnavailableError: a backend that was asked for by name cannot run here.
        BundleError: a bundle is not whole, or was altered.
    """
    given = [bundle] if isinstance(bundle, str | os.PathLike | Bundle) else list(bundle)
    opened = [one if isinstance(one, Bundle) else Bundle(one, lazily=True) for one in given]
    for kind, names, known in (("backend", backends or (), BACKENDS), ("peer", against, tuple(PEERS))):
        if unknown := [name for name in names if name not in known]:
            raise UnknownNameError(kind, unknown[0], known)
    if rounds < 1:
        raise UsageError(f"{rounds} rounds were asked for; give 1 or more")
    if openings is None:
        openings = 1 if quick else OPENINGS
    if openings < 1:
        raise UsageError(f"{openings} openings were asked for; give 1 or more")
    start = time.perf_counter()
    plan = Plan(opened, backends, against, rounds, threads or processors(), module, progress=progress)
    plan.openings = openings
    plan.throughput = plan.starts = plan.memory = plan.cases = not quick
    plan.check()
    several = [sizes] if sizes is None or isinstance(sizes, Mapping) else list(sizes)
    for one in several:
        _case(opened[0], one or {})  # what cannot be measured is told before the others are
    surroundings = environment(plan.threads)
    if not quick:
        progress("measure the machine's limits")
    ceilings = None if quick else measure_ceilings(plan.threads)
    models = [measure(plan, one or {}, ceilings) for one in several]
    surroundings.load_after = load_now()
    return found.Results(
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - start, 1),
        environment=surroundings,
        ceilings=ceilings,
        models=models,
    )


@dataclass
class Plan:
    """What is to be measured, and how; :func:`benchmark` says what each means."""

    bundles: list[Bundle]
    backends: Sequence[str] | None
    against: Sequence[str]
    rounds: int
    threads: int
    module: Any = None
    throughput: bool = True
    starts: bool = True
    memory: bool = True
    cases: bool = True
    """Whether ours, and peers that are as fast, are held to the budget in all of a bundle's reference cases."""
    fresh_peers: Sequence[str] | None = None
    """Whose starts and memory are measured, besides ours; by default all."""
    seconds: float = float("inf")
    """After which no further round begins; shared out among the openings as the rounds are."""
    openings: int = 1
    progress: Progress = lambda stage: None

    @property
    def shares(self) -> list[int]:
        """How many rounds each opening has."""
        openings = min(self.openings, self.rounds)
        return [self.rounds // openings + (i < self.rounds % openings) for i in range(openings)]

    def check(self) -> None:
        """That the bundles are of one model, at a precision each.

        Raises:
            UsageError: they are not.
        """
        forms = [[(spec.name, spec.dims) for spec in bundle.manifest.inputs] for bundle in self.bundles]
        precisions = [bundle.manifest.precision for bundle in self.bundles]
        if not forms or any(form != forms[0] for form in forms) or len(set(precisions)) < len(precisions):
            raise UsageError(
                f"the bundles are {', '.join(map(repr, self.bundles))}; give one, or several of one model, each at "
                "another precision"
            )


@dataclass
class _Entry:
    """A contender, opened: `stack` closes it."""

    name: str
    precision: str
    ours: bool
    what: str
    run: Callable[[], dict[str, Array]]
    runner: Runner
    job: Job
    stack: ExitStack
    error: float = 0.0
    budget: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"{self.name} {self.precision}"


def measure(plan: Plan, sizes: Mapping[str, int], ceilings: Ceilings | None) -> found.Model:
    """Every contender on one model at one set of sizes."""
    manifest = plan.bundles[0].manifest
    case = _case(plan.bundles[0], sizes)  # of the others the sizes are the same
    wrong: dict[str, str] = {}
    skipped: dict[str, str] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with_threads(plan.threads, stack)  # else who is closed would take them from who stays open
        truths = [_Truth(bundle, sizes, plan, folder) for bundle in plan.bundles]
        opened: dict[str, _Entry] = {}
        rounds: dict[str, list[list[float]]] = {}
        openings: list[int] = []
        for i, share in enumerate(plan.shares):
            opened = _opened_anew(plan, truths, opened, stack, wrong, skipped, seed=i)
            which = f"opening {i + 1} of {len(plan.shares)}"
            for reasons in (wrong, skipped):
                for key in reasons.keys() & rounds.keys():
                    reasons[key] += f" (in {which}; before, it was right)"
            plan.progress(f"time {manifest.name}{_at(case)}{f', {which}' if len(plan.shares) > 1 else ''}")
            times = race({key: one.run for key, one in opened.items()}, share, plan.seconds / len(plan.shares), seed=i)
            rounds = {key: rounds.get(key, []) + one for key, one in times.items()}
            openings.append(max((len(one) for one in times.values()), default=0))
        entries = list(opened.values())
        per_second = _throughputs(plan, entries, case) if plan.throughput else {}
        contenders = [_contender(one, rounds[one.key], openings, per_second.get(one.key, [])) for one in entries]
        _compared(plan, contenders)
        for entry, contender in zip(entries, contenders, strict=True):
            contender.size_mb = _size_mb(entry)
        pairs = {entry.key: (entry, one) for entry, one in zip(entries, contenders, strict=True)}
        _measure_fresh(plan, pairs, case)
        if plan.cases:
            _held_to_all_cases(plan, truths, list(pairs.values()))
        model = found.Model(
            name=manifest.name,
            sizes=case.sizes,
            inputs={spec.name: f"{spec.dtype}{list(reference.shape_of(spec, case.sizes))}" for spec in manifest.inputs},
            rounds=max((len(one) for one in rounds.values()), default=0),
            deployed=[_deployed(bundle) for bundle in plan.bundles],
            contenders=contenders,
            wrong=wrong,
            skipped=skipped,
        )
        if ceilings is not None:
            _held_to_limits(plan.bundles, model, ceilings)
        return model


def _case(bundle: Bundle, sizes: Mapping[str, int]) -> Case:
    """A case of these sizes: one that the bundle has outputs of, where it has one.

    Raises:
        UnknownNameError: no such dim.
        InputError: a size outside the profile.
    """
    inputs, cases = bundle.manifest.inputs, bundle.manifest.cases
    at = reference.at(inputs, sizes)
    shapes_of(inputs, (), *((reference.shape_of(spec, at.sizes), np.dtype(spec.dtype)) for spec in inputs))
    for case in cases:
        if case.kind == at.kind and case.sizes == at.sizes and case.masks == at.masks:
            return case
    spreads = [case.spread for case in cases if case.is_ordinary]
    at.spread = {
        name: (max(one[name][0] for one in spreads if name in one), max(one[name][1] for one in spreads if name in one))
        for name in {name for one in spreads for name in one}
    }
    return at


class _Truth:
    """What a case's outputs have to be at one bundle's precision: kept in the bundle, else of the module."""

    def __init__(self, bundle: Bundle, sizes: Mapping[str, int], plan: Plan, folder: Path) -> None:
        manifest = bundle.manifest
        self.bundle, self.case = bundle, _case(bundle, sizes)
        case = self.case
        feeds = reference.make_inputs(case, manifest.inputs, {})
        self.job = Job(bundle, feeds, plan.threads, folder, plan.module)
        for needed in (REFERENCE_OUTPUTS, REFERENCE_EXAMPLE) if plan.cases else ():
            bundle.file(needed)  # that they are there and unaltered is known before anything is timed
        if any(case.name == one.name for one in manifest.cases):
            self._outputs: Mapping[str, Array] = load_file(bundle.file(REFERENCE_OUTPUTS))
            return
        precisions = {budget_precision(manifest, name).name for name in BACKENDS} | {manifest.precision}
        self._outputs = {}
        at_precision = {name: precision_named("fp32" if manifest.mixed is not None else name) for name in precisions}
        for name in precisions:
            for output, (eager, exact) in expected(self.job.module, at_precision[name], feeds).items():
                own = name == manifest.precision  # which of a bundle that chose its precisions stands for fp32
                self._outputs |= kept(eager, case, reference.key(case, output, "eager" if own else name))
                self._outputs |= kept(exact, case, reference.key(case, output, "float64")) if own else {}

    def judged(self, entry: _Entry) -> str | None:
        """Why a contender's answer is wrong, or None; what it errs by is kept with it. It has run before, ours as often
        as they take to prepare for sizes that come again, so that what is judged is what is timed."""
        for _ in range(RUNS_TO_WARM - 1 if entry.ours else 1):
            entry.run()
        references = References({}, self._outputs)
        found = hold(
            self.bundle, entry.name, lambda feeds: self._answer(entry, feeds), [self.case], references
        ).comparisons
        worst = max(found, key=lambda one: one.error / one.budget if one.budget else 0.0)
        if worst.error * entry.budget >= entry.error * worst.budget:  # of all openings
            entry.error, entry.budget = worst.error, worst.budget
        return next((f"{one.output}: {one.reason}" for one in found if not one.passed), None)

    def in_every_case(self, entry: _Entry) -> found.Cases:
        """How a contender does in the bundle's reference cases, at sizes that it was made for."""
        every = self.bundle.manifest.cases
        any_sizes = entry.ours or PEERS[entry.name].any_sizes
        cases = [case for case in every if any_sizes or case.sizes == self.case.sizes]
        begun: list[str] = []

        def run(feeds: dict[str, Array]) -> dict[str, Array]:
            begun.append(cases[len(begun)].name)
            return self._answer(entry, feeds)

        try:
            wrong = hold(self.bundle, entry.name, run, cases).missed if cases else None
        except BundleError:
            raise
        except Exception as error:  # what fails is a result
            wrong = f"{begun[-1] if begun else 'all'}, where it fails: {_first_line(error)}"
        return found.Cases(held=len(begun), of=len(every), wrong=wrong)

    def _answer(self, entry: _Entry, feeds: dict[str, Array]) -> dict[str, Array]:
        """The outputs, in their own dtypes: OpenVINO's answers to a 16-bit model's inputs are fp32."""
        answered = entry.runner(feeds)
        if entry.ours:
            return answered
        own = {spec.name: spec.dtype for spec in self.bundle.manifest.outputs}
        return {n: a.astype(own[n]) if a.dtype.name != own[n] and is_floating(a) else a for n, a in answered.items()}


@dataclass(frozen=True)
class _Offer:
    """A contender that may be opened; `stays` open once it is."""

    truth: _Truth
    name: str
    ours: bool
    what: str
    open: Callable[[Job, ExitStack], Runner]
    stays: bool = False

    @property
    def precision(self) -> str:
        return self.truth.bundle.manifest.precision

    @property
    def key(self) -> str:
        return f"{self.name} {self.precision}"


def _opened_anew(
    plan: Plan,
    truths: Sequence[_Truth],
    before: dict[str, _Entry],
    stack: ExitStack,
    wrong: dict[str, str],
    skipped: dict[str, str],
    seed: int,
) -> dict[str, _Entry]:
    """The contenders by key that could be opened and are right.

    They are opened in an order drawn anew, for who is opened among the first is often slower for good.

    Args:
        before: of the last opening; each is closed.
        stack: closes what is open in the end.
        wrong: with a reason for each that is, and for each of the bundles' own that can run here and fails.
        skipped: with a reason for each of the others. Whose key is in either is not opened again.
        seed: of the order.
    """
    offers = [offer for truth in truths for offer in _offers(plan, truth, wrong, skipped)]
    opened: dict[str, _Entry] = {}
    for offer in random.Random(seed).sample(offers, len(offers)):
        key = offer.key
        if offer.stays and key in before:
            entry = before.pop(key)
        else:
            plan.progress(f"open {key}")
            try:
                entry = _opened(offer, before.pop(key, None), stack)
            except BundleError:
                raise
            except Exception as error:  # what refuses the model is a result
                (wrong if offer.ours else skipped)[key] = _first_line(error)
                continue
        plan.progress(f"check {key}")
        try:
            reason = offer.truth.judged(entry)
        except Exception as error:  # a peer that cannot run this model at all is a result, no failure of ours
            (wrong if offer.ours else skipped)[key] = _first_line(error)
            continue
        if reason is None:
            opened[key] = entry
        else:
            wrong[key] = reason
    return {offer.key: opened[offer.key] for offer in offers if offer.key in opened}


def _offers(plan: Plan, truth: _Truth, wrong: dict[str, str], skipped: dict[str, str]) -> Iterator[_Offer]:
    """The contenders at a bundle's precision, but those that cannot run, whose reason is added to `skipped`."""
    bundle = truth.bundle
    precision = bundle.manifest.precision
    chosen = chosen_here(bundle) if plan.backends is None else None
    for name in plan.backends or BACKENDS:
        if f"{name} {precision}" in wrong | skipped:
            continue
        if chosen is not None and name in WITHOUT_TARGET and name in chosen.dropped:  # `auto` never loads it
            skipped[f"{name} {precision}"] = chosen.dropped[name]
        elif (reason := why_unavailable(bundle, name)) is not None:
            if plan.backends is not None:
                raise UnavailableError(f"{name}: {reason}")
            skipped[f"{name} {precision}"] = reason
        else:
            yield _Offer(truth, name, True, f"the bundle on {name}", partial(open_backend, name))
    for name in plan.against:
        peer, key = PEERS[name], f"{name} {precision}"
        if key in wrong | skipped:
            continue
        if peer.engine == "onnxruntime" and (reason := why_no_products(precision)) is not None:
            skipped[key] = reason
        else:
            yield _Offer(truth, name, False, peer.what, peer.open, peer.compiles)


def _opened(offer: _Offer, last: _Entry | None, stack: ExitStack) -> _Entry:
    """A contender, opened.

    What was open of it is closed once its successor is there: memory that was given back first would be had again, page
    for page, and with it the speed.
    """
    own, job = stack.enter_context(ExitStack()), offer.truth.job
    try:
        runner = offer.open(job, own)
    finally:
        if last is not None:
            last.stack.close()
    made = _Entry(offer.name, offer.precision, offer.ours, offer.what, partial(runner, job.feeds), runner, job, own)
    if last is not None:
        made.error, made.budget = last.error, last.budget
    return made


def _contender(
    entry: _Entry, rounds: list[list[float]], openings: list[int], per_second: list[found.Throughput]
) -> found.Contender:
    if not entry.ours and PEERS[entry.name].compiles and len(openings) > 1:
        entry.notes.append(
            "what is compiled was opened once, for it takes long: its interval does not tell how openings differ"
        )
    return found.Contender(
        name=entry.name,
        precision=entry.precision,
        ours=entry.ours,
        what=entry.what,
        error=entry.error,
        budget=entry.budget,
        latency=latency_of(rounds, openings),
        throughput=per_second,
        notes=entry.notes,
    )


def _compared(plan: Plan, contenders: Sequence[found.Contender]) -> None:
    """Mark what `auto` picks at each precision, and hold the others of that precision to it; to our fastest where it
    was not timed."""
    for bundle in plan.bundles:
        same = [one for one in contenders if one.precision == bundle.manifest.precision]
        ours = {one.name: one for one in same if one.ours}
        loaded = next((name for name in by_preference(bundle) if why_unavailable(bundle, name) is None), None)
        if loaded in ours:
            ours[loaded].picked = True
        best = ours.get(loaded or "") or min(ours.values(), key=lambda one: one.latency.median.value, default=None)
        if best is not None:
            for one in same:
                one.ratio = ratio_of(one.latency.rounds, best.latency.rounds, best.latency.openings)


def _held_to_all_cases(plan: Plan, truths: Sequence[_Truth], every: Sequence[tuple[_Entry, found.Contender]]) -> None:
    """Hold ours to all of a bundle's reference cases, then every peer that is as fast as the best of ours that is
    right, or as what is picked where that is slower: who is faster, and wrong elsewhere, is no better choice."""
    for truth in truths:
        pairs = [(entry, one) for entry, one in every if entry.job is truth.job]
        _held_in(plan, truth, [(entry, one) for entry, one in pairs if one.ours])
        right = [one for _, one in pairs if one.ours and one.wrong_in is None]
        fastest = min((one.latency.median.value for one in right), default=math.inf)
        enough = max([fastest, *(one.latency.median.value for one in right if one.picked)])
        _held_in(plan, truth, [(e, c) for e, c in pairs if not c.ours and c.latency.median.value <= enough])


def _held_in(plan: Plan, truth: _Truth, pairs: Sequence[tuple[_Entry, found.Contender]]) -> None:
    for entry, one in pairs:
        plan.progress(f"check {one.key} in every case")
        one.cases = truth.in_every_case(entry)


# --- throughput -------------------------------------------------------------------------------------------------------


def _throughputs(plan: Plan, entries: Sequence[_Entry], case: Case) -> dict[str, list[found.Throughput]]:
    """Over batches, one caller each; and over callers, at the sizes that are measured."""
    plan.progress("measure throughput")
    batches = [n for n in BATCHES if BATCH in case.sizes and _allows(plan.bundles[0], {**case.sizes, BATCH: n})]
    points = [(n, 1) for n in batches] or [(case.sizes.get(BATCH, 1), 1)]
    points += [(case.sizes.get(BATCH, 1), n) for n in CALLERS if n > 1]
    runs: dict[str, Callable[[], Any]] = {}
    places: dict[str, tuple[_Entry, int, int]] = {}
    for entry in entries:
        if not entry.ours and entry.name not in THROUGHPUT_PEERS:
            continue
        for batch, callers in points:
            if callers > 1 and not entry.ours:
                continue  # peers are opened for one caller
            sizes = {**case.sizes, BATCH: batch} if BATCH in case.sizes else case.sizes
            one = Case(name="throughput", sizes=sizes, kind="normal", seed=1)
            feeds = reference.make_inputs(one, entry.job.bundle.manifest.inputs, {})
            key = f"{entry.key}, {batch}, {callers}"
            try:
                for _ in range(RUNS_TO_WARM):
                    entry.runner(feeds)
            except Exception as error:  # the rest is measured all the same
                entry.notes.append(f"no throughput at batch {batch}: {_first_line(error)}")
                continue
            runs[key], places[key] = partial(entry.runner, feeds), (entry, batch, callers)
    rates = bursts(runs, {key: at[2] for key, at in places.items()}, {key: at[1] for key, at in places.items()})
    known: dict[str, list[found.Throughput]] = {}
    for key, (entry, batch, callers) in places.items():
        rate = latency_of([[1e3 / one] for one in rates[key]]).median  # of seconds a thousand, whose order turns round
        interval = found.Interval(value=1e3 / rate.value, low=1e3 / rate.high, high=1e3 / rate.low)
        known.setdefault(entry.key, []).append(found.Throughput(batch=batch, callers=callers, per_second=interval))
    return known


def _allows(bundle: Bundle, sizes: Mapping[str, int]) -> bool:
    with contextlib.suppress(InputError):
        _case(bundle, sizes)
        return True
    return False


# --- processes of their own -------------------------------------------------------------------------------------------


def _measure_fresh(plan: Plan, pairs: Mapping[str, tuple[_Entry, found.Contender]], case: Case) -> None:
    """Starts one after another, then memory, of which two processes at a time do not disturb each other.

    What takes long to load is loaded twice, by the process whose memory is measured or one more, and the lesser time
    taken: a virtual machine's memory is slow where it is touched for the first time, and the first process pays.
    """
    orders = {}
    for key, (entry, contender) in pairs.items():
        named = entry.ours or plan.fresh_peers is None or entry.name in plan.fresh_peers
        if named and (plan.starts or plan.memory):
            order = _order(plan, entry, case)
            if isinstance(order, str):
                contender.notes.append(order)
            else:
                orders[key] = order
    held: dict[str, fresh.Found] = {}
    for key, order in orders.items() if plan.starts else ():
        plan.progress(f"start {key} anew")
        with _noted(pairs[key][1], "start"):
            one = fresh.measured(order)
            pairs[key][1].cold = cold = found.Cold(import_s=one.import_s, load_s=one.load_s, first_s=one.first_s)
            if not (order.any_sizes and case.sizes):  # it runs at these sizes alone all the same
                held[key] = one
                if one.load_s > LONG_START:
                    with contextlib.suppress(fresh.FailedError):
                        cold.load_s = min(one.load_s, fresh.measured(order).load_s)
    if plan.memory:
        plan.progress("measure memory")
        with ThreadPoolExecutor(2) as threads:
            running = {
                key: threads.submit(fresh.measured, order.model_copy(update={"warm": True}))
                for key, order in orders.items()
                if key not in held
            }
        for key in orders:
            with _noted(pairs[key][1], "memory"):
                one = held[key] if key in held else running[key].result()
                if one.loaded_mib is not None and one.peak_mib is not None and one.extra_mib is not None:
                    memory = found.Memory(loaded_mib=one.loaded_mib, peak_mib=one.peak_mib, extra_mib=one.extra_mib)
                    pairs[key][1].memory = memory
                if (start := pairs[key][1].cold) is not None and start.load_s > LONG_START:
                    start.load_s = min(start.load_s, one.load_s)


@contextlib.contextmanager
def _noted(contender: found.Contender, what: str) -> Iterator[None]:
    try:
        yield
    except fresh.FailedError as error:
        contender.notes.append(f"its {what} is not measured: {error}")


def _order(plan: Plan, entry: _Entry, case: Case) -> fresh.Order | str:
    """What a process has to be told to run a contender, or why none can."""
    peer = PEERS.get(entry.name) if not entry.ours else None
    bundle = entry.job.bundle
    if peer is not None and peer.compiles:
        return "its start and memory are not measured: what it compiled is kept on disk, so no start of it is a first"
    if peer is not None and peer.file is None and bundle.manifest.source.kind in ("module", "onnx"):
        return "its start and memory are not measured: another process cannot make the module again"
    return fresh.Order(
        bundle=str(bundle.path),
        contender=entry.name,
        engine="backend" if peer is None else peer.engine,
        file=str(peer.file(entry.job)) if peer is not None and peer.file is not None else None,
        sizes=case.sizes,
        threads=plan.threads,
        folder=str(entry.job.folder),
        any_sizes=peer is None or peer.any_sizes,
        warm=False,
    )


def _files(entry: _Entry) -> list[Path]:
    """The files that a contender is made of."""
    bundle, peer = entry.job.bundle, PEERS.get(entry.name) if not entry.ours else None
    if not entry.ours:
        file = peer.file(entry.job) if peer is not None and peer.file is not None else None
        return [] if file is None else [file, *file.parent.glob(f"{file.name}.data")]
    manifest = bundle.manifest
    record = manifest.targets.get(entry.name)
    if record is not None and record.engines:
        return [bundle.path / record.engines[0].file]
    if entry.name == "onnxruntime-tensorrt":
        record = next(manifest.targets[flavour] for flavour in FLAVOURS if flavour in manifest.targets)
    else:
        record = manifest.targets.get("onnxruntime")
    name = CANONICAL if entry.name == "openvino" or record is None else record.model
    return [bundle.path / name, *([bundle.path / WEIGHTS] if WEIGHTS in manifest.files else [])]


def _size_mb(entry: _Entry) -> float | None:
    files = _files(entry)
    return sum(file.stat().st_size for file in files) / 1e6 if files else None


# --- limits and surroundings ------------------------------------------------------------------------------------------


def _held_to_limits(bundles: Sequence[Bundle], model: found.Model, ceilings: Ceilings) -> None:
    for bundle in bundles:
        precision = bundle.manifest.precision
        work = work_of(ir.load(bundle.file(CANONICAL)), model.sizes)
        model.work[precision] = work
        model.limit[precision] = limit = limit_seconds(work, ceilings)
        for one in model.contenders:
            if one.precision == precision and one.name not in (*ON_GPU, *GPU_PEERS):
                one.share = limit.share(one.latency.median.value / 1e3)


def _deployed(bundle: Bundle) -> found.Deployed:
    manifest = bundle.manifest
    options = " ".join(f"{name}={value}" for name, value in manifest.source.options.items())
    return found.Deployed(
        precision=manifest.precision,
        bundle=bundle.path.name,
        source=f"{manifest.source.name} {options}".strip(),
        seconds=manifest.seconds,
        size_mb=sum(file.stat().st_size for file in bundle.path.rglob("*") if file.is_file()) / 1e6,
    )


def environment(threads: int) -> found.Environment:
    """The machine and how busy it is."""
    governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    try:
        told = governor.read_text(encoding="ascii").strip()
    except OSError:
        told = "the system does not tell"
    return found.Environment(
        machine=this_machine(), versions=tool_versions(), threads=threads, governor=told, load_before=load_now()
    )


def load_now() -> float | None:
    """Processes that ran or waited over the last minute, where the system tells."""
    with contextlib.suppress(OSError, AttributeError):
        return os.getloadavg()[0]
    return None


def _at(case: Case) -> str:
    return " at " + ", ".join(f"{name} {size}" for name, size in case.sizes.items()) if case.sizes else ""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
