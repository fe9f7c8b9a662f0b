"""Whether two graphs of one bundle are one function in float64, and if not, where they part.

What is deployed is the plain graph rewritten twice, and float64 leaves no rounding to hide behind: where the canonical
graph gives other numbers than the plain one, or a lowered one than the canonical, a rewrite is wrong or weights were
altered. The tensors that both graphs have by name show which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array, is_floating
from attnforge.bundle import Certificate
from attnforge.export.diagnosis.stages import Stage, module_of
from attnforge.export.graphs.execute import Tensors, as_it_is, in_float64
from attnforge.export.graphs.float64 import NoDoublePath
from attnforge.export.graphs.parts import computed, part_of, values_of
from attnforge.export.graphs.saving import save
from attnforge.export.graphs.types import FLOAT, LOW, retype

SAME = 1e-7
"""Relative difference in float64 up to which two graphs are one function; what is written out for want of a double
kernel is exact to far less."""

SAME_IN_FP32 = 1e-3
"""The same where a graph has an operator that is computed in fp32 alone."""


@dataclass(frozen=True)
class Parting:
    """Where two graphs part.

    Attributes:
        before, after: the stages.
        tensor: the first, in the later graph's order, that differs though all that it is made of is the same.
        module: that it belongs to.
        rule: what was rewritten there, or which weights are others.
        difference: relative, of that tensor.
        inputs: the tensors that are the same, from which it is computed.
    """

    before: Stage
    after: Stage
    tensor: str
    module: str
    rule: str
    difference: float
    inputs: tuple[str, ...]


def first_parting(stages: Sequence[Stage], feeds: Mapping[str, Array], certificate: Certificate) -> Parting | None:
    """The first pair of stages, plain and canonical or canonical and lowered, that are not one function on `feeds`."""
    canonical = next(stage for stage in stages if stage.name == "canonical")
    pairs = [(stage, canonical) for stage in stages if stage.name == "plain"]
    pairs += [(canonical, stage) for stage in stages if stage.name not in ("plain", "canonical")]
    for before, after in pairs:
        if (found := _parting(before, after, feeds, certificate)) is not None:
            return found
    return None


def _parting(before: Stage, after: Stage, feeds: Mapping[str, Array], certificate: Certificate) -> Parting | None:
    outputs = [str(v.name) for v in after.model.graph.outputs]
    # A type's least number stands for minus infinity in one idiom's mask, and is a number to add in another's.
    for stands_for_infinity in (False, True):
        one, other, same = _both(before.model, after.model, outputs, feeds, stands_for_infinity)
        if all(_difference(other[name], one[name]) <= same for name in outputs):
            return None
    known = set(computed(before.model))
    common = [name for name in computed(after.model) if name in known]
    one, other, same = _both(before.model, after.model, common, feeds)
    differences = {name: _difference(other[name], one[name]) for name in common}
    tensor = next((name for name in common if differences[name] > same), outputs[0])
    region, inputs = _region(after.model, tensor, {name for name in common if differences[name] <= same})
    node = region[-1]
    rule = _altered(before.model, after.model, region) or _rule(before, after, region, certificate)
    sites = [detail.site for detail in certificate.details]
    module = next((s for s in sites if any((n.name or "").startswith(f"{s}/") for n in region)), module_of(node))
    return Parting(before, after, tensor, module, rule, differences.get(tensor, np.inf), inputs)


def _both(
    before: ir.Model,
    after: ir.Model,
    names: Sequence[str],
    feeds: Mapping[str, Array],
    stands_for_infinity: bool = False,
) -> tuple[Tensors, Tensors, float]:
    try:
        one, other = (in_float64(m, names, least_stays_least=stands_for_infinity)(feeds) for m in (before, after))
        return one, other, SAME
    except NoDoublePath:
        return as_it_is(before, names)(feeds), as_it_is(after, names)(feeds), SAME_IN_FP32


def _difference(got: Array, wanted: Array) -> float:
    if got.shape != wanted.shape:
        return np.inf
    got, wanted = got.astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(wanted)
    if not np.array_equal(got[~finite], wanted[~finite], equal_nan=True) or not np.isfinite(got[finite]).all():
        return np.inf
    return float(np.linalg.norm(got[finite] - wanted[finite])) / (float(np.linalg.norm(wanted[finite])) or 1.0)


def _region(model: ir.Model, tensor: str, agreed: set[str]) -> tuple[list[ir.Node], tuple[str, ...]]:
    """The nodes between tensors that are agreed upon and `tensor`, in order, and these tensors."""
    values = values_of(model)
    region: set[ir.Node] = set()
    inputs: dict[str, None] = {}
    todo = [values[tensor]]
    while todo:
        value = todo.pop()
        node = value.producer()
        if node is None or (value.name in agreed and value.name != tensor):
            if value.name and not value.is_initializer():
                inputs[value.name] = None
        elif node not in region:
            region.add(node)
            todo += [v for v in node.inputs if v is not None]
    return [node for node in model.graph if node in region], tuple(inputs)


def _altered(before: ir.Model, after: ir.Model, region: Sequence[ir.Node]) -> str | None:
    """Weights of the region that both graphs have by name, and that are others."""
    for node in region:
        for value in node.inputs:
            held = before.graph.initializers.get(str(value.name)) if value is not None else None
            if value is None or held is None or value.const_value is None or held.const_value is None:
                continue
            mine, theirs = (t.numpy().astype(np.float64) for t in (value.const_value, held.const_value))
            if mine.shape != theirs.shape:
                return f"the weights {value.name} are {list(mine.shape)}, and were {list(theirs.shape)}"
            differ = np.flatnonzero(~((mine == theirs) | (np.isnan(mine) & np.isnan(theirs))))
            if differ.size:
                at = [int(i) for i in np.unravel_index(differ[0], mine.shape)]
                return f"the weights {value.name} differ at {differ.size} of {mine.size} places, first at {at}"
    return None


def _rule(before: Stage, after: Stage, region: Sequence[ir.Node], certificate: Certificate) -> str:
    for detail in certificate.details:
        if any((node.name or "").startswith(f"{detail.site}/") for node in region):
            if after.name == "canonical":
                return f"canonicalize: {detail.written_as} to {detail.form or 'Attention'}"
            form = detail.targets[after.name].form if after.name in detail.targets else "its form"
            return f"lowering for {after.name}: Attention to {form}"
    known = {node.name: node for node in before.model.graph}
    node = region[-1]
    was = known.get(node.name)
    if was is not None and was.op_type != node.op_type:
        return f"{was.op_type} became {node.op_type} ({node.name})"
    return f"{node.op_type} ({node.name}) has other attributes or operands"


# --- to be shown to somebody ------------------------------------------------------------------------------------------


def write_reproduction(parting: Parting, feeds: Mapping[str, Array], folder: Path) -> list[Path]:
    """Write what is needed to see the fault: `after.onnx`, the piece that is wrong; `before.onnx`, the same piece
    before it was rewritten; and `inputs.npz`, which both take.

    Args:
        parting: what to show.
        feeds: the model's inputs for which it shows.
        folder: is made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    after = part_of(parting.after.model, [parting.tensor], parting.inputs)
    shared = {*computed(parting.before.model), *feeds}.intersection(_inputs(after))
    before = part_of(parting.before.model, [parting.tensor], shared)
    names = list(dict.fromkeys([*_inputs(after), *_inputs(before)]))
    held = _tensors(parting.before.model, names, feeds)
    _of_one_type(before, after)
    save(after, folder / "after.onnx")
    save(before, folder / "before.onnx")
    dtypes = {str(v.name): v.dtype for model in (before, after) for v in model.graph.inputs}
    arrays = {
        name: array.astype(dtype.numpy()) if is_floating(array) and (dtype := dtypes.get(name)) is not None else array
        for name, array in held.items()
    }
    np.savez(folder / "inputs.npz", **arrays)  # type: ignore[arg-type]
    return [folder / name for name in ("before.onnx", "after.onnx", "inputs.npz")]


def _inputs(model: ir.Model) -> list[str]:
    return [str(value.name) for value in model.graph.inputs]


def _of_one_type(before: ir.Model, after: ir.Model) -> None:
    """Both pieces in fp32 where one is, so that they take the same inputs."""
    types = [{v.dtype for v in model.graph.inputs} for model in (before, after)]
    if types[0] != types[1]:
        for model in (before, after):
            retype(model, LOW, FLOAT, least_stays_least=False)


def _tensors(model: ir.Model, names: Sequence[str], feeds: Mapping[str, Array]) -> Tensors:
    wanted = [name for name in names if name not in feeds]
    found = in_float64(model, wanted)(feeds) if wanted else {}
    return {name: feeds[name] if name in feeds else found[name] for name in names}
