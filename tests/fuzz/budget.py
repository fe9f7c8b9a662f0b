"""How many wrong things are tried: a few in every run of the tests, thousands where `ATTNFORGE_FUZZ` is set."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

LONG = bool(os.environ.get("ATTNFORGE_FUZZ"))
"""Whether thousands are tried, of another seed each time."""


_TRY = [Phase.explicit, Phase.generate]


def tries(few: int, many: int, *, shrinks: bool = True) -> settings:
    """Settings of a test that tries `few` of the same in every run, and `many` in a long one.

    Args:
        shrinks: whether what fails is made small in a long run, which takes hundreds of tries more.
    """
    return settings(
        max_examples=many if LONG else few,
        derandomize=not LONG,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=_TRY + ([Phase.reuse, Phase.shrink] if LONG and shrinks else []),
    )
