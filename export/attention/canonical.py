"""The canonical Attention node: the one form that every site of a graph is rewritten to, however its author wrote it.

It is ai.onnx Attention, opset 23 (https://onnx.ai/onnx/operators/onnx__Attention.html), with

- query `(B, H, n_q, d_k)`, key `(B, H', n_k, d_k)`, value `(B, H', n_k, d_v)`, where H' divides H;
- at most one mask that broadcasts to `(B, H, n_q, n_k)`, boolean (True attends) or added to the scores;
- `scale` always given.

Node metadata records what the operator leaves open: :data:`SILENT_ROWS` and :data:`MASK_STEP`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from attnforge.export.attention.layout import Dims, Layout, Sized, rearrange
from attnforge.export.attention.operands import Operand
from attnforge.export.attention.walk_back import TensorScale
from attnforge.export.graphs.attention import SILENT_ROWS, Reading
from attnforge.export.graphs.build import Builder, broadcast_like, cast, constant, dims_of, like, typed
from attnforge.export.graphs.nodes import input_of, optional_input
from attnforge.export.graphs.sizes import Size

QUERY, KEY, VALUE = ("B", "H", "n_q", "d_k"), ("B", "H_kv", "n_k", "d_k"), ("B", "H_kv", "n_k", "d_v")
SCORES, OUTPUT = ("B", "H", "n_q", "n_k"), ("B", "H", "n_q", "d_v")
"""Dim names of the canonical tensors; H_kv stands for H'."""

ROWS = ("B", "H", "n_q", "")
"""Dim names of a tensor with one number per query."""

MASK_STEP = "attnforge.mask_step"
"""Metadata of the nodes that compute a mask, in the order in which the author applied them to the scores: `bias` on an
Add, `fill` on a Where that replaces scores with a number. A finite fill differs from a finite bias: a fully masked
row gets the mean of all values."""


WINDOW = "attnforge.window"
"""Metadata of an Attention node that reads a cache: the number of tokens that a query attends to, itself included; 0
for all tokens up to itself. The node's mask encodes the same."""

SLOPES = "attnforge.slopes"
"""Metadata of an Attention node that reads a cache: the ALiBi slope of each head, which is what a score grows by per
position of the key. No bias without this entry. The node's mask encodes the same."""

SINKS = "attnforge.sinks"
"""Metadata of an Attention node that reads a cache: the score of each head's sinks together. No sinks without this
entry. A first key and value of zeros and the first column of the node's mask encode the same."""

PLACES = "attnforge.places"
"""Metadata of the node in a decoder step that computes the cache positions of the new tokens, `(batch, tokens)`: the
positions after each sample's cached tokens."""


def attention_node(op: Builder, name: str, reading: Reading, mask: ir.Value | None) -> ir.Value:
    """Write a canonical node called `name`.

    Args:
        op: records the node.
        name: its name.
        reading: the operands on four dims, the scale, and what else are attributes of the node.
        mask: all masks in one, which broadcasts to `(B, H, n_q, n_k)`; None if there are none.

    Returns:
        `(B, H, n_q, d_v)`, in the type of the query.
    """
    query, key, value = reading.query, reading.key, reading.value
    if reading.scale <= 0:  # kernels take the root of their scale, and some read 0 as its default
        query = like(op.Mul(query, constant(op, -1.0 if reading.scale else 0.0, query.dtype)), query)
    optional = {
        "is_causal": int(reading.is_causal),
        "softcap": reading.softcap,
        "softmax_precision": reading.softmax_precision,
    }
    attributes = {"scale": abs(reading.scale) or 1.0, **{name: number for name, number in optional.items() if number}}
    inputs = [query, key, value, *([mask] if mask is not None else [])]
    metadata = {SILENT_ROWS: "nan"} if reading.silent_rows_are_nan else {}
    output = op.op("Attention", inputs, attributes, name=name, metadata_props=metadata)
    return typed(output, query.dtype, [*dims_of(query)[:3], dims_of(value)[3]])


def described(node: ir.Node) -> str:
    """Describe a canonical node, as in `Attention(heads 12, head size 64, mask bool, causal, softcap 30)`."""
    query, key, value = (dims_of(input_of(node, i)) for i in range(3))
    mask, heads, shared, size, value_size = optional_input(node, 3), query[1], key[1], query[3], value[3]
    parts = [f"heads {heads}"]
    if shared != heads:
        parts.append(f"key heads {shared}")
    parts.append(f"head size {size}" if size == value_size else f"head sizes {size} and {value_size}")
    if mask is not None and mask.dtype is not None:
        parts.append(f"mask {mask.dtype.numpy().name}")
    if node.attributes.get_int("is_causal", 0):
        parts.append("causal")
    if softcap := node.attributes.get_float("softcap", 0.0):
        parts.append(f"softcap {softcap:g}")
    if softmax_precision := node.attributes.get_int("softmax_precision", 0):
        parts.append(f"softmax {ir.DataType(softmax_precision).numpy().name}")
    return f"Attention({', '.join(parts)})"


@dataclass(frozen=True)
class SiteAxes:
    """The axes of one site, by the name of their dim in the canonical operands: B, H, H_kv (the key-value heads), n_q,
    n_k, d_k, d_v."""

    dims: Mapping[str, Dims]

    def layout(self, *names: str) -> Layout:
        """The layout of the named dims; `"H d_k"` is one dim of packed heads, and `""` a dim of size 1."""
        return Layout([axis for name in dim.split() for axis in self.dims[name]] for dim in names)

    def size(self, name: str) -> Size:
        return self.layout(name).sizes()[0]


@dataclass(frozen=True)
class SiteWriter:
    """Writes the nodes of one site.

    Attributes:
        axes: the dims that operands are rearranged to.
        dtype: the type of query, key, value and output.
        sized: values from whose shapes dynamic axis sizes can be read.
    """

    op: Builder
    axes: SiteAxes
    dtype: ir.DataType
    sized: list[Sized]

    def arranged(self, operand: Operand, layout: Layout) -> ir.Value:
        """Rearrange `operand` to `layout`, repeating it along the axes that it lacks."""
        return rearrange(self.op, operand.value, operand.layout, layout, self.sized)

    def broadcastable(self, operand: Operand, *names: str) -> ir.Value:
        """Rearrange `operand` to the named dims, with size 1 for each dim along which it does not vary."""
        varies, dims = set(operand.layout.axes), self.axes.layout(*names).dims
        return self.arranged(operand, Layout(dim if varies & set(dim) else () for dim in dims))

    def scaled(self, x: ir.Value, scales: Iterable[TensorScale], *names: str) -> ir.Value:
        """Multiply or divide `x` by tensors, on the named dims."""
        for by in scales:
            scale = cast(self.op, self.broadcastable(by.operand, *names), self.dtype)
            x = broadcast_like(self.op.op(by.op_type, [x, scale]), x, scale)
        return x
