"""Timings on the device: ceilings, attention alone compared with torch's flash kernel, patch-attention and published
models compared with torch's ways of running them, and the overhead of a session."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attnforge.arrays import to_numpy
from attnforge.bench.contenders.peers import using_sdpa
from attnforge.bench.limits import best_rate
from attnforge.bench.limits.work import work_of
from attnforge.bundle import FLAVOURS, Bundle
from attnforge.model.attention import attention as decomposed
from attnforge.model.registry import Example
from attnforge.precision import precision_named
from attnforge.runtime.race import seconds_of
from attnforge.runtime.session import load
from benchmarks.gpu.device import Device
from benchmarks.gpu.models import (
    Large,
    PatchPoint,
    large_of,
    patch_attention,
    patch_truth,
    target_of,
    targets_of,
    truth_of,
)
from benchmarks.gpu.racing import OpenContender, Ways, in_session, mib, race
from benchmarks.gpu.running import LEAST, Task
from benchmarks.gpu.steps import COMPILE, EAGER, FLASH, HEADS, PATCH, SIDES, Item, ParityCheck, is_ours  # fmt: skip
from benchmarks.published import Published

WIDTH, HEAD = 192, 64
"""Further sizes of the registered patch-attention."""

SDPA, GRAPHED = "torch eager, SDPA", "torch.compile, CUDA graphs"

CEILING_SECONDS = 0.3
"""Seconds for each ceiling."""


# --- ceilings ---------------------------------------------------------------------------------------------------------


def ceilings(device: Device) -> list[Task]:
    """Return tasks for a copy, and for matrix products of every precision."""
    products = [(f"product {name}", partial(_product, device, name)) for name in ("fp16", "bf16", "tf32", "fp32")]
    return [("copy", partial(_copy, device)), *products]


def _product(device: Device, name: str, item: Item) -> None:
    precision = precision_named(name)
    size = 8192 if device.on_cuda else 128
    with device.products(precision), device.stream():
        a, b = (device.to_device(torch.randn(size, size), precision) for _ in range(2))
        c = torch.empty_like(a)
        rate = _best_rate(device, lambda: torch.mm(a, b, out=c), 2 * size**3)
    item.values |= {"size": size, "tflops": rate / 1e12}


def _copy(device: Device, item: Item) -> None:
    size = 2**31 if device.on_cuda else 2**20
    with device.stream():
        source = torch.zeros(size, dtype=torch.uint8, device=device.name)
        target = torch.empty_like(source)
        rate = _best_rate(device, lambda: target.copy_(source), 2 * size)
    item.values["gb_per_s"] = rate / 1e9


def _best_rate(device: Device, call: Callable[[], Any], amount: int) -> float:
    """Return the best rate of a call on the device, in `amount` per second."""
    for _ in range(3):
        call()
    device.sync()
    return best_rate(lambda: device.device_ms(call, 0.1) / 1e3, amount, CEILING_SECONDS)


# --- models -----------------------------------------------------------------------------------------------------------


def sessions(
    device: Device, stack: ExitStack, model: Large, sizes: Mapping[str, int], inputs: Sequence[Tensor], item: Item
) -> tuple[Ways, dict[str, Bundle]]:
    """Return the model on every backend that runs here and whose plan could be built, with inputs on the device; and
    the bundle of each."""
    backends = device.usable(item)
    of_target = {
        target: model.deploy(device.scratch("timed"), sizes, [target], item) for target in targets_of(backends)
    }
    bundles = {name: of_target[target_of(name)] for name in backends if target_of(name) not in item.failed}
    ways: Ways = {
        name: partial(in_session, device, stack, bundle, name, feeds_of(device, bundle, inputs))
        for name, bundle in bundles.items()
    }
    return ways, bundles


def feeds_of(device: Device, bundle: Bundle, inputs: Sequence[Tensor]) -> list[Any]:
    """Return a bundle's inputs, integers in its own type."""
    specs = bundle.manifest.inputs
    return [
        device.feed(tensor if tensor.is_floating_point() else tensor.to(getattr(torch, spec.dtype)))
        for spec, tensor in zip(specs, inputs, strict=True)
    ]


# --- attention alone --------------------------------------------------------------------------------------------------


def attention(device: Device) -> list[Task]:
    """Return tasks for attention of three heads only, compared with torch's flash kernel."""
    tokens = [(side // PATCH) ** 2 for side in SIDES]
    chosen = tokens[-1:] if device.settings.quick else tokens[::-1]
    device.leave_out("attention", [f"{count} tokens" for count in tokens if count not in chosen])
    return [(f"{count} tokens", partial(_attention, device, count)) for count in chosen]


def _attention(device: Device, tokens: int, item: Item) -> None:
    precision = precision_named("fp16")
    large = large_of(device, attention_alone, "fp16")
    shape = (1, HEADS, tokens, HEAD)
    work = work_of(large.captured.model, {"tokens": tokens})
    item.values |= {"tokens": tokens, "flops": work.flops, "bytes": work.least_bytes}
    with device.stream(), ExitStack() as stack:
        generator = torch.Generator().manual_seed(tokens)
        inputs = [device.to_device(torch.randn(shape, generator=generator), precision) for _ in range(3)]
        plain = partial(decomposed, scale=1 / math.sqrt(HEAD))
        truth = truth_of(device, f"{tokens} tokens", precision, plain, plain, inputs)
        ways, _ = sessions(device, stack, large, {"tokens": tokens}, inputs, item)

        def flash() -> Any:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return scaled_dot_product_attention(inputs[0], inputs[1], inputs[2])

        if device.peers:
            ways[FLASH] = lambda: OpenContender(flash)
        else:
            item.skipped[FLASH] = "torch has no CUDA here"
        race(device, item, ways, truth, 1)


def attention_alone() -> Example:
    """Return scaled dot-product attention of three heads over any number of tokens."""

    class ScaledDotProductAttention(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return scaled_dot_product_attention(query, key, value)

    tokens = Dim("tokens", min=2, max=2**16)
    args = tuple(torch.randn(3, 1, HEADS, 48, HEAD, generator=torch.Generator().manual_seed(0)))
    return Example(ScaledDotProductAttention(), args, {name: {2: tokens} for name in ("query", "key", "value")})


# --- patch-attention --------------------------------------------------------------------------------------------------


def points() -> list[PatchPoint]:
    """Return the grid, in order of importance."""
    order = [("fp16", 1), ("fp32", 1), ("fp16", 8), ("fp16", 64), ("fp32", 8), ("bf16", 1), ("bf16", 8), ("fp32", 64)]
    return [PatchPoint(precision, side, batch) for precision, batch in [*order, ("bf16", 64)] for side in SIDES]


def latency(device: Device) -> list[Task]:
    """Return tasks for patch-attention over tokens, batch and precision, compared with torch."""
    grid = points()
    if device.settings.quick:
        grid = [p for p in grid if p.precision == "fp16" and p.batch <= 8 and p.side in (SIDES[0], SIDES[2])]
        device.leave_out("latency", [point.name for point in points() if point not in grid])
    return [(point.name, partial(_latency, device, point)) for point in grid]


def _latency(device: Device, point: PatchPoint, item: Item) -> None:
    large = large_of(device, patch_attention, point.precision)
    with device.stream(), device.products(precision_named(point.precision)), ExitStack() as stack:
        images = point.images(device)
        truth = patch_truth(device, large, images, point)
        ways, bundles = sessions(device, stack, large, point.sizes, [images], item)
        if device.peers and point.batch == 1:
            array = to_numpy("image", images)
            for name in [name for name in ways if name in FLAVOURS or not device.on_cuda]:
                ways[f"{name}, NumPy in and out"] = partial(in_session, device, stack, bundles[name], name, [array])
        if device.peers:
            ways |= peers_of(device, large.module, [images], point.batch)
        # torch's contenders come last, because its allocator keeps memory that it has used once
        race(device, item, ways, truth, point.batch, partial(why_too_large, device, point))


def peers_of(device: Device, module: nn.Module, inputs: Sequence[Tensor], batch: int) -> Ways:
    """Return torch's ways of running the same module on the same inputs of `batch` samples."""
    torch.compiler.reset()  # otherwise it stops compiling after a number of sizes

    def compiled(mode: str | None) -> OpenContender:
        run = torch.compile(module, dynamic=False, mode=mode)
        return OpenContender(lambda: run(*inputs))

    def fused() -> Tensor:
        with using_sdpa():
            result: Tensor = module(*inputs)
        return result

    ways: Ways = {COMPILE: lambda: compiled(None)}
    if batch == 1 and device.on_cuda and not device.settings.quick:
        ways = {GRAPHED: lambda: compiled("reduce-overhead"), **ways}
    ways[SDPA] = lambda: OpenContender(fused)
    ways[EAGER] = lambda: OpenContender(partial(module, *inputs))
    return ways


def why_too_large(device: Device, point: PatchPoint, name: str) -> str | None:
    """Return why a contender that materialises the scores, twice at a time, is not tried, or None."""
    free = device.free()
    unfused = name in (EAGER, COMPILE, GRAPHED) or (is_ours(name) and point.precision == "fp32")
    if not unfused or free is None or 2 * point.score_bytes <= 0.6 * free:
        return None
    return (
        f"it materialises the scores twice, {point.score_bytes / 2**30:.0f} GiB each, and {free / 2**30:.0f} GiB of "
        "the device are free"
    )


# --- overhead of a session --------------------------------------------------------------------------------------------


def overhead(device: Device) -> list[Task]:
    """Return tasks for calls in several ways, calls from threads, and loads, with the first two backends here."""
    kinds = {"one call": _one_call, "threads": _threads, "loads": _loads}
    backends = device.usable(Item(), (*FLAVOURS, "onnxruntime-cuda"))[:2]
    return [(f"{backend}: {kind}", partial(do, device, backend)) for backend in backends for kind, do in kinds.items()]


@cache
def _prepared(device: Device, backend: str) -> tuple[Bundle, Large, PatchPoint]:
    """Return patch-attention of 196 tokens in fp16, deployed for a backend."""
    point, item = PatchPoint("fp16", SIDES[0], 1), Item()
    large = large_of(device, patch_attention, point.precision)
    bundle = large.deploy(device.scratch("overhead"), point.sizes, targets_of([backend]), item)
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
        ways: Ways = {
            backend: partial(opened, [feed]),
            f"{backend}, graphs=False": partial(opened, [feed], graphs=False),
            f"{backend}, NumPy in and out": partial(opened, [array]),
            f"{backend}, NumPy in and out, graphs=False": partial(opened, [array], graphs=False),
        }
        if device.peers:
            target = torch.empty(1, point.tokens, WIDTH, dtype=images.dtype, device=device.name)
            ways[f"{backend}, out given"] = partial(opened, [feed], out=target)
        race(device, item, ways, truth, 1)


def _threads(device: Device, backend: str, item: Item) -> None:
    """Call one session from several threads, each with its own stream and images; every answer is checked."""
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
    """Load repeatedly with one call each; the device's free memory before and after shows what loads leak."""
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


# --- published models of real size ------------------------------------------------------------------------------------


PRECISION, BATCHES, TOKENS = "fp16", (1, 8), 128


def bert_base() -> Example:
    """Return BERT-base of 128 tokens with an attention mask."""
    return _states("BertModel", inputs="input_ids,attention_mask", tokens=TOKENS)


def vit_base() -> Example:
    """Return ViT-B/16 of images of 224 × 224 pixels, which are 197 tokens."""
    return _states("ViTModel")


MODELS: dict[str, Callable[[], Example]] = {"BERT-base": bert_base, "ViT-B/16": vit_base}


def _states(architecture: str, **options: str | int) -> Example:
    """Return an architecture of transformers with random weights, whose output is the states of its last layer."""
    model, args, shapes = Published(architecture, "encoder", architecture).example(**options)

    class LastStates(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
            result = self.model(*(tensor for tensor in (inputs, mask) if tensor is not None))
            return result["last_hidden_state"]  # type: ignore[no-any-return]

    return Example(LastStates(), args, dict(zip(("inputs", "mask"), (shapes or {}).values(), strict=False)))


def published(device: Device) -> list[Task]:
    """Return tasks for each model and number of samples."""
    return [
        (f"{name}, {PRECISION}, batch {batch}", partial(_published, device, make, batch))
        for name, make in MODELS.items()
        for batch in BATCHES
    ]


def _published(device: Device, make: Callable[[], Example], batch: int, item: Item) -> None:
    precision = precision_named(PRECISION)
    large = large_of(device, make, PRECISION)
    with device.stream(), device.products(precision), ExitStack() as stack:
        inputs = _inputs(device, large, batch)
        truth = truth_of(device, make.__name__, precision, large.module, large.exact, inputs)
        ways, bundles = sessions(device, stack, large, {"batch": batch, "tokens": TOKENS}, inputs, item)
        if (bundle := bundles.get(name := "onnxruntime-cuda")) is not None:
            feeds = feeds_of(device, bundle, inputs)
            ways[f"{name}, graphs=True"] = partial(in_session, device, stack, bundle, name, feeds, graphs=True)
        if device.peers:
            ways |= peers_of(device, large.module, inputs, batch)
            del ways[SDPA]  # which is what these models use anyway
        race(device, item, ways, truth, batch)


def _inputs(device: Device, large: Large, batch: int) -> list[Tensor]:
    """Return inputs on the device: random images, or sentences of other lengths in each sample."""
    inputs = []
    for spec, example in zip(large.captured.inputs, large.captured.args, strict=True):
        if spec.name == "mask":
            lengths = torch.tensor([[TOKENS - 12 * i] for i in range(batch)])
            tensor = (torch.arange(TOKENS) < lengths).to(example.dtype)
        elif example.is_floating_point():
            tensor = torch.randn((batch, *example.shape[1:]), generator=torch.Generator().manual_seed(batch))
        else:
            tensor = torch.cat([example[:1].roll(i, -1) for i in range(batch)])
        inputs.append(device.to_device(tensor, large.captured.precision))
    return inputs
