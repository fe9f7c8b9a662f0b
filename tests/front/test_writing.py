"""Bundles and files are written atomically and nowhere else, and leftovers of killed processes are removed."""

from __future__ import annotations

import ctypes
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from attnforge import atomic
from attnforge.atomic import (
    check_writable,
    exchange,
    give_modes,
    rename_new,
    scratch,
    sweep,
    temporary_folder,
    write_whole,
    written_whole,
)
from attnforge.bundle import MANIFEST, Bundle, writing
from attnforge.errors import UsageError

IS_ROOT = os.getuid() == 0


def fill(folder: Path, source: Path) -> None:
    shutil.copytree(source, folder, dirs_exist_ok=True)


# --- existing destinations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("force", [False, True])
def test_what_appears_while_a_bundle_is_made_is_left_alone(copy: Path, tmp_path: Path, force: bool) -> None:
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="exists"), writing(out, force) as folder:
        fill(folder, copy)
        out.mkdir()
        (out / "thesis.tex").write_text("irreplaceable")
    assert (out / "thesis.tex").read_text() == "irreplaceable"
    assert {path.name for path in tmp_path.iterdir()} == {"out", "copy"}


def test_a_folder_that_appears_at_the_last_instant_is_left_alone(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def late(old: Path, new: Path) -> None:
        new.mkdir()
        rename_new(old, new)

    monkeypatch.setattr("attnforge.bundle.output.rename_new", late)
    with pytest.raises(UsageError, match="out appeared meanwhile"), writing(out, False) as folder:
        fill(folder, copy)
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("name", ["notes.txt", "onnxruntime/notes.txt", "link"])
def test_force_leaves_a_bundle_with_other_files_alone(copy: Path, name: str) -> None:
    (copy / name).symlink_to("/etc") if name == "link" else (copy / name).write_text("mine")
    with (
        pytest.raises(UsageError, match=f"contains '{name}', which is not part of the bundle"),
        writing(copy, force=True),
    ):
        pytest.fail("minutes of work for nothing")
    assert os.path.lexists(copy / name)


def test_force_while_a_file_is_put_into_the_bundle(copy: Path, tmp_path: Path) -> None:
    whole = Path(shutil.copytree(copy, tmp_path / "whole"))
    with pytest.raises(UsageError, match=r"notes\.txt"), writing(copy, force=True) as folder:
        fill(folder, whole)
        (copy / "notes.txt").write_text("mine")
    assert (copy / "notes.txt").read_text() == "mine"


def test_files_of_the_file_manager_are_nobodys(copy: Path, tmp_path: Path) -> None:
    whole = Path(shutil.copytree(copy, tmp_path / "whole"))
    (copy / ".DS_Store").write_bytes(b"\0")
    with writing(copy, force=True) as folder:
        fill(folder, whole)
    assert not (copy / ".DS_Store").exists()


@pytest.mark.skipif(IS_ROOT, reason="root may write everywhere")
def test_a_read_only_bundle_is_not_overwritten(copy: Path) -> None:
    (copy / "onnxruntime").chmod(0o555)
    with pytest.raises(UsageError, match="read-only"), writing(copy, force=True):
        pytest.fail("minutes of work for nothing")
    (copy / "onnxruntime").chmod(0o755)


def test_a_read_only_bundle_is_not_overwritten_whoever_asks(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, how: not str(path).endswith("reference"))
    with pytest.raises(UsageError, match="read-only"), writing(copy, force=True):
        pytest.fail("minutes of work for nothing")


@pytest.mark.parametrize("name", ["n" * 300, "nul\0", "loop/bundle", "file/bundle"])
def test_an_impossible_path_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError) as raised, writing(tmp_path / name, force=False):
        pytest.fail("it cannot be written")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("below", ["inner", "onnxruntime/a/b/inner"])
def test_no_bundle_is_made_inside_a_bundle(copy: Path, tmp_path: Path, below: str) -> None:
    (tmp_path / "link").symlink_to(copy)
    for outer in (copy, tmp_path / "link"):
        with pytest.raises(UsageError, match=r"is inside the bundle .*copy; choose a folder outside it"):
            writing(outer / below, False)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / MANIFEST).write_text('{"name": "a web page"}')
    with writing(tmp_path / "app/bundle", False) as folder:
        assert folder.parent == tmp_path / "app"


def test_a_folder_that_is_not_utf_8_is_refused_before_the_work(tmp_path: Path) -> None:
    for out in (tmp_path / os.fsdecode(b"\xff"), tmp_path / os.fsdecode(b"\xff") / "bundle"):
        with pytest.raises(UsageError, match="its path is not UTF-8; choose another"):
            writing(out, False)


# --- permissions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0o002, 0o664, 0o775)]
)
def test_permissions_are_those_of_new_files(tmp_path: Path, mask: int, file: int, folder: int) -> None:
    """A library makes its files private to their owner, so that verify would fail for other users."""
    before = os.umask(mask)
    try:
        with writing(tmp_path / "out", False) as made:
            (made / "reference").mkdir(0o700)
            (made / "reference/outputs.safetensors").touch(0o600)
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(os.stat(tmp_path / "out" / name).st_mode) for name in ("", "reference")]
    assert modes == [folder, folder]
    assert stat.S_IMODE(os.stat(tmp_path / "out/reference/outputs.safetensors").st_mode) == file


def test_a_link_is_not_made_writable(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.touch(0o600)
    inside.mkdir()
    (inside / "link").symlink_to(outside)
    give_modes(inside)
    assert stat.S_IMODE(outside.stat().st_mode) == 0o600


# --- exchanging -------------------------------------------------------------------------------------------------------


def test_folders_exchange_at_one_instant(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a complete bundle at every moment: no rename leaves its path empty."""
    monkeypatch.setattr(Path, "rename", lambda *paths: pytest.fail("between two renames there is no bundle"))
    whole = Path(shutil.copytree(copy, tmp_path / "whole"))
    old = (copy / MANIFEST).stat().st_ino
    with writing(copy, force=True) as folder:
        fill(folder, whole)
    assert (copy / MANIFEST).stat().st_ino != old
    Bundle(copy)


@pytest.mark.parametrize("why", ["no such call", "no such file system"])
def test_where_the_system_cannot_exchange(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "no such call":
        monkeypatch.setattr(ctypes, "CDLL", lambda *args, **options: object())
    else:
        monkeypatch.setattr(atomic, "_renamed", lambda *args: False)
    assert not exchange(copy, copy)
    (tmp_path / "a").mkdir()
    with pytest.raises(FileExistsError):
        rename_new(tmp_path / "a", copy)
    (tmp_path / "a").rmdir()
    whole = Path(shutil.copytree(copy, tmp_path / "whole"))
    for force in (True, True):
        with writing(copy, force) as folder:
            fill(folder, whole)
        Bundle(copy)
    with writing(tmp_path / "new", False) as folder:
        fill(folder, whole)
    assert {path.name for path in tmp_path.iterdir()} == {"copy", "whole", "new"}


def test_what_was_left_between_two_renames_is_brought_back(copy: Path, tmp_path: Path) -> None:
    whole = Path(shutil.copytree(copy, tmp_path / "whole"))
    copy.rename(tmp_path / ".copy.abcd.old")
    with pytest.raises(UsageError, match="exists"), writing(copy, force=False):
        pytest.fail("the old bundle is there")
    Bundle(copy)
    shutil.copytree(whole, tmp_path / ".copy.efgh.old")
    with writing(copy, force=True) as folder:
        fill(folder, whole)
    assert {path.name for path in tmp_path.iterdir()} == {"copy", "whole"}


# --- what is stale ----------------------------------------------------------------------------------------------------


def test_what_is_held_is_not_swept_and_what_is_not_is(tmp_path: Path) -> None:
    with scratch(tmp_path, ".out.", ".partial") as held:
        for name in (".out.stale.partial", ".out.file.partial", ".other.stale.partial", "out.partial"):
            (tmp_path / name).mkdir() if "file" not in name else (tmp_path / name).touch()
        (tmp_path / ".out.link.partial").symlink_to("/etc")
        sweep(tmp_path, ".out.", ".partial")
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {held.name, ".other.stale.partial", "out.partial", ".out.link.partial"}
    assert not held.exists()
    held.mkdir()  # without the lock
    sweep(tmp_path, ".out.", ".partial")
    assert not held.exists()


def test_what_others_made_is_not_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".out.theirs.partial").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    sweep(tmp_path, ".out.", ".partial")
    assert (tmp_path / ".out.theirs.partial").exists()


@pytest.mark.parametrize("opened", [False, True])
def test_a_scratch_folder_that_is_swept_before_it_is_held_is_made_again(
    opened: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, times = atomic.locked, []

    @contextmanager
    def late(path: Path) -> Iterator[int | None]:
        times.append(path)
        is_swept = len(times) == 1
        if is_swept and not opened:
            path.rmdir()
        with real(path) as number:
            if is_swept and opened:
                path.rmdir()
            yield number

    monkeypatch.setattr(atomic, "locked", late)
    with scratch(tmp_path, ".out.", ".partial") as held:
        assert held.is_dir() and len(times) == 2


def test_folders_that_are_read_only_are_removed(tmp_path: Path) -> None:
    with temporary_folder() as folder:
        (folder / "a/b").mkdir(parents=True)
        (folder / "a/b/file").touch()
        (folder / "a/b").chmod(0o500)
        (folder / "a").chmod(0o500)
    assert not folder.exists()


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "out.npz"
    with pytest.raises(KeyboardInterrupt), written_whole(file) as stream:
        stream.write(b"half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".out.npz.abc.unfinished").touch()
    write_whole(file, b"all")
    assert file.read_bytes() == b"all" and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("name", ["n" * 300, "nul\0", "folder", "file/below"])
def test_a_file_that_cannot_be_written_is_reported_first(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot be written: .*; choose another file"):
        check_writable(tmp_path / name)
    check_writable(tmp_path / "fine")
    check_writable(tmp_path / "absent/too/fine")
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "file"}


@pytest.fixture(params=["pipe", "device", "link to a device"])
def special(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file that is not regular: a pipe, a device like /dev/null, or a link to one."""
    file = tmp_path / "special"
    if request.param == "pipe":
        os.mkfifo(file)
        return file
    try:
        os.mknod(file, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes devices")
    (tmp_path / "link").symlink_to(file)
    return tmp_path / "link" if request.param.startswith("link") else file


def test_what_is_no_regular_file_is_not_replaced(special: Path) -> None:
    before = os.lstat(special).st_ino, os.stat(special).st_mode
    with pytest.raises(UsageError, match="cannot be written: it is not a regular file; choose another file"):
        check_writable(special)
    with pytest.raises(OSError, match="not a regular file"):
        write_whole(special, b"all")
    assert (os.lstat(special).st_ino, os.stat(special).st_mode) == before
    assert not [path for path in special.parent.iterdir() if path.name.endswith(".unfinished")]


FULL = """
import errno, resource, sys
from pathlib import Path
from attnforge.atomic import written_whole
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    with written_whole(Path(sys.argv[1])) as stream:
        stream.write(bytes(100_000))
except OSError as error:
    print(error.errno == errno.EFBIG, error.filename, error.strerror, sep="|")
"""


def test_a_full_disk_is_reported_with_the_file_and_what_is_free(tmp_path: Path) -> None:
    out = tmp_path / "out.npz"
    done = subprocess.run([sys.executable, "-c", FULL, str(out)], capture_output=True, text=True, timeout=120)
    is_limit, file, why = done.stdout.strip().split("|")
    assert (is_limit, file) == ("True", str(out)), done.stderr
    assert re.fullmatch(r"File too large; make room \([\d,.]+ MiB are free\), raise your quota .*, or choose .*", why)
    assert list(tmp_path.iterdir()) == []


# --- killed -----------------------------------------------------------------------------------------------------------

KILLED = """
import shutil, sys, time
from pathlib import Path
from attnforge.bundle import writing
source, out = map(Path, sys.argv[1:])
print("ready", flush=True)
while True:
    with writing(out, True) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)
"""

TIMES = int(os.environ.get("ATTNFORGE_KILLS", "10"))
"""Number of times a process is killed: 100 in `make kill`."""


@pytest.fixture(scope="module")
def started() -> Iterator[Callable[[Path, Path], subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def start(source: Path, out: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", KILLED, str(source), str(out)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_killed_at_any_moment_a_bundle_is_whole_and_nothing_stays(
    copy: Path, tmp_path: Path, started: Callable[[Path, Path], subprocess.Popen[str]]
) -> None:
    source = Path(shutil.copytree(copy, tmp_path / "source"))
    rng = random.Random(0)
    for _ in range(TIMES):
        process = started(source, copy)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(rng.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        Bundle(copy)
    with writing(copy, True) as folder:
        fill(folder, source)
    assert {path.name for path in tmp_path.iterdir()} == {"copy", "source"}
