"""What a deployed model is measured against. Needs torch, and the module that was deployed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import Dim

import attnforge
from attnforge.arrays import Array, to_numpy, to_torch
from attnforge.bundle import Bundle, DimSpec, Manifest, TensorSpec
from attnforge.eager import at_precision, in_float64, run, torch_dtype
from attnforge.export.capture import capture
from attnforge.export.graph import Imported, import_graph
from attnforge.export.saving import save
from attnforge.precision import Precision, precision_named
from attnforge.runtime.onnxruntime import OnnxRuntime
from attnforge.runtime.session import Session
from attnforge.sources import rebuild

Runner = Callable[[dict[str, Array]], dict[str, Array]]


def rebuilt(manifest: Manifest) -> Any:
    """The module that a bundle was deployed from, or the graph.

    Raises:
        UsageError: it was a module in memory, or a file that is no more.
    """
    if manifest.source.kind != "onnx":
        return rebuild(manifest.source).module
    ranges = {name: tuple(map(int, str(text).split(":"))) for name, text in manifest.source.options.items()}
    return import_graph(manifest.source.name, ranges, manifest.precision)  # type: ignore[arg-type]


def open_eager(bundle: Bundle, module: Any, feeds: dict[str, Array], threads: int, stack: ExitStack) -> Runner:
    """The module as its author wrote it, at the bundle's precision."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    stack.callback(torch.set_num_threads, before)
    return stack.enter_context(attnforge.load(bundle, "eager", module=module)).run


def open_plain(bundle: Bundle, module: Any, feeds: dict[str, Array], threads: int, stack: ExitStack) -> Runner:
    """ONNX Runtime on the exporter's graph as it is, its inputs checked and bound as the bundle's own are."""
    file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "plain.onnx"
    save_plain(bundle, module, feeds, file)
    manifest = bundle.manifest
    backend = OnnxRuntime("onnxruntime-plain", file, manifest.inputs, manifest.outputs, threads)
    return stack.enter_context(Session(bundle, backend)).run


def save_plain(bundle: Bundle, module: Any, feeds: dict[str, Array], file: Path) -> None:
    """Write the exporter's graph as it is, with the dynamic dims that the bundle has."""
    if isinstance(module, Imported):
        save(module.original.model, file)
        return
    manifest = bundle.manifest
    example = [to_torch(array) for array in feeds.values()]
    captured = capture(module, example, _dynamic_shapes(manifest.inputs), precision_named(manifest.precision))
    save(captured.model, file)


def _dynamic_shapes(inputs: list[TensorSpec]) -> dict[str, dict[int, Any]]:
    """What the bundle was deployed with, from its manifest."""
    roots: dict[str, Any] = {}
    for dim in (d for spec in inputs for d in spec.dims if isinstance(d, DimSpec)):
        low, high = (bound // dim.factor for bound in (dim.min or 0, dim.max or 0))
        roots.setdefault(dim.symbol, Dim(dim.symbol, min=low, max=high))
    return {
        spec.name: {
            i: roots[dim.symbol] if dim.factor == 1 else dim.factor * roots[dim.symbol]
            for i, dim in enumerate(spec.dims)
            if isinstance(dim, DimSpec)
        }
        for spec in inputs
    }


PEERS: dict[str, Callable[[Bundle, Any, dict[str, Array], int, ExitStack], Runner]] = {
    "eager": open_eager,
    "onnxruntime-plain": open_plain,
}


def expected(module: Any, precision: Precision, feeds: dict[str, Array]) -> dict[str, tuple[Array, Array]]:
    """For every output, eager's at the precision and the same weights' in float64, flat, as float64."""
    if isinstance(module, Imported):
        given, truth = module.eager(feeds), module.exact(feeds)
        return {name: tuple(a.astype(np.float64).reshape(-1) for a in (given[name], truth[name])) for name in given}  # type: ignore[misc]
    copied = at_precision(module, precision)
    eager = run(copied, feeds, torch_dtype(precision))
    exact = run(in_float64(copied), feeds, torch.float64)

    def flat(name: str, tensor: torch.Tensor) -> Array:
        return to_numpy(name, tensor.double()).astype(np.float64).reshape(-1)

    return {name: (flat(name, eager[name]), flat(name, exact[name])) for name in eager}
