"""The TensorRT builder in a process of its own: `python -m attnforge.export.tensorrt.process < request`.

The builder is native code, and some graphs crash it (seen with TensorRT-RTX 1.7). In a process of its own that is an
error to report, and the calling process goes on. The request comes on standard input as JSON, the answer leaves on
standard output; the plan goes straight to its file.
"""

from __future__ import annotations

import importlib
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from attnforge import cache
from attnforge.bundle import Range, TensorSpec
from attnforge.children import end_with_parent
from attnforge.memory import peak
from attnforge.records import Record

_LAYER = re.compile(
    r"^Name: (?P<name>[^,]*), LayerType: (?P<type>[^,]*),.*?TacticName: (?P<tactic>[^,]*),.*Metadata: ?(?P<meta>.*)$"
)
_MEMORY = re.compile(r"Total Activation Memory: (\d+) bytes")
_ONNX_NODE = re.compile(r"\[ONNX Layer: ([^\]]*)\]")


class Layer(Record):
    """A layer of a compiled plan.

    Attributes:
        name: TensorRT's own.
        type: TensorRT's kind of layer.
        tactic: the kernel that TensorRT chose.
        onnx_nodes: names of the ONNX nodes that the layer computes.
    """

    name: str
    type: str
    tactic: str
    onnx_nodes: list[str]

    @property
    def is_fused_attention(self) -> bool:
        return "_mha_" in self.name


class Request(Record):
    """What to build.

    Attributes:
        onnx_file: the graph.
        plan_file: where the plan is written.
        flavour: `tensorrt` or `tensorrt_rtx`.
        inputs: name, dtype and dims of each input.
        precision: name of the bundle's; TF32 is allowed for tf32 alone.
        compute_capabilities: GPUs that the plan is for; empty for TensorRT's own choice.
        profiles: the range of every symbol, for every optimization profile.
        timing_cache: file that TensorRT's timings are read from and kept in.
    """

    onnx_file: str
    plan_file: str
    flavour: str
    inputs: list[TensorSpec]
    precision: str
    compute_capabilities: list[str]
    profiles: list[dict[str, Range]]
    timing_cache: str | None = None


class Answer(Record):
    """What was built, or why nothing was.

    Attributes:
        version: of the TensorRT.
        layers: of the plan, as the builder lists them.
        seconds: that building took.
        activation_memory: bytes on the device, at the largest sizes; None where the builder does not say.
        memory: bytes that the process had in memory at its peak.
        refusal: the builder's own words; None where it built.
        misuse: whether the request itself was wrong.
        errno: of the error for which the plan was not written; None where it was.
    """

    version: str
    layers: list[Layer] = []
    seconds: float = 0.0
    activation_memory: int | None = None
    memory: int = 0
    refusal: str | None = None
    misuse: bool = False
    errno: int | None = None


def main() -> None:
    """Serve one request."""
    end_with_parent()
    request = Request.model_validate_json(sys.stdin.read())
    print(answer(request).model_copy(update={"memory": peak()}).model_dump_json())


def answer(request: Request) -> Answer:
    """Build a plan as `request` says and write it to its file."""
    trt: Any = importlib.import_module(request.flavour)
    log, file = _logger(trt), Path(request.onnx_file).name

    def refuse(reason: str, misuse: bool = False) -> Answer:
        return Answer(version=trt.__version__, refusal=reason, misuse=misuse)

    builder = trt.Builder(log)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(request.onnx_file):
        reasons = "; ".join(_described(parser.get_error(i)) for i in range(parser.num_errors))
        return refuse(f"{request.flavour} cannot parse {file}: {reasons or log.last_error()}")
    config = builder.create_builder_config()
    if refusal := _choose_compute_capabilities(trt, config, request):
        return refuse(refusal, misuse=True)
    _configure(trt, builder, config, request)
    start = time.perf_counter()
    plan = builder.build_serialized_network(network, config)
    seconds = time.perf_counter() - start
    if plan is None:
        return refuse(f"{request.flavour} cannot build {file}: {log.last_error()}")
    try:
        Path(request.plan_file).write_bytes(plan)
    except OSError as error:
        return Answer(version=trt.__version__, errno=error.errno)
    if request.timing_cache is not None:
        cache.write(Path(request.timing_cache), bytes(config.get_timing_cache().serialize()))
    return Answer(
        version=trt.__version__, layers=_layers(log.messages), seconds=seconds, activation_memory=_memory(log.messages)
    )


def _configure(trt: Any, builder: Any, config: Any, request: Request) -> None:
    """Set what is logged of layers, whether TF32 is allowed, the optimization profiles and the timing cache."""
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if request.precision == "tf32":
        config.set_flag(trt.BuilderFlag.TF32)
    else:
        config.clear_flag(trt.BuilderFlag.TF32)
    for ranges in request.profiles:
        profile = builder.create_optimization_profile()
        for spec in request.inputs:
            profile.set_shape(spec.name, *(_shape(spec, ranges, which) for which in range(3)))
        config.add_optimization_profile(profile)
    if request.timing_cache is not None:
        timing_cache = config.create_timing_cache(cache.read(Path(request.timing_cache)) or b"")
        config.set_timing_cache(timing_cache, False)


def _described(error: Any) -> str:
    where = f" (node {error.node_name()}, operator {error.node_operator()})" if error.node_operator() else ""
    return f"{error.desc()}{where}"


def _shape(spec: TensorSpec, ranges: Mapping[str, Range], which: int) -> tuple[int, ...]:
    return tuple(dim if isinstance(dim, int) else dim.factor * ranges[dim.symbol][which] for dim in spec.dims)


def _choose_compute_capabilities(trt: Any, config: Any, request: Request) -> str | None:
    names = request.compute_capabilities
    if not names:
        return None
    if request.flavour != "tensorrt_rtx":
        return f"{request.flavour} builds for the GPU at hand; compute capabilities are chosen for tensorrt_rtx only"
    known = [name for name in dir(trt.ComputeCapability) if name.startswith("SM") or name == "CURRENT"]
    if unknown := [name for name in names if name not in known]:
        return (
            f"unknown compute capability {unknown[0]!r}; {request.flavour} {trt.__version__} knows {', '.join(known)}"
        )
    config.num_compute_capabilities = len(names)
    for i, name in enumerate(names):
        config.set_compute_capability(getattr(trt.ComputeCapability, name), i)
    return None


def _layers(messages: list[tuple[int, str]]) -> list[Layer]:
    lines = [line for _, text in messages if text.startswith("Layers:") for line in text.splitlines()]
    matches = [match for line in lines if (match := _LAYER.match(line))]
    return [
        Layer(name=m["name"], type=m["type"], tactic=m["tactic"], onnx_nodes=_ONNX_NODE.findall(m["meta"]))
        for m in matches
    ]


def _memory(messages: list[tuple[int, str]]) -> int | None:
    matches = [match for _, text in messages if (match := _MEMORY.match(text))]
    return int(matches[-1][1]) if matches else None


def _logger(trt: ModuleType) -> Any:
    class Log(trt.ILogger):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.messages: list[tuple[int, str]] = []

        def log(self, severity: Any, message: str) -> None:
            self.messages.append((int(severity), message))

        def last_error(self) -> str:
            errors = [text for severity, text in self.messages if severity <= int(trt.ILogger.ERROR)]
            return errors[-1].strip() if errors else "it gave no reason"

    return Log()


if __name__ == "__main__":
    main()
