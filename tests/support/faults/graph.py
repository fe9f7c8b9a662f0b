"""Faults, and helpers to alter a deployed graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.export.graphs.build import Builder, constant, insert
from attnforge.runtime.decoding.decoder import Decoder

KEPT = "faults.to"
"""Metadata key of a cast that must stay in float64; the value is the type that it casts to."""


class NotThere(Exception):
    """The graph lacks what a fault alters, or the alteration changed nothing."""


@dataclass(frozen=True)
class Linear:
    """`x W + b`: its weight (in, out; as stored for a Gemm), its bias, and its output."""

    weight: ir.Value
    bias: ir.Value
    output: ir.Value


@dataclass(frozen=True)
class Products:
    """Decomposed attention: `MatMul·(Where·)Softmax·MatMul(·Where)`."""

    scores: ir.Node
    fill: ir.Node | None
    softmax: ir.Node
    context: ir.Node
    guard: ir.Node | None


PARTS = {
    "query": "attention.query_proj",
    "key": "attention.key_proj",
    "value": "attention.value_proj",
    "output": "attention.output_proj",
    "up": "feed_forward.linear1",
    "down": "feed_forward.linear2",
    "patches": "embedding",
    "head": "head",
}

Build = Callable[[Builder, ir.Value], ir.Value]


class Graph:
    """A deployed graph, with its parts and methods that alter it in place."""

    def __init__(self, model: ir.Model) -> None:
        self.graph = model.graph
        self._changes = 0

    def nodes(self, op_type: str) -> list[ir.Node]:
        return [node for node in self.graph if node.op_type == op_type]

    def node(self, op_type: str, i: int = 0) -> ir.Node:
        nodes = self.nodes(op_type)
        if not -len(nodes) <= i < len(nodes):
            raise NotThere(f"{op_type} number {i} of {len(nodes)}")
        return nodes[i]

    def weight(self, ending: str, i: int = 0) -> ir.Value:
        """Return the i-th weight, in the order of layers, whose name has this ending."""
        names = sorted(name for name in self.graph.initializers if f".{name}".endswith(f".{ending}"))
        if i >= len(names):
            raise NotThere(f"{ending} number {i} of {len(names)}")
        return self.graph.initializers[names[i]]

    def linear(self, part: str, layer: int = 0) -> Linear:
        bias = self.weight(f"{PARTS[part]}.bias", layer)
        (user,) = self.users(bias)
        product = user if user.op_type == "Gemm" else producer(other(user, bias))
        weight = product.inputs[1]
        assert weight is not None
        return Linear(weight, bias, user.outputs[0])

    @property
    def mask(self) -> ir.Value:
        return self.input("key_padding_mask")

    def input(self, name: str) -> ir.Value:
        for value in self.graph.inputs:
            if value.name == name:
                return value
        raise NotThere(name)

    @property
    def fused(self) -> ir.Node | None:
        """The fused attention node, if the graph has one."""
        return next(iter(self.nodes("MultiHeadAttention")), None)

    @property
    def sites(self) -> list[Products]:
        sites = []
        for softmax in self.nodes("Softmax"):
            before = producer(softmax.inputs[0])
            fill = before if before.op_type == "Where" else None
            scores = producer(fill.inputs[1]) if fill is not None else before
            (context,) = self.users(softmax.outputs[0])
            guard = next((user for user in self.users(context.outputs[0]) if user.op_type == "Where"), None)
            sites.append(Products(scores, fill, softmax, context, guard))
        if not sites:
            raise NotThere("attention as products")
        return sites

    def masked(self) -> Iterator[tuple[ir.Node, ir.Node]]:
        """Yield for every site the Where that fills scores, and the one that gives zeros to a query without keys."""
        for site in self.sites:
            if site.fill is None or site.guard is None:
                raise NotThere("a mask")
            yield site.fill, site.guard

    def users(self, value: ir.Value) -> list[ir.Node]:
        return [use.node for use in value.uses()]

    def set(self, value: ir.Value, array: Array) -> None:
        """Set a weight, or the output of a Constant, to `array`."""
        before = numbers(value)
        array = np.asarray(array).astype(before.dtype)
        if array.shape != before.shape or np.array_equal(array, before):
            raise NotThere(f"a change of {value.name}")
        node = value.producer()
        if node is None:
            value.const_value = ir.tensor(array, name=value.name)
        else:
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(array))
            value.const_value = None

    def after(self, value: ir.Value, build: Build) -> None:
        """Apply `build` to `value`, for all its users."""
        uses, node, is_output = list(value.uses()), value.producer(), value.is_graph_output()
        anchor = next(iter(self.graph)) if node is None else node
        made = self.insert(anchor, value, build, after=node is not None)
        for user, index in uses:
            user.replace_input_with(index, made)
        if is_output:
            value.name, made.name = f"{value.name}/before", value.name
            self.graph.outputs[list(self.graph.outputs).index(value)] = made
        elif not uses:
            raise NotThere(f"a user of {value.name}")
        self.graph.sort()

    def before(self, node: ir.Node, index: int, build: Build) -> None:
        """Apply `build` to input `index` of `node`, only for this node."""
        value = node.inputs[index]
        assert value is not None
        node.replace_input_with(index, self.insert(node, value, build))
        self.graph.sort()

    def insert(self, at: ir.Node, value: ir.Value, build: Build, after: bool = False) -> ir.Value:
        self._changes += 1
        made = insert(self.graph, at, lambda op: build(op, value), after, stem=f"fault/{self._changes}")
        made.type = made.type or value.type
        return made

    def output_becomes(self, output: ir.Value, value: ir.Value) -> None:
        """Replace an output of the graph with `value`."""
        copy = ir.node("Identity", [value], name=f"fault/{output.name}").outputs[0]
        node = copy.producer()
        assert node is not None
        name, copy.type, copy.shape = output.name, output.type, output.shape
        output.name, copy.name = f"{name}/before", name
        self.graph.append(node)
        self.graph.outputs[list(self.graph.outputs).index(output)] = copy

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Replace `old` with `new` for all users."""
        uses = [(user, index) for user, index in old.uses() if new not in user.outputs]
        if not uses:
            raise NotThere(f"a user of {old.name}")
        for user, index in uses:
            user.replace_input_with(index, new)


def producer(value: ir.Value | None) -> ir.Node:
    node = value.producer() if value is not None else None
    if node is None:
        raise NotThere("the node that makes a value")
    return node


def other(node: ir.Node, value: ir.Value) -> ir.Value:
    """Return the one of two inputs that is not `value`."""
    (operand,) = [operand for operand in node.inputs if operand is not value]
    assert operand is not None
    return operand


def numbers(value: ir.Value) -> Array:
    node = value.producer()
    tensor = value.const_value if node is None else node.attributes["value"].as_tensor()
    if tensor is None:
        raise NotThere(f"numbers of {value.name}")
    return tensor.numpy()


def is_constant(value: ir.Value | None) -> bool:
    node = value.producer() if value is not None else None
    return node is not None and node.op_type == "Constant"


def float_constant(op: Builder, like: ir.Value, data: Any) -> ir.Value:
    assert like.dtype is not None
    return constant(op, data, like.dtype)


def required(value: ir.Value | None) -> ir.Value:
    if value is None:
        raise NotThere("an input")
    return value


def rolled(op: Builder, x: ir.Value, axis: int) -> ir.Value:
    """Roll `x` by one along `axis`: the first element becomes the last."""
    zero, one, end = constant(op, [0]), constant(op, [1]), constant(op, [np.iinfo(np.int64).max])
    where = constant(op, [axis])
    return op.Concat(op.Slice(x, one, end, where), op.Slice(x, zero, one, where), axis=axis)


def first_along(axis: int) -> Build:
    """Repeat the first element along an axis for all."""

    def build(op: Builder, x: ir.Value) -> ir.Value:
        first = op.Slice(x, constant(op, [0]), constant(op, [1]), constant(op, [axis]))
        return op.Expand(first, op.Shape(x))

    return build


def all_true(op: Builder, x: ir.Value) -> ir.Value:
    """Replace every condition with True."""
    return op.Or(x, op.Not(x))


Alter = Callable[[Graph], None]
Family = list[tuple[str, str, Alter, tuple[str, ...] | str]]
"""Name, description, alteration and subjects of each fault of a kind."""


@dataclass(frozen=True)
class Fault:
    """A mistake to seed.

    Attributes:
        what: one-line description.
        alter: puts it into a graph.
        subjects: names of the subjects to put it into.
        is_inert: whether the function is provably unchanged.
        not_in: the precisions in which it would alter nothing.
        driver: a decoder class that makes the mistake, instead of an altered graph.
    """

    name: str
    family: str
    what: str
    alter: Alter
    subjects: tuple[str, ...]
    is_inert: bool = False
    not_in: tuple[str, ...] = ()
    driver: type[Decoder] | None = None
