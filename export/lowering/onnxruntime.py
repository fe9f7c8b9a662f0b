"""Canonical attention to the form that ONNX Runtime runs fastest on a CPU.

Its `com.microsoft::MultiHeadAttention` without a mask takes a path that never holds the n² scores: less time, and
memory that grows with n instead of n². Its operands must have the heads side by side behind the tokens, or one head at
a time; where that costs transposes that the plain products do without (features as rows, say) it pays from some
hundred tokens on. With a mask or a causal flag no fused form beats the plain products, for it holds the scores too.
16-bit types have no kernels for either: on the CPU the graph computes in fp32 between inputs and outputs of the
bundle's own type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attnforge.export.canonicalize import Site
from attnforge.export.layout import (
    Builder,
    Layout,
    Size,
    effort,
    insert,
    needs_transpose,
    rearrange,
    replace_value,
    typed,
)
from attnforge.export.lowering.attention import Attention, Lowered, attentions, decompose
from attnforge.export.precision import widen

CONTRIB = "com.microsoft"

MANY_SCORES = 512 * 512
"""Scores a head from which not holding them is worth any transposes that it takes."""


def lower(model: ir.Model, sites: list[Site], sizes: Mapping[str, int], device: str = "cpu") -> list[Lowered]:
    """Rewrite every canonical site of `model`, in place, for ONNX Runtime; say what was chosen and why.

    Args:
        model: with canonical Attention nodes.
        sites: what :func:`~attnforge.export.canonicalize.canonicalize` found in it.
        sizes: what each symbol of the dims most often is.
        device: on `"cuda"` the types stay the graph's; on `"cpu"` 16-bit ones are widened.
    """
    if device == "cpu":
        widen(model)
    lowered = []
    for site, attention in attentions(model, sites):
        emit, one = _choose(site.name, attention, sizes)
        result = insert(model.graph, attention.node, emit)
        replace_value(attention.output, result)
        if one.unfused is None:
            model.graph.opset_imports[CONTRIB] = 1
        lowered.append(one)
    RemoveUnusedNodesPass()(model)
    return lowered


def _choose(site: str, a: Attention, sizes: Mapping[str, int]) -> tuple[Callable[[Builder], ir.Value], Lowered]:
    fused_name, softmax_name = f"{site}/MultiHeadAttention", f"{site}/Softmax"
    products = partial(_products, a=a, name=softmax_name)
    if a.mask is not None or a.is_causal:
        why = "with a mask no fused form of ONNX Runtime's CPU is faster than the products written out"
        return products, Lowered(site, "MatMul·Softmax·MatMul", why, softmax_name, unfused=why)
    if a.softcap:
        why = "a soft cap on the scores, which the fused form does not know"
        return products, Lowered(site, "MatMul·Tanh·Softmax·MatMul", why, softmax_name, unfused=why)
    if a.softmax_dtype != a.dtype:
        why = "the softmax is computed in another type than the products, which the fused form cannot"
        return products, Lowered(site, "MatMul·Softmax·MatMul", why, softmax_name, unfused=why)
    layouts, heads = _apart(a), 1
    if a.size("H").is_static and _moves(a, _packed(a)) <= _moves(a, _apart(a)):
        layouts, heads = _packed(a), a.size("H").factor
    scores = _typical(a.size("n_q"), sizes) * _typical(a.size("n_k"), sizes)
    if scores < MANY_SCORES and _moves(a, layouts) > _moves_of_products(a):
        why = f"the fused form would need other layouts, which about {scores} scores a head do not repay"
        return products, Lowered(site, "MatMul·Softmax·MatMul", why, softmax_name, unfused=why)
    why = "the fast path without a mask: memory linear in tokens"
    fused = partial(_fused, a=a, layouts=layouts, heads=heads, name=fused_name)
    return fused, Lowered(site, f"{CONTRIB}::MultiHeadAttention", why, fused_name)


def _typical(size: Size, sizes: Mapping[str, int]) -> int:
    return size.factor * prod(sizes.get(symbol, 1) for symbol in size.symbols)


def _packed(a: Attention) -> list[Layout]:
    """Query, key, value and output with the heads side by side in the last dim."""
    return [a.layout("B", n, f"H {d}") for n, d in (("n_q", "d_k"), ("n_k", "d_k"), ("n_k", "d_v"), ("n_q", "d_v"))]


def _apart(a: Attention) -> list[Layout]:
    """Query, key, value and output with every head a batch of its own."""
    return [a.layout("B H", n, d) for n, d in (("n_q", "d_k"), ("n_k", "d_k"), ("n_k", "d_v"), ("n_q", "d_v"))]


def _moves(a: Attention, layouts: list[Layout]) -> int:
    """How many operands must be transposed, or have their shape computed, to have `layouts`."""
    have = [a.query.layout, a.key.layout, a.value.layout, a.output_layout]
    return sum(effort(one, other) for one, other in zip(have, layouts, strict=True))


def _moves_of_products(a: Attention) -> int:
    """The same for the products, where the last two dims may come swapped: ONNX Runtime's product takes them so."""
    ends = (("n_q", "d_k"), ("n_k", "d_k"), ("n_k", "d_v"), ("n_q", "d_v"))
    have = (a.query.layout, a.key.layout, a.value.layout, a.output_layout)
    return sum(
        min(effort(layout, a.layout("B", "H", n, d)), effort(layout, a.layout("B", "H", d, n)))
        for layout, (n, d) in zip(have, ends, strict=True)
    )


def _fused(op: Builder, a: Attention, layouts: list[Layout], heads: int, name: str) -> ir.Value:
    *inner, out = layouts
    operands = (a.query, a.key, a.value)
    inputs = [rearrange(op, o.value, o.layout, layout, a.sized) for o, layout in zip(operands, inner, strict=True)]
    result = op.op("MultiHeadAttention", inputs, {"num_heads": heads, "scale": a.scale}, domain=CONTRIB, name=name)
    typed(result, a.dtype, [size.dim() for size in out.sizes()])
    return rearrange(op, result, out, a.output_layout, a.sized)


def _products(op: Builder, a: Attention, name: str) -> ir.Value:
    rows, columns = a.layout("B", "H", "n_q", "d_v"), a.layout("B", "H", "d_v", "n_q")
    as_columns = needs_transpose(rows, a.output_layout) and not needs_transpose(columns, a.output_layout)
    value_layout = a.layout("B", "H", "d_v", "n_k") if as_columns else a.layout("B", "H", "n_k", "d_v")
    query = rearrange(op, a.query.value, a.query.layout, a.layout("B", "H", "n_q", "d_k"), a.sized)
    key = rearrange(op, a.key.value, a.key.layout, a.layout("B", "H", "d_k", "n_k"), a.sized)
    value = rearrange(op, a.value.value, a.value.layout, value_layout, a.sized)
    result = decompose(op, a, query, key, value, name, as_columns)
    return rearrange(op, result, columns if as_columns else rows, a.output_layout, a.sized)
