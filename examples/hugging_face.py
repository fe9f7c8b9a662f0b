"""A Hugging Face BERT by its configuration: no download, random weights; a folder with weights works the same.

python examples/hugging_face.py [FOLDER]
"""

import sys
from pathlib import Path

import numpy as np
from transformers import BertConfig

import attnforge
from attnforge.export.sources.huggingface import example


def main(folder: Path) -> None:
    config = BertConfig(
        vocab_size=1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        architectures=["BertModel"],
    )  # fmt: skip
    config.save_pretrained(folder / "bert")  # or a folder that you have
    model = example(folder / "bert", attention="eager", max_batch=4, max_tokens=64)  # what hf:FOLDER does in a shell
    # Leave tune=False out, and deploy measures which form and which backend are fastest on this machine.
    bundle = attnforge.deploy(
        model.module, model.args, folder / "bert.bundle", model.dynamic_shapes, name="bert", tune=False, force=True
    )
    print(bundle.manifest.attention.fused, "of", bundle.manifest.attention.sites)
    print("passed" if attnforge.verify(bundle).passed else "over the budget")

    with attnforge.load(bundle) as session:
        print({spec.name: spec.text() for spec in session.inputs})
        tokens = np.random.default_rng(0).integers(0, 1000, (3, 20))
        feeds = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "token_type_ids": np.zeros_like(tokens)}
        outputs = session.run({spec.name: feeds[spec.name] for spec in session.inputs})
        print({name: array.shape for name, array in outputs.items()})


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
