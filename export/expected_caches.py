"""What a decoder's caches are to hold: the keys and values of the model without a cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.export.attention.canonicalize import Site
from attnforge.export.attention.layout import Layout, rearrange
from attnforge.export.attention.operands import Operand
from attnforge.export.decoding.insert import in_cache
from attnforge.export.diagnosis.stages import written_out
from attnforge.export.graphs.build import Builder, insert, typed
from attnforge.export.graphs.execute import at_own_precision, in_float64
from attnforge.export.graphs.float64 import NoDoublePath
from attnforge.export.lowering.attention import Attention, attentions
from attnforge.memory import available

log = logging.getLogger("attnforge")

WIDE = 8
"""Bytes of a number in float64."""

Caches = dict[str, Array]
"""Keys and values by the names of caches, `(batch, key heads, tokens, size)`."""


@dataclass(frozen=True)
class ExpectedCaches:
    """Keys and values of a model without a cache, for some inputs.

    Attributes:
        places: tokens that the caches hold for each sample.
        names: of the caches, in the order of sites, the key's before the value's.
        graph: the model as it is deployed, canonical, before caches were put in.
        exact: the canonical graph that is the truth in float64: without what quantising rounds.
        sites: the attention of both.
        scales: of caches in int8, `(key heads, 1, size)` by name.
    """

    places: int
    names: Sequence[str]
    graph: ir.Model
    exact: ir.Model
    sites: Sequence[Site]
    scales: Mapping[str, Array]

    def computed(self, cases: Mapping[str, Mapping[str, Array]]) -> dict[str, tuple[Caches, Caches]]:
        """What the caches hold behind all tokens: at the graph's own precision, 16-bit numbers as float32, and in
        float64.

        Args:
            cases: inputs by name, of every case by its name.

        Returns:
            by case; empty where the graph is not computed in float64, or memory is short for it, which is logged.
        """
        weights = sum(v.const_value.size for v in self.exact.graph.initializers.values() if v.const_value is not None)
        left, needed = available(), 2 * WIDE * weights
        if left is not None and needed > left:
            log.warning(
                "caches are not compared: their truth needs %.1f GiB of memory, and %.1f are left",
                needed / 2**30, left / 2**30,
            )  # fmt: skip
            return {}
        try:
            run = in_float64(with_caches(self.exact, self.sites, self.names), self.names)
        except NoDoublePath as error:
            log.warning("caches are not compared: the graph is not computed in float64 (%s)", error)
            return {}
        exact = {case: run(inputs) for case, inputs in cases.items()}
        del run  # with the weights in float64
        eager = at_own_precision(with_caches(self.graph, self.sites, self.names), self.names)
        return {case: (eager(inputs), exact[case]) for case, inputs in cases.items()}


def with_caches(model: ir.Model, sites: Sequence[Site], names: Sequence[str]) -> ir.Model:
    """A copy of a canonical graph, attention written out, whose outputs are keys and values as caches hold them.

    Args:
        model: is not touched.
        sites: its attention.
        names: of the outputs, the key's before the value's of every site.
    """
    model = model.clone()
    graph, following = model.graph, iter(names)
    graph.outputs.clear()
    for _, a in attentions(model, sites):
        for kept in in_cache(a):
            name = next(following)
            value = insert(graph, a.node, partial(_arranged, a=a, kept=kept), stem=f"{a.node.name}/{name}")
            value.name = name
            graph.outputs.append(value)
    return written_out(model, list(sites))


def _arranged(op: Builder, a: Attention, kept: tuple[Operand, Layout]) -> ir.Value:
    operand, layout = kept
    value = rearrange(op, operand.value, operand.layout, layout, a.sized)
    return typed(op.Identity(value), a.dtype, [size.dim() for size in layout.sizes()])
