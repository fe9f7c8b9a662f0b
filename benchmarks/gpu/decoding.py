"""Prompts and steps of a decoder of about 100 million parameters, compared with transformers' static cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial

import torch
from torch import Tensor, nn

from attnforge.arrays import Array, to_numpy
from attnforge.bench.contenders.decoding.in_torch import OfTransformers, language_model_in
from attnforge.bench.contenders.decoding.stepper import OfDecoder, Stepper
from attnforge.bundle import Bundle
from attnforge.export.deploy import deploy
from attnforge.precision import precision_named
from attnforge.runtime.backends.eager import at_precision, doubled
from attnforge.runtime.backends.registry import ON_GPU, STEPPING
from attnforge.runtime.session import load
from benchmarks.experiments.decoding import CACHE_TOKENS, SIZES
from benchmarks.gpu.device import Device
from benchmarks.gpu.models import targets_of, truth_of
from benchmarks.gpu.racing import WARM_UP, OpenContender, race
from benchmarks.gpu.running import Task
from benchmarks.gpu.steps import COMPILE, EAGER, Item
from benchmarks.published import Published

PRECISION, BATCHES, CONTEXTS, PROMPTS = "fp16", (1, 8), (128, 1024), (16, 256, 1024)

OPTIONS = {"inputs": "input_ids", "batch": "2", "max_batch": str(max(BATCHES)), "tokens": "128", "max_tokens": "256"}

BACKENDS = [name for name in ON_GPU if name in STEPPING]

CHECKED = WARM_UP + 1
"""The calls whose answers may be checked, which therefore all start from the same tokens."""


def decoding(device: Device) -> list[Task]:
    """Return tasks for one token after others, and for prompts."""
    steps = [
        (f"{batch} × 1 token after {context:,}", partial(_after, device, batch, context, 1))
        for batch in BATCHES
        for context in CONTEXTS
    ]
    prompts = [(f"a prompt of {tokens:,} tokens", partial(_after, device, 1, 0, tokens)) for tokens in PROMPTS]
    device.leave_out("decoding", [key for key, _ in [*steps[1:], *prompts[1:]]] if device.settings.quick else ())
    return [steps[0], prompts[0]] if device.settings.quick else [*steps, *prompts]


@cache
def _llama(device: Device) -> tuple[Bundle, nn.Module]:
    """Return the model with random weights, at the precision on the device, and its bundle; made once per process."""
    folder = device.scratch("decoder")
    module, args, shapes = Published("llama-100m", "decoder", "LlamaForCausalLM", SIZES, OPTIONS).example()
    backends = device.usable(Item(), BACKENDS)
    bundle = deploy(
        module, args, folder / "bundle", shapes, PRECISION, targets_of(backends), tune=False, cache=False,
        cache_tokens=CACHE_TOKENS,
    )  # fmt: skip
    return bundle, at_precision(module, precision_named(PRECISION)).to(device.name)


def _after(device: Device, batch: int, context: int, count: int, item: Item) -> None:
    """Time `count` tokens of each sample after `context` others."""
    precision = precision_named(PRECISION)
    bundle, module = _llama(device)
    with device.stream(), device.products(precision), ExitStack() as stack:
        shape, generator = (batch, context + count), torch.Generator().manual_seed(context)
        ids = device.to_device(torch.randint(SIZES["vocab_size"], shape, generator=generator), precision)
        tokens = to_numpy("tokens", ids)
        truth = truth_of(device, f"{count} after {context}", precision, _last(module), _last(doubled(module)), [ids])

        def ours(backend: str) -> OpenContender:
            session = stack.enter_context(load(bundle.path, backend, device=device.settings.device))
            (output,) = bundle.manifest.outputs
            stepper = OfDecoder(session.decoder(batch), output.name)
            return OpenContender(_extending(stepper, tokens, context), session, waits=True)

        def torchs(is_compiled: bool) -> OpenContender:
            stepper = OfTransformers(language_model_in(module), CACHE_TOKENS, is_compiled)
            return OpenContender(_extending(stepper, tokens, context), waits=True)

        backends = device.usable(item, BACKENDS)
        ways: dict[str, Callable[[], OpenContender]] = {name: partial(ours, name) for name in backends}
        if device.peers:
            ways |= {COMPILE: partial(torchs, True), EAGER: partial(torchs, False)}
        race(device, item, ways, truth, batch * count)


def _last(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The logits of the last token, without a cache."""

    def last(ids: Tensor) -> Tensor:
        logits: Tensor = module(ids)["logits"][:, -1]
        return logits

    return last


def _extending(stepper: Stepper, tokens: Array, context: int) -> Callable[[], Array]:
    """A call that appends the tokens after `context` to the caches. While answers may be checked, and when the caches
    are full, it goes back to the context first; this takes time, so other calls append to what is there."""
    new, calls = tokens[:, context:], 0
    if context:
        stepper.extend(tokens[:, :context])
    stepper.mark()
    fits = (CACHE_TOKENS - context) // new.shape[1]

    def call() -> Array:
        nonlocal calls
        if calls <= CHECKED or (calls - CHECKED) % fits == 0:
            stepper.rewind()
        calls += 1
        return stepper.extend(new)

    return call
