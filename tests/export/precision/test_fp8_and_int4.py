"""precision="fp8" and "int4": the same Q/DQ and the same gate as int8, with different numbers and kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor, nn
from torch.export import Dim

import attnforge
from attnforge.arrays import Array
from attnforge.bundle import CANONICAL, Bundle
from attnforge.errors import BuildError, UsageError
from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.diagnosis.stages import decomposed
from attnforge.export.graphs.execute import as_it_is
from attnforge.export.graphs.qdq import SCHEMES
from attnforge.export.lowering.integers import casts_for_fp8, products_of_nibbles
from attnforge.export.precision.quantisation import SHRUNK, Quantisation, quantise
from attnforge.export.precision.rounding import round_operands, sites_for_fp8
from attnforge.export.sources.torch_module import capture
from attnforge.precision import PRECISIONS
from attnforge.runtime.parity.budget import relative_error
from tests.export.precision.test_int8 import WIDTH, Block, Outliers, deployed, linear, made, of, real, result

FP8, INT4 = SCHEMES["fp8"], SCHEMES["int4"]
DIMS, SEEDS = st.sampled_from(([3], [2, 5], [1, 2, 3])), st.integers(0, 2**16)


def drawn(rng: np.random.Generator, dims: list[int], channels: int) -> tuple[Array, Array, Array, Array]:
    """Inputs of some size, sometimes with a row of zeros; a weight, its bias, and balancing divisors."""
    outputs = int(rng.integers(64, 90))
    weight, bias = rng.standard_normal((channels, outputs)).astype(np.float32), rng.standard_normal(outputs)
    x = rng.standard_normal([*dims, channels]).astype(np.float32) * np.float32(10.0 ** rng.integers(-3, 4))
    x[0, ..., :] *= rng.integers(0, 2)
    return x, weight, bias.astype(np.float32), np.exp(rng.standard_normal(channels)).astype(np.float32)


def in_fp8(numbers: Array) -> Array:
    """Numbers rounded to E4M3, in float64."""
    return np.clip(numbers, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


@settings(max_examples=15)
@given(DIMS, st.booleans(), st.booleans(), SEEDS)
def test_a_product_in_fp8_matches_the_formulas(dims: list[int], by_token: bool, is_balanced: bool, seed: int) -> None:
    """The canonical graph, and the casts for ONNX Runtime: the same to the last bits, except where a number is half way
    between two."""
    rng = np.random.default_rng(seed)
    x, weight, bias, balance = drawn(rng, dims, int(rng.integers(64, 90)))
    largest = float(np.abs(x).max() or 1)
    scale = None if by_token else largest / rng.uniform(200, 600)
    inputs, matrix = x.astype(np.float64), weight.astype(np.float64)
    if is_balanced:
        inputs, matrix = inputs / balance, matrix * balance[:, None]
    steps = np.abs(matrix).max(axis=0) / 448
    size = np.abs(inputs).max(axis=-1, keepdims=True)
    step = np.where(size > 0, size, 1) / 448 if scale is None else scale
    wanted = (in_fp8(inputs / step) * step) @ (in_fp8(matrix / steps) * steps) + bias
    model = linear(weight, bias, dims)
    quantise(model, {"product": Quantisation(scale, balance if is_balanced else None, scheme=FP8)})
    canonical = result(model, x)
    assert relative_error(canonical.astype(np.float64), wanted) < 1e-2
    casts_for_fp8(model)
    RemoveUnusedNodesPass()(model)
    assert not {"QuantizeLinear", "DequantizeLinear"} & {node.op_type for node in model.graph}
    assert relative_error(result(model, x).astype(np.float64), canonical.astype(np.float64)) < 1e-2


@settings(max_examples=15)
@given(DIMS, st.sampled_from((32, 128)), st.booleans(), st.booleans(), SEEDS)
def test_a_product_with_weights_of_4_bits_matches_the_formulas(
    dims: list[int], block: int, has_bias: bool, is_balanced: bool, seed: int
) -> None:
    """Every block has the scale with the smallest error, and ONNX Runtime's kernel reads the same numbers. Its inputs
    are in 8 bits, which costs little if channels are alike, as balancing leaves them."""
    rng = np.random.default_rng(seed)
    x, weight, bias, balance = drawn(rng, dims, 256)
    x = x * balance if is_balanced else x
    form = Quantisation(balance=balance if is_balanced else None, scheme=INT4, block=block)
    model = linear(weight, bias if has_bias else None, dims)
    quantise(model, {"product": form})
    stored = {name: v.const_value for name, v in model.graph.initializers.items() if v.const_value is not None}
    numbers, scales = (stored[f"product/{part}"].numpy() for part in ("weight", "weight_scale"))
    assert numbers.dtype == ml_dtypes.int4 and scales.shape == (256 // block, weight.shape[1])
    matrix = weight * balance[:, None] if is_balanced else weight
    blocks, kept = (a.astype(np.float64).reshape(-1, block, weight.shape[1]) for a in (matrix, numbers))
    share = scales * 7 / np.abs(blocks).max(axis=1)
    assert (share >= SHRUNK[-1] - 1e-5).all() and (share <= 1 + 1e-5).all()
    steps = np.abs(blocks).max(axis=1, keepdims=True) / 7
    plain = np.square(np.rint(blocks / steps) * steps - blocks).sum(axis=1)
    assert (np.square(kept * scales[:, None] - blocks).sum(axis=1) <= plain * (1 + 1e-5)).all()
    inputs = x / balance if is_balanced else x
    wanted = inputs.astype(np.float64) @ (kept * scales[:, None]).reshape(weight.shape) + (bias if has_bias else 0)
    canonical = result(model, x)
    assert relative_error(canonical.astype(np.float64), wanted) < 1e-5
    products_of_nibbles(model)
    RemoveUnusedNodesPass()(model)
    assert [node.op_type for node in model.graph].count("MatMulNBits") == 1
    assert "DequantizeLinear" not in {node.op_type for node in model.graph}
    lowered = result(model, x, optimised=True).astype(np.float64)
    assert relative_error(lowered, wanted) < 1e-2


@pytest.mark.parametrize(("precision", "has_data"), [("fp8", True), ("fp8", False), ("int4", True)])
def test_a_deployment_is_verified_on_every_backend_here(tmp_path: Path, precision: str, has_data: bool) -> None:
    """4 bits without data: `test_what_costs_too_much_is_refused_or_kept_in_fp32`."""
    bundle = deployed(tmp_path / "b", precision=precision, data=real() if has_data else [], max_error=0.15)
    report = attnforge.verify(bundle, ["onnxruntime-cpu", "openvino"])
    assert report.passed and report.warnings == []
    manifest, quantised = bundle.manifest, of(bundle)
    assert manifest.precision == precision == quantised.type and manifest.eager_precision == "fp32"
    assert len(quantised.products) == 6 and 0.01 < quantised.error <= 0.15
    assert [*quantised.kept] == (["attention"] if precision == "fp8" else [])  # its tokens are dynamic
    assert {product.block for product in quantised.products} <= ({32, 128} if precision == "int4" else {None})
    by = {"fp8": {"token", "tensor"} if has_data else {"token"}, "int4": {None}}
    assert {product.by for product in quantised.products} == by[precision]
    assert manifest.targets["onnxruntime"].low_bit == (6 if precision == "int4" else 0)  # it has no fp8 product
    weights = ir.load(bundle.file(CANONICAL)).graph.initializers.values()
    size = sum(value.const_value.nbytes for value in weights if value.const_value is not None)
    head, products = 4 * 128 * WIDTH, (4 * WIDTH * WIDTH + 4 * WIDTH * WIDTH) * (0.5 if precision == "int4" else 1)
    assert head + products < size < head + 1.5 * products  # the scales, biases and norms of a model this small


@pytest.mark.parametrize(("precision", "capability"), [("fp8", "SM120"), ("int4", "SM89")])
def test_tensorrt_reads_stored_numbers_with_fused_attention(tmp_path: Path, precision: str, capability: str) -> None:
    """With dynamic batch and tokens, and attention in fp16. The next test has a plan for both devices."""
    bundle = deployed(
        tmp_path / "b", precision=precision, data=real(1), max_error=0.15, targets=["tensorrt_rtx"],
        compute_capabilities=[capability],
    )  # fmt: skip
    record = bundle.manifest.targets["tensorrt_rtx"]
    assert record.low_bit == 6 and record.attention_precision == "fp16" and record.without is None
    assert bundle.manifest.attention.fused["tensorrt_rtx"] == 1


def test_a_plan_with_fp8_is_for_gpus_that_have_it(tmp_path: Path) -> None:
    bundle = deployed(tmp_path / "b", precision="fp8", max_error=0.15, targets=["tensorrt_rtx"])
    (engine,) = bundle.manifest.targets["tensorrt_rtx"].engines
    assert engine.compute_capabilities == ["SM89", "SM120"]
    with pytest.raises(UsageError, match=r"fp8 is for GPUs of compute capability 8\.9 and later, not SM80"):
        deployed(tmp_path / "c", precision="auto-fp8", max_error=0.15, compute_capabilities=["SM80", "SM89"],
                 targets=["tensorrt_rtx"])  # fmt: skip
    assert not (tmp_path / "c").exists()


def test_what_costs_too_much_is_refused_or_kept_in_fp32(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"int4 misses the requirement: .* precision auto-int4, which keeps"):
        deployed(tmp_path / "b", Outliers, "int4", max_error=0.05)
    assert not (tmp_path / "b").exists()
    whole = of(deployed(tmp_path / "balanced", Outliers, "int4", max_error=0.05, data=real()))
    assert whole.kept == {} and any(product.balanced for product in whole.products)
    some = of(deployed(tmp_path / "some", Outliers, "auto-int4", max_error=0.05))
    assert 0 < len(some.kept) < 6 and some.error <= 0.05
    assert attnforge.verify(tmp_path / "some", ["onnxruntime-cpu", "openvino"]).passed


def test_weights_without_whole_blocks_are_refused(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up, self.norm = nn.Linear(WIDTH, 72), nn.Linear(72, WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm(self.up(self.down(x).relu()))
            return y

    quantised = of(deployed(tmp_path / "b", Odd, "int4", max_error=0.2))
    assert len(quantised.products) == 1

    class Odder(Odd):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm(self.up(x[..., :72].repeat(1, 1, 2)[..., :72]))
            return y

    with pytest.raises(UsageError, match=r"worth 4 bits: .* weights, in more than one block of 32 channels"):
        deployed(tmp_path / "c", Odder, "int4", max_error=0.2)


# --- attention in fp8 -------------------------------------------------------------------------------------------------

STATIC = 48
"""Number of tokens of attention that is fused in fp8."""


def fixed(
    folder: Path, kind: Callable[[], nn.Module] = Block, tokens: int = STATIC, precision: str = "fp8", **options: Any
) -> Bundle:
    """A deployment with a static number of tokens and a dynamic batch, with real data."""
    module, _ = made(kind)
    generator = torch.Generator().manual_seed(1)
    args, *data = (
        (torch.randn(2, tokens, WIDTH, generator=generator) * 2,) for _ in range(1 + options.pop("count", 3))
    )
    options = {"targets": ["onnxruntime"], "tune": False, "max_error": 0.2, "data": data, **options}
    shapes = {"x": {0: Dim("batch", min=1, max=4)}}
    return attnforge.deploy(module, args, folder, shapes, precision, **options)


class Masked(Block):
    """The same block, whose queries see no later token."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before_attention(x)
        query, key, value = (
            linear(normed).unflatten(-1, (4, -1)).transpose(1, 2)
            for linear in (self.attention.query_proj, self.attention.key_proj, self.attention.value_proj)
        )
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, seen)
        x = x + self.down(nn.functional.gelu(self.up(mixed.transpose(1, 2).flatten(2))))
        logits: Tensor = self.head(self.last(x))
        return logits


@pytest.mark.parametrize("kind", [Block, Masked])
def test_attention_over_static_tokens_is_in_fp8_and_right_on_every_backend_here(
    tmp_path: Path, kind: Callable[[], nn.Module]
) -> None:
    bundle = fixed(tmp_path / "b", kind)
    quantised = of(bundle)
    (error,) = quantised.attention.values()
    assert quantised.kept == {} and 5e-3 < error < 0.1
    assert "1 of 1 attention sites" in quantised.steps[0]
    lowered = bundle.manifest.attention.details[0].targets["onnxruntime"]
    assert lowered.form == "MatMul·Softmax·MatMul" and "in fp8, for parity" in lowered.why
    report = attnforge.verify(bundle, ["onnxruntime-cpu", "openvino"])
    assert report.passed and report.warnings == []


@pytest.mark.parametrize("tokens", [STATIC, 5])
def test_attention_in_fp8_matches_the_formulas(tokens: int) -> None:
    """As in eager: query, key and value with one scale each, and the softmax's output with 1/448. Over few keys nothing
    is rounded, because TensorRT does not fuse that."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((2, 3, tokens, 16)).astype(np.float32) * 3 for _ in range(3))

    class Alone(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(query, key, value)

    inputs = tuple(map(torch.from_numpy, (query, key, value)))
    model = capture(Alone(), inputs, None, PRECISIONS["fp32"]).model
    sites = canonicalize(model).sites
    feeds = dict(zip([str(x.name) for x in model.graph.inputs], (query, key, value), strict=True))
    chosen, kept = sites_for_fp8(model, sites, [feeds], is_real=True)
    if tokens < STATIC:
        assert chosen == [] and "over at least 32 keys, not 5" in kept[sites[0].name]
        return
    round_operands(model, chosen)
    (result,) = as_it_is(decomposed(model, sites))(feeds).values()

    def rounded(x: Array) -> Array:
        scale = 1.2 * float(np.abs(x).max()) / 448
        return in_fp8(x.astype(np.float64) / scale) * scale

    scores = rounded(query) @ rounded(key).swapaxes(-1, -2) / 4
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    wanted = (in_fp8(weights / weights.sum(axis=-1, keepdims=True) * 448) / 448) @ rounded(value)
    assert relative_error(result.astype(np.float64), wanted) < 1e-2
    exact = Alone()(*inputs).numpy()
    assert chosen[0].error == pytest.approx(relative_error(result, exact), rel=1e-3)


@pytest.mark.parametrize("capability", ["SM89", "SM120"])
@pytest.mark.parametrize("kind", [Block, Masked])
def test_tensorrt_fuses_attention_in_fp8(tmp_path: Path, capability: str, kind: Callable[[], nn.Module]) -> None:
    bundle = fixed(tmp_path / "b", kind, targets=["tensorrt_rtx"], compute_capabilities=[capability])
    record, attention = bundle.manifest.targets["tensorrt_rtx"], bundle.manifest.attention
    assert record.low_bit == len(of(bundle).products)
    assert record.low_bit_attention == attention.fused["tensorrt_rtx"] == 1
    assert attention.details[0].targets["tensorrt_rtx"].why.startswith("in fp8")


def test_with_dynamic_tokens_the_certificate_says_why_attention_is_not_in_fp8(tmp_path: Path) -> None:
    bundle = deployed(tmp_path / "b", precision="fp8", data=real(1), max_error=0.15, targets=["tensorrt_rtx"])
    (site,) = bundle.manifest.attention.details
    assert "not in fp8: TensorRT fuses attention in fp8 only if" in site.targets["tensorrt_rtx"].why
    assert "are static" in of(bundle).kept[site.site] and of(bundle).attention == {}
    assert bundle.manifest.targets["tensorrt_rtx"].low_bit_attention is None


def test_without_data_attention_stays_in_16_bits(tmp_path: Path) -> None:
    quantised = of(fixed(tmp_path / "b", data=[]))
    assert quantised.attention == {} and ["ranges from real data" in why for why in quantised.kept.values()] == [True]


def test_auto_takes_attention_out_of_fp8_if_it_costs_too_much(tmp_path: Path) -> None:
    class Sharp(Block):
        """Its softmax selects one key of many, so that the rounding of scores decides which."""

        def __init__(self) -> None:
            super().__init__()
            with torch.no_grad():
                self.attention.query_proj.weight *= 100

    with pytest.raises(BuildError, match="fp8 misses the requirement"):
        fixed(tmp_path / "a", Sharp, max_error=0.04)
    quantised = of(fixed(tmp_path / "b", Sharp, precision="auto-fp8", max_error=0.04))
    assert quantised.attention == {} and len(quantised.kept) < 7 and quantised.error <= 0.04
