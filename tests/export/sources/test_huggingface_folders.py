"""Untrusted Hugging Face folders: code next to the configuration, missing weights, implausible sizes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from attnforge.bundle import Bundle, Source
from attnforge.cli import app
from attnforge.errors import UnavailableError, UsageError
from attnforge.export.sources.huggingface import example
from attnforge.export.sources.named import build, rebuild

transformers = pytest.importorskip("transformers")

TINY = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the configuration of a small BERT, and no weights."""
    config = transformers.BertConfig(**TINY, architectures=["BertModel"])
    config.save_pretrained(tmp_path)
    return tmp_path


def with_weights(folder: Path) -> Path:
    transformers.BertModel(transformers.BertConfig(**TINY)).save_pretrained(folder)
    return folder


def edit(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_code_in_the_folder_is_neither_run_nor_asked_about(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.input", lambda *text: pytest.fail(f"it asks {text}"))
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    edit(folder, model_type="ours", auto_map={"AutoConfig": "own.Config", "AutoModel": "own.Model"})
    with pytest.raises(UsageError, match="no configuration that transformers knows"):
        example(folder)
    edit(folder, model_type="bert", architectures=None)
    example(folder)  # for a model type of transformers, transformers' own code is run
    assert not (folder / "ran").exists()
    assert capsys.readouterr().out == ""


def test_weights_that_are_named_and_missing_are_refused(folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "gone.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match=r"names 'gone.safetensors', which does not exist \(2 of 2 are missing\)"):
        example(folder)
    save_file({}, folder / "model-00001-of-00002.safetensors")
    with pytest.raises(UsageError, match=r"\(1 of 2 are missing\)"):
        example(folder)


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": 3}', "[" * 100_000])
def test_an_invalid_index_is_refused(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UsageError, match="is not an index of weights"):
        example(folder)


@pytest.mark.parametrize("name", ["tf_model.h5", "model.gguf", "weights.bin"])
def test_weights_of_an_unsupported_format_are_not_replaced_by_random_ones(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"weights")
    with pytest.raises(UsageError, match=f"{name}, a format that is not supported"):
        example(folder)


def test_random_weights_are_recorded_as_random(folder: Path) -> None:
    assert build(f"hf:{folder}", {"seed": "3"}, None)[1].random_weights == "all, seed 3"
    loaded = build(f"hf:{with_weights(folder)}", {}, None)[1]
    assert loaded == Source(kind="huggingface", name=f"hf:{folder}")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if not name.startswith("pooler")},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert build(f"hf:{folder}", {}, None)[1].random_weights == "pooler.dense.bias and 1 more, seed 0"
    assert build("self-attention", {}, None)[1].random_weights == "all, seed 0"
    assert build("patch-attention-digits", {}, None)[1].random_weights is None


def rename(folder: Path, change: Callable[[str], str | None]) -> None:
    """Change the names of the weights in a folder; None removes a weight."""
    tensors = load_file(folder / "model.safetensors")
    named = {new: tensor for name, tensor in tensors.items() if (new := change(name)) is not None}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "matched"),
    [
        (lambda name: f"ours.{name}", 0),
        (lambda name: None, 0),
        (lambda name: name if name.startswith("embeddings") else None, 5),
        (lambda name: None if name.startswith("encoder") else name, 7),
        (lambda name: name.replace("query", "q"), 21),
        (lambda name: None if name == "embeddings.word_embeddings.weight" else name, 22),
    ],
    ids=["another prefix", "none", "embeddings alone", "no encoder", "other names", "one is missing"],
)
def test_weights_of_another_model_are_not_replaced_by_random_ones(
    folder: Path, change: Callable[[str], str | None], matched: int
) -> None:
    rename(with_weights(folder), change)
    with pytest.raises(UsageError, match=rf"has {matched} of the 23 weights of BertModel .*--random-weights") as raised:
        build(f"hf:{folder}", {}, None)
    assert "\n" not in str(raised.value)
    source = build(f"hf:{folder}", {"random_weights": "true"}, None)[1]
    assert source.options == {"random_weights": "true"} and source.random_weights is not None
    with pytest.raises(UsageError, match="random_weights is 'yes'; give true or false"):
        build(f"hf:{folder}", {"random_weights": "yes"}, None)


@pytest.mark.parametrize(
    "kind", ["BertForMaskedLM", "BertForSequenceClassification", "BertForTokenClassification", "BertForPreTraining"]
)
def test_the_missing_head_of_a_base_model_is_random(folder: Path, kind: str) -> None:
    with_weights(folder)
    named = build(f"hf:{folder}", {"architecture": kind}, None)[1].random_weights
    assert named is not None and named.startswith(("cls", "classifier"))


def test_a_pooler_within_the_base_model_may_be_missing(folder: Path) -> None:
    config = transformers.BertConfig(**TINY, architectures=["BertForMaskedLM"])
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    named = build(f"hf:{folder}", {"architecture": "BertForSequenceClassification"}, None)[1].random_weights
    assert named is not None and named.startswith("bert.pooler")


@pytest.mark.parametrize("path", ["../out.safetensors", "absolute", "below/../../out.safetensors"])
def test_an_index_that_names_a_file_outside_is_refused(folder: Path, path: str) -> None:
    inside = folder / "inside"
    inside.mkdir()
    with_weights(inside)
    tensors = load_file(inside / "model.safetensors")
    (inside / "below").mkdir()
    (inside / "model.safetensors").rename(folder / "out.safetensors")
    path = str(folder / "out.safetensors") if path == "absolute" else path
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, path)}
    (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match=r"names .*out\.safetensors', outside the folder"):
        example(inside)


def test_the_command_lets_weights_be_random(folder: Path, tmp_path: Path) -> None:
    rename(with_weights(folder), lambda name: f"ours.{name}")
    arguments = ["deploy", f"hf:{folder}", "--out", str(tmp_path / "bundle"), "--target", "onnxruntime", "--no-tune"]
    refused = CliRunner().invoke(app, [*arguments, "--random-weights=no"])
    assert refused.exit_code == 2
    refused = CliRunner().invoke(app, arguments)
    assert isinstance(refused.exception, UsageError) and not (tmp_path / "bundle").exists()
    done = CliRunner().invoke(app, [*arguments, "--random-weights"])
    assert done.exit_code == 0, done.output
    assert (source := Bundle(tmp_path / "bundle").manifest.source).random_weights is not None
    assert rebuild(source, trusted=True).args


@pytest.mark.parametrize("name", ["pipeline", "AutoConfig", "BertTokenizer", "logging", "NoSuchModel"])
def test_an_architecture_that_is_no_model_is_refused(folder: Path, name: str) -> None:
    edit(folder, architectures=[name])
    with pytest.raises(UsageError, match=f"has no model class {name}"):
        example(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 10**9},
        {"hidden_size": 10**7},
        {"vocab_size": 10**13},
        {"hidden_size": 17},
        {"num_attention_heads": 0},
        {"hidden_size": "wide"},
        {"hidden_act": "no such function"},
    ],
)
def test_implausible_sizes_are_refused_immediately(folder: Path, fields: dict[str, Any]) -> None:
    edit(folder, **fields)
    start = time.perf_counter()
    with pytest.raises((UsageError, UnavailableError)) as raised:
        example(folder)
    assert time.perf_counter() - start < 5
    assert "\n" not in str(raised.value)
