"""The race: contenders are opened, held to the parity budget, and timed in turns, several times over.

One model opened twice in one process has two speeds, up to 8% apart, which it keeps for as long as it is open. So
contenders are opened several times in a run, each time for a share of the rounds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from attnforge.arrays import Array, is_floating
from attnforge.bench.contenders.engines import Runner, open_backend, why_no_products
from attnforge.bench.contenders.peers import PeerJob, expected
from attnforge.bench.contenders.registry import PEERS
from attnforge.bench.experiment import Experiment, case_at
from attnforge.bench.results import Cases, Contender
from attnforge.bundle import CANONICAL, REFERENCE_EXAMPLE, REFERENCE_OUTPUTS, Bundle
from attnforge.errors import BundleError, UnavailableError, first_line
from attnforge.export.decoding.whole import whole_graph
from attnforge.export.diagnosis.stages import sites_of, written_out
from attnforge.export.graphs.execute import as_it_is
from attnforge.export.reference import kept
from attnforge.precision import precision_named
from attnforge.runtime import cases as reference
from attnforge.runtime.backends.registry import BACKENDS, WITHOUT_TARGET, why_not_unasked, why_unavailable
from attnforge.runtime.parity.budget import budget_precision
from attnforge.runtime.parity.verify import References, hold
from attnforge.runtime.preference import chosen_here
from attnforge.runtime.session import RUNS_TO_WARM
from attnforge.runtime.turns import race


@dataclass
class Entry:
    """A contender in the race.

    Attributes:
        yardstick: what it is held to, and the bundle and inputs that it is opened for.
        what: it is, in a line.
        opener: makes what runs it on any inputs.
        stays: whether it stays open for all rounds.
        error, budget: the worst on the timed inputs of all openings, relative to float64.
        notes: what could not be measured, and why.
        runner: runs it, once it is open; closing `stack` closes it.
    """

    yardstick: Yardstick
    name: str
    ours: bool
    what: str
    opener: Callable[[PeerJob, ExitStack], Runner]
    stays: bool = False
    error: float = 0.0
    budget: float = 0.0
    notes: list[str] = field(default_factory=list)
    runner: Runner = field(init=False)
    stack: ExitStack | None = None

    @property
    def job(self) -> PeerJob:
        return self.yardstick.job

    @property
    def precision(self) -> str:
        return self.job.precision.name

    @property
    def key(self) -> str:
        return f"{self.name} {self.precision}"

    def run(self) -> dict[str, Array]:
        """Run it on the inputs that are timed."""
        return self.runner(self.job.feeds)

    def open(self, stack: ExitStack) -> None:
        """Open it anew, until `stack` closes.

        The last opening is closed once this one is there: memory that was given back first would be taken again, page
        for page, and with it the same speed.
        """
        own, last = stack.enter_context(ExitStack()), self.stack
        try:
            self.runner = self.opener(self.job, own)
        finally:
            if last is not None:
                last.close()
        self.stack = own


@dataclass
class Raced:
    """What came of a race.

    Attributes:
        entries: the contenders that were right in every opening, and are still open.
        rounds: milliseconds of each of their calls, by key and round.
        openings: how many of the rounds, in order, were of each opening.
        wrong, skipped: why other contenders have no time, by key.
    """

    entries: list[Entry]
    rounds: dict[str, list[list[float]]]
    openings: list[int]
    wrong: dict[str, str]
    skipped: dict[str, str]


class Yardstick:
    """What contenders at one bundle's precision are held to: outputs that the bundle holds, or else the module gives.

    Attributes:
        case: that is timed.
        job: what peers are opened for.
    """

    def __init__(self, bundle: Bundle, sizes: Mapping[str, int], experiment: Experiment, folder: Path) -> None:
        manifest = bundle.manifest
        self.bundle, self.case = bundle, case_at(bundle, sizes)
        case = self.case
        feeds = reference.make_inputs(case, manifest.inputs, {})
        self.job = PeerJob(bundle, feeds, experiment.threads, folder, experiment.module, experiment.trust_source)
        for needed in (REFERENCE_OUTPUTS, REFERENCE_EXAMPLE) if experiment.cases else ():
            bundle.file(needed)  # fails before anything is timed where the file is missing or altered
        if any(case.name == stored.name for stored in manifest.cases):
            self._outputs: Mapping[str, Array] = bundle.tensors(REFERENCE_OUTPUTS)
            return
        precisions = {budget_precision(manifest, name).name for name in BACKENDS} | {manifest.precision}
        self._outputs = {}
        for name in precisions:
            at = precision_named(name if manifest.eager_precision == manifest.precision else manifest.eager_precision)
            answers = expected(self.job.module, at, feeds)
            if manifest.quantised is not None:  # eager is the same Q/DQ
                again = as_it_is(written_out(whole_graph(bundle, CANONICAL), sites_of(manifest.attention)))(feeds)
                answers = {output: (again[output].reshape(-1), exact) for output, (_, exact) in answers.items()}
            for output, (eager, exact) in answers.items():
                is_own = name == manifest.precision  # a bundle that chose its precisions is compared with fp32
                self._outputs |= kept(eager, case, reference.key(case, output, "eager" if is_own else name))
                self._outputs |= kept(exact, case, reference.key(case, output, "float64")) if is_own else {}

    def why_wrong(self, entry: Entry) -> str | None:
        """Why a contender's answer to the timed inputs is wrong, or None; its error is kept in the entry.

        It runs before that, ours as often as a session takes to prepare for sizes that come again, so that the answer
        is of the code that is timed.
        """
        for _ in range(RUNS_TO_WARM - 1 if entry.ours else 1):
            entry.run()
        references = References({}, self._outputs)
        run = partial(self._answer, entry)
        report = hold(self.bundle, entry.name, run, [self.case], references)
        if report.error * entry.budget >= entry.error * report.budget:
            entry.error, entry.budget = report.error, report.budget
        return next((f"{failure.output}: {failure.reason}" for failure in report.failures), report.reason)

    def in_every_case(self, entry: Entry) -> Cases:
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
        except Exception as error:  # a contender that fails is a result
            wrong = f"{begun[-1] if begun else 'all'}, where it fails: {first_line(error)}"
        return Cases(held=len(begun), of=len(every), wrong=wrong)

    def _answer(self, entry: Entry, feeds: dict[str, Array]) -> dict[str, Array]:
        """The outputs in the model's dtypes: OpenVINO answers a 16-bit model's inputs in fp32."""
        outputs = entry.runner(feeds)
        if entry.ours:
            return outputs
        own = {spec.name: spec.dtype for spec in self.bundle.manifest.outputs}
        return {n: a.astype(own[n]) if a.dtype.name != own[n] and is_floating(a) else a for n, a in outputs.items()}


def run_race(experiment: Experiment, yardsticks: Sequence[Yardstick], model: str, stack: ExitStack) -> Raced:
    """Open all contenders anew for every share of the rounds, hold them to the budget, and time them in turns.

    Args:
        yardsticks: of each bundle.
        model: its name and sizes, as progress tells them.
        stack: closes what is open in the end.
    """
    raced = Raced([], {}, [], {}, {})
    entries = {entry.key: entry for held_to in yardsticks for entry in _entries(experiment, held_to, raced.skipped)}
    for i, share in enumerate(experiment.shares):
        _open_anew(experiment, entries, stack, raced, seed=i)
        which = f"opening {i + 1} of {len(experiment.shares)}"
        for reasons in (raced.wrong, raced.skipped):
            for key in reasons.keys() & raced.rounds.keys():
                reasons[key] += f" (in {which}; before, it was right)"
        experiment.progress(f"time {model}{f', {which}' if len(experiment.shares) > 1 else ''}")
        seconds = experiment.seconds / len(experiment.shares)
        times = race({key: entry.run for key, entry in entries.items()}, share, seconds, seed=i)
        raced.rounds = {key: raced.rounds.get(key, []) + rounds for key, rounds in times.items()}
        raced.openings.append(max((len(rounds) for rounds in times.values()), default=0))
    raced.entries = list(entries.values())
    return raced


def _entries(experiment: Experiment, yardstick: Yardstick, skipped: dict[str, str]) -> Iterator[Entry]:
    """The contenders at a bundle's precision; the reasons of those that cannot run go to `skipped`.

    Raises:
        UnavailableError: a backend that was asked for by name cannot run here.
    """
    bundle = yardstick.bundle
    precision = bundle.manifest.precision
    chosen = chosen_here(bundle) if experiment.backends is None else None
    why_not = why_not_unasked if experiment.backends is None else why_unavailable
    for name in experiment.backends or BACKENDS:
        if chosen is not None and name in WITHOUT_TARGET and name in chosen.dropped:  # `auto` never loads it
            skipped[f"{name} {precision}"] = chosen.dropped[name]
        elif (reason := why_not(bundle, name)) is None:
            yield Entry(yardstick, name, True, f"the bundle on {name}", partial(open_backend, name))
        elif experiment.backends is not None:
            raise UnavailableError(f"{name}: {reason}")
        else:
            skipped[f"{name} {precision}"] = reason
    for name in experiment.against:
        peer = PEERS[name]
        if peer.engine == "onnxruntime" and (reason := why_no_products(precision)) is not None:
            skipped[f"{name} {precision}"] = reason
        else:
            yield Entry(yardstick, name, False, peer.what, peer.open, peer.compiles)


def _open_anew(experiment: Experiment, entries: dict[str, Entry], stack: ExitStack, raced: Raced, seed: int) -> None:
    """Open all entries, in an order drawn anew, because a contender that is opened among the first often stays slower.

    Args:
        entries: by key; those that cannot run or are wrong leave.
        stack: closes what is open in the end.
        raced: its `wrong` grows by contenders that are wrong and by ours that fail, its `skipped` by all others that
            cannot run.
        seed: of the order.
    """
    for entry in random.Random(seed).sample(list(entries.values()), len(entries)):
        try:
            if not entry.stays or entry.stack is None:
                experiment.progress(f"open {entry.key}")
                entry.open(stack)
            experiment.progress(f"check {entry.key}")
            reason = entry.yardstick.why_wrong(entry)
            reasons = raced.wrong
        except BundleError:
            raise
        except Exception as error:  # a peer that cannot run the model is a result, no failure of the benchmark
            reason, reasons = first_line(error), raced.wrong if entry.ours else raced.skipped
        if reason is not None:
            reasons[entry.key] = reason
            del entries[entry.key]


def check_all_cases(
    experiment: Experiment, yardsticks: Sequence[Yardstick], pairs: Sequence[tuple[Entry, Contender]]
) -> None:
    """Hold ours to all of a bundle's reference cases, then every peer that is as fast as our fastest right one, or as
    the picked one where that is slower: a peer that is faster, and wrong elsewhere, is no better choice."""
    for yardstick in yardsticks:
        of_bundle = [(entry, contender) for entry, contender in pairs if entry.job is yardstick.job]
        _check_cases(experiment, yardstick, [pair for pair in of_bundle if pair[1].ours])
        right = [contender for _, contender in of_bundle if contender.ours and contender.wrong_in is None]
        fastest = min((contender.latency.median.value for contender in right), default=math.inf)
        enough = max([fastest, *(contender.latency.median.value for contender in right if contender.picked)])
        peers = [pair for pair in of_bundle if not pair[1].ours and pair[1].latency.median.value <= enough]
        _check_cases(experiment, yardstick, peers)


def _check_cases(experiment: Experiment, yardstick: Yardstick, pairs: Sequence[tuple[Entry, Contender]]) -> None:
    for entry, contender in pairs:
        experiment.progress(f"check {contender.key} in every case")
        contender.cases = yardstick.in_every_case(entry)
