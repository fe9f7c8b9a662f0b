"""attnforge takes attention models from eager PyTorch to ONNX and TensorRT, and proves that they are still the same
function, still fused, and how fast.

    bundle = attnforge.deploy(module, args, "bundle/", dynamic_shapes=…, precision="fp16")
    session = attnforge.load("bundle/")
    report = attnforge.verify("bundle/")
    finding = attnforge.diagnose("bundle/").finding
    figures = attnforge.benchmark("bundle/")

Names are imported when they are first used: loading and running a bundle imports no torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from attnforge.version import __version__

if TYPE_CHECKING:
    from attnforge.bench.run import benchmark
    from attnforge.bundle import Bundle, Trusted, sign
    from attnforge.export.deploy import deploy
    from attnforge.export.diagnosis.diagnose import diagnose
    from attnforge.runtime.parity.verify import verify
    from attnforge.runtime.session import Session

__all__ = ["Bundle", "Session", "__version__", "benchmark", "deploy", "diagnose", "load", "sign", "verify"]

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # ONNX Runtime 1.29 and later send usage to Microsoft, unless told

_HOME = {
    "Bundle": "attnforge.bundle",
    "Session": "attnforge.runtime.session",
    "benchmark": "attnforge.bench.run",
    "deploy": "attnforge.export.deploy",
    "diagnose": "attnforge.export.diagnosis.diagnose",
    "sign": "attnforge.bundle",
    "verify": "attnforge.runtime.parity.verify",
}


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

            - `auto`: on the machine that deployed the bundle, the backend that was measured there to be fastest within
              the parity budget, on a GPU where one can run it. Elsewhere the first backend that can run it of
              TensorRT, TensorRT-RTX, and ONNX Runtime with TensorRT, on CUDA, and on the CPU. TensorRT's plans can run
              code, so `auto` passes over those that neither this user built nor a trusted key has signed.
            - `tensorrt`, `tensorrt_rtx`, `onnxruntime-tensorrt`, `onnxruntime-cuda`, `onnxruntime-cpu` or `openvino`:
              this backend. A backend of the CPU leaves CUDA alone, so the process may fork after it.
            - `onnxruntime`: ONNX Runtime on a GPU where it can run there, else on the CPU.
            - `eager`: the torch module itself, at the bundle's precision.
        module: the torch module, for `eager`.
        threads: over how many a CPU backend spreads one run; by default its own choice.
        device: number of the CUDA device.
        contexts: how many calls may run at once on a GPU, each with activation memory of its own, and how many runs of
            :meth:`Session.run_async` on a CPU; further callers wait.
        graphs: whether to replay CUDA graphs. By default TensorRT replays them for shapes and addresses that come
            again, and ONNX Runtime does not, because it has to copy inputs and outputs for that.
        cache: whether to keep what TensorRT compiles for this device on disk, in `BUNDLE.cache` beside the bundle.
        rebuild: whether to build a plan from the bundle's own model, and add it to the bundle, where the bundle has no
            plan that this machine can load: for its version, for its device, or because the file was altered. The
            bundle is another one then: its signature is removed, and where one is asked for, nothing is built.
        trusted: files of public keys, one of which must have signed the bundle (:func:`sign`); by default those that
            `ATTNFORGE_TRUSTED` names. False asks for no signature, whatever the variable says.

    Raises:
        BundleError: the folder holds no bundle of this schema, or a file that is needed is missing or altered.
        SignatureError: a BundleError: a signature is asked for, and the bundle has none, another, or was altered.
        UnknownNameError: no such backend.
        UsageError: no such device, or fewer than one context.
        UnavailableError: this machine or this bundle cannot run it; says what would.
        BuildError: the plan could not be built again.
    """
    from attnforge.runtime import session

    if rebuild:
        from attnforge.export.tensorrt.rebuild import rebuilt

        bundle, trusted = rebuilt(bundle, backend, device, trusted=trusted), None
    return session.load(
        bundle,
        backend,
        module=module,
        threads=threads,
        device=device,
        contexts=contexts,
        graphs=graphs,
        cache=cache,
        trusted=trusted,
    )


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'attnforge' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
