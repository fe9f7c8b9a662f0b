"""The machine at hand: its processor, its CUDA devices, and the versions of what is installed. Imports no torch.

Results of measurements hold for a :class:`Machine` and for versions (:func:`versions`, :func:`tool_versions`); whoever
records some takes both from here.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import math
import os
import platform
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from attnforge.memory import cgroups
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
"""The packages that decide what a bundle holds and how it runs."""


class Machine(Record):
    """What a measurement holds for: on an equal machine, equal times are to be expected.

    Attributes:
        system: operating system and architecture, such as `Linux x86_64`.
        processor: its model.
        processors: how many this process may run on at once.
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
        """Whether its products of 8-bit numbers add pairs in 16 bits, which can saturate: x86 without VNNI."""
        return "x86" in self.system.lower() and {"avx_vnni", "avx512_vnni"}.isdisjoint(self.instructions)


@functools.cache
def this_machine(gpus: bool = True) -> Machine:
    """The machine that this process runs on.

    Args:
        gpus: whether to ask for CUDA devices, which initialises CUDA in this process; a process must not fork after
            that. Without, `gpus` is empty.
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
    """How many processors this process may run on, or fewer where a container's quota is for fewer at once."""
    return max(1, math.ceil(min(len(os.sched_getaffinity(0)), cpu_quota())))


def cpu_quota(root: Path = Path("/")) -> float:
    """How many processors the cgroups of this process let it use at once, such as 1.5; infinity where none limits it.

    Args:
        root: of the file system.
    """
    quotas = [_quota(group, files) for controller, files in _QUOTA_FILES.items() for group in cgroups(controller, root)]
    return min(quotas, default=math.inf)


_QUOTA_FILES = {"": ["cpu.max"], "cpu": ["cpu.cfs_quota_us", "cpu.cfs_period_us"]}
"""By a cgroup's controller, the files with the microseconds that it may have, and of how many: version 2, then 1."""


def _quota(group: Path, files: Sequence[str]) -> float:
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = map(int, " ".join((group / file).read_text(encoding="ascii") for file in files).split())
        return quota / period if quota > 0 else math.inf
    return math.inf  # "max" is no number


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those of `packages` that are installed."""
    installed = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def tool_versions() -> dict[str, str]:
    """The versions of attnforge and of the installed :data:`TOOLS`."""
    return {"attnforge": __version__, **versions(TOOLS)}


def _cpuinfo() -> dict[str, str]:
    """What Linux says of the first processor, by key; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


@functools.cache
def cuda_devices() -> int:
    """Number of CUDA devices that the driver reports; 0 where there is no driver or no cuda-bindings.

    Calls `cuInit`: a process that has asked must not fork, for its children could use no GPU.
    """
    try:
        driver = importlib.import_module("cuda.bindings.driver")
        if int(driver.cuInit(0)[0]) != 0:
            return 0
        status, count = driver.cuDeviceGetCount()
    except (ImportError, RuntimeError):  # RuntimeError: the bindings are there and the driver's library is not
        return 0
    return int(count) if int(status) == 0 else 0


def cuda_driver() -> str:
    """The CUDA version that the driver supports, such as `13.0`; there must be a driver."""
    version = int(importlib.import_module("cuda.bindings.driver").cuDriverGetVersion()[1])
    return f"{version // 1000}.{version % 1000 // 10}"


@functools.cache
def compute_capability(device: int) -> str:
    """The compute capability of a CUDA device, as TensorRT-RTX writes it: `SM90` is 9.0.

    Args:
        device: its number; there must be such a device.
    """
    core = importlib.import_module("cuda.core")
    major, minor = core.Device(device).compute_capability
    return f"SM{major}{minor}"


@functools.cache
def device_name(device: int) -> str:
    """The name of a CUDA device, such as `NVIDIA H200`.

    Args:
        device: its number; there must be such a device.
    """
    return str(importlib.import_module("cuda.core").Device(device).name)
