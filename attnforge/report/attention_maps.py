"""Attention weights: how much each query attends to each key, in float64, in eager and in the deployed model.

Float64's and eager's come from the bundle's canonical graph, whose Attention nodes have query, key and mask as inputs:
the graph runs in double, and with every result rounded to the bundle's precision, and the weights are computed from
these inputs. The deployed ones come from the ONNX Runtime model: where a site is plain products they are the Softmax's
own output; a fused operator never holds them, so they are computed from what it is given and told. A mistake in how a
site was lowered shows in them, one inside of a fused kernel does not. Imports no torch.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isqrt
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attnforge.arrays import BFLOAT16, Array
from attnforge.bundle import CANONICAL, Bundle, Case, SiteRecord
from attnforge.export.attention.canonicalize import Site
from attnforge.export.graphs.build import Builder, constant, insert, replace_value
from attnforge.export.graphs.float64 import NoDoublePath, to_double
from attnforge.export.graphs.saving import save
from attnforge.export.graphs.types import FLOAT, LOW, round_results
from attnforge.export.lowering.attention import attentions, mask_steps
from attnforge.export.lowering.onnxruntime import candidates_for
from attnforge.runtime import cases as reference
from attnforge.runtime.parity.verify import stored_inputs

TARGET = "onnxruntime"
FORMS = ("Softmax", "MultiHeadAttention", "Attention", "GroupQueryAttention")
"""How the name of the node ends that a site was lowered to, after the site's own."""

MOST_SCORES, MOST_IN_ALL = 2**25, 2**26
"""How many weights of one sample are looked at: of one site (256 MiB in float64), and of all."""


@dataclass(frozen=True)
class SiteWeights:
    """The weights of one site, of the first sample: three arrays (heads, queries, keys), each row summing to one, or
    all zeros where a query may attend to nothing.

    Attributes:
        site: its name.
        form: what it was lowered to.
        is_held: whether `deployed` is what the model itself computed; else it follows from what the fused operator is
            given.
        samples: how many the site attends in, each apart: a batch, or the windows of all its images.
        exact: in float64, of the numbers that the graph holds: the scale is fp32 in ONNX. None where the graph cannot
            be computed so.
        eager: at the bundle's precision, every step rounded to it.
        deployed: in the deployed model.
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
    """What the weights of one sample are computed from.

    Attributes:
        query: (H, n_q, d).
        key: (H', n_k, d), where H' divides H.
        scale: factor on the scores.
        softcap: scores are capped at ± this; 0 for no cap.
        is_causal: whether a query may attend to no later key.
        steps: what is done to the scores in order, each an array that broadcasts to (H, n_q, n_k): added to them, or
            where a number comes with it, a condition and what takes the place of the scores where it is False.
    """

    query: Array
    key: Array
    scale: float
    softcap: float = 0.0
    is_causal: bool = False
    steps: Sequence[tuple[Array, float | None]] = ()


def weights_of(o: Operands, dtype: np.dtype[Any]) -> Array:
    """`softmax(scale · QKᵀ + …)`, (H, n_q, n_k), in float64 where `dtype` is, else in float32 and every step rounded to
    `dtype`."""
    wide = np.dtype(np.float64 if dtype == np.float64 else np.float32)

    def rounded(x: Array) -> Array:
        return x.astype(dtype).astype(wide) if dtype != wide else x

    query, key = o.query.astype(wide), o.key.astype(wide)
    key = key.repeat(len(query) // len(key), axis=0)
    with np.errstate(over="ignore", invalid="ignore"):
        scores = rounded(wide.type(o.scale) * (query @ key.swapaxes(-1, -2)))
        if o.softcap:
            scores = rounded(wide.type(o.softcap) * np.tanh(scores / wide.type(o.softcap)))
        if o.is_causal:
            queries, keys = (np.arange(n) for n in scores.shape[-2:])
            scores = np.where(keys <= queries[:, None], scores, wide.type(-np.inf))
        for operand, fill in o.steps:
            if fill is None:
                scores = rounded(scores + operand.astype(wide))
            else:
                scores = np.where(operand, scores, wide.type(_held(fill, dtype)))
        highest = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - np.where(highest == -np.inf, 0, highest))
        total = weights.sum(axis=-1, keepdims=True)
        return rounded(weights / np.where(total == 0, 1, total))


def _held(number: float, dtype: np.dtype[Any]) -> float:
    """A finite number as far as `dtype` holds it."""
    most = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    return float(np.clip(number, -most, most)) if np.isfinite(number) else number


@dataclass(frozen=True)
class Found:
    """A site, how many samples it attends in, the type that eager has there, and what its weights follow from; of a
    deployed Softmax the weights."""

    site: str
    form: str
    samples: int
    dtype: np.dtype[Any]
    exact: Operands | None
    eager: Operands
    deployed: Operands | Array


@dataclass
class AttentionWeights:
    """The weights of every site that can be looked at, on one case. Iterating gives one :class:`SiteWeights` after
    another, in the order of the graph, whose arrays are made as they are asked for.

    Attributes:
        case: whose inputs the model was given.
        inputs: by name.
        left_out: why there are none, by site.
        no_exact: why there are none in float64; None where there are.
        found: what the weights follow from.
    """

    case: Case
    inputs: Mapping[str, Array]
    left_out: dict[str, str]
    no_exact: str | None = None
    found: list[Found] = field(default_factory=list)

    def __iter__(self) -> Iterator[SiteWeights]:
        for one in self.found:
            eager = weights_of(one.eager, one.dtype)
            exact = weights_of(one.exact, np.dtype(np.float64)) if one.exact is not None else None
            is_held = not isinstance(one.deployed, Operands)
            deployed = one.deployed
            if isinstance(deployed, Operands):
                deployed = weights_of(deployed, np.dtype(np.float64))
            silent = ~eager.any(axis=-1, keepdims=True)
            deployed = np.where(silent & np.isnan(deployed), 0, deployed)  # a bare softmax has NaN there, as meant
            yield SiteWeights(one.site, one.form, is_held, one.samples, exact, eager, deployed)


def attention_weights(bundle: Bundle, case: Case | None = None) -> AttentionWeights:
    """Run the canonical graph and the deployed ONNX Runtime model on one case, and look at every attention site.

    Args:
        bundle: deployed for ONNX Runtime; without that every site is left out.
        case: whose inputs to run; by default the first of real data, else the example.
    """
    manifest = bundle.manifest
    if case is None:
        case = next((one for kind in ("data", "example") for one in manifest.cases if one.kind == kind), None)
        case = case or manifest.cases[0]
    inputs = reference.make_inputs(case, manifest.inputs, stored_inputs(bundle))
    records = {record.site: record for record in manifest.attention.details}
    left_out = {
        name: f"it was left as it is written: {record.reason or 'it was not understood as attention'}"
        for name, record in records.items()
        if not record.canonical
    }
    found = AttentionWeights(case, inputs, left_out)
    canonical = {name: record for name, record in records.items() if record.canonical}
    if not canonical:
        return found
    if TARGET not in manifest.targets:
        found.left_out |= dict.fromkeys(
            canonical, "the bundle has no ONNX Runtime model, and a TensorRT plan does not show what it computes inside"
        )
        return found
    try:
        plain = _canonical_graph(bundle, list(canonical))
        eager_model = plain.model.clone()
        round_results(eager_model)
        eager = plain.operands(_run(eager_model, inputs, np.float32, optimized=False))
    except Exception as error:  # ONNX Runtime's are of many kinds
        found.left_out |= dict.fromkeys(canonical, f"ONNX Runtime cannot run the canonical graph: {_first(error)}")
        return found
    exact: dict[str, tuple[Operands, int]] = {}
    try:
        to_double(plain.model)
        exact = plain.operands(_run(plain.model, inputs, np.float64, optimized=False))
    except Exception as error:
        what = str(error) if isinstance(error, NoDoublePath) else _first(error)
        found.no_exact = f"ONNX Runtime cannot compute the graph in double: {what}"
    sizes = {site: (len(o.query), o.query.shape[1], o.key.shape[1]) for site, (o, _) in eager.items()}
    chosen = _within_limits(sizes, found.left_out)
    try:
        deployed = _deployed(bundle, {name: canonical[name] for name in chosen}, sizes, inputs)
    except Exception as error:
        found.left_out |= dict.fromkeys(chosen, f"ONNX Runtime cannot run the deployed graph: {_first(error)}")
        return found
    for site in chosen:
        if site not in deployed:
            found.left_out[site] = "its node is not in the deployed model"
            continue
        operands, samples = eager[site]
        form = canonical[site].targets[TARGET].form
        in_double = exact[site][0] if site in exact else None
        found.found.append(Found(site, form, samples, plain.seen[site].dtype, in_double, operands, deployed[site]))
    return found


def _within_limits(sizes: Mapping[str, tuple[int, int, int]], left_out: dict[str, str]) -> list[str]:
    """The sites whose weights are not too many; of the others `left_out` is told why."""
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


@dataclass
class _Seen:
    """What is seen of one canonical node: its type, names of the outputs that show its inputs, and what its attributes
    say."""

    dtype: np.dtype[Any]
    query: str
    key: str
    scale: float
    softcap: float
    is_causal: bool
    steps: list[tuple[str, float | None]]


@dataclass
class _Canonical:
    """The canonical graph with its attention as plain products, whose outputs are the inputs of every site."""

    model: ir.Model
    seen: dict[str, _Seen]

    def operands(self, results: Mapping[str, Array]) -> dict[str, tuple[Operands, int]]:
        """Of every site what its first sample's weights follow from, and how many samples there are."""
        found = {}
        for site, seen in self.seen.items():
            query, key = results[seen.query], results[seen.key]
            steps = [(_first_of(results[name]), fill) for name, fill in seen.steps]
            operands = Operands(query[0], key[0], seen.scale, seen.softcap, seen.is_causal, steps)
            found[site] = operands, len(query)
        return found


def _canonical_graph(bundle: Bundle, sites: list[str]) -> _Canonical:
    model = ir.load(bundle.file(CANONICAL))
    seen: dict[str, _Seen] = {}
    taps = _Taps(model.graph)
    named = [Site(name, "", node=f"{name}/Attention") for name in sites]
    for site, attention in attentions(model, named):
        node = attention.node
        query, key = node.inputs[:2]
        assert query is not None and key is not None
        seen[site.name] = _Seen(
            attention.dtype.numpy(),
            taps.add(query, node),
            taps.add(key, node),
            attention.scale,
            attention.softcap,
            attention.is_causal,
            [(taps.add(step.operand, node), step.fill) for step in mask_steps(attention.mask)],
        )
        # As products: ONNX Runtime's own Attention takes not every mask, and knows no precision between its steps.
        products = candidates_for(site.name, attention)[0]
        result = insert(model.graph, node, lambda op, emit=products.emit, a=attention: emit(op, a))  # type: ignore[misc]
        replace_value(attention.output, result)
    taps.take_over()
    RemoveUnusedNodesPass()(model)
    return _Canonical(model, seen)


class _Taps:
    """Values of a graph that are to be its outputs."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._outputs: list[ir.Value] = []

    def add(self, value: ir.Value, at: ir.Node, after: bool = False) -> str:
        """Show `value`, with a node before or after `at`; under the name that is returned."""
        node = ir.node("Identity", [value], name=f"attnforge/seen/{len(self._outputs)}")
        shown = node.outputs[0]
        shown.name, shown.type, shown.shape = node.name, value.type, value.shape
        if after:
            self._graph.insert_after(at, node)
        else:
            self._graph.insert_before(at, node)
        self._outputs.append(shown)
        return str(shown.name)

    def take_over(self) -> None:
        """Let what is shown be the outputs of the graph, and nothing else."""
        self._graph.outputs.clear()
        self._graph.outputs.extend(self._outputs)


# --- the deployed graph -----------------------------------------------------------------------------------------------


def _deployed(
    bundle: Bundle,
    sites: Mapping[str, SiteRecord],
    sizes: Mapping[str, tuple[int, int, int]],
    inputs: Mapping[str, Array],
) -> dict[str, Operands | Array]:
    """Of every site that is found in the deployed model what its weights follow from, or the weights."""
    model = ir.load(bundle.file(bundle.manifest.targets[TARGET].model))
    nodes = {node.name: node for node in model.graph}
    taps = _Taps(model.graph)
    shown: dict[str, tuple[ir.Node, dict[int, list[str]]]] = {}
    for site in sites:
        node = next((nodes[name] for form in FORMS if (name := f"{site}/{form}") in nodes), None)
        if node is None:
            continue
        if node.op_type == "Softmax":
            first = insert(model.graph, node, lambda op, node=node: _first_sample(op, node), after=True)  # type: ignore[misc]
            producer = first.producer()
            assert producer is not None
            shown[site] = node, {0: [taps.add(first, producer, after=True)]}
        else:
            mask = 5 if node.op_type == "MultiHeadAttention" else 3 if node.op_type == "Attention" else None
            wanted = [i for i in (0, 1, mask) if i is not None and i < len(node.inputs) and node.inputs[i] is not None]
            heads = [node, *_further_heads(node, nodes)]
            shown[site] = node, {i: [taps.add(_input(one, i), one) for one in heads] for i in wanted}
    taps.take_over()
    RemoveUnusedNodesPass()(model)
    for value in model.graph.inputs:
        if value.dtype in LOW:  # a cast to fp32 follows; NumPy has no bfloat16 to feed
            value.type = ir.TensorType(FLOAT)
    results = _run(model, inputs, np.float32, optimized=True) if shown else {}
    return {
        site: results[names[0][0]][0]
        if node.op_type == "Softmax"
        else _operands_of(
            node,
            {i: np.concatenate([results[name] for name in some], axis=-1) for i, some in names.items()},
            sizes[site][0],
            apart=len(names[0]) == 1,
        )
        for site, (node, names) in shown.items()
    }


def _further_heads(node: ir.Node, nodes: Mapping[str | None, ir.Node]) -> list[ir.Node]:
    """Where a site is run head after head, the nodes of all but its first head."""
    names = itertools.takewhile(lambda name: name in nodes, (f"{node.name}_{i}" for i in itertools.count(1)))
    return [nodes[name] for name in names]


def _input(node: ir.Node, i: int) -> ir.Value:
    value = node.inputs[i]
    assert value is not None
    return value


def _first_sample(op: Builder, node: ir.Node) -> ir.Value:
    weights = node.outputs[0]
    first = op.Slice(weights, constant(op, [0]), constant(op, [1]), constant(op, [0]))
    first.type = weights.type
    return first


def _operands_of(node: ir.Node, given: Mapping[int, Array], heads: int, apart: bool) -> Operands:
    """What a fused operator was given of the first sample, with its heads apart.

    Args:
        apart: whether it is one operator for all heads; else what was given to one a head stands side by side.
    """
    query, key = given[0], given[1]
    attributes = node.attributes
    softcap = attributes.get_float("softcap", 0.0) or 0.0
    steps: list[tuple[Array, float | None]] = []
    is_causal = bool(attributes.get_int("is_causal", 0))
    if node.op_type == "Attention":
        query, key = query[0], key[0]
        if 3 in given:
            mask = _first_of(given[3])
            steps = [(mask, -np.inf if mask.dtype == np.bool_ else None)]
    elif node.op_type == "GroupQueryAttention":
        is_causal = True
        query, key = (
            _apart(x[0], attributes.get_int(name) or 1) for x, name in ((query, "num_heads"), (key, "kv_num_heads"))
        )
    else:
        is_causal = bool(attributes.get_int("unidirectional", 0))
        packed = (attributes.get_int("num_heads") or 1) if apart else heads
        if packed == heads:
            query, key = _apart(query[0], heads), _apart(key[0], heads)
        else:  # every head a sample of its own
            query, key = query[:heads], key[:heads]
        if 5 in given:
            steps = [(_first_of(given[5]), None)]
    scale = attributes.get_float("scale", 0.0) or query.shape[-1] ** -0.5
    return Operands(query, key, scale, softcap, is_causal, steps)


def _first_of(mask: Array) -> Array:
    """The first sample's part of what broadcasts to (B, H, n_q, n_k)."""
    return mask[0] if mask.ndim == 4 else mask


def _apart(x: Array, heads: int) -> Array:
    """`(n, H·d)` as `(H, n, d)`."""
    return x.reshape(len(x), heads, -1).swapaxes(0, 1)


# --- running ----------------------------------------------------------------------------------------------------------


def _run(
    model: ir.Model, inputs: Mapping[str, Array], wide: type[np.floating[Any]], optimized: bool
) -> dict[str, Array]:
    """Outputs by name; floating-point inputs are widened."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    with tempfile.TemporaryDirectory(prefix="attnforge-") as folder:
        file = Path(folder) / "model.onnx"
        save(model, file)
        session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        wanted = {value.name for value in session.get_inputs()}
        feeds = {
            name: a.astype(wide) if a.dtype == BFLOAT16 or np.issubdtype(a.dtype, np.floating) else a
            for name, a in inputs.items()
            if name in wanted
        }
        names = [value.name for value in session.get_outputs()]
        return dict(zip(names, session.run(names, feeds), strict=True))


def _first(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


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
