"""Calls of a bundle's model, by its backends and its peers: on the same inputs, how they are checked and timed; and
throughput, in samples per second over batch sizes and concurrent callers, with contenders in turns."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from attnforge.arrays import Array, is_floating
from attnforge.bench.contenders.engines import Runner, open_backend
from attnforge.bench.contenders.peers import PeerJob, expected
from attnforge.bench.contenders.registry import PEERS
from attnforge.bench.experiment import Experiment, case_at
from attnforge.bench.race import Entry, Times, Workload, entries_of
from attnforge.bench.results import Cases, Contender
from attnforge.bundle import CANONICAL, REFERENCE_EXAMPLE, REFERENCE_OUTPUTS, Bundle, Case
from attnforge.errors import BundleError, InputError, first_line
from attnforge.export.decoding.whole import whole_graph
from attnforge.export.diagnosis.stages import decomposed, sites_of
from attnforge.export.graphs.execute import as_it_is
from attnforge.export.reference import kept
from attnforge.precision import precision_named
from attnforge.runtime import cases as reference
from attnforge.runtime.backends.registry import BACKENDS, REGISTRY, chosen_here
from attnforge.runtime.parity.budget import budget_precision
from attnforge.runtime.parity.verify import References, hold
from attnforge.runtime.race import in_turns, race, seconds_of
from attnforge.runtime.session import RUNS_TO_WARM

Caller = Entry[Runner]
"""A contender that is called with inputs."""


class Baseline(PeerJob):
    """The job of the contenders at one bundle's precision, with reference outputs: stored in the bundle, or computed by
    the module.

    Attributes:
        case: the timed case.
    """

    def __init__(self, bundle: Bundle, sizes: Mapping[str, int], experiment: Experiment, folder: Path) -> None:
        manifest, self.case = bundle.manifest, case_at(bundle, sizes)
        case, feeds = self.case, reference.make_inputs(self.case, manifest.inputs, {})
        super().__init__(bundle, feeds, experiment.threads, folder, experiment.module, experiment.trust_source)
        for needed in (REFERENCE_OUTPUTS, REFERENCE_EXAMPLE) if experiment.cases else ():
            bundle.file(needed)  # fails before anything is timed if the file is missing or altered
        if any(case.name == stored.name for stored in manifest.cases):
            self._outputs: Mapping[str, Array] = bundle.tensors(REFERENCE_OUTPUTS)
            return
        precisions = {budget_precision(manifest, name).name for name in BACKENDS} | {manifest.precision}
        self._outputs = {}
        for name in precisions:
            eager_at = name if manifest.eager_precision == manifest.precision else manifest.eager_precision
            answers = expected(self.module, precision_named(eager_at), feeds)
            if manifest.quantised is not None:  # the eager baseline is the same Q/DQ graph
                again = as_it_is(decomposed(whole_graph(bundle, CANONICAL), sites_of(manifest.attention)))(feeds)
                answers = {output: (again[output].reshape(-1), exact) for output, (_, exact) in answers.items()}
            for output, (eager, exact) in answers.items():
                is_own = name == manifest.precision  # a bundle that chose its precisions is compared with fp32 eager
                self._outputs |= kept(eager, case, reference.key(case, output, "eager" if is_own else name))
                self._outputs |= kept(exact, case, reference.key(case, output, "float64")) if is_own else {}

    def why_wrong(self, entry: Caller) -> str | None:
        """Return why a contender's answer to the timed inputs is wrong, or None; its error is kept in the entry.

        The contender runs before that, ours as often as a session needs to prepare for repeated sizes, so that the
        checked answer comes from the code that is timed.
        """
        for _ in range(RUNS_TO_WARM - 1 if entry.ours else 1):
            entry.opened(self.feeds)
        report = hold(self.bundle, entry.name, partial(self._answer, entry), [self.case], References({}, self._outputs))
        entry.keep(report.error, report.budget)
        return next((f"{failure.output}: {failure.reason}" for failure in report.failures), report.reason)

    def in_every_case(self, entry: Caller) -> Cases:
        """Check a contender in the bundle's reference cases, at sizes that it was compiled for."""
        every = self.bundle.manifest.cases
        cases = [case for case in every if entry.peer.any_sizes or case.sizes == self.case.sizes]
        started: list[str] = []

        def run(feeds: dict[str, Array]) -> dict[str, Array]:
            started.append(cases[len(started)].name)
            return self._answer(entry, feeds)

        try:
            wrong = hold(self.bundle, entry.name, run, cases).missed if cases else None
        except BundleError:
            raise
        except Exception as error:  # a contender that fails is a result
            wrong = f"{started[-1] if started else 'all'}, where it fails: {first_line(error)}"
        return Cases(held=len(started), of=len(every), wrong=wrong)

    def _answer(self, entry: Caller, feeds: dict[str, Array]) -> dict[str, Array]:
        """Return the outputs in the model's dtypes: OpenVINO returns fp32 for a 16-bit model."""
        outputs = entry.opened(feeds)
        if entry.ours:
            return outputs
        dtypes = {spec.name: spec.dtype for spec in self.bundle.manifest.outputs}
        return {name: a.astype(dtypes[name], copy=False) if is_floating(a) else a for name, a in outputs.items()}


class Calls(Workload[Runner]):
    """Calls on the inputs of the baselines, one for each bundle."""

    def why_wrong(self, entry: Caller) -> str | None:
        """See :meth:`Baseline.why_wrong`."""
        assert isinstance(entry.job, Baseline)
        return entry.job.why_wrong(entry)

    def time(self, entries: Mapping[str, Caller], rounds: int, seconds: float, seed: int) -> Times:
        """Return the milliseconds of every call."""
        return race({key: partial(e.opened, e.job.feeds) for key, e in entries.items()}, rounds, seconds, seed=seed)


def callers(experiment: Experiment, baseline: Baseline, skipped: dict[str, str]) -> Iterator[Caller]:
    """Yield the contenders at a bundle's precision; the reasons of those that cannot run go to `skipped`.

    Raises:
        UnavailableError: a backend that was requested by name cannot run here.
    """
    suffix = f" {baseline.precision.name}"
    chosen = chosen_here(baseline.bundle) if experiment.backends is None else None
    dropped = chosen.dropped if chosen is not None else {}
    never_loaded = {name: reason for name, reason in dropped.items() if not REGISTRY[name].targets}  # by `auto`
    return entries_of(experiment, baseline, BACKENDS, open_backend, PEERS, never_loaded, skipped, suffix)


def check_all_cases(experiment: Experiment, pairs: Sequence[tuple[Caller, Contender]]) -> None:
    """Check ours in all of a bundle's reference cases, then every peer that is as fast as our fastest right backend, or
    as the picked one if that is slower: a faster peer that is wrong elsewhere is not a better choice."""
    for entry, contender in sorted(pairs, key=lambda pair: not pair[1].ours):
        right = [c for of, c in pairs if of.job is entry.job and c.ours and c.wrong_in is None]
        fastest = min((c.latency.median.value for c in right), default=math.inf)
        enough = max([fastest, *(c.latency.median.value for c in right if c.picked)])
        if contender.ours or contender.latency.median.value <= enough:
            experiment.progress(f"check {contender.key} in every case")
            assert isinstance(entry.job, Baseline)
            contender.cases = entry.job.in_every_case(entry)


# --- throughput -------------------------------------------------------------------------------------------------------


THROUGHPUT_PEERS = ("onnxruntime-plain", "eager")
"""Peers whose throughput is measured too; that of other peers is close to the inverse of their latency."""

BATCH = "batch"
"""The symbol of the dim that counts samples."""

BATCHES, CALLERS = (1, 2, 4, 8), (1, 2, 4)

BURST = 0.1
"""Approximate seconds of a turn."""

ROUNDS = 4


@dataclass
class Load(Workload[Runner]):
    """Calls of `batch` samples by `callers` concurrent callers, each in its own thread, on one loaded model.

    Attributes:
        case: gives the sizes of the other dims.
        batch: samples per call.
        callers: number of concurrent callers.
        runs: one call of each contender that takes the load, by key.
    """

    in_last_opening_alone = True

    case: Case
    batch: int
    callers: int
    runs: dict[str, Callable[[], Any]] = field(default_factory=dict)

    def why_wrong(self, entry: Caller) -> None:
        """Warm up a contender. Its answers were checked before; a failure becomes a note, and the other loads are still
        measured. Peers support one caller only."""
        if not entry.ours and (entry.name not in THROUGHPUT_PEERS or self.callers > 1):
            return
        sizes = {**self.case.sizes, BATCH: self.batch} if BATCH in self.case.sizes else self.case.sizes
        at_batch = Case(name="throughput", sizes=sizes, kind="normal", seed=1)
        run = partial(entry.opened, reference.make_inputs(at_batch, entry.job.bundle.manifest.inputs, {}))
        try:
            for _ in range(RUNS_TO_WARM):
                run()
        except Exception as error:
            entry.notes.append(f"no throughput at batch {self.batch}: {first_line(error)}")
        else:
            self.runs[entry.key] = run

    def time(self, entries: Mapping[str, Caller], rounds: int, seconds: float, seed: int) -> Times:
        """Return milliseconds per sample, in :data:`ROUNDS` bursts of :data:`BURST` seconds."""
        return in_turns({key: partial(self._burst, run) for key, run in self.runs.items()}, ROUNDS)

    def _burst(self, run: Callable[[], Any]) -> list[float]:
        calls = max(1, int(BURST / seconds_of(run) / self.callers))
        if self.callers == 1:
            return [1e3 * seconds_of(run, calls) / (self.batch * calls)]
        with ThreadPoolExecutor(self.callers) as threads:
            list(threads.map(lambda _: None, range(self.callers)))  # starts the threads
            seconds = seconds_of(lambda: list(threads.map(lambda _: seconds_of(run, calls), range(self.callers))))
        return [1e3 * seconds / (self.batch * self.callers * calls)]


def loads(bundle: Bundle, case: Case) -> Iterator[Load]:
    """Yield the batch sizes that the bundle takes with one caller, and several callers at the sizes of `case`."""
    batches = []
    for batch in BATCHES if BATCH in case.sizes else ():
        with contextlib.suppress(InputError):  # outside the profile
            case_at(bundle, {**case.sizes, BATCH: batch})
            batches.append(batch)
    at_case = case.sizes.get(BATCH, 1)
    for batch, callers in [*((n, 1) for n in batches or [at_case]), *((at_case, n) for n in CALLERS if n > 1)]:
        words = f"batch {batch}, {callers} caller{'s' if callers > 1 else ''}"
        yield Load(f"warm up {words} of", f"throughput at {words}", case, batch, callers)
