"""Attention alone, against torch's flash kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from attnforge.benchmarks.gpu.device import Device
from attnforge.benchmarks.gpu.large import large_of, targets_of, truth_of
from attnforge.benchmarks.gpu.racing import OpenContender, in_session, race, race_seconds
from attnforge.benchmarks.gpu.running import Task
from attnforge.benchmarks.gpu.steps import FLASH, HEAD, HEADS, PATCH, SIDES, Item
from attnforge.precision import precision_named

if TYPE_CHECKING:
    from torch import Tensor

    from attnforge.model.registry import Example


def attention(device: Device) -> list[Task]:
    """Attention of three heads and nothing else, against torch's flash kernel."""
    tokens = [(side // PATCH) ** 2 for side in SIDES]
    chosen = tokens[-1:] if device.settings.quick else tokens[::-1]
    device.leave_out("attention", [f"{count} tokens" for count in tokens if count not in chosen])
    return [(f"{count} tokens", partial(_attention, device, count)) for count in chosen]


def _attention(device: Device, tokens: int, item: Item) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    from attnforge.benchmarks.measure.work import work_of
    from attnforge.model.attention import attention as written_out

    torch, precision = device.torch, precision_named("fp16")
    large = large_of(device, attention_alone, "fp16")
    shape = (1, HEADS, tokens, HEAD)
    work = work_of(large.captured.model, {"tokens": tokens})
    item.values |= {"tokens": tokens, "batch": 1, "heads": HEADS, "head_size": HEAD, "precision": "fp16"}
    item.values |= {"flops": work.flops, "bytes": work.least_bytes}
    with device.stream(), ExitStack() as stack:
        generator = torch.Generator().manual_seed(tokens)
        inputs = [device.to_device(torch.randn(shape, generator=generator), precision) for _ in range(3)]
        plain = partial(written_out, scale=1 / math.sqrt(HEAD))
        truth = truth_of(device, f"{tokens} tokens", precision, plain, plain, inputs)
        backends = device.usable(item)
        bundle = large.deploy(
            device.scratch("attention"), [shape] * 3, shape, {"tokens": tokens}, targets_of(backends), item.failed
        )
        item.values |= {f"fused by {name}": count for name, count in bundle.manifest.attention.fused.items()}
        feeds = [device.feed(tensor) for tensor in inputs]
        ways: dict[str, Callable[[], OpenContender]] = {
            name: partial(in_session, device, stack, bundle, name, feeds)
            for name in backends
            if name not in item.failed
        }

        def flash() -> Any:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return scaled_dot_product_attention(inputs[0], inputs[1], inputs[2])

        if device.peers:
            ways[FLASH] = lambda: OpenContender(flash)
        else:
            item.skipped[FLASH] = "torch has no CUDA here"
        race(device, item, ways, truth, 1, race_seconds(device))


def attention_alone() -> Example:
    """Scaled dot-product attention of three heads over any number of tokens."""
    import torch
    from torch.export import Dim

    from attnforge.model.registry import Example

    class ScaledDotProductAttention(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    tokens = Dim("tokens", min=2, max=2**16)
    args = tuple(torch.randn(3, 1, HEADS, 48, HEAD, generator=torch.Generator().manual_seed(0)))
    return Example(ScaledDotProductAttention(), args, {name: {2: tokens} for name in ("query", "key", "value")})
