"""What a benchmark measures: bundles of one model, contenders, and how often each has a turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnforge.bundle import Bundle, Case
from attnforge.errors import UsageError
from attnforge.runtime import cases as reference
from attnforge.runtime.inputs import shapes_of

Progress = Callable[[str], None]
"""Called with the name of each stage as it starts."""


@dataclass
class Experiment:
    """What is measured, and how; :func:`~.run.benchmark` explains the arguments that it has too.

    Attributes:
        bundles: of one model, each at another precision.
        backends: the bundles' backends; None for all that run here.
        against: names of peers.
        throughput, starts, memory: whether those are measured, besides latency.
        cases: whether ours, and peers that are as fast, are held to the budget in all of a bundle's reference cases.
        fresh_peers: peers whose starts and memory are measured, besides ours; None for all.
        trust_source: whether what the bundles' manifests name may be imported, opened and run.
        seconds: after which no further round begins; shared out among the openings as the rounds are.
    """

    bundles: list[Bundle]
    backends: Sequence[str] | None
    against: Sequence[str]
    rounds: int
    threads: int
    module: Any = None
    throughput: bool = True
    starts: bool = True
    memory: bool = True
    cases: bool = True
    fresh_peers: Sequence[str] | None = None
    seconds: float = float("inf")
    openings: int = 1
    trust_source: bool = False
    progress: Progress = lambda stage: None

    @property
    def shares(self) -> list[int]:
        """How many rounds each opening has."""
        openings = min(self.openings, self.rounds)
        return [self.rounds // openings + (i < self.rounds % openings) for i in range(openings)]

    def check(self) -> None:
        """Check that the bundles are of one model, each at another precision.

        Raises:
            UsageError: they are not.
        """
        forms = [[(spec.name, spec.dims) for spec in bundle.manifest.inputs] for bundle in self.bundles]
        precisions = [bundle.manifest.precision for bundle in self.bundles]
        if not forms or any(form != forms[0] for form in forms) or len(set(precisions)) < len(precisions):
            raise UsageError(
                f"the bundles are {', '.join(map(repr, self.bundles))}; give one, or several of one model, each at "
                "another precision"
            )


def case_at(bundle: Bundle, sizes: Mapping[str, int]) -> Case:
    """A case of these sizes: one whose outputs the bundle holds, where there is one.

    Args:
        sizes: of the dynamic dims, by symbol; the example's where they are not named.

    Raises:
        UnknownNameError: no such dim.
        InputError: a size outside the profile.
    """
    inputs, cases = bundle.manifest.inputs, bundle.manifest.cases
    at = reference.at(inputs, sizes)
    shapes_of(inputs, (), *((reference.shape_of(spec, at.sizes), np.dtype(spec.dtype)) for spec in inputs))
    for case in cases:
        if case.kind == at.kind and case.sizes == at.sizes and case.masks == at.masks:
            return case
    spreads = [case.spread for case in cases if case.is_ordinary]
    at.spread = {
        name: tuple(max(spread[name][i] for spread in spreads if name in spread) for i in range(2))  # type: ignore[misc]
        for name in {name for spread in spreads for name in spread}
    }
    return at
