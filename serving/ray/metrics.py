"""Metrics of a Session in a Ray actor, exported with Ray's Prometheus metrics.

Names and labels are those of :mod:`attnforge.serving.metrics`, with Ray's prefix `ray_`; Ray adds its labels, among
them the actor's and, in Serve, the deployment's and the replica's.
"""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge, Histogram

from attnforge.bundle import DimSpec
from attnforge.runtime.session import Session
from attnforge.serving.batching import batch_of
from attnforge.serving.metrics import LABELS, SAMPLES, SECONDS, Observed


def observed(session: Session) -> Observed:
    """Return a Session whose calls, errors, seconds, samples and memory Ray exports. Its memory is measured once, after
    loading.

    Args:
        session: session in an actor to observe.
    """
    manifest = session.bundle.manifest
    labels = dict(zip(LABELS, (manifest.name, manifest.precision, session.backend), strict=True))
    calls = Counter("attnforge_calls", "Calls of a Session.", LABELS)
    errors = Counter("attnforge_errors", "Calls that failed.", (*LABELS, "error"))
    seconds = Histogram("attnforge_call_seconds", "Seconds of a call.", list(SECONDS), LABELS)
    samples = Histogram("attnforge_call_samples", "Samples in a call.", list(SAMPLES), LABELS)
    memory = Gauge("attnforge_memory_bytes", "Bytes that a Session holds.", (*LABELS, "what"))
    for what in ("weights", "activations", "buffers", "pinned"):
        if (size := getattr(session.memory, what)) is not None:
            memory.set(size, {**labels, "what": what})
    has_batch = isinstance(batch_of(manifest), DimSpec)

    def count(took: float | None, size: int | None, error: BaseException | None) -> None:
        calls.inc(1, labels)
        if error is not None:
            errors.inc(1, {**labels, "error": type(error).__name__})
        if took is not None:
            seconds.observe(took, labels)
        if size is not None and has_batch:
            samples.observe(size, labels)

    return Observed(session, count)
