"""OpenVINO, which runs the canonical graph of every bundle: if it computes a site faster in blocks, or with queries and
keys in int8, it gets a separate graph. It is not a target that can be named."""

from __future__ import annotations

from collections.abc import Mapping

from attnforge.bundle import OPENVINO, TargetRecord
from attnforge.export.lowering.attention import attentions
from attnforge.export.lowering.openvino import CANONICAL_FORM, LIBRARY, candidates_for, lower
from attnforge.export.lowering.tuning import Tuner
from attnforge.export.targets.target import Built, Job
from attnforge.progress import Progress, Steps
from attnforge.runtime.backends.registry import why_not_here
from attnforge.runtime.cases import sizes_at


def own_graph(job: Job, built: Mapping[str, Built], progress: Progress) -> Built | None:
    """Build a graph for OpenVINO if a mask hides enough of a site, or if queries and keys may be in int8; None if the
    canonical graph is as fast.

    Args:
        job: what to build from; the graph has no cache.
        built: what was built for the targets, whose measurements have used part of the seconds.
        progress: receives each site whose form is chosen by measuring.
    """
    scales = job.scores_in_int8
    sites = list(attentions(job.model, job.sites))
    offered = [candidates_for(site.name, a, scales.get(site.name)) for site, a in sites]
    if all([candidate.form for candidate in candidates] == [CANONICAL_FORM] for candidates in offered):
        return None
    sizes = sizes_at(job.inputs, "opt")
    spent = sum(target.record.tuning.seconds for target in built.values() if target.record.tuning is not None)
    seconds = job.measuring - spent if why_not_here(OPENVINO) is None else 0.0
    measured = f"{OPENVINO}, int8: {', '.join(scales)}" if scales else OPENVINO  # identifies the forms to measure
    tuner = None
    if seconds > 0:
        tuner = Tuner(sizes, seconds, Steps(progress), job.reuse.forms(sizes, measured), LIBRARY)
    model = job.model.clone()
    lowered = lower(model, job.sites, sizes, tuner, scales)
    tuning = job.reuse.tuning(tuner, measured)
    if all(site.form == CANONICAL_FORM for site in lowered):
        return None
    return Built(TargetRecord(model=job.shelf.save(model, f"{OPENVINO}/model.onnx"), tuning=tuning), lowered)
