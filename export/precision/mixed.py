"""Mixed precisions, `precision="auto"`: 16 bits, and fp32 for the operators without which the requirement is missed.

All operators start in 16 bits. If that misses the requirement, culprits are raised to fp32: operators that leave the
range of 16 bits, all at once, or else the operator at which an error begins and those that compute its inputs. Once the
requirement is met, operators that prove unneeded in fp32 are lowered again, the most expensive first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import onnx_ir as ir

from attnforge.bundle import Mixed, Region
from attnforge.errors import BuildError
from attnforge.export.attention.canonicalize import Site
from attnforge.export.flops import known_flops, run_cost
from attnforge.export.graphs.nodes import inputs_of
from attnforge.export.options import DeployOptions
from attnforge.export.precision.assign import MixedGraph
from attnforge.export.precision.judge import Assignment, Judge, Requirement, answers_of, judged_on
from attnforge.export.precision.search import NOTHING_LEFT, by_culprits, culprits, lower_again
from attnforge.export.reference import Data, Derived, ReferenceModel, at_precision, inputs_and_cases
from attnforge.export.room import Numbers
from attnforge.numbers import scientific
from attnforge.precision import Precision, precision_named
from attnforge.progress import Progress, Steps


def _reference(whole: ReferenceModel, precision: Precision) -> ReferenceModel:
    """The reference of a deployment with chosen precisions: eager at the 16-bit one, float64 with the fp32 weights."""
    low = whole.at(precision)
    text = f"{whole.reference}, its weights in fp32 for float64 and in {precision.name} for eager"
    return Derived(whole, precision, text, lambda inputs: low.eager(at_precision(inputs, precision)))


@dataclass(frozen=True)
class ChosenPrecisions:
    """Precisions that meet the requirement.

    Attributes:
        model: the canonical graph in these precisions.
        reference: the reference that the deployment is checked against.
        mixed: the manifest's record of them.
        cost: estimated seconds of the model.
    """

    model: ir.Model
    reference: ReferenceModel
    mixed: Mixed
    cost: float


def choose(
    model: ir.Model, sites: list[Site], whole: ReferenceModel, options: DeployOptions, data: Data, progress: Progress
) -> ChosenPrecisions:
    """The cheapest precisions found that meet the requirement.

    Args:
        model: a canonical fp32 graph; not modified.
        sites: its attention sites.
        whole: the model in fp32, for references.
        options: the 16-bit precisions to try, the second only if the first needs operators in fp32; and the
            requirement.
        data: real inputs, on which assignments are judged too.
        progress: receives each assignment that is tried.

    Raises:
        BuildError: not even fp32 meets the requirement.
    """
    references = [_reference(whole, precision_named(name)) for name in options.automatic]
    baseline, steps = references[0], Steps(progress)
    requirement = replace(Requirement.of(options, data), baseline=baseline.precision)
    stored, cases = inputs_and_cases(baseline, data, run_cost(model))
    answers = answers_of(baseline, judged_on(cases), stored)
    candidates: list[ChosenPrecisions] = []
    for reference in references:
        graph = MixedGraph(model, sites, reference.precision)
        judge = Judge(graph.run, answers, requirement, graph.text, steps)
        high, mixed = _searched(graph, judge, cases[0].sizes)
        if requirement.is_metric:  # then the error is simply measured, on every ordinary case
            ordinary = [case for case in cases if case.is_ordinary and case.kind != "zeros"]  # eager may refuse these
            everywhere = judge.run(graph.run(high), answers_of(baseline, ordinary, stored))
            mixed.max_error, mixed.exactly = 2 * max(everywhere.error, reference.precision.floor), True
        numbers = Numbers(cases[0].sizes)
        cost = sum(cost_of(node, numbers, name in high) for name, node in graph.nodes.items())
        candidates.append(ChosenPrecisions(graph.assigned(high), reference, mixed, cost))
        if not mixed.regions:
            break
    return min(candidates, key=lambda candidate: candidate.cost)


def _searched(graph: MixedGraph, judge: Judge, sizes: Mapping[str, int]) -> tuple[Assignment, Mixed]:
    """The operators in fp32, and the manifest's record of the search for them.

    Args:
        graph: the graph.
        judge: judges its assignments.
        sizes: sizes of the dynamic dims at which cost is estimated.

    Raises:
        BuildError: not even fp32 meets the requirement.
    """
    raised = by_culprits(judge, partial(culprits, graph, judge.answers), frozenset(graph.nodes))
    high, stays, why = frozenset[str](), frozenset[str](), dict[str, str]()
    path = [("all in 16 bits", high)]
    for step in raised:
        high |= step.names
        stays |= step.names if step.out_of_range else frozenset()
        why |= dict.fromkeys(step.names, step.why)
        path.append(("everything in fp32" if step.why == NOTHING_LEFT else step.why, high))
    if not (trial := judge(high)).passed:
        raise BuildError(
            f"even fp32 throughout misses the budget ({trial.text}, an error of {scientific(trial.error)}); allow a "
            "larger error, or run attnforge diagnose on the fp32 bundle"
        )
    for less in lower_again(judge, high, _groups(graph, high - stays, sizes)):
        path.append((f"{', '.join(sorted(high - less)[:3])} in 16 bits again", less))
        high = less
    flops = {name: known_flops(node, sizes) for name, node in graph.nodes.items()}
    total = sum(flops.values())
    allowed = judge.requirement.allowed
    return high, Mixed(
        low=graph.precision.name,
        max_error=allowed.error,
        exactly=allowed.exactly,
        error=judge(high).error,
        regions=[
            Region(module=module, nodes=sorted(names), why=why[min(names)])
            for module, names in graph.by_module(high).items()
        ],
        low_flops=sum(count for name, count in flops.items() if name not in high) / total if total else 1.0,
        trials=len(judge.trials),
        steps=[f"{step}: {judge.text(high)}, {judge(high).text}" for step, high in path],
    )


def _groups(graph: MixedGraph, names: Assignment, sizes: Mapping[str, int]) -> Iterator[Sequence[str]]:
    """Groups of operators to lower again, those of one module first, then single ones, the most expensive first. None
    is near the end of the range of 16 bits, because untested inputs may reach further."""
    numbers, nodes = Numbers(sizes), graph.nodes
    saves = {name: cost_of(node, numbers, True) - cost_of(node, numbers, False) for name, node in nodes.items()}
    modules = [group for group in graph.by_module(names).values() if len(group) > 1]
    for groups in (modules, [[name] for name in saves if name in names]):
        yield from sorted(groups, key=lambda group: -sum(saves[name] for name in group))


# --- cost -------------------------------------------------------------------------------------------------------------

# The estimated seconds of an operator in 16 bits and in fp32.


RATE_16, RATE_32, BANDWIDTH = 312e12, 19.5e12, 1.6e12
"""Operations per second of 16-bit and fp32 products, and bytes per second, of an A100 (NVIDIA A100 datasheet). Only
their ratios matter here."""


def cost_of(node: ir.Node, numbers: Numbers, is_high: bool) -> float:
    """Estimated seconds of an operator, from its products and the memory that it reads and writes.

    Args:
        node: the operator; inputs and outputs whose shape is not known do not count.
        numbers: counts the elements of inputs and outputs.
        is_high: whether it computes in fp32 rather than in 16 bits.
    """
    moved = sum(map(numbers, (*inputs_of(node), *node.outputs))) * (4 if is_high else 2)
    return known_flops(node, numbers.sizes) / (RATE_32 if is_high else RATE_16) + moved / BANDWIDTH
