"""Peers in torch: transformers' models with a static or growing cache, attnforge's decoder with its cache, and the step
of either through `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from attnforge.arrays import Array, to_numpy, to_torch
from attnforge.bench.contenders.decoding.stepper import Marking, Stepper
from attnforge.bench.contenders.peers import PeerJob
from attnforge.errors import UnavailableError
from attnforge.model.decoder import Decoder
from attnforge.runtime.backends.eager import as_written


def compiled_static(job: PeerJob, stack: ExitStack) -> Stepper:
    """:func:`eager_static` with steps of one token through `torch.compile`; prompts run in eager mode."""
    return eager_static(job, stack, is_compiled=True)


def eager_dynamic(job: PeerJob, stack: ExitStack) -> Stepper:
    """A model of transformers with the default cache of its `generate`, which grows by concatenation."""
    model = language_model_in(job.torch_module())
    if model is None:
        raise UnavailableError("its module is not a model of transformers, which this growing cache needs")
    return OfTransformers(model, None, is_compiled=False)


def eager_static(job: PeerJob, stack: ExitStack, is_compiled: bool = False) -> Stepper:
    """The module step by step, with a cache of the bundle's capacity that it updates in place."""
    module = job.torch_module()
    if isinstance(module, Decoder):
        return OfAttnforge(module, job.batch, job.decoding.places, is_compiled)
    if (model := language_model_in(module)) is not None:
        return OfTransformers(model, job.decoding.places, is_compiled)
    raise UnavailableError("its module has no step with a cache: it is neither transformers' nor attnforge's decoder")


def language_model_in(module: nn.Module) -> Any:
    """Return the outermost language model of transformers in a module, or None."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return None
    return next((part for part in module.modules() if isinstance(part, PreTrainedModel)), None)


class OfTransformers:
    """A language model of transformers with a cache of its own.

    Args:
        model: model of transformers, with a language-model head.
        capacity: capacity of a static cache; None for a growing cache.
        is_compiled: whether steps of one token run through `torch.compile`.
    """

    def __init__(self, model: Any, capacity: int | None, is_compiled: bool) -> None:
        self._model, self._capacity = model, capacity
        self._step: Callable[..., Any] = torch.compile(model.forward, dynamic=False) if is_compiled else model
        self._marks: list[dict[str, Any]] = []
        self.reset()

    def reset(self) -> None:
        from transformers import DynamicCache, StaticCache

        config = self._model.config
        if self._capacity is None:
            self._cache: Any = DynamicCache(config=config)
        elif not hasattr(self, "_cache"):
            self._cache = StaticCache(config=config, max_cache_len=self._capacity)
        else:  # its memory stays: compiled code refers to its address
            self._cache.reset()

    def extend(self, tokens: Array) -> Array:
        run, ids = self._step if tokens.shape[1] == 1 else self._model, to_torch(tokens).to(self._model.device)
        with torch.no_grad(), as_written():
            # the head runs on the last token only, as in its `generate`
            result = run(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        return to_numpy("logits", result.logits[:, -1])

    def mark(self) -> None:
        self._marks = [
            {name: _kept(value, name, type(layer).__name__) for name, value in vars(layer).items()}
            for layer in self._cache.layers
        ]

    def rewind(self) -> None:
        for layer, mark in zip(self._cache.layers, self._marks, strict=True):
            for name, value in mark.items():
                now = getattr(layer, name)
                if not isinstance(value, Tensor) or now.shape != value.shape:
                    setattr(layer, name, value)
                elif now is not value:
                    now.copy_(value)


def _kept(value: Any, name: str, layer: str) -> Any:
    """Return what a mark keeps of a cache. Rows of a whole static layer beyond its length are masked, and those of a
    growing layer are never overwritten: neither is copied."""
    is_whole = layer in ("StaticLayer", "DynamicLayer") and name in ("keys", "values")
    return value.clone() if isinstance(value, Tensor) and not is_whole else value


class OfAttnforge(Marking[int]):
    """:class:`attnforge.model.decoder.Decoder` with its cache; its state is the length of all rows."""

    def __init__(self, module: Decoder, batch: int, capacity: int, is_compiled: bool) -> None:
        super().__init__(0)
        self._module, self._batch = module, batch
        self._cache = module.empty_cache(batch, min(capacity, module.sizes.max_tokens))
        self._logits = torch.compile(module.logits, dynamic=False) if is_compiled else None

    def extend(self, tokens: Array) -> Array:
        ids = to_torch(tokens)
        past, count = torch.full((self._batch,), self._now), ids.shape[1]
        with torch.no_grad(), as_written():
            if self._logits is not None and count == 1:
                logits = self._logits(ids, past[:, None], self._cache)
            else:
                logits = self._module.step(ids, past, self._cache)
        self._now += count
        return to_numpy("logits", logits[:, -1])
