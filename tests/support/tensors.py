"""Random tensors and modules in float64, and comparisons of results."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor, nn


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


Module = TypeVar("Module", bound=nn.Module)


def randomized(module: Module) -> Module:
    """Convert to float64 and eval mode, with random parameters: initial biases of 0 and norms of 1 hide mistakes."""
    with torch.no_grad():
        for parameter in module.double().eval().parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) / math.sqrt(parameter.shape[-1]))
    return module


def agree(given: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(given, expected, rtol=0, atol=atol)


def differ(a: Tensor, b: Tensor) -> bool:
    return (a - b).abs().max().item() > 1e-3
