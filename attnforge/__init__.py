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

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnforge.benchmarks.measure.bench import benchmark
    from attnforge.bundle import Bundle
    from attnforge.export.deploy import deploy
    from attnforge.export.diagnosis.diagnose import diagnose
    from attnforge.runtime.parity.verify import verify
    from attnforge.runtime.session import Session, load

__version__ = "0.1.0"
__all__ = ["Bundle", "Session", "benchmark", "deploy", "diagnose", "load", "verify"]

_HOME = {
    "Bundle": "attnforge.bundle",
    "Session": "attnforge.runtime.session",
    "benchmark": "attnforge.benchmarks.measure.bench",
    "deploy": "attnforge.export.deploy",
    "diagnose": "attnforge.export.diagnosis.diagnose",
    "load": "attnforge.runtime.session",
    "verify": "attnforge.runtime.parity.verify",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'attnforge' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
