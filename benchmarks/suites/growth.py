"""How time and memory grow: with the tokens of patch attention, and with the layers of a transformer encoder.

Memory is measured in a process of its own for every point, two of them at a time; times in turns, after that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnforge.benchmarks.measure import results as found
from attnforge.benchmarks.measure.bench import Plan, measure
from attnforge.benchmarks.measure.statistics import fit_of
from attnforge.bundle import Bundle


def over_sizes(plan: Plan, along: str, points: Mapping[int, Mapping[str, int]]) -> found.Growth:
    """One bundle at several sizes.

    Args:
        plan: of one bundle.
        along: what grows.
        points: sizes of the dims, by how much there is of it.
    """
    models = {size: measure(plan, dims, None) for size, dims in points.items()}
    return _growth(plan, along, models, [])


def over_bundles(plan: Plan, along: str, bundles: Mapping[int, Bundle]) -> found.Growth:
    """Bundles of a model that grows, each at its own example's sizes.

    Args:
        plan: whose bundles are these in turn.
        along: what grows.
        bundles: by how much there is of it.
    """
    models = {}
    for size, bundle in bundles.items():
        plan.bundles = [bundle]
        models[size] = measure(plan, {}, None)
    return _growth(plan, along, models, [bundle.manifest.seconds for bundle in bundles.values()])


def _growth(
    plan: Plan, along: str, models: Mapping[int, found.Model], deploy_seconds: Sequence[dict[str, float]]
) -> found.Growth:
    sizes = list(models)
    every = {one.key: one for model in models.values() for one in model.contenders}
    series = []
    for key, one in every.items():
        at = [next((c for c in model.contenders if c.key == key), None) for model in models.values()]
        ms = [None if c is None else c.latency.median.value for c in at]
        mib = [None if c is None or c.memory is None else c.memory.extra_mib for c in at]
        reasons = {size: (model.wrong | model.skipped).get(key) for size, model in models.items()}
        series.append(
            found.Series(
                name=one.name,
                precision=one.precision,
                ours=one.ours,
                ms=ms,
                extra_mib=mib,
                time=fit_of(sizes, ms),
                memory=fit_of(sizes, mib),
                notes=[f"{along} {size}: {reason}" for size, reason in reasons.items() if reason],
            )
        )
    name = next(iter(models.values())).name
    return found.Growth(model=name, along=along, sizes=sizes, series=series, deploy_seconds=list(deploy_seconds))
