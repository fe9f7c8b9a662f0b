"""The size of inputs in hard cases, and the number of draws of eager's error."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attnforge
from attnforge.arrays import Array
from attnforge.bundle import REFERENCE_OUTPUTS, Case, TensorSpec
from attnforge.errors import CaptureError
from attnforge.export.reference import write_reference
from attnforge.export.reference.spread import Spreads, neighbours
from attnforge.export.sources.torch_module import capture
from attnforge.precision import Precision, precision_named
from attnforge.runtime.backends.eager import products_in
from attnforge.runtime.cases import make_inputs
from attnforge.runtime.parity.budget import (
    FEW,
    HANDFUL,
    LEAST_DRAWS,
    LEAST_LOW_DRAWS,
    MOST_DRAWS,
    judge,
    relative_error,
)


class Standard(nn.Module):
    """Inputs over their standard deviation, or over their largest absolute value."""

    def __init__(self, squares: bool) -> None:
        super().__init__()
        self.squares = squares

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        if self.squares:
            return x / x.std((0, 1), keepdim=True)
        return x / x.abs().amax((0, 1), keepdim=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_squares_on_the_way_to_extremes_stay_in_range(precision: str, tmp_path: Path) -> None:
    """torch's deviation sums squares in a wider type, so eager can take larger inputs than an exported graph."""
    p = precision_named(precision)
    largest = {}
    for squares in (True, False):
        captured = capture(Standard(squares), (torch.randn(8, 64),), None, p)
        (tmp_path / str(squares)).mkdir()
        cases = {case.name: case for case in write_reference(tmp_path / str(squares), captured, captured.model)}
        inputs = make_inputs(cases["extremes"], captured.inputs, {})["x"].astype(np.float64)
        largest[squares] = float(np.abs(inputs).max())
        assert cases["scaled-100"].scale == 100 and cases["outliers"].scale == 1
    assert 1e6 < largest[True] < p.largest**0.5 / 16
    assert largest[False] > p.largest**0.5


class Products(nn.Module):
    """Products, a convolution and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(64, 64), nn.Conv1d(9, 9, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        heads = x.reshape(2, 9, 4, 16).transpose(1, 2)
        attention = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return self.linear(x), self.conv(x), attention, x @ x.mT, torch.einsum("bij,bkj->bik", x, x)


def test_eager_rounds_the_operands_of_products_to_tf32() -> None:
    """As a GPU does, and no CPU; every other operator computes in fp32."""
    torch.manual_seed(0)
    module, x = Products(), torch.randn(2, 9, 64)
    errors = {}
    for precision in ("fp32", "tf32"):
        captured = capture(module, (x,), None, precision_named(precision))
        eager, exact = captured.eager(captured.example), captured.exact(captured.example)
        errors[precision] = [relative_error(eager[name].astype(np.float64), exact[name]) for name in eager]
    assert max(errors["fp32"]) < 1e-6
    assert all(1e-4 < error < 1e-3 for error in errors["tf32"]), errors


def test_products_round_to_tf32_in_inference_mode_and_in_an_lstm() -> None:
    torch.manual_seed(0)
    lstm, x = nn.LSTM(64, 64), torch.randn(9, 9, 64)
    with torch.inference_mode():
        results = {}
        for precision in ("fp32", "tf32"):
            with products_in(precision_named(precision)):
                results[precision] = [lstm(x)[0], x @ x.mT, torch.einsum("bij,bkj->bik", x, x)]
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(results["tf32"], results["fp32"], strict=True)]
    assert all(5e-5 < error < 1e-3 for error in errors), errors


def test_inputs_move_by_one_rounding_of_the_precision() -> None:
    array = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    array[0, 0] = 0.0
    for precision, largest in (("fp32", 2**-23), ("tf32", 2**-10)):
        moved = neighbours(array, precision_named(precision), np.random.default_rng(1))
        share = np.abs(moved - array)[array != 0] / np.abs(array[array != 0])
        assert moved[0, 0] == 0 and largest / 2 < share.max() <= largest
        assert 0.5 < (share > 0).mean() < 0.8


class Alike(nn.Module):
    """Sums of equal numbers if all inputs are ones, and what such sums cancel to."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        thirds = x / 3
        mean = nn.functional.scaled_dot_product_attention(x[:, :1, :16], x.mT, thirds.mT)
        norms = nn.functional.instance_norm(thirds), nn.functional.group_norm(thirds, 16)
        return thirds.sum(-1), thirds @ x[0].mT, mean, torch.fft.fft(thirds).real, thirds.var(-1), *norms


def test_equal_numbers_may_be_added_one_by_one(tmp_path: Path) -> None:
    """Their roundings have the same sign, and eager adds in blocks, which errs less."""
    captured = capture(Alike(), (torch.randn(4, 16, 3001),), None, precision_named("fp32"))
    (case,) = (case for case in write_reference(tmp_path, captured, captured.model) if case.kind == "constant")
    (x,) = make_inputs(case, captured.inputs, captured.example).values()
    eager, exact = captured.eager({"x": x}), captured.exact({"x": x})
    thirds = x / np.float32(3)
    added = np.cumsum(thirds, -1)[..., -1]
    mean = np.cumsum(thirds * np.float32(1 / 3001), -1)[:, None, :, -1]
    centred = thirds - (added / np.float32(3001))[..., None]
    variance = (centred**2).mean(-1)
    norm = centred / np.sqrt(variance + np.float32(1e-5))[..., None]
    turns = np.cos(2 * np.pi / 3001 * np.outer(np.arange(3001), np.arange(3001))).astype(np.float32)
    waves = np.broadcast_to(np.cumsum(thirds[0, 0] * turns, -1)[:, -1], x.shape)
    small = variance, norm, norm  # of which float64's are next to nothing
    unlucky = dict(zip(exact, (added, np.repeat(added[..., None], 16, -1), mean, waves, *small), strict=True))
    for name, result in unlucky.items():
        verdicts = [
            judge(case, name, (result * scale).astype(np.float32), eager[name], exact[name], captured.precision)
            for scale in (1, 1.0005)
        ]
        errors = [relative_error(array.astype(np.float64), exact[name]) for array in (result, eager[name])]
        assert errors[0] > errors[1]
        assert verdicts[0].passed, verdicts[0].reason
        assert not verdicts[1].passed or any(result is array for array in small)


class Last(nn.Module):
    """The token before a length, from ids."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        picked: Tensor = self.words(ids)[torch.arange(ids.shape[0]), lengths - 1]
        return picked


def test_integers_suit_the_sizes(tmp_path: Path) -> None:
    """A length of four is not valid for an input of one token."""
    batch, tokens = Dim("batch", min=1, max=4), Dim("tokens", min=1, max=16)
    args = torch.randint(0, 20, (2, 9)), torch.tensor([4, 9])
    module = Last().eval()
    bundle = attnforge.deploy(
        module,
        args,
        tmp_path / "b",
        ({0: batch, 1: tokens}, {0: batch}),
        targets=["onnxruntime"],
        tune=False,
        cache=False,
    )
    cases = {case.name: case for case in bundle.manifest.cases}
    assert cases["normal-opt"].most is None and cases["normal-largest"].most is None
    assert cases["normal-smallest"].most in (0, 1)
    assert attnforge.verify(bundle, ["onnxruntime-cpu"]).backends["onnxruntime-cpu"].passed
    with pytest.raises(CaptureError, match="Last does not run"):
        attnforge.deploy(
            module, (args[0], args[1] + 9), tmp_path / "c", targets=["onnxruntime"], tune=False, cache=False
        )


def test_lengths_reach_the_sizes_of_a_case_where_eager_accepts_them(tmp_path: Path) -> None:
    """Otherwise no token after the example's last would ever be looked up in the largest inputs."""
    batch, tokens = Dim("batch", min=1, max=20), Dim("tokens", min=1, max=16)
    args = torch.randint(0, 20, (2, 9)), torch.tensor([4, 9])
    shapes = ({0: batch, 1: tokens}, {0: batch})
    bundle = attnforge.deploy(Last(), args, tmp_path / "b", shapes, targets=["onnxruntime"], tune=False, cache=False)
    cases = {case.name: case for case in bundle.manifest.cases}
    assert cases["normal-largest"].reach == 16  # not 20, which is no token
    lengths = make_inputs(cases["normal-largest"], bundle.manifest.inputs, {})["lengths"]
    assert lengths.min() >= 4 and lengths.max() == 16
    assert cases["normal-opt"].reach is None and cases["normal-smallest"].reach is None


class Power(nn.Module):
    """Overflows for exponents that are larger than the example's."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        return x * 100.0 ** n.square()[:, None, None].to(x.dtype)


def test_integers_beyond_the_example_that_overflow_are_not_tried(tmp_path: Path) -> None:
    tokens = {1: Dim("tokens", min=2, max=64)}
    args = torch.randn(2, 8, 4), torch.tensor([1, 2])
    bundle = attnforge.deploy(
        Power(), args, tmp_path / "b", (tokens, None), targets=["onnxruntime"], tune=False, cache=False
    )
    assert {case.reach for case in bundle.manifest.cases} == {None}


class Kinds(nn.Module):
    """Token types and positions that a caller gives."""

    def __init__(self) -> None:
        super().__init__()
        self.types, self.positions = nn.Embedding(2, 8), nn.Embedding(24, 8)

    def forward(self, types: Tensor, positions: Tensor) -> Tensor:
        result: Tensor = self.types(types) + self.positions(positions)
        return result


def test_all_rows_of_tables_are_looked_up(tmp_path: Path) -> None:
    """Of which the example has the first alone: token types are mostly 0, and positions end with its tokens."""
    args = torch.zeros(2, 6, dtype=torch.int64), torch.arange(6).repeat(2, 1)
    shapes = ({1: Dim("tokens", min=1, max=24)},) * 2
    bundle = attnforge.deploy(Kinds(), args, tmp_path / "b", shapes, targets=["onnxruntime"], tune=False, cache=False)
    assert [(spec.low, spec.high) for spec in bundle.manifest.inputs] == [(0, 1), (0, 23)]
    assert not [case.name for case in bundle.manifest.cases if case.name.startswith("mask")]  # two types are no mask
    assert attnforge.verify(bundle, ["onnxruntime-cpu"]).passed


class Padded(nn.Module):
    """The sum of scores of tokens that are not all zeros."""

    def __init__(self, ignored: bool) -> None:
        super().__init__()
        self.ignored = ignored

    def forward(self, x: Tensor) -> Tensor:
        scores = x.pow(2).sum(-1) + 1
        is_token = torch.full_like(scores, True, dtype=torch.bool) if self.ignored else (x != 0).any(-1)
        return torch.where(is_token, scores, 0.0).sum(-1)


def test_padding_that_is_read_from_zeros_of_the_input_is_tried(tmp_path: Path) -> None:
    args, shapes = (torch.randn(2, 6, 4),), ({1: Dim("tokens", min=1, max=24)},)
    bundle = attnforge.deploy(
        Padded(False), args, tmp_path / "b", shapes, targets=["onnxruntime"], tune=False, cache=False
    )
    report = attnforge.verify(bundle, ["eager"], module=Padded(True))
    assert {failure.case for failure in report.backends["eager"].failures} == {"sparse"}
    assert attnforge.verify(bundle, ["onnxruntime-cpu"]).passed


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_least_number_of_a_type_is_that_of_the_precision_in_float64(precision: str, tmp_path: Path) -> None:
    class Filled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.softmax(-1).masked_fill(torch.arange(x.shape[-1]) > 5, torch.finfo(x.dtype).min)

    bundle = attnforge.deploy(
        Filled(), (torch.randn(4, 8),), tmp_path / "b", None, precision, ["onnxruntime"], tune=False, cache=False
    )
    assert attnforge.verify(bundle, ["onnxruntime-cpu"]).passed
    exact = bundle.tensors(REFERENCE_OUTPUTS)["example/output/float64"]
    assert exact.min() == -precision_named(precision).largest


class Large(nn.Module):
    """Integers that eager cannot take: a division that it refuses, or a sine that fp32 cannot represent."""

    def __init__(self, divides: bool) -> None:
        super().__init__()
        self.divides = divides

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        factor = (torch.full_like(n, 8) // n).float() if self.divides else n.float().sin()
        return x * factor[:, None]


@pytest.mark.parametrize(("divides", "kept"), [(True, "integers-large"), (False, "integers-zero")])
def test_integers_that_eager_cannot_take_are_left_out(divides: bool, kept: str, tmp_path: Path) -> None:
    args = torch.randn(2, 8), torch.tensor([1, 3])
    bundle = attnforge.deploy(Large(divides), args, tmp_path / "b", targets=["onnxruntime"], tune=False, cache=False)
    cases = [case.name for case in bundle.manifest.cases if case.name.startswith("integers-")]
    assert cases == [kept]


def test_large_lengths_are_as_large_as_the_sizes_allow(tmp_path: Path) -> None:
    """For a lookup of the last token, no length may exceed the number of tokens."""
    batch, tokens = Dim("batch", min=1, max=4), Dim("tokens", min=1, max=16)
    args = torch.randint(0, 20, (2, 9)), torch.tensor([4, 9])
    shapes = ({0: batch, 1: tokens}, {0: batch})
    bundle = attnforge.deploy(Last(), args, tmp_path / "b", shapes, targets=["onnxruntime"], tune=False, cache=False)
    large = next(case for case in bundle.manifest.cases if case.kind == "large")
    assert large.most == large.sizes["tokens"]


def test_integers_from_eager_are_stored_unchanged(tmp_path: Path) -> None:
    """fp32 rounds 2^24 + 1, so an output in fp32 that is wrong by one would pass."""

    class Next(nn.Module):
        def forward(self, x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, n + 1

    args = torch.randn(2, 8), torch.tensor([2**24, 2**40])
    bundle = attnforge.deploy(Next(), args, tmp_path / "b", targets=["onnxruntime"], tune=False, cache=False)
    assert bundle.tensors(REFERENCE_OUTPUTS)["example/output_1/eager"].tolist() == [2**24 + 1, 2**40 + 1]


@dataclass
class Noisy:
    """Eager is off by `error`, or by a random share of it; counts its runs by the first number of its input.

    Attributes:
        size: size of the output.
        varies: whether the error varies.
    """

    precision: Precision
    size: int
    error: float
    varies: bool
    runs: list[float] = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    reference = "a number"

    def __post_init__(self) -> None:
        self.inputs = [TensorSpec(name="x", dtype=self.precision.dtype.name, dims=[self.size])]

    @property
    def example(self) -> dict[str, Array]:
        return {"x": np.ones(self.size, self.precision.dtype)}

    def eager(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.runs.append(float(inputs["x"][0]))
        share = self.rng.standard_normal() if self.varies else 1.0
        return {"y": inputs["x"].astype(np.float64) * (1 + self.error * share)}

    def exact(
        self, inputs: Mapping[str, Array], peaks: list[float] | None = None, noise: np.random.Generator | None = None
    ) -> dict[str, Array]:
        return {"y": inputs["x"].astype(np.float64)}

    def at(self, precision: Precision) -> Noisy:
        raise NotImplementedError

    def written(self, folder: Path) -> list[Case]:
        return write_reference(folder, self, ir.Model(ir.Graph([], [], nodes=[]), ir_version=10))

    def drawn(self, kind: str, cases: list[Case]) -> int:
        """The number of runs of a case, including the first."""
        (case,) = (case for case in cases if case.name == kind)
        first = float(make_inputs(case, self.inputs, self.example)["x"][0])
        return sum(abs(run - first) <= 0.01 * abs(first) for run in self.runs)


@pytest.mark.parametrize(("precision", "least"), [("fp32", LEAST_DRAWS), ("fp16", LEAST_LOW_DRAWS)])
def test_draws_that_agree_are_few(precision: str, least: int, tmp_path: Path) -> None:
    model = Noisy(precision_named(precision), 64, 2 * precision_named(precision).floor, varies=False)
    cases = model.written(tmp_path)
    assert model.drawn("scaled-16", cases) == 1 + least
    assert model.drawn("normal-opt", cases) == 1
    assert not any(np.isnan(error) for case in cases for errors in case.spread.values() for error in errors)


def test_draws_that_decide_nothing_are_not_made(tmp_path: Path) -> None:
    model = Noisy(precision_named("fp32"), 2048, 1e-7, varies=True)
    cases = model.written(tmp_path)
    assert model.drawn("scaled-16", cases) == 1


class Steep(Noisy):
    """The output changes between neighbouring inputs by far more than eager's error."""

    def eager(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.runs.append(float(inputs["x"][0]))
        return {"y": self.exact(inputs)["y"] * (1 + self.error)}

    def exact(
        self, inputs: Mapping[str, Array], peaks: list[float] | None = None, noise: np.random.Generator | None = None
    ) -> dict[str, Array]:
        return {"y": np.cos(1000 * inputs["x"].astype(np.float64))}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_answer_that_is_exact_for_a_neighbouring_input_is_allowed(precision: str, tmp_path: Path) -> None:
    """Only beyond 16 bits: with them, eager's own draws are many and no case was seen to need it."""
    error = 2 * precision_named(precision).floor
    cases = Steep(precision_named(precision), 2048, error, varies=False).written(tmp_path)
    spread = next(case.spread["y"] for case in cases if case.name == "scaled-16")
    if precision == "fp32":
        assert spread[0] > 20 * error and spread[1] > 20 * error
    else:
        assert spread == pytest.approx((error, error), rel=0.1)
    assert not any("y" in case.spread for case in cases if case.name == "normal-opt")


@pytest.mark.parametrize(("precision", "flushes"), [("bf16", True), ("fp16", False), ("fp32", False)])
def test_products_in_bf16_may_take_denormal_numbers_for_zeros(precision: str, flushes: bool, tmp_path: Path) -> None:
    """As those of AVX512-BF16 and AMX do, torch's own from 64 × 64 on."""
    model = Noisy(precision_named(precision), FEW, 0.0, varies=False)
    cases = {case.name: case.spread.get("y", (0.0, 0.0)) for case in model.written(tmp_path)}
    assert (cases["denormal"][0] == pytest.approx(1, rel=0.01)) == flushes
    assert not flushes or 0 < cases["denormal"][1] < model.precision.smallest_normal
    assert max(error for name, (error, _) in cases.items() if name != "denormal") < model.precision.floor


@pytest.mark.parametrize(("size", "drawn"), [(HANDFUL - 1, MOST_DRAWS), (HANDFUL, 0)])
def test_a_handful_of_numbers_is_drawn_on_ordinary_inputs(size: int, drawn: int, tmp_path: Path) -> None:
    floor = precision_named("fp32").floor
    model = Noisy(precision_named("fp32"), size, 4 * floor, varies=True)
    cases = model.written(tmp_path)
    assert model.drawn("normal-opt", cases) == 1 + drawn
    assert model.drawn("scaled-16", cases) == 1 + MOST_DRAWS
    (spread,) = {case.spread["y"][0] for case in cases if case.name == "normal-opt"}
    assert (spread > 7 * floor) == (drawn > 0)


def test_a_handful_of_elements_near_zero_by_chance_gets_the_floor_of_the_usual_size(tmp_path: Path) -> None:
    floor = precision_named("fp32").floor
    sizes: dict[tuple[int, str], float] = {}
    spreads: dict[tuple[int, str], tuple[float, float]] = {}
    ordinary: list[float] = []
    for size in (HANDFUL - 1, HANDFUL):
        model = Noisy(precision_named("fp32"), size, 1e-9, varies=False)
        (tmp_path / str(size)).mkdir()
        for case in model.written(tmp_path / str(size)):
            inputs = make_inputs(case, model.inputs, model.example)["x"]
            sizes[size, case.name], spreads[size, case.name] = float(np.abs(inputs).max()), case.spread["y"]
            ordinary += [sizes[size, case.name]] if case.is_ordinary and size < HANDFUL else []
    few, more = (HANDFUL - 1, "example"), (HANDFUL, "example")
    usual = statistics.median(ordinary)
    assert sizes[few] == 1 < usual
    assert spreads[few] == pytest.approx((floor / 2 * usual, floor / 2 * (usual - 1)), rel=1e-3)
    assert max(spreads[more]) < 1e-8
    for made_small in ("scaled-0.1", "denormal"):
        assert max(spreads[HANDFUL - 1, made_small]) < 1e-6, made_small  # one rounding of such inputs at most


@pytest.mark.parametrize(("factor", "widened"), [(1 / 40, True), (1 / 2000, False)])
def test_on_hard_inputs_too_a_handful_may_be_near_zero_by_chance(factor: float, widened: bool) -> None:
    """Like a score of two normalised vectors, which denormal inputs do not make small."""
    model = Noisy(precision_named("fp32"), 1, 0.0, varies=False)
    floor, spreads = model.precision.floor, Spreads(model, model)
    truth = {"y": np.full(1, 1.0)}
    usual, hard = (Case(name=kind, sizes={}, kind=kind, seed=1) for kind in ("normal", "denormal"))
    spreads.add(usual, truth, truth, truth)
    small = {"y": factor * truth["y"]}
    spreads.add(hard, small, small, small)
    spreads.pool()
    assert (hard.spread["y"][0] == pytest.approx(floor / 2 / factor)) == widened
    assert widened or hard.spread["y"] == (0.0, 0.0)


def test_the_error_of_quantised_weights_is_no_draw() -> None:
    model = Noisy(precision_named("int4"), 2**16, 0.0, varies=False)
    spreads, truth = Spreads(model, model), {"y": np.full(2**16, 2.0)}
    cases = [Case(name=name, sizes={}, kind="normal", seed=1) for name in ("larger", "smaller")]
    for case, off in zip(cases, (0.5, 0.2), strict=True):
        eager = {"y": truth["y"] + off}
        spreads.add(case, eager, truth, eager)
    spreads.pool()
    assert not any(case.spread for case in cases)


def test_ordinary_cases_on_which_eager_is_far_off_share_the_largest_error() -> None:
    """Like padded rows whose numbers are almost equal before they are normalised: in each case their error is one
    draw, which a backend's may exceed by any factor."""
    model = Noisy(precision_named("fp32"), 2**16, 0.0, varies=False)
    spreads, truth = Spreads(model, model), {"y": np.full(2**16, 2.0)}
    off = {"larger": 2e-4, "smaller": 5e-5, "smallest": 4e-5, "close": 2e-6}
    cases = {name: Case(name=name, sizes={}, kind="normal", seed=1) for name in off}
    for name, case in cases.items():
        eager = {"y": truth["y"] + off[name]}
        spreads.add(case, eager, truth, eager)
    spreads.pool()
    assert cases["smaller"].spread["y"] == pytest.approx((1e-4, 2e-4))
    assert cases["smallest"].spread["y"] == pytest.approx((8e-5, 1.6e-4))  # at most four times its own
    assert cases["smaller"].spread["y/blocks"][0] == pytest.approx(1e-4)
    assert not cases["close"].spread


def test_numbers_next_to_much_larger_ones_get_no_error_of_these() -> None:
    case = Case(name="normal", sizes={}, kind="normal", seed=1, spread={"y": (1e-3, 1.0)})
    truth = np.concatenate([np.linspace(1000, 1001, 1000), np.linspace(0.1, 1, 1000)])
    eager, got = truth + 1e-7, truth.copy()
    got[1000:] += 1e-3
    comparison = judge(case, "y", got, eager, truth, precision_named("fp32"))
    assert not comparison.passed and "over the budget of" in str(comparison.reason)
