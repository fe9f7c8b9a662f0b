"""The claims of the suite: which contenders they are about, and when they hold."""

from __future__ import annotations

import pytest

from attnforge.bench.interval import latency_of
from attnforge.bench.results import Cases, Contender, Environment, Growth, Interval, Model, Results, Series
from attnforge.machine import this_machine
from benchmarks.experiment import Claim, claims_table, verdict
from benchmarks.experiments import suite as claims
from benchmarks.growth import fit_of


def contender(name: str, precision: str, ms: float, ours: bool = False, picked: bool = False) -> Contender:
    times = latency_of([[ms * (1 + 0.001 * (i % 5))] for i in range(15)])
    return Contender(
        name=name, precision=precision, ours=ours, picked=picked, what=name, error=0, budget=1, latency=times
    )


def model(*contenders: Contender) -> Model:
    return Model(name="m", sizes={}, inputs={}, rounds=15, deployed=[], contenders=list(contenders))


def results_of(found: Model) -> Results:
    here = Environment(machine=this_machine(), versions={}, threads=2, governor="-", load_before=None)
    return Results(command="c", created="-", seconds=1, environment=here, models=[found])


def test_what_auto_picks_is_compared_with_the_fastest_of_the_others() -> None:
    claim = claims.Ratio("m", "fp32", "fp32", 1.05)
    ours, slow = contender("openvino", "fp32", 10, True, True), contender("onnxruntime-cpu", "fp32", 20, True)
    faster, low = contender("eager", "fp32", 8), contender("eager", "bf16", 1)
    outcome = claim.measured_on(model(ours, slow, faster, low))
    assert outcome.against == "openvino fp32 to eager fp32"
    assert isinstance(outcome.measured, Interval) and outcome.measured.value == pytest.approx(1.25)
    assert outcome.holds == "**no**"
    assert claim.measured_on(model(ours, slow, low)).holds == "yes"  # half of the peer's time
    assert claim.measured_on(model(slow, faster)).holds == "not measured"  # nothing is picked
    assert claim.measured_on(None).holds == "not measured"


def test_who_is_wrong_in_another_case_is_passed_over() -> None:
    """And is named, with the ratio of ours to it."""
    ours, fast, right = (contender(n, "fp32", ms, n == "b", n == "b") for n, ms in (("b", 10), ("fast", 8), ("c", 9)))
    fast.cases = Cases(held=3, of=14, wrong="constant, output: error 2 is over the budget of 1")
    right.cases = Cases(held=2, of=14)
    to_any, to_fast = claims.Ratio("m", "fp32", "fp32", 1.05), claims.Ratio("m", "fp32", "fast fp32", 1.05)
    claim = to_any.measured_on(model(ours, fast, right))
    assert claim.against == "b fp32 to c fp32, checked in 2 of 14 cases" and claim.passed_over == ("fast fp32 (1.25)",)
    assert isinstance(claim.measured, Interval) and claim.measured.value == pytest.approx(10 / 9)
    by_name = to_fast.measured_on(model(ours, fast, right))
    assert by_name.text == "m: fp32 to fast" and isinstance(by_name.measured, Interval)
    assert by_name.measured.value == pytest.approx(10 / 8)
    alone = to_any.measured_on(model(ours, fast))
    assert alone.holds == "not measured" and alone.passed_over == claim.passed_over
    ours.cases = fast.cases
    assert to_any.measured_on(model(ours, right)).holds.startswith("**no**, it is wrong in co")


def test_what_is_passed_over_is_in_the_table() -> None:
    fast, ours = contender("openvino-plain", "fp32", 8), contender("onnxruntime-cpu", "fp32", 10, True, True)
    fast.cases = Cases(held=3, of=14, wrong="constant, output: error 2 is over the budget of 1")
    measured = model(fast, ours, contender("eager", "fp32", 20)).model_copy(update={"name": "vit-b-16"})
    (line,) = (
        one for one in claims_table(claims.measured_claims(results_of(measured))).splitlines() if "vit-b-16" in one
    )
    over = "not compared, because wrong in another case: openvino-plain fp32 (1.25)"
    assert line.startswith(
        f"| vit-b-16: fp32 to any fp32 contender; {over} | onnxruntime-cpu fp32 to eager fp32 | 1.05 |"
    )
    assert line.endswith("| yes |")


def test_differing_loads_widen_a_claims_interval() -> None:
    """Fifteen rounds of one load give a narrow interval; three loads do not."""
    claim = claims.Ratio("m", "fp32", "eager fp32", 1.05)
    ours = contender("openvino", "fp32", 10, True, True)
    ours.latency = latency_of([[11.0]] * 5 + [[10.9]] * 5 + [[10.6]] * 5)
    apart = model(ours, contender("eager", "fp32", 10))
    assert claim.measured_on(apart).holds == "**no**"
    ours.latency = ours.latency.model_copy(update={"openings": [5, 5, 5]})
    assert claim.measured_on(apart).holds == "within noise"


@pytest.mark.parametrize(
    ("value", "holds"),
    [(0.70, "yes"), (0.73, "within noise"), (0.75, "within noise"), (0.77, "within noise"), (0.90, "**no**")],
)
def test_what_is_within_its_interval_may_be_chance(value: float, holds: str) -> None:
    """On both sides of the limit."""
    measured = Interval(value=value, low=value - 0.05, high=value + 0.05)
    assert Claim("", measured, 0.75).holds == holds


@pytest.mark.parametrize(("reading", "word"), [(63.9, "yes"), (64.0, "yes"), (64.1, "no")])
def test_a_single_reading_stands_for_itself(reading: float, word: str) -> None:
    assert verdict(reading, 64) == word
    assert verdict(Interval(value=reading, low=reading, high=reading), 64) == word


def test_memory_and_how_it_grows() -> None:
    sizes = [196, 784, 3136, 12544]
    mib: list[float | None] = [0.5, 2.0, 8.0, 32.0]
    series = Series(
        name="onnxruntime-cpu", precision="fp32", ours=True, ms=[1, 2, 3, 4], extra_mib=mib, memory=fit_of(sizes, mib)
    )
    most, exponent = claims._of_memory([Growth(model="m", along="tokens", sizes=sizes, series=[series])])
    assert most.measured == 32 and most.holds == "yes"
    assert isinstance(exponent.measured, Interval) and exponent.measured.value == pytest.approx(1)
    assert exponent.holds == "yes"
    assert [one.holds for one in claims._of_memory([])] == ["not measured"] * 2
    assert claims_table([most]).endswith("|  | 64 | 32 | – | yes |"), "a reading has no interval"
