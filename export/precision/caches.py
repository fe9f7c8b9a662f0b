"""int8 caches: ranges of keys and values, and the error of rounding them.

Keys and values are rounded before attention reads them, each channel of each head with a separate scale from
calibration data, because a few channels of keys are much larger than the others (KIVI,
https://arxiv.org/abs/2402.02750). Numbers beyond the data's range are clipped. A token's keys and values do not change
later, so whole sequences and steps round alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.export.attention.canonical import KEY, VALUE
from attnforge.export.attention.canonicalize import Site
from attnforge.export.attention.layout import Layout, rearrange
from attnforge.export.attention.operands import Operand
from attnforge.export.decoding.insert import in_cache
from attnforge.export.expected_caches import with_caches
from attnforge.export.graphs.build import Builder, insert
from attnforge.export.graphs.execute import as_it_is
from attnforge.export.graphs.qdq import InInt8
from attnforge.export.lowering.attention import Attention, attention_of, attentions
from attnforge.export.precision.calibration import HEADROOM
from attnforge.export.precision.quantisation import INT8, scale_for
from attnforge.export.precision.rounding import Rounding, with_errors


@dataclass(frozen=True)
class RoundedCache(Rounding):
    """Attention whose keys and values can be rounded to int8.

    Attributes:
        key, value: scales, `(key heads, 1, size)`, float32 > 0.
    """

    key: Array = field(repr=False)
    value: Array = field(repr=False)

    @property
    def name(self) -> str:
        return f"cache of {self.site.name}"

    def operands(self, graph: ir.Graph, node: ir.Node, stem: str) -> list[ir.Value]:
        """Query, and key and value after Q/DQ."""
        a, query = attention_of(node), node.inputs[0]
        assert query is not None
        values = [query]
        kept = zip(in_cache(a), ((self.key, KEY), (self.value, VALUE)), ("key", "value"), strict=True)
        for (operand, layout), (scale, dims), part in kept:
            write = partial(_rounded, a=a, operand=operand, layout=layout, scale=scale, canonical=a.layout(*dims))
            values.append(insert(graph, node, write, stem=f"{stem}/{part}"))
        return values


def _rounded(op: Builder, a: Attention, operand: Operand, layout: Layout, scale: Array, canonical: Layout) -> ir.Value:
    """Keys or values in the dims of a canonical node, rounded in the dims of a cache."""
    kept = rearrange(op, operand.value, operand.layout, layout, a.sized)
    return rearrange(op, InInt8.of(op, kept, scale).restored(op), layout, canonical, a.sized)


def sites_with_caches(
    model: ir.Model, sites: Sequence[Site], data: Sequence[Mapping[str, Array]]
) -> list[RoundedCache]:
    """All attention sites, with the ranges of their keys and values.

    Args:
        model: a canonical fp32 graph; not modified.
        sites: its attention sites.
        data: real inputs of the model.
    """
    nodes = list(attentions(model, sites))
    names = [f"{site.name}/{part}" for site, _ in nodes for part in ("key", "value")]
    run, peaks = as_it_is(with_caches(model, sites, names), names), dict[str, Array]()
    for feeds in data:
        for name, array in run(feeds).items():
            largest = np.abs(np.where(np.isfinite(array), array, 0)).max(axis=(0, 2), initial=0.0)[:, None]
            peaks[name] = np.maximum(peaks.get(name, largest), largest)
    scales = {name: scale_for(HEADROOM * peak, INT8) for name, peak in peaks.items()}
    rounded = [
        RoundedCache(site, str(a.node.name), scales[f"{site.name}/key"], scales[f"{site.name}/value"])
        for site, a in nodes
    ]
    return with_errors(model, sites, rounded, data)
