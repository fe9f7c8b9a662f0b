"""TensorRT plans, and what the builder says it compiled.

`tensorrt_rtx` is the real builder and needs no GPU; the full `tensorrt` builds for the GPU at hand. Both know strongly
typed networks only: every tensor's type is the graph's.
"""

from __future__ import annotations

import importlib
import re
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from attnforge.bundle import DimSpec, TensorSpec
from attnforge.errors import BuildError, UnavailableError, UsageError

FLAVOURS = ("tensorrt", "tensorrt_rtx")
PORTABLE = "portable"
"""What a TensorRT-RTX plan is built for unless told otherwise: every NVIDIA GPU from Ampere on."""

_LAYER = re.compile(
    r"^Name: (?P<name>[^,]*), LayerType: (?P<type>[^,]*),.*?TacticName: (?P<tactic>[^,]*),.*Metadata: ?(?P<meta>.*)$"
)
_ONNX_NODE = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
_FUSED_ATTENTION = re.compile(r"_mha_")


@dataclass(frozen=True)
class Layer:
    """A layer of a compiled plan, and the names of the ONNX nodes that it does the work of."""

    name: str
    type: str
    tactic: str
    onnx_nodes: tuple[str, ...]

    @property
    def is_fused_attention(self) -> bool:
        return _FUSED_ATTENTION.search(self.name) is not None


@dataclass(frozen=True)
class Plan:
    """A serialized engine.

    Attributes:
        data: the plan itself.
        version: of the TensorRT that built it, the only one sure to load it.
        layers: what was compiled, as the builder listed it.
        seconds: how long building took.
    """

    data: bytes
    version: str
    layers: list[Layer]
    seconds: float

    def kernel_of(self, onnx_node: str) -> str | None:
        """Name of the fused attention layer that does the work of `onnx_node`, or None."""
        return next((la.name for la in self.layers if la.is_fused_attention and onnx_node in la.onnx_nodes), None)

    def layers_of(self, onnx_node: str) -> list[str]:
        return [layer.name for layer in self.layers if onnx_node in layer.onnx_nodes]


def load_tensorrt(flavour: str) -> Any:
    """The `tensorrt` or `tensorrt_rtx` module.

    Raises:
        UnavailableError: it is not installed, or its libraries do not load; says what to install.
    """
    try:
        return importlib.import_module(flavour)
    except ImportError as error:
        package = "tensorrt_rtx" if flavour == "tensorrt_rtx" else "attnforge[tensorrt]"
        raise UnavailableError(f"{flavour} cannot be used here ({error}); pip install {package}") from error


def build(
    onnx_file: Path, flavour: str, inputs: list[TensorSpec], precision: str, compute_capabilities: tuple[str, ...] = ()
) -> Plan:
    """Build a plan from `onnx_file`.

    Args:
        onnx_file: the lowered graph.
        flavour: `tensorrt` or `tensorrt_rtx`.
        inputs: their dynamic dims become one optimization profile.
        precision: `tf32` lets fp32 products round their factors to TF32; nothing else is not in the graph.
        compute_capabilities: for TensorRT-RTX, such as `("SM89", "SM120")` or `("CURRENT",)`; by default portable.

    Raises:
        UnavailableError: the flavour is not installed here.
        UsageError: a compute capability that it does not know.
        BuildError: the parser or the builder refused, in its own words.
    """
    trt = load_tensorrt(flavour)
    log = _logger(trt)
    log.messages.clear()
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(onnx_file)):
        reasons = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
        raise BuildError(f"{flavour} cannot parse {onnx_file.name}: {reasons}")
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if precision == "tf32":
        config.set_flag(trt.BuilderFlag.TF32)
    else:
        config.clear_flag(trt.BuilderFlag.TF32)
    if compute_capabilities:
        _set_compute_capabilities(trt, config, flavour, compute_capabilities)
    if any(isinstance(dim, DimSpec) for spec in inputs for dim in spec.dims):
        profile = builder.create_optimization_profile()
        for spec in inputs:
            profile.set_shape(spec.name, *(_bound(spec, which) for which in ("min", "opt", "max")))
        config.add_optimization_profile(profile)
    start = time.perf_counter()
    data = builder.build_serialized_network(network, config)
    seconds = time.perf_counter() - start
    if data is None:
        raise BuildError(f"{flavour} cannot build {onnx_file.name}: {log.last_error()}")
    return Plan(bytes(data), trt.__version__, _layers(log.messages), seconds)


def _bound(spec: TensorSpec, which: str) -> tuple[int, ...]:
    return tuple(d if isinstance(d, int) else getattr(d, which) for d in spec.dims)


def _set_compute_capabilities(trt: Any, config: Any, flavour: str, names: tuple[str, ...]) -> None:
    if flavour != "tensorrt_rtx":
        raise UsageError(f"{flavour} builds for the GPU at hand; compute capabilities are chosen for tensorrt_rtx only")
    known = [name for name in dir(trt.ComputeCapability) if name.startswith("SM") or name == "CURRENT"]
    if unknown := [name for name in names if name not in known]:
        raise UsageError(
            f"unknown compute capability {unknown[0]!r}; {flavour} {trt.__version__} knows {', '.join(known)}"
        )
    config.num_compute_capabilities = len(names)
    for i, name in enumerate(names):
        config.set_compute_capability(getattr(trt.ComputeCapability, name), i)


def _layers(messages: list[tuple[int, str]]) -> list[Layer]:
    lines = [line for _, text in messages if text.startswith("Layers:") for line in text.splitlines()]
    matches = [match for line in lines if (match := _LAYER.match(line))]
    return [Layer(m["name"], m["type"], m["tactic"], tuple(_ONNX_NODE.findall(m["meta"]))) for m in matches]


_LOGGERS: dict[str, Any] = {}


def _logger(trt: ModuleType) -> Any:
    """One logger a flavour and process: TensorRT keeps the first that it is given."""
    if trt.__name__ not in _LOGGERS:

        class Log(trt.ILogger):  # type: ignore[name-defined, misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)
                self.messages: list[tuple[int, str]] = []

            def log(self, severity: Any, message: str) -> None:
                self.messages.append((int(severity), message))

            def last_error(self) -> str:
                errors = [text for severity, text in self.messages if severity <= int(trt.ILogger.ERROR)]
                return errors[-1].strip() if errors else "it gave no reason"

        _LOGGERS[trt.__name__] = Log()
    return _LOGGERS[trt.__name__]
