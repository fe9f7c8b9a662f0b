"""Attention alone, against torch's flash kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from attnforge.benchmarks.gpu.bench import Bench
from attnforge.benchmarks.gpu.contenders import Opened, enter, in_session, race, race_seconds
from attnforge.benchmarks.gpu.large import large_of, targets_of, truth_of
from attnforge.benchmarks.gpu.records import FLASH, HEAD, HEADS, PATCH, SIDES, Item
from attnforge.benchmarks.gpu.running import Task
from attnforge.precision import precision_named

if TYPE_CHECKING:
    from torch import Tensor

    from attnforge.model.registry import Example


def attention(bench: Bench) -> list[Task]:
    """Attention of three heads and nothing else, against torch's flash kernel."""
    tokens = [(side // PATCH) ** 2 for side in SIDES]
    chosen = tokens[-1:] if bench.settings.quick else tokens[::-1]
    bench.leave_out("attention", [f"{count} tokens" for count in tokens if count not in chosen])
    return [(f"{count} tokens", partial(_attention, bench, count)) for count in chosen]


def _attention(bench: Bench, tokens: int, item: Item) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    from attnforge.model.attention import attention as written_out

    torch, precision = bench.torch, precision_named("fp16")
    large = large_of(bench, attention_alone, "fp16")
    shape = (1, HEADS, tokens, HEAD)
    item.values |= {"tokens": tokens, "batch": 1, "heads": HEADS, "head_size": HEAD, "precision": "fp16"}
    with bench.stream(), ExitStack() as stack:
        generator = torch.Generator().manual_seed(tokens)
        inputs = [bench.to_device(torch.randn(shape, generator=generator), precision) for _ in range(3)]
        plain = partial(written_out, scale=1 / math.sqrt(HEAD))
        truth = truth_of(bench, f"{tokens} tokens", precision, plain, plain, inputs)
        backends = bench.usable(item)
        bundle = large.deploy(
            bench.scratch("attention"), [shape] * 3, shape, {"tokens": tokens}, targets_of(backends), item.failed
        )
        item.values |= {f"fused by {name}": count for name, count in bundle.manifest.attention.fused.items()}
        feeds = [bench.feed(tensor) for tensor in inputs]
        ways: dict[str, Callable[[], Opened]] = {
            name: partial(in_session, bench, stack, bundle, name, feeds) for name in backends if name not in item.failed
        }

        def flash() -> Any:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return scaled_dot_product_attention(inputs[0], inputs[1], inputs[2])

        if bench.peers:
            ways[FLASH] = lambda: Opened(flash)
        else:
            item.skipped[FLASH] = "torch has no CUDA here"
        entered = {name: enter(bench, item, name, make, truth) for name, make in ways.items()}
        race(bench, item, {name: one for name, one in entered.items() if one is not None}, 1, race_seconds(bench))


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
