"""A target that another package adds: it is given the canonical graph, and lowers it itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from attnforge.bundle import CANONICAL, OF_PACKAGES, TargetRecord
from attnforge.errors import BuildError, raised_as
from attnforge.export.lowering.attention import Lowered
from attnforge.export.targets.target import Built, Finish, Job
from attnforge.progress import Progress
from attnforge.runtime.backends.backend import Target


def begin(job: Job, progress: Progress, target: Target) -> Finish:
    """Let a target write its files; nothing is left to wait for.

    Args:
        job: what to build from.
        progress: not reported to.
        target: the target.

    Raises:
        BuildError: it cannot run this model, or wrote other files than the one that it named.
    """
    model = CANONICAL if target.build is None else _built(target, target.build, job.folder)
    why = "the package of this target lowers the canonical node itself"
    nodes = {site.name: site.node for site in job.sites if site.node is not None}
    lowered = [Lowered("Attention", why, site=site, node=node) for site, node in nodes.items()]
    built = Built(TargetRecord(model=model), lowered)
    return lambda steps: built


def _built(target: Target, build: Callable[[Path, Path], str], bundle: Path) -> str:
    """Return the name of the one file that a target wrote to its folder, which is removed if it fails."""
    folder = bundle / OF_PACKAGES / target.name
    folder.mkdir(parents=True)
    try:
        with raised_as(BuildError, f"{target.name} cannot build this model"):
            name = build(bundle / CANONICAL, folder)
        if sorted(folder.iterdir()) != [folder / str(name)] or not (folder / str(name)).is_file():
            written = ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing"
            raise BuildError(f"{target.name} must write one file and return its name; it wrote {written}, not {name!r}")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return f"{OF_PACKAGES}/{target.name}/{name}"
