"""Every error that attnforge raises on purpose.

Each message is one line that says what was given, what is allowed, and what to do. The command line prints it without
a traceback and exits with 2 for a :class:`UsageError` and 1 for any other.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # help is shown without importing pydantic, which takes a while
    from attnforge.certificate import Certificate


class AttnforgeError(Exception):
    """Base class of every error raised on purpose. Its message is one line, even if it quotes other texts."""

    def __init__(self, message: str) -> None:
        super().__init__(plain(message))


class UsageError(AttnforgeError, ValueError):
    """An invalid request: an argument, size, name or input that is not allowed."""


class UnknownNameError(UsageError):
    """A model, backend, target, precision, option or dim that does not exist.

    Attributes:
        kind: kind of the name, such as "model".
        given: the unknown name.
        known: the known names, sorted.
    """

    def __init__(self, kind: str, given: str, known: Iterable[str]) -> None:
        self.kind, self.given, self.known = kind, given, sorted(known)
        nearest = get_close_matches(given, self.known, 1) if isinstance(given, str) else []
        meant = f"; did you mean {nearest[0]}?" if nearest else ""
        super().__init__(f"unknown {kind} {given!r}; known: {', '.join(self.known)}{meant}")

    def __reduce__(self) -> tuple[type[UnknownNameError], tuple[str, str, list[str]]]:
        return type(self), (self.kind, self.given, self.known)  # so that it can be passed between processes


def check_known(kind: str, given: str, known: Collection[str]) -> None:
    """Check that a name exists.

    Raises:
        UnknownNameError: it does not.
    """
    if given not in known:
        raise UnknownNameError(kind, given, known)


class ShapeError(UsageError):
    """Incompatible sizes of a module or of its inputs."""


class InputError(UsageError):
    """An input whose name, dtype, rank or dims a deployed model does not accept."""


class CaptureError(UsageError):
    """A module that cannot be exported as requested."""


class UntrustedError(UsageError):
    """Untrusted code or an untrusted file, which is imported or opened only if the caller says so."""


class BundleError(AttnforgeError):
    """A bundle that is missing, incomplete, altered, or of another schema version."""


class ReplacedError(BundleError):
    """A bundle that was replaced while it was read; reading it again gives the new one."""


class SignatureError(BundleError):
    """A bundle that is not signed by a trusted key, or was altered after signing."""


class BuildError(AttnforgeError):
    """A TensorRT or ONNX Runtime build that failed, with the builder's message."""


class WrongError(AttnforgeError):
    """A model that no backend computes correctly, or whose eager error is too large to judge parity; the message says
    where."""


class UnfusedError(AttnforgeError):
    """A model whose attention a target does not fuse although that was required.

    Attributes:
        certificate: contains the reason for every site.
    """

    def __init__(self, message: str, certificate: Certificate) -> None:
        self.certificate = certificate
        super().__init__(message)

    def __reduce__(self) -> tuple[type[UnfusedError], tuple[str, Certificate]]:
        return type(self), (str(self), self.certificate)


class UnavailableError(AttnforgeError):
    """A target or backend that this machine cannot build or run; the message says what would change that."""


def extra(module: str, name: str) -> Any:
    """Import a module that one of attnforge's extras installs.

    Args:
        module: its qualified name.
        name: name of the extra.

    Raises:
        UnavailableError: it cannot be imported.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise UnavailableError(
            f"{module} cannot be imported ({first_line(error)}); pip install 'attnforge[{name}]'"
        ) from error


class RunError(AttnforgeError):
    """A run that failed in the backend's library, with its message."""


class DeviceError(AttnforgeError):
    """A CUDA call or a GPU run that failed; the message says how, and whether this process can continue."""


def first_line(error: BaseException | str) -> str:
    """Return the first informative line of an error's message, or of a text, without terminal colours. For OpenVINO it
    is the last line, since the others name its source files. Without such a line, return the name of the error's type,
    or an empty string for a text."""
    lines = [plain(re.sub(r"\x1b\[[0-9;]*m", "", line)).strip() for line in str(error).splitlines()]
    if any(line.startswith("Exception from ") for line in lines):
        lines.reverse()
    otherwise = type(error).__name__ if isinstance(error, BaseException) else ""
    return next((line for line in lines if line and not line.startswith("Failed to export")), otherwise)


@contextmanager
def raised_as(
    kind: type[AttnforgeError], message: str, advice: str = "", passing: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """A block in which any error of another library is raised as one of attnforge's: `message`, the first line of the
    library's message, and `advice`.

    Args:
        kind: type of the error to raise.
        message: what failed.
        advice: what to do about it; begins with its own punctuation.
        passing: types of errors that pass unchanged, in addition to attnforge's own and `MemoryError`.
    """
    unchanged: tuple[type[Exception], ...] = (AttnforgeError, MemoryError, *passing)
    try:
        yield
    except unchanged:
        raise
    except Exception as error:
        raise kind(f"{message}: {shortened(first_line(error))}{advice}") from error


LONGEST = 400
"""Maximum number of characters of a foreign text that a message quotes."""


def shortened(text: str, longest: int = LONGEST) -> str:
    """Return the beginning of a text of any length, for a message."""
    return text if len(text) <= longest else f"{text[:longest]} … ({len(text):,} characters)"


CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters: line ends, terminal controls, and changes of writing direction; and surrogates, which stand for
non-UTF-8 bytes of a file name and which neither JSON nor a page can contain."""


def plain(text: str) -> str:
    """Return a foreign text, safe for a terminal: every control character becomes a replacement character."""
    return CONTROL.sub("\ufffd", text)
