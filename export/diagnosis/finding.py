"""The result of a diagnosis: the first wrong step of a deployment, and its cause."""

from __future__ import annotations

from typing import Literal

import numpy as np

from attnforge.bundle import Wrong
from attnforge.export.diagnosis.stages import line_of, module_of
from attnforge.export.diagnosis.trace import TensorErrors

Cause = Literal[
    "overflow", "underflow", "norm", "cancellation", "softmax", "conditioning", "accumulation", "clipping",
    "outlier channel", "saturation", "quantisation", "operator", "export", "rewrite", "reference", "rounding",
]  # fmt: skip

COSTS = ("rounding", "quantisation")
"""Causes that are nothing but the cost of a precision."""


class Finding(Wrong):
    """The first wrong step of a deployment, and its cause.

    Attributes:
        cause: `export`: the graph is a different function from the module; `rewrite`: a graph is a different function
            from the one that it was made from; otherwise an effect of the precision:
            `overflow`, `underflow`, `norm` (in the squares of a norm), `cancellation`, `softmax` (scores so large that
            their rounding decides), `conditioning` (a function that is steep there), `accumulation`, `clipping`
            (numbers beyond a quantised range), `outlier channel` (one that takes up a range), `operator` (an operator
            computes something else), `saturation` (sums of 8-bit products, in a backend), `reference` (the reference
            that the bundle was checked against is not this graph), or `rounding` or `quantisation`: only the cost of
            the precision.
        stage: the graph or the backend that is wrong; `eager` for the effect of the precision on the model as written.
        tensor, operator, module, line: where; None if no single tensor is responsible.
        evidence: the numbers that prove it.
        error_without: the final error if this tensor alone is exact.
        rule: for a rewrite, what was rewritten.
        reproduction: files that reproduce it.
    """

    cause: Cause
    stage: str = "eager"
    error_without: float | None = None
    rule: str | None = None
    reproduction: list[str] = []

    @classmethod
    def at(
        cls,
        tensor: TensorErrors,
        cause: Cause,
        evidence: str,
        *,
        stage: str = "eager",
        module: str | None = None,
        error_without: float | None = None,
    ) -> Finding:
        """A finding at a tensor.

        Args:
            tensor: the tensor that is wrong.
            cause: cause of the error.
            evidence: the numbers that prove it.
            stage: the graph or backend that is wrong.
            module: the tensor's module, if its node does not say.
            error_without: the final error if this tensor alone is exact; None if that was not tried.
        """
        return cls(
            cause=cause,
            stage=stage,
            evidence=evidence,
            tensor=tensor.name,
            operator=tensor.node.op_type,
            module=module or module_of(tensor.node),
            line=line_of(tensor.node),
            error_without=finite(error_without),
        )


def finite(number: float | None) -> float | None:
    """A finite number, or else None, which JSON can represent."""
    return None if number is None or not np.isfinite(number) else float(number)
