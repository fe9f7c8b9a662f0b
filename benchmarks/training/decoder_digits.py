"""Train a decoder to write scikit-learn's handwritten digits, on a CPU, in less than five minutes.

``python -m benchmarks.training.decoder_digits --out FILE`` writes the weights as safetensors in float16 and the
tokenizer next to them, and prints how well held-out scans are predicted and how many of the digits that it writes a
classifier reads as the requested ones. It produced the files that ship with the package,
``model/weights/decoder-digits.safetensors`` and ``model/weights/decoder-digits.tokenizer.json``.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from attnforge.errors import UnavailableError
from attnforge.model.data import DigitsSplit, load_digits_split
from attnforge.model.decoder import CausalAttention, Decoder, SwiGLU
from attnforge.model.decoder_digits import CHARACTERS, CLASSES, END, INK, PROMPT, TOKENS, tokens_of
from attnforge.model.registry import DECODER_DIGITS, build_model
from benchmarks.training.digits import Out, Seed
from tests.support.decoders import generate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers import Tokenizer

DROPPED = (CausalAttention, SwiGLU)
DROPOUT = 0.2


def image_of(tokens: Tensor) -> Tensor | None:
    """Return the image (1, 8, 8) in [0, 1] of one scan's tokens (TOKENS,), or None if they are not a valid scan."""
    rows = tokens[2:-1].view(8, 9)
    ink = rows[:, :8] - len(CLASSES)
    image = ink.float().unsqueeze(0) / 16
    whole = ((ink >= 0) & (ink < len(INK))).all() and 0 <= tokens[0] < len(CLASSES)
    return image if whole and torch.equal(tokens_of(image[None], tokens[:1])[0], tokens) else None


def text_of(tokens: Tensor) -> str:
    """Return the text of tokens (n,) as the tokenizer decodes them, without the end token."""
    return "".join(CHARACTERS[token] for token in tokens.tolist() if token != END)


def make_tokenizer() -> Tokenizer:
    """Return the tokenizer of these texts: one token per character, and decode(encode(text)) is the text.

    Text with any other character has no encoding. Raises UnavailableError without the library ``tokenizers``.
    """
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise UnavailableError(
            "the tokenizer needs the library tokenizers, which is not installed; pip install 'attnforge[hf]'"
        ) from error
    vocabulary = {character: token for token, character in enumerate(CHARACTERS)} | {"<end>": END}
    tokenizer = Tokenizer(
        models.WordLevel(vocabulary, unk_token="<none>")
    )  # not in the vocabulary, so that other characters fail
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    return tokenizer


@contextmanager
def dropout(model: Decoder, share: float, generator: torch.Generator) -> Iterator[None]:
    """In the block, zero a share of the outputs of attention and feed-forward layers, and scale up the rest."""

    def drop(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output * (torch.rand(output.shape, generator=generator) >= share) / (1 - share)

    parts = [part for layer in model.layers for part in layer.children() if isinstance(part, DROPPED)]
    hooks = [part.register_forward_hook(drop) for part in parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def loss_of(model: Decoder, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats per token, of everything after the class and its newline."""
    logits = model(tokens[:, :-1])  # (N, TOKENS - 1, vocab_size)
    return F.cross_entropy(logits[:, PROMPT - 1 :].flatten(0, 1), tokens[:, PROMPT:].flatten())


def train(split: DigitsSplit, epochs: int = 40, batch_size: int = 32, seed: int = 0) -> Decoder:
    """Train a decoder with AdamW, a one-cycle learning rate, dropout and random sideways shifts; returned in eval mode.

    Its weights are rounded to float16, in which they are stored.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = Decoder(DECODER_DIGITS)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
    generator = torch.Generator().manual_seed(seed)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    gains = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.98))
    steps = -(-len(split.train_labels) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=epochs * steps, pct_start=0.1)
    for _ in range(epochs):
        for rows in torch.randperm(len(split.train_labels), generator=generator).chunk(steps):
            images = moved_sideways(split.train_images[rows], generator)
            with dropout(model, DROPOUT, generator):
                loss = loss_of(model, tokens_of(images, split.train_labels[rows]))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return model.half().float().eval()


def moved_sideways(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift a third of the images (N, 1, 8, 8) by one pixel to the left or the right, filling with zeros.

    Scans touch their upper and lower edge. Shifted up or down they would not, and the most likely first row of any
    digit would be an empty one, after which the most likely image is empty.
    """
    padded = F.pad(images, (1, 1)).squeeze(1)  # (N, 8, 10)
    left = torch.tensor([0, 1, 1, 1, 1, 2])[torch.randint(0, 6, (len(images), 1, 1), generator=generator)]
    samples, rows, columns = torch.arange(len(images))[:, None, None], torch.arange(8)[:, None], torch.arange(8)
    return padded[samples, rows, left + columns].unsqueeze(1)


def bits_per_token(model: Decoder, split: DigitsSplit) -> float:
    """Return the mean bits per token of the held-out scans, given their class."""
    with torch.inference_mode():
        return float(loss_of(model, tokens_of(split.test_images, split.test_labels))) / math.log(2)


def write_digits(model: Decoder, each: int = 20, temperature: float = 1.0, seed: int = 0) -> Tensor:
    """Return digits that the model writes, as tokens (10 · each, TOKENS): zeros first, nines last."""
    labels = torch.arange(len(CLASSES)).repeat_interleave(each)
    prompt = torch.stack([labels, torch.full_like(labels, CHARACTERS.index("\n"))], dim=1)
    generator = torch.Generator().manual_seed(seed)
    written = generate(model, prompt, TOKENS - PROMPT, temperature=temperature, generator=generator)
    return torch.cat([prompt, written], dim=1)


def share_read(tokens: Tensor, classifier: nn.Module) -> float:
    """Return the share of digits (N, TOKENS) that are well formed and that an image classifier reads as their class."""
    images = [(digit[0], image) for digit in tokens if (image := image_of(digit)) is not None]
    with torch.inference_mode():
        return sum(int(classifier(image[None]).argmax() == label) for label, image in images) / len(tokens)


def main(out: Out, epochs: int = 40, seed: Seed = 0) -> None:
    """Train the decoder, print what it learnt, and write the weights and the tokenizer."""
    tokenizer = make_tokenizer()
    split = load_digits_split()
    model = train(split, epochs, seed=seed)
    print(f"held-out {bits_per_token(model, split):.4f} bits per token on {len(split.test_labels)} scans")
    classifier = build_model("patch-attention-digits").module
    for name, each, temperature in ("greedy", 1, 0.0), ("sampled", 50, 1.0):
        digits = write_digits(model, each, temperature)
        print(f"{name} {share_read(digits, classifier):.3f} of {len(digits)} digits read as the requested class")
    print(text_of(write_digits(model, 1, 1.0).flatten()))
    save_file({name: tensor.half() for name, tensor in model.state_dict().items()}, out)
    tokenizer.save(str(out.with_suffix(".tokenizer.json")))


if __name__ == "__main__":
    typer.run(main)
