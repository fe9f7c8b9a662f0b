"""What a deployed model is to answer: its source's outputs, at the bundle's precision and in float64, by case."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from safetensors.numpy import save_file

from attnforge import reference
from attnforge.arrays import BFLOAT16, Array
from attnforge.bundle import REFERENCE_EXAMPLE, REFERENCE_OUTPUTS, Case, TensorSpec
from attnforge.precision import Precision


class Expected(Protocol):
    """What was captured or imported, as far as the reference goes: inputs, and outputs by name.

    `eager` computes at the bundle's precision, `exact` in float64 with the same weights; `reference` says what does.
    """

    inputs: list[TensorSpec]

    @property
    def reference(self) -> str: ...

    @property
    def example(self) -> dict[str, Array]: ...

    def eager(self, inputs: Mapping[str, Array]) -> dict[str, Array]: ...

    def exact(self, inputs: Mapping[str, Array]) -> dict[str, Array]: ...

    def at(self, precision: Precision) -> Expected: ...


def write_reference(folder: Path, source: Expected, attention: Precision | None = None) -> list[Case]:
    """Run every case through the source at the bundle's precision and in float64; keep the outputs.

    Args:
        folder: of the bundle.
        source: what the outputs are of.
        attention: the precision of attention alone, where it is another. Eager cannot be told to compute attention
            alone so; all of it runs at that precision, as the yardstick of :mod:`attnforge.runtime.parity`.

    Returns:
        the cases, as they were run.
    """
    example = source.example
    low = source.at(attention) if attention is not None else None
    kept: dict[str, Array] = {}
    cases = []
    for wanted in reference.cases(source.inputs):
        case, inputs, eager = _run_finite(wanted, source, example)
        truth = source.exact(inputs)
        for output, value in eager.items():
            for which, array in (("eager", value), ("float64", truth[output])):
                kept[reference.key(case, output, which)] = np.ascontiguousarray(reference.sampled(array, case))
        if low is not None and attention is not None:
            rounded = {n: a.astype(attention.dtype) if a.dtype.kind == "f" else a for n, a in inputs.items()}
            for output, value in low.eager(rounded).items():
                array = reference.sampled(value, case)
                kept[reference.key(case, output, attention.name)] = np.ascontiguousarray(array)
        cases.append(case)
    (folder / "reference").mkdir()
    save_file(kept, folder / REFERENCE_OUTPUTS)
    # Every bfloat16 is a float32, and the file format has no word for NumPy's bfloat16.
    stored = {name: array.astype(np.float32) if array.dtype == BFLOAT16 else array for name, array in example.items()}
    save_file({name: np.ascontiguousarray(array) for name, array in stored.items()}, folder / REFERENCE_EXAMPLE)
    return cases


def _run_finite(
    case: Case, source: Expected, example: Mapping[str, Array]
) -> tuple[Case, dict[str, Array], dict[str, Array]]:
    """Run a case in eager. A large one that overflows eager says nothing about a backend, so it is halved."""
    while True:
        inputs = reference.make_inputs(case, source.inputs, example)
        eager = source.eager(inputs)
        if case.kind != "large" or case.scale <= 1 or all(bool(np.isfinite(a).all()) for a in eager.values()):
            return case, inputs, eager
        case = case.model_copy(update={"scale": case.scale / 2})
