"""Signatures of bundles, in the format of OpenSSF's model-signing, which makes and checks them.

A signature is over the name and the sha256 of every file in the folder but itself, the manifest among them. Files are
opened as everywhere else: without following links. The manifest is the very bytes that the caller has read and parses
if they are signed, so nobody can exchange it between the check and its use; every other file is held to the sum that
the signed manifest has of it, whenever it is read.
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
"""Bytes that a signature may have."""

HOW = "pass the .pem file of an elliptic-curve key (openssl ecparam -name prime256v1 -genkey -noout -out KEY)"


class _Content(hashing.Config):
    """What a folder holds, as model-signing compares it with what was signed.

    Attributes:
        asked: whether it was: model-signing asks once it has accepted a key's signature.
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
        """Ignore no file that whoever signed it wants ignored."""

    def _sum(self, name: str) -> bytes:
        if name == MANIFEST:
            return hashlib.sha256(self.manifest_data).digest()
        with open_inside(self.root, name) as stream:
            return hashlib.file_digest(stream, "sha256").digest()


def check_signed(path: Path, root: Path, manifest_data: bytes, keys: Sequence[Path]) -> None:
    """Check that a folder holds what the owner of a key has signed. Nothing of it is parsed but the signature.

    Args:
        path: of the folder, for messages.
        root: the folder, with links resolved.
        manifest_data: the content of its manifest.
        keys: public keys, of which one is enough.

    Raises:
        SignatureError: the folder is not signed, by another key, or altered.
        UsageError: a key is none.
    """
    allowed = f"one by {' or '.join(map(str, keys))} is asked for"
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
        raise SignatureError(f"{path / SIGNATURE} is no signature: it has more than {MOST_SIGNATURE:,} bytes")
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
            except Exception as error:  # of what a stranger wrote: of every kind
                if content.asked:
                    raise SignatureError(
                        f"{path} was altered after it was signed ({shortened(first_line(error))}); do not use it; copy "
                        "it again from its maker"
                    ) from error
    raise SignatureError(
        f"{path} is signed by another key, or its {SIGNATURE} is altered, and {allowed}; do not use it, or pass the "
        "public key of whom you trust"
    )


def signature_of(root: Path, manifest_data: bytes, key: Path) -> bytes:
    """The signature of what a folder holds.

    Args:
        root: the folder, with links resolved.
        manifest_data: the content of its manifest.
        key: private, a .pem file.

    Raises:
        UsageError: the key is none, or has a password.
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
        raise UsageError(f"{key} is no private key: {shortened(first_line(error), 120)}; {HOW}") from error
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
            f"trusted key {key} is no public key of an elliptic curve: {shortened(first_line(error), 120)}; make it "
            "with openssl ec -in KEY -pubout"
        ) from error
