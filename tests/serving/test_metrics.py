"""A Session's calls, errors, seconds, samples and memory, as Prometheus reads them."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

import attnforge
from attnforge.errors import InputError
from attnforge.serving.metrics import observed
from tests.support.bundles import Deploy, DeploySmall, small_inputs

DIGITS = {"model": "patch-attention-digits", "precision": "fp32", "backend": "onnxruntime-cpu"}


def test_calls_are_counted_by_what_came_of_them(registered: Deploy) -> None:
    registry = CollectorRegistry()
    with attnforge.load(registered("patch-attention-digits", "fp32"), "onnxruntime-cpu", threads=1) as session:
        counted = observed(session, registry)
        images = np.ones((5, 1, 8, 8), np.float32)
        np.testing.assert_array_equal(counted(images), session(images))
        np.testing.assert_array_equal(counted.run({"image": images})["output"], session(images))
        for wrong in (images[0], images.astype(np.float64)):
            with pytest.raises(InputError):
                counted(wrong)

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"attnforge_{name}", DIGITS | labels)

        assert value("calls_total") == 4
        assert value("errors_total", error="InputError") == 2
        assert value("call_seconds_count") == 2 and (value("call_seconds_sum") or 0) > 0
        assert (value("call_samples_count"), value("call_samples_sum")) == (2, 10)
        assert (value("call_samples_bucket", le="4.0"), value("call_samples_bucket", le="8.0")) == (0, 2)
        assert value("memory_bytes", what="weights") == session.memory.weights
    assert value("memory_bytes", what="weights") is None  # it is closed


def test_sessions_of_one_registry_share_its_metrics(small: DeploySmall) -> None:
    registry, labels = CollectorRegistry(), {"model": "small", "precision": "fp32", "backend": "onnxruntime-cpu"}
    with (
        attnforge.load(small("fp32"), "onnxruntime-cpu") as first,
        attnforge.load(small("fp32"), "onnxruntime-cpu") as second,
    ):
        for session in (first, second):
            observed(session, registry).run(small_inputs())
        assert registry.get_sample_value("attnforge_calls_total", labels) == 2
        weights = registry.get_sample_value("attnforge_memory_bytes", labels | {"what": "weights"})
        assert weights == 2 * (first.memory.weights or 0)
        assert registry.get_sample_value("attnforge_call_samples_count", labels) == 0  # it has no batch
        assert b"attnforge_call_seconds_bucket" in generate_latest(registry)


def test_an_observed_session_is_not_kept(small: DeploySmall) -> None:
    registry = CollectorRegistry()
    observed(attnforge.load(small("fp32"), "onnxruntime-cpu"), registry).run(small_inputs())
    gc.collect()
    assert "attnforge_memory_bytes{" not in generate_latest(registry).decode()
