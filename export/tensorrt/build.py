"""TensorRT plans, and what the builder says it compiled.

`tensorrt_rtx` is the real builder and needs no GPU; the full `tensorrt` builds for the GPU at hand. Both know strongly
typed networks only: every tensor's type is the graph's.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from attnforge.atomic import temporary_folder
from attnforge.bundle import Cost, Engine, Range, TensorSpec
from attnforge.children import command, environment
from attnforge.errors import BuildError, UnavailableError, UnknownNameError, UsageError
from attnforge.export.graphs.qdq import Between, rounding_of
from attnforge.export.tensorrt.process import Answer, Layer, Request
from attnforge.runtime.cases import sizes_at
from attnforge.runtime.plans import own_code


@dataclass(frozen=True)
class Plan:
    """A serialized engine.

    Attributes:
        data: the plan itself; empty where it was written to a file.
        version: of the TensorRT that built it; only the same version is sure to load it.
        layers: what was compiled, as the builder listed it.
        seconds: how long building took.
        size: bytes of the plan.
        activation_memory: bytes on the device for everything between inputs and outputs, at the largest sizes; None
            where the builder does not say.
        profiles: its optimization profiles.
        process: what the builder's process took.
    """

    data: bytes
    version: str
    layers: list[Layer]
    seconds: float
    size: int = 0
    activation_memory: int | None = None
    profiles: tuple[Mapping[str, Range], ...] = ()
    process: Cost = field(default_factory=lambda: Cost(seconds=0.0, memory=0))

    def kernel_of(self, onnx_node: str) -> str | None:
        """Name of the first fused attention layer that does the work of `onnx_node`; None where none does, or one part
        of it is left to other layers."""
        nodes = {node for layer in self.layers for node in layer.onnx_nodes if _is_part(node, onnx_node)}
        fused = [layer for layer in self.layers if layer.is_fused_attention and nodes & {*layer.onnx_nodes}]
        return fused[0].name if nodes and nodes <= {node for layer in fused for node in layer.onnx_nodes} else None

    def scores_of(self, onnx_node: str) -> int | None:
        """How many scores the fused layers of `onnx_node` compute together; None where it is not fused, or a layer's
        tensors do not tell, as those of dynamic dims do not."""
        if self.kernel_of(onnx_node) is None:
            return None
        names = {*self.layers_of(onnx_node)}
        counts = [layer.scores for layer in self.layers if layer.name in names and layer.is_fused_attention]
        return None if None in counts else sum(count for count in counts if count is not None)

    def layers_of(self, onnx_node: str) -> list[str]:
        """Names of the layers that do the work of `onnx_node`."""
        return [la.name for la in self.layers if any(_is_part(node, onnx_node) for node in la.onnx_nodes)]

    def why_unfused(self, onnx_node: str) -> str:
        """Why no fused layer does the work of `onnx_node`, with the names of those that do."""
        return f"the builder chose separate kernels: {', '.join(self.layers_of(onnx_node)) or 'none named'}"

    def reads_as_stored(self, between: Between) -> bool:
        """Whether the kernel of a product takes the numbers of its weight, and of a quantised input, as they are
        stored: no other dequantises them before."""
        parts = (between.product, between.dequantise, between.weight)
        product, *dequantised = (str(node.name) for node in parts if node is not None)
        multiplying = [la for la in self.layers if la.type in ("gemm", "runtime_fusion") and product in la.onnx_nodes]
        return bool(multiplying) and all({*dequantised} <= {*layer.onnx_nodes} for layer in multiplying)

    def attends_in_fp8(self, softmax: str) -> bool:
        """Whether the fused kernel of a softmax rounds its numbers to fp8, as all that it multiplies."""
        kernel, rounding = self.kernel_of(softmax), rounding_of(softmax)
        return any(layer.name == kernel and rounding in layer.onnx_nodes for layer in self.layers)

    def record(self, file: str, flavour: str, compute_capabilities: Sequence[str], sha256: str) -> Engine:
        """The manifest's record of the plan, as one that this user built.

        Args:
            file: name of the plan's file in the bundle.
            flavour: `tensorrt` or `tensorrt_rtx`.
            compute_capabilities: that the plan is for.
            sha256: of that file, in hexadecimal.
        """
        return Engine(
            file=file,
            flavour=flavour,  # type: ignore[arg-type]
            version=self.version,
            compute_capabilities=list(compute_capabilities),
            layers=len(self.layers),
            size=self.size,
            build_seconds=round(self.seconds, 3),
            activation_memory=self.activation_memory,
            profiles=[dict(profile) for profile in self.profiles],
            code=own_code(sha256),
        )


def _is_part(node: str, whole: str) -> bool:
    return node == whole or node.startswith(f"{site_of(whole)}/Attention/Softmax_part_")


def _only(device: int) -> dict[str, str]:
    """The environment in which a CUDA device is the first one, for which TensorRT builds.

    Args:
        device: its number.
    """
    if device == 0:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[device].strip() if visible else str(device)}


def softmax_of(site: str, part: int = 0) -> str:
    """Name of the Softmax that stands for an attention site in the model that TensorRT parses, or for a further part of
    one that is computed in several."""
    return f"{site}/Attention/Softmax_part_{part}" if part else f"{site}/Softmax"


def site_of(node: str) -> str:
    """The site that a node was written for, by the node's name."""
    return node.partition("/Attention/")[0].removesuffix("/Softmax")


def profiles_of(inputs: Sequence[TensorSpec], further: Sequence[Mapping[str, Range]] = ()) -> list[dict[str, Range]]:
    """The optimization profiles of a plan: all that the inputs may be, and `further` ones.

    Args:
        inputs: with the range of every dynamic dim.
        further: (min, opt, max) of some symbols each; the others are as in the first.

    Raises:
        UnknownNameError: no such symbol.
        UsageError: sizes out of order, or outside what the inputs may be.
    """
    low, opt, high = (sizes_at(inputs, bound) for bound in ("min", "opt", "max"))
    whole = {symbol: (low[symbol], opt[symbol], high[symbol]) for symbol in opt}
    for ranges in further:
        for symbol, (least, usual, most) in ranges.items():
            if symbol not in whole:
                raise UnknownNameError("dim", symbol, whole)
            if not low[symbol] <= least <= usual <= most <= high[symbol]:
                raise UsageError(
                    f"a profile has {symbol} from {least} over {usual} to {most}; give min ≤ opt ≤ max from "
                    f"{low[symbol]} to {high[symbol]}, as the dim is"
                )
    return [whole, *({**whole, **ranges} for ranges in further)] if whole else []


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
    onnx_file: Path,
    flavour: str,
    inputs: list[TensorSpec],
    precision: str,
    compute_capabilities: Sequence[str] = (),
    profiles: Sequence[Mapping[str, Range]] = (),
    timing_cache: Path | None = None,
    device: int = 0,
) -> Plan:
    """Build a plan from `onnx_file`, in a process of its own, and wait for it.

    Args:
        onnx_file: the lowered graph.
        flavour: `tensorrt` or `tensorrt_rtx`.
        inputs: their dynamic dims become the first optimization profile.
        precision: `tf32` lets fp32 products round their factors to TF32; every other type is the graph's.
        compute_capabilities: for TensorRT-RTX, such as `("SM89", "SM120")` or `("CURRENT",)`; by default portable.
        profiles: further ones, the range of some symbols each: TensorRT chooses its kernels for each profile's opt.
        timing_cache: file in which TensorRT keeps what it timed, for the next build on the same device.
        device: number of the CUDA device that TensorRT builds for.

    Raises:
        UnavailableError: the flavour is not installed here.
        UsageError: a compute capability that it does not know, or a profile outside what the inputs may be.
        BuildError: the parser or the builder refused, in its own words, or crashed.
    """
    with temporary_folder() as folder, Builders() as builders:
        request = Request(
            onnx_file=onnx_file, plan_file=folder / "engine.plan", flavour=flavour, inputs=inputs, precision=precision,
            compute_capabilities=compute_capabilities, profiles=profiles_of(inputs, profiles),
            timing_cache=timing_cache,
        )  # fmt: skip
        return replace(builders.start(request, device).result(), data=request.plan_file.read_bytes())


class Builders:
    """Builders at work beside this process, one after another, each in a process of its own. Leaving the block ends
    the one that is still at work.

    Args:
        reuse: gets every request and what answers it by building, and may answer in its stead.
    """

    def __init__(self, reuse: Callable[[Request, Callable[[], Answer]], Answer] | None = None) -> None:
        self._reuse = reuse
        self._thread = ThreadPoolExecutor(1, "attnforge-builder")
        self._lock = threading.Lock()
        self._at_work: subprocess.Popen[str] | None = None
        self._ended = False

    def start(self, request: Request, device: int = 0) -> Future[Plan]:
        """Let a plan be built and written to its file, while the caller goes on.

        Args:
            request: whose graph must stay as it is until the plan is built.
            device: number of the CUDA device that TensorRT builds for.

        Returns:
            The plan to come, whose `data` is empty; it raises what :func:`build` raises.
        """
        load_tensorrt(request.flavour)
        return self._thread.submit(self._built, request, device)

    def __enter__(self) -> Builders:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._ended = True
            if self._at_work is not None:
                self._at_work.kill()
        self._thread.shutdown(cancel_futures=True)

    def _built(self, request: Request, device: int) -> Plan:
        start = time.perf_counter()
        build = partial(self._answer, request, device)
        answer = build() if self._reuse is None else self._reuse(request, build)
        if answer.errno is not None:
            raise OSError(answer.errno, os.strerror(answer.errno), str(request.plan_file))
        if answer.refusal is not None:
            raise (UsageError if answer.misuse else BuildError)(answer.refusal)
        return Plan(
            data=b"",
            version=answer.version,
            layers=answer.layers,
            seconds=answer.seconds,
            size=request.plan_file.stat().st_size,
            activation_memory=answer.activation_memory,
            profiles=tuple(request.profiles),
            process=Cost(seconds=round(time.perf_counter() - start, 3), memory=answer.memory),
        )

    def _answer(self, request: Request, device: int) -> Answer:
        """The answer of a builder in a process of its own.

        Raises:
            BuildError: the process crashed or failed, or was ended.
        """
        with temporary_folder() as folder:
            with self._lock:
                if self._ended:
                    raise BuildError(f"{request.flavour}'s builder was ended")
                self._at_work = process = subprocess.Popen(
                    command("attnforge.export.tensorrt.process"),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    cwd=folder,
                    env=environment(_only(device)),
                )
            output, errors = process.communicate(request.model_dump_json())
            with self._lock:
                self._at_work = None
        if process.returncode != 0:
            last_line = (errors.strip().splitlines() or ["it said nothing"])[-1]
            how = f"crashed (signal {-process.returncode})" if process.returncode < 0 else "failed"
            raise BuildError(f"{request.flavour}'s builder {how} on {request.onnx_file.name}: {last_line}")
        return Answer.model_validate_json(output.splitlines()[-1])
