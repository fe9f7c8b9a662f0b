"""The judge of precisions: runs a graph with some parts in fp32 and the others in fewer bits, and compares its outputs
with float64 with the original weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from attnforge.arrays import Array, is_floating
from attnforge.bundle import Case
from attnforge.export.options import DeployOptions
from attnforge.export.reference import Data, ReferenceModel
from attnforge.numbers import scientific
from attnforge.precision import Precision
from attnforge.progress import Steps
from attnforge.runtime.cases import key, make_inputs
from attnforge.runtime.parity.budget import FAR_OFF, Allowed, judge, relative_error
from attnforge.runtime.parity.metrics import MeasuredMetric, metric_named
from attnforge.runtime.parity.verify import Run

JUDGED = 6
"""Cases on which assignments are judged."""


@dataclass(frozen=True)
class Part:
    """A part of a graph whose precision is a choice.

    Attributes:
        name: its name, unlike that of any other part.
        kind: what it is, in the plural: `products`, `tables`, `attention sites` or `caches`.
        error: error of its own output in fewer bits, on calibration data, relative to fp32.
    """

    name: str
    kind: str
    error: float


Assignment = frozenset[str]
"""The names of the parts that stay in fp32; all others have fewer bits."""


@dataclass(frozen=True)
class Requirement:
    """The requirement on an assignment, on every case.

    Attributes:
        max_error: maximum relative error of an output. If it is None, the metric decides alone; without one, an output
            may have twice eager's error, and at most ten floors.
        metric: makes an empty score of the task's metric, which has to be met as well.
        baseline: the precision of eager in the parity budget (:mod:`attnforge.runtime.parity.budget`), with `max_error`
            as its error; None to compare the relative error alone.
    """

    max_error: float | None = None
    metric: Callable[[], MeasuredMetric] | None = None
    baseline: Precision | None = None

    @classmethod
    def of(cls, options: DeployOptions, data: Data) -> Requirement:
        """The requirement that the options of a deployment make.

        Args:
            options: the options.
            data: the real inputs and labels that the metric is measured on.
        """
        if options.metric is None:
            return cls(options.max_error)
        labels = {f"data-{i}": data.labels[i] if data.labels else None for i in range(len(data.inputs))}
        metric = metric_named(options.metric, bool(data.labels))
        return cls(options.max_error, partial(MeasuredMetric, options.metric, metric, labels, options.least))

    @property
    def is_metric(self) -> bool:
        """Whether the metric alone decides."""
        return self.metric is not None and self.max_error is None

    @property
    def allowed(self) -> Allowed:
        """The error that a deployment is allowed whose eager baseline is at :attr:`baseline`."""
        assert self.baseline is not None
        return Allowed(self.max_error or FAR_OFF * self.baseline.floor, self.max_error is not None)

    def trial(self, answer: Answer, name: str, output: Array) -> Trial:
        """Judge one output of a case, all but the metric."""
        case, eager, exact = answer.case, answer.eager[name], answer.exact[name]
        finite = np.isfinite(exact)
        error = relative_error(output[finite].astype(np.float64), exact[finite])
        if not np.isfinite(error):
            share = np.inf
        elif self.is_metric:
            share = 0.0
        elif self.baseline is None:
            assert self.max_error is not None
            share = error / self.max_error
        else:
            comparison = judge(case, name, output, eager, exact, self.baseline, None, self.allowed)
            share = comparison.share if comparison.passed or comparison.share > 1 else np.inf
        return Trial(share, error, case)

    def verdict(self, trials: Sequence[Trial], measured: MeasuredMetric | None = None) -> Trial:
        """The verdict on all outputs of all cases.

        Args:
            trials: the results of all floating-point outputs: integers are right or wrong by the numbers that they are
                computed from.
            measured: the metric's values; None without one.
        """
        worst = max(trials, key=lambda trial: (trial.share, trial.error), default=Trial(0.0, 0.0))
        error = max((trial.error for trial in trials), default=0.0)
        if worst.share == np.inf:
            text = "NaN or infinity"
        elif self.baseline is not None and worst.share:
            text = f"{worst.share:.2f} of the budget"
        else:
            text = f"an error of {_beside(error, self.max_error)}"
        text += f" in {worst.case.name}" if worst.case is not None else ""
        text += f", with {self.max_error:g} allowed" if self.baseline is None and self.max_error is not None else ""
        if measured is None:
            return Trial(worst.share, error, worst.case, text)
        report = measured.report()
        text += f"; {report.name} {report.value:.6g}, with {report.least:.6g} required"
        return Trial(worst.share if report.passed else np.inf, error, worst.case, text)


def _beside(error: float, limit: float | None) -> str:
    """An error in as many digits as tell it from a limit."""
    every = (scientific(error, digits) for digits in range(2, 18))
    return next(text for text in every if limit is None or (float(text) > limit) == (error > limit))


@dataclass(frozen=True)
class Trial:
    """The result of judging an assignment, or one output.

    Attributes:
        share: share of the requirement that it uses, on the worst case; 1 or less meets it. Infinity stands for NaN or
            infinity in the output, and for a missed metric; 0 if the metric alone decides and is met.
        error: the largest relative error; infinity for NaN.
        case: the worst case; None if no output is floating-point.
        text: the result in words.
    """

    share: float
    error: float
    case: Case | None = None
    text: str = ""

    @property
    def passed(self) -> bool:
        return self.share <= 1


@dataclass(frozen=True)
class Answer:
    """A case, its inputs, and the outputs of eager and float64."""

    case: Case
    inputs: dict[str, Array]
    eager: dict[str, Array]
    exact: dict[str, Array]

    def stored(self) -> dict[str, Array]:
        """Both outputs, by the keys that a bundle stores them under."""
        both = {"eager": self.eager, "float64": self.exact}
        return {key(self.case, name, which): a for which, outputs in both.items() for name, a in outputs.items()}


def answers_of(model: ReferenceModel, cases: Sequence[Case], stored: Mapping[str, Array]) -> list[Answer]:
    """Run `model` on `cases`, whose inputs are made from seeds and stored inputs."""
    inputs = [make_inputs(case, model.inputs, stored) for case in cases]
    eager = [model.eager(arrays) for arrays in inputs]
    return [Answer(*each, model.exact(each[1])) for each in zip(cases, inputs, eager, strict=True)]


def judged_on(cases: Sequence[Case]) -> list[Case]:
    """The cases to judge assignments on: real data, and ordinary ones of all kinds except the largest."""
    ordinary = {case.name: case for case in cases if case.is_ordinary}
    data = [case for case in ordinary.values() if case.kind == "data"]
    names = ("example", "uniform", "normal-odd", "normal-opt", "normal-again", "normal-prime")
    return [*data, *(ordinary[name] for name in names if name in ordinary)][: max(JUDGED, len(data))]


@dataclass
class Judge:
    """Judges assignments, each once: `judge(high)` is the trial of the graph with the parts `high` in fp32.

    Attributes:
        build: makes what runs that graph.
        answers: answers to the cases that assignments are judged on.
        requirement: what has to be met.
        text: an assignment in words.
        steps: receives every assignment before it is run.
        trials: the results so far, in order.
    """

    build: Callable[[Assignment], Run]
    answers: Sequence[Answer]
    requirement: Requirement
    text: Callable[[Assignment], str]
    steps: Steps
    trials: dict[Assignment, Trial] = field(default_factory=dict, init=False)

    def __call__(self, high: Assignment) -> Trial:
        if high not in self.trials:
            self.steps.begin(self.text(high))
            self.trials[high] = self.run(self.build(high), self.answers)
        return self.trials[high]

    def run(self, graph: Run, answers: Sequence[Answer]) -> Trial:
        """Judge a graph on other cases, or one that is no assignment."""
        measured = self.requirement.metric() if self.requirement.metric is not None else None
        trials: list[Trial] = []
        for answer in answers:
            outputs = graph(answer.inputs)
            if measured is not None:
                measured.add(answer.case, outputs, answer.stored())
            floating = {name: array for name, array in outputs.items() if is_floating(array)}
            trials += [self.requirement.trial(answer, name, array) for name, array in floating.items()]
        return self.requirement.verdict(trials, measured)
