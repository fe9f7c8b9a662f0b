"""Graphs with one canonical Attention node, and their reference in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from attnforge.arrays import Array
from attnforge.bundle import DimSpec, TensorSpec
from attnforge.export.attention.canonicalize import Site
from attnforge.export.graphs.attention import SILENT_ROWS

DTYPES = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
OPT = {"batch": 2, "n": 13, "m": 11}
SIZES = [{"batch": 1, "n": 1, "m": 1}, {"batch": 2, "n": 13, "m": 11}, {"batch": 3, "n": 8, "m": 32}]
Dim = int | str


@dataclass
class Attends:
    """A graph with one canonical Attention node, and its reference in NumPy."""

    batch: Dim = "batch"
    heads: int = 4
    key_heads: int | None = None
    n_q: Dim = "n"
    n_k: Dim = "m"
    d_k: int = 32
    d_v: int = 32
    mask: tuple[Dim, ...] | None = None
    bias: bool = False  # the mask is added, not boolean
    is_causal: bool = False
    scale: float = 0.25
    softcap: float = 0.0
    silent_rows: str = "zero"
    precision: str = "fp32"

    @property
    def shapes(self) -> dict[str, tuple[Dim, ...]]:
        key_heads = self.key_heads or self.heads
        shapes: dict[str, tuple[Dim, ...]] = {
            "query": (self.batch, self.heads, self.n_q, self.d_k),
            "key": (self.batch, key_heads, self.n_k, self.d_k),
            "value": (self.batch, key_heads, self.n_k, self.d_v),
        }
        return shapes if self.mask is None else shapes | {"mask": self.mask}

    def model(self) -> tuple[ir.Model, list[Site]]:
        dtype = DTYPES[self.precision]
        inputs = []
        for name, shape in self.shapes.items():
            kind = ir.DataType.BOOL if name == "mask" and not self.bias else dtype
            inputs.append(ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(kind)))
        attributes: dict[str, Any] = {"scale": self.scale}
        if self.is_causal:
            attributes["is_causal"] = 1
        if self.softcap:
            attributes["softcap"] = self.softcap
        node = ir.node("Attention", inputs, attributes, name="site/Attention")
        if self.silent_rows == "nan":
            node.metadata_props[SILENT_ROWS] = "nan"
        output = node.outputs[0]
        output.name, output.type = "output", ir.TensorType(dtype)
        output.shape = ir.Shape((self.batch, self.heads, self.n_q, self.d_v))
        graph = ir.Graph(inputs, [output], nodes=[node], opset_imports={"": 23}, name="attention")
        return ir.Model(graph, ir_version=10), [Site("site", "Attention", node="site/Attention")]

    def specs(self) -> list[TensorSpec]:
        kinds = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
        return [
            TensorSpec(
                name=name,
                dtype="bool" if name == "mask" and not self.bias else kinds[self.precision],
                dims=[d if isinstance(d, int) else DimSpec(symbol=d, min=1, opt=OPT[d], max=64) for d in shape],
            )
            for name, shape in self.shapes.items()
        ]

    def feeds(self, sizes: dict[str, int], seed: int = 0) -> dict[str, Array]:
        rng = np.random.default_rng(seed)
        made: dict[str, Array] = {}
        for name, shape in self.shapes.items():
            dims = tuple(d if isinstance(d, int) else sizes[d] for d in shape)
            if name == "mask" and not self.bias:
                made[name] = rng.random(dims) < 0.6
                made[name].reshape(-1, dims[-1])[0] = False  # the first row is fully masked
            else:
                # Rounded to 16 bits, so that every precision gets the same values.
                made[name] = rng.standard_normal(dims).astype(np.float16).astype(np.float32)
        return made

    def expected(self, feeds: dict[str, Array]) -> Array:
        query, key, value = (feeds[name].astype(np.float64) for name in ("query", "key", "value"))
        group = self.heads // key.shape[1]
        key, value = key.repeat(group, axis=1), value.repeat(group, axis=1)
        scores = query @ key.swapaxes(-1, -2) * self.scale
        if self.softcap:
            scores = self.softcap * np.tanh(scores / self.softcap)
        if self.is_causal:
            scores = np.where(np.tri(*scores.shape[-2:], dtype=np.bool_), scores, -np.inf)
        if self.mask is not None:
            scores = scores + feeds["mask"] if self.bias else np.where(feeds["mask"], scores, -np.inf)
        with np.errstate(invalid="ignore"):
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
        output: Array = weights @ value
        return np.where(np.isnan(output), 0.0, output) if self.silent_rows == "zero" else output


def run(model: ir.Model, feeds: dict[str, Array]) -> Array:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    data = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    output: Array = session.run(None, feeds)[0]
    return output


def agree(got: Array, expected: Array, tolerance: float = 1e-6) -> None:
    assert got.shape == expected.shape
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    error = np.linalg.norm(np.nan_to_num(got.astype(np.float64) - expected))
    # Outputs are means of standard normal values; where these cancel, use the size of the values.
    assert error <= tolerance * max(np.linalg.norm(np.nan_to_num(expected)), np.sqrt(got.size))


CPU: dict[str, Attends] = {
    "heads": Attends(),
    "one head": Attends(heads=1),
    "a lone head": Attends(batch=1, heads=1),
    "wider values": Attends(d_k=24, d_v=40),
    "grouped heads": Attends(key_heads=2),
    "one key head": Attends(key_heads=1),
    "causal": Attends(is_causal=True),
    "mask": Attends(mask=("batch", 1, "n", "m")),
    "mask of keys": Attends(mask=(1, 1, 1, "m")),
    "mask, NaN for fully masked rows": Attends(mask=("batch", 4, "n", "m"), silent_rows="nan"),
    "mask and causal": Attends(mask=(1, 1, 1, "m"), is_causal=True),
    "bias": Attends(mask=(1, 4, "n", "m"), bias=True),
    "soft cap": Attends(softcap=3.0),
    "soft cap and mask": Attends(softcap=3.0, mask=(1, 1, "n", "m")),
    "many tokens": Attends(batch=1, heads=2, n_q=600, n_k=600),
}
