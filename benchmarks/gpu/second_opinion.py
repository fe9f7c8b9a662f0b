"""A bundle's plan in Polygraphy's TrtRunner: a second opinion beside attnforge's own runtime, by the same rule.

Polygraphy is asked by its command, in a process of its own: it knows one of the two TensorRTs in a process.
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
    """The name of the second opinion on a flavour of TensorRT."""
    return f"{flavour} in Polygraphy"


def second_opinion(bundle: Bundle, flavour: str, device: int, scratch: Path, seconds: float) -> BackendReport:
    """The parity report on a bundle's plan that Polygraphy runs.

    Args:
        bundle: deployed for the flavour.
        flavour: `tensorrt` or `tensorrt_rtx`.
        device: number of the CUDA device.
        scratch: folder to write to.
        seconds: after which Polygraphy is ended.

    Raises:
        UnavailableError: the bundle has no plan for this device, or tensors that NumPy has no type for.
        RunError: Polygraphy failed, in its words.
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
    """The folder of CUDA's runtime library, which Polygraphy looks for by the paths of libraries alone."""
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
    """The parity report on a model of a bundle that a runner of Polygraphy's runs.

    Args:
        bundle: whose cases are run.
        model: file of the bundle.
        runner: Polygraphy's option for the runner, with those of its own.
        variables: of the environment.
        backend: whose budget it is held to.
        scratch: folder to write to.
        seconds: after which Polygraphy is ended.

    Raises:
        RunError: it failed, in its words.
        subprocess.TimeoutExpired: it did not end in time.
    """
    held, results = scratch / f"{bundle.path.name}.held", scratch / f"{bundle.path.name}.{backend}.json"
    if not held.exists():
        package(bundle, held)
    files = [str(held / BUNDLE / model), *runner, "--load-inputs", str(held / INPUTS), "--save-outputs", str(results)]
    with temporary_folder() as folder:
        done = subprocess.run(
            [sys.executable, "-P", "-c", POLYGRAPHY, "run", *files],
            env=environment({**variables, "POLYGRAPHY_AUTOINSTALL_DEPS": "0"}),
            cwd=folder, capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    if done.returncode != 0 or not results.exists():
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        last = next((line for line in lines if "[!]" in line), lines[-1] if lines else "it said nothing")
        raise RunError(f"polygraphy run ended with {done.returncode}: {last}")
    (report,) = verify_results(held / BUNDLE, results, backend).backends.values()
    return report
