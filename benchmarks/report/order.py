"""In which order reports name precisions and contenders."""

from __future__ import annotations

from collections.abc import Iterable

from attnforge.benchmarks.measure.results import Contender, Model


def precisions(names: Iterable[str]) -> list[str]:
    """Each precision once, fp32 first, then in the order of the names."""
    return sorted(dict.fromkeys(names), key=lambda name: name != "fp32")


def by_precision(model: Model) -> dict[str, list[Contender]]:
    """A model's contenders by precision, the fastest first."""
    fastest_first = sorted(model.contenders, key=lambda contender: contender.latency.median.value)
    return {
        name: [contender for contender in fastest_first if contender.precision == name]
        for name in precisions(contender.precision for contender in fastest_first)
    }
