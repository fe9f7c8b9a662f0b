"""The deployed backends: which of them this machine can run, and why not the others."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from attnforge.bundle import FLAVOURS, Bundle, Choice
from attnforge.errors import UnavailableError
from attnforge.machine import compute_capability, cuda_devices, this_machine
from attnforge.runtime.backends.backend import BACKENDS, LIBRARIES, ON_GPU, PROVIDERS, WITHOUT_TARGET, Backend
from attnforge.runtime.options import Options
from attnforge.runtime.plans import engine_for

log = logging.getLogger("attnforge")


def why_unavailable(bundle: Bundle, backend: str, device: int = 0) -> str | None:
    """Why `backend` cannot run `bundle` on this machine, or None."""
    if backend in FLAVOURS:
        return _why_no_tensorrt(bundle, backend, device)
    if backend in WITHOUT_TARGET:
        return why_no_provider(backend)
    if backend == "onnxruntime-tensorrt" and not any(flavour in bundle.manifest.targets for flavour in FLAVOURS):
        return "the bundle has no model for TensorRT; deploy it again with --target tensorrt_rtx, or tensorrt"
    if backend != "onnxruntime-tensorrt" and "onnxruntime" not in bundle.manifest.targets:
        return "the bundle was not deployed for onnxruntime; deploy it again with --target onnxruntime"
    return why_no_provider(backend)


def why_no_provider(backend: str) -> str | None:
    """Why no model can run on `backend`, which is not TensorRT, on this machine, or None."""
    if backend == "onnxruntime-cpu":
        return None
    if backend == "openvino":
        return why_no_openvino()
    import onnxruntime as ort

    if PROVIDERS[backend] not in ort.get_available_providers():
        return f"this onnxruntime has no {PROVIDERS[backend]}; pip install onnxruntime-gpu"
    if cuda_devices() == 0:
        return "no CUDA device"
    if backend == "onnxruntime-tensorrt" and not _holds_nvinfer():
        return "its provider needs TensorRT 10's library libnvinfer.so.10, which is not here; pip install 'tensorrt<11'"
    return None


@functools.cache
def why_no_openvino() -> str | None:
    """Why this machine cannot run OpenVINO, or None."""
    try:
        import openvino

        openvino.Core().get_property("CPU", "FULL_DEVICE_NAME")
    except (ImportError, RuntimeError) as error:
        return f"openvino is not installed, or finds no CPU that it knows ({error}); pip install attnforge[openvino]"
    return None


@functools.cache
def _holds_nvinfer() -> bool:
    """Whether the TensorRT that ONNX Runtime is built for can be loaded; tensorrt's wheel brings it along."""
    with suppress(ImportError):
        importlib.import_module("tensorrt")
    try:
        ctypes.CDLL("libnvinfer.so.10")
    except OSError:
        return False
    return True


def _why_no_tensorrt(bundle: Bundle, backend: str, device: int) -> str | None:
    if backend not in bundle.manifest.targets:
        skipped = bundle.manifest.skipped.get(backend, f"deploy it again with --target {backend}")
        return f"the bundle holds no plan for {backend}: {skipped}"
    try:
        version = importlib.import_module(backend).__version__
    except ImportError as error:
        package = "tensorrt_rtx" if backend == "tensorrt_rtx" else "attnforge[tensorrt]"
        return f"{backend} is not installed ({error}); pip install {package}"
    engines = bundle.manifest.targets[backend].engines
    if not engines:
        return f"the bundle has no plan for {backend}; build it from the bundle's model with load(…, rebuild=True)"
    if all(engine.version != version for engine in engines):
        built = " and ".join(sorted({engine.version for engine in engines}))
        return (
            f"its plan was built by {backend} {built} and this machine has {version}, which may not load it; build it "
            f"again from the bundle's own model with load(…, {backend!r}, rebuild=True), or install "
            f"{backend}=={engines[0].version}"
        )
    if cuda_devices() == 0:
        return f"no CUDA device: {backend} plans are built and inspected without one, and run only on an NVIDIA GPU"
    chosen = engine_for(engines, version, compute_capability(device))
    return chosen if isinstance(chosen, str) else None


def versions(backends: Iterable[str]) -> dict[str, str]:
    """Of the packages of some backends that are installed."""
    found = {}
    for package in sorted({package for name in backends for package in LIBRARIES[name]}):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def chosen_here(bundle: Bundle) -> Choice | None:
    """What was measured when the bundle was deployed, where that was on this machine and with its libraries."""
    choice = bundle.manifest.choice
    if choice is None or choice.machine != this_machine():
        return None
    return choice if choice.versions == versions([*choice.milliseconds, *choice.dropped]) else None


def by_preference(bundle: Bundle) -> list[str]:
    """The backends that `auto` tries, in order: what was measured here, those on a GPU first, each from the fastest on,
    and then by rule; what missed the budget here not at all, where anything met it. What the bundle has no model for is
    loaded only where it was measured."""
    choice, ruled = chosen_here(bundle), [name for name in BACKENDS if name not in WITHOUT_TARGET]
    if choice is None or choice.picked is None:
        return ruled
    measured = fastest_first(choice.milliseconds)
    return [*measured, *(name for name in ruled if name not in measured and name not in choice.dropped)]


def fastest_first(milliseconds: Mapping[str, float]) -> list[str]:
    """Backends on a GPU, whose callers' arrays lie there and stay there, before those on the CPU; then by time."""
    return sorted(milliseconds, key=lambda name: (name not in ON_GPU, milliseconds[name]))


def open_first(bundle: Bundle, candidates: Sequence[str], options: Options) -> Backend:
    """The first of `candidates` that runs here; that a plan cannot be loaded after all is known when it is tried.

    Raises:
        UnavailableError: none does; says why of each.
    """
    reasons: dict[str, str] = {}
    for candidate in candidates:
        reason = why_unavailable(bundle, candidate, options.device)
        if reason is None:
            try:
                backend = open_backend(bundle, candidate, options)
            except UnavailableError as error:
                reason = str(error)
            else:
                passed_over = "".join(f"; not {name}: {why}" for name, why in reasons.items())
                log.info("%s runs on %s%s", bundle.manifest.name, candidate, passed_over)
                return backend
        reasons[candidate] = reason
    raise UnavailableError("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))


def open_backend(bundle: Bundle, backend: str, options: Options) -> Backend:
    """A backend of `bundle` that :func:`why_unavailable` has nothing against."""
    if backend in FLAVOURS:
        from attnforge.runtime.backends.tensorrt import TensorRT

        return TensorRT(bundle, backend, options)
    if backend in PROVIDERS:
        from attnforge.runtime.backends.onnxruntime_gpu import OnnxRuntimeGpu

        return OnnxRuntimeGpu(bundle, backend, options)
    if backend == "openvino":
        from attnforge.runtime.backends import openvino

        return openvino.open_bundle(bundle, options)
    from attnforge.runtime.backends.onnxruntime import open_bundle

    return open_bundle(bundle, options)
