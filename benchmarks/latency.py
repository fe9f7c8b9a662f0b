"""Latency of a bundle's backends and of its peers, interleaved in one run.

Machines drift, so only ratios within a run mean anything: the contenders take turns, round by round, in an order
shuffled anew each time. Where there are peers, each contender is held to the bundle's parity budget before it is
timed, on the very inputs that are timed: a wrong answer has no time.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from attnforge import reference
from attnforge.arrays import Array
from attnforge.bundle import Bundle, Case, Record
from attnforge.errors import UnavailableError, UnknownNameError, UsageError
from attnforge.precision import Precision
from attnforge.runtime.backends import BACKENDS, why_unavailable
from attnforge.runtime.budget import judge
from attnforge.runtime.inputs import checked
from attnforge.runtime.parity import budget_precision
from attnforge.runtime.session import load

if TYPE_CHECKING:
    from attnforge.benchmarks.peers import Runner

PEERS = ("eager", "onnxruntime-plain")
"""What a bundle can be measured against: the module itself, and ONNX Runtime given the exporter's graph as it is."""


SETTLE = 0.02
"""Seconds before each turn: the threads of whoever ran last go on spinning for a while, on processors not theirs."""


class Latency(Record):
    """Milliseconds a call over all rounds; `ratio` is this median over that of the bundle's fastest backend."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    ratio: float


class LatencyReport(Record):
    """What :func:`benchmark` measured. `wrong` names contenders that missed the parity budget; they are not timed."""

    bundle: str
    name: str
    precision: str
    sizes: dict[str, int]
    threads: int
    rounds: int
    machine: str
    backends: dict[str, Latency]
    peers: dict[str, Latency]
    wrong: dict[str, str]
    skipped: dict[str, str]


def benchmark(
    bundle: str | os.PathLike[str] | Bundle,
    backends: Sequence[str] | None = None,
    against: Sequence[str] = (),
    *,
    sizes: Mapping[str, int] | None = None,
    rounds: int = 20,
    threads: int | None = None,
    module: Any = None,
) -> LatencyReport:
    """Time a bundle's backends, and peers where asked, side by side.

    Args:
        bundle: its folder.
        backends: by default every deployed one that this machine can run.
        against: of `eager` and `onnxruntime-plain`; both need torch and the module.
        sizes: of the dynamic dims; by default the example's.
        rounds: how often every contender runs.
        threads: of CPU contenders; by default one a processor.
        module: the module that was deployed, where the bundle does not say how to make it again.

    Raises:
        UnknownNameError: no such backend, peer or dim.
        UsageError: fewer than one round, or peers without a module.
        InputError: a size outside the profile.
        UnavailableError: a backend that was asked for by name cannot run here.
    """
    opened = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
    manifest = opened.manifest
    for kind, names, known in (("backend", backends or (), BACKENDS), ("peer", against, PEERS)):
        if unknown := [name for name in names if name not in known]:
            raise UnknownNameError(kind, unknown[0], known)
    if rounds < 1:
        raise UsageError(f"{rounds} rounds were asked for; give 1 or more")
    threads = threads or os.cpu_count() or 1
    case = reference.at(manifest.inputs, sizes or {})
    feeds = reference.make_inputs(case, manifest.inputs, {})
    checked(manifest.inputs, feeds)
    skipped: dict[str, str] = {}
    deployed: dict[str, Runner] = {}
    peers: dict[str, Runner] = {}
    wrong: dict[str, str] = {}
    with ExitStack() as stack:
        for name in backends or BACKENDS:
            if (reason := why_unavailable(opened, name)) is None:
                deployed[name] = stack.enter_context(load(opened, name, threads=threads)).run
            elif backends is None:
                skipped[name] = reason
            else:
                raise UnavailableError(f"{name}: {reason}")
        if against:
            from attnforge.benchmarks.peers import PEERS as open_peer
            from attnforge.benchmarks.peers import expected, rebuilt

            module = module if module is not None else rebuilt(manifest)
            for name in against:
                try:
                    peers[name] = open_peer[name](opened, module, feeds, threads, stack)
                except (
                    Exception
                ) as error:  # a peer that cannot run this model at all is a result, not a failure of ours
                    skipped[name] = str(error).splitlines()[0]
            wrong = {}
            for precision in {budget_precision(manifest, name) for name in (*deployed, *peers)}:
                held = {n: r for n, r in {**deployed, **peers}.items() if budget_precision(manifest, n) == precision}
                wrong |= _wrong(held, case, feeds, expected(module, precision, feeds), precision)
        contenders = {name: run for name, run in {**deployed, **peers}.items() if name not in wrong}
        times = _interleave(contenders, feeds, rounds)
    best = min((statistics.median(times[name]) for name in deployed if name in times), default=float("nan"))
    latencies = {name: _latency(seconds, best) for name, seconds in times.items()}
    return LatencyReport(
        bundle=str(opened.path),
        name=manifest.name,
        precision=manifest.precision,
        sizes=case.sizes,
        threads=threads,
        rounds=rounds,
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors",
        backends={name: latency for name, latency in latencies.items() if name in deployed},
        peers={name: latency for name, latency in latencies.items() if name in peers},
        wrong=wrong,
        skipped=skipped,
    )


def _wrong(
    contenders: Mapping[str, Runner],
    case: Case,
    feeds: dict[str, Array],
    truth: Mapping[str, tuple[Array, Array]],
    precision: Precision,
) -> dict[str, str]:
    """Which contenders miss the parity budget, and by how much."""
    found: dict[str, str] = {}
    for name, run in contenders.items():
        for output, array in run(feeds).items():
            eager, exact = truth[output]
            verdict = judge(case, output, array.astype(np.float64).reshape(-1), eager, exact, precision)
            if verdict.reason is not None:
                found[name] = f"{output}: {verdict.reason}"
    return found


def _interleave(contenders: Mapping[str, Runner], feeds: dict[str, Array], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    shuffle = random.Random(0)
    for run in contenders.values():
        run(feeds)
    for _ in range(rounds):
        for name in shuffle.sample(list(contenders), len(contenders)):
            time.sleep(SETTLE)
            contenders[name](feeds)
            start = time.perf_counter()
            contenders[name](feeds)
            times[name].append(time.perf_counter() - start)
    return times


def _latency(seconds: list[float], best: float) -> Latency:
    ordered = sorted(seconds)
    return Latency(
        median_ms=1e3 * statistics.median(ordered),
        p10_ms=1e3 * ordered[int(0.1 * (len(ordered) - 1))],
        p90_ms=1e3 * ordered[round(0.9 * (len(ordered) - 1))],
        ratio=statistics.median(ordered) / best,
    )
