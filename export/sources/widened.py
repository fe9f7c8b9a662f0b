"""A torch module in float64, with the weights that it has: the truth that errors are measured against.

Nothing is copied: a dispatch mode widens every operator's operands as the operator runs, so a model of a billion
parameters needs no second, doubled copy. What code casts to another floating-point type on the way stays float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from attnforge.arrays import Array, is_floating
from attnforge.errors import CaptureError
from attnforge.runtime.backends.eager import doubled, run

WIDE: Mapping[torch.dtype, torch.dtype] = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
"""The types that are widened, and to which."""

LEAST = {torch.finfo(dtype).min for dtype in (torch.float16, torch.bfloat16, torch.float32)}
"""Numbers that stand for minus infinity in code that was written, or exported, for a narrower type."""

KEPT = 1 << 30
"""Bytes of widened parameters that stay for the next operator and the next run; of others they are made anew."""

SCORES = 1 << 24
"""Scores of attention that are in memory at a time: 128 MiB."""


class Float64:
    """A module's answers in float64, with the weights that it has.

    Code that compares its inputs' type with its weights' refuses to be widened operator by operator; such a module is
    copied, and the copy's weights are doubled.

    Args:
        module: is not touched.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = _Parameters()
        self._doubled = False

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Tensor]:
        """The outputs by the names that they have in a bundle.

        Args:
            inputs: in the order of the module's arguments.

        Raises:
            CaptureError: the module does not run in float64, or does not return tensors.
        """
        inputs = {name: a.astype(np.float64) if is_floating(a) else a for name, a in inputs.items()}
        if not self._doubled:
            try:
                with self._widening():
                    return run(self._module, inputs, torch.float64)
            except CaptureError:
                self._module, self._doubled = doubled(self._module), True
                self._parameters = _Parameters()
        with _wide_by_default():
            return run(self._module, inputs, torch.float64)

    @contextmanager
    def _widening(self) -> Iterator[None]:
        with _wide_by_default(), _Widen(self._parameters):
            yield


@contextmanager
def _wide_by_default() -> Iterator[None]:
    """Let numbers that code makes without naming a type be float64, and compute attention without torch's fused
    kernels, so that the truth shares none with eager."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Attention(), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.set_default_dtype(before)


class _Parameters:
    """The parameters that stay widened from one run to the next, up to :data:`KEPT` bytes."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._bytes = 0

    def widened(self, parameter: Tensor) -> Tensor:
        if id(parameter) in self._tensors:
            return self._tensors[id(parameter)][1]
        wide = parameter.to(WIDE[parameter.dtype])
        if self._bytes + wide.nbytes <= KEPT:
            self._tensors[id(parameter)] = parameter, wide
            self._bytes += wide.nbytes
        return wide


class _Widen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operator on widened operands, with the types that it names widened.

    Tensors that a module keeps outside its parameters, such as a cache, are widened once a block, so that what one
    operator writes to them in place, the next one reads; the module's own stay as they were.
    """

    def __init__(self, parameters: _Parameters) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = parameters
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(self._wide, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _wide(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self._tensor(argument) if argument.dtype in WIDE else argument
        if isinstance(argument, torch.dtype):
            return WIDE.get(argument, argument)
        if isinstance(argument, float) and argument in LEAST:
            return torch.finfo(torch.float64).min
        return argument

    def _tensor(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return self._parameters.widened(tensor)
        if id(tensor) not in self._kept:
            self._kept[id(tensor)] = tensor, tensor.to(WIDE[tensor.dtype])
        return self._kept[id(tensor)][1]


class _Attention(TorchFunctionMode):
    """Computes scaled dot-product attention for a block of queries at a time, so that not all scores are in memory."""

    FUNCTIONS = (nn.functional.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_attention if func in self.FUNCTIONS else func)(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """torch's scaled dot-product attention, some rows of queries at a time; causal ones see the keys so far alone."""
    sdpa = nn.functional.scaled_dot_product_attention
    query, key, value = query.double(), key.double(), value.double()
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.double()
    queries, keys = query.shape[-2], key.shape[-2]
    rows = max(SCORES * queries // max(query.shape[:-1].numel() * keys, 1), 1)
    if rows >= queries:
        return sdpa(query, key, value, attn_mask, dropout_p, is_causal, **options)
    blocks = []
    for start in range(0, queries, rows):
        end = min(start + rows, queries)
        seen = min(end, keys) if is_causal else keys
        mask = attn_mask
        if is_causal:
            mask = torch.arange(seen) <= torch.arange(start, end)[:, None]
        elif mask is not None and mask.shape[-2] != 1:
            mask = mask[..., start:end, :]
        block = query[..., start:end, :], key[..., :seen, :], value[..., :seen, :]
        blocks.append(sdpa(*block, mask, dropout_p, **options))
    return torch.cat(blocks, dim=-2)
