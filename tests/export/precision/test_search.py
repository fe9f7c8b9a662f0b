"""The search for parts in fp32, on graphs whose errors are sums of those of their parts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnforge.bundle import Case
from attnforge.export.precision.judge import Answer, Assignment, Judge, Part, Requirement, Trial
from attnforge.export.precision.search import NOTHING_LEFT, TRIALS, Culprits, by_culprits, by_error, lower_again
from attnforge.precision import PRECISIONS
from attnforge.progress import Steps
from attnforge.runtime.parity.metrics import MeasuredMetric, accuracy
from attnforge.runtime.parity.verify import Run

EXACT = {"y": np.ones(1)}


def judge_of(errors: Mapping[str, float], allowed: float) -> Judge:
    """Judges graphs whose output is 1, and more by the error of each part that is not in fp32."""

    def build(high: Assignment) -> Run:
        off = sum(error for name, error in errors.items() if name not in high)
        return lambda inputs: {"y": np.array([1 + off])}

    case = Case(name="example", sizes={}, kind="example", seed=0)
    answers = [Answer(case, {}, EXACT, EXACT)]
    return Judge(build, answers, Requirement(allowed), lambda high: f"{len(high)} in fp32", Steps(None))


def parts_of(errors: Mapping[str, float]) -> list[Part]:
    return [Part(name, "products", error) for name, error in errors.items()]


ERRORS = st.lists(st.integers(1, 1000), min_size=1, max_size=40).map(
    lambda errors: {f"part {i}": float(error) for i, error in enumerate(errors)}
)


@given(ERRORS, st.integers(1, 20_000))
def test_the_fewest_parts_with_the_largest_errors_are_raised(errors: dict[str, float], allowed: int) -> None:
    judge = judge_of(errors, allowed)
    raised = by_error(judge, parts_of(errors))
    left = sorted(errors.values())
    fewest = next(count for count in range(len(left) + 1) if sum(left[: len(left) - count]) <= allowed)
    assert [part.error for part in raised] == left[::-1][:fewest]
    assert len(judge.trials) <= 1 + np.ceil(np.log2(len(errors))) + 1
    if len(raised) < len(errors):
        assert judge(frozenset(part.name for part in raised)).passed


@given(ERRORS, st.integers(1, 20_000))
def test_culprits_are_raised_until_nothing_is_left(errors: dict[str, float], allowed: int) -> None:
    def largest(high: Assignment, trial: Trial) -> Culprits | None:
        assert trial.error > allowed
        left = {name: error for name, error in errors.items() if name not in high and error > 10}
        return Culprits(frozenset([max(left, key=lambda name: left[name])]), "the largest") if left else None

    judge = judge_of(errors, allowed)
    raised = by_culprits(judge, largest, frozenset(errors))
    high = frozenset().union(*(step.names for step in raised))
    assert judge(high).passed
    assert all(len(step.names) == 1 for step in raised if step.why != NOTHING_LEFT)
    assert (high == set(errors)) or NOTHING_LEFT not in {step.why for step in raised}


def test_what_proves_unneeded_is_lowered_again() -> None:
    errors = {"a": 0.5, "b": 0.2, "c": 0.1, "d": 0.1}
    judge, high = judge_of(errors, 0.45), frozenset(errors)
    path = list(lower_again(judge, high, [["a", "b"], ["a"], ["b", "c"], ["c"], ["d"]]))
    assert path == [{"a", "d"}, {"a"}]
    many = {f"part {i}": 1e-3 for i in range(2 * TRIALS)}
    judge = judge_of(many, 1.0)
    assert len(list(lower_again(judge, frozenset(many), ([name] for name in many)))) == len(judge.trials) == TRIALS


@pytest.mark.parametrize("nothing", [np.nan, np.inf])
def test_nan_passes_no_search(nothing: float) -> None:
    judge = judge_of({"a": nothing, "b": 1e-3}, 0.5)
    trial = judge(frozenset())
    assert not trial.passed and trial.text == "NaN or infinity in example, with 0.5 allowed"
    assert [part.name for part in by_error(judge, parts_of({"a": np.inf, "b": 1e-3}))] == ["a"]
    assert list(lower_again(judge, frozenset("ab"), [["a"], ["b"]])) == [{"a"}]
    (answer,) = judge.answers
    scores = MeasuredMetric("own", accuracy, {}, 0.9)
    for requirement in (
        judge.requirement,
        Requirement(metric=lambda: scores),
        Requirement(baseline=PRECISIONS["fp16"]),
    ):
        good, bad = (requirement.trial(answer, "y", np.array([number])) for number in (1.0001, nothing))
        for trials in ([good, bad], [bad, good]):
            assert good.passed and not requirement.verdict(trials).passed
