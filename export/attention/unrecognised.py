"""Attention whose weights no softmax computes: a sigmoid, ReLU, `exp / (1 + sum)`.

Such a site is two products of computed tensors with a nonlinearity between them, over pairs of a query and a key. The
walk goes forward from the first product while a value keeps the two dims of the pairs, to a product that sums over one
of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

import onnx_ir as ir

from attnforge.export.attention.contraction import Side, contraction_of, is_product
from attnforge.export.graphs.attention import NotAttention
from attnforge.export.graphs.nodes import VIEWS, dependent_on_inputs, is_op
from attnforge.export.graphs.sizes import ONE, LayoutError, Size, sizes_of

_LINEAR = VIEWS | {
    "Add", "BatchNormalization", "Cast", "Concat", "Conv", "Div", "Dropout", "Einsum", "Expand", "Gather", "Gemm",
    "MatMul", "Mul", "Neg", "Pad", "ReduceSum", "Slice", "Split", "Sub", "Sum", "Tile", "Trilu", "Where",
}  # fmt: skip
"""Operators without which weights would be a linear function of the scores."""


def unrecognised(graph: ir.Graph) -> Iterator[tuple[ir.Node, list[str], str]]:
    """Find the attention of a graph that has no canonical form and no softmax: two products with a nonlinearity between
    them.

    Args:
        graph: a graph whose other attention is canonical.

    Yields:
        the product of queries and keys, the operators from it to the second product, and why this has no canonical
        form.
    """
    computed = dependent_on_inputs(graph)
    for node in graph:
        if not is_product(node) or not _both_in(node, computed) or (pairs := _pairs_of(node)) is None:
            continue
        for path, _ in products_after(node, pairs, computed):
            nonlinear = [other.op_type for other in path[1:-1] if other.op_type not in _LINEAR]
            if nonlinear and sums(path[-1], pairs):
                reason = f"{nonlinear[0]} computes the weights; fused attention kernels compute a softmax"
                yield node, [other.op_type for other in path], reason
                break


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


def products_after(
    first: ir.Node, kept: Counter[Size], computed: set[ir.Value]
) -> Iterator[tuple[tuple[ir.Node, ...], list[Side]]]:
    """Walk forward from a node while values keep dims of some sizes, up to softmaxes and products of two computed
    tensors.

    Args:
        first: the node.
        kept: the sizes.
        computed: the values that depend on the graph's inputs.

    Yields:
        the nodes from the first to a product, and the side of the product that the walk did not come from.
    """
    start: tuple[ir.Value, tuple[ir.Node, ...]] = first.outputs[0], (first,)
    pending, seen = [start], {first.outputs[0]}
    while pending:
        value, path = pending.pop(0)
        for user in dict.fromkeys(use.node for use in value.uses()):
            if is_op(user, "Softmax"):
                continue
            if is_product(user) and _both_in(user, computed):
                yield (*path, user), [side for side in contraction_of(user).sides if side.value not in seen]
                continue
            for output in user.outputs:
                if output not in seen and _keeps(output, kept):
                    seen.add(output)
                    pending.append((output, (*path, user)))


def _keeps(value: ir.Value, pairs: Counter[Size]) -> bool:
    try:
        return pairs <= Counter(sizes_of(value))
    except LayoutError:
        return False


def sums(product: ir.Node, sizes: Collection[Size]) -> bool:
    """Whether a product sums over a dim of one of the sizes."""
    return any(size in sizes for size in contraction_of(product).summed.values())
