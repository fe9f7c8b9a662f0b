"""The settings of a benchmark: bundles of one model, contenders, rounds and loads."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from attnforge.bench.results import Environment, Run
from attnforge.bundle import Bundle, Case, Source
from attnforge.errors import UsageError, check_known
from attnforge.machine import this_machine, tool_versions
from attnforge.runtime import cases as reference
from attnforge.runtime.backends.backend import check_threads
from attnforge.runtime.backends.registry import BACKENDS
from attnforge.runtime.inputs import shapes_of

ROUNDS = 20
"""Default number of timed rounds per contender."""

R = TypeVar("R", bound=Run)

StageCallback = Callable[[str], None]
"""Called with the name of each stage as it starts."""


@dataclass
class Experiment:
    """The settings of a benchmark; :func:`~.run.benchmark` documents the arguments that they share.

    Attributes:
        bundles: bundles of one model, each at a different precision.
        backends: backends of the bundles; None for all that run here.
        against: names of peers.
        throughput, starts, memory: whether to measure these in addition to latency.
        cases: whether ours, and peers that are as fast, are checked against the budget in all of a bundle's reference
            cases.
        fresh_peers: peers whose starts and memory are measured in addition to ours; None for all.
        trust_source: whether what the bundles' manifests name may be imported, opened and run.
        skipped: why peers that were not named are not measured, by name and precision.
        seconds: time limit after which no further round starts; split between loads as the rounds are.
        openings: how often each contender is loaded.
    """

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
    fresh_peers: Sequence[str] | None = None
    seconds: float = float("inf")
    openings: int = 1
    trust_source: bool = False
    skipped: Mapping[str, str] = field(default_factory=dict)
    progress: StageCallback = lambda stage: None

    @property
    def shares(self) -> list[int]:
        """Number of rounds of each load."""
        openings = min(self.openings, self.rounds)
        return [self.rounds // openings + (i < self.rounds % openings) for i in range(openings)]

    def check(self, peers: Collection[str], threads: int | None) -> None:
        """Check the arguments.

        Args:
            peers: names of all peers.
            threads: number of threads, as given by the caller.

        Raises:
            UnknownNameError: no such backend or peer.
            UsageError: fewer than one round, load or thread, or bundles that are not of one model, each at a different
                precision.
        """
        for kind, names, known in (("backend", self.backends or (), BACKENDS), ("peer", self.against, tuple(peers))):
            for name in names:
                check_known(kind, name, known)
        for count, what in ((self.rounds, "rounds"), (self.openings, "openings")):
            if count < 1:
                raise UsageError(f"{count} {what} were asked for; give 1 or more")
        check_threads(threads)
        forms = [[(spec.name, spec.dims) for spec in bundle.manifest.inputs] for bundle in self.bundles]
        precisions = [bundle.manifest.precision for bundle in self.bundles]
        if not forms or any(form != forms[0] for form in forms) or len(set(precisions)) < len(precisions):
            raise UsageError(
                f"the bundles are {', '.join(map(repr, self.bundles))}; give one, or several of one model, each at "
                "a different precision"
            )


def source_text(source: Source) -> str:
    """Return the name and options that rebuild a model, as text."""
    return " ".join([source.name, *(f"{name}={value}" for name, value in source.options.items())])


def case_at(bundle: Bundle, sizes: Mapping[str, int]) -> Case:
    """Return a case of these sizes, if possible one whose outputs are stored in the bundle.

    Args:
        sizes: sizes of the dynamic dims, by symbol; a dim that is not named has the example's size.

    Raises:
        UnknownNameError: no such dim.
        InputError: a size is outside the profile.
    """
    inputs, cases = bundle.manifest.inputs, bundle.manifest.cases
    at = reference.at(inputs, sizes)
    shapes_of(inputs, (), *((reference.shape_of(spec, at.sizes), np.dtype(spec.dtype)) for spec in inputs))
    for case in cases:
        if case.kind == at.kind and case.sizes == at.sizes and case.masks == at.masks:
            return case
    spreads = [case.spread for case in cases if case.is_ordinary]
    at.spread = {
        name: tuple(max(spread[name][i] for spread in spreads if name in spread) for i in range(2))  # type: ignore[misc]
        for name in {name for spread in spreads for name in spread}
    }
    return at


def new_run(command: str, threads: int) -> dict[str, Any]:
    """Return the fields of :class:`~.results.Run` that are known at its start: time, machine, versions and load.

    Args:
        command: command that reproduces the results.
        threads: number of threads of every CPU contender.
    """
    clock = "not reported by the system"
    with contextlib.suppress(OSError):
        clock = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text(encoding="ascii").strip()
    surroundings = Environment(
        machine=this_machine(), versions=tool_versions(), threads=threads, governor=clock, load_before=load_now()
    )
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return {"command": command, "created": created, "seconds": 0, "environment": surroundings}


def load_now() -> float | None:
    """Return the number of processes that ran or waited over the last minute; None where it is not reported."""
    with contextlib.suppress(OSError, AttributeError):
        return os.getloadavg()[0]
    return None


def finished(results: R, start: float) -> R:
    """Return the results with the seconds since `start` and the machine's load now."""
    results.environment.load_after = load_now()
    results.seconds = round(time.perf_counter() - start, 1)
    return results
