"""The check at the end of every deploy: does at least one backend compute what the model computes?

Backends are checked on ordinary inputs here; the hard ones are left to :func:`attnforge.verify`. If measuring has
already found a backend that meets the whole budget, there is nothing left to check.
"""

from __future__ import annotations

from pathlib import Path

from attnforge.atomic import temporary_folder
from attnforge.bundle import CANONICAL, Bundle, Choice, Manifest, Wrong
from attnforge.errors import AttnforgeError, first_line
from attnforge.export.decoding.whole import whole_graph
from attnforge.export.diagnosis.diagnose import diagnose
from attnforge.export.diagnosis.trace import COSTS
from attnforge.export.flops import run_cost
from attnforge.machine import this_machine, versions
from attnforge.progress import Progress
from attnforge.runtime.backends.registry import REGISTRY, libraries_of, why_unavailable
from attnforge.runtime.cases import run_of_example
from attnforge.runtime.choose import why_dropped
from attnforge.runtime.parity.verify import References, unproved

CHECKING = "check backends"
"""The name of the stage."""

MOST_EXAMPLE_RUNS = 2
"""Maximum cost of a case that backends are checked on here, in runs of the example."""


def check(folder: Path, manifest: Manifest, progress: Progress) -> Wrong | None:
    """Why no backend available on this machine computes what the model computes, or why that is not proved; None if one
    does, or if none can run here.

    Args:
        folder: the bundle's folder, with its manifest written.
        manifest: receives the backends that are wrong, if others are right.
        progress: receives each backend.
    """
    bundle = Bundle(folder, lazily=True, trusted=False)
    ordinary = [case for case in manifest.cases if case.is_ordinary]
    cost = run_cost(whole_graph(bundle, CANONICAL))
    most = MOST_EXAMPLE_RUNS * run_of_example(ordinary[0].sizes, cost)
    cheap = [case for case in ordinary if cost(case.sizes) <= most]
    if (doubt := unproved(manifest, ordinary, References.of(bundle))) is not None:
        return _why(bundle, doubt)
    if manifest.choice is not None and manifest.choice.milliseconds:
        return None
    able = [name for name, row in REGISTRY.items() if row.targets and why_unavailable(bundle, name) is None]
    dropped = why_dropped(bundle, able, progress, cheap)
    if able and len(dropped) == len(able):
        return _why(bundle, "; ".join(f"{name}: {reason}" for name, reason in dropped.items()))
    if dropped and manifest.choice is None:
        manifest.choice = Choice(
            machine=this_machine(), versions=versions(libraries_of(able)), sizes=ordinary[0].sizes, picked=None,
            milliseconds={}, dropped=dropped, seconds=0.0,
        )  # fmt: skip
    return None


def _why(bundle: Bundle, evidence: str) -> Wrong:
    """The result of a diagnosis, or, if it fails, of the checks before it."""
    try:
        with temporary_folder() as reproduction:
            finding = diagnose(bundle, out=reproduction).finding
    except (AttnforgeError, MemoryError) as error:
        return Wrong(cause="unknown", stage="backends", evidence=f"{evidence} (no diagnosis: {first_line(error)})")
    stage = "backends" if finding.cause in COSTS else finding.stage  # a cost has no separate stage
    fields = {"stage": stage, "evidence": f"{evidence}; {finding.evidence}"}
    return Wrong.model_validate({**finding.model_dump(include=set(Wrong.model_fields)), **fields})
