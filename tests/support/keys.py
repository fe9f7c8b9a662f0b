"""Keys for signing bundles."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat


def new_key(file: Path, curve: ec.EllipticCurve | None = None) -> Path:
    """Write a private key to a file, and the public key to FILE.pub next to it."""
    private = ec.generate_private_key(curve or ec.SECP256R1())
    file.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()))
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    file.with_suffix(".pub").write_bytes(public)
    return file
