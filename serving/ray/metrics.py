"""Metrics of a Session in a Ray actor, exported with Ray's Prometheus metrics.

Names and labels are those of :mod:`attnforge.serving.metrics`, with Ray's prefix `ray_`; Ray adds its labels, among
them the actor's and, in Serve, the deployment's and the replica's.
"""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge, Histogram

from attnforge.runtime.session import Session
from attnforge.serving.metrics import LABELS, MEMORY, Observed, instruments, labels_of


def observed(session: Session) -> Observed:
    """Return a Session whose calls, errors, seconds, samples and memory Ray exports. Its memory is measured once, after
    loading.

    Args:
        session: session in an actor to observe.
    """
    labels = labels_of(session)
    memory = Gauge("attnforge_memory_bytes", "Bytes that a Session holds.", (*LABELS, "what"))
    for what in MEMORY:
        if (size := getattr(session.memory, what)) is not None:
            memory.set(size, dict(zip((*LABELS, "what"), (*labels, what), strict=True)))
    metrics = instruments(Counter, lambda name, text, labels, buckets: Histogram(name, text, list(buckets), labels))

    def record(name: str, value: float, *error: str) -> None:
        metric, tags = metrics[name], dict(zip((*LABELS, "error"), (*labels, *error), strict=False))
        metric.inc(value, tags) if isinstance(metric, Counter) else metric.observe(value, tags)

    return Observed(session, record)
