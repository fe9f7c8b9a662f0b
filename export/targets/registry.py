"""The targets by name: what builds each, and why one cannot be built on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from attnforge.bundle import FLAVOURS
from attnforge.errors import BuildError, UnavailableError, UsageError
from attnforge.export.targets import onnxruntime, outside, tensorrt
from attnforge.export.targets.target import Built, Finish, Job
from attnforge.progress import Progress, Steps
from attnforge.runtime.backends.registry import OUTSIDE

T = TypeVar("T")

TARGETS: dict[str, Callable[[Job, Progress], Finish]] = {
    "onnxruntime": onnxruntime.begin,
    **{flavour: partial(tensorrt.begin, flavour=flavour) for flavour in FLAVOURS},
    **{name: partial(outside.begin, target=target) for name, target in OUTSIDE.items()},
}
"""Starts building each target, and returns the function that waits for it."""


def why_not_buildable(target: str) -> str | None:
    """Why `target` cannot be built on this machine, or None if it can."""
    if target in OUTSIDE:
        return OUTSIDE[target].why_unusable()
    return tensorrt.why_not_buildable(target) if target in FLAVOURS else None


@dataclass(frozen=True)
class Selection:
    """The targets of one deployment.

    Attributes:
        chosen: the targets to build.
        named: targets that must be built; if the builder refuses one of the others, the deployment goes on.
        skipped: why each other target cannot be built on this machine.
    """

    chosen: tuple[str, ...]
    named: frozenset[str]
    skipped: dict[str, str]


def select(targets: Sequence[str] | None, require_fused: Sequence[str]) -> Selection:
    """Choose the targets to build.

    Args:
        targets: names of targets, or None for all that this machine can build.
        require_fused: names of targets that must be among them.

    Raises:
        UnavailableError: a target that was named cannot be built here.
        UsageError: a required target is not among the named ones.
    """
    reasons = {target: why_not_buildable(target) for target in targets or TARGETS}
    skipped = {target: reason for target, reason in reasons.items() if reason is not None}
    for target in targets if targets is not None else require_fused:
        if target in skipped:
            raise UnavailableError(skipped[target])
    chosen = tuple(target for target in TARGETS if target in reasons and target not in skipped)
    for target in require_fused:
        if target in OUTSIDE:
            raise UsageError(
                f"{target} does not report what it fuses, so it cannot be required to fuse attention; require that of "
                f"{', '.join(name for name in TARGETS if name not in OUTSIDE)}"
            )
        if target not in chosen:
            raise UsageError(
                f"{target} must run attention fused but is not among the targets to build ({', '.join(chosen)}); add "
                "it to the targets, or do not require it"
            )
    return Selection(chosen, frozenset((*(targets or ()), *require_fused)), skipped)


def finish(
    begun: Mapping[str, Finish | str], selection: Selection, progress: Progress
) -> tuple[dict[str, Built], dict[str, str]]:
    """Wait for all targets.

    Args:
        begun: for each target what waits for it, or why it cannot be built.
        selection: says which targets must be built.
        progress: receives each plan that is waited for.

    Returns:
        what was built for every target, and the builder's message for each that it refused.

    Raises:
        BuildError: the builder refused a target that must be built.
        UsageError: the builder does not support an option.
    """
    steps = Steps(progress)
    ended = {
        target: wait if isinstance(wait, str) else unless_refused(target, selection, partial(wait, steps))
        for target, wait in begun.items()
    }
    refused = {target: result for target, result in ended.items() if isinstance(result, str)}
    return {target: result for target, result in ended.items() if not isinstance(result, str)}, refused


def unless_refused(target: str, selection: Selection, build: Callable[[], T]) -> T | str:
    """Return the result of `build`, or the builder's message if it refused a target that need not be built.

    Raises:
        BuildError: the builder refused a target that must be built.
        UsageError: the builder does not support an option.
    """
    try:
        return build()
    except BuildError as error:
        if target in selection.named:
            raise
        return str(error)
