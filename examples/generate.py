"""A decoder that writes digits, token by token: deployed with a cache, verified, and asked for a few.

python examples/generate.py [CLASS …]
"""

import sys
from pathlib import Path

import attnforge
from attnforge.model import MODELS, build_model


def main(classes: list[str]) -> None:
    model = MODELS["decoder-digits"]  # trained on scikit-learn's scans, which are 8 × 8 levels of ink
    module, args, shapes = build_model(model.name)
    bundle = attnforge.deploy(
        module, args, Path("digits.bundle"), shapes, cache_tokens=128, tokenizer=model.tokenizer, stop=model.stop,
        targets=["onnxruntime"], tune=False, force=True,
    )  # fmt: skip
    print("passed" if attnforge.verify(bundle).passed else "over the budget")

    with attnforge.load(bundle) as session:
        tokenizer = session.tokenizer
        prompts = [tokenizer.ids(f"{name}\n") for name in classes]
        written = list(session.generate(prompts, 73, temperature=0.7, seed=3))  # all classes at once
        digits = [[int(token) for token in tokens if token >= 0] for tokens in zip(*written, strict=True)]
        for row in zip(*(tokenizer.text(digit).splitlines() for digit in digits), strict=False):
            print("   ".join(row))


if __name__ == "__main__":
    main(sys.argv[1:] or ["3", "7", "0"])
