"""Whether queries and keys that OpenVINO multiplies in int8 stay within the parity budget of their bundle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir
from safetensors.numpy import load_file

from attnforge.arrays import is_floating
from attnforge.bundle import REFERENCE_EXAMPLE, REFERENCE_OUTPUTS, Case, TensorSpec
from attnforge.export.attention.canonicalize import Site
from attnforge.export.diagnosis.stages import decomposed
from attnforge.export.graphs.execute import as_it_is
from attnforge.export.precision.rounding import RoundedOperands, round_operands
from attnforge.export.reference import kept
from attnforge.precision import PRECISIONS
from attnforge.runtime.cases import key, make_inputs
from attnforge.runtime.parity.budget import judge

INT8_PRECISION = PRECISIONS["int8"]

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
                comparison = judge(case, name, numbers, eager, exact, INT8_PRECISION)
                if not comparison.passed or (is_floating(array) and comparison.share > SPARE):
                    return (
                        f"OpenVINO's int8 product of queries and keys takes {comparison.share:.0%} of the parity "
                        f"budget in {case.name}, whose queries and keys are beyond the data's ranges or less exact"
                    )
    return None
