"""Products of two tensors that sum over an axis, in any form: MatMul, Gemm, Einsum, ReduceSum of a Mul."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from attnforge.export.attention.operands import factor_of
from attnforge.export.graphs.attention import NotAttention
from attnforge.export.graphs.nodes import constant_input, inputs_of, is_op, maker_of
from attnforge.export.graphs.sizes import ONE, Size, sizes_of

Label = str | None
"""The name of a dim in a product; None for a broadcast dim."""


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two tensors of a product, with the labels of its dims."""

    value: ir.Value
    labels: list[Label]


@dataclass(frozen=True)
class Contraction:
    """A product of two tensors, with a label for every dim.

    Attributes:
        sides: the left and the right tensor.
        output: the labels of the result.
        summed: the labels that the product sums over, which both sides have, with their sizes.
    """

    sides: tuple[Side, Side]
    output: list[str]
    summed: dict[str, Size]

    @property
    def summed_dims(self) -> list[tuple[ir.Value, int]]:
        """The dims of both sides that the product sums over."""
        return [(side.value, i) for side in self.sides for i, label in enumerate(side.labels) if label in self.summed]


def is_product(node: ir.Node) -> bool:
    """Whether a node sums products of the elements of two tensors."""
    return is_op(node, "MatMul", "Gemm", "Einsum") or _summed_mul(node) is not None


def sum_of(mul: ir.Node) -> ir.Node | None:
    """The ReduceSum that is the only reader of a Mul's products; None if there is none."""
    users = [use.node for use in mul.outputs[0].uses()]
    if len(users) == 1 and users[0].op_type == "Cast":
        users = [use.node for use in users[0].outputs[0].uses()]
    return users[0] if len(users) == 1 and _summed_mul(users[0]) is mul else None


def contraction_of(node: ir.Node) -> Contraction:
    """The labels of a product for which :func:`is_product` holds.

    Raises:
        NotAttention: the product does more than sum over an axis that both sides have.
    """
    mul = _summed_mul(node)
    return _product_of_terms(node) if mul is None else _sum_of_products(node, mul)


def _summed_mul(node: ir.Node) -> ir.Node | None:
    """The Mul whose products `node` sums; None if `node` is not such a ReduceSum, or something else reads the
    products."""
    if not is_op(node, "ReduceSum"):
        return None
    mul = maker_of(node.inputs[0])
    if mul is not None and mul.op_type == "Cast" and mul.inputs[0] is not None and len(mul.outputs[0].uses()) == 1:
        product = mul.inputs[0]  # 16-bit products are summed in fp32
        mul = product.producer() if product.dtype is not None and product.dtype.bitwidth == 16 else None
    return mul if is_op(mul, "Mul") and not factor_of(mul) and len(mul.outputs[0].uses()) == 1 else None


def _broadcast(sizes: list[Size], labels: list[str]) -> list[Label]:
    """The trailing `labels` for dims of `sizes`, with None for broadcast dims."""
    last = labels[len(labels) - len(sizes) :]
    return [None if size == ONE else label for size, label in zip(sizes, last, strict=True)]


def _sum_of_products(node: ir.Node, mul: ir.Node) -> Contraction:
    """A ReduceSum of a Mul."""
    axes = constant_input(node, 1)
    if axes is None:
        raise NotAttention("products are summed over axes that are not constant")
    sizes = sizes_of(mul.outputs[0])
    labels = [f"dim{i}" for i in range(len(sizes))]
    summed = {labels[i]: sizes[i] for i in axes.reshape(-1)}
    kept = {label: f"{label} kept" for label in summed} if node.attributes.get_int("keepdims", 1) else {}
    output = [kept.get(label, label) for label in labels if label in kept or label not in summed]
    left_side, right_side = (Side(value, _broadcast(sizes_of(value), labels)) for value in inputs_of(mul))
    return Contraction((left_side, right_side), output, summed)


def _product_of_terms(node: ir.Node) -> Contraction:
    """A MatMul, a Gemm or an Einsum."""
    equation = _equation(node)
    terms, _, output = equation.partition("->")
    pairs = list(zip(inputs_of(node), terms.split(","), strict=True))
    ranks = [len(sizes_of(value)) - len(term.replace("...", "")) for value, term in pairs]  # of the ellipsis
    batch = [f"{node.op_type} batch{i}" for i in range(max(ranks))]
    sides = []
    for (value, term), rank in zip(pairs, ranks, strict=True):
        first = max(term.find("..."), 0)
        sides.append(Side(value, _spread(term, _broadcast(sizes_of(value)[first : first + rank], batch))))
    left, right = sides
    result = [label for label in _spread(output, batch) if label is not None]
    sizes = dict(pair for side in (right, left) for pair in zip(side.labels, sizes_of(side.value), strict=True))
    summed = {label: size for label, size in sizes.items() if label is not None and label not in result}
    named = [[label for label in side.labels if label is not None] for side in sides]
    is_shared = all(label in named[0] and label in named[1] for label in summed)
    if any(len(set(labels)) < len(labels) for labels in named) or not is_shared:
        raise NotAttention(f"an Einsum that takes a diagonal or sums over an axis of one side alone: {equation}")
    return Contraction((left, right), result, summed)


def _equation(node: ir.Node) -> str:
    """The equation of an Einsum, or of the Einsum that a MatMul or a Gemm is."""
    if node.op_type == "Einsum":
        equation = node.attributes["equation"].as_string().replace(" ", "")
        if len(node.inputs) != 2 or equation.endswith("->") or "->" not in equation:
            raise NotAttention(f"an Einsum that is not a product of two tensors: {equation}")
        return equation
    if node.op_type == "Gemm":
        if node.attributes.get_float("alpha", 1.0) != 1.0 or any(v is not None for v in node.inputs[2:]):
            raise NotAttention("a Gemm with a bias or a factor on the product")
        left = "sr" if node.attributes.get_int("transA", 0) else "rs"
        right = "cs" if node.attributes.get_int("transB", 0) else "sc"
        return f"{left},{right}->rc"
    left_rank, right_rank = (len(sizes_of(value)) for value in inputs_of(node))
    row, column = "r" if left_rank > 1 else "", "c" if right_rank > 1 else ""
    return f"...{row}s,...s{column}->...{row}{column}"


def _spread(term: str, batch: Sequence[Label]) -> list[Label]:
    """The letters of an Einsum term, with `batch` in place of its ellipsis."""
    front, ellipsis, back = term.partition("...")
    return [*front, *(batch if ellipsis else ()), *back]
