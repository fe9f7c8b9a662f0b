"""Signatures of bundles, in the format of OpenSSF's model-signing, which makes and checks them.

A signature covers the name and the sha256 of every file in the folder except itself, the manifest included. Files are
opened without following links. The manifest is checked as the bytes that the caller has read and will parse, so it
cannot be exchanged between the check and its use; every other file is checked against its sha256 in the signed manifest
whenever it is read.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from model_signing import hashing, manifest, signing, verifying
from model_signing._hashing.hashing import Digest  # what items of its public manifests are made of

from attnforge.bundle.schema import MANIFEST, SIGNATURE
from attnforge.errors import SignatureError, UsageError, first_line, shortened
from attnforge.files import names_in, open_inside, open_regular
from attnforge.quiet import quiet

MOST_SIGNATURE = 2**24
"""Maximum size of a signature, in bytes."""

HOW = "pass the .pem file of an elliptic-curve key (openssl ecparam -name prime256v1 -genkey -noout -out KEY)"


class _Content(hashing.Config):
    """Contents of a folder, which model-signing compares with what was signed.

    Attributes:
        asked: whether :meth:`hash` was called: model-signing does so once it has accepted a key's signature.
    """

    def __init__(self, root: Path, manifest_data: bytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.root, self.manifest_data, self.asked = root, manifest_data, False

    def hash(self, model_path: hashing.PathLike, *, files_to_hash: Iterable[Any] | None = None) -> manifest.Manifest:
        self.asked = True
        kind = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": [SIGNATURE]}
        items = [
            manifest.FileManifestItem(path=PurePosixPath(name), digest=Digest("sha256", self._sum(name)))
            for name in names_in(self.root)
            if name != SIGNATURE
        ]
        return manifest.Manifest(self.root.name, items, manifest.SerializationType.from_args(kind))

    def add_ignored_paths(self, *, model_path: hashing.PathLike, paths: Iterable[hashing.PathLike]) -> None:
        """Do nothing: a signature may not exclude files."""

    def _sum(self, name: str) -> bytes:
        if name == MANIFEST:
            return hashlib.sha256(self.manifest_data).digest()
        with open_inside(self.root, name) as stream:
            return hashlib.file_digest(stream, "sha256").digest()


def check_signed(path: Path, root: Path, manifest_data: bytes, keys: Sequence[Path]) -> None:
    """Check that a folder contains what the owner of a key has signed. Only the signature is parsed.

    Args:
        path: path of the folder, for messages.
        root: the folder, with links resolved.
        manifest_data: the content of its manifest.
        keys: public keys, one of which must have signed it.

    Raises:
        SignatureError: the folder is not signed, is signed by another key, or was altered.
        UsageError: a key is not a public key.
    """
    allowed = f"one by {' or '.join(map(str, keys))} is required"
    verifiers = [_verifier(key) for key in keys]
    try:
        with open_regular(root / SIGNATURE) as stream:
            data = stream.read(MOST_SIGNATURE + 1)
    except FileNotFoundError as error:
        raise SignatureError(
            f"{path} has no signature, and {allowed}; have its maker sign it (attnforge sign), or do not use it"
        ) from error
    except OSError as error:
        raise SignatureError(f"{path / SIGNATURE} cannot be read: {first_line(error)}") from error
    if len(data) > MOST_SIGNATURE:
        raise SignatureError(f"{path / SIGNATURE} is not a signature: it has more than {MOST_SIGNATURE:,} bytes")
    with tempfile.TemporaryDirectory() as folder:  # model-signing reads a path, and the bundle's may change meanwhile
        file = Path(folder, SIGNATURE)
        file.write_bytes(data)
        for verifier in verifiers:
            content = _Content(root, manifest_data)
            try:
                with quiet():
                    verifier.set_hashing_config(content).verify(root, file)
                return
            except MemoryError:
                raise
            except Exception as error:  # the signature is untrusted, so any type of error may occur
                if content.asked:
                    raise SignatureError(
                        f"{path} was altered after it was signed ({shortened(first_line(error))}); do not use it; copy "
                        "it again from its maker"
                    ) from error
    raise SignatureError(
        f"{path} is signed by another key, or its {SIGNATURE} is altered, and {allowed}; do not use it, or pass the "
        "public key of a signer you trust"
    )


def signature_of(root: Path, manifest_data: bytes, key: Path) -> bytes:
    """Return the signature of a folder's contents.

    Args:
        root: the folder, with links resolved.
        manifest_data: the content of its manifest.
        key: private key, a .pem file.

    Raises:
        UsageError: the key is not a private key, or has a password.
    """
    config = signing.Config()  # type: ignore[no-untyped-call]
    try:
        os.stat(key)
        config.use_elliptic_key_signer(private_key=key)
    except OSError as error:
        raise UsageError(f"key {key} cannot be read: {error.strerror}; {HOW}") from error
    except TypeError as error:
        raise UsageError(f"key {key} has a password; sign with a copy without one (openssl ec -in {key})") from error
    except Exception as error:
        raise UsageError(f"{key} is not a private key: {shortened(first_line(error), 120)}; {HOW}") from error
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, SIGNATURE)
        config.set_hashing_config(_Content(root, manifest_data)).sign(root, file)
        return file.read_bytes()


def _verifier(key: Path) -> verifying.Config:
    try:
        os.stat(key)
        return verifying.Config().use_elliptic_key_verifier(public_key=key)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise UsageError(
            f"trusted key {key} cannot be read: {error.strerror}; pass the file of a public key (openssl ec -in KEY "
            "-pubout)"
        ) from error
    except Exception as error:
        raise UsageError(
            f"trusted key {key} is not a public key of an elliptic curve: {shortened(first_line(error), 120)}; make it "
            "with openssl ec -in KEY -pubout"
        ) from error
