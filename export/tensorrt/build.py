"""TensorRT plans, and what the builder reports of what it compiled.

`tensorrt_rtx` needs no GPU to build; the full `tensorrt` builds for a GPU of this machine. Both only support strongly
typed networks: every tensor has the graph's type.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from attnforge import cache
from attnforge.bundle import Cost, Engine, Range, TensorSpec
from attnforge.children import ChildError, call
from attnforge.errors import BuildError, UnavailableError, UnknownNameError, UsageError
from attnforge.export.graphs.qdq import Between, rounding_of
from attnforge.export.tensorrt.process import Answer, Request
from attnforge.machine import device_name
from attnforge.runtime.cases import sizes_at
from attnforge.runtime.plans import own_code

PROCESS = "attnforge.export.tensorrt.process"
"""The module that runs the builder."""


class Plan(Answer):
    """A serialized engine, and the answer of the builder that built it.

    Attributes:
        data: the plan itself; empty if it was written to a file.
        size: size of the plan in bytes.
        profiles: its optimization profiles.
        process: time and memory of the builder's process.
    """

    data: bytes = b""
    size: int = 0
    profiles: list[dict[str, Range]] = []
    process: Cost = Cost(seconds=0.0, memory=0)

    def kernel_of(self, onnx_node: str) -> str | None:
        """Name of the first fused attention layer that computes `onnx_node`; None if none does, or if one part of it is
        left to other layers."""
        nodes = {node for layer in self.layers for node in layer.onnx_nodes if _is_part(node, onnx_node)}
        fused = [layer for layer in self.layers if layer.is_fused_attention and nodes & {*layer.onnx_nodes}]
        return fused[0].name if nodes and nodes <= {node for layer in fused for node in layer.onnx_nodes} else None

    def layers_of(self, onnx_node: str) -> list[str]:
        """Names of the layers that compute `onnx_node`."""
        return [la.name for la in self.layers if any(_is_part(node, onnx_node) for node in la.onnx_nodes)]

    def why_unfused(self, onnx_node: str) -> str:
        """Why no fused layer computes `onnx_node`, with the names of the layers that do."""
        return f"the builder chose separate kernels: {', '.join(self.layers_of(onnx_node)) or 'none named'}"

    def reads_as_stored(self, between: Between) -> bool:
        """Whether the kernel of a product reads its weight, and a quantised input, as they are stored: no other kernel
        dequantises them first."""
        parts = (between.product, between.dequantise, between.weight)
        product, *dequantised = (str(node.name) for node in parts if node is not None)
        multiplying = [la for la in self.layers if la.type in ("gemm", "runtime_fusion") and product in la.onnx_nodes]
        return bool(multiplying) and all({*dequantised} <= {*layer.onnx_nodes} for layer in multiplying)

    def attends_in_fp8(self, softmax: str) -> bool:
        """Whether the fused kernel of a softmax rounds the softmax's output to fp8, like the other factors."""
        kernel, rounding = self.kernel_of(softmax), rounding_of(softmax)
        return any(layer.name == kernel and rounding in layer.onnx_nodes for layer in self.layers)

    def record(self, file: str, flavour: str, compute_capabilities: Sequence[str], sha256: str) -> Engine:
        """The manifest's record of the plan, as built by this user.

        Args:
            file: name of the plan's file in the bundle.
            flavour: `tensorrt` or `tensorrt_rtx`.
            compute_capabilities: those that the plan is built for.
            sha256: sha256 of that file, in hexadecimal.
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
            profiles=self.profiles,
            code=own_code(sha256),
        )


def _is_part(node: str, whole: str) -> bool:
    return node == whole or node.startswith(f"{site_of(whole)}/Attention/Softmax_part_")


def _only(device: int) -> dict[str, str]:
    """The environment in which a CUDA device is the first one, which TensorRT builds for.

    Args:
        device: number of the device.
    """
    if device == 0:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[device].strip() if visible else str(device)}


def softmax_of(site: str, part: int = 0) -> str:
    """Name of the Softmax that stands for an attention site in the model that TensorRT parses, or for a further part of
    a site that is computed in several parts."""
    return f"{site}/Attention/Softmax_part_{part}" if part else f"{site}/Softmax"


def site_of(node: str) -> str:
    """The site that a node was written for, by the node's name."""
    return node.partition("/Attention/")[0].removesuffix("/Softmax")


def profiles_of(inputs: Sequence[TensorSpec], further: Sequence[Mapping[str, Range]] = ()) -> list[dict[str, Range]]:
    """The optimization profiles of a plan: the full range of the inputs, and `further` ones.

    Args:
        inputs: the inputs, with the range of every dynamic dim.
        further: (min, opt, max) of some symbols each; the others are as in the first profile.

    Raises:
        UnknownNameError: no such symbol.
        UsageError: sizes out of order, or out of the inputs' range.
    """
    low, opt, high = (sizes_at(inputs, bound) for bound in ("min", "opt", "max"))
    whole = {symbol: (low[symbol], opt[symbol], high[symbol]) for symbol in opt}
    for ranges in further:
        for symbol, (least, usual, most) in ranges.items():
            if symbol not in whole:
                raise UnknownNameError("dim", symbol, whole)
            if not low[symbol] <= least <= usual <= most <= high[symbol]:
                raise UsageError(
                    f"a profile has {symbol} from {least} over {usual} to {most}; give min ≤ opt ≤ max within the "
                    f"dim's range, {low[symbol]} to {high[symbol]}"
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
        package = "tensorrt_rtx" if flavour == "tensorrt_rtx" else "'attnforge[tensorrt]'"
        raise UnavailableError(f"{flavour} cannot be used here ({error}); pip install {package}") from error


def timings_of(folder: Path, flavour: str, device: int = 0) -> Path | None:
    """The file in which TensorRT stores its timings on a device; None for TensorRT-RTX, which stores none.

    Args:
        folder: the bundle's folder.
        flavour: `tensorrt` or `tensorrt_rtx`.
        device: number of the CUDA device.
    """
    if flavour != "tensorrt":
        return None
    return cache.timing_cache_file(folder, load_tensorrt(flavour).__version__, device_name(device))


def build(request: Request) -> Plan:
    """Build a plan in a separate process, and wait for it.

    Raises:
        UnavailableError: the flavour is not installed here.
        UsageError: an unknown compute capability.
        BuildError: the parser or the builder refused, with its message, or crashed.
    """
    with Builders() as builders:
        plan = builders.start(request).result()
    return plan.model_copy(update={"data": request.plan_file.read_bytes()})


class Builders(AbstractContextManager["Builders"]):
    """Builders that run alongside this process, one after another, each in a separate process. Leaving the block
    kills the one that is still running.

    Args:
        reuse: receives every request and a function that builds it, and may answer without building.
    """

    def __init__(self, reuse: Callable[[Request, Callable[[], Answer]], Answer] | None = None) -> None:
        self._reuse = reuse
        self._thread = ThreadPoolExecutor(1, "attnforge-builder")
        self._lock = threading.Lock()
        self._running: subprocess.Popen[str] | None = None
        self._ended = False

    def start(self, request: Request) -> Future[Plan]:
        """Start building a plan, which is written to its file, while the caller goes on.

        Args:
            request: the request; its graph must not change until the plan is built.

        Returns:
            the future plan, whose `data` is empty; it raises what :func:`build` raises.
        """
        load_tensorrt(request.flavour)
        return self._thread.submit(self._built, request)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._ended = True
            if self._running is not None:
                self._running.kill()
        self._thread.shutdown(cancel_futures=True)

    def _built(self, request: Request) -> Plan:
        start = time.perf_counter()
        build = partial(self._answer, request)
        answer = build() if self._reuse is None else self._reuse(request, build)
        if answer.errno is not None:
            raise OSError(answer.errno, os.strerror(answer.errno), str(request.plan_file))
        if answer.refusal is not None:
            raise (UsageError if answer.misuse else BuildError)(answer.refusal)
        return Plan(
            **dict(answer),
            size=request.plan_file.stat().st_size,
            profiles=request.profiles,
            process=Cost(seconds=round(time.perf_counter() - start, 3), memory=answer.memory),
        )

    def _answer(self, request: Request) -> Answer:
        """Run a builder in a separate process and return its answer.

        Raises:
            BuildError: the process crashed, failed or was killed.
        """

        def started(process: subprocess.Popen[str]) -> None:
            with self._lock:
                self._running = process
                if self._ended:
                    process.kill()

        try:
            return call(PROCESS, request, Answer, variables=_only(request.device), started=started)
        except ChildError as error:
            raise BuildError(f"{request.flavour}'s builder on {request.onnx_file.name} {error}") from error
        finally:
            with self._lock:
                self._running = None
