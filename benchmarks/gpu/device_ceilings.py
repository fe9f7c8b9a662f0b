"""What the device can do at most, in matrix products and copies: what times are held against."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from attnforge.benchmarks.gpu.device import Device
from attnforge.benchmarks.gpu.running import Task
from attnforge.benchmarks.gpu.steps import Item
from attnforge.benchmarks.measure.limits import best_rate
from attnforge.precision import precision_named

SECONDS = 0.3
"""For each ceiling."""


def ceilings(device: Device) -> list[Task]:
    """A copy, and matrix products of every precision."""
    products = [(f"product {name}", partial(_product, device, name)) for name in ("fp16", "bf16", "tf32", "fp32")]
    return [("copy", partial(_copy, device)), *products]


def _product(device: Device, name: str, item: Item) -> None:
    torch, precision = device.torch, precision_named(name)
    size = 8192 if device.on_cuda else 128
    with device.products(precision), device.stream():
        a, b = (device.to_device(torch.randn(size, size), precision) for _ in range(2))
        c = torch.empty_like(a)
        rate = _best_rate(device, lambda: torch.mm(a, b, out=c), 2 * size**3)
    item.values |= {"size": size, "tflops": rate / 1e12}


def _copy(device: Device, item: Item) -> None:
    size = 2**31 if device.on_cuda else 2**20
    with device.stream():
        source = device.torch.zeros(size, dtype=device.torch.uint8, device=device.name)
        target = device.torch.empty_like(source)
        rate = _best_rate(device, lambda: target.copy_(source), 2 * size)
    item.values |= {"bytes": 2 * size, "gb_per_s": rate / 1e9}


def _best_rate(device: Device, call: Callable[[], Any], amount: int) -> float:
    """The best amount a second on the device, of calls that each do `amount`."""
    for _ in range(3):
        call()
    device.sync()
    return best_rate(lambda: device.device_ms(call, 0.1) / 1e3, amount, SECONDS)
