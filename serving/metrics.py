"""Prometheus metrics of a Session (`pip install 'attnforge[metrics]'`).

    session = observed(attnforge.load("bundle/"))
    prometheus_client.start_http_server(9000)

Calls are timed on the host, so on a GPU a call that returns once its work is enqueued counts only until then.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from attnforge.bundle import DimSpec
from attnforge.errors import UnavailableError, UsageError
from attnforge.runtime.session import Session
from attnforge.serving.batching import batch_of

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise UnavailableError(f"metrics need prometheus_client ({error}); pip install 'attnforge[metrics]'") from error

LABELS = ("model", "precision", "backend")
SECONDS = tuple(base * 10**power for power in (-4.0, -3.0, -2.0, -1.0, 0.0) for base in (1, 2.5, 5))
"""Upper bounds of the histogram's buckets: 0.1 ms to 5 s."""

SAMPLES = tuple(2**power for power in range(11))
MEMORY = ("weights", "activations", "buffers", "pinned")
"""The sizes in a Session's memory."""


def labels_of(session: Session) -> tuple[str, str, str]:
    """Return the values of :data:`LABELS`."""
    return session.bundle.manifest.name, session.bundle.manifest.precision, session.backend


def instruments(counter: Callable[..., Any], histogram: Callable[..., Any]) -> dict[str, Any]:
    """Return the metrics of calls, by the names under which :class:`Observed` records them.

    Args:
        counter: makes a counter of a name, a description and names of labels.
        histogram: makes a histogram of these, and `buckets`.
    """
    return {
        "calls": counter("attnforge_calls", "Calls of a Session.", LABELS),
        "errors": counter("attnforge_errors", "Calls that failed.", (*LABELS, "error")),
        "seconds": histogram("attnforge_call_seconds", "Seconds of a call.", LABELS, buckets=SECONDS),
        "samples": histogram("attnforge_call_samples", "Samples in a call.", LABELS, buckets=SAMPLES),
    }


class Metrics(Collector):
    """The metrics of any number of Sessions.

    - `attnforge_calls_total`, and `attnforge_errors_total` by the error's class;
    - `attnforge_call_seconds`, a histogram of successful calls;
    - `attnforge_call_samples`, a histogram of their batch sizes, for models with a batch;
    - `attnforge_memory_bytes`, the memory of open sessions, as far as their backends report it.

    Args:
        registry: registry of prometheus_client.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._metrics = instruments(partial(Counter, registry=registry), partial(Histogram, registry=registry))
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        registry.register(self)

    def observe(self, session: Session) -> Observed:
        """Return the session with its calls counted."""
        self._sessions.add(session)
        labels = labels_of(session)
        for metric in ("calls", "seconds", "samples"):
            self._metrics[metric].labels(*labels)  # zero until the first call

        def record(metric: str, value: float, *error: str) -> None:
            child = self._metrics[metric].labels(*labels, *error)
            child.inc(value) if isinstance(child, Counter) else child.observe(value)

        return Observed(session, record)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the memory of open sessions, summed over those of one model and backend."""
        totals: dict[tuple[str, str, str, str], int] = {}
        for session in list(self._sessions):
            try:
                memory = session.memory
            except UsageError:  # it is closed
                continue
            for what in MEMORY:
                if (size := getattr(memory, what)) is not None:
                    labels = (*labels_of(session), what)
                    totals[labels] = totals.get(labels, 0) + size
        family = GaugeMetricFamily("attnforge_memory_bytes", "Bytes that a Session holds.", labels=(*LABELS, "what"))
        for labels, size in totals.items():
            family.add_metric(labels, size)
        yield family

    def describe(self) -> list[GaugeMetricFamily]:
        """Return nothing, so that no memory is read before the first scrape."""
        return []


class Observed:
    """A Session whose calls are counted, called like the Session; its other methods are on `session`.

    Args:
        session: the Session.
        record: receives the name of a metric (`calls`, `errors`, `seconds`, `samples`), by how much it rises or what is
            observed, and for `errors` the error's class.

    Attributes:
        session: the Session.
        inputs, outputs: the Session's.
    """

    def __init__(self, session: Session, record: Callable[..., None]) -> None:
        self.session, self._record = session, record
        self.inputs, self.outputs = session.inputs, session.outputs
        self._has_batch = isinstance(batch_of(session.bundle.manifest), DimSpec)

    def __call__(self, *values: Any, **options: Any) -> Any:
        """See :meth:`attnforge.Session.__call__`."""
        return self._counted(lambda: self.session(*values, **options), next(iter(values), None))

    def run(self, values: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """See :meth:`attnforge.Session.run`."""
        first = self.session.inputs[0].name if self.session.inputs else ""
        given = values.get(first) if isinstance(values, Mapping) else None
        answer: dict[str, Any] = self._counted(lambda: self.session.run(values, **options), given)
        return answer

    def _counted(self, call: Callable[[], Any], first: Any) -> Any:
        start = time.perf_counter()
        try:
            answer = call()
        except BaseException as error:
            self._record("errors", 1, type(error).__name__)
            raise
        finally:
            seconds = time.perf_counter() - start
            self._record("calls", 1)
        self._record("seconds", seconds)
        shape: Any = getattr(first, "shape", ())
        if self._has_batch and len(shape):
            self._record("samples", int(shape[0]))
        return answer


_METRICS: weakref.WeakKeyDictionary[CollectorRegistry, Metrics] = weakref.WeakKeyDictionary()


def observed(session: Session, registry: CollectorRegistry = REGISTRY) -> Observed:
    """Return a Session whose calls, errors, seconds, samples and memory are exported to Prometheus.

    Args:
        session: session to observe.
        registry: registry of prometheus_client; all sessions of a registry share its metrics.
    """
    if registry not in _METRICS:
        _METRICS[registry] = Metrics(registry)
    return _METRICS[registry].observe(session)
