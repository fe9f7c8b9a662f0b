"""Time of canonicalising and lowering over the number of layers.

`python -m benchmarks run scaling` writes `benchmarks/results/scaling.json`. The time of torch's export,
which precedes them, is shown for comparison.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import onnx_ir as ir
import torch

from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.lowering import onnxruntime as for_onnxruntime
from attnforge.export.lowering import tensorrt as for_tensorrt
from attnforge.export.sources.torch_module import capture
from attnforge.model.registry import build_model
from attnforge.precision import precision_named
from attnforge.report.render import markdown_table
from attnforge.runtime.race import seconds_of
from benchmarks.experiment import Experiment

LAYERS = (6, 12, 24, 48)


def measure() -> dict[str, Any]:
    """Measure seconds of every stage by number of layers, and the exponent of the stages other than torch's export."""
    _seconds(2)  # warm-up: one-time imports and compilation do not count
    seconds = {layers: _seconds(layers) for layers in LAYERS}
    ours = {layers: sum(s for stage, s in times.items() if stage != "export") for layers, times in seconds.items()}
    (n, few), (m, many) = next(iter(ours.items())), list(ours.items())[-1]
    return {"seconds": seconds, "exponent": math.log(many / few) / math.log(m / n)}


def _seconds(layers: int) -> dict[str, float]:
    start = time.perf_counter()
    captured = capture(*build_model("transformer-encoder", num_layers=layers), precision_named("fp16"))
    times = {"export": time.perf_counter() - start, "canonicalize": _best(canonicalize, captured.model)}
    sites = canonicalize(captured.model).sites
    assert sum(site.node is not None for site in sites) == layers
    lowerings: dict[str, Callable[[ir.Model], object]] = {
        "onnxruntime": lambda model: for_onnxruntime.lower(model, sites, {}),
        "tensorrt": lambda model: for_tensorrt.lower(model, sites),
    }
    return times | {f"lower for {name}": _best(lower, captured.model) for name, lower in lowerings.items()}


def _best(stage: Callable[[ir.Model], object], model: ir.Model) -> float:
    """Return the least time of three, each on a fresh copy."""
    return min(seconds_of(partial(stage, model.clone())) for _ in range(3))


def table(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    seconds = figures["seconds"]
    stages = list(next(iter(seconds.values())))
    header = ("seconds", *(f"{layers} layers" for layers in seconds))
    rows = [(stage, *(f"{times[stage]:.2f}" for times in seconds.values())) for stage in stages]
    where = f"{figures['machine']['processor']}, CPU threads: {figures['machine']['threads']}; `{figures['command']}`"
    law = f"All but the export grow with layers^{figures['exponent']:.2f}."
    return f"{markdown_table(header, rows)}\n\n{law} {where}"


EXPERIMENT = Experiment("scaling.json", measure, {"scaling": table}, threads=torch.get_num_threads)
