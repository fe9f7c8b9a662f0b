"""Whether two graphs of one bundle are one function in float64, and if not, where they diverge.

The deployed graph is the plain graph rewritten twice, and float64 leaves no rounding that could hide a fault: if the
canonical graph gives different numbers from the plain graph, or a lowered graph from the canonical graph, a rewrite is
wrong or weights were altered. The tensors that both graphs have by name show which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.bundle import Certificate, SiteRecord
from attnforge.export.diagnosis.stages import module_of
from attnforge.export.diagnosis.trace import Finding, error_of
from attnforge.export.graphs.execute import as_it_is, computed, in_float64, part_of, values_of, with_products
from attnforge.export.graphs.float64 import NoDoublePath
from attnforge.export.graphs.nodes import numpy_type, upstream
from attnforge.export.graphs.saving import save
from attnforge.export.graphs.types import FLOAT, LOW, retype
from attnforge.numbers import scientific

SAME = 1e-7
"""Relative difference in float64 up to which two graphs are one function; operators that are decomposed because they
have no double kernel are exact to far less."""

SAME_IN_FP32 = 1e-3
"""The same if a graph has an operator that can only be computed in fp32."""


@dataclass(frozen=True)
class Parting:
    """A region in which two graphs diverge.

    Attributes:
        before, after: the graphs.
        tensor: the first tensor, in the order of the later graph, that differs although its ancestors do not.
        inputs: names of the tensors that agree, from which it is computed.
        finding: what was rewritten there, or which weights were altered.
    """

    before: ir.Model
    after: ir.Model
    tensor: str
    inputs: tuple[str, ...]
    finding: Finding


def first_parting(
    stages: Mapping[str, ir.Model], feeds: Mapping[str, Array], certificate: Certificate
) -> Parting | None:
    """The first pair of stages, plain and canonical or canonical and lowered, that are not one function.

    Args:
        stages: the stages from :func:`~attnforge.export.diagnosis.stages.stages`.
        feeds: inputs by name, on which the stages are compared.
        certificate: says what was rewritten at each site.
    """
    pairs = [("canonical", name) for name in stages if name not in ("plain", "canonical")]
    if "plain" in stages:
        pairs.insert(0, ("plain", "canonical"))
    partings = (_parting(stages, before, after, feeds, certificate) for before, after in pairs)
    return next((parting for parting in partings if parting is not None), None)


def _parting(
    stages: Mapping[str, ir.Model], before: str, after: str, feeds: Mapping[str, Array], certificate: Certificate
) -> Parting | None:
    was, became = models = stages[before], stages[after]
    outputs = [str(v.name) for v in became.graph.outputs]
    # A type's least number stands for minus infinity in one idiom's mask, and is an ordinary number in another's.
    for stands_for_infinity in (False, True):
        differences, same = _differences(models, outputs, feeds, stands_for_infinity)
        if all(difference <= same for difference in differences.values()):
            return None
    known = set(computed(was))
    common = [name for name in computed(became) if name in known]
    differences, same = _differences(models, common, feeds)
    tensor = next((name for name in common if differences[name] > same), outputs[0])
    region, inputs = region_of(became, tensor, {name for name in common if differences[name] <= same})
    names = [node.name or "" for node in region]
    site = next((d for d in certificate.details if any(name.startswith(f"{d.site}/") for name in names)), None)
    rule = _altered(was, region) or _rule(was, after, region[-1], site)
    finding = Finding(
        cause="rewrite",
        stage=after,
        evidence=f"in float64, {tensor} of the {after} graph is {scientific(differences.get(tensor, np.inf))} off "
        f"the {before} graph's, for the same inputs: {rule}",
        tensor=tensor,
        operator=region[-1].op_type,
        module=site.site if site is not None else module_of(region[-1]),
        rule=rule,
    )
    return Parting(was, became, tensor, inputs, finding)


def _differences(
    models: Sequence[ir.Model], names: Sequence[str], feeds: Mapping[str, Array], stands_for_infinity: bool = False
) -> tuple[dict[str, float], float]:
    """The relative differences of some tensors of two graphs, and the limit up to which they count as equal."""
    try:
        runs = [in_float64(model, names, least_stays_least=stands_for_infinity) for model in models]
        same = SAME
    except NoDoublePath:
        runs, same = [as_it_is(with_products(model, names), names) for model in models], SAME_IN_FP32
    was, became = (run(feeds) for run in runs)
    return {name: _difference(became[name], was[name]) for name in names}, same


def _difference(got: Array, wanted: Array) -> float:
    """The relative difference; infinite if shapes or positions of non-finite numbers differ."""
    if got.shape != wanted.shape:
        return np.inf
    lost = ~np.isfinite(wanted)
    return error_of(got, wanted) if np.array_equal(got[lost], wanted[lost], equal_nan=True) else np.inf


def region_of(model: ir.Model, tensor: str, agreed: set[str]) -> tuple[list[ir.Node], tuple[str, ...]]:
    """The nodes between the tensors `agreed` and `tensor`, in order, and the names of the tensors at which they
    begin."""

    def begins(value: ir.Value) -> bool:
        return value.producer() is None or (value.name in agreed and value.name != tensor)

    reached = list(upstream([values_of(model)[tensor]], begins))
    region = {value.producer() for value in reached if not begins(value)}
    inputs = tuple(v.name for v in reached if begins(v) and v.name and not v.is_initializer())
    return [node for node in model.graph if node in region], inputs


def _altered(before: ir.Model, region: Sequence[ir.Node]) -> str | None:
    """The difference between the weights of a region and those with the same name in the graph before."""
    for node in region:
        for value in node.inputs:
            original = before.graph.initializers.get(str(value.name)) if value is not None else None
            if value is None or original is None or value.const_value is None or original.const_value is None:
                continue
            now, was = (tensor.numpy().astype(np.float64) for tensor in (value.const_value, original.const_value))
            if now.shape != was.shape:
                return f"the weights {value.name} are {list(now.shape)}, and were {list(was.shape)}"
            differ = np.flatnonzero(~((now == was) | (np.isnan(now) & np.isnan(was))))
            if differ.size:
                first = [int(i) for i in np.unravel_index(differ[0], now.shape)]
                return f"the weights {value.name} differ at {differ.size} of {now.size} positions, first at {first}"
    return None


def _rule(before: ir.Model, after: str, node: ir.Node, site: SiteRecord | None) -> str:
    """A description of the rewrite of a node, which is part of a site or not."""
    if site is not None:
        if after == "canonical":
            return f"canonicalize: {site.written_as} to {site.form or 'Attention'}"
        form = site.targets[after].form if after in site.targets else "its form"
        return f"lowering for {after}: Attention to {form}"
    was = {node.name: node for node in before.graph}.get(node.name)
    if was is not None and was.op_type != node.op_type:
        return f"{was.op_type} became {node.op_type} ({node.name})"
    return f"{node.op_type} ({node.name}) has other attributes or operands"


# --- a reproduction ---------------------------------------------------------------------------------------------------


def write_reproduction(parting: Parting, feeds: Mapping[str, Array], folder: Path) -> list[Path]:
    """Write files that reproduce the fault: `after.onnx`, the part that is wrong; `before.onnx`, the same part before
    it was rewritten; and `inputs.npz`, the inputs of both.

    Args:
        parting: what to reproduce.
        feeds: inputs of the model by name, for which the fault shows.
        folder: created if needed.

    Returns:
        the three files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    after = part_of(parting.after, [parting.tensor], parting.inputs)
    known = {*computed(parting.before), *feeds}
    shared = [str(value.name) for value in after.graph.inputs if value.name in known]
    before = part_of(parting.before, [parting.tensor], shared)
    parts = (before, after)
    if {v.dtype for v in before.graph.inputs} != {v.dtype for v in after.graph.inputs}:  # then one is fp32
        for part in parts:
            retype(part, LOW, FLOAT, least_stays_least=False)
    inputs = {str(value.name): numpy_type(value) for part in parts for value in part.graph.inputs}
    inside = [name for name in inputs if name not in feeds]
    tensors = {**feeds, **(in_float64(parting.before, inside)(feeds) if inside else {})}
    arrays = {name: tensors[name].astype(dtype, copy=False) for name, dtype in inputs.items()}
    files = [folder / name for name in ("before.onnx", "after.onnx", "inputs.npz")]
    for part, file in zip(parts, files, strict=False):
        save(part, file)
    np.savez(files[-1], **arrays)  # type: ignore[arg-type]
    return files
