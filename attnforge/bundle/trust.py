"""Whose bundles are opened: public keys, by argument or by a variable of the environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from attnforge.errors import UsageError, extra

TRUSTED = "ATTNFORGE_TRUSTED"
"""The variable of the environment with public keys, as PATH has folders."""

Trusted = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Literal[False] | None
"""Whose bundles are opened: those that are signed by one of these public keys; of None those of :data:`TRUSTED`, and
anybody's where it is not set; of False anybody's."""


def signatures() -> Any:
    """What makes and checks signatures.

    Raises:
        UnavailableError: `attnforge[signing]` is not installed.
    """
    return extra("attnforge.bundle.signatures", "signing")  # which imports model-signing


def keys_of(trusted: Trusted) -> tuple[Path, ...]:
    """The files of public keys that a caller trusts, or the environment.

    Raises:
        UsageError: no key was given where keys are asked for.
    """
    if trusted is False:
        return ()
    if trusted is None:
        if TRUSTED not in os.environ:
            return ()
        trusted, whose = [key for key in os.environ[TRUSTED].split(os.pathsep) if key], TRUSTED
    else:
        trusted, whose = [trusted] if isinstance(trusted, str | os.PathLike) else trusted, "trusted"
    try:
        keys = tuple(Path(key).absolute() for key in trusted)
    except TypeError:  # True, and whatever is no path
        raise UsageError(f"trusted is {trusted!r}; give the files of public keys, or False to ask for none") from None
    if not keys:
        raise UsageError(f"{whose} names no key, so no bundle could be opened; name the file of a public key")
    return keys
