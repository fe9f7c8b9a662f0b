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
    from attnforge.benchmarks.measure import benchmark
    from attnforge.bundle import Bundle
    from attnforge.export.deploy import deploy
    from attnforge.export.diagnosis.diagnose import diagnose
    from attnforge.runtime import Session, load, verify

__version__ = "0.1.0"
__all__ = ["Bundle", "Session", "benchmark", "deploy", "diagnose", "load", "verify"]

_HOME = {
    "Bundle": "attnforge.bundle",
    "Session": "attnforge.runtime",
    "benchmark": "attnforge.benchmarks.measure",
    "deploy": "attnforge.export.deploy",
    "diagnose": "attnforge.export.diagnosis.diagnose",
    "load": "attnforge.runtime",
    "verify": "attnforge.runtime",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'attnforge' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
