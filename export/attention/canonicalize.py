"""Rewrite every attention site of a graph, however it was written, to one canonical Attention node (:mod:`.canonical`).

A site is found by its softmax: the walk back from it (:mod:`.walk_back`) leads to query and key, the walk forward
(:mod:`.walk_forward`) to values and output. A site that is not recognised stays as it is and gets a reason, and so does
attention without a softmax (:mod:`.unrecognised`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import onnx_ir as ir
from onnx_ir.passes import PassResult
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attnforge.export.attention.canonical import described
from attnforge.export.attention.contraction import is_product
from attnforge.export.attention.emit import emit, standard
from attnforge.export.attention.layout import Layout
from attnforge.export.attention.operands import Position
from attnforge.export.attention.softmax import by_hand, restore_softmax
from attnforge.export.attention.unrecognised import COMPUTES, unrecognised, why_no_attention
from attnforge.export.attention.walk_back import Ended, Scores, Steps, both_computed, walk_to_product
from attnforge.export.attention.walk_forward import Weights, walk_to_outputs
from attnforge.export.graphs.attention import READERS, NotAttention
from attnforge.export.graphs.nodes import dependent_on_inputs, input_of, is_op, scope_of, upstream
from attnforge.export.graphs.sizes import LayoutError

LOST = "it runs in the module, and the exported graph has neither a softmax nor an attention operator for it"
WITHOUT_EFFECT = "the exported program computes the outputs without it: it is constant, repeated, or not used"


@dataclass(frozen=True)
class Site:
    """One attention site of a graph.

    Attributes:
        name: qualified name of the module that contains it; numbered where a module has several.
        written_as: the operators from the first product to the second in the author's graph.
        node: name of the canonical Attention node, or None if there is none.
        form: a short description of that node.
        reason: why there is no such node.
    """

    name: str
    written_as: str
    node: str | None = None
    form: str | None = None
    reason: str | None = None


@dataclass
class Canonical(PassResult):
    """The result of :func:`canonicalize`: onnx_ir's own `PassResult`, so that our passes and theirs are used alike. A
    pass is a function `pass_(model, …)` that changes `model` in place and, where callers ask whether it did, returns
    `PassResult(model, modified)`.

    Attributes:
        model: the graph that was passed in.
        modified: whether the pass changed it.
        sites: all sites, in graph order; those that could not be rewritten have a reason instead of a node.
        other_softmaxes: why each of the other softmaxes is no attention, by module.
    """

    sites: list[Site]
    other_softmaxes: dict[str, str]


def canonicalize(model: ir.Model, without_effect: Sequence[str] = (), lost: Sequence[str] = ()) -> Canonical:
    """Rewrite every attention site of `model`, in place, to a canonical Attention node. Every softmax and every
    attention operator, of the graph or only of its source, is part of a site or one of the other softmaxes.

    Args:
        model: the graph.
        without_effect: the modules of those without which the exported program computes the outputs.
        lost: the modules of those that the exported program has and the graph lacks.
    """
    before, remove_unused = _nodes(model), RemoveUnusedNodesPass()
    modified = remove_unused(model).modified  # nodes that feed no output must not count as users of the scores
    if restore_softmax(model).modified:
        remove_unused(model)
    sites: list[Site] = []
    others: dict[str, str] = {}
    softmaxes: list[ir.Node] = []
    for node in list(model.graph):
        if (node.domain, node.op_type) in READERS:
            operator = f"{node.domain}::{node.op_type}".removeprefix("::")
            sites.append(_written(Site(_unused_name(node, sites), operator), partial(standard, model.graph, node)))
        elif is_op(node, "Softmax"):
            found = _from_softmax(model.graph, node, _unused_name(node, sites))
            if isinstance(found, str):
                others[_numbered(scope_of(node) or "graph", others)] = found
            else:
                sites += found
                softmaxes.append(node)
        elif is_op(node, "ArgMax"):
            sites += _from_argmax(node, _unused_name(node, sites))
    modified |= remove_unused(model).modified or before != _nodes(model)
    _add_without_softmax(sites, model.graph, softmaxes)
    for module in lost:
        sites.append(Site(_numbered(module, (site.name for site in sites)), "Softmax", reason=LOST))
    for module in without_effect:
        others[_numbered(module, others)] = WITHOUT_EFFECT
    nodes = {node.name: node for node in model.graph}
    sites = [site if site.node is None else replace(site, form=described(nodes[site.node])) for site in sites]
    return Canonical(model, modified, sites, others)


def _add_without_softmax(sites: list[Site], graph: ir.Graph, softmaxes: Sequence[ir.Node]) -> None:
    """Add the sites whose weights none of the sites' softmaxes computes."""
    of_sites: set[ir.Node] = set()
    for path, reason in unrecognised(graph):
        of_sites.update(path)
        if not any(_computes(softmax, path) for softmax in softmaxes):
            written_as = "·".join(node.op_type for node in path)
            sites.append(Site(_unused_name(path[0], sites), written_as, reason=reason))
    computed = dependent_on_inputs(graph)
    for node in graph:
        scores = None if node in of_sites else by_hand(node)
        if scores is not None and why_no_attention(node, *scores, computed, is_site=False) is None:
            sites.append(Site(_unused_name(node, sites), "Exp·Div", reason=COMPUTES.format("Exp")))


def _computes(softmax: ir.Node, path: Sequence[ir.Node]) -> bool:
    """Whether a softmax of the scores takes part in the weights of attention from the first product to the second."""
    scores = path[0].outputs[0]
    made_from = (upstream(node.outputs, lambda value: value is scores) for node in (path[-2], softmax))
    return all(value in made for made, value in zip(made_from, (softmax.outputs[0], scores), strict=True))


def _nodes(model: ir.Model) -> list[tuple[ir.Node, str | None, int]]:
    """The nodes with their names and attribute counts, which is all that canonicalising changes."""
    return [(node, node.name, len(node.attributes)) for node in model.graph]


def _unused_name(node: ir.Node, sites: list[Site]) -> str:
    """The name of the module that contains `node`, followed by a number if another site already has that name."""
    return _numbered(scope_of(node) or "graph", (site.name for site in sites))


def _numbered(name: str, taken: Iterable[str]) -> str:
    count = sum(other.partition("#")[0] == name for other in taken)
    return f"{name}#{count + 1}" if count else name


def _from_softmax(graph: ir.Graph, node: ir.Node, name: str) -> list[Site] | str:
    """Return one site for each product that reads the weights, or why the softmax is no attention."""
    source = input_of(node)
    try:
        layout = Layout.fresh(source)
    except LayoutError as error:
        return [Site(name, "Softmax", reason=str(error))]
    dim = layout.dims[node.attributes.get_int("axis", -1)]
    if not dim:
        return "it runs over one element"
    scores = walk_to_product(Position(source, layout, dim[0]))
    sink = scores.steps.sink if isinstance(scores, Scores) else None
    outputs = walk_to_outputs(Position(node.outputs[0], layout, dim[0]), Steps(sink=sink))
    walks: Sequence[Weights | Ended] = [outputs] if isinstance(outputs, Ended) else outputs
    written_as = ["·".join([*reversed(scores.steps.path), "Softmax", *walk.steps.path]) for walk in walks]
    sites = [Site(f"{name}, values {i + 1}" if i else name, path) for i, path in enumerate(written_as)]
    if isinstance(scores, Ended) or isinstance(outputs, Ended):
        reasons = (walk.reason for walk in (scores, outputs) if isinstance(walk, Ended))
        reason = "; ".join(reasons) + _unknown(source)
        sites = [replace(site, reason=reason) for site in sites]
    else:
        places = {node: i for i, node in enumerate(graph)}
        # from the last product on: its values may be those of one before it
        for i, weights in sorted(enumerate(outputs), key=lambda walk: -places[walk[1].product]):
            write = partial(emit, graph, scores=scores, weights=weights, softmax_dtype=source.dtype)
            sites[i] = _written(sites[i], write)
    if any(site.node is not None for site in sites):
        return sites
    is_site = both_computed(scores) or not isinstance(outputs, Ended)
    axis = node.attributes.get_int("axis", -1)
    return why_no_attention(node, source, axis, dependent_on_inputs(graph), is_site) or sites


def _unknown(scores: ir.Value) -> str:
    """Which size torch does not know of what scores are computed from after their product, in the words of a reason's
    end; empty if it knows all."""
    values = upstream([scores], lambda value: (node := value.producer()) is not None and is_product(node))
    sizes = sorted({str(dim) for value in values for dim in value.shape or () if re.fullmatch(r"u\d+", str(dim))})
    return f"; torch does not know the size {sizes[0]}, which depends on values of an input" if sizes else ""


def _written(site: Site, write: Callable[[str], None]) -> Site:
    """Write the canonical node of a site, under the name that `write` is given; return the site with that name, or with
    the reason why there is no such node."""
    name = f"{site.name}/Attention"
    try:
        write(name)
    except (NotAttention, LayoutError) as error:
        return replace(site, reason=str(error))
    return replace(site, node=name)


def _from_argmax(node: ir.Node, name: str) -> list[Site]:
    """Report hard alignment, which attends to the best key alone: its author may expect it to be fused."""
    source = input_of(node)
    try:
        layout = Layout.fresh(source)
        (axis, *_) = layout.dims[node.attributes.get_int("axis", 0)]
    except (LayoutError, IndexError, ValueError):
        return []
    scores = walk_to_product(Position(source, layout, axis))
    if isinstance(scores, Ended) or not both_computed(scores):
        return []
    reason = "the alignment is hard (ArgMax): fused attention kernels compute a softmax"
    return [Site(name, "·".join([*reversed(scores.steps.path), "ArgMax"]), reason=reason)]
