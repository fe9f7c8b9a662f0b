"""The page of a benchmark: one HTML file, without network access or scripts, that starts with which backend to ship and
what it costs."""

from __future__ import annotations

import os
from collections.abc import Sequence

from attnforge.bench import plots
from attnforge.bench.advice import advice_on
from attnforge.bench.results import Results
from attnforge.bench.tables import decimals_of, growth_tables
from attnforge.report.render import check_page, write_template

TEMPLATE = "bench.html"


def write_page(
    results: Results,
    path: str | os.PathLike[str],
    *,
    force: bool = False,
    compared: Sequence[str] | None = None,
) -> None:
    """Write results to one HTML file with tables and plots.

    Args:
        results: results of one run.
        path: path of the file.
        force: overwrite the file.
        compared: differences from an earlier run, one sentence each.

    Raises:
        UnavailableError: the packages for pages are not installed: `pip install 'attnforge[report]'`.
        UsageError: `path` is a folder, or exists and `force` is not given.
    """
    check_page(path, force)
    answered = [(model, every) for model in results.models if (every := advice_on(model))]
    shipped = [answer.ship for _, every in answered for answer in every if answer.ship is not None]
    write_template(
        TEMPLATE,
        path,
        results=results,
        names=", ".join(dict.fromkeys(model.name for model in results.models)) or "nothing",
        answers=answered,
        decimals=decimals_of(shipped),
        roofline=plots.roofline(results),
        compared=list(compared or ()),
        has_cases=any(c.cases is not None for model in results.models for c in model.contenders),
        # functions that the template calls for each model
        decimals_of=decimals_of,
        latencies=plots.latencies,
        ratios=plots.ratios,
        growth_tables=growth_tables,
        growth_plot=plots.growth_plot,
    )
