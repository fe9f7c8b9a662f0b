"""Models that no backend computes correctly, of which nothing is proved, or that are random, are not deployed: the
exporter's faults, small numbers that it drops, dropout that is left on, and an eager that is far off itself."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import attnforge
from attnforge.bundle import Bundle
from attnforge.cli import main
from attnforge.errors import CaptureError, UnavailableError, UsageError, WrongError
from attnforge.export import checking
from attnforge.export.diagnosis.departure import departure
from attnforge.export.sources import repair, source, torch_module
from attnforge.export.sources.torch_module import capture
from attnforge.precision import precision_named
from attnforge.runtime.backends.registry import by_preference, why_unavailable
from attnforge.runtime.parity.verify import verify
from attnforge.serving.triton.repository import package
from tests.support.export_faults import FAULTS, tried

FP32 = precision_named("fp32")
X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))


class Function(nn.Module):
    """A function of one tensor."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def deployed(function: Callable[[Tensor], Tensor], out: Path, precision: str = "fp32", **options: Any) -> Bundle:
    module = Function(function).eval()
    return attnforge.deploy(module, (X,), out, None, precision, ["onnxruntime"], tune=False, **options)


# --- numbers that are nearly 0 or 1 -----------------------------------------------------------------------------------

SMALL = (1e-6, 1e-8, 1e-12, 1e-20, 1e-40)

WITH_A_SMALL_NUMBER: dict[str, Callable[[float], Callable[[Tensor], Tensor]]] = {
    "Add": lambda c: lambda x: torch.rsqrt((x * 0).pow(2).mean(-1, keepdim=True) + c),
    "Sub": lambda c: lambda x: torch.rsqrt((x * 0) - -c),
    "Mul": lambda c: lambda x: (x * c) / c,
    "Div": lambda c: lambda x: (x / c) * c,
    "Max": lambda c: lambda x: torch.maximum(x * 0, torch.tensor(c)) / c,
    "Clamp": lambda c: lambda x: F.normalize(x * 0 + c, eps=c),
    "Where": lambda c: lambda x: torch.where(x > 0, c, 2 * c) / c,
}


@pytest.mark.parametrize("operator", WITH_A_SMALL_NUMBER)
@pytest.mark.parametrize("number", SMALL)
def test_a_small_number_is_exported(operator: str, number: float) -> None:
    """onnxscript takes numbers within 1e-8 of 0 for 0: the exporter would drop the epsilon of a norm."""
    captured = capture(Function(WITH_A_SMALL_NUMBER[operator](number)).eval(), (X,), None, FP32)
    assert departure(captured) is None
    assert np.isfinite(captured.exact(captured.example)["output"]).all()


@pytest.mark.parametrize("factor", [1 + 2e-7, 1 + 1e-6, 1 - 1e-6])
def test_a_factor_that_is_nearly_one_is_exported(factor: float) -> None:
    """onnxscript also takes numbers within 1e-5 of 1 for 1."""
    for function in (lambda x: x * factor, lambda x: x / factor, lambda x: torch.add(x, x, alpha=factor)):
        captured = capture(Function(function).eval(), (X,), None, FP32)
        assert any(node.op_type in ("Mul", "Div") for node in captured.model.graph)
        assert departure(captured) is None


def test_operators_without_effect_are_still_left_out() -> None:
    captured = capture(Function(lambda x: ((x + 0) * 1 - 0) / 1 + x).eval(), (X,), None, FP32)
    assert [node.op_type for node in captured.model.graph] == ["Add"]


def test_a_norm_of_zeros_is_finite_where_it_runs(tmp_path: Path) -> None:
    def norm(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-8)

    with attnforge.load(deployed(norm, tmp_path / "b")) as session:
        assert np.array_equal(session(np.zeros((2, 6, 16), np.float32)), np.zeros((2, 6, 16)))


# --- operators without a float64 kernel -------------------------------------------------------------------------------


class Asinh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.asinh()


def test_an_operator_that_only_runs_in_fp32_has_the_floor_of_fp32() -> None:
    pixels = torch.randn(1, 1, 128, 128, generator=torch.Generator().manual_seed(0)) + 1
    module = nn.Sequential(nn.InstanceNorm2d(1), Asinh())
    assert departure(capture(module.eval(), (pixels,), None, FP32)) is None


# --- randomness -------------------------------------------------------------------------------------------------------


class SetsItselfToTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        self.train()
        dropped: Tensor = self.dropout(x)
        return dropped


def _seeded(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return F.dropout(x, 0.5)


@pytest.mark.parametrize(
    "module",
    [
        Function(lambda x: F.dropout(x, 0.5)),
        Function(lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.3)),
        Function(lambda x: x + torch.rand_like(x) * 1e-7),
        Function(lambda x: x + torch.randn(16)),
        Function(lambda x: torch.bernoulli(x.sigmoid())),
        Function(_seeded),
        Function(lambda x: x if random.random() < 0.01 else 2 * x),
        Function(lambda x: x if np.random.rand() < 0.01 else 2 * x),
        SetsItselfToTraining(),
    ],
)
def test_a_random_module_is_refused(module: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="random numbers"):
        attnforge.deploy(module.eval(), (X,), tmp_path / "b", targets=["onnxruntime"], tune=False)
    assert not (tmp_path / "b").exists()


class Counts(nn.Module):
    """Its output depends on how many times it was called."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def test_a_module_with_state_is_refused() -> None:
    with pytest.raises(CaptureError, match="keeps state between calls"):
        capture(Counts().eval(), (X,), None, FP32)


class KeepsKeys(nn.Module):
    """Attends to the keys of its first call, as decoders do whose encoder ran once."""

    keys: Tensor | None = None

    def forward(self, query: Tensor, source: Tensor) -> Tensor:
        if self.keys is None:
            self.keys = source.tanh()
        return (query @ self.keys.mT).softmax(-1) @ source


def test_a_module_that_keeps_results_of_its_first_inputs_is_refused() -> None:
    with pytest.raises(CaptureError, match="if it was called with other inputs before: it keeps state between calls"):
        capture(KeepsKeys().eval(), (X, X.cos()), None, FP32)


class KeepsKeysOf(nn.Module):
    """Attends to the keys of the first call with as many tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: dict[int, Tensor] = {}

    def forward(self, query: Tensor) -> Tensor:
        tokens = query.shape[1]
        if tokens not in self.keys:
            self.keys[tokens] = query.tanh()
        return (query @ self.keys[tokens].mT).softmax(-1)


class KeepsNamedKeys(nn.Module):
    """Attends to the keys of its first call, which it has as an attribute or not."""

    keys: Tensor

    def forward(self, query: Tensor) -> Tensor:
        if "keys" not in vars(self):
            self.keys = query.tanh()
        return (query @ self.keys.mT).softmax(-1)


@pytest.mark.parametrize("module", [KeepsKeys(), KeepsKeysOf(), KeepsNamedKeys()], ids=lambda m: type(m).__name__)
def test_a_module_that_keeps_results_of_an_earlier_call_is_refused(module: nn.Module) -> None:
    args = (X, X.cos()) if isinstance(module, KeepsKeys) else (X,)
    module.eval()(*(arg.flip(1) for arg in args))
    with pytest.raises(CaptureError, match="keeps 'keys' from a call before it was deployed"):
        capture(module, args, None, FP32)


class HasAnOptionalBias(nn.Module):
    """Adds what it has as a plain attribute, and what it kept before, which is the same for all inputs."""

    bias: Tensor | None = None
    sizes: Tensor | None = None
    means: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("means", torch.zeros(16))
        self.bias = torch.arange(16.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.sizes is None:
            self.sizes = torch.arange(x.shape[2])
        x = self.linear(x if self.bias is None else x + self.bias)
        self.means = x.mean((0, 1))
        return x * self.sizes


def test_constants_and_what_every_call_computes_again_are_no_results_of_an_earlier_call() -> None:
    module = HasAnOptionalBias().eval()
    module(X.cos())
    capture(module, (X,), None, FP32)


class KeepsPositions(nn.Module):
    """Keeps what it computes from the sizes of its inputs alone."""

    positions: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.positions is None:
            self.positions = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        return x * self.positions


class KeepsAsManyPositions(nn.Module):
    """Keeps positions for as many tokens as it was called with, and makes more for more tokens."""

    positions: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.positions is None or x.shape[1] > len(self.positions):
            self.positions = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        return x * self.positions[: x.shape[1]]


class KeepsAsManyInABuffer(nn.Module):
    """The same in a buffer, which torch does not export if it is missing."""

    positions: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.positions is None or x.shape[1] > len(self.positions):
            self.register_buffer("positions", torch.arange(x.shape[1], dtype=x.dtype)[:, None], persistent=False)
        assert self.positions is not None
        return x * self.positions[: x.shape[1]]


class KeepsPositionsOfItsTokens(nn.Module):
    """Keeps positions for the number of tokens that it was called with, and makes others for another number."""

    tokens = 0
    positions: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != self.tokens:
            self.tokens, self.positions = x.shape[1], torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        return x * self.positions


def test_a_module_that_keeps_what_does_not_depend_on_its_inputs_is_captured() -> None:
    capture(KeepsPositions().eval(), (X,), None, FP32)


@pytest.mark.parametrize("module", [KeepsAsManyPositions(), KeepsAsManyInABuffer(), KeepsPositionsOfItsTokens()])
def test_tables_that_a_module_keeps_for_its_sizes_do_not_fix_them(module: nn.Module, tmp_path: Path) -> None:
    shapes = ({1: Dim("tokens", min=2, max=32)},)
    attnforge.deploy(module.eval(), (X,), tmp_path / "b", shapes, targets=["onnxruntime"], tune=False)
    x = torch.randn(2, 9, 16)
    torch.testing.assert_close(attnforge.load(tmp_path / "b")(x), x * torch.arange(9.0)[:, None])


class ReturnsWhatAHookKept(nn.Module):
    """Returns the attention weights, which a hook keeps in a dict of the module or of the code around it."""

    def __init__(self, kept: dict[str, Tensor] | None = None) -> None:
        super().__init__()
        self.softmax, self.kept = nn.Softmax(-1), {} if kept is None else kept
        if kept is None:
            self.softmax.register_forward_hook(lambda module, args, output: self.kept.update(weights=output))
        else:
            self.softmax.register_forward_hook(lambda module, args, output: kept.update(weights=output))

    def forward(self, x: Tensor) -> Tensor:
        self.softmax(x @ x.mT)
        return self.kept["weights"]


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("kept", [None, {}], ids=["its own", "of others"])
def test_what_hooks_keep_is_of_the_last_call(kept: Any, is_called: bool, tmp_path: Path) -> None:
    module = ReturnsWhatAHookKept(kept).eval()
    if is_called:
        module(X)
    attnforge.deploy(module, (X,), tmp_path / "b", targets=["onnxruntime"], tune=False)
    torch.testing.assert_close(attnforge.load(tmp_path / "b", "onnxruntime-cpu")(X.cos()), module(X.cos()))


class Adapted(nn.Module):
    """Its linear layer's forward is replaced by a function that adds a product of weights of small rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(6)
        layer: Any = self.linear
        forward, down, scale = layer.forward, nn.Parameter(torch.randn(16, 2)), nn.Parameter(torch.tensor([0.5]))
        up = [nn.Parameter(torch.randn(2, 16))]
        layer.forward = lambda x, scale=scale: forward(x) + self.norm(x) @ down @ up[0] * scale

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y.softmax(-1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_functions_of_a_module_refer_to_the_copy_that_is_exported(precision: str) -> None:
    module = Adapted()
    captured = capture(module, (X,), None, precision_named(precision))
    assert not module.norm.num_batches_tracked  # the copy is in eval mode, and the module stays as it is
    expected = module.eval()(X).detach()
    answer = torch.from_numpy(captured.eager({"x": X.numpy()})["output"])
    torch.testing.assert_close(answer, expected, rtol=0, atol=2e-2 if precision == "bf16" else 1e-6)


class Warm(nn.Module):
    """Computes something else after some calls."""

    def __init__(self, first: Callable[[Tensor], Tensor], then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.calls, self.first, self.then = 0, first, then

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (self.first if self.calls < 12 else self.then)(x.softmax(-1))


def with_infinity(y: Tensor) -> Tensor:
    return torch.cat([y, y.new_full((*y.shape[:-1], 1), -torch.inf)], -1)


@pytest.mark.parametrize(
    ("first", "then", "precision"),
    [
        (lambda y: y, lambda y: y * 1.05, "fp32"),
        (lambda y: y, lambda y: y * 1.05, "bf16"),
        (with_infinity, lambda y: with_infinity(y * 1.05), "fp32"),
        (with_infinity, lambda y: with_infinity(y).nan_to_num(), "fp32"),
        (lambda y: y.argsort(-1), lambda y: y.argsort(-1, descending=True), "fp32"),
    ],
)
def test_a_module_that_changes_later_is_refused(
    first: Callable[[Tensor], Tensor], then: Callable[[Tensor], Tensor], precision: str, tmp_path: Path
) -> None:
    with pytest.raises(CaptureError, match="returns a different output after other inputs than before them"):
        attnforge.deploy(
            Warm(first, then).eval(), (X,), tmp_path / "b", None, precision, targets=["onnxruntime"], tune=False
        )


def test_generators_of_random_numbers_are_left_as_they_are() -> None:
    before, numbers = random.getstate(), np.random.get_state()
    try:
        np.random.seed(3)
        capture(Function(torch.tanh).eval(), (X,), None, FP32)
        assert random.getstate() == before and np.random.rand() == np.random.RandomState(3).rand()
    finally:
        np.random.set_state(numbers)


def test_a_module_that_writes_to_its_input_is_the_same_each_time() -> None:
    captured = capture(Function(lambda x: x.mul_(2) + 1).eval(), (X.clone(),), None, FP32)
    assert np.array_equal(captured.example["x"], X.numpy())


def test_a_module_that_writes_to_its_input_is_deployed(tmp_path: Path) -> None:
    bundle = deployed(lambda x: x.mul_(2).softmax(-1), tmp_path / "b")
    with attnforge.load(bundle, "onnxruntime-cpu") as session:
        assert np.allclose(session(X.numpy()), (X * 2).softmax(-1).numpy(), atol=1e-6)
    module = Function(lambda x: x.mul_(2)).eval()
    given = X.numpy().copy()
    with attnforge.load(bundle, "eager", module=module) as session:
        session(given)
    assert np.array_equal(given, X.numpy())


# --- nothing proved ---------------------------------------------------------------------------------------------------


def test_an_eager_that_is_far_off_proves_nothing(tmp_path: Path) -> None:
    with pytest.raises(WrongError, match=r"conditioning at Function, Sin output: nothing is proved: .* Sin is steep"):
        deployed(lambda x: torch.sin(1e9 * x), tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_user_may_ask_for_another_limit(tmp_path: Path) -> None:
    bundle = deployed(lambda x: torch.sin(1e9 * x), tmp_path / "b", max_eager_error=2.0)
    assert verify(bundle).passed and bundle.manifest.max_eager_error == 2.0
    with pytest.raises(UsageError, match="max_eager_error is 0; give a relative error above 0"):
        deployed(lambda x: x, tmp_path / "c", max_eager_error=0.0)


def test_a_bundle_that_proves_nothing_does_not_verify(tmp_path: Path) -> None:
    bundle = deployed(lambda x: torch.sin(1e9 * x), tmp_path / "b", keep_wrong=True)
    report = verify(bundle)
    assert not report.passed
    assert str(report.backends["onnxruntime-cpu"].missed).startswith("nothing is proved")


def test_few_numbers_that_are_nearly_zero_by_chance_are_proved_together(tmp_path: Path) -> None:
    """A mean of 96 numbers is sometimes near zero, and eager's relative error is then large."""
    assert verify(deployed(lambda x: x.mean(), tmp_path / "b", "bf16")).passed


# --- wrong bundles ----------------------------------------------------------------------------------------------------


@pytest.fixture
def sigmoid_for_tanh(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exporter that writes Sigmoid for Tanh."""
    right = repair.optimise

    def wrong(model: ir.Model) -> None:
        right(model)
        node = next(node for node in model.graph if node.op_type == "Tanh")
        node.op_type = "Sigmoid"

    monkeypatch.setattr(torch_module, "optimise", wrong)
    monkeypatch.setattr(source, "capture", capture)


@pytest.mark.usefixtures("sigmoid_for_tanh")
def test_backends_show_what_the_export_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle of an earlier version, whose export was not compared, is diagnosed from its graph in float64."""
    monkeypatch.setattr("attnforge.export.deployment.departure", lambda source: None)
    with pytest.raises(WrongError, match=r"onnxruntime-cpu: it missed .* the exporter wrote a different function"):
        deployed(torch.tanh, tmp_path / "b")
    bundle = deployed(torch.tanh, tmp_path / "b", keep_wrong=True)
    assert bundle.manifest.wrong is not None and bundle.manifest.wrong.cause == "export"


@pytest.mark.usefixtures("sigmoid_for_tanh")
def test_a_fault_after_an_operator_that_only_runs_in_fp32_is_named() -> None:
    module = nn.Sequential(Asinh(), nn.Tanh(), nn.Conv1d(6, 6, 2))
    wrong = departure(capture(module.eval(), (X,), None, FP32))
    assert wrong is not None and wrong.evidence.startswith("in fp32, tanh of the exported graph is ")
    assert wrong.evidence.endswith(" aten.tanh.default(asinh), the graph Sigmoid")


@pytest.mark.usefixtures("sigmoid_for_tanh")
def test_a_wrong_deploy_is_kept_only_on_request(tmp_path: Path, caplog: Any) -> None:
    with pytest.raises(WrongError, match=r"aten\.tanh\.default output: .* the graph Sigmoid"):
        deployed(torch.tanh, tmp_path / "b")
    assert not (tmp_path / "b").exists()
    bundle = deployed(torch.tanh, tmp_path / "b", keep_wrong=True)
    with pytest.raises(UnavailableError, match="was kept although it is wrong"):
        attnforge.load(bundle)
    with attnforge.load(bundle, "onnxruntime-cpu"):
        assert "was kept although it is wrong" in caplog.text
    with pytest.raises(UnavailableError, match="was kept although it is wrong"):
        package([bundle], tmp_path / "models")
    finding = attnforge.diagnose(bundle).finding
    assert (finding.cause, finding.tensor, finding.operator) == ("export", "output", "aten.tanh.default")


def test_the_command_line_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "steep.py").write_text(
        "import torch\n"
        "class Steep(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.sin(1e9 * x)\n"
        "def model():\n"
        "    return Steep(), (torch.randn(2, 8),), None\n"
    )
    monkeypatch.chdir(tmp_path)

    def code(*arguments: str) -> int:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["attnforge", *arguments])
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    command = ["deploy", "steep:model", "--target", "onnxruntime", "--no-tune", "--out", "b", "--json"]
    assert code(*command) == 1 and not Path("b").exists()
    error = json.loads(capfd.readouterr().out)["error"]
    assert error["kind"] == "WrongError" and "--keep-wrong" in error["message"]
    assert code(*command, "--keep-wrong") == 0
    assert code("verify", "b") == 1


def test_the_choice_of_a_backend_skips_wrong_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two targets is wrong: the bundle is written, and `auto` uses the other."""
    real, asked = why_unavailable, ["onnxruntime-cpu", "onnxruntime-cuda"]
    monkeypatch.setattr(checking, "why_unavailable", lambda b, name: None if name in asked else real(b, name))
    monkeypatch.setattr(checking, "why_dropped", lambda *_: {"onnxruntime-cuda": "it is wrong"})
    bundle = deployed(torch.tanh, tmp_path / "b")
    assert bundle.manifest.choice is not None and bundle.manifest.choice.dropped == {"onnxruntime-cuda": "it is wrong"}
    preferred = by_preference(bundle)
    assert preferred.index("onnxruntime-cpu") < preferred.index("onnxruntime-cuda")


class Statistics(nn.Module):
    """A batch norm that uses the statistics of its input in eval mode too, which the exporter ignores."""

    mean: Tensor
    variance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("variance", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, training=True)


def test_a_wrong_operator_of_several_results_is_named(tmp_path: Path) -> None:
    with pytest.raises(WrongError, match=r"_native_batch_norm_legit.*the graph BatchNormalization"):
        attnforge.deploy(Statistics().eval(), (X,), tmp_path / "b", targets=["onnxruntime"], tune=False)


def test_a_choice_among_equal_numbers_is_named_as_one() -> None:
    """The mask's number, which is that of float64 in the module and that of fp32 in the graph, is not named instead."""

    def chosen(x: Tensor) -> Tensor:
        hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
        weights = (x @ x.mT).masked_fill(hidden, -torch.finfo(x.dtype).max).softmax(-1)
        largest = (weights @ x).sum(-1).clamp(max=-9.0).topk(2).indices  # of scores that are all the same
        return x.gather(1, largest[..., None].expand(-1, -1, 16))

    wrong = departure(capture(Function(chosen).eval(), (X,), None, FP32))
    assert wrong is not None and wrong.operator == "aten.gather.default"
    assert "TopK" in wrong.evidence and wrong.evidence.endswith("which may choose others of equal numbers")


@pytest.mark.parametrize("seed", [*range(len(FAULTS)), 25, 157])
def test_a_fault_of_export_is_refused_and_named(seed: int, tmp_path: Path) -> None:
    """A draw of `python -m benchmarks run export-faults`, which tries 200."""
    verdict = tried(seed, tmp_path)
    assert verdict.fault.kind == FAULTS[seed % len(FAULTS)].__name__
    assert verdict.is_good, verdict


def test_frozen_sizes_show_at_the_smallest_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A size of the example instead of the input's own is right only on the example."""
    right = repair.optimise

    def frozen(model: ir.Model) -> None:
        right(model)
        node = next(node for node in model.graph if node.op_type == "Mul")
        operand = next(value for value in node.inputs if value is not model.graph.inputs[0])
        assert operand is not None
        six = ir.val("six", const_value=ir.tensor(np.float32(6), name="six"))
        model.graph.register_initializer(six)
        node.replace_input_with(list(node.inputs).index(operand), six)

    module = Function(lambda x: x * x.shape[1]).eval()
    sizes = {"x": {1: Dim("tokens", min=2, max=9)}}
    assert departure(capture(module, (X,), sizes, FP32)) is None
    monkeypatch.setattr(torch_module, "optimise", frozen)
    wrong = departure(capture(module, (X,), sizes, FP32))
    assert wrong is not None and wrong.operator in ("aten.mul.Tensor", "aten.scalar_tensor.default")


def test_a_size_that_the_exporter_freezes_is_found_at_another_and_named() -> None:
    module = Function(lambda x: x.reshape(int(x.shape[0] / 0.5), 3, -1).mT.reshape(x.shape)).eval()
    wrong = departure(capture(module, (X,), {"x": {0: Dim("samples", min=1, max=9)}}, FP32))
    assert wrong is not None and "differs from the module's with x [3, 6, 16]: " in wrong.evidence


def test_a_frozen_size_that_only_a_case_shows_is_called_a_fault_of_export(tmp_path: Path) -> None:
    module = Function(lambda x: x[:, : int(x.shape[1] ** 0.5)]).eval()  # 2 of 4 to 8 tokens
    sizes = {"x": {0: Dim("samples", max=4), 1: Dim("tokens", min=2, max=32)}}
    with pytest.raises(WrongError, match=r"not deployed: export: .* the exporter wrote a different function"):
        attnforge.deploy(module, (X,), tmp_path / "b", sizes, targets=["onnxruntime"], tune=False)


@pytest.mark.parametrize(
    ("function", "assumed"),
    [
        (lambda x: 2 * x if 17 <= x.shape[1] < 19 else x.softmax(-1), "assumes tokens <= 16: with tokens 17"),
        (lambda x: 2 * x if x.shape[1] == 23 else x.softmax(-1), r"assumes Ne\(tokens, 23\): with tokens 23"),
        (lambda x: 2 * x if x.shape[1] % 33 == 0 else x.softmax(-1), r"assumes Ne\(Mod\(tokens, 33\), 0\)"),
        (lambda x: 2 * x if x.shape[1] // 100 == 7 else x.softmax(-1), r"assumes Ne\(.*, 7\): with tokens 7\d\d"),
    ],
)
def test_a_branch_on_a_size_that_no_case_has_is_refused(
    function: Callable[[Tensor], Tensor], assumed: str, tmp_path: Path
) -> None:
    """torch's exporter keeps the example's branch, and leaves out the check that sizes take it."""
    with pytest.raises(WrongError, match=f"branches on sizes, and torch.export {assumed}"):
        sizes = {"x": {1: Dim("tokens", min=2, max=2000)}}
        attnforge.deploy(Function(function).eval(), (X,), tmp_path / "b", sizes, targets=["onnxruntime"], tune=False)


class Alike(nn.Module):
    """Branches on how two sizes compare, as attention to itself and to others may."""

    def __init__(self, is_other: Callable[[int, int], bool]) -> None:
        super().__init__()
        self.is_other = is_other

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        weights = (x @ memory.mT).softmax(-1)
        return (2 if self.is_other(x.shape[1], memory.shape[1]) else 1) * weights @ memory


@pytest.mark.parametrize(
    "is_other",
    [lambda n, m: n == m, lambda n, m: 2 * n - m == 10, lambda n, m: 700 <= n * m < 1000],
)
def test_a_branch_on_two_sizes_is_refused(is_other: Callable[[int, int], bool]) -> None:
    n, m = (Dim(name, min=2, max=400) for name in ("n", "m"))
    args = torch.randn(1, 100, 8), torch.randn(1, 64, 8)
    wrong = departure(capture(Alike(is_other).eval(), args, {"x": {1: n}, "memory": {1: m}}, FP32))
    assert wrong is not None and "branches on sizes" in wrong.evidence


@pytest.mark.parametrize(
    ("function", "dim"),
    [
        (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), Dim("tokens", min=1, max=40)),
        (lambda x: x.unflatten(1, (-1, 2)).softmax(-1), 2 * Dim("pairs", min=1, max=20)),
        (lambda x: x[:, : min(x.shape[1], 20)].softmax(-1), Dim("tokens", min=1, max=40)),
    ],
)
def test_sizes_of_which_much_is_assumed_and_nothing_is_wrong(function: Callable[[Tensor], Tensor], dim: Any) -> None:
    assert departure(capture(Function(function).eval(), (X,), {"x": {1: dim}}, FP32)) is None
