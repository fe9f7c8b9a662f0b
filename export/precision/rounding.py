"""Low-bit operands of attention: which are rounded, by which ranges, and the error of rounding them.

- **fp8 attention**, where TensorRT fuses it: query, key and value are rounded to E4M3 with one scale each, and the
  softmax's output with a fixed 1/448, as in NVIDIA's Model-Optimizer (https://github.com/NVIDIA/Model-Optimizer,
  `fp8_exporter.py`).
- **int8 queries and keys**, where OpenVINO multiplies them in int8: one scale each, as NNCF does for transformers. A
  range depends on the data, so only queries and keys that weights compute from a norm's output are rounded: their range
  does not depend on the model's input. Values and the softmax's output are not rounded.
- **int8 caches**: keys and values are rounded before attention reads them, each channel of each head with a separate
  scale, because a few channels of keys are much larger than the others (KIVI, https://arxiv.org/abs/2402.02750). A
  token's keys and values do not change later, so whole sequences and steps round alike.

Scales are from calibration data, and numbers beyond its range are clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
from safetensors.numpy import load_file

from attnforge.arrays import Array, is_floating
from attnforge.bundle import REFERENCE_EXAMPLE, REFERENCE_OUTPUTS, Case, TensorSpec
from attnforge.export.attention.canonicalize import Site
from attnforge.export.attention.layout import Layout
from attnforge.export.attention.masking import Zeros, with_zeros
from attnforge.export.attention.operands import Operand
from attnforge.export.decoding.insert import in_cache, sites_over_tokens
from attnforge.export.diagnosis.stages import decomposed
from attnforge.export.expected_caches import with_caches
from attnforge.export.graphs.build import Builder, insert, like
from attnforge.export.graphs.execute import Runner, as_it_is
from attnforge.export.graphs.nodes import input_of
from attnforge.export.graphs.qdq import FP8, MOST_FP8, InInt8, rounded_to
from attnforge.export.lowering.attention import Attention, attentions
from attnforge.export.lowering.openvino import may_round_scores
from attnforge.export.lowering.tensorrt import why_not_in_fp8
from attnforge.export.precision.calibration import HEADROOM, is_normed
from attnforge.export.precision.quantisation import INT8, scale_for
from attnforge.export.reference import kept
from attnforge.precision import PRECISIONS
from attnforge.runtime.cases import key, make_inputs
from attnforge.runtime.parity.budget import judge, relative_error

WITHOUT_DATA = "fp8 attention needs ranges from real data"

LEAST = 0.03
"""The least range of an operand of fp8 attention: its scale is still a normal number in fp16, the type of attention
around it."""

Scale = float | Array
"""Scale of a whole operand, > 0, or `(key heads, 1, size)`, float32 > 0."""

OPERANDS = ("query", "key", "value")

Write = Callable[[Builder, Attention, int, Scale], ir.Value]
"""Writes Q/DQ of an operand, given the attention, the operand's index in :data:`OPERANDS` and its scale, and returns
the result."""


@dataclass(frozen=True)
class RoundedOperands:
    """Operands of one attention site that may be rounded.

    Attributes:
        name: name of the part: the site's, or that of its cache.
        site: the site, which has a canonical node.
        scales: scale of every rounded operand, by its index in :data:`OPERANDS`.
        write: writes their Q/DQ.
        error: error of the site's output on calibration data, relative to fp32.
    """

    name: str
    site: Site
    scales: Mapping[int, Scale]
    write: Write
    error: float = 0.0

    def operands(self, graph: ir.Graph, a: Attention, stem: str) -> list[ir.Value | None]:
        """Query, key and value after Q/DQ, which are written before the node.

        Args:
            graph: graph of the node.
            a: the canonical node.
            stem: prefix of the names of new values.
        """

        def rounded(i: int) -> ir.Value:
            return insert(graph, a.node, lambda op: self.write(op, a, i, self.scales[i]), stem=f"{stem}/{OPERANDS[i]}")

        return [rounded(i) if i in self.scales else a.node.inputs[i] for i in range(3)]


def whole(dtype: ir.DataType) -> Write:
    """Writes Q/DQ of whole operands in a low-bit type, with one scale each."""

    def write_operand(op: Builder, a: Attention, i: int, scale: Scale) -> ir.Value:
        return rounded_to(op, input_of(a.node, i), float(scale), dtype)

    return write_operand


def round_operands(model: ir.Model, chosen: Sequence[RoundedOperands]) -> None:
    """Put Q/DQ before operands of canonical attention, in place."""
    by_site = {rounded.site: rounded for rounded in chosen}
    for site, a in attentions(model, list(by_site)):
        for i, value in enumerate(by_site[site].operands(model.graph, a, str(a.node.name))):
            a.node.replace_input_with(i, value)


# --- sites ------------------------------------------------------------------------------------------------------------


def sites_for_fp8(
    model: ir.Model, sites: Sequence[Site], data: Sequence[Mapping[str, Array]], is_real: bool
) -> tuple[list[RoundedOperands], dict[str, str]]:
    """The sites whose attention can be in fp8, with their ranges, and why any other is left unchanged, by site name.

    Args:
        model: a canonical fp32 graph; not modified.
        sites: its attention sites.
        data: inputs of the model.
        is_real: whether they are like what the model will see; if not, nothing is in fp8, because ranges depend on the
            data.
    """
    nodes = list(attentions(model, sites))
    reasons = {site.name: why_not_in_fp8(a) or (None if is_real else WITHOUT_DATA) for site, a in nodes}
    fitting = [(site, a) for site, a in nodes if reasons[site.name] is None]
    kept = {name: why for name, why in reasons.items() if why is not None}
    return _with_ranges(model, sites, fitting, FP8, _fp8_scales, data), kept


def _fp8_scales(a: Attention, peaks: Sequence[float]) -> list[float]:
    """Scales of query, key and value; the query's is for its original numbers, although it is rounded after scaling."""
    query, *others = (HEADROOM * peak for peak in peaks)
    ranges = max(query, LEAST / min(abs(a.scale), 1.0)), *(max(peak, LEAST) for peak in others)
    return [most / MOST_FP8 for most in ranges]


def sites_for_int8(
    model: ir.Model, sites: Sequence[Site], data: Sequence[Mapping[str, Array]]
) -> list[RoundedOperands]:
    """The sites whose queries and keys may be rounded to int8, with their ranges.

    Args:
        model: a canonical fp32 graph; not modified.
        sites: its attention sites.
        data: real inputs of the model.
    """
    fitting = [
        (site, a)
        for site, a in attentions(model, sites)
        if may_round_scores(a) and is_normed(a.query.value) and is_normed(a.key.value)
    ]
    return _with_ranges(model, sites, fitting, INT8.dtype, _int8_scales, data)


def _int8_scales(a: Attention, peaks: Sequence[float]) -> list[float]:
    return [HEADROOM * peak / INT8.most or 1.0 for peak in peaks[:2]]


def sites_with_caches(
    model: ir.Model, sites: Sequence[Site], data: Sequence[Mapping[str, Array]]
) -> list[RoundedOperands]:
    """All attention sites whose keys are tokens, with the ranges of their keys and values in int8 caches.

    Args:
        model: a canonical fp32 graph; not modified.
        sites: its attention sites.
        data: real inputs of the model.
    """
    nodes = list(attentions(model, sites_over_tokens(model, sites)))
    names = {site.name: [f"{site.name}/{part}" for part in OPERANDS[1:]] for site, _ in nodes}
    every = [name for of_site in names.values() for name in of_site]
    peaks = _peaks(as_it_is(with_caches(model, sites, every), every), data, axis=(0, 2))
    rounded = [
        RoundedOperands(
            f"cache of {site.name}",
            site,
            {i: scale_for(HEADROOM * peaks[name][:, None], INT8) for i, name in enumerate(names[site.name], start=1)},
            cached_operand,
        )
        for site, _ in nodes
    ]
    return with_errors(model, sites, rounded, data)


def cached_operand(op: Builder, a: Attention, i: int, scale: Scale) -> ir.Value:
    """Write Q/DQ of keys or values in int8, in the dims of a cache."""
    operand, layout = in_cache(a)[i - 1]
    stored = InInt8.of(op, a.arranged(op, operand, layout), np.asarray(scale)).restored(op)
    canonical = Layout([*a.layout("B", "H_kv").dims, *layout.dims[2:]])
    rounded, zeros = a.arranged(op, Operand(stored, layout), canonical), Zeros.of(input_of(a.node, i))
    return rounded if zeros is None else with_zeros(op, rounded, zeros.count, first=zeros.first)


# --- ranges and errors ------------------------------------------------------------------------------------------------


def _with_ranges(
    model: ir.Model,
    sites: Sequence[Site],
    fitting: Sequence[tuple[Site, Attention]],
    dtype: ir.DataType,
    scales_of: Callable[[Attention, Sequence[float]], Sequence[float]],
    data: Sequence[Mapping[str, Array]],
) -> list[RoundedOperands]:
    """Operands of the sites that fit, with the scales that `scales_of` computes from the largest numbers of query, key
    and value."""
    if not fitting:
        return []
    names = sorted({str(operand.value.name) for _, a in fitting for operand in a.operands})
    peaks = _peaks(as_it_is(decomposed(model, list(sites)), names), data)
    rounded = []
    for site, a in fitting:
        scales = scales_of(a, [float(peaks[str(operand.value.name)]) for operand in a.operands])
        rounded.append(RoundedOperands(site.name, site, dict(enumerate(scales)), whole(dtype)))
    return with_errors(model, sites, rounded, data)


def _peaks(run: Runner, data: Sequence[Mapping[str, Array]], axis: tuple[int, ...] | None = None) -> dict[str, Array]:
    """The largest finite absolute values of a graph's outputs over some axes, by name."""
    peaks: dict[str, Array] = {}
    for feeds in data:
        for name, array in run(feeds).items():
            largest = np.abs(np.where(np.isfinite(array), array, 0)).max(axis=axis, initial=0.0)
            peaks[name] = np.maximum(peaks.get(name, largest), largest)
    return peaks


def with_errors(
    model: ir.Model, sites: Sequence[Site], rounded: Sequence[RoundedOperands], data: Sequence[Mapping[str, Array]]
) -> list[RoundedOperands]:
    """Copies of `rounded` with the error of rounding each, the others unrounded, relative to its output in fp32: every
    node gets a twin with rounded operands, which nothing reads."""
    twins, by_site = model.clone(), {part.site: part for part in rounded}
    pairs: dict[str, tuple[str, str]] = {}
    both = list(sites)
    for site, a in attentions(twins, list(by_site)):
        part, node, output, name = by_site[site], a.node, a.node.outputs[0], f"{a.node.name}/twin"
        inputs = [*part.operands(twins.graph, a, name), *node.inputs[3:]]
        twin = ir.Node("", "Attention", inputs, node.attributes.values(), name=name)
        twin.metadata_props.update(node.metadata_props)
        result = like(twin.outputs[0], output)
        result.name = f"{output.name}/twin"
        twins.graph.insert_before(node, twin)
        twins.graph.outputs.extend([output, result])
        pairs[part.name] = str(output.name), str(result.name)
        both.append(replace(site, name=f"{part.name}/twin", node=name))
    run = as_it_is(decomposed(twins, both), sorted({name for pair in pairs.values() for name in pair}))
    errors = dict.fromkeys(pairs, 0.0)
    for feeds in data:
        outputs = run(feeds)
        for name, (exact, low) in pairs.items():
            finite = np.isfinite(outputs[exact])
            errors[name] = max(errors[name], relative_error(outputs[low][finite], outputs[exact][finite]))
    return [replace(part, error=errors[part.name]) for part in rounded]


# --- the parity budget of queries and keys in int8 --------------------------------------------------------------------

# Whether queries and keys that OpenVINO multiplies in int8 stay within the parity budget of their bundle.


SPARE = 0.9
"""Share of the parity budget that the graph may use for OpenVINO to stay within it."""


def why_over_budget(
    folder: Path,
    model: ir.Model,
    sites: Sequence[Site],
    scores: Sequence[RoundedOperands],
    inputs: list[TensorSpec],
    cases: Sequence[Case],
) -> str | None:
    """Why the quantised graph, with queries and keys rounded as well, may miss the bundle's parity budget, whose `e`
    rounds neither; None if it stays within it in every case with some margin.

    Args:
        folder: the bundle's folder, with its reference.
        model: the quantised graph; not modified.
        sites: its attention sites.
        scores: the sites whose queries and keys are rounded.
        inputs: inputs of the model.
        cases: the reference cases.
    """
    outputs, stored = load_file(folder / REFERENCE_OUTPUTS), load_file(folder / REFERENCE_EXAMPLE)
    rounded = model.clone()
    round_operands(rounded, scores)
    run = as_it_is(decomposed(rounded, list(sites)))
    for case in cases:
        for name, array in run(make_inputs(case, inputs, stored)).items():
            for suffix, numbers in kept(array, case, "").items():
                if suffix and not is_floating(array):
                    continue
                eager, exact = (outputs[key(case, name, which) + suffix] for which in ("eager", "float64"))
                comparison = judge(case, name, numbers, eager, exact, PRECISIONS["int8"])
                if not comparison.passed or (is_floating(array) and comparison.share > SPARE):
                    return (
                        f"OpenVINO's int8 product of queries and keys takes {comparison.share:.0%} of the parity "
                        f"budget in {case.name}, whose queries and keys are beyond the data's ranges or less exact"
                    )
    return None
