"""Small bundles to deploy and to alter, shared by many tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from attnforge.arrays import Array
from attnforge.bundle import MANIFEST, Bundle, Manifest, write_manifest
from attnforge.model import Example, build_model
from attnforge.model.registry import MAX_TOKENS

Deploy = Callable[[str, str], Bundle]
"""Deploys a registered model, by name and precision."""

DeploySmall = Callable[[str], Bundle]
"""Deploys the small model, by precision."""


MOST_TOKENS = 64
"""Maximum number of tokens of a registered model in the tests: float64 outputs take four times as long for twice as
many tokens."""


IN_FP32 = (
    "self-attention", "multi-head-self-attention", "parameter-free-attention", "patch-attention",
    "worked-example", "general-attention", "post-softmax-scale", "reshape-without-transpose",
)  # fmt: skip
"""The registered models that are also deployed in fp32; the first four have fused attention."""

IN_BF16 = ("multi-head-self-attention", "cross-attention")
"""The registered models that are also deployed in bf16."""


def example_of(name: str) -> Example:
    """Build a registered model; with smaller images, batches and token ranges where its own are
    large."""
    options: dict[str, dict[str, Any]] = {
        "patch-attention": {"image_size": 32, "max_image_size": 64},
        "patch-attention-digits": {"max_batch": 32},
    }
    module, args, shapes = build_model(name, **options.get(name, {}))
    fewer = {  # one Dim per name, which makes two dims equal
        dim.__name__: Dim(dim.__name__, min=dim.min, max=min(dim.max, MOST_TOKENS))
        for dims in (shapes or {}).values()
        for dim in (dims or {}).values()
        if dim.max == MAX_TOKENS
    }
    shorter = {
        of: dims and {axis: fewer.get(dim.__name__, dim) for axis, dim in dims.items()}
        for of, dims in (shapes or {}).items()
    }
    return Example(module, args, shorter if shapes else None)


class Small(nn.Module):
    """Two heads that attend from `x` to a padded memory of an even length, plus integers that are added: every
    kind of input."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.memory = nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor, kinds: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (2, 8)).transpose(1, 2)  # (B, 2, n, 8)
        key, value = self.memory(memory).unflatten(-1, (2, 16)).transpose(1, 2).chunk(2, dim=-1)
        scores = query @ key.transpose(-2, -1) / math.sqrt(8)
        weights = scores.masked_fill(padding[:, None, None, :], -math.inf).softmax(-1)
        context: Tensor = weights.masked_fill(padding.all(-1)[:, None, None, None], 0.0) @ value
        return context.transpose(1, 2).flatten(2) + kinds.to(x.dtype)  # (B, n, 16)


def small_example() -> Example:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = Small()
        padding = torch.zeros(2, 6, dtype=torch.bool)
        padding[1, 4:] = True
        args = (torch.randn(2, 5, 16), torch.randn(2, 6, 16), padding, torch.randint(-2, 3, (16,)))
    batch, tokens, pairs = Dim("batch", min=1, max=4), Dim("tokens", min=2, max=9), Dim("pairs", min=1, max=6)
    shapes = {
        "x": {0: batch, 1: tokens},
        "memory": {0: batch, 1: 2 * pairs},
        "padding": {0: batch, 1: 2 * pairs},
        "kinds": None,
    }
    return Example(module, args, shapes)


def small_inputs(batch: int = 3, tokens: int = 4, length: int = 8, seed: int = 0) -> dict[str, Array]:
    """Return inputs of :class:`Small`, by name."""
    rng = np.random.default_rng(seed)
    padding = np.zeros((batch, length), bool)
    padding[0, 2:] = True
    return {
        "x": rng.standard_normal((batch, tokens, 16), np.float32),
        "memory": rng.standard_normal((batch, length, 16), np.float32),
        "padding": padding,
        "kinds": rng.integers(-2, 3, 16),
    }


def rewrite(folder: Path, change: Callable[[Manifest], object] = lambda manifest: None) -> Bundle:
    """Change a bundle's manifest, and update the sha256 sums to the current files."""
    manifest = Manifest.model_validate_json((folder / MANIFEST).read_text(encoding="utf-8"))
    (folder / MANIFEST).unlink()
    change(manifest)
    write_manifest(folder, manifest)
    return Bundle(folder)
