"""The comparison function for `polygraphy run --compare-func-script`: checks results against a bundle's budget."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polygraphy.logger import G_LOGGER

from attnforge.arrays import to_numpy
from attnforge.bundle import Bundle
from attnforge.numbers import scientific
from attnforge.runtime.parity.results import as_deployed
from attnforge.runtime.parity.verify import References, hold
from attnforge.serving.polygraphy.folder import RUNNER
from attnforge.serving.polygraphy.runner import polygraphy_errors

Compare = Callable[[Any, Any], "OrderedDict[str, bool]"]
"""Compares two IterationResults; returns whether each output passes."""


@functools.cache
def budget_of(bundle: Path, backend: str = "") -> Compare:
    """Return the function that checks results against a bundle's budget. Polygraphy requests it in every iteration, so
    it is cached.

    Args:
        bundle: folder of the bundle.
        backend: backend whose model is run, if its budget differs from the bundle's.
    """
    with polygraphy_errors():
        opened = Bundle(bundle)
        references = References.of(opened)
    cases = {case.name: case for case in opened.manifest.cases}

    def compare(first: Any, second: Any) -> OrderedDict[str, bool]:
        names = [result.runner_name.removeprefix(RUNNER) for result in (first, second)]
        of_case = [name != result.runner_name for name, result in zip(names, (first, second), strict=True)]
        if sum(of_case) != 1 or (name := names[of_case.index(True)]) not in cases:
            G_LOGGER.critical(
                f"one of {first.runner_name} and {second.runner_name} must be the float64 outputs of {bundle}: give "
                "one runner, followed by --load-outputs float64.json; attnforge verify --results checks several"
            )
        result, case = (second, first)[of_case.index(True)], cases[name]
        specs = {spec.name: spec for spec in opened.manifest.outputs}
        if missing := [output for output in specs if output not in result]:
            G_LOGGER.error(f"{case.name} | {result.runner_name} has no output {missing[0]}")
            return OrderedDict((output, output not in missing) for output in specs)
        with polygraphy_errors():
            arrays = {name: as_deployed(to_numpy(name, result[name]), spec) for name, spec in specs.items()}
            report = hold(opened, backend, lambda feeds: arrays, [case], references)
        for comparison in report.comparisons:
            error, budget = scientific(comparison.error, 3), scientific(comparison.budget, 3)
            where = f"{comparison.case} | {comparison.output} | error {error} of {budget}"
            if comparison.passed:
                G_LOGGER.finish(f"{where} | within the budget")
            else:
                G_LOGGER.error(f"{where} | {comparison.reason}")
        return OrderedDict((comparison.output, comparison.passed) for comparison in report.comparisons)

    return compare
