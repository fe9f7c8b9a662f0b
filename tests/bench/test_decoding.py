"""Decoding benchmark: every contender answers like the model without a cache, a wrong one has no time, and the claims
follow one rule. No test depends on times."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import attnforge
from attnforge.arrays import Array
from attnforge.bench import decoding
from attnforge.bench.contenders.decoding import in_onnxruntime, registry
from attnforge.bench.contenders.decoding.registry import DECODING_PEERS
from attnforge.bench.contenders.decoding.stepper import OfDecoder, Stepper, ours
from attnforge.bench.contenders.peers import Peer, PeerJob, expected
from attnforge.bench.results import DecodingResults
from attnforge.bundle import CANONICAL, Bundle, Source
from attnforge.cli import app
from attnforge.errors import UnavailableError, UnknownNameError, UntrustedError, UsageError
from attnforge.export.diagnosis.stages import sites_of
from attnforge.export.graphs.saving import load_graph
from attnforge.model.registry import build_model
from benchmarks.experiments import decoding as suite
from tests.support.pairs import pairs

pytestmark = pytest.mark.xdist_group("measure")

TOKENS, PLACES = 30, 48
TINY = {
    **suite.SIZES,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 64,
    "max_position_embeddings": PLACES,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A tiny version of the experiment's model."""
    return suite.deployed(tmp_path_factory.mktemp("llama"), TINY, PLACES, 16)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """attnforge's decoder of one layer, with a window."""
    options: dict[str, Any] = {
        "num_layers": 1, "embed_dim": 32, "vocab_size": 64, "max_tokens": PLACES, "num_tokens": 8, "window": 11,
    }  # fmt: skip
    module, args, shapes = build_model("decoder", **options)
    return attnforge.deploy(
        module, args, tmp_path_factory.mktemp("own") / "bundle", shapes, targets=["onnxruntime"], tune=False,
        source=Source(kind="registered", name="decoder", options=options), cache_tokens=PLACES,
    )  # fmt: skip


def job_of(bundle: Bundle, batch: int, folder: Path) -> PeerJob:
    decoding_ = bundle.manifest.decoding
    assert decoding_ is not None and decoding_.vocabulary is not None
    ids = np.random.default_rng(1).integers(0, decoding_.vocabulary, (batch, TOKENS))
    return PeerJob(bundle, {decoding_.tokens: ids}, 1, folder, None, True)


def furthest(stepper: Stepper, ids: Array, truth: Array) -> float:
    """Return the largest error of a contender that takes tokens in pieces, rewinds and resets."""
    errors = []

    def take(first: int, end: int) -> None:
        logits = stepper.extend(ids[:, first:end])
        exact = truth[:, end - 1]
        assert logits.shape == exact.shape
        errors.append(float(np.linalg.norm(logits - exact) / np.linalg.norm(exact)))

    for _ in range(2):
        take(0, 7)
        take(7, 12)
        stepper.mark()
        for _ in range(2):
            for token in range(12, 20):
                take(token, token + 1)
            stepper.rewind()
        take(12, TOKENS)
        stepper.reset()
    return max(errors)


@pytest.mark.parametrize(("name", "batch"), pairs(["onnxruntime-cpu", *DECODING_PEERS], [1, 2]))
@pytest.mark.parametrize("of", ["llama", "own"])
def test_every_contender_answers_as_the_model_without_a_cache(
    of: str, name: str, batch: int, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one or two samples: `attnforge bench --decode` checks each contender at the batch that it times."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # its C++ takes half a minute
    bundle: Bundle = request.getfixturevalue(of)
    job = job_of(bundle, batch, tmp_path)
    missing = {"eager-dynamic", "onnxruntime-genai-operator"} if of == "own" else set()
    with ExitStack() as stack:
        if name in (*missing, "onnxruntime-genai", "openvino-genai"):
            with pytest.raises(UnavailableError):
                DECODING_PEERS[name].open(job, stack)
            return
        stepper = ours(name, job, stack) if name == "onnxruntime-cpu" else DECODING_PEERS[name].open(job, stack)
        ((_, exact),) = expected(job.module, job.precision, job.feeds).values()
        ids = job.feeds["input_ids"]
        assert furthest(stepper, ids, exact.reshape(batch, TOKENS, -1)) < 4e-6


def test_graphs_of_peers_have_the_caches_that_their_names_say(llama: Bundle) -> None:
    def counted(*changes: Any) -> Counter[str]:
        model = load_graph(llama, CANONICAL)
        for change in changes:
            change(model)
        return Counter(node.op_type for node in model.graph)

    growing = counted(in_onnxruntime.by_concatenation)
    assert (growing["TensorScatter"], growing["Attention"]) == (0, 1)
    products = counted(in_onnxruntime.by_concatenation, in_onnxruntime.as_products)
    assert (products["Attention"], products["Softmax"]) == (0, 1)
    sites = sites_of(llama.manifest.attention)
    in_place = counted(partial(in_onnxruntime.with_rotary_operator, sites=sites))
    assert (in_place["GroupQueryAttention"], in_place["RotaryEmbedding"], in_place["TensorScatter"]) == (1, 0, 0)


def test_every_contender_has_times_and_a_wrong_one_has_none(llama: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(OfDecoder):
        def extend(self, tokens: Array) -> Array:
            return super().extend(tokens) * np.float32(1.001)

    def wrong(job: PeerJob, stack: ExitStack) -> Stepper:
        session = stack.enter_context(attnforge.load(job.bundle, "onnxruntime-cpu"))
        return Wrong(session.decoder(job.batch), job.output)

    def broken(job: PeerJob, stack: ExitStack) -> Stepper:
        raise RuntimeError("it is broken")

    for name in DECODING_PEERS.keys() - {"onnxruntime-concat"}:
        monkeypatch.delitem(DECODING_PEERS, name)
    monkeypatch.setitem(DECODING_PEERS, "wrong", Peer("wrong", make=wrong))
    monkeypatch.setitem(DECODING_PEERS, "broken", Peer("broken", make=broken))
    results = attnforge.benchmark(
        llama,
        ["onnxruntime-cpu"],
        against=["all", "broken"],
        decode=True,
        contexts=[20, 4],
        prompts=[5],
        rounds=3,
        openings=2,
        threads=1,
        trust_source=True,
    )
    assert list(results.wrong) == ["wrong"] and "over the budget" in results.wrong["wrong"]
    assert results.skipped == {"broken": "it is broken"}
    assert results.held_to == "float64" and results.contexts == [4, 20] and results.openings == 2
    for limit in results.limits.values():
        assert [len(calls) for calls in limit.latency.rounds] == [decoding.STEPS] * 3
        assert limit.latency.median.value > 0
    assert [contender.name for contender in results.contenders] == ["onnxruntime-cpu", "onnxruntime-concat"]
    for contender in results.contenders:
        assert 0 < contender.error <= contender.budget
        assert [step.context for step in contender.steps] == [4, 20]
        for step in contender.steps:
            assert [len(calls) for calls in step.latency.rounds] == [decoding.STEPS] * 3
            assert step.latency.openings == [2, 1]
            assert step.per_second.low <= step.per_second.value <= step.per_second.high
            least = results.limits[step.context].latency.median.value
            assert step.share is not None and step.share.value == pytest.approx(least / step.latency.median.value)
        assert [len(calls) for calls in contender.first_tokens[0].latency.rounds] == [1] * 3
    # One token of one site's cache: keys and values of two heads of 16 numbers of 4 bytes.
    assert results.limits[20].cache - results.limits[4].cache == 16 * 2 * 2 * 16 * 4
    assert results.limits[4].weights == results.limits[20].weights > 4 * 64 * 64


def test_a_window_limits_the_cache_that_is_read_and_the_bundle_alone_is_enough(
    own: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "is_at_hand", lambda job: False)  # logits are checked against the exported graph
    results = attnforge.benchmark(
        own, ["onnxruntime-cpu"], decode=True, contexts=[4, 20], prompts=[5], rounds=1, openings=1, threads=1
    )
    (ours,) = results.contenders
    assert results.best is ours and ours.steps[0].ratio is not None and ours.steps[0].ratio.value == 1
    assert results.limits[20].cache == 11 * results.limits[4].cache / 4


def test_an_expensive_reference_is_eager(own: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MOST_OPERATIONS", 0)
    for at_hand in (True, False):
        monkeypatch.setattr(decoding, "is_at_hand", lambda job, at_hand=at_hand: at_hand)
        results = attnforge.benchmark(own, decode=True, contexts=[4], rounds=1, threads=1, quick=True)
        assert results.held_to == "eager" and results.contenders and not results.wrong
        assert not results.limits and not results.prompts


def test_what_cannot_be_measured_is_refused(own: Bundle, llama: Bundle, tmp_path: Path) -> None:
    decodes = partial(attnforge.benchmark, decode=True)
    with pytest.raises(UsageError, match="contexts: 40 given; the caches hold 48 tokens, so give 1 to 39"):
        decodes(own, contexts=[4, 40])
    with pytest.raises(UsageError, match="prompts: 0 given"):
        decodes(own, prompts=[0])
    with pytest.raises(UsageError, match="1 or more"):
        decodes(own, rounds=0)
    with pytest.raises(UsageError, match="the bundle takes 1 to 2"):
        decodes(llama, batch=3)
    with pytest.raises(UnknownNameError, match="abacus"):
        decodes(own, against=["abacus"])
    with pytest.raises(UnavailableError, match="cannot run steps"):
        decodes(own, ["tensorrt"])
    with pytest.raises(UntrustedError):
        decodes(llama, against=["eager-static"])
    with pytest.raises(UsageError, match="one bundle at a time"):
        decodes([own, llama])
    with pytest.raises(UsageError, match="batch means nothing without decode=True"):
        attnforge.benchmark(own, batch=2)  # type: ignore[call-overload]


def test_default_contexts_are_those_that_fit() -> None:
    assert decoding._fitting("contexts", None, decoding.CONTEXTS, 1024, 1033) == [128, 512, 1024]
    assert decoding._fitting("contexts", None, decoding.CONTEXTS, 1023, 1032) == [128, 512]
    assert decoding._fitting("contexts", None, decoding.CONTEXTS, 39, 48) == [39]
    with pytest.raises(UsageError, match="too few"):
        decoding._fitting("contexts", None, decoding.CONTEXTS, 0, 9)


def test_the_command_prints_one_document_or_tables(own: Bundle, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    sizes = ["--context", "4", "--prompt", "5", "--rounds", "2", "--threads", "1"]
    peers = ["--against", "onnxruntime-concat", "--against", "openvino-genai"]
    command = ["bench", str(own.path), "--decode", *peers, *sizes]
    done = CliRunner().invoke(app, [*command, "--json", "--out", str(file)])
    assert done.exit_code == 0, done.output
    results = DecodingResults.model_validate(json.loads(done.stdout))
    assert "openvino-genai" in results.skipped and "onnxruntime-cpu" in [each.name for each in results.contenders]
    assert DecodingResults.model_validate_json(file.read_bytes()).contexts == [4]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and "after 4 tokens; copying the bytes of a step takes" in done.stdout
    assert "onnxruntime-concat" in done.stdout and "OpenVINO GenAI is not installed here" in done.stdout


def test_the_command_refuses_in_one_line(own: Bundle) -> None:
    for arguments, said in (
        (["--decode", "--html", "page.html"], "--html means nothing with --decode"),
        (["--decode", "--shapes", "batch=1"], "--shapes means nothing with --decode"),
        (["--context", "4"], "--context means nothing without --decode"),
        (["--decode", str(own.path)], "one bundle at a time"),
    ):
        done = CliRunner().invoke(app, ["bench", str(own.path), *arguments])
        assert isinstance(done.exception, UsageError) and said in str(done.exception)


def test_a_bundle_without_a_cache_is_refused(tmp_path: Path) -> None:
    module, args, shapes = build_model("self-attention", input_dim=8, key_dim=8, value_dim=8)
    bundle = attnforge.deploy(module, args, tmp_path / "b", shapes, targets=["onnxruntime"], tune=False)
    with pytest.raises(UsageError, match=r"has no cache, so there is no step to time; deploy it with cache_tokens"):
        attnforge.benchmark(bundle, decode=True)


def test_libraries_that_are_here_are_said_to_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda package: object())
    with ExitStack() as stack, pytest.raises(UnavailableError, match="installed, but"):
        DECODING_PEERS["openvino-genai"].open(None, stack)  # type: ignore[arg-type]


# --- the suite --------------------------------------------------------------------------------------------------------


def latency_of(ms: float) -> dict[str, Any]:
    return {
        "rounds": [[ms]] * 4, "openings": [2, 2], "median": {"value": ms, "low": ms, "high": ms}, "min": ms, "p90": ms,
        "p99": ms, "samples": 4,
    }  # fmt: skip


def contender(name: str, ms: float, *, ours: bool = False) -> dict[str, Any]:
    latency, share = latency_of(ms), {"value": 0.5, "low": 0.4, "high": 0.6}
    rate = {"value": 1e3 / ms, "low": 1e3 / ms, "high": 1e3 / ms}
    step = {"context": 128, "latency": latency, "per_second": rate, "ratio": None, "share": share}
    return {
        "name": name, "ours": ours, "what": "", "error": 1e-7, "budget": 1e-6, "steps": [step],
        "first_tokens": [{"prompt": 16, "latency": latency}], "growth": 2048.0,
    }  # fmt: skip


def figures(contenders: list[dict[str, Any]], wrong: dict[str, str]) -> dict[str, Any]:
    machine = {"system": "s", "processor": "p", "processors": 2, "instructions": [], "gpus": []}
    environment = {"machine": machine, "versions": {}, "threads": 2, "governor": "g", "load_before": 0.5}
    return {
        "command": "c", "created": "now", "seconds": 1, "environment": environment, "model": "llama",
        "precision": "fp32", "source": "s", "batch": 1, "places": 2048, "steps": 8, "contexts": [128], "prompts": [16],
        "rounds": 4, "openings": 2, "held_to": "float64",
        "limits": {128: {"weights": 4e8, "cache": 1e7, "latency": latency_of(6.5)}},
        "contenders": contenders, "wrong": wrong, "skipped": {"openvino-genai": "it is not here"},
    }  # fmt: skip


def test_claims_compare_with_eager_the_best_right_peer_and_the_limit() -> None:
    ours = contender("onnxruntime-cpu", 10.0, ours=True)
    peers = [contender("eager-static", 20.0), contender("onnxruntime-concat", 9.0), contender("torch-compile", 30.0)]
    measured = figures([ours, *peers], {"eager-dynamic": "error 1 is over the budget"})
    made = list(suite.claims(measured))
    assert [(claim.against, claim.holds) for claim in made] == [
        ("eager-static", "yes"),
        ("onnxruntime-concat", "**no**"),
        ("", "yes"),
        ("eager-static", "yes"),
    ]
    assert len(suite.broken(measured)) == 1
    lines = suite.table(measured).splitlines()
    assert lines[2] == "| ms a token, of eager-static's, after 128 tokens | eager-static | 0.9 | 0.5 | 0.5–0.5 | yes |"
    assert "After 128 tokens: 6.5 ms to copy 410 MB" in lines
    assert "| **onnxruntime-cpu** | 10.00 | 100.0 | – | 50% | 1e-7 |" in lines
    assert "Not timed, because its logits are wrong: eager-dynamic: error 1 is over the budget." in lines


def test_a_bundle_that_is_wrong_breaks_the_suite() -> None:
    measured = figures([contender("eager-static", 20.0)], {"onnxruntime-cpu": "wrong"})
    assert {claim.holds for claim in suite.claims(measured)} == {"not measured"}
    assert suite.broken(measured) == ["no backend of the bundle was timed"]
