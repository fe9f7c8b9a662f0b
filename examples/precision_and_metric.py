"""The cheapest precision that a task bears: 16 bits where they do no harm, fp32 where accuracy needs it.

python examples/precision_and_metric.py [FOLDER]
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.export import Dim

import attnforge


class Classifier(nn.Module):
    """A classifier of sequences whose stream grows large in the middle, as some trained transformers' do."""

    def __init__(self, width: int = 32, classes: int = 4) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 2, 64, batch_first=True, norm_first=True)
        self.up, self.norm, self.head = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, classes)
        nn.init.normal_(self.up.weight, std=5e4)  # beyond fp16's 65504

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, tokens, width) → (batch, classes)
        return self.head(self.norm(self.up(self.layer(x).mean(1))))


def main(folder: Path) -> None:
    torch.manual_seed(0)
    model = Classifier().eval()
    inputs = torch.randn(100, 10, 32)
    with torch.no_grad():
        labels = model(inputs).argmax(-1)  # yours come with your data
    bundle = attnforge.deploy(
        model, (inputs[:2],), folder / "classifier.bundle", ({0: Dim("batch", min=1, max=128)},), precision="auto",
        data=[(inputs,)], labels=[labels], metric="accuracy", least=0.97, targets=["onnxruntime"], tune=False,
        force=True,
    )  # fmt: skip
    mixed = bundle.manifest.mixed
    assert mixed is not None
    print(f"{mixed.low_flops:.0%} of the products' operations in {mixed.low}, after {mixed.trials} trials")
    for region in mixed.regions:
        print(f"fp32 in {region.module}: {region.why}")
    for name, backend in attnforge.verify(bundle).backends.items():  # the metric is part of every verification
        assert backend.metric is not None
        print(f"{name}: {backend.metric.text()}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
