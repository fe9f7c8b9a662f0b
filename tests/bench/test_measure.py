"""Benchmarks: turns, parity before time, starts and memory in separate processes, growth. No test depends on times."""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.export import Dim

import attnforge
from attnforge.arrays import Array
from attnforge.bench import alone, calls, limits
from attnforge.bench import results as found
from attnforge.bench import run as bench
from attnforge.bench.contenders.engines import ENGINES, Setup, one_operator
from attnforge.bench.contenders.peers import Peer, PeerJob, using_sdpa
from attnforge.bench.contenders.quantised import QUANTISED
from attnforge.bench.contenders.registry import ON_GPU, PEERS, expanded, peers_here
from attnforge.bench.experiment import Experiment, case_at
from attnforge.bench.interval import latency_of
from attnforge.bench.limits import ceilings
from attnforge.bundle import REFERENCE_EXAMPLE, Bundle, Case, Source
from attnforge.children import ChildError
from attnforge.cli import main
from attnforge.errors import BundleError, InputError, UnavailableError, UnknownNameError, UsageError
from attnforge.machine import cuda_devices
from attnforge.model.registry import build_model
from attnforge.runtime import cases as reference
from attnforge.runtime import race as kernel
from attnforge.runtime.backends.registry import why_not_here
from attnforge.runtime.parity import verify
from attnforge.runtime.parity.verify import stored_inputs
from benchmarks.experiment import COMMAND, RESULTS, put, run
from benchmarks.experiments import suite
from tests.support.bundles import rewrite

pytestmark = pytest.mark.xdist_group("measure")

SMALL: dict[str, Any] = {"embed_dim": 32, "vocab_size": 50, "num_layers": 1}


def deployed(folder: Path, precision: str = "fp32", data: int = 0, **options: Any) -> Bundle:
    """Deploy a small encoder, with `data` cases of real data."""
    options = {**SMALL, **options}
    module, args, shapes = build_model("transformer-encoder", **options)
    others = [build_model("transformer-encoder", **SMALL, num_tokens=9 + i).args for i in range(data)]
    source = Source(kind="registered", name="transformer-encoder", options=options)
    name = f"encoder-{precision}-{options['num_layers']}"
    return attnforge.deploy(
        module, args, folder / name, shapes, precision, ["onnxruntime"], "encoder", tune=False, source=source,
        data=others,
    )  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return deployed(tmp_path_factory.mktemp("measure"), data=2)


@pytest.fixture(scope="module")
def low(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The same bundle in bf16."""
    return deployed(tmp_path_factory.mktemp("measure"), "bf16", data=2)


@pytest.fixture
def copy(bundle: Bundle, tmp_path: Path) -> Path:
    """A copy that a test may alter."""
    return Path(shutil.copytree(bundle.path, tmp_path / "copy"))


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """One product, at one size."""
    out = tmp_path_factory.mktemp("measure") / "fixed"
    return attnforge.deploy(nn.Linear(8, 4), (torch.randn(3, 8),), out, targets=["onnxruntime"], tune=False)


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Bundle]:
    """One product for batches up to 5, and its module."""
    module, shapes = nn.Linear(8, 4), ({0: Dim("batch", min=1, max=5)},)
    out = tmp_path_factory.mktemp("measure") / "linear"
    return module, attnforge.deploy(module, (torch.randn(3, 8),), out, shapes, targets=["onnxruntime"], tune=False)


def job_of(bundle: Bundle, folder: Path, **sizes: int) -> PeerJob:
    feeds = reference.make_inputs(reference.at(bundle.manifest.inputs, sizes), bundle.manifest.inputs, {})
    return PeerJob(bundle, feeds, 1, folder)


# --- throughput -------------------------------------------------------------------------------------------------------


def test_callers_call_at_once() -> None:
    at_once, most, lock = 0, 0, threading.Lock()

    def call() -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.02)
        with lock:
            at_once -= 1

    case = Case(name="any", sizes={}, kind="normal", seed=0)
    load = calls.Load("warm up", "throughput", case, batch=5, callers=3, runs={"a": call})
    (rounds,) = load.time({}, 2, float("inf"), 0).values()
    assert most == 3
    assert len(rounds) == calls.ROUNDS and all(ms >= 20 / (3 * 5) for (ms,) in rounds)


# --- parity first -----------------------------------------------------------------------------------------------------


def with_peer(monkeypatch: pytest.MonkeyPatch, run: Callable[[dict[str, Array]], dict[str, Array]]) -> None:
    monkeypatch.setitem(PEERS, "eager", Peer("planted", make=lambda job, stack: run))


def test_a_wrong_answer_has_no_time(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    right = attnforge.load(bundle, "onnxruntime-cpu").run
    calls: Counter[str] = Counter()

    def wrong(feeds: dict[str, Array]) -> dict[str, Array]:
        calls["wrong"] += 1
        return {name: array * np.float32(1.001) for name, array in right(feeds).items()}

    with_peer(monkeypatch, wrong)
    (model,) = attnforge.benchmark(bundle, ["onnxruntime-cpu"], ["eager"], rounds=2, quick=True).models
    assert "over the budget" in model.wrong["eager fp32"]
    assert [contender.name for contender in model.contenders] == ["onnxruntime-cpu"]
    assert calls["wrong"] == 2  # and no more


def held_to_all(
    bundles: list[Bundle],
    against: list[str],
    monkeypatch: pytest.MonkeyPatch,
    peers: float = 1.0,
    cases: bool = True,
    sizes: dict[str, int] | None = None,
) -> list[found.Contender]:
    """Measure contenders, with peers `peers` times as slow as ours."""

    def raced(runs: dict[str, Any], rounds: int, *given: Any, **options: Any) -> dict[str, list[list[float]]]:
        return {key: [[peers if key.partition(" ")[0] in PEERS else 1.0]] * rounds for key in runs}

    monkeypatch.setattr(calls, "race", raced)
    experiment = Experiment(bundles, ["onnxruntime-cpu"], against, 1, 1, throughput=False, starts=False, memory=False)
    experiment.cases = cases
    return bench.measure(experiment, sizes or {}, None).contenders


@pytest.mark.parametrize("any_sizes", [True, False])
@pytest.mark.parametrize("does", ["well", "err", "fail"])
def test_ours_and_peers_as_fast_are_checked_in_every_case(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, any_sizes: bool, does: str
) -> None:
    """A peer is wrong, or fails, in one case that is not timed."""
    right = attnforge.load(bundle, "onnxruntime-cpu").run
    every, inputs = bundle.manifest.cases, bundle.manifest.inputs
    timed = case_at(bundle, {})
    made_for = [case for case in every if any_sizes or case.sizes == timed.sizes]
    assert len(made_for) > 1 and (len(made_for) < len(every)) != any_sizes
    bad = next(case for case in reversed(made_for) if case != timed)
    stored = stored_inputs(bundle)
    cases = {_bytes(reference.make_inputs(case, inputs, stored)): case.name for case in made_for}
    held: list[str] = []

    def run(feeds: dict[str, Array]) -> dict[str, Array]:
        held.append(cases[_bytes(feeds)])
        if held[-1] == bad.name and does == "fail":
            raise RuntimeError("no such kernel")
        by = 1.01 if held[-1] == bad.name and does == "err" else 1.0
        return {name: array * np.float32(by) for name, array in right(feeds).items()}

    monkeypatch.setitem(PEERS, "eager", Peer("planted", make=lambda job, stack: run, any_sizes=any_sizes))
    ours, peer = held_to_all([bundle], ["eager"], monkeypatch)
    assert ours.cases == found.Cases(held=len(every), of=len(every)) and ours.wrong_in is None and ours.partly is None
    count = made_for.index(bad) + 1 if does == "fail" else len(made_for)
    assert peer.cases is not None and (peer.cases.held, peer.cases.of) == (count, len(every))
    assert held[-count:] == [case.name for case in made_for[:count]]
    reason = {"well": "None", "err": "error .* is over the budget of", "fail": "where it fails: no such kernel"}[does]
    assert re.search(reason, str(peer.wrong_in)) and (does == "well") == (peer.wrong_in is None)
    assert does == "well" or str(peer.wrong_in).startswith(f"{bad.name}, ")
    some = f"checked in {len(made_for)} of {len(every)} cases"
    assert peer.partly == (some if does == "well" and not any_sizes else None)


def test_slower_peers_are_not_checked_in_every_case(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    for times, cases, held in ((1.0, True, [True, True]), (1.1, True, [True, False]), (1.0, False, [False, False])):
        contenders = held_to_all([bundle], ["eager"], monkeypatch, times, cases)
        assert [contender.cases is not None for contender in contenders] == held


def test_a_contender_that_fits_no_case_is_checked_in_none(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    right = attnforge.load(bundle, "onnxruntime-cpu").run
    monkeypatch.setitem(PEERS, "eager", Peer("planted", make=lambda job, stack: right, any_sizes=False))
    _, peer = held_to_all([bundle], ["eager"], monkeypatch, sizes={"batch": 3, "tokens": 11})
    count = len(bundle.manifest.cases)
    assert peer.cases == found.Cases(held=0, of=count) and peer.partly == f"checked in 0 of {count} cases"


@pytest.mark.parametrize(("picked", "held"), [("onnxruntime-cpu", False), ("openvino", True)])
def test_a_peer_as_fast_as_the_picked_backend_is_checked(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, picked: str, held: bool
) -> None:
    """Even though another of our backends is faster."""
    monkeypatch.setattr(calls.Baseline, "in_every_case", lambda job, entry: found.Cases(held=2, of=2))
    of, entries = object.__new__(calls.Baseline), []
    for name, ms in (("onnxruntime-cpu", 1.0), ("openvino", 3.0), ("eager", 2.0)):
        contender = found.Contender(
            name=name, precision="fp32", ours=name != "eager", picked=name == picked, what="", error=0, budget=1,
            latency=latency_of([[ms]]),
        )  # fmt: skip
        entries.append((SimpleNamespace(job=of), contender))
    calls.check_all_cases(Experiment([bundle], None, [], 1, 1), entries)  # type: ignore[arg-type]
    assert [contender.cases is not None for _, contender in entries] == [True, True, held]


def test_a_missing_reference_file_is_reported_before_anything_is_timed(
    fixed: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "measure_ceilings", quick_ceilings)
    made = Bundle(shutil.copytree(fixed.path, tmp_path / "copy"))
    made.file(REFERENCE_EXAMPLE).unlink()
    stages: list[str] = []
    with pytest.raises(BundleError, match="example"):
        attnforge.benchmark(Bundle(made.path, lazily=True), rounds=1, progress=stages.append)
    assert not any(stage.startswith("time") for stage in stages)
    assert attnforge.benchmark(Bundle(made.path, lazily=True), ["onnxruntime-cpu"], rounds=1, quick=True).models


def test_if_ours_is_wrong_every_peer_is_checked(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours is wrong, although it is right on the timed inputs and was picked."""
    real = verify.hold

    def hold(of: Bundle, backend: str, *given: Any) -> Any:
        report = real(of, backend, *given)
        is_planted = backend != "eager" and len(given[1]) > 1  # not in the one case that is timed
        return report.model_copy(update={"passed": False, "reason": "planted"}) if is_planted else report

    monkeypatch.setattr(calls, "hold", hold)
    ours, peer = held_to_all([bundle], ["eager"], monkeypatch, peers=1.1)
    assert ours.wrong_in == "planted" and peer.cases is not None and peer.wrong_in is None


def test_cases_of_real_data_and_of_two_precisions_are_checked(
    bundle: Bundle, low: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [bundle, low]
    for contender, each in zip(held_to_all(made, [], monkeypatch), made, strict=True):
        count = len(each.manifest.cases)
        assert contender.cases == found.Cases(held=count, of=count), contender.cases
        assert sum(case.kind == "data" for case in each.manifest.cases) == 2


def _bytes(feeds: dict[str, Array]) -> bytes:
    return b"".join(array.tobytes() for array in feeds.values())


def test_a_wrong_backend_of_ours_has_no_time_either(copy: Path) -> None:
    file = copy / "onnxruntime/model.onnx"
    model = onnx.load(file)
    weight = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    array = onnx.numpy_helper.to_array(weight) * np.float32(1.01)
    weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))
    onnx.save(model, file)
    (measured,) = attnforge.benchmark(rewrite(copy), ["onnxruntime-cpu"], rounds=1, quick=True).models
    assert "onnxruntime-cpu fp32" in measured.wrong and measured.contenders == []


def test_what_cannot_run_is_a_result(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(feeds: dict[str, Array]) -> dict[str, Array]:
        raise RuntimeError("no such kernel\nand a page of more")

    with_peer(monkeypatch, fail)
    (model,) = attnforge.benchmark(
        bundle, ["onnxruntime-cpu"], ["eager", "torch-tensorrt"], rounds=1, quick=True
    ).models
    assert model.skipped["eager fp32"] == "no such kernel"
    assert "torch_tensorrt" in model.skipped["torch-tensorrt fp32"]
    assert [contender.name for contender in model.contenders] == ["onnxruntime-cpu"]


@pytest.mark.skipif(why_not_here("openvino") is not None, reason=str(why_not_here("openvino")))
def test_every_peer_of_a_cpu_is_right_and_timed(bundle: Bundle) -> None:
    named = [name for name in PEERS if name not in (*ON_GPU, *QUANTISED, "torch-compile", "flex-attention")]
    (model,) = attnforge.benchmark(bundle, None, named, sizes={"batch": 2, "tokens": 7}, rounds=3, quick=True).models
    assert model.wrong == {} and model.sizes == {"batch": 2, "tokens": 7}
    assert {contender.name for contender in model.contenders} == {"onnxruntime-cpu", "openvino", *named}, model.skipped
    for contender in model.contenders:
        assert 0 <= contender.error <= contender.budget and len(contender.latency.rounds) == 3
        assert contender.ratio is not None and contender.ratio.low <= contender.ratio.value <= contender.ratio.high
        assert contender.ours == (contender.name in ("onnxruntime-cpu", "openvino")) and contender.throughput == []
        assert contender.cold is None and contender.memory is None and contender.share is None
    (picked,) = [contender for contender in model.contenders if contender.picked]
    assert picked.name == attnforge.load(bundle).backend and picked.ratio is not None and picked.ratio.value == 1


def test_several_precisions_in_one_run(bundle: Bundle, low: Bundle) -> None:
    (model,) = attnforge.benchmark([bundle, low], ["onnxruntime-cpu"], ["eager"], rounds=2, quick=True).models
    assert {contender.key for contender in model.contenders} == {
        f"{name} {precision}" for name in ("onnxruntime-cpu", "eager") for precision in ("fp32", "bf16")
    }
    assert [bundle_.precision for bundle_ in model.deployed] == ["fp32", "bf16"]
    budgets = {contender.precision: contender.budget for contender in model.contenders}
    assert budgets["bf16"] > 100 * budgets["fp32"]
    for contender in model.contenders:  # each is compared with the picked backend at its precision
        assert contender.ratio is not None and (contender.ratio.value == 1) == contender.picked


def test_several_sizes_are_measured_each_for_itself(bundle: Bundle) -> None:
    sizes = [{"batch": 1, "tokens": 3}, {"batch": 2, "tokens": 5}]
    taken = attnforge.benchmark(bundle, ["onnxruntime-cpu"], sizes=sizes, rounds=1, quick=True)
    assert [model.sizes for model in taken.models] == sizes
    assert taken.models[0].inputs["tokens"] == "int64[1, 3]"


def test_sizes_that_the_bundle_has_outputs_of_need_no_module(linear: tuple[nn.Module, Bundle]) -> None:
    module, made = linear
    (model,) = attnforge.benchmark(made, rounds=1, quick=True, backends=["onnxruntime-cpu"]).models
    assert model.contenders[0].budget > 0
    with pytest.raises(UsageError, match="pass it as module"):
        attnforge.benchmark(made, ["onnxruntime-cpu"], sizes={"batch": 4}, rounds=1, quick=True)
    assert attnforge.benchmark(
        made, ["onnxruntime-cpu"], sizes={"batch": 4}, rounds=1, quick=True, module=module
    ).models


def test_what_cannot_be_meant(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="backend 'abacus'"):
        attnforge.benchmark(bundle, ["abacus"])
    with pytest.raises(UnknownNameError, match="peer 'abacus'"):
        attnforge.benchmark(bundle, against=["abacus"])
    for against in (["all", "abacus"], ["abacus", "all"]):
        with pytest.raises(UnknownNameError, match="peer 'abacus'"):
            attnforge.benchmark(bundle, against=against, module=nn.Identity())
    with pytest.raises(UsageError, match="1 or more"):
        attnforge.benchmark(bundle, rounds=0)
    with pytest.raises(UsageError, match="0 openings were asked for; give 1 or more"):
        attnforge.benchmark(bundle, openings=0)
    stages: list[str] = []
    with pytest.raises(InputError, match="999"):
        attnforge.benchmark(bundle, sizes=[{"tokens": 9}, {"tokens": 999}], progress=stages.append)
    assert stages == []  # nothing was measured in vain
    with pytest.raises(UsageError, match="a different precision"):
        attnforge.benchmark([bundle, bundle], quick=True)
    with pytest.raises(UnavailableError, match="tensorrt"):
        attnforge.benchmark(bundle, ["tensorrt"], quick=True)


def test_torchs_attention_replaces_ours_and_is_removed_again(bundle: Bundle, fixed: Bundle, tmp_path: Path) -> None:
    module = build_model("transformer-encoder", **SMALL | {"num_layers": 2}).module.eval()
    job = job_of(bundle, tmp_path, batch=2, tokens=6)
    tensors = [torch.from_numpy(array) for array in job.feeds.values()]
    with torch.no_grad():
        plain = module(*tensors)
        with using_sdpa() as calls:
            fused = module(*tensors)
        assert len(calls) == 2  # one per layer
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)
        module(*tensors)
        assert len(calls) == 2
    with ExitStack() as stack, pytest.raises(UnavailableError, match="its attention is not attnforge's"):
        job = PeerJob(fixed, {"input": np.zeros((3, 8), np.float32)}, 1, tmp_path, nn.Linear(8, 4))
        PEERS["eager-sdpa"].open(job, stack)(job.feeds)


def test_without_a_gpu_no_peer_of_one_is_asked_for() -> None:
    assert set(PEERS) - set(peers_here()) - set(QUANTISED) in (set(), set(ON_GPU))
    assert set(peers_here(["int8"])) == {*peers_here(), *QUANTISED}


def test_all_is_every_peer_that_can_run_here_and_those_that_are_named() -> None:
    assert expanded(["all"], peers_here) == expanded(["all", "eager", "all"], peers_here) == peers_here()
    assert expanded(["abacus", "all"], lambda: ["eager"]) == ["abacus", "eager"]
    assert expanded(["eager", "eager"], lambda: pytest.fail("nobody asked for all")) == ["eager"]


def test_plots_are_overwritten_where_that_is_asked_for(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latency.png").touch()

    def begins(*arguments: object, **options: object) -> None:
        raise UsageError("it has begun")

    monkeypatch.setattr(attnforge, "benchmark", begins)
    for flags, words in (
        ([], "contains plots; choose another folder with --plots, or overwrite them with --force"),
        (["--force"], "it has begun"),
    ):
        monkeypatch.setattr(sys, "argv", ["attnforge", "bench", str(bundle.path), "--plots", str(tmp_path), *flags])
        with pytest.raises(SystemExit):
            main()
        assert words in capsys.readouterr().err


# --- loads ------------------------------------------------------------------------------------------------------------


def loaded(bundle: Bundle, stack: ExitStack) -> Callable[[dict[str, Array]], dict[str, Array]]:
    return stack.enter_context(attnforge.load(bundle, "onnxruntime-cpu")).run


def planted(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], None] = lambda opening: None, **of: Any
) -> list[str]:
    """Make two peers run the bundle's backend; `fails` is called at each load of `eager`. Return its events."""
    happened: list[str] = []

    def open_it(job: PeerJob, stack: ExitStack) -> Callable[[dict[str, Array]], dict[str, Array]]:
        count = sum(event.startswith("open") for event in happened) + 1
        happened.append(f"open {count}")
        fails(count)
        stack.callback(happened.append, f"close {count}")
        return loaded(bundle, stack)

    monkeypatch.setitem(PEERS, "eager", Peer("planted", make=open_it, **of))
    monkeypatch.setitem(PEERS, "eager-sdpa", Peer("planted", make=lambda job, stack: loaded(bundle, stack)))
    whole = kernel.race

    def raced(*given: Any, **more: Any) -> Any:
        happened.append("race")
        return whole(*given, **more)

    monkeypatch.setattr(calls, "race", raced)
    return happened


def opened(bundle: Bundle, rounds: int, openings: int) -> found.Model:
    named = ["onnxruntime-cpu"], ["eager", "eager-sdpa"]
    (model,) = attnforge.benchmark(bundle, *named, rounds=rounds, openings=openings, quick=True).models
    return model


@pytest.mark.parametrize(("rounds", "openings", "shares"), [(5, 3, [2, 2, 1]), (24, 4, [6] * 4), (2, 9, [1, 1])])
def test_rounds_are_split_between_loads(rounds: int, openings: int, shares: list[int]) -> None:
    assert Experiment([], None, [], rounds, 1, openings=openings).shares == shares


def test_every_contender_is_loaded_again_for_its_share(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new one is loaded before the old one is closed, whose memory it would reuse; at the end all are closed."""
    happened, threads = planted(bundle, monkeypatch), torch.get_num_threads()
    model = opened(bundle, 5, 3)
    assert happened == [
        "open 1", "race", "open 2", "close 1", "race", "open 3", "close 2", "race", "close 3"
    ]  # fmt: skip
    assert (model.rounds, model.openings) == (5, 3) and torch.get_num_threads() == threads
    assert [(len(contender.latency.rounds), contender.latency.openings) for contender in model.contenders] == [
        (5, [2, 2, 1])
    ] * 3
    assert all(contender.error > 0 and contender.notes == [] for contender in model.contenders)


def test_every_load_has_its_own_order(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of loading varies, but the results list contenders in a fixed order."""
    said: list[str] = []
    planted(bundle, monkeypatch)
    named = ["onnxruntime-cpu"], ["eager", "eager-sdpa"]
    (model,) = attnforge.benchmark(bundle, *named, rounds=6, openings=6, quick=True, progress=said.append).models
    order = [stage.removeprefix("open ") for stage in said if stage.startswith("open ")]
    orders = {tuple(order[i : i + 3]) for i in range(0, len(order), 3)}
    assert len(order) == 18 and len(orders) > 2 and all(len(set(names)) == 3 for names in orders)
    assert [contender.name for contender in model.contenders] == ["onnxruntime-cpu", "eager", "eager-sdpa"]


def test_what_torch_compiles_stays_open(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    happened = planted(bundle, monkeypatch, any_sizes=False)
    model = opened(bundle, 2, 2)
    assert happened == ["open 1", "race", "race", "close 1"]
    notes = {contender.name: contender.notes for contender in model.contenders}
    assert notes.pop("eager") == [
        "compiled once, because that takes long: its interval does not cover differences between loads"
    ]
    assert notes == {"onnxruntime-cpu": [], "eager-sdpa": []}


def test_what_fails_in_a_later_load_has_no_time(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not loaded again, and the others' rounds still pair."""

    def fails(opening: int) -> None:
        if opening == 2:
            raise RuntimeError("no memory")

    happened = planted(bundle, monkeypatch, fails)
    model = opened(bundle, 3, 3)
    assert model.skipped == {"eager fp32": "no memory (in load 2 of 3; it was right before)"} and not model.wrong
    assert happened == ["open 1", "race", "open 2", "close 1", "race", "race"]
    assert [contender.latency.openings for contender in model.contenders] == [[1, 1, 1]] * 2
    assert all(contender.ratio is not None for contender in model.contenders)


def test_what_is_wrong_in_a_later_load_has_no_time(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(bundle, monkeypatch)
    factors = iter([1.0, 1.001])

    def open_it(job: PeerJob, stack: ExitStack) -> Callable[[dict[str, Array]], dict[str, Array]]:
        right, by = loaded(bundle, stack), np.float32(next(factors))
        return lambda feeds: {name: array * by for name, array in right(feeds).items()}

    monkeypatch.setitem(PEERS, "eager", Peer("planted", make=open_it))
    model = opened(bundle, 2, 2)
    assert "over the budget" in model.wrong["eager fp32"] and "load 2 of 2" in model.wrong["eager fp32"]
    assert {contender.name for contender in model.contenders} == {"onnxruntime-cpu", "eager-sdpa"}


# --- whole runs -------------------------------------------------------------------------------------------------------


def quick_ceilings(threads: int) -> limits.Ceilings:
    return ceilings.measure_ceilings(threads, ("fp32",), 0.02)


@pytest.fixture(scope="module")
def whole(bundle: Bundle) -> found.Results:
    against, sizes = ["onnxruntime-plain"], {"batch": 2, "tokens": 33}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "measure_ceilings", quick_ceilings)
        patch.setattr(calls, "BURST", 0.01)
        return attnforge.benchmark(bundle, ["onnxruntime-cpu"], against, sizes=sizes, rounds=3, threads=1)


def test_everything_is_measured(whole: found.Results) -> None:
    (model,) = whole.models
    assert model.openings == 3 and all(contender.latency.openings == [1, 1, 1] for contender in model.contenders)
    assert whole.ceilings is not None and whole.environment.threads == 1
    assert whole.environment.versions["attnforge"] == attnforge.__version__
    assert whole.environment.machine.processor and whole.seconds > 0
    assert model.work["fp32"].flops > 0 and model.work["fp32"].uncounted == []
    for contender in model.contenders:
        assert (
            contender.cold is not None
            and min(contender.cold.import_s, contender.cold.load_s, contender.cold.first_s) > 0
        ), contender.notes
        assert contender.memory is not None and contender.memory.peak_mib >= contender.memory.loaded_mib > 10, (
            contender.notes
        )
        limit = model.limit["fp32"].seconds
        assert contender.share == pytest.approx(1e3 * limit / contender.latency.median.value)
        points = {(each.batch, each.callers) for each in contender.throughput}
        assert points == ({(1, 1), (2, 1), (4, 1), (8, 1)} | ({(2, 2), (2, 4)} if contender.ours else set()))
        for each in contender.throughput:
            assert 0 < each.per_second.low <= each.per_second.value <= each.per_second.high
    sizes = {contender.name: contender.size_mb for contender in model.contenders}
    assert sizes["onnxruntime-cpu"] == pytest.approx(0.15, abs=0.1)
    (record,) = model.deployed
    assert record.source.startswith("transformer-encoder") and {"export", "reference"} <= set(record.seconds)
    ours = sizes["onnxruntime-cpu"]
    assert ours is not None and record.size_mb > ours


def test_results_are_written_and_read_again(whole: found.Results, tmp_path: Path) -> None:
    found.write(whole, tmp_path / "results.json")
    again = found.read(tmp_path / "results.json")
    assert again.models[0].contenders[0].latency.median.value == pytest.approx(
        whole.models[0].contenders[0].latency.median.value, rel=1e-4
    )
    assert again.environment.machine == whole.environment.machine
    assert again.environment.versions == whole.environment.versions
    text = (tmp_path / "results.json").read_text(encoding="utf-8")
    before = json.loads(text)  # before there were several openings
    assert [contender["latency"].pop("openings") for contender in before["models"][0]["contenders"]] == [[1, 1, 1]] * 2
    (tmp_path / "before.json").write_text(json.dumps(before), encoding="utf-8")
    assert found.read(tmp_path / "before.json").models[0].openings == 1
    for other, words in (
        (text.replace('"schema_version": 1', '"schema_version": 7'), "schema version 7"),
        (text.replace('"models"', '"modles"'), "not a valid results file"),
        ("{", "not a results file"),
    ):
        (tmp_path / "other.json").write_text(other, encoding="utf-8")
        with pytest.raises(UsageError, match=words):
            found.read(tmp_path / "other.json")


# --- separate processes -----------------------------------------------------------------------------------------------


def order(deployed: Bundle, folder: Path, **changes: Any) -> alone.RunRequest:
    given = {
        "bundle": str(deployed.path), "contender": "onnxruntime-cpu", "engine": "backend", "file": None,
        "sizes": {"batch": 1, "tokens": 4}, "threads": 1, "folder": str(folder), "any_sizes": True, "warm": True,
    }  # fmt: skip
    return alone.RunRequest(**{**given, **changes})


def test_memory_of_a_run_is_that_of_its_scores(tmp_path: Path) -> None:
    """Eager materialises the scores of 1 × 3 heads × 1600² about twice, 29 MiB each; attnforge does not."""
    options: dict[str, Any] = {"max_image_size": 160, "max_batch": 1, "image_size": 160}
    module, args, shapes = build_model("patch-attention", **options)
    source = Source(kind="registered", name="patch-attention", options=options)
    made = attnforge.deploy(module, args, tmp_path / "b", shapes, targets=["onnxruntime"], tune=False, source=source)
    sizes = {"rows": 40, "cols": 40}
    ours = alone.measured(order(made, tmp_path, sizes=sizes)).memory
    eager = alone.measured(order(made, tmp_path, sizes=sizes, contender="eager", engine="torch")).memory
    if ours is None or eager is None:
        pytest.skip("the system does not report a process's memory")
    assert ours.peak_mib - ours.loaded_mib < 25
    assert 29 < eager.peak_mib - eager.loaded_mib < 200
    assert ours.loaded_mib < eager.loaded_mib  # eager includes torch


def loaded_in(run: alone.FreshRun, seconds: float) -> alone.FreshRun:
    return run.model_copy(update={"cold": run.cold.model_copy(update={"load_s": seconds})})


@pytest.mark.parametrize("is_fixed", [False, True])
def test_what_takes_long_to_load_is_loaded_twice(
    fixed: Bundle, linear: tuple[nn.Module, Bundle], monkeypatch: pytest.MonkeyPatch, is_fixed: bool
) -> None:
    """The shorter time counts. A model of dynamic sizes is loaded again for its memory, one of fixed sizes only if
    loading takes long."""
    real, seconds = alone.measured, [4.0, 2.0, 0.1, 0.2]
    monkeypatch.setattr(alone, "measured", lambda order: loaded_in(real(order), seconds.pop(0)))
    made = fixed if is_fixed else linear[1]
    experiment = Experiment([made], ["onnxruntime-cpu"], [], 1, 1, throughput=False, cases=False)
    for least, left in ((2.0, 2), (0.1, 1 if is_fixed else 0)):
        (contender,) = bench.measure(experiment, {}, None).contenders
        assert contender.cold is not None and contender.cold.load_s == least and contender.memory is not None
        assert len(seconds) == left


def test_a_second_load_that_fails_costs_nothing(fixed: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = alone.measured, Counter[str]()

    def measured(order: alone.RunRequest) -> alone.FreshRun:
        calls["processes"] += 1
        if calls["processes"] > 1:
            raise ChildError("planted")
        return loaded_in(real(order), 4.0)

    monkeypatch.setattr(alone, "measured", measured)
    experiment = Experiment([fixed], ["onnxruntime-cpu"], [], 1, 1, throughput=False, cases=False)
    (contender,) = bench.measure(experiment, {}, None).contenders
    assert (
        contender.cold is not None
        and contender.cold.load_s == 4.0
        and contender.memory is not None
        and contender.notes == []
    )
    assert calls["processes"] == 2


def test_a_process_that_fails_says_why(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(ChildError, match="no bundle"):
        alone.measured(order(bundle, tmp_path, bundle=str(tmp_path)))


def test_a_process_that_takes_too_long_is_ended(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alone, "TIMEOUT", 0.01)
    with pytest.raises(ChildError, match="took more than"):
        alone.measured(order(bundle, tmp_path))


# --- growth -----------------------------------------------------------------------------------------------------------


def test_growth_over_sizes_and_over_bundles(bundle: Bundle, tmp_path: Path) -> None:
    experiment = Experiment(
        [bundle], ["onnxruntime-cpu"], ["eager"], 2, 1, throughput=False, starts=False, memory=False
    )
    grown = suite.measured_growth(experiment, "tokens", {n: (bundle, {"batch": 1, "tokens": n}) for n in (4, 16, 64)})
    assert grown.sizes == [4, 16, 64] and {series.name for series in grown.series} == {"onnxruntime-cpu", "eager"}
    for series in grown.series:
        assert all(ms is not None and ms > 0 for ms in series.ms) and series.time is not None
        assert series.extra_mib == [None] * 3 and series.memory is None
    layers: suite.Points = {1: (bundle, {}), 2: (deployed(tmp_path, num_layers=2), {})}
    grown = suite.measured_growth(experiment, "layers", layers)
    assert grown.sizes == [1, 2] and len(grown.deploy_seconds) == 2
    assert all(seconds["export"] > 0 for seconds in grown.deploy_seconds)


# --- the suite --------------------------------------------------------------------------------------------------------


def test_the_results_page_has_marks_for_every_table_of_the_suite(tmp_path: Path) -> None:
    names = [*(subject.name for subject in suite.SUBJECTS), "claims", "growth-tokens", "growth-layers"]
    page = Path(shutil.copy(Path(__file__).parents[2] / "docs/results.md", tmp_path))
    assert [name for name in names if not put("", name, RESULTS / "suite.json", page)] == []


def test_the_suite_measures_writes_and_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**SMALL, "max_batch": 1, "batch_size": 1}
    only_ours = {"throughput": False, "fresh_peers": ()}
    small = suite.Subject("small", "transformer-encoder", options, ("fp32",), ["eager"], only_ours)
    monkeypatch.setattr(bench, "measure_ceilings", quick_ceilings)
    monkeypatch.setattr("attnforge.export.deploy.measure", lambda *given: None)
    monkeypatch.setattr(suite, "ROUNDS", 3)
    monkeypatch.setattr(suite, "SUBJECTS", (small,))
    for along in ("tokens", "layers"):
        grown = found.Growth(model="small", along=along, sizes=[], series=[])
        monkeypatch.setattr(suite, f"over_{along}", lambda *given, grown=grown: grown)
    page = tmp_path / "results.md"
    file = tmp_path / "suite.json"
    names = ("small", "claims", "growth-tokens", "growth-layers")
    places = "\n".join(f"<!-- {name}: from {file.as_posix()} -->\nOUTDATED\n<!-- /{name} -->" for name in names)
    other = "<!-- claims: from another.json -->\nANOTHER MACHINE'S\n<!-- /claims -->"
    page.write_text(f"before\n{places}\n{other}\nafter\n", encoding="utf-8")
    html = tmp_path / "page/index.html"
    options_given = ["--results", str(file), "--html", str(html), "--threads", "1"]
    with pytest.raises(SystemExit) as ended:
        run("suite", options_given)
    assert ended.value.code == 0
    tables = suite.tables(found.read(file).model_dump(mode="json"))
    assert set(tables) == {*names, "summary"} and not put(tables["summary"], "summary", file, page)
    assert all(put(tables[name], name, file, page) for name in names)
    text = page.read_text(encoding="utf-8")
    assert (
        text.startswith("before\n")
        and text.endswith(f"{other}\nafter\n")
        and "OUTDATED" not in text
        and "eager" in text
    )
    assert html.exists() and list(html.parent.glob("*.png"))
    taken = found.read(file)
    assert [model.name for model in taken.models] == ["small"]
    assert taken.command == f"{COMMAND} suite {' '.join(options_given)}" and f"`{taken.command}`" in text
    for contender in taken.models[0].contenders:
        assert (contender.cold is not None, contender.memory is not None) == (contender.ours, contender.ours), (
            contender.notes
        )
    for times, written in (
        (1, file),
        (4, tmp_path / "old.json"),
    ):  # as if ours were four times as fast
        for contender in taken.models[0].contenders:
            ms = 1.0 / (times if contender.ours else 1)
            contender.latency.rounds = [[ms * (1 + 0.001 * (i % 3))] for i in range(20)]
            contender.latency.openings = [5] * 4
        found.write(taken, written)
    monkeypatch.setattr(suite, "run_suite", lambda *given: found.read(file))
    with pytest.raises(SystemExit) as ended:
        run("suite", [*options_given, "--compare", str(tmp_path / "old.json")])
    assert ended.value.code == 1


@pytest.mark.skipif(cuda_devices() > 0, reason="there is a CUDA device")
def test_a_peer_on_cuda_does_not_run_on_the_cpu_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime only logs that it could not load CUDA."""
    monkeypatch.setattr("attnforge.bench.contenders.engines.why_not_here", lambda name: None)
    (tmp_path / "product.onnx").write_bytes(one_operator("MatMul", (4, 4)))
    setup = Setup(Bundle(Path(__file__).parents[1] / "golden/encoder-fp32"), {}, 1)
    with ExitStack() as stack, pytest.raises(UnavailableError, match="could not start its CUDAExecutionProvider"):
        ENGINES["onnxruntime-cuda"](setup, tmp_path / "product.onnx", stack)
