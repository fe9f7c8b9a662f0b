"""The device: which backends run on it, and how time and memory are measured there."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnforge.arrays import to_numpy
from attnforge.precision import Precision
from attnforge.runtime.backends.eager import torch_dtype
from attnforge.runtime.backends.registry import BACKENDS, ON_GPU, why_not_here
from attnforge.runtime.race import seconds_of
from benchmarks.gpu.running import GpuRun
from benchmarks.gpu.steps import Item, why_broken

BY_QUICK = "left out by --quick"

CYCLES_PER_MS, LONGEST_BUSY = 2_000_000, 20.0
"""Cycles per millisecond at 2 GHz, which no device exceeds; maximum milliseconds for which a device is kept busy."""


class Device:
    """The device, which backends run on it, and how time is measured there.

    Attributes:
        run: this process's part of the run.
        settings: settings of the run.
        on_cuda: whether torch computes on the device.
        peers: whether torch computes on the same device as the sessions; if not, sessions are timed on NumPy arrays
            only.
        name: torch's name of the device that it computes on.
    """

    def __init__(self, run: GpuRun) -> None:
        self.run, self.settings = run, run.settings
        self.on_cuda = run.settings.place == "cuda" and torch.cuda.is_available()
        self.peers = self.on_cuda or run.settings.place == "cpu"
        self.name = f"cuda:{run.settings.device}" if self.on_cuda else "cpu"
        if self.on_cuda:
            torch.cuda.set_device(run.settings.device)

    @cached_property
    def absent(self) -> dict[str, str]:
        """Reasons why backends cannot run here, by backend."""
        return {name: reason for name in BACKENDS if (reason := why_not_here(name)) is not None}

    @cached_property
    def why_not(self) -> dict[str, str]:
        """Reasons why backends cannot run here, or failed when they were tried, by backend."""
        reasons = {name: why_broken(self.run.results, name) for name in self.settings.backends}
        return {name: reason for name, reason in reasons.items() if reason is not None} | self.absent

    def usable(self, item: Item, backends: Sequence[str] = ON_GPU) -> list[str]:
        """Return those of `backends` that run here; the reasons of the others go to the item. On the CPU, the settings'
        backends replace `backends`."""
        backends = backends if self.settings.place == "cuda" else self.settings.backends
        item.skipped |= {name: self.why_not[name] for name in backends if name in self.why_not}
        return [name for name in backends if name not in self.why_not]

    def leave_out(self, step: str, tasks: Sequence[str]) -> None:
        """Record the tasks that a step skips in a quick run."""
        self.run.results.steps[step].left_out |= dict.fromkeys(tasks, BY_QUICK)

    def scratch(self, name: str) -> Path:
        """Create a new folder in the run's temporary folder."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.settings.scratch))

    def stream(self) -> AbstractContextManager[Any]:
        """Return a context with a stream other than the default one, so that graphs can be replayed on it."""
        return torch.cuda.stream(torch.cuda.Stream(self.name)) if self.on_cuda else nullcontext()  # type: ignore[no-untyped-call]

    def to_device(self, tensor: Tensor, precision: Precision) -> Tensor:
        """Move a tensor to the device, floating-point ones at a precision; other streams may read it."""
        moved = tensor.to(self.name, torch_dtype(precision) if tensor.is_floating_point() else tensor.dtype)
        self.sync()
        return moved

    def feed(self, tensor: Tensor) -> Any:
        """Return a session's input: the tensor if the session reads the device, otherwise an array."""
        return tensor if self.peers else to_numpy("input", tensor)

    # time

    def sync(self) -> None:
        """Wait until the current stream is done."""
        if self.on_cuda:
            torch.cuda.current_stream().synchronize()

    def wall_ms(self, call: Callable[[], Any]) -> float:
        """Return the milliseconds until the stream is done with a call."""
        return 1e3 * (seconds_of(call) + seconds_of(self.sync))

    def host_ms(self, call: Callable[[], Any]) -> float:
        """Return the milliseconds until a call returns."""
        spent = seconds_of(call)
        self.sync()
        return 1e3 * spent

    def device_ms(self, call: Callable[[], Any], host_ms: float) -> float:
        """Return the milliseconds between events around a call, while the device is kept busy for about as long as
        enqueueing the call takes (`host_ms`); by the clock if torch does not compute on the device."""
        if not self.on_cuda:
            return self.wall_ms(call)
        cuda: Any = torch.cuda
        first, last = (cuda.Event(enable_timing=True) for _ in range(2))
        if hasattr(cuda, "_sleep"):
            cuda._sleep(int(CYCLES_PER_MS * min(1.5 * host_ms + 0.05, LONGEST_BUSY)))
        first.record()
        call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last))

    # memory

    def free(self) -> float | None:
        """Return the free bytes of the device, after torch's allocator has released unused memory."""
        if not self.on_cuda:
            return None
        self.sync()
        torch.cuda.empty_cache()
        return float(torch.cuda.mem_get_info(self.settings.device)[0])

    def allocated(self) -> float:
        """Return the bytes that torch has allocated now; :meth:`peak` counts from here."""
        if not self.on_cuda:
            return 0.0
        torch.cuda.reset_peak_memory_stats()
        return float(torch.cuda.memory_allocated())

    def peak(self, since: float) -> float | None:
        """Return the peak of torch's allocated bytes since :meth:`allocated`, minus its result `since`."""
        return float(torch.cuda.max_memory_allocated()) - since if self.on_cuda else None

    @contextmanager
    def products(self, precision: Precision) -> Iterator[None]:
        """Let torch compute fp32 products and convolutions in TF32 if that is the precision, otherwise in full fp32."""
        tf32 = precision.name == "tf32"
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before[0])
            torch.backends.cudnn.allow_tf32 = before[1]
