"""A bundle's plan in Polygraphy's TrtRunner: a second opinion on attnforge's runtime, by the same rule.

Polygraphy runs through its command line, in its own process: it supports one of the two TensorRTs per process.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from attnforge.arrays import BFLOAT16
from attnforge.atomic import temporary_folder
from attnforge.bundle import Bundle
from attnforge.children import environment
from attnforge.errors import RunError, UnavailableError
from attnforge.machine import compute_capability
from attnforge.runtime.parity.results import verify_results
from attnforge.runtime.parity.verify import BackendReport
from attnforge.runtime.plans import engine_for
from attnforge.serving.polygraphy.folder import BUNDLE, INPUTS, package

POLYGRAPHY = "import sys; from polygraphy.tools import main; sys.exit(main())"


def opinion_of(flavour: str) -> str:
    """Return the name of the second opinion on a flavour of TensorRT."""
    return f"{flavour} in Polygraphy"


def second_opinion(bundle: Bundle, flavour: str, device: int, scratch: Path, seconds: float) -> BackendReport:
    """Return the parity report on a bundle's plan that Polygraphy runs.

    Args:
        bundle: a bundle deployed for the flavour.
        flavour: `tensorrt` or `tensorrt_rtx`.
        device: number of the CUDA device.
        scratch: folder to write to.
        seconds: timeout of Polygraphy.

    Raises:
        UnavailableError: the bundle has no plan for this device, or tensors of a type that NumPy lacks.
        RunError: Polygraphy failed; with its message.
        subprocess.TimeoutExpired: it did not end in time.
    """
    if any(spec.dtype == BFLOAT16.name for spec in bundle.manifest.inputs + bundle.manifest.outputs):
        raise UnavailableError("NumPy has no bfloat16, and Polygraphy's results of other libraries are pickles")
    version = importlib.import_module(flavour).__version__
    engine = engine_for(bundle.manifest.targets[flavour].engines, version, compute_capability(device))
    if isinstance(engine, str):
        raise UnavailableError(engine)
    variables = {
        "POLYGRAPHY_USE_TENSORRT_RTX": str(int(flavour == "tensorrt_rtx")),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [_cuda_runtime(), os.environ.get("LD_LIBRARY_PATH")])),
    }
    if device:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        variables["CUDA_VISIBLE_DEVICES"] = visible.split(",")[device].strip() if visible else str(device)
    return judged(bundle, engine.file, ["--trt"], variables, flavour, scratch, seconds)


def _cuda_runtime() -> str | None:
    """Return the folder of CUDA's runtime library, which Polygraphy searches only in the library path."""
    with suppress(ImportError, RuntimeError):
        library = importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib("cudart")
        return str(Path(library.abs_path).parent) if library.abs_path else None
    return None


def judged(
    bundle: Bundle,
    model: str,
    runner: Sequence[str],
    variables: Mapping[str, str],
    backend: str,
    scratch: Path,
    seconds: float,
) -> BackendReport:
    """Return the parity report on a model of a bundle that a Polygraphy runner runs.

    Args:
        bundle: the bundle, whose cases are run.
        model: file in the bundle.
        runner: Polygraphy's option for the runner, with the runner's options.
        variables: environment variables.
        backend: backend whose budget applies.
        scratch: folder to write to.
        seconds: timeout of Polygraphy.

    Raises:
        RunError: it failed; with its message.
        subprocess.TimeoutExpired: it did not end in time.
    """
    packaged, results = scratch / f"{bundle.path.name}.package", scratch / f"{bundle.path.name}.{backend}.json"
    if not packaged.exists():
        package(bundle, packaged)
    files = [
        str(packaged / BUNDLE / model), *runner, "--load-inputs", str(packaged / INPUTS), "--save-outputs", str(results)
    ]  # fmt: skip
    with temporary_folder() as folder:
        done = subprocess.run(
            [sys.executable, "-P", "-c", POLYGRAPHY, "run", *files],
            env=environment({**variables, "POLYGRAPHY_AUTOINSTALL_DEPS": "0"}),
            cwd=folder, capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    if done.returncode != 0 or not results.exists():
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        last = next((line for line in lines if "[!]" in line), lines[-1] if lines else "no output")
        raise RunError(f"polygraphy run exited with code {done.returncode}: {last}")
    (report,) = verify_results(packaged / BUNDLE, results, backend).backends.values()
    return report
