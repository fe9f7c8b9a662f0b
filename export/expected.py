"""What a deployed model is to answer: eager outputs, at the bundle's precision and in float64, for every case."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor

from attnforge import reference
from attnforge.arrays import BFLOAT16, Array, to_numpy
from attnforge.bundle import REFERENCE_EXAMPLE, REFERENCE_OUTPUTS, Case
from attnforge.eager import at_precision, in_float64, run, torch_dtype
from attnforge.export.capture import Captured
from attnforge.precision import Precision


def write_reference(
    folder: Path, captured: Captured, precision: Precision, attention: Precision | None = None
) -> list[Case]:
    """Run every case through eager at the bundle's precision and through the same weights in float64; keep the outputs.

    Args:
        folder: of the bundle.
        captured: the module, its inputs and outputs.
        precision: the bundle's.
        attention: that of attention alone, where it is another. Eager cannot be told to compute attention alone so, so
            the whole module runs at it, as the yardstick of :mod:`attnforge.runtime.parity`.

    Returns:
        the cases, as they were run.
    """
    exact = in_float64(captured.module)
    low = at_precision(captured.module, attention) if attention is not None else None
    example = {spec.name: to_numpy(spec.name, arg) for spec, arg in zip(captured.inputs, captured.args, strict=True)}
    kept: dict[str, Array] = {}
    cases = []
    for wanted in reference.cases(captured.inputs):
        case, inputs, eager = _run_finite(wanted, captured, example, precision)
        truth = run(exact, inputs, torch.float64)
        for output, value in eager.items():
            for which, tensor in (("eager", value.float()), ("float64", truth[output].double())):
                array = reference.sampled(to_numpy(output, tensor), case)
                kept[reference.key(case, output, which)] = np.ascontiguousarray(array)
        if low is not None and attention is not None:
            for output, value in run(low, inputs, torch_dtype(attention)).items():
                array = reference.sampled(to_numpy(output, value.float()), case)
                kept[reference.key(case, output, attention.name)] = np.ascontiguousarray(array)
        cases.append(case)
    (folder / "reference").mkdir()
    save_file(kept, folder / REFERENCE_OUTPUTS)
    # Every bfloat16 is a float32, and the file format has no word for NumPy's bfloat16.
    stored = {name: array.astype(np.float32) if array.dtype == BFLOAT16 else array for name, array in example.items()}
    save_file({name: np.ascontiguousarray(array) for name, array in stored.items()}, folder / REFERENCE_EXAMPLE)
    return cases


def _run_finite(
    case: Case, captured: Captured, example: Mapping[str, Array], precision: Precision
) -> tuple[Case, dict[str, Array], dict[str, Tensor]]:
    """Run a case in eager. A large one that overflows eager says nothing about a backend, so it is halved."""
    while True:
        inputs = reference.make_inputs(case, captured.inputs, example)
        eager = run(captured.module, inputs, torch_dtype(precision))
        if case.kind != "large" or case.scale <= 1 or all(bool(value.isfinite().all()) for value in eager.values()):
            return case, inputs, eager
        case = case.model_copy(update={"scale": case.scale / 2})
