"""What TensorRT's backend does without a device; `tests/runtime/test_gpu.py` runs it on one."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings")

from attnforge.runtime.backends.tensorrt import TensorRT
from attnforge.runtime.inputs import Shapes


def test_output_shapes_that_the_sizes_determine_are_not_inferred() -> None:
    backend = TensorRT.__new__(TensorRT)  # without a plan, a device or a context
    shapes = Shapes(inputs=((2, 9, 16), (16,)), sizes={"batch": 2, "tokens": 9}, outputs=((2, 9, 4), (2,)))
    assert backend.output_shapes(shapes) == ((2, 9, 4), (2,))
