"""What the device can do at most: matrix products and copies."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from attnforge.benchmarks.gpu.bench import Bench
from attnforge.benchmarks.gpu.records import Item
from attnforge.benchmarks.gpu.running import Task
from attnforge.precision import precision_named


def ceilings(bench: Bench) -> list[Task]:
    """What the device can do at most: matrix products of every precision, and copies."""
    products = [(f"product {name}", partial(_product, bench, name)) for name in ("fp16", "bf16", "tf32", "fp32")]
    return [("copy", partial(_copy, bench)), *products]


def _product(bench: Bench, name: str, item: Item) -> None:
    torch, precision = bench.torch, precision_named(name)
    size = 8192 if bench.on_cuda else 128
    with bench.products(precision), bench.stream():
        a, b = (bench.to_device(torch.randn(size, size), precision) for _ in range(2))
        c = torch.empty_like(a)
        times = _repeated(bench, lambda: torch.mm(a, b, out=c))
    median = statistics.median(times)
    item.values |= {"size": size, "ms": median, "tflops": 2 * size**3 / median / 1e9}


def _copy(bench: Bench, item: Item) -> None:
    size = 2**31 if bench.on_cuda else 2**20
    with bench.stream():
        source = bench.torch.zeros(size, dtype=bench.torch.uint8, device=bench.device)
        target = bench.torch.empty_like(source)
        times = _repeated(bench, lambda: target.copy_(source))
    median = statistics.median(times)
    item.values |= {"bytes": 2 * size, "ms": median, "gb_per_s": 2 * size / median / 1e6}


def _repeated(bench: Bench, call: Callable[[], Any]) -> list[float]:
    for _ in range(3):
        call()
    bench.sync()
    return [bench.device_ms(call, 0.1) for _ in range(10)]
