"""int8 queries and keys, where OpenVINO multiplies them in int8: their ranges, and the error of rounding them.

Query and key are rounded with one scale each, from calibration data, as NNCF does for transformers. A range depends on
the data, so only queries and keys that weights compute from a norm's output are rounded: their range does not depend on
the model's input. Values and the softmax's output are not rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx_ir as ir
from safetensors.numpy import load_file

from attnforge.arrays import Array, is_floating
from attnforge.bundle import REFERENCE_EXAMPLE, REFERENCE_OUTPUTS, Case, TensorSpec
from attnforge.export.attention.canonicalize import Site
from attnforge.export.diagnosis.stages import decomposed
from attnforge.export.graphs.execute import as_it_is
from attnforge.export.graphs.qdq import in_int8
from attnforge.export.lowering.attention import attentions
from attnforge.export.lowering.openvino import may_round_scores
from attnforge.export.precision.calibration import HEADROOM, is_normed
from attnforge.export.precision.quantisation import INT8
from attnforge.export.precision.rounding import Rounded, peaks_of, round_operands, with_errors
from attnforge.precision import PRECISIONS
from attnforge.runtime.cases import blocks, key, make_inputs, sampled
from attnforge.runtime.parity.budget import judge

INT8_PRECISION = PRECISIONS["int8"]

SPARE = 0.9
"""Share of the parity budget that the graph may use for OpenVINO to stay within it."""


def sites_for_int8(model: ir.Model, sites: Sequence[Site], data: Sequence[Mapping[str, Array]]) -> list[Rounded]:
    """The sites whose queries and keys may be rounded, with their ranges.

    Args:
        model: a canonical fp32 graph; not modified.
        sites: its attention sites.
        data: real inputs of the model.
    """
    fitting = {
        str(a.node.name): (site, a)
        for site, a in attentions(model, sites)
        if may_round_scores(a) and is_normed(a.query.value) and is_normed(a.key.value)
    }
    if not fitting:
        return []
    names = {str(operand.value.name) for _, a in fitting.values() for operand in (a.query, a.key)}
    peaks = peaks_of(model, sites, names, data)

    def scale(value: ir.Value) -> float:
        return HEADROOM * peaks[str(value.name)] / INT8.most or 1.0

    rounded = [
        Rounded(site, node, (scale(a.query.value), scale(a.key.value)), in_int8) for node, (site, a) in fitting.items()
    ]
    return with_errors(model, sites, rounded, data)


def why_over_budget(
    folder: Path,
    model: ir.Model,
    sites: Sequence[Site],
    scores: Sequence[Rounded],
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
    kept, stored = load_file(folder / REFERENCE_OUTPUTS), load_file(folder / REFERENCE_EXAMPLE)
    rounded = model.clone()
    round_operands(rounded, scores)
    run = as_it_is(decomposed(rounded, list(sites)))
    for case in cases:
        for name, array in run(make_inputs(case, inputs, stored)).items():
            sums = blocks(array, case) if is_floating(array) else None
            for suffix, numbers in (("", sampled(array, case)), ("/blocks", sums)):
                if numbers is None:
                    continue
                eager, exact = (kept[key(case, name, which) + suffix] for which in ("eager", "float64"))
                comparison = judge(case, name, numbers, eager, exact, INT8_PRECISION)
                used = max(
                    comparison.error / comparison.budget,
                    comparison.max_error / comparison.max_budget if comparison.max_budget else 0.0,
                )
                if not comparison.passed or (is_floating(array) and used > SPARE):
                    return (
                        f"OpenVINO's int8 product of queries and keys takes {used:.0%} of the parity budget in "
                        f"{case.name}, whose queries and keys are beyond the data's ranges or less exact"
                    )
    return None
