"""Models of real size, compared with torch's ways of running them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from attnforge.model.registry import Example
from attnforge.precision import precision_named
from benchmarks.gpu.device import Device
from benchmarks.gpu.models import Large, large_of, truth_of
from benchmarks.gpu.racing import in_session, race
from benchmarks.gpu.running import Task
from benchmarks.gpu.steps import SDPA, Item
from benchmarks.gpu.timings import feeds_of, peers_of, sessions
from benchmarks.published import Published

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
            states: Tensor = self.model(*(tensor for tensor in (inputs, mask) if tensor is not None))[
                "last_hidden_state"
            ]
            return states

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
        sizes = {"batch": batch, "tokens": TOKENS}
        ways, bundles = sessions(device, stack, large, sizes, inputs, item)
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
