"""What torch's exporter does anew for every export, done once a process: a third of the time of a small export.

It parses the source of all ONNX functions that it could need, and looks up all operators of torch that are made of
others. Neither differs between the exports of a run.
"""

from __future__ import annotations

import copy
import functools

import torch
import torch._export.utils as export_utils
from torch.onnx._internal.exporter._registration import ONNXRegistry


def share_between_exports() -> None:
    """Let all exports of this process share what does not differ between them."""
    read, look_up = ONNXRegistry.from_torchlib, export_utils._materialize_cpp_cia_ops
    read_once, look_up_once = functools.cache(read), functools.cache(lambda number: look_up())

    def from_torchlib(opset_version: int) -> ONNXRegistry:
        registry = copy.copy(read_once(opset_version))
        registry.functions = {target: list(metas) for target, metas in registry.functions.items()}
        return registry

    def materialize() -> None:
        composite = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        look_up_once(len(composite))  # grows where a library is imported

    ONNXRegistry.from_torchlib = staticmethod(from_torchlib)  # type: ignore[assignment]
    export_utils._materialize_cpp_cia_ops = materialize
