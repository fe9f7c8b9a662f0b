"""verify, diagnose and precision="auto" on awkward models: outputs that are not floats, inputs without dims, weights as
outputs, masks with their own dtype, operators without a double kernel in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnforge
from attnforge.bundle import Bundle, DimSpec
from attnforge.errors import CaptureError, InputError, UsageError, WrongError
from attnforge.export.diagnosis.diagnose import diagnose
from attnforge.export.diagnosis.findings import another_reference
from attnforge.export.graphs.execute import as_it_is
from attnforge.export.sources.torch_module import capture
from attnforge.precision import precision_named
from attnforge.runtime.parity.metrics import accuracy
from attnforge.runtime.parity.verify import hold
from attnforge.runtime.session import Session
from tests.support.broken import DIM, TOKENS, Attention
from tests.support.pairs import pairs


class Function(nn.Module):
    """Attention, and a function of its output and of the inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.attention, self.function = Attention(), function
        self.offset = nn.Parameter(torch.randn(TOKENS, DIM))

    def forward(self, x: Tensor, *more: Tensor) -> Any:
        return self.function(self, self.attention(x), *more)


def made(function: Callable[..., Any], *more: Tensor) -> tuple[nn.Module, tuple[Tensor, ...]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Function(function).eval(), (torch.randn(2, TOKENS, DIM), *more)


def deployed(function: Callable[..., Any], folder: Path, precision: str, *more: Tensor) -> Bundle:
    module, args = made(function, *more)
    return attnforge.deploy(module, args, folder, None, precision, ["onnxruntime"], tune=False)


AWKWARD: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "indices": (lambda s, y: y.argmax(-1), ()),
    "steep indices": (lambda s, y: (100 * y).sin().argmax(-1), ()),
    "booleans": (lambda s, y: (y, y > 0), ()),
    "a weight": (lambda s, y: (y, s.offset), ()),
    "a constant with a weight's name": (lambda s, y: {"y": y + s.offset, "offset": s.offset.exp()}, ()),
    "the same twice": (lambda s, y: (y, y), ()),
    "a number": (lambda s, y, t: y * t, (torch.tensor(0.5),)),
    "a number out": (lambda s, y: y.square().mean(), ()),
    "positions": (lambda s, y: y + torch.arange(TOKENS, dtype=y.dtype)[:, None] / TOKENS, ()),
    "resized": (lambda s, y: F.interpolate(y[:, None], scale_factor=2.0, mode="bilinear"), ()),
    "zeros of its own": (lambda s, y: torch.cat([y.new_zeros(2, 1, DIM), y], 1), ()),
    "inputs written to": (
        lambda s, y, hidden: y.masked_fill(hidden.logical_not_(), 0),
        (torch.rand(2, TOKENS, 1) < 0.7,),
    ),
    "a mask for all queries, and no double kernel": (
        lambda s, y, seen: F.scaled_dot_product_attention(y[:, None].asinh(), *(y[:, None],) * 2, seen[:, None, None]),
        (torch.arange(TOKENS) < torch.tensor([[5], [TOKENS]]),),
    ),
    "cumulated": (lambda s, y: y.cumsum(1) / TOKENS, ()),
    "resized twice": (lambda s, y: F.interpolate(y, scale_factor=2.0) - F.interpolate(y.abs(), scale_factor=2.0), ()),
}


@pytest.mark.parametrize(("name", "precision"), pairs([*AWKWARD], ["fp32", "auto"]))
def test_it_is_deployed_verified_and_diagnosed(name: str, precision: str, tmp_path: Path) -> None:
    """Each in fp32 or in `auto`, which exports fp32 first; `precision/test_auto.py` tests what `auto` chooses."""
    function, more = AWKWARD[name]
    bundle = deployed(function, tmp_path / "b", precision, *more)
    assert attnforge.verify(bundle).passed
    onnx.checker.check_model(str(bundle.file("canonical.onnx")), full_check=True)
    if name.startswith(("resized", "a mask")):
        with pytest.raises(attnforge.errors.UnavailableError, match=r"Resize|Asinh"):
            diagnose(bundle)
    else:
        assert diagnose(bundle).failing == []


class Wrong(Session):
    change: Callable[[dict[str, Any]], None]

    def run(self, values: Any, **options: Any) -> dict[str, Any]:
        results = super().run(values, **options)
        type(self).change(results)
        return results


def failing(bundle: Bundle, change: Callable[[dict[str, Any]], None]) -> list[str]:
    """Why a session with altered outputs does not pass."""
    with attnforge.load(bundle) as session:
        session.__class__ = type("Altered", (Wrong,), {"change": staticmethod(change)})
        report = hold(session.bundle, session.backend, session.run)
        return [str(failure.reason) for failure in report.failures]


def test_indices_are_right_or_wrong(tmp_path: Path) -> None:
    bundle = deployed(AWKWARD["indices"][0], tmp_path / "b", "fp16")

    def next_ones(results: dict[str, Any]) -> None:
        results["output"] = results["output"] + 1

    assert "are neither eager's nor float64's" in failing(bundle, next_ones)[0]


@pytest.mark.parametrize("change", ["flat", "wide"])
def test_an_output_of_another_form_fails(change: str, tmp_path: Path) -> None:
    bundle = deployed(lambda s, y: y, tmp_path / "b", "fp32")

    def altered(results: dict[str, Any]) -> None:
        y = results["output"]
        results["output"] = y.reshape(-1) if change == "flat" else y.astype(np.float64)

    reason = failing(bundle, altered)[0]
    assert "and must be float32[2, 24, 64]" in reason


def test_a_mask_of_its_own_type_does_not_spoil_float64(tmp_path: Path) -> None:
    """torch's fused attention on the CPU misreads a float32 mask with float64 queries."""

    def masked(s: Function, y: Tensor) -> Tensor:
        mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)
        return F.scaled_dot_product_attention(y[:, None], y[:, None], y[:, None], mask)

    bundle = deployed(masked, tmp_path / "b", "fp32")
    report = attnforge.verify(bundle)
    assert report.passed and report.warnings == []
    ordinary = {case.name for case in bundle.manifest.cases if case.is_ordinary}
    for comparison in report.backends["onnxruntime-cpu"].comparisons:
        assert comparison.case not in ordinary or comparison.eager_error < 1e-5
    assert diagnose(bundle).finding.cause == "rounding"


def test_tensors_with_their_own_dtype_are_reported(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="need the dtype of its inputs"):
        deployed(lambda s, y: y @ torch.ones(DIM, DIM), tmp_path / "b", "auto")


class Remembers(nn.Module):
    """Keeps the result of its first call outside its buffers, as LeViT keeps the biases of its attention."""

    def __init__(self, inside: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.attention, self.bias, self.inside = Attention(), nn.Parameter(torch.randn(TOKENS, TOKENS)), inside
        self.cache: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        if "cpu" not in self.cache:
            self.cache["cpu"] = self.inside(self.bias.flip(0))
        kept = self.cache["cpu"]
        y: Tensor = self.attention(x)
        return (y @ y.mT + (kept if isinstance(kept, Tensor) else kept.tensor)).softmax(-1) @ y


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("grad", [True, False])
def test_a_module_that_was_called_before_is_deployed(grad: bool, precision: str, tmp_path: Path) -> None:
    module, x = Remembers(lambda tensor: tensor).eval(), torch.randn(2, TOKENS, DIM)
    with torch.set_grad_enabled(grad):
        module(x)
    kept = module.cache["cpu"]
    bundle = attnforge.deploy(module, (x,), tmp_path / "b", None, precision, ["onnxruntime"], tune=False)
    assert bundle.manifest.attention.canonical == 2
    assert attnforge.verify(bundle, ["onnxruntime-cpu", "eager"], module=module).passed
    assert module.cache["cpu"] is kept and kept.dtype == torch.float32


def test_a_module_that_hides_tensors_is_refused_in_one_line(tmp_path: Path) -> None:
    class Box:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor.detach()

    module, x = Remembers(Box).eval(), torch.randn(2, TOKENS, DIM)
    module(x)
    with pytest.raises(CaptureError, match=r"^Remembers does not run in float16: .*the dtype of its inputs$"):
        attnforge.deploy(module, (x,), tmp_path / "b", None, "fp16", ["onnxruntime"], tune=False)


class Rotated(nn.Module):
    """Rotary positions from a table of complex numbers, as in Llama's own code."""

    rotations: Tensor

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(TOKENS), 1e4 ** (-torch.arange(0, DIM, 2) / DIM))
        self.register_buffer("rotations", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.rotations).flatten(-2).type_as(x)


def test_a_buffer_of_complex_numbers_stays_complex_in_16_bits() -> None:
    x = torch.randn(2, TOKENS, DIM, generator=torch.Generator().manual_seed(0)).half().float()
    captured = capture(Rotated(), (x,), None, precision_named("fp16"))
    got, exact = captured.eager(captured.example)["output"], captured.exact(captured.example)["output"]
    graph = as_it_is(captured.model)(captured.example)["output"]
    for array in (got, exact, graph):
        assert np.allclose(array, Rotated()(x), atol=2e-3)


class Recurrent(nn.Module):
    """Torch's decompositions freeze sizes that follow a GRU, which ONNX Runtime computes in fp32 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.recur, self.attention = nn.GRU(DIM, DIM, batch_first=True), nn.MultiheadAttention(DIM, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.recur(x)
        result: Tensor
        result, _ = self.attention(x, x, x, need_weights=False)
        return result


def test_sizes_after_a_recurrent_layer_stay_dynamic(tmp_path: Path) -> None:
    shapes = {"x": {0: torch.export.Dim("batch", max=4), 1: torch.export.Dim("tokens", min=2, max=32)}}
    args = (torch.randn(2, TOKENS, DIM),)
    bundle = attnforge.deploy(Recurrent().eval(), args, tmp_path / "b", shapes, targets=["onnxruntime"], tune=False)
    session = attnforge.load(bundle.path, "onnxruntime-cpu")
    with pytest.raises(InputError, match="1 to 4"):  # ONNX Runtime's recurrent operators end the process
        session.run({"x": torch.zeros(0, TOKENS, DIM)})
    assert bundle.manifest.outputs[0].dims == bundle.manifest.inputs[0].dims


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recur = nn.LSTM(DIM, DIM, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor
        result = self.recur(x)[0] + self.recur(x.flip(1))[0]
        return result


class Decomposed(Twice):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.recur(x)[0]
        return torch.nan_to_num(result)  # which torch decomposes, and the layer with it


def test_sizes_after_two_recurrent_layers_stay_dynamic() -> None:
    shapes = {"x": {0: torch.export.Dim("batch", max=4), 1: torch.export.Dim("tokens", max=64)}}
    module, projecting = Twice().eval(), Twice().eval()
    projecting.recur = nn.LSTM(DIM, 2 * DIM, batch_first=True, proj_size=DIM)
    capture(projecting, (torch.randn(2, 5, DIM),), {"x": {0: shapes["x"][0]}}, precision_named("fp32"))
    for first in (Decomposed().eval(), module):  # torch keeps what it decomposed a layer into
        captured = capture(first, (torch.randn(2, 5, DIM),), shapes, precision_named("fp32"))
    x = torch.randn(3, 7, DIM)
    (got,) = as_it_is(captured.model)({"x": x.numpy()}).values()
    torch.testing.assert_close(torch.from_numpy(got), module(x).detach())


def test_a_dynamic_dim_is_at_least_1() -> None:
    batch, pairs = torch.export.Dim("batch", max=4), torch.export.Dim("pairs", max=9)
    captured = capture(
        Attention().eval(), (torch.randn(2, 4, DIM),), ({0: batch, 1: 2 * pairs},), precision_named("fp32")
    )
    assert [dim.min for dim in captured.inputs[0].dims if isinstance(dim, DimSpec)] == [1, 2]


def test_an_lstm_that_projects_is_exported_over_a_fixed_number_of_tokens() -> None:
    module = Twice().eval()
    module.recur = nn.LSTM(DIM, 2 * DIM, 2, batch_first=True, bidirectional=True, proj_size=DIM)
    batch, tokens = torch.export.Dim("batch", max=4), torch.export.Dim("tokens", max=64)
    args = (torch.randn(2, 3, DIM),)  # each token adds to the graph
    captured = capture(module, args, {"x": {0: batch}}, precision_named("fp32"))
    x = torch.randn(3, 3, DIM)
    (got,) = as_it_is(captured.model)({"x": x.numpy()}).values()
    torch.testing.assert_close(torch.from_numpy(got), module(x).detach())
    with pytest.raises(CaptureError, match="an LSTM with proj_size needs a fixed number of tokens"):
        capture(module, args, {"x": {1: tokens}}, precision_named("fp32"))


def test_an_exported_graph_with_frozen_sizes_is_refused_in_one_line(tmp_path: Path) -> None:
    class Decomposed(Recurrent):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.nan_to_num(x))  # which is decomposed

    shapes = {"x": {1: torch.export.Dim("tokens", min=2, max=32)}}
    args = (torch.randn(1, TOKENS, DIM),)
    with pytest.raises(WrongError, match=r"export: the exported graph does not run with x \[1, 3, \d+\]: "):
        attnforge.deploy(Decomposed().eval(), args, tmp_path / "b", shapes, targets=["onnxruntime"], tune=False)


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        (
            lambda s, y: y + s.missing,
            r"does not run in float32: .* has no attribute 'missing' \(test_awkward\.py:\d+\)$",
        ),
        (
            lambda s, y: y if y.sum() > 0 else -y,
            r"^torch cannot export Function: its code depends on values \(data-dependent expression Eq\(u0, 1\)\); "
            r"choose by torch\.where, or deploy the part before it \(test_awkward\.py:\d+\)$",
        ),
        (
            lambda s, y: torch._check_tensor_all(y.abs() < 1e3) or y,  # type: ignore[no-untyped-call]
            r"does not run .* \(test_awkward\.py:\d+\); the inputs of case extremes are random, .* checks of data "
            r"out of forward, and sizes that it does not take out of its Dims$",
        ),
        (lambda s, y: [{1, 2}], r"^the module must return a tensor, or .* of tensors, not set in what it returned$"),
    ],
)
def test_errors_of_the_module_itself_are_one_line(
    inside: Callable[[Any, Tensor], Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CaptureError, match=message):
        deployed(inside, tmp_path / "b", "fp32")


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        (
            lambda s, y: F.scaled_dot_product_attention(y, y, y, is_causal=y.shape[0] > 1),
            r"must be bool, not SymBool; write bool\(…\) around a comparison of sizes \(test_awkward\.py:\d+\)$",
        ),
        (
            lambda s, y: F.conv1d(y.flatten(0, 1)[None], y.flatten(0, 1)[:, None, :3], groups=y.shape[0] * TOKENS),
            r"a constant of an operator, such as a convolution's groups, depends on a dynamic dim; give no Dim for it",
        ),
    ],
)
def test_what_torch_cannot_export_at_dynamic_sizes(inside: Callable[[Any, Tensor], Any], message: str) -> None:
    module, args = made(inside)
    with pytest.raises(CaptureError, match=message):
        capture(module, args, ({0: torch.export.Dim("batch", min=1, max=4)},), precision_named("fp32"))


def test_a_static_method_that_a_module_keeps(tmp_path: Path) -> None:
    module, args = made(lambda s, y: s.squash(y))
    vars(module)["squash"] = staticmethod(torch.sin)
    attnforge.deploy(module, args, tmp_path / "b", targets=["onnxruntime"], tune=False)


def test_a_reference_that_is_another_function_is_found(tmp_path: Path) -> None:
    bundle = deployed(lambda s, y: y, tmp_path / "b", "fp32")
    assert diagnose(bundle).healthy
    finding = another_reference(5e-8, 0.27, bundle.manifest)
    assert finding is not None and finding.cause == "reference" and "0.27" not in finding.evidence.split("off")[0]
    assert another_reference(5e-8, 3e-7, bundle.manifest) is None


def test_there_is_one_label_per_sample() -> None:
    logits = np.array([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]])
    assert accuracy({"y": logits}, np.array([1, 0, 1])) == accuracy({"y": logits}, np.array([[1], [0], [1]])) == 1.0
    assert accuracy({"y": logits * np.nan}, np.array([0, 0, 0])) == 0.0, "NaN has no class"
    with pytest.raises(UsageError, match="2 labels for 3 samples"):
        accuracy({"y": logits}, np.array([1, 0]))


def test_every_backend_has_its_own_score(tmp_path: Path) -> None:
    module, args = made(lambda s, y: y.mean(1))
    labels = module(*args).argmax(-1)
    bundle = attnforge.deploy(
        module, args, tmp_path / "b", None, "fp32", ["onnxruntime"], tune=False, data=[args], labels=[labels],
        metric="accuracy",
    )  # fmt: skip
    negative, _ = made(lambda s, y: -y.mean(1))
    report = attnforge.verify(bundle, ["onnxruntime-cpu", "eager"], module=negative)
    metrics = {name: backend.metric for name, backend in report.backends.items()}
    assert metrics["onnxruntime-cpu"] is not None and metrics["onnxruntime-cpu"].value == 1.0
    assert metrics["eager"] is not None and (metrics["eager"].value, metrics["eager"].samples) == (0.0, 2)


def test_eager_of_a_bundle_that_chose_its_precisions_is_fp32(tmp_path: Path) -> None:
    module, args = made(lambda s, y: y / (1e-3 + (300 * y).pow(2).mean(-1, keepdim=True).sqrt()))
    bundle = attnforge.deploy(module, args, tmp_path / "b", None, "auto", ["onnxruntime"], tune=False)
    assert attnforge.verify(bundle, module=module).passed
