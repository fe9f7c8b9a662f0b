"""TensorRT and TensorRT-RTX as targets: one model that both parse, and a plan of each."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from attnforge import cache
from attnforge.bundle import PORTABLE, PlainPlan, TargetRecord
from attnforge.errors import UnavailableError
from attnforge.export.lowering.attention import Lowered
from attnforge.export.lowering.tensorrt import lower
from attnforge.export.targets.target import Built, Job
from attnforge.export.tensorrt import build as engine
from attnforge.machine import compute_capability, cuda_devices, device_name
from attnforge.precision import Precision
from attnforge.progress import Progress, Steps


def why_not_buildable(flavour: str) -> str | None:
    """Why this machine cannot build plans of a flavour, or None where it can."""
    try:
        engine.load_tensorrt(flavour)
    except UnavailableError as error:
        return str(error)
    if flavour == "tensorrt" and not cuda_devices():
        return "tensorrt builds for the GPU at hand and there is no CUDA device; tensorrt_rtx builds without one"
    return None


def build(job: Job, progress: Progress, flavour: str) -> Built:
    """Lower the canonical graph for TensorRT and build a plan of it.

    Args:
        job: what to build from.
        progress: hears of every plan that is built.
        flavour: `tensorrt` or `tensorrt_rtx`.

    Raises:
        UnavailableError: the flavour is not installed here.
        UsageError: a compute capability that it does not know.
        BuildError: its parser or builder refused.
    """
    record = TargetRecord(model="", attention_precision=job.attention.name if job.attention else None)
    steps = Steps(progress, 2 if job.attention is not None else 1)
    if job.attention is not None:
        steps.begin(f"plan with attention in {job.precision.name}")
        _, plain = _lower_and_build(job, flavour, record, None)
        record.without = PlainPlan(
            layers=len(plain.layers), size=len(plain.data), activation_memory=plain.activation_memory
        )
    steps.begin("plan")
    lowered, plan = _lower_and_build(job, flavour, record, job.attention)
    file = f"tensorrt/engine.{flavour}.plan"
    (job.folder / file).parent.mkdir(exist_ok=True)
    (job.folder / file).write_bytes(plan.data)
    record.engines = [plan.record(file, flavour, _built_for(job, flavour))]
    return Built(
        record,
        lowered,
        kernel_of=lambda form: plan.kernel_of(form.node),
        why_unfused=lambda form: plan.why_unfused(form.node),
    )


def _lower_and_build(
    job: Job, flavour: str, record: TargetRecord, attention: Precision | None
) -> tuple[list[Lowered], engine.Plan]:
    """The forms of every site and the plan; `record.model` becomes the name of the file that it was built from."""
    model = job.model.clone()
    lowered = lower(model, job.sites, ir.DataType.from_numpy(attention.dtype) if attention is not None else None).sites
    record.model = job.shelf.save(model, "tensorrt/model.onnx")
    plan = engine.build(
        job.folder / record.model, flavour, job.inputs, job.precision.name,
        job.compute_capabilities if flavour == "tensorrt_rtx" else (), job.profiles, _timings(job.out, flavour),
    )  # fmt: skip
    return lowered, plan


def _timings(out: Path, flavour: str) -> Path | None:
    """The file in which TensorRT keeps what it timed on this machine's first GPU, for which it builds."""
    if flavour != "tensorrt":
        return None
    return cache.timing_cache_file(out, engine.load_tensorrt(flavour).__version__, device_name(0))


def _built_for(job: Job, flavour: str) -> list[str]:
    """The compute capabilities that the plan is for, as the manifest names them."""
    if flavour == "tensorrt":
        return [compute_capability(0)]
    return [compute_capability(0) if name == "CURRENT" else name for name in job.compute_capabilities or [PORTABLE]]
