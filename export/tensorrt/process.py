"""The TensorRT builder in a separate process (:mod:`attnforge.children`).

The builder is native code, and some graphs crash it (seen with TensorRT-RTX 1.7). In a separate process a crash is an
error to report, and the calling process goes on. The plan is written directly to its file.

Polygraphy's loaders parse, configure and build. They support neither TensorRT-RTX's TF32 flag nor a timing cache that
is checked before it is read, so these two are set on the configuration that they make.
"""

from __future__ import annotations

import glob
import importlib
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from attnforge import cache
from attnforge.bundle import Range, TensorSpec
from attnforge.children import serve
from attnforge.memory import peak
from attnforge.records import Record
from attnforge.runtime.cases import shape_of

_LAYER = re.compile(
    r"^Name: (?P<name>[^,]*), LayerType: (?P<type>[^,]*),(?P<tensors>.*?)"
    r"TacticName: (?P<tactic>[^,]*),.*Metadata: ?(?P<meta>.*)$"
)
_DIMENSIONS = re.compile(r"Dimensions: \[([-\d,]*)\]")
_MEMORY = re.compile(r"Total Activation Memory: (\d+) bytes")
_PARSER_ERROR = re.compile(
    r"^(In node -?\d+ with name: (?P<node>.*) and operator: (?P<type>.*) )?\(\w+\): [A-Z_]+: (?P<what>.*)$", re.DOTALL
)
_ONNX_NODE = re.compile(r"\[ONNX Layer: ([^\]]*)\]")


File = Annotated[Path, AfterValidator(Path.absolute)]
"""A file by its absolute path, because the builder runs in a separate folder."""


class Layer(Record):
    """A layer of a compiled plan.

    Attributes:
        name: TensorRT's name.
        type: TensorRT's kind of layer.
        tactic: the kernel that TensorRT chose.
        onnx_nodes: names of the ONNX nodes that the layer computes.
        inputs, outputs: the dims of each tensor; -1 for a dynamic one.
    """

    name: str
    type: str
    tactic: str
    onnx_nodes: list[str]
    inputs: list[list[int]] = []
    outputs: list[list[int]] = []

    @property
    def is_fused_attention(self) -> bool:
        return "_mha_" in self.name


class Request(Record):
    """A request to build.

    Attributes:
        onnx_file: the graph.
        plan_file: file that the plan is written to.
        flavour: `tensorrt` or `tensorrt_rtx`.
        inputs: name, dtype and dims of each input.
        precision: name of the bundle's precision; TF32 is allowed for tf32 only.
        compute_capabilities: GPUs that the plan is built for; empty for TensorRT's own choice.
        profiles: the range of every symbol, for every optimization profile.
        timing_cache: file that TensorRT's timings are read from and written to.
        device: number of the CUDA device that TensorRT builds for.
    """

    onnx_file: File
    plan_file: File
    flavour: str
    inputs: list[TensorSpec]
    precision: str
    compute_capabilities: Sequence[str] = ()
    profiles: list[dict[str, Range]]
    timing_cache: File | None = None
    device: int = 0


class Answer(Record):
    """The result of a build, or the reason why there is none.

    Attributes:
        version: version of the TensorRT that built the plan; only the same version is certain to load it.
        layers: layers of the plan, as listed by the builder.
        seconds: duration of the build.
        activation_memory: device memory in bytes for everything between inputs and outputs, at the largest sizes; None
            if the builder does not report it.
        memory: peak memory of the process in bytes.
        refusal: the builder's own message; None if it built the plan.
        misuse: whether the request itself was wrong.
        errno: number of the error that kept the plan from being written; None if it was written.
    """

    version: str
    layers: list[Layer] = []
    seconds: float = 0.0
    activation_memory: int | None = None
    memory: int = 0
    refusal: str | None = None
    misuse: bool = False
    errno: int | None = None


def load(flavour: str) -> Any:
    """The `tensorrt` or `tensorrt_rtx` module, with Polygraphy set to use it: Polygraphy reads only once, when it is
    first imported, which one that is, and whether it may install packages, which it must never do here."""
    os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = str(int(flavour == "tensorrt_rtx"))
    os.environ["POLYGRAPHY_AUTOINSTALL_DEPS"] = "0"
    trt = importlib.import_module(flavour)
    importlib.import_module("polygraphy.backend.trt")
    return trt


def answer(request: Request) -> Answer:
    """Build a plan for `request` and write it to its file."""
    trt = load(request.flavour)
    from polygraphy.backend.trt import engine_bytes_from_network, network_from_onnx_path
    from polygraphy.exception import PolygraphyException

    log, file = _Log(), request.onnx_file.name

    def refuse(reason: str, misuse: bool = False) -> Answer:
        return Answer(version=trt.__version__, refusal=reason, misuse=misuse)

    if reason := _why_not_for(trt, request):
        return refuse(reason, misuse=True)
    try:
        builder, network, parser = network_from_onnx_path(str(request.onnx_file))
    except PolygraphyException as error:
        return refuse(f"{request.flavour} cannot parse {file}: {log.of_parser() or log.last_error() or error}")
    if (name := _input_of_shapes(network)) is not None:
        why = f"the values of input {name} decide shapes; deploy it for onnxruntime"
        return refuse(f"{request.flavour} cannot build {file}: {why}")
    try:
        config = _configured(trt, builder, network, request)
        start = time.perf_counter()
        plan = engine_bytes_from_network((builder, network, parser), config)
        seconds = time.perf_counter() - start
    except PolygraphyException as error:
        return refuse(f"{request.flavour} cannot build {file}: {log.last_error() or error}")
    try:
        request.plan_file.write_bytes(plan)
    except OSError as error:
        return Answer(version=trt.__version__, errno=error.errno)
    if request.timing_cache is not None:
        cache.write(request.timing_cache, bytes(config.get_timing_cache().serialize()))
    return Answer(
        version=trt.__version__, layers=_layers(log.messages), seconds=seconds, activation_memory=_memory(log.messages)
    )


def _why_not_for(trt: Any, request: Request) -> str | None:
    """Why no plan can be built for the compute capabilities; None if one can."""
    names = request.compute_capabilities
    if not names:
        return None
    if request.flavour != "tensorrt_rtx":
        return f"{request.flavour} builds for a GPU of this machine; compute capabilities are for tensorrt_rtx only"
    known = [name for name in dir(trt.ComputeCapability) if name.startswith("SM") or name == "CURRENT"]
    if unknown := [name for name in names if name not in known]:
        return (
            f"unknown compute capability {unknown[0]!r}; {request.flavour} {trt.__version__} supports "
            f"{', '.join(known)}"
        )
    return None


def _input_of_shapes(network: Any) -> str | None:
    """The first input whose values determine shapes: a profile would need their range, which is unknown; Polygraphy
    would use the dims of the input instead."""
    from polygraphy.logger import G_LOGGER

    with G_LOGGER.verbosity():  # TensorRT complains about the query while there is no profile
        tensors = [network.get_input(i) for i in range(network.num_inputs)]
        return next((tensor.name for tensor in tensors if tensor.is_shape_tensor), None)


def _configured(trt: Any, builder: Any, network: Any, request: Request) -> Any:
    """The builder's configuration: the GPUs that the plan is built for, the optimization profiles, whether TF32 is
    allowed, and the timing cache. By Polygraphy's default everything about layers is logged.

    Raises:
        PolygraphyException: a profile is invalid.
    """
    from polygraphy.backend.tensorrt_rtx import create_config_rtx
    from polygraphy.backend.trt import create_config

    profiles = [_profile(request.inputs, ranges) for ranges in request.profiles]
    if request.flavour == "tensorrt_rtx":
        names = request.compute_capabilities
        numbers = [(int(name[2:-1]), int(name[-1])) for name in names if name != "CURRENT"]
        config = create_config_rtx(
            builder, network, use_gpu="CURRENT" in names, compute_capabilities=numbers or None, profiles=profiles
        )
    else:
        config = create_config(builder, network, profiles=profiles)
    if request.precision == "tf32":
        config.set_flag(trt.BuilderFlag.TF32)
    else:
        config.clear_flag(trt.BuilderFlag.TF32)
    if request.timing_cache is not None:
        config.set_timing_cache(config.create_timing_cache(cache.read(request.timing_cache) or b""), False)
    return config


def _profile(inputs: list[TensorSpec], ranges: Mapping[str, Range]) -> Any:
    """The optimization profile with these ranges. Polygraphy treats names as patterns, so they are escaped."""
    from polygraphy.backend.trt import Profile

    shapes = Profile()
    bounds = [{symbol: sizes[which] for symbol, sizes in ranges.items()} for which in range(3)]
    for spec in inputs:
        shapes.add(glob.escape(spec.name), *(shape_of(spec, sizes) for sizes in bounds))
    return shapes


def _layers(messages: list[tuple[int, str]]) -> list[Layer]:
    lines = [line for _, text in messages if text.startswith("Layers:") for line in text.splitlines()]
    layers = []
    for m in filter(None, map(_LAYER.match, lines)):
        inputs, _, outputs = m["tensors"].partition("Outputs: ")
        inputs = inputs.partition("Constants: ")[0]
        layers.append(
            Layer(
                name=m["name"],
                type=m["type"],
                tactic=m["tactic"],
                onnx_nodes=_ONNX_NODE.findall(m["meta"]),
                inputs=_dims(inputs),
                outputs=_dims(outputs),
            )
        )
    return layers


def _dims(tensors: str) -> list[list[int]]:
    """The dims of every tensor in a list as written by the builder."""
    return [[int(dim) for dim in dims.split(",") if dim] for dims in _DIMENSIONS.findall(tensors)]


def _memory(messages: list[tuple[int, str]]) -> int | None:
    matches = [match for _, text in messages if (match := _MEMORY.match(text))]
    return int(matches[-1][1]) if matches else None


class _Log(logging.Handler):
    """The messages of TensorRT and its parser, which Polygraphy passes to Python's logging.

    Attributes:
        messages: each message with its level.
    """

    def __init__(self) -> None:
        from polygraphy.logger import G_LOGGER

        super().__init__()
        self.messages: list[tuple[int, str]] = []
        G_LOGGER.module_severity = G_LOGGER.EXTRA_VERBOSE
        G_LOGGER.use_python_logging_system = True
        G_LOGGER.colors = G_LOGGER.letter = False
        G_LOGGER.python_logger.setLevel(1)
        G_LOGGER.python_logger.propagate = False
        G_LOGGER.python_logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append((record.levelno, record.getMessage().strip()))

    @property
    def errors(self) -> list[str]:
        """TensorRT's errors; Polygraphy's are critical."""
        return [text for level, text in self.messages if level == logging.ERROR]

    def last_error(self) -> str | None:
        """The last informative error: without a GPU, TensorRT-RTX adds to any failure that there is none."""
        informative = [text for text in self.errors if "catchCudaError" not in text]
        return next(reversed(informative or self.errors), None)

    def of_parser(self) -> str:
        """The parser's errors, each with its node if it has one."""
        matches = [match for text in self.errors if (match := _PARSER_ERROR.match(text))]
        texts = [f"{m['what']} (node {m['node']}, operator {m['type']})" if m["type"] else m["what"] for m in matches]
        return "; ".join(dict.fromkeys(texts))


if __name__ == "__main__":
    serve(Request, lambda request, progress: answer(request).model_copy(update={"memory": peak()}))
