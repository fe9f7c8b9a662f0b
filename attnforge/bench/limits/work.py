"""The least work of a model: operations and bytes, counted in its canonical graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from math import ceil, prod

import onnx_ir as ir

from attnforge.bench.limits import Work
from attnforge.export.decoding.tokens import REDUCTIONS
from attnforge.export.flops import PRODUCTS, attention_scores, product_flops
from attnforge.export.graphs.nodes import BY_ELEMENT
from attnforge.export.graphs.sizes import Unmeasurable, shape_at
from attnforge.export.masks.visibility import visibility
from attnforge.export.precision.assign import MOVERS

SOFTMAX = 5
"""Operations per score: maximum, subtraction, exponential, addition, and multiplication by the reciprocal."""

PRECISIONS = {
    ir.DataType.FLOAT: "fp32",
    ir.DataType.FLOAT16: "fp16",
    ir.DataType.BFLOAT16: "bf16",
    ir.DataType.DOUBLE: "fp64",
}

READS_PART = ("Gather", "GatherElements", "GatherND", "Slice")
"""Operators that read only the part of their first input that they return."""

FREE = MOVERS | {
    *("Compress", "Constant", "ConstantOfShape", "DepthToSpace", "Dropout", "EyeLike", "GatherND", "NonZero"),
    *("OneHot", "Range", "ReverseSequence", "ScatterElements", "ScatterND", "Shape", "Size", "SpaceToDepth", "Trilu"),
}
"""Operators that compute no floating-point numbers."""

REDUCING = {
    *REDUCTIONS, *("ArgMax", "ArgMin", "AveragePool", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool"),
    *("LpPool", "MaxPool", "TopK"),
}  # fmt: skip
"""Operators that cost an operation per element of their input."""

COMPUTING = BY_ELEMENT | {
    *("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BatchNormalization", "BitShift", "CumProd", "CumSum"),
    *("GroupNormalization", "InstanceNormalization", "LayerNormalization", "LpNormalization"),
    *("MeanVarianceNormalization", "RMSNormalization", "Resize", "RotaryEmbedding", "Shrink"),
}
"""Operators that cost an operation per element of their result, apart from those that are free."""


def work_of(model: ir.Model, sizes: Mapping[str, int]) -> Work:
    """Count the work of a model.

    Attention counts the pairs of query and key that are not proved to be hidden by causality or the mask
    (:mod:`attnforge.export.masks.visibility`); pairs that depend on data, such as padding, count as visible.

    Args:
        model: canonical graph; every value has its shape.
        sizes: sizes of the symbolic dims.
    """
    graph, counter = model.graph, _Counter(model, sizes)
    work = counter.work
    for node in graph:
        try:
            counter.count(node)
        except Unmeasurable as reason:
            work.uncounted.append(f"{node.name or node.op_type}: {reason}")

    def total(values: Iterable[ir.Value], bytes_of: Callable[[ir.Value], int]) -> int:
        size = 0
        for value in values:
            try:
                size += bytes_of(value)
            except Unmeasurable as reason:
                work.uncounted.append(f"{value.name}: {reason}")
        return size

    constants = [node.outputs[0] for node in graph if node.op_type == "Constant"]
    inputs = [v for v in graph.inputs if v.uses() and v.name not in graph.initializers]
    work.weights = total((*graph.initializers.values(), *constants), lambda v: _read(v, graph, sizes))
    work.inputs = total(inputs, lambda v: _bytes(v, v.dtype, sizes))
    work.outputs = total(graph.outputs, lambda v: _bytes(v, v.dtype, sizes))
    return work


def _floats(graph: ir.Graph) -> set[ir.Value]:
    """Return the values of floating-point type; an untyped value counts if an operand of its node does."""
    floats = {v for v in (*graph.inputs, *graph.initializers.values()) if v.dtype and v.dtype.is_floating_point()}
    for node in graph:
        reads_floats = any(v in floats for v in node.inputs) and node.op_type not in ("Shape", "Size")
        for v in node.outputs:
            if v.dtype.is_floating_point() if v.dtype is not None else reads_floats:
                floats.add(v)
    return floats


class _Counter:
    """Counts the operations of nodes.

    Attributes:
        work: receives the operations.
    """

    def __init__(self, model: ir.Model, sizes: Mapping[str, int]) -> None:
        self.work, self._model, self._sizes = Work(), model, sizes
        self._floats = _floats(model.graph)
        self._shares: dict[Hashable, float] = {}  # of visible pairs of the masks seen so far: layers share their masks

    def count(self, node: ir.Node) -> None:
        """Add the operations of one node.

        Raises:
            Unmeasurable: the operations are unknown; nothing was added.
        """
        op_type, scores = node.op_type, 0
        if (why := _why_opaque(self._model, node)) is not None:
            raise Unmeasurable(why)
        if op_type in FREE and node.attributes.get_string("reduction", "none") == "none":
            return
        if op_type in REDUCING | COMPUTING and self._floats.isdisjoint((*node.inputs, *node.outputs)):
            return
        if op_type == "Attention":
            scores = self._needed_scores(node)
            (*_, d_k), (*_, d_v) = (shape_at(value, self._sizes) for value in (node.inputs[0], node.inputs[2]))
            self._add_product(node, 2 * scores * (d_k + d_v))
        elif op_type in PRODUCTS:
            self._add_product(node, product_flops(node, self._sizes))
        elif op_type in ("Softmax", "LogSoftmax"):
            scores = prod(shape_at(node.outputs[0], self._sizes))
        elif op_type in REDUCING | COMPUTING:
            elements = node.inputs[0] if op_type in REDUCING else node.outputs[0]
            self.work.others += prod(shape_at(elements, self._sizes))
        else:
            raise Unmeasurable(f"no rule for {op_type}")
        self.work.others += SOFTMAX * scores
        self.work.exponentials += scores

    def _needed_scores(self, node: ir.Node) -> int:
        """Return the number of scores that an Attention node needs: those of pairs that are not proved to be hidden.

        Raises:
            Unmeasurable: the node is not canonical, or a shape is unknown.
        """
        scores = attention_scores(node, self._sizes)
        if len(node.inputs) < 4 or node.inputs[3] is None:
            return scores
        (batch, heads, n_q, _), (_, _, n_k, _) = (shape_at(value, self._sizes) for value in node.inputs[:2])
        key = node.inputs[3], node.attributes.get_int("is_causal", 0), n_q, n_k
        if key not in self._shares:
            try:
                self._shares[key] = visibility(node).share(self._sizes)
            except Unmeasurable:
                return scores
        return batch * heads * round(self._shares[key] * n_q * n_k)

    def _add_product(self, node: ir.Node, flops: int) -> None:
        dtype = node.inputs[0].dtype if node.inputs[0] is not None else None
        if dtype not in PRECISIONS:
            raise Unmeasurable(f"a product of {str(dtype).lower() if dtype is not None else 'an unknown type'}")
        products, precision = self.work.products, PRECISIONS[dtype]
        products[precision] = products.get(precision, 0) + flops


def _why_opaque(model: ir.Model, node: ir.Node) -> str | None:
    """Return why the work of a node cannot be counted, or None."""
    if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()):
        return f"{node.op_type} contains subgraphs"
    if node.op_identifier() in model.functions:
        return f"{node.op_type} is a function of the model"
    return f"{node.domain}::{node.op_type} is not a standard operator" if node.domain else None


def _bytes(value: ir.Value, dtype: ir.DataType | None, sizes: Mapping[str, int]) -> int:
    if dtype is None or dtype == ir.DataType.STRING:
        raise Unmeasurable("elements of unknown size")
    return ceil(prod(shape_at(value, sizes)) * dtype.bitwidth / 8)


def _read(weight: ir.Value, graph: ir.Graph, sizes: Mapping[str, int]) -> int:
    """Return the bytes of a weight that are read: all of it, or only the gathered rows if all its uses gather."""
    tensor = ir.convenience.get_const_tensor(weight)
    if tensor is None:
        raise Unmeasurable("an initializer without a value")
    partial_reads = [
        node for node, i in weight.uses() if i == 0 and node.op_type in READS_PART and node.graph is graph
    ]  # a subgraph may run any number of times
    if len(partial_reads) < len(weight.uses()) or weight.is_graph_output():
        return tensor.nbytes
    return min(tensor.nbytes, sum(_bytes(node.outputs[0], tensor.dtype, sizes) for node in partial_reads))
