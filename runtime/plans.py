"""The choice of a TensorRT plan for a device, and of its optimization profile for the sizes of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log

from attnforge.bundle import PORTABLE, Bundle, Engine, Range
from attnforge.cache import code_of, is_made_by_user
from attnforge.errors import InputError


def profile_for(profiles: Sequence[Mapping[str, Range]], sizes: Mapping[str, int]) -> int:
    """The number of the optimization profile to run at `sizes`: of the profiles whose ranges include the sizes, the one
    whose optimum is nearest, as a factor; of equally near ones the narrowest.

    Args:
        profiles: (min, opt, max) of every symbol; empty if nothing is dynamic.
        sizes: the size of every symbol.

    Raises:
        InputError: no profile includes the sizes.
    """
    if not profiles:
        return 0
    fit = [i for i, profile in enumerate(profiles) if all(lo <= sizes[s] <= hi for s, (lo, _, hi) in profile.items())]
    if not fit:
        given = ", ".join(f"{symbol} {size}" for symbol, size in sizes.items())
        raise InputError(f"no optimization profile of the plan includes {given}; deploy again with a wider range")

    def distance(i: int) -> tuple[float, float, int]:
        ranges = [(sizes[symbol], *bounds) for symbol, bounds in profiles[i].items()]
        from_optimum = sum(abs(log(max(size, 1) / max(opt, 1))) for size, _, opt, _ in ranges)
        return round(from_optimum, 9), sum(log(max(hi, 1) / max(lo, 1)) for _, lo, _, hi in ranges), i

    return min(fit, key=distance)


def engine_for(engines: Sequence[Engine], version: str, capability: str) -> Engine | str:
    """The plan to load on a device, or the reason why none can be loaded. A plan for exactly this device is preferred
    to a portable one, and a newer plan to an older one.

    Args:
        engines: a bundle's plans for one flavour of TensorRT, the oldest first.
        version: version of that TensorRT on this machine.
        capability: the device's compute capability, such as `SM90`.
    """
    built_here = [engine for engine in reversed(engines) if engine.version == version]
    if exact := [engine for engine in built_here if capability in engine.compute_capabilities]:
        return exact[0]
    portable = [engine for engine in built_here if PORTABLE in engine.compute_capabilities]
    number = capability.removeprefix("SM")
    if portable and number.isdecimal() and int(number) >= 80:
        return portable[0]
    has = sorted({name for engine in engines for name in engine.compute_capabilities})
    return (
        f"its plans are for {', '.join(has)}{' (SM80 and later)' if PORTABLE in has else ''} and this device is "
        f"{capability}; build one for it from the bundle's own model with load(…, {engines[0].flavour!r}, rebuild=True)"
    )


def own_code(sha256: str) -> str | None:
    """The user's authentication code for a plan that this user built, in hexadecimal; None if no key can be stored.

    Args:
        sha256: sha256 of the plan's file, in hexadecimal.
    """
    try:
        return code_of(_PLAN, sha256.encode()).hex()
    except OSError:
        return None


def is_trusted_plan(bundle: Bundle, engine: Engine) -> bool:
    """Whether a plan, which may run code, is trusted: this user built it, or the bundle's signature was checked when it
    was opened."""
    code = bytes.fromhex(engine.code or "")
    return bool(bundle.trusted) or is_made_by_user(_PLAN, bundle.manifest.files[engine.file].encode(), code)


_PLAN = "plan"
