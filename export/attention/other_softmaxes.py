"""Softmaxes that are no attention: of a classifier, of a gate over experts or channels, or without effect."""

from __future__ import annotations

import onnx_ir as ir

from attnforge.export.attention.contraction import contraction_of, is_product
from attnforge.export.attention.layout import Layout, before_view, is_view
from attnforge.export.attention.unrecognised import COLUMNS, products_after
from attnforge.export.graphs.attention import NotAttention
from attnforge.export.graphs.nodes import input_of, is_op
from attnforge.export.graphs.sizes import LayoutError, sizes_of


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
        (*_, product), sides, is_chosen = found
        summed = contraction_of(product).summed
        dims = [(side.value, i) for side in sides for i, label in enumerate(side.labels) if label in summed]
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
    if is_view(node):
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
