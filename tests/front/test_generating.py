"""`attnforge generate`, and what `attnforge deploy` stores for it."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import attnforge
from attnforge.bundle import Bundle
from attnforge.cli import main
from attnforge.errors import InputError, UnknownNameError
from attnforge.model.decoder import Decoder
from attnforge.text import Tokenizer as OfBundle
from tests.support.decoders import PLACES, DeployDecoder, decoder_example, generate
from tests.support.first_hour import run_job

pytestmark = pytest.mark.xdist_group("generating")

LETTERS = "abcdefghijklmnopqrstuvwxyz .,\n"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """`here(*arguments)`: exit code, standard output and standard error of the command in this process."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["attnforge", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capfd.readouterr()

    return run


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Single letters as tokens, from id 0 on."""
    library = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token=" "))
    library.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    library.decoder = decoders.Fuse()
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    library.save(str(file))
    return file


@pytest.fixture(scope="module")
def folder(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder with a tokenizer, whose stop token is the full stop."""
    module, args, shapes = decoder_example()
    out = tmp_path_factory.mktemp("generating") / "decoder"
    attnforge.deploy(
        module, args, out, shapes, "fp32", ["onnxruntime"], tune=False, cache_tokens=PLACES, tokenizer=tokenizer,
        stop=[LETTERS.index(".")],
    )  # fmt: skip
    return out


def likeliest(prompt: list[int], count: int) -> list[int]:
    module = decoder_example().module
    assert isinstance(module, Decoder)
    tokens: list[int] = generate(module, torch.tensor([prompt]), count)[0].tolist()
    return tokens


def test_a_text_goes_on(here: Run, folder: Path) -> None:
    assert Bundle(folder).manifest.files.keys() >= {"tokenizer.json"}
    code, out, error = here("generate", folder, "to be", "--max-new-tokens", "12", "--stop", "49", "--json")
    assert (code, error) == (0, "")
    document: dict[str, Any] = json.loads(out)
    prompt = [LETTERS.index(letter) for letter in "to be"]
    assert document["prompt"] == prompt
    assert document["tokens"] == likeliest(prompt, 12)[: len(document["tokens"])]
    assert document["text"].startswith("to be") and document["backend"] == "onnxruntime-cpu"
    code, shown, _ = here("generate", folder, "to be", "--max-new-tokens", "12", "--stop", "49")
    assert code == 0 and shown.startswith(document["text"])
    assert f"{len(document['tokens'])} tokens on onnxruntime-cpu; the first after" in " ".join(shown.split())


def test_a_session_goes_on_with_a_text(folder: Path) -> None:
    prompt = [LETTERS.index(letter) for letter in "to be"]
    with attnforge.load(folder) as session:
        pieces = list(session.generate("to be", 12, eos_token_id=49))  # type: ignore[call-arg]
        ids = [int(token[0]) for token in session.generate([prompt], 12, stop=[49])]
        assert "".join(pieces) == session.tokenizer.text([*prompt, *ids])[len("to be") :]
        assert len(list(session.generate([prompt], temperature=1.5, seed=3, stop=[]))) == PLACES - len(prompt) + 1
        for alone in (prompt, 3, np.array(prompt)):
            with pytest.raises(InputError, match=r"one text, or the token ids of every sample, as in \[\[1, 450"):
                session.generate(alone)
        with pytest.raises(UnknownNameError, match=r"keyword of generate 'temperatures'.*did you mean temperature"):
            session.generate("to be", temperatures=0.7)  # type: ignore[call-arg]
        with pytest.raises(InputError, match="texts become input_ids, attention_mask, token_type_ids; the model takes"):
            session.tokenizer.inputs(["a"], [session.inputs[0].model_copy(update={"name": "tokens"})])


def test_ids_go_on_without_a_tokenizer(here: Run, decoders: DeployDecoder) -> None:
    bundle = decoders("rotary", "fp32").path
    code, out, _ = here("generate", bundle, "--ids", "1,2,3", "--max-new-tokens", "6")
    assert code == 0 and [int(word) for word in out.splitlines()[0].split()] == likeliest([1, 2, 3], 6)
    stop = likeliest([1, 2, 3], 6)[2]
    code, out, _ = here("generate", bundle, "--ids", "1,2,3", "--max-new-tokens", "6", "--stop", str(stop), "--json")
    assert json.loads(out)["tokens"][-1] == stop


def test_what_is_drawn_is_drawn_again(here: Run, folder: Path) -> None:
    drawn = ("generate", folder, "a", "--temperature", "1.5", "--top-k", "20", "--top-p", "0.9", "--json", "--seed")
    first, again, other = (json.loads(here(*drawn, seed)[1])["tokens"] for seed in ("1", "1", "2"))
    assert first == again != other


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give either a prompt text or token ids"),
        (("a", "--ids", "1"), "give either a prompt text or token ids"),
        (("",), "the prompt has no token"),
        (("--ids", "1,x"), "--ids has 'x'; give whole numbers"),
        (("--ids", "1,99"), "has the id 99; the table's ids are 0 to 49"),
        (("a", "--max-new-tokens", "0"), "max_new_tokens is 0; give 1 or more"),
        (("a", "--max-new-tokens", "99"), "and 99 new tokens are 100 tokens, and the cache has room for 41"),
        (("a", "--temperature", "-1"), "temperature is -1"),
        (("a", "--top-k", "3"), "need a temperature"),
        (("a", "--stop", "."), "--stop has '.'"),
    ],
)
def test_misuse_is_one_line(here: Run, folder: Path, arguments: tuple[str, ...], words: str) -> None:
    code, out, error = here("generate", folder, *arguments)
    assert code == 2 and words in error and error.count("\n") == 1 and out == ""


def test_a_bundle_without_a_tokenizer(here: Run, decoders: DeployDecoder) -> None:
    code, _, error = here("generate", decoders("rotary", "fp32").path, "text")
    assert code == 2 and "has no tokenizer; give token ids (--ids), or deploy with a tokenizer.json" in error


def test_a_file_that_is_no_tokenizer(tmp_path: Path) -> None:
    module, args, shapes = decoder_example()
    for content, words in (("{", "is not a tokenizer"), ("{}", "contains no tokenizer model")):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(attnforge.errors.UsageError, match=words):
            attnforge.deploy(
                module, args, tmp_path / "b", shapes, "fp32", ["onnxruntime"], tune=False, cache_tokens=PLACES,
                tokenizer=tmp_path / "tokenizer.json",
            )  # fmt: skip
        assert not (tmp_path / "b").exists()


def test_letters_whose_bytes_come_apart_come_when_they_are_whole(folder: Path) -> None:
    tokenizer = OfBundle(Bundle(folder))
    tokenizer.text = lambda ids: bytes(ids).decode(errors="replace")  # type: ignore[method-assign]
    a, é = b"a", "é".encode()
    assert list(tokenizer.stream([*a], [*é, é[0]])) == ["é", "\ufffd"]
    assert list(tokenizer.stream([*a, é[0]], [é[1], *a])) == ["é", "a"]  # a prompt that ends within a letter


CLEANED = decoders.WordPiece()
SPACES = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1)]
)
PIECES: dict[str, tuple[decoders.Decoder, list[str]]] = {
    "word pieces": (CLEANED, ["un", "##break", "##able", ",", "it", "is", ".", "[END]"]),
    "spaces": (SPACES, ["▁un", "break", "▁able", ",", "▁", "<0xC3>", "<0xA9>", "▁it", "[END]"]),
    "bytes": (decoders.ByteLevel(), ["un", "Ġbreak", "able", "Ã", "©", "ðŁ", "ĺĢ", "Ġ", "[END]"]),
}


@pytest.mark.parametrize("kind", PIECES)
def test_pieces_of_a_text_are_the_text(folder: Path, kind: str) -> None:
    decoder, words = PIECES[kind]
    library = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    library.decoder = decoder
    library.add_special_tokens(["[END]"])
    tokenizer = OfBundle(Bundle(folder))
    tokenizer._library = library
    rng = random.Random(0)
    for _ in range(50):
        ids = [rng.randrange(len(words)) for _ in range(30)]
        if kind == "spaces":  # of bytes that are no letter each is shown for itself, once another one comes
            ids = [i for drawn in ids for i in ((5, 6) if drawn in (5, 6) else (drawn,))]
        for prompt in range(4):
            if not (shown := tokenizer.text(ids[:prompt])).endswith("\ufffd"):
                assert shown + "".join(tokenizer.stream(ids[:prompt], ids[prompt:])) == tokenizer.text(ids)


def test_a_long_text_takes_as_long_a_token_as_a_short_one(folder: Path) -> None:
    decoded: list[int] = []
    tokenizer = OfBundle(Bundle(folder))
    tokenizer.text = lambda ids: decoded.append(len(ids)) or "a" * len(ids)  # type: ignore[func-returns-value, method-assign]
    assert "".join(tokenizer.stream([0], iter([0] * 1000))) == "a" * 1000
    assert max(decoded) < 5


def test_a_hugging_face_folder_brings_its_tokenizer_and_the_end_of_its_texts(
    here: Run, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=30,
        intermediate_size=48, max_position_embeddings=64, eos_token_id=[27, 5], architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path / "llama")
    (tmp_path / "llama" / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    out = run_job("stream", tmp_path, monkeypatch)["bundle"].path
    assert out == Path("llama-fp32")
    manifest = Bundle(out).manifest
    assert manifest.decoding is not None and manifest.decoding.stop == [27, 5]
    assert [spec.text() for spec in manifest.inputs] == ["int64[batch, tokens]"]
    assert manifest.source.options == {"inputs": "input_ids", "max_tokens": "32"}
    assert here("generate", out, "hello", "--max-new-tokens", "3")[0] == 0
    _, shown, _ = here("inspect", out)
    assert "decodes: caches of 32 tokens, 4.0 KiB for each sample" in shown
