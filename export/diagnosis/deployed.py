"""The intermediate tensors of a backend: it runs the deployed graph with these tensors as additional outputs. Those
inside an attention site are not shown, so that the site stays fused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice
from pathlib import Path

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.atomic import temporary_folder
from attnforge.bundle import CANONICAL, FLAVOURS, NEXT, Bundle, TargetRecord, write_manifest
from attnforge.errors import UnavailableError
from attnforge.export.decoding.whole import whole_graph
from attnforge.export.graphs.execute import Tensors, as_it_is, computed, in_float64, values_of, wide
from attnforge.export.graphs.nodes import inputs_of, is_op, maker_of
from attnforge.export.graphs.saving import load_graph, save
from attnforge.export.graphs.types import LOW
from attnforge.export.sources.specs import output_dims, spec_of
from attnforge.export.tensorrt import build as engine
from attnforge.export.tensorrt.process import Request
from attnforge.files import sha256
from attnforge.runtime.backends.registry import OUTSIDE, REGISTRY
from attnforge.runtime.session import load

NEAR = 8
"""Number of nodes before a tensor that are searched for a cast."""


def tensors_on(bundle: Bundle, backend: str, feeds: Mapping[str, Array], names: Collection[str]) -> Tensors:
    """Tensors as computed by `backend`, in float64.

    Args:
        bundle: deployed for the backend, which can run here.
        backend: name of the backend; for TensorRT a plan is built with the tensors as outputs.
        feeds: inputs by name.
        names: names of the tensors; those that the deployed graph does not have are left out.

    Raises:
        AttnforgeError: the backend cannot build or run the graph.
    """
    if backend in OUTSIDE:
        raise UnavailableError(f"{backend} is of another package, which does not show the tensors inside its model")
    target, record, model = _graph_of(bundle, backend)
    name = CANONICAL if record.model == CANONICAL else "model.onnx"
    shown = _show(bundle, model, names)
    with temporary_folder() as folder:
        path = Path(folder)
        changed = TargetRecord(model=name, cuda_model=name if record.cuda_model else None)
        save(model, path / changed.model)
        manifest = bundle.manifest.model_copy(deep=True)
        if target in FLAVOURS:
            of_this = ("CURRENT",) if target == "tensorrt_rtx" else ()  # TensorRT builds for no other device
            file = path / "engine.plan"
            request = Request(
                onnx_file=path / changed.model, plan_file=file, flavour=target, inputs=manifest.inputs,
                precision=manifest.precision, compute_capabilities=of_this,
                profiles=engine.profiles_of(manifest.inputs),
            )  # fmt: skip
            plan = engine.build(request)
            changed.engines = [plan.record(file.name, target, record.engines[0].compute_capabilities, sha256(file))]
        manifest.targets, manifest.cases, manifest.files = {target: changed}, [], {}
        manifest.decoding = None  # the graph runs whole sequences
        manifest.outputs = [spec_of(value, output_dims(value, manifest.inputs)) for value in model.graph.outputs]
        write_manifest(path, manifest)
        with load(Bundle(path, trusted=False), backend, cache=False) as session:
            results = session.run(dict(feeds))
    return {name: wide(results[name]) for name in shown}


def _graph_of(bundle: Bundle, backend: str) -> tuple[str, TargetRecord, ir.Model]:
    """The graph that a backend runs on whole sequences, and its target; the canonical graph if the backend has none of
    its own."""
    target = REGISTRY[backend].family
    record = bundle.manifest.targets.get(target)
    if record is None:
        target, record = "onnxruntime", TargetRecord(model=CANONICAL)
    file = (record.cuda_model if backend == "onnxruntime-cuda" else None) or record.model
    return target, record, whole_graph(bundle, file)


def step_tensors_on(bundle: Bundle, backend: str, feeds: Mapping[str, Array], names: Collection[str]) -> Tensors:
    """The same for a decoder step, whose feeds are the tokens, the number of tokens before them, and the caches.

    Raises:
        UnavailableError: the backend's graph of a step is not available, such as OpenVINO's.
    """
    if backend != "onnxruntime-cpu":
        raise UnavailableError(f"tensors of a decoder step can be examined on onnxruntime-cpu only, not on {backend}")
    model = load_graph(bundle, bundle.manifest.targets["onnxruntime"].model)
    shown = _show(bundle, model, names)
    return {name: wide(array) for name, array in as_it_is(model, shown, optimised=True)(feeds).items()}


def stored_low(bundle: Bundle, backend: str, tensor: str) -> str | None:
    """The 16-bit type that the deployed graph casts to shortly before `tensor`; None if it does not."""
    _, _, model = _graph_of(bundle, backend)
    makers = [maker_of(values_of(model).get(tensor))]
    for node in islice(makers, NEAR):  # the list grows, so that the nearest come first
        if is_op(node, "Cast") and node.outputs[0].dtype in LOW:
            return str(node.outputs[0].dtype)
        makers += map(maker_of, inputs_of(node)) if node is not None else []
    return None


def _show(bundle: Bundle, model: ir.Model, names: Collection[str]) -> list[str]:
    """Make tensors outputs of a bundle's graph, and return the ones of `names` that it has."""
    known, values = set(computed(model)), values_of(model)
    inside = tuple(f"{detail.site}/" for detail in bundle.manifest.attention.details)
    shown = [name for name in names if name in known and not name.startswith(inside)]
    model.graph.outputs.extend(values[name] for name in shown if not values[name].is_graph_output())
    return shown


# --- a decoder step ---------------------------------------------------------------------------------------------------

# A decoder step after a past, as diagnosis examines it if only steps are wrong.


def step_inputs(bundle: Bundle, feeds: Mapping[str, Array], position: int) -> dict[str, Array]:
    """Inputs of a step of one token, with the caches computed in float64.

    Args:
        bundle: a bundle with a cache.
        feeds: the model's inputs by name, whole sequences.
        position: position of the first sample's token, limited to the last one. Every further sample is one position
            earlier, as far as possible, so that mixed-up samples show.

    Raises:
        NoDoublePath: an operator of the model cannot be computed in float64.
    """
    decoding, tokens = bundle.manifest.decoding, feeds[bundle.manifest.graph_inputs[0].name]
    assert decoding is not None
    position = min(position, tokens.shape[1] - 1)
    pasts = np.maximum(position - np.arange(len(tokens)), 0)
    caches = {
        spec.name: np.zeros((len(tokens), *(dim for dim in spec.dims[1:] if isinstance(dim, int))))
        for spec in decoding.tensors
    }
    first = {} if decoding.kept is None else {decoding.kept: np.zeros(1, np.int64)}
    if position:
        run = in_float64(load_graph(bundle, CANONICAL), [f"{name}{NEXT}" for name in caches])
        nothing = np.zeros(len(tokens), np.int64)
        filled = run({decoding.tokens: tokens[:, :position], decoding.past: nothing, **first, **caches})
        for name, cache in caches.items():
            for sample, past in enumerate(pasts):
                cache[sample, :, :past] = filled[f"{name}{NEXT}"][sample, :, :past]
    following = tokens[np.arange(len(tokens)), pasts][:, None]
    return {decoding.tokens: following, decoding.past: pasts.astype(np.int64), **first, **caches}
