"""What a Session adds to ONNX Runtime: the same model called through it and bare, in turns.

`python -m benchmarks run overhead` writes `benchmarks/results/overhead.json`. Bare is
`InferenceSession.run_with_iobinding` on inputs and outputs that were bound once, so it neither checks nor allocates nor
binds anything. The Session does all three at every call.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import onnxruntime as ort
import torch
from torch import nn
from torch.export import Dim

import attnforge
from attnforge.bundle import Bundle
from attnforge.model.registry import build_model
from attnforge.report.render import markdown_table
from attnforge.runtime import cases as reference
from attnforge.runtime.race import in_turns, seconds_of
from benchmarks.experiment import Experiment, where


class Subject(NamedTuple):
    """A model, and how it is called.

    Attributes:
        make: makes the model.
        calls: of a turn.
        spreads: whether a call uses all threads.
    """

    make: Callable[[], Sequence[Any]]
    calls: int
    spreads: bool


def measure(subject: Subject, rounds: int = 60, threads: int = 2) -> dict[str, float]:
    """Median microseconds of a call, bare and through a Session, over rounds of calls each in turn."""
    with tempfile.TemporaryDirectory() as folder:
        module, args, shapes = subject.make()
        bundle = attnforge.deploy(module, args, Path(folder) / "bundle", shapes, targets=["onnxruntime"])
        return medians(bundle, threads if subject.spreads else 1, subject.calls, rounds)


def medians(bundle: Bundle, threads: int, calls: int, rounds: int) -> dict[str, float]:
    """Median microseconds of a call of a bundle."""
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
    us = {name: statistics.median(series) for name, series in times.items()}
    added = us["session_us"] - us["bare_us"]
    return {**us, "added_us": added, "ratio": us["session_us"] / us["bare_us"]}


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


EXPERIMENT = Experiment(
    "overhead.json",
    measure,
    lambda figures: {"overhead": table(figures)},
    subjects={
        "one linear layer, 2 × 16": Subject(_tiny, 500, spreads=False),
        "patch-attention, 3136 tokens": Subject(lambda: build_model("patch-attention"), 1, spreads=True),
    },
)
