"""Signed bundles: moved, altered by a byte, or signed by another key, with every way to open a bundle."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

import attnforge
from attnforge.bench import alone
from attnforge.bundle import MANIFEST, SIGNATURE, TRUSTED, Bundle, output, reading, sign
from attnforge.children import ChildError
from attnforge.cli import main
from attnforge.errors import BundleError, SignatureError, UnavailableError, UsageError
from attnforge.export.tensorrt.rebuild import rebuild
from tests.support.bundles import small_inputs
from tests.support.keys import new_key

MODEL = "onnxruntime/model.onnx"
PLAN = "tensorrt/engine.tensorrt_rtx.plan"

Use = Callable[[Path, Path | None], object]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return new_key(tmp_path / "maker.key")


@pytest.fixture
def signed(copy: Path, key: Path) -> Path:
    assert sign(copy, key) == copy / SIGNATURE
    return copy


def load(folder: Path, trusted: Path | None) -> None:
    with attnforge.load(folder, "onnxruntime-cpu", trusted=trusted) as session:
        session.run(small_inputs())


def verify(folder: Path, trusted: Path | None) -> None:
    assert attnforge.verify(folder, ["onnxruntime-cpu"], trusted=trusted).passed


def diagnose(folder: Path, trusted: Path | None) -> None:
    attnforge.diagnose(folder, ["onnxruntime-cpu"], trusted=trusted)


def bench(folder: Path, trusted: Path | None) -> None:
    attnforge.benchmark(folder, ["onnxruntime-cpu"], rounds=1, quick=True, trusted=trusted)


def inspect(folder: Path, trusted: Path | None) -> None:
    Bundle(folder, trusted=trusted)


USES: list[Use] = [load, verify, diagnose, bench, inspect]
by_every_way = pytest.mark.parametrize("use", USES)


def refused(use: Use, folder: Path, trusted: Path | None, words: str) -> None:
    with pytest.raises(SignatureError, match=words) as raised:
        use(folder, trusted)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 2_000


# --- signed, moved, altered by a byte, signed by another --------------------------------------------------------------


@by_every_way
def test_signed_and_moved_are_accepted(signed: Path, key: Path, use: Use) -> None:
    use(signed, key.with_suffix(".pub"))
    moved = signed.rename(signed.with_name("elsewhere"))
    use(moved, key.with_suffix(".pub"))
    shutil.copytree(moved, moved.with_name("copied"))
    use(moved.with_name("copied"), key.with_suffix(".pub"))


@by_every_way
@pytest.mark.parametrize("name", [MODEL, MANIFEST, "reference/outputs.safetensors", PLAN])
def test_altered_by_a_byte_is_refused(signed: Path, key: Path, use: Use, name: str) -> None:
    """This includes unused files."""
    data = bytearray((signed / name).read_bytes())
    data[-2] ^= 1
    (signed / name).write_bytes(data)
    refused(use, signed, key.with_suffix(".pub"), f"was altered after it was signed .*{name}")


@pytest.mark.parametrize("trusted", [True, 5, [5], b"key", [b"key"], [None]])
def test_keys_that_are_no_paths(copy: Path, trusted: Any) -> None:
    with pytest.raises(UsageError, match=r"trusted is .*; give the files of public keys, or False to require none"):
        attnforge.load(copy, trusted=trusted)


@by_every_way
def test_signed_by_another_is_refused(signed: Path, key: Path, use: Use) -> None:
    other = new_key(key.with_name("other.key"))
    refused(use, signed, other.with_suffix(".pub"), "signed by another key, .*other.pub is required; do not use")
    sign(signed, other, force=True)
    use(signed, other.with_suffix(".pub"))
    refused(use, signed, key.with_suffix(".pub"), "signed by another key")


@by_every_way
def test_not_signed_is_refused_and_nothing_of_it_parsed(
    copy: Path, key: Path, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_parsed_manifest", lambda *arguments: pytest.fail("the manifest was parsed"))
    (copy / MANIFEST).write_text("{" * 10_000)
    refused(use, copy, key.with_suffix(".pub"), "has no signature, .*maker.pub is required; have its maker sign it")
    (copy / SIGNATURE).write_text("{" * 100_000)
    refused(use, copy, key.with_suffix(".pub"), "signed by another key, or its model.sig is altered")


def test_an_altered_manifest_is_not_parsed(signed: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_parsed_manifest", lambda *arguments: pytest.fail("the manifest was parsed"))
    (signed / MANIFEST).write_text((signed / MANIFEST).read_text() + " ")
    for use in USES:
        refused(use, signed, key.with_suffix(".pub"), "was altered")


@by_every_way
def test_nobody_asks_and_signed_or_not_is_accepted(signed: Path, use: Use) -> None:
    use(signed, None)
    (signed / SIGNATURE).write_text("no signature")
    use(signed, None)


def test_what_is_checked_is_what_is_used(signed: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanging the manifest or a model after the signature was checked has no effect."""
    opened = Bundle(signed, lazily=True, trusted=key.with_suffix(".pub"))
    (signed / MODEL).write_bytes(b"another")
    with pytest.raises(BundleError, match="altered"):
        opened.model(MODEL)


def test_the_manifest_that_was_signed_is_the_one_that_is_parsed(
    signed: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever replaces it while the signature is checked."""
    own = (signed / MANIFEST).read_bytes()
    another = own.replace(b'"name": "small"', b'"name": "other"', 1)
    assert another != own
    real = reading.manifest_data

    def then(data: bytes) -> Callable[..., bytes]:
        def exchanged(folder: Path, shown: Path | None = None) -> bytes:
            read = real(folder, shown)
            (signed / MANIFEST).write_bytes(data)
            return read

        return exchanged

    monkeypatch.setattr(reading, "manifest_data", then(another))
    assert Bundle(signed, trusted=key.with_suffix(".pub")).manifest.name == "small"
    monkeypatch.setattr(reading, "manifest_data", then(own))
    refused(inspect, signed, key.with_suffix(".pub"), "was altered after it was signed .*manifest.json")


# --- what a signature is over -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["json.py", "onnxruntime/extra.so", ".git/config", ".gitignore"])
def test_a_file_that_came_after_the_signature_is_refused(signed: Path, key: Path, name: str) -> None:
    (signed / name).parent.mkdir(exist_ok=True)
    (signed / name).write_text("raise SystemExit")
    refused(load, signed, key.with_suffix(".pub"), f"was altered after it was signed .*{name}")


def test_a_file_that_is_gone_a_link_and_a_pipe_are_refused(signed: Path, key: Path) -> None:
    (signed / PLAN).rename(signed.with_name("plan"))
    refused(load, signed, key.with_suffix(".pub"), "altered after it was signed .*Missing")
    (signed / PLAN).symlink_to(signed.with_name("plan"))
    refused(load, signed, key.with_suffix(".pub"), "altered after it was signed")
    (signed / PLAN).unlink()
    os.mkfifo(signed / PLAN)
    refused(load, signed, key.with_suffix(".pub"), "altered after it was signed")


@pytest.mark.parametrize("content", ["", "{}", "[]", "null", '{"verificationMaterial": 3}', "\0", "9" * 100_000])
def test_a_signature_that_is_none_is_refused(signed: Path, key: Path, content: str) -> None:
    (signed / SIGNATURE).write_text(content)
    refused(load, signed, key.with_suffix(".pub"), "signed by another key, or its model.sig is altered")


def test_a_signature_is_a_file_of_bounded_size(signed: Path, key: Path) -> None:
    (signed / SIGNATURE).rename(signed.with_name("sig"))
    (signed / SIGNATURE).symlink_to(signed.with_name("sig"))
    refused(load, signed, key.with_suffix(".pub"), "model.sig cannot be read")
    (signed / SIGNATURE).unlink()
    os.mkfifo(signed / SIGNATURE)
    refused(load, signed, key.with_suffix(".pub"), "model.sig cannot be read")
    (signed / SIGNATURE).unlink()
    with (signed / SIGNATURE).open("wb") as stream:
        stream.truncate(2**25)
    refused(load, signed, key.with_suffix(".pub"), "has more than 16,777,216 bytes")


def test_the_signature_of_one_bundle_is_none_of_another(signed: Path, key: Path) -> None:
    other = Path(shutil.copytree(signed, signed.with_name("other")))
    document = json.loads((other / MANIFEST).read_text())
    (other / MANIFEST).write_text(json.dumps(document | {"name": "another"}))
    sign(other, key, force=True)
    shutil.copy(other / SIGNATURE, signed / SIGNATURE)
    refused(load, signed, key.with_suffix(".pub"), "altered after it was signed .*manifest.json")


def test_model_signings_own_command_reads_and_writes_such_signatures(signed: Path, key: Path) -> None:
    def command(what: str, key: Path, option: str) -> None:
        command = [sys.executable, "-m", "model_signing", what, "key", "--signature", str(signed / SIGNATURE)]
        done = subprocess.run([*command, option, str(key), str(signed)], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr

    command("verify", key.with_suffix(".pub"), "--public_key")
    (signed / SIGNATURE).unlink()
    command("sign", key, "--private_key")
    load(signed, key.with_suffix(".pub"))


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curve", [ec.SECP384R1(), ec.SECP521R1()], ids=["P-384", "P-521"])
def test_larger_keys_and_several(copy: Path, key: Path, curve: ec.EllipticCurve) -> None:
    larger = new_key(key.with_name("larger.key"), curve)
    sign(copy, larger)
    both = [key.with_suffix(".pub"), larger.with_suffix(".pub")]
    Bundle(copy, trusted=both)
    Bundle(copy, trusted=both[::-1])
    refused(inspect, copy, both[0], "signed by another key")


def test_keys_that_are_none(copy: Path, key: Path) -> None:
    private = rsa.generate_private_key(65537, 2048)
    wrong, locked = key.with_name("rsa.pem"), key.with_name("locked.key")
    wrong.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    secret = ec.generate_private_key(ec.SECP256R1())
    locked.write_bytes(
        secret.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, BestAvailableEncryption(b"x"))
    )
    for file, words in (
        (wrong, "is not a private key"),
        (key.with_suffix(".pub"), "is not a private key"),
        (locked, "has a password"),
        (key.with_name("absent"), "cannot be read"),
        (key.parent, "is not a private key|cannot be read"),
    ):
        with pytest.raises(UsageError, match=words) as raised:
            sign(copy, file)
        assert "\n" not in str(raised.value) and not (copy / SIGNATURE).exists()
    for file, words in (
        (key, "is not a public key"),
        (wrong, "is not a public key"),
        (key.with_name("absent"), "be read"),
    ):
        with pytest.raises(UsageError, match=words) as raised:
            Bundle(copy, trusted=file)
        assert "\n" not in str(raised.value)
    with pytest.raises(UsageError, match="trusted names no key"):
        Bundle(copy, trusted=[])


def test_the_environment_names_keys(signed: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = new_key(key.with_name("other.key")).with_suffix(".pub")
    monkeypatch.setenv(TRUSTED, str(other))
    for use in USES:
        refused(use, signed, None, "signed by another key")
    load(signed, key.with_suffix(".pub"))  # the argument takes precedence
    Bundle(signed, trusted=False)
    monkeypatch.setenv(TRUSTED, os.pathsep.join(map(str, (other, key.with_suffix(".pub")))))
    for use in USES:
        use(signed, None)
    (signed / SIGNATURE).unlink()
    refused(load, signed, None, "has no signature")
    monkeypatch.setenv(TRUSTED, "")
    with pytest.raises(UsageError, match=f"{TRUSTED} names no key"):
        attnforge.load(signed)


def test_without_the_library_nothing_is_accepted(signed: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "attnforge.bundle.signatures", None)
    monkeypatch.delattr("attnforge.bundle.signatures", raising=False)
    with pytest.raises(UnavailableError, match=r"pip install 'attnforge\[signing\]'"):
        attnforge.load(signed, trusted=key.with_suffix(".pub"))
    with pytest.raises(UnavailableError, match=r"pip install 'attnforge\[signing\]'"):
        sign(signed, key, force=True)
    load(signed, None)


def test_a_process_of_a_benchmark_asks_for_the_signature_again(signed: Path, key: Path) -> None:
    other = new_key(key.with_name("other.key")).with_suffix(".pub")
    order = alone.RunRequest(
        bundle=str(signed), contender="onnxruntime-cpu", engine="backend", file=None, threads=1, any_sizes=True,
        sizes=Bundle(signed).manifest.cases[0].sizes, folder=str(signed.parent), warm=False,
        trusted=[str(key.with_suffix(".pub"))],
    )  # fmt: skip
    assert alone.measured(order).cold.first_s > 0
    with pytest.raises(ChildError, match="signed by another key"):
        alone.measured(order.model_copy(update={"trusted": [str(other)]}))


# --- signing, and what becomes of signed bundles ----------------------------------------------------------------------


def test_what_is_not_whole_is_not_signed(copy: Path, key: Path) -> None:
    (copy / "stray.py").touch()
    with pytest.raises(BundleError, match=r"not listed in its manifest: stray\.py; remove them"):
        sign(copy, key)
    (copy / "stray.py").unlink()
    (copy / MODEL).write_bytes(b"another")
    with pytest.raises(BundleError, match="was altered"):
        sign(copy, key)
    assert not (copy / SIGNATURE).exists()


def test_a_signature_is_overwritten_on_request_and_is_not_an_unlisted_file(signed: Path, key: Path) -> None:
    with pytest.raises(UsageError, match="is already signed"):
        sign(signed, key)
    sign(signed, key, force=True)
    opened = Bundle(signed)
    assert opened.unlisted() == [] and SIGNATURE not in opened.manifest.files
    assert not attnforge.verify(signed, ["onnxruntime-cpu"]).warnings
    assert output._why_not_replaced(signed) is None


def test_a_new_plan_ends_the_signature_and_is_not_built_where_one_is_asked_for(
    signed: Path, key: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tensorrt_rtx")
    with pytest.raises(SignatureError, match="has no signed plan for this machine"):
        rebuild(Bundle(signed, trusted=key.with_suffix(".pub")), "tensorrt_rtx", "SM89")
    load(signed, key.with_suffix(".pub"))
    rebuild(Bundle(signed), "tensorrt_rtx", "SM89")
    assert "its signature was removed; sign it again" in caplog.text
    refused(load, signed, key.with_suffix(".pub"), "has no signature")
    sign(signed, key)
    load(signed, key.with_suffix(".pub"))


# --- the command line -------------------------------------------------------------------------------------------------


def test_commands(copy: Path, key: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def here(*arguments: object) -> tuple[int, Any, str]:
        monkeypatch.setattr(sys, "argv", ["attnforge", *map(str, arguments), "--json"])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        printed, said = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, json.loads(printed), said

    np.savez(copy.parent / "inputs.npz", allow_pickle=False, **small_inputs())
    backend = ("--backend", "onnxruntime-cpu")
    commands = (
        ("run", copy, copy.parent / "inputs.npz", "--out", copy.parent / "o.npz", "--force", *backend),
        ("verify", copy, *backend),
        ("diagnose", copy, *backend),
        ("bench", copy, *backend, "--quick", "--rounds", 1),
        ("inspect", copy),
    )
    public, other = key.with_suffix(".pub"), new_key(key.with_name("other.key")).with_suffix(".pub")

    def all_refused(*further: object) -> None:
        for command in commands:
            code, document, said = here(*command, *further)
            assert code == 1 and document["error"]["kind"] == "SignatureError" and said.count("\n") == 1, command

    all_refused("--trusted", public)
    assert here("inspect", copy)[1]["signature"] == "none"
    assert here("sign", copy, "--key", key)[:2] == (0, {"bundle": str(copy), "signature": str(copy / SIGNATURE)})
    assert here("inspect", copy)[1]["signature"] == "not checked"
    assert here("inspect", copy, "--trusted", public)[1]["signature"] == "of a trusted key"
    for command in commands:
        for keys in ((public,), (other, public), ()):
            assert here(*command, *(word for key in keys for word in ("--trusted", key)))[0] == 0, command
    all_refused("--trusted", other)
    monkeypatch.setenv(TRUSTED, str(other))
    all_refused()
    monkeypatch.delenv(TRUSTED)
    (copy / MODEL).write_bytes((copy / MODEL).read_bytes() + b"\0")
    all_refused("--trusted", public)
    assert here("sign", copy, "--key", key.with_name("absent"), "--force")[0] == 1  # the bundle is not whole
