"""ONNX functions for torch operators, in place of those of torch's exporter."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset23
from onnxscript.function_libs.torch_lib.ops import core

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
    operands = _broadcast((query, key, value), kept=3 if enable_gqa else 2)
    mask, (*leading, _, head_dim) = attn_mask, operands[0].shape
    rank, mask_rank = len(leading) + 2, 0 if mask is None else len(mask.shape)
    if scale is None and rank != 4 and isinstance(head_dim, int):
        scale = head_dim**-0.5  # the operator's default, from a shape that is still known here
    if rank > 4:
        before_heads = [_size(operands[0], axis) for axis in range(rank - 3)]
        if mask_rank > 3:
            mask = _merged(_broadcast((operands[0], mask), kept=3)[1])
        operands = [_merged(x) for x in operands]
    elif rank < 4:
        missing = op.Constant(value_ints=[1] if rank == 3 else [0, 1])
        if mask_rank == 3:
            mask = op.Unsqueeze(mask, missing)
        operands = [op.Unsqueeze(x, missing) for x in operands]
    result, *_ = op.Attention(*operands, attn_mask=mask, scale=scale, is_causal=is_causal)
    if rank > 4:
        return op.Reshape(result, op.Concat(*before_heads, op.Shape(result, start=1), axis=0))
    return op.Squeeze(result, missing) if rank < 4 else result


def unflatten(self: Any, dim: int, sizes: Sequence[Any]) -> Any:
    """`unflatten` of an axis of a tensor as a Reshape. The exporter's functions for this and for :func:`flatten` read
    the tensor's whole shape, which keeps it in memory and hides which dims stay.

    Args:
        self: `(…, n, …)`.
        dim: the axis of size n.
        sizes: numbers or scalars whose product is n; one number may be -1.
    """
    axis = dim % len(self.shape)
    if -1 in sizes:
        rest: Any = _size(self, axis, as_number=True)
        for size in (size for size in sizes if size != -1):
            rest = rest // size if isinstance(rest, int) and isinstance(size, int) else op.Div(*map(_one, (rest, size)))
        sizes = [rest if size == -1 else size for size in sizes]
    return _reshaped(self, axis, sizes, axis + 1)


def reshape(self: Any, shape: Sequence[Any]) -> Any:
    """`reshape` as a Reshape in which a size of 0 is one, and not that of the tensor.

    Args:
        self: the tensor.
        shape: numbers or scalars; one number may be -1.
    """
    return op.Reshape(self, _sizes(shape), allowzero=True)


def flatten(self: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    """`flatten` of some axes of a tensor as a Reshape."""
    dims = list(self.shape)
    if not dims:
        return op.Reshape(self, op.Constant(value_ints=[1]))
    first, last = start_dim % len(dims), end_dim % len(dims)
    merged: Any = prod(dim for dim in dims[first : last + 1] if isinstance(dim, int))
    for axis in range(first, last + 1):
        if not isinstance(dims[axis], int):
            merged = op.Mul(_size(self, axis), _one(merged))
    return _reshaped(self, first, [merged], last + 1)


def squeeze(self: Any, dim: int) -> Any:
    """`squeeze` of a dim, which stays if its size is not 1; the exporter's Squeeze is refused then."""
    return op.Squeeze(self, op.Constant(value_ints=[dim])) if self.shape and self.shape[dim] == 1 else op.Identity(self)


def rsub(self: Any, other: float, alpha: float = 1) -> Any:
    """`other - alpha * self`. Torch decomposes it to a difference that its exporter refuses if self is of integers and
    other is not."""
    is_float = isinstance(other, float) if isinstance(other, int | float) else other.dtype.is_floating_point()
    if is_float and self.dtype.is_integer():
        self = op.Cast(self, to=ir.DataType.FLOAT)
    if alpha != 1:
        self = op.Mul(self, op.CastLike(alpha, self))
    return op.Sub(op.CastLike(other, self), self)


def floor_divide(self: Any, other: Any) -> Any:
    """`self // other`. Of integers the exporter computes it in eight operators; these three are right for negative
    ones too, since ONNX's remainder has the divisor's sign, unless the difference leaves the range of the type."""
    if not self.dtype.is_integer():
        return core.aten_floor_divide(self, other)
    if isinstance(other, int):
        other = op.CastLike(other, self)
    return op.Div(op.Sub(self, op.Mod(self, other)), other)


def rounded_quotient(self: Any, other: Any, rounding_mode: str | None = None) -> Any:
    """`torch.div` with a rounding mode. Of integers the exporter computes it in fp32, which is exact up to 2^24."""
    if rounding_mode is None or not self.dtype.is_integer():
        return core.aten_div_mode(self, other, rounding_mode)
    return floor_divide(self, other) if rounding_mode == "floor" else op.Div(self, other)


def floor_divide_sizes(self: Any, other: Any) -> Any:
    """`self // other` of numbers of the shape, which the exporter rounds towards zero: the same where neither is
    negative, as in most; but `-(-tokens // 2)` rounds up."""
    return op.Div(self, other) if _is_counted(self) and _is_counted(other) else floor_divide(self, other)


def _is_counted(size: Any) -> bool:
    """Whether a number is computed from sizes by operators that make no negative numbers."""
    if isinstance(size, int):
        return size >= 0
    node = size.producer()
    if node is None or node.op_type not in ("Add", "Div", "Mod", "Mul", "Neg", "Sub"):
        return True
    return node.op_type not in ("Neg", "Sub") and all(map(_is_counted, node.inputs))


def log_sigmoid(self: Any) -> Any:
    """`logsigmoid`. The exporter's logarithm of a sigmoid is -inf where that is 0."""
    return op.Neg(op.Softplus(op.Neg(self)))


def expm1(self: Any) -> Any:
    """`expm1`, as `tanh(x / 2) * (exp(x) + 1)`. The exporter's difference loses the digits of small numbers."""
    x = op.Cast(self, to=ir.DataType.FLOAT) if self.dtype.bitwidth == 16 else self  # torch rounds once
    half, one = (op.CastLike(number, x) for number in (0.5, 1.0))
    return op.CastLike(op.Mul(op.Tanh(op.Mul(x, half)), op.Add(op.Exp(x), one)), self)


def log_add_exp(self: Any, other: Any) -> Any:
    """`logaddexp`. The exporter's exponentials overflow."""
    apart = op.Add(op.Max(self, other), op.Softplus(op.Neg(op.Abs(op.Sub(self, other)))))
    return op.Where(op.Equal(self, other), op.Add(self, op.CastLike(math.log(2), self)), apart)  # both may be infinite


def log_add_exp2(self: Any, other: Any) -> Any:
    """`logaddexp2`, by :func:`log_add_exp`."""
    scale = op.CastLike(math.log(2), self)
    return op.Div(log_add_exp(op.Mul(self, scale), op.Mul(other, scale)), scale)


def histogram(self: Any, bins: int = 100, min: float = 0.0, max: float = 0.0) -> Any:
    """`histc`. The exporter compares the numbers with the ends of the bins; integers with a bin each, such as those of
    experts, are compared with their bin's own number, so that it can be proved what is counted."""
    node = self.producer()
    numbers = node.inputs[0] if node is not None and node.op_type == "Cast" else self
    if not numbers.dtype.is_integer() or (min, max) != (0, bins - 1) or bins < 2:
        return core.aten_histc(self, bins, min, max)
    every = op.CastLike(op.Constant(value=ir.tensor(np.arange(bins)[:, None])), numbers)
    if len(numbers.shape) != 1:
        numbers = op.Reshape(numbers, op.Constant(value_ints=[-1]))
    is_in = op.Equal(op.Unsqueeze(numbers, op.Constant(value_ints=[0])), every)
    return op.ReduceSum(op.Cast(is_in, to=self.dtype), op.Constant(value_ints=[1]), keepdims=0)


def copy(self: Any, src: Any, non_blocking: bool = False) -> Any:
    """What `self` is after `src` was copied to it, in its shape; the exporter's has the shape of `src`."""
    result = op.CastLike(src, self)
    return result if src.shape == self.shape else op.Expand(result, op.Shape(self))


def slice_scatter(self: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """A tensor with a part along a dim replaced. The exporter scatters by index along the first dim, between two
    transposes; a part of static size is joined with what is before and after it."""
    axis = dim % len(self.shape)
    size, most = self.shape[axis], torch.iinfo(torch.int64).max
    ends = [0 if start is None else start, most if end is None else end]
    if not (isinstance(size, int) and step == 1 and all(isinstance(each, int) for each in ends)):
        return core.aten_slice_scatter(self, src, dim, start, end, step)
    first, last = (min(max(each + size if each < 0 else each, 0), size) for each in ends)
    last = max(first, last)
    parts = [src]
    for i, (begin, stop) in enumerate(((0, first), (last, size))):
        if begin < stop:
            part = op.Slice(self, *(op.Constant(value_ints=[each]) for each in (begin, stop, axis)))
            parts.insert(i * len(parts), part)
    return op.Concat(*parts, axis=axis) if len(parts) > 1 else op.Identity(src)


def grouped_product(self: Any, mat2: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """`grouped_mm`, the product of each group of rows with a matrix of its own, as the experts of a mixture: one MatMul
    for each group.

    Args:
        self: `(rows, k)`, one group after another.
        mat2: `(groups, k, n)`.
        offs: `(groups,)`, the end of each group.
        bias: None.
        out_dtype: None.

    Returns:
        `(rows, n)`.

    Raises:
        ValueError: the operands have other dims, or the number of groups is dynamic.
    """
    groups = mat2.shape[0]
    if bias is not None or out_dtype is not None:
        raise ValueError("grouped_mm is exported without bias and out_dtype only")
    if offs is None or len(self.shape) != 2 or len(mat2.shape) != 3 or not isinstance(groups, int):
        raise ValueError("grouped_mm is exported for rows (rows, k) and matrices (groups, k, n) of static number only")
    zero, start = op.Constant(value_ints=[0]), op.Constant(value_ints=[0])
    parts = []
    for group in range(groups):
        index = op.Constant(value_ints=[group])
        end = op.Cast(op.Gather(offs, index), to=ir.DataType.INT64)
        matrix = op.Squeeze(op.Gather(mat2, index), zero)
        parts.append(op.MatMul(op.Slice(self, start, end, zero), matrix))
        start = end
    result = op.Concat(*parts, axis=0)
    result.shape = ir.Shape([self.shape[0], mat2.shape[2]])  # inference does not know that the groups are all rows
    return result


def added_to(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a product that is added to a tensor, as `baddbmm`. With a `beta` of 0, torch ignores the tensor,
    which is often uninitialised; the exporter adds it times 0, and attention is not found.

    Args:
        otherwise: the exporter's function.
    """

    def product(self: Any, left: Any, right: Any, beta: float = 1.0, alpha: float = 1.0) -> Any:
        if not isinstance(beta, int | float) or beta != 0:
            return otherwise(self, left, right, beta, alpha)
        result = op.MatMul(left, right)
        return op.Mul(result, op.CastLike(alpha, result)) if alpha != 1 else result

    return product


def over_all(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """The function of `amax` and `amin` over some dims or, without any, over all; the exporter's refuses that.

    Args:
        otherwise: the exporter's function.
    """

    def extreme(self: Any, dim: Sequence[int] | None = None, keepdim: bool = False) -> Any:
        return otherwise(self, list(dim) if dim else None, keepdim)

    return extreme


def stable_sort(self: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """`sort(stable=True)`, which the exporter lacks. TopK returns equal elements in their order."""
    return core.aten_sort(self, dim, descending)


def distances(x1: Any, x2: Any, p: float = 2.0, compute_mode: int | None = None) -> Any:
    """`cdist`, the p-norms of the differences of the rows of two tensors, which the exporter lacks.

    Args:
        x1: `(…, n, d)`.
        x2: `(…, m, d)`.
        p: the norm's exponent.
        compute_mode: has no effect.

    Returns:
        `(…, n, m)`.
    """
    last = op.Constant(value_ints=[max(len(x1.shape), len(x2.shape))])  # from the end, ONNX Runtime keeps it if empty
    apart = op.Sub(op.Unsqueeze(x1, op.Constant(value_ints=[-2])), op.Unsqueeze(x2, op.Constant(value_ints=[-3])))
    if p in (1, 2):
        return (op.ReduceL1 if p == 1 else op.ReduceL2)(apart, last, keepdims=0)
    if p == math.inf:
        return op.ReduceMax(op.Abs(apart), last, keepdims=0)
    powers = op.Pow(op.Abs(apart), op.CastLike(p, apart)) if p else op.Abs(op.Sign(apart))
    total = op.ReduceSum(powers, last, keepdims=0)
    return op.Pow(total, op.CastLike(1 / p, total)) if p else total


def search_sorted(
    sorted_sequence: Any, self: Any, *, out_int32: bool = False, right: bool = False, side: str | None = None,
    sorter: Any = None,
) -> Any:  # fmt: skip
    """`searchsorted`, which the exporter lacks: how many numbers of a sequence are below each of a tensor.

    Args:
        sorted_sequence: `(m,)`, or `(…, m)` for each row of the tensor.
        self: the tensor, `(…, n)`.
        out_int32: whether the result is of int32.
        right: whether equal numbers count as well.
        side: "right" for the same.
        sorter: the order of a sequence that is not sorted.
    """
    last = op.Constant(value_ints=[len(self.shape)])
    sequence = sorted_sequence if sorter is None else op.GatherElements(sorted_sequence, sorter, axis=-1)
    if len(sorted_sequence.shape) > 1:
        sequence = op.Unsqueeze(sequence, op.Constant(value_ints=[-2]))
    compare = op.LessOrEqual if right or side == "right" else op.Less
    below = op.Cast(compare(sequence, op.Unsqueeze(self, last)), to=ir.DataType.INT64)
    count = op.ReduceSum(below, last, keepdims=0)
    return op.Cast(count, to=ir.DataType.INT32) if out_int32 else count


def index_put(self: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """`self[indices] = values`. The exporter takes a mask as the first index only, and scatters to the positions at
    which it is true. Values that are the same at all of them are chosen where it is, as by `masked_fill`.

    Args:
        self: the tensor.
        indices: None for all of a dim, integers, or a mask of several dims.
        values: broadcasts to what is replaced.
        accumulate: whether the values are added.
    """
    first, *others = (i for i, index in enumerate(indices) if index is not None)
    mask = indices[first]
    after = len(self.shape) - first - len(mask.shape)
    is_same = all(dim == 1 for dim in values.shape[: max(len(values.shape) - after, 0)])
    if others or accumulate or not is_same or mask.dtype != ir.DataType.BOOL:
        return core.aten_index_put(self, indices, values, accumulate)
    where = op.Unsqueeze(mask, op.Constant(value_ints=[*range(-after, 0)])) if after else mask
    return op.Where(where, values, self)


def _reshaped(x: Any, before: int, sizes: Sequence[Any], after: int) -> Any:
    """A tensor with other sizes, numbers or tensors of one, in place of the axes from `before` to `after`."""
    ends = [*sizes, *(_size(x, axis, as_number=True) for axis in range(after, len(x.shape)))]
    if all(isinstance(size, int) and size for size in ends):
        return op.Reshape(x, _sizes([0] * before + ends))  # a size of 0 is that of the tensor
    return op.Reshape(x, _sizes([_size(x, axis, as_number=True) for axis in range(before)] + ends), allowzero=True)


def _sizes(sizes: Sequence[Any]) -> Any:
    """A shape of numbers and tensors of one."""
    if all(isinstance(size, int) for size in sizes):
        return op.Constant(value_ints=list(sizes))
    return op.Concat(*map(_one, sizes), axis=0)


def _one(size: Any) -> Any:
    """A number, a scalar or a tensor of one as `(1,)`."""
    return op.Constant(value_ints=[size]) if isinstance(size, int) else op.Reshape(size, op.Constant(value_ints=[1]))


def _size(x: Any, axis: int, *, as_number: bool = False) -> Any:
    """The size of an axis, `(1,)`, or if `as_number`, a number where it is static."""
    dim, axis = x.shape[axis], axis % len(x.shape)
    if isinstance(dim, int):
        return dim if as_number else op.Constant(value_ints=[dim])
    return op.Shape(x, start=axis, end=axis + 1)


def _broadcast(tensors: Sequence[Any], kept: int) -> list[Any]:
    """Expand tensors to the same dims, except for the last `kept` of each."""
    rank = max(len(x.shape) for x in tensors)
    aligned = [[1] * (rank - len(x.shape)) + list(x.shape) for x in tensors]
    widest = [next((i for i, dims in enumerate(aligned) if dims[axis] != 1), None) for axis in range(rank - kept)]
    common = [1 if i is None else aligned[i][axis] for axis, i in enumerate(widest)]
    one = op.Constant(value_ints=[1])
    sizes = [one if i is None else _size(tensors[i], axis - rank) for axis, i in enumerate(widest)]
    shape = op.Concat(*sizes, *[one] * kept, axis=0)
    expanded = list(tensors)
    for i, x in enumerate(tensors):
        if x.shape != (wanted := [*common, *aligned[i][-kept:]]):
            expanded[i] = op.Expand(x, shape)
            expanded[i].shape = ir.Shape(wanted)  # shape inference knows it only where all of `shape` is constant
    return expanded


def _merged(x: Any) -> Any:
    """A tensor with all dims but its last three in one."""
    sizes = (_size(x, axis) for axis in (-3, -2, -1))
    result = op.Reshape(x, op.Concat(op.Constant(value_ints=[-1]), *sizes, axis=0))
    *leading, heads, tokens, width = x.shape
    is_static = all(isinstance(dim, int) for dim in leading)
    samples = prod(leading) if is_static else ir.SymbolicDim("*".join(map(str, leading)))
    result.shape = ir.Shape([samples, heads, tokens, width])  # shape inference does not know it
    return result


TRANSLATIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten._cdist_forward.default: distances,
    torch.ops.aten._grouped_mm.default: grouped_product,
    torch.ops.aten.addmm.default: added_to(core.aten_addmm),
    torch.ops.aten.amax.default: over_all(core.aten_amax),
    torch.ops.aten.amin.default: over_all(core.aten_amin),
    torch.ops.aten.baddbmm.default: added_to(core.aten_baddbmm),
    torch.ops.aten.scaled_dot_product_attention.default: attention,
    operator.floordiv: floor_divide_sizes,
    torch.ops.aten.copy.default: copy,
    torch.ops.aten.div.Tensor_mode: rounded_quotient,
    torch.ops.aten.expm1.default: expm1,
    torch.ops.aten.floor_divide.default: floor_divide,
    torch.ops.aten.histc.default: histogram,
    torch.ops.aten.flatten.using_ints: flatten,
    torch.ops.aten.index_put.default: index_put,
    torch.ops.aten.log_sigmoid.default: log_sigmoid,
    torch.ops.aten.logaddexp.default: log_add_exp,
    torch.ops.aten.logaddexp2.default: log_add_exp2,
    torch.ops.aten.reshape.default: reshape,
    torch.ops.aten.rsub.Scalar: rsub,
    torch.ops.aten.searchsorted.Tensor: search_sorted,
    torch.ops.aten.slice_scatter.default: slice_scatter,
    torch.ops.aten.sort.stable: stable_sort,
    torch.ops.aten.squeeze.dim: squeeze,
    torch.ops.aten.unflatten.int: unflatten,
}
"""The ONNX function of each torch operator, for `custom_translation_table` of `torch.onnx.export`."""


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """:data:`TRANSLATIONS` and those of the operators that transformers adds to torch when it is imported."""
    grouped = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    return {**TRANSLATIONS, **({} if grouped is None else {grouped.default: grouped_product})}
