"""The expected contents of a decoder's caches: the keys and values of the model without a cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.export.attention.canonicalize import Site
from attnforge.export.attention.layout import Layout
from attnforge.export.attention.operands import Operand
from attnforge.export.decoding.insert import in_cache, sites_over_tokens
from attnforge.export.diagnosis.stages import decomposed
from attnforge.export.graphs.build import Builder, insert
from attnforge.export.graphs.execute import at_own_precision, in_float64
from attnforge.export.graphs.float64 import NoDoublePath
from attnforge.export.lowering.attention import Attention, attentions
from attnforge.memory import available

log = logging.getLogger("attnforge")

WIDE = 8
"""Bytes of a float64 number."""

Caches = dict[str, Array]
"""Keys and values by cache name, `(batch, key heads, tokens, size)`."""


@dataclass(frozen=True)
class ExpectedCaches:
    """Keys and values of a model without a cache, for given inputs.

    Attributes:
        capacity: of the caches, in tokens per sample.
        names: names of the caches, in the order of sites, each key before its value.
        graph: the deployed canonical model, before caches were inserted.
        exact: the canonical graph that is the truth in float64: without the rounding of quantisation.
        sites: the attention sites of both.
        scales: scales of int8 caches, `(key heads, 1, size)` by name.
    """

    capacity: int
    names: Sequence[str]
    graph: ir.Model
    exact: ir.Model
    sites: Sequence[Site]
    scales: Mapping[str, Array]

    def computed(self, cases: Mapping[str, Mapping[str, Array]]) -> dict[str, tuple[Caches, Caches]]:
        """The contents of the caches after all tokens: at the graph's own precision, with 16-bit numbers as float32,
        and in float64.

        Args:
            cases: the inputs of every case, by case name and input name.

        Returns:
            by case; empty if the graph cannot be computed in float64 or there is too little memory for it, which is
            logged.
        """
        weights = sum(v.const_value.size for v in self.exact.graph.initializers.values() if v.const_value is not None)
        left, needed = available(), 2 * WIDE * weights
        if left is not None and needed > left:
            log.warning(
                "caches are not compared: their float64 reference needs %.1f GiB of memory, and %.1f are left",
                needed / 2**30, left / 2**30,
            )  # fmt: skip
            return {}
        try:
            run = in_float64(with_caches(self.exact, self.sites, self.names), self.names)
        except NoDoublePath as error:
            log.warning("caches are not compared: the graph cannot be computed in float64 (%s)", error)
            return {}
        exact = {case: run(inputs) for case, inputs in cases.items()}
        del run  # and with it the float64 weights
        eager = at_own_precision(with_caches(self.graph, self.sites, self.names), self.names)
        return {case: (eager(inputs), exact[case]) for case, inputs in cases.items()}


def with_caches(model: ir.Model, sites: Sequence[Site], names: Sequence[str]) -> ir.Model:
    """A copy of a canonical graph, with attention decomposed, whose outputs are keys and values as caches store them.

    Args:
        model: not modified.
        sites: its attention sites.
        names: names of the outputs; for every site whose keys are tokens, the key's before the value's.
    """
    model = model.clone()
    graph, following = model.graph, iter(names)
    graph.outputs.clear()
    for _, a in attentions(model, sites_over_tokens(model, sites)):
        for kept in in_cache(a):
            name = next(following)
            value = insert(graph, a.node, partial(_arranged, a=a, kept=kept), stem=f"{a.node.name}/{name}")
            value.name = name
            graph.outputs.append(value)
    return decomposed(model, list(sites))


def _arranged(op: Builder, a: Attention, kept: tuple[Operand, Layout]) -> ir.Value:
    operand, layout = kept
    return a.laid_out(op.Identity(a.arranged(op, operand, layout)), layout)
