"""What the values of a graph depend on."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import pytest

from attnforge.export.graphs.build import typed
from attnforge.export.graphs.nodes import dependent_on_inputs

IDS = ("batch", "tokens")


@pytest.mark.parametrize(
    ("op_type", "dims", "is_data"),
    [
        ("Abs", IDS, False),
        ("Transpose", IDS[::-1], False),
        ("Reshape", ("batch*tokens",), False),
        ("NonZero", (2, "found"), True),
        ("Compress", (None,), True),
    ],
)
def test_a_size_depends_on_data_if_data_decide_it(
    op_type: str, dims: Sequence[str | int | None], is_data: bool
) -> None:
    """`Shape(NonZero(ids))` is the number of tokens that are not 0."""
    int64 = ir.DataType.INT64
    ids = typed(ir.Value(name="ids"), int64, [ir.SymbolicDim(dim) for dim in IDS])
    part = ir.node(op_type, [ids])
    typed(part.outputs[0], int64, [dim if isinstance(dim, int) else ir.SymbolicDim(dim) for dim in dims])
    size = ir.node("Size", part.outputs)
    dependent = dependent_on_inputs(ir.Graph([ids], size.outputs, nodes=[part, size]))
    assert part.outputs[0] in dependent and (size.outputs[0] in dependent) == is_data
