"""attnforge deploys PyTorch attention models to ONNX Runtime, OpenVINO and TensorRT, and verifies accuracy, fusion and
speed.

    bundle = attnforge.deploy(module, args, "bundle/", dynamic_shapes=…, precision="fp16")
    session = attnforge.load("bundle/")
    report = attnforge.verify("bundle/")
    finding = attnforge.diagnose("bundle/").finding
    figures = attnforge.benchmark("bundle/")

Names are imported when they are first used: loading and running a bundle imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from attnforge.keywords import guessable
from attnforge.version import __version__

if TYPE_CHECKING:
    from attnforge.bench.run import benchmark
    from attnforge.bundle import Bundle, Trusted, sign
    from attnforge.bundle import Bundle as inspect
    from attnforge.export.deploy import deploy
    from attnforge.export.diagnosis.diagnose import diagnose
    from attnforge.runtime.backends.backend import Target
    from attnforge.runtime.parity.verify import verify
    from attnforge.runtime.session import Session

__all__ = [
    "Bundle", "Session", "Target", "__version__", "bench", "benchmark", "deploy", "diagnose", "inspect", "load", "run",
    "sign", "verify",
]  # fmt: skip

# ONNX Runtime 1.29 and later otherwise send usage data to Microsoft
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

_HOME = {
    "Bundle": "attnforge.bundle",
    "Session": "attnforge.runtime.session",
    "Target": "attnforge.runtime.backends.backend",
    "bench": "attnforge.bench.run:benchmark",
    "benchmark": "attnforge.bench.run",
    "deploy": "attnforge.export.deploy",
    "diagnose": "attnforge.export.diagnosis.diagnose",
    "inspect": "attnforge.bundle:Bundle",
    "sign": "attnforge.bundle",
    "verify": "attnforge.runtime.parity.verify",
}
"""The module of every name, and its name there if that is another. `bench` and `inspect` are the verbs of the command
line."""


@guessable()
def load(
    bundle: str | os.PathLike[str] | Bundle,
    backend: str = "auto",
    *,
    module: Any = None,
    threads: int | None = None,
    device: int = 0,
    contexts: int = 4,
    graphs: bool | None = None,
    cache: bool = True,
    rebuild: bool = False,
    trusted: Trusted = None,
) -> Session:
    """Load a bundle, ready to run.

    Args:
        bundle: its folder.
        backend: one of

            - `auto`: on the machine that deployed the bundle, the backend measured as fastest within the parity budget
              there, on a GPU if one can run it. Elsewhere the first that can run it of TensorRT, TensorRT-RTX, and
              ONNX Runtime with TensorRT, on CUDA, and on the CPU. TensorRT plans can run code, so `auto` skips plans
              that were neither built by this user nor signed by a trusted key.
            - `tensorrt`, `tensorrt_rtx`, `onnxruntime-tensorrt`, `onnxruntime-cuda`, `onnxruntime-cpu` or `openvino`:
              this backend. A CPU backend does not initialise CUDA, so the process may fork afterwards.
            - `onnxruntime`: ONNX Runtime on a GPU if it can run there, else on the CPU.
            - `eager`: the torch module itself, at the bundle's precision.
        module: the torch module, for `eager`.
        threads: number of threads of one run on a CPU backend; by default the backend's choice.
        device: number of the CUDA device; on a CPU backend only 0.
        contexts: maximum number of concurrent calls on a GPU, each with its own activation memory, and of concurrent
            :meth:`Session.run_async` runs on a CPU; further callers wait.
        graphs: whether to replay CUDA graphs. By default TensorRT replays them for repeated shapes and addresses, and
            ONNX Runtime does not, because it would have to copy inputs and outputs.
        cache: whether to keep what TensorRT compiles for this device on disk, in `BUNDLE.cache` next to the bundle.
        rebuild: whether to build a plan from the bundle's own model, and add it to the bundle, if the bundle has no
            plan that this machine can load: none for its version or device, or the file was altered. This changes the
            bundle, so its signature is removed; if a signature is required, nothing is built.
        trusted: files of public keys, one of which must have signed the bundle (:func:`sign`); by default those named
            by `ATTNFORGE_TRUSTED`. False requires no signature, whatever the variable says.

    Raises:
        BundleError: the folder contains no bundle of this schema, or a required file is missing or altered.
        SignatureError: a BundleError: a signature is required, and the bundle has none, one by another key, or was
            altered.
        UnknownNameError: no such backend.
        UsageError: no such device, a device for a backend that runs on the CPU, or fewer than one context.
        UnavailableError: this machine or this bundle cannot run it; the message says what would.
        BuildError: the plan could not be rebuilt.
    """
    from attnforge.runtime import session

    if rebuild:
        from attnforge.export.tensorrt.rebuild import rebuilt

        bundle, trusted = rebuilt(bundle, backend, device, trusted=trusted), None
    return session.load(
        bundle, backend, module=module, threads=threads, device=device, contexts=contexts, graphs=graphs, cache=cache,
        trusted=trusted,
    )  # fmt: skip


def run(
    bundle: str | os.PathLike[str] | Bundle, values: Mapping[str, Any], backend: str = "auto", **options: Any
) -> dict[str, Any]:
    """Load a bundle, run it once on inputs by name, and close it. For more than one run, :func:`load` it.

    Args:
        bundle: its folder.
        values: the inputs, by name.
        backend: as for :func:`load`, which the other options are for too.

    Returns:
        the outputs by name.

    Raises:
        AttnforgeError: as for :func:`load` and :meth:`Session.run`.
    """
    with load(bundle, backend, **options) as session:
        return session.run(values)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'attnforge' has no attribute {name!r}")
    module, _, other = _HOME[name].partition(":")
    return getattr(import_module(module), other or name)


def __dir__() -> list[str]:
    return sorted(__all__)
