"""How many attention sites are fused: by attnforge, by others' optimisers, and by TensorRT-RTX alone.

`python -m attnforge.benchmarks.suites.fusion` writes `benchmarks/results/fusion_coverage.json` and refreshes the
table in the README. Every model is exported anew for each: for attnforge and for TensorRT-RTX alone
at opset 23 in fp16, for ONNX Runtime's optimisers at opset 18 in fp32, the form that they were written for. Counted are
sites that became one operator, and for TensorRT-RTX fused attention kernels in the plan.
"""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import onnx_ir as ir
import torch
import typer
from rich.console import Console

from attnforge.benchmarks.contenders.peers import export_at_18, fused_operators, ort_fusions, transformers_optimizer
from attnforge.benchmarks.publish import RESULTS, machine, publish
from attnforge.benchmarks.suites.huggingface import build, minilm, variants
from attnforge.errors import AttnforgeError
from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.deploy import tool_versions
from attnforge.export.lowering import tensorrt as for_tensorrt
from attnforge.export.sources.huggingface import example
from attnforge.export.sources.torch_module import Captured, capture
from attnforge.export.tensorrt import build as engine
from attnforge.model.registry import MODELS, Example, build_model
from attnforge.precision import precision_named

COMMAND = "python -m attnforge.benchmarks.suites.fusion"
COLUMNS = ("canonical", "tensorrt_rtx", "optimizer", "ort_fusions", "tensorrt_rtx_alone")


def main(
    results: Annotated[Path, typer.Option(help="Where to write the figures.")] = RESULTS / "fusion_coverage.json",
    readme: Annotated[Path | None, typer.Option(help="Whose table to refresh.")] = Path("README.md"),
    only: Annotated[list[str] | None, typer.Option(help="A model; repeat. All by default.")] = None,
) -> None:
    """Count, write the figures, and refresh the README's table from them."""
    console = Console()
    rows: dict[str, dict[str, Any]] = {}
    for name, make in models().items():
        if only and name not in only:
            continue
        console.print(f"{name} …", style="dim")
        rows[name] = coverage(make())
    figures = {
        "command": COMMAND,
        "machine": machine(torch.get_num_threads()),
        "tools": {**tool_versions(), "transformers": importlib.metadata.version("transformers")},
        "models": rows,
    }
    text = table(figures)
    console.print(text)
    publish(figures, text, "fusion-coverage", results, readme)


def models() -> dict[str, Callable[[], Example]]:
    """Every model by name: Hugging Face's in both their forms of attention, one with trained weights, our own."""
    made: dict[str, Callable[[], Example]] = {}
    for name, attention in variants():
        made[f"{name}, {attention}"] = lambda n=name, a=attention: build(n, a)  # type: ignore[misc]
    made["all-MiniLM-L6-v2"] = lambda: example(minilm(), max_tokens=64)
    for name in MODELS:
        made[name] = lambda n=name: build_model(n)  # type: ignore[misc]
    return made


def coverage(model: Example) -> dict[str, Any]:
    """For one model: its sites, and how many each way fuses. What a tool refuses counts as none, with its words."""
    counts: dict[str, Any] = {}
    refused: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        captured = capture(*model, precision_named("fp16"))
        plain = captured.model.clone()
        sites = canonicalize(captured.model)
        counts["sites"], counts["canonical"] = len(sites), sum(site.node is not None for site in sites)
        lowered = for_tensorrt.lower(captured.model, sites)
        for column, graph in (("tensorrt_rtx", captured.model), ("tensorrt_rtx_alone", plain)):
            try:
                plan = _built(graph, captured, file)
            except AttnforgeError as error:
                counts[column], refused[column] = 0, str(error)
                continue
            if column == "tensorrt_rtx":
                counts[column] = sum(plan.kernel_of(one.node) is not None for one in lowered)
            else:
                counts[column] = sum(layer.is_fused_attention for layer in plan.layers)
        for column, optimize in (("optimizer", transformers_optimizer), ("ort_fusions", ort_fusions)):
            try:
                export_at_18(model.module, model.args, model.dynamic_shapes, file)
                counts[column] = fused_operators(optimize(file))
            except Exception as error:  # others' tools, whatever they raise
                counts[column], refused[column] = 0, f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return {**counts, "refused": refused}


def _built(graph: ir.Model, captured: Captured, file: Path) -> engine.Plan:
    ir.save(graph, file)
    return engine.build(file, "tensorrt_rtx", captured.inputs, "fp16")


def table(figures: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = [
        "| model | sites | attnforge: canonical | attnforge: TensorRT-RTX kernels | onnxruntime.transformers.optimizer "
        "| ort_fusions | TensorRT-RTX alone |",
        "|" + "---|" * 7,
    ]
    rows = figures["models"]
    for name, row in rows.items():
        lines.append(f"| {name} | {row['sites']} | " + " | ".join(_cell(row, column) for column in COLUMNS) + " |")
    totals = [sum(row[column] for row in rows.values()) for column in ("sites", *COLUMNS)]
    lines.append("| **all** | " + " | ".join(f"**{total}**" for total in totals) + " |")
    versions = ", ".join(f"{k} {figures['tools'][k]}" for k in ("tensorrt_rtx", "onnxscript", "transformers"))
    return "\n".join([*lines, "", f"– where the tool refuses the model. {versions}; `{figures['command']}`"])


def _cell(row: dict[str, Any], column: str) -> str:
    return "–" if column in row["refused"] else str(row[column])


if __name__ == "__main__":
    typer.run(main)
