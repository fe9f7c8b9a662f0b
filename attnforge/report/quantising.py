"""What quantising costs, for the headline of a report. Backends are compared with the quantised model, so a passed
verification says nothing about what quantising itself changed."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from attnforge.bundle import Manifest, Quantised
from attnforge.report.render import percent
from attnforge.runtime.parity.verify import Report


class QuantisingCost(NamedTuple):
    """What quantising costs.

    Attributes:
        text: the relative error against float64 in the typical (median) and the worst reference case, the least cosine
            similarity, the limit and on which inputs it was asked.
        exceeds: whether an ordinary reference case exceeds the limit.
    """

    text: str
    exceeds: bool


def cost_of_quantising(report: Report, manifest: Manifest) -> QuantisingCost | None:
    """Return what quantising costs; None for a model that is not quantised, or if no backend compared its outputs.

    Args:
        report: the report on a bundle.
        manifest: the bundle's manifest.
    """
    quantised, outputs = manifest.quantised, {spec.name for spec in manifest.outputs}
    every = [c for b in report.backends.values() for c in b.comparisons if c.output in outputs and c.size]
    if quantised is None or not every:
        return None
    worst = max(every, key=lambda comparison: comparison.eager_error)
    typical = statistics.median(comparison.eager_error for comparison in every)
    cosine = min((c.cosine for c in every if c.cosine is not None), default=None)
    where = worst.where if len(outputs) == 1 else f"{worst.where}, {worst.output}"
    similarity = "" if cosine is None else f"; the least cosine similarity is {cosine:.6g}"
    sentences = [
        f"Quantising to {quantised.type} changes the outputs by {percent(typical)} in a typical case and by "
        f"{percent(worst.eager_error)} in the worst, {where}{similarity}.",
        _limit(quantised, manifest),
    ]
    ordinary = {case.name for case in report.cases if case.is_ordinary}
    limit = quantised.max_error
    above = {c.where for c in every if limit is not None and c.case in ordinary and c.eager_error > limit}
    if above:
        of = len({c.where for c in every if c.case in ordinary})
        sentences.append(
            f"In {len(above)} of the {of} ordinary reference cases it is more: {', '.join(sorted(above)[:4])}."
        )
    return QuantisingCost(" ".join(sentences), bool(above))


def _limit(quantised: Quantised, manifest: Manifest) -> str:
    """Return the limit that quantising had to stay within, on which inputs, and what was reached there."""
    real = sum(case.kind == "data" for case in manifest.cases)
    data = f"on real data ({real} case{'s' * (real != 1)})" if real else "on random inputs"
    if quantised.max_error is None:
        least = "" if manifest.least is None else f" of at least {manifest.least:g}"
        return f"The requirement was the metric {manifest.metric or '(unnamed)'}{least} {data}."
    return f"Up to {percent(quantised.max_error)} was allowed {data}, and it is {percent(quantised.error)} there."
