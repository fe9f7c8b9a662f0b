"""The machine at hand: its processor, its CUDA devices, and what decides which code is fast on it. Imports no torch."""

from __future__ import annotations

import functools
import importlib
import os
import platform
from pathlib import Path

from attnforge.records import Record

INSTRUCTIONS = (
    "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16",
    "asimd", "asimdhp", "bf16", "sve",
)  # fmt: skip
"""Of the processor's instruction sets those that matrix products and attention are written for."""


class Machine(Record):
    """What a measurement holds for: where all of this is the same, it may be expected again.

    Attributes:
        processors: that this process may run on.
        instructions: the processor's, of :data:`INSTRUCTIONS`.
        gpus: names of CUDA devices.
    """

    system: str
    processor: str
    processors: int
    instructions: list[str]
    gpus: list[str]


@functools.cache
def this_machine(gpus: bool = True) -> Machine:
    """The machine that this runs on.

    Args:
        gpus: without, none is asked for, which would initialise CUDA in this process.
    """
    about = _cpuinfo()
    flags = set((about.get("flags") or about.get("Features") or "").split())
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        processor=about.get("model name") or platform.processor() or platform.machine(),
        processors=processors(),
        instructions=[name for name in INSTRUCTIONS if name in flags],
        gpus=[device_name(i) for i in range(cuda_devices())] if gpus else [],
    )


def processors() -> int:
    """How many processors this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def _cpuinfo() -> dict[str, str]:
    """What Linux says of the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


@functools.cache
def cuda_devices() -> int:
    """Number of CUDA devices that the driver reports; 0 where there is no driver or no cuda-bindings."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
        if int(driver.cuInit(0)[0]) != 0:
            return 0
        status, count = driver.cuDeviceGetCount()
    except (ImportError, RuntimeError):  # RuntimeError: the bindings are there and the driver's library is not
        return 0
    return int(count) if int(status) == 0 else 0


@functools.cache
def compute_capability(device: int) -> str:
    """Of a CUDA device, as TensorRT-RTX names it: `SM90` is 9.0. To be asked only where there is one."""
    core = importlib.import_module("cuda.core")
    major, minor = core.Device(device).compute_capability
    return f"SM{major}{minor}"


@functools.cache
def device_name(device: int) -> str:
    """Name of a CUDA device, such as `NVIDIA H200`. To be asked only where there is one."""
    return str(importlib.import_module("cuda.core").Device(device).name)
