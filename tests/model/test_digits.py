"""The trained digits classifier: data, shifts, training and accuracy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import typer

from attnforge.errors import UnavailableError
from attnforge.model import MODELS, build_model
from attnforge.model.data import load_digits_split
from attnforge.model.patch import PatchAttentionClassifier
from benchmarks.training import digits


def test_digits_are_classified() -> None:
    pytest.importorskip("sklearn")
    split = load_digits_split()
    module = build_model("patch-attention-digits").module
    assert isinstance(module, PatchAttentionClassifier)
    assert digits.accuracy(module, split.test_images, split.test_labels) >= 0.975
    assert digits.accuracy(module, split.test_images.flip(-1), split.test_labels) < 0.8  # pixel positions matter
    weights = MODELS["patch-attention-digits"].weights
    assert weights is not None and weights.stat().st_size < 1_000_000


def test_digits_split_is_fixed_disjoint_and_stratified() -> None:
    pytest.importorskip("sklearn")
    split, again = load_digits_split(), load_digits_split()
    assert all(torch.equal(a, b) for a, b in zip(split, again, strict=True))
    assert split.train_images.shape == (1347, 1, 8, 8)
    assert split.test_images.shape == (450, 1, 8, 8)
    assert split.train_images.dtype == torch.float32
    assert (split.train_images.min().item(), split.train_images.max().item()) == (0, 1)
    counts = torch.bincount(torch.cat([split.train_labels, split.test_labels]))
    assert ((torch.bincount(split.test_labels) / counts - 0.25).abs() < 0.01).all()
    train, test = ({image.numpy().tobytes() for image in images} for images in (split.train_images, split.test_images))
    assert not train & test


def test_shifts_move_by_at_most_one_pixel() -> None:
    image = torch.zeros(500, 1, 8, 8)
    image[:, 0, 3, 4] = 1
    moved = digits.shifted(image, torch.Generator().manual_seed(0))
    positions = {tuple(position) for position in moved[:, 0].nonzero()[:, 1:].tolist()}
    assert positions == {(row, column) for row in (2, 3, 4) for column in (3, 4, 5)}
    assert torch.equal(moved.sum((1, 2, 3)), torch.ones(500))
    edge = torch.zeros(500, 1, 8, 8)
    edge[:, 0, 0] = 1  # shifting up drops the row; nothing wraps around
    assert (digits.shifted(edge, torch.Generator().manual_seed(0))[:, 0, 7] == 0).all()


def test_training_command_writes_weights_that_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for file in files:
        monkeypatch.setattr("sys.argv", ["digits", "--out", str(file), "--epochs", "1"])
        with pytest.raises(SystemExit, match=r"^0$"):
            typer.run(digits.main)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert "held-out accuracy 0." in capsys.readouterr().out
    fresh = build_model("patch-attention-digits", weights=files[0]).module.state_dict()
    shipped = build_model("patch-attention-digits").module.state_dict()
    assert not torch.equal(fresh["head.weight"], shipped["head.weight"])


def test_the_error_without_scikit_learn_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(UnavailableError, match=r"pip install 'attnforge\[data\]'"):
        load_digits_split()
