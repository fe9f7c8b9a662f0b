"""Results of an earlier deploy of the same model are reused from the cache, complete and unaltered, or made again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import attnforge
from attnforge.cache import VARIABLE, DeployCache, _own_code
from attnforge.machine import versions
from tests.support.broken import Attention, made
from tests.support.decoders import PLACES, decoder_example

ABOUT = {"what": "a test"}
HAS_RTX = "tensorrt_rtx" in versions(["tensorrt_rtx"])
TARGETS = ["onnxruntime", *(["tensorrt_rtx"] if HAS_RTX else [])]
ALL = [
    "forms of attention sites", "reference", *(["plan for tensorrt_rtx"] if HAS_RTX else []), "measured backends",
]  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the user's cache."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def deployed(folder: Path, change: Callable[[torch.nn.Module], object] = lambda module: None) -> attnforge.Bundle:
    module, args, shapes = made(Attention)
    change(module)
    return attnforge.deploy(module, args, folder, shapes, targets=TARGETS)


def test_a_second_deploy_makes_nothing_again(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = deployed(tmp_path / "first")
    assert first.manifest.reused == [] and len(list(cache.iterdir())) == len(ALL)

    def made(*arguments: object) -> None:
        pytest.fail("made again")

    for name in (
        "deployment.write_reference", "deploy.measure", "lowering.tuning.medians",
        "tensorrt.build.Builders._answer",
    ):  # fmt: skip
        monkeypatch.setattr(f"attnforge.export.{name}", made)
    second = deployed(tmp_path / "second")
    assert sorted(second.manifest.reused) == sorted(ALL)
    alike = {"created", "seconds", "memory", "children", "reused"}
    before, after = (bundle.manifest.model_dump(exclude=alike) for bundle in (first, second))
    for manifest in (before, after):
        if (tuning := manifest["targets"]["onnxruntime"]["tuning"]) is not None:
            tuning["seconds"] = 0
    assert after == before
    assert attnforge.verify(second.path, ["onnxruntime-cpu"]).passed

    def change(module: torch.nn.Module) -> None:
        with torch.no_grad():
            next(module.parameters()).view(-1)[0] += 1

    monkeypatch.undo()
    monkeypatch.setenv(VARIABLE, str(cache))
    monkeypatch.setattr("attnforge.export.deploy.measure", lambda *arguments: None)
    assert deployed(tmp_path / "other", change).manifest.reused == []


def test_a_deploy_that_had_no_memory_for_caches_leaves_none_to_others(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, args, shapes = decoder_example()

    def deploy(name: str) -> attnforge.Bundle:
        return attnforge.deploy(
            module, args, tmp_path / name, shapes, targets=["onnxruntime"], tune=False, cache_tokens=PLACES
        )

    def compared(bundle: attnforge.Bundle) -> list[str]:
        return [case.name for case in bundle.manifest.cases if case.caches]

    monkeypatch.setattr("attnforge.export.expected_caches.available", lambda: 1000)
    assert compared(deploy("short of memory")) == []
    monkeypatch.undo()
    monkeypatch.setenv(VARIABLE, str(cache))
    again = deploy("enough of it")
    assert compared(again) == ["example", "normal-prime"] and again.manifest.reused == []
    assert compared(deploy("once more")) == ["example", "normal-prime"]


def test_without_a_cache_nothing_is_kept(tmp_path: Path, cache: Path) -> None:
    module, args, shapes = made(Attention)
    bundle = attnforge.deploy(module, args, tmp_path / "b", shapes, targets=["onnxruntime"], tune=False, cache=False)
    assert bundle.manifest.reused == [] and not cache.exists()


# Entries


def test_an_entry_is_what_was_put(tmp_path: Path) -> None:
    cache = DeployCache(tmp_path / "cache")
    (tmp_path / "file").write_bytes(b"content")
    assert cache.get(ABOUT) is None
    cache.put(ABOUT, {"file": tmp_path / "file", "bytes": b"more"})
    entry = cache.get(ABOUT)
    assert entry is not None
    assert ((entry / "file").read_bytes(), (entry / "bytes").read_bytes()) == (b"content", b"more")
    assert cache.get({"what": "another"}) is None
    cache.put(ABOUT, {"bytes": b"kept first by another process"})
    assert not list((tmp_path / "cache").glob(".*"))


DAMAGES = ["altered", "missing", "added", "no sums", "a list of sums", "deep sums", "a pipe", "a pipe of sums"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_dropped(tmp_path: Path, damage: str) -> None:
    cache = DeployCache(tmp_path / "cache")
    cache.put(ABOUT, {"bytes": b"content"})
    entry = cache.get(ABOUT)
    assert entry is not None
    if damage == "altered":
        (entry / "bytes").write_bytes(b"contents")
    elif damage == "missing":
        (entry / "bytes").unlink()
    elif damage == "added":
        (entry / "more").touch()
    elif damage.startswith("a pipe"):  # reading it would block
        file = entry / ("bytes" if damage == "a pipe" else "sha256.json")
        file.unlink()
        os.mkfifo(file)
    else:
        texts = {"no sums": "[", "a list of sums": '["bytes"]', "deep sums": "[" * 100_000}
        (entry / "sha256.json").write_text(texts[damage])
    assert cache.get(ABOUT) is None and not entry.exists()


def test_an_entry_that_others_may_write_to_is_not_read(tmp_path: Path) -> None:
    cache = DeployCache(tmp_path / "cache")
    cache.put(ABOUT, {"bytes": b"content"})
    assert cache.get(ABOUT) is not None
    (tmp_path / "cache").chmod(0o777)
    assert cache.get(ABOUT) is None


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    cache = DeployCache(tmp_path / "cache", limit=3000)
    for i in range(3):
        cache.put({"what": i}, {"bytes": bytes(800)})
        entry = cache.get({"what": i})
        assert entry is not None
        os.utime(entry, (i, i))
    assert cache.get({"what": 0}) is not None  # used now
    cache.put({"what": 3}, {"bytes": bytes(800)})
    assert [cache.get({"what": i}) is not None for i in range(4)] == [True, False, True, True]
    cache.put({"what": 4}, {"bytes": bytes(4000)})  # more than all of it
    assert cache.get({"what": 4}) is None and cache.get({"what": 3}) is not None


def test_what_is_no_entry_is_left_alone_and_room_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    strays = [folder / "a file", folder / ("f" * 64), folder / "a link", folder / "a folder"]
    strays[0].write_bytes(bytes(9000))
    strays[1].write_bytes(bytes(9000))
    strays[2].symlink_to("nowhere")
    strays[3].mkdir()
    (strays[3] / "large").write_bytes(bytes(9000))
    cache = DeployCache(folder, limit=3000)
    for i in range(4):
        cache.put({"what": i}, {"bytes": bytes(1300)})
        if (entry := cache.get({"what": i})) is not None:
            os.utime(entry, (i, i))
    assert [cache.get({"what": i}) is not None for i in range(4)] == [False, False, True, True]
    assert all(stray.is_symlink() or stray.exists() for stray in strays)


def test_the_key_is_of_the_code_that_decides_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ignores all other packages, so that a change of a help text or a page does not invalidate entries."""
    read: list[str] = []

    def note(file: Path) -> bytes:
        read.append(file.as_posix())
        return b""

    monkeypatch.setattr(Path, "read_bytes", note)
    _own_code.__wrapped__()
    rooms = {file.partition("/attnforge/")[2].partition("/")[0] for file in read}
    assert {"bundle", "export", "model", "runtime", "files.py"} <= rooms
    assert not {"bench", "cli", "report", "serving"} & rooms


def test_a_cache_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    cache = DeployCache(tmp_path / "cache")
    cache.put(ABOUT, {"bytes": b"content"})
    assert cache.get(ABOUT) is None
