"""What a session costs besides computing: with and without graphs, with outputs that the caller brings, from several
threads, and to load."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache, partial

from attnforge.arrays import to_numpy
from attnforge.benchmarks.gpu.device import Device
from attnforge.benchmarks.gpu.models import Large, PatchPoint, large_of, patch_attention, patch_truth, targets_of
from attnforge.benchmarks.gpu.racing import OpenContender, in_session, mib, race, race_seconds
from attnforge.benchmarks.gpu.running import LEAST, Task
from attnforge.benchmarks.gpu.steps import SIDES, Item, ParityCheck
from attnforge.bundle import FLAVOURS, Bundle
from attnforge.runtime.session import load
from attnforge.runtime.turns import seconds_of


def overhead(device: Device) -> list[Task]:
    """One call in several ways, calls from several threads, and loads, of the first two backends that run here."""
    kinds = {"one call": _one_call, "threads": _threads, "loads": _loads}
    backends = device.usable(Item(), (*FLAVOURS, "onnxruntime-cuda"))[:2]
    return [(f"{backend}: {kind}", partial(do, device, backend)) for backend in backends for kind, do in kinds.items()]


@cache
def _prepared(device: Device, backend: str) -> tuple[Bundle, Large, PatchPoint]:
    """Patch-attention of 196 tokens in fp16, deployed for a backend."""
    point, item = PatchPoint("fp16", SIDES[0], 1), Item()
    large = large_of(device, patch_attention, point.precision)
    bundle = large.deploy(device.scratch("overhead"), *point.shapes, targets_of([backend]), item)
    if item.failed:
        raise RuntimeError("; ".join(item.failed.values()))
    return bundle, large, point


def _one_call(device: Device, backend: str, item: Item) -> None:
    bundle, large, point = _prepared(device, backend)
    with device.stream(), ExitStack() as stack:
        images = point.images(device)
        truth = patch_truth(device, large, images, point)
        array, feed = to_numpy("image", images), device.feed(images)
        opened = partial(in_session, device, stack, bundle, backend)
        ways: dict[str, Callable[[], OpenContender]] = {
            backend: partial(opened, [feed]),
            f"{backend}, graphs=False": partial(opened, [feed], graphs=False),
            f"{backend}, NumPy in and out": partial(opened, [array]),
            f"{backend}, NumPy in and out, graphs=False": partial(opened, [array], graphs=False),
        }
        if device.peers:
            target = device.torch.empty(point.shapes[1], dtype=images.dtype, device=device.name)
            ways[f"{backend}, out given"] = partial(opened, [feed], out=target)
        race(device, item, ways, truth, 1, race_seconds(device))


def _threads(device: Device, backend: str, item: Item) -> None:
    """Calls of one session from several threads, each with a stream and images of its own; every answer is checked."""
    bundle, large, point = _prepared(device, backend)
    threads, calls = 8, 1000 if device.on_cuda and not device.settings.quick else 80
    images = [point.images(device) * (1 + i / threads) for i in range(threads)]
    truths = [patch_truth(device, large, image, point) for image in images]
    device.sync()
    start = time.perf_counter()
    with load(bundle.path, backend, device=device.settings.device) as session:

        def work(i: int) -> list[ParityCheck]:
            feed = device.feed(images[i])
            checks = []
            with device.stream():
                for _ in range(calls // threads):
                    answered = session(feed)
                    device.sync()
                    checks.append(truths[i].check(answered))
            return checks

        with ThreadPoolExecutor(threads) as pool:
            checks = [check for of_thread in pool.map(work, range(threads)) for check in of_thread]
    worst = max(checks, key=lambda check: (not check.passed, check.error / check.budget))
    right = sum(check.passed for check in checks)
    item.values |= {"threads": threads, "calls": len(checks), "right": right, "seconds": time.perf_counter() - start}
    item.checks[f"{backend}, {threads} threads"] = worst.model_copy(update={"cases": len(checks)})


def _loads(device: Device, backend: str, item: Item) -> None:
    """Loads with one call each; the memory that is free on the device before and after shows what they leave behind."""
    bundle, _, point = _prepared(device, backend)
    images = point.images(device)
    wanted = 200 if device.on_cuda and not device.settings.quick else 10
    seconds: list[float] = []

    def once() -> None:
        with load(bundle.path, backend, device=device.settings.device) as session:
            session(device.feed(images))
            device.sync()

    with device.stream():
        for _ in range(3):
            once()
        before = device.free()
        while len(seconds) < wanted and device.run.left > LEAST:
            seconds.append(seconds_of(once))
        after = device.free()
    item.values |= {"loads": len(seconds), "median ms": 1e3 * statistics.median(seconds)}
    item.values |= {"free MiB before": mib(before), "free MiB after": mib(after)}
