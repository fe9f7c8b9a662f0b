"""Every error that attnforge raises on purpose.

Each message is one line that says what was given, what is allowed, and what to do. The command line prints it without
a traceback and exits with 2 for a :class:`UsageError` and 1 for any other.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line shows its help without pydantic, which takes a while to import
    from attnforge.certificate import Certificate


class AttnforgeError(Exception):
    """Base class of every error raised on purpose. Its message is one line, whatever texts of others are in it."""

    def __init__(self, message: str) -> None:
        super().__init__(plain(message))


class UsageError(AttnforgeError, ValueError):
    """A request that cannot be meant: an argument, a size, a name or an input outside the allowed ones."""


class UnknownNameError(UsageError):
    """A model, backend, target, precision, option or dim that does not exist.

    Attributes:
        kind: such as "model".
        given: the name.
        known: the names that exist, sorted.
    """

    def __init__(self, kind: str, given: str, known: Iterable[str]) -> None:
        self.kind, self.given, self.known = kind, given, sorted(known)
        super().__init__(f"unknown {kind} {given!r}; known: {', '.join(self.known)}")

    def __reduce__(self) -> tuple[type[UnknownNameError], tuple[str, str, list[str]]]:
        return type(self), (self.kind, self.given, self.known)  # what is raised in another process comes back


def check_known(kind: str, given: str, known: Collection[str]) -> None:
    """Check that a name exists.

    Raises:
        UnknownNameError: it does not.
    """
    if given not in known:
        raise UnknownNameError(kind, given, known)


class ShapeError(UsageError):
    """Sizes of a module or of its input that do not fit together."""


class InputError(UsageError):
    """An input whose name, dtype, rank or dims a deployed model does not take."""


class CaptureError(UsageError):
    """A module that cannot be exported as asked for."""


class UntrustedError(UsageError):
    """Code or a file that somebody else named, and that is imported or opened only where the caller says so."""


class BundleError(AttnforgeError):
    """A bundle that is missing, incomplete, altered, or of another schema version."""


class ReplacedError(BundleError):
    """A bundle that was replaced while it was read; read again, it is the new one."""


class SignatureError(BundleError):
    """A bundle that is not signed by whom the caller trusts, or altered since."""


class BuildError(AttnforgeError):
    """A TensorRT or ONNX Runtime build that failed, with the builder's own words."""


class WrongError(AttnforgeError):
    """A model that no backend computes right, or whose eager precision proves nothing; the message says where."""


class UnfusedError(AttnforgeError):
    """A model whose attention a target does not run fused, where that was required.

    Attributes:
        certificate: gives the reason for every site.
    """

    def __init__(self, message: str, certificate: Certificate) -> None:
        self.certificate = certificate
        super().__init__(message)

    def __reduce__(self) -> tuple[type[UnfusedError], tuple[str, Certificate]]:
        return type(self), (str(self), self.certificate)


class UnavailableError(AttnforgeError):
    """A target or backend that this machine cannot build or run; the message says what would change that."""


def extra(module: str, name: str) -> Any:
    """A module that one of attnforge's extras brings.

    Args:
        module: its qualified name.
        name: of the extra.

    Raises:
        UnavailableError: it cannot be imported.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise UnavailableError(
            f"{module} cannot be imported ({first_line(error)}): pip install attnforge[{name}]"
        ) from error


class RunError(AttnforgeError):
    """A run that the backend's library failed, in its words."""


class DeviceError(AttnforgeError):
    """A CUDA call or a run on the GPU that failed; the message says how, and whether this process can go on."""


def first_line(error: BaseException | str) -> str:
    """The first line of an error's message, or of text about one, that says something, without terminal colours; of
    OpenVINO's, whose other lines say in which of its files it was raised, the last. Where there is none: the name of
    the error's type, of text nothing."""
    lines = [plain(re.sub(r"\x1b\[[0-9;]*m", "", line)).strip() for line in str(error).splitlines()]
    if any(line.startswith("Exception from ") for line in lines):
        lines.reverse()
    otherwise = type(error).__name__ if isinstance(error, BaseException) else ""
    return next((line for line in lines if line and not line.startswith("Failed to export")), otherwise)


@contextmanager
def raised_as(
    kind: type[AttnforgeError], message: str, advice: str = "", passing: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """A block in which another library's error, of whatever type, is raised as one of attnforge's: `message`, the first
    line of what the library said, and `advice`.

    Args:
        kind: type of the error to raise.
        message: what failed, for whom.
        advice: what to do about it; begins with its own punctuation.
        passing: types of errors that leave the block as they are, besides attnforge's own and `MemoryError`.
    """
    as_they_are: tuple[type[Exception], ...] = (AttnforgeError, MemoryError, *passing)
    try:
        yield
    except as_they_are:
        raise
    except Exception as error:
        raise kind(f"{message}: {shortened(first_line(error))}{advice}") from error


LONGEST = 400
"""Characters of a text of somebody else's that a message takes over."""


def shortened(text: str, longest: int = LONGEST) -> str:
    """The beginning of a text that may be of any length, for a message."""
    return text if len(text) <= longest else f"{text[:longest]} … ({len(text):,} characters)"


CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that end a line, ring or steer a terminal, or turn the direction of writing; and what stands for bytes of
a file's name that are not UTF-8, which neither JSON nor a page can hold."""


def plain(text: str) -> str:
    """A text of somebody else's as a terminal may show it: a replacement character for every one of control."""
    return CONTROL.sub("\ufffd", text)
