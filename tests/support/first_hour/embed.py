"""Sentences embedded by all-MiniLM-L6-v2 in 8 bits, whose ranges come from a file of texts."""

from pathlib import Path

import numpy as np

import attnforge

bundle = attnforge.deploy(
    "hf:minilm", precision="int8", data="calibrate.txt", metric="cosine", least=0.995, targets="onnxruntime",
    tune=False, model_options={"max_tokens": 128},
)  # fmt: skip
report = attnforge.verify(bundle)
texts = Path("texts.txt").read_text().splitlines()
with attnforge.load(bundle) as session:
    batches = [session.tokenize(texts[i : i + 8]) for i in range(0, len(texts), 8)]
    embeddings = np.concatenate([session(**batch) for batch in batches])
