"""The canonical node, lowered for each target: the same function, and fused if possible.

The TensorRT form is tested twice: the real builder shows whether it fuses, and ONNX Runtime, which can run it because
it is plain ONNX, whether its arithmetic is right.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.graphs.types import widen
from attnforge.export.lowering import onnxruntime as for_onnxruntime
from attnforge.export.lowering import tensorrt as for_tensorrt
from attnforge.export.lowering.attention import Lowered
from attnforge.export.sources.torch_module import capture
from attnforge.export.tensorrt.build import Plan
from attnforge.model import build_model
from attnforge.model.attention import MultiHeadSelfAttention
from attnforge.precision import precision_named
from tests.support.attends import CPU, OPT, SIZES, Attends, agree, run
from tests.support.plans import build


def for_trt(attends: Attends) -> tuple[ir.Model, Lowered]:
    model, sites = attends.model()
    (lowered,) = for_tensorrt.lower(model, sites)
    return model, lowered


def arithmetic(attends: Attends, sizes: dict[str, int], seed: int = 0) -> None:
    """Run TensorRT's graph in fp32: whatever the 16-bit form does to sizes and orders, it must do exactly."""
    model, _ = for_trt(attends)
    if attends.precision != "fp32":
        widen(model)
        narrowed = model.graph.outputs[0].producer()
        assert narrowed is not None and narrowed.op_type == "Cast" and narrowed.inputs[0] is not None
        model.graph.outputs[0] = narrowed.inputs[0]  # before it is rounded
    feeds = attends.feeds(sizes, seed)
    half = {"fp16": np.float16, "fp32": np.float32}[attends.precision]
    given = {name: array if array.dtype == bool else array.astype(half) for name, array in feeds.items()}
    agree(run(model, given), attends.expected(feeds))


def plan(attends: Attends, tmp_path: Path) -> tuple[Plan, Lowered]:
    model, lowered = for_trt(attends)
    ir.save(model, tmp_path / "model.onnx")
    return build(tmp_path / "model.onnx", "tensorrt_rtx", attends.specs(), attends.precision), lowered


LONE = Attends(batch=1, heads=1, precision="fp16")

FUSED: dict[str, Attends] = {
    "heads": Attends(precision="fp16"),
    "no scale": Attends(precision="fp16", scale=1.0),
    "static": Attends(batch=2, n_q=13, n_k=11, precision="fp16"),
    "wider values": Attends(d_k=32, d_v=64, precision="fp16"),
    "narrower values": Attends(d_k=64, d_v=24, precision="fp16"),
    "heads of 3": Attends(d_k=3, d_v=3, precision="fp16"),
    "heads of 8 and 40": Attends(d_k=8, d_v=40, precision="fp16"),
    "heads of 256": Attends(heads=2, d_k=256, d_v=256, precision="fp16"),
    "heads of 100 and 256": Attends(heads=2, d_k=100, d_v=256, precision="fp16"),
    "one head, dynamic batch": Attends(heads=1, precision="fp16"),
    "a lone head, even": replace(LONE, n_q=12, n_k=7),
    "a lone head, odd": replace(LONE, n_q=13, n_k=7),
    "a lone head, dynamic": LONE,
    "a lone head, one query": replace(LONE, n_q=1),
    "a lone head of 20 and 12": replace(LONE, d_k=20, d_v=12),
    "a lone head, causal": replace(LONE, is_causal=True),
    "a lone head, mask of keys": replace(LONE, mask=(1, 1, 1, "m")),
    "a lone head, mask of both": replace(LONE, mask=(1, 1, "n", "m")),
    "a lone head, bias of keys": replace(LONE, mask=(1, 1, 1, "m"), bias=True),
    "a lone head, bias of both": replace(LONE, mask=(1, 1, "n", "m"), bias=True),
    "one head, dynamic batch, bias": Attends(heads=1, mask=("batch", 1, "n", "m"), bias=True, precision="fp16"),
    "one head, dynamic batch, mask": Attends(heads=1, mask=("batch", 1, 1, "m"), precision="fp16"),
    "one head, dynamic batch, causal": Attends(heads=1, is_causal=True, precision="fp16"),
    "grouped heads": Attends(key_heads=2, precision="fp16"),
    "one key head": Attends(key_heads=1, precision="fp16"),
    "causal": Attends(n_k="n", is_causal=True, precision="fp16"),
    "causal, more keys than queries": Attends(is_causal=True, precision="fp16"),
    "mask": Attends(mask=("batch", 4, "n", "m"), precision="fp16"),
    "mask of keys": Attends(mask=("batch", 1, 1, "m"), precision="fp16"),
    "mask of queries and keys": Attends(mask=(1, 1, "n", "m"), precision="fp16"),
    "mask, NaN for silent rows": Attends(mask=(1, 1, "n", "m"), silent_rows="nan", precision="fp16"),
    "bias": Attends(mask=(1, 4, "n", "m"), bias=True, precision="fp16"),
    "bias, other head sizes": Attends(mask=(1, 4, "n", "m"), bias=True, d_k=20, d_v=48, precision="fp16"),
}


NOT_YET = {"one head, dynamic batch, bias": "the builder merges the check for queries without keys into the softmax"}


@pytest.mark.parametrize(
    "form",
    [pytest.param(f, marks=pytest.mark.xfail(strict=True, reason=NOT_YET[f])) if f in NOT_YET else f for f in FUSED],
)
def test_tensorrt_fuses_in_16_bits(form: str, tmp_path: Path) -> None:
    built, lowered = plan(FUSED[form], tmp_path)
    assert lowered.unfused is None
    assert built.kernel_of(lowered.node), f"{lowered.why}; the builder made {built.layers_of(lowered.node)}"


@pytest.mark.parametrize("form", ["heads", "wider values", "a lone head, odd", "mask of keys"])
def test_tensorrt_fuses_in_bfloat16(form: str, tmp_path: Path) -> None:
    built, lowered = plan(replace(FUSED[form], precision="bf16"), tmp_path)
    assert built.kernel_of(lowered.node)


@pytest.mark.parametrize("form", FUSED)
@pytest.mark.parametrize("sizes", range(len(SIZES)))
def test_the_tensorrt_form_computes_the_same(form: str, sizes: int) -> None:
    arithmetic(FUSED[form], SIZES[sizes])


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ("heads", "fuses in 16-bit types"),
        ("wider values", "heads of 32 and 64 zero-padded"),
        ("heads of 3", "heads of 3 and 3 zero-padded"),
        ("a lone head, odd", "written as two: half of the queries each"),
        ("a lone head, causal", "its mask differs by query"),
        ("a lone head, mask of keys", "half of the queries each"),
    ],
)
def test_tensorrts_choice_says_why(form: str, why: str) -> None:
    _, lowered = for_trt(FUSED[form])
    assert why in lowered.why


UNFUSED: dict[str, tuple[Attends, str]] = {
    "fp32": (Attends(), "no fused attention kernel for float; deploy in fp16 or bf16"),
    "fp32, a lone head with other sizes": (Attends(batch=1, heads=1, d_k=20, d_v=12), "no fused attention kernel"),
    "fp32, causal and static": (Attends(batch=1, n_q=9, n_k=9, is_causal=True), "no fused attention kernel"),
    "fp32, mask": (Attends(mask=("batch", 1, "n", "m")), "no fused attention kernel"),
    "fp32, grouped": (Attends(key_heads=2), "no fused attention kernel"),
    "heads of 257": (Attends(heads=2, d_k=257, d_v=257, precision="fp16"), "heads of 257 exceed"),
    "values of 320": (Attends(heads=2, d_v=320, precision="fp16"), "heads of 320 exceed"),
    "soft cap": (Attends(softcap=5.0, precision="fp16"), "a soft cap on the scores"),
}  # fmt: skip


@pytest.mark.parametrize("form", UNFUSED)
def test_what_tensorrt_does_not_fuse_builds_computes_and_has_a_reason(form: str, tmp_path: Path) -> None:
    attends, reason = UNFUSED[form]
    built, lowered = plan(attends, tmp_path)
    assert lowered.unfused is not None and reason in lowered.unfused
    assert built.data and built.kernel_of(lowered.node) is None
    for sizes in SIZES:
        arithmetic(attends, sizes)


@pytest.mark.parametrize("silent_rows", ["zero", "nan"])
def test_masks_have_the_same_meaning_with_attention_alone_in_fp16(silent_rows: str) -> None:
    """A number beyond fp16 stays finite: in fp32 it absorbs every score, so a fully masked row gets the mean."""
    attends = Attends(mask=("batch", 1, "n", "m"), bias=True, silent_rows=silent_rows)
    feeds = attends.feeds(OPT)
    for row, number in enumerate((-1e9, -np.inf, np.finfo(np.float32).min)):
        feeds["mask"][:, :, row] = number
        feeds["mask"][:, :, row + 3, ::2] = number
    expected = attends.expected(feeds)
    expected[:, :, [0, 2]] = feeds["value"].mean(2, keepdims=True)
    model, sites = attends.model()
    (lowered,) = for_tensorrt.lower(model, sites, ir.DataType.FLOAT16)
    assert lowered.unfused is None
    agree(run(model, feeds), expected, 1e-3)


class RelativePositions(nn.Module):
    """Swin's bias: read from a table by fixed positions. It has too many numbers for torch's exporter to fold it."""

    def __init__(self, tokens: int = 49, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(32 * heads, 3 * 32 * heads)
        self.table = nn.Parameter(torch.randn(2 * tokens - 1, heads))
        positions = torch.arange(tokens)
        self.index = nn.Buffer(positions[:, None] - positions[None] + tokens - 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, 32)).permute(2, 0, 3, 1, 4)
        tokens = self.index.shape[0]
        bias = self.table[self.index.view(-1)].view(tokens, tokens, -1).permute(2, 0, 1)[None]
        output: torch.Tensor = torch.softmax(query @ key.mT * 32**-0.5 + bias, -1) @ value
        return output


def test_a_bias_computed_from_constants_is_a_weight_for_tensorrt(tmp_path: Path) -> None:
    """TensorRT-RTX 1.7 fuses no attention whose bias it has to compute, even from constants."""
    torch.manual_seed(0)
    module, x = RelativePositions().eval(), torch.randn(2, 49, 128)
    captured = capture(module, (x,), ({0: torch.export.Dim("batch", min=1, max=4)},), precision_named("fp16"))
    sites = canonicalize(captured.model).sites
    (node,) = (node for node in captured.model.graph if node.op_type == "Attention")
    assert node.inputs[3] is not None and node.inputs[3].producer() is not None, "torch's exporter folds it now"
    (lowered,) = for_tensorrt.lower(captured.model, sites)
    file = tmp_path / "model.onnx"
    ir.save(captured.model, file)
    assert build(file, "tensorrt_rtx", captured.inputs, "fp16").kernel_of(lowered.node) is not None
    exact = module.half().double()(x.half().double()).detach().numpy()
    agree(run(captured.model, {"x": x.half().numpy()}), exact, 2e-3)


def test_no_attention_operator_is_left_for_tensorrt() -> None:
    for attends in FUSED.values():
        model, _ = for_trt(attends)
        assert not [node for node in model.graph if node.op_type == "Attention"]


# ONNX Runtime


@pytest.mark.parametrize("form", CPU)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_onnxruntime_form_computes_the_same(form: str, precision: str) -> None:
    attends = replace(CPU[form], precision=precision)
    for sizes in SIZES:
        model, sites = attends.model()
        for_onnxruntime.lower(model, sites, OPT)
        feeds = attends.feeds(sizes)
        half = np.float16 if precision == "fp16" else np.float32
        given = {name: array if array.dtype == bool else array.astype(half) for name, array in feeds.items()}
        output = run(model, given)
        assert output.dtype == half
        agree(output, attends.expected(feeds), 1e-6 if precision == "fp32" else 5e-4)


@pytest.mark.parametrize("form", ["heads", "one head", "a lone head", "wider values", "many tokens"])
def test_heads_one_after_another_compute_the_same(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(for_onnxruntime, "MANY_BYTES", 0)
    monkeypatch.setattr(for_onnxruntime, "MANY_SCORES", 0)
    for sizes in SIZES:
        model, sites = CPU[form].model()
        (lowered,) = for_onnxruntime.lower(model, sites, OPT)
        feeds = CPU[form].feeds(sizes)
        agree(run(model, feeds), CPU[form].expected(feeds), 1e-6)
        nodes = [node.name for node in model.graph if node.op_type == "MultiHeadAttention"]
        apart = lowered.form == for_onnxruntime.HEAD_AFTER_HEAD
        assert len(nodes) == (CPU[form].heads if apart else 1) and lowered.node in nodes


def test_a_projection_is_made_head_by_head_where_all_at_once_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor has the queries, keys or values of all heads, and the weights are the same numbers."""
    module, args, shapes = build_model("multi-head-self-attention")
    captured = capture(module, args, shapes, precision_named("fp32"))
    sites = canonicalize(captured.model).sites
    assert isinstance(module, MultiHeadSelfAttention)
    widths = (module.query_proj.out_features, module.value_proj.out_features)
    for least, apart in ((2**60, False), (0, True)):
        monkeypatch.setattr(for_onnxruntime, "MANY_BYTES", least)
        monkeypatch.setattr(for_onnxruntime, "MANY_SCORES", 0)
        model = captured.model.clone()
        (lowered,) = for_onnxruntime.lower(model, sites, {"batch": 2, "tokens": 48})
        assert (lowered.form == for_onnxruntime.HEAD_AFTER_HEAD) == apart, lowered
        products = [node for node in model.graph if node.op_type == "MatMul"]
        assert len(products) == (3 * module.num_heads if apart else 3)
        whole = [value for node in model.graph for value in node.outputs if value.shape and value.shape[-1] in widths]
        assert len(whole) == (1 if apart else 4)  # the output, which is concatenated from the heads
        x = np.random.default_rng(0).standard_normal((3, 5, module.input_dim), np.float32)
        agree(run(model, {"x": x}), module.double()(torch.from_numpy(x).double()).detach().numpy(), 1e-6)
        module.float()


@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_group_norms_of_a_signal_that_hardly_varies_have_no_nan(offset: float) -> None:
    """ONNX Runtime's own implementation has NaN: wav2vec2 turned a constant signal into NaN."""
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.GroupNorm(2, 4), nn.GroupNorm(4, 4)).eval(), torch.randn(2, 4, 3000) * 1e-3 + offset
    shapes = ({0: torch.export.Dim("batch", min=1, max=4)},)
    captured = capture(module, (x,), shapes, precision_named("fp32"))
    assert sum(node.op_type == "GroupNormalization" for node in captured.model.graph) == 2
    for_onnxruntime.lower(captured.model, [], OPT)
    signals = torch.cat([x, torch.full_like(x, offset)])
    exact = module.double()(signals.double()).detach().numpy()
    agree(run(captured.model, {captured.inputs[0].name: signals.numpy()}), exact, 1e-5 if offset == 0 else 1e-2)


@pytest.mark.parametrize("sizes", [(4, 1024), (4096,)])
def test_group_norms_add_in_two_steps(sizes: tuple[int, ...]) -> None:
    """As MobileViTv2's, over all channels: the 262,144 squares err by three hundred times as much if they are added one
    by one."""
    torch.manual_seed(0)
    module, x = nn.GroupNorm(1, 64).eval(), torch.randn(1, 64, *sizes)
    x[:, ::16] *= 100
    captured = capture(module, (x,), None, precision_named("fp32"))
    for_onnxruntime.lower(captured.model, [], OPT)
    exact = module.double()(x.double()).detach().numpy()
    agree(run(captured.model, {captured.inputs[0].name: x.numpy()}), exact, 1e-6)


def test_on_cuda_the_types_stay_those_of_the_graph() -> None:
    attends = Attends(precision="fp16")
    kinds = {}
    for device in ("cpu", "cuda"):
        model, sites = attends.model()
        for_onnxruntime.lower(model, sites, OPT, device=device)
        kinds[device] = {value.dtype for node in model.graph for value in node.outputs if value.dtype is not None}
        assert model.graph.outputs[0].dtype == ir.DataType.FLOAT16
    assert ir.DataType.FLOAT in kinds["cpu"] and ir.DataType.FLOAT not in kinds["cuda"]


@pytest.mark.parametrize(
    ("form", "fused"),
    [("a lone head", True), ("many tokens", True), ("mask", False), ("causal", False), ("soft cap", False)],
)
def test_onnxruntimes_choice_says_why(form: str, fused: bool) -> None:
    model, sites = CPU[form].model()
    (lowered,) = for_onnxruntime.lower(model, sites, OPT)
    assert (lowered.unfused is None) == fused
    assert lowered.why and lowered.site == "site"
    assert lowered.node in {node.name for node in model.graph}
    assert ("com.microsoft" in model.graph.opset_imports) == fused


# Any sizes


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    attends=st.builds(
        Attends,
        batch=st.sampled_from(["batch", 1, 2]),
        heads=st.sampled_from([1, 2, 4]),
        key_heads=st.sampled_from([None, None, 1]),
        n_q=st.sampled_from(["n", 1, 2, 7]),
        n_k=st.sampled_from(["m", "n", 1, 5]),
        d_k=st.integers(1, 40),
        d_v=st.integers(1, 40),
        is_causal=st.booleans(),
        scale=st.sampled_from([1.0, 0.3125]),  # exact in 16 bits
        precision=st.sampled_from(["fp16", "fp32"]),
    ),
    mask=st.sampled_from(["none", "keys", "full", "bias"]),
    sizes=st.fixed_dictionaries({"batch": st.integers(1, 3), "n": st.integers(1, 9), "m": st.integers(1, 9)}),
)
def test_both_forms_compute_the_same_at_any_sizes(attends: Attends, mask: str, sizes: dict[str, int]) -> None:
    shape: tuple[int | str, ...] = (attends.batch, attends.heads, attends.n_q, attends.n_k)
    if mask != "none":
        shape = (1, 1, 1, attends.n_k) if mask == "keys" else shape
        attends = replace(attends, mask=shape, bias=mask == "bias", is_causal=False, silent_rows="nan")
    arithmetic(attends, sizes)
    plain = replace(attends, precision="fp32")
    model, sites = plain.model()
    for_onnxruntime.lower(model, sites, OPT)
    feeds = plain.feeds(sizes)
    agree(run(model, feeds), plain.expected(feeds))


ITSELF = Attends(n_k="n", mask=("batch", 1, "n", "n"), precision="fp16")


@pytest.mark.parametrize(
    ("attends", "tokens", "fused"),
    [
        (ITSELF, 16, True),
        (replace(ITSELF, mask=("batch", 1, 1, "n")), 16, True),
        (replace(ITSELF, mask=(1, 4, "n", "n"), bias=True), 16, True),
        (ITSELF, 13, False),
        (replace(ITSELF, silent_rows="nan"), 16, False),
        (Attends(mask=("batch", 1, 1, "m"), precision="fp16"), 16, False),
        (replace(ITSELF, precision="fp32"), 16, False),
    ],
)
def test_a_mask_in_fp16_is_one_kernel_on_cuda(attends: Attends, tokens: int, fused: bool) -> None:
    """Its arithmetic is checked in fp32, on the CPU."""
    model, sites = attends.model()
    (lowered,) = for_onnxruntime.lower(model, sites, {**OPT, "n": tokens}, device="cuda")
    assert (lowered.form == for_onnxruntime.MULTI_HEAD) == fused, lowered
    if attends.precision == "fp16":
        widen(model)
        narrowed = model.graph.outputs[0].producer()
        assert narrowed is not None and narrowed.inputs[0] is not None
        model.graph.outputs[0] = narrowed.inputs[0]  # before it is rounded
    feeds = attends.feeds({"batch": 2, "n": tokens, "m": 11}, 0)
    half = {"fp16": np.float16, "fp32": np.float32}[attends.precision]
    given = {name: array if array.dtype == bool else array.astype(half) for name, array in feeds.items()}
    agree(run(model, given), attends.expected(feeds))
