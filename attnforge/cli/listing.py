"""`attnforge models` and `attnforge doctor`."""

from __future__ import annotations

import os
import platform

from attnforge.cli import printing
from attnforge.cli.answers import Answer
from attnforge.cli.options import Json


def models(as_json: Json = False) -> Answer:
    """List the registered models and their options.

    Example: `attnforge models`
    """
    import inspect

    from attnforge.model.registry import MODELS

    listing = {
        name: {
            "system": model.system,
            "summary": model.summary,
            "options": list(inspect.signature(model.make).parameters),
        }
        for name, model in MODELS.items()
    }
    return Answer(listing, lambda: printing.print_models(listing))


def doctor(as_json: Json = False) -> Answer:
    """Say what this machine can build and run, and what to install for the rest.

    Example: `attnforge doctor`
    """
    from attnforge.export.targets.registry import TARGETS, why_not_buildable
    from attnforge.machine import cuda_devices, tool_versions
    from attnforge.runtime.backends.registry import BACKENDS, why_not_here

    report = {  # of every target and backend None, or why not and what would change that
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, {cuda_devices()} CUDA devices",
        "packages": tool_versions(),
        "build": {target: why_not_buildable(target) for target in TARGETS},
        "run": {backend: why_not_here(backend) for backend in BACKENDS},
    }
    return Answer(report, lambda: printing.print_examination(report))
