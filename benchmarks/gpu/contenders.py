"""Contenders: opened, held to the truth, and timed in turns."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnforge.benchmarks.gpu.bench import Bench
from attnforge.benchmarks.gpu.large import Truth
from attnforge.benchmarks.gpu.records import Item, Spread, Timing
from attnforge.benchmarks.gpu.running import attempt, device_lost
from attnforge.bundle import Bundle
from attnforge.runtime.options import Memory
from attnforge.runtime.session import Session, load

WARM_UP, ROUNDS, LEAST_ROUNDS = 6, 300, 5


@dataclass
class Opened:
    """Something that can be called again and again. It `waits` where it returns only when its outputs are there."""

    call: Callable[[], Any]
    session: Session | None = None
    waits: bool = False


@dataclass
class Contender:
    """What was opened and gave a right answer, and the times of its calls."""

    opened: Opened
    ready_seconds: float
    held: float | None
    peak: float | None
    host_ms: float = 0.0
    on_device: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)


def enter(bench: Bench, item: Item, name: str, make: Callable[[], Opened], truth: Truth) -> Contender | None:
    """Open a contender, hold its first answer to the budget, and warm it up; None where it is out."""

    def opening() -> Contender | None:
        before, base = bench.free(), 0.0
        if bench.on_cuda:
            base = float(bench.torch.cuda.memory_allocated())
            bench.peak()
        start = time.perf_counter()
        opened = make()
        first = opened.call()
        bench.sync()
        seconds = time.perf_counter() - start
        peak, after = bench.peak(base), bench.free()
        verdict = item.verdicts[name] = truth.verdict(first)
        bench.run.save()
        if not verdict.passed:
            item.skipped[name] = "not timed, for its answer is wrong"
            return None
        del first
        for _ in range(WARM_UP):
            opened.call()
        bench.sync()
        held = before - after if before is not None and after is not None else None
        host = statistics.median(bench.host_ms(opened.call) for _ in range(3))
        return Contender(opened, seconds, held, None if opened.session else peak, host)

    found = attempt(item.failed, name, opening)
    if found is None and bench.on_cuda and not device_lost():
        attempt(item.failed, f"{name}, freeing its memory", bench.free)
    return found


def race(bench: Bench, item: Item, contenders: dict[str, Contender], batch: int, seconds: float) -> None:
    """Time the contenders, in turns, and record them."""
    shuffle = random.Random(0)
    ends = time.perf_counter() + min(seconds, max(bench.run.left, 0.0))
    for turn in range(ROUNDS if contenders else 0):
        if turn >= LEAST_ROUNDS and time.perf_counter() > ends:
            break
        for name in shuffle.sample(list(contenders), len(contenders)):
            one = contenders[name]
            one.opened.call()
            bench.sync()
            if not one.opened.waits:
                one.on_device.append(bench.device_ms(one.opened.call, one.host_ms))
            one.wall.append(bench.wall_ms(one.opened.call))
    for name, one in contenders.items():
        item.timings[name] = timing(one, batch)
    bench.run.save()


def race_seconds(bench: Bench) -> float:
    """Seconds for one race."""
    return 1.0 if bench.settings.quick or not bench.on_cuda else 3.0


def timing(one: Contender, batch: int) -> Timing:
    held = _on_device(one.opened.session.memory) if one.opened.session is not None else None
    wall = spread(one.wall)
    return Timing(
        calls=len(one.wall),
        device_ms=spread(one.on_device) if one.on_device else None,
        wall_ms=wall,
        host_ms=one.host_ms,
        per_second=1e3 * batch / wall.p50,
        ready_seconds=one.ready_seconds,
        held_mib=mib(one.held),
        peak_mib=mib(one.peak),
        session_mib=mib(held),
    )


def spread(milliseconds: Sequence[float]) -> Spread:
    """Percentiles, each the least time that so many of a hundred calls do not exceed."""
    ordered = sorted(milliseconds)
    at = {f"p{n}": ordered[max(math.ceil(n / 100 * len(ordered)), 1) - 1] for n in (50, 90, 99)}
    return Spread(**at)


def _on_device(memory: Memory) -> float:
    return float((memory.weights or 0) + (memory.activations or 0) + memory.buffers)


def mib(size: float | None) -> float | None:
    return None if size is None else size / 2**20


def in_session(
    bench: Bench, stack: ExitStack, bundle: Bundle, backend: str, feeds: Sequence[Any], **options: Any
) -> Opened:
    """A bundle's backend, on these inputs."""
    kept = {name: options.pop(name) for name in ("out",) if name in options}
    given = {"device": bench.settings.device, "contexts": 1, **options}
    session = stack.enter_context(load(bundle.path, backend, **given))
    return Opened(lambda: session(*feeds, **kept), session, waits=isinstance(feeds[0], np.ndarray))
