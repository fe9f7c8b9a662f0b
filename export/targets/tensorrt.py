"""TensorRT and TensorRT-RTX as targets: one model that both parse, and a plan for each."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from attnforge.bundle import PORTABLE, PlainPlan, TargetRecord
from attnforge.errors import BuildError, UnavailableError
from attnforge.export.graphs.qdq import INT8, products_between
from attnforge.export.lowering.attention import Lowered, attentions
from attnforge.export.lowering.tensorrt import lower
from attnforge.export.targets.target import Built, Finish, Job
from attnforge.export.tensorrt import build as engine
from attnforge.export.tensorrt.process import Request
from attnforge.files import sha256
from attnforge.machine import compute_capability, cuda_devices
from attnforge.precision import Precision
from attnforge.progress import Progress, Steps
from attnforge.runtime.cases import sizes_at


def why_not_buildable(flavour: str) -> str | None:
    """Why this machine cannot build plans of a flavour, or None if it can."""
    try:
        engine.load_tensorrt(flavour)
    except UnavailableError as error:
        return str(error)
    if flavour == "tensorrt" and not cuda_devices():
        return "tensorrt builds for a GPU of this machine and there is no CUDA device; tensorrt_rtx builds without one"
    return None


def begin(job: Job, progress: Progress, flavour: str) -> Finish:
    """Lower the canonical graph for TensorRT and start building a plan alongside this process.

    Args:
        job: what to build from.
        progress: receives nothing: only the plan is waited for.
        flavour: `tensorrt` or `tensorrt_rtx`.

    Raises:
        UnavailableError: the flavour is not installed here.
        BuildError: caches are int8.
    """
    if any(node.op_type == "TensorScatter" and node.outputs[0].dtype == INT8 for node in job.model.graph):
        raise BuildError(f"{flavour} supports caches in fp32, fp16 or bf16, not int8; leave out cache_precision for it")
    is_alone = job.attention is not None and not job.precision.is_quantised  # the plain plan shows what that gains
    plain = _begin_plan(job, flavour, None, f"tensorrt/plain.{flavour}") if is_alone else None
    wanted = _begin_plan(job, flavour, job.attention, f"tensorrt/engine.{flavour}", "tensorrt/model.onnx")
    return partial(_finish, job, flavour, plain, wanted)


@dataclass(frozen=True)
class _Begun:
    """A plan that is being built.

    Attributes:
        model: file that it is built from, relative to the bundle's folder.
        file: file of the plan.
        lowered: the form of every site.
        plan: the future plan.
    """

    model: str
    file: str
    lowered: list[Lowered]
    plan: Future[engine.Plan]


def _begin_plan(job: Job, flavour: str, attention: Precision | None, stem: str, model: str | None = None) -> _Begun:
    """Lower the graph, save it and start the builder.

    Args:
        job: what to build from.
        flavour: `tensorrt` or `tensorrt_rtx`.
        attention: precision of attention alone; None for the bundle's.
        stem: stem of the plan's file, and of the model's if that has no name of its own.
        model: file for the lowered graph.
    """
    graph = job.model.clone()
    dtype = ir.DataType.from_numpy(attention.dtype) if attention is not None else None
    lowered = lower(graph, job.sites, dtype, sizes_at(job.inputs, "opt"), job.not_in_fp8)
    name = job.shelf.save(graph, model or f"{stem}.onnx")
    file = job.folder / f"{stem}.plan"
    file.parent.mkdir(exist_ok=True)
    request = Request(
        onnx_file=job.folder / name, plan_file=file, flavour=flavour, inputs=job.inputs, precision=job.precision.name,
        compute_capabilities=job.compute_capabilities if flavour == "tensorrt_rtx" else (),
        profiles=engine.profiles_of(job.inputs, job.profiles), timing_cache=engine.timings_of(job.out, flavour),
    )  # fmt: skip
    return _Begun(name, f"{stem}.plan", lowered, job.builders.start(request))


def _finish(job: Job, flavour: str, plain: _Begun | None, wanted: _Begun, steps: Steps) -> Built:
    """Wait for the plans. Only the record of the one with attention at the bundle's own precision is kept."""
    record = TargetRecord(model=wanted.model, attention_precision=job.attention.name if job.attention else None)
    children = {}
    if plain is not None:
        steps.begin(f"{flavour}, attention in {job.precision.name}")
        try:
            plan = plain.plan.result()
        finally:
            for file in (plain.model, plain.file):
                (job.folder / file).unlink(missing_ok=True)
        record.without = PlainPlan(layers=len(plan.layers), size=plan.size, activation_memory=plan.activation_memory)
        children[f"{flavour}, attention in {job.precision.name}"] = plan.process
    steps.begin(flavour)
    plan = wanted.plan.result()
    if plan.process.memory:  # otherwise the plan was taken from the cache, and no process built it
        children[flavour] = plan.process
    record.engines = [plan.record(wanted.file, flavour, _built_for(job, flavour), sha256(job.folder / wanted.file))]
    if quantised := products_between(job.model):
        record.low_bit = sum(plan.reads_as_stored(between) for between in quantised)
    rounded = [site.name for site, attention in attentions(job.model, job.sites) if attention.scales is not None]
    if rounded:
        record.low_bit_attention = sum(plan.attends_in_fp8(engine.softmax_of(site)) for site in rounded)
    return Built(
        record,
        wanted.lowered,
        kernel_of=lambda form: plan.kernel_of(form.node),
        why_unfused=lambda form: plan.why_unfused(form.node),
        children=children,
    )


def _built_for(job: Job, flavour: str) -> list[str]:
    """The compute capabilities that the plan is built for, as the manifest names them."""
    if flavour == "tensorrt":
        return [compute_capability(0)]
    return [compute_capability(0) if name == "CURRENT" else name for name in job.compute_capabilities or [PORTABLE]]
