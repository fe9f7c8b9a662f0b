"""An eager module at a precision: what the deployed one is held against. The runtime imports this only to run eager."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnforge.arrays import Array, to_torch
from attnforge.errors import CaptureError
from attnforge.precision import Precision


def torch_dtype(precision: Precision) -> torch.dtype:
    dtype = getattr(torch, precision.dtype.name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def at_precision(module: nn.Module, precision: Precision) -> nn.Module:
    """A copy of `module` in eval mode with its floating-point weights in the precision's dtype."""
    try:
        copied = copy.deepcopy(module)
    except Exception as error:
        raise CaptureError(f"{type(module).__name__} cannot be copied: {first_line(error)}") from error
    return copied.eval().requires_grad_(False).to(torch_dtype(precision))


def in_float64(module: nn.Module) -> nn.Module:
    """A copy of `module` with the same weights widened to float64."""
    return copy.deepcopy(module).double()


def run(module: nn.Module, inputs: Mapping[str, Array], dtype: torch.dtype) -> dict[str, Tensor]:
    """Run a module on arrays, floating-point ones as `dtype`, without gradients; outputs by name."""
    tensors: list[Tensor] = [to_torch(array) for array in inputs.values()]
    # torch's fused attention on the CPU takes a float32 mask for a float64 one, and misreads it.
    plain = sdpa_kernel(SDPBackend.MATH) if dtype == torch.float64 else nullcontext()
    with torch.no_grad(), as_written(), plain:
        try:
            return named_outputs(module(*(t.to(dtype) if t.is_floating_point() else t for t in tensors)))
        except RuntimeError as error:
            kind = str(dtype).removeprefix("torch.")
            raise CaptureError(
                f"{type(module).__name__} does not run in {kind}: {first_line(error)}; tensors that it makes itself "
                "have to be of its inputs' dtype"
            ) from error


@contextmanager
def as_written() -> Iterator[None]:
    """torch.nn's own modules compute as their code says, not by a fused shortcut, which is not what is exported.

    The two differ for a query that may attend to nothing: NaN, and zeros.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def named_outputs(result: Any) -> dict[str, Tensor]:
    """What a module returned, by the names that its deployed outputs have."""
    return dict(zip(output_names(result), _tensors(result), strict=True))


def _tensors(result: Any) -> list[Tensor]:
    items = [result] if isinstance(result, Tensor) else list(result.values() if isinstance(result, Mapping) else result)
    if not items or not all(isinstance(item, Tensor) for item in items):
        raise CaptureError("the module must return a tensor, or a tuple, list or dict of tensors")
    return items


def output_names(result: Any) -> list[str]:
    if isinstance(result, Mapping):
        return [str(key) for key in result]
    count = len(_tensors(result))
    return ["output"] if count == 1 else [f"output_{i}" for i in range(count)]


def first_line(error: BaseException) -> str:
    """What torch says first, without colours."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in str(error).splitlines()]
    return next((line for line in lines if line and not line.startswith("Failed to export")), type(error).__name__)
