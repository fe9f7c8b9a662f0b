"""The page of a benchmark: one HTML file, without network access or scripts, that starts with which backend to ship and
what it costs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from attnforge.bench import plots
from attnforge.bench.advice import advice_on
from attnforge.bench.results import Contender, Results
from attnforge.report.render import check_page, places, write_template

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
    write_template(TEMPLATE, path, **page_values(results, compared))


def page_values(results: Results, compared: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the values of the template; arguments as for :func:`write_page`."""
    answered = [(model, every) for model in results.models if (every := advice_on(model))]
    shipped = [answer.ship for _, every in answered for answer in every if answer.ship is not None]
    return {
        "results": results,
        "names": ", ".join(dict.fromkeys(model.name for model in results.models)) or "nothing",
        "answers": answered,
        "decimals": decimals_of(shipped),
        "roofline": plots.roofline(results),
        "compared": list(compared or ()),
        "has_cases": any(c.cases is not None for model in results.models for c in model.contenders),
        # functions that the template calls for each model
        "decimals_of": decimals_of,
        "latencies": plots.latencies,
        "ratios": plots.ratios,
    }


def decimals_of(contenders: Sequence[Contender]) -> dict[str, int]:
    """Return the decimals of every numeric column, by its name."""
    return {
        "ms": places(c.latency.median.value for c in contenders),
        "cold": places((c.cold.load_s for c in contenders if c.cold), 2),
        "peak": places(c.memory.peak_mib for c in contenders if c.memory),
        "extra": places((c.memory.extra_mib for c in contenders if c.memory), 2),
        "size": places((c.size_mb for c in contenders), 2),
        "rate": places((rate.per_second.value for c in contenders for rate in c.throughput), 2),
    }
