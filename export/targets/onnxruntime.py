"""ONNX Runtime as a target: a model for its CPU provider, and at 16 bits or with a cache another one for CUDA."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort

from attnforge.atomic import is_full
from attnforge.bundle import TargetRecord
from attnforge.errors import BuildError
from attnforge.export.graphs.qdq import products_between
from attnforge.export.lowering.cached import caches
from attnforge.export.lowering.integers import KERNELS
from attnforge.export.lowering.onnxruntime import lower
from attnforge.export.lowering.tuning import Tuner
from attnforge.export.targets.target import Built, Finish, Job
from attnforge.progress import Progress, Steps
from attnforge.runtime.backends.onnxruntime import session_options
from attnforge.runtime.cases import sizes_at

TOOK_APART = "ONNX Runtime's own optimiser decomposed the fused node"


def begin(job: Job, progress: Progress) -> Finish:
    """Lower the canonical graph for ONNX Runtime and query what it compiles; nothing is left to wait for.

    Args:
        job: what to build from.
        progress: receives each site whose form is chosen by measuring.

    Raises:
        BuildError: ONNX Runtime cannot load the lowered graph.
    """
    sizes, largest = (sizes_at(job.inputs, bound) for bound in ("opt", "max"))
    steps = Steps(progress, sum(site.node is not None for site in job.sites))
    tuner = Tuner(sizes, job.measuring, steps, job.reuse.forms(sizes)) if job.measuring else None
    model = job.model.clone()
    lowered = lower(model, job.sites, sizes, tuner=tuner, largest=largest)
    record = TargetRecord(model=job.shelf.save(model, "onnxruntime/model.onnx"))
    record.tuning = job.reuse.tuning(tuner)
    if job.precision.is_low or caches(job.model):
        model = job.model.clone()
        lower(model, job.sites, sizes, device="cuda")
        record.cuda_model = job.shelf.save(model, "onnxruntime/model.cuda.onnx")
    operators = compiled_operators(job.folder / record.model)
    if quantised := products_between(job.model):
        record.low_bit = sum(operators.get(str(between.product.name)) in KERNELS for between in quantised)
    built = Built(
        record,
        lowered,
        kernel_of=lambda form: operators.get(form.node) if form.unfused is None else None,
        why_unfused=lambda form: TOOK_APART,
    )
    return lambda steps: built


def compiled_operators(file: Path) -> dict[str, str]:
    """The operator of every node that remains after ONNX Runtime's own optimisation of a model, by node name.

    Raises:
        BuildError: ONNX Runtime cannot load the model.
    """
    optimized = file.with_suffix(".optimized.onnx")
    options = session_options()
    options.optimized_model_filepath = str(optimized)
    options.add_session_config_entry(
        "session.optimized_model_external_initializers_file_name", f"{optimized.name}.data"
    )  # protobuf cannot represent a model of more than 2 GiB
    options.add_session_config_entry("session.disable_prepacking", "1")  # prepacking copies weights to run faster
    try:
        ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        nodes = ir.load(optimized).graph
        return {node.name or "": f"{node.domain}::{node.op_type}".removeprefix("::") for node in nodes}
    except Exception as error:
        if is_full(file.parent, error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(optimized)) from error
        raise BuildError(f"ONNX Runtime cannot load the lowered graph: {error}") from error
    finally:
        for left in file.parent.glob(f"{optimized.name}*"):
            left.unlink()
