"""The precisions that a bundle can have, and the error that each always allows."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from attnforge.errors import check_known


@dataclass(frozen=True)
class Precision:
    """A floating-point precision of a deployed model.

    Attributes:
        name: as users write it.
        dtype: of parameters, inputs and outputs.
        mantissa_bits: explicit bits of the mantissa of the numbers that are multiplied; with the dtype's exponent they
            give the ulp.
        floor: the relative error that is always allowed (:mod:`attnforge.runtime.parity.budget`).
        bits: of the numbers that quantised weights are stored in; None where none are.
    """

    name: str
    dtype: np.dtype
    mantissa_bits: int
    floor: float
    bits: int | None = None

    @property
    def is_low(self) -> bool:
        """Whether the dtype has 16 bits; TensorRT has fused attention kernels for no other."""
        return self.dtype.itemsize == 2

    @property
    def is_quantised(self) -> bool:
        """Whether products are quantised, and all else is of the dtype."""
        return self.bits is not None

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return float(ml_dtypes.finfo(self.dtype).max)  # type: ignore[no-untyped-call]

    @property
    def smallest_normal(self) -> float:
        """The least positive number with all bits of the mantissa."""
        return float(ml_dtypes.finfo(self.dtype).smallest_normal)  # type: ignore[no-untyped-call]

    @property
    def unit(self) -> float:
        """The unit roundoff: the largest relative error of rounding a normal number."""
        return float(2.0 ** -(self.mantissa_bits + 1))

    def ulp(self, magnitude: float) -> float:
        """Distance between neighbouring numbers at `magnitude`."""
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
        Precision("int8", np.dtype(np.float32), 7, 8e-3, bits=8),  # 127 steps a side; in- and outputs and sums are fp32
        Precision("fp8", np.dtype(np.float32), 7, 8e-3, bits=8),  # as strict: eager's own error is what is allowed more
        Precision("int4", np.dtype(np.float32), 7, 8e-3, bits=4),
    )
}


def precision_named(name: str) -> Precision:
    """The precision called `name`.

    Raises:
        UnknownNameError: there is none.
    """
    check_known("precision", name, PRECISIONS)
    return PRECISIONS[name]
