"""Texts as inputs: a Hugging Face folder deployed by name with its tokenizer, calibrated and run with lines of text."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, processors

import attnforge
from attnforge.bundle import DimSpec, TensorSpec
from attnforge.cli import app
from attnforge.errors import InputError, UsageError
from attnforge.export.deploy import check_processor, check_tokenizer, usable
from attnforge.export.options import DeployOptions
from attnforge.export.sources.huggingface import example
from attnforge.export.sources.named import name_of
from attnforge.input_files import read_inputs
from attnforge.runtime.inputs import in_order
from attnforge.text import Tokenizer, read_texts

WORDS = ["[PAD]", "[CLS]", "[SEP]", "a", "bird", "that", "sang", "once", "upon", "the", "tree", "away"]

BATCH, TOKENS = DimSpec(symbol="batch", min=1, opt=2, max=3), DimSpec(symbol="tokens", min=2, opt=4, max=6)


def specs(*names: str) -> list[TensorSpec]:
    return [TensorSpec(name=name, dtype="int64", dims=[BATCH, TOKENS]) for name in names]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small BERT of random weights, a tokenizer of some words, and an image processor's settings."""
    folder = tmp_path_factory.mktemp("texts") / "small-bert"
    transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16, architectures=["BertModel"],
    ).save_pretrained(folder)  # fmt: skip
    library = Library(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[PAD]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.post_processor = processors.TemplateProcessing("[CLS] $0 [SEP]", None, [("[CLS]", 1), ("[SEP]", 2)])
    library.enable_padding(length=16)  # as in all-MiniLM-L6-v2's file
    library.save(str(folder / "tokenizer.json"))
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "ViTImageProcessor"}))
    (folder / "texts.txt").write_text("a bird\n\nthat sang once upon the tree\na tree\naway\n")
    return folder


def test_texts_become_inputs(bert: Path) -> None:
    """Padded to the longest text, truncated to what the model takes, with the mask and token types that it takes."""
    tokenizer = Tokenizer(bert / "tokenizer.json")
    inputs = tokenizer.inputs(["a bird", "that sang once upon the tree"], specs("input_ids", "attention_mask"))
    assert inputs["input_ids"].tolist() == [[1, 3, 4, 2, 0, 0], [1, 5, 6, 7, 8, 2]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6]
    assert len(tokenizer.ids("that sang once upon the tree")) == 8  # prompts are not truncated
    masked = tokenizer.batches(["a"] * 4, specs("input_ids", "attention_mask", "token_type_ids"))
    assert [batch["token_type_ids"].shape for batch in masked] == [(2, 3), (2, 3)]
    assert [len(batch["input_ids"]) for batch in tokenizer.batches(["a"] * 4, specs("input_ids"))] == [1] * 4
    fixed = [TensorSpec(name="input_ids", dtype="int64", dims=[3, 5])]
    assert [batch["input_ids"].shape for batch in tokenizer.batches(["a"] * 4, fixed)] == [(3, 5), (3, 5)]
    for least, most, sizes in ((4, 8, {1: [4], 9: [4, 5]}), (3, 4, {2: [3], 5: [3, 3], 9: [3, 3, 3]})):
        batch = DimSpec(symbol="batch", min=least, opt=least, max=most)
        takes = [TensorSpec(name=name, dtype="int64", dims=[batch, TOKENS]) for name in ("input_ids", "attention_mask")]
        for count, expected in sizes.items():
            assert [len(batch["input_ids"]) for batch in tokenizer.batches(["a"] * count, takes)] == expected
    for wrong in ([], [1]):
        with pytest.raises(InputError, match=r"one or more texts are needed, not \[1?\]; give a list of strings"):
            tokenizer.inputs(wrong, specs("input_ids"))  # type: ignore[arg-type]


def test_threads_share_a_tokenizer(bert: Path) -> None:
    """Prompts stay whole while other threads truncate texts."""
    tokenizer, text = Tokenizer(bert / "tokenizer.json"), "a bird that sang " * 200

    def lengths(_: int) -> tuple[int, ...]:
        return len(tokenizer.ids(text)), tokenizer.inputs([text] * 4, specs("input_ids"))["input_ids"].shape[1]

    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(lengths, range(200))) == {(802, 6)}


def test_lines_of_a_file_are_texts(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_bytes("\ufeffa b\r\nc\u2028d\x0ce\n\n".encode())
    assert read_texts(tmp_path / "texts.txt") == ["a b", "c\u2028d\x0ce"]


def test_token_types_that_are_all_0_may_be_left_out(tmp_path: Path) -> None:
    ids = np.ones((2, 3), np.int64)
    takes = specs("input_ids")
    for types, more in ((np.zeros_like(ids), takes), (ids, [*takes, *specs("token_type_ids")])):
        np.savez(tmp_path / "texts.npz", input_ids=ids, token_type_ids=types)
        feeds = {"input_ids": ids, "token_type_ids": types}
        assert list(read_inputs(more, [str(tmp_path / "texts.npz")])) == [spec.name for spec in more]
        assert len(in_order(more, feeds)) == len(more)
    assert len(in_order(takes, {"input_ids": ids, "token_type_ids": [[0, 0, 0], [0, 0, 0]]})) == 1
    message = r"no input 'token_type_ids'.*all token types for 0; deploy it with -o inputs=input_ids,token_type_ids"
    for read in (lambda: read_inputs(takes, [str(tmp_path / "texts.npz")]), lambda: in_order(takes, feeds)):
        with pytest.raises(InputError, match=message):
            read()


def test_a_model_has_token_types_on_request(bert: Path) -> None:
    made = example(bert, inputs="input_ids,attention_mask,token_type_ids", max_tokens=8)
    assert list(made.dynamic_shapes or ()) == ["input_ids", "attention_mask", "token_type_ids"]
    assert made.args[2].amin() == 0 and made.args[2].amax() == 1
    assert list(example(bert, max_tokens=8).dynamic_shapes or ()) == ["input_ids", "attention_mask"]


def test_inputs_are_shown_before_deploying(bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app(["models", f"hf:{bert}", "-o", "max_tokens=8"], standalone_mode=False)
    shown = capsys.readouterr().out.splitlines()
    assert shown == [
        "input_ids: int64[batch, tokens]",
        "attention_mask: int64[batch, tokens]",
        "sizes: batch 1 to 8, tokens 2 to 8",
    ]


def test_a_folder_is_deployed_by_name_with_its_files(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 8 bits, calibrated on its texts; the bundle is called after the folder and takes texts."""
    monkeypatch.chdir(tmp_path)
    bundle = attnforge.deploy(
        f"hf:{bert}", precision="int8", max_error=0.3, data=str(bert / "texts.txt"), targets="onnxruntime", tune=False,
        model_options={"max_tokens": 8},
    )  # fmt: skip
    manifest = bundle.manifest
    assert (bundle.path, manifest.name) == (Path("small-bert-int8"), "small-bert")
    assert manifest.quantised is not None and manifest.quantised.calibrated == 1
    assert {"tokenizer.json", "preprocessor_config.json"} <= manifest.files.keys()
    with attnforge.load(bundle) as session:
        feeds = session.tokenize(["a bird", "that sang"])
        by_name = session.run({**feeds, "token_type_ids": torch.zeros(2, 4, dtype=torch.int64)})
        np.testing.assert_array_equal(session(**feeds)[0], by_name["last_hidden_state"])


def test_files_that_cannot_be_kept_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those found in a folder: no files that links bring from elsewhere, but those of the hub's cache."""
    folder, blobs = tmp_path / "hub/snapshots/0123", tmp_path / "hub/blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    settings, tokenizer = folder / "preprocessor_config.json", folder / "tokenizer.json"
    contents = json.dumps({"feature_extractor_type": "ViTFeatureExtractor"})
    (blobs / "89ab").write_text(contents)
    settings.symlink_to("../../blobs/89ab")
    assert usable(settings, check_processor) == settings and usable(None, check_tokenizer) is None
    assert not caplog.messages
    tokenizer.write_text("[1]")
    assert usable(tokenizer, check_tokenizer) is None
    settings.unlink()
    (tmp_path / "theirs.json").write_text(contents)
    settings.symlink_to(tmp_path / "theirs.json")
    assert usable(settings, check_processor) is None
    settings.unlink()
    settings.write_text("{}")
    assert usable(settings, check_processor) is None
    reasons = (
        "contains no tokenizer model",
        "is a link to a file outside its folder",
        "has no image_processor_type or",
    )
    for message, reason in zip(caplog.messages, reasons, strict=True):
        assert message.startswith("the bundle keeps no ") and reason in message


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hf:bert/small", "small"),
        ("hf:bert/small/config.json", "small"),
        ("hf:some_package/model", "some_package"),
        ("hf:hub/models--org--tiny-llama/snapshots/0123abc", "tiny-llama"),
        ("folder/model.onnx", "model"),
        ("mine:attention", "attention"),
        ("vit", "vit"),
    ],
)
def test_names_of_bundles(name: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bert/small").mkdir(parents=True)
    (tmp_path / "bert/small/config.json").touch()
    assert name_of(name) == expected


def test_what_is_wrong_is_said_before_the_model_is_built(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="no limit was given; give max_error"):
        attnforge.deploy("hf:absent", out=out, precision="int8")
    for option in ("tokenizer", "processor"):
        with pytest.raises(UsageError, match=r"absent\.json is not an? .*; give a "):
            attnforge.deploy("hf:absent", out=out, **{option: "absent.json"})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no Hugging Face configuration"):
        attnforge.deploy("hf:absent", out=out)
    with pytest.raises(UsageError, match=rf"is not an \.onnx or \.pt2 file; give one, hf:{tmp_path} for"):
        attnforge.deploy(str(tmp_path), out=out)
    (tmp_path / "texts.txt").write_text("a\n")
    with pytest.raises(UsageError, match=r"texts\.txt contains texts, and the model has no tokenizer"):
        DeployOptions(data=[tmp_path / "texts.txt"]).real_data(specs("input_ids"))
    with pytest.raises(UsageError, match="labels were given, and texts and pictures have none"):
        DeployOptions(data=["texts.txt"], labels=[1]).check_data()
