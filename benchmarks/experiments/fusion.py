"""How many attention sites are fused: by attnforge, by other optimisers, and by TensorRT-RTX alone.

`python -m benchmarks run fusion` writes `benchmarks/results/fusion_coverage.json`. Every model is exported
separately for each column: for attnforge and for TensorRT-RTX alone by torch.export at opset 23 in fp16; for ONNX
Runtime's optimisers in fp32 by torch.export at opset 18; and for `onnxruntime.transformers.optimizer`, which was
written for the graphs of the older exporter, also by TorchScript at opset 17. That optimizer is tried with every model
type, and is given the number of heads and the hidden size. The counts are sites that became one operator, and for
TensorRT-RTX fused attention kernels in the plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor

from attnforge.atomic import temporary_folder
from attnforge.bench.contenders.peers import export_at_18, fused_operators, ort_fusions, transformers_optimizer
from attnforge.errors import AttnforgeError, first_line
from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.sources.huggingface import example
from attnforge.export.sources.torch_module import capture
from attnforge.model.registry import MODELS, Example, build_model
from attnforge.precision import precision_named
from attnforge.quiet import quiet
from attnforge.report.render import markdown_table
from attnforge.runtime.backends.eager import as_written
from benchmarks.experiment import Experiment
from benchmarks.rtx import compiled, plan_of
from tests.support.huggingface import build, minilm, variants

COLUMNS = {
    "canonical": "attnforge: canonical",
    "tensorrt_rtx": "attnforge: TensorRT-RTX kernels",
    "optimizer": "onnxruntime.transformers.optimizer, on torch.export's graphs, which it was not written for",
    "optimizer_torchscript": "the same, on TorchScript exports",
    "ort_fusions": "ort_fusions",
    "tensorrt_rtx_alone": "TensorRT-RTX alone",
}
"""Headings of the table, by the names of the counts in the results file."""

Exporter = Callable[[torch.nn.Module, tuple[Any, ...], Any, Path], None]


def models() -> dict[str, Callable[[], Example]]:
    """Return all models by name: Hugging Face's with both forms of attention, one with trained weights, and ours."""
    every: dict[str, Callable[[], Example]] = {
        f"{name}, {attention}": partial(build, name, attention) for name, attention in variants()
    }
    every["all-MiniLM-L6-v2"] = lambda: example(minilm(), max_tokens=64)
    return every | {name: partial(build_model, name) for name in MODELS}


def coverage(make: Callable[[], Example]) -> dict[str, Any]:
    """Count a model's sites, and how many each tool fuses. A refusal counts as none, recorded with its message."""
    model = make()
    captured = capture(*model, precision_named("fp16"))
    plain = captured.model.clone()
    sites = canonicalize(captured.model, captured.without_effect, captured.lost).sites
    canonical = captured.model.clone()
    with temporary_folder() as folder:
        file = folder / "model.onnx"

        def optimized(write: Exporter, optimize: Callable[[Path], onnx.ModelProto]) -> int:
            write(model.module, model.args, model.dynamic_shapes, file)
            return fused_operators(optimize(file))

        def kernels() -> int:
            lowered, plan = compiled(captured.model, sites, captured.inputs, "fp16")
            return sum(plan.kernel_of(attention.node) is not None for attention in lowered)

        for_ort = partial(transformers_optimizer, canonical=canonical)
        ways: dict[str, Callable[[], int]] = {
            "tensorrt_rtx": kernels,
            "tensorrt_rtx_alone": lambda: sum(
                layer.is_fused_attention for layer in plan_of(plain, captured.inputs).layers
            ),
            "optimizer": partial(optimized, export_at_18, for_ort),
            "optimizer_torchscript": partial(optimized, export_by_torchscript, for_ort),
            "ort_fusions": partial(optimized, export_at_18, ort_fusions),
        }
        counts: dict[str, Any] = {"sites": len(sites), "canonical": sum(site.node is not None for site in sites)}
        refused: dict[str, str] = {}
        for column, count in ways.items():
            # third-party tools raise anything
            refusals = AttnforgeError if column.startswith("tensorrt_rtx") else Exception
            try:
                counts[column] = count()
            except refusals as error:
                counts[column], refused[column] = 0, f"{type(error).__name__}: {first_line(error)}"
    return {**counts, "refused": refused}


def export_by_torchscript(module: torch.nn.Module, args: tuple[Tensor, ...], shapes: Any, file: Path) -> None:
    """Write a module with torch's older exporter, which traces it to TorchScript, at opset 17.

    Args:
        module: the module.
        args: example inputs.
        shapes: dynamic shapes as torch.export takes them, by the input's name or in order.
        file: file to write.
    """
    names = list(inspect.signature(module.forward).parameters)[: len(args)]
    by_name = shapes if isinstance(shapes, dict) else dict(zip(names, shapes or (), strict=False))
    axes = {
        name: {axis: f"{name}_{axis}" for axis, dim in dims.items() if dim is not None}
        for name, dims in by_name.items()
        if dims
    }
    with quiet(), torch.no_grad(), as_written():
        torch.onnx.export(
            module.eval(), args, str(file), input_names=names, dynamic_axes=axes, dynamo=False, opset_version=17
        )


def table(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    rows = figures["models"]
    lines = [
        (name, row["sites"], *("–" if column in row["refused"] else row[column] for column in COLUMNS))
        for name, row in rows.items()
    ]
    totals = [f"**{sum(row[column] for row in rows.values())}**" for column in ("sites", *COLUMNS)]
    text = markdown_table(("model", "sites", *COLUMNS.values()), [*lines, ("**all**", *totals)])
    versions = ", ".join(f"{k} {figures['tools'][k]}" for k in ("tensorrt_rtx", "onnxscript", "transformers"))
    return f"{text}\n\n– where the tool refuses the model. {versions}; `{figures['command']}`"


def summary(figures: dict[str, Any]) -> str:
    """Return the totals as a sentence."""
    rows = figures["models"].values()
    sites, canonical, compiled, alone = (
        sum(row[column] for row in rows) for column in ("sites", "canonical", "tensorrt_rtx", "tensorrt_rtx_alone")
    )
    return (
        f"Of {sites} attention sites in {len(rows)} models, {canonical} become one canonical node and TensorRT-RTX "
        f"compiles {compiled} to its fused kernel; given torch's own export it fuses {alone}."
    )


EXPERIMENT = Experiment(
    "fusion_coverage.json",
    coverage,
    {"fusion-coverage": table, "fusion-summary": summary},
    subjects=models(),
    threads=torch.get_num_threads,
    packages=["transformers"],
)
