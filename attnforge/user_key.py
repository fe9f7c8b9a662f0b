"""The user's own key: by it attnforge knows again what this user made, wherever it was copied to since.

What can run code (TensorRT's plans and kernels) gets a code when it is made: its HMAC by a key that this user alone can
read. Nobody else can make that code, and nobody needs to: it says who made a thing, for the maker.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
from pathlib import Path

from attnforge.atomic import locked, write_whole
from attnforge.files import is_own, open_regular

LENGTH = 32
"""Bytes of a key, and of a code (HMAC-SHA256)."""


def code_of(name: str, data: bytes) -> bytes:
    """The user's code of `data`, under a name that says what it is for: a code of the one name is none of another.

    Raises:
        OSError: the key cannot be kept, or others could read or have written it.
    """
    return hmac.digest(_key(), name.encode() + b"\0" + data, "sha256")


def is_made_by_user(name: str, data: bytes, code: bytes) -> bool:
    """Whether `code` is the user's code of `data` under that name; False where the user has no key, or none that can be
    trusted."""
    try:
        return hmac.compare_digest(code, code_of(name, data))
    except OSError:
        return False


def _key() -> bytes:
    """The user's key, which is made when it is first used.

    Raises:
        OSError: it cannot be kept, or others could read or have written it.
    """
    file = Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")) / "attnforge/cache.key"
    if not file.exists():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(file.parent):  # another process may make it just now
            if not file.exists():
                write_whole(file, secrets.token_bytes(LENGTH), mode=0o600)
    with open_regular(file) as stream:
        about = os.fstat(stream.fileno())
        key = stream.read(LENGTH + 1)
    if len(key) != LENGTH or not is_own(about) or about.st_mode & 0o077:
        raise OSError(errno.EPERM, "it is not for this user alone; delete it", str(file))
    return key
