"""TensorRT plans: which of a bundle's fits a device, and which of its optimization profiles fits the sizes at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log

from attnforge.bundle import PORTABLE, Engine, Range
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


def engine_for(engines: Sequence[Engine], version: str, capability: str) -> Engine | str:
    """The plan to load on a device, or why none of them can be: one for just this device first, the newest first.

    Args:
        engines: of one flavour.
        version: of that TensorRT on this machine.
        capability: of the device, such as `SM90`.
    """
    built_here = [engine for engine in reversed(engines) if engine.version == version]
    if exact := [engine for engine in built_here if capability in engine.compute_capabilities]:
        return exact[0]
    portable = [engine for engine in built_here if PORTABLE in engine.compute_capabilities]
    if portable and _number(capability) >= 80:
        return portable[0]
    has = sorted({name for engine in engines for name in engine.compute_capabilities})
    return (
        f"its plans are for {', '.join(has)}{' (SM80 and later)' if PORTABLE in has else ''} and this device is "
        f"{capability}; build one for it from the bundle's own model with load(…, {engines[0].flavour!r}, rebuild=True)"
    )


def _number(capability: str) -> int:
    digits = capability.removeprefix("SM")
    return int(digits) if digits.isdecimal() else 0
