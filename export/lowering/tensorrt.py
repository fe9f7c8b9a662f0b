"""Lower canonical attention to the form that TensorRT and TensorRT-RTX fuse.

What the builder fuses was learned from its plans (compute capability 8.0 and later): in 16-bit types, two products
around a softmax on four dims, if queries, keys and values have one head size, between 16 and 256, and if there is more
than one head, or the batch is dynamic or above one.

- The Attention operator is fused too, but the parser refuses some of its uses and the build fails on others, so it is
  never written.
- fp32 has no fused kernel. The plain form is written, which always builds; on request attention alone is cast to 16
  bits, with its biases and its softmax in fp32, and then it is fused.
- Not fused by TensorRT-RTX 1.7: a soft cap, whether as `c·tanh(s/c)` in 16 bits or in fp32, with the cap folded into
the
  query, as a sigmoid, as `s/(1+|s|)`, as `exp` normalised after the second product, or as a bias of `cap(s) - s`;
  heads of 512, or of 320, also with the values split in two.
- Fused but never written: capped scores as the bias of a product of zeros, and heads of 512 with half of the product
  as a bias and the values' halves as further heads. The bias materialises all n² scores, which fusing is to avoid.
- Not fused: a bias that is computed from constants, such as Swin's relative positions, which torch's exporter folds
only
  below 8,192 numbers. It is computed here.
- Fused without changes: biases computed from keys or queries (disentangled attention), and tensors that scale the
  queries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Literal

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attnforge.export.attention.canonical import MASK_STEP, OUTPUT
from attnforge.export.attention.canonicalize import Site
from attnforge.export.attention.layout import Layout
from attnforge.export.attention.operands import Operand
from attnforge.export.graphs.build import (
    Builder,
    cast,
    constant,
    dims_of,
    initializer,
    insert,
    like,
    replace_value,
    resized,
    typed,
    up_to,
)  # fmt: skip
from attnforge.export.graphs.execute import at_own_precision
from attnforge.export.graphs.nodes import numpy_type, upstream
from attnforge.export.graphs.sizes import ONE, sizes_of
from attnforge.export.graphs.types import in_fp32
from attnforge.export.lowering.attention import Attention, Lowered, attentions, usual
from attnforge.export.lowering.blocks import IN_BAND, IN_CAUSAL_BLOCKS, in_blocks, in_causal_blocks
from attnforge.export.lowering.products import decompose, mask_steps
from attnforge.export.tensorrt.build import softmax_of

BOOL = ir.DataType.BOOL

SMALLEST_HEAD, LARGEST_HEAD = 16, 256
"""Range of head sizes of the fused kernels."""

FEWEST_KEYS = 32
"""Minimum number of keys of fused fp8 attention."""

LARGEST_MASK = 2**24
"""Maximum elements of a mask that is computed here."""

BLOCKS = (256, 128, 64, 32)
"""Queries per block, if a mask leaves a band visible."""

MOST_PRODUCTS = 1.3
"""Maximum ratio of the products that a band's blocks compute to those it needs; exceeded only by the smallest
blocks."""

MANY_SCORES = 512 * 512
"""Scores per head from which attention within a band is cut into blocks."""

STEPS, MANY_TOKENS = 4, 2048
"""Blocks of queries for causal attention, and tokens from which there are any: they compute five eighths of the
products."""

WITHOUT_BF16 = ("ConvTranspose", "GRU", "HardSwish", "Mish")
"""Operators that TensorRT-RTX 1.7 does not build in bf16; they are computed in fp32."""

MANY_IN_CHUNK = 128
"""Tokens of a causal chunk from which it is computed in as many blocks."""


def lower(
    model: ir.Model,
    sites: list[Site],
    attention_dtype: ir.DataType | None = None,
    sizes: Mapping[str, int] | None = None,
    not_in_fp8: Mapping[str, str] | None = None,
) -> list[Lowered]:
    """Rewrite every canonical site of `model`, in place, for TensorRT.

    Args:
        model: a graph with canonical Attention nodes.
        sites: what :func:`~attnforge.export.attention.canonicalize.canonicalize` found in it.
        attention_dtype: type of attention alone, between casts; by default the graph's own.
        sizes: the usual size of each symbolic dim; without them attention within a band is written like any other if
            the tokens are dynamic.
        not_in_fp8: why a site is not in fp8 although products are, by site name.

    Returns:
        the form of every canonical site, and why it was chosen.
    """
    _compute_constant_masks(model, sites)
    lowered = []
    for site, attention in attentions(model, sites):
        dtype = attention_dtype or attention.dtype
        recipe = _recipe(attention, dtype, sizes or {}, (not_in_fp8 or {}).get(site.name))
        node = softmax_of(site.name)
        build = partial(_emit_in, a=attention, recipe=recipe, site=site.name, dtype=dtype)
        replace_value(attention.output.value, insert(model.graph, attention.node, build))
        lowered.append(Lowered(recipe.form, recipe.why, site=site.name, node=node, unfused=recipe.unfused))
    in_fp32(model, WITHOUT_BF16)
    RemoveUnusedNodesPass()(model)
    return lowered


def _compute_constant_masks(model: ir.Model, sites: list[Site]) -> None:
    """Replace the masks and biases of canonical sites that are computed from constants alone by weights."""
    operands = [step.operand for _, attention in attentions(model, sites) for step in mask_steps(attention.mask)]
    wanted = [value for value in dict.fromkeys(operands) if value.producer() and _is_constant(value)]
    arrays = at_own_precision(model, [str(value.name) for value in wanted])({}) if wanted else {}
    for value in wanted:
        array = arrays[str(value.name)].astype(numpy_type(value))
        replace_value(value, initializer(model.graph, f"{value.name}/computed", array))


def _is_constant(value: ir.Value) -> bool:
    """Whether a tensor is computed from constants alone, by tensors of static, moderate size."""

    def is_stored(value: ir.Value) -> bool:
        return ir.convenience.get_const_tensor(value) is not None

    def is_computed(value: ir.Value) -> bool:
        node, shape = value.producer(), value.shape
        if node is None or not node.inputs or shape is None or not shape.is_static():
            return False
        return prod(shape.numpy()) <= LARGEST_MASK

    return all(is_stored(each) or is_computed(each) for each in upstream([value], is_stored))


@dataclass(frozen=True)
class _Recipe:
    """The form in which a site is written.

    Attributes:
        why: why this way.
        unfused: why no fused kernel is expected; None if one is.
        head_size: the size that heads are padded to; None if they keep theirs.
        pair: how a lone head becomes two.
        width: queries per block, if the mask leaves a band visible; None for a single block.
        steps: blocks of causal queries, each with the keys up to its own; with a width, in every chunk.
    """

    why: str
    unfused: str | None
    head_size: int | None = None
    pair: Literal["halved", "copied"] | None = None
    width: int | None = None
    steps: int = 1

    @property
    def form(self) -> str:
        """The operators, and the number of blocks."""
        if self.width is not None:
            how = f", blocks of {self.width}" + (f", {self.steps} steps each" if self.steps > 1 else "")
        else:
            how = f", {self.steps} blocks" if self.steps > 1 else ""
        return f"MatMul·Softmax·MatMul{how}"


def _recipe(a: Attention, dtype: ir.DataType, sizes: Mapping[str, int], not_in_fp8: str | None) -> _Recipe:
    why = "fuses in 16-bit types, builds in every type" if a.scales is None else "in fp8, fused over static tokens"
    if not_in_fp8 is not None and a.scales is None:
        why = f"not in fp8: {not_in_fp8}; {why}"
    recipe = _Recipe(why, _unfused(a, dtype))
    if (width := _width(a, sizes)) is not None:
        recipe = replace(recipe, why=f"{recipe.why}; {IN_BAND}", width=width)
        if a.band is not None and a.band.is_causal_chunk and width == a.band.chunk >= MANY_IN_CHUNK:
            recipe = replace(recipe, steps=STEPS)
    elif a.causal_prefix == 0 and a.has_static_heads and usual(a.size("n_q"), sizes) >= MANY_TOKENS:  # no prefix
        recipe = replace(recipe, why=f"{recipe.why}; {IN_CAUSAL_BLOCKS}", steps=STEPS)
    if recipe.unfused is not None:
        return recipe
    d_k, d_v = a.size("d_k").factor, a.size("d_v").factor
    size = max(d_k, d_v, SMALLEST_HEAD)
    if not d_k == d_v == size:
        why = f"{recipe.why}; heads of {d_k} and {d_v} zero-padded to {size}"
        recipe = replace(recipe, why=why, head_size=size)
    if a.size("B") * a.size("H") == ONE and recipe.width is None:
        rows_vary = a.is_causal or (a.mask is not None and sizes_of(a.mask)[2] != ONE)
        how = "computed twice, because its mask differs by query" if rows_vary else "half of the queries each"
        why = f"{recipe.why}; a lone head is not fused, so it is written as two: {how}"
        recipe = replace(recipe, why=why, pair="copied" if rows_vary else "halved")
    return recipe


def _width(a: Attention, sizes: Mapping[str, int]) -> int | None:
    """Queries per block; None if the mask leaves no band, or blocks would save less than half of the products."""
    n_q, n_k = (usual(a.size(name), sizes) for name in ("n_q", "n_k"))
    if a.band is None or n_q * n_k < MANY_SCORES or not a.has_static_heads:
        return None
    widths, most = a.band.widths(BLOCKS), MOST_PRODUCTS * a.band.pairs(n_q)
    width = next((width for width in widths if a.band.products(width, n_q) <= most), widths[-1] if widths else None)
    return width if width is not None and 2 * a.band.products(width, n_q) <= n_q * n_k else None


def _unfused(a: Attention, dtype: ir.DataType) -> str | None:
    """Why no fused kernel supports this attention; None if one does."""
    d_k, d_v = a.size("d_k"), a.size("d_v")
    size = max(d_k.factor, d_v.factor)
    if dtype.bitwidth != 16:
        return (
            f"TensorRT has no fused attention kernel for {dtype.name.lower()}; deploy in fp16 or bf16, or set "
            "attention_precision for attention alone"
        )
    if not (d_k.is_static and d_v.is_static):
        return "the head size is dynamic"
    if a.softcap:
        return "a soft cap on the scores, which no fused kernel computes"
    if size > LARGEST_HEAD:
        return f"heads of {size} exceed what fused kernels support ({LARGEST_HEAD}); use more, smaller heads"
    return None


def why_not_in_fp8(a: Attention) -> str | None:
    """Why TensorRT-RTX fuses no attention of this kind in fp8; None if it does. Learned from plans for SM89 and SM120:
    with a dynamic number of tokens it multiplies in fp8 and materialises all scores in memory."""
    if (why := _unfused(a, ir.DataType.FLOAT16)) is not None:
        return why
    if not (a.size("n_q").is_static and a.size("n_k").is_static):
        return "TensorRT fuses attention in fp8 only if the numbers of queries and keys are static"
    if (n_k := a.size("n_k").factor) < FEWEST_KEYS:
        return f"TensorRT fuses attention in fp8 only over at least {FEWEST_KEYS} keys, not {n_k}"
    return None


def _emit_in(op: Builder, a: Attention, recipe: _Recipe, site: str, dtype: ir.DataType) -> ir.Value:
    """Attention in `dtype`, between casts if that is not the graph's type. Biases and the softmax keep their types."""
    if dtype == a.dtype:
        return _emit(op, a, recipe, site)
    operands: Sequence[Operand] = a.operands
    if recipe.unfused is None and _features_first(a.query.layout, a, "d_k", "n_q"):
        # moved here, where the builder cannot fold it into the next product
        operands = [Operand(_apart(op, x.value), x.layout) for x in a.for_products(op)]
    query, key, value = (Operand(cast(op, x.value, dtype), x.layout) for x in operands)
    return cast(op, _emit(op, replace(a, query=query, key=key, value=value), recipe, site), a.dtype)


def _emit(op: Builder, a: Attention, recipe: _Recipe, site: str, part: int = 0) -> ir.Value:
    if recipe.width is not None:
        of_block = replace(recipe, width=None)
        return in_blocks(op, a, recipe.width, lambda block, i: _emit(op, block, of_block, site, i), as_heads=False)
    if recipe.steps > 1:
        return in_causal_blocks(op, a, recipe.steps, lambda block, i: _emit_one(op, block, recipe, softmax_of(site, i)))
    return _emit_one(op, a, recipe, softmax_of(site, part))


def _emit_one(op: Builder, a: Attention, recipe: _Recipe, name: str) -> ir.Value:
    """Two products around one softmax."""
    fused = recipe.unfused is None
    query, key, value = (operand.value for operand in a.for_products(op))
    if recipe.head_size is not None:
        query, value = _padded(op, query, 3, recipe.head_size), _padded(op, value, 3, recipe.head_size)
        key = _padded(op, key, 2, recipe.head_size)
    if fused and a.scale == 1.0:
        query = _apart(op, query)
    if fused and _features_first(a.value.layout, a, "d_v", "n_k"):
        value = _apart(op, value)
    rows = query
    if recipe.pair is not None:
        key, value = _twice(op, key), _twice(op, value)
        query = _halved(op, query) if recipe.pair == "halved" else _twice(op, query)
        if a.mask is not None and a.mask.dtype != BOOL:
            last = a.mask.producer()
            if last is None or MASK_STEP not in last.metadata_props:
                a = replace(a, mask=_twice(op, a.mask))  # a bias that is broadcast over both is not fused
    result = decompose(op, a, query, key, value, name)
    if fused and _features_first(a.output.layout, a, "d_v", "n_q"):
        result = _apart(op, result)
    if recipe.pair is not None:
        result = _joined(op, result, rows, recipe.pair)
    d_v = a.size("d_v")
    if recipe.head_size not in (None, d_v.factor):
        result = up_to(op, result, 3, constant(op, [d_v.factor]), d_v.dim())
    return a.as_output(op, result, a.layout(*OUTPUT))


def _apart(op: Builder, x: ir.Value) -> ir.Value:
    """`x` plus -0.0, which changes no number but keeps two neighbouring operators separate.

    The builder would fold a transpose into the next product, or a product into a cast, and then no longer recognise
    attention. On the query a scale has the same effect.
    """
    return like(op.Add(x, constant(op, -0.0, x.dtype)), x)


def _features_first(layout: Layout, a: Attention, features: str, tokens: str) -> bool:
    """Whether a layout has its features before its tokens and therefore has to be transposed."""
    axes = layout.axes  # lacks the axes along which the tensor is repeated
    order = [[axes.index(axis) for axis in a.layout(name).axes if axis in axes] for name in (features, tokens)]
    return bool(order[0] and order[1]) and min(order[0]) < min(order[1])


def _padded(op: Builder, x: ir.Value, axis: int, size: int) -> ir.Value:
    """`x` padded with zeros along `axis` to `size`. They add nothing to a product; those of the values are sliced off
    the output."""
    if (missing := size - int(dims_of(x)[axis])) == 0:  # type: ignore[arg-type]
        return x
    pads = [0] * 8
    pads[4 + axis] = missing
    return resized(op.Pad(x, constant(op, pads)), x, axis, size)


def _twice(op: Builder, x: ir.Value) -> ir.Value:
    """`(1, …)` repeated as `(2, …)`."""
    return resized(op.Expand(x, constant(op, [2, 1, 1, 1])), x, 0, 2)


def _halved(op: Builder, query: ir.Value) -> ir.Value:
    """`(1, 1, n, d)` as `(2, 1, ⌈n/2⌉, d)`: no query sees another, so each half can be a head."""
    *_, n, d = dims_of(query)
    if isinstance(n, int):
        query = _padded(op, query, 2, n + n % 2)
    else:
        odd = op.Mod(op.Shape(query, start=2, end=3), constant(op, [2]))
        pads = op.Concat(constant(op, [0] * 6), odd, constant(op, [0]), axis=0)
        query = resized(op.Pad(query, pads), query, 2, ir.SymbolicDim(f"even_{n.value}"))
    halves = op.Reshape(query, constant(op, [2, 1, -1, int(d)]))  # type: ignore[arg-type]
    half = (n + 1) // 2 if isinstance(n, int) else ir.SymbolicDim(f"half_{n.value}")
    return typed(halves, query.dtype, [2, 1, half, d])


def _joined(op: Builder, result: ir.Value, rows: ir.Value, pair: str) -> ir.Value:
    """One head's output from a pair's: the halves joined, or the first of two equal heads.

    Args:
        result: `(2, 1, n', d)`.
        rows: the queries before they became a pair, `(1, 1, n, d)`.
        pair: how the head became a pair.
    """
    n, d = dims_of(rows)[2], dims_of(result)[3]
    if pair == "copied":
        return up_to(op, result, 0, constant(op, [1]), 1)
    joined = op.Reshape(result, constant(op, [1, 1, -1, int(d)]))  # type: ignore[arg-type]
    even = n + n % 2 if isinstance(n, int) else ir.SymbolicDim(f"even_{n.value}")
    typed(joined, result.dtype, [1, 1, even, d])
    if isinstance(n, int) and n % 2 == 0:
        return joined
    return up_to(op, joined, 2, op.Shape(rows, start=2, end=3), n)
