"""What a task is measured by, over the real data that a bundle was deployed with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from safetensors.numpy import load_file

from attnforge.arrays import Array
from attnforge.bundle import REFERENCE_EXAMPLE, Bundle, Case
from attnforge.errors import UnknownNameError, UsageError
from attnforge.records import Record
from attnforge.runtime import cases as reference

Outputs = Mapping[str, Array]
Metric = Callable[[Outputs, Array], float]
"""From outputs by name, and labels, to a number: the larger the better."""


class MetricReport(Record):
    """A metric's value, the mean over the cases of real data by their samples.

    Attributes:
        eager, float64: its values for eager at the bundle's precision, and for float64.
        least: what had to be reached.
        reason: why it is not passed.
    """

    name: str
    value: float
    eager: float
    float64: float
    least: float
    samples: int
    passed: bool
    reason: str | None = None

    def text(self) -> str:
        found = f"{self.name} {self.value:.6g} over {self.samples} samples"
        return f"{found}, where float64 has {self.float64:.6g} and eager {self.eager:.6g}; at least {self.least:.6g}"


def accuracy(outputs: Outputs, labels: Array) -> float:
    """Share of the samples whose largest number of the first output, along its last dim, stands at the label."""
    predicted = np.argmax(_first(outputs), axis=-1)
    if predicted.size != labels.size:
        raise UsageError(f"there are {labels.size} labels for {predicted.size} samples; give one for each")
    return float(np.mean(predicted == labels.reshape(predicted.shape)))


def cosine(outputs: Outputs, labels: Array) -> float:
    """Mean cosine between the rows (last dim) of the first output and those of float64's: of embeddings, say."""
    given, wanted = _first(outputs).astype(np.float64), np.asarray(labels, np.float64)
    norms = np.linalg.norm(given, axis=-1) * np.linalg.norm(wanted, axis=-1)
    return float(np.mean(np.sum(given * wanted, axis=-1) / np.where(norms > 0, norms, 1)))


METRICS: dict[str, Metric] = {"accuracy": accuracy, "cosine": cosine}


@dataclass
class Scores:
    """A metric, and what was found of it as the cases were run."""

    name: str
    metric: Metric
    labels: Mapping[str, Array | None]
    least: float | None
    found: list[tuple[int, float, float, float]] = field(default_factory=list)

    def add(self, case: Case, results: Outputs, outputs: Mapping[str, Array]) -> None:
        """Measure a case, if it is one of real data.

        Args:
            case: which was run.
            results: what came out.
            outputs: eager's and float64's, as the bundle keeps them.
        """
        if case.name not in self.labels:
            return
        truth, eager = (
            {n: self._whole(outputs[reference.key(case, n, which)], a, case) for n, a in results.items()}
            for which in ("float64", "eager")
        )
        labels = self.labels[case.name]
        wanted = _first(truth) if labels is None or self.metric is cosine else labels
        values = [float(self.metric(one, wanted)) for one in (results, eager, truth)]
        first = _first(results)
        self.found.append((len(first) if first.ndim else 1, values[0], values[1], values[2]))

    def report(self) -> MetricReport:
        """The means over all samples."""
        samples = sum(count for count, *_ in self.found)
        if samples == 0:
            raise UsageError(f"{self.name} cannot be measured over no samples; give data that has some")
        value, eager, truth = (sum(one[0] * one[i] for one in self.found) / samples for i in (1, 2, 3))
        least = self.least
        if (
            least is None
        ):  # one sample is what a count can tell; of other metrics, what rounding leaves of their last digits
            slack = 1 / samples if self.metric is accuracy else 1e-6 * max(abs(truth), 1e-6)
            least = truth - 2 * max(truth - eager, 0.0) - slack
        passed = value >= least
        reason = None if passed else f"{self.name} is {value:.6g}, under the {least:.6g} that it has to reach"
        return MetricReport(
            name=self.name, value=value, eager=eager, float64=truth, least=least, samples=samples, passed=passed,
            reason=reason,
        )  # fmt: skip

    def _whole(self, kept: Array, like: Array, case: Case) -> Array:
        if kept.size != like.size:
            raise UsageError(
                f"the bundle keeps {kept.size} of the {like.size} numbers of {case.name}'s outputs, too few for a "
                "metric; deploy with fewer samples a case"
            )
        return kept.reshape(like.shape)


def chosen_metric(bundle: Bundle, metric: str | Metric | None, least: float | None) -> Scores | None:
    """The metric that was asked for, or else the bundle's own, if it has one.

    Raises:
        UnknownNameError: no such metric.
        UsageError: the bundle has no real data, or no labels for accuracy.
    """
    if metric is None:
        metric, least = bundle.manifest.metric, bundle.manifest.least if least is None else least
    if metric is None:
        if least is not None:
            raise UsageError(f"a metric is to reach {least:g}, and none was named; name one of {', '.join(METRICS)}")
        return None
    name = metric if isinstance(metric, str) else getattr(metric, "__name__", "metric")
    cases = [case for case in bundle.manifest.cases if case.kind == "data"]
    if not cases:
        raise UsageError(
            f"{name} is measured on real data, and {bundle.path} was deployed without; give it to deploy(…, data=…)"
        )
    stored = load_file(bundle.file(REFERENCE_EXAMPLE))
    labels = {case.name: stored.get(reference.labels_key(case)) for case in cases}
    return Scores(name, metric_named(metric, labelled=all(one is not None for one in labels.values())), labels, least)


def metric_named(metric: str | Metric, labelled: bool) -> Metric:
    """The metric of a name.

    Raises:
        UnknownNameError: no such metric.
        UsageError: accuracy without labels.
    """
    if not isinstance(metric, str):
        return metric
    if metric not in METRICS:
        raise UnknownNameError("metric", metric, METRICS)
    if metric == "accuracy" and not labelled:
        raise UsageError("accuracy needs labels; give them to deploy(…, data=…, labels=…)")
    return METRICS[metric]


def _first(outputs: Outputs) -> Array:
    return next(iter(outputs.values()))
