"""Patch attention on the CPU: time against the plain export, and memory over tokens.

`python -m attnforge.benchmarks.patch_attention` writes `benchmarks/results/patch_attention.json` and refreshes the
table in the README. Both models run in ONNX Runtime with the same threads, the times in one run, the memory in a fresh
process each.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import onnxruntime as ort
import typer
from rich.console import Console

import attnforge
from attnforge import reference
from attnforge.benchmarks.peers import save_plain
from attnforge.benchmarks.report import RESULTS, machine, publish
from attnforge.bundle import Bundle, Source
from attnforge.export.deploy import tool_versions
from attnforge.model.registry import build_model

SIDES = (28, 56, 79, 112)
"""Patches a side: 784, 3136, 6241 and 12544 tokens."""

COMMAND = "python -m attnforge.benchmarks.patch_attention"


def main(
    results: Annotated[Path, typer.Option(help="Where to write the figures.")] = RESULTS / "patch_attention.json",
    readme: Annotated[Path | None, typer.Option(help="Whose table to refresh.")] = Path("README.md"),
    rounds: int = 30,
    threads: int = 2,
) -> None:
    """Measure, write the figures, and refresh the README's table from them."""
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        console.print("deploy …", style="dim")
        bundle, plain = _deploy(Path(folder))
        console.print("time …", style="dim")
        against = ("eager", "onnxruntime-plain")
        latency = attnforge.benchmark(bundle, ["onnxruntime-cpu"], against, rounds=rounds, threads=threads)
        console.print("memory …", style="dim")
        models = {"attnforge": bundle.file(bundle.manifest.targets["onnxruntime"].model), "plain": plain}
        memory = {name: {side**2: _extra_mib(file, side, threads) for side in SIDES} for name, file in models.items()}
    figures = {
        "command": COMMAND,
        "machine": machine(threads),
        "tools": tool_versions(),
        "latency": latency.model_dump(exclude={"bundle"}),
        "ratio_to_plain": 1 / latency.peers["onnxruntime-plain"].ratio,
        "extra_memory_mib": memory,
        "memory_exponent": {name: _exponent(series) for name, series in memory.items()},
    }
    text = table(figures)
    console.print(text)
    publish(figures, text, "patch-attention", results, readme)


def _deploy(folder: Path) -> tuple[Bundle, Path]:
    options: dict[str, Any] = {"max_image_size": 4 * max(SIDES), "max_batch": 1}
    module, args, dynamic_shapes = build_model("patch-attention", **options)
    source = Source(kind="registered", name="patch-attention", options=options)
    bundle = attnforge.deploy(
        module, args, folder / "bundle", dynamic_shapes, targets=["onnxruntime"], name="patch-attention", source=source
    )
    feeds = reference.make_inputs(reference.cases(bundle.manifest.inputs)[1], bundle.manifest.inputs, {})
    save_plain(bundle, module, feeds, folder / "plain.onnx")
    return bundle, folder / "plain.onnx"


# --- memory -----------------------------------------------------------------------------------------------------------


def _extra_mib(file: Path, side: int, threads: int) -> float:
    """What one run adds to the peak memory of a process that has loaded the model, in MiB."""
    command = [
        sys.executable,
        "-m",
        "attnforge.benchmarks.patch_attention",
        "--measure",
        str(file),
        str(side),
        str(threads),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def _measure(file: str, side: int, threads: int) -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session: Any = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    image = np.random.default_rng(0).standard_normal((1, 3, 4 * side, 4 * side), np.float32)
    session.run(None, {"image": image[:, :, :8, :8]})
    Path("/proc/self/clear_refs").write_text("5")  # starts the peak anew (Linux)
    before = _status("VmRSS")
    session.run(None, {"image": image})
    print((_status("VmHWM") - before) / 1024)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _exponent(series: dict[int, float]) -> float:
    """The p of memory ~ tokensᵖ, between the two largest sizes."""
    (n, small), (m, large) = list(series.items())[-2:]
    return math.log(large / small) / math.log(m / n)


# --- the page ---------------------------------------------------------------------------------------------------------


def table(figures: dict[str, Any]) -> str:
    """The figures as Markdown."""
    latency, memory = figures["latency"], figures["extra_memory_mib"]
    ours, peers = latency["backends"]["onnxruntime-cpu"], latency["peers"]
    sizes = list(next(iter(memory.values())))
    columns = " | ".join(f"MiB at {size} tokens" for size in sizes)
    header = f"| | median ms, 3136 tokens | to attnforge | {columns} | memory ~ tokens^ |"
    lines = [header, "|" + "---|" * (4 + len(sizes))]
    rows = {
        "attnforge on ONNX Runtime": (ours, "attnforge"),
        "ONNX Runtime, plain export": (peers["onnxruntime-plain"], "plain"),
    }
    for label, (time, key) in rows.items():
        cells = " | ".join(f"{value:.0f}" for value in memory[key].values())
        exponent = figures["memory_exponent"][key]
        lines.append(f"| {label} | {time['median_ms']:.1f} | {time['ratio']:.2f} | {cells} | {exponent:.2f} |")
    eager = peers["eager"]
    lines.append(f"| eager | {eager['median_ms']:.1f} | {eager['ratio']:.2f} |" + " |" * (len(sizes) + 1))
    where = f"{figures['machine']['processor']}, {figures['machine']['threads']} threads; `{figures['command']}`"
    return "\n".join([*lines, "", where])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        _measure(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        typer.run(main)
