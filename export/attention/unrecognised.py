"""Attention that has no canonical form: weights that no softmax computes (a sigmoid, ReLU, `exp / (1 + sum)`), or a
softmax of scores that are mixed on the way, as talking heads are.

Such a site is two products of computed tensors with a nonlinearity between them, over pairs of a query and a key. The
walk goes forward from the first product while a value keeps the two dims of the pairs, to a product that sums over one
of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from attnforge.export.attention.contraction import contraction_of, is_product
from attnforge.export.graphs.attention import NotAttention
from attnforge.export.graphs.nodes import VIEWS, dependent_on_inputs
from attnforge.export.graphs.sizes import ONE, LayoutError, Size, sizes_of

_LINEAR = VIEWS | {
    "Add", "BatchNormalization", "Cast", "Concat", "Conv", "Div", "Dropout", "Einsum", "Expand", "Gather", "Gemm",
    "MatMul", "Mul", "Neg", "Pad", "ReduceSum", "Slice", "Split", "Sub", "Sum", "Tile", "Trilu", "Where",
}  # fmt: skip
"""Operators without which weights would be a linear function of the scores."""


@dataclass(frozen=True)
class Unrecognised:
    """Two products with a nonlinearity between them.

    Attributes:
        first: the product of queries and keys.
        path: the operators from the first product to the second.
        reason: why this has no canonical form.
    """

    first: ir.Node
    path: tuple[str, ...]
    reason: str


def unrecognised(graph: ir.Graph, known: Collection[ir.Node]) -> Iterator[Unrecognised]:
    """Yield the attention of a graph that has no canonical form.

    Args:
        graph: a graph whose other attention is canonical.
        known: softmax nodes whose sites are known.
    """
    computed = dependent_on_inputs(graph)
    for node in graph:
        pairs = _pairs_of(node) if is_product(node) and _both_in(node, computed) else None
        found = _to_second_product(node, pairs, computed, known) if pairs is not None else None
        if found is not None:
            yield found


def _both_in(product: ir.Node, computed: set[ir.Value]) -> bool:
    try:
        return all(side.value in computed for side in contraction_of(product).sides)
    except (NotAttention, LayoutError):
        return False


def _pairs_of(product: ir.Node) -> Counter[Size] | None:
    """The sizes of the two dims that each come from one operand of a product alone, a query's and a key's; None if it
    has no two."""
    contraction = contraction_of(product)
    left, right = ({label for label in side.labels if label is not None} for side in contraction.sides)
    sizes = dict(zip(contraction.output, sizes_of(product.outputs[0]), strict=True))
    own = [
        [size for label, size in sizes.items() if label in mine - other]
        for mine, other in ((left, right), (right, left))
    ]
    if not all(own) or ONE in (pairs := Counter((own[0][-1], own[1][-1]))):
        return None
    return pairs


def _to_second_product(
    first: ir.Node, pairs: Counter[Size], computed: set[ir.Value], known: Collection[ir.Node]
) -> Unrecognised | None:
    """Walk from a product to one that sums over its queries or keys, past a nonlinearity."""
    start: tuple[ir.Value, tuple[ir.Node, ...]] = first.outputs[0], ()
    pending, seen = [start], {first.outputs[0]}
    while pending:
        value, path = pending.pop(0)
        for user in dict.fromkeys(use.node for use in value.uses()):
            if user in known:
                continue
            if is_product(user) and _both_in(user, computed):
                if (nonlinear := [node for node in path if node.op_type not in _LINEAR]) and _sums(user, pairs):
                    names = first.op_type, *(node.op_type for node in path), user.op_type
                    return Unrecognised(first, names, _reason(nonlinear, path))
                continue
            for output in user.outputs:
                if output not in seen and _keeps(output, pairs):
                    seen.add(output)
                    pending.append((output, (*path, user)))
    return None


def _keeps(value: ir.Value, pairs: Counter[Size]) -> bool:
    try:
        return pairs <= Counter(sizes_of(value))
    except LayoutError:
        return False


def _sums(product: ir.Node, pairs: Counter[Size]) -> bool:
    return any(size in pairs for size in contraction_of(product).summed.values())


def _reason(nonlinear: list[ir.Node], path: tuple[ir.Node, ...]) -> str:
    """Why no canonical node computes these weights."""
    if any(node.op_type == "Softmax" for node in nonlinear):
        others = [node.op_type for node in path if node.op_type in ("Conv", "Einsum", "Gemm", "MatMul")]
        between = f"{others[0]} mixes its scores or weights" if others else "it is not next to its products"
        return f"there is a softmax, but {between}; fused attention kernels compute nothing in between"
    return f"{nonlinear[0].op_type} computes the weights; fused attention kernels compute a softmax"
