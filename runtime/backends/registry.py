"""The registry of backends, one row each; what keeps a backend from running a bundle here; and the order in which
`auto` tries them."""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

from attnforge.bundle import FLAVOURS, Bundle, Certificate, Choice, Engine, Manifest
from attnforge.errors import UnavailableError
from attnforge.machine import compute_capability, cuda_devices, this_machine, versions
from attnforge.runtime.backends.backend import CUDA_PROVIDER, Backend, Options, Registered, installed
from attnforge.runtime.backends.whole_sequences import as_model
from attnforge.runtime.plans import engine_for, is_trusted_plan

log = logging.getLogger("attnforge")


def why_unavailable(bundle: Bundle, backend: str, device: int = 0) -> str | None:
    """Why `backend` cannot run `bundle` on this machine and its CUDA device `device`, or None."""
    if bundle.manifest.decoding is not None and backend not in STEPPING:
        return f"decoder steps run on {', '.join(STEPPING)} only; {backend} has no caches that are updated in place"
    if bundle.manifest.decoding is not None and backend in ON_GPU and not bundle.manifest.decoding.cuda:
        return (
            "the bundle has no step for CUDA: an earlier version deployed it, or its caches are in 8 bits; deploy it "
            "again without --cache-precision"
        )
    if backend in FLAVOURS:
        plan = _plan(bundle, backend, device)
        return plan if isinstance(plan, str) else None
    try:
        REGISTRY[backend].model(bundle.manifest)
    except UnavailableError as error:
        return str(error)
    return why_not_here(backend)


def why_not_unasked(bundle: Bundle, backend: str, device: int = 0) -> str | None:
    """Why `backend` does not run `bundle` here for a caller who has not named it, or None.

    In addition to what :func:`why_unavailable` says: a plan may run code, so without being named it is loaded only if
    it is trusted.
    """
    if (reason := why_unavailable(bundle, backend, device)) is not None:
        return reason
    if backend in OUTSIDE and OUTSIDE[backend].runs_code and not bundle.trusted:
        return FOREIGN.format(backend)
    if backend not in FLAVOURS:
        return None
    plan = _plan(bundle, backend, device)
    return None if isinstance(plan, Engine) and is_trusted_plan(bundle, plan) else STRANGERS.format(backend)


def why_not_here(backend: str) -> str | None:
    """Why this machine cannot run `backend`, whatever the bundle, or None."""
    return REGISTRY[backend].why_not_here(backend)


def open_backend(bundle: Bundle, backend: str, options: Options) -> Backend:
    """Open a backend of `bundle` for which :func:`why_unavailable` gives no reason.

    Raises:
        UnavailableError: its library refuses the bundle's model or plan after all.
        BundleError: a file that it needs is missing or altered.
    """
    return as_model(REGISTRY[backend].open(bundle, options), bundle.manifest)


CRASHED = "its process"
"""How a reason begins why a backend was left out that ended its process."""


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
    known = bundle.manifest.choice
    for candidate in candidates:
        reason = (why_unavailable if named else why_not_unasked)(bundle, candidate, options.device)
        if reason == STRANGERS.format(candidate):
            log.warning("%s is not loaded on %s: %s", bundle.path, candidate, reason)
        why = known.dropped.get(candidate) if known is not None else None
        if why is not None and chosen_here(bundle) is None:
            why = None
        if reason is None and why is not None and why.startswith(CRASHED):
            reason = f"{why} when the bundle was deployed on this machine"
        if reason is None:
            try:
                backend = open_backend(bundle, candidate, options)
            except UnavailableError as error:
                reason = str(error)
            else:
                skipped = "".join(f"; not {name}: {why}" for name, why in reasons.items())
                log.info("%s runs on %s%s", bundle.manifest.name, candidate, skipped)
                if why is not None:
                    log.warning("%s on %s was left out by deploy on this machine: %s", bundle.path, candidate, why)
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
    return row.uncertified or certificate.fused.get(row.family, f"the bundle was not deployed for {row.family}")


def libraries_of(backends: Sequence[str]) -> list[str]:
    """The packages that `backends` depend on, sorted."""
    return sorted({package for name in backends for package in REGISTRY[name].libraries})


# --- the backends that `auto` tries -----------------------------------------------------------------------------------


def by_preference(bundle: Bundle) -> list[str]:
    """The backends that `auto` tries, in order.

    On the machine that deployed the bundle: the backends that were measured there, those on a GPU first, each group
    from the fastest on (a decoder's by time alone); then the others in the registry's order, without those that missed
    the budget. Elsewhere: the registry's order; if no backend met the budget, those that missed it come last. A backend
    without a target in the bundle is tried only if it was measured.
    """
    choice, by_rule = chosen_here(bundle), [name for name, row in REGISTRY.items() if row.targets]
    if choice is None:
        return by_rule
    measured = fastest_first(choice.milliseconds, bundle.manifest)
    left = [name for name in by_rule if name not in measured and name not in choice.dropped]
    return [*measured, *left] if measured else [*left, *(name for name in by_rule if name in choice.dropped)]


def chosen_here(bundle: Bundle) -> Choice | None:
    """The measurements from the deploy; None if it was on another machine or with other versions of the backends'
    libraries. Queries CUDA for its devices."""
    choice = bundle.manifest.choice
    if choice is None or choice.machine != this_machine():
        return None
    if not {*choice.milliseconds, *choice.dropped} <= set(BACKENDS):  # from another version of attnforge, or altered
        return None
    return choice if choice.versions == versions(libraries_of([*choice.milliseconds, *choice.dropped])) else None


def fastest_first(milliseconds: Mapping[str, float], manifest: Manifest) -> list[str]:
    """Backends on a GPU, where callers' arrays stay, before those on the CPU, except for decoders, which take arrays on
    the host; then by time."""
    takes_device_arrays = manifest.decoding is None
    return sorted(milliseconds, key=lambda name: (takes_device_arrays and name not in ON_GPU, milliseconds[name]))


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
NO_DRIVER = "no CUDA device: it runs only on an NVIDIA GPU, with its driver"
LEAST = {"onnxruntime": (1, 30), "openvino": (2026, 3)}
"""The first release of a library that computes attention correctly (`python -m benchmarks run matrix`) and does not
abort: ONNX Runtime 1.28 and 1.29 end the process when they open an encoder in int8."""
WRONG = "{} {} computes some forms of attention wrongly, or aborts; pip install --upgrade '{}>={}.{}'"
UNSUPPORTED = "{} {} does not support this GPU: its compute capability is {}, and the supported ones are {}"


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
        package = "tensorrt_rtx" if backend == "tensorrt_rtx" else "'attnforge[tensorrt]'"
        return f"{backend} is not installed ({error}); pip install {package}"
    return None


def too_old(library: str, version: str) -> str | None:
    """Why a release of a library is not used, or None."""
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= LEAST[library]:
        return None
    package = next(iter(versions([f"{library}-gpu"])), library)
    return WRONG.format(library, version.partition("-")[0], package, *LEAST[library])


def _no_onnxruntime(backend: str) -> str | None:
    import onnxruntime as ort

    provider = REGISTRY[backend].provider
    if (reason := too_old("onnxruntime", ort.__version__)) is not None or not provider:
        return reason
    if provider not in ort.get_available_providers():
        return f"this onnxruntime has no {provider}; pip install onnxruntime-gpu"
    if cuda_devices() == 0:
        return NO_DRIVER
    if provider != CUDA_PROVIDER:
        with suppress(ImportError):
            importlib.import_module("tensorrt")  # whose wheel includes the library
        try:
            ctypes.CDLL("libnvinfer.so.10")
        except OSError:
            needed = "its provider needs TensorRT 10's library libnvinfer.so.10"
            return f"{needed}, which is missing; pip install 'tensorrt<11'"
    return None


@functools.cache
def _no_openvino(backend: str) -> str | None:
    try:
        import openvino

        openvino.Core().get_property("CPU", "FULL_DEVICE_NAME")
    except (ImportError, RuntimeError) as error:
        return f"openvino is not installed, or finds no supported CPU ({error}); pip install 'attnforge[openvino]'"
    return too_old("openvino", openvino.__version__)


# --- availability of a bundle's backends ------------------------------------------------------------------------------


def _plan(bundle: Bundle, backend: str, device: int) -> Engine | str:
    """The plan that a device runs, or the reason why there is none."""
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
    return engine_for(engines, version, compute_capability(device))


# --- the table --------------------------------------------------------------------------------------------------------

ORT = ("onnxruntime", "onnxruntime-gpu")

REGISTRY = {
    row.name: row
    for row in (
        *(
            Registered(flavour, flavour, (flavour,), "tensorrt:TensorRT", _no_tensorrt, (flavour,), on_gpu=True)
            for flavour in FLAVOURS
        ),
        Registered(
            "onnxruntime-tensorrt", "onnxruntime", (*ORT, "tensorrt"), "onnxruntime_gpu:OnnxRuntimeGpu",
            _no_onnxruntime, FLAVOURS, on_gpu=True, provider="TensorrtExecutionProvider",
            uncertified="its provider compiles when a session first runs, so nothing was counted",
        ),
        Registered(
            "onnxruntime-cuda", "onnxruntime", ORT, "onnxruntime_gpu:OnnxRuntimeGpu", _no_onnxruntime,
            ("onnxruntime",), on_gpu=True, provider=CUDA_PROVIDER, steps=True,
            uncertified="ONNX Runtime's fused sites were counted on the CPU, not for its CUDA provider",
        ),
        Registered(
            "onnxruntime-cpu", "onnxruntime", ORT, "onnxruntime:open_bundle", _no_onnxruntime,
            ("onnxruntime",), steps=True,
        ),
        Registered(
            "openvino", "openvino", ("openvino",), "openvino:OpenVino", _no_openvino, steps=True,
            uncertified="it does not report what it fuses",
        ),
    )
}  # fmt: skip
"""Every backend by name, in the order in which `auto` prefers them if nothing was measured."""

OUTSIDE = installed((*REGISTRY, "auto", "eager", "onnxruntime"))
"""The targets of other packages, by name; each is a backend as well, after all others."""
REGISTRY |= {
    name: Registered(
        name, name, tuple(target.libraries), "backend:Outside", lambda name: OUTSIDE[name].why_unusable(), (name,),
        uncertified="its package does not report what it fuses", target=target,
    )
    for name, target in OUTSIDE.items()
}  # fmt: skip

BACKENDS = tuple(REGISTRY)
ON_GPU = tuple(name for name, row in REGISTRY.items() if row.on_gpu)
STEPPING = tuple(name for name, row in REGISTRY.items() if row.steps)
"""The backends that run steps of a decoder."""
