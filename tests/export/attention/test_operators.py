"""Attention operators of other exporters become canonical Attention nodes that compute the same function."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from attnforge.arrays import Array
from attnforge.export.attention.canonicalize import Site, canonicalize
from attnforge.export.lowering import onnxruntime as for_onnxruntime
from attnforge.export.lowering import tensorrt as for_tensorrt
from attnforge.runtime.parity.budget import relative_error

CONTRIB = "com.microsoft"
RNG = np.random.default_rng(0)
B, N, M, H, D = 2, 6, 5, 4, 16


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


@dataclass(frozen=True)
class Written:
    """A node, its inputs by position (None for an omitted one), and its number of outputs."""

    op_type: str
    inputs: Sequence[Array | None]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    domain: str = CONTRIB
    outputs: int = 1
    constants: tuple[int, ...] = ()  # inputs that are weights
    same_as: "Written | None" = None  # an equal node to compare with if ONNX Runtime's CPU has no kernel

    def model(self) -> onnx.ModelProto:
        names = [f"in{i}" if array is not None else "" for i, array in enumerate(self.inputs)]
        outputs = [f"out{i}" for i in range(self.outputs)]
        node = helper.make_node(self.op_type, names, outputs, domain=self.domain, name="site", **self.attributes)
        values, initializers = [], []
        for i, array in enumerate(self.inputs):
            if array is None:
                continue
            if i in self.constants:
                initializers.append(onnx.numpy_helper.from_array(array, f"in{i}"))
            else:
                dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
                values.append(helper.make_tensor_value_info(f"in{i}", dtype, array.shape))
        results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
        graph = helper.make_graph([node], "graph", values, results, initializers)
        opsets = [helper.make_opsetid("", 23), helper.make_opsetid(CONTRIB, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)

    def feeds(self) -> dict[str, Array]:
        return {f"in{i}": a for i, a in enumerate(self.inputs) if a is not None and i not in self.constants}

    def expected(self) -> list[Array]:
        """The operator's own results: of ai.onnx by its reference, of ONNX Runtime by its kernel."""
        if self.same_as is not None:
            return self.same_as.expected()
        if self.domain == "":
            return list(ReferenceEvaluator(self.model()).run(None, self.feeds()))
        return run(self.model().SerializeToString(), self.feeds())


def run(model: bytes | str, feeds: Mapping[str, Array]) -> list[Array]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return list(ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, dict(feeds)))


def apart(tokens: int, heads: int = H, size: int = D) -> Array:
    return normal(B, heads, tokens, size)


def packed(tokens: int, heads: int = H, size: int = D) -> Array:
    return normal(B, tokens, heads * size)


APART = apart(N), apart(M), apart(M)
STACKED = normal(B, N, H, 3, D)
UNSTACKED = [STACKED[:, :, :, i].reshape(B, N, -1) for i in range(3)]
CACHE = (normal(B, H, 3, D), normal(B, H, 3, D))
PADDING = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], np.int32)
HEADS = {"q_num_heads": H, "kv_num_heads": H}
ALLOWED = RNG.random((N, M)) < 0.7
ALLOWED[2] = False
WITHOUT_A_ROW = normal(1, H, N, M)
WITHOUT_A_ROW[:, :, 1] = -np.inf
WITHOUT_A_SQUARES_ROW = normal(1, H, N, N)
WITHOUT_A_SQUARES_ROW[:, :, 1] = -np.inf
ANGLES = RNG.random((16, D // 2)).astype(np.float32)
COSINE, SINE = np.cos(ANGLES), np.sin(ANGLES)
LENGTHS = np.array([N - 1, N - 3], np.int32)
TOTAL = np.array(N, np.int32)

WRITTEN = {
    "three dims": Written("Attention", [packed(N), packed(M), packed(M)], HEADS, ""),
    "three dims, grouped": Written(
        "Attention", [packed(N), packed(M, 2), packed(M, 2, 8)], {"q_num_heads": H, "kv_num_heads": 2}, ""
    ),
    "mask of two dims": Written("Attention", [apart(N), apart(M), apart(M), ALLOWED], {}, ""),
    "bias of three dims": Written("Attention", [apart(N), apart(M), apart(M), normal(H, N, M)], {"scale": 0.3}, ""),
    "scale of 0": Written("Attention", [*APART], {"scale": 0.0}, ""),
    "negative scale": Written(
        "Attention", [*APART], {"scale": -0.3}, "",
        same_as=Written("Attention", [-APART[0], *APART[1:]], {"scale": 0.3}, ""),
    ),
    "cache": Written("Attention", [apart(N), apart(N), apart(N), None, *CACHE], {}, "", outputs=3),
    "cache, causal": Written("Attention", [apart(2), apart(2), apart(2), None, *CACHE], {"is_causal": 1}, "", 3),
    "cache, three dims, bias": Written(
        "Attention", [packed(2), packed(2), packed(2), normal(2, 5), *CACHE], {**HEADS, "is_causal": 1}, "", 3
    ),
    "causal, rows fully masked by both": Written(
        "Attention", [apart(N), apart(N), apart(N), np.tri(N, N, -2, dtype=bool).T | np.eye(N, N, -4, dtype=bool)],
        {"is_causal": 1}, "",
    ),
    "soft cap": Written("Attention", [packed(N), packed(M), packed(M)], {**HEADS, "softcap": 3.0}, ""),
    "multi-head": Written("MultiHeadAttention", [packed(N), packed(M), packed(M)], {"num_heads": H}),
    "multi-head, biases": Written(
        "MultiHeadAttention", [packed(N), packed(M), packed(M), normal(3 * H * D)], {"num_heads": H, "scale": 0.2}
    ),
    "multi-head, padding": Written(
        "MultiHeadAttention", [packed(N), packed(M), packed(M), None, PADDING], {"num_heads": H}
    ),
    "multi-head, padding by lengths": Written(
        "MultiHeadAttention", [packed(N), packed(M), packed(M), None, np.array([5, 2], np.int32)], {"num_heads": H}
    ),
    "multi-head, bias of the scores": Written(
        "MultiHeadAttention", [packed(N), packed(M), packed(M), None, None, normal(1, H, N, M)], {"num_heads": H}
    ),
    "multi-head, a fully masked row": Written(
        "MultiHeadAttention", [packed(N), packed(M), packed(M), None, None, WITHOUT_A_ROW], {"num_heads": H}
    ),
    "multi-head, causal": Written(
        "MultiHeadAttention", [packed(N), packed(N), packed(N)], {"num_heads": H, "unidirectional": 1}
    ),
    "multi-head, keys apart": Written("MultiHeadAttention", [packed(N), apart(M), apart(M)], {"num_heads": H}),
    "multi-head, stacked": Written(
        "MultiHeadAttention", [STACKED], {"num_heads": H},
        same_as=Written("MultiHeadAttention", UNSTACKED, {"num_heads": H}),
    ),
    "multi-head, keys and values stacked": Written(
        "MultiHeadAttention", [UNSTACKED[0], STACKED[:, :, :, 1:]], {"num_heads": H},
        same_as=Written("MultiHeadAttention", UNSTACKED, {"num_heads": H}),
    ),
    "multi-head, cache": Written(
        "MultiHeadAttention", [packed(2), packed(2), packed(2), None, None, None, *CACHE], {"num_heads": H}, outputs=3
    ),
    "projecting": Written(
        "Attention", [normal(B, N, 32), normal(32, 3 * H * D) / 6, normal(3 * H * D)], {"num_heads": H},
        constants=(1, 2),
    ),
    "projecting, padding": Written(
        "Attention", [normal(B, M, 32), normal(32, 3 * H * D) / 6, normal(3 * H * D), PADDING], {"num_heads": H},
        constants=(1, 2),
    ),
    "projecting, padding by lengths": Written(
        "Attention", [normal(B, M, 32), normal(32, 3 * H * D) / 6, normal(3 * H * D), np.array([5, 2], np.int32)],
        {"num_heads": H}, constants=(1, 2),
    ),
    "projecting, a fully masked row": Written(
        "Attention",
        [normal(B, M, 32), normal(32, 3 * H * D) / 6, normal(3 * H * D), None, None, WITHOUT_A_ROW[:, :, :M]],
        {"num_heads": H}, constants=(1, 2),
    ),
    "projecting, causal, narrower values": Written(
        "Attention", [normal(B, N, 32), normal(32, 160) / 6, normal(160)],
        {"num_heads": H, "unidirectional": 1, "qkv_hidden_sizes": [64, 64, 32]}, constants=(1, 2),
    ),
    "grouped query": Written(
        "GroupQueryAttention", [packed(N), packed(N, 2), packed(N, 2), None, None, LENGTHS, TOTAL],
        {"num_heads": H, "kv_num_heads": 2},
    ),
    "grouped query, all in one": Written(
        "GroupQueryAttention", [packed(N, H + 4), None, None, None, None, LENGTHS, TOTAL],
        {"num_heads": H, "kv_num_heads": 2},
    ),
    "grouped query, a fully masked row": Written(
        "GroupQueryAttention",
        [packed(N), packed(N, 2), packed(N, 2), None, None, LENGTHS, TOTAL, None, None, None, WITHOUT_A_SQUARES_ROW],
        {"num_heads": H, "kv_num_heads": 2},
    ),
    "grouped query, rotary": Written(
        "GroupQueryAttention", [packed(N), packed(N, 2), packed(N, 2), None, None, LENGTHS, TOTAL, COSINE, SINE],
        {"num_heads": H, "kv_num_heads": 2, "do_rotary": 1},
    ),
    "grouped query, window": Written(
        "GroupQueryAttention", [packed(N), packed(N, 2), packed(N, 2), None, None, LENGTHS, TOTAL],
        {"num_heads": H, "kv_num_heads": 2, "local_window_size": 3, "softcap": 5.0},
    ),
}  # fmt: skip


def canonical(written: Written) -> tuple[ir.Model, list[Site]]:
    model = ir.serde.deserialize_model(written.model())
    return model, canonicalize(model).sites


@pytest.mark.parametrize("name", WRITTEN)
def test_an_operator_becomes_a_plain_attention_node(name: str, tmp_path: Path) -> None:
    written = WRITTEN[name]
    model, sites = canonical(written)
    assert [site.reason for site in sites] == [None]
    (node,) = [node for node in model.graph if node.op_type == "Attention"]
    assert node.domain == "" and len(node.inputs) <= 4 and node.name == sites[0].node
    assert all(v is not None and v.shape is not None and len(v.shape) == 4 for v in node.inputs)
    expected = written.expected()
    for target in ("onnxruntime", "tensorrt"):
        lowered = model.clone()
        if target == "onnxruntime":
            for_onnxruntime.lower(lowered, sites, {})
        else:
            for_tensorrt.lower(lowered, sites)
        file = str(tmp_path / f"{target}.onnx")
        ir.save(lowered, file)
        for got, wanted in zip(run(file, written.feeds()), expected, strict=True):
            assert got.shape == wanted.shape
            rows = valid_rows(written, got.shape)
            got, wanted = got[rows], wanted[rows]
            assert np.array_equal(np.isnan(got), np.isnan(wanted)), target
            assert relative_error(np.nan_to_num(got), np.nan_to_num(wanted)) <= 2e-6, target


def valid_rows(written: Written, shape: tuple[int, ...]) -> Array:
    """The rows to compare: GroupQueryAttention may return anything for queries that are padding."""
    valid = np.ones(shape, bool)
    if written.op_type == "GroupQueryAttention":
        valid[1, LENGTHS[1] + 1 :] = False
    return valid


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (
            Written("Attention", [apart(N), apart(M), apart(M)], {"qk_matmul_output_mode": 1}, "", 4),
            "scores are an output",
        ),
        (
            Written("MultiHeadAttention", [packed(N), packed(M), packed(M)], {"num_heads": H, "unidirectional": 1}),
            "different numbers of keys and queries",
        ),
        (
            Written("MultiHeadAttention", [packed(N), packed(M), packed(M), None, np.array([5, 2, 0, 0], np.int32)],
                    {"num_heads": H}),
            "padding mask is given by the first and last key",
        ),
        (
            Written(
                "GroupQueryAttention",
                [packed(1), packed(1, 2), packed(1, 2), normal(B, 2, 8, D), normal(B, 2, 8, D), LENGTHS, TOTAL],
                {"num_heads": H, "kv_num_heads": 2}, outputs=3,
            ),
            "with a cache",
        ),
    ],
)  # fmt: skip
def test_an_operator_that_does_more_is_left_and_gets_a_reason(written: Written, reason: str) -> None:
    before = written.model()
    model, sites = canonical(written)
    (site,) = sites
    assert site.node is None and site.reason is not None and reason in site.reason
    assert [node.op_type for node in model.graph] == [node.op_type for node in before.graph.node]
