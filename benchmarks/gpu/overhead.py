"""What a session does besides computing: graphs, outputs that the caller brings, threads, loading."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

from attnforge.arrays import to_numpy
from attnforge.benchmarks.gpu.bench import Bench
from attnforge.benchmarks.gpu.contenders import Opened, enter, in_session, mib, race, race_seconds
from attnforge.benchmarks.gpu.large import Large, large_of, targets_of
from attnforge.benchmarks.gpu.patch import Point, patch_attention, patch_truth
from attnforge.benchmarks.gpu.records import SIDES, Item, Verdict
from attnforge.benchmarks.gpu.running import LEAST, Task
from attnforge.bundle import FLAVOURS, Bundle
from attnforge.runtime.session import load


def overhead(bench: Bench) -> list[Task]:
    """What a session does besides computing: graphs, outputs that the caller brings, threads, loading."""
    deployed: dict[str, Bundle] = {}
    backends = bench.usable(Item(), (*FLAVOURS, "onnxruntime-cuda"))[:2]
    tasks: list[Task] = []
    for backend in backends:
        tasks.append((f"{backend}: one call", partial(_one_call, bench, backend, deployed)))
        tasks.append((f"{backend}: threads", partial(_threads, bench, backend, deployed)))
        tasks.append((f"{backend}: loads", partial(_loads, bench, backend, deployed)))
    return tasks


def _prepared(bench: Bench, backend: str, deployed: dict[str, Bundle]) -> tuple[Bundle, Large, Point]:
    """Patch-attention of 196 tokens in fp16, deployed for a backend."""
    point = Point("fp16", SIDES[0], 1)
    large = large_of(bench, patch_attention, point.precision)
    if backend not in deployed:
        refused: dict[str, str] = {}
        deployed[backend] = large.deploy(bench.scratch("overhead"), *point.shapes, targets_of([backend]), refused)
        if refused:
            raise RuntimeError("; ".join(refused.values()))
    return deployed[backend], large, point


def _one_call(bench: Bench, backend: str, deployed: dict[str, Bundle], item: Item) -> None:
    bundle, large, point = _prepared(bench, backend, deployed)
    with bench.stream(), ExitStack() as stack:
        images = point.images(bench)
        truth = patch_truth(bench, large, images, point)
        array, feed = to_numpy("image", images), bench.feed(images)
        made = partial(in_session, bench, stack, bundle, backend)
        ways: dict[str, Callable[[], Opened]] = {
            backend: partial(made, [feed]),
            f"{backend}, graphs=False": partial(made, [feed], graphs=False),
            f"{backend}, NumPy in and out": partial(made, [array]),
            f"{backend}, NumPy in and out, graphs=False": partial(made, [array], graphs=False),
        }
        if bench.peers:
            target = bench.torch.empty(point.shapes[1], dtype=images.dtype, device=bench.device)
            ways[f"{backend}, out given"] = partial(made, [feed], out=target)
        entered = {name: enter(bench, item, name, make, truth) for name, make in ways.items()}
        race(bench, item, {name: one for name, one in entered.items() if one is not None}, 1, race_seconds(bench))


def _threads(bench: Bench, backend: str, deployed: dict[str, Bundle], item: Item) -> None:
    """Threads on one session, each with a stream and images of its own; every answer is held to the budget."""
    bundle, large, point = _prepared(bench, backend, deployed)
    threads, calls = 8, 1000 if bench.on_cuda and not bench.settings.quick else 80
    given = [point.images(bench) * (1 + i / threads) for i in range(threads)]
    truths = [patch_truth(bench, large, images, point) for images in given]
    bench.sync()
    start = time.perf_counter()
    with load(bundle.path, backend, device=bench.settings.device) as session:

        def work(i: int) -> list[Verdict]:
            feed = bench.feed(given[i])
            found = []
            with bench.stream():
                for _ in range(calls // threads):
                    answered = session(feed)
                    bench.sync()
                    found.append(truths[i].verdict(answered))
            return found

        with ThreadPoolExecutor(threads) as pool:
            verdicts = [verdict for found in pool.map(work, range(threads)) for verdict in found]
    worst = max(verdicts, key=lambda verdict: (not verdict.passed, verdict.error / verdict.budget))
    right = sum(verdict.passed for verdict in verdicts)
    item.values |= {"threads": threads, "calls": len(verdicts), "right": right, "seconds": time.perf_counter() - start}
    item.verdicts[f"{backend}, {threads} threads"] = worst.model_copy(update={"cases": len(verdicts)})


def _loads(bench: Bench, backend: str, deployed: dict[str, Bundle], item: Item) -> None:
    """Loads and closes, with one call each; what is free on the device before and after."""
    bundle, _, point = _prepared(bench, backend, deployed)
    images = point.images(bench)
    wanted = 200 if bench.on_cuda and not bench.settings.quick else 10
    seconds: list[float] = []

    def once() -> None:
        start = time.perf_counter()
        with load(bundle.path, backend, device=bench.settings.device) as session:
            session(bench.feed(images))
            bench.sync()
        seconds.append(time.perf_counter() - start)

    with bench.stream():
        for _ in range(3):
            once()
        before = bench.free()
        seconds.clear()
        while len(seconds) < wanted and bench.run.left > LEAST:
            once()
        after = bench.free()
    item.values |= {"loads": len(seconds), "median ms": 1e3 * statistics.median(seconds)}
    item.values |= {"free MiB before": mib(before), "free MiB after": mib(after)}
