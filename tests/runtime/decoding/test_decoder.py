"""Decoders: every way to feed a sequence gives the module's own outputs, caches keep their memory, and invalid inputs
are refused before anything is written."""

from __future__ import annotations

import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnforge
from attnforge.arrays import Array
from attnforge.bundle import Manifest
from attnforge.errors import InputError, RunError, UnavailableError, UsageError
from attnforge.memory import resident
from attnforge.model import build_model
from attnforge.runtime.backends.registry import why_not_here
from attnforge.runtime.decoding.decoder import Decoder
from attnforge.runtime.parity.budget import relative_error
from attnforge.runtime.session import Session
from tests.support.bundles import DeploySmall, rewrite
from tests.support.decoders import KINDS, LONGEST, PLACES, VOCABULARY, DeployDecoder, decoder_example, eager, ids
from tests.support.faults.driving import verified
from tests.support.pairs import pairs

CLOSE = 2e-6


def needing(backend: str, *marks: pytest.MarkDecorator) -> Any:
    why_not = why_not_here(backend)
    return pytest.param(backend, marks=[*marks, pytest.mark.skipif(why_not is not None, reason=str(why_not))])


BACKENDS = ["onnxruntime-cpu", needing("openvino"), needing("onnxruntime-cuda", pytest.mark.gpu)]


@pytest.fixture(scope="module", params=BACKENDS)
def session(decoders: DeployDecoder, request: pytest.FixtureRequest) -> Iterator[Session]:
    with attnforge.load(decoders("rotary", "fp32"), request.param) as opened:
        yield opened


@pytest.mark.parametrize(("kind", "precision"), pairs([*KINDS], ["fp32", "fp16", "bf16"]))
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_decoder_is_the_same_function_in_every_order_of_its_tokens(
    decoders: DeployDecoder, kind: str, precision: str, backend: str
) -> None:
    """Each kind at one precision; `benchmarks.experiments.false_alarms` samples decoders at every precision."""
    report = attnforge.verify(decoders(kind, precision), [backend]).backends[backend]
    assert report.passed, report.failures
    schedules = {comparison.schedule for comparison in report.comparisons}
    assert schedules == {None, "token by token", "in pieces", "ragged", "cut and forked"}
    whole = [comparison for comparison in report.comparisons if comparison.case == "whole-cache"]
    assert [comparison.schedule for comparison in whole] == ["token by token", "in pieces"]
    assert all(comparison.size == PLACES * VOCABULARY for comparison in whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_and_steps_to_the_last_position(decoders: DeployDecoder, kind: str) -> None:
    tokens = ids(3, PLACES)
    expected = eager(kind, tokens)
    with attnforge.load(decoders(kind, "fp32"), "onnxruntime-cpu") as session:
        decoder = session.decoder(3)
        answers = [decoder.prefill(tokens[:, :30])]  # more tokens than one run accepts
        answers += [decoder.step(tokens[:, position]) for position in range(30, PLACES)]
    assert relative_error(np.stack(answers, axis=1), expected[:, 29:]) < CLOSE
    assert decoder.lengths.tolist() == [PLACES] * 3


def test_samples_of_different_lengths(session: Session) -> None:
    tokens = ids(3, 20)
    expected = eager("rotary", tokens)
    lengths = np.array([1, 9, 20])
    padded = np.where(np.arange(20) < lengths[:, None], tokens, 0)
    last = np.stack([row[n - 1] for row, n in zip(expected, lengths, strict=True)])
    for prompt in ([row[:n] for row, n in zip(tokens, lengths, strict=True)], padded):
        decoder = session.decoder(3)
        answer = decoder.prefill(prompt, None if isinstance(prompt, list) else lengths)
        assert relative_error(answer, last) < CLOSE and decoder.lengths.tolist() == lengths.tolist()
    following = np.array([tokens[0, 1], tokens[1, 9], 3])
    answer = decoder.step(following)
    assert relative_error(answer[:2], np.stack([expected[0, 1], expected[1, 9]])) < CLOSE


def test_fork_continues_one_prompt_several_times(session: Session) -> None:
    tokens = ids(1, 12)
    prompt, ends = tokens[:, :8], [tokens[0, 8:], ids(4, seed=1), ids(4, seed=2)]
    first = session.decoder()
    first.prefill(prompt)
    several = first.fork([0, 0, 0])
    answers = several.prefill(np.stack(ends))
    for answer, end in zip(answers, ends, strict=True):
        assert relative_error(answer, eager("rotary", np.concatenate([prompt[0], end])[None])[0, -1]) < CLOSE
    first.prefill(ids(1, 3, seed=3))
    assert several.lengths.tolist() == [12] * 3 and first.lengths.tolist() == [11]


def test_cropped_tokens_are_forgotten(session: Session) -> None:
    tokens = ids(2, 16)
    decoder = session.decoder(2)
    decoder.prefill(np.concatenate([tokens[:, :6], ids(2, 9, seed=5)], axis=1))
    decoder.crop([6, 4])
    assert decoder.lengths.tolist() == [6, 4]
    answer = decoder.prefill([tokens[0, 6:], tokens[1, 4:]])
    assert relative_error(answer, eager("rotary", tokens)[:, -1]) < CLOSE
    decoder.reset()
    assert relative_error(decoder.prefill(tokens), eager("rotary", tokens)[:, -1]) < CLOSE


@pytest.mark.parametrize("backend", [BACKENDS[0], BACKENDS[2]])
@pytest.mark.parametrize("kind", ["rotary", "uneven"])
def test_cropped_numbers_do_not_reach_outputs(decoders: DeployDecoder, kind: str, backend: str) -> None:
    """NaN times a weight of zero is NaN, so a hidden position must not contain NaN."""
    tokens = ids(2, 10)
    with attnforge.load(decoders(kind, "fp32"), backend) as session:
        decoder = session.decoder(2)
        decoder.prefill(ids(2, 20, seed=1))
        for cache in caches(decoder):
            cache[0, :, 4:20] = np.nan
        decoder.crop([4, 0])
        decoder.crop(0)
        answer = decoder.prefill(tokens)
    assert relative_error(answer, eager(kind, tokens)[:, -1]) < CLOSE


def test_torch_in_torch_out(session: Session) -> None:
    decoder = session.decoder(2)
    tokens = torch.from_numpy(ids(2, 5))
    assert isinstance(decoder.prefill(tokens), torch.Tensor)
    answer = decoder.step(tokens[:, 0])
    assert isinstance(answer, torch.Tensor) and answer.shape == (2, VOCABULARY)


def test_a_later_step_does_not_change_an_earlier_answer(session: Session) -> None:
    decoder = session.decoder()
    decoder.prefill(ids(1, 3))
    answer = decoder.step(np.array([1]))
    kept = answer.copy()
    decoder.step(np.array([2]))
    assert np.array_equal(answer, kept)
    out = np.empty((1, VOCABULARY), np.float32)
    assert decoder.step(np.array([3]), out=out) is out and np.isfinite(out).all()


WRONG_OUT: dict[str, Any] = {
    "rows": np.zeros((1, VOCABULARY), np.float32),
    "dtype": np.zeros((2, VOCABULARY)),
    "read-only": np.broadcast_to(np.float32(0), (2, VOCABULARY)),
    "a text": "logits",
    "a gradient": torch.zeros(2, VOCABULARY, requires_grad=True),
}


@pytest.mark.parametrize("case", WRONG_OUT)
def test_no_token_is_appended_where_the_output_cannot_be_written(session: Session, case: str) -> None:
    decoder = session.decoder(2)
    decoder.prefill(ids(2, 3))
    with pytest.raises(InputError, match=r"output|input"):
        decoder.step(np.array([1, 2]), out=WRONG_OUT[case])
    assert decoder.lengths.tolist() == [3, 3]


def test_answers_are_written_to_strided_arrays_and_torch_tensors(session: Session) -> None:
    decoder, same = session.decoder(2), session.decoder(2)
    several = np.zeros((2, 3, VOCABULARY), np.float32)
    for position, tokens in enumerate(ids(3, 2)):
        decoder.step(tokens, out=several[:, position])
        assert np.array_equal(several[:, position], same.step(tokens))
    out = torch.zeros(2, VOCABULARY)
    assert decoder.step(ids(2), out=out) is out and np.array_equal(out.numpy(), same.step(ids(2)))


def test_numbers_that_are_no_integers(session: Session) -> None:
    for batch in (2.0, "2", None):
        with pytest.raises(InputError, match=f"batch is {batch!r}; give a whole number"):
            session.decoder(batch)  # type: ignore[arg-type]
    decoder = session.decoder(np.int64(2))  # type: ignore[arg-type]
    assert decoder.batch == 2
    for call in (lambda: decoder.fork([0.5]), lambda: decoder.cached(1.7), lambda: decoder.fork("ab")):  # type: ignore[list-item, arg-type]
        with pytest.raises(InputError, match=r"a sample's number is .*; give a whole number"):
            call()
    with pytest.raises(InputError, match=r"max_new_tokens is 2\.0; give a whole number"):
        session.generate([np.array([1])], 2.0)  # type: ignore[arg-type]


def test_rows_of_different_lengths_are_refused_as_an_array(session: Session) -> None:
    decoder = session.decoder(2)
    calls: list[Callable[[], object]] = [
        lambda: decoder.step([[1, 2], [1]]),
        lambda: decoder.prefill([[1, [2]], [1]]),
        lambda: decoder.prefill(ids(2, 3), lengths=[[1], [1, 2]]),
    ]
    for call in calls:
        with pytest.raises(InputError, match=r"cannot be converted to an array: .*; give rows of one length"):
            call()
    assert decoder.lengths.tolist() == [0, 0]


def test_a_decoder_cannot_be_pickled(session: Session) -> None:
    with pytest.raises(UsageError, match=r"cannot be pickled or copied; fork\(\) makes another one here"):
        pickle.dumps(session.decoder())


def test_whole_sequences_run_as_before(session: Session) -> None:
    tokens = ids(2, 11)
    assert relative_error(session(tokens), eager("rotary", tokens)) < CLOSE
    assert isinstance(session(torch.from_numpy(tokens)), torch.Tensor)


# --- memory of caches -------------------------------------------------------------------------------------------------


def caches(decoder: Decoder) -> list[Array]:
    return list(decoder._caches.values())


def address_of(cache: Any) -> int:
    return int(cache.ctypes.data if isinstance(cache, np.ndarray) else cache[:].ptr)


def growth(run: Callable[[], None], limit: int) -> int:
    """How much memory the process gains by a run, in bytes. A leak grows in every run, while other threads and the
    allocator do so in some: run again, at most five times, where it is not below the limit."""
    least = limit
    for _ in range(5):
        before = resident()
        if before is None:
            pytest.skip("the system does not report how much of a process is in memory")
        run()
        least = min(least, (resident() or 0) - before)
        if least < limit:
            break
    return least


@pytest.mark.parametrize("backend", BACKENDS)
def test_caches_stay_in_place_and_nothing_grows(decoders: DeployDecoder, backend: str) -> None:
    """A thousand steps: each writes one position of every cache in place, and memory does not grow."""
    with attnforge.load(decoders("rotary", "fp32"), backend) as session:
        decoder, tokens = session.decoder(2), ids(2)
        addresses = [address_of(cache) for cache in caches(decoder)]

        def run(steps: int) -> None:
            for _ in range(steps):
                if decoder.lengths.max() == PLACES:
                    decoder.reset()
                decoder.step(tokens)

        run(200)
        assert growth(lambda: run(1000), 2**20) < 2**20
        assert [address_of(cache) for cache in caches(decoder)] == addresses
        decoder.reset()
        decoder.step(tokens)
        assert all(cache[:, :, :1].any() and not cache[:, :, 1:].any() for cache in caches(decoder))


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_after_ever_more_tokens_keep_no_kernels(tmp_path: Path, backend: str) -> None:
    """Nine hundred steps, each after a new number of tokens. OpenVINO with its defaults keeps 400 MiB more."""
    module, args, shapes = build_model("decoder", max_tokens=1024)
    bundle = attnforge.deploy(
        module, args, tmp_path / "bundle", shapes, targets=["onnxruntime"], tune=False, cache_tokens=1024
    )
    with attnforge.load(bundle, backend) as session:
        decoder, tokens = session.decoder(), np.ones(1, np.int64)
        for _ in range(100):
            decoder.step(tokens)
        if (before := resident()) is None:
            pytest.skip("the system does not report how much of a process is in memory")
        for _ in range(900):
            decoder.step(tokens)
        assert (resident() or 0) - before < 2**26


def test_decoders_in_many_threads_answer_as_in_one(session: Session) -> None:
    def decode(seed: int) -> Array:
        decoder, tokens = session.decoder(2), ids(2, 200, seed=seed)
        answers = []
        for position in range(200):
            if decoder.lengths.max() == PLACES:
                decoder.crop(5)
            answers.append(decoder.step(tokens[:, position]))
        return np.stack(answers)

    alone = [decode(seed) for seed in range(16)]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(decode, range(16)))
    assert all(np.array_equal(answer, expected) for expected, answer in zip(alone, together, strict=True))


def test_memory_is_reported_before_it_is_allocated(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 2 * 2 * 2 * PLACES * 16 * 4  # layers, keys and values, heads, positions, head size, bytes
    assert session.decoder(3).nbytes == 3 * size
    assert session.bundle.manifest.decoding is not None
    assert session.bundle.manifest.decoding.bytes_a_sample == size
    decoder = session.decoder()
    monkeypatch.setattr("attnforge.runtime.decoding.decoder.ROOM", 0)
    monkeypatch.setattr(decoder._backend, "free_bytes", lambda: 3 * size // 2)
    session.decoder(1)
    with pytest.raises(UnavailableError, match=r"caches and outputs of 2 samples with 40 tokens each take 0\.00 GiB"):
        session.decoder(2)


# --- errors -----------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Any, str]] = {
    "a prompt longer than the cache": (lambda d: d.prefill(ids(2, PLACES - 2)), r"sample 0 has 3 tokens .* 38 more"),
    "ids outside the table": (lambda d: d.step(np.array([0, VOCABULARY])), r"has the id 50; the table's ids are 0 to"),
    "negative ids": (lambda d: d.step(np.array([-1, 0])), r"has the id -1"),
    "another batch": (lambda d: d.step(np.array([1])), r"has the shape \[1\]; give \(2\)"),
    "another rank": (lambda d: d.prefill(ids(2, 3, 1)), r"has the shape \[2, 3, 1\]; give \(2, tokens\)"),
    "numbers that are no ids": (lambda d: d.step(np.zeros(2, np.float32)), r"is float32; the model takes int64"),
    "rows of another batch": (lambda d: d.prefill([ids(3)]), r"tokens of 1 samples were given; this decoder has 2"),
    "rows and lengths": (lambda d: d.prefill([ids(3), ids(2)], [3, 2]), r"leave lengths out"),
    "lengths out of range": (lambda d: d.prefill(ids(2, 3), [4, 1]), r"lengths are \[4, 1\], of rows of 3 tokens"),
    "lengths of another batch": (lambda d: d.prefill(ids(2, 3), [1, 2, 3]), r"lengths are int64\[3\]"),
    "lengths that are no numbers": (lambda d: d.prefill(ids(2, 3), [0.5, 1]), r"lengths are float64"),
    "no token": (lambda d: d.prefill([ids(3), ids(0)]), r"sample 1 has no token"),
    "keeping more than is there": (lambda d: d.crop([3, 4]), r"sample 1 has 3 tokens, so 4 cannot be kept"),
    "keeping less than nothing": (lambda d: d.crop(-1), r"so -1 cannot be kept"),
    "a sample that is not there": (lambda d: d.fork([2]), r"no sample 2; samples are 0 to 1"),
    "more samples than the bundle takes": (lambda d: d.fork([0] * 5), r"batch is 5; .* 1 to 4 samples"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_inputs_are_refused_before_anything_is_written(session: Session, wrong: str) -> None:
    call, message = WRONG[wrong]
    decoder, tokens = session.decoder(2), ids(2, 4)
    decoder.prefill(tokens[:, :3])
    before = [np.array(cache[:, :, :]) for cache in caches(decoder)]
    with pytest.raises(InputError, match=message):
        call(decoder)
    assert all(np.array_equal(cache[:, :, :], kept) for cache, kept in zip(caches(decoder), before, strict=True))
    assert relative_error(decoder.step(tokens[:, 3]), eager("rotary", tokens)[:, -1]) < CLOSE


def test_a_step_beyond_the_capacity_leaves_the_decoder_intact(session: Session) -> None:
    decoder, tokens = session.decoder(2), ids(2, PLACES)
    decoder.prefill([tokens[0], tokens[1, :5]])
    with pytest.raises(
        InputError, match=r"sample 0 has 40 tokens in the cache and 1 more were given; its capacity is 40"
    ):
        decoder.step(tokens[:, 0])
    decoder.crop([20, 5])
    answer = decoder.step(np.array([tokens[0, 20], tokens[1, 5]]))
    expected = eager("rotary", tokens)
    assert relative_error(answer, np.stack([expected[0, 20], expected[1, 5]])) < CLOSE


def test_calls_from_another_thread_are_refused_while_a_step_runs(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = session.decoder()
    decoder.step(np.array([1]))
    started, proceed = threading.Event(), threading.Event()
    run = decoder._next
    assert run is not None

    def slowly() -> None:
        started.set()
        assert proceed.wait(60)
        run()

    monkeypatch.setattr(decoder, "_next", slowly)
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(decoder.step, np.array([2]))
        assert started.wait(60)
        for call in (decoder.fork, decoder.reset, lambda: decoder.step(np.array([3]))):
            with pytest.raises(UsageError, match="this decoder runs in another thread"):
                call()
        proceed.set()
        step.result()
    assert decoder.lengths.tolist() == [2]


def test_a_run_that_fails_changes_nothing(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = session.decoder()
    decoder.step(np.array([1]))

    def fail() -> None:
        raise RuntimeError("the kernel is out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "_next", fail)
        with pytest.raises(RunError, match="cannot run this step: the kernel is out of luck"):
            decoder.step(np.array([2]))
    assert decoder.lengths.tolist() == [1]
    tokens = np.array([[1, 2]])
    assert relative_error(decoder.step(tokens[:, 1]), eager("rotary", tokens)[:, -1]) < CLOSE


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_closed_session_runs_no_step(decoders: DeployDecoder, backend: str) -> None:
    session = attnforge.load(decoders("rotary", "fp32"), backend)
    decoder = session.decoder()
    decoder.step(np.array([1]))
    session.close()
    with pytest.raises(UsageError, match="closed"):
        decoder.step(np.array([1]))
    with pytest.raises(UsageError, match="closed"):
        session.decoder()
    if backend != "openvino":  # which knows its types without its library
        with pytest.raises(UsageError, match="closed"):
            decoder.fork()


def test_a_bundle_without_a_cache_has_no_decoder(small: DeploySmall) -> None:
    with (
        attnforge.load(small("fp32"), "onnxruntime-cpu") as session,
        pytest.raises(UsageError, match=r"has no cache, .* deploy it with cache_tokens"),
    ):
        session.decoder()


def test_other_backends_report_that_they_have_no_steps(decoders: DeployDecoder) -> None:
    with pytest.raises(UnavailableError, match="decoder steps run on onnxruntime-cuda, onnxruntime-cpu, openvino only"):
        attnforge.load(decoders("rotary", "fp32"), "tensorrt_rtx")
    assert "tensorrt_rtx" in attnforge.verify(decoders("rotary", "fp32")).skipped


def test_a_bundle_without_a_step_for_cuda_says_so(decoders: DeployDecoder, tmp_path: Path) -> None:
    def without(manifest: Manifest) -> None:
        assert manifest.decoding is not None and manifest.decoding.cuda
        manifest.decoding.cuda = False  # as from an earlier version

    bundle = rewrite(Path(shutil.copytree(decoders("rotary", "fp32").path, tmp_path / "bundle")), without)
    with pytest.raises(UnavailableError, match="has no step for CUDA: an earlier version deployed it"):
        attnforge.load(bundle, "onnxruntime-cuda")


def test_a_run_refuses_more_tokens_than_the_profile_has(session: Session) -> None:
    with pytest.raises(InputError, match=f"the profile takes 1 to {LONGEST}"):
        session(ids(1, LONGEST + 1))


class _OffAtTheEnd(Decoder):
    """The last key of the first layer is 1% off, which affects no answer yet."""

    def cached(self, sample: int) -> dict[str, Array]:
        contents = super().cached(sample)
        contents["key_cache.0"][:, -1] *= 1.01
        return contents


def test_a_wrong_cache_is_named(decoders: DeployDecoder) -> None:
    report = verified(decoders("rotary", "fp32"), _OffAtTheEnd)
    assert not report.passed
    assert {failure.output for failure in report.failures} == {"key_cache.0"}
    assert {failure.case for failure in report.failures} == {"example", "normal-prime"}


def test_contents_of_the_caches(session: Session) -> None:
    tokens = ids(2, 7)
    decoder = session.decoder(2)
    decoder.prefill([tokens[0], tokens[1, :3]])
    contents = [decoder.cached(sample) for sample in range(2)]
    assert [[cache.shape[1] for cache in of_sample.values()] for of_sample in contents] == [[7] * 4, [3] * 4]
    alone = session.decoder()
    alone.prefill(tokens[1:, :3])
    for name, cache in alone.cached(0).items():
        assert relative_error(contents[1][name], cache) < CLOSE
    with pytest.raises(InputError, match="there is no sample 2; samples are 0 to 1"):
        decoder.cached(2)


def test_caches_have_a_separate_error_budget_where_precisions_are_chosen(tmp_path: Path) -> None:
    """The budget of outputs does not apply to keys, whose layers may be in 16 bits as they hardly affect outputs."""
    module, args, shapes = decoder_example("learned")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "output_proj" in name or "feed_forward" in name:
                parameter.mul_(0.01)
    bundle = attnforge.deploy(
        module, args, tmp_path / "b", shapes, "auto", ["onnxruntime"], tune=False, cache_tokens=PLACES, max_error=5e-5
    )
    assert bundle.manifest.mixed is not None
    report = attnforge.verify(bundle, ["onnxruntime-cpu"]).backends["onnxruntime-cpu"]
    assert report.passed and "caches" in report.outputs, report.failures


def test_verify_warns_about_a_bundle_without_expected_caches(decoders: DeployDecoder, tmp_path: Path) -> None:
    """Such as a bundle deployed before caches were compared."""

    def forget(manifest: Manifest) -> None:
        for case in manifest.cases:
            case.caches = False

    folder = Path(shutil.copytree(decoders("rotary", "fp32").path, tmp_path / "b"))
    assert attnforge.verify(folder, ["onnxruntime-cpu"]).warnings == []
    report = attnforge.verify(rewrite(folder, forget), ["onnxruntime-cpu"])
    assert report.passed and "caches" not in report.backends["onnxruntime-cpu"].outputs
    assert any("the contents of caches are not compared" in warning for warning in report.warnings)
