"""The number of examples: a few in every run of the tests, thousands if `ATTNFORGE_FUZZ` is set."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

LONG = bool(os.environ.get("ATTNFORGE_FUZZ"))
"""Whether to try thousands of examples, with a new seed each time."""


_TRY = [Phase.explicit, Phase.generate]


def tries(few: int, many: int, *, shrinks: bool = True) -> settings:
    """Return the settings of a test that tries the same `few` examples in every run, and `many` in a long run.

    Args:
        shrinks: whether a long run shrinks a failure, which takes hundreds of additional examples.
    """
    return settings(
        max_examples=many if LONG else few,
        derandomize=not LONG,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=_TRY + ([Phase.reuse, Phase.shrink] if LONG and shrinks else []),
    )
