"""Attention maps: how much each query attends to each key, in float64, in eager and in the deployed model.

The float64 and eager maps come from the bundle's canonical graph with its attention decomposed into products: the graph
runs in double, and with every result rounded to the bundle's precision. The deployed maps come from the ONNX Runtime
model: if a site is plain products, they are the output of its Softmax; a fused operator never materialises them, so it
is decomposed in double and run on the inputs that it receives. The maps show a mistake in how a site was lowered, but
not one inside a fused kernel. Imports no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import isqrt

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array, is_floating
from attnforge.bundle import CANONICAL, Bundle, Case, Manifest, SiteRecord
from attnforge.errors import first_line
from attnforge.export.decoding.whole import whole_graph
from attnforge.export.diagnosis.stages import decomposed, scores_of, sites_of
from attnforge.export.graphs.attention import products, read
from attnforge.export.graphs.build import Builder, constant, insert
from attnforge.export.graphs.execute import Runner, Tensors, as_it_is, at_own_precision, in_float64, part_of, values_of
from attnforge.export.graphs.float64 import to_double
from attnforge.export.graphs.nodes import input_of, rank_of
from attnforge.export.graphs.types import DOUBLE, FLOATS, retype
from attnforge.export.lowering.blocks import band_of, of_all_pairs
from attnforge.export.tensorrt.build import softmax_of
from attnforge.runtime import cases as reference
from attnforge.runtime.parity.verify import stored_inputs

TARGET = "onnxruntime"
FORMS = ("Softmax", "MultiHeadAttention", "Attention", "GroupQueryAttention")
"""Suffixes of the name of the node that a site was lowered to, after the site's name."""

MOST_SCORES, MOST_IN_ALL = 2**25, 2**26
"""Maximum number of weights in the maps of one sample, for one site (256 MiB in float64) and for all sites."""


@dataclass(frozen=True)
class SiteMaps:
    """The attention maps of one site for the first sample: three arrays (heads, queries, keys). Each row sums to one,
    or is all zeros if it is fully masked.

    Attributes:
        site: name of the site.
        form: form that the site was lowered to.
        is_held: whether `deployed` was computed by the model itself; else it is computed from the inputs of the fused
            operator.
        samples: number of samples that the site processes independently: a batch, or the windows of all its images.
        exact: float64, with the graph's own constants: the scale is fp32 in ONNX. None if the graph cannot be computed
            in double.
        eager: float32, with every step rounded to the bundle's precision.
        deployed: float32 if `is_held`, else float64.
    """

    site: str
    form: str
    is_held: bool
    samples: int
    exact: Array | None
    eager: Array
    deployed: Array


@dataclass
class AttentionMaps:
    """The maps of every site that can be shown, on one case. Iteration yields :class:`SiteMaps` in the order of the
    graph, each computed when it is reached.

    Attributes:
        case: the reference case.
        inputs: its inputs, by name.
        left_out: why a site has no maps, by site.
        no_exact: why there are no maps in float64; None if there are.
    """

    case: Case
    inputs: Mapping[str, Array]
    left_out: dict[str, str]
    no_exact: str | None = None
    _makers: list[Callable[[], SiteMaps]] = field(default_factory=list)

    def __iter__(self) -> Iterator[SiteMaps]:
        return (make() for make in self._makers)


def attention_maps(bundle: Bundle) -> AttentionMaps:
    """Run the canonical graph and the deployed ONNX Runtime model on the first case of real data, else on the example,
    and collect the attention maps.

    Args:
        bundle: a bundle; without an ONNX Runtime model every site is left out.
    """
    manifest = bundle.manifest
    case = _usual(manifest)
    inputs = reference.make_inputs(case, manifest.inputs, stored_inputs(bundle))
    records = {record.site: record for record in manifest.attention.details}
    left_out = {name: why for name, record in records.items() if (why := _why_left_out(record, manifest)) is not None}
    maps = AttentionMaps(case, inputs, left_out)
    names = [name for name in records if name not in left_out]
    if not names:
        return maps
    model = decomposed(whole_graph(bundle, CANONICAL), sites_of(manifest.attention))
    written = _written_sites(model, names)
    operands = list(dict.fromkeys(name for site in written.values() for name in site.operands))
    try:
        eager = at_own_precision(model, operands)(inputs)
    except Exception as error:  # ONNX Runtime raises many types
        maps.left_out |= dict.fromkeys(names, f"ONNX Runtime cannot run the canonical graph: {first_line(error)}")
        return maps
    exact: Tensors | None = None
    try:
        exact = _exactly(model, operands)(inputs)
    except Exception as error:
        maps.no_exact = f"ONNX Runtime cannot compute the graph in double: {first_line(error)}"
    chosen = _within_limits({name: site.sizes(eager) for name, site in written.items()}, maps.left_out)
    try:
        deployed = _deployed(bundle, {name: written[name] for name in chosen}, eager, inputs)
    except Exception as error:
        maps.left_out |= dict.fromkeys(chosen, f"ONNX Runtime cannot run the deployed graph: {first_line(error)}")
        return maps
    for name in chosen:
        if name in deployed:
            maps._makers.append(partial(_site_maps, records[name], written[name], exact, eager, deployed[name]))
        elif "first queries" in records[name].targets[TARGET].form:
            maps.left_out[name] = "its first queries are computed separately"
        else:
            maps.left_out[name] = "its node is not in the deployed model"
    return maps


def _why_left_out(site: SiteRecord, manifest: Manifest) -> str | None:
    """Return why a site has no maps, by its record in the manifest; None if it may have some."""
    if not site.canonical:
        return f"it was left unchanged: {site.reason or 'it was not recognised as attention'}"
    if TARGET not in manifest.targets:
        return "the bundle has no ONNX Runtime model, and a TensorRT plan does not expose its intermediate results"
    if TARGET not in site.targets:
        return "the manifest does not say how it was lowered for ONNX Runtime"
    in_int8 = manifest.quantised is not None and site.site in manifest.quantised.caches
    if in_int8 and "GroupQueryAttention" in site.targets[TARGET].form:
        return "the kernel rounds its keys to int8, which maps computed from its inputs do not show"
    return None


def _site_maps(
    record: SiteRecord, site: WrittenSite, exact: Tensors | None, eager: Tensors, deployed: Array | Callable[[], Array]
) -> SiteMaps:
    """Compute the maps of a site.

    Args:
        exact, eager: operands of all sites, in float64 and at the bundle's precision.
        deployed: the map that the model computed, or a function that computes it.
    """
    is_held = isinstance(deployed, np.ndarray)
    deployed_map = deployed if isinstance(deployed, np.ndarray) else deployed()
    eager_map = site.map(at_own_precision, eager)
    exact_map = site.map(_exactly, exact) if exact is not None else None
    masked = ~eager_map.any(axis=-1, keepdims=True)  # fully masked rows, which are NaN in a plain softmax
    deployed_map = np.where(masked & np.isnan(deployed_map), 0, deployed_map)
    form = record.targets[TARGET].form
    return SiteMaps(record.site, form, is_held, site.sizes(eager)[0], exact_map, eager_map, deployed_map)


def _usual(manifest: Manifest) -> Case:
    """Return the first case of real data, else the example, else the first; without cases, normal inputs."""
    cases = manifest.cases or [case for case in reference.cases(manifest.inputs) if case.kind == "normal"]
    of_kinds = (case for kind in ("data", "example") for case in cases if case.kind == kind)
    return next(of_kinds, cases[0])


def _within_limits(sizes: Mapping[str, tuple[int, ...]], left_out: dict[str, str]) -> list[str]:
    """Return the sites whose maps are not too large; `left_out` receives the reasons for the others."""
    chosen, total = [], 0
    for site, (_, heads, queries, keys) in sizes.items():
        count = heads * queries * keys
        if count > MOST_SCORES:
            left_out[site] = (
                f"its weights are {heads} × {queries} × {keys}, more than the limit of {MOST_SCORES / 1e6:.0f} million"
            )
        elif total + count > MOST_IN_ALL:
            left_out[site] = f"the sites before it have {total / 1e6:.0f} million weights, which nearly is the limit"
        else:
            total += count
            chosen.append(site)
    return chosen


# --- the canonical graph ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WrittenSite:
    """A canonical site decomposed into products, as a separate graph.

    Attributes:
        model: graph from the operands to the scores and the map.
        scores: name of the softmax's input.
        softmax: name of the map, in the type of the products.
        operands: names of the graph's inputs: query (B, H, n_q, d), key (B, H, d, n_k), and masks.
    """

    model: ir.Model
    scores: str
    softmax: str
    operands: list[str]

    def sizes(self, tensors: Tensors) -> tuple[int, ...]:
        """Return the numbers of samples, heads, queries and keys."""
        query, key = (tensors[name] for name in self.operands[:2])
        return *query.shape[:3], key.shape[3]

    def map(self, run: Callable[..., Runner], operands: Tensors) -> Array:
        """Return the map (H, n_q, n_k) of the first sample, with zeros in fully masked rows."""
        first = {name: operands[name][:1] if operands[name].ndim == 4 else operands[name] for name in self.operands}
        tensors = run(self.model)(first)
        masked = (tensors[self.scores] == -np.inf).all(axis=-1, keepdims=True)
        return np.asarray(np.where(masked, 0, tensors[self.softmax])[0])


_exactly = partial(in_float64, least_stays_least=True)


def _written_sites(model: ir.Model, names: list[str]) -> dict[str, WrittenSite]:
    nodes = {node.name: node for node in model.graph}
    sites: dict[str, tuple[str, str, list[str]]] = {}
    for name in names:
        softmax = nodes[softmax_of(name)]
        scores, result = scores_of(softmax), softmax.outputs[0]
        users = [use.node for use in result.uses()]
        if [user.op_type for user in users] == ["Cast"]:  # back from the type that the softmax is computed in
            result = users[0].outputs[0]
        producers = [node for score in reversed(scores) if (node := score.producer()) is not None]
        inputs = [value for node in producers for value in node.inputs if value is not None]
        operands = [v for v in inputs if v not in scores and ir.convenience.get_const_tensor(v) is None]
        sites[name] = str(scores[0].name), str(result.name), [str(v.name) for v in dict.fromkeys(operands)]
    outputs = [output for scores, result, _ in sites.values() for output in (scores, result)]
    together = part_of(model, outputs, {name for _, _, operands in sites.values() for name in operands})
    _forget_shapes(together)
    return {
        name: WrittenSite(part_of(together, [scores, result], operands), scores, result, operands)
        for name, (scores, result, operands) in sites.items()
    }


def _forget_shapes(model: ir.Model) -> None:
    """Let a graph run on one sample, even if the model has a fixed batch size."""
    for value in values_of(model).values():
        if not value.is_initializer():
            value.shape = None


# --- the deployed graph -----------------------------------------------------------------------------------------------


def _deployed(
    bundle: Bundle, sites: Mapping[str, WrittenSite], eager: Tensors, inputs: Mapping[str, Array]
) -> dict[str, Array | Callable[[], Array]]:
    """Return, for every site in the deployed model, the map of its first sample or a function that computes it."""
    model = whole_graph(bundle, bundle.manifest.targets[TARGET].model)
    nodes = {node.name: node for node in model.graph}
    held: dict[str, str] = {}
    fused: dict[str, list[FusedOperator]] = {}  # one for all heads, or one per head
    for site in sites:
        node = next((nodes[name] for form in FORMS if (name := f"{site}/{form}") in nodes), None)
        if node is not None and node.op_type == "Softmax":
            first = insert(model.graph, node, lambda op, node=node: _first_sample(op, node), after=True)  # type: ignore[misc]
            held[site] = str(first.name)
        elif node is not None:
            further = itertools.takewhile(nodes.__contains__, (f"{node.name}_{i}" for i in itertools.count(1)))
            fused[site] = [FusedOperator.of(model, head) for head in (node, *(nodes[name] for name in further))]
    graphs = [operator.model.graph for heads in fused.values() for operator in heads]
    names = [*held.values(), *(str(value.name) for graph in graphs for value in graph.inputs)]
    tensors = as_it_is(model, names, optimised=True)(inputs) if names else {}
    maps: dict[str, Array | Callable[[], Array]] = {site: tensors[name][0] for site, name in held.items()}
    for site, heads in fused.items():
        maps[site] = partial(_map_of, heads, tensors, sites[site].sizes(eager))
    return maps


def _first_sample(op: Builder, softmax: ir.Node) -> ir.Value:
    result = softmax.outputs[0]
    first = op.Slice(result, constant(op, [0]), constant(op, [1]), constant(op, [0]))
    first.type = result.type
    return first


@dataclass(frozen=True)
class FusedOperator:
    """A fused operator, and a separate graph that computes its weights in float64.

    Attributes:
        node: the operator.
        model: graph from the operator's inputs to its weights, `(samples, heads, n_q, n_k)`.
    """

    node: ir.Node
    model: ir.Model

    @classmethod
    def of(cls, model: ir.Model, node: ir.Node) -> FusedOperator:
        """Build the graph for the operator `node` of `model`."""
        given = [str(v.name) for v in node.inputs if v is not None and ir.convenience.get_const_tensor(v) is None]
        double = part_of(model, [str(node.outputs[0].name)], given)
        retype(double, FLOATS[:-1], DOUBLE)
        (operator,) = (inside for inside in double.graph if inside.name == node.name)
        maps, _ = insert(double.graph, operator, lambda op: products(op, read(op, operator)), stem="weights")
        weights = part_of(double, [str(maps.name)])
        to_double(weights)
        _forget_shapes(weights)
        return cls(node, weights)

    def query(self, tensors: Tensors) -> Array:
        return tensors[str(input_of(self.node).name)]

    def weights(self, tensors: Tensors, samples: int) -> Array:
        """Return the weights for the model's first sample, which may be several samples of the operator."""
        batch = len(self.query(tensors))
        masks = self.node.inputs[3:] if self.node.op_type == "Attention" else ()
        without_batch = [mask.name for mask in masks if mask is not None and rank_of(mask) in (2, 3)]
        first = {}
        for value in self.model.graph.inputs:
            array = tensors[str(value.name)]
            if len(array) == batch and value.name not in without_batch:
                array = array[: batch // samples]
            if not value.dtype:  # computed from sizes by a lowering, or a mask, which the graph takes as double
                array = array.astype(np.float64) if is_floating(array) else array
                value.dtype = ir.DataType.from_numpy(array.dtype)
            first[str(value.name)] = array
        (weights,) = as_it_is(self.model)(first).values()
        return weights


def _map_of(operators: list[FusedOperator], tensors: Tensors, sizes: tuple[int, ...]) -> Array:
    """Return the map of a site from one operator for all heads, or one per head."""
    samples, _, queries, keys = sizes
    parts = [operator.weights(tensors, samples) for operator in operators]
    if (band := band_of(operators[0].node)) is not None:  # the operator's samples or heads are blocks of tokens
        are_heads = operators[0].query(tensors).ndim == 4  # blocks are heads, and heads are samples
        return of_all_pairs(parts[0].swapaxes(0, 1) if are_heads else parts[0], band, queries)
    maps = np.concatenate([part.reshape(-1, *part.shape[2:]) for part in parts])
    return maps[..., :keys]  # a cache has more slots, which no query sees


# --- images -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PatchGrid:
    """Arrangement of a site's keys on an image: `rows` × `columns` squares of `side` pixels, row by row, after `extra`
    keys that are not patches (a class token)."""

    rows: int
    columns: int
    side: int
    extra: int


def patch_grid(height: int, width: int, keys: int) -> PatchGrid | None:
    """Return the grid of square patches of an image that corresponds to `keys` keys, with or without a class token
    before them; None if there is no such grid."""
    for extra in (0, 1):
        patches = keys - extra
        if patches < 4 or height * width % patches:
            continue
        side = isqrt(height * width // patches)
        if side * side * patches == height * width and not height % side and not width % side:
            return PatchGrid(height // side, width // side, side, extra)
    return None
