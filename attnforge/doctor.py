"""What this machine can build and run."""

from __future__ import annotations

import os
import platform
from typing import Any

from attnforge.export.targets.registry import TARGETS, why_not_buildable
from attnforge.machine import cuda_devices, tool_versions
from attnforge.runtime.backends.registry import BACKENDS, why_not_here


def examine() -> dict[str, Any]:
    """For every target and backend None, or the reason why not and what would change it."""
    return {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, {cuda_devices()} CUDA devices",
        "packages": tool_versions(),
        "build": {target: why_not_buildable(target) for target in TARGETS},
        "run": {backend: why_not_here(backend) for backend in BACKENDS},
    }
