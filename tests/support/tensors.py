"""Random tensors and modules in float64, and how two results compare."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor, nn


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


Module = TypeVar("Module", bound=nn.Module)


def randomized(module: Module) -> Module:
    """In float64 and eval mode, all parameters random: biases and norms start at 0 and 1, which hides mistakes."""
    with torch.no_grad():
        for parameter in module.double().eval().parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) / math.sqrt(parameter.shape[-1]))
    return module


def agree(given: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(given, expected, rtol=0, atol=atol)


def differ(a: Tensor, b: Tensor) -> bool:
    return (a - b).abs().max().item() > 1e-3
