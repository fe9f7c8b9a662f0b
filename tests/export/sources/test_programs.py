"""Programs of torch.export that torch need not decompose, which takes half of an export."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnxscript.rewriter._matcher import SimplePatternMatcher
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization
from torch.onnx._internal.exporter import _fx_passes

from attnforge.errors import CaptureError
from attnforge.export.graphs.execute import as_it_is
from attnforge.export.sources import repair
from attnforge.export.sources.torch_module import capture
from attnforge.precision import precision_named

SHAPES = {"x": {0: Dim("batch", max=4), 1: Dim("tokens", min=2, max=64)}}


class Renamed(nn.Module):
    """Operators that are others under another name, differences of neighbours, and one whose result is not used."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        unused = x.softmax(-1)
        seen = (x > 0) & (x < 1) | (x < -1)
        offset = torch.tensor([0.5, -0.5]).mean()  # a constant that torch detaches
        low, high = torch.min(x, x.roll(1, -1)), torch.max(x, offset)
        fewer = x.chunk(5, dim=-1)  # four parts of two
        (whole,) = torch.chunk(x, chunks=1, dim=2)
        turned = (1.5 - torch.arange(5)).T, torch.rsub(seen.long(), 2.5), torch.rsub(x, 1, alpha=2).flatten(1).T
        casts = seen.mT.to(torch.int64), high.to(torch.float64).to("cpu"), unused[:0].to(x)
        steps = x.diff(dim=1), seen.long().diff(prepend=seen[..., :1].long() - 1), x.diff(1, 0, append=x[:2])
        mixed = x.shape[1] * 0.5 - seen.long(), x.shape[1] - x, x.clamp(min=-1, max=0.5)
        return low.mT, *casts, *fewer, whole, *turned, *steps, *mixed


class Promoted(nn.Module):
    """Operands of several dtypes, products among them."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        count = (x > 0).sum(-1, keepdim=True)
        scores = x.sign() @ x.sign().mT  # whole numbers, which no order of addition rounds
        outer = torch.einsum("i,j->ij", torch.arange(x.shape[1]), x[0, 0])
        masked = torch.einsum("bij,bi->bij", x > 0, x[..., 0])
        compared = x > count, torch.where(x > 0, x, 1)
        return count * x, count / 3, scores + scores.to(torch.float64), x * 2, outer, masked, *compared


class OfBooleans(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (torch.einsum("bi,bj->bij", x[..., 0] > 0, x[..., 1] > 0),)


class Empty(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x[..., :0].chunk(3, -1)


def test_parts_of_nothing() -> None:
    """ONNX Runtime ends the process if it splits them into parts of size 0."""
    check(Empty())


class Decomposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nan_to_num(x)


def refuse(*_: Any) -> Any:
    raise AssertionError("torch decomposes the program")


def test_what_has_functions_is_not_decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fx_passes, "decompose_with_registry", refuse)
    check(Renamed())


@pytest.mark.parametrize("module", [Promoted(), OfBooleans()])
def test_operands_of_several_dtypes_are_cast_as_torch_does(module: nn.Module) -> None:
    check(module)


class Complex(nn.Module):
    """Positions as complex numbers in a buffer, as in Llama's own code, with the views that exporters lack."""

    turns: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        angles = torch.outer(torch.arange(64.0), torch.tensor([1.0, 0.1, 0.01, 0.001]))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        numbers = torch.view_as_complex(x.reshape(*x.shape[:2], 4, 2))  # (batch, tokens, 4)
        positions = torch.arange(x.shape[1], device=x.device)
        gathered = self.turns[positions].unsqueeze(-3).expand(x.shape[0], -1, -1)
        others = self.turns.index_select(-2, positions).reshape(1, x.shape[1], 4) * 1.5
        last = self.turns[-1].repeat(2, 1).to("cpu")[:, None].select(-3, 1)
        results = (
            numbers * gathered, numbers / self.scale, self.scale * numbers * others, (numbers * last).flatten(-2),
            numbers.mT.contiguous().conj() * x[:, :1, :1], numbers + gathered.clone() / x.shape[1],
        )  # fmt: skip
        more = numbers + x[:, :, :1], 2 + numbers.neg(), numbers - (1 + 2j), (numbers * (0.5 - 1j)) / 2j
        of_real = x[..., :4] / (numbers + 9), x[..., :4] - numbers
        turned = numbers * torch.exp(1j * torch.outer(positions.float(), torch.tensor([1.0, 0.5, 0.3, 0.1])))
        return (
            *(torch.view_as_real(result) for result in (*results, *more, *of_real)),
            turned.imag,
            *(part.real for part in (*torch.split(numbers, [1, 3], -1), *numbers.chunk(2, -1))),
            (-0.5j * x.long()).real,
        )


def test_complex_numbers_are_pairs() -> None:
    check(Complex(), rtol=1e-5, atol=1e-6)
    captured = capture(Complex().eval(), (torch.randn(3, 7, 8),), SHAPES, precision_named("fp32"))
    assert not any(isinstance(spec.dims[0], int) for spec in captured.outputs), "no dim is fixed"


def test_complex_inputs_and_outputs_are_refused() -> None:
    pairs, precision = torch.randn(2, 5, 8, 2), precision_named("fp32")
    with pytest.raises(CaptureError, match="example input 0 is complex64; take real pairs"):
        capture(nn.Identity(), (torch.view_as_complex(pairs),), None, precision)
    with pytest.raises(CaptureError, match="the module returns complex numbers; return real pairs"):
        capture(Conjugate(), (pairs,), None, precision)


@pytest.mark.parametrize("model", [torch.relu, nn.Linear, torch.jit.script(nn.Linear(8, 8))])
def test_what_is_no_module_is_refused(model: Any) -> None:
    with pytest.raises(CaptureError, match=r"the model is a \w+; give a torch.nn.Module"):
        capture(model, (torch.randn(2, 8),), None, precision_named("fp32"))


def test_what_torch_quantised_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantise: Any = torch.ao.quantization.quantize_dynamic
        quantised = quantise(nn.Sequential(nn.Linear(8, 8)).eval())
    with pytest.raises(CaptureError, match=r"Sequential has a Linear that torch\.ao quantised; give the module as"):
        capture(quantised, (torch.randn(2, 8),), None, precision_named("fp32"))


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.script(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


def test_a_script_within_a_module_is_refused_in_one_line() -> None:
    with pytest.raises(CaptureError, match=r"torch cannot export Scripted: .*inner\.weight"):
        capture(Scripted(), (torch.randn(2, 8),), None, precision_named("fp32"))


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({0: Dim("batch", max=4)}, "dynamic_shapes names 0; the inputs are input"),
        (({-2: Dim("batch", max=4)},), "dynamic_shapes has dim -2 of 'input', whose dims are 0 to 1"),
        (({2: Dim("batch", max=4)},), "dynamic_shapes has dim 2 of 'input', whose dims are 0 to 1"),
        (3, "dynamic_shapes has 3 in place of"),
        ((3,), "dynamic_shapes has 3 in place of"),
    ],
)
def test_dims_that_no_input_has(shapes: Any, words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        capture(nn.Linear(8, 8), (torch.randn(2, 8),), shapes, precision_named("fp32"))


class Frozen(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.one_hot(x.long(), x.shape[0])


@pytest.mark.parametrize(("size", "advice"), [(1, "an example size of at least 2"), (5, "no Dim for it")])
def test_a_dim_that_the_export_fixes(size: int, advice: str) -> None:
    words = rf"len\(x\) in place of x.shape.* and int\(n / 2\) in place of n // 2; give {advice}$"
    with pytest.raises(CaptureError, match=f"fixed it at {size}: .* {words}"):
        capture(Frozen(), (torch.zeros(size),), ({0: Dim("n", min=1, max=8)},), precision_named("fp32"))


class OffDiagonal(nn.Module):
    """Masks of Booleans that are filled and chosen, and a diagonal in two types."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        own = torch.zeros(x.shape[1], x.shape[1], dtype=torch.bool)
        own.fill_diagonal_(True)
        few = torch.where(x > 0, x < 1, (x < -1).masked_fill(x < -2, False))
        scores = (x @ x.mT).masked_fill(own, -9)
        return scores.softmax(-1), x.masked_fill(few, 0), scores[0].clone().fill_diagonal_(7.0)


def test_booleans_are_chosen_and_diagonals_filled() -> None:
    check(OffDiagonal(), rtol=1e-5, atol=1e-6)


class Padded(nn.Module):
    """Pads tokens to a multiple of 4, as attention in windows does."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] % 4:
            x = F.pad(x, (0, -x.shape[0] % 4))
        windows = x.reshape(-1, 4)
        return windows if windows.shape[0] < 2 else windows + windows.roll(1, 0)


def test_a_dim_that_the_export_takes_only_multiples_of() -> None:
    with pytest.raises(
        CaptureError,
        match=r"dim 0 of input 'x' was declared dynamic \(n\) but the export takes only multiples of 4: the module's "
        r"code depends on its value; give 4 \* torch\.export\.Dim\(…\)$",
    ):
        capture(Padded(), (torch.zeros(12),), ({0: Dim("n", min=1, max=16)},), precision_named("fp32"))


class Heads(nn.Module):
    """Repeats a mask for each head and views it by the other input's samples, as diffusers does."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        by_head = mask.repeat_interleave(2, 0).view(x.shape[0], 2, -1, mask.shape[1])
        return (x[:, None] @ x[:, None].mT + by_head).softmax(-1) @ x[:, None]


def test_a_dim_of_two_inputs_in_a_view_that_broadcasts() -> None:
    x, mask = torch.randn(3, 7, 8), torch.randn(3, 7)
    shapes = {"x": SHAPES["x"], "mask": SHAPES["x"]}
    captured = capture(Heads(), (torch.randn(2, 5, 8), torch.randn(2, 5)), shapes, precision_named("fp32"))
    (got,) = as_it_is(captured.model)({"x": x.numpy(), "mask": mask.numpy()}).values()
    torch.testing.assert_close(torch.from_numpy(got), Heads()(x, mask), rtol=1e-5, atol=1e-6)


class Renames(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"y": y, "x": x + y}


def test_an_output_has_the_name_of_an_input(caplog: pytest.LogCaptureFixture) -> None:
    x, y = torch.randn(2, 8), torch.randn(2, 8)
    captured = capture(Renames(), (x, y), None, precision_named("fp32"))
    assert caplog.messages == [f"Renames has an input {n!r}: the output of that name is '{n}_out'" for n in "xy"]
    assert [spec.name for spec in captured.inputs] == ["x", "y"]
    for outputs in (captured.eager(captured.example), captured.exact(captured.example)):
        assert [*outputs] == [spec.name for spec in captured.outputs] == ["y_out", "x_out"]
        torch.testing.assert_close(torch.from_numpy(outputs["x_out"]).float(), x + y)


def test_a_distributed_module_is_its_own() -> None:
    distributed: Any = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        module = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
        captured = capture(module, (torch.randn(2, 8),), None, precision_named("fp32"))
    finally:
        distributed.destroy_process_group()
    assert "weight" in captured.model.graph.initializers


class Conditional(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda t: t.softmax(-1), lambda t: t * 2.0, (x,))


def test_branches_on_data_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"the graph has If .*; export it without control flow"):
        capture(Conditional(), (torch.randn(2, 5, 8),), None, precision_named("fp32"))


class Translation(nn.Module):
    """torch.nn's encoder and decoder, which look into a mask to see whether it is causal."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        banned = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(2)
        return (self.model(x, x.flip(1), src_mask=banned, tgt_mask=causal),)


def test_masks_of_torch_transformers_are_not_branched_on() -> None:
    check(Translation(), rtol=1e-5, atol=1e-6)
    assert nn.modules.transformer._detect_is_causal_mask(nn.Transformer.generate_square_subsequent_mask(3))


class Checked(nn.Module):
    """Data are checked, as transformers' models check that images and their tokens match."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        torch._check_tensor_all(x.isfinite())  # type: ignore[no-untyped-call]
        torch._check(x.shape[0] > 0)  # type: ignore[no-untyped-call]
        return (x + 1,)


def test_checks_of_data_are_left_out() -> None:
    check(Checked())


class Several(nn.Module):
    def __init__(self, results: Any) -> None:
        super().__init__()
        self.results = results

    def forward(self, x: Tensor) -> Any:
        return {"output": x, "more": self.results} if self.results is not None else ()


IN_PLACE: dict[str, tuple[Callable[[Tensor, Tensor], Any], bool]] = {
    "all but a row and a column": (lambda x, y: x[:, 1:, 1:].add_(y[1:, 1:]), True),
    "all but a row, by their own products": (lambda x, y: x[:, 1:, 2:].add_((x @ y)[:, 1:, 2:]), True),
    "all but two columns": (lambda x, y: x[..., 2:].add_(y[:, 2:]), True),
    "all but a row, of every sample": (lambda x, y: x[:, 1:].add_(x[:, 1:] * y[1:]), True),
    "the same number": (lambda x, y: x[:, 1:].add_(y[:1, :1]), False),
    "some rows": (lambda x, y: x[:, 1:3].add_(y[1:3]), False),
    "every second row": (lambda x, y: x[:, 1::2].add_(y[1::2]), False),
    "twice a tensor": (lambda x, y: x[:, 1:].add_(y[1:], alpha=2), False),
    "other rows": (lambda x, y: x[:, 2:].copy_(x[:, 1:-1] + y[2:]), False),
    "rows that are replaced": (lambda x, y: x[:, 1:].copy_(y[1:]), False),
}
"""What is written to a part of a tensor, and whether that becomes a sum of whole tensors."""


class InPlace(nn.Module):
    def __init__(self, write: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.write, self.bias = write, nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = 2 * x
        self.write(x, self.bias)
        return 3 * x


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_added_in_place_to_the_rest_of_a_dim_is_a_sum(name: str) -> None:
    write, is_sum = IN_PLACE[name]
    module, x = InPlace(write).eval(), torch.randn(2, 5, 5)
    captured = capture(module, (x,), ({0: Dim("batch", min=1, max=4)},), precision_named("fp32"))
    kinds = {node.op_type for node in captured.model.graph}
    assert kinds.isdisjoint({"Concat", "ScatterND"}) == is_sum
    assert str(captured.model.graph.outputs[0].shape) == "[batch,5,5]"
    for inputs in (x, torch.randn(3, 5, 5)):
        (got,) = as_it_is(captured.model)({"x": inputs.numpy()}).values()
        torch.testing.assert_close(torch.from_numpy(got), module(inputs).detach())


@pytest.mark.parametrize(
    ("returned", "names"),
    [
        (lambda x: (x, None), ["output"]),
        (lambda x: (None, x, x + 1), ["output_1", "output_2"]),
        (lambda x: (x, [x + 1, {"more": x + 2}]), ["output_0", "output_1_0", "output_1_1_more"]),
        (lambda x: {"last": x, "all": (x + 1, None, x + 2), "none": []}, ["last", "all_0", "all_2"]),
    ],
)
def test_tensors_in_what_is_returned_are_outputs(returned: Callable[[Tensor], Any], names: list[str]) -> None:
    module = Several(None)
    module.forward = lambda x: returned(2 * x)  # type: ignore[method-assign]
    captured = capture(module, (torch.ones(2, 8),), None, precision_named("fp32"))
    assert [spec.name for spec in captured.outputs] == names
    results = as_it_is(captured.model)({"x": np.ones((2, 8), np.float32)})
    assert [float(results[name].max()) for name in names] == [2.0 + i for i in range(len(names))]


@pytest.mark.parametrize(("results", "found"), [([1], "not int in what it returned"), (None, "not nothing")])
def test_what_is_returned_must_be_tensors(results: Any, found: str) -> None:
    with pytest.raises(CaptureError, match=f"dataclass of tensors, {found}"):
        capture(Several(results), (torch.randn(2, 8),), None, precision_named("fp32"))


@pytest.mark.parametrize("names", [("0", 0), ("a", ""), ("a", "a\nb"), ("a", "a" * 1025)])
def test_outputs_have_names_of_their_own(names: tuple[Any, Any]) -> None:
    module = Several(None)
    module.forward = lambda x: dict.fromkeys(names, x + 1)  # type: ignore[method-assign]
    with pytest.raises(CaptureError, match=r"the module returns an output named '.*'; give each a name of its own"):
        capture(module, (torch.randn(2, 8),), None, precision_named("fp32"))


class WithoutFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh().erfinv()


def test_an_operator_without_a_function_is_named() -> None:
    words = (
        r"torch cannot export WithoutFunction: its exporter has no ONNX function for prims\.erf_inv\.default; compute"
    )
    with pytest.raises(CaptureError, match=words):
        capture(WithoutFunction(), (torch.randn(2, 8),), None, precision_named("fp32"))


class Conjugate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_complex(x).conj()


class Noise(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + torch.randn_like(weight)


@pytest.mark.parametrize("parametrize", [parametrizations.orthogonal, parametrizations.spectral_norm])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_parametrized_weights_are_constants(parametrize: Any, precision: str) -> None:
    layer: Any = nn.Linear(8, 8)
    module, tied = nn.Sequential(parametrize(layer), nn.Linear(8, 8)), layer.parametrizations.weight.original
    module[1].weight = tied
    x, expected = torch.randn(3, 8), module.eval()(torch.ones(3, 8))
    captured = capture(module.train(), (x,), None, precision_named(precision))
    assert all(value.const_value is not None for value in captured.model.graph.initializers.values())
    exact = captured.exact({"input": x.numpy()})["output"]
    torch.testing.assert_close(torch.from_numpy(exact), module.eval()(x).double(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(module(torch.ones(3, 8)), expected, rtol=0, atol=0)  # it is as it was


def test_a_parametrization_that_is_random_is_refused() -> None:
    layer = nn.Linear(8, 8)
    register_parametrization(layer, "weight", Noise())
    with pytest.raises(CaptureError, match="draws random numbers"):
        capture(layer, (torch.randn(2, 8),), None, precision_named("fp32"))


def check(module: nn.Module, rtol: float = 0, atol: float = 0) -> None:
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    captured = capture(module.eval(), (x,), SHAPES, precision_named("fp32"))
    other = torch.randn(3, 7, 8, generator=torch.Generator().manual_seed(1))
    got = as_it_is(captured.model)({"x": other.numpy()}).values()
    for array, expected in zip(got, module(other), strict=True):
        torch.testing.assert_close(torch.from_numpy(array), expected, rtol=rtol, atol=atol)


def test_what_has_no_function_is_decomposed_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fx_passes, "decompose_with_registry", refuse)
    with pytest.raises(CaptureError, match="torch decomposes the program"):
        capture(Decomposed().eval(), (torch.randn(2, 5, 8),), SHAPES, precision_named("fp32"))


class Simplified(nn.Module):
    """Operators that rules replace, alone and in pairs, and two that are fused."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        halves = torch.cat((-x[..., 4:], x[..., :4]), -1)
        turned = (x * 1 + 0).mT.mT.to(torch.float64).to(torch.float32)
        flat = self.norm(turned + halves).reshape(-1, 4).reshape(x.shape[0], -1, 8)
        result: Tensor = flat.clamp(min=0).relu().unsqueeze(0).unsqueeze(0).squeeze(0)
        return result


def test_rules_by_operator_change_what_all_rules_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is the same to the byte as where onnxscript tries every rule at every node, which takes far longer."""
    example, match = (torch.randn(2, 5, 8),), SimplePatternMatcher.match
    tried: list[ir.Node] = []

    def noted(matcher: Any, model: ir.Model, graph: Any, node: ir.Node, **options: Any) -> Any:
        tried.append(node)
        return match(matcher, model, graph, node, **options)

    monkeypatch.setattr(SimplePatternMatcher, "match", noted)

    def exported() -> tuple[bytes, int]:
        tried.clear()
        model = capture(Simplified(), example, SHAPES, precision_named("fp32")).model
        return ir.to_proto(model).SerializeToString(deterministic=True), len(tried)

    fast, few = exported()
    monkeypatch.setattr(repair, "_rules_by_operator", nullcontext)
    slow, many = exported()
    assert fast == slow and 0 < 5 * few < many
