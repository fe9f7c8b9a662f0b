"""all-MiniLM-L6-v2 with its trained weights in 8 bits, on real sentences that were not used for calibration."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import attnforge
from attnforge.export.sources.named import build
from attnforge.export.sources.widened import Float64
from benchmarks.experiments.eight_bits import sentences, tokenized
from tests.support.huggingface import minilm

CALIBRATING, TRIED = 16, 208


def test_embeddings_of_real_sentences_are_preserved(tmp_path: Path) -> None:
    """Every cosine to float64 is at least 0.99; no product is in fp32, and the weights of products take a quarter of
    the memory."""
    example = build(f"hf:{minilm()}", {"max_tokens": 128}, None)[0]
    texts = sentences(CALIBRATING + TRIED)
    assert len(texts) == CALIBRATING + TRIED
    names = list(example.dynamic_shapes or ())
    calibrating = tokenized(texts[:CALIBRATING], names)
    bundle = attnforge.deploy(
        example.module, example.args, tmp_path / "b", example.dynamic_shapes, "int8", ["onnxruntime"], tune=False,
        data=calibrating, metric="cosine", least=0.995,
    )  # fmt: skip
    quantised = bundle.manifest.quantised
    assert quantised is not None and quantised.kept == {} and len(quantised.products) == 36
    assert quantised.share > 0.9 and bundle.manifest.targets["onnxruntime"].low_bit == 36
    assert attnforge.verify(bundle, ["onnxruntime-cpu"]).passed
    exact, cosines = Float64(example.module), []
    with attnforge.load(bundle, backend="onnxruntime-cpu") as session:
        for feeds in tokenized(texts[CALIBRATING:], names):
            (got,), (true,) = session.run(feeds).values(), exact(feeds).values()
            truth = true.detach().numpy()
            norms = np.linalg.norm(got, axis=-1) * np.linalg.norm(truth, axis=-1)
            cosines += list(np.sum(got * truth, axis=-1) / norms)
    assert len(cosines) >= TRIED - 8 and min(cosines) >= 0.99
