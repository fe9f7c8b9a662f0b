"""Low-bit operands of attention: Q/DQ before them, and the error of rounding them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.export.attention.canonicalize import Site
from attnforge.export.diagnosis.stages import decomposed
from attnforge.export.graphs.build import Builder, insert, like
from attnforge.export.graphs.execute import as_it_is
from attnforge.runtime.parity.budget import relative_error


@dataclass(frozen=True)
class Rounding(ABC):
    """Attention whose operands can be rounded.

    Attributes:
        site: the site.
        node: name of the canonical node.
        error: error of its output on calibration data, relative to fp32.
    """

    site: Site
    node: str
    error: float = field(default=0.0, kw_only=True)

    @property
    def name(self) -> str:
        """Name of the rounded value."""
        return self.site.name

    @abstractmethod
    def operands(self, graph: ir.Graph, node: ir.Node, stem: str) -> list[ir.Value]:
        """Query, key and value after Q/DQ, which are written before the node.

        Args:
            graph: graph of the node.
            node: the canonical node.
            stem: prefix of the names of new values.
        """


@dataclass(frozen=True)
class Rounded(Rounding):
    """Attention whose first operands are rounded with one scale each, and whose others are not.

    Attributes:
        scales: scales of query, key and value, > 0, as many as are rounded.
        write: writes the Q/DQ of an operand with a scale, and returns its output.
    """

    scales: tuple[float, ...]
    write: Callable[[Builder, ir.Value, float], ir.Value]

    def operands(self, graph: ir.Graph, node: ir.Node, stem: str) -> list[ir.Value]:
        return [self._operand(graph, node, i, f"{stem}/{part}") for i, part in enumerate(("query", "key", "value"))]

    def _operand(self, graph: ir.Graph, node: ir.Node, i: int, stem: str) -> ir.Value:
        value = node.inputs[i]
        assert value is not None
        if i >= len(self.scales):
            return value
        return insert(graph, node, lambda op: self.write(op, value, self.scales[i]), stem=stem)


R = TypeVar("R", bound=Rounding)


def round_operands(model: ir.Model, chosen: Sequence[Rounding]) -> None:
    """Put Q/DQ before operands of canonical attention, in place."""
    by_node = {rounding.node: rounding for rounding in chosen}
    for node in list(model.graph):
        if node.name in by_node:
            for i, value in enumerate(by_node[node.name].operands(model.graph, node, str(node.name))):
                node.replace_input_with(i, value)


def with_errors(
    model: ir.Model, sites: Sequence[Site], rounded: Sequence[R], data: Sequence[Mapping[str, Array]]
) -> list[R]:
    """Copies of `rounded` with the error of rounding each, the others unrounded, relative to its output in fp32: every
    node gets a twin with rounded operands, which nothing reads."""
    twins, nodes = model.clone(), {rounding.node: rounding for rounding in rounded}
    pairs: dict[str, tuple[str, str]] = {}
    both = list(sites)
    for node in list(twins.graph):
        if node.name not in nodes:
            continue
        rounding, output = nodes[node.name], node.outputs[0]
        inputs = [*rounding.operands(twins.graph, node, f"{node.name}/twin"), *node.inputs[3:]]
        twin = ir.Node("", "Attention", inputs, node.attributes.values(), name=f"{node.name}/twin")
        twin.metadata_props.update(node.metadata_props)
        result = like(twin.outputs[0], output)
        result.name = f"{output.name}/twin"
        twins.graph.insert_before(node, twin)
        twins.graph.outputs.extend([output, result])
        pairs[rounding.name] = str(output.name), str(result.name)
        both.append(Site(f"{rounding.name}/twin", rounding.site.written_as, f"{node.name}/twin", rounding.site.form))
    run = as_it_is(decomposed(twins, both), sorted({name for pair in pairs.values() for name in pair}))
    errors = dict.fromkeys(pairs, 0.0)
    for feeds in data:
        outputs = run(feeds)
        for name, (exact, low) in pairs.items():
            finite = np.isfinite(outputs[exact])
            errors[name] = max(errors[name], relative_error(outputs[low][finite], outputs[exact][finite]))
    return [replace(rounding, error=errors[rounding.name]) for rounding in rounded]


def peaks_of(
    model: ir.Model, sites: Sequence[Site], names: set[str], data: Sequence[Mapping[str, Array]]
) -> dict[str, float]:
    """The largest finite absolute value of every named value on the data, by name."""
    run, peaks = as_it_is(decomposed(model, list(sites)), sorted(names)), dict.fromkeys(names, 0.0)
    for feeds in data:
        for name, array in run(feeds).items():
            peaks[name] = max(peaks[name], float(np.abs(array[np.isfinite(array)]).max(initial=0.0)))
    return peaks
