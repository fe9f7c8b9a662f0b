"""Which operators have to stay in fp32 for a deployment to keep to its budget, and no others.

All are 16-bit at first. Where that misses the budget, what is to blame is raised to fp32: operators that leave the
range of 16 bits all at once, else the tensor at which an error begins and what computes its inputs. When the budget is
met, what proves unneeded is lowered again, the dearest first. Every assignment is judged by running it, with 16-bit
storage emulated as a fused plan has it, against float64 of the original weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array, is_floating
from attnforge.bundle import Case, Mixed, Region, TensorSpec
from attnforge.errors import BuildError
from attnforge.export.attention.canonicalize import Site
from attnforge.export.attention.layout import VIEWS
from attnforge.export.diagnosis.causes import Blame, blame
from attnforge.export.diagnosis.stages import module_of, written_out
from attnforge.export.diagnosis.trace import Trace, trace
from attnforge.export.graphs.float64 import NoDoublePath
from attnforge.export.lowering import tensorrt as for_tensorrt
from attnforge.export.lowering.attention import Lowered
from attnforge.export.precision.assign import assign, cost_of, flops_of, operators
from attnforge.export.precision.emulation import emulate, held_by_fused_kernels
from attnforge.export.reference import Data, ReferenceModel, at_precision, stored_of
from attnforge.precision import Precision, precision_named
from attnforge.progress import Progress, Steps
from attnforge.runtime import cases as reference
from attnforge.runtime.parity.budget import FAR_OFF, Allowed, judge
from attnforge.runtime.parity.metrics import Scores

HEADROOM = 2.0
"""How far below the largest number of a type a tensor has to stay: inputs that were not tried may reach further."""

STANDS_FOR_INFINITY = 1e30
"""A number of this size in a mask excludes, and any as low does the same."""

RAISES, TRIALS = 16, 64
"""How often something is raised, and how many assignments are judged, at most."""


class MixedReference:
    """What a deployment of chosen precisions is held against: eager at the 16-bit one, float64 of the fp32 weights.

    Args:
        whole: the model in fp32.
        low: the 16-bit precision.
    """

    def __init__(self, whole: ReferenceModel, low: Precision) -> None:
        self._whole, self._low = whole, whole.at(low)
        self.inputs: list[TensorSpec] = whole.inputs
        self.precision = low

    @property
    def reference(self) -> str:
        return f"{self._whole.reference}, its weights in fp32 for float64 and in {self.precision.name} for eager"

    @property
    def example(self) -> dict[str, Array]:
        return self._whole.example

    def eager(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self._low.eager(at_precision(inputs, self.precision))

    def exact(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self._whole.exact(inputs)

    def at(self, precision: Precision) -> ReferenceModel:
        return self._whole.at(precision)


@dataclass(frozen=True)
class Requirement:
    """What has to be met.

    Attributes:
        max_error: relative, on every ordinary case; None for twice eager's, and no more than ten floors.
        metric: in its place, what the task is measured by; makes scores of the cases of data.
    """

    max_error: float | None = None
    metric: Callable[[], Scores] | None = None

    def allowed(self, precision: Precision) -> Allowed:
        return Allowed(self.max_error or FAR_OFF * precision.floor, self.max_error is not None)


@dataclass
class Trial:
    """How an assignment did: `share` is of the budget, and 1 or less meets it; `error` the largest relative one."""

    share: float
    error: float
    case: Case | None


@dataclass
class Assignment:
    """An assignment that meets the budget."""

    reference: MixedReference
    model: ir.Model
    mixed: Mixed
    cost: float


@dataclass
class _Search:
    model: ir.Model
    sites: list[Site]
    source: MixedReference
    yardstick: MixedReference
    budget: Requirement
    cases: list[Case]
    feeds: dict[str, dict[str, Array]]
    sizes: dict[str, int]
    expected: dict[str, tuple[dict[str, Array], dict[str, Array]]]
    all_cases: list[Case]
    feed: Callable[[Case], dict[str, Array]]
    trials: Steps
    tried: dict[frozenset[str], Trial] = field(default_factory=dict)
    steps: list[str] = field(default_factory=list)
    out_of_range: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.low = ir.DataType.from_numpy(self.source.precision.dtype)
        self.nodes = {str(node.name): node for node in operators(self.model)}

    # --- judging ------------------------------------------------------------------------------------------------------

    def assigned(self, high: Iterable[str]) -> ir.Model:
        model = self.model.clone()
        assign(model, self.low, frozenset(high))
        return model

    def lowered(self, high: Iterable[str]) -> tuple[ir.Model, list[Lowered]]:
        model = self.assigned(high)
        return model, for_tensorrt.lower(model, self.sites).sites

    def judge(self, high: frozenset[str]) -> Trial:
        """The verdict on an assignment, over all cases."""
        if high not in self.tried:
            self.trials.begin(f"{len(high)} of {len(self.nodes)} operators in fp32")
            self.tried[high] = self._judged(high)
        return self.tried[high]

    def _judged(self, high: frozenset[str]) -> Trial:
        model, lowered = self.lowered(high)
        run = emulate(model, [one.site for one in lowered if one.unfused is None])
        allowed = self.budget.allowed(self.yardstick.precision)
        scores = self.budget.metric() if self.budget.metric is not None else None
        worst = Trial(0.0, 0.0, None)
        for case in self.cases:
            eager, exact = self.expected[case.name]
            results = run(self.feeds[case.name])
            if scores is not None:
                keys = {
                    reference.key(case, n, which): a
                    for which, arrays in (("eager", eager), ("float64", exact))
                    for n, a in arrays.items()
                }
                scores.add(case, results, keys)
            for name, array in results.items():
                arrays = (array.astype(np.float64), eager[name].astype(np.float64), exact[name].astype(np.float64))
                if not is_floating(array):
                    continue  # it is right or wrong by what it is made of
                found = judge(case, name, *arrays, self.yardstick.precision, None, allowed)
                lost = bool((~np.isfinite(arrays[0]) & np.isfinite(arrays[2])).any())
                share = max(found.error / found.budget, found.max_error / found.max_budget if found.max_budget else 0.0)
                if scores is not None and self.budget.max_error is None:
                    share = 0.0
                share = np.inf if lost or (not found.passed and share <= 1 and scores is None) else share
                worst.error = max(worst.error, found.error)
                if worst.case is None or share > worst.share:
                    worst.share, worst.case = share, case
        if scores is not None:
            report = scores.report()
            worst.share = max(worst.share, 1.0 if report.passed else 1.0 + report.least - report.value)
        return worst

    def everywhere(self, high: frozenset[str]) -> float:
        """The largest error over every ordinary case, those of the largest sizes too."""
        cases = [case for case in self.all_cases if case.is_ordinary]
        feeds = {case.name: self.feed(case) for case in cases}
        expected = {
            name: (self.yardstick.eager(inputs), self.yardstick.exact(inputs)) for name, inputs in feeds.items()
        }
        return replace(self, cases=cases, feeds=feeds, expected=expected, tried={}).judge(high).error

    # --- searching ----------------------------------------------------------------------------------------------------

    def meets(self, high: frozenset[str]) -> bool:
        return self.judge(high).share <= 1

    def note(self, what: str, high: frozenset[str]) -> None:
        verdict = self.judge(high)
        share = "numbers are lost" if verdict.share == np.inf else f"{verdict.share:.2f} of the budget"
        where = f" in {verdict.case.name}" if verdict.case is not None else ""
        self.steps.append(f"{what}: {len(high)} of {len(self.nodes)} operators in fp32, {share}{where}")

    def raise_until_met(self) -> tuple[frozenset[str], dict[str, str]]:
        """Operators in fp32 with which the budget is met, and why each is."""
        high: frozenset[str] = frozenset()
        why: dict[str, str] = {}
        self.note("all in 16 bits", high)
        for _ in range(RAISES):
            if self.meets(high):
                return high, why
            more, reason = self._to_raise(high)
            if not more:
                break
            high |= more
            why.update(dict.fromkeys(more, reason))
            self.note(reason, high)
        if self.meets(high):
            return high, why
        everything = frozenset(self.nodes)
        why = {name: why.get(name, "the budget is not met without") for name in everything}
        self.note("everything in fp32", everything)
        if not self.meets(everything):
            verdict = self.judge(everything)
            raise BuildError(
                f"even all in fp32 misses the budget ({verdict.share:.3g} of it, an error of {verdict.error:.1e}); "
                "allow a larger error, or look at what attnforge diagnose says of the fp32 bundle"
            )
        return everything, why

    def _to_raise(self, high: frozenset[str]) -> tuple[frozenset[str], str]:
        """What to raise next, and why: empty where nothing is left that is to blame."""
        case = self.judge(high).case
        assert case is not None
        _, lowered = self.lowered(high)
        fused = {one.site for one in lowered if one.unfused is None}
        graph = written_out(self.assigned(high), self.sites)
        held = held_by_fused_kernels(graph, fused)
        try:
            traced = trace(graph, self.feeds[case.name], held)
        except NoDoublePath as error:
            return frozenset(self.nodes) - high, f"nothing can be blamed: {error} is not computed in float64"
        if beyond := self._beyond(traced, high):
            self.out_of_range |= beyond
            names = ", ".join(sorted(beyond)[:3])
            return beyond, f"beyond the range of {self.source.precision.name}: {names}"
        found = blame(traced)
        more = self._around(found) - high
        reason = found.evidence
        if not more and found.tensor is not None:
            module = module_of(found.tensor.node)
            more = frozenset(n for n, node in self.nodes.items() if module_of(node) == module) - high
            reason = f"{module}: {found.evidence}"
        if not more:
            worst = max((m for m in traced.tensors if self._owner(m.node) not in (None, *high)),
                        key=lambda m: m.error, default=None)  # fmt: skip
            owner = self._owner(worst.node) if worst is not None else None
            more = frozenset([owner]) if owner is not None else frozenset()
            reason = f"the largest error left: {worst.name}" if worst is not None else ""
        return more, reason

    def _beyond(self, traced: Trace, high: frozenset[str]) -> frozenset[str]:
        """What computes tensors that 16 bits do not hold, takes them, or has weights that they do not hold."""
        most = self.source.precision.largest / HEADROOM
        found: set[str | None] = set()
        for one in traced.tensors:
            if one.largest > most and one.node.outputs[0].dtype == self.low:
                takers = [use.node for use in one.node.outputs[0].uses()] if one.node.op_type == "Cast" else []
                found |= {self._owner(node) for node in (one.node, *takers)}
        for name, node in self.nodes.items():
            weights = [v.const_value.numpy() for v in node.inputs if v is not None and v.const_value is not None]
            sizes = [np.abs(w) for w in weights if w.dtype == np.float32]
            if any(np.max(size[size < STANDS_FOR_INFINITY], initial=0.0) > most for size in sizes):
                found.add(name)
        return frozenset(name for name in found if name is not None) - high

    def _around(self, found: Blame) -> frozenset[str]:
        """The operator at which an error begins, and those that compute its inputs."""
        if found.tensor is None:
            return frozenset()
        names = {self._owner(found.tensor.node)}
        for value in found.tensor.node.inputs:
            names.add(self._owner(_computed(value)))
        return frozenset(name for name in names if name is not None)

    def _owner(self, node: ir.Node | None) -> str | None:
        """The operator of the canonical graph that a node of the written-out one is part of."""
        if node is None or node.name is None:
            return None
        if node.name in self.nodes:
            return node.name
        site = node.name.partition("/Attention/")[0].removesuffix("/Softmax")
        name = f"{site}/Attention"
        return name if name in self.nodes else None

    def lower_again(self, high: frozenset[str]) -> frozenset[str]:
        """Without what proves unneeded: groups first, then single operators, the dearest first. What is near the end of
        the range stays, for inputs that were not tried may reach further."""
        groups = _groups(high - self.out_of_range, lambda name: module_of(self.nodes[name]))
        for group in sorted(groups, key=self._saved, reverse=True):
            if len(group) > 1:
                high = self._without(high, group)
        for name in sorted(high - self.out_of_range, key=lambda name: self._saved([name]), reverse=True):
            high = self._without(high, [name])
        return high

    def _without(self, high: frozenset[str], group: Sequence[str]) -> frozenset[str]:
        less = high - set(group)
        if less == high or len(self.tried) >= TRIALS or not self.meets(less):
            return high
        self.note(f"{', '.join(group[:3])} in 16 bits again", less)
        return less

    def _saved(self, names: Iterable[str]) -> float:
        return sum(cost_of(self.nodes[n], self.sizes, True) - cost_of(self.nodes[n], self.sizes, False) for n in names)

    def cost(self, high: frozenset[str]) -> float:
        return sum(cost_of(node, self.sizes, name in high) for name, node in self.nodes.items())

    def low_flops(self, high: frozenset[str]) -> float:
        flops = {name: flops_of(node, self.sizes) for name, node in self.nodes.items()}
        total = sum(flops.values())
        return sum(f for name, f in flops.items() if name not in high) / total if total else 1.0


def _computed(value: ir.Value | None) -> ir.Node | None:
    """The node that computes a value's numbers, through what only moves or casts them."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type not in VIEWS | {"Slice", "Expand", "Cast"}:
            return node
        value = node.inputs[0]
    return None


def _groups(names: Iterable[str], of: Callable[[str], str]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(of(name), []).append(name)
    return [sorted(group) for group in groups.values()]


MOST = 6
"""Cases on which assignments are judged."""


def choose(
    model: ir.Model,
    sites: list[Site],
    whole: ReferenceModel,
    names: Sequence[str],
    budget: Requirement,
    data: Data,
    progress: Progress,
) -> Assignment:
    """The cheapest assignment found that meets the budget.

    Args:
        model: canonical, in fp32; is not touched.
        sites: its attention.
        whole: the model in fp32, for references.
        names: the 16-bit precisions to try, the first alone where it needs no fp32.
        budget: what has to be met.
        data: real inputs, on which it is judged too.
        progress: hears of every assignment that is tried.

    Raises:
        BuildError: not even fp32 meets the budget.
    """
    sources = [MixedReference(whole, precision_named(name)) for name in names]
    stored, cases = stored_of(sources[0], data)
    judged = _judged_on(cases)

    def feed(case: Case) -> dict[str, Array]:
        return reference.make_inputs(case, whole.inputs, stored)

    feeds = {case.name: feed(case) for case in judged}
    expected = {name: (sources[0].eager(inputs), whole.exact(inputs)) for name, inputs in feeds.items()}
    found: list[Assignment] = []
    trials = Steps(progress)
    for source in sources:
        search = _Search(
            model, sites, source, sources[0], budget, judged, feeds, cases[0].sizes, expected, cases, feed, trials
        )
        found.append(_chosen(search))
        if not found[-1].mixed.regions:
            break
    return min(found, key=lambda one: one.cost)


def _chosen(search: _Search) -> Assignment:
    source, budget = search.source, search.budget
    high, why = search.raise_until_met()
    high = search.lower_again(high)
    allowed = budget.allowed(search.yardstick.precision)
    verdict = search.judge(high)
    assigned = search.assigned(high)
    groups = sorted(_groups(high, lambda n: module_of(search.nodes[n])), key=lambda g: list(search.nodes).index(g[0]))
    regions = [Region(module=module_of(search.nodes[g[0]]), nodes=g, why=why[g[0]]) for g in groups]
    exactly, error = allowed.exactly, allowed.error
    if budget.metric is not None and budget.max_error is None:  # what it comes to anywhere is then what it may
        exactly, error = True, 2 * max(search.everywhere(high), source.precision.floor)
    mixed = Mixed(
        low=source.precision.name, max_error=error, exactly=exactly, error=verdict.error, regions=regions,
        low_flops=search.low_flops(high), trials=len(search.tried), steps=search.steps,
    )  # fmt: skip
    return Assignment(source, assigned, mixed, search.cost(high))


def _judged_on(cases: Sequence[Case]) -> list[Case]:
    """Ordinary cases of all sorts, none of them the largest."""
    ordinary = [case for case in cases if case.is_ordinary]
    wanted = ("example", "uniform", "normal-odd", "normal-opt", "normal-again", "normal-prime")
    first = [case for case in ordinary if case.kind == "data"]
    return [*first, *(case for name in wanted for case in ordinary if case.name == name)][: max(MOST, len(first))]
