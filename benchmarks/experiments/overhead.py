"""What a Session adds to ONNX Runtime: the same model called through it and bare, in turns.

`python -m benchmarks.experiments.overhead` writes `benchmarks/results/overhead.json`. Bare is
`InferenceSession.run_with_iobinding` on inputs and outputs that were bound once, so it neither checks nor allocates nor
binds anything. The Session does all three at every call.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import onnxruntime as ort
import torch
import typer
from rich.console import Console
from torch import nn
from torch.export import Dim

import attnforge
from attnforge.bundle import Bundle
from attnforge.model.registry import build_model
from attnforge.report.render import markdown_table
from attnforge.runtime import cases as reference
from attnforge.runtime.turns import in_turns, seconds_of
from benchmarks.publish import RESULTS, show, where, write_figures

COMMAND = "python -m benchmarks.experiments.overhead"


def main(
    results: Annotated[Path, typer.Option(help="Where to write the figures.")] = RESULTS / "overhead.json",
    rounds: int = 60,
    threads: int = 2,
) -> None:
    """Measure, and write the figures."""
    models: dict[str, tuple[tuple[Any, ...], int, int]] = {
        "one linear layer, 2 × 16": (_tiny(), 1, 500),
        "patch-attention, 3136 tokens": (tuple(build_model("patch-attention")), threads, 1),
    }
    measured = {}
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, ((module, args, shapes), spread, calls)) in enumerate(models.items()):
            Console().print(f"{name} …", style="dim")
            bundle = attnforge.deploy(module, args, Path(folder) / str(i), shapes, targets=["onnxruntime"])
            measured[name] = measure(bundle, spread, calls, rounds)
    write_figures(COMMAND, threads, results, models=measured)
    show(results, table)


def measure(bundle: Bundle, threads: int, calls: int, rounds: int) -> dict[str, float]:
    """Median microseconds of a call, bare and through a Session, over rounds of `calls` calls each in turn."""
    feeds = reference.make_inputs(reference.at(bundle.manifest.inputs, {}), bundle.manifest.inputs, {})
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    file = bundle.file(bundle.manifest.targets["onnxruntime"].model)
    bare: Any = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    binding = bare.io_binding()
    with attnforge.load(bundle, "onnxruntime-cpu", threads=threads) as session:
        results = session.run(feeds)
        for name, array in feeds.items():
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name, array in results.items():
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        contenders: dict[str, Callable[[], object]] = {
            "bare_us": lambda: bare.run_with_iobinding(binding),
            "session_us": lambda: session.run(feeds),
            "session_out_us": lambda: session.run(feeds, out=results),
        }
        turns = {name: partial(_microseconds, call, calls) for name, call in contenders.items()}
        times = in_turns(turns, rounds)
    medians = {name: statistics.median(series) for name, series in times.items()}
    added = medians["session_us"] - medians["bare_us"]
    return {**medians, "added_us": added, "ratio": medians["session_us"] / medians["bare_us"]}


def _microseconds(call: Callable[[], object], calls: int) -> float:
    """Microseconds of a call, the mean of `calls` after one that is not timed."""
    call()
    return 1e6 * seconds_of(call, calls) / calls


def _tiny() -> tuple[Any, ...]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(16, 16), (torch.randn(2, 16),), ({0: Dim("batch", min=1, max=64)},)


def table(figures: dict[str, Any]) -> str:
    """The figures as Markdown."""
    header = ("median µs a call", "bare ONNX Runtime", "Session", "Session, `out=`", "added", "ratio")
    rows = [
        (
            name,
            *(f"{of[key]:,.1f}" for key in ("bare_us", "session_us", "session_out_us", "added_us")),
            f"{of['ratio']:.3f}",
        )
        for name, of in figures["models"].items()
    ]
    return f"{markdown_table(header, rows)}\n\n{where(figures)}"


if __name__ == "__main__":
    typer.run(main)
