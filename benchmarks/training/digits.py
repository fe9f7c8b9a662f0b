"""Train the patch-attention classifier on scikit-learn's handwritten digits, on a CPU, in about a minute.

``python -m benchmarks.training.digits --out FILE`` writes the weights as safetensors and prints the held-out accuracy.
It produced the file that ships with the package, ``model/weights/patch-attention-digits.safetensors``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from attnforge.model.data import DigitsSplit, load_digits_split
from attnforge.model.patch import PatchAttentionClassifier


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift every image (N, 1, 8, 8) by -1, 0 or 1 pixels along each axis, filling with zeros."""
    padded = F.pad(images, (1, 1, 1, 1)).squeeze(1)  # (N, 10, 10)
    top, left = torch.randint(0, 3, (2, len(images), 1, 1), generator=generator)
    steps = torch.arange(images.shape[-1])
    samples = torch.arange(len(images))[:, None, None]
    return padded[samples, top + steps[:, None], left + steps].unsqueeze(1)


def train(split: DigitsSplit, epochs: int = 150, batch_size: int = 64, seed: int = 0) -> PatchAttentionClassifier:
    """Train a classifier with AdamW, a one-cycle learning rate, label smoothing and random shifts; in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = PatchAttentionClassifier()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    steps = -(-len(split.train_labels) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=epochs * steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(split.train_labels), generator=generator).chunk(steps):
            logits = model(shifted(split.train_images[rows], generator))
            loss = F.cross_entropy(logits, split.train_labels[rows], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return model.eval()


def accuracy(model: PatchAttentionClassifier, images: Tensor, labels: Tensor) -> float:
    """Return the share of images whose highest logit is their label's."""
    with torch.inference_mode():
        return float((model(images).argmax(-1) == labels).double().mean())


Out = Annotated[Path, typer.Option(help="The safetensors file to write.")]
Seed = Annotated[int, typer.Option(help="Seed of the weights and the shuffling; the split is fixed.")]


def main(out: Out, epochs: int = 150, seed: Seed = 0) -> None:
    """Train the classifier, print its accuracies, and write the weights."""
    split = load_digits_split()
    model = train(split, epochs, seed=seed)
    for name, images, labels in ("train", split.train_images, split.train_labels), ("held-out", *split[2:]):
        print(f"{name} accuracy {accuracy(model, images, labels):.4f} on {len(labels)} images")
    save_file(model.state_dict(), out)


if __name__ == "__main__":
    typer.run(main)
