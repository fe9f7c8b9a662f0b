"""The meaning of attention: what an operator that computes it reads, and the products that it stands for.

Canonicalising writes a :class:`Reading` as one canonical node, float64 execution and attention maps write it as
:func:`products`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from attnforge.export.graphs.build import Builder, constant, dims_of, like, numbered, typed
from attnforge.export.graphs.sizes import Size, sizes_of

BOOL, INT64 = ir.DataType.BOOL, ir.DataType.INT64

SILENT_ROWS = "attnforge.silent_rows"
"""Metadata of an Attention node: what a fully masked row gets. `nan`, as from a bare softmax; without this entry zeros,
as the operator specifies."""


class NotAttention(Exception):
    """A graph is not attention that a canonical node can compute; the message gives a reason that a user can act on."""


@dataclass(frozen=True)
class Reading:
    """The operands and outputs of an attention operator.

    Attributes:
        query: `(B, H, n_q, d_k)`.
        key: `(B, H', n_k, d_k)`, past keys first.
        value: `(B, H', n_k, d_v)`, past values first.
        masks: each on four dims, boolean or added to the scores.
        offset: number of keys before the first query's own key, int64, one element or one per sample.
        window: number of keys that a query sees to its left and to its right; -1 for all.
        silent_rows_are_nan: whether fully masked rows are NaN instead of zeros.
        in_buffer: whether keys and values are in a buffer that may be longer than the keys in it.
        packed_output: whether the output is `(B, n_q, H·d_v)` instead of `(B, H, n_q, d_v)`.
        sinks: `(H,)`, the score of each head's attention sink.
        present: the keys and values that are the operator's outputs 1 and 2.
    """

    query: ir.Value
    key: ir.Value
    value: ir.Value
    scale: float
    masks: tuple[ir.Value, ...] = ()
    is_causal: bool = False
    offset: ir.Value | None = None
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    softmax_precision: int = 0
    silent_rows_are_nan: bool = True
    in_buffer: bool = False
    packed_output: bool = True
    sinks: ir.Value | None = None
    present: tuple[ir.Value, ...] = ()

    def masked(self, *masks: ir.Value) -> Reading:
        """The same with further masks added."""
        return replace(self, masks=(*self.masks, *masks))

    @property
    def is_windowed(self) -> bool:
        return self.window != (-1, -1)


def reach(op: Builder, reading: Reading) -> Iterator[ir.Value]:
    """Yield the conditions `(1 | B, 1, n_q, n_k)` under which causality and the window allow a query to attend to a
    key."""
    n_q, n_k = dims_of(reading.query)[2], dims_of(reading.key)[2]
    rows = typed(op.Unsqueeze(numbered(op, reading.query, 2), constant(op, [0, 1, 3])), INT64, [1, 1, n_q, 1])
    columns = typed(op.Unsqueeze(numbered(op, reading.key, 2), constant(op, [0, 1, 2])), INT64, [1, 1, 1, n_k])
    dims = [1 if reading.offset is None else dims_of(reading.offset)[0], 1, n_q, n_k]
    if reading.offset is not None:
        rows = typed(op.Add(rows, reading.offset), INT64, [*dims[:3], 1])
    distance = typed(op.Sub(rows, columns), INT64, dims)
    left, right = reading.window
    if reading.is_causal:
        yield typed(op.GreaterOrEqual(distance, constant(op, 0)), BOOL, dims)
    if left >= 0:
        yield typed(op.LessOrEqual(distance, constant(op, left)), BOOL, dims)
    if right >= 0:
        yield typed(op.GreaterOrEqual(distance, constant(op, -right)), BOOL, dims)


def merged_heads(op: Builder, x: ir.Value) -> ir.Value:
    """`(B, H, n, d)` as `(B, n, H·d)`."""
    batch, heads, tokens, size = dims_of(x)
    width = sizes_of(x)[1] * sizes_of(x)[3]
    transposed = typed(op.Transpose(x, perm=[0, 2, 1, 3]), x.dtype, [batch, tokens, heads, size])
    return typed(op.Reshape(transposed, constant(op, [0, 0, width.factor])), x.dtype, [batch, tokens, width.dim()])


# --- products ---------------------------------------------------------------------------------------------------------


def products(op: Builder, reading: Reading) -> tuple[ir.Value, ir.Value]:
    """Write `softmax(softcap(scale · query · keyᵀ), masked) · value`, in the type of the operands.

    Returns:
        The weights `(B, H, n_q, n_k)`, which are the result of the softmax; with sinks, `(B, H, n_q, 1 + n_k)`, theirs
        first. And the operator's first output.

    Raises:
        NotAttention: the number of heads is dynamic.
    """
    dtype = reading.query.dtype
    assert dtype is not None
    heads = sizes_of(reading.query)[1]
    key, value = (_for_all_heads(op, x, heads) for x in (reading.key, reading.value))
    query = like(op.Mul(reading.query, constant(op, reading.scale, dtype)), reading.query)
    dims = [*dims_of(query)[:3], dims_of(key)[2]]
    scores = typed(op.MatMul(query, op.Transpose(key, perm=[0, 1, 3, 2])), dtype, dims)
    if reading.softcap:
        cap = constant(op, reading.softcap, dtype)
        scores = like(op.Mul(op.Tanh(op.Div(scores, cap)), cap), scores)
    low = constant(op, -np.inf, dtype)
    for mask in (*reading.masks, *(reach(op, reading) if reading.is_causal or reading.is_windowed else ())):
        scores = like(op.Where(mask, scores, low) if mask.dtype == BOOL else op.Add(scores, mask), scores)
    joined = scores if reading.sinks is None else _after_sinks(op, reading.sinks, scores)
    weights = of_keys = like(op.Softmax(joined, axis=-1), joined)
    if reading.sinks is not None:
        of_keys = like(op.Slice(weights, constant(op, [1]), constant(op, [2**62]), constant(op, [3])), scores)
    output = typed(op.MatMul(of_keys, value), dtype, [*dims[:3], dims_of(value)[3]])
    if (reading.masks or reading.window[0] >= 0) and not reading.silent_rows_are_nan:
        seen = op.Cast(op.Not(op.Equal(scores, low)), to=dtype.value)
        count = op.ReduceSum(seen, constant(op, [-1]), keepdims=1)  # ReduceMax has other inputs below opset 18
        output = like(op.Where(op.Equal(count, constant(op, 0, dtype)), constant(op, 0, dtype), output), output)
    return weights, merged_heads(op, output) if reading.packed_output else output


def _after_sinks(op: Builder, sinks: ir.Value, scores: ir.Value) -> ir.Value:
    """`(B, H, n_q, 1 + n_k)`: scores after those of the sinks, `(H,)`."""
    *dims, _ = dims_of(scores)
    by_head = op.Reshape(sinks, constant(op, [1, -1, 1, 1]))
    shape = op.Concat(op.Shape(scores, end=3), constant(op, [1]), axis=0)
    column = typed(op.Expand(by_head, shape), scores.dtype, [*dims, 1])
    return typed(op.Concat(column, scores, axis=3), scores.dtype, [*dims, sizes_of(scores)[3].plus(1).dim()])


def _for_all_heads(op: Builder, x: ir.Value, heads: Size) -> ir.Value:
    """Keys or values `(B, H', n, d)` as `(B, H, n, d)`."""
    shared = sizes_of(x)[1]
    if shared == heads:
        return x
    if not (shared.is_static and heads.is_static):
        raise NotAttention("the number of heads is dynamic")
    index = constant(op, np.repeat(np.arange(shared.factor), heads.factor // shared.factor))
    batch, _, *others = dims_of(x)
    return typed(op.Gather(x, index, axis=1), x.dtype, [batch, heads.factor, *others])
