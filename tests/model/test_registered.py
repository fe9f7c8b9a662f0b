"""Deploying every registered model: parity, recognised attention, and fusion or the reason why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attnforge
from attnforge.arrays import Array
from attnforge.bundle import Bundle, Certificate
from attnforge.export.attention.counted import counted
from attnforge.model import MODELS, build_model
from attnforge.model.attention import MultiHeadSelfAttention
from attnforge.runtime.backends.registry import why_not_here
from tests.support.bundles import IN_BF16, IN_FP32, Deploy, example_of

BILINEAR = [name for name in MODELS if name != "additive-attention"]
TWO_LAYERS = ("patch-attention-digits", "transformer-encoder", "decoder", "vit")
SITES = {name: 2 if name in TWO_LAYERS else 1 for name in MODELS} | {"decoder-digits": 3}
PRECISIONS = [
    (name, precision)
    for precision, names in {"fp16": MODELS, "fp32": IN_FP32, "bf16": IN_BF16}.items()
    for name in names
]


@pytest.mark.parametrize(("name", "precision"), PRECISIONS)
def test_a_deployed_model_is_the_same_function(registered: Deploy, name: str, precision: str) -> None:
    report = attnforge.verify(registered(name, precision))
    assert report.passed, {name: backend.failures for name, backend in report.backends.items()}
    backend = report.backends["onnxruntime-cpu"]
    assert backend.cases >= 5 and backend.error <= backend.budget


@pytest.mark.skipif(why_not_here("openvino") is not None, reason=str(why_not_here("openvino")))
@pytest.mark.parametrize(("name", "precision"), PRECISIONS)
def test_openvino_is_the_same_function(registered: Deploy, name: str, precision: str) -> None:
    report = attnforge.verify(registered(name, precision), ["openvino"])
    assert report.passed, [(failure.case, failure.reason) for failure in report.backends["openvino"].failures]
    assert report.backends["openvino"].cases >= 5


def fused(certificate: Certificate, target: str) -> str:
    """Describe how many sites `target` fuses and why not the others, for the message of a failing test."""
    reasons = [site.reason for site in certificate.unfused if site.target == target]
    return f"{certificate.fused[target]} of {certificate.sites} {reasons}"


@pytest.mark.parametrize("name", BILINEAR)
def test_attention_is_recognised_and_fused_in_fp16(registered: Deploy, name: str) -> None:
    certificate = registered(name, "fp16").manifest.attention
    assert certificate.sites == certificate.canonical == len(certificate.details) == SITES[name]
    if name != "worked-example":  # may fuse: no kernel is made for three tokens of three features
        assert fused(certificate, "tensorrt_rtx") == f"{SITES[name]} of {SITES[name]} []"
    for record in certificate.details:
        assert record.canonical and record.reason is None and record.written_as
        for target, made in record.targets.items():
            assert made.form and made.why
            assert (made.kernel is None) == (made.reason is not None), target


@pytest.mark.parametrize("name", MODELS)
def test_every_softmax_that_runs_is_in_a_site(registered: Deploy, name: str) -> None:
    module, args, _ = example_of(name)
    with torch.no_grad(), counted(module) as ran:
        module(*args)
    certificate = registered(name, "fp16").manifest.attention
    assert (ran.total(), certificate.other_softmaxes) == (certificate.sites, {})


@pytest.mark.parametrize("name", IN_BF16)
def test_attention_is_fused_in_bf16(registered: Deploy, name: str) -> None:
    certificate = registered(name, "bf16").manifest.attention
    assert fused(certificate, "tensorrt_rtx") == "1 of 1 []"


@pytest.mark.parametrize("name", IN_FP32)
def test_fp32_has_no_fused_kernel_and_says_so(registered: Deploy, name: str) -> None:
    certificate = registered(name, "fp32").manifest.attention
    assert certificate.canonical == certificate.sites == SITES[name]
    assert certificate.fused["tensorrt_rtx"] == 0
    reasons = [site.reason for site in certificate.unfused if site.target == "tensorrt_rtx"]
    assert len(reasons) == SITES[name]
    assert all("no fused attention kernel for float; deploy in fp16 or bf16" in reason for reason in reasons)


@pytest.mark.parametrize("name", IN_FP32[:4])
def test_onnxruntime_runs_unmasked_attention_as_one_kernel(registered: Deploy, name: str) -> None:
    certificate = registered(name, "fp32").manifest.attention
    assert fused(certificate, "onnxruntime") == f"{SITES[name]} of {SITES[name]} []"
    assert "MultiHeadAttention" in str(certificate.details[0].targets["onnxruntime"].kernel)


def test_an_additive_score_gets_a_reason(registered: Deploy) -> None:
    certificate = registered("additive-attention", "fp16").manifest.attention
    assert (certificate.sites, certificate.canonical) == (1, 0)
    assert certificate.fused == dict.fromkeys(certificate.fused, 0)
    assert {site.target for site in certificate.unfused} == set(certificate.fused)
    for reason in (certificate.details[0].reason, *(site.reason for site in certificate.unfused)):
        assert reason is not None and "inner product" in reason


def test_a_bilinear_score_is_fused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"feature_dim": 24, "key_dim": 20, "value_dim": 16, "query_dim": 12}
    module, args, shapes = build_model("general-attention", score="general", **options)
    bundle = attnforge.deploy(module, args, tmp_path / "bundle", shapes, "fp16", tune=False)
    assert fused(bundle.manifest.attention, "tensorrt_rtx") == "1 of 1 []"
    assert attnforge.verify(bundle).passed


def test_hard_alignment_gets_a_reason(tmp_path: Path) -> None:
    module, args, shapes = build_model("general-attention", align="hard")
    bundle = attnforge.deploy(module, args, tmp_path / "bundle", shapes, targets=["onnxruntime"], tune=False)
    certificate = bundle.manifest.attention
    assert (certificate.sites, certificate.canonical, certificate.fused) == (1, 0, {"onnxruntime": 0})
    assert "the alignment is hard" in str(certificate.details[0].reason)
    assert "the alignment is hard" in certificate.unfused[0].reason
    # If two scores are nearly equal, the last bit decides, so only the example's output is compared.
    with torch.no_grad():
        expected = module(*args).numpy()
    output = run(bundle, *(arg.numpy() for arg in args))
    assert np.linalg.norm(output - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("name", MODELS)
def test_every_bundle_has_its_plan(registered: Deploy, name: str) -> None:
    bundle = registered(name, "fp16")
    (engine,) = bundle.manifest.targets["tensorrt_rtx"].engines
    file = bundle.file(engine.file)
    assert file.name == "engine.tensorrt_rtx.plan"
    assert file.stat().st_size == engine.size > 1000
    assert engine.layers > 0 and engine.compute_capabilities == ["portable"]


def run(bundle: Bundle, *inputs: Array) -> Array:
    with attnforge.load(bundle, "onnxruntime-cpu") as session:
        output: Array = session(*inputs)
    return output


def test_s4_the_worked_example_has_its_known_values(registered: Deploy) -> None:
    tokens = np.array([[1, 0, 1, 0], [0, 2, 0, 2], [1, 1, 1, 1]], np.float32)
    expected = [[1.936621, 6.683105, 1.595068], [1.999994, 7.963992, 0.053976], [1.999705, 7.759892, 0.358389]]
    np.testing.assert_allclose(run(registered("worked-example", "fp32"), tokens), expected, rtol=0, atol=1e-6)
    half = run(registered("worked-example", "fp16"), tokens.astype(np.float16))
    assert half.dtype == np.float16
    np.testing.assert_allclose(half, np.array(expected).astype(np.float16), rtol=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["multi-head-self-attention", "parameter-free-attention"])
def test_s11_permuting_the_tokens_permutes_the_outputs(registered: Deploy, name: str, precision: str) -> None:
    bundle = registered(name, precision)
    width = bundle.manifest.inputs[0].dims[-1]
    assert isinstance(width, int)
    rng = np.random.default_rng(5)
    x = rng.standard_normal((2, 37, width)).astype(np.float16 if precision == "fp16" else np.float32)
    order = rng.permutation(37)
    output, permuted = run(bundle, x), run(bundle, np.ascontiguousarray(x[:, order]))
    tolerance = 1e-3 if precision == "fp16" else 1e-6
    assert np.linalg.norm(permuted.astype(np.float64) - output[:, order]) <= tolerance * np.linalg.norm(output)
    assert np.linalg.norm(permuted.astype(np.float64) - output) > 0.1 * np.linalg.norm(output)


def test_s13a_fuses_with_its_factor_after_the_softmax(registered: Deploy) -> None:
    (record,) = registered("post-softmax-scale", "fp16").manifest.attention.details
    assert record.written_as.index("Softmax") < record.written_as.index("Div")
    assert record.targets["tensorrt_rtx"].kernel


def test_s13b_keeps_its_wrong_answer(registered: Deploy) -> None:
    bundle = registered("reshape-without-transpose", "fp32")
    module, _, _ = example_of("reshape-without-transpose")
    right = MultiHeadSelfAttention(128, 128, 128, num_heads=4)
    right.load_state_dict(module.state_dict())
    x = torch.randn(3, 22, 128, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wrong_answer, right_answer = module(x).numpy(), right(x).numpy()
    output = run(bundle, x.numpy())
    assert np.linalg.norm(output - wrong_answer) <= 1e-6 * np.linalg.norm(wrong_answer)
    assert np.linalg.norm(output - right_answer) > 0.3 * np.linalg.norm(right_answer)


def test_s8_accepts_images_of_other_sizes(registered: Deploy) -> None:
    bundle = registered("patch-attention", "fp32")
    module, _, _ = example_of("patch-attention")
    for height, width in ((8, 64), (20, 12)):
        image = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(height))
        with torch.no_grad():
            expected = module(image).numpy()
        output = run(bundle, image.numpy())
        assert output.shape == (2, height * width // 16, 192)
        assert np.linalg.norm(output - expected) <= 1e-6 * np.linalg.norm(expected)


class TorchAttention(nn.Module):
    """PyTorch's own module with padding, where a sample that is all padding has nothing to attend to."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        output: Tensor = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        return output


def test_torchs_own_module_with_padding(tmp_path: Path) -> None:
    batch, tokens = Dim("batch", min=1, max=4), Dim("tokens", min=1, max=16)
    args = (torch.randn(2, 9, 32), torch.arange(9) >= torch.tensor([[9], [4]]))
    shapes = {"x": {0: batch, 1: tokens}, "padding": {0: batch, 1: tokens}}
    bundle = attnforge.deploy(TorchAttention(), args, tmp_path / "bundle", shapes, "fp16", tune=False)
    assert fused(bundle.manifest.attention, "tensorrt_rtx") == "1 of 1 []"
    report = attnforge.verify(bundle)
    assert report.passed, report.backends["onnxruntime-cpu"].failures
