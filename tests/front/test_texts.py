"""Texts as inputs: a Hugging Face folder deployed by name with its tokenizer, calibrated and run with lines of text."""

from __future__ import annotations

import json
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
from attnforge.export.options import DeployOptions
from attnforge.export.sources.huggingface import example
from attnforge.export.sources.named import name_of
from attnforge.input_files import read_inputs
from attnforge.runtime.inputs import in_order
from attnforge.text import Tokenizer

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
    assert [batch["token_type_ids"].shape for batch in masked] == [(3, 3), (1, 3)]
    assert [len(batch["input_ids"]) for batch in tokenizer.batches(["a"] * 4, specs("input_ids"))] == [1] * 4
    fixed = [TensorSpec(name="input_ids", dtype="int64", dims=[3, 5])]
    assert [batch["input_ids"].shape for batch in tokenizer.batches(["a"] * 4, fixed)] == [(3, 5), (3, 5)]


def test_token_types_that_are_all_0_may_be_left_out(tmp_path: Path) -> None:
    ids = np.ones((2, 3), np.int64)
    takes = specs("input_ids")
    for types, more in ((np.zeros_like(ids), takes), (ids, [*takes, *specs("token_type_ids")])):
        np.savez(tmp_path / "texts.npz", input_ids=ids, token_type_ids=types)
        feeds = {"input_ids": ids, "token_type_ids": types}
        assert list(read_inputs(more, [str(tmp_path / "texts.npz")])) == [spec.name for spec in more]
        assert len(in_order(more, feeds)) == len(more)
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
    with pytest.raises(UsageError, match="no Hugging Face configuration"):
        attnforge.deploy("hf:absent", out=out)
    with pytest.raises(UsageError, match=rf"is not an \.onnx or \.pt2 file; give one, hf:{tmp_path} for"):
        attnforge.deploy(str(tmp_path), out=out)
    (tmp_path / "texts.txt").write_text("a\n")
    with pytest.raises(UsageError, match=r"texts\.txt contains texts, and the model has no tokenizer"):
        DeployOptions(data=[tmp_path / "texts.txt"]).real_data(specs("input_ids"))
    with pytest.raises(UsageError, match="labels were given, and texts have none"):
        DeployOptions(data=["texts.txt"], labels=[1]).check_data()
