"""Hugging Face architectures at the sizes that their authors published, each with the head of its task.

Sizes are those of the models' own configuration files; what a configuration class of transformers has by default is not
repeated. Weights are random but where a package brings them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import attnforge
from attnforge.bundle import Bundle
from attnforge.export.sources.named import build
from benchmarks.experiment import say
from tests.support.huggingface import minilm


@dataclass(frozen=True)
class Published:
    """One published model.

    Attributes:
        name: that its authors gave it.
        kind: `encoder`, `decoder`, `vision`, `audio` or `cross`, whose attention is across two sequences;
            `growth` of :data:`GROWTH`, and :data:`CALLABLE`.
        architecture: class in transformers, with the head of the task; :data:`SENTENCES`; or the name of a callable as
            :func:`attnforge.export.sources.named.build` takes it.
        sizes: where the published configuration differs from the class's defaults.
        options: of :func:`attnforge.export.sources.huggingface.example`.
    """

    name: str
    kind: str
    architecture: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def source(self, parent: Path) -> str:
        """The name that :func:`attnforge.export.sources.named.build` takes: that of a new folder under `parent`, or of
        the package that brings trained weights."""
        if self.kind == CALLABLE:
            return self.architecture
        if self.architecture == SENTENCES:
            return f"hf:{minilm()}"
        folder = parent / "model"
        kind: Any = getattr(import_module("transformers"), self.architecture)
        config = {"architectures": [self.architecture], "model_type": kind.config_class.model_type, **self.sizes}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        return f"hf:{folder}"

    def deployed(self, folder: Path, **options: Any) -> Bundle:
        """The bundle for ONNX Runtime in `folder`, deployed as `attnforge deploy` does; options are those of deploy."""
        say(f"deploy {self.name}")
        (module, args, shapes), source = build(self.source(folder), dict(self.options), None)
        return attnforge.deploy(
            module, args, folder / "bundle", shapes, targets=["onnxruntime"], name=self.name, cache=False,
            source=source, **options,
        )  # fmt: skip


CALLABLE = "callable"
"""The kind of what a function makes."""

SENTENCES = "sentence-transformers"
"""In the place of an architecture: all-MiniLM-L6-v2 with its trained weights, pooling and normalisation."""

_BASE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
_CLASSES = {"num_labels": 1000}
_LOGITS = {"max_batch": 2}
"""Of decoders: a batch of logits over 100,000 words and more is larger than the model."""

PUBLISHED = (
    Published("all-MiniLM-L6-v2, embeddings, trained", "encoder", SENTENCES),
    Published("bert-base-uncased", "encoder", "BertForSequenceClassification"),
    Published("distilbert-base-uncased", "encoder", "DistilBertForSequenceClassification"),
    Published(
        "roberta-base", "encoder", "RobertaForSequenceClassification",
        {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    ),
    Published(
        "deberta-v3-base", "encoder", "DebertaV2ForSequenceClassification",
        {
            **_BASE, "num_hidden_layers": 12, "relative_attention": True, "max_relative_positions": -1,
            "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "type_vocab_size": 0,
        },
    ),
    Published(
        "albert-base-v2", "encoder", "AlbertForMaskedLM", {**_BASE, "num_hidden_layers": 12, "hidden_act": "gelu_new"}
    ),
    Published(
        "electra-base-discriminator", "encoder", "ElectraForPreTraining", {**_BASE, "embedding_size": 768}
    ),
    Published("mpnet-base", "encoder", "MPNetForMaskedLM", {"vocab_size": 30527, "max_position_embeddings": 514}),
    Published("ModernBERT-base", "encoder", "ModernBertForMaskedLM"),
    Published("nomic-embed-text-v1", "encoder", "NomicBertModel"),
    Published("convbert-base", "encoder", "ConvBertForSequenceClassification"),
    Published(
        "esm2_t12_35M", "encoder", "EsmForMaskedLM",
        {
            "vocab_size": 33, "hidden_size": 480, "num_hidden_layers": 12, "num_attention_heads": 20,
            "intermediate_size": 1920, "max_position_embeddings": 1026, "position_embedding_type": "rotary",
            "token_dropout": True, "mask_token_id": 32, "pad_token_id": 1, "emb_layer_norm_before": False,
        },
    ),
    Published("gpt2", "decoder", "GPT2LMHeadModel", {}, _LOGITS),
    Published(
        "SmolLM-135M", "decoder", "LlamaForCausalLM",
        {
            "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
            "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        _LOGITS,
    ),
    Published(
        "Qwen2.5-0.5B", "decoder", "Qwen2ForCausalLM",
        {
            "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
            "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
        _LOGITS,
    ),
    Published(
        "Qwen3-0.6B", "decoder", "Qwen3ForCausalLM",
        {
            "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
            "tie_word_embeddings": True,
        },
        _LOGITS,
    ),
    Published(
        "gemma-3-270m", "decoder", "Gemma3ForCausalLM",
        {
            "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4,
            "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "max_position_embeddings": 32768,
            "sliding_window": 512,
        },
        _LOGITS,
    ),
    Published("opt-125m", "decoder", "OPTForCausalLM", {}, _LOGITS),
    Published(
        "bloom-560m", "decoder", "BloomForCausalLM",
        {"hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880},
        _LOGITS,
    ),
    Published(
        "pythia-160m", "decoder", "GPTNeoXForCausalLM",
        {**_BASE, "num_hidden_layers": 12, "vocab_size": 50304, "max_position_embeddings": 2048},
        _LOGITS,
    ),
    Published(
        "TinyMistral-248M", "decoder", "MistralForCausalLM",
        {
            "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 32005, "max_position_embeddings": 32768, "sliding_window": 32,
        },
        _LOGITS,
    ),
    Published("vit-base-patch16-224", "vision", "ViTForImageClassification", _CLASSES),
    Published("deit-base-patch16-224", "vision", "DeiTForImageClassification", _CLASSES),
    Published("dinov2-base at 224", "vision", "Dinov2ForImageClassification", _CLASSES),
    Published("swin-tiny-patch4-window7-224", "vision", "SwinForImageClassification", _CLASSES),
    Published(
        "beit-base-patch16-224", "vision", "BeitForImageClassification",
        {**_CLASSES, "use_relative_position_bias": True, "use_mean_pooling": True},
    ),
    Published("segformer-b0-512", "vision", "SegformerForSemanticSegmentation", {"num_labels": 150, "image_size": 512}),
    Published("yolos-tiny at 512", "vision", "YolosForObjectDetection", {
        "hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "image_size": [512, 512],
        "use_mid_position_embeddings": False, "num_detection_tokens": 100, "num_labels": 91,
    }),
    Published("whisper-tiny", "audio", "WhisperForConditionalGeneration", {}, {"max_batch": 2}),
    Published("wav2vec2-base", "audio", "Wav2Vec2ForCTC"),
    Published("hubert-base", "audio", "HubertForCTC"),
    Published("wavlm-base", "audio", "WavLMForCTC"),
    Published("ast-10-10-0.4593", "audio", "ASTForAudioClassification", {"num_labels": 527}, {"max_batch": 2}),
    Published("t5-small", "cross", "T5ForConditionalGeneration", {}, _LOGITS),
    Published(
        "bart-base", "cross", "BartForConditionalGeneration",
        {
            "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12,
            "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072,
        },
        _LOGITS,
    ),
    Published(
        "opus-mt-en-de", "cross", "MarianMTModel",
        {
            "d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 8,
            "decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "vocab_size": 58101,
            "decoder_vocab_size": 58101, "max_position_embeddings": 512, "pad_token_id": 58100,
            "decoder_start_token_id": 58100, "activation_function": "swish", "scale_embedding": True,
        },
        _LOGITS,
    ),
    Published("clip-vit-base-patch32", "cross", "CLIPModel"),
    Published("siglip-base-patch16-224", "cross", "SiglipModel"),
    Published(
        "detr-resnet-50 at 480", "cross", "DetrForObjectDetection",
        {
            "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "num_labels": 91,
            "backbone_config": {"model_type": "resnet", "out_features": ["stage4"]}, "image_size": 480,
        },
        {"max_batch": 2},
    ),
    Published("vilt-b32-finetuned-vqa", "cross", "ViltForQuestionAnswering", {"num_labels": 3129}),
)  # fmt: skip


def _bert(layers: int, width: int) -> Published:
    sizes = {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 64,
        "intermediate_size": 4 * width,
    }  # fmt: skip
    return Published(f"{layers} layers, {width} wide", "growth", "BertForSequenceClassification", sizes)


GROWTH = {
    "depth": [_bert(layers, 768) for layers in (6, 12, 24, 48)],
    "width": [_bert(12, width) for width in (192, 384, 768, 1536)],
}
"""BERTs that differ in depth alone, and in width alone; one is in both."""
