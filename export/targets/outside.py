"""A target that another package adds: it is given the canonical graph, and lowers it itself."""

from __future__ import annotations

from attnforge.bundle import CANONICAL, TargetRecord
from attnforge.errors import BuildError, raised_as
from attnforge.export.lowering.attention import Lowered
from attnforge.export.targets.target import Built, Finish, Job
from attnforge.progress import Progress
from attnforge.runtime.backends.outside import Target

FOLDER = "targets"
"""Folder of the bundle in which each such target has one."""


def begin(job: Job, progress: Progress, target: Target) -> Finish:
    """Let a target write its files; nothing is left to wait for.

    Args:
        job: what to build from.
        progress: not reported to.
        target: the target.

    Raises:
        BuildError: it cannot run this model, or returned no file in its folder.
    """
    model = CANONICAL
    if target.build is not None:
        folder = job.folder / FOLDER / target.name
        folder.mkdir(parents=True)
        with raised_as(BuildError, f"{target.name} cannot build this model"):
            model = f"{FOLDER}/{target.name}/{target.build(job.folder / CANONICAL, folder)}"
        if not (job.folder / model).is_file():
            raise BuildError(f"{target.name} wrote no file {model}")
    why = "the package of this target lowers the canonical node itself"
    lowered = [Lowered(site.name, "Attention", why, site.node) for site in job.sites if site.node is not None]
    built = Built(TargetRecord(model=model), lowered)
    return lambda steps: built
