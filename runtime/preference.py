"""The backends that `auto` tries, in order."""

from __future__ import annotations

from collections.abc import Mapping

from attnforge.bundle import Bundle, Choice
from attnforge.machine import this_machine, versions
from attnforge.runtime.backends.registry import BACKENDS, ON_GPU, WITHOUT_TARGET, libraries_of


def by_preference(bundle: Bundle) -> list[str]:
    """The backends that `auto` tries, in order.

    On the machine that deployed the bundle: the backends that were measured there, those on a GPU first, each group
    from the fastest on; then the others in the registry's order, without those that missed the budget. Elsewhere: the
    registry's order; if no backend met the budget, those that missed it come last. A backend without a target in the
    bundle is tried only if it was measured.
    """
    choice, by_rule = chosen_here(bundle), [name for name in BACKENDS if name not in WITHOUT_TARGET]
    if choice is None:
        return by_rule
    measured = fastest_first(choice.milliseconds)
    left = [name for name in by_rule if name not in measured and name not in choice.dropped]
    return [*measured, *left] if measured else [*left, *(name for name in by_rule if name in choice.dropped)]


def chosen_here(bundle: Bundle) -> Choice | None:
    """The measurements from the deploy; None if it was on another machine or with other versions of the backends'
    libraries. Queries CUDA for its devices."""
    choice = bundle.manifest.choice
    if choice is None or choice.machine != this_machine():
        return None
    if not {*choice.milliseconds, *choice.dropped} <= set(BACKENDS):  # from another version of attnforge, or altered
        return None
    return choice if choice.versions == versions(libraries_of([*choice.milliseconds, *choice.dropped])) else None


def fastest_first(milliseconds: Mapping[str, float]) -> list[str]:
    """Backends on a GPU, whose callers' arrays stay there, before those on the CPU; then by time."""
    return sorted(milliseconds, key=lambda name: (name not in ON_GPU, milliseconds[name]))
