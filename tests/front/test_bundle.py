"""A bundle is complete or refused; a failed deploy leaves no files and loses none."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import attnforge
from attnforge.bundle import MANIFEST, Bundle, DimSpec, Manifest, TensorSpec, writing
from attnforge.bundle.schema import SCHEMA_VERSION
from attnforge.errors import AttnforgeError, BundleError, UnavailableError, UnknownNameError, UsageError
from attnforge.export.diagnosis.stages import stages
from attnforge.export.graphs.types import FLOAT
from attnforge.files import sha256
from attnforge.model.registry import build_model
from attnforge.runtime.cases import make_inputs
from tests.support.bundles import DeploySmall, rewrite, small_example


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change only the manifest's JSON."""
    document = json.loads((folder / MANIFEST).read_text())
    change(document)
    (folder / MANIFEST).write_text(json.dumps(document))


def contents(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): sha256(file) for file in sorted(folder.rglob("*")) if file.is_file()}


# The manifest


def test_manifest_says_what_is_there(small: DeploySmall) -> None:
    bundle = small("fp16")
    manifest = bundle.manifest
    assert Manifest.model_validate_json(manifest.model_dump_json()) == manifest
    assert manifest == Manifest.model_validate_json((bundle.path / MANIFEST).read_text())
    assert (manifest.name, manifest.precision, manifest.schema_version) == ("small", "fp16", SCHEMA_VERSION)
    assert manifest.files == {name: digest for name, digest in contents(bundle.path).items() if name != MANIFEST}
    assert {"canonical.onnx", "onnxruntime/model.onnx", "tensorrt/model.onnx"} <= set(manifest.files)
    assert set(manifest.targets) == {"onnxruntime", "openvino", "tensorrt_rtx"}
    (engine,) = manifest.targets["tensorrt_rtx"].engines
    assert bundle.file(engine.file).stat().st_size == engine.size > 0
    assert manifest.tools["torch"] and manifest.tools["tensorrt_rtx"] == engine.version


def test_manifest_gives_names_types_and_ranges(small: DeploySmall) -> None:
    inputs = {spec.name: spec for spec in small("fp16").manifest.inputs}
    assert [spec.text() for spec in inputs.values()] == [
        "float16[batch, tokens, 16]",
        "float16[batch, 2*pairs, 16]",
        "bool[batch, 2*pairs]",
        "int64[16]",
    ]
    assert inputs["x"].dims[1] == DimSpec(symbol="tokens", min=2, opt=5, max=9)
    assert inputs["memory"].dims[1] == DimSpec(symbol="pairs", factor=2, min=2, opt=6, max=12)
    assert (inputs["kinds"].low, inputs["kinds"].high) == (-2, 2)
    (output,) = small("fp16").manifest.outputs
    assert output.text() == "float16[batch, tokens, 16]"
    assert output.dims[:2] == inputs["x"].dims[:2]


def test_records_refuse_what_they_do_not_know() -> None:
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        TensorSpec.model_validate({"name": "x", "dtype": "float32", "dims": [], "colour": "red"})
    with pytest.raises(ValueError, match="valid integer"):
        Manifest.model_validate({"schema_version": "1"})


# Refused bundles


def test_nothing_is_no_bundle(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(BundleError, match=r"no bundle at .*attnforge deploy"):
            Bundle(path)


@pytest.mark.parametrize("name", ["onnxruntime/model.onnx", "tensorrt/engine.tensorrt_rtx.plan", "canonical.onnx"])
def test_an_altered_file_is_refused_before_it_is_used(copy: Path, name: str) -> None:
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises(BundleError, match=f"{name} was altered"):
        Bundle(copy)
    with pytest.raises(BundleError, match=f"{name} was altered"):
        Bundle(copy, lazily=True).file(name)


def test_loading_checks_what_is_run_and_no_more(copy: Path) -> None:
    (copy / "canonical.onnx").write_bytes(b"something else")
    attnforge.load(copy, "onnxruntime-cpu")
    (copy / "onnxruntime/model.onnx").write_bytes(b"something else")
    with pytest.raises(BundleError, match=r"onnxruntime/model\.onnx was altered"):
        attnforge.load(copy, "onnxruntime-cpu")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Bundle]:
    """A bundle with large weights, in the shared file or in the canonical graph."""

    @functools.cache
    def deploy(shelved: bool) -> Bundle:
        module, args, shapes = build_model("multi-head-attention", embed_dim=128, num_heads=4)
        out = tmp_path_factory.mktemp("wide") / "bundle"
        with pytest.MonkeyPatch.context() as patch:
            if shelved:
                patch.setattr("attnforge.export.graphs.saving.SHELVED", 1)
            return attnforge.deploy(module, args, out, shapes, targets=["onnxruntime"], tune=False)

    return deploy


@pytest.mark.xdist_group("wide")
def test_weights_that_graphs_share_are_checked_with_each_of_them(
    wide: Callable[[bool], Bundle], tmp_path: Path
) -> None:
    made = Bundle(shutil.copytree(wide(True).path, tmp_path / "copy"))
    data = bytearray((made.path / "weights.data").read_bytes())
    data[-1] ^= 1
    (made.path / "weights.data").write_bytes(data)
    with pytest.raises(BundleError, match=r"weights\.data was altered"):
        attnforge.load(made.path, "onnxruntime-cpu")


@pytest.mark.xdist_group("wide")
@pytest.mark.parametrize("shelved", [False, True])
def test_the_plain_graph_is_whole(wide: Callable[[bool], Bundle], tmp_path: Path, shelved: bool) -> None:
    """Any tool can check and run it in place; weights are stored once; a bundle with weights as inputs still loads."""
    bundle = Bundle(shutil.copytree(wide(shelved).path, tmp_path / "copy"))
    plain, canonical = bundle.file("plain.onnx"), bundle.file("canonical.onnx")
    assert plain.stat().st_size < 100_000 < (bundle.file("weights.data") if shelved else canonical).stat().st_size
    onnx.checker.check_model(str(plain), full_check=True)
    case = next(case for case in bundle.manifest.cases if case.kind == "normal")
    feeds = make_inputs(case, bundle.manifest.inputs, {})
    by_plain, by_canonical = (ort.InferenceSession(str(file)).run(None, feeds)[0] for file in (plain, canonical))
    np.testing.assert_allclose(by_plain, by_canonical, rtol=1e-4, atol=1e-5)
    assert [*stages(bundle)] == ["plain", "canonical", "onnxruntime"]

    older, weights = ir.load(plain), ir.load(canonical).graph.initializers
    names = [
        name for name, value in older.graph.initializers.items() if isinstance(value.const_value, ir.ExternalTensor)
    ]
    assert len(names) >= 4
    for name in names:
        value = older.graph.initializers.pop(name)
        value.type, value.shape = ir.TensorType(weights[name].dtype or FLOAT), weights[name].shape
        value.const_value = None
        older.graph.inputs.append(value)
    numbers = {name: weights[name].const_value.numpy().copy() for name in names}  # type: ignore[union-attr]
    ir.save(older, plain)
    loaded = stages(rewrite(bundle.path))["plain"].graph
    assert [value.name for value in loaded.inputs] == [spec.name for spec in bundle.manifest.inputs]
    for name in names:
        np.testing.assert_array_equal(loaded.initializers[name].const_value.numpy(), numbers[name])  # type: ignore[union-attr]


def test_a_missing_file_is_refused(copy: Path) -> None:
    (copy / "reference/outputs.safetensors").unlink()
    with pytest.raises(BundleError, match=r"outputs\.safetensors is missing"):
        attnforge.verify(copy)


def test_another_schema_is_refused_before_the_rest_is_read(copy: Path) -> None:
    edit(copy, lambda document: document.update(schema_version=SCHEMA_VERSION + 1, colour="red"))
    with pytest.raises(
        BundleError, match=f"schema version {SCHEMA_VERSION + 1}, this attnforge reads {SCHEMA_VERSION}"
    ):
        Bundle(copy)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda document: document.pop("schema_version"), "schema_version"),
        (lambda document: document.update(schema_version=True), "schema_version"),
        (lambda document: document.pop("precision"), "precision"),
        (lambda document: document["inputs"][0].update(dims="many"), r"inputs\.0\.dims"),
        (lambda document: document["targets"].update(cpu=[]), r"targets\.cpu"),
        (lambda document: document["cases"][0].update(kind="odd"), r"cases\.0\.kind"),
        (lambda document: document.update(outputs=[]), "outputs: there are none"),
    ],
)
def test_an_invalid_manifest_is_refused_with_the_location(
    copy: Path, change: Callable[[Any], object], where: str
) -> None:
    edit(copy, change)
    with pytest.raises(BundleError, match=f"is not a valid manifest: {where}"):
        Bundle(copy)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"no json", b'{"schema_version": 1, "name": "\xff\xfe"}'])
def test_a_manifest_that_is_no_manifest_is_refused(copy: Path, data: bytes) -> None:
    (copy / MANIFEST).write_bytes(data)
    with pytest.raises(BundleError, match="is not a valid manifest"):
        Bundle(copy)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "onnxruntime/../../outside"])
def test_files_outside_the_bundle_are_refused(copy: Path, name: str) -> None:
    (copy.parent / "outside").write_text("x")
    edit(copy, lambda document: document["files"].update({name: sha256(copy.parent / "outside")}))
    with pytest.raises(BundleError, match="outside the bundle"):
        Bundle(copy)


def test_a_link_out_of_the_bundle_is_refused(copy: Path) -> None:
    model = copy / "onnxruntime/model.onnx"
    model.rename(copy.parent / "model.onnx")
    model.symlink_to(copy.parent / "model.onnx")
    with pytest.raises(BundleError, match="outside the bundle"):
        Bundle(copy)


@pytest.mark.parametrize(
    ("name", "why"),
    [("../outside.onnx", "'../outside.onnx' is outside the bundle"), ("unlisted.onnx", "has no unlisted.onnx")],
)
def test_only_listed_files_are_ever_opened(copy: Path, name: str, why: str) -> None:
    for file in (copy.parent / "outside.onnx", copy / "unlisted.onnx"):
        file.write_bytes((copy / "onnxruntime/model.onnx").read_bytes())
    edit(copy, lambda document: document["targets"]["onnxruntime"].update(model=name))
    with pytest.raises(BundleError, match=why):
        attnforge.load(copy, "onnxruntime-cpu")


# Writing


def test_a_bundle_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "er" / "bundle"
    with writing(out, force=False) as folder:
        (folder / "file").write_text("new")
        assert not out.exists()
        assert folder.parent == out.parent  # on one file system, or the rename would not be atomic
    assert (out / "file").read_text() == "new"
    assert list(out.parent.iterdir()) == [out]


def test_an_existing_folder_is_kept_without_force(copy: Path) -> None:
    before = contents(copy)
    with pytest.raises(UsageError, match="force=True"), writing(copy, force=False):
        pytest.fail("nothing must be made when nothing can be kept")
    assert contents(copy) == before


def test_force_replaces_a_bundle(copy: Path) -> None:
    with writing(copy, force=True) as folder:
        (folder / MANIFEST).write_text("new")
        assert Bundle(copy)
    assert contents(copy).keys() == {MANIFEST}
    assert list(copy.parent.iterdir()) == [copy]


def test_force_fills_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with writing(tmp_path / "empty", force=True) as folder:
        (folder / "file").write_text("new")
    assert (tmp_path / "empty" / "file").exists()


@pytest.mark.parametrize("manifest", [None, '{"name": "a web app", "icons": []}'])
def test_force_never_deletes_what_is_no_bundle(tmp_path: Path, manifest: str | None) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "holiday.jpg").write_bytes(b"irreplaceable")
    if manifest is not None:
        (folder / MANIFEST).write_text(manifest)
    with pytest.raises(UsageError, match="not a bundle"), writing(folder, force=True) as new:
        (new / "file").write_text("new")
    assert (folder / "holiday.jpg").read_bytes() == b"irreplaceable"


def test_force_never_deletes_a_file(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not a bundle"), writing(tmp_path / "notes.txt", force=True):
        pytest.fail("a file is no bundle")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_force_through_a_link_replaces_what_it_points_to(copy: Path) -> None:
    link = copy.parent / "latest"
    link.symlink_to(copy, target_is_directory=True)
    with writing(link, force=True) as folder:
        (folder / MANIFEST).write_text("new")
    assert (link / MANIFEST).read_text() == "new"
    assert {path.name for path in copy.parent.iterdir()} <= {"copy", "latest"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("stage", ["export", "reference"])
def test_an_interrupted_deploy_leaves_the_old_bundle(copy: Path, error: type[BaseException], stage: str) -> None:
    def interrupt(now: str) -> None:
        if now == stage:
            raise error("stop")

    before = contents(copy)
    module, args, shapes = small_example()
    with pytest.raises(error, match="stop"):
        attnforge.deploy(
            module, args, copy, shapes, targets=["onnxruntime"], tune=False, force=True, progress=interrupt
        )
    assert contents(copy) == before
    assert list(copy.parent.iterdir()) == [copy]
    Bundle(copy)


def test_an_interrupted_first_deploy_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(now: str) -> None:
        if now == "canonicalize":
            raise RuntimeError("stop")

    module, args, shapes = small_example()
    with pytest.raises(RuntimeError, match="stop"):
        attnforge.deploy(
            module, args, tmp_path / "new", shapes, targets=["onnxruntime"], tune=False, progress=interrupt
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"precision": "int3"},
            UnknownNameError,
            "unknown precision 'int3'; known: auto, auto-bf16, auto-fp16, auto-fp8, auto-int4, auto-int8, bf16, fp16, "
            "fp32, fp8, int4, int8, tf32",
        ),
        ({"targets": ["onnx"]}, UnknownNameError, "unknown target 'onnx'; known: onnxruntime, tensorrt, tensorrt_rtx"),
        ({"targets": []}, UsageError, "targets is empty"),
        ({"targets": ["tensorrt"]}, UnavailableError, r"pip install 'attnforge\[tensorrt\]'"),
    ],
)
def test_what_cannot_be_deployed_is_reported_before_anything_is_exported(
    tmp_path: Path, arguments: dict[str, Any], error: type[AttnforgeError], message: str
) -> None:
    module, args, shapes = small_example()
    with pytest.raises(error, match=message):
        attnforge.deploy(module, args, tmp_path / "new", shapes, progress=pytest.fail, **arguments)
    assert list(tmp_path.iterdir()) == []


def test_rewriting_hashes_again(copy: Path) -> None:
    (copy / "canonical.onnx").write_bytes(b"other")
    assert rewrite(copy).manifest.files["canonical.onnx"] == sha256(copy / "canonical.onnx")
