"""Floating-point operations of the products in a graph, counted node by node.

This is the only counter: the search for precisions estimates costs with it, and benchmarks compare times against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from math import prod

import onnx_ir as ir

from attnforge.export.attention.emit import is_standard
from attnforge.export.graphs.sizes import Unmeasurable, shape_at

PRODUCTS = ("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Attention")
"""Operators that multiply and add."""


def product_flops(node: ir.Node, sizes: Mapping[str, int]) -> int:
    """Floating-point operations of a matrix product, a convolution (including those on its padding) or attention, two
    per multiply-add; 0 for any other operator.

    Args:
        sizes: sizes of the symbolic dims.

    Raises:
        Unmeasurable: a shape is not known, or this form of the operator is not counted.
    """
    if node.domain != "" or node.op_type not in PRODUCTS:
        return 0
    if node.op_type == "Attention":
        *_, d_k = shape_at(node.inputs[0], sizes)
        *_, d_v = shape_at(node.inputs[2], sizes)
        return 2 * attention_scores(node, sizes) * (d_k + d_v)
    if node.op_type == "Einsum":
        return _einsum(node, sizes)
    a, b = (shape_at(value, sizes) for value in node.inputs[:2])
    if node.op_type == "ConvTranspose":
        return 2 * prod(a) * prod(b[1:])
    result = prod(shape_at(node.outputs[0], sizes))
    if node.op_type == "Conv":
        return 2 * result * prod(b[1:])
    return 2 * result * (a[0] if node.op_type == "Gemm" and node.attributes.get_int("transA") == 1 else a[-1])


def known_flops(node: ir.Node, sizes: Mapping[str, int]) -> int:
    """The same; 0 for a node whose work cannot be counted as well."""
    try:
        return product_flops(node, sizes)
    except Unmeasurable:
        return 0


def run_cost(model: ir.Model) -> Callable[[Mapping[str, int]], int]:
    """The floating-point operations of all products in a graph that is not modified, as a function of the sizes of its
    symbolic dims, computed once for each; products that cannot be counted are left out."""

    @cache
    def cost(sizes: tuple[tuple[str, int], ...]) -> int:
        return sum(known_flops(node, dict(sizes)) for node in model.graph)

    return lambda sizes: cost(tuple(sizes.items()))


def attention_scores(node: ir.Node, sizes: Mapping[str, int]) -> int:
    """The number of scores that a canonical Attention node needs: for causal attention, the pairs of a query and a key
    that it attends to; with a mask, all pairs.

    Raises:
        Unmeasurable: the node is not canonical, or a shape is not known.
    """
    if not is_standard(node):
        raise Unmeasurable("an Attention that is not canonical")
    (batch, heads, n_q, _), (_, _, n_k, _) = (shape_at(value, sizes) for value in node.inputs[:2])
    pairs = n_q * n_k
    if node.attributes.get_int("is_causal", 0):  # the query at i attends to the keys up to i
        rows = min(n_q, n_k)
        pairs = rows * (rows + 1) // 2 + (n_q - rows) * n_k
    return batch * heads * pairs


def _einsum(node: ir.Node, sizes: Mapping[str, int]) -> int:
    """One multiply-add for every combination of indices of two operands; with more, their order would have to be
    known."""
    terms = node.attributes["equation"].as_string().replace(" ", "").partition("->")[0].split(",")
    if len(terms) != 2 or any("..." in term for term in terms):
        raise Unmeasurable("an Einsum that does not have two operands whose indices are all named")
    shapes = [shape_at(value, sizes) for value in node.inputs]
    named = [pair for term, shape in zip(terms, shapes, strict=True) for pair in zip(term, shape, strict=True)]
    return 2 * prod(dict(named).values())
