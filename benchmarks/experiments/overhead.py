"""The overhead of a Session over ONNX Runtime: the same model called through both, in turns.

`python -m benchmarks run overhead` writes `benchmarks/results/overhead.json`. Bare ONNX Runtime is
`InferenceSession.run_with_iobinding` on inputs and outputs that were bound once, so it neither checks nor allocates nor
binds anything. The Session does all three at every call.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import onnxruntime as ort
import torch
from torch import nn
from torch.export import Dim

import attnforge
from attnforge.atomic import temporary_folder
from attnforge.bundle import Bundle
from attnforge.model.registry import Example, build_model
from attnforge.runtime import cases as reference
from attnforge.runtime.race import in_turns, seconds_of
from benchmarks.experiment import Columns, Experiment, named, table_of, where
from benchmarks.published import deployed


class Subject(NamedTuple):
    """A model, and how it is called.

    Attributes:
        make: builds the model.
        calls: calls per turn.
        spreads: whether a call uses all threads.
    """

    make: Callable[[], Example]
    calls: int
    spreads: bool


def measure(subject: Subject, rounds: int = 60, threads: int = 2) -> dict[str, float]:
    """Measure median microseconds of a call, bare and through a Session, in turns."""
    with temporary_folder() as folder:
        bundle = deployed(subject.make(), folder / "bundle")
        return medians(bundle, threads if subject.spreads else 1, subject.calls, rounds)


def medians(bundle: Bundle, threads: int, calls: int, rounds: int) -> dict[str, float]:
    """Return median microseconds of a call of a bundle."""
    feeds = reference.make_inputs(reference.at(bundle.manifest.inputs, {}), bundle.manifest.inputs, {})
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    file = bundle.file(bundle.manifest.targets["onnxruntime"].model)
    bare: Any = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    binding = bare.io_binding()
    with attnforge.load(bundle, "onnxruntime-cpu", threads=threads) as session:
        results = session.run(feeds)
        for bind, arrays in ((binding.bind_input, feeds), (binding.bind_output, results)):
            for name, array in arrays.items():
                bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        contenders: dict[str, Callable[[], object]] = {
            "bare_us": lambda: bare.run_with_iobinding(binding),
            "session_us": lambda: session.run(feeds),
            "session_out_us": lambda: session.run(feeds, out=results),
        }
        times = in_turns({name: partial(_microseconds, call, calls) for name, call in contenders.items()}, rounds)
    us = {name: statistics.median(series) for name, series in times.items()}
    return {**us, "added_us": us["session_us"] - us["bare_us"], "ratio": us["session_us"] / us["bare_us"]}


def _microseconds(call: Callable[[], object], calls: int) -> float:
    """Return the microseconds of a call, as the mean of `calls` after an untimed one."""
    call()
    return 1e6 * seconds_of(call, calls) / calls


def _tiny() -> Example:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Example(nn.Linear(16, 16), (torch.randn(2, 16),), {"input": {0: Dim("batch", min=1, max=64)}})


COLUMNS: Columns = {
    "median µs a call": "{name}".format_map,
    "bare ONNX Runtime": "{bare_us:,.1f}".format_map,
    "Session": "{session_us:,.1f}".format_map,
    "Session, `out=`": "{session_out_us:,.1f}".format_map,
    "added": "{added_us:,.1f}".format_map,
    "ratio": "{ratio:.3f}".format_map,
}


def table(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    return f"{table_of(COLUMNS, named(figures['models']), None)}\n\n{where(figures)}"


EXPERIMENT = Experiment(
    "overhead.json",
    measure,
    {"overhead": table},
    subjects={
        "one linear layer, 2 × 16": Subject(_tiny, 500, spreads=False),
        "patch-attention, 3136 tokens": Subject(lambda: build_model("patch-attention"), 1, spreads=True),
    },
)
