"""Generation: greedy tokens are eager's, sampled tokens follow the requested probabilities, and tokens are yielded as
they are generated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnforge
from attnforge.errors import InputError, RunError, UsageError
from attnforge.model.decoder import Decoder
from attnforge.runtime.decoding.generation import GREEDY, STOPPED, Sampler
from attnforge.runtime.session import Session
from tests.support.decoders import PLACES, DeployDecoder, decoder_example, generate, ids


@pytest.fixture(scope="module")
def session(decoders: DeployDecoder) -> Iterator[Session]:
    with attnforge.load(decoders("rotary", "fp32"), "onnxruntime-cpu") as opened:
        yield opened


def test_greedy_tokens_are_those_of_eager(session: Session) -> None:
    module = decoder_example("rotary").module
    assert isinstance(module, Decoder)
    prompts = ids(3, 5)
    expected = generate(module, torch.from_numpy(prompts), 20).numpy()
    assert np.array_equal(np.stack(list(session.generate(prompts, 20)), axis=1), expected)
    lengths = torch.tensor([2, 5, 3])
    ragged = generate(module, torch.from_numpy(prompts), 20, lengths=lengths).numpy()
    rows = [row[:n] for row, n in zip(prompts, lengths, strict=True)]
    assert np.array_equal(np.stack(list(session.generate(rows, 20)), axis=1), ragged)


def test_a_stopped_sample_gets_no_more_tokens(session: Session) -> None:
    prompts = ids(2, 5)
    whole = np.stack(list(session.generate(prompts, 10)), axis=1)
    stop = int(whole[0, 3])
    tokens = np.stack(list(session.generate(prompts, 10, stop=[stop])), axis=1)
    first = [int(np.argmax(row == stop)) if stop in row else 9 for row in whole]
    for row, was, end in zip(tokens, whole, first, strict=True):
        assert row[: end + 1].tolist() == was[: end + 1].tolist()
        assert (row[end + 1 :] == STOPPED).all()


def test_sampled_tokens_depend_only_on_the_seed_and_the_sample(session: Session) -> None:
    prompts = np.repeat(ids(1, 5), 3, axis=0)
    sampler = Sampler(temperature=2.0, seed=7)
    both = np.stack(list(session.generate(prompts, 12, sampler=sampler)), axis=1)
    again = np.stack(list(session.generate(prompts[:2], 12, sampler=sampler)), axis=1)
    assert np.array_equal(both[:2], again) and len({tuple(row) for row in both}) == 3
    reseeded = np.stack(list(session.generate(prompts, 12, sampler=Sampler(2.0, seed=8))), axis=1)
    assert not np.array_equal(both, reseeded)


def test_the_last_token_needs_no_cache_position(session: Session) -> None:
    assert len(list(session.generate(ids(1, PLACES - 4), 5))) == 5
    with pytest.raises(InputError, match="the prompt and 6 new tokens are 42 tokens, and the cache has room for 41"):
        session.generate(ids(1, PLACES - 4), 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1, "top_k": 0}, "top_k is 0"),
        ({"temperature": 1, "top_p": 0}, "top_p is 0"),
        ({"temperature": 1, "top_p": 1.5}, "top_p is 1.5"),
        ({"temperature": 1, "seed": -1}, "seed is -1"),
        ({"top_k": 3}, "without one the most likely"),
        ({"temperature": 1, "top_k": 1.5}, "top_k is 1.5; give a whole number"),
        ({"temperature": 1, "seed": 1.5}, "seed is 1.5; give a whole number"),
    ],
)
def test_invalid_options_of_a_sampler(options: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Sampler(**options)  # type: ignore[arg-type]


def test_zero_new_tokens_are_refused(session: Session) -> None:
    with pytest.raises(UsageError, match="max_new_tokens is 0"):
        session.generate(ids(1, 3), 0)


@pytest.mark.parametrize(
    ("prompts", "stop", "message"),
    [
        ([[5, 7]], "ab", "a stop token id is 'ab'; give a whole number"),
        ([[5, 7]], [1.5], "a stop token id is 1.5; give a whole number"),
        (["a text", "another"], [], "generate takes one text"),
        ([[5, 7], []], [], "sample 1 has no token; give one or more"),
    ],
)
def test_invalid_prompts_and_stops(session: Session, prompts: Any, stop: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(session.generate(prompts, 2, stop=stop))


LOGITS = st.lists(st.floats(-30, 30), min_size=1, max_size=12).map(lambda xs: np.array(xs, np.float32))


@given(LOGITS, st.floats(0.1, 5), st.none() | st.integers(1, 15), st.none() | st.floats(0.01, 1))
def test_probabilities(logits: np.ndarray, temperature: float, top_k: int | None, top_p: float | None) -> None:
    probabilities = Sampler(temperature, top_k, top_p).probabilities(logits)
    assert probabilities.sum() == pytest.approx(1) and (probabilities >= 0).all()
    softmax = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    softmax /= softmax.sum()
    kept = probabilities > 0
    shown = softmax[kept]
    assert probabilities[kept] == pytest.approx(shown / shown.sum(), rel=1e-9)
    assert not (~kept).any() or shown.min() >= softmax[~kept].max() - 1e-12  # the most likely tokens are kept
    assert kept.sum() <= (top_k or len(logits))
    if top_p is not None and kept.sum() > 1:
        assert np.sort(shown)[1:].sum() < top_p  # one token fewer would not reach top_p
    assert GREEDY.probabilities(logits)[logits.argmax()] == 1


@pytest.mark.parametrize("sampler", [GREEDY, Sampler(temperature=1.0)])
@pytest.mark.parametrize("wrong", [[np.nan, 1.0], [-np.inf, -np.inf], [0.0, np.inf]])
def test_logits_without_a_finite_maximum_are_refused(sampler: Sampler, wrong: list[float]) -> None:
    generators = [np.random.default_rng(i) for i in range(2)]
    hidden = np.array([[-np.inf, 1.0], [2.0, -np.inf]], np.float32)
    assert sampler.choose(hidden, generators).tolist() == [1, 0]
    with pytest.raises(RunError, match=r"sample 1 has no most likely token: its largest logit is (nan|-?inf)"):
        sampler.choose(np.array([[0.0, 1.0], wrong], np.float32), generators)
