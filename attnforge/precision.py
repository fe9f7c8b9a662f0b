"""The precisions of bundles, and the error that each always allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from attnforge.errors import check_known


@dataclass(frozen=True)
class Precision:
    """A floating-point precision of a deployed model.

    Attributes:
        name: name that users write.
        dtype: dtype of parameters, inputs and outputs.
        mantissa_bits: explicit mantissa bits of the factors of products; with the dtype's exponent they give the ulp.
        floor: relative error that is always allowed (:mod:`attnforge.runtime.parity.budget`).
        bits: bits per stored number of quantised weights; None without quantisation.
    """

    name: str
    dtype: np.dtype
    mantissa_bits: int
    floor: float
    bits: int | None = None

    @property
    def is_low(self) -> bool:
        """Whether the dtype has 16 bits; TensorRT has fused attention kernels only for these."""
        return self.dtype.itemsize == 2

    @property
    def is_quantised(self) -> bool:
        """Whether products are quantised; all else has the dtype."""
        return self.bits is not None

    @property
    def may_flush(self) -> bool:
        """Whether products may take denormal numbers for zeros: in bf16, AVX512-BF16 and AMX do so in every library."""
        return self.name == "bf16"

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return float(ml_dtypes.finfo(self.dtype).max)  # type: ignore[no-untyped-call]

    @property
    def smallest_normal(self) -> float:
        """The smallest positive normal number."""
        return float(ml_dtypes.finfo(self.dtype).smallest_normal)  # type: ignore[no-untyped-call]

    @property
    def unit(self) -> float:
        """The unit roundoff: the largest relative error of rounding a normal number."""
        return float(2.0 ** -(self.mantissa_bits + 1))

    def with_own_limits(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return float64 numbers in which the largest and the least of float64 are those of this precision, because a
        module that fills with `torch.finfo(x.dtype).min` means the least number."""
        is_limit = np.abs(array) == np.finfo(np.float64).max
        return np.where(is_limit, np.copysign(self.largest, array), array) if is_limit.any() else array

    def ulp(self, magnitude: float) -> float:
        """Return the distance between neighbouring numbers at `magnitude`."""
        if not np.isfinite(magnitude) or magnitude == 0:
            return 0.0
        return float(2.0 ** (np.floor(np.log2(max(magnitude, self.smallest_normal))) - self.mantissa_bits))


PRECISIONS = {
    p.name: p
    for p in (
        Precision("fp32", np.dtype(np.float32), 23, 4e-6),
        Precision("tf32", np.dtype(np.float32), 10, 1e-3),
        Precision("fp16", np.dtype(np.float16), 10, 1e-3),
        Precision("bf16", np.dtype(ml_dtypes.bfloat16), 7, 8e-3),
        # 127 steps per sign; inputs, outputs and sums are fp32
        Precision("int8", np.dtype(np.float32), 7, 8e-3, bits=8),
        Precision("fp8", np.dtype(np.float32), 7, 8e-3, bits=8),  # equally strict; eager's error raises the budget
        Precision("int4", np.dtype(np.float32), 7, 8e-3, bits=4),
    )
}


SPELLINGS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "half": "fp16"}
"""Other names of precisions: those of dtypes."""


def spelled(precision: Any) -> Any:
    """Return the name of a precision that is given as such, by another name or as a torch dtype."""
    name = str(precision).removeprefix("torch.")
    return SPELLINGS.get(name, name if name in PRECISIONS else precision)


def precision_named(name: str) -> Precision:
    """Return the precision called `name`.

    Raises:
        UnknownNameError: it does not exist.
    """
    check_known("precision", name, PRECISIONS)
    return PRECISIONS[name]
