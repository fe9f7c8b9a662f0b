"""Plans built again from the bundle's own model, by the real builder: for another version or device, or a new file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import attnforge
from attnforge.bundle import Bundle, Manifest
from attnforge.errors import BundleError, UnavailableError, UsageError
from attnforge.export.tensorrt.build import build
from attnforge.export.tensorrt.rebuild import fits, rebuild, rebuilt
from attnforge.machine import cuda_devices
from tests.support.bundles import rewrite, small_example

pytest.importorskip("tensorrt_rtx")
RTX = "tensorrt_rtx"
PLAN = "tensorrt/engine.tensorrt_rtx.plan"


@pytest.fixture
def half(small: Callable[[str], Bundle], tmp_path: Path) -> Bundle:
    """A copy of the small fp16 bundle, whose attention TensorRT-RTX fuses."""
    return Bundle(shutil.copytree(small("fp16").path, tmp_path / "half"))


def test_a_plan_for_another_device_is_added_and_the_old_one_stays(half: Bundle) -> None:
    assert fits(half, RTX, "SM86") and not fits(half, RTX, "SM75")
    again = rebuild(half, RTX, "SM75")
    engines = again.manifest.targets[RTX].engines
    assert [engine.compute_capabilities for engine in engines] == [["portable"], ["SM75"]]
    assert engines[1].file == f"tensorrt/engine.tensorrt_rtx-{engines[1].version}-sm75.plan"
    assert fits(again, RTX, "SM75") and fits(again, RTX, "SM86")
    assert Bundle(half.path).manifest == again.manifest  # whole: every file has the manifest's sha256
    assert again.file(PLAN).read_bytes() == half.file(PLAN).read_bytes()
    assert again.manifest.attention.fused[RTX] == again.manifest.attention.sites == 1
    assert attnforge.verify(half.path, ["onnxruntime-cpu"]).passed
    assert not list(half.path.rglob(".*"))


def test_two_devices_rebuild_at_once_and_both_plans_stay(half: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one builds, another process adds its plan."""
    real, other = build, Bundle(half.path)

    def slow(*arguments: Any) -> Any:
        monkeypatch.setattr("attnforge.export.tensorrt.rebuild.build", real)
        rebuild(other, RTX, "SM75")
        return real(*arguments)

    monkeypatch.setattr("attnforge.export.tensorrt.rebuild.build", slow)
    engines = rebuild(half, RTX, "SM86").manifest.targets[RTX].engines
    assert [engine.compute_capabilities for engine in engines] == [["portable"], ["SM75"], ["SM86"]]
    assert len({engine.file for engine in engines}) == 3
    Bundle(half.path)


def test_a_plan_is_not_written_through_a_link(half: Bundle) -> None:
    (half.path / "tensorrt").rename(half.path.parent / "elsewhere")
    (half.path / "tensorrt").symlink_to(half.path.parent / "elsewhere", target_is_directory=True)
    before = sorted((half.path.parent / "elsewhere").iterdir())
    with pytest.raises(BundleError):
        rebuild(Bundle(half.path, lazily=True), RTX, "SM86")
    assert sorted((half.path.parent / "elsewhere").iterdir()) == before


def test_a_device_that_the_builder_does_not_know_gets_the_portable_plan(half: Bundle) -> None:
    none = rewrite(half.path, lambda manifest: manifest.targets[RTX].engines.clear())
    engines = rebuild(none, RTX, "SM90").manifest.targets[RTX].engines
    assert [engine.compute_capabilities for engine in engines] == [["portable"]]


def test_an_altered_plan_is_replaced(half: Bundle) -> None:
    data = bytearray(half.file(PLAN).read_bytes())
    data[100] ^= 255
    half.file(PLAN).write_bytes(data)
    with pytest.raises(
        BundleError, match=r"was altered .*; do not use it; build it again with load\(…, rebuild=True\)"
    ):
        Bundle(half.path)
    lenient = Bundle(half.path, check_plans=False)
    assert not fits(lenient, RTX, "SM80")
    again = rebuild(lenient, RTX, "SM80")
    assert fits(again, RTX, "SM80") and [e.compute_capabilities for e in again.manifest.targets[RTX].engines] == [
        ["SM80"]
    ]
    assert Bundle(half.path).manifest == again.manifest and not (half.path / PLAN).exists()


def test_a_missing_plan_is_built(half: Bundle) -> None:
    half.file(PLAN).unlink()
    with pytest.raises(BundleError, match=r"is missing; copy the bundle again, or build it again"):
        Bundle(half.path)
    assert rebuild(Bundle(half.path, check_plans=False), RTX, "SM89").manifest == Bundle(half.path).manifest


def test_a_plan_of_another_version_is_kept_next_to_the_new_one(half: Bundle) -> None:
    def age(manifest: Manifest) -> None:
        manifest.targets[RTX].engines[0].version = "1.0.0"

    old = rewrite(half.path, age)
    assert not fits(old, RTX, "SM80")
    again = rebuild(old, RTX, "SM80")
    assert [e.version for e in again.manifest.targets[RTX].engines] == [
        "1.0.0",
        half.manifest.targets[RTX].engines[0].version,
    ]
    assert fits(again, RTX, "SM80")


def test_an_altered_model_is_never_built_from(half: Bundle) -> None:
    model = half.file(half.manifest.targets[RTX].model)
    model.write_bytes(model.read_bytes() + b"\0")
    with pytest.raises(BundleError, match=r"model\.onnx was altered .*deploy the model again"):
        rebuilt(half.path, RTX)


def test_for_auto_another_users_plan_is_built_again(
    half: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan may run code: only this user's own plans are loaded without being named."""
    assert fits(half, RTX, "SM89") and fits(half, RTX, "SM89", trusted=True)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    assert fits(half, RTX, "SM89") and not fits(half, RTX, "SM89", trusted=True)
    again = rebuild(half, RTX, "SM89")
    assert fits(again, RTX, "SM89", trusted=True), "of two plans for a device, the one that was built last"


def test_profiles_are_in_the_plan_and_in_the_manifest_and_are_built_again(tmp_path: Path) -> None:
    module, args, shapes = small_example()
    further = [{"batch": (1, 1, 1)}, {"batch": (1, 1, 1), "tokens": (9, 9, 9)}]
    bundle = attnforge.deploy(
        module, args, tmp_path / "b", shapes, targets=[RTX], profiles=further, name="small", tune=False
    )
    engine = bundle.manifest.targets[RTX].engines[0]
    assert engine.profiles == [
        {"batch": (1, 2, 4), "tokens": (2, 5, 9), "pairs": (1, 3, 6)},
        {"batch": (1, 1, 1), "tokens": (2, 5, 9), "pairs": (1, 3, 6)},
        {"batch": (1, 1, 1), "tokens": (9, 9, 9), "pairs": (1, 3, 6)},
    ]
    assert rebuild(bundle, RTX, "SM89").manifest.targets[RTX].engines[1].profiles == engine.profiles


def test_a_profile_outside_the_dims_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    module, args, shapes = small_example()
    with pytest.raises(
        UsageError, match="a profile has batch from 1 over 2 to 5; give min ≤ opt ≤ max within the dim's range, 1 to 4"
    ):
        attnforge.deploy(module, args, tmp_path / "b", shapes, targets=[RTX], profiles=[{"batch": (1, 2, 5)}])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(cuda_devices() > 0, reason="there is a CUDA device")
def test_without_a_device_nothing_is_built_again(half: Bundle) -> None:
    before = half.manifest.model_dump()
    with pytest.raises(UnavailableError, match=f"no CUDA device to build {RTX}'s plan for"):
        attnforge.load(half.path, RTX, rebuild=True)
    with attnforge.load(half.path, rebuild=True) as session:
        assert session.backend == "onnxruntime-cpu"
    assert Bundle(half.path).manifest.model_dump() == before
