"""Architectures of Hugging Face transformers: every site is canonical, every lowered graph within the parity budget."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from safetensors.torch import save_file

from attnforge.arrays import to_numpy
from attnforge.errors import UsageError
from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.deploy import deploy
from attnforge.export.lowering import onnxruntime as for_onnxruntime
from attnforge.export.lowering import tensorrt as for_tensorrt
from attnforge.export.sources.huggingface import around, example, longest
from attnforge.export.sources.sentences import Pooling, parts
from attnforge.export.sources.torch_module import capture
from attnforge.model import Example
from attnforge.precision import precision_named
from attnforge.runtime.cases import cases, make_inputs
from attnforge.runtime.parity.budget import judge
from attnforge.runtime.parity.verify import verify
from attnforge.runtime.session import load
from tests.support.huggingface import build, minilm, variants

FP32 = precision_named("fp32")
SITES = {"swin": 4}  # two in the other architectures

SAME = ("clip-vision", "dinov2", "whisper-encoder")
"""Architectures that call scaled_dot_product_attention like ViT, through the same function and without a mask."""

VARIANTS = [(name, attention) for name, attention in variants() if attention == "eager" or name not in SAME]
VARIANTS += [("mixtral", "sdpa")]  # whose tokens choose experts


@pytest.mark.parametrize(("name", "attention"), VARIANTS)
def test_every_site_is_canonical_and_within_budget(name: str, attention: str, tmp_path: Path) -> None:
    made = build(name, attention)
    captured = capture(made.module, made.args, made.dynamic_shapes, FP32)
    sites = canonicalize(captured.model).sites
    assert [site.reason for site in sites] == [None] * SITES.get(name, 2)
    arrays = {spec.name: to_numpy(spec.name, arg) for spec, arg in zip(captured.inputs, captured.args, strict=True)}
    wanted = [case for case in cases(captured.inputs) if case.name in ("example", "normal-odd")]
    sessions = []
    for target in (for_onnxruntime, for_tensorrt):
        model = captured.model.clone()
        target.lower(model, sites, *([wanted[0].sizes] if target is for_onnxruntime else []))
        file = str(tmp_path / "model.onnx")
        ir.save(model, file)
        sessions.append(ort.InferenceSession(file, providers=["CPUExecutionProvider"]))
    for case in wanted:
        inputs = make_inputs(case, captured.inputs, arrays)
        truth, eager = captured.exact(inputs), captured.eager(inputs)
        for session in sessions:
            for output, got in zip(truth, session.run(None, inputs), strict=True):
                wide = [np.asarray(x, np.float64) for x in (got, eager[output], truth[output])]
                verdict = judge(case, output, wide[0], wide[1], wide[2], FP32)
                assert verdict.passed, verdict.reason


SENTENCES = (
    "A man is playing a guitar on the street.",
    "Somebody performs music outdoors.",
    "The quarterly report is due on Friday.",
)


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """all-MiniLM-L6-v2 with its trained weights, deployed for ONNX Runtime."""
    folder = tmp_path_factory.mktemp("minilm") / "bundle"
    made = example(minilm(), max_tokens=64)
    deploy(made.module, made.args, folder, made.dynamic_shapes, targets=["onnxruntime"], tune=False)
    return folder


def test_trained_weights_on_real_sentences(sentences: Path) -> None:
    """The deployed model returns sentence embeddings: the mean of the tokens' states, at unit length."""
    from transformers import AutoModel, AutoTokenizer

    report = verify(sentences)
    assert report.passed, report
    tokens = AutoTokenizer.from_pretrained(str(minilm()))(list(SENTENCES), padding=True, return_tensors="np")
    ids, mask = (np.asarray(tokens[name], np.int64) for name in ("input_ids", "attention_mask"))
    with load(sentences) as session:
        assert session.bundle.manifest.attention.canonical == 6
        outputs = session.run({"input_ids": ids, "attention_mask": mask})
    assert list(outputs) == ["sentence_embedding"]
    vectors = outputs["sentence_embedding"]
    model = AutoModel.from_pretrained(str(minilm())).eval().double()
    with torch.no_grad():
        states = model(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask)).last_hidden_state.numpy()
    truth = (states * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    truth /= np.linalg.norm(truth, axis=1, keepdims=True)
    assert np.linalg.norm(vectors - truth) / np.linalg.norm(truth) < 2e-6
    similar, different = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
    assert similar > 0.4 > 0.1 > different


STATES = torch.arange(24.0).reshape(2, 4, 3) - 7
MASK = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
GROWING = torch.tensor([1.0, 2, 3]) / 6


@pytest.mark.parametrize(
    ("mode", "first", "second"),
    [
        ("cls", STATES[0, 0], STATES[1, 1]),
        ("lasttoken", STATES[0, 2], STATES[1, 3]),
        ("max", STATES[0, 2], STATES[1, 3]),
        ("mean", STATES[0, :3].mean(0), STATES[1, 1:].mean(0)),
        ("mean_sqrt_len_tokens", STATES[0, :3].sum(0) / 3**0.5, STATES[1, 1:].sum(0) / 3**0.5),
        ("weightedmean", STATES[0, :3].T @ GROWING, STATES[1, 1:].T @ GROWING),
    ],
)  # fmt: skip
def test_pooling(mode: str, first: torch.Tensor, second: torch.Tensor) -> None:
    torch.testing.assert_close(Pooling([mode])(STATES, MASK), torch.stack([first, second]))
    torch.testing.assert_close(Pooling([mode, "cls"])(STATES, MASK)[:, 3:], STATES[[0, 1], [0, 1]])


def test_parts_of_a_sentence_transformers_folder(tmp_path: Path) -> None:
    """Dense layers are read with their weights, unsupported parts are refused by name, and nothing is executed."""

    def write(folder: str, config: dict[str, Any]) -> None:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "config.json").write_text(json.dumps(config))

    def listed(*kinds: str) -> None:
        modules = [{"type": f"sentence_transformers.models.{kind}", "path": kind if i else ""} for i, kind in
                   enumerate(kinds)]  # fmt: skip
        (tmp_path / "modules.json").write_text(json.dumps(modules))

    assert parts(tmp_path) is None
    listed("Transformer", "Pooling", "Dense")
    write("Pooling", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False})
    write("Dense", {"in_features": 3, "out_features": 1, "bias": False, "activation_function": "torch.nn.Tanh"})
    with pytest.raises(UsageError, match="weights of the Dense layer are not in"):
        parts(tmp_path)
    save_file({"linear.weight": torch.ones(1, 3)}, str(tmp_path / "Dense" / "model.safetensors"))
    read = parts(tmp_path)
    assert read is not None
    assert read[0] == tmp_path
    torch.testing.assert_close(read[1](STATES, MASK)[:, 0], torch.tanh(STATES[[0, 1], [0, 1]].sum(-1)))
    write("Dense", {"in_features": 3, "out_features": 1, "activation_function": "os.system"})
    with pytest.raises(UsageError, match="an activation or residual that is not supported"):
        parts(tmp_path)
    write("Pooling", {"pooling_mode": "median"})
    with pytest.raises(UsageError, match="there is no pooling mode 'median'"):
        parts(tmp_path)
    listed("Transformer", "LSTM")
    with pytest.raises(UsageError, match="of the kind LSTM; supported are"):
        parts(tmp_path)
    listed("CLIPModel")
    with pytest.raises(UsageError, match="does not begin with a Transformer"):
        parts(tmp_path)
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        parts(tmp_path)


def shapes_of(model: Example) -> dict[str, Any]:
    assert model.dynamic_shapes is not None
    return dict(model.dynamic_shapes)


def test_options_and_errors(tmp_path: Path) -> None:
    from transformers import BertConfig, T5Config

    with pytest.raises(UsageError, match=r"no Hugging Face configuration at .*nothing"):
        example(tmp_path / "nothing")
    folder = tmp_path / "bert"
    BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50,
               max_position_embeddings=24).save_pretrained(folder)  # fmt: skip
    made = example(folder, attention="eager", batch="3", tokens=6, dynamic="tokens")
    assert type(made.module.model).__name__ == "BertModel"
    assert [tuple(arg.shape) for arg in made.args] == [(3, 6), (3, 6)]
    shapes = shapes_of(made)
    assert {name: list(dims) for name, dims in shapes.items()} == {"input_ids": [1], "attention_mask": [1]}
    assert shapes["input_ids"][1].max == 23  # all positions except that of padding
    named = example(folder, architecture="BertForMaskedLM")
    assert list(named.module(*named.args)) == ["logits"]
    with pytest.raises(UsageError, match="has no model class BertForTea"):
        example(folder, architecture="BertForTea")
    with pytest.raises(UsageError, match="dims that can vary: batch, tokens"):
        example(folder, dynamic="heads")
    with pytest.raises(UsageError, match="no part 'middle'"):
        example(folder, part="middle")
    with pytest.raises(UsageError, match="batch is 'many'; give a whole number"):
        example(folder, batch="many")
    with pytest.raises(UsageError, match="attention='flash'; give eager or sdpa"):
        example(folder, attention="flash")
    with pytest.raises(UsageError, match="batch is 1 in the example, with a range from 1 to 1; choose batch"):
        example(folder, batch=1, max_batch=1)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="has no configuration that transformers knows"):
        example(tmp_path)
    T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=50).save_pretrained(tmp_path / "t5")
    assert list(shapes_of(example(tmp_path / "t5"))) == ["input_ids", "attention_mask", "decoder_input_ids"]
    assert list(shapes_of(example(tmp_path / "t5", part="encoder"))) == ["input_ids", "attention_mask"]


def test_as_many_tokens_as_the_position_table_holds() -> None:
    from transformers import MarianConfig, RobertaConfig, WhisperConfig

    assert longest(WhisperConfig()) == 448  # of its texts; the id of padding is not a position
    assert longest(MarianConfig(max_position_embeddings=96, pad_token_id=58100)) == 96
    assert longest(RobertaConfig(max_position_embeddings=130, pad_token_id=1)) == 128


def test_a_main_input_of_another_kind_is_refused() -> None:
    from transformers import DecisionTransformerConfig, DecisionTransformerModel

    config = DecisionTransformerConfig(hidden_size=16, n_layer=1, n_head=1, state_dim=3, act_dim=2)
    with pytest.raises(UsageError, match="DecisionTransformerModel takes states"):
        around(DecisionTransformerModel(config))
