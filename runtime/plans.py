"""Optimization profiles: which of a plan's is best for the sizes at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log

from attnforge.bundle import Range
from attnforge.errors import InputError


def profile_for(profiles: Sequence[Mapping[str, Range]], sizes: Mapping[str, int]) -> int:
    """Number of the profile to run at `sizes`: of those that hold them, the one whose optimum is nearest, as a factor;
    of equally near ones the narrowest.

    Args:
        profiles: (min, opt, max) of every symbol; none where nothing is dynamic.
        sizes: of the symbols.

    Raises:
        InputError: none holds them.
    """
    if not profiles:
        return 0
    fit = [i for i, profile in enumerate(profiles) if all(lo <= sizes[s] <= hi for s, (lo, _, hi) in profile.items())]
    if not fit:
        given = ", ".join(f"{symbol} {size}" for symbol, size in sizes.items())
        raise InputError(f"no optimization profile of the plan holds {given}; deploy again with a wider range")

    def distance(i: int) -> tuple[float, float, int]:
        ranges = [(sizes[symbol], *bounds) for symbol, bounds in profiles[i].items()]
        from_optimum = sum(abs(log(max(size, 1) / max(opt, 1))) for size, _, opt, _ in ranges)
        width = sum(log(max(hi, 1) / max(lo, 1)) for _, lo, _, hi in ranges)
        return round(from_optimum, 9), width, i

    return min(fit, key=distance)
