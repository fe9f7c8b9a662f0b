"""Patch-attention over tokens, batch and precision, against torch's ways of running it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from attnforge.arrays import to_numpy
from attnforge.benchmarks.gpu.device import Device
from attnforge.benchmarks.gpu.large import large_of, targets_of
from attnforge.benchmarks.gpu.patch import PatchPoint, patch_attention, patch_truth
from attnforge.benchmarks.gpu.racing import OpenContender, in_session, race, race_seconds
from attnforge.benchmarks.gpu.running import Task
from attnforge.benchmarks.gpu.steps import COMPILE, EAGER, GRAPHED, SDPA, SIDES, Item, is_ours
from attnforge.bundle import FLAVOURS, Bundle
from attnforge.precision import precision_named

if TYPE_CHECKING:
    from torch import Tensor, nn


def points() -> list[PatchPoint]:
    """The grid, in order of worth."""
    order = [("fp16", 1), ("fp32", 1), ("fp16", 8), ("fp16", 64), ("fp32", 8), ("bf16", 1), ("bf16", 8), ("fp32", 64)]
    return [PatchPoint(precision, side, batch) for precision, batch in [*order, ("bf16", 64)] for side in SIDES]


def latency(device: Device) -> list[Task]:
    """Patch-attention over tokens, batch and precision, against torch's ways of running it."""
    grid = points()
    if device.settings.quick:
        grid = [p for p in grid if p.precision == "fp16" and p.batch <= 8 and p.side in (SIDES[0], SIDES[2])]
        device.leave_out("latency", [point.name for point in points() if point not in grid])
    return [(point.name, partial(_latency, device, point)) for point in grid]


def _latency(device: Device, point: PatchPoint, item: Item) -> None:
    large = large_of(device, patch_attention, point.precision)
    item.values |= {"tokens": point.tokens, "batch": point.batch, "precision": point.precision}
    with device.stream(), device.products(precision_named(point.precision)), ExitStack() as stack:
        images = point.images(device)
        truth = patch_truth(device, large, images, point)
        backends = device.usable(item)
        bundle = large.deploy(device.scratch("latency"), *point.shapes, targets_of(backends), item.failed)
        item.values |= {f"fused by {name}": count for name, count in bundle.manifest.attention.fused.items()}
        ways = sessions_of(device, stack, bundle, backends, images, point, item)
        if device.peers:
            ways |= peers_of(device, large.module, images, point)
        # torch's come last, because its allocator keeps the memory that it once had
        why_not = partial(why_too_large, device, point)
        race(device, item, ways, truth, point.batch, race_seconds(device), why_not)


def sessions_of(
    device: Device,
    stack: ExitStack,
    bundle: Bundle,
    backends: Sequence[str],
    images: Tensor,
    point: PatchPoint,
    item: Item,
) -> dict[str, Callable[[], OpenContender]]:
    """attnforge's contenders: every backend on what lies on the device, TensorRT at batch 1 on NumPy arrays too."""
    ways: dict[str, Callable[[], OpenContender]] = {}
    array = to_numpy("image", images)
    for backend in backends:
        if backend in item.failed:  # its plan could not be built
            continue
        ways[backend] = partial(in_session, device, stack, bundle, backend, [device.feed(images)])
        if device.peers and point.batch == 1 and (backend in FLAVOURS or not device.on_cuda):
            ways[f"{backend}, NumPy in and out"] = partial(in_session, device, stack, bundle, backend, [array])
    return ways


def peers_of(
    device: Device, module: nn.Module, images: Tensor, point: PatchPoint
) -> dict[str, Callable[[], OpenContender]]:
    """torch's ways of running the same module on the same images."""
    from attnforge.benchmarks.contenders.peers import using_sdpa

    torch = device.torch
    torch.compiler.reset()  # else it would stop compiling after some sizes

    def compiled(mode: str | None) -> OpenContender:
        run = torch.compile(module, dynamic=False, mode=mode)
        return OpenContender(lambda: run(images))

    def fused(images: Tensor) -> Tensor:
        with using_sdpa():
            result: Tensor = module(images)
        return result

    ways: dict[str, Callable[[], OpenContender]] = {COMPILE: lambda: compiled(None)}
    if point.batch == 1 and device.on_cuda and not device.settings.quick:
        ways = {GRAPHED: lambda: compiled("reduce-overhead"), **ways}
    ways[SDPA] = lambda: OpenContender(partial(fused, images))
    ways[EAGER] = lambda: OpenContender(partial(module, images))
    return ways


def why_too_large(device: Device, point: PatchPoint, name: str) -> str | None:
    """Why a contender that holds all scores is not tried, or None: it holds two of that size at once."""
    free = device.free()
    unfused = name in (EAGER, COMPILE, GRAPHED) or (is_ours(name) and point.precision == "fp32")
    if not unfused or free is None or 2 * point.score_bytes <= 0.6 * free:
        return None
    return (
        f"its scores alone are {point.score_bytes / 2**30:.0f} GiB, of which it holds two, and {free / 2**30:.0f} GiB "
        "of the device are free"
    )
