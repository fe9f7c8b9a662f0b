"""How time and memory grow: with the tokens of patch attention, and with the layers of a transformer encoder.

Memory is measured in a process of its own for every point, two of them at a time; times in turns, after that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnforge.benchmarks.measure.bench import measure
from attnforge.benchmarks.measure.experiment import Experiment
from attnforge.benchmarks.measure.results import Growth, Model, Series
from attnforge.benchmarks.measure.statistics import fit_of
from attnforge.bundle import Bundle


def over_sizes(experiment: Experiment, along: str, points: Mapping[int, Mapping[str, int]]) -> Growth:
    """One bundle at several sizes.

    Args:
        experiment: of one bundle.
        along: what grows, such as `tokens`.
        points: sizes of the dims, by the number of tokens or whatever grows.
    """
    models = {size: measure(experiment, dims, None) for size, dims in points.items()}
    return _growth(experiment, along, models, [])


def over_bundles(experiment: Experiment, along: str, bundles: Mapping[int, Bundle]) -> Growth:
    """Bundles of a model that grows, each at its own example's sizes.

    Args:
        experiment: with other bundles; it is left with the last of these.
        along: what grows, such as `layers`.
        bundles: by the number of layers or whatever grows.
    """
    models = {}
    for size, bundle in bundles.items():
        experiment.bundles = [bundle]
        models[size] = measure(experiment, {}, None)
    return _growth(experiment, along, models, [bundle.manifest.seconds for bundle in bundles.values()])


def _growth(
    experiment: Experiment, along: str, models: Mapping[int, Model], deploy_seconds: Sequence[dict[str, float]]
) -> Growth:
    sizes = list(models)
    contenders = {contender.key: contender for model in models.values() for contender in model.contenders}
    series = []
    for key, contender in contenders.items():
        at = [next((c for c in model.contenders if c.key == key), None) for model in models.values()]
        ms = [None if c is None else c.latency.median.value for c in at]
        mib = [None if c is None or c.memory is None else c.memory.extra_mib for c in at]
        reasons = {size: (model.wrong | model.skipped).get(key) for size, model in models.items()}
        series.append(
            Series(
                name=contender.name,
                precision=contender.precision,
                ours=contender.ours,
                ms=ms,
                extra_mib=mib,
                time=fit_of(sizes, ms),
                memory=fit_of(sizes, mib),
                notes=[f"{along} {size}: {reason}" for size, reason in reasons.items() if reason],
            )
        )
    name = next(iter(models.values())).name
    return Growth(model=name, along=along, sizes=sizes, series=series, deploy_seconds=list(deploy_seconds))
