"""Public keys of trusted signers, from an argument or an environment variable."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from attnforge.errors import UsageError, extra

TRUSTED = "ATTNFORGE_TRUSTED"
"""Environment variable with paths of public keys, separated as in PATH."""

Trusted = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Literal[False] | None
"""Public keys, one of which must have signed a bundle. None means those of :data:`TRUSTED`, or no check if it is not
set; False means no check."""


def signatures() -> Any:
    """Import the module that makes and checks signatures.

    Raises:
        UnavailableError: `attnforge[signing]` is not installed.
    """
    return extra("attnforge.bundle.signatures", "signing")  # which imports model-signing


def keys_of(trusted: Trusted) -> tuple[Path, ...]:
    """Return the files of the public keys that the caller, or by default the environment, trusts.

    Raises:
        UsageError: a signature is required, but no key is named.
    """
    origin = "trusted"
    if trusted is None and TRUSTED in os.environ:
        trusted, origin = [key for key in os.environ[TRUSTED].split(os.pathsep) if key], TRUSTED
    if trusted is None or trusted is False:
        return ()
    trusted = [trusted] if isinstance(trusted, str | os.PathLike) else trusted
    try:
        keys = tuple(Path(key).absolute() for key in trusted)
    except TypeError:  # True, or an item that is not a path
        raise UsageError(f"trusted is {trusted!r}; give the files of public keys, or False to require none") from None
    if not keys:
        raise UsageError(f"{origin} names no key, so no bundle could be opened; name the file of a public key")
    return keys
