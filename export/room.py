"""The minimum memory of a deploy, checked against the available memory before it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod

import onnx_ir as ir

from attnforge.bundle import FLAVOURS
from attnforge.errors import UnavailableError
from attnforge.export.graphs.saving import bytes_of_weights
from attnforge.export.graphs.sizes import Unmeasurable, shape_at
from attnforge.memory import available
from attnforge.precision import Precision

BUILDER = 3
"""Memory of TensorRT's builder, as a multiple of the weights (BERT-base in fp32: 1.6 GiB for 0.4)."""


@dataclass(frozen=True)
class MemoryNeeds:
    """A deploy whose memory is estimated.

    Attributes:
        model: the canonical graph.
        precision: the bundle's precision.
        targets: names of targets.
        tune: whether backends are measured.
        sizes: sizes of the dynamic dims at which most memory is needed.
    """

    model: ir.Model
    precision: Precision
    targets: Sequence[str]
    tune: bool
    sizes: Mapping[str, int]

    def bytes(self) -> int:
        """Bytes that are needed at least, in addition to what is in memory once the graph is canonical.

        Either the reference keeps the live activations in float64 while TensorRT's builder holds weights, or the
        backends that are measured keep their weights and the activations at the bundle's precision. Scores are not
        counted, because it is not yet known whether a form materialises them.
        """
        weights = bytes_of_weights(self.model)
        live = most_alive(self.model, self.sizes)
        builder = BUILDER * weights if not set(FLAVOURS).isdisjoint(self.targets) else 0
        return max(8 * live + builder, 2 * weights + live * max(self.precision.dtype.itemsize, 4) if self.tune else 0)

    def check(self) -> None:
        """Refuse work that needs more memory than is available.

        Raises:
            UnavailableError: says what is needed, what is available, and what would need less.
        """
        left, needed = available(), self.bytes()
        if left is None or needed <= left:
            return
        less = {"--target onnxruntime": replace(self, targets=["onnxruntime"]), "--no-tune": replace(self, tune=False)}
        changes = [f"{name} ({_gib(size)})" for name, work in less.items() if (size := work.bytes()) < needed]
        halved = replace(self, sizes={symbol: max(size // 2, 1) for symbol, size in self.sizes.items()})
        if (size := halved.bytes()) < needed:
            changes.append(f"dims of half the maximum ({_gib(size)})")
        sizes = ", ".join(f"{symbol} {size:,}" for symbol, size in self.sizes.items()) or "its fixed sizes"
        raise UnavailableError(
            f"deploying this model needs at least {_gib(needed)} of memory at {sizes}, and {_gib(left)} are available; "
            f"free some, or deploy with less: {', or '.join(changes) or 'a smaller model'}"
        )


class Numbers:
    """The number of elements of values; 0 if a shape is not known.

    Args:
        sizes: sizes of the symbolic dims.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self._known: dict[str, int] = {}

    def __call__(self, value: ir.Value) -> int:
        shape = str(value.shape)  # few values of a graph have distinct shapes
        if shape not in self._known:
            self._known[shape] = 0
            with suppress(Unmeasurable):
                self._known[shape] = prod(shape_at(value, self.sizes))
        return self._known[shape]


def most_alive(model: ir.Model, sizes: Mapping[str, int]) -> int:
    """The largest number of activation elements that are live at one time when the nodes of a graph run in order.
    Tensors whose shapes are not known are left out.

    Args:
        model: the graph.
        sizes: sizes of the symbolic dims.
    """
    nodes, numbers = list(model.graph), Numbers(sizes)
    last: dict[ir.Value, int] = {}
    for index, node in enumerate(nodes):
        last |= {value: index for value in node.inputs if value is not None}
    last |= dict.fromkeys(model.graph.outputs, len(nodes))
    ending: dict[int, list[ir.Value]] = {}
    for value, index in last.items():
        ending.setdefault(index, []).append(value)
    alive = most = sum(map(numbers, model.graph.inputs))
    for index, node in enumerate(nodes):
        alive += sum(numbers(value) for value in node.outputs if value in last)
        most = max(most, alive)
        alive -= sum(numbers(value) for value in ending.get(index, ()) if not value.is_initializer())
    return most


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
