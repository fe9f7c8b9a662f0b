"""How a process of pytest begins. What tests share is loaded in the processes that run tests: torch alone takes two
seconds, and the process that hands tests out to workers starts them first."""

from __future__ import annotations

import importlib
import os

import pytest

pytest_plugins = ["pytester"]

os.environ["RAY_metrics_report_interval_ms"] = "1000"  # noqa: SIM112  (a test waits for them)
os.environ["ATTNFORGE_CACHE"] = "off"  # a test that deploys makes everything itself, unless it says otherwise


@pytest.hookimpl(trylast=True)  # after xdist's, which registers what hands tests out
def pytest_configure(config: pytest.Config) -> None:
    """Give each worker a processor of its own, so that libraries start one thread: a second one takes a worker's time
    from another, and ONNX Runtime's spin while they wait."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker.startswith("gw") and hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[int(worker[2:]) % len(allowed)]})
    if not config.pluginmanager.has_plugin("dsession"):
        config.pluginmanager.register(importlib.import_module("tests.support.session"))
