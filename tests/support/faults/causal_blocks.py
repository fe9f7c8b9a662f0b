"""Faults of causal attention in causal blocks, as for TensorRT: blocks of queries, each with the keys up to its end."""

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


class CausalBlocks:
    """The parts of attention in causal blocks.

    Attributes:
        joined: the Concat of the blocks' outputs.
        steps: the products of every block, in order.
    """

    def __init__(self, g: Graph) -> None:
        self.steps = g.sites
        joins = [node for node in g.nodes("Concat") if len(node.inputs) == len(self.steps) > 1]
        joins = [node for node in joins if node.attributes["axis"].as_int() == 2]
        if not joins:
            raise NotThere("attention in steps")
        self.joined = joins[-1]

    def conditions(self, number: int) -> tuple[ir.Node, ir.Value | None]:
        """Return the LessOrEqual of keys and queries of a block, and the condition of the rest of the mask, if any."""
        fill = self.steps[number].fill
        if fill is None:
            raise NotThere("a mask of a step")
        node = producer(fill.inputs[0])
        if node.op_type == "And":
            return producer(node.inputs[1]), required(node.inputs[0])
        return node, None


def in_step(number: int | None, change: Callable[[Graph, CausalBlocks, int], None]) -> Alter:
    """Change one block, or all."""

    def alter(g: Graph) -> None:
        blocks = CausalBlocks(g)
        for i in range(len(blocks.steps)) if number is None else [number % len(blocks.steps)]:
            change(g, blocks, i)

    return alter


def diagonal(build: Build) -> Callable[[Graph, CausalBlocks, int], None]:
    """Apply `build` to the condition that hides later keys."""
    return lambda g, blocks, i: g.after(blocks.conditions(i)[0].outputs[0], build)


def numbered(index: int, by: int) -> Callable[[Graph, CausalBlocks, int], None]:
    """Offset the indices of the keys (input 0 of the comparison) or the queries (1)."""
    return lambda g, blocks, i: g.before(blocks.conditions(i)[0], index, lambda op, x: op.Add(x, constant(op, by)))


def from_first(g: Graph, blocks: CausalBlocks, i: int) -> None:
    """Count the queries of a block from the block's own first one."""
    compares = blocks.conditions(i)[0]

    def build(op: Builder, x: ir.Value) -> ir.Value:
        return op.Sub(x, op.ReduceMin(x, keepdims=1))

    g.before(compares, 1, build)


def operand(name: str, build: Build) -> Callable[[Graph, CausalBlocks, int], None]:
    """Apply `build` to query, key (features before tokens) or value of a block."""

    def change(g: Graph, blocks: CausalBlocks, i: int) -> None:
        step: Products = blocks.steps[i]
        node, index = {"query": (step.scores, 0), "key": (step.scores, 1), "value": (step.context, 1)}[name]
        g.before(node, index, build)

    return change


def rest(build: Build) -> Callable[[Graph, CausalBlocks, int], None]:
    """Apply `build` to the padding of a block."""
    return lambda g, blocks, i: g.after(required(blocks.conditions(i)[1]), build)


def fill(number: float) -> Callable[[Graph, CausalBlocks, int], None]:
    """Set the scores of hidden keys."""

    def change(g: Graph, blocks: CausalBlocks, i: int) -> None:
        filled = blocks.steps[i].fill
        g.set(required(filled.inputs[2] if filled is not None else None), np.asarray(number))

    return change


def without_guard(g: Graph, blocks: CausalBlocks, i: int) -> None:
    """Keep the products' output for a query without keys."""
    guard = blocks.steps[i].guard
    if guard is None:
        raise NotThere("a guard of queries without keys")
    g.replace(guard.outputs[0], required(guard.inputs[1]))


def lost(op: Builder, x: ir.Value) -> ir.Value:
    return op.Mul(x, constant(op, 0.0, x.dtype or ir.DataType.FLOAT))


def output(number: int, build: Build) -> Alter:
    """Apply `build` to a block's output."""

    def alter(g: Graph) -> None:
        joined = CausalBlocks(g).joined
        g.before(joined, number % len(joined.inputs), build)

    return alter


def exchanged(a: int, b: int) -> Alter:
    """Exchange the outputs of two blocks."""

    def alter(g: Graph) -> None:
        joined = CausalBlocks(g).joined
        first, second = (required(joined.inputs[i % len(joined.inputs)]) for i in (a, b))
        joined.replace_input_with(a % len(joined.inputs), second)
        joined.replace_input_with(b % len(joined.inputs), first)

    return alter


def twice(g: Graph) -> None:
    """Use the output of the second last block for the last one too."""
    joined = CausalBlocks(g).joined
    joined.replace_input_with(len(joined.inputs) - 1, required(joined.inputs[-2]))


def joined_output(build: Build) -> Alter:
    """Apply `build` to the joined output."""
    return lambda g: g.after(CausalBlocks(g).joined.outputs[0], build)


def wide_steps(g: Graph) -> None:
    """Round the block size down, so that the last tokens are in no block."""
    blocks = CausalBlocks(g)
    for node in g.nodes("Add"):
        more = node.inputs[1]
        is_rounded_up = more is not None and more.producer() is not None and more.producer().op_type == "Constant"  # type: ignore[union-attr]
        if is_rounded_up and more is not None and np.array_equal(numbers(more), [len(blocks.steps) - 1]):
            return g.set(more, np.asarray([0]))
    raise NotThere("the width of a step")


# With padding, the rest of the mask hides later keys once more, so an open diagonal has no effect there.
IN_STEPS: Family = [
    ("step-lost", "one block too few: the last gives zeros", output(-1, lost), BOTH),
    ("first-step-lost", "the first block gives zeros", output(0, lost), BOTH),
    ("steps-exchanged", "the second and third blocks exchanged", exchanged(1, 2), BOTH),
    ("step-twice", "the second last block also replaces the last", twice, BOTH),
    ("steps-moved", "the output is one token early", joined_output(lambda op, x: rolled(op, x, 2)), BOTH),
    ("step-width", "block size rounded down, so that tokens are in no block", wide_steps, BOTH),
    ("diagonal-unmasked", "every block sees all of its own keys", in_step(None, diagonal(all_true)), STEPS),
    ("first-diagonal-unmasked", "the first block sees all of its own keys", in_step(0, diagonal(all_true)), STEPS),
    ("last-diagonal-unmasked", "the last block sees all of its own keys", in_step(-1, diagonal(all_true)), STEPS),
    ("next-key-seen", "one key too many, in every block", in_step(None, numbered(1, 1)), STEPS),
    ("next-key-seen-once", "one key too many, in the third block", in_step(2, numbered(1, 1)), STEPS),
    ("own-key-hidden", "no query sees its own key", in_step(None, numbered(0, 1)), BOTH),
    ("step-from-first", "a block's queries are counted from its first", in_step(None, from_first), BOTH),
    ("step-from-first-once", "the last block's queries are counted from its first", in_step(-1, from_first), BOTH),
    ("step-queries-moved", "queries one earlier", in_step(1, operand("query", lambda op, x: rolled(op, x, 2))), BOTH),
    ("step-keys-moved", "keys one earlier", in_step(None, operand("key", lambda op, x: rolled(op, x, 3))), BOTH),
    ("step-values-moved", "values one earlier", in_step(-1, operand("value", lambda op, x: rolled(op, x, 2))), BOTH),
    ("step-keys-of-sample", "the first sample's keys for all", in_step(1, operand("key", first_along(0))), BOTH),
    ("step-fill-10", "-10 where -inf is meant", in_step(None, fill(-10.0)), BOTH),
    ("step-padding-dropped", "padding is ignored in every block", in_step(None, rest(all_true)), PADDED_STEPS),
    ("last-padding-dropped", "padding is ignored in the last block", in_step(-1, rest(all_true)), PADDED_STEPS),
    ("step-padding-moved", "one key early", in_step(None, rest(lambda op, x: rolled(op, x, 3))), PADDED_STEPS),
    ("step-padding-of-sample", "the first sample's for all", in_step(None, rest(first_along(0))), PADDED_STEPS),
    ("step-silent-rows", "queries without keys keep NaN", in_step(None, without_guard), PADDED_STEPS),
]  # fmt: skip
