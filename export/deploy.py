"""The way through the house: module → graph → canonical graph → each target's form → bundle."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort
import torch
from torch import Tensor, nn

import attnforge
from attnforge import bundle as b
from attnforge import reference
from attnforge.errors import BuildError, UnavailableError, UnfusedError, UnknownNameError, UsageError
from attnforge.export import engine
from attnforge.export.canonicalize import Site, canonicalize
from attnforge.export.capture import Captured, DynamicShapes, capture
from attnforge.export.expected import write_reference
from attnforge.export.lowering import onnxruntime as for_onnxruntime
from attnforge.export.lowering import tensorrt as for_tensorrt
from attnforge.export.lowering.attention import Lowered
from attnforge.export.lowering.tuning import Tuner
from attnforge.precision import PRECISIONS, Precision, precision_named

TARGETS = ("onnxruntime", "tensorrt", "tensorrt_rtx")
Progress = Callable[[str], None]


def deploy(
    module: nn.Module,
    args: Sequence[Tensor],
    out: str | os.PathLike[str],
    dynamic_shapes: DynamicShapes = None,
    precision: str = "fp32",
    targets: Sequence[str] | None = None,
    name: str | None = None,
    *,
    compute_capabilities: Sequence[str] = (),
    attention_precision: str | None = None,
    require_fused: Sequence[str] = (),
    tune: bool = True,
    force: bool = False,
    source: b.Source | None = None,
    progress: Progress = lambda stage: None,
) -> b.Bundle:
    """Export `module` as it computes in eval mode, lower it for every target, and write a bundle to `out`.

    Args:
        module: takes tensors by position, returns a tensor or a tuple, list or dict of them. It is not touched.
        args: example inputs.
        out: folder to write.
        dynamic_shapes: `torch.export`'s own; every Dim needs a `max`. Min, example and max become TensorRT's profile.
        precision: `fp32`, `tf32`, `fp16` or `bf16`.
        targets: of `onnxruntime`, `tensorrt`, `tensorrt_rtx`; by default every one that can be built on this machine. A
            builder that refuses one which was asked for by name is an error, else the manifest says why it is missing.
        name: of the deployed model; by default the class's.
        compute_capabilities: that the TensorRT-RTX plan is for, such as `("SM89",)`; by default portable from SM80.
        attention_precision: `fp16` or `bf16`, for fp32 and tf32: TensorRT, which has no fused kernel for fp32, computes
            attention alone in it, between casts. All else stays as it is, ONNX Runtime's model too.
        require_fused: targets that must run every attention site as one fused kernel; where one does not, nothing is
            written.
        tune: measure on this machine which form of each site ONNX Runtime runs fastest on its CPU, for some seconds;
            without it rules choose, and the same module gives the same bundle on every machine.
        force: overwrite a bundle at `out`; the old one stays whole until the new one is.
        source: where the module came from, for those who want to make it again.
        progress: called with the name of each stage as it starts.

    Raises:
        UsageError: an argument that cannot be meant, or `out` exists.
        CaptureError: torch cannot export the module so.
        UnavailableError: a target that was asked for cannot be built here.
        BuildError: a builder refused.
        UnfusedError: a target of `require_fused` leaves a site unfused, or the model has no site.
    """
    p = precision_named(precision)
    chosen, skipped = choose_targets(targets)
    _check_required(require_fused, chosen, skipped)
    attention = _attention_precision(attention_precision, p, chosen)
    with b.writing(out, force) as folder:
        progress("export")
        captured = capture(module, args, dynamic_shapes, p)
        progress("canonicalize")
        model, sites = captured.model, canonicalize(captured.model)
        save(model, folder / b.CANONICAL)
        built = _Built()
        for target in chosen:
            progress(f"lower and build for {target}")
            if target == "onnxruntime":
                _for_onnxruntime(folder, captured, sites, p, tune, built)
                continue
            try:
                _for_tensorrt(folder, captured, sites, p, target, compute_capabilities, attention, built)
            except BuildError as error:
                if targets is not None or target in require_fused:
                    raise
                built.refused[target] = str(error)
        certificate = certify(folder, sites, built.lowered, built.plans)
        _hold_to(require_fused, certificate)
        progress("reference")
        cases = write_reference(folder, captured, p, attention)
        manifest = b.Manifest(
            name=name or type(module).__name__,
            precision=precision,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            tools=tool_versions(),
            source=source or b.Source(kind="module", name=f"{type(module).__module__}.{type(module).__qualname__}"),
            inputs=captured.inputs,
            outputs=captured.outputs,
            attention=certificate,
            targets=built.records,
            skipped={**skipped, **built.refused},
            cases=cases,
        )
        b.write_manifest(folder, manifest)
    return b.Bundle(out)


def choose_targets(targets: Sequence[str] | None) -> tuple[list[str], dict[str, str]]:
    """The targets to build, and why any other is not.

    Raises:
        UnknownNameError: a target that does not exist.
        UnavailableError: one that was asked for by name and cannot be built here.
    """
    for target in targets or ():
        if target not in TARGETS:
            raise UnknownNameError("target", target, TARGETS)
    if targets is not None and not targets:
        raise UsageError(
            f"no target was given; name some of {', '.join(TARGETS)}, or none to build all that can be built here"
        )
    chosen, skipped = [], {}
    for target in TARGETS:
        if targets is not None and target not in targets:
            continue
        if (reason := why_not_buildable(target)) is None:
            chosen.append(target)
        elif targets is not None:
            raise UnavailableError(reason)
        else:
            skipped[target] = reason
    return chosen, skipped


def _check_required(required: Sequence[str], chosen: list[str], skipped: Mapping[str, str]) -> None:
    """That every target which must fuse is one that will be built."""
    for target in required:
        if target not in TARGETS:
            raise UnknownNameError("target", target, TARGETS)
        if target in skipped:
            raise UnavailableError(skipped[target])
        if target not in chosen:
            raise UsageError(
                f"{target} is to run attention fused but is not among the targets to build ({', '.join(chosen)}); "
                f"add it to the targets, or do not require it"
            )


def _attention_precision(name: str | None, precision: Precision, chosen: list[str]) -> Precision | None:
    """The precision of attention alone that was asked for, if that can be meant."""
    if name is None:
        return None
    known = [p.name for p in PRECISIONS.values() if p.is_low]
    if name not in known:
        raise UnknownNameError("attention precision", name, known)
    if precision.is_low:
        raise UsageError(
            f"attention is to be {name} in a bundle that is {precision.name} throughout; leave the attention precision "
            "out, or deploy in fp32 or tf32"
        )
    if not set(chosen) & set(engine.FLAVOURS):
        raise UsageError(
            f"attention is to be {name} for TensorRT, and only {', '.join(chosen)} is built; add a target "
            f"({', '.join(engine.FLAVOURS)}), or leave the attention precision out"
        )
    return PRECISIONS[name]


def _hold_to(required: Sequence[str], certificate: b.Certificate) -> None:
    """That every target which must fuse does, at every site."""
    if required and certificate.sites == 0:
        raise UnfusedError(
            "no attention site was found in this model, so none can be required to be fused", certificate
        )
    for target in required:
        if (fused := certificate.fused[target]) < certificate.sites:
            missing = certificate.sites - fused
            raise UnfusedError(
                f"{target} does not fuse {missing} of {certificate.sites} attention sites, which was required; nothing "
                "was written. Change what the reasons name, or deploy without requiring it",
                certificate,
            )


def why_not_buildable(target: str) -> str | None:
    """Why `target` cannot be built on this machine, or None."""
    if target == "onnxruntime":
        return None
    try:
        engine.load_tensorrt(target)
    except UnavailableError as error:
        return str(error)
    if target == "tensorrt" and not torch.cuda.is_available():
        return "tensorrt builds for the GPU at hand and there is no CUDA device; tensorrt_rtx builds without one"
    return None


def save(model: ir.Model, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    ir.save(model, file)


@dataclass
class _Built:
    """What came of the targets: their records, the forms they were lowered to, their plans, and what was refused."""

    records: dict[str, b.TargetRecord] = field(default_factory=dict)
    lowered: dict[str, list[Lowered]] = field(default_factory=dict)
    plans: dict[str, engine.Plan] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def _for_onnxruntime(
    folder: Path, captured: Captured, sites: list[Site], precision: Precision, tune: bool, built: _Built
) -> None:
    sizes = reference.cases(captured.inputs)[0].sizes
    record = built.records["onnxruntime"] = b.TargetRecord(model="onnxruntime/model.onnx")
    model = captured.model.clone()
    tuner = Tuner(sizes) if tune else None
    built.lowered["onnxruntime"] = for_onnxruntime.lower(model, sites, sizes, tuner=tuner)
    if tuner is not None and tuner.spent:
        seconds = round(tuner.spent, 3)
        record.tuning = b.Tuning(processors=os.cpu_count() or 1, sizes=sizes, seconds=seconds)
    save(model, folder / record.model)
    if precision.is_low:
        record.cuda_model = "onnxruntime/model.cuda.onnx"
        model = captured.model.clone()
        for_onnxruntime.lower(model, sites, sizes, device="cuda")
        save(model, folder / record.cuda_model)


def _for_tensorrt(
    folder: Path,
    captured: Captured,
    sites: list[Site],
    precision: Precision,
    flavour: str,
    compute_capabilities: Sequence[str],
    attention: Precision | None,
    built: _Built,
) -> None:
    record = b.TargetRecord(model="tensorrt/model.onnx", attention_precision=attention.name if attention else None)
    capabilities = tuple(compute_capabilities) if flavour == "tensorrt_rtx" else ()

    def lower_and_build(dtype: ir.DataType | None) -> tuple[list[Lowered], engine.Plan]:
        model = captured.model.clone()
        lowered = for_tensorrt.lower(model, sites, dtype)
        save(model, folder / record.model)
        return lowered, engine.build(folder / record.model, flavour, captured.inputs, precision.name, capabilities)

    if attention is not None:
        _, plain = lower_and_build(None)
        record.without = b.PlainPlan(
            layers=len(plain.layers), size=len(plain.data), activation_memory=plain.activation_memory
        )
    lowered, plan = lower_and_build(ir.DataType.from_numpy(attention.dtype) if attention is not None else None)
    file = f"tensorrt/engine.{flavour}.plan"
    (folder / file).write_bytes(plan.data)
    default = engine.PORTABLE if flavour == "tensorrt_rtx" else "CURRENT"
    record.engines = [
        b.Engine(
            file=file,
            flavour=flavour,  # type: ignore[arg-type]
            version=plan.version,
            compute_capabilities=list(capabilities) or [default],
            layers=len(plan.layers),
            size=len(plan.data),
            build_seconds=round(plan.seconds, 3),
            activation_memory=plan.activation_memory,
        )
    ]
    built.records[flavour], built.lowered[flavour], built.plans[flavour] = record, lowered, plan


# --- the certificate --------------------------------------------------------------------------------------------------


def certify(
    folder: Path, sites: list[Site], lowered: Mapping[str, list[Lowered]], plans: Mapping[str, engine.Plan]
) -> b.Certificate:
    """What became of every site, counted in what each backend compiled."""
    details, unfused = [], []
    kept = _nodes_kept_by_onnxruntime(folder / "onnxruntime/model.onnx") if "onnxruntime" in lowered else {}
    for site in sites:
        record = b.SiteRecord(
            site=site.name,
            written_as=site.written_as,
            canonical=site.node is not None,
            form=site.form,
            reason=site.reason,
        )
        for target, forms in lowered.items():
            form = next((one for one in forms if one.site == site.name), None)
            if form is None:
                unfused.append(b.Unfused(site=site.name, target=target, reason=site.reason or "not canonical"))
                continue
            if target == "onnxruntime":
                kernel = kept.get(form.node) if form.unfused is None else None
                otherwise = "ONNX Runtime's own optimiser took the fused node apart"
            else:
                kernel = plans[target].kernel_of(form.node)
                chosen = ", ".join(plans[target].layers_of(form.node)) or "none named"
                otherwise = f"the builder chose separate kernels: {chosen}"
            reason = None if kernel else form.unfused or otherwise
            record.targets[target] = b.SiteTarget(
                form=form.form,
                why=form.why,
                kernel=kernel,
                reason=reason,
                measured=dict(form.measured),
                dropped=dict(form.dropped),
            )
            if reason is not None:
                unfused.append(b.Unfused(site=site.name, target=target, reason=reason))
        details.append(record)
    return b.Certificate(
        sites=len(sites),
        canonical=sum(record.canonical for record in details),
        fused={t: sum(t in r.targets and r.targets[t].kernel is not None for r in details) for t in lowered},
        unfused=unfused,
        details=details,
    )


def _nodes_kept_by_onnxruntime(file: Path) -> dict[str, str]:
    """The operator of every node that is left after ONNX Runtime's own optimisation, by the node's name."""
    optimized = file.with_suffix(".optimized.onnx")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(optimized)
    options.log_severity_level = 3
    try:
        ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        return {
            node.name or "": f"{node.domain}::{node.op_type}".removeprefix("::") for node in ir.load(optimized).graph
        }
    except Exception as error:
        raise BuildError(f"ONNX Runtime cannot load the lowered graph: {error}") from error
    finally:
        for left in file.parent.glob(f"{optimized.name}*"):
            left.unlink()


def tool_versions() -> dict[str, str]:
    names = (
        "torch",
        "onnx",
        "onnx_ir",
        "onnxscript",
        "onnxruntime",
        "onnxruntime-gpu",
        "tensorrt",
        "tensorrt_rtx",
        "numpy",
    )
    versions = {"attnforge": attnforge.__version__}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
