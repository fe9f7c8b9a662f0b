"""all-MiniLM-L6-v2 with its trained weights in 8 bits, on real sentences that were not used for calibration."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from attnforge.export.sources.named import build
from attnforge.export.sources.widened import Float64
from benchmarks.experiments.eight_bits import sentences, tokenized
from tests.support.first_hour import run_job
from tests.support.huggingface import minilm

CALIBRATING, TRIED = 16, 208


def test_embeddings_of_real_sentences_are_preserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cosine to float64, of ids by transformers' own tokenizer, is at least 0.99; no product is in fp32, and the
    weights of products take a quarter of the memory."""
    texts = sentences(CALIBRATING + TRIED)
    assert len(texts) == CALIBRATING + TRIED
    (tmp_path / "minilm").symlink_to(minilm())
    (tmp_path / "calibrate.txt").write_text("\n".join(texts[:CALIBRATING]))
    (tmp_path / "texts.txt").write_text("\n".join(texts[CALIBRATING:]))
    job = run_job("embed", tmp_path, monkeypatch)
    manifest = job["bundle"].manifest
    assert manifest.name == "minilm" and job["report"].passed
    quantised = manifest.quantised
    assert quantised.kept == {} and len(quantised.products) == 36
    assert quantised.share > 0.9 and manifest.targets["onnxruntime"].low_bit == 36
    example = build("hf:minilm", {"max_tokens": 128}, None)[0]
    exact, names = Float64(example.module), list(example.dynamic_shapes or ())
    outputs = [exact(feeds)["sentence_embedding"] for feeds in tokenized(texts[CALIBRATING:], names)]
    truth, got = torch.cat(outputs).detach().numpy(), job["embeddings"]
    assert got.shape == truth.shape == (TRIED, 384)
    norms = np.linalg.norm(got, axis=-1) * np.linalg.norm(truth, axis=-1)
    assert (np.sum(got * truth, axis=-1) / norms).min() >= 0.99
