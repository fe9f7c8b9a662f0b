"""This machine: its processor, its CUDA devices, and the versions of installed packages. Imports no torch.

Measurements are valid for a :class:`Machine` and for versions (:func:`versions`, :func:`tool_versions`); code that
records measurements takes both from here.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import math
import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from attnforge.memory import cgroup_numbers, entries
from attnforge.records import Record
from attnforge.version import __version__

INSTRUCTIONS = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16",
    "amx_fp16", "asimd", "asimdhp", "bf16", "sve",
)  # fmt: skip
"""The instruction sets that kernels of matrix products and attention are written for."""

TOOLS = (
    "torch", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt_rtx",
    "polygraphy", "openvino", "numpy",
)  # fmt: skip
"""The packages that affect a bundle's contents and how it runs."""


class Machine(Record):
    """The machine of a measurement: on an equal machine, equal times are to be expected.

    Attributes:
        system: operating system and architecture, such as `Linux x86_64`.
        processor: model of the processor.
        processors: number of processors that this process may use at once.
        instructions: those of :data:`INSTRUCTIONS` that the processor has.
        gpus: names of the CUDA devices.
    """

    system: str
    processor: str
    processors: int
    instructions: list[str]
    gpus: list[str]

    @property
    def saturates(self) -> bool:
        """Whether its 8-bit products add pairs in 16 bits, which can saturate: x86 without VNNI."""
        return "x86" in self.system.lower() and {"avx_vnni", "avx512_vnni"}.isdisjoint(self.instructions)


@functools.cache
def this_machine(gpus: bool = True) -> Machine:
    """Return the machine that this process runs on.

    Args:
        gpus: whether to query CUDA devices, which initialises CUDA in this process; a process must not fork after
            that. If False, `gpus` is empty.
    """
    about = entries(Path("/proc/cpuinfo"))  # of the first processor
    flags = set((about.get("flags") or about.get("Features") or "").split())
    return Machine(
        system=f"{platform.system()} {platform.machine()}",
        processor=about.get("model name") or platform.processor() or platform.machine(),
        processors=processors(),
        instructions=[name for name in INSTRUCTIONS if name in flags],
        gpus=[device_name(i) for i in range(cuda_devices())] if gpus else [],
    )


def processors() -> int:
    """Return the number of processors that this process may use at once, by its affinity and its container's quota."""
    return max(1, math.ceil(min(len(os.sched_getaffinity(0)), cpu_quota())))


def cpu_quota(root: Path = Path("/")) -> float:
    """Return how many processors this process's cgroups let it use at once, such as 1.5; infinity without a limit.

    Args:
        root: root of the file system.
    """
    numbers = cgroup_numbers(_QUOTA_FILES, root)
    return min((quota / period for _, quota, period in numbers if quota > 0 < period), default=math.inf)


_QUOTA_FILES = {"": ["cpu.max"], "cpu": ["cpu.cfs_quota_us", "cpu.cfs_period_us"]}
"""Files with a cgroup's quota and its period, both in microseconds, by controller: version 2, then 1."""


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those `packages` that are installed."""
    installed = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def tool_versions() -> dict[str, str]:
    """Return the versions of attnforge and of the installed :data:`TOOLS`."""
    return {"attnforge": __version__, **versions(TOOLS)}


@functools.cache
def cuda_devices() -> int:
    """Return the number of CUDA devices that the driver reports; 0 without a driver or cuda-bindings.

    Calls `cuInit`, after which a process must not fork: its children could not use the GPU.
    """
    try:
        driver = importlib.import_module("cuda.bindings.driver")
        if int(driver.cuInit(0)[0]) != 0:
            return 0
        status, count = driver.cuDeviceGetCount()
    except (ImportError, RuntimeError):  # RuntimeError: the bindings are installed, but not the driver's library
        return 0
    return int(count) if int(status) == 0 else 0


@functools.cache
def compute_capability(device: int) -> str:
    """Return the compute capability of a CUDA device, as TensorRT-RTX writes it: `SM90` is 9.0.

    Args:
        device: its number; the device must exist.
    """
    major, minor = importlib.import_module("cuda.core").Device(device).compute_capability
    return f"SM{major}{minor}"


@functools.cache
def device_name(device: int) -> str:
    """Return the name of a CUDA device, such as `NVIDIA H200`.

    Args:
        device: its number; the device must exist.
    """
    return str(importlib.import_module("cuda.core").Device(device).name)
