"""Compute the results of the tokens that a call asks for: of a prompt, the logits of the last token alone are read."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from attnforge.export.graphs.build import Builder, dims_of, insert, typed
from attnforge.export.graphs.nodes import BY_ELEMENT, input_of, inputs_of, is_op, maker_of, rank_of

KEPT = "kept"
"""Name of the input with the tokens of a call whose results are computed."""


def last_products(graph: ir.Graph, by_token: set[ir.Value], by_count: set[ir.Value]) -> list[ir.Node | None]:
    """For each output, the product with weights that computes it from each token, except for operators by element
    after it; None if there is none that only this output reads.

    Args:
        graph: a graph whose outputs are `(batch, tokens, …)`, and which computes them token by token.
        by_token: values that depend on the contents of the model's inputs.
        by_count: values that depend on the number of tokens only.
    """
    return [_product(output, by_token, by_count) for output in graph.outputs]


def _product(output: ir.Value, by_token: set[ir.Value], by_count: set[ir.Value]) -> ir.Node | None:
    value = output
    while (node := value.producer()) is not None:
        expected = (0, True) if value is output else (1, False)
        if (len(value.uses()), value.is_graph_output()) != expected:
            return None
        read = [each for each in inputs_of(node) if each in by_token]
        if len(node.outputs) != 1 or len(read) != 1 or not by_count.isdisjoint(inputs_of(node)):
            return None
        if is_op(node, "MatMul"):
            is_rounded = is_op(maker_of(read[0]), "DequantizeLinear")  # which has to stay next to the product
            return node if read[0] is node.inputs[0] and rank_of(read[0]) == 3 and not is_rounded else None
        if not is_op(node, *BY_ELEMENT) or dims_of(read[0])[:2] != dims_of(node.outputs[0])[:2]:
            return None
        value = read[0]
    return None


def compute_kept(graph: ir.Graph, kept: ir.Value, products: Sequence[ir.Node | None]) -> None:
    """Make every output `(batch, kept, …)`, of these tokens, in place.

    Args:
        graph: the graph; its outputs are `(batch, tokens, …)`.
        kept: the indices of the tokens, `(kept,)`.
        products: see :func:`last_products`.
    """
    for i, (output, node) in enumerate(zip(list(graph.outputs), products, strict=True)):
        if node is not None:
            node.replace_input_with(0, _taken(graph, node, input_of(node), kept))
            value = node.outputs[0]
            while True:
                value.shape = ir.Shape(_dims(value, kept))
                if value is output:
                    break
                ((reader, _),) = value.uses()
                value = reader.outputs[0]
        elif (last := output.producer()) is not None:
            graph.outputs[i] = taken = _taken(graph, last, output, kept, after=True)
            output.name, taken.name = f"{output.name}/every token", output.name


def _taken(graph: ir.Graph, at: ir.Node, value: ir.Value, kept: ir.Value, after: bool = False) -> ir.Value:
    def take(op: Builder) -> ir.Value:
        return typed(op.Gather(value, kept, axis=1), value.dtype, _dims(value, kept))

    return insert(graph, at, take, after, stem=f"{at.name}/{value.name}/{KEPT}")


def _dims(value: ir.Value, kept: ir.Value) -> list[int | ir.SymbolicDim]:
    batch, _, *rest = dims_of(value)
    return [batch, dims_of(kept)[0], *rest]
