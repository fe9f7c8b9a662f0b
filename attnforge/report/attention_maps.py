"""Attention maps: how much each query attends to each key, in float64, in eager and in the deployed model.

The maps of float64 and of eager come from the bundle's canonical graph with its attention written out as products: the
graph runs in double, and with every result rounded to the bundle's precision. The deployed maps come from the ONNX
Runtime model: where a site is plain products they are the output of its Softmax; a fused operator never holds them, so
they are computed from the inputs and attributes of the operator. A mistake in how a site was lowered shows in them, a
mistake inside a fused kernel does not. Imports no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import isqrt

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.bundle import CANONICAL, Bundle, Case, Manifest, SiteRecord
from attnforge.errors import first_line
from attnforge.export.decoding.whole import whole_graph
from attnforge.export.diagnosis.stages import scores_of, sites_of, written_out
from attnforge.export.graphs.build import Builder, constant, insert
from attnforge.export.graphs.execute import Runner, Tensors, as_it_is, at_own_precision, in_float64
from attnforge.export.graphs.parts import part_of, values_of
from attnforge.export.graphs.rotary import turn_before_attention
from attnforge.export.lowering.blocks import before_blocks, mask_of_blocks
from attnforge.export.tensorrt.build import softmax_of
from attnforge.runtime import cases as reference
from attnforge.runtime.parity.verify import stored_inputs

TARGET = "onnxruntime"
FORMS = ("Softmax", "MultiHeadAttention", "Attention", "GroupQueryAttention")
"""How the name of the node ends that a site was lowered to, after the name of the site."""

MOST_SCORES, MOST_IN_ALL = 2**25, 2**26
"""How many numbers the maps of one sample may have: those of one site (256 MiB in float64), and of all sites."""


@dataclass(frozen=True)
class SiteMaps:
    """The attention maps of one site, of the first sample: three arrays (heads, queries, keys), each row summing to
    one, or all zeros where a query may attend to nothing.

    Attributes:
        site: name of the site.
        form: what the site was lowered to.
        is_held: whether `deployed` is what the model itself computed; else it follows from the inputs of the fused
            operator.
        samples: how many samples the site attends in, each apart: a batch, or the windows of all its images.
        exact: float64, of the numbers that the graph holds: the scale is fp32 in ONNX. None where the graph cannot be
            computed so.
        eager: float32, with every step rounded to the bundle's precision.
        deployed: float32 where `is_held`, else float64.
    """

    site: str
    form: str
    is_held: bool
    samples: int
    exact: Array | None
    eager: Array
    deployed: Array


@dataclass(frozen=True)
class Operands:
    """What the map of one sample is computed from.

    Attributes:
        query: (H, n_q, d).
        key: (H', n_k, d), where H' divides H.
        scale: factor on the scores.
        softcap: scores are capped at ± this; 0 for no cap.
        is_causal: whether a query may attend to no later key.
        mask: broadcasts to (H, n_q, n_k): added to the scores, or where it is boolean, False for what is left out.
    """

    query: Array
    key: Array
    scale: float
    softcap: float = 0.0
    is_causal: bool = False
    mask: Array | None = None

    def map(self) -> Array:
        """`softmax(scale · QKᵀ + mask)`, (H, n_q, n_k), in float64."""
        query, key = self.query.astype(np.float64), self.key.astype(np.float64)
        key = key.repeat(len(query) // len(key), axis=0)
        with np.errstate(over="ignore", invalid="ignore"):
            scores = self.scale * (query @ key.swapaxes(-1, -2))
            if self.softcap:
                scores = self.softcap * np.tanh(scores / self.softcap)
            if self.is_causal:
                queries, keys = (np.arange(n) for n in scores.shape[-2:])
                scores = np.where(keys <= queries[:, None], scores, -np.inf)
            if self.mask is not None:
                is_condition = self.mask.dtype == np.bool_
                scores = np.where(self.mask, scores, -np.inf) if is_condition else scores + self.mask
            highest = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
            exponentials = np.exp(scores - np.where(highest == -np.inf, 0, highest))
            total = exponentials.sum(axis=-1, keepdims=True)
            return np.asarray(exponentials / np.where(total == 0, 1, total))


@dataclass
class AttentionMaps:
    """The maps of every site that can be looked at, on one case. Iterating gives one :class:`SiteMaps` after another,
    in the order of the graph, whose arrays are computed as they are asked for.

    Attributes:
        case: whose inputs the model was given.
        inputs: by name.
        left_out: why a site has no maps, by site.
        no_exact: why there are no maps in float64; None where there are.
    """

    case: Case
    inputs: Mapping[str, Array]
    left_out: dict[str, str]
    no_exact: str | None = None
    _makers: list[Callable[[], SiteMaps]] = field(default_factory=list)

    def __iter__(self) -> Iterator[SiteMaps]:
        return (make() for make in self._makers)


def attention_maps(bundle: Bundle, case: Case | None = None) -> AttentionMaps:
    """Run the canonical graph and the deployed ONNX Runtime model on one case, and look at every attention site.

    Args:
        bundle: deployed for ONNX Runtime; without that every site is left out.
        case: whose inputs to run; by default the first of real data, else the example.
    """
    manifest = bundle.manifest
    case = case or _usual(manifest)
    inputs = reference.make_inputs(case, manifest.inputs, stored_inputs(bundle))
    records = {record.site: record for record in manifest.attention.details}
    left_out = {
        name: f"it was left as it is written: {record.reason or 'it was not understood as attention'}"
        for name, record in records.items()
        if not record.canonical
    }
    left_out |= {
        name: "the manifest does not say what it became for ONNX Runtime"
        for name, record in records.items()
        if record.canonical and TARGET in manifest.targets and TARGET not in record.targets
    }
    in_int8 = manifest.quantised.caches if manifest.quantised is not None else {}
    left_out |= {
        name: "the kernel rounds its keys to int8, which maps of what the kernel is given do not show"
        for name in in_int8.keys() - left_out.keys()
        if "GroupQueryAttention" in records[name].targets[TARGET].form
    }
    maps = AttentionMaps(case, inputs, left_out)
    canonical = {name: record for name, record in records.items() if record.canonical and name not in left_out}
    if not canonical:
        return maps
    if TARGET not in manifest.targets:
        maps.left_out |= dict.fromkeys(
            canonical, "the bundle has no ONNX Runtime model, and a TensorRT plan does not show what it computes inside"
        )
        return maps
    model = written_out(whole_graph(bundle, CANONICAL), sites_of(manifest.attention))
    written = _written_sites(model, list(canonical))
    operands = list(dict.fromkeys(name for site in written.values() for name in site.operands))
    try:
        eager = at_own_precision(model, operands)(inputs)
    except Exception as error:  # ONNX Runtime's are of many kinds
        maps.left_out |= dict.fromkeys(canonical, f"ONNX Runtime cannot run the canonical graph: {first_line(error)}")
        return maps
    exact: Tensors | None = None
    try:
        exact = _exactly(model, operands)(inputs)
    except Exception as error:
        maps.no_exact = f"ONNX Runtime cannot compute the graph in double: {first_line(error)}"
    sizes = {name: site.sizes(eager) for name, site in written.items()}
    chosen = _within_limits(sizes, maps.left_out)
    try:
        deployed = _deployed(bundle, {name: canonical[name] for name in chosen}, sizes, inputs)
    except Exception as error:
        maps.left_out |= dict.fromkeys(chosen, f"ONNX Runtime cannot run the deployed graph: {first_line(error)}")
        return maps
    for name in chosen:
        if name not in deployed:
            in_parts = "first queries" in canonical[name].targets[TARGET].form
            why = "its first queries are computed apart" if in_parts else "its node is not in the deployed model"
            maps.left_out[name] = why
            continue
        site, form = written[name], canonical[name].targets[TARGET].form
        firsts = site.first_sample(exact) if exact is not None else None, site.first_sample(eager)
        maps._makers.append(partial(_site_maps, name, form, site.samples(eager), site, *firsts, deployed[name]))
    return maps


def _site_maps(
    name: str,
    form: str,
    samples: int,
    site: WrittenSite,
    exact: Tensors | None,
    eager: Tensors,
    deployed: Operands | Array,
) -> SiteMaps:
    """The maps of a site.

    Args:
        exact, eager: operands of the first sample, in float64 and at the bundle's precision.
        deployed: operands of the fused operator, or the map that the model holds.
    """
    eager_map = site.map(at_own_precision, eager)
    exact_map = site.map(_exactly, exact) if exact is not None else None
    held = deployed.map() if isinstance(deployed, Operands) else deployed
    silent = ~eager_map.any(axis=-1, keepdims=True)
    held = np.where(silent & np.isnan(held), 0, held)  # a bare softmax has NaN there, as meant
    return SiteMaps(name, form, not isinstance(deployed, Operands), samples, exact_map, eager_map, held)


def _usual(manifest: Manifest) -> Case:
    """The first case of real data, else the example, else the first; of a bundle without any, normal inputs."""
    cases = manifest.cases or [case for case in reference.cases(manifest.inputs) if case.kind == "normal"]
    of_kinds = (case for kind in ("data", "example") for case in cases if case.kind == kind)
    return next(of_kinds, cases[0])


def _within_limits(sizes: Mapping[str, tuple[int, int, int]], left_out: dict[str, str]) -> list[str]:
    """The sites whose maps are not too large; `left_out` is told why the others are not shown."""
    chosen, total = [], 0
    for site, (heads, queries, keys) in sizes.items():
        count = heads * queries * keys
        if count > MOST_SCORES:
            left_out[site] = (
                f"its weights are {heads} × {queries} × {keys}, more than the {MOST_SCORES / 1e6:.0f} million looked at"
            )
        elif total + count > MOST_IN_ALL:
            left_out[site] = f"the sites before it have {total / 1e6:.0f} million weights already, enough for one look"
        else:
            total += count
            chosen.append(site)
    return chosen


# --- the canonical graph ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WrittenSite:
    """A canonical site written out as products, a graph of its own.

    Attributes:
        model: from the operands to the scores and the map.
        scores: name of the input of the softmax.
        softmax: name of the map, at the type of the products.
        operands: names of what the graph takes: query (B, H, n_q, d), key (B, H, d, n_k), and what masks.
    """

    model: ir.Model
    scores: str
    softmax: str
    operands: list[str]

    def samples(self, tensors: Tensors) -> int:
        return len(tensors[self.operands[0]])

    def sizes(self, tensors: Tensors) -> tuple[int, int, int]:
        """Heads, queries and keys."""
        query, key = (tensors[name] for name in self.operands[:2])
        return query.shape[1], query.shape[2], key.shape[3]

    def first_sample(self, tensors: Tensors) -> Tensors:
        """The operands among `tensors`, of the first sample."""
        return {name: tensors[name][:1] if tensors[name].ndim == 4 else tensors[name] for name in self.operands}

    def map(self, run: Callable[..., Runner], operands: Tensors) -> Array:
        """The map (H, n_q, n_k) of one sample, zeros where a query may attend to nothing."""
        tensors = run(self.model)(operands)
        silent = (tensors[self.scores] == -np.inf).all(axis=-1, keepdims=True)
        return np.asarray(np.where(silent, 0, tensors[self.softmax])[0])


def _exactly(model: ir.Model, names: list[str] | None = None) -> Runner:
    return in_float64(model, names, least_stays_least=True)


def _written_sites(model: ir.Model, names: list[str]) -> dict[str, WrittenSite]:
    nodes = {node.name: node for node in model.graph}
    sites: dict[str, tuple[str, str, list[str]]] = {}
    for name in names:
        softmax = nodes[softmax_of(name)]
        scores, result = scores_of(softmax), softmax.outputs[0]
        users = [use.node for use in result.uses()]
        if [user.op_type for user in users] == ["Cast"]:  # back from the type that the softmax is computed in
            result = users[0].outputs[0]
        inputs = [value for score in reversed(scores) for value in _producer(score).inputs if value is not None]
        operands = [v for v in inputs if v not in scores and ir.convenience.get_const_tensor(v) is None]
        sites[name] = str(scores[0].name), str(result.name), [str(v.name) for v in dict.fromkeys(operands)]
    outputs = [output for scores, result, _ in sites.values() for output in (scores, result)]
    together = part_of(model, outputs, {name for _, _, operands in sites.values() for name in operands})
    for value in values_of(together).values():
        if not value.is_initializer():
            value.shape = None  # it runs on one sample, whatever batch the model is fixed to
    return {
        name: WrittenSite(part_of(together, [scores, result], operands), scores, result, operands)
        for name, (scores, result, operands) in sites.items()
    }


def _producer(value: ir.Value) -> ir.Node:
    node = value.producer()
    assert node is not None
    return node


# --- the deployed graph -----------------------------------------------------------------------------------------------


def _deployed(
    bundle: Bundle,
    sites: Mapping[str, SiteRecord],
    sizes: Mapping[str, tuple[int, int, int]],
    inputs: Mapping[str, Array],
) -> dict[str, Operands | Array]:
    """Of every site that the deployed model has, the map, or what it is computed from."""
    model = whole_graph(bundle, bundle.manifest.targets[TARGET].model)
    turn_before_attention(model)
    nodes = {node.name: node for node in model.graph}
    shown: dict[str, tuple[ir.Node, dict[int, list[str]]]] = {}
    for site in sites:
        node = next((nodes[name] for form in FORMS if (name := f"{site}/{form}") in nodes), None)
        if node is None:
            continue
        if node.op_type == "Softmax":
            first = insert(model.graph, node, lambda op, node=node: _first_sample(op, node), after=True)  # type: ignore[misc]
            shown[site] = node, {0: [str(first.name)]}
        elif (blocked := before_blocks(node)) is not None:
            shown[site] = node, {i: [str(x.name)] for i, x in ((0, blocked[0]), (1, blocked[1]), (3, _input(node, 3)))}
        else:
            mask = 5 if node.op_type == "MultiHeadAttention" else 3 if node.op_type == "Attention" else None
            wanted = [i for i in (0, 1, mask) if i is not None and i < len(node.inputs) and node.inputs[i] is not None]
            heads = [node, *_further_heads(node, nodes)]
            shown[site] = node, {i: [str(_input(head, i).name) for head in heads] for i in wanted}
    names = [name for _, operands in shown.values() for of_heads in operands.values() for name in of_heads]
    tensors = as_it_is(model, names, optimised=True)(inputs) if names else {}
    return {
        site: tensors[operands[0][0]][0]
        if node.op_type == "Softmax"
        else _operands_of(
            node,
            {i: np.concatenate([tensors[name] for name in names], axis=-1) for i, names in operands.items()},
            sizes[site][0],
            apart=len(operands[0]) == 1,
        )
        for site, (node, operands) in shown.items()
    }


def _further_heads(node: ir.Node, nodes: Mapping[str | None, ir.Node]) -> list[ir.Node]:
    """Where a site is run head after head, the nodes of all but its first head."""
    names = itertools.takewhile(lambda name: name in nodes, (f"{node.name}_{i}" for i in itertools.count(1)))
    return [nodes[name] for name in names]


def _input(node: ir.Node, i: int) -> ir.Value:
    value = node.inputs[i]
    assert value is not None
    return value


def _first_sample(op: Builder, softmax: ir.Node) -> ir.Value:
    result = softmax.outputs[0]
    first = op.Slice(result, constant(op, [0]), constant(op, [1]), constant(op, [0]))
    first.type = result.type
    return first


def _operands_of(node: ir.Node, tensors: Mapping[int, Array], heads: int, apart: bool) -> Operands:
    """The operands of a fused operator for the first sample, with the heads apart.

    Args:
        node: the operator.
        tensors: its inputs, by place.
        heads: of the site.
        apart: whether it is one operator for all heads; else the inputs of one operator a head stand side by side.
    """
    query, key, attributes = tensors[0], tensors[1], node.attributes
    softcap = attributes.get_float("softcap", 0.0) or 0.0
    is_causal, mask = bool(attributes.get_int("is_causal", 0)), None
    if (blocked := before_blocks(node)) is not None:
        query, key = (
            _apart(x[0], attributes.get_int(name) or 1) for x, name in ((query, "q_num_heads"), (key, "kv_num_heads"))
        )
        mask = mask_of_blocks(tensors[3], blocked[2], query.shape[1])
    elif node.op_type == "Attention":
        query, key = query[0], key[0]
        mask = _first_of(tensors[3]) if 3 in tensors else None
    elif node.op_type == "GroupQueryAttention":
        is_causal, counts = True, [attributes.get_int(name) or 1 for name in ("num_heads", "kv_num_heads")]
        if (window := attributes.get_int("local_window_size", 0) or 0) > 0:
            mask = np.tri(query.shape[1], dtype=bool) & ~np.tri(query.shape[1], k=-window, dtype=bool)
        if counts[0] == heads:
            query, key = (_apart(x[0], count) for x, count in zip((query, key), counts, strict=True))
        else:  # every head a sample of its own
            query, key = query[:heads], key[:heads]
    else:
        is_causal = bool(attributes.get_int("unidirectional", 0))
        packed = (attributes.get_int("num_heads") or 1) if apart else heads
        if packed == heads:
            query, key = _apart(query[0], heads), _apart(key[0], heads)
        else:  # every head a sample of its own
            query, key = query[:heads], key[:heads]
        mask = _first_of(tensors[5]) if 5 in tensors else None
    scale = attributes.get_float("scale", 0.0) or query.shape[-1] ** -0.5
    return Operands(query, key, scale, softcap, is_causal, mask)


def _first_of(mask: Array) -> Array:
    """The first sample's part of a mask that broadcasts to (B, H, n_q, n_k)."""
    return mask[0] if mask.ndim == 4 else mask


def _apart(x: Array, heads: int) -> Array:
    """`(n, H·d)` as `(H, n, d)`."""
    return x.reshape(len(x), heads, -1).swapaxes(0, 1)


# --- images -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PatchGrid:
    """How the keys of a site lie on an image: `rows` × `columns` squares of `side` pixels, row by row, after `extra`
    keys that are none (a class token)."""

    rows: int
    columns: int
    side: int
    extra: int


def patch_grid(height: int, width: int, keys: int) -> PatchGrid | None:
    """The grid of square patches that `keys` keys are of an image, with or without one class token before them; None
    where there is no such grid."""
    for extra in (0, 1):
        patches = keys - extra
        if patches < 4 or height * width % patches:
            continue
        side = isqrt(height * width // patches)
        if side * side * patches == height * width and not height % side and not width % side:
            return PatchGrid(height // side, width // side, side, extra)
    return None
