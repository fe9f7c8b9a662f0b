"""Parity of every registered model in every precision on every backend, and of torch on the device.

Plans are checked in Polygraphy's TrtRunner too: a second opinion on attnforge's runtime, by the same rule. Polygraphy
runs through its command line, in its own process: it supports one of the two TensorRTs per process.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import torch
import typer

from attnforge.arrays import BFLOAT16
from attnforge.atomic import temporary_folder
from attnforge.bench.contenders.peers import torch_runner
from attnforge.bundle import FLAVOURS, Bundle
from attnforge.children import environment
from attnforge.errors import RunError, UnavailableError
from attnforge.export.deploy import deploy
from attnforge.machine import compute_capability
from attnforge.model.registry import MODELS, Example, build_model
from attnforge.precision import precision_named
from attnforge.runtime.backends.eager import at_precision
from attnforge.runtime.backends.registry import why_unavailable
from attnforge.runtime.parity.results import verify_results
from attnforge.runtime.parity.verify import BackendReport, hold
from attnforge.runtime.plans import engine_for
from attnforge.runtime.session import load
from attnforge.serving.polygraphy.folder import BUNDLE, INPUTS, package
from benchmarks.gpu import steps
from benchmarks.gpu.device import BY_QUICK, Device
from benchmarks.gpu.lean import plans
from benchmarks.gpu.models import patch_attention, targets_of
from benchmarks.gpu.running import NO_TIME, Task, attempt, device_lost, read, supervise, write
from benchmarks.gpu.steps import COMPILE, EAGER, WHOLE, GpuResults, Item, ParityCheck, Settings, StepResult

POLYGRAPHY = "import sys; from polygraphy.tools import main; sys.exit(main())"


def second_opinion(bundle: Bundle, flavour: str, device: int, scratch: Path, seconds: float) -> BackendReport:
    """Return the parity report on a bundle's plan that Polygraphy runs.

    Args:
        bundle: a bundle deployed for the flavour.
        flavour: `tensorrt` or `tensorrt_rtx`.
        device: number of the CUDA device.
        scratch: folder to write to.
        seconds: timeout of Polygraphy.

    Raises:
        UnavailableError: the bundle has no plan for this device, or tensors of a type that NumPy lacks.
        RunError: Polygraphy failed; with its message.
        subprocess.TimeoutExpired: it did not end in time.
    """
    if any(spec.dtype == BFLOAT16.name for spec in bundle.manifest.inputs + bundle.manifest.outputs):
        raise UnavailableError("NumPy has no bfloat16, and Polygraphy's results of other libraries are pickles")
    version = importlib.import_module(flavour).__version__
    engine = engine_for(bundle.manifest.targets[flavour].engines, version, compute_capability(device))
    if isinstance(engine, str):
        raise UnavailableError(engine)
    variables = {
        "POLYGRAPHY_USE_TENSORRT_RTX": str(int(flavour == "tensorrt_rtx")),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [_cuda_runtime(), os.environ.get("LD_LIBRARY_PATH")])),
    }
    if device:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        variables["CUDA_VISIBLE_DEVICES"] = visible.split(",")[device].strip() if visible else str(device)
    return judged(bundle, engine.file, ["--trt"], variables, flavour, scratch, seconds)


def _cuda_runtime() -> str | None:
    """Return the folder of CUDA's runtime library, which Polygraphy searches only in the library path."""
    with suppress(ImportError, RuntimeError):
        library = importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib("cudart")
        return str(Path(library.abs_path).parent) if library.abs_path else None
    return None


def judged(
    bundle: Bundle,
    model: str,
    runner: Sequence[str],
    variables: Mapping[str, str],
    backend: str,
    scratch: Path,
    seconds: float,
) -> BackendReport:
    """Return the parity report on a model of a bundle that a Polygraphy runner runs.

    Args:
        bundle: the bundle, whose cases are run.
        model: file in the bundle.
        runner: Polygraphy's option for the runner, with the runner's options.
        variables: environment variables.
        backend: backend whose budget applies.
        scratch: folder to write to.
        seconds: timeout of Polygraphy.

    Raises:
        RunError: it failed; with its message.
        subprocess.TimeoutExpired: it did not end in time.
    """
    packaged, results = scratch / f"{bundle.path.name}.package", scratch / f"{bundle.path.name}.{backend}.json"
    if not packaged.exists():
        package(bundle, packaged)
    files = [
        str(packaged / BUNDLE / model), *runner, "--load-inputs", str(packaged / INPUTS), "--save-outputs", str(results)
    ]  # fmt: skip
    with temporary_folder() as folder:
        done = subprocess.run(
            [sys.executable, "-P", "-c", POLYGRAPHY, "run", *files],
            env=environment({**variables, "POLYGRAPHY_AUTOINSTALL_DEPS": "0"}),
            cwd=folder, capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    if done.returncode != 0 or not results.exists():
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        last = next((line for line in lines if "[!]" in line), lines[-1] if lines else "no output")
        raise RunError(f"polygraphy run exited with code {done.returncode}: {last}")
    (report,) = verify_results(packaged / BUNDLE, results, backend).backends.values()
    return report


# --- every model on every backend -------------------------------------------------------------------------------------


PRECISIONS_TRIED = ("fp16", "fp32", "bf16", "tf32")
MODELS_FIRST = (
    "vit", "patch-attention", "multi-head-attention", "transformer-encoder", "cross-attention",
    "patch-attention-digits", "self-attention", "multi-head-self-attention",
)  # fmt: skip
COMPARED = ("vit", "patch-attention", "multi-head-attention")
"""Models for which eager and torch.compile on the device, and the plans in Polygraphy, are checked too."""


def models() -> list[str]:
    """Return every registered model, the most important ones first."""
    return list(dict.fromkeys([*MODELS_FIRST, *MODELS]))


def keys_of(model: str, precisions: Sequence[str] = PRECISIONS_TRIED) -> list[str]:
    """Return the tasks of a model, in order."""
    keys = [f"{model}, {precision}" for precision in precisions]
    return keys + ([f"{key}, torch" for key in keys] if model in COMPARED else [])


def chosen_keys(model: str, quick: bool) -> list[str]:
    """Return the tasks of a model to run: in a quick run, two precisions of the first models."""
    if not quick:
        return keys_of(model)
    return keys_of(model, PRECISIONS_TRIED[:2]) if model in MODELS_FIRST[:4] else []


def supervise_models(settings: Settings) -> None:
    """Check every registered model in every precision on every backend: one process per model, several at once, each
    with its own results, which are merged when it has ended."""
    results = read(settings.out)
    record = results.steps["parity"] = StepResult()
    attempt(record.failed, WHOLE, partial(_supervise_each, settings, results, record))
    write(results, settings.out)


def _supervise_each(settings: Settings, results: GpuResults, record: StepResult) -> None:
    workers = max(min(10, (os.cpu_count() or 1) * 2 // 3), 1)
    threads = max((os.cpu_count() or 1) // workers, 1)

    def supervised(model: str) -> StepResult:
        folder = Path(tempfile.mkdtemp(prefix=f"parity-{model}-", dir=settings.scratch))
        write(GpuResults(steps={"environment": results.steps.get("environment", StepResult())}), folder)
        changed = {"out": str(folder), "scratch": str(folder), "threads": threads}
        supervise(settings.model_copy(update=changed), f"parity:{model}")
        return read(folder).steps[f"parity:{model}"]

    chosen = {model: keys for model in models() if (keys := chosen_keys(model, settings.quick))}
    record.planned = [key for keys in chosen.values() for key in keys]
    every = [key for model in models() for key in keys_of(model)]
    record.left_out = {key: BY_QUICK for key in every if key not in record.planned}
    with ThreadPoolExecutor(workers) as pool:
        for (model, keys), taken in zip(chosen.items(), pool.map(supervised, chosen), strict=True):
            record.items |= taken.items
            record.failed |= {f"{model}, {what}": why for what, why in taken.failed.items()}
            why_whole = taken.left_out.get(WHOLE, "its process failed")
            for key in keys:
                if key in taken.left_out or key not in taken.items:
                    record.left_out[key] = taken.left_out.get(key, why_whole)
            write(results, settings.out)


def parity_of(device: Device, model: str) -> list[Task]:
    """Return the tasks of one model: every precision on every backend, then torch on the device."""
    verifies = {True: _verify_torch, False: _verify}
    keys = chosen_keys(model, device.settings.quick)
    return [(key, partial(verifies[key.endswith(", torch")], device, model, key.split(", ")[1])) for key in keys]


@cache
def _bundle(device: Device, model: str, precision: str) -> Bundle:
    """Return the model's bundle: the one that another machine deployed, if there is one and its plan for every device
    works here; otherwise deployed as a user would, once for all processes of the step."""
    wanted = steps.capabilities(device.run.results)
    if device.settings.bundles is not None and not wanted:
        elsewhere = Path(device.settings.bundles) / f"{model}-{precision}"
        if elsewhere.exists():
            return Bundle(elsewhere)
    folder = Path(device.settings.scratch) / f"{model}-{precision}"
    if folder.exists():
        return Bundle(folder)
    usable = targets_of(device.usable(Item(), device.settings.backends))
    return _deploy(model, precision, folder, [name for name in usable if not on_lean_runtime(name)], wanted)


def on_lean_runtime(backend: str) -> bool:
    """Return whether a backend is TensorRT's lean runtime, whose bundles no other backend can run."""
    return backend == "tensorrt" and plans.in_use()


def _for_lean_runtime(device: Device, model: str, precision: str) -> Bundle:
    """Return the model's bundle for TensorRT's lean runtime.

    Raises:
        UnavailableError: TensorRT 8.6 has not the precision, or refuses the model.
    """
    if precision == "bf16":
        raise UnavailableError("TensorRT 8.6 has no bf16 in networks that are not strongly typed")
    folder = Path(device.settings.scratch) / f"lean-{model}-{precision}"
    _deploy(model, precision, folder, ["tensorrt_rtx"], ["SM80"])
    return plans.add_plan(folder)


def _deploy(
    model: str, precision: str, folder: Path, targets: Sequence[str] | None = None, wanted: Sequence[str] = ()
) -> Bundle:
    module, args, shapes = small(model)
    return deploy(
        module, args, folder, shapes, precision, targets, model,
        compute_capabilities=wanted, tune=False, cache=False,
    )  # fmt: skip


def deploy_all(folder: Path) -> None:
    """Deploy every registered model in every precision to `FOLDER/MODEL-PRECISION`; bundles that exist are kept.

    This needs no GPU: TensorRT-RTX's plan is portable.
    """
    for model in models():
        for precision in PRECISIONS_TRIED:
            if not (bundle := folder / f"{model}-{precision}").exists():
                _deploy(model, precision, bundle)


def small(model: str) -> Example:
    """Return a registered model; patch-attention with small images, because it runs in float64 on the CPU here."""
    return patch_attention() if model == "patch-attention" else build_model(model)


def _verify(device: Device, model: str, precision: str, item: Item) -> None:
    bundle = _bundle(device, model, precision)
    item.values |= {f"fused by {name}": count for name, count in bundle.manifest.attention.fused.items()}
    for backend in device.settings.backends:
        lean = backend not in device.why_not and on_lean_runtime(backend)
        reason = device.why_not.get(backend)
        if reason is None and not lean:
            reason = why_unavailable(bundle, backend, device.settings.device)
        if reason is not None:
            item.skipped[backend] = reason
            continue

        def check(backend: str = backend, lean: bool = lean) -> None:
            held = _for_lean_runtime(device, model, precision) if lean else bundle
            with load(held, backend, device=device.settings.device) as session:
                item.checks[backend] = check_of(hold(session.bundle, session.backend, session.run))

        attempt(item.failed, backend, check)
        if model in COMPARED and backend in FLAVOURS and not lean:
            _ask_polygraphy(device, bundle, backend, item)
        device.run.save()
        if item.failed and device_lost():
            return


def _ask_polygraphy(device: Device, bundle: Bundle, flavour: str, item: Item) -> None:
    """Check the same plan in Polygraphy's TrtRunner, in its own process."""
    settings, name = device.settings, steps.opinion_of(flavour)

    def check() -> None:
        try:
            report = second_opinion(bundle, flavour, settings.device, Path(settings.scratch), device.run.left)
            item.checks[name] = check_of(report)
        except UnavailableError as error:
            item.skipped[name] = str(error)
        except subprocess.TimeoutExpired:
            item.skipped[name] = NO_TIME

    attempt(item.failed, name, check)


def _verify_torch(device: Device, model: str, precision: str, item: Item) -> None:
    """Check eager and torch.compile on the device, against the same budget in the same cases."""
    if not device.peers:
        item.skipped["torch"] = "torch has no CUDA here"
        return
    p = precision_named(precision)
    bundle = _bundle(device, model, precision)
    module = at_precision(small(model).module, p).to(device.name)
    for name in (EAGER, COMPILE):

        def check(name: str = name) -> None:
            torch.compiler.reset()
            run = torch.compile(module, dynamic=True) if name == COMPILE else module
            with device.products(p):
                item.checks[name] = check_of(hold(bundle, name, torch_runner(run, p, device.name)))

        attempt(item.failed, name, check)


def check_of(report: BackendReport) -> ParityCheck:
    """Return the record of a backend's report, with up to three failures."""
    reasons = [f"{failure.case}, {failure.output}: {failure.reason}" for failure in report.failures[:3]]
    reason = "; ".join(reasons) or (None if report.passed else report.case)
    return ParityCheck(
        passed=report.passed, error=report.error, budget=report.budget, cases=report.cases, reason=reason
    )


if __name__ == "__main__":
    typer.run(deploy_all)
