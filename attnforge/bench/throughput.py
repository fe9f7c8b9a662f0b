"""Throughput: samples a second over batches, and over callers at once, contenders in turns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from attnforge.bench.calls import Caller
from attnforge.bench.contenders.engines import Runner
from attnforge.bench.experiment import case_at
from attnforge.bench.race import Times, Workload
from attnforge.bundle import Bundle, Case
from attnforge.errors import InputError, first_line
from attnforge.runtime import cases as reference
from attnforge.runtime.race import in_turns, seconds_of
from attnforge.runtime.session import RUNS_TO_WARM

THROUGHPUT_PEERS = ("onnxruntime-plain", "eager")
"""Peers whose throughput is measured too; that of the others is close to their latency's inverse."""

BATCH = "batch"
"""The symbol of the dim that counts samples."""

BATCHES, CALLERS = (1, 2, 4, 8), (1, 2, 4)

BURST = 0.1
"""Seconds that a turn takes, about."""

ROUNDS = 4


@dataclass
class Load(Workload[Runner]):
    """Calls of `batch` samples by `callers` at once, each in a thread of its own, on one loaded model.

    Attributes:
        case: whose sizes the other dims have.
        runs: one call of each contender that can.
    """

    in_last_opening_alone = True

    case: Case
    batch: int
    callers: int
    runs: dict[str, Callable[[], Any]] = field(default_factory=dict)

    def why_wrong(self, entry: Caller) -> None:
        """Warm a contender up. Answers were judged before; where it fails, a note says so, and the rest is measured all
        the same. Peers are opened for one caller."""
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
        """Milliseconds a sample, in bursts of :data:`BURST` seconds; as often as :data:`ROUNDS` says."""
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
    """Batches that the bundle takes with one caller, and several callers at the sizes of `case`."""
    batches = []
    for batch in BATCHES if BATCH in case.sizes else ():
        with contextlib.suppress(InputError):  # outside the profile
            case_at(bundle, {**case.sizes, BATCH: batch})
            batches.append(batch)
    at_case = case.sizes.get(BATCH, 1)
    for batch, callers in [*((n, 1) for n in batches or [at_case]), *((at_case, n) for n in CALLERS if n > 1)]:
        words = f"batch {batch}, {callers} caller{'s' if callers > 1 else ''}"
        yield Load(f"warm up {words} of", f"throughput at {words}", case, batch, callers)
