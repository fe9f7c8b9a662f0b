"""Torch's `flex_attention` without a compiler, in eager mode and while it is exported.

In eager mode it compiles itself, which torch's modes cannot follow, and it is exported as an operator without an ONNX
function. It calls the functions that change and hide scores with the indices of a single score; here they are called
once, with indices that broadcast, so that what they capture is traced like the rest of a module. The blocks of hidden
scores that it skips are not traced.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import math_attention

from attnforge.errors import first_line


@contextmanager
def interpreted() -> Iterator[None]:
    """Run compiled functions as Python code, for a block, and `flex_attention` as the formula that defines it."""
    stance = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with stance, _with(math_attention):
        yield


@contextmanager
def traced() -> Iterator[None]:
    """Trace `flex_attention` as products around a softmax, for a block."""
    with _with(_attend, create_mask=_create_mask, _transpose_ordered=lambda *blocks: (None, None)):
        yield


@contextmanager
def _with(attend: Callable[..., Any], **others: Any) -> Iterator[None]:
    """Make `flex_attention` call a function, for a block, and replace other functions that it calls."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is None:  # no module can have it
        yield
        return
    names = {"flex_attention_hop": attend, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True, **others}
    before = {name: value for name, value in vars(flex).items() if name in names}
    vars(flex).update({name: names[name] for name in before})
    try:
        yield
    finally:
        vars(flex).update(before)


def _create_mask(mask: Callable[..., Tensor], B: Any, H: Any, Q_LEN: int, KV_LEN: int, device: Any = None) -> Tensor:
    """Torch's function of that name: a mask of these sizes, of which None is 1."""
    whole = torch.ones([1 if size is None else size for size in (B, H, Q_LEN, KV_LEN)], dtype=torch.bool, device=device)
    return whole & mask(*_indices(whole))


def _indices(scores: Tensor) -> list[Tensor]:
    """The indices of scores along each of their four axes, which broadcast to one another."""
    sizes = enumerate(scores.shape)
    return [torch.arange(n, device=scores.device).view([-1 if i == axis else 1 for i in range(4)]) for axis, n in sizes]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, change: Callable[..., Tensor], block_mask: Any, scale: float, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """What the operator of `flex_attention` returns: attention, and for each query, the logarithm of the sum of
    exponentials of its scores, and the largest of them, both divided by the logarithm of 2.

    Raises:
        ValueError: the functions do not take indices that broadcast.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).transpose(-2, -1) * scale
    indices = _indices(scores)
    try:
        seen = torch.where(block_mask[-1](*indices), change(scores, *indices), -torch.inf).to(wide)
        scores = seen if seen.shape == scores.shape else seen.expand(scores.shape)
    except Exception as error:
        raise ValueError(
            f"what flex_attention calls cannot be traced: {first_line(error)}; it must index tensors "
            "with all their indices at once, as in bias[head, query - key]"
        ) from None
    weights = scores.softmax(-1)
    weights = weights.masked_fill(weights.isnan(), 0)  # of a query that sees no key
    return weights.to(query.dtype) @ value, scores.logsumexp(-1) / math.log(2), scores.amax(-1) / math.log(2)
