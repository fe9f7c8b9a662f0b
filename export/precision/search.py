"""The search for the parts of a graph that have to stay in fp32 for a requirement to be met, and no others.

Parts are raised to fp32 until the requirement is met, in one of two ways: :func:`by_error`, if the errors of parts are
known, or :func:`by_culprits`, which a trace of the failing graph names. Then :func:`lower_again` lowers those that
prove unneeded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attnforge.export.diagnosis.causes import first_cause
from attnforge.export.diagnosis.stages import decomposed, module_of
from attnforge.export.diagnosis.trace import Trace, trace
from attnforge.export.graphs.float64 import NoDoublePath
from attnforge.export.graphs.nodes import VIEWS
from attnforge.export.precision.assign import MixedGraph, unrounded_in_fused_kernels
from attnforge.export.precision.judge import Answer, Assignment, Judge, Part, Trial
from attnforge.export.tensorrt.build import site_of

RAISES, TRIALS = 16, 64
"""Maximum number of times that culprits are raised, and of assignments that are judged."""


def by_error(judge: Judge, parts: Sequence[Part]) -> Sequence[Part]:
    """The fewest parts to raise, those with the largest errors first, by bisection; all parts if fewer do not pass."""
    if judge(frozenset()).passed:
        return []
    ordered = sorted(parts, key=lambda part: -part.error)

    def fails(low: int) -> bool:
        """Whether so many parts may not have fewer bits."""
        return not judge(frozenset(part.name for part in ordered[: len(parts) - low])).passed

    return ordered[: len(parts) - bisect_left(range(1, len(parts)), True, key=fails)]


def by_culprits(
    judge: Judge, blame: Callable[[Assignment, Trial], Culprits | None], everything: Assignment
) -> Sequence[Culprits]:
    """The parts to raise, step by step, until the requirement is met; in the end all, if nothing is left to blame.

    Args:
        judge: judges assignments.
        blame: names the parts to raise next, given an assignment that fails and its trial; None if nothing is left.
        everything: all parts.
    """
    raised: list[Culprits] = []
    high: Assignment = frozenset()
    while not (trial := judge(high)).passed and high != everything:
        blamed = blame(high, trial) if len(raised) < RAISES else None
        raised.append(blamed or Culprits(everything - high, NOTHING_LEFT))
        high |= raised[-1].names
    return raised


def lower_again(judge: Judge, high: Assignment, groups: Iterable[Collection[str]]) -> Iterator[Assignment]:
    """Yield assignments that still pass, each with another of these groups lowered as well.

    Args:
        judge: judges assignments; at most :data:`TRIALS` in all.
        high: an assignment that passes.
        groups: parts to lower together, in the order in which to try them.
    """
    for group in groups:
        less = high.difference(group)
        if less != high and len(judge.trials) < TRIALS and judge(less).passed:
            high = less
            yield high


# --- culprits ---------------------------------------------------------------------------------------------------------

# The operators to blame if an assignment of precisions misses its requirement.


HEADROOM = 2.0
"""Factor below the largest number of a type that a tensor has to stay, because untested inputs may reach further."""

STANDS_FOR_INFINITY = 1e30
"""A number of this size in a mask excludes keys, and any other as low has the same effect."""


NOTHING_LEFT = "the budget is not met without"
"""Why operators are raised if nothing is left to blame."""


@dataclass(frozen=True)
class Culprits:
    """Operators to raise to fp32.

    Attributes:
        names: their names.
        why: the evidence.
        out_of_range: whether 16 bits cannot represent their numbers; then they stay in fp32.
    """

    names: frozenset[str]
    why: str
    out_of_range: bool = False


def culprits(mixed: MixedGraph, answers: Sequence[Answer], high: Assignment, trial: Trial) -> Culprits | None:
    """The operators to raise next, among those that compute in 16 bits; None if nothing is left to blame.

    Args:
        mixed: the graph.
        answers: answers to the cases that assignments are judged on.
        high: the operators in fp32.
        trial: the result, with a worst case, in which they are found.
    """
    inputs = next(answer.inputs for answer in answers if answer.case is trial.case)
    _, fused = mixed.lowered(high)
    graph = decomposed(mixed.assigned(high), mixed.sites)
    try:
        traced = trace(graph, inputs, unrounded_in_fused_kernels(graph, fused))
    except NoDoublePath as error:
        return Culprits(frozenset(mixed.nodes) - high, f"nothing can be blamed: {error} cannot be computed in float64")
    if beyond := _beyond_range(mixed, traced) - high:
        shown = ", ".join(sorted(beyond)[:3])
        return Culprits(beyond, f"beyond the range of {mixed.precision.name}: {shown}", out_of_range=True)
    finding = first_cause(traced)
    nodes = [tensor.node for tensor in traced.tensors if tensor.name == finding.tensor]
    began = _where_it_begins(mixed, nodes[0], finding.evidence, high) if nodes else None
    return began or _largest_left(mixed, traced, high)


def _where_it_begins(mixed: MixedGraph, node: ir.Node, evidence: str, high: Assignment) -> Culprits | None:
    """The operator at which an error begins, and those that compute its inputs, or else all operators of its module."""
    module = module_of(node)
    if raised := _owners(mixed, (node, *map(_computing, node.inputs))) - high:
        return Culprits(raised, evidence)
    raised = frozenset(name for name, other in mixed.nodes.items() if module_of(other) == module) - high
    return Culprits(raised, f"{module}: {evidence}") if raised else None


def _largest_left(mixed: MixedGraph, traced: Trace, high: Assignment) -> Culprits | None:
    """The 16-bit operator whose tensor has the largest error."""
    left = [tensor for tensor in traced.tensors if _owners(mixed, [tensor.node]) - high]
    if not left:
        return None
    worst = max(left, key=lambda tensor: tensor.error)
    return Culprits(_owners(mixed, [worst.node]), f"the largest remaining error: {worst.name}")


def _beyond_range(mixed: MixedGraph, traced: Trace) -> frozenset[str]:
    """The operators that compute or receive numbers beyond the range of 16 bits, or have such weights."""
    most = mixed.precision.largest / HEADROOM
    beyond: list[ir.Node] = []
    for tensor in traced.tensors:
        if tensor.largest > most and (output := tensor.node.outputs[0]).dtype == mixed.low:
            beyond += [tensor.node, *(output.consumers() if tensor.node.op_type == "Cast" else ())]
    large = (name for name, node in mixed.nodes.items() if _largest_weight(node) > most)
    return _owners(mixed, beyond).union(large)


def _largest_weight(node: ir.Node) -> float:
    """The largest number of an operator's fp32 weights, except those that stand for infinity."""
    weights = [v.const_value.numpy() for v in node.inputs if v is not None and v.const_value is not None]
    sizes = [np.abs(weight) for weight in weights if weight.dtype == np.float32]
    return max((float(np.max(size[size < STANDS_FOR_INFINITY], initial=0.0)) for size in sizes), default=0.0)


def _owners(mixed: MixedGraph, nodes: Iterable[ir.Node | None]) -> frozenset[str]:
    """The operators of the canonical graph that nodes of the decomposed graph are parts of."""
    names = [str(node.name) for node in nodes if node is not None]
    owners = (name if name in mixed.nodes else f"{site_of(name)}/Attention" for name in names)
    return frozenset(owners).intersection(mixed.nodes)


def _computing(value: ir.Value | None) -> ir.Node | None:
    """The node that computes a value's numbers, looking through nodes that only move or cast them."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type not in VIEWS | {"Slice", "Expand", "Cast"}:
            return node
        value = node.inputs[0]
    return None
