"""What this machine can run, asked without torch."""

from __future__ import annotations

import functools
import importlib


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
