"""What this machine can build and run."""

from __future__ import annotations

import importlib
import os
import platform
from typing import Any

from attnforge.bundle import FLAVOURS
from attnforge.export.deploy import TARGETS, tool_versions, why_not_buildable
from attnforge.machine import cuda_devices
from attnforge.runtime.backends.backend import BACKENDS
from attnforge.runtime.backends.registry import why_no_provider


def examine() -> dict[str, Any]:
    """For every target and backend None, or the reason why not and what would change it."""
    return {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, {cuda_devices()} CUDA devices",
        "packages": tool_versions(),
        "build": {target: why_not_buildable(target) for target in TARGETS},
        "run": {backend: _why_not_runnable(backend) for backend in BACKENDS},
    }


def _why_not_runnable(backend: str) -> str | None:
    if backend not in FLAVOURS:
        return why_no_provider(backend)
    try:
        importlib.import_module(backend)
    except ImportError as error:
        package = "tensorrt_rtx" if backend == "tensorrt_rtx" else "attnforge[tensorrt]"
        return f"not installed ({error}); pip install {package}"
    return None if cuda_devices() else "no CUDA device: plans are built without one, and run only on an NVIDIA GPU"
