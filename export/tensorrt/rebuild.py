"""TensorRT plans, built again from a bundle's own model: for another version, another device, or an altered file.

The bundle contains the model that TensorRT parses, with its sha256. A machine that has the builder builds a plan from
that model, without torch and without the source. New plans are added alongside the old ones, which other machines may
still load; only missing and altered plans are removed from the manifest.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os

from attnforge.atomic import locked, temporary_folder, write_whole
from attnforge.bundle import FLAVOURS, MANIFEST, PORTABLE, SIGNATURE, Bundle, Certificate, Engine, Trusted
from attnforge.errors import BundleError, ReplacedError, SignatureError, UnavailableError
from attnforge.export.tensorrt.build import Plan, build, load_tensorrt, profiles_of, softmax_of, timings_of
from attnforge.export.tensorrt.process import Request
from attnforge.machine import compute_capability, cuda_devices
from attnforge.runtime.plans import engine_for, is_trusted_plan

log = logging.getLogger("attnforge")


def rebuilt(
    bundle: str | os.PathLike[str] | Bundle, backend: str, device: int = 0, *, trusted: Trusted = None
) -> Bundle:
    """The bundle with a plan that this machine's `backend` can load, built if there is none.

    Raises:
        BundleError: something other than a plan is missing or altered, or the folder cannot be written to.
        SignatureError: a signature is required, and a plan is needed that nobody has signed.
        UnavailableError: TensorRT was named and there is no device, or no builder.
        BuildError: the builder refused.
    """
    if isinstance(bundle, Bundle) and trusted is None:
        trusted = bundle.trusted or False
    opened = Bundle(bundle.path if isinstance(bundle, Bundle) else bundle, check_plans=False, trusted=trusted)
    for flavour in FLAVOURS:
        if backend not in ("auto", flavour) or flavour not in opened.manifest.targets:
            continue
        try:
            if cuda_devices() == 0:
                raise UnavailableError(f"no CUDA device to build {flavour}'s plan for; plans run on NVIDIA GPUs only")
            capability = compute_capability(device)
            if not fits(opened, flavour, capability, trusted=backend == "auto"):
                opened = rebuild(opened, flavour, capability, device)
        except UnavailableError:  # there is no device, or TensorRT is not installed
            if backend == flavour:
                raise
    return opened


def fits(bundle: Bundle, flavour: str, capability: str, *, trusted: bool = False) -> bool:
    """Whether the bundle contains an unaltered plan for this version and device.

    Args:
        bundle: the bundle.
        flavour: `tensorrt` or `tensorrt_rtx`.
        capability: the device's compute capability, such as `SM89`.
        trusted: whether only trusted plans fit, as for `auto`.

    Raises:
        UnavailableError: TensorRT is not installed.
    """
    whole = [record for record in bundle.manifest.targets[flavour].engines if _is_whole(bundle, record.file)]
    version = load_tensorrt(flavour).__version__
    engine = engine_for(whole, version, capability) if whole else ""
    return isinstance(engine, Engine) and (not trusted or is_trusted_plan(bundle, engine))


def rebuild(bundle: Bundle, flavour: str, capability: str, device: int = 0) -> Bundle:
    """Build a plan from the bundle's own model and add it to the bundle.

    Args:
        bundle: the bundle; its model is unaltered.
        flavour: `tensorrt`, which builds for the device itself, or `tensorrt_rtx`.
        capability: compute capability to build for, such as `SM89`; one that TensorRT-RTX does not support gets the
            portable plan.
        device: number of the CUDA device, whose timings TensorRT stores.

    Raises:
        BundleError: the folder cannot be written to.
        UnavailableError: TensorRT is not installed.
        BuildError: the builder refused.
    """
    if bundle.trusted:
        raise SignatureError(
            f"{bundle.path} has no signed plan for this machine, and building one here would invalidate its signature; "
            "build it without a trusted key, sign the bundle with your own key and trust that one"
        )
    trt, manifest = load_tensorrt(flavour), bundle.manifest
    record = manifest.targets[flavour]
    portable = flavour == "tensorrt_rtx" and not hasattr(trt.ComputeCapability, capability)
    wanted = () if portable or flavour == "tensorrt" else (capability,)
    further = record.engines[0].profiles[1:] if record.engines else []
    with bundle.steady(whole=False), temporary_folder() as folder:  # plans for other devices may be added meanwhile
        request = Request(
            onnx_file=bundle.file(record.model), plan_file=folder / "engine.plan", flavour=flavour,
            inputs=manifest.graph_inputs, precision=manifest.precision, compute_capabilities=wanted,
            profiles=profiles_of(manifest.graph_inputs, further),
            timing_cache=timings_of(bundle.path, flavour, device), device=device,
        )  # fmt: skip
        plan = build(request)
    name = f"tensorrt/engine.{flavour}-{plan.version}-{PORTABLE if portable else capability.lower()}.plan"
    with locked(bundle.path.resolve()):  # another process may have added a plan for another device meanwhile
        return _added(_as_it_is_now(bundle, record.model), flavour, name, plan, PORTABLE if portable else capability)


def _as_it_is_now(bundle: Bundle, model: str) -> Bundle:
    """The bundle with its current manifest.

    Raises:
        ReplacedError: the model that a plan was built from has been replaced.
    """
    now = Bundle(bundle.path, check_plans=False, lazily=True, trusted=False)
    if now.manifest.files.get(model) != bundle.manifest.files[model]:
        raise ReplacedError(f"{bundle.path} was replaced while a plan was built from its model; build the plan again")
    return now


def _added(bundle: Bundle, flavour: str, name: str, plan: Plan, capability: str) -> Bundle:
    """Add a plan to a bundle, and remove missing and altered ones from the manifest."""
    manifest = bundle.manifest
    record = manifest.targets[flavour]
    kept = [old for old in record.engines if _is_whole(bundle, old.file) and old.file != name]
    gone = {old.file for old in record.engines} - {old.file for old in kept} - {name}
    sha256 = hashlib.sha256(plan.data).hexdigest()
    record.engines = [*kept, plan.record(name, flavour, [capability], sha256)]
    manifest.attention = certified(manifest.attention, flavour, plan)
    for file in gone:
        del manifest.files[file]
    try:
        for file in (name, *gone):
            if (folder := (bundle.path / file).parent).is_symlink():
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
            folder.mkdir(exist_ok=True)
        is_signed = os.path.lexists(bundle.path / SIGNATURE)
        (bundle.path / SIGNATURE).unlink(missing_ok=True)
        write_whole(bundle.path / name, plan.data)
        manifest.files[name] = sha256
        manifest.files = dict(sorted(manifest.files.items()))
        write_whole(bundle.path / MANIFEST, (manifest.model_dump_json(indent=2) + "\n").encode())
        for file in gone:
            (bundle.path / file).unlink(missing_ok=True)
    except OSError as error:
        raise BundleError(f"{bundle.path} cannot be written to ({error}); copy the bundle and load the copy") from error
    if is_signed:
        log.warning("%s has a new plan, so its signature was removed; sign it again: attnforge sign", bundle.path)
    return Bundle(bundle.path, check_plans=False, trusted=False)


def certified(certificate: Certificate, flavour: str, plan: Plan) -> Certificate:
    """The certificate updated with what another plan made of every site that was lowered for it."""
    details = [site.model_copy(deep=True) for site in certificate.details]
    for site in details:
        if (target := site.targets.get(flavour)) is not None:
            softmax = softmax_of(site.site)
            target.kernel = plan.kernel_of(softmax)
            target.reason = None if target.kernel else target.reason or plan.why_unfused(softmax)
    return Certificate.of(details, list(dict.fromkeys((*certificate.fused, flavour))))


def _is_whole(bundle: Bundle, file: str) -> bool:
    try:
        bundle.check(file)
    except BundleError:
        return False
    return True
