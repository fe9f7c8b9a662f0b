"""The options that a session is loaded with, and the memory that it uses."""

from __future__ import annotations

from dataclasses import dataclass

from attnforge.bundle import MOST_THREADS
from attnforge.errors import UsageError
from attnforge.numbers import whole


@dataclass(frozen=True)
class Options:
    """The options of a session; :func:`attnforge.load` describes each option."""

    threads: int | None = None
    device: int = 0
    contexts: int = 4
    graphs: bool | None = None
    cache: bool = True

    def __post_init__(self) -> None:
        if whole("contexts", self.contexts) < 1:
            raise UsageError(f"{self.contexts} execution contexts were asked for; give 1 or more")
        check_threads(self.threads)


def check_threads(threads: int | None) -> None:
    """Check a number of threads; libraries start as many as requested, until the machine has no more.

    Raises:
        UsageError: fewer than 1, or more than :data:`~attnforge.bundle.MOST_THREADS`.
    """
    if threads is not None and not 1 <= whole("threads", threads) <= MOST_THREADS:
        raise UsageError(f"{threads} threads were asked for; give 1 to {MOST_THREADS:,}")


@dataclass(frozen=True)
class Memory:
    """The memory of a session: bytes, None if its backend does not report them, and two counts.

    Attributes:
        weights: bytes of the model's parameters.
        activations: bytes for everything between inputs and outputs, in all execution contexts.
        buffers: bytes of inputs and outputs on the device, including those that callers refer to.
        pinned: bytes of host memory through which NumPy arrays reach the device.
        contexts: number of execution contexts.
        graphs: number of captured CUDA graphs.
    """

    weights: int | None = None
    activations: int | None = None
    buffers: int = 0
    pinned: int = 0
    contexts: int = 0
    graphs: int = 0
