"""Queries and keys in int8, where OpenVINO multiplies them so: their ranges, and what rounding them costs.

Query and key are rounded by one scale each, from calibration data, as NNCF writes it for transformers. A range is the
data's, so only such queries and keys are rounded as weights make of what a norm left: these have one range whatever the
model is given. What the softmax makes, and values, stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.export.attention.canonicalize import Site
from attnforge.export.graphs.build import insert
from attnforge.export.graphs.qdq import in_int8
from attnforge.export.lowering.attention import attentions
from attnforge.export.lowering.openvino import may_round_scores
from attnforge.export.precision.calibration import HEADROOM, is_normed
from attnforge.export.precision.quantisation import INT8
from attnforge.export.precision.rounding import errors_of_rounding, peaks_of


@dataclass(frozen=True)
class RoundedScores:
    """Attention whose queries and keys can be rounded to int8.

    Attributes:
        site: that it is.
        node: name of the canonical node.
        scales: of query and key, float > 0.
        error: of its output on calibration data, relative to fp32.
    """

    site: Site
    node: str
    scales: tuple[float, float]
    error: float = 0.0

    @property
    def name(self) -> str:
        return self.site.name

    def operands(self, graph: ir.Graph, node: ir.Node, stem: str) -> list[ir.Value]:
        """Query and key of a node behind Q/DQ, and its value."""
        query, key, value = node.inputs[:3]
        assert query is not None and key is not None and value is not None
        of_query, of_key = self.scales
        return [
            insert(graph, node, lambda op: in_int8(op, query, of_query), stem=f"{stem}/query"),
            insert(graph, node, lambda op: in_int8(op, key, of_key), stem=f"{stem}/key"),
            value,
        ]


def sites_for_int8(model: ir.Model, sites: Sequence[Site], data: Sequence[Mapping[str, Array]]) -> list[RoundedScores]:
    """The attention whose queries and keys may be rounded, with its ranges.

    Args:
        model: canonical, fp32; is not touched.
        sites: its attention.
        data: real inputs of the model.
    """
    found = {
        str(a.node.name): (site, a)
        for site, a in attentions(model, sites)
        if may_round_scores(a) and is_normed(a.query.value) and is_normed(a.key.value)
    }
    if not found:
        return []
    names = {str(operand.value.name) for _, a in found.values() for operand in (a.query, a.key)}
    peaks = peaks_of(model, sites, names, data)

    def scale(value: ir.Value) -> float:
        return HEADROOM * peaks[str(value.name)] / INT8.most or 1.0

    rounded = [
        RoundedScores(site, node, (scale(a.query.value), scale(a.key.value))) for node, (site, a) in found.items()
    ]
    errors = errors_of_rounding(model, sites, rounded, data)
    return [replace(one, error=errors[one.name]) for one in rounded]
