"""Caches in int8: a quarter of the bytes, within the allowed error, or refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file, save_file

import attnforge
from attnforge.arrays import Array
from attnforge.bundle import CANONICAL, REFERENCE_OUTPUTS, Bundle
from attnforge.errors import BuildError, BundleError, UnavailableError, UnknownNameError, UsageError
from attnforge.export.diagnosis.diagnose import diagnose
from attnforge.export.graphs.build import Builder, typed
from attnforge.export.graphs.qdq import InInt8
from attnforge.export.graphs.saving import load_graph
from attnforge.report.attention_maps import attention_maps
from attnforge.runtime.backends.registry import why_not_here
from attnforge.runtime.parity.budget import relative_error
from tests.support.bundles import rewrite
from tests.support.decoders import KINDS, PLACES, DeployDecoder, decoder_example, eager, ids

ALLOWED = 0.05
DATA = [[ids(2, 20, seed=seed)] for seed in range(4)]
LOW: dict[str, Any] = {"cache_tokens": PLACES, "cache_precision": "int8", "data": DATA, "max_error": ALLOWED}


def deploy(kind: str, folder: Path, precision: str = "fp32", **options: Any) -> Bundle:
    module, args, shapes = decoder_example(kind)
    options = {"targets": ["onnxruntime"], "tune": False, **LOW, **options}
    return attnforge.deploy(module, args, folder, shapes, precision, **options)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return deploy("rotary", tmp_path_factory.mktemp("int8") / "b")


@pytest.mark.parametrize("kind", KINDS)
def test_a_quarter_of_the_bytes_within_the_allowed_error(kind: str, decoders: DeployDecoder, tmp_path: Path) -> None:
    bundle = deploy(kind, tmp_path / "b")
    decoding, record = bundle.manifest.decoding, bundle.manifest.quantised
    assert decoding is not None and record is not None and bundle.manifest.precision == "fp32"
    assert {spec.dtype for spec in decoding.tensors} == {"int8"}
    assert list(record.caches) == [cache.site for cache in decoding.caches] and record.products == []
    assert 0 < record.error <= ALLOWED and all(0 < error < ALLOWED for error in record.caches.values())
    backends = ["onnxruntime-cpu"] + ["openvino"] * (why_not_here("openvino") is None)
    verified = attnforge.verify(bundle, backends)
    assert verified.warnings == []  # no warning of drift in fp32, because the rounding was requested
    for name, report in verified.backends.items():
        assert report.passed, (name, report.failures)
        assert "caches" in report.outputs
    tokens = ids(2, PLACES, seed=9)
    with (
        attnforge.load(bundle, "onnxruntime-cpu") as low,
        attnforge.load(decoders(kind, "fp32"), "onnxruntime-cpu") as high,
    ):
        rounded, plain = low.decoder(2), high.decoder(2)
        assert 4 * rounded.nbytes == plain.nbytes
        answers = [rounded.prefill(tokens[:, :10])]
        answers += [rounded.step(tokens[:, position]) for position in range(10, PLACES)]
    assert 0 < relative_error(np.stack(answers, 1), eager(kind, tokens)[:, 9:]) < 2 * ALLOWED


def test_the_kernel_reads_int8_itself(deployed: Bundle) -> None:
    model = load_graph(deployed, deployed.manifest.targets["onnxruntime"].model)
    kernels = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    assert len(kernels) == 2
    for node in kernels:
        scales = [node.inputs[i] for i in (12, 13)]
        caches = [node.inputs[i] for i in (3, 4)]
        assert [cache.dtype for cache in caches if cache is not None] == [ir.DataType.INT8] * 2
        sizes = [scale.shape.numpy() for scale in scales if scale is not None and scale.shape is not None]
        assert sizes == [(32,), (32,)]  # two heads of 16
        assert node.attributes.get_int("do_rotary") == 1
    assert not [node for node in model.graph if node.op_type in ("QuantizeLinear", "DequantizeLinear")]


def test_a_gpu_does_not_run_them(deployed: Bundle) -> None:
    """It never has; `test_decoder` has the caches that a GPU runs."""
    assert deployed.manifest.decoding is not None and not deployed.manifest.decoding.cuda
    with pytest.raises(UnavailableError, match=r"no step for CUDA: .* or its caches are in 8 bits"):
        attnforge.load(deployed, "onnxruntime-cuda")


def test_tensorrt_has_no_caches_in_int8(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="tensorrt_rtx supports caches in fp32, fp16 or bf16, not int8"):
        deploy("rotary", tmp_path / "b", targets=["tensorrt_rtx"])


def test_with_low_bit_products(tmp_path: Path) -> None:
    bundle = deploy("rotary", tmp_path / "b", "int8", max_error=0.2)
    record = bundle.manifest.quantised
    assert record is not None and record.products and record.caches
    assert attnforge.verify(bundle, ["onnxruntime-cpu"]).passed


def test_a_cache_whose_rounding_error_is_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"an int8 cache misses the requirement: .*with 1e-06 allowed"):
        deploy("rotary", tmp_path / "b", max_error=1e-6)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"data": []}, UsageError, "no real inputs were given"),
        ({"max_error": None}, UsageError, "no limit was given"),
        ({"cache_tokens": None}, UsageError, "there is no cache; give cache_tokens"),
        ({"cache_precision": "int4"}, UnknownNameError, "int8"),
        ({"precision": "fp16"}, UsageError, "need fp32 or quantised products, not fp16"),
        ({"precision": "auto"}, UsageError, "not auto"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[Exception], words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        deploy("rotary", tmp_path / "b", **options)
    assert not (tmp_path / "b").exists()


def scale_off(model: ir.Model, index: int) -> None:
    """Change a scale of the first layer by a tenth."""
    node = next(node for node in model.graph if node.op_type == "GroupQueryAttention")
    scale = node.inputs[index]
    producer = scale.producer() if scale is not None else None
    numbers = ir.convenience.get_const_tensor(scale) if scale is not None else None
    assert producer is not None and numbers is not None
    producer.attributes["value"] = ir.AttrTensor("value", ir.tensor((1.1 * numbers.numpy()).astype(np.float32)))


@pytest.mark.parametrize("index", [12, 13])
def test_a_wrong_scale_is_detected_in_the_caches(deployed: Bundle, index: int, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(deployed.path, tmp_path / "b"))
    file = folder / deployed.manifest.targets["onnxruntime"].model
    model = ir.load(file)
    scale_off(model, index)
    ir.save(model, file)
    report = attnforge.verify(rewrite(folder), ["onnxruntime-cpu"]).backends["onnxruntime-cpu"]
    assert not report.passed
    names = {failure.output for failure in report.failures}
    assert ("key_cache.0" if index == 12 else "value_cache.0") in names


def without_scale(stored: dict[str, Array]) -> None:
    del stored["value_cache.1/scale"]


def of_another_shape(stored: dict[str, Array]) -> None:
    stored["value_cache.1/scale"] = np.ones(3, np.float32)


def of_zeros(stored: dict[str, Array]) -> None:
    stored["value_cache.1/scale"] *= 0


@pytest.mark.parametrize("change", [without_scale, of_another_shape, of_zeros])
def test_caches_are_not_verified_without_their_scale(
    deployed: Bundle, change: Callable[[dict[str, Array]], None], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(deployed.path, tmp_path / "b"))
    stored = load_file(folder / REFERENCE_OUTPUTS)
    change(stored)
    save_file(stored, folder / REFERENCE_OUTPUTS)
    with pytest.raises(BundleError, match=r"value_cache\.1"):
        attnforge.verify(rewrite(folder), ["onnxruntime-cpu"])


def test_maps_say_that_the_kernel_rounds(deployed: Bundle) -> None:
    maps = attention_maps(deployed)
    assert len(maps.left_out) == 2 and not list(maps)
    assert all("rounds its keys to int8" in why for why in maps.left_out.values())


def test_the_rounding_of_a_models_author_is_no_cache() -> None:
    """Products around Q/DQ of a model's author, which have their own scale and zero point."""
    op = Builder()
    x = typed(ir.Value(name="x"), ir.DataType.FLOAT, [1, 2, 3, 4])
    restored = InInt8.of(op, x, np.full((2, 1, 4), 0.5, np.float32)).restored(op)
    rounding = InInt8.before(restored)
    assert rounding is not None and rounding.source is x and np.all(rounding.scale == 0.5)
    product = restored.producer()
    assert product is not None
    product.metadata_props.clear()
    assert InInt8.before(restored) is None


def test_diagnosis_reads_a_step_with_caches_in_int8(deployed: Bundle) -> None:
    assert diagnose(deployed).healthy
    assert any(node.op_type == "QuantizeLinear" for node in load_graph(deployed, CANONICAL).graph)
