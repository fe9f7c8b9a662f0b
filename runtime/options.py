"""What a session is told, and what it says of its memory."""

from __future__ import annotations

from dataclasses import dataclass

from attnforge.errors import UsageError


@dataclass(frozen=True)
class Options:
    """How a bundle is loaded; :func:`attnforge.load` says what each means."""

    threads: int | None = None
    device: int = 0
    contexts: int = 4
    graphs: bool | None = None
    cache: bool = True

    def __post_init__(self) -> None:
        if self.contexts < 1:
            raise UsageError(f"{self.contexts} execution contexts were asked for; give 1 or more")


@dataclass(frozen=True)
class Memory:
    """Bytes that a session holds; None for what its backend does not say.

    Attributes:
        weights: of the model.
        activations: everything between inputs and outputs, of all execution contexts.
        buffers: inputs and outputs on the device, those that callers hold included.
        pinned: host memory through which NumPy arrays reach the device.
        contexts: execution contexts.
        graphs: captured CUDA graphs.
    """

    weights: int | None = None
    activations: int | None = None
    buffers: int = 0
    pinned: int = 0
    contexts: int = 0
    graphs: int = 0
