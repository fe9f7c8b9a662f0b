"""The parity budget: which errors pass and which fail, and that a wrong bundle is caught."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from torch import nn

import attnforge
from attnforge.arrays import PIECE, Array
from attnforge.bundle import REFERENCE_OUTPUTS, Bundle, Case, DimSpec, Kind, Masks, TensorSpec
from attnforge.errors import UnavailableError, UnknownNameError
from attnforge.precision import PRECISIONS, precision_named
from attnforge.runtime import cases as reference
from attnforge.runtime.backends.registry import BACKENDS
from attnforge.runtime.parity.budget import Allowed, judge, relative_error
from attnforge.runtime.parity.comparison import Comparison
from attnforge.runtime.parity.verify import hold
from attnforge.runtime.session import Session
from tests.support.bundles import DeploySmall, rewrite, small_example
from tests.support.bundles import Small as SmallModule

CASE = Case(name="case", sizes={}, kind="normal", seed=1)


def judged(got: Array, eager: Array, truth: Array, precision: str = "fp32") -> Comparison:
    wide = [np.asarray(array, np.float64) for array in (got, eager, truth)]
    return judge(CASE, "output", wide[0], wide[1], wide[2], precision_named(precision))


def off_by(truth: Array, error: float, seed: int) -> Array:
    """`truth` with a relative error of `error`, spread evenly."""
    noise = np.sign(np.random.default_rng(seed).standard_normal(truth.shape))
    return np.asarray(truth + noise * error * np.linalg.norm(truth) / np.sqrt(truth.size))


# The budget

TRUTH = np.random.default_rng(0).standard_normal(1000)


@pytest.mark.parametrize(("precision", "floor"), [("fp32", 4e-6), ("tf32", 1e-3), ("fp16", 1e-3), ("bf16", 8e-3)])
def test_floors_are_exact_limits(precision: str, floor: float) -> None:
    """Where eager is exact, only the floor applies; a single element may be off by 4 ulp of the largest."""
    assert PRECISIONS[precision].floor == floor
    assert judged(off_by(TRUTH, 0.5 * floor, 1), TRUTH, TRUTH, precision).passed
    over = judged(off_by(TRUTH, 1.1 * floor, 1), TRUTH, TRUTH, precision)
    assert not over.passed
    assert over.reason is not None and "over the budget" in over.reason
    assert over.budget == floor and over.error == pytest.approx(1.1 * floor)


def test_where_attention_alone_is_narrower_its_eager_is_the_baseline() -> None:
    def compare(got: Array, low: Array, eager: Array = TRUTH) -> Comparison:
        return judge(CASE, "output", got, eager, TRUTH, precision_named("fp16"), low)

    low = off_by(TRUTH, 1e-2, 2)
    assert compare(off_by(TRUTH, 1.9e-2, 1), low).passed
    assert not compare(off_by(TRUTH, 2.1e-2, 1), low).passed
    # fp32 eager determines where numbers must be finite; a baseline that overflows elsewhere allows nothing.
    overflowing = np.where(np.arange(TRUTH.size) == 3, np.nan, low)
    assert "NaN at 1 positions" in str(compare(overflowing, overflowing).reason)
    assert not compare(off_by(TRUTH, 1.9e-2, 1), overflowing).passed
    assert compare(off_by(TRUTH, 0.9e-3, 1), overflowing).passed
    truth = np.where(np.isnan(overflowing), np.nan, TRUTH)
    assert judge(CASE, "output", overflowing, truth, truth, precision_named("fp16"), overflowing).passed


@given(eager_error=st.floats(1e-5, 1e-1), times=st.floats(0.0, 4.0), seed=st.integers(0, 99))
def test_a_backend_may_err_twice_as_much_as_eager(eager_error: float, times: float, seed: int) -> None:
    assume(abs(times - 2.0) > 1e-6)
    comparison = judged(off_by(TRUTH, times * eager_error, seed), off_by(TRUTH, eager_error, seed + 1), TRUTH)
    assert comparison.passed == (times < 2.0)
    assert comparison.eager_error == pytest.approx(eager_error)
    assert comparison.budget == pytest.approx(2 * eager_error)
    assert comparison.error == pytest.approx(times * eager_error)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_element_may_be_off_by_four_ulp_or_the_floor_of_the_largest(precision: str) -> None:
    truth = np.linspace(-3.0, 5.0, 1_000_001)  # so large that one element hardly changes the norm
    coarse = {"tf32": 4 * 2.0**-8, "fp16": 4 * 2.0**-8, **dict.fromkeys(("bf16", "int8", "fp8", "int4"), 4 * 2.0**-5)}
    least = coarse.get(precision, 2e-5)
    for times, passed in ((0.98, True), (1.02, False)):
        got = truth.copy()
        got[12] += times * least
        comparison = judged(got, truth, truth, precision)
        assert comparison.passed is passed, comparison
        assert comparison.max_budget == pytest.approx(least)
        assert passed or (comparison.reason is not None and "one element" in comparison.reason)


def test_one_element_may_be_off_twice_as_far_as_eagers_worst() -> None:
    truth = np.linspace(-3.0, 5.0, 1_000_001)
    eager = truth.copy()
    eager[7] += 1e-3
    for off, passed in ((1.99e-3, True), (2.1e-3, False)):
        got = truth.copy()
        got[500] -= off
        assert judged(got, eager, truth).passed is passed


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", np.float32), ("fp16", np.float16), ("bf16", ml_dtypes.bfloat16)]
)
@given(data=st.data())
def test_ulp_is_the_distance_to_the_next_number(precision: str, dtype: type, data: st.DataObject) -> None:
    largest = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    value: Array = np.array(data.draw(st.floats(0.0, largest / 4, exclude_min=True)), dtype)
    assume(value > 0)
    following = np.nextafter(value, np.array(np.inf, dtype), dtype=dtype)
    assert PRECISIONS[precision].ulp(float(value)) == float(following) - float(value)


def test_ulp_of_zero_infinity_and_nan_is_zero() -> None:
    assert [PRECISIONS["fp32"].ulp(value) for value in (0.0, np.inf, np.nan)] == [0.0, 0.0, 0.0]
    assert PRECISIONS["tf32"].ulp(1.0) == 2.0**-10  # fp32's range, fp16's mantissa


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_must_be_where_eager_has_them(odd: float) -> None:
    clean, marked = TRUTH.copy(), TRUTH.copy()
    marked[5] = odd
    assert judged(marked, marked, marked).passed
    for got, eager in ((marked, clean), (clean, marked), (-marked, marked), (np.roll(marked, 1), marked)):
        if np.isnan(odd) and got[5] != got[5] and eager[5] != eager[5]:
            continue  # a NaN has no sign
        comparison = judged(got, eager, eager)
        assert not comparison.passed


TRIAL = CASE.model_copy(update={"kind": "scaled", "scale": 100.0})


def tried(got: Array, eager: Array, truth: Array = TRUTH, precision: str = "fp16", case: Case = TRIAL) -> Comparison:
    return judge(case, "output", got, eager, truth, precision_named(precision))


def test_where_eager_overflows_a_backend_may_overflow_too() -> None:
    eager = TRUTH.copy()
    eager[5] = np.nan
    for got in (np.nan, np.inf, -np.inf):
        assert tried(np.where(np.isnan(eager), got, TRUTH), eager).passed, "as NaN or infinity of either sign"
    assert tried(TRUTH, eager).passed
    wrong = TRUTH.copy()
    wrong[5] += 1
    assert not tried(wrong, eager).passed, "a finite number there is compared with float64"
    elsewhere = TRUTH.copy()
    elsewhere[[5, 6]] = np.nan
    assert "NaN at 1 positions where neither eager nor float64 has it" in str(tried(elsewhere, eager).reason)
    assert tried(TRUTH, eager).overflowed == 1


def test_a_model_that_overflows_on_ordinary_inputs_fails_with_eager() -> None:
    eager = TRUTH.copy()
    eager[5] = np.inf
    comparison = tried(eager, eager, case=CASE)
    assert not comparison.passed and comparison.worst is not None and comparison.worst.index == [5]
    assert "fp16 overflows: NaN or infinity at 1 positions" in str(comparison.reason)
    assert tried(TRUTH, eager, case=CASE).passed, "a backend that computes in more bits may be right"


def test_numbers_beyond_the_dtype_may_be_infinite() -> None:
    truth = TRUTH.copy()
    truth[5] = 1e5
    over = np.where(truth == 1e5, np.inf, truth)
    assert tried(over, over, truth).passed and tried(over, over, truth, case=CASE).passed
    assert not tried(-over, over, truth).passed
    assert not tried(over, truth, truth, "fp32").passed, "fp32 can represent it"


def test_small_outputs_use_the_error_of_eager_over_all_ordinary_inputs(tmp_path: Path) -> None:
    bundle = attnforge.deploy(
        nn.Linear(16, 16), (torch.randn(2, 16),), tmp_path / "b", precision="fp16", targets=["onnxruntime"], tune=False
    )
    stored = load_file(bundle.file(REFERENCE_OUTPUTS))
    ordinary = [case for case in bundle.manifest.cases if case.is_ordinary]
    errors = [
        relative_error(*(stored[reference.key(case, "output", w)].astype(np.float64) for w in ("eager", "float64")))
        for case in ordinary
    ]
    assert len(ordinary) > 2 and len(set(errors)) > 1
    assert all(case.spread["output"][0] == pytest.approx(max(errors)) for case in ordinary)


def test_the_spread_of_eagers_error_counts_on_trials_of_a_model() -> None:
    spread = TRIAL.model_copy(update={"spread": {"output": (1e-2, 1.0)}})
    assert tried(off_by(TRUTH, 1.9e-2, 1), TRUTH, case=spread).passed
    assert not tried(off_by(TRUTH, 2.1e-2, 1), TRUTH, case=spread).passed
    assert not tried(off_by(TRUTH, 1.9e-2, 1), TRUTH).passed


def test_the_spread_of_an_element_counts_for_a_sum_by_the_root_of_its_terms() -> None:
    """64 errors of random signs add up to eight times one of them."""
    case = TRIAL.model_copy(update={"spread": {"output": (1.0, 1.0)}})
    truth = np.full(100, 40.0)
    for off, terms, passes in ((1.9, 1, True), (2.1, 1, False), (15.9, 64, True), (16.1, 64, False)):
        got = truth + np.eye(1, 100)[0] * off
        assert judge(case, "output", got, truth, truth, precision_named("fp32"), terms=terms).passed == passes


def test_all_subnormal_outputs_have_the_ulp_of_every_element() -> None:
    least = PRECISIONS["fp16"].ulp(1e-30)
    truth = least * np.array([3.0, 5.0, -2.0, 1.0])
    assert tried(truth + 2 * least, truth, truth).passed
    assert not tried(truth + 5 * least, truth, truth).passed


def test_outputs_whose_squares_are_zero_in_float64_have_it_too() -> None:
    truth, least = np.array([3e-200, -2e-200]), 2.0**-149
    for got, passes in ((0.0, True), (4 * least, True), (5 * least, False)):
        assert judged(np.full(2, got), np.zeros(2), truth).passed == passes


@pytest.mark.parametrize("exactly", [False, True])
def test_the_budget_of_a_bundle_that_chose_its_precisions(exactly: bool) -> None:
    def passes(error: float, eager_error: float, case: Case = CASE, eager: Array | None = None) -> bool:
        eager = off_by(TRUTH, eager_error, 2) if eager is None else eager
        allowed = Allowed(1e-2, exactly)
        return judge(
            case, "output", off_by(TRUTH, error, 1), eager, TRUTH, precision_named("fp16"), None, allowed
        ).passed

    assert passes(9e-3, 1e-1) and not passes(1.1e-2, 1e-1), "eager's own error is bounded"
    assert passes(9e-3, 0.0) is exactly, "within twice eager's, unless an error was requested"
    assert passes(1.1e-2, 1e-1, TRIAL), "the budget of trials is unchanged"
    overflowed = np.where(np.arange(TRUTH.size) == 3, np.nan, TRUTH)
    assert passes(9e-3, 0.0, eager=overflowed) and not passes(1.1e-2, 0.0, eager=overflowed)


def test_finite_elements_next_to_a_nan_are_still_judged() -> None:
    eager, got = TRUTH.copy(), TRUTH * 1.01
    eager[3] = got[3] = np.nan
    comparison = judged(got, eager, TRUTH)
    assert not comparison.passed and comparison.error == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize("fill", [-1e4, -1e9, float(np.finfo(np.float32).min), 1e9])
def test_a_fill_does_not_hide_the_errors_of_other_numbers(fill: float) -> None:
    """Next to logits of words that must not be chosen, all others may be wrong by far within the budget."""
    is_filled = np.arange(TRUTH.size) % 4 == 1
    truth = np.where(is_filled, fill, TRUTH)
    assert judged(np.where(is_filled, fill, off_by(TRUTH, 2e-6, 1)), truth, truth).passed
    got = truth.copy()
    got[12] += 1e-3
    comparison = judged(got, truth, truth)
    assert not comparison.passed and comparison.worst is not None and comparison.worst.index == [12]
    assert not judged(np.where(is_filled, 2 * fill, truth), truth, truth).passed
    several = np.where(np.arange(TRUTH.size) % 4 == 2, -1e4, truth)  # of two layers of masks
    assert not judged(several + np.where(np.arange(TRUTH.size) == 12, 1e-3, 0.0), several, several).passed


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_small_channels_are_checked_on_their_own(precision: str) -> None:
    """Scores next to boxes in pixels, in the norm of which they vanish."""
    case = Case(name="case", sizes={}, kind="normal", seed=1)
    sizes = np.array([640.0, 400.0, 0.5, 0.1])
    truth = np.random.default_rng(0).uniform(0.5, 1, (50, 4)) * sizes
    indices = reference.channels(truth.shape, case)

    def compare(got: Array, eager: Array, rows: int | None = None) -> Comparison:
        arrays = [array[:rows].reshape(-1) for array in (got, eager, truth)]
        part = [index[: arrays[0].size] for index in indices]
        return judge(case, "y", arrays[0], arrays[1], arrays[2], precision_named(precision), channels=part)

    wrong = truth * np.where(sizes < 1, 1.001 if precision == "fp32" else 1.1, 1)
    assert not compare(wrong, truth).passed and compare(truth, truth).passed
    assert compare(wrong, truth * np.where(sizes < 1, 1.2, 1)).passed  # noise in eager, too
    assert compare(wrong, truth, 5).passed, "too few"
    one = truth.copy()
    one[7, 3] += 0.01 if precision == "fp32" else 0.2
    worst = compare(one, truth).worst
    assert worst is not None and worst.index == [31]
    hard = case.model_copy(update={"kind": "scaled"})
    assert reference.channels(truth.shape, hard) == () == reference.channels((), case)
    assert reference.channels((2, reference.SAMPLED), case.model_copy(update={"kind": "data"})) == ()
    assert [len(index) for index in reference.channels((2, reference.SAMPLED), case)] == [reference.SAMPLED] * 2


def test_a_deployment_that_was_given_its_error_is_compared_as_a_whole() -> None:
    filled = np.where(np.arange(TRUTH.size) % 4 == 1, -1e9, TRUTH)
    arrays = [np.where(filled < -1e8, filled, off_by(TRUTH, 1e-2, 1)), filled, filled]
    for allowed in (None, Allowed(2e-2, True)):
        comparison = judge(CASE, "output", arrays[0], arrays[1], arrays[2], precision_named("fp32"), allowed=allowed)
        assert comparison.passed is (allowed is not None)


def test_numbers_that_are_small_by_chance_are_not_checked_on_their_own() -> None:
    """Every number of a single token is a channel; in a few of them, an error that is small in all looks large."""
    case = Case(name="case", sizes={}, kind="normal", seed=1)
    truth = np.random.default_rng(0).standard_normal(768)
    indices = reference.channels((1, 1, 768), case)
    got = off_by(truth, 2e-6, 1)
    assert np.count_nonzero(100 * np.abs(truth) < np.abs(truth).max()) > 16
    assert judge(case, "y", got, truth, truth, precision_named("fp32"), channels=indices).passed


def test_large_numbers_of_different_sizes_are_no_fill() -> None:
    truth = np.where(np.arange(TRUTH.size) % 4 == 1, 1e5 * TRUTH, 1e-3 * TRUTH)
    assert judged(truth + 1e-3, truth, truth).passed


def test_an_output_of_another_size_fails() -> None:
    comparison = judged(TRUTH[:-1], TRUTH, TRUTH)
    assert not comparison.passed
    assert comparison.reason == "999 elements, where float64 eager has 1000"


def test_relative_error() -> None:
    assert relative_error(np.array([3.0, 0.0]), np.array([3.0, 4.0])) == 0.8
    assert relative_error(np.array([0.0, 0.5]), np.zeros(2)) == 0.5  # absolute where the reference is zero
    assert judged(np.full(9, 1e-3), np.zeros(9), np.zeros(9)).passed is False
    assert relative_error(np.array([np.nan, 4.0]), np.array([3.0, 4.0])) == np.inf  # NaN fails every comparison


@pytest.mark.parametrize("size", [PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 77])
def test_large_outputs_compared_in_pieces_give_the_same_error(size: int) -> None:
    rng = np.random.Generator(np.random.PCG64(size))
    truth, got = rng.standard_normal((2, size))
    whole = float(np.linalg.norm(got - truth) / np.linalg.norm(truth))
    assert relative_error(got, truth) == pytest.approx(whole, rel=1e-12)
    case = Case(name="large", sizes={}, kind="normal", seed=3)
    seeded = np.random.Generator(np.random.PCG64([case.seed, size, reference.BLOCK]))
    signed = got * (seeded.integers(0, 2, size) * 2 - 1)
    sums = reference.blocks(got, case)
    assert sums is not None and np.array_equal(sums, np.add.reduceat(signed, np.arange(0, size, reference.BLOCK)))


# Statistics reported with the verdict


def test_cosine_noise_and_quantiles_of_the_error() -> None:
    truth = np.array([3.0, 4.0, 0.0, 0.0])
    got = np.array([3.0, 4.0, 0.5, 0.0])
    comparison = judged(got, truth, truth)
    assert comparison.cosine == pytest.approx(25 / (5 * np.hypot(5, 0.5)))
    assert comparison.snr_db == pytest.approx(20.0)  # the error is a tenth
    assert comparison.quantiles == {
        "p50": 0.0,
        "p90": pytest.approx(0.0875),
        "p99": pytest.approx(0.12125),
        "max": 0.125,
    }
    assert comparison.worst is not None and comparison.worst.index == [2]
    assert (comparison.worst.got, comparison.worst.eager, comparison.worst.float64) == (0.5, 0.0, 0.0)
    assert comparison.worst.text("y") == "y[2] is 0.5, where float64 has 0 and eager 0"
    square = truth.reshape(2, 2)
    assert judged(got.reshape(2, 2), square, square) == comparison  # elements are numbered in order, whatever the shape
    exact = judged(truth, truth, truth)
    assert exact.snr_db is None and exact.cosine == pytest.approx(1.0) and exact.quantiles["max"] == 0.0
    nothing = judged(np.zeros(3), np.zeros(3), np.zeros(3))
    assert nothing.cosine is nothing.snr_db is None and nothing.passed


def test_the_position_of_a_nan_that_eager_does_not_have() -> None:
    got = TRUTH.copy()
    got[[7, 9]] = np.nan
    comparison = judged(got, TRUTH, TRUTH)
    assert (
        not comparison.passed
        and comparison.worst is not None
        and comparison.worst.index == [7]
        and comparison.worst.got is None
    )
    assert comparison.worst.text("y").startswith("y[7] is not finite, where float64 has ")


# Whole bundles


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Bundle]:
    """One product of (rows, 16) by (16, 8), deployed."""

    @functools.cache
    def deploy(rows: int) -> Bundle:
        out = tmp_path_factory.mktemp("product") / "b"
        return attnforge.deploy(nn.Linear(16, 8), (torch.randn(rows, 16),), out, targets=["onnxruntime"], tune=False)

    return deploy


@pytest.mark.xdist_group("product")
@pytest.mark.parametrize("rows", [7, 9001])  # of the larger output only some elements are compared
def test_the_worst_element_is_named_by_its_index_in_the_output(product: Callable[[int], Bundle], rows: int) -> None:
    bundle = product(rows)
    case = next(case for case in bundle.manifest.cases if case.kind == "normal")
    flat = reference.stored_indices(rows * 8, case)
    row, column = np.unravel_index(5 if flat is None else flat[5], (rows, 8))

    class Off(Session):
        def run(self, values: Any, **options: Any) -> dict[str, Any]:
            results = super().run(values, **options)
            results["output"][row, column] += 1
            return results

    with attnforge.load(bundle) as session:
        session.__class__ = Off
        report = hold(session.bundle, session.backend, session.run)
    worst = report.outputs["output"].worst
    assert not report.passed and worst is not None and worst.index == [row, column]
    assert worst.got is not None and worst.float64 is not None
    assert worst.got - worst.float64 == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_deployed_model_passes_on_every_case(small: DeploySmall, precision: str) -> None:
    bundle = small(precision)
    report = attnforge.verify(bundle.path)
    assert report.passed and report.precision == precision
    parity = report.backends["onnxruntime-cpu"]
    assert parity.cases == len(bundle.manifest.cases) > 8
    assert parity.failures == [] and 0 < parity.error <= parity.budget
    assert set(report.skipped) | set(report.backends) == set(BACKENDS)
    assert all(report.skipped.values())


def test_eager_passes_its_own_budget(small: DeploySmall) -> None:
    module, _, _ = small_example()
    report = attnforge.verify(small("fp16"), module=module)
    assert report.backends["eager"].passed
    assert report.backends["eager"].error == report.backends["eager"].eager_error


def test_another_module_fails(small: DeploySmall) -> None:
    report = attnforge.verify(small("fp32"), ["eager"], module=SmallModule())
    without_weights = {"mask-all", "integers-large"}  # no memory is visible; 2^31 dominates the sum
    assert {c.case for c in report.backends["eager"].comparisons if c.passed} <= without_weights
    assert not report.passed


def scale_weights(file: Path, factor: float) -> None:
    model = ir.load(file)
    weight = max(model.graph.initializers.values(), key=lambda value: value.const_value.size)  # type: ignore[union-attr]
    assert weight.const_value is not None
    weight.const_value = ir.tensor(weight.const_value.numpy() * np.float32(factor), name=weight.name)
    ir.save(model, file)


@pytest.mark.parametrize(("factor", "passed"), [(1.0, True), (1.01, False), (1 + 1e-5, False)])
def test_a_wrong_weight_fails(copy: Path, factor: float, passed: bool) -> None:
    scale_weights(copy / "onnxruntime/model.onnx", factor)
    report = attnforge.verify(rewrite(copy))
    assert report.passed is passed
    failures = report.backends["onnxruntime-cpu"].failures
    assert passed or any("over the budget" in (failure.reason or "") for failure in failures)


def test_a_mask_that_is_ignored_fails(copy: Path) -> None:
    """Leave scores unmasked where the model fills them with -inf: a mistake that a loose tolerance lets pass."""
    model = ir.load(copy / "onnxruntime/model.onnx")
    wheres = [node for node in model.graph if node.op_type == "Where"]
    assert wheres
    for node in wheres:
        scores = max(node.inputs[1:], key=lambda value: len(value.shape or ()))  # type: ignore[union-attr]
        ir.convenience.replace_all_uses_with(node.outputs[0], scores)  # type: ignore[arg-type]
    ir.save(model, copy / "onnxruntime/model.onnx")
    report = attnforge.verify(rewrite(copy))
    assert not report.passed


def test_no_case_is_no_proof(copy: Path) -> None:
    def without_cases(manifest: attnforge.bundle.Manifest) -> None:
        manifest.cases = []

    report = attnforge.verify(rewrite(copy, without_cases))
    assert not report.passed
    assert report.backends["onnxruntime-cpu"].cases == 0


def test_no_backend_is_no_proof(copy: Path) -> None:
    def for_tensorrt_only(manifest: attnforge.bundle.Manifest) -> None:
        manifest.targets = {"tensorrt": manifest.targets["tensorrt_rtx"]}

    report = attnforge.verify(rewrite(copy, for_tensorrt_only))
    assert not report.passed and report.backends == {}
    assert "deploy it again with --target onnxruntime" in report.skipped["onnxruntime-cpu"]


def test_backends_asked_for_by_name(small: DeploySmall) -> None:
    assert list(attnforge.verify(small("fp32"), ["onnxruntime-cpu"]).backends) == ["onnxruntime-cpu"]
    with pytest.raises(UnknownNameError, match="unknown backend 'gpu'"):
        attnforge.verify(small("fp32"), ["gpu"])
    with pytest.raises(UnavailableError, match="no plan for tensorrt"):
        attnforge.verify(small("fp32"), ["tensorrt"])


@pytest.mark.gpu("tensorrt_rtx")
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_tensorrt_rtx_passes(small: DeploySmall, precision: str) -> None:
    report = attnforge.verify(small(precision), ["tensorrt_rtx"])
    assert report.passed, report.backends["tensorrt_rtx"].failures


# Cases

BATCH, TOKENS = DimSpec(symbol="batch", min=1, opt=2, max=8), DimSpec(symbol="tokens", min=1, opt=48, max=128)


def spec(name: str, dtype: str, *dims: int | DimSpec, low: int | None = None, high: int | None = None) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, dims=list(dims), low=low, high=high)


def test_cases_of_a_dynamic_model_cover_the_profile() -> None:
    inputs = [spec("x", "float32", BATCH, TOKENS, 16), spec("mask", "bool", TOKENS, TOKENS)]
    added = spec("bias", "float32", TOKENS, TOKENS)
    added.role = "scores"
    before, cases = reference.cases(inputs), reference.cases([*inputs, spec("n", "int64", BATCH, low=2, high=9), added])
    first = [case.model_copy(update={"reach": None}) for case in cases[: len(before)]]
    assert first == before, "further cases come last"
    assert next(case for case in cases if case.name == "normal-largest").reach == 128
    sizes = [case.sizes for case in cases]
    assert {case.kind for case in cases} == set(get_args(Kind)) - {"data"}
    assert {case.masks for case in cases} == set(get_args(Masks))
    assert len({case.name for case in cases}) == len(cases) == len({case.seed for case in cases})
    for size in ({"batch": 2, "tokens": 48}, {"batch": 1, "tokens": 1}, {"batch": 8, "tokens": 128}):
        assert size in sizes
    tokens = {size["tokens"] for size in sizes}
    assert any(n % 2 and n > 1 for n in tokens), "an odd size"
    assert any(n > 7 and all(n % d for d in range(2, n)) for n in tokens), "a prime size"
    for size in ({"batch": 1, "tokens": 128}, {"batch": 8, "tokens": 1}):
        assert size in sizes, "a corner"
    assert all(1 <= s["batch"] <= 8 and 1 <= s["tokens"] <= 128 for s in sizes)


def test_cases_of_a_static_model() -> None:
    cases = reference.cases([spec("x", "float32", 3, 4)])
    assert [case.kind for case in cases[:3]] == ["example", "normal", "normal"] and cases[1].seed != cases[2].seed
    assert {case.kind for case in cases} == set(get_args(Kind)) - {"data", "zeros", "large"}
    tokens = [spec("ids", "int64", TOKENS, low=0, high=9)]
    assert {case.kind for case in reference.cases(tokens)} == {"example", "normal", "zeros", "large"}
    tokens[0].index = (0, 99)
    assert {case.kind for case in reference.cases(tokens)} == {"example", "normal"}
    tokens[0].index, tokens[0].role = None, "shape"
    assert {case.kind for case in reference.cases(tokens)} == {"example", "normal"}
    tokens[0].role, tokens[0].high = None, 1
    assert {case.kind for case in reference.cases(tokens)} == {"example", "normal"}, "a mask"
    tokens[0].role = "number"
    assert {case.kind for case in reference.cases(tokens)} == {"example", "normal", "zeros", "large"}


@given(low=st.integers(1, 40), extra=st.integers(0, 90), factor=st.sampled_from([1, 2, 4]), fraction=st.floats(0, 1))
def test_sizes_stay_inside_the_profile_and_keep_multiples(low: int, extra: int, factor: int, fraction: float) -> None:
    dim = DimSpec(
        symbol="s",
        factor=factor,
        min=factor * low,
        opt=factor * round(low + fraction * extra),
        max=factor * (low + extra),
    )
    inputs = [spec("x", "float32", dim)]
    for case in reference.cases(inputs):
        (size,) = reference.shape_of(inputs[0], case.sizes)
        assert size % factor == 0 and dim.min is not None and dim.max is not None
        assert dim.min <= size <= dim.max


def test_inputs_are_reproduced_from_the_case_alone() -> None:
    inputs = [
        spec("x", "float32", TOKENS, 16),
        spec("half", "float16", 3),
        spec("brain", "bfloat16", 3),
        spec("ids", "int32", TOKENS, low=-3, high=7),
        spec("mask", "bool", BATCH, TOKENS),
    ]
    case = Case(name="n", sizes={"batch": 3, "tokens": 40}, kind="normal", seed=4)
    made, again = reference.make_inputs(case, inputs, {}), reference.make_inputs(case, inputs, {})
    assert {name: (array.dtype.name, array.shape) for name, array in made.items()} == {
        "x": ("float32", (40, 16)), "half": ("float16", (3,)), "brain": ("bfloat16", (3,)), "ids": ("int32", (40,)),
        "mask": ("bool", (3, 40)),
    }  # fmt: skip
    assert all(np.array_equal(made[name], again[name]) for name in made)
    reseeded = reference.make_inputs(case.model_copy(update={"seed": 5}), inputs, {})
    assert not any(np.array_equal(made[name], reseeded[name]) for name in made)
    assert made["ids"].min() == -3 and made["ids"].max() == 7
    assert sorted(made["mask"].sum(1) // 40) == [0, 0, 1] and 0 in made["mask"].sum(1)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_inputs_of_every_kind(precision: str) -> None:
    p = precision_named(precision)
    inputs = [spec("x", p.dtype.name, 16, 128)]

    def made(kind: Kind, scale: float = 1.0) -> Array:
        case = Case(name="k", sizes={}, kind=kind, scale=scale, seed=1)
        array = reference.make_inputs(case, inputs, {})["x"]
        assert array.dtype == p.dtype and np.array_equal(array, reference.make_inputs(case, inputs, {})["x"])
        return array.astype(np.float64)

    assert 14 < made("scaled", 16.0).std() < 18 and made("normal").std() == pytest.approx(1, abs=0.1)
    assert 0.9 < np.abs(made("uniform")).max() <= 1 and made("uniform").std() == pytest.approx(3**-0.5, rel=0.1)
    assert np.array_equal(made("constant"), np.ones((16, 128)))
    channels = made("outliers").std(axis=0)
    assert (channels > 20).sum() == 2 and np.median(channels) < 2
    denormal = np.abs(made("denormal"))
    assert 0 < denormal.max() < 2 * p.smallest_normal and (denormal < p.smallest_normal).mean() > 0.9
    extremes = np.abs(made("extremes"))
    assert (extremes == p.largest).sum() == 34 and np.median(extremes) < 2
    assert np.abs(made("extremes", 2.0**-4)).max() == pytest.approx(p.largest / 16, rel=1e-2)


@pytest.mark.parametrize("kind", ["normal", "extremes", "denormal", "scaled", "constant"])
def test_a_setting_stays_in_its_range_where_other_inputs_are_hard(kind: Kind) -> None:
    """A temperature at its extreme would mask the effects of extremes in other inputs."""
    inputs = [spec("x", "float16", 61), spec("temperature", "float16", 3)]
    case = Case(name="k", sizes={}, kind=kind, scale=1.0, seed=1)
    before = reference.make_inputs(case, inputs, {})
    inputs[1].setting = (0.25, 2.0)
    made = reference.make_inputs(case, inputs, {})
    assert made["temperature"].min() >= 0.25 and made["temperature"].max() <= 2
    assert len(set(made["temperature"].tolist())) == 3 and made["temperature"].dtype == np.float16
    assert np.array_equal(made["x"], before["x"])
    alone = reference.make_inputs(case, inputs[1:], {})
    inputs[1].setting = None
    assert np.array_equal(alone["temperature"], reference.make_inputs(case, inputs[1:], {})["temperature"])


def test_detection_of_settings() -> None:
    """A setting is one number, or one per sample, of one sign; data has more numbers, both signs or zeros."""
    assert reference.range_of_setting(np.array(2, np.float32)) == (1.0, 4.0)
    assert reference.range_of_setting(np.array([0.5, 1.5], np.float32)) == (0.25, 3.0)
    assert reference.range_of_setting(-np.ones((3, 1, 1))) == (-2.0, -0.5)
    assert reference.range_of_setting(np.array(50_000, np.float16)) == (24_992.0, 65_504.0)
    for example in (np.zeros(()), np.array([-1.0, 1.0]), np.ones((2, 3)), np.array(np.inf), np.array([np.nan])):
        assert reference.range_of_setting(example) is None


@pytest.mark.parametrize(
    ("precision", "size", "swapped"), [("fp32", 8, 0), ("bf16", 8, 2), ("tf32", 3, 1), ("fp16", 1, 0)]
)
def test_indices_of_scores_that_tie_up_to_rounding_may_be_swapped(precision: str, size: int, swapped: int) -> None:
    truth = np.arange(size)
    case = Case(name="normal-opt", sizes={}, kind="normal", seed=1)
    for wrong in range(min(size, 4)):
        got = np.where(np.arange(size) < wrong, -1, truth)
        assert judge(case, "y", got, truth, truth, precision_named(precision)).passed == (wrong <= swapped)


def test_the_example_and_data_are_the_stored_arrays() -> None:
    inputs = [spec("x", "float32", 3)]
    stored = {"x": np.arange(3.0), "data-0/x": np.ones(3)}
    for kind, name in (("example", "x"), ("data", "data-0/x")):
        case = Case(name="data-0", sizes={}, kind=kind, seed=0)  # type: ignore[arg-type]
        assert reference.make_inputs(case, inputs, stored)["x"] is stored[name]


@pytest.mark.parametrize("kind", ["bool", "added", "infinite", "int64"])
def test_masks_of_every_kind(kind: str) -> None:
    excludes: dict[str, Any] = {"added": -1e4, "infinite": "-inf"}
    mask = spec("m", {"bool": "bool", "int64": "int64"}.get(kind, "float32"), 40, 9)
    mask.excludes, (mask.low, mask.high) = excludes.get(kind), (0, 1) if kind == "int64" else (None, None)

    def made(masks: Masks) -> Array:
        case = Case(name="m", sizes={}, kind="normal", masks=masks, seed=1)
        array = reference.make_inputs(case, [mask], {})["m"]
        if mask.excludes is None:
            return array.astype(bool)
        assert set(np.unique(array)) <= {0.0, float(mask.excludes)}
        return np.equal(array, 0)

    assert made("all").all() and not made("none").any()
    assert (made("one").sum(1) == 1).all() and len(set(made("one").argmax(1))) > 3
    assert (made("all but one").sum(1) == 8).all()
    lengths = made("ragged").sum(1)
    assert np.array_equal(made("ragged"), np.arange(9) < lengths[:, None]) and len(set(lengths)) > 3
    if kind != "int64":
        counts = made("random").sum(1)
        assert 0 in counts and 9 in counts and 5 < counts.mean() < 8


@pytest.mark.parametrize(
    ("dtype", "low", "most", "wanted"),
    [
        ("int64", 1, None, {2**31 - 1, 2**31 - 2, 2**31 - 3, 2**31 - 4}),
        ("int32", -1, None, {sign * (2**31 - i) for i in (1, 2, 3, 4) for sign in (1, -1)}),
        ("uint8", 3, None, {252, 253, 254, 255}),
        ("int64", 1, 2, {0, 1, 2}),
    ],
)
def test_integer_inputs_are_zero_and_as_large_as_eager_supports(
    dtype: str, low: int, most: int | None, wanted: set[int]
) -> None:
    inputs = [spec("n", dtype, 40, low=low, high=9), spec("ids", "int64", 40, low=2, high=9), spec("x", "float32", 40)]
    inputs[1].index = (0, 9)
    case = Case(name="n", sizes={}, kind="large", most=most, seed=1)
    made = reference.make_inputs(case, inputs, {})
    assert set(made["n"].tolist()) == wanted and made["n"].dtype == dtype
    assert made["ids"].max() <= 9 and np.abs(made["x"]).max() < 9
    zeros = reference.make_inputs(case.model_copy(update={"kind": "zeros"}), inputs, {})
    assert not zeros["n"].any() and zeros["ids"].all() and zeros["x"].all()


def test_a_bias_of_scores_excludes_random_keys() -> None:
    bias = spec("bias", "float16", 40, 9)
    bias.role = "scores"
    case = Case(name="n", sizes={}, kind="normal", masks="infinite", seed=1)
    made = reference.make_inputs(case, [bias], {})["bias"]
    counts = np.isneginf(made).sum(1)
    assert {0, 9} <= set(counts) and np.isfinite(made[~np.isneginf(made)]).all()


def test_an_additive_mask_is_recognised_by_its_example() -> None:
    assert reference.excluded_by(np.array([0, -np.inf, 0], np.float32)) == "-inf"
    assert reference.excluded_by(np.array([0, -1e4], np.float16)) == -1e4
    for example in ([0.0, 1.0], [0.0, -1.0], [-1e9], [0.0], [0.0, -1e9, -1e4], []):
        assert reference.excluded_by(np.array(example)) is None


def test_a_scalar_input_is_made() -> None:
    for dtype, kind in (("float32", "normal"), ("float32", "constant"), ("int64", "normal"), ("bool", "normal")):
        case = Case(name="n", sizes={}, kind=kind, seed=1)  # type: ignore[arg-type]
        made = reference.make_inputs(case, [spec("t", dtype, low=0, high=3)], {})["t"]
        assert isinstance(made, np.ndarray) and made.shape == () and made.dtype == dtype


def test_large_outputs_are_sampled_at_positions_drawn_by_the_seed() -> None:
    array = np.arange(100_000).reshape(100, 1000)
    case, reseeded = CASE, CASE.model_copy(update={"seed": 2})
    picked = reference.sampled(array, case)
    assert picked.shape == (reference.SAMPLED,) and len(set(picked)) == reference.SAMPLED
    assert np.array_equal(picked, reference.sampled(array, case))
    assert np.array_equal(picked, np.sort(picked)) and picked[0] < 100 and picked[-1] > 99_900
    assert not np.array_equal(picked, reference.sampled(array, reseeded))
    assert np.array_equal(reference.sampled(array[:10], case), np.arange(10_000))


def test_the_reference_stores_eager_and_float64(small: DeploySmall) -> None:
    bundle = small("fp16")
    stored = load_file(bundle.file(REFERENCE_OUTPUTS))
    assert set(stored) == {
        reference.key(case, "output", which) for case in bundle.manifest.cases for which in ("eager", "float64")
    }
    for case in bundle.manifest.cases:
        eager, truth = (stored[reference.key(case, "output", which)] for which in ("eager", "float64"))
        assert truth.dtype == np.float64 and eager.shape == truth.shape
        error = relative_error(eager.astype(np.float64), truth)
        if case.is_ordinary and case.name != "mask-all":
            assert 0 < error < 0.02  # the rounding error of half precision


@pytest.mark.xdist_group("product")
@pytest.mark.parametrize("wrong", [100.0, np.nan])
def test_every_element_of_a_large_output_is_checked(wrong: float, product: Callable[[int], Bundle]) -> None:
    """Elements of a large output that are not stored one by one are part of a stored sum."""
    bundle = product(9001)
    case = next(case for case in bundle.manifest.cases if case.kind == "normal")
    kept = reference.stored_indices(9001 * 8, case)
    assert kept is not None
    missing = int(np.setdiff1d(np.arange(9001 * 8), kept)[4321])

    class Off(Session):
        def run(self, values: Any, **options: Any) -> dict[str, Any]:
            results = super().run(values, **options)
            results["output"].reshape(-1)[missing] = wrong
            return results

    with attnforge.load(bundle) as session:
        assert hold(session.bundle, session.backend, session.run).passed
        session.__class__ = Off
        report = hold(session.bundle, session.backend, session.run)
    assert not report.passed
    start = missing // reference.BLOCK * reference.BLOCK
    assert f"among elements {start} to {start + reference.BLOCK - 1}" in str(report.failures[0].reason)
