"""The operators that have to stay in fp32 for a deployment to meet its requirement, and no others.

All operators start in 16 bits. If that misses the requirement, culprits are raised to fp32: operators that leave the
range of 16 bits, all at once, or else the operator at which an error begins and those that compute its inputs. Once the
requirement is met, operators that prove unneeded in fp32 are lowered again, the most expensive first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from attnforge.bundle import Case, Mixed, Region
from attnforge.errors import BuildError
from attnforge.export.attention.canonicalize import Site
from attnforge.export.diagnosis.stages import module_of
from attnforge.export.flops import run_cost
from attnforge.export.precision.cost import cost_of, flops_of
from attnforge.export.precision.culprits import culprits
from attnforge.export.precision.trials import Answers, Assignment, MixedReference, Requirement, Trials
from attnforge.export.reference import Data, ReferenceModel, stored_inputs
from attnforge.numbers import scientific
from attnforge.precision import precision_named
from attnforge.progress import Progress, Steps

RAISES, TRIALS = 16, 64
"""Maximum number of times that culprits are raised, and of assignments that are judged."""

JUDGED = 6
"""Cases on which assignments are judged."""


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
    reference: MixedReference
    mixed: Mixed
    cost: float


def choose(
    model: ir.Model,
    sites: list[Site],
    whole: ReferenceModel,
    names: Sequence[str],
    requirement: Requirement,
    data: Data,
    progress: Progress,
) -> ChosenPrecisions:
    """The cheapest precisions found that meet the requirement.

    Args:
        model: a canonical fp32 graph; not modified.
        sites: its attention sites.
        whole: the model in fp32, for references.
        names: the 16-bit precisions to try; the second only if the first needs operators in fp32.
        requirement: what has to be met.
        data: real inputs, on which assignments are judged too.
        progress: receives each assignment that is tried.

    Raises:
        BuildError: not even fp32 meets the requirement.
    """
    references = [MixedReference(whole, precision_named(name)) for name in names]
    baseline = references[0]
    stored, cases = stored_inputs(baseline, data, run_cost(model))
    answers, steps = Answers.of(baseline, judged_on(cases), stored), Steps(progress)
    candidates: list[ChosenPrecisions] = []
    for reference in references:
        trials = Trials(model, sites, reference.precision, baseline.precision, requirement, answers, steps)
        search = _Search(trials, cases[0].sizes)
        high = search.lower_again(search.raise_until_met())
        error, exactly = trials.allowed.error, trials.allowed.exactly
        if requirement.is_metric:  # then the error is simply measured, on every ordinary case
            ordinary = [case for case in cases if case.is_ordinary and case.kind != "zeros"]  # eager may refuse these
            everywhere = Answers.of(baseline, ordinary, stored)
            error, exactly = 2 * max(trials.error_on(high, everywhere), reference.precision.floor), True
        mixed = search.record(high, error, exactly)
        candidates.append(ChosenPrecisions(trials.assigned(high), reference, mixed, search.cost(high)))
        if not mixed.regions:
            break
    return min(candidates, key=lambda candidate: candidate.cost)


def judged_on(cases: Sequence[Case]) -> list[Case]:
    """The cases to judge assignments on: real data, and ordinary ones of all kinds except the largest."""
    ordinary = {case.name: case for case in cases if case.is_ordinary}
    data = [case for case in ordinary.values() if case.kind == "data"]
    names = ("example", "uniform", "normal-odd", "normal-opt", "normal-again", "normal-prime")
    return [*data, *(ordinary[name] for name in names if name in ordinary)][: max(JUDGED, len(data))]


@dataclass
class _Search:
    """One search for an assignment.

    Attributes:
        trials: judges assignments.
        sizes: sizes of the dynamic dims at which cost is estimated.
        why: the evidence against every operator that was raised.
        out_of_range: operators that stay in fp32 because 16 bits cannot represent their numbers.
        steps: what was tried, in order, and the outcome.
    """

    trials: Trials
    sizes: Mapping[str, int]
    why: dict[str, str] = field(default_factory=dict)
    out_of_range: frozenset[str] = frozenset()
    steps: list[str] = field(default_factory=list)

    def raise_until_met(self) -> Assignment:
        """Raise culprits until the requirement is met, or all operators if no culprit is left.

        Raises:
            BuildError: not even fp32 meets the requirement.
        """
        high: Assignment = frozenset()
        self._note("all in 16 bits", high)
        for _ in range(RAISES):
            if self._meets(high):
                return high
            raised = culprits(self.trials, high)
            if not raised.names:
                break
            high |= raised.names
            self.why.update(dict.fromkeys(raised.names, raised.why))
            self.out_of_range |= raised.names if raised.out_of_range else frozenset()
            self._note(raised.why, high)
        if self._meets(high):
            return high
        everything = frozenset(self.trials.nodes)
        self.why = {name: self.why.get(name, "the budget is not met without") for name in everything}
        self._note("everything in fp32", everything)
        if not self._meets(everything):
            trial = self.trials.judge(everything)
            raise BuildError(
                f"even fp32 throughout misses the budget ({trial.text}, an error of {scientific(trial.error)}); "
                "allow a larger error, or run attnforge diagnose on the fp32 bundle"
            )
        return everything

    def lower_again(self, high: Assignment) -> Assignment:
        """Lower operators that prove unneeded in fp32: groups of one module first, then single operators, the most
        expensive first. Operators near the end of the range stay, because untested inputs may reach further."""
        for group in sorted(self._by_module(high - self.out_of_range), key=self._saved, reverse=True):
            if len(group) > 1:
                high = self._without(high, group)
        for name in sorted(high - self.out_of_range, key=lambda name: self._saved([name]), reverse=True):
            high = self._without(high, [name])
        return high

    def _without(self, high: Assignment, group: Sequence[str]) -> Assignment:
        """The assignment without a group, if it still meets the requirement."""
        less = high - set(group)
        if less == high or len(self.trials) >= TRIALS or not self._meets(less):
            return high
        self._note(f"{', '.join(group[:3])} in 16 bits again", less)
        return less

    def _meets(self, high: Assignment) -> bool:
        return self.trials.judge(high).passed

    def _note(self, step: str, high: Assignment) -> None:
        trial = self.trials.judge(high)
        self.steps.append(f"{step}: {len(high)} of {len(self.trials.nodes)} operators in fp32, {trial.text}")

    def record(self, high: Assignment, max_error: float, exactly: bool) -> Mixed:
        """The manifest's record of an assignment, and of how it was found."""
        order = {name: i for i, name in enumerate(self.trials.nodes)}
        groups = sorted(self._by_module(high), key=lambda group: order[group[0]])
        return Mixed(
            low=self.trials.precision.name,
            max_error=max_error,
            exactly=exactly,
            error=self.trials.judge(high).error,
            regions=[Region(module=self._module(g[0]), nodes=g, why=self.why[g[0]]) for g in groups],
            low_flops=self._low_flops(high),
            trials=len(self.trials),
            steps=self.steps,
        )

    def _module(self, name: str) -> str:
        return module_of(self.trials.nodes[name])

    def _by_module(self, names: Iterable[str]) -> list[list[str]]:
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(self._module(name), []).append(name)
        return [sorted(group) for group in groups.values()]

    def _saved(self, names: Iterable[str]) -> float:
        """Estimated seconds that lowering these operators saves."""
        nodes = [self.trials.nodes[name] for name in names]
        return sum(cost_of(node, self.sizes, True) - cost_of(node, self.sizes, False) for node in nodes)

    def cost(self, high: Assignment) -> float:
        """Estimated seconds of the model."""
        return sum(cost_of(node, self.sizes, name in high) for name, node in self.trials.nodes.items())

    def _low_flops(self, high: Assignment) -> float:
        """Share of the floating-point operations that are in 16 bits."""
        flops = {name: flops_of(node, self.sizes) for name, node in self.trials.nodes.items()}
        total = sum(flops.values())
        return sum(count for name, count in flops.items() if name not in high) / total if total else 1.0
