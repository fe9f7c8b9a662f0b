"""Faults of causal attention in steps, as TensorRT gets it: blocks of queries, each with the keys up to its own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from attnforge.export.graphs.build import Builder, constant
from tests.support.faults.graph import (
    Alter,
    Build,
    Family,
    Graph,
    NotThere,
    Products,
    all_true,
    first_along,
    numbers,
    producer,
    required,
    rolled,
)

STEPS, PADDED_STEPS = "steps", "padded-steps"
BOTH = (STEPS, PADDED_STEPS)


class Stairs:
    """The parts of attention in steps.

    Attributes:
        joined: the Concat of the steps' outputs.
        steps: the products of every step, in order.
    """

    def __init__(self, g: Graph) -> None:
        self.steps = g.sites
        joins = [node for node in g.nodes("Concat") if len(node.inputs) == len(self.steps) > 1]
        joins = [node for node in joins if node.attributes["axis"].as_int() == 1]
        if not joins:
            raise NotThere("attention in steps")
        self.joined = joins[-1]

    def conditions(self, number: int) -> tuple[ir.Node, ir.Value | None]:
        """Of a step: the LessOrEqual of keys and queries, and what else hides keys."""
        fill = self.steps[number].fill
        if fill is None:
            raise NotThere("a mask of a step")
        node = producer(fill.inputs[0])
        if node.op_type == "And":
            return producer(node.inputs[1]), required(node.inputs[0])
        return node, None


def in_step(number: int | None, change: Callable[[Graph, Stairs, int], None]) -> Alter:
    """A change of a step, or of every one."""

    def alter(g: Graph) -> None:
        stairs = Stairs(g)
        for i in range(len(stairs.steps)) if number is None else [number % len(stairs.steps)]:
            change(g, stairs, i)

    return alter


def diagonal(build: Build) -> Callable[[Graph, Stairs, int], None]:
    """What `build` makes of the condition that hides later keys."""
    return lambda g, stairs, i: g.behind(stairs.conditions(i)[0].outputs[0], build)


def numbered(index: int, by: int) -> Callable[[Graph, Stairs, int], None]:
    """The keys (input 0 of the comparison) or the queries (1) are counted from another number on."""
    return lambda g, stairs, i: g.before(stairs.conditions(i)[0], index, lambda op, x: op.Add(x, constant(op, by)))


def from_first(g: Graph, stairs: Stairs, i: int) -> None:
    """The queries of a step are counted from its own first one."""
    compares = stairs.conditions(i)[0]

    def build(op: Builder, x: ir.Value) -> ir.Value:
        return op.Sub(x, op.ReduceMin(x, keepdims=1))

    g.before(compares, 1, build)


def operand(name: str, build: Build) -> Callable[[Graph, Stairs, int], None]:
    """What `build` makes of query, key (features before tokens) or value of a step."""

    def change(g: Graph, stairs: Stairs, i: int) -> None:
        step: Products = stairs.steps[i]
        node, index = {"query": (step.scores, 0), "key": (step.scores, 1), "value": (step.context, 1)}[name]
        g.before(node, index, build)

    return change


def rest(build: Build) -> Callable[[Graph, Stairs, int], None]:
    """What `build` makes of the padding of a step."""
    return lambda g, stairs, i: g.behind(required(stairs.conditions(i)[1]), build)


def fill(number: float) -> Callable[[Graph, Stairs, int], None]:
    """What the scores of hidden keys become."""

    def change(g: Graph, stairs: Stairs, i: int) -> None:
        filled = stairs.steps[i].fill
        g.set(required(filled.inputs[2] if filled is not None else None), np.asarray(number))

    return change


def without_guard(g: Graph, stairs: Stairs, i: int) -> None:
    """A query that sees no key keeps what the products give it."""
    guard = stairs.steps[i].guard
    if guard is None:
        raise NotThere("a guard of queries without keys")
    g.replace(guard.outputs[0], required(guard.inputs[1]))


def lost(op: Builder, x: ir.Value) -> ir.Value:
    return op.Mul(x, constant(op, 0.0, x.dtype or ir.DataType.FLOAT))


def output(number: int, build: Build) -> Alter:
    """What `build` makes of a step's output."""

    def alter(g: Graph) -> None:
        joined = Stairs(g).joined
        g.before(joined, number % len(joined.inputs), build)

    return alter


def exchanged(a: int, b: int) -> Alter:
    """Two steps in each other's place."""

    def alter(g: Graph) -> None:
        joined = Stairs(g).joined
        first, second = (required(joined.inputs[i % len(joined.inputs)]) for i in (a, b))
        joined.replace_input_with(a % len(joined.inputs), second)
        joined.replace_input_with(b % len(joined.inputs), first)

    return alter


def twice(g: Graph) -> None:
    """The output of the last step but one in the last's place."""
    joined = Stairs(g).joined
    joined.replace_input_with(len(joined.inputs) - 1, required(joined.inputs[-2]))


def joined_behind(build: Build) -> Alter:
    """What `build` makes of all steps together."""
    return lambda g: g.behind(Stairs(g).joined.outputs[0], build)


def wide_steps(g: Graph) -> None:
    """Steps of one token fewer: the last tokens are in none."""
    stairs = Stairs(g)
    for node in g.nodes("Add"):
        more = node.inputs[1]
        is_rounded_up = more is not None and more.producer() is not None and more.producer().op_type == "Constant"  # type: ignore[union-attr]
        if is_rounded_up and more is not None and np.array_equal(numbers(more), [len(stairs.steps) - 1]):
            return g.set(more, np.asarray([0]))
    raise NotThere("the width of a step")


# Where a mask hides padding too, it hides later keys once more: what the diagonal lets through there changes nothing.
IN_STEPS: Family = [
    ("step-lost", "a step too few: the last gives zeros", output(-1, lost), BOTH),
    ("first-step-lost", "the first step gives zeros", output(0, lost), BOTH),
    ("steps-exchanged", "the second step in the third's place, and the other way round", exchanged(1, 2), BOTH),
    ("step-twice", "the last but one in the last's place", twice, BOTH),
    ("steps-moved", "what comes out is one token early", joined_behind(lambda op, x: rolled(op, x, 1)), BOTH),
    ("step-width", "steps rounded down, so that tokens are in none", wide_steps, BOTH),
    ("diagonal-unmasked", "every block sees all of its own keys", in_step(None, diagonal(all_true)), STEPS),
    ("first-diagonal-unmasked", "the first block sees all of its own keys", in_step(0, diagonal(all_true)), STEPS),
    ("last-diagonal-unmasked", "the last block sees all of its own keys", in_step(-1, diagonal(all_true)), STEPS),
    ("next-key-seen", "one key too many, in every step", in_step(None, numbered(1, 1)), STEPS),
    ("next-key-seen-once", "one key too many, in the third step", in_step(2, numbered(1, 1)), STEPS),
    ("own-key-hidden", "no query sees its own key", in_step(None, numbered(0, 1)), BOTH),
    ("step-from-first", "a step's queries are counted from its first", in_step(None, from_first), BOTH),
    ("step-from-first-once", "those of the last step are", in_step(-1, from_first), BOTH),
    ("step-queries-moved", "queries one earlier", in_step(1, operand("query", lambda op, x: rolled(op, x, 2))), BOTH),
    ("step-keys-moved", "keys one earlier", in_step(None, operand("key", lambda op, x: rolled(op, x, 3))), BOTH),
    ("step-values-moved", "values one earlier", in_step(-1, operand("value", lambda op, x: rolled(op, x, 2))), BOTH),
    ("step-keys-of-sample", "the first sample's keys for all", in_step(1, operand("key", first_along(0))), BOTH),
    ("step-fill-10", "-10 where -inf is meant", in_step(None, fill(-10.0)), BOTH),
    ("step-padding-dropped", "padding is ignored in every step", in_step(None, rest(all_true)), PADDED_STEPS),
    ("last-padding-dropped", "padding is ignored in the last step", in_step(-1, rest(all_true)), PADDED_STEPS),
    ("step-padding-moved", "one key early", in_step(None, rest(lambda op, x: rolled(op, x, 3))), PADDED_STEPS),
    ("step-padding-of-sample", "the first sample's for all", in_step(None, rest(first_along(0))), PADDED_STEPS),
    ("step-silent-rows", "queries without keys keep NaN", in_step(None, without_guard), PADDED_STEPS),
]  # fmt: skip
