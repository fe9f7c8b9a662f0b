"""A site cut from its model, with all that is computed for it alone, to be measured in each form.

The cut begins after the products that compute queries, keys and values, and at the model's inputs. So it has their
rotation and casts, and the whole graph of the mask. A form is written into it by the code that deploys it. Then what
other sites need too, such as the mask that a form reads as it is, is computed only once for all of them and becomes an
input.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attnforge.arrays import Array
from attnforge.errors import first_line, shortened
from attnforge.export.graphs.execute import as_it_is, part_of, values_of
from attnforge.export.graphs.nodes import input_of, inputs_of, is_op, numpy_type
from attnforge.export.graphs.sizes import Unmeasurable, shape_at
from attnforge.export.graphs.types import FLOATS
from attnforge.export.lowering.attention import Attention, Candidate, attention_of, write

BOOL, BFLOAT16, INT8 = ir.DataType.BOOL, ir.DataType.BFLOAT16, ir.DataType.INT8

PRODUCTS = {"Attention", "Conv", "ConvTranspose", "Einsum", "GRU", "Gemm", "LSTM", "MatMul", "RNN", "Softmax"}
"""Operators that the cut begins after, in addition to those of other domains and those with graphs of their own."""

FEW = 64
"""Numbers of a floating-point constant up to which they are part of the work that a site does."""


@dataclass(frozen=True)
class Cut:
    """A site with all that is computed for it alone.

    Attributes:
        model: computes the site's output and the caches that it writes; not modified.
        node: name of the canonical node.
        mask: name of the mask, if there is one.
        past: name of the input for the number of cached tokens, if there is one.
        shared: names of tensors that the rest of the model needs too.
    """

    model: ir.Model
    node: str
    mask: str | None
    past: str | None
    shared: list[str]

    def lowered(self, candidate: Candidate) -> ir.Model:
        """The site in a form, with its shared tensors as inputs."""
        model = self.model.clone()
        node = next(node for node in model.graph if node.name == self.node)
        write(model.graph, attention_of(node), candidate)
        RemoveUnusedNodesPass()(model)
        known, outputs = values_of(model), [str(value.name) for value in model.graph.outputs]
        return part_of(model, outputs, [name for name in self.shared if name in known])

    def feeds(self, sizes: Mapping[str, int], past: int = 0) -> dict[str, Array]:
        """Random inputs of the site in any form, by name.

        Integers are 0 or 1. If the mask itself is an input that differs by query, its first row is fully masked.

        Args:
            sizes: the size of each symbolic dim.
            past: the number of tokens in a cache.

        Raises:
            Unmeasurable: a shape is not known, or operands cannot be computed from such inputs.
        """
        rng = np.random.default_rng(0)
        arrays: dict[str, Array] = {}
        for value in self.model.graph.inputs:
            name, shape, dtype = str(value.name), shape_at(value, sizes), value.dtype
            if name == self.past:
                array: Array = np.full(shape, past)
            elif dtype == INT8:
                array = rng.integers(-127, 128, shape)
            elif dtype in FLOATS:
                array = rng.standard_normal(shape, np.float32)
            else:
                array = rng.random(shape) < 0.75
            if name == self.mask and prod(shape[:-1]) > 1:
                array.reshape(-1, shape[-1])[0] = -np.inf if dtype in FLOATS else False
            arrays[name] = array.astype(numpy_type(value))
        try:
            return arrays | (as_it_is(self.model, self.shared)(arrays) if self.shared else {})
        except Exception as error:  # ONNX Runtime raises errors of several kinds
            raise Unmeasurable(f"random inputs do not give its operands ({shortened(first_line(error))})") from error


def cut_of(model: ir.Model, a: Attention, projects: bool = False) -> Cut:
    """Cut a site from a model.

    Args:
        model: not modified.
        a: the site.
        projects: whether a form writes the projections of its operands, too.
    """
    nodes, given = _needed(a, projects)
    known, after = set(nodes), set(_after(a))
    shared = [
        str(value.name)
        for node in nodes
        for value in node.outputs
        if value not in after and (value.dtype == BOOL or value.dtype in FLOATS) and value.dtype != BFLOAT16
        if any(use.node not in known and use.node.op_type != "Shape" for use in value.uses())
    ]
    cached = a.cached
    outputs = [a.output.value, *([] if cached is None else [cache.after for cache in cached.caches])]
    part = part_of(model, [str(value.name) for value in outputs], [str(value.name) for value in given])
    past = None if cached is None else str(cached.past.name)
    return Cut(part, str(a.node.name), None if a.mask is None else str(a.mask.name), past, shared)


def work_of(a: Attention, sizes: Mapping[str, int], projects: bool = False) -> Hashable:
    """Identify the work of a site at the given sizes: equal for two sites that one measurement serves.

    Raises:
        Unmeasurable: a shape is not known.
    """
    nodes, given = _needed(a, projects)
    results = (output for node in nodes for output in node.outputs)
    numbers: dict[ir.Value | None, int] = {value: i for i, value in enumerate((*given, *results))}
    work: list[Hashable] = [(value.dtype, *shape_at(value, sizes)) for value in given]
    for node in nodes:
        operands = tuple(numbers[value] if value in numbers else _constant(value) for value in node.inputs)
        attributes = tuple((name, str(attribute.value)) for name, attribute in sorted(node.attributes.items()))
        metadata = tuple((k, v) for k, v in sorted(node.metadata_props.items()) if k.startswith("attnforge."))
        work.append((node.domain, node.op_type, operands, attributes, metadata))
    return tuple(work)


def _constant(value: ir.Value | None) -> Hashable:
    """Identify a constant: by its numbers if they are integers, or few."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None:
        return None
    whole = tensor.dtype not in FLOATS or tensor.size <= FEW
    return tensor.dtype, tuple(tensor.shape), tensor.tobytes() if whole else None


def _needed(a: Attention, projects: bool) -> tuple[list[ir.Node], list[ir.Value]]:
    """The nodes of the cut, from the output back, and the tensors that it begins with."""
    last = a.output.value.producer()
    assert last is not None
    inside = {a.node, *(x.value.producer() for x in a.operands if projects and _is_projection(x.value))}
    nodes, given, sized = [last], dict[ir.Value, None](), dict[ir.Value, None]()
    for node in nodes:
        for value in inputs_of(node):
            producer = value.producer()
            if ir.convenience.get_const_tensor(value) is not None or producer in nodes:
                continue
            if node.op_type == "Shape":
                sized[value] = None  # its numbers are not needed
            elif producer is not None and (producer in inside or not _begins_after(producer)):
                nodes.append(producer)
            else:
                given[value] = None
    return nodes, list(dict.fromkeys((*given, *(value for value in sized if value.producer() not in nodes))))


def _is_projection(value: ir.Value) -> bool:
    node = value.producer()
    return is_op(node, "MatMul") and ir.convenience.get_const_tensor(input_of(node, 1)) is not None


def _begins_after(node: ir.Node) -> bool:
    """Whether the cut begins after a node."""
    has_graph = any(attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values())
    is_wide = node.op_type == "Cast" and input_of(node).dtype == BFLOAT16  # which NumPy has no arrays of
    return node.domain != "" or node.op_type in PRODUCTS or has_graph or is_wide


def _after(a: Attention) -> list[ir.Value]:
    """The node's output, and what views make of it, up to the site's output."""
    values = [a.output.value]
    while values[-1] is not a.node.outputs[0]:
        view = values[-1].producer()
        assert view is not None
        values.append(input_of(view))
    return values
