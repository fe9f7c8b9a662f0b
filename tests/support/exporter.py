"""What torch's exporter makes anew for each export, though it is the same for all: a third of a small export's time.

This is torchlib's registry of 500 functions, with the signature of each; the table of decompositions, which follows
from it; and the operators that torch asks its C++ dispatcher for. No argument of `torch.onnx.export` spares them, so
the product leaves them as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch._export.utils
import torch.fx.config
from onnxscript.values import TracedOnnxFunction
from torch.onnx._internal.exporter import _decomp
from torch.onnx._internal.exporter._constants import TORCHLIB_OPSET as OPSET
from torch.onnx._internal.exporter._registration import ONNXRegistry


def make_once() -> None:
    """Make these once for a process. Each export gets copies of what it may change."""
    from_torchlib = functools.cache(ONNXRegistry.from_torchlib)

    def registry(_: type[ONNXRegistry], opset_version: int = OPSET) -> ONNXRegistry:
        full, copied = from_torchlib(opset_version), ONNXRegistry()
        copied._opset_version = opset_version
        copied.functions = {target: [*functions] for target, functions in full.functions.items()}
        return copied

    ONNXRegistry.from_torchlib = classmethod(registry)  # type: ignore[method-assign,assignment]

    make_table = _decomp.create_onnx_friendly_decomposition_table
    table_of = functools.cache(lambda operators: make_table(set(operators)))

    def table(operators: set[Any]) -> dict[Any, Callable[..., Any]]:
        return {**table_of(frozenset(operators))}

    _decomp.create_onnx_friendly_decomposition_table = table  # type: ignore[assignment]

    materialize = functools.cache(torch._export.utils._materialize_cpp_cia_ops)
    torch._export.utils._materialize_cpp_cia_ops = materialize

    # Nodes, too, ask for the signature, for which onnxscript reads and parses the function's source each time.
    signature_of = cast(property, TracedOnnxFunction.function_ir).fget
    assert signature_of is not None
    TracedOnnxFunction.function_ir = property(functools.cache(signature_of))  # type: ignore[method-assign,assignment]

    # Where in the sources each node was made: nothing of it is read.
    torch.fx.config.do_not_emit_stack_traces = True
