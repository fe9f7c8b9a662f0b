"""Pictures become what transformers' image processors make of them, or are refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from sklearn.datasets import load_sample_images
from typer.testing import CliRunner

import attnforge
from attnforge.bundle import DimSpec, TensorSpec
from attnforge.cli import app
from attnforge.errors import InputError, UsageError
from attnforge.pictures import ImageProcessor, image_to_input

PICTURES = [Image.fromarray(array) for array in load_sample_images().images]
BATCH = DimSpec(symbol="batch", min=1, opt=2, max=3)
PIXELS = TensorSpec(name="pixel_values", dtype="float32", dims=[BATCH, 3, 224, 224])

Make = Callable[..., Any]
MADE: dict[str, tuple[Make, dict[str, Any]]] = {
    "ViT": (transformers.ViTImageProcessor, {}),
    "ViT, bicubic, not normalised": (transformers.ViTImageProcessor, {"resample": 3, "do_normalize": False}),
    "ViT, without resizing": (transformers.ViTImageProcessor, {"do_resize": False}),
    "DeiT": (transformers.DeiTImageProcessor, {}),
    "CLIP": (transformers.CLIPImageProcessor, {}),
    "CLIP, smaller than its crop": (transformers.CLIPImageProcessor, {"size": {"shortest_edge": 101}}),
    "CLIP, without a crop": (transformers.CLIPImageProcessor, {"do_center_crop": False}),
    "DINOv2": (transformers.BitImageProcessor, {"size": {"shortest_edge": 256}}),
    "SigLIP": (transformers.SiglipImageProcessor, {}),
    "BEiT": (transformers.BeitImageProcessor, {"do_center_crop": True}),
    "not rescaled": (transformers.ViTImageProcessor, {"do_rescale": False}),
}


def settings(**changed: Any) -> bytes:
    known = {
        "image_processor_type": "ViTImageProcessor", "do_resize": True, "size": 224, "resample": 2,
        "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    return json.dumps({k: v for k, v in (known | changed).items() if v is not ...}).encode()


@pytest.mark.parametrize("name", MADE)
def test_pictures_become_what_transformers_makes_of_them(name: str, tmp_path: Path) -> None:
    make, options = MADE[name]
    theirs = make(**options)
    theirs.save_pretrained(tmp_path)
    ours = ImageProcessor.of((tmp_path / "preprocessor_config.json").read_bytes())
    for picture in (*PICTURES, PICTURES[0].rotate(90, expand=True), PICTURES[1].convert("L")):
        expected = theirs(picture.convert("RGB"), return_tensors="np")["pixel_values"][0]
        np.testing.assert_allclose(ours.pixels(picture), expected, rtol=2e-6, atol=2e-6)


def test_sizes_of_older_files_are_one_number() -> None:
    """The side of a square, or the shorter edge, by the kind of processor."""
    written = settings(do_center_crop=None, crop_size=None, default_to_square=True, data_format="channels_first")
    assert ImageProcessor.of(written).pixels(PICTURES[0]).shape == (3, 224, 224)
    for kind, shape in (("ViTFeatureExtractor", (3, 64, 64)), ("CLIPFeatureExtractor", (3, 64, 95))):
        older = settings(image_processor_type=..., feature_extractor_type=kind, size=64)
        assert ImageProcessor.of(older).pixels(PICTURES[0]).shape == shape


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"image_processor_type": "ConvNextImageProcessor"}, "is of another processor"),
        ({"crop_pct": 0.9}, "has crop_pct"),
        ({"do_pad": True}, "has do_pad"),
        ({"image_mean": ...}, "does not say image_mean"),
        ({"do_center_crop": True}, "does not say crop_size"),
        ({"size": 2**30}, "size"),
        ({"size": {"longest_edge": 8}}, "size"),
        ({"image_std": [1, 1]}, "image_std"),
        ({"image_std": [1, 0, 1]}, "image_std"),
        ({"image_std": [1e-50] * 3}, "says [1e-50, 1e-50, 1e-50] for image_std"),
        ({"image_mean": [0, float("nan"), 0]}, "image_mean"),
        ({"image_mean": [1e300] * 3}, "image_mean"),
        ({"rescale_factor": 1e300}, "rescale_factor"),
        ({"size": True}, "size"),
        ({"data_format": "channels_last"}, "has data_format"),
        ({"image_processor_type": ...}, "no image_processor_type"),
        ({"do_resize": ...}, "do_resize"),
        ({"resample": 9}, "resample"),
    ],
    ids=str,
)
def test_what_is_done_otherwise_is_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError) as refused:
        image_to_input(PIXELS, PICTURES[0], settings(**changed))
    assert reason in str(refused.value) and str(refused.value).endswith("transformers' AutoImageProcessor")


def test_another_size_than_the_model_takes_is_refused() -> None:
    with pytest.raises(InputError, match=r"makes \[3, 64, 64\] of a picture; the model takes float32\[batch, 3, 224"):
        image_to_input(PIXELS, PICTURES[0], settings(size=64))
    narrow = settings(image_processor_type="CLIPImageProcessor", size={"shortest_edge": 2**14})
    with pytest.raises(InputError, match=r"makes 16384 × 16384000 pixels of a picture; 16,777,216 are allowed"):
        image_to_input(PIXELS, Image.new("RGB", (1, 1000)), narrow)
    with pytest.raises(InputError, match="no defined range"):
        image_to_input(PIXELS, Image.fromarray(np.zeros((4, 4), np.int32)), settings())
    with pytest.raises(InputError, match="take 8-bit pictures, and this one is I;16"):
        image_to_input(PIXELS, Image.fromarray(np.zeros((4, 4), np.uint16)), settings())


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small ViT of random weights and its image processor, and one with pictures."""
    folder = tmp_path_factory.mktemp("pictures") / "small-vit"
    transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8,
        architectures=["ViTForImageClassification"],
    ).save_pretrained(folder)  # fmt: skip
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    (photos := folder.parent / "photos").mkdir()
    for i in range(5):
        PICTURES[i % 2].rotate(20 * i).save(photos / f"{i}.png")
    (photos / "notes.md").write_text("not a picture")
    return folder


def test_a_folder_of_pictures_calibrates_and_a_picture_runs(vit: Path, tmp_path: Path) -> None:
    photos, bundle, out = vit.parent / "photos", tmp_path / "bundle", tmp_path / "out.npz"
    deployed = attnforge.deploy(
        f"hf:{vit}", out=bundle, precision="int8", max_error=0.3, data=str(photos), targets="onnxruntime", tune=False,
        model_options={"max_batch": 3},
    )  # fmt: skip
    sizes = [case.sizes["batch"] for case in deployed.manifest.cases if case.kind == "data"]
    assert sorted(sizes) == [2, 3]
    done = CliRunner().invoke(app, ["run", str(bundle), str(photos / "0.png"), "--out", str(out)])
    assert done.exit_code == 0, done.output
    theirs = transformers.ViTImageProcessor.from_pretrained(vit)(PICTURES[0], return_tensors="np")["pixel_values"]
    with attnforge.load(bundle) as session:
        np.testing.assert_allclose(np.load(out)["logits"], session(theirs), atol=1e-5)


def test_pictures_that_no_model_takes_are_refused_before_the_export(vit: Path, tmp_path: Path) -> None:
    photos = vit.parent / "photos"
    with pytest.raises(UsageError, match="texts and pictures have none"):
        attnforge.deploy(f"hf:{vit}", out=tmp_path / "bundle", data=str(photos), labels=[[1] * 5])
    (empty := tmp_path / "empty").mkdir()
    for path in (empty, tmp_path / "absent.png", vit / "config.json"):
        done = CliRunner().invoke(app, ["deploy", f"hf:{vit}", "--calibrate", str(path)])
        assert isinstance(done.exception, UsageError) and "has no real inputs; give an .npz" in str(done.exception)
