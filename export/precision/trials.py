"""Assignments of precisions, judged by running them: 16-bit storage emulated as in a fused plan, against float64 with
the original weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array, is_floating
from attnforge.bundle import Case
from attnforge.export.attention.canonicalize import Site
from attnforge.export.lowering.tensorrt import lower
from attnforge.export.precision.assign import assign, operators
from attnforge.export.precision.emulation import emulate
from attnforge.export.reference import Derived, ReferenceModel, at_precision
from attnforge.numbers import scientific
from attnforge.precision import Precision
from attnforge.progress import Steps
from attnforge.runtime.cases import key, make_inputs
from attnforge.runtime.parity.budget import FAR_OFF, Allowed, judge
from attnforge.runtime.parity.metrics import MeasuredMetric, MetricReport

Assignment = frozenset[str]
"""The names of the operators that compute in fp32; all others compute in 16 bits."""


class MixedReference(Derived):
    """The reference of a deployment with chosen precisions: eager at the 16-bit one, float64 with the fp32 weights.

    Args:
        whole: the model in fp32.
        low: the 16-bit precision.
    """

    def __init__(self, whole: ReferenceModel, low: Precision) -> None:
        super().__init__(whole, low)
        self._low = whole.at(low)

    @property
    def reference(self) -> str:
        return f"{self._whole.reference}, its weights in fp32 for float64 and in {self.precision.name} for eager"

    def eager(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self._low.eager(at_precision(inputs, self.precision))


@dataclass(frozen=True)
class Requirement:
    """The requirement on an assignment.

    Attributes:
        max_error: maximum relative error on every ordinary case; None for twice eager's, and at most ten floors.
        metric: makes an empty score of the task's metric, which decides if `max_error` is None.
    """

    max_error: float | None = None
    metric: Callable[[], MeasuredMetric] | None = None

    @property
    def is_metric(self) -> bool:
        """Whether the metric alone decides."""
        return self.metric is not None and self.max_error is None

    def allowed(self, precision: Precision) -> Allowed:
        """The error that a deployment is allowed whose eager baseline is at `precision`."""
        return Allowed(self.max_error or FAR_OFF * precision.floor, self.max_error is not None)


@dataclass(frozen=True)
class Answers:
    """Cases, and by case name the inputs and the outputs of eager and float64."""

    cases: Sequence[Case]
    inputs: dict[str, dict[str, Array]]
    eager: dict[str, dict[str, Array]]
    exact: dict[str, dict[str, Array]]

    @classmethod
    def of(cls, model: ReferenceModel, cases: Sequence[Case], stored: Mapping[str, Array]) -> Answers:
        """Run `model` on `cases`, whose inputs are made from seeds and stored inputs."""
        feeds = {case.name: make_inputs(case, model.inputs, stored) for case in cases}
        eager = {name: model.eager(arrays) for name, arrays in feeds.items()}
        return cls(cases, feeds, eager, {name: model.exact(arrays) for name, arrays in feeds.items()})

    def stored(self, case: Case) -> dict[str, Array]:
        """Eager's and float64's outputs of a case, by the keys that a bundle stores them under."""
        answers = {"eager": self.eager[case.name], "float64": self.exact[case.name]}
        return {key(case, name, which): array for which, outputs in answers.items() for name, array in outputs.items()}


@dataclass(frozen=True)
class Trial:
    """The result of judging an assignment.

    Attributes:
        share: share of the requirement that it uses, on the worst case; 1 or less meets it, and infinity stands for NaN
            or infinity in the output or a missed metric.
        error: the largest relative error.
        case: the worst one; None if no output is floating-point.
        summary: the result in words; None for the share of the budget.
    """

    share: float
    error: float
    case: Case | None
    summary: str | None = None

    @property
    def passed(self) -> bool:
        return self.share <= 1

    @property
    def text(self) -> str:
        if self.summary is not None:
            return self.summary
        share = "NaN or infinity" if self.share == np.inf else f"{self.share:.2f} of the budget"
        share = share if self.share else f"an error of {scientific(self.error)}"
        return f"{share} in {self.case.name}" if self.case is not None else share


def by_metric(trial: Trial, report: MetricReport) -> Trial:
    """A trial that the task's metric decides as well: if it is missed, or NaN, the requirement is missed."""
    text = f"{trial.text}; {report.name} {report.value:.6g}, with {report.least:.6g} required"
    return replace(trial, share=trial.share if report.passed else np.inf, summary=text)


class Trials:
    """Judges assignments of one canonical graph, each once.

    Args:
        model: a canonical fp32 graph; not modified.
        sites: its attention sites.
        precision: the 16-bit precision.
        baseline: the precision whose eager sets the budget and gave `answers`.
        requirement: what has to be met.
        answers: answers to the cases that assignments are judged on.
        steps: counts every assignment that is run.

    Attributes:
        nodes: the operators whose precision is a choice, by name, in graph order.
        low: the 16-bit type.
    """

    def __init__(
        self,
        model: ir.Model,
        sites: list[Site],
        precision: Precision,
        baseline: Precision,
        requirement: Requirement,
        answers: Answers,
        steps: Steps,
    ) -> None:
        self.model, self.sites, self.precision, self.answers = model, sites, precision, answers
        self.nodes = {str(node.name): node for node in operators(model)}
        self.low = ir.DataType.from_numpy(precision.dtype)
        self.allowed = requirement.allowed(baseline)
        self._baseline, self._requirement, self._steps = baseline, requirement, steps
        self._trials: dict[Assignment, Trial] = {}

    def __len__(self) -> int:
        return len(self._trials)

    def assigned(self, high: Iterable[str]) -> ir.Model:
        """A copy of the graph with these operators in fp32."""
        model = self.model.clone()
        assign(model, self.low, frozenset(high))
        return model

    def lowered(self, high: Iterable[str]) -> tuple[ir.Model, list[str]]:
        """A copy of the graph with these operators in fp32, lowered for TensorRT, and the sites that it fuses."""
        model = self.assigned(high)
        return model, [form.site for form in lower(model, self.sites).sites if form.unfused is None]

    def judge(self, high: Assignment) -> Trial:
        """Run an assignment on all cases."""
        if high not in self._trials:
            self._steps.begin(f"{len(high)} of {len(self.nodes)} operators in fp32")
            self._trials[high] = self._judged(high, self.answers)
        return self._trials[high]

    def error_on(self, high: Assignment, answers: Answers) -> float:
        """The largest relative error of an assignment on other cases."""
        return self._judged(high, answers).error

    def _judged(self, high: Assignment, answers: Answers) -> Trial:
        run = emulate(*self.lowered(high))
        scores = self._requirement.metric() if self._requirement.metric is not None else None
        worst, error = Trial(0.0, 0.0, None), 0.0
        for case in answers.cases:
            eager, exact = answers.eager[case.name], answers.exact[case.name]
            outputs = run(answers.inputs[case.name])
            if scores is not None:
                scores.add(case, outputs, answers.stored(case))
            for name, array in outputs.items():
                if not is_floating(array):
                    continue  # integers are right or wrong by the numbers that they are computed from
                trial = self._judge_output(case, name, array, eager[name], exact[name])
                error = max(error, trial.error)
                if worst.case is None or trial.share > worst.share:
                    worst = trial
        trial = Trial(worst.share, error, worst.case)
        return trial if scores is None else by_metric(trial, scores.report())

    def _judge_output(self, case: Case, name: str, output: Array, eager: Array, exact: Array) -> Trial:
        output, eager, exact = (array.astype(np.float64) for array in (output, eager, exact))
        comparison = judge(case, name, output, eager, exact, self._baseline, None, self.allowed)
        share = comparison.error / comparison.budget
        if comparison.max_budget:
            share = max(share, comparison.max_error / comparison.max_budget)
        if self._requirement.is_metric:
            share = 0.0
        lost = bool((~np.isfinite(output) & np.isfinite(exact)).any())
        failed_otherwise = not comparison.passed and share <= 1 and self._requirement.metric is None
        return Trial(np.inf if lost or failed_otherwise or np.isnan(share) else share, comparison.error, case)
