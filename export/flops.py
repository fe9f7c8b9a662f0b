"""Floating-point operations of the products in a graph, counted node by node.

This is the only counter: the search for precisions estimates costs with it, and benchmarks compare times against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from math import prod

import onnx_ir as ir

from attnforge.export.attention.operators import is_standard
from attnforge.export.graphs.sizes import LayoutError, sizes_of
from attnforge.export.lowering.forms import Unmeasurable, evaluated

PRODUCTS = ("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Attention")
"""Operators that multiply and add."""


class Uncountable(Exception):
    """An operator's work or a tensor's size is unknown; the message says why."""


def product_flops(node: ir.Node, sizes: Mapping[str, int]) -> int:
    """Floating-point operations of a matrix product, a convolution (including those on its padding) or attention, two
    per multiply-add; 0 for any other operator.

    Args:
        sizes: sizes of the symbolic dims.

    Raises:
        Uncountable: a shape is not known, or this form of the operator is not counted.
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


def run_cost(model: ir.Model) -> Callable[[Mapping[str, int]], int]:
    """The floating-point operations of all products in a graph that is not modified, as a function of the sizes of its
    symbolic dims, computed once for each; products that cannot be counted are left out."""
    counts: dict[tuple[tuple[str, int], ...], int] = {}

    def cost(sizes: Mapping[str, int]) -> int:
        key = tuple(sizes.items())
        if key not in counts:
            counts[key] = 0
            for node in model.graph:
                with suppress(Uncountable):
                    counts[key] += product_flops(node, sizes)
        return counts[key]

    return cost


def attention_scores(node: ir.Node, sizes: Mapping[str, int]) -> int:
    """The number of scores that a canonical Attention node needs: for causal attention, the pairs of a query and a key
    that it attends to; with a mask, all pairs.

    Raises:
        Uncountable: the node is not canonical, or a shape is not known.
    """
    if not is_standard(node):
        raise Uncountable("an Attention that is not canonical")
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
        raise Uncountable("an Einsum that does not have two operands whose indices are all named")
    shapes = [shape_at(value, sizes) for value in node.inputs]
    named = [pair for term, shape in zip(terms, shapes, strict=True) for pair in zip(term, shape, strict=True)]
    return 2 * prod(dict(named).values())


def shape_at(value: ir.Value | None, sizes: Mapping[str, int]) -> list[int]:
    """The shape of a value.

    Args:
        value: an operand that is present.
        sizes: sizes of the symbolic dims.

    Raises:
        Uncountable: it is not known.
    """
    assert value is not None
    try:
        return [evaluated(size, sizes) for size in sizes_of(value)]
    except LayoutError as error:
        raise Uncountable(str(error)) from error
    except Unmeasurable as error:
        raise Uncountable(f"the shape {value.shape} of {value.name!r} is not known") from error
