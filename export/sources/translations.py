"""ONNX functions for forms of torch operators that torch's exporter refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import onnx_ir as ir
import torch
from onnxscript import opset23

op: Any = opset23
"""The operators; their types are too narrow for values whose types are known only to the exporter."""


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`scaled_dot_product_attention` as ai.onnx Attention
    (https://onnx.ai/onnx/operators/onnx__Attention.html), which takes four dims. Torch 2.13's exporter refuses any
    other number of dims, and dims before the tokens that broadcast, such as one key head for all query heads.

    Args:
        query: `(…, n_q, d_k)`.
        key: `(…, n_k, d_k)`.
        value: `(…, n_k, d_v)`.
        attn_mask: broadcasts to `(…, n_q, n_k)`, boolean or added to the scores.

    Returns:
        `(…, n_q, d_v)`.

    Raises:
        ValueError: `dropout_p` is not 0.
    """
    if dropout_p:
        raise ValueError("scaled_dot_product_attention draws random numbers (dropout_p); set it to 0 in eval mode")
    operands = _broadcast([_Tensor.of(x) for x in (query, key, value)], kept=3 if enable_gqa else 2)
    mask, rank = attn_mask, len(operands[0].dims)
    if scale is None and rank != 4 and isinstance(operands[0].dims[-1], int):
        scale = operands[0].dims[-1] ** -0.5  # the operator's default, from a shape that is still known here
    if rank > 4:
        leading = [operands[0].size(axis) for axis in range(rank - 3)]
        if mask is not None and len(mask.shape) > 3:
            mask = _merged(_broadcast([operands[0], _Tensor.of(mask)], kept=3)[1])
        result = _attention([_merged(x) for x in operands], mask, scale, is_causal)
        return op.Reshape(result, op.Concat(*leading, op.Shape(result, start=1), axis=0))
    if rank == 4:
        return _attention([x.value for x in operands], mask, scale, is_causal)
    missing = op.Constant(value_ints=[1] if rank == 3 else [0, 1])
    if mask is not None and len(mask.shape) == 3:
        mask = op.Unsqueeze(mask, missing)
    return op.Squeeze(_attention([op.Unsqueeze(x.value, missing) for x in operands], mask, scale, is_causal), missing)


def _attention(operands: Sequence[Any], mask: Any, scale: float | None, is_causal: bool) -> Any:
    result, *_ = op.Attention(*operands, attn_mask=mask, scale=scale, is_causal=is_causal)
    return result


class _Tensor(NamedTuple):
    """A tensor and its dims, which a value that was just written does not have yet."""

    value: Any
    dims: list[Any]

    @classmethod
    def of(cls, value: Any) -> _Tensor:
        return cls(value, list(value.shape))

    def size(self, axis: int) -> Any:
        """The size of an axis, `(1,)`."""
        dim, axis = self.dims[axis], axis % len(self.dims)
        return op.Constant(value_ints=[dim]) if isinstance(dim, int) else op.Shape(self.value, start=axis, end=axis + 1)


def _broadcast(tensors: Sequence[_Tensor], kept: int) -> list[_Tensor]:
    """Expand tensors to the same dims, except for the last `kept` of each."""
    rank = max(len(x.dims) for x in tensors)
    aligned = [[1] * (rank - len(x.dims)) + x.dims for x in tensors]
    widest = [next((i for i, dims in enumerate(aligned) if dims[axis] != 1), None) for axis in range(rank - kept)]
    common = [1 if i is None else aligned[i][axis] for axis, i in enumerate(widest)]
    one = op.Constant(value_ints=[1])
    sizes = [one if i is None else tensors[i].size(axis - rank) for axis, i in enumerate(widest)]
    shape = op.Concat(*sizes, *[one] * kept, axis=0)
    return [
        x if x.dims == [*common, *dims[-kept:]] else _Tensor(op.Expand(x.value, shape), [*common, *dims[-kept:]])
        for x, dims in zip(tensors, aligned, strict=True)
    ]


def _merged(x: _Tensor) -> Any:
    """A tensor with all dims but its last three in one."""
    *leading, _, _, _ = x.dims
    result = op.Reshape(x.value, op.Concat(op.Constant(value_ints=[-1]), *map(x.size, (-3, -2, -1)), axis=0))
    is_static = all(isinstance(dim, int) for dim in leading)
    samples = prod(leading) if is_static else ir.SymbolicDim("*".join(map(str, leading)))
    result.shape = ir.Shape([samples, *x.dims[-3:]])  # shape inference does not know it
    return result


TRANSLATIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.scaled_dot_product_attention.default: attention,
}
"""The ONNX function of each torch operator, for `custom_translation_table` of `torch.onnx.export`."""
