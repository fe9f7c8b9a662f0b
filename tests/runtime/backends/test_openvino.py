"""The OpenVINO backend with varying sizes, threads and callers, and its graph with attention in blocks. Its results are
checked in test_registered as well."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx.parser
import pytest
import torch
from openvino import Core
from openvino import Tensor as OpenVinoTensor
from torch import Tensor, nn
from torch.export import Dim

import attnforge
from attnforge.arrays import BFLOAT16
from attnforge.bundle import CANONICAL, OPENVINO, Bundle
from attnforge.cli.printing import print_bundle
from attnforge.errors import InputError, RunError, UnavailableError, UsageError
from attnforge.export.diagnosis.deployed import tensors_on
from attnforge.export.graphs.saving import load_graph
from attnforge.export.lowering import blocks as lowering_blocks
from attnforge.export.lowering import openvino as for_openvino
from attnforge.model.registry import build_model
from attnforge.runtime import cases as reference
from attnforge.runtime.backends import openvino
from attnforge.runtime.backends.openvino_graph import prepared
from attnforge.runtime.backends.registry import REGISTRY, fused_by, why_not_here
from attnforge.runtime.choose import choose_backend
from attnforge.runtime.parity.verify import hold
from tests.support.bundles import DeploySmall
from tests.support.faults.subjects import PLACES, subject
from tests.support.idioms import IDIOMS

pytestmark = [
    pytest.mark.skipif(why_not_here("openvino") is not None, reason=str(why_not_here("openvino"))),
    pytest.mark.xdist_group("openvino"),
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    module, args, shapes = build_model("transformer-encoder", num_layers=1, embed_dim=32, vocab_size=50)
    folder = tmp_path_factory.mktemp("encoder") / "bundle"
    return attnforge.deploy(module, args, folder, shapes, targets=["onnxruntime"], name="encoder", tune=False)


def feeds_of(bundle: Bundle, **sizes: int) -> dict[str, np.ndarray]:
    return reference.make_inputs(reference.at(bundle.manifest.inputs, sizes), bundle.manifest.inputs, {})


def test_repeated_shapes_are_compiled_for_and_give_the_same_results(encoder: Bundle) -> None:
    with attnforge.load(encoder, "openvino") as session, attnforge.load(encoder, "onnxruntime-cpu") as baseline:
        weights = session.memory.weights
        assert weights is not None
        for tokens in (5, 17):
            feeds = feeds_of(encoder, batch=3, tokens=tokens)
            first = session.run(feeds)
            before = session.memory.weights
            again, third = session.run(feeds), session.run(feeds)
            assert session.memory.weights == (before or 0) + weights  # one more compiled model
            for result in (first, again, third):
                np.testing.assert_allclose(result["output"], baseline.run(feeds)["output"], rtol=1e-4, atol=1e-5)


def test_the_cause_of_an_error_is_kept(encoder: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO reports it last, after the source files that it was raised in."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> sums (float[4] x) => (float[4] y) { y = Add(x, x) }'
    )
    core = Core()
    request = core.compile_model(core.read_model(model.SerializeToString()), "CPU").create_infer_request()
    six = OpenVinoTensor(np.zeros(6, np.float32))
    with attnforge.load(encoder, "openvino") as session:
        monkeypatch.setattr(session._backend, "run", lambda *arguments: request.set_tensor("x", six))
        with pytest.raises(
            RunError, match=r"^openvino cannot run encoder: Can't set the input tensor .* incompatible$"
        ):
            session.run(feeds_of(encoder, batch=1, tokens=3))


def test_the_number_of_shapes_compiled_for_is_bounded(encoder: Bundle) -> None:
    with attnforge.load(encoder, "openvino") as session:
        weights = session.memory.weights or 0
        for tokens in range(1, openvino.SPECIALIZED + 4):
            for _ in range(3):
                session.run(feeds_of(encoder, batch=1, tokens=tokens))
        assert session.memory.weights == (1 + openvino.SPECIALIZED) * weights
        backend = session._backend
        assert isinstance(backend, openvino.OpenVino)
        kept = dict(backend._special)
        for tokens in range(openvino.SPECIALIZED + 4, 0, -1):
            session.run(feeds_of(encoder, batch=1, tokens=tokens))
        assert backend._special == kept  # no entry was evicted


def test_shapes_that_take_turns_are_compiled_for_once_they_are_frequent(encoder: Bundle) -> None:
    with attnforge.load(encoder, "openvino") as session:
        weights = session.memory.weights
        for call in range(3 * openvino.OFTEN):
            assert session.memory.weights == weights, f"after {call} calls"
            session.run(feeds_of(encoder, batch=1, tokens=2 + call % 3))
            if session.memory.weights != weights:
                break
        assert call == 3 * (openvino.OFTEN - 1)


def test_many_threads_get_their_own_answers(encoder: Bundle) -> None:
    with attnforge.load(encoder, "openvino", contexts=3) as session:

        def call(tokens: int) -> bool:
            feeds = feeds_of(encoder, batch=2, tokens=tokens)
            expected = session.run(feeds)["output"]
            return all(np.allclose(session.run(feeds)["output"], expected, atol=1e-5) for _ in range(8))

        with ThreadPoolExecutor(6) as threads:
            assert all(threads.map(call, (3, 3, 9, 21, 40, 64)))
        assert session.memory.contexts <= 3


def test_a_later_call_does_not_change_earlier_outputs(encoder: Bundle) -> None:
    with attnforge.load(encoder, "openvino") as session:
        first = session.run(feeds_of(encoder, batch=1, tokens=8))["output"]
        kept = first.copy()
        changed = {
            name: (49 if value.dtype == int else 1) - value
            for name, value in feeds_of(encoder, batch=1, tokens=8).items()
            if value.dtype != bool
        }
        session.run({**feeds_of(encoder, batch=1, tokens=8), **changed})
        np.testing.assert_array_equal(first, kept)


def test_outputs_are_written_to_the_given_arrays(encoder: Bundle) -> None:
    feeds = feeds_of(encoder, batch=2, tokens=6)
    with attnforge.load(encoder, "openvino") as session:
        expected = session.run(feeds)["output"]
        mine = np.full_like(expected, np.nan)
        assert session.run(feeds, out={"output": mine})["output"] is mine
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)


def test_fp32_is_fp32_even_where_bf16_would_be_faster(encoder: Bundle) -> None:
    report = attnforge.verify(encoder, ["openvino"]).backends["openvino"]
    assert report.passed and report.error < 1e-5


def test_bfloat16_arrays_in_and_out(tmp_path: Path) -> None:
    module, args, shapes = build_model("self-attention")
    bundle = attnforge.deploy(module, args, tmp_path / "b", shapes, "bf16", ["onnxruntime"], tune=False)
    feeds = feeds_of(bundle, batch=2, tokens=5)
    with attnforge.load(bundle, "openvino") as session, attnforge.load(bundle, "onnxruntime-cpu") as baseline:
        results = [session.run(feeds)["output"] for _ in range(3)]
        expected = baseline.run(feeds)["output"].astype(np.float32)
    assert all(result.dtype == BFLOAT16 for result in results)
    for result in results:
        np.testing.assert_allclose(result.astype(np.float32), expected, rtol=0.05, atol=0.02)


def test_the_number_of_threads_is_the_requested_one(encoder: Bundle) -> None:
    with attnforge.load(encoder, "openvino", threads=1) as session:
        backend = session._backend
        assert isinstance(backend, openvino.OpenVino)
        assert backend._properties["INFERENCE_NUM_THREADS"] == 1


def test_a_closed_session_raises(encoder: Bundle) -> None:
    session = attnforge.load(encoder, "openvino")
    session.close()
    with pytest.raises(UsageError, match="closed"):
        session.run(feeds_of(encoder, batch=1, tokens=4))


def test_by_default_it_is_verified_only_where_auto_may_load_it(encoder: Bundle) -> None:
    report = attnforge.verify(encoder)  # deployed without measuring
    assert "openvino" not in report.backends and "by name" in report.skipped["openvino"]
    assert attnforge.load(encoder).backend == "onnxruntime-cpu"


def test_read_only_arrays_are_accepted(encoder: Bundle) -> None:
    feeds = feeds_of(encoder, batch=2, tokens=6)
    for array in feeds.values():
        array.flags.writeable = False
    with attnforge.load(encoder, "openvino") as session, attnforge.load(encoder, "onnxruntime-cpu") as baseline:
        np.testing.assert_allclose(session.run(feeds)["output"], baseline.run(feeds)["output"], rtol=1e-4, atol=1e-5)


def test_copies_of_read_only_arrays_live_until_the_run_is_done(small: DeploySmall) -> None:
    """With four inputs, the memory of the first copy was reused for the next ones before OpenVINO read it."""
    with attnforge.load(small("fp32"), "openvino") as session:

        def run(feeds: dict[str, np.ndarray]) -> Mapping[str, np.ndarray]:
            for array in feeds.values():
                array.flags.writeable = False
            return session.run(feeds)

        assert hold(session.bundle, "openvino", run).missed is None


def test_replacing_the_bundle_does_not_affect_a_loaded_session(encoder: Bundle, tmp_path: Path) -> None:
    shutil.copytree(encoder.path, tmp_path / "b")
    feeds = feeds_of(encoder, batch=2, tokens=6)
    with attnforge.load(tmp_path / "b", "openvino") as session:
        expected = session.run(feeds)["output"]
        (tmp_path / "b/canonical.onnx").write_bytes(b"another")
        for _ in range(3):
            np.testing.assert_allclose(session.run(feeds)["output"], expected, rtol=1e-4, atol=1e-5)


class ActivationAfterAttention(nn.Module):
    """What follows attention element by element, before its heads are merged."""

    def __init__(self, after: str) -> None:
        super().__init__()
        self.project, self.after = nn.ModuleList(nn.Linear(32, 32) for _ in range(3)), after

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (project(x).unflatten(-1, (4, 8)).transpose(1, 2) for project in self.project)
        y = nn.functional.scaled_dot_product_attention(query, key, value)
        gate = x[:, None, :, :1].sigmoid()
        y = {"tanh": y.tanh(), "gate": y * gate, "sum with a gate": y - y * gate}[self.after]
        return y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("after", "tokens"), [("tanh", 4), ("gate", 4), ("sum with a gate", 5)])
@pytest.mark.parametrize("is_static", [True, False])
def test_attention_that_is_not_fused_with_what_follows(
    after: str, tokens: int, is_static: bool, tmp_path: Path
) -> None:
    """OpenVINO 2026.4 alone gives other numbers with as many tokens as heads, and crashes at the sum, once shapes are
    static: for a static model, and for one that is compiled for a shape that recurs."""
    module, x = ActivationAfterAttention(after).eval(), torch.randn(1, tokens, 32)
    shapes = None if is_static else {"x": {1: Dim("tokens", min=2, max=8)}}
    bundle = attnforge.deploy(module, (x,), tmp_path / "b", shapes, targets=["onnxruntime"], tune=False, cache=False)
    with attnforge.load(bundle, "openvino") as session:
        for _ in range(3):
            (result,) = session.run({"x": x.numpy()}).values()
            np.testing.assert_allclose(result, module(x).detach().numpy(), rtol=1e-5, atol=1e-6)


class GroupNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Conv2d(16, 16, 1), nn.GroupNorm(4, 16)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part(x)
        return x


def test_group_norms_that_are_added(tmp_path: Path) -> None:
    """OpenVINO 2026.4 alone crashes as it compiles them for one size."""
    bundle = attnforge.deploy(
        GroupNorms().eval(), (torch.randn(2, 16, 17, 24),), tmp_path / "b", targets=["onnxruntime"], tune=False
    )
    assert attnforge.verify(bundle, ["openvino"]).passed


def test_bf16_scores_that_are_a_sum_of_two_products(tmp_path: Path) -> None:
    """OpenVINO 2026.4 alone errs by the size of the output."""
    idiom = IDIOMS["bias_of_queries_and_a_table_first"]
    bundle = attnforge.deploy(
        idiom.module(), idiom.args, tmp_path / "b", idiom.dynamic_shapes, "bf16", ["onnxruntime"], tune=False
    )
    assert attnforge.verify(bundle, ["openvino"]).passed


class UnusedInput(nn.Module):
    def forward(self, x: Tensor, unused: Tensor) -> Tensor:
        heads = x.reshape(*x.shape[:-1], 4, 8).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(heads, heads, heads).tanh().transpose(1, 2).flatten(2)


def test_an_input_that_openvino_drops(tmp_path: Path) -> None:
    args = (torch.randn(1, 5, 32), torch.randn(1, 5))
    bundle = attnforge.deploy(UnusedInput(), args, tmp_path / "b", targets=["onnxruntime"], tune=False, cache=False)
    assert attnforge.verify(bundle, ["openvino"]).passed


# --- the graph that OpenVINO is given ---------------------------------------------------------------------------------


def test_an_input_that_is_also_an_output_is_refused(tmp_path: Path) -> None:
    """OpenVINO 2026.4 takes the output's memory for the input's if both have one name."""
    head = '<ir_version: 10, opset_import: ["": 17]> graph'
    text = f"{head} (float[2, 4] x) => (float[2, 4] y, float[2, 4] x) {{ y = Tanh(x) }}"
    onnx.save(onnx.parser.parse_model(text), tmp_path / "same.onnx")
    bundle = attnforge.deploy(tmp_path / "same.onnx", out=tmp_path / "b", targets=["onnxruntime"], tune=False)
    x = np.ones((2, 4), np.float32)
    with attnforge.load(bundle, "onnxruntime-cpu") as session:
        assert np.array_equal(session.run({"x": x})["x"], x)
    with pytest.raises(UnavailableError, match="'x' is an input and an output"):
        attnforge.load(bundle, "openvino")


def graph_of(bundle: Bundle) -> Any:
    from openvino import Core

    return Core().read_model(str(bundle.file(CANONICAL)))


def operators(model: Any) -> Counter[str]:
    return Counter(node.get_type_name() for node in model.get_ordered_ops())


def test_attention_is_passed_as_products_directly_connected_to_their_transposes(tmp_path: Path) -> None:
    module, args, shapes = build_model("patch-attention", image_size=32, max_image_size=32, max_batch=1)
    bundle = attnforge.deploy(module, args, tmp_path / "b", shapes, targets=["onnxruntime"], tune=False)
    written, given = operators(graph_of(bundle)), prepared(graph_of(bundle), widen=True)
    assert written["ScaledDotProductAttention"] == 1 and operators(given)["ScaledDotProductAttention"] == 0
    scores = next(node for node in given.get_ordered_ops() if node.get_type_name() == "Softmax")
    product = scores.input_value(0).get_node().input_value(0).get_node()
    assert [product.input_value(i).get_node().get_type_name() for i in (0, 1)] == ["Transpose", "Transpose"]
    assert all(product.input_value(i).get_node().get_output_partial_shape(0).rank.get_length() == 4 for i in (0, 1))
    taken = next(iter(scores.output(0).get_target_inputs())).get_node()
    assert next(iter(taken.output(0).get_target_inputs())).get_node().get_type_name() == "Transpose"
    assert operators(given)["Transpose"] == written["Transpose"]


def test_16_bit_types_remain_only_in_inputs_outputs_and_weights(tmp_path: Path) -> None:
    module, args, shapes = build_model("vit")
    bundle = attnforge.deploy(module, args, tmp_path / "b", shapes, "bf16", ["onnxruntime"], tune=False)
    written, given = graph_of(bundle), prepared(graph_of(bundle), widen=True)
    for ours, theirs in zip((*given.inputs, *given.outputs), (*written.inputs, *written.outputs), strict=True):
        assert ours.get_names() == theirs.get_names()
        assert ours.get_element_type() == theirs.get_element_type()
        assert ours.get_partial_shape() == theirs.get_partial_shape()
    narrow = Counter(
        node.get_type_name()
        for node in given.get_ordered_ops()
        for port in node.outputs()
        if port.get_element_type().get_type_name() in ("bf16", "f16")
    )
    weights = narrow.pop("Constant")
    assert weights > 20 and narrow == {"Parameter": 1, "Convert": 1, "Result": 1}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_large_16_bit_weights_are_not_also_kept_in_fp32(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless OpenVINO computes in fp32 and converts them anyway: then the mask must be the least number of fp32."""
    bundle = by_hand("least", precision, tmp_path / "b")
    in_fp32 = openvino._precision(Core(), bundle.manifest) == "f32"
    asked: list[bool] = []

    def preparing(model: Any, widen: bool, scores: bool) -> Any:
        asked.append(widen)
        return prepared(model, widen, scores)

    monkeypatch.setattr(openvino, "prepared", preparing)
    assert attnforge.verify(bundle, ["openvino"]).passed
    monkeypatch.setattr(openvino, "WIDENED_BYTES", 0)
    assert attnforge.verify(bundle, ["openvino"]).passed
    assert asked == [True, in_fp32] and in_fp32 >= (precision == "fp16")
    softmax = next(node for node in prepared(graph_of(bundle), widen=False).get_ordered_ops() if "Soft" in str(node))
    assert softmax.get_output_element_type(0).get_type_name() == {"fp16": "f16", "bf16": "bf16"}[precision]


def test_reported_weights_are_those_of_the_graph_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of ONNX Runtime, which computes bf16 in fp32, are in the same file but do not count."""
    module, args, shapes = build_model("transformer-encoder", num_layers=1, vocab_size=50)
    monkeypatch.setattr("attnforge.export.graphs.saving.SHELVED", 1)
    bundle = attnforge.deploy(module, args, tmp_path / "b", shapes, "bf16", ["onnxruntime"], tune=False)
    numbers = sum(tensor.numel() for tensor in (*module.parameters(), *module.buffers()))
    with attnforge.load(bundle, "openvino") as session:
        assert session.memory.weights == pytest.approx(2 * numbers, rel=0.01)


def test_the_rewritten_graph_computes_the_same_function_as_the_original(encoder: Bundle) -> None:
    from openvino import Core

    outputs = []
    for model in (graph_of(encoder), prepared(graph_of(encoder), widen=True)):
        compiled = Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        outputs.append([compiled(feeds_of(encoder, batch=n, tokens=5 * n))[0] for n in (1, 2, 3)])
    for written, given in zip(*outputs, strict=True):
        np.testing.assert_allclose(given, written, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("on", ["rewriting", "compiling"])
def test_the_original_graph_runs_where_openvino_does_not_accept_the_rewritten_one(
    encoder: Bundle, on: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    feeds = feeds_of(encoder, batch=2, tokens=6)
    with attnforge.load(encoder, "openvino") as session:
        expected = session.run(feeds)["output"]
    assert not caplog.records

    def refused(model: Any, widen: bool, scores: bool) -> Any:
        if on == "rewriting":
            raise RuntimeError("no such operator")
        rewritten.append(prepared(model, widen, scores))
        return rewritten[0]

    def compiled(self: Any, model: Any) -> Any:
        if rewritten and model is rewritten[0]:
            raise RuntimeError("no such kernel")
        return compile_model(self, model)

    rewritten: list[Any] = []
    compile_model = openvino.OpenVino._compile
    monkeypatch.setattr(openvino, "prepared", refused)
    monkeypatch.setattr(openvino.OpenVino, "_compile", compiled)
    with attnforge.load(encoder, "openvino") as session:
        np.testing.assert_allclose(session.run(feeds)["output"], expected, rtol=1e-4, atol=1e-5)
    assert "does not accept" in caplog.text and len(rewritten) == (on == "compiling")


class Numbers(nn.Module):
    """An integer function next to a floating-point one."""

    def __init__(self, function: Any, buffer: int = 0) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("buffer", torch.tensor([buffer, 1]))

    def forward(self, x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, self.function(x, n, self.buffer)


def attended(x: Tensor, bias: Tensor) -> Tensor:
    return torch.nan_to_num((x @ x.transpose(1, 2) + bias).softmax(-1) @ x, nan=7.0)


def of_length(x: Tensor, n: Tensor, _: Tensor) -> Tensor:
    hidden = torch.arange(x.shape[1]) >= n[:, None, None]
    return attended(x, torch.zeros(x.shape[1]).masked_fill(hidden, -torch.inf))


WRONG: dict[str, tuple[Any, str]] = {
    "a sum": (lambda x, n, _: n + 1, "integers-large"),
    "a remainder": (lambda x, n, _: n % 5, "integers-large"),
    "a quotient": (lambda x, n, _: n // 3, "integers-large"),
    "a comparison": (lambda x, n, _: n[:, None] == n, "integers-large"),
    "a constant of 64 bits": (lambda x, n, buffer: n + buffer, "example"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_integer_results_are_detected(name: str, tmp_path: Path) -> None:
    """OpenVINO computes int64 in 32 bits, and remainders, quotients and comparisons in fp32."""
    function, case = WRONG[name]
    args = torch.randn(2, 8, 16), torch.tensor([5, 8])
    module = Numbers(function, buffer=2**40 + 3)
    bundle = attnforge.deploy(module, args, tmp_path / "b", targets=["onnxruntime"], tune=False, cache=False)
    report = attnforge.verify(bundle, ["onnxruntime-cpu", "openvino"])
    assert report.backends["onnxruntime-cpu"].passed
    assert case in {failure.case for failure in report.backends["openvino"].failures}


class Biased(nn.Module):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return attended(x, bias)


WITHOUT_KEYS: dict[str, tuple[nn.Module, Tensor, str]] = {
    "a length": (Numbers(of_length), torch.tensor([5, 8]), "integers-zero"),
    "a bias, 0": (Biased(), torch.full((2, 8, 8), 0.0), "mask-infinite"),
    "a bias, 0.5": (Biased(), torch.full((2, 8, 8), 0.5), "mask-infinite"),
}


@pytest.mark.parametrize("name", WITHOUT_KEYS)
@pytest.mark.parametrize("in_own_graph", [True, False])
def test_rows_without_keys_are_nan_in_its_own_graph(
    in_own_graph: bool, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenVINO gives zeros for them in the canonical graph, which is detected."""
    if not in_own_graph:
        monkeypatch.setattr(for_openvino, "_may_hide_all", lambda a: False)
    module, second, case = WITHOUT_KEYS[name]
    args = torch.randn(2, 8, 16), second
    bundle = attnforge.deploy(module, args, tmp_path / "b", targets=["onnxruntime"], tune=False, cache=False)
    report = attnforge.verify(bundle, ["onnxruntime-cpu", "openvino"])
    assert report.backends["onnxruntime-cpu"].passed
    failures = {failure.case for failure in report.backends["openvino"].failures}
    assert failures == (set() if in_own_graph else {case})


class ByHand(nn.Module):
    """Attention as many models write it: heads by a view, keys that two queries share, and a mask on the scores."""

    def __init__(self, hides: str) -> None:
        super().__init__()
        self.query, self.key, self.hides = nn.Linear(32, 32), nn.Linear(32, 16), hides
        self.bias = nn.Parameter(torch.randn(20, 20))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = *x.shape[:-1], -1, 8
        query = self.query(x).view(heads).transpose(1, 2).tanh()
        key = self.key(x).view(heads).transpose(1, 2).tanh()
        key = key[:, :, None].expand(-1, -1, 2, -1, -1).reshape(query.shape)
        scores, kept = query @ key.mT * 8**-0.5, mask[:, None, None, :]
        if self.hides in ("-inf", "-1e4"):
            scores = scores.masked_fill(kept == 0, float(self.hides))
        elif self.hides == "least, in fp32":
            scores = scores + ((1 - kept.float()) * torch.finfo(x.dtype).min).to(x.dtype)
        elif self.hides == "least, by where":
            shown = (kept > 0) & (torch.arange(x.shape[1])[:, None] >= torch.arange(x.shape[1]))
            scores = scores + torch.where(shown, 0.0, torch.finfo(x.dtype).min).to(x.dtype)
        else:
            if self.hides == "least, with a bias":
                scores = scores + self.bias[: x.shape[1], : x.shape[1]]
            scores = scores + (1 - kept.to(x.dtype)) * torch.finfo(x.dtype).min
        attended: Tensor = (scores.softmax(-1) @ key).transpose(1, 2).flatten(2)
        return attended


def by_hand(hides: str, precision: str, folder: Path) -> Bundle:
    args = torch.randn(2, 6, 32), torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]])
    dims = {0: Dim("batch", min=1, max=4), 1: Dim("tokens", min=2, max=20)}
    return attnforge.deploy(
        ByHand(hides).eval(), args, folder, {"x": dims, "mask": dims}, precision, ["onnxruntime"],
        tune=False, cache=False,
    )  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("hides", ["-inf", "-1e4", "least", "least, in fp32", "least, by where", "least, with a bias"])
def test_attention_by_hand_is_within_the_budget(hides: str, precision: str, tmp_path: Path) -> None:
    """With padding, which may hide all keys of a sample; for all sizes, and compiled for those of a repeated call, at
    which a bias is a constant."""
    bundle = by_hand(hides, precision, tmp_path / "b")
    report = attnforge.verify(bundle, ["openvino"]).backends["openvino"]
    assert report.passed, [(c.case, c.reason) for c in report.comparisons if not c.passed]


class InFp32(nn.Module):
    """A bf16 model with fp32 angles of timesteps, running means, buckets of distances, or experts by a softmax."""

    def __init__(self, computes: str) -> None:
        super().__init__()
        self.linear, self.computes, self.rows = nn.Linear(32, 32), computes, nn.Embedding(1024, 32)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        if self.computes == "angles":
            wide = (time.float()[:, None] * torch.arange(1, 33)).sin()[:, None]
        elif self.computes == "buckets":
            wide = self.rows(((1 + time.float() / 8).log() / 5 * 999).long())[:, None]
        elif self.computes == "experts":
            wide = self.rows((x.float() / 16 + torch.arange(32) / 1e4).softmax(-1).topk(2).indices).sum(-2)
        else:
            wide = x.float().cumsum(1) / (time[:, None, None] + torch.arange(x.shape[1])[:, None])
        projected: Tensor = self.linear(x + wide.to(x.dtype))
        return projected


@pytest.mark.parametrize("computes", ["angles", "buckets", "experts", "means"])
def test_fp32_in_a_bf16_model_stays_fp32(computes: str, tmp_path: Path) -> None:
    args, dims = (torch.randn(2, 300, 32) + 4, torch.tensor([7, 950])), {0: Dim("batch", min=1, max=4)}
    bundle = attnforge.deploy(
        InFp32(computes), args, tmp_path / "b", (dims, dims), "bf16", ["onnxruntime"], tune=False, cache=False
    )
    report = attnforge.verify(bundle, ["openvino"]).backends["openvino"]
    assert report.passed, [(c.case, c.reason) for c in report.comparisons if not c.passed]


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1, 1_700_000_000_000])
def test_integers_beyond_32_bits_are_refused(number: int, tmp_path: Path) -> None:
    args = torch.randn(2, 8, 16), torch.tensor([5, 8])
    module = Numbers(lambda x, n, _: n - 1)
    bundle = attnforge.deploy(module, args, tmp_path / "b", targets=["onnxruntime"], tune=False, cache=False)
    x, n = np.ones((2, 8, 16), np.float32), np.array([3, number])
    with attnforge.load(bundle, "openvino") as session:
        assert session(x, np.array([3, 2**31 - 1]))[1].tolist() == [2, 2**31 - 2]
        with pytest.raises(InputError, match=f"input 'n' has {number}, and OpenVINO computes int64 in 32 bits; load"):
            session(x, n)
    with attnforge.load(bundle, "onnxruntime-cpu") as session:
        assert session(x, n)[1].tolist() == [2, number - 1]


@pytest.mark.parametrize(("example", "reason"), [(5, "integers-large, output_1"), (2**40, "has 1099511627776")])
def test_auto_does_not_choose_it_where_integer_results_are_wrong(example: int, reason: str, tmp_path: Path) -> None:
    args = torch.randn(2, 8, 16), torch.tensor([example, 8])
    module = Numbers(lambda x, n, _: n + 1)
    bundle = attnforge.deploy(module, args, tmp_path / "b", targets=["onnxruntime"], tune=False, cache=False)
    choice = choose_backend(bundle, seconds=0.1)
    assert choice is not None and choice.picked == "onnxruntime-cpu" and reason in choice.dropped["openvino"]


def test_a_first_call_of_one_token_spoils_no_later_call(tmp_path: Path) -> None:
    """The kernel of OpenVINO 2026.4 for attention without a mask keeps the state of its first run."""
    module, args, shapes = build_model("self-attention")
    bundle = attnforge.deploy(module, args, tmp_path / "b", shapes, targets=["onnxruntime"], tune=False)
    with attnforge.load(bundle, "openvino") as session, attnforge.load(bundle, "onnxruntime-cpu") as baseline:
        for tokens in (1, 63, 17):
            feeds = feeds_of(bundle, batch=1, tokens=tokens)
            np.testing.assert_allclose(
                session.run(feeds)["output"], baseline.run(feeds)["output"], rtol=1e-4, atol=1e-5
            )


# --- attention in blocks ----------------------------------------------------------------------------------------------


class Sees(nn.Module):
    """A window of 16 keys and causal attention, each with padding: `(batch, tokens, 32)` and `(batch, tokens)`, True
    for words; two heads."""

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        back = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        heads, words = x.reshape(*x.shape[:2], 2, 16).transpose(1, 2), padding[:, None, None]
        for mask in ((back >= 0) & (back < 16), back >= 0):
            heads = heads + nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask & words)
        return heads.transpose(1, 2).flatten(2)


def in_blocks(folder: Path, precision: str = "fp32", **options: Any) -> Bundle:
    """Deploy at so few tokens that the rules would leave attention undivided."""
    batch, tokens = Dim("batch", min=1, max=3), Dim("tokens", min=1, max=150)
    shapes = {name: {0: batch, 1: tokens} for name in ("x", "padding")}
    generator = torch.Generator().manual_seed(3)
    args = torch.randn(2, 96, 32, generator=generator), torch.arange(96) >= torch.tensor([[0], [40]])
    many = mock.patch.multiple(for_openvino, MANY_SCORES=1, MANY_TOKENS=1)
    with many, mock.patch.object(lowering_blocks, "BLOCKS", (16,)):
        return attnforge.deploy(Sees(), args, folder, shapes, precision, ["onnxruntime"], **options)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return in_blocks(tmp_path_factory.mktemp("blocks") / "b", tune=False)


def test_a_graph_with_blocks_is_what_openvino_runs(blocks: Bundle) -> None:
    manifest = blocks.manifest
    record = manifest.targets[OPENVINO]
    assert record.model == REGISTRY["openvino"].model(manifest) == "openvino/model.onnx" and record.tuning is None
    forms = [site.targets[OPENVINO].form for site in manifest.attention.details]
    assert forms == ["MatMul·Softmax·MatMul, blocks of 16 × 31", "MatMul·Softmax·MatMul, 4 blocks"]
    with attnforge.load(blocks, "openvino") as session:
        backend = session._backend
        assert isinstance(backend, openvino.OpenVino)
        assert operators(backend._model)["Softmax"] == 1 + 4


def test_it_does_not_count_as_fused(blocks: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    certificate = blocks.manifest.attention
    assert set(certificate.fused) == {"onnxruntime"} == {site.target for site in certificate.unfused}
    assert isinstance(fused_by(certificate, "openvino"), str)
    assert all(site.targets[OPENVINO].kernel is site.targets[OPENVINO].reason is None for site in certificate.details)
    print_bundle(blocks)
    printed = capsys.readouterr().out
    assert "openvino: MatMul·Softmax·MatMul, 4 blocks" in printed and "causal: each block of queries" in printed


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_blocks_are_within_the_budget(precision: str, tmp_path: Path) -> None:
    """On the reference cases: one token, a prime number of tokens, queries without keys, samples without words."""
    bundle = in_blocks(tmp_path / "b", precision, tune=False)
    assert OPENVINO in bundle.manifest.targets
    report = attnforge.verify(bundle, ["openvino"]).backends["openvino"]
    assert report.passed, [(c.case, c.reason) for c in report.comparisons if not c.passed]


def test_repeated_shapes_run_in_blocks_too(blocks: Bundle) -> None:
    with attnforge.load(blocks, "openvino") as session, attnforge.load(blocks, "onnxruntime-cpu") as baseline:
        for tokens in (1, 4, 15, 16, 17, 113):
            feeds = feeds_of(blocks, batch=2, tokens=tokens)
            (expected,) = baseline.run(feeds).values()
            for _ in range(3):
                (result,) = session.run(feeds).values()
                np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_a_bundle_without_that_graph_runs_as_before(blocks: Bundle, tmp_path: Path) -> None:
    shutil.copytree(blocks.path, tmp_path / "b")
    document = json.loads((tmp_path / "b/manifest.json").read_text())
    del document["targets"][OPENVINO], document["files"]["openvino/model.onnx"]
    for site in document["attention"]["details"]:
        del site["targets"][OPENVINO]
    (tmp_path / "b/manifest.json").write_text(json.dumps(document))
    shutil.rmtree(tmp_path / "b/openvino")
    older, feeds = Bundle(tmp_path / "b"), feeds_of(blocks, batch=2, tokens=70)
    with attnforge.load(blocks, "openvino") as session, attnforge.load(older, "openvino") as before:
        backend = before._backend
        assert isinstance(backend, openvino.OpenVino) and operators(backend._model)["Softmax"] < 5
        result, expected = (next(iter(each.run(feeds).values())) for each in (session, before))
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_measuring_decides_and_nothing_is_written_without_a_gain(tmp_path: Path) -> None:
    bundle = in_blocks(tmp_path / "b", cache=False)
    record, sites = bundle.manifest.targets.get(OPENVINO), bundle.manifest.attention.details
    assert ("openvino/model.onnx" in bundle.manifest.files) == (record is not None)
    for site in sites if record is not None else ():
        target = site.targets[OPENVINO]
        assert len(target.measured) >= 2 and not target.dropped and "measured: " in target.why
    assert record is None or (record.tuning is not None and record.tuning.sizes == {"batch": 2, "tokens": 96})


@pytest.mark.parametrize("kind", ["few tokens", "no mask", "a decoder"])
def test_other_bundles_have_no_such_graph(kind: str, encoder: Bundle, tmp_path: Path) -> None:
    bundle = encoder
    if kind == "few tokens":
        with mock.patch.multiple(for_openvino, MANY_SCORES=2**30, MANY_TOKENS=2**30):
            few = torch.zeros(1, 32, 32), torch.ones(1, 32, dtype=torch.bool)
            bundle = attnforge.deploy(Sees(), few, tmp_path / "b", targets=["onnxruntime"], tune=False)
    elif kind == "a decoder":
        module, args, shapes = subject("llama")
        with mock.patch.multiple(for_openvino, MANY_SCORES=1, MANY_TOKENS=1):
            bundle = attnforge.deploy(
                module, args, tmp_path / "b", shapes, targets=["onnxruntime"], tune=False, cache_tokens=PLACES
            )
    assert set(bundle.manifest.targets) == {"onnxruntime"}
    assert not any(name.startswith("openvino") for name in bundle.manifest.files)


def test_its_weights_are_those_of_the_other_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, args, shapes = build_model("transformer-encoder", num_layers=1, vocab_size=50, is_causal=True)
    monkeypatch.setattr("attnforge.export.graphs.saving.SHELVED", 1)
    sizes = []
    for many, folder in ((1, "a"), (2**30, "b")):
        monkeypatch.setattr(for_openvino, "MANY_TOKENS", many)
        bundle = attnforge.deploy(module, args, tmp_path / folder, shapes, targets=["onnxruntime"], tune=False)
        sizes.append(bundle.file("weights.data").stat().st_size)
        assert (OPENVINO in bundle.manifest.targets) == (many == 1)
        assert REGISTRY["openvino"].model(bundle.manifest) == ("openvino.model.onnx" if many == 1 else CANONICAL)
        feeds = feeds_of(bundle, batch=2, tokens=9)
        with attnforge.load(bundle, "openvino") as session, attnforge.load(bundle, "onnxruntime-cpu") as baseline:
            np.testing.assert_allclose(
                session.run(feeds)["output"], baseline.run(feeds)["output"], rtol=1e-4, atol=1e-5
            )
    assert sizes[0] == sizes[1]


def test_intermediate_tensors_are_those_of_its_own_graph(blocks: Bundle) -> None:
    names = [str(node.outputs[0].name) for node in load_graph(blocks, "openvino/model.onnx").graph]
    names = [name for name in names if name.endswith("add_1")] or names[-1:]
    tensors = tensors_on(blocks, "openvino", feeds_of(blocks, batch=1, tokens=20), names)
    assert set(tensors) == set(names)
