"""Task metrics, measured over the real data that a bundle was deployed with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from attnforge.arrays import Array
from attnforge.bundle import REFERENCE_EXAMPLE, Bundle, Case
from attnforge.errors import UsageError, check_known
from attnforge.records import Record
from attnforge.runtime import cases as reference

Outputs = Mapping[str, Array]
Metric = Callable[[Outputs, Array], float]
"""Computes a number from outputs by name, and labels; larger is better."""


class MetricReport(Record):
    """A metric's value on one backend: the mean over all samples of the cases of real data.

    Attributes:
        name: name of the metric.
        value: the backend's value.
        eager, float64: the values of eager at the bundle's precision, and of float64.
        least: the required value.
        samples: number of samples measured.
        reason: why it did not pass.
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
        """One line of human-readable text."""
        value = f"{self.name} {self.value:.6g} over {self.samples} samples"
        return f"{value}, where float64 has {self.float64:.6g} and eager {self.eager:.6g}; at least {self.least:.6g}"


def accuracy(outputs: Outputs, labels: Array) -> float:
    """The share of samples whose class is right.

    Args:
        outputs: outputs by name; the first, `(…, classes)`, contains the scores, and the largest along the last dim is
            the class; if one is NaN, there is none.
        labels: as many integers as there are samples.

    Raises:
        UsageError: there is not one label per sample.
    """
    scores = _first(outputs)
    predicted = np.where(np.isnan(scores).any(axis=-1), -1, np.argmax(scores, axis=-1))
    if predicted.size != labels.size:
        raise UsageError(f"there are {labels.size} labels for {predicted.size} samples; give one for each")
    return float(np.mean(predicted == labels.reshape(predicted.shape)))


def cosine(outputs: Outputs, labels: Array) -> float:
    """The mean cosine between the rows (last dim) of the first output and float64's rows, for embeddings for example.

    Args:
        outputs: outputs by name; the first is compared.
        labels: float64's first output, of the same shape.
    """
    rows, truth = _first(outputs).astype(np.float64), np.asarray(labels, np.float64)
    norms = np.linalg.norm(rows, axis=-1) * np.linalg.norm(truth, axis=-1)
    return float(np.mean(np.sum(rows * truth, axis=-1) / np.where(norms > 0, norms, 1)))


METRICS: dict[str, Metric] = {"accuracy": accuracy, "cosine": cosine}


@dataclass
class MeasuredMetric:
    """A metric, and its values for the cases that were run.

    Attributes:
        name: name of the metric.
        metric: the function.
        labels: labels by case of real data; None if the case has none.
        least: the required value; None for the default.
        measured: for every case, the number of samples, and the values of the backend, eager and float64.
    """

    name: str
    metric: Metric
    labels: Mapping[str, Array | None]
    least: float | None
    measured: list[tuple[int, float, float, float]] = field(default_factory=list)

    def add(self, case: Case, results: Outputs, outputs: Mapping[str, Array]) -> None:
        """Measure a case; cases without real data are skipped.

        Args:
            case: the case.
            results: the backend's outputs, by name.
            outputs: eager's and float64's, by :func:`~attnforge.runtime.cases.key`.

        Raises:
            UsageError: the bundle stores only part of the outputs.
        """
        if case.name not in self.labels:
            return
        truth, eager = (
            {n: self._whole(outputs[reference.key(case, n, which)], a, case) for n, a in results.items()}
            for which in ("float64", "eager")
        )
        labels = self.labels[case.name]
        targets = _first(truth) if labels is None or self.metric is cosine else labels
        values = [float(self.metric(answers, targets)) for answers in (results, eager, truth)]
        first = _first(results)
        self.measured.append((len(first) if first.ndim else 1, values[0], values[1], values[2]))

    def report(self) -> MetricReport:
        """The means over all samples, and whether they suffice.

        By default the metric may fall short of float64's by twice as much as eager's does, and by the smallest
        measurable difference: one sample of a count, and the rounding of the last digits of other metrics.

        Raises:
            UsageError: no sample was measured.
        """
        samples = sum(count for count, *_ in self.measured)
        if samples == 0:
            raise UsageError(f"{self.name} cannot be measured without samples; give data that has some")
        value, eager, truth = (sum(row[0] * row[i] for row in self.measured) / samples for i in (1, 2, 3))
        least = self.least
        if least is None:
            slack = 1 / samples if self.metric is accuracy else 1e-6 * max(abs(truth), 1e-6)
            least = truth - 2 * max(truth - eager, 0.0) - slack
        passed = bool(value >= least)  # False for NaN
        return MetricReport(
            name=self.name, value=value, eager=eager, float64=truth, least=least, samples=samples, passed=passed,
            reason=None if passed else f"{self.name} is {value:.6g}, below the required {least:.6g}",
        )  # fmt: skip

    def _whole(self, kept: Array, like: Array, case: Case) -> Array:
        if kept.size != like.size:
            raise UsageError(
                f"the bundle stores {kept.size} of the {like.size} elements of {case.name}'s outputs, too few for a "
                "metric; deploy with fewer samples per case"
            )
        return kept.reshape(like.shape)


def chosen_metric(bundle: Bundle, metric: str | Metric | None, least: float | None) -> MeasuredMetric | None:
    """The metric that was asked for, or else the bundle's own; None if there is neither.

    Args:
        bundle: the bundle whose real data it is measured on.
        metric: a name in :data:`METRICS`, or a function.
        least: the required value.

    Raises:
        UnknownNameError: no such metric.
        UsageError: the bundle has no real data, or no labels for accuracy; or `least` was given without a metric.
    """
    if least is not None:
        check_least(least)
    if metric is None:
        metric, least = bundle.manifest.metric, bundle.manifest.least if least is None else least
    if metric is None:
        if least is not None:
            raise UsageError(f"least is {least:g} and no metric was named; name one of {', '.join(METRICS)}")
        return None
    name = metric if isinstance(metric, str) else getattr(metric, "__name__", "metric")
    cases = [case for case in bundle.manifest.cases if case.kind == "data"]
    if not cases:
        raise UsageError(
            f"{name} is measured on real data, and {bundle.path} was deployed without any; give it to deploy(…, data=…)"
        )
    stored = bundle.tensors(REFERENCE_EXAMPLE)
    labels = {case.name: stored.get(reference.labels_key(case)) for case in cases}
    labelled = all(array is not None for array in labels.values())
    return MeasuredMetric(name, metric_named(metric, labelled), labels, least)


def check_least(least: float) -> None:
    """Check the required value of a metric: a value that is not finite would always or never be reached.

    Raises:
        UsageError: it is NaN or infinite.
    """
    if not math.isfinite(least):
        raise UsageError(f"the metric's least value is {least}; give a finite number")


def metric_named(metric: str | Metric, labelled: bool) -> Metric:
    """The function of a metric.

    Args:
        metric: a name in :data:`METRICS`, or the function itself.
        labelled: whether all real data has labels.

    Raises:
        UnknownNameError: no such metric.
        UsageError: accuracy without labels.
    """
    if not isinstance(metric, str):
        return metric
    check_known("metric", metric, METRICS)
    if metric == "accuracy" and not labelled:
        raise UsageError("accuracy needs labels; give them to deploy(…, data=…, labels=…)")
    return METRICS[metric]


def _first(outputs: Outputs) -> Array:
    return next(iter(outputs.values()))
