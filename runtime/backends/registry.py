"""The registry of backends: one row each, with what it needs of this machine and of a bundle, and how it is opened.

A backend's own file is imported when the backend is opened, because most of them import libraries that need not be
installed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from attnforge.bundle import CANONICAL, FLAVOURS, OF_PACKAGES, Bundle, Certificate
from attnforge.errors import UnavailableError
from attnforge.machine import compute_capability, cuda_devices
from attnforge.runtime.backends.backend import PROVIDERS, Backend
from attnforge.runtime.backends.outside import Outside, Target, installed
from attnforge.runtime.backends.whole_sequences import STEPPING, as_model
from attnforge.runtime.options import Options
from attnforge.runtime.plans import engine_for, is_trusted_plan

log = logging.getLogger("attnforge")


@dataclass(frozen=True)
class Registered:
    """A backend, before it is opened.

    Attributes:
        name: name of the backend as users write it.
        libraries: distribution names of the packages whose versions affect its speed and results.
        on_gpu: whether it computes on a CUDA device.
        why_not_here: given the name, the reason why this machine cannot run it whatever the bundle, or None.
        why_not_bundle: given a bundle, the name and the number of the CUDA device, the reason why it cannot run the
            bundle here, or None.
        open: opens a bundle for which `why_not_bundle` gives no reason.
        certified: the entry of the bundle's certificate that counts what this backend compiled; None if the bundle has
            no such count.
        uncertified: why the bundle has no such count.
        has_target: whether a bundle is deployed for it by name. A backend without a target runs the canonical graph, or
            a separate graph; if it misses the budget, another backend may still meet it.
    """

    name: str
    libraries: tuple[str, ...]
    on_gpu: bool
    why_not_here: Callable[[str], str | None]
    why_not_bundle: Callable[[Bundle, str, int], str | None]
    open: Callable[[Bundle, str, Options], Backend]
    certified: str | None = None
    uncertified: str = ""
    has_target: bool = True


def why_unavailable(bundle: Bundle, backend: str, device: int = 0) -> str | None:
    """Why `backend` cannot run `bundle` on this machine and its CUDA device `device`, or None."""
    if bundle.manifest.decoding is not None and backend not in STEPPING:
        return f"decoder steps run on {', '.join(STEPPING)} only; {backend} has no caches that are updated in place"
    return REGISTRY[backend].why_not_bundle(bundle, backend, device)


def why_not_unasked(bundle: Bundle, backend: str, device: int = 0) -> str | None:
    """Why `backend` does not run `bundle` here for a caller who has not named it, or None.

    In addition to what :func:`why_unavailable` says: a plan may run code, so without being named it is loaded only if
    it is trusted.
    """
    if (reason := why_unavailable(bundle, backend, device)) is not None:
        return reason
    if backend in OUTSIDE:
        return None if bundle.trusted or not OUTSIDE[backend].runs_code else FOREIGN.format(backend)
    if backend not in FLAVOURS:
        return None
    version = importlib.import_module(backend).__version__
    engine = engine_for(bundle.manifest.targets[backend].engines, version, compute_capability(device))
    return engine if isinstance(engine, str) else None if is_trusted_plan(bundle, engine) else STRANGERS.format(backend)


def why_not_here(backend: str) -> str | None:
    """Why this machine cannot run `backend`, whatever the bundle, or None."""
    return REGISTRY[backend].why_not_here(backend)


def open_backend(bundle: Bundle, backend: str, options: Options) -> Backend:
    """Open a backend of `bundle` for which :func:`why_unavailable` gives no reason.

    Raises:
        UnavailableError: its library refuses the bundle's model or plan after all.
        BundleError: a file that it needs is missing or altered.
    """
    return as_model(REGISTRY[backend].open(bundle, backend, options), bundle.manifest)


def open_first(bundle: Bundle, candidates: Sequence[str], options: Options, *, named: bool = True) -> Backend:
    """Open the first of `candidates` that runs here. Whether a plan can be loaded is known only once it is tried.

    Args:
        bundle: the bundle to open.
        candidates: backends, in order of preference.
        options: options of the session.
        named: whether the caller named them; otherwise untrusted plans are skipped.

    Raises:
        UnavailableError: none runs here; gives the reason for each.
    """
    reasons: dict[str, str] = {}
    for candidate in candidates:
        reason = (why_unavailable if named else why_not_unasked)(bundle, candidate, options.device)
        if reason is not None and reason == STRANGERS.format(candidate):
            log.warning("%s is not loaded on %s: %s", bundle.path, candidate, reason)
        if reason is None:
            try:
                backend = open_backend(bundle, candidate, options)
            except UnavailableError as error:
                reason = str(error)
            else:
                skipped = "".join(f"; not {name}: {why}" for name, why in reasons.items())
                log.info("%s runs on %s%s", bundle.manifest.name, candidate, skipped)
                return backend
        reasons[candidate] = reason
    raise UnavailableError("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))


def fused_by(certificate: Certificate, backend: str) -> int | str:
    """The number of attention sites that `backend` runs as one kernel each, by the certificate; or the reason why it is
    not known.

    A count is valid only for the backend that it was taken from: ONNX Runtime's is of the graph that its CPU provider
    compiled, and says nothing about its CUDA or TensorRT provider.
    """
    row = REGISTRY[backend]
    if row.certified is None:
        return row.uncertified
    return certificate.fused.get(row.certified, f"the bundle was not deployed for {row.certified}")


def libraries_of(backends: Sequence[str]) -> list[str]:
    """The packages that `backends` depend on, sorted."""
    return sorted({package for name in backends for package in REGISTRY[name].libraries})


# --- what this machine lacks ------------------------------------------------------------------------------------------

STRANGERS = (
    "its plan was not built by this user, and plans can run code; if you trust who built it, name the backend {!r} or "
    "the key that signed the bundle (trusted=…, ATTNFORGE_TRUSTED), otherwise build your own plan with rebuild=True"
)
FOREIGN = (
    "its file may hold code; if you trust who made the bundle, name the backend {!r} or the key that signed the bundle "
    "(trusted=…, ATTNFORGE_TRUSTED)"
)
NO_DEVICE = "no CUDA device: {} plans can be built and inspected without one, but run only on an NVIDIA GPU"
UNSUPPORTED = "{} {} does not support this GPU: its compute capability is {}, and the supported ones are {}"


def _nothing(backend: str) -> str | None:
    return None


def _no_tensorrt(backend: str) -> str | None:
    return _no_package(backend) or _no_gpu(backend, 0)


def _no_gpu(backend: str, device: int) -> str | None:
    """Why a flavour of TensorRT that is installed cannot run any plan on a CUDA device, or None."""
    if cuda_devices() == 0:
        return NO_DEVICE.format(backend)
    if backend != "tensorrt_rtx":
        return None
    # It lists what it supports, and loads no plan elsewhere, whatever the plan was built for.
    library, here = importlib.import_module(backend), compute_capability(device)
    supported = [name for name in dir(library.ComputeCapability) if name.startswith("SM")]
    return None if here in supported else UNSUPPORTED.format(backend, library.__version__, here, ", ".join(supported))


def _no_package(backend: str) -> str | None:
    try:
        importlib.import_module(backend)
    except ImportError as error:
        package = "tensorrt_rtx" if backend == "tensorrt_rtx" else "attnforge[tensorrt]"
        return f"{backend} is not installed ({error}); pip install {package}"
    return None


def _no_provider(backend: str) -> str | None:
    import onnxruntime as ort

    if PROVIDERS[backend] not in ort.get_available_providers():
        return f"this onnxruntime has no {PROVIDERS[backend]}; pip install onnxruntime-gpu"
    return "no CUDA device" if cuda_devices() == 0 else None


def _no_tensorrt_provider(backend: str) -> str | None:
    if (reason := _no_provider(backend)) is not None:
        return reason
    if not _has_nvinfer():
        return "its provider needs TensorRT 10's library libnvinfer.so.10, which is missing; pip install 'tensorrt<11'"
    return None


@functools.cache
def _has_nvinfer() -> bool:
    """Whether the TensorRT that ONNX Runtime is built for can be loaded; tensorrt's wheel includes it."""
    with suppress(ImportError):
        importlib.import_module("tensorrt")
    try:
        ctypes.CDLL("libnvinfer.so.10")
    except OSError:
        return False
    return True


@functools.cache
def _no_openvino(backend: str) -> str | None:
    try:
        import openvino

        openvino.Core().get_property("CPU", "FULL_DEVICE_NAME")
    except (ImportError, RuntimeError) as error:
        return f"openvino is not installed, or finds no supported CPU ({error}); pip install attnforge[openvino]"
    return None


# --- availability of a bundle's backends ------------------------------------------------------------------------------


def _no_plan(bundle: Bundle, backend: str, device: int) -> str | None:
    if backend not in bundle.manifest.targets:
        skipped = bundle.manifest.skipped.get(backend, f"deploy it again with --target {backend}")
        return f"the bundle has no plan for {backend}: {skipped}"
    if (reason := _no_package(backend)) is not None:
        return reason
    version = importlib.import_module(backend).__version__
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
    if (reason := _no_gpu(backend, device)) is not None:
        return reason
    engine = engine_for(engines, version, compute_capability(device))
    return engine if isinstance(engine, str) else None


def _no_onnxruntime_model(bundle: Bundle, backend: str, device: int) -> str | None:
    if "onnxruntime" not in bundle.manifest.targets:
        return "the bundle was not deployed for onnxruntime; deploy it again with --target onnxruntime"
    return why_not_here(backend)


def _no_tensorrt_model(bundle: Bundle, backend: str, device: int) -> str | None:
    if not any(flavour in bundle.manifest.targets for flavour in FLAVOURS):
        return "the bundle has no model for TensorRT; deploy it again with --target tensorrt_rtx, or tensorrt"
    return why_not_here(backend)


def _no_library(bundle: Bundle, backend: str, device: int) -> str | None:
    return why_not_here(backend)  # every bundle contains the canonical graph


def _not_deployed(bundle: Bundle, backend: str, device: int) -> str | None:
    record = bundle.manifest.targets.get(backend)
    if record is None or not (record.model == CANONICAL or record.model.startswith(f"{OF_PACKAGES}/{backend}/")):
        return f"the bundle was not deployed for {backend}; deploy it again with --target {backend}"
    return why_not_here(backend)


# --- how each is opened -----------------------------------------------------------------------------------------------


def _tensorrt(bundle: Bundle, backend: str, options: Options) -> Backend:
    from attnforge.runtime.backends.tensorrt import TensorRT

    return TensorRT(bundle, backend, options)


def _onnxruntime_gpu(bundle: Bundle, backend: str, options: Options) -> Backend:
    from attnforge.runtime.backends.onnxruntime_gpu import OnnxRuntimeGpu

    return OnnxRuntimeGpu(bundle, backend, options)


def _onnxruntime(bundle: Bundle, backend: str, options: Options) -> Backend:
    from attnforge.runtime.backends.onnxruntime import open_bundle

    return open_bundle(bundle, options)


def _openvino(bundle: Bundle, backend: str, options: Options) -> Backend:
    from attnforge.runtime.backends.openvino import open_bundle

    return open_bundle(bundle, options)


def _outside(bundle: Bundle, backend: str, options: Options) -> Backend:
    manifest = bundle.manifest
    with bundle.steady():
        file = bundle.file(manifest.targets[backend].model)
        return Outside(OUTSIDE[backend], file, manifest.graph_inputs, manifest.graph_outputs, options.threads)


def _of_package(target: Target) -> Registered:
    return Registered(
        target.name, tuple(target.libraries), False, lambda name: target.why_unusable(), _not_deployed, _outside,
        uncertified="its package does not report what it fuses",
    )  # fmt: skip


# --- the table --------------------------------------------------------------------------------------------------------

ORT = ("onnxruntime", "onnxruntime-gpu")

REGISTRY = {
    row.name: row
    for row in (
        Registered("tensorrt", ("tensorrt",), True, _no_tensorrt, _no_plan, _tensorrt, certified="tensorrt"),
        Registered(
            "tensorrt_rtx", ("tensorrt_rtx",), True, _no_tensorrt, _no_plan, _tensorrt, certified="tensorrt_rtx"
        ),
        Registered(
            "onnxruntime-tensorrt", (*ORT, "tensorrt"), True, _no_tensorrt_provider, _no_tensorrt_model,
            _onnxruntime_gpu, uncertified="its provider compiles when a session first runs, so nothing was counted",
        ),
        Registered(
            "onnxruntime-cuda", ORT, True, _no_provider, _no_onnxruntime_model, _onnxruntime_gpu,
            uncertified="ONNX Runtime's fused sites were counted on the CPU, not for its CUDA provider",
        ),
        Registered(
            "onnxruntime-cpu", ORT, False, _nothing, _no_onnxruntime_model, _onnxruntime, certified="onnxruntime"
        ),
        Registered(
            "openvino", ("openvino",), False, _no_openvino, _no_library, _openvino, has_target=False,
            uncertified="it does not report what it fuses",
        ),
    )
}  # fmt: skip
"""Every backend by name, in the order in which `auto` prefers them if nothing was measured."""

OUTSIDE = installed((*REGISTRY, "auto", "eager", "onnxruntime"))
"""The targets of other packages, by name; each is a backend as well, after all others."""
REGISTRY |= {name: _of_package(target) for name, target in OUTSIDE.items()}

BACKENDS = tuple(REGISTRY)
ON_GPU = tuple(name for name, row in REGISTRY.items() if row.on_gpu)
WITHOUT_TARGET = tuple(name for name, row in REGISTRY.items() if not row.has_target)
