"""The graphs of a bundle, from the exported to the deployed, and where their nodes come from."""

from __future__ import annotations

import re
from pathlib import PurePath

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attnforge.bundle import CANONICAL, OPENVINO, PLAIN, Bundle, Certificate
from attnforge.export.attention.canonicalize import Site
from attnforge.export.decoding.whole import whole_graph
from attnforge.export.graphs.nodes import scope_of
from attnforge.export.graphs.saving import load_graph, with_weights_of
from attnforge.export.lowering.attention import attentions, write
from attnforge.export.lowering.onnxruntime import candidates_for
from attnforge.export.tensorrt.build import site_of


def stages(bundle: Bundle, *, of_step: bool = False) -> dict[str, ir.Model]:
    """The graphs on the way from the export to the targets, in order and at their own types: `plain`, as it was
    exported, if the bundle has it; `canonical`; and each graph that is lowered from it, by target.

    The attention of the canonical graph is decomposed into products around a softmax, because the operator itself does
    not determine everything that its metadata says.

    Args:
        bundle: the bundle.
        of_step: keep the caches in graphs of a decoder step, and leave out the plain graph, which has none.
    """
    graph_of = load_graph if of_step else whole_graph
    canonical = graph_of(bundle, CANONICAL)
    graphs: dict[str, ir.Model] = {}
    if PLAIN in bundle.manifest.files and not of_step:
        graphs["plain"] = with_weights_of(load_graph(bundle, PLAIN), canonical)
    sites = sites_of(bundle.manifest.attention)
    graphs["canonical"] = decomposed(canonical, sites)
    targets: dict[str, str] = {}
    for target, record in bundle.manifest.targets.items():
        targets.setdefault(record.model, target)  # both TensorRTs parse one file
    graphs |= {target: graph_of(bundle, file) for file, target in targets.items()}
    if OPENVINO in graphs:  # which keeps canonical nodes, among others with their names
        graphs[OPENVINO] = decomposed(graphs[OPENVINO], sites, "products")
    return graphs


def sites_of(certificate: Certificate) -> list[Site]:
    """The canonical sites, as :func:`~attnforge.export.attention.canonicalize.canonicalize` found them."""
    return [Site(d.site, d.written_as, f"{d.site}/Attention", d.form) for d in certificate.details if d.canonical]


def decomposed(canonical: ir.Model, sites: list[Site], stem: str | None = None) -> ir.Model:
    """A copy of the canonical graph with attention decomposed into products around a softmax, which exposes the scores.

    Args:
        canonical: not modified.
        sites: its attention sites.
        stem: a part of the new nodes' names.
    """
    model = canonical.clone()
    for site, attention in attentions(model, sites):
        products, *_ = candidates_for(site.name, attention)
        write(model.graph, attention, products, stem and f"{attention.node.name}/{stem}")
    RemoveUnusedNodesPass()(model)
    return model


def scores_of(softmax: ir.Node) -> list[ir.Value]:
    """The scores of decomposed attention, from the input of the softmax back to the product."""
    scores: list[ir.Value] = []
    value = softmax.inputs[0]
    while value is not None and (node := value.producer()) is not None:
        scores.append(value)
        if node.op_type == "MatMul":
            break
        value = node.inputs[1 if node.op_type == "Where" else 0]
    return scores


def module_of(node: ir.Node) -> str:
    """Qualified name of the module that a node belongs to, from the exporter's metadata; the site for a node that a
    lowering wrote; the node's own name in a graph without metadata."""
    if (module := scope_of(node)) is not None:
        return module
    name = node.name or node.op_type
    return site_of(name) if "/" in name else name


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>[^\n]+)')


def line_of(node: ir.Node) -> str | None:
    """The author's line of code that a node comes from: `model.py:41: return x * scale`."""
    frames = list(_FRAME.finditer(node.metadata_props.get("pkg.torch.onnx.stack_trace", "")))
    if not frames:
        return None
    authors = [frame for frame in frames if "/torch/" not in frame["file"].replace("\\", "/")]
    last = (authors or frames)[-1]
    return f"{PurePath(last['file']).name}:{last['line']}: {last['code'].strip()}"
