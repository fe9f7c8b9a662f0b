"""Restore a decomposed softmax to a Softmax, and multiply each softmax of a sum by the values.

Three forms of a decomposed softmax are recognised: `exp(x) / sum(exp(x))`, with or without the maximum subtracted;
`exp(log_softmax(x))`; and the division after the product with the values, `(exp(x) @ v) / sum(exp(x))`. If the maximum
is not subtracted, the graph may overflow where Softmax does not; wherever it is finite, both give the same result.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import permutations, repeat

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import PassResult

from attnforge.export.graphs.build import (
    Builder,
    broadcast_like,
    constant,
    dims_of,
    insert,
    like,
    replace_value,
    resized,
)
from attnforge.export.graphs.nodes import VIEWS, constant_input, input_of, inputs_of, is_op, maker_of, rank_of

_PASSED = VIEWS | {"Cast", "Mul", "Div", "Dropout"}
"""Operators that may lie between a softmax and a guard against its NaN."""


def restore_softmax(model: ir.Model) -> PassResult:
    """Rewrite every decomposed softmax and every product of a sum of softmaxes of `model`, in place."""
    modified = [_restore(model.graph, node) for node in list(model.graph) if is_op(node, "Div", "Exp")]
    modified += [_distribute(model.graph, node) for node in list(model.graph) if is_op(node, "MatMul")]
    return PassResult(model, any(modified))


def _restore(graph: ir.Graph, node: ir.Node) -> bool:
    """Replace the decomposed softmax that ends at a Div or Exp; return whether there is one."""
    if node.outputs[0].shape is None:
        return False
    scores = _divided(node) if node.op_type == "Div" else _exponentiated(node)
    if scores is not None:
        replace_value(node.outputs[0], _softmax(graph, node, *scores))
        return True
    product = maker_of(node.inputs[0]) if node.op_type == "Div" else None
    if product is None or (late := _divided_late(node, product)) is None:
        return False
    product.replace_input_with(0, _softmax(graph, product, *late))
    replace_value(node.outputs[0], product.outputs[0])
    return True


def _softmax(graph: ir.Graph, at: ir.Node, source: ir.Value, axis: int) -> ir.Value:
    """Insert a Softmax before `at`, with the metadata of `at`."""
    result = insert(graph, at, lambda op: like(op.Softmax(source, axis=axis), source), stem=f"{at.name}/restored")
    softmax = result.producer()
    assert softmax is not None
    softmax.metadata_props.update(at.metadata_props)
    return result


def _divided(div: ir.Node) -> tuple[ir.Value, int] | None:
    """The scores and axis of the softmax that a Div computes; None if it is not a softmax."""
    exp, total = (_maker(value) for value in div.inputs)
    scores = _summed(exp, total)
    if scores is None or exp is None or div.outputs[0].dtype != exp.outputs[0].dtype:
        return None
    return scores if _is_shifted(*scores) or not _is_guarded(div.outputs[0]) else None


def _summed(exp: ir.Node | None, total: ir.Node | None) -> tuple[ir.Value, int] | None:
    """The exponents of the exponentials that `exp` computes, and the axis along which `total` sums them; None if they
    are no such nodes."""
    source, axis = _sum_over(total) or (None, 0)
    return (input_of(exp), axis) if is_op(exp, "Exp") and _maker(source) is exp else None


def _is_shifted(scores: ir.Value, axis: int) -> bool:
    """Whether the maximum of the scores is subtracted from them, so that no quotient is 0/0."""
    node = scores.producer()
    if not is_op(node, "Sub"):
        return False
    largest = _maker(node.inputs[1])
    if largest is None or largest.op_type != "ReduceMax" or one_axis(largest) != axis:
        return False
    return before_casts(largest.inputs[0]) is before_casts(node.inputs[0])


def _is_guarded(weights: ir.Value) -> bool:
    """Whether a node tests the weights for NaN. If the maximum is not subtracted, very low scores give 0/0, which is
    NaN, where Softmax gives numbers."""
    return any(
        use.node.op_type in ("IsNaN", "Equal") or (use.node.op_type in _PASSED and _is_guarded(use.node.outputs[0]))
        for use in weights.uses()
    )


def _exponentiated(exp: ir.Node) -> tuple[ir.Value, int] | None:
    """The same for an Exp: of a LogSoftmax, or of scores minus their log-sum-exp."""
    log = maker_of(exp.inputs[0])
    if not is_op(log, "LogSoftmax", "Sub"):
        return None
    source = input_of(log)
    if log.op_type == "LogSoftmax":
        return source, log.attributes.get_int("axis", -1)
    total = maker_of(log.inputs[1])
    axis = one_axis(total) if is_op(total, "ReduceLogSumExp") and total.inputs[0] is source else None
    return None if axis is None else (source, axis)


def _divided_late(div: ir.Node, product: ir.Node) -> tuple[ir.Value, int] | None:
    """The same for a Div of a product of exponentials and values by the sum of the exponentials."""
    if not is_op(product, "MatMul") or len(product.outputs[0].uses()) != 1 or product.outputs[0].is_graph_output():
        return None
    scores = _summed(maker_of(input_of(product)), _maker(div.inputs[1]))
    return scores if scores is not None and scores[1] == rank_of(scores[0]) - 1 > 0 else None


def by_hand(div: ir.Node) -> tuple[ir.Value, int] | None:
    """The scores and axis of exponentials, some of which may be masked, that a Div divides by their own sum, or by a
    little more; None if it does not."""
    if not is_op(div, "Div"):
        return None
    weights, total = before_casts(div.inputs[0]), _maker(div.inputs[1])
    if is_op(total, "Add", "Clip", "Max"):
        total = next((maker for x in total.inputs if is_op(maker := _maker(x), "ReduceSum", "Unsqueeze")), None)
    source, axis = _sum_over(total) or (None, 0)
    maker = _maker(weights)
    if source is None or before_casts(source) is not weights:
        return None
    makers = [maker, *(_maker(x) for x in maker.inputs if is_op(maker, "Mul", "Where"))] if maker else []
    exp = next((node for node in makers if is_op(node, "Exp")), None)
    return None if exp is None or input_of(exp).shape is None else (input_of(exp), axis)


def _sum_over(node: ir.Node | None) -> tuple[ir.Value | None, int] | None:
    """What a node sums over one axis, whose dim it keeps or an Unsqueeze restores, and the axis; None if it is no such
    sum."""
    total = _maker(node.inputs[0]) if is_op(node, "Unsqueeze") else node
    axis = one_axis(total, keepdims=int(total is node)) if is_op(total, "ReduceSum") else None
    if total is None or axis is None:
        return None
    if is_op(node, "Unsqueeze"):
        restored, rank = constant_input(node, 1), rank_of(node.outputs[0])
        if restored is None or restored.size != 1 or not rank or int(restored.item()) % rank != axis:
            return None
    return total.inputs[0], axis


def before_casts(value: ir.Value | None) -> ir.Value | None:
    """`value` before casts between floating-point types, which the exporter adds around sums of 16-bit numbers."""
    while value is not None and (node := value.producer()) is not None and node.op_type == "Cast":
        source = node.inputs[0]
        if not all(v is not None and v.dtype is not None and v.dtype.is_floating_point() for v in (source, value)):
            break
        value = source
    return value


def _maker(value: ir.Value | None) -> ir.Node | None:
    """The node that computes `value`, ignoring casts."""
    return maker_of(before_casts(value))


def one_axis(node: ir.Node, keepdims: int = 1) -> int | None:
    """The axis of a reduction over one axis with this `keepdims`; None for other reductions."""
    axes, source = constant_input(node, 1), node.inputs[0]
    if axes is None or axes.size != 1 or node.attributes.get_int("keepdims", 1) != keepdims:
        return None
    if source is None or source.shape is None:
        return None
    return int(axes.item()) % len(source.shape)


# --- sums of softmaxes ------------------------------------------------------------------------------------------------


def _distribute(graph: ir.Graph, product: ir.Node) -> bool:
    """Replace `(a ± b) @ v`, where `a` or `b` is a softmax times factors of its rows, by `a @ v ± b @ v`; return
    whether the product is one.

    The sum may have more terms, and may be divided by its total, as in ConViT (https://arxiv.org/abs/2103.10697). A
    softmax adds up to one, so its factors are its share of the total.
    """
    weights, values = inputs_of(product)
    whole, div, result = weights, maker_of(weights), product.outputs[0]
    if div is not None and _is_divided_by_its_total(div):
        whole = input_of(div)
    terms = _terms(whole)
    factors = [_factors_of_rows(term) for _, term in terms]
    users = {use.node for value in (whole, weights) for use in value.uses()}
    if len(users) > (3 if whole is not weights else 1) or whole.is_graph_output() or weights.is_graph_output():
        return False
    if len(terms) == 1 or not any(found is not None for found in factors):
        return False
    if rank_of(values) < 2 or rank_of(result) < 2 or dims_of(values)[:-2] != dims_of(result)[:-2]:
        return False
    if whole is not weights and any(rank_of(term) != rank_of(whole) for _, term in terms):
        return False

    def build(op: Builder) -> ir.Value:
        def joined(parts: Iterable[ir.Value], kinds: Iterable[str]) -> ir.Value:
            first, *others = parts
            for kind, other in zip(kinds, others, strict=False):
                first = broadcast_like(op.op(kind, [first, other]), first, other)
            return first

        def total(term: ir.Value, of_rows: list[ir.Value] | None) -> ir.Value:
            if of_rows is None or any(rank_of(factor) != rank_of(term) for factor in of_rows):
                return resized(op.ReduceSum(term, constant(op, [-1])), term, -1, 1)
            return joined([constant(op, np.ones([1] * rank_of(term)), term.dtype), *of_rows], repeat("Mul"))

        kinds, parts = [kind for kind, _ in terms[1:]], [part for _, part in terms]
        outputs = joined([like(op.MatMul(part, values), result) for part in parts], kinds)
        if whole is weights:
            return outputs
        return like(op.Div(outputs, joined(map(total, parts, factors), kinds)), result)

    replace_value(result, insert(graph, product, build, stem=f"{product.name}/distributed"))
    return True


def _terms(whole: ir.Value) -> list[tuple[str, ir.Value]]:
    """The terms of a sum, each with the operator that joins it to those before it."""
    node = maker_of(whole)
    if not is_op(node, "Add", "Sub"):
        return [("Add", whole)]
    terms: list[tuple[str, ir.Value]] = []
    for side in inputs_of(node):
        if rank_of(side) < 2 or dims_of(side)[-2:] != dims_of(whole)[-2:]:
            return [("Add", whole)]
        within = [("Add", side)] if len(side.uses()) > 1 else _terms(side)
        negative = node.op_type == "Sub" and bool(terms)
        terms += [({"Add": "Sub", "Sub": "Add"}[kind], term) for kind, term in within] if negative else within
    return terms


def _factors_of_rows(weights: ir.Value) -> list[ir.Value] | None:
    """The factors between a softmax over the last axis and `weights`, each the same for all elements of a row; None if
    `weights` are computed in another way."""
    node = maker_of(weights)
    if is_op(node, "Softmax"):
        return [] if node.attributes.get_int("axis", -1) in (-1, rank_of(weights) - 1) else None
    if is_op(node, "Mul"):
        for inner, factor in permutations(inputs_of(node)):
            if factor.shape is not None and (not factor.shape or factor.shape[-1] == 1):
                found = _factors_of_rows(inner)
                return None if found is None else [*found, factor]
    return None


def _is_divided_by_its_total(div: ir.Node) -> bool:
    """Whether a Div divides each row of a value by the sum of the row."""
    if not is_op(div, "Div"):
        return False
    whole, divisor = inputs_of(div)
    return _sum_over(maker_of(divisor)) == (whole, rank_of(whole) - 1)
