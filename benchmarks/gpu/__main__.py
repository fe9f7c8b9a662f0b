"""All checks and measurements that need a GPU: looks for the device, then runs the steps one after another."""

from __future__ import annotations

import importlib
import platform
import shlex
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from attnforge.machine import compute_capability, cuda_devices, device_name, tool_versions, versions
from benchmarks.experiment import RESULTS
from benchmarks.gpu.running import read, supervise, write
from benchmarks.gpu.steps import COMMAND, SHARES, GpuResults, Settings, StepResult, failed_tests, wrong_answers

NO_DEVICE = 3
"""Exit code without a CUDA device."""


def main(
    out: Annotated[Path, typer.Option(help="Where to write gpu.json and gpu.md.")] = RESULTS,
    seconds: Annotated[float, typer.Option(help="Approximate time limit of the run, in seconds.")] = 450,
    quick: Annotated[bool, typer.Option(help="Fewer models, sizes and precisions.")] = False,
    device: Annotated[int, typer.Option(help="Number of the CUDA device.")] = 0,
    bundles: Annotated[Path | None, typer.Option(help="Folder of bundles deployed elsewhere.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="A step; repeatable. Figures of the others are kept.")] = None,
) -> None:
    """Run all checks and measurements that need a GPU, and write the results.

    A machine without a GPU can deploy the registered models for it: `python -m benchmarks.gpu.parity FOLDER`, and then
    `--bundles FOLDER` here.
    """
    if unknown := [name for name in only or () if name not in SHARES]:
        raise typer.BadParameter(f"unknown step {unknown[0]!r}; known: {', '.join(SHARES)}")
    if cuda_devices() <= device:
        missing = f"no CUDA device {device}, of {cuda_devices()}" if cuda_devices() else "no CUDA device"
        hint = "run this on a machine with a CUDA device and driver; attnforge doctor lists what a machine can do"
        print(f"{missing}: nothing was run; {hint}", file=sys.stderr)
        raise typer.Exit(NO_DEVICE)
    from benchmarks.gpu.parity import supervise_models  # imports torch

    results = GpuResults(
        command=shlex.join([*COMMAND.split(), *sys.argv[1:]]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        budget_seconds=seconds,
        machine=device_and_versions(device),
    )
    if only:
        results.steps = {name: step for name, step in _earlier_steps(out, results).items() if name not in only}
    start = time.time()
    write(results, out)
    with tempfile.TemporaryDirectory(prefix="attnforge-gpu-", ignore_cleanup_errors=True) as scratch:
        settings = Settings(out=str(out), scratch=scratch, ends=start + seconds, device=device, quick=quick)
        settings.bundles = None if bundles is None else str(bundles.resolve())
        for name in [name for name in SHARES if not only or name in only]:
            print(f"{name} …", file=sys.stderr, flush=True)
            now = time.time()
            of_step = settings.model_copy(update={"ends": now + SHARES[name] * (settings.ends - now)})
            supervise_models(of_step) if name == "parity" else supervise(of_step, name)
            results = read(out)
            results.seconds = time.time() - start
            write(results, out)
    for claim in results.claims:
        print(f"{claim.answer}: {claim.text} ({claim.because})")
    for failed in failed_tests(results):
        print(f"failed: {failed}")
    print(f"{Path(out) / 'gpu.md'}: {results.seconds:.0f} s", file=sys.stderr)
    raise typer.Exit(1 if wrong_answers(results) or failed_tests(results) else 0)


def _earlier_steps(out: Path, results: GpuResults) -> dict[str, StepResult]:
    """Return the steps of an earlier run on the same device with the same versions; empty if there is no such run."""
    try:
        earlier = read(out)
    except ValueError:  # another version of attnforge wrote the file
        return {}
    return earlier.steps if earlier.machine == results.machine else {}


def device_and_versions(device: int) -> dict[str, str]:
    """Return the device and the versions: figures of two runs can be combined only if these are equal."""
    driver = int(importlib.import_module("cuda.bindings.driver").cuDriverGetVersion()[1])
    return {
        "device": device_name(device),
        "compute capability": compute_capability(device),
        "CUDA of the driver": f"{driver // 1000}.{driver % 1000 // 10}",
        "python": platform.python_version(),
        **tool_versions(),
        **versions(("triton", "cuda-core", "cuda-bindings")),
    }


if __name__ == "__main__":
    typer.run(main)
