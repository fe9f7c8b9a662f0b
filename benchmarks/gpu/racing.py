"""Contenders of a race on the device: loaded, checked against the truth, and timed in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from attnforge.bench.interval import latency_of, ratio_of
from attnforge.bench.results import Interval, Latency
from attnforge.bundle import Bundle
from attnforge.runtime.race import in_turns
from attnforge.runtime.session import Session, load
from benchmarks.gpu.device import Device
from benchmarks.gpu.models import ReferenceElements
from benchmarks.gpu.running import attempt, device_lost
from benchmarks.gpu.steps import COMPILE, EAGER, FLASH, Item, Timing, is_ours

WARM_UP, ROUNDS, LEAST_ROUNDS = 6, 200, 5

COMPARED = (EAGER, COMPILE, FLASH)
"""Peers with which attnforge's contenders are compared."""


@dataclass
class OpenContender:
    """A contender that is ready for calls; with `waits`, a call returns only when its outputs are complete."""

    call: Callable[[], Any]
    session: Session | None = None
    waits: bool = False


Ways = dict[str, Callable[[], OpenContender]]
"""Functions that load each contender, by name."""


@dataclass
class Racer:
    """A loaded contender that gave a right answer.

    Attributes:
        opened: the contender.
        ready_seconds: time from the start of loading to the first output.
        taken: bytes of device memory that this took, where the system reports it.
        peak: peak bytes that torch's allocator added.
        host_ms: milliseconds until a call returns.
    """

    opened: OpenContender
    ready_seconds: float
    taken: float | None
    peak: float | None
    host_ms: float = 0.0

    def turn(self, device: Device) -> tuple[float | None, float]:
        """Return milliseconds of a call on the device (None if calls wait for their outputs), and of one end to end."""
        self.opened.call()
        device.sync()
        on_device = None if self.opened.waits else device.device_ms(self.opened.call, self.host_ms)
        return on_device, device.wall_ms(self.opened.call)


def enter(
    device: Device, item: Item, name: str, make: Callable[[], OpenContender], truth: ReferenceElements
) -> Racer | None:
    """Load a contender, check its first answer, warm it up, and check its last answer too, which may come from a
    replayed graph; return None if it failed or was wrong, with the reason in the item."""

    def is_right(answer: Any) -> bool:
        check = item.checks[name] = truth.check(answer)
        device.run.save()
        if not check.passed:
            item.skipped[name] = "not timed, because its answer is wrong"
        return check.passed

    def open_racer() -> Racer | None:
        before, base = device.free(), device.allocated()
        start = time.perf_counter()
        opened = make()
        answer = opened.call()
        device.sync()
        seconds = time.perf_counter() - start
        peak, after = device.peak(base), device.free()
        if not is_right(answer):
            return None
        del answer
        for _ in range(WARM_UP - 1):
            opened.call()
        answer = opened.call()
        device.sync()
        if not is_right(answer):
            return None
        del answer
        taken = before - after if before is not None and after is not None else None
        host = statistics.median(device.host_ms(opened.call) for _ in range(3))
        return Racer(opened, seconds, taken, None if opened.session else peak, host)

    racer = attempt(item.failed, name, open_racer)
    if racer is None and device.on_cuda and not device_lost():
        attempt(item.failed, f"{name}, freeing its memory", device.free)
    return racer


def race(
    device: Device,
    item: Item,
    ways: Ways,
    truth: ReferenceElements,
    batch: int,
    why_not: Callable[[str], str | None] = lambda name: None,
    seconds: float | None = None,
) -> None:
    """Enter contenders one after another, time those that are right in turns, and record them.

    Args:
        device: the device.
        item: receives times, checks and failures.
        ways: the contenders.
        truth: reference of their outputs.
        batch: samples per call.
        why_not: called before a contender is loaded; returns why to skip it, or None.
        seconds: time limit of the rounds; by default :func:`race_seconds`.
    """
    racers: dict[str, Racer] = {}
    for name, make in ways.items():
        if (reason := why_not(name)) is not None:
            item.skipped[name] = reason
        elif (racer := enter(device, item, name, make, truth)) is not None:
            racers[name] = racer
    turns = {name: partial(racer.turn, device) for name, racer in racers.items()}
    most = min(race_seconds(device) if seconds is None else seconds, max(device.run.left, 0.0))
    measured = in_turns(turns, ROUNDS, most, fewest=LEAST_ROUNDS, settle=0)
    on_device = {name: [[ms] for ms, _ in times if ms is not None] for name, times in measured.items()}
    wall = {name: [[ms] for _, ms in times] for name, times in measured.items()}

    def ratios(name: str, times: Mapping[str, list[list[float]]]) -> dict[str, Interval]:
        peers = [peer for peer in COMPARED if is_ours(name) and times.get(peer) and times[name]]
        return {peer: ratio_of(times[name], times[peer]) for peer in peers}

    for name, racer in racers.items():
        latency = without_rounds(wall[name])
        memory = racer.opened.session.memory if racer.opened.session is not None else None
        item.timings[name] = Timing(
            calls=len(wall[name]),
            device=without_rounds(on_device[name]) if on_device[name] else None,
            wall=latency,
            host_ms=racer.host_ms,
            per_second=1e3 * batch / latency.median.value,
            ready_seconds=racer.ready_seconds,
            ratios=ratios(name, wall),
            device_ratios=ratios(name, on_device),
            held_mib=mib(racer.taken),
            peak_mib=mib(racer.peak),
            session_mib=mib((memory.weights or 0) + (memory.activations or 0) + memory.buffers) if memory else None,
        )
    device.run.save()


def race_seconds(device: Device) -> float:
    """Return the seconds for one race."""
    return 1.0 if device.settings.quick or not device.on_cuda else 3.0


def without_rounds(rounds: list[list[float]]) -> Latency:
    """Return the median with its 95% interval and the percentiles, without the rounds themselves."""
    return latency_of(rounds).model_copy(update={"rounds": []})


def mib(size: float | None) -> float | None:
    """Convert bytes to MiB."""
    return None if size is None else size / 2**20


def in_session(
    device: Device,
    stack: ExitStack,
    bundle: Bundle,
    backend: str,
    feeds: Sequence[Any],
    out: Any = None,
    graphs: bool | None = None,
) -> OpenContender:
    """Load a bundle's backend for these inputs; it writes to `out` if that is given."""
    session = load(bundle.path, backend, device=device.settings.device, contexts=1, graphs=graphs)
    stack.enter_context(session)
    return OpenContender(lambda: session(*feeds, out=out), session, waits=isinstance(feeds[0], np.ndarray))
