"""The targets by name: what builds each, and why one cannot be built on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from attnforge.bundle import FLAVOURS
from attnforge.errors import UnavailableError, UsageError
from attnforge.export.targets import onnxruntime, outside, tensorrt
from attnforge.export.targets.target import Finish, Job
from attnforge.progress import Progress
from attnforge.runtime.backends.registry import OUTSIDE

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
