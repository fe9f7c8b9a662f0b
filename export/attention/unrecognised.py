"""Attention whose weights no softmax computes: a sigmoid, ReLU, `exp / (1 + sum)`. And softmaxes that are no attention.

Such a site is two products of computed tensors with a nonlinearity between them, over pairs of a query and a key. The
walk goes forward from the first product while a value keeps the two dims of the pairs, to a product that sums over one
of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import onnx_ir as ir

from attnforge.export.attention.contraction import Contraction, contraction_of, is_product
from attnforge.export.attention.layout import Layout, after_view, before_view
from attnforge.export.graphs.attention import NotAttention
from attnforge.export.graphs.nodes import VIEWS, dependent_on_inputs, input_of, inputs_of, is_op, upstream
from attnforge.export.graphs.sizes import ONE, LayoutError, sizes_of

_LINEAR = VIEWS | {
    "Add", "BatchNormalization", "Cast", "Concat", "Conv", "Div", "Dropout", "Einsum", "Expand", "Gather", "Gemm",
    "MatMul", "Mul", "Neg", "Pad", "ReduceSum", "Slice", "Split", "Sub", "Sum", "Tile", "Trilu", "Where",
}  # fmt: skip
"""Operators without which weights would be a linear function of the scores."""


_CHOOSE = ("Compress", "Gather", "GatherElements", "Slice", "Split", "TopK")
"""Operators that return a part of a dim, or choose some of it."""

COMPUTES = "{} computes the weights; fused attention kernels compute a softmax"

COLUMNS = {"MatMul": -1, "Gemm": -1, "Conv": 1}
"""The dim of a product that comes from its second operand alone."""

Origins = list[set[int]]
"""For each dim of a value, the dims of the first value of a walk that it comes from."""


def unrecognised(graph: ir.Graph) -> Iterator[tuple[tuple[ir.Node, ...], str]]:
    """Find the attention of a graph that has no canonical form and no softmax: two products with a nonlinearity between
    them.

    Args:
        graph: a graph whose other attention is canonical.

    Yields:
        the nodes from the product of queries and keys to the second product, and why this has no canonical form.
    """
    computed = dependent_on_inputs(graph)
    for node in graph:
        if (pairs := _pairs_of(node, computed)) is None:
            continue
        for path, _, is_chosen in products_after(node, pairs, computed):
            if is_chosen:
                continue
            scores, weights = path[0].outputs[0], path[-2].outputs
            aside = sorted(_between(scores, weights), key=_is_test)
            if any(map(is_product, aside)):  # a layer of its own, and a residual around it
                aside = []
            computing = (*path[1:-1], *aside)
            nonlinear = [other.op_type for other in computing if _is_nonlinear(other, scores)]
            if nonlinear:
                yield path, COMPUTES.format(nonlinear[0])
                break


def _between(scores: ir.Value, weights: Sequence[ir.Value]) -> list[ir.Node]:
    """The nodes through which weights depend on scores, but for their sizes and other attention."""
    needed, nodes, todo = set(upstream(weights, lambda value: value is scores)), dict[ir.Node, None](), [scores]
    for value in todo:
        for node in value.consumers():
            if node not in nodes and not is_op(node, *_APART) and not needed.isdisjoint(node.outputs):
                nodes[node] = None
                todo += node.outputs
    return list(nodes)


_APART = ("Attention", "Shape", "Size", "Softmax")


def _is_test(node: ir.Node) -> bool:
    """Whether a node returns booleans, as comparisons do."""
    return node.outputs[0].dtype == ir.DataType.BOOL


def _is_nonlinear(node: ir.Node, scores: ir.Value) -> bool:
    """Whether a node is no linear function of scores, as products and quotients of two values that are computed from
    them."""
    if not is_op(node, "Mul", "Div"):
        return node.op_type not in _LINEAR
    return all(scores in upstream([side], lambda value: value is scores) for side in inputs_of(node))


def _product(node: ir.Node, computed: set[ir.Value]) -> Contraction | None:
    """The product of two computed tensors that a node is; None for other nodes."""
    try:
        contraction = contraction_of(node) if is_product(node) else None
    except (NotAttention, LayoutError):
        return None
    is_computed = contraction is not None and all(side.value in computed for side in contraction.sides)
    return contraction if is_computed else None


def _pairs_of(node: ir.Node, computed: set[ir.Value]) -> set[int] | None:
    """The two dims of a product of computed tensors that each come from one operand alone, a query's and a key's; None
    if it has no two."""
    if (contraction := _product(node, computed)) is None:
        return None
    left, right = ({label for label in side.labels if label is not None} for side in contraction.sides)
    sizes = sizes_of(node.outputs[0])
    own = [
        [i for i, label in enumerate(contraction.output) if label in mine - other]
        for mine, other in ((left, right), (right, left))
    ]
    if not all(own):
        return None
    pairs = {dims[-1] for dims in own}
    return None if ONE in [sizes[i] for i in pairs] else pairs


def products_after(
    first: ir.Node, kept: Collection[int], computed: set[ir.Value]
) -> Iterator[tuple[tuple[ir.Node, ...], list[tuple[ir.Value, int]], bool]]:
    """Walk forward from a node while values have some of its dims, whole or in parts, up to softmaxes and products of
    two computed tensors.

    Args:
        first: the node.
        kept: the dims, of which a product sums over one, or over another of the node's.
        computed: the values that depend on the graph's inputs.

    Yields:
        the nodes from the first to a product, the dims that the product sums over of what the walk did not come from,
        and whether the way to it takes a part of a dim, or chooses some of it.
    """
    if first.outputs[0].shape is None:
        return
    origins: dict[ir.Value, Origins] = {first.outputs[0]: [{i} for i in range(len(first.outputs[0].shape))]}
    pending: list[tuple[ir.Value, tuple[ir.Node, ...], bool]] = [(first.outputs[0], (first,), False)]
    while pending:
        value, path, is_chosen = pending.pop(0)
        for user in value.consumers():
            if is_op(user, "Softmax"):
                continue
            if (contraction := _product(user, computed)) is not None:
                dims = contraction.summed_dims
                if any(origins[operand][i] for operand, i in dims if operand in origins):
                    yield (*path, user), [dim for dim in dims if dim[0] not in origins], is_chosen
                continue
            for output in user.outputs:
                after = None if output in origins else _origins_after(user, value, origins[value], output)
                if after is not None and set(kept) <= set().union(*after):
                    origins[output] = after
                    chosen = is_chosen or (user.op_type in _CHOOSE and sizes_of(output) != sizes_of(value))
                    pending.append((output, (*path, user), chosen))


def _origins_after(node: ir.Node, value: ir.Value, origins: Origins, output: ir.Value) -> Origins | None:
    """The origins of the dims of a node's output, given those of an input; None if the sizes are not known, or the
    output is of integers."""
    if output.dtype is not None and output.dtype.is_integer():
        return None
    try:
        before, sizes = sizes_of(value), sizes_of(output)
        if is_op(node, *VIEWS):
            layout = Layout.fresh(value)
            after = after_view(node, layout)  # before dims are read, which it may split
            dims = [*zip(layout.dims, origins, strict=True)]
            return [set().union(*(of for dim, of in dims if not set(dim).isdisjoint(new))) for new in after.dims]
    except LayoutError:
        return None
    result: Origins = [set() for _ in sizes]
    moved, lost = [], set[int]()
    for i, of_dim in enumerate(origins):  # most dims stay where they are, counted from the last
        place = i + len(sizes) - len(before)
        if place >= 0 and (sizes[place] == before[i] or (node.op_type in _CHOOSE and len(sizes) == len(before))):
            result[place] = of_dim
        elif of_dim:
            moved.append((before[i], of_dim))
    for size, of_dim in moved:
        if (place := next((j for j, other in enumerate(sizes) if other == size and not result[j]), -1)) >= 0:
            result[place] = of_dim
        else:  # summed over, say, and so are the other parts of the same dims
            lost |= of_dim
    result = [of_dim - lost for of_dim in result]
    if node.op_type in COLUMNS and len(sizes) == len(before):
        result[COLUMNS[node.op_type] if value is node.inputs[0] else -2] = set()
    return result


# --- softmaxes that are no attention ----------------------------------------------------------------------------------

# Softmaxes that are no attention: of a classifier, of a gate over experts or channels, or without effect.


def why_no_attention(node: ir.Node, source: ir.Value, axis: int, computed: set[ir.Value], is_site: bool) -> str | None:
    """Return why a softmax that has no canonical form is no attention; None if it is attention.

    Attention weights values: the softmax, or what is computed from it by element, meets another computed tensor in a
    product that sums over one of its dims. A mixture of experts does too, but there constant weights give the dims, of
    the softmax and of the values.

    Args:
        node: the softmax, or the last node of one that is written by hand.
        source: its scores.
        axis: the axis that it runs over.
        computed: the values that depend on the graph's inputs.
        is_site: whether a walk from it arrived at queries and keys, or at values.
    """
    if source not in computed:
        return "it does not depend on the inputs"
    axis %= len(sizes_of(source))
    is_gate = _is_of_weights(source, axis, computed)
    found = next(products_after(node, [axis], computed), None)
    if found is not None:
        _, dims, is_chosen = found
        of_weights = dims and all(_is_of_weights(value, i, computed, joined=True) for value, i in dims)
        is_gate &= is_chosen or bool(of_weights)  # the best of some experts are experts
    if is_gate:
        return "its axis is one of weights, such as the classes of a classifier, or the experts or channels of a gate"
    return None if is_site or found is not None else "it weights no values that depend on the inputs"


def _is_of_weights(value: ir.Value, axis: int, computed: set[ir.Value], *, joined: bool = False) -> bool:
    """Whether a dim comes from constant weights, or if `joined`, from joining tensors, on every way on which no two
    computed tensors are multiplied."""
    pending, seen = [(value, axis)], {(value, axis)}
    while pending:
        value, axis = pending.pop()
        if value not in computed:
            continue
        node = value.producer()
        if joined and is_op(node, "Concat") and axis == node.attributes.get_int("axis", 0) % len(sizes_of(value)):
            continue
        try:
            before = [] if node is None else _before(node, axis, computed)
        except (NotAttention, LayoutError):
            return False
        if not before:
            return False
        pending += [step for step in before if step not in seen]
        seen.update(before)
    return True


def _before(node: ir.Node, axis: int, computed: set[ir.Value]) -> list[tuple[ir.Value, int]]:
    """The dims of a node's inputs from which a dim of its result comes; empty if that is not known, or if it multiplies
    two computed tensors."""
    result, source = node.outputs[0], input_of(node)
    sizes = sizes_of(result)
    if is_op(node, *VIEWS):
        after = Layout.fresh(result)
        before, wanted = before_view(node, after), set(after.dims[axis])
        return [(source, i) for i, dim in enumerate(before.dims) if not wanted.isdisjoint(dim)]
    if is_op(node, *COLUMNS) and axis == COLUMNS[node.op_type] % len(sizes):
        weights = input_of(node, 1)
        return [] if weights in computed else [(weights, axis)]
    if is_product(node):
        contraction = contraction_of(node)
        label = contraction.output[axis]
        if all(side.value in computed for side in contraction.sides):
            return []
        return [(side.value, side.labels.index(label)) for side in contraction.sides if label in side.labels]
    same = [value for value in node.inputs if value is not None and value in computed]
    return [(v, axis) for v in same if len(sizes_of(v)) == len(sizes) and sizes_of(v)[axis] == sizes[axis]]
