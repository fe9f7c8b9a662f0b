"""Every error on the command line is one line, one exit code, and with `--json` one document; and whatever a
stranger's bundle says, the terminal stays the user's."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import attnforge
from attnforge.bundle import Manifest
from attnforge.cli import ending, main, terminal
from attnforge.errors import BundleError, UsageError, plain
from tests.support.bundles import DeploySmall, rewrite, small_inputs

Done = tuple[int, str, str]
Here = Callable[..., Done]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    """Run a command in this process; return its exit code and both streams."""

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["attnforge", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capfd.readouterr()

    return run


def refused(done: Done, code: int, words: str = "") -> dict[str, str]:
    """Return the document of a command that was refused with one line."""
    status, printed, said = done
    assert status == code
    assert "Traceback" not in said and words in said
    document: dict[str, dict[str, str]] = json.loads(printed)
    assert set(document["error"]) == {"kind", "message"}
    return document["error"]


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (("verify", "absent", "--json"), 1, "BundleError"),
        (("inspect", "absent", "--json"), 1, "BundleError"),
        (("diagnose", "absent", "--json"), 1, "BundleError"),
        (("bench", "absent", "--json"), 1, "BundleError"),
        (("run", "absent", "x.npy", "--json"), 1, "BundleError"),
        (("deploy", "no-such-model", "--json"), 2, "UnknownNameError"),
        (("deploy", "model.onnx", "--json"), 2, "UsageError"),
        (("verify", "--json"), 2, "UsageError"),
        (("verify", "absent", "--no-such-option", "--json"), 2, "UsageError"),
        (("bench", "absent", "--rounds", "many", "--json"), 2, "UsageError"),
        (("no-such-command", "--json"), 2, "UsageError"),
    ],
)
def test_every_error_is_a_document(
    here: Here, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], code: int, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(here(*arguments), code)["kind"] == kind
    status, printed, said = here(*arguments[:-1])
    assert (status, printed) == (code, "") and said and "Traceback" not in said


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/somewhere/x"),
        PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/somewhere/x"),
        OSError("of no number"),
        MemoryError(),
        BundleError("two\nlines \x1b[31m and a colour"),
    ],
    ids=["full", "forbidden", "plain", "memory", "lines"],
)
def test_errors_of_the_system_are_one_line(
    here: Here, copy: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(attnforge, "verify", fails)
    status, printed, said = here("verify", copy, "--json")
    assert refused((status, printed, said), 1)["kind"] == type(error).__name__
    assert len(said.strip().splitlines()) == 1 and said.startswith("error: ") and "\x1b" not in said


def test_a_fault_of_ours_keeps_its_traceback_and_has_a_document(
    here: Here, copy: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attnforge, "verify", lambda *arguments, **options: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["attnforge", "verify", str(copy), "--json"])
    with pytest.raises(ZeroDivisionError):
        main()
    assert json.loads(capfd.readouterr().out)["error"]["kind"] == "ZeroDivisionError"


def test_a_check_that_fails_is_no_error(here: Here, copy: Path) -> None:
    status, printed, _ = here("verify", rewrite(copy, lambda m: setattr(m, "cases", [])).path, "--json")
    assert status == 1 and "error" not in json.loads(printed)


def test_numbers_that_json_does_not_know_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_json({"a": [math.nan, 1.0, (math.inf,)], "b": {"c": -math.inf}})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "a": [None, 1.0, [None]],
        "b": {"c": None},
    }


# --- outputs are tried before the work --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["file/below.npz", "n" * 300 + ".npz"], ids=["below a file", "long"])
def test_an_output_that_cannot_be_written_is_reported_first(
    here: Here, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / name
    for kind in ("load", "verify", "benchmark"):
        monkeypatch.setattr(attnforge, kind, lambda *arguments, **options: pytest.fail("the work has begun"))
    commands: list[tuple[object, ...]] = [("run", copy, "x.npy", "--out", out), ("verify", copy, "--html", out)]
    commands += [("bench", copy, option, out) for option in ("--out", "--html", "--plots")]
    for arguments in commands:
        assert "cannot be written" in refused(here(*arguments, "--json"), 2)["message"]


def test_a_folder_that_is_missing_is_made(here: Here, copy: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", **small_inputs())  # type: ignore[arg-type]
    status, _, said = here("run", copy, tmp_path / "in.npz", "--out", tmp_path / "new/er/out.npz")
    assert status == 0, said
    assert list((tmp_path / "new/er").iterdir()) == [tmp_path / "new/er/out.npz"]


def test_a_device_is_not_replaced_by_an_output(here: Here, copy: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    np.savez(tmp_path / "in.npz", **small_inputs())  # type: ignore[arg-type]
    commands: list[tuple[object, ...]] = [("run", copy, tmp_path / "in.npz", "--out"), ("verify", copy, "--html")]
    commands += [("bench", copy, option) for option in ("--out", "--html")]
    for arguments in commands:
        error = refused(here(*arguments, tmp_path / "pipe", "--force", "--json"), 2)
        assert "it is not a regular file; choose another" in error["message"]
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("arguments", [("inspect", "copy", "--json"), ("models",), ("inspect", "absent", "--json")])
def test_standard_output_that_is_full_is_one_line(copy: Path, arguments: tuple[str, ...]) -> None:
    if not Path("/dev/full").is_char_device():
        pytest.skip("no /dev/full")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "attnforge", *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, cwd=copy.parent, env=environment, text=True, timeout=120
        )
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "absent" in arguments or "standard output" in done.stderr


# --- names that are not UTF-8 -----------------------------------------------------------------------------------------

BYTE = os.fsdecode(b"\xff")
"""A byte that is not UTF-8, as Python represents it in a file name."""


@pytest.mark.parametrize("arguments", [("deploy", "--help"), ("models",)])
def test_a_reader_that_has_gone_is_no_error_of_the_model(arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "attnforge", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert done.returncode == 1 and done.stderr == ""


WITHOUT_EXPORTER = """
import sys
from attnforge.cli import main
absent = ["PIL", "einops", "islpy", "onnx", "onnx_ir", "onnxscript", "polygraphy", "sympy", "torch"]
sys.modules.update(dict.fromkeys(absent))
main()
"""


@pytest.mark.parametrize("command", [("deploy", "vit"), ("diagnose", "."), ("doctor",)])
def test_an_environment_that_only_runs_bundles_says_so(copy: Path, command: tuple[str, ...]) -> None:
    program = [sys.executable, "-c", WITHOUT_EXPORTER, *command, "--json"]
    done = subprocess.run(program, capture_output=True, text=True, cwd=copy, timeout=120)
    document = json.loads(done.stdout)
    if command == ("doctor",):
        assert done.returncode == 0 and document["run"]["onnxruntime-cpu"] is None
        assert "onnxruntime" in document["build"]
        (reason,) = set(document["build"].values())
    else:
        assert done.returncode == 1 and document["error"]["kind"] == "UnavailableError"
        reason = document["error"]["message"]
        assert len(done.stderr.splitlines()) == 1
    assert "environment only runs bundles" in reason and reason.endswith("pip install attnforge")


def test_names_that_are_not_utf_8(here: Here, copy: Path, tmp_path: Path) -> None:
    bundle, page, out = copy.rename(tmp_path / f"b{BYTE}"), tmp_path / f"p{BYTE}.html", tmp_path / f"o{BYTE}.npz"
    np.savez(tmp_path / f"i{BYTE}.npz", **small_inputs())  # type: ignore[arg-type]
    fine: list[tuple[object, ...]] = [("inspect", bundle), ("verify", bundle, "--html", page)]
    fine.append(("run", bundle, tmp_path / f"i{BYTE}.npz", "--out", out))
    for arguments in fine:
        status, _, said = here(*arguments)
        assert status == 0, said
    assert out.is_file() and page.read_text(encoding="utf-8")
    wrong: list[tuple[object, ...]] = [("deploy", f"m{BYTE}:f"), ("deploy", f"m{BYTE}.onnx"), ("deploy", f"hf:m{BYTE}")]
    wrong += [("deploy", "self-attention", "--out", tmp_path / BYTE), ("run", bundle, f"{BYTE}.npy")]
    for arguments in [*wrong, ("deploy", "self-attention", "-o", f"{BYTE}=1")]:
        refused(here(*arguments, "--json"), 2)["message"].encode()


def test_a_file_whose_name_is_not_utf_8_is_a_source(small: DeploySmall, tmp_path: Path) -> None:
    file = tmp_path / f"x{BYTE}.onnx"
    onnx.save(onnx.load(small("fp32").path / "plain.onnx"), file)
    dims = {"batch": (1, 2, 4), "tokens": (2, 5, 9), "2_pairs": (2, 6, 12)}
    bundle = attnforge.deploy(file, None, tmp_path / "b", dims, targets=["onnxruntime"], tune=False)
    assert bundle.manifest.name == "x\ufffd" and bundle.manifest.source.name.endswith("x\ufffd.onnx")


@pytest.mark.parametrize("name", [f"a{BYTE}", "a\nb", "a" * 2000], ids=["not UTF-8", "two lines", "long"])
def test_a_name_that_no_manifest_takes_is_refused_before_the_work(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give one line of at most"):
        attnforge.deploy(torch.nn.Linear(2, 2), (torch.zeros(1, 2),), tmp_path / "b", name=name)


# --- models that cannot be made ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "option"),
    [
        ("self-attention", "key_dim=99999999999"),
        ("self-attention", f"key_dim={2**63 - 1}"),
        ("self-attention", f"key_dim={10**30}"),
        ("decoder", "vocab_size=99999999999"),
    ],
)
def test_sizes_that_no_memory_holds(here: Here, tmp_path: Path, model: str, option: str) -> None:
    error = refused(here("deploy", model, "-o", option, "--out", tmp_path / "b", "--json"), 2)
    assert error["kind"] == "UsageError" and f"{model} cannot be built with {{" in error["message"]


ENDS = """
import sys, torch

class Ends(torch.nn.Module):
    def forward(self, x):
        sys.exit({code!r})

def module():
    return Ends(), (torch.zeros(1),), None

def called():
    sys.exit({code!r})
"""


@pytest.mark.parametrize("code", [0, None, 3, "words"])
@pytest.mark.parametrize("where", ["called", "imported", "forward"])
def test_a_strangers_exit_is_an_error(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: object, where: str
) -> None:
    name = f"ends_{where}_{code}"
    (tmp_path / f"{name}.py").write_text(ENDS.format(code=code) + ("called()" if where == "imported" else ""))
    monkeypatch.chdir(tmp_path)
    done = here("deploy", f"{name}:{'called' if where == 'called' else 'module'}", "--out", "b", "--json")
    assert refused(done, 2)["kind"] == "UsageError"
    assert not (tmp_path / "b").exists()


def test_help_is_a_document_too(here: Here) -> None:
    for flag in ("--help", "-h"):
        status, printed, said = here("deploy", flag, "--json")
        assert (status, said) == (0, "")
        assert "Usage" in json.loads(printed)["help"] and "\x1b" not in printed
    assert here("models", "--help")[1].lstrip().startswith("Usage")


@pytest.mark.parametrize("columns", ["0", "", "-5"])
def test_a_terminal_of_no_width_is_of_the_usual(columns: str) -> None:
    environment = {**os.environ, "COLUMNS": columns}
    for arguments in (["models"], ["models", "--help"]):
        command = [sys.executable, "-m", "attnforge", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
        assert done.returncode == 0 and ("attention" in done.stdout or "Usage" in done.stdout)


# --- the terminal stays the user's ------------------------------------------------------------------------------------

HOSTILE = "a[/red]b [link=http://x]c[/link] \x1b]0;title\x07\x1b[31m\x9b2J\u202egnp.exe [bold"


def hostile(folder: Path) -> Path:
    def change(manifest: Manifest) -> None:
        manifest.reference = HOSTILE
        manifest.skipped = {"tensorrt": HOSTILE}
        manifest.source.random_weights = HOSTILE
        manifest.reused = [HOSTILE]
        manifest.attention.details[0].reason = manifest.attention.details[0].site = HOSTILE
        manifest.attention.details[0].written_as = HOSTILE
        manifest.name = "a[/red]b[link=http://x]"
        manifest.tools = {"a[/red]b": HOSTILE}

    return rewrite(folder, change).path


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_nothing_of_a_manifest_steers_the_terminal(here: Here, copy: Path, command: str) -> None:
    status, printed, said = here(command, hostile(copy))
    assert status == 0, said
    for text in (printed, said):
        assert not set(text) & {"\x1b", "\x07", "\x9b", "\u202e"}
    assert "a[/red]b" in printed
    status, printed, _ = here(command, copy, "--json")
    assert status == 0 and json.loads(printed)


MARKUP = ("a[/red]b", "a[bold]b", "a\\[red]b", "[/]", "a\x1b[31mb")


@pytest.mark.parametrize("name", MARKUP)
def test_markup_in_a_path_is_no_markup(here: Here, copy: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir(parents=True)
    moved = copy.rename(folder / "bundle")
    np.savez(tmp_path / "in.npz", **small_inputs())  # type: ignore[arg-type]
    for arguments in (("inspect", moved), ("verify", moved, "--html", folder / "page.html"), ("verify", folder),
                      ("run", moved, tmp_path / "in.npz", "--out", folder / "out.npz"), ("deploy", name),
                      ("run", moved, folder / "absent.npy")):  # fmt: skip
        status, printed, said = here(*arguments)
        assert "Traceback" not in said and "MarkupError" not in said
        shown = printed + said.replace("\n", "")
        assert plain(name) in shown or repr(name)[1:-1] in shown  # as it is, or as Python writes it
        assert "\x1b" not in printed + said
        assert status == (1 if arguments == ("verify", folder) else 2 if arguments[0] == "deploy" or "absent" in
                          str(arguments[-1]) else 0)  # fmt: skip


def test_what_is_plain() -> None:
    assert plain("a\tb\x00\x7f\u2028") == "a\ufffdb\ufffd\ufffd\ufffd"
    assert plain("größer → [x]") == "größer → [x]"


def test_a_terminal_whose_encoding_lacks_characters_works(copy: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    code = f"from attnforge.cli import main; import sys; sys.argv = ['attnforge', 'inspect', {str(copy)!r}]; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    done.stdout.decode("ascii")


# --- signals ----------------------------------------------------------------------------------------------------------


INTERRUPTED = """
import os, signal, sys
import attnforge
from attnforge.cli import main, terminal
from attnforge.errors import BundleError

number, swallowed = int(sys.argv[1]), sys.argv[2]

def work(*arguments, **options):
    try:
        os.kill(os.getpid(), number)
        for _ in range(1_000_000):
            pass
    except BaseException:
        if swallowed == "not":
            raise
        if swallowed == "as an error":
            raise BundleError("torch cannot export") from None
    with terminal.stages_shown(quiet=True) as display:
        display("the next step")
    print("it goes on")

def status():
    try:
        main()
    except SystemExit as ended:
        return ended.code

def before(number, frame):
    print("not handled by the command")

signal.signal(number, before)
sys.argv[1:] = ["verify", "absent", "--json"]
attnforge.verify = work
first = status()
assert signal.getsignal(number) is before
attnforge.verify = lambda *arguments, **options: attnforge.Bundle("absent")
sys.argv.pop()
print(first, status())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("swallowed", ["as an error", "and forgotten", "not"])
def test_a_signal_ends_the_command_whatever_a_library_makes_of_it(number: signal.Signals, swallowed: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, str(int(number)), swallowed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, start_new_session=True)
    assert "interrupted" in done.stderr
    document, _, codes = done.stdout.rstrip().rpartition("\n")
    assert codes == f"{128 + number} 1", done.stderr  # the signal does not affect the next command
    assert json.loads(document)["error"]["kind"] == "Interrupted"


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending.orderly():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGHUP)
        assert ending.status() is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_stream_that_cannot_be_told_is_left(monkeypatch: pytest.MonkeyPatch, here: Here) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert here("--version")[0] == 0
