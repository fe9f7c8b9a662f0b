"""Every registered model in every precision on every backend, and torch on the device beside them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnforge.arrays import Array, to_numpy, to_torch
from attnforge.benchmarks.gpu.device import Device
from attnforge.benchmarks.gpu.large import targets_of
from attnforge.benchmarks.gpu.patch import patch_attention
from attnforge.benchmarks.gpu.processes import supervise
from attnforge.benchmarks.gpu.running import NO_TIME, UNDER_WAY, OutOfTime, Task, attempt, device_lost, read, write
from attnforge.benchmarks.gpu.steps import (
    COMPILE,
    EAGER,
    WHOLE,
    GpuResults,
    Item,
    ParityCheck,
    Settings,
    Step,
    capabilities,
)
from attnforge.bundle import Bundle
from attnforge.precision import precision_named
from attnforge.runtime.backends.registry import why_unavailable
from attnforge.runtime.inputs import Shapes
from attnforge.runtime.options import Memory
from attnforge.runtime.parity.verify import BackendReport, hold
from attnforge.runtime.session import Session, load

if TYPE_CHECKING:
    from attnforge.model.registry import Example

PRECISIONS_TRIED = ("fp16", "fp32", "bf16", "tf32")
MODELS_FIRST = (
    "vit", "patch-attention", "multi-head-attention", "transformer-encoder", "cross-attention",
    "patch-attention-digits", "self-attention", "multi-head-self-attention",
)  # fmt: skip
COMPARED = ("vit", "patch-attention", "multi-head-attention")
"""Models whose eager and torch.compile on the device are held to the budget, too."""


def models() -> list[str]:
    """Every registered model, the most important ones first."""
    from attnforge.model.registry import MODELS

    return list(dict.fromkeys([*MODELS_FIRST, *MODELS]))


def keys_of(model: str, precisions: Sequence[str] = PRECISIONS_TRIED) -> list[str]:
    """The tasks of a model, in order."""
    keys = [f"{model}, {precision}" for precision in precisions]
    return keys + ([f"{key}, torch" for key in keys] if model in COMPARED else [])


def chosen_keys(model: str, quick: bool) -> list[str]:
    """The tasks of a model that are done: in a quick run, two precisions of the first models."""
    if not quick:
        return keys_of(model)
    return keys_of(model, PRECISIONS_TRIED[:2]) if model in MODELS_FIRST[:4] else []


def parity(device: Device) -> list[Task]:
    """Every registered model in every precision on every backend: a process a model, several at once."""
    settings = device.settings
    workers = max(min(6, (os.cpu_count() or 1) // 2), 1)
    threads = max((os.cpu_count() or 1) // workers, 1)
    pool = ThreadPoolExecutor(workers)
    tasks: list[Task] = []
    for model in models():
        keys = chosen_keys(model, settings.quick)
        device.leave_out("parity", [key for key in keys_of(model) if key not in keys])
        if not keys:
            continue
        folder = device.scratch(f"parity-{model}")
        write(GpuResults(steps={"environment": device.run.results.steps.get("environment", Step())}), folder)
        changed = {"out": str(folder), "scratch": str(folder), "ends": settings.ends - 1, "threads": threads}
        own = settings.model_copy(update=changed)
        done = pool.submit(supervise, own, f"model:{model}", group=False)
        tasks += [(key, partial(_collect, device, own, model, key, done)) for key in keys]
    return tasks


def _collect(device: Device, own: Settings, model: str, key: str, done: Future[None], item: Item) -> None:
    """Wait until a model's process has recorded a task, and take its record over."""
    while True:
        ended = done.done()
        record = read(own.out).steps.get(f"model:{model}", Step())
        if key in record.items and (record.doing != key or ended):
            for name in Item.model_fields:
                setattr(item, name, getattr(record.items[key], name))
            return
        if ended:
            if record.failed:
                raise RuntimeError("; ".join(record.failed.values()))
            raise OutOfTime(record.left_out.get(key) or record.left_out.get(WHOLE) or NO_TIME)
        if device.run.left < 0:
            raise OutOfTime(UNDER_WAY if record.items else NO_TIME)
        time.sleep(0.2)


def parity_of(device: Device, model: str) -> list[Task]:
    """One model: every precision on every backend, then torch's own ways on the device."""
    bundles: dict[str, Bundle] = {}
    tasks: list[Task] = []
    for key in chosen_keys(model, device.settings.quick):
        precision = key.split(", ")[1]
        do = _verify_torch if key.endswith(", torch") else _verify
        tasks.append((key, partial(do, device, model, precision, bundles)))
    return tasks


def _bundle(device: Device, model: str, precision: str, bundles: dict[str, Bundle]) -> Bundle:
    """The model, deployed as a user would deploy it, once for all processes of the step."""
    from attnforge.export.deploy import deploy

    folder = Path(device.settings.scratch) / f"{model}-{precision}.bundle"
    if precision not in bundles and folder.exists():
        bundles[precision] = Bundle(folder)
    if precision not in bundles:
        module, args, shapes = small(model)
        wanted = capabilities(device.run.results)
        targets = None if device.settings.place == "cuda" else targets_of(device.settings.backends)
        bundles[precision] = deploy(
            module, args, folder, shapes, precision, targets, model, compute_capabilities=wanted, tune=False
        )
    return bundles[precision]


def small(model: str) -> Example:
    """A registered model; patch-attention with small images, because it runs in float64 on the CPU here."""
    from attnforge.model.registry import build_model

    return patch_attention() if model == "patch-attention" else build_model(model)


def _verify(device: Device, model: str, precision: str, bundles: dict[str, Bundle], item: Item) -> None:
    bundle = _bundle(device, model, precision, bundles)
    item.values |= {f"fused by {name}": count for name, count in bundle.manifest.attention.fused.items()}
    for backend in device.settings.backends:
        reason = device.why_not.get(backend) or why_unavailable(bundle, backend, device.settings.device)
        if reason is not None:
            item.skipped[backend] = reason
            continue

        def held(backend: str = backend) -> ParityCheck:
            with load(bundle, backend, device=device.settings.device) as session:
                return check_of(hold(session.bundle, session.backend, session.run))

        if (check := attempt(item.failed, backend, held)) is not None:
            item.checks[backend] = check
        device.run.save()
        if item.failed and device_lost():
            return


def _verify_torch(device: Device, model: str, precision: str, bundles: dict[str, Bundle], item: Item) -> None:
    """Eager and torch.compile on the device, held to the same budget on the same cases."""
    from attnforge.runtime.backends.eager import at_precision

    if not device.peers:
        item.skipped["torch"] = "torch has no CUDA here"
        return
    torch, p = device.torch, precision_named(precision)
    bundle = _bundle(device, model, precision, bundles)
    module = at_precision(small(model).module, p).to(device.name)
    ways: dict[str, Callable[[], Callable[..., Any]]] = {
        EAGER: lambda: module,
        COMPILE: lambda: torch.compile(module, dynamic=True),
    }
    for name, make in ways.items():

        def held(name: str = name, make: Callable[[], Callable[..., Any]] = make) -> ParityCheck:
            torch.compiler.reset()
            with device.products(p), Session(bundle, OnDevice(device, name, make())) as session:
                return check_of(hold(session.bundle, session.backend, session.run))

        if (check := attempt(item.failed, name, held)) is not None:
            item.checks[name] = check


def check_of(report: BackendReport) -> ParityCheck:
    """What is recorded of a backend's report: the first three failures, where there are any."""
    reasons = [f"{failure.case}, {failure.output}: {failure.reason}" for failure in report.failures[:3]]
    return ParityCheck(
        passed=report.passed,
        error=report.error,
        budget=report.budget,
        cases=report.cases,
        reason="; ".join(reasons) or (None if report.passed else report.case),
    )


class OnDevice:
    """A torch module on the device as a backend, on arrays of the host."""

    gpu = None

    def __init__(self, device: Device, name: str, module: Callable[..., Any]) -> None:
        self.name, self._device, self._module = name, device, module

    def run(self, arrays: Sequence[Array], shapes: Shapes, out: Sequence[Array | None] | None = None) -> list[Array]:
        from attnforge.runtime.backends.eager import as_written, named_outputs

        device = self._device
        tensors = [to_torch(np.array(array)).to(device.name) for array in arrays]
        with device.torch.no_grad(), as_written():
            results = named_outputs(self._module(*tensors))
        return [to_numpy(name, tensor) for name, tensor in results.items()]

    def memory(self) -> Memory:
        return Memory()

    def keep(self) -> None: ...

    def close(self) -> None:
        del self._module
