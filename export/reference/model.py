"""Models that compute the outputs a deployment is verified against, at the bundle's precision and in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from attnforge.arrays import Array, is_floating
from attnforge.bundle import TensorSpec
from attnforge.precision import Precision

Eager = Callable[[Mapping[str, Array]], dict[str, Array]]
"""Computes outputs from inputs, both by name."""


class ReferenceModel(Protocol):
    """A model that answers twice: at the bundle's precision, and in float64 with the same weights.

    Attributes:
        inputs: name, dtype and dims of each input.
        precision: the precision at which :meth:`eager` computes.
    """

    inputs: list[TensorSpec]
    precision: Precision

    @property
    def reference(self) -> str:
        """Description of what computes the outputs, for the manifest."""

    @property
    def example(self) -> dict[str, Array]:
        """The example inputs by name, in the dtypes of `inputs`."""

    def eager(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name at the precision; 16-bit ones as float32, which represents them exactly."""

    def exact(
        self, inputs: Mapping[str, Array], peaks: list[float] | None = None, noise: np.random.Generator | None = None
    ) -> dict[str, Array]:
        """Outputs by name in float64.

        Args:
            inputs: inputs by name.
            peaks: receives the largest absolute value of every operator's results, in execution order, if the model
                knows them; otherwise unchanged.
            noise: moves the result of every sum as rounding in fp32 might, if the model can.
        """

    def at(self, precision: Precision) -> ReferenceModel:
        """The same weights rounded to another precision."""


class Derived:
    """A model whose eager is computed by something else, and whose float64 is its own.

    Args:
        whole: the model.
        precision: the precision of eager.
        reference: description of both, for the manifest.
        eager: computes eager's outputs.
    """

    def __init__(self, whole: ReferenceModel, precision: Precision, reference: str, eager: Eager) -> None:
        self.inputs, self.example = whole.inputs, whole.example
        self.precision, self.reference = precision, reference
        self.eager, self.exact, self.at = eager, whole.exact, whole.at


def at_precision(inputs: Mapping[str, Array], precision: Precision) -> dict[str, Array]:
    """Inputs by name, floating-point ones rounded to the precision's dtype."""
    with np.errstate(over="ignore"):
        return {name: a.astype(precision.dtype) if is_floating(a) else a for name, a in inputs.items()}
