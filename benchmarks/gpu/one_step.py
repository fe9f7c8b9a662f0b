"""A process of the run: one step, or one model's part of it, by `python -m benchmarks.gpu.one_step STEP SETTINGS`.

The settings are JSON. Without a device no such process starts, and nothing imports torch.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable
from functools import partial

from benchmarks.gpu.decoding import decoding
from benchmarks.gpu.device import Device
from benchmarks.gpu.environment import environment, tests
from benchmarks.gpu.lean import plans
from benchmarks.gpu.parity import parity_of
from benchmarks.gpu.running import GpuRun, Task, read, step
from benchmarks.gpu.steps import Settings
from benchmarks.gpu.timings import attention, ceilings, latency, overhead, published

STEPS: dict[str, Callable[[Device], list[Task]]] = {
    step.__name__: step for step in (environment, tests, ceilings, published, decoding, attention, latency, overhead)
}
"""The functions that list the tasks of each step except `parity`."""


def main(name: str, settings: Settings) -> None:
    """Run a step, and end the process."""
    faulthandler.enable(all_threads=False)
    if plans.PYTHON in os.environ:
        plans.use_lean_runtime()
    run = GpuRun(settings, read(settings.out))
    kind, _, model = name.partition(":")
    device = Device(run)
    step(run, name, partial(parity_of, device, model) if kind == "parity" else partial(STEPS[name], device))
    sys.stdout.flush()
    os._exit(0)  # threads that are still running, if any, must not keep the process alive


if __name__ == "__main__":
    main(sys.argv[1], Settings.model_validate_json(sys.argv[2]))
