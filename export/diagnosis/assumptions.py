"""Sizes of which a program of torch.export assumes something that its Dims do not say.

Where a module's code branches on a size, the exporter keeps the branch that the example takes, and leaves out the check
that sizes take it. What it assumes is left in the program: as ranges of sizes, and as comparisons that nothing uses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import sympy
import torch

from attnforge.bundle import DimSpec
from attnforge.export.sources.torch_module import Captured
from attnforge.runtime.cases import sizes_at

MOST_SCANNED = 512
"""Number of sizes up to which all sizes of a dim are tried. Of a wider range, the smallest and the largest are, and
those at the numbers of the assumption, at their products, and at the sizes of other dims."""

MOST = 32
"""Maximum number of sizes at which a module is compared."""


class Assumption(NamedTuple):
    """What a program assumes of sizes, and sizes for which that is not so.

    Attributes:
        text: the condition, such as `Eq(Mod(tokens, 4), 0)`.
        sizes: sizes of all dims.
    """

    text: str
    sizes: dict[str, int]


def assumptions(source: Captured) -> list[Assumption]:
    """Return what the program assumes of sizes that the inputs' dims do not guarantee, up to :data:`MOST`: for each, in
    order, the failing size that is nearest the example's, and the smallest. One dim has another size than the example.
    """
    if source.program is None:
        return []
    names = _names(source)
    low, opt, high = (sizes_at(source.inputs, bound) for bound in ("min", "opt", "max"))
    usual = {symbol: opt[name] for symbol, name in names.items()}
    found: list[Assumption] = []
    for condition in dict.fromkeys(_conditions(source)):
        if not condition.free_symbols <= names.keys():
            continue
        text = str(condition.subs({s: sympy.Symbol(name) for s, name in names.items()}))
        for symbol in sorted(condition.free_symbols, key=str):
            name = names[symbol]
            tried = _tried(condition, low[name], high[name], usual.values())
            failing = [size for size in tried if condition.subs({**usual, symbol: size}) == sympy.false]
            for size in sorted(failing, key=lambda size: abs(size - opt[name]))[:1] + failing[:1]:
                sizes = {**opt, name: size}
                if len(found) < MOST and sizes not in [assumption.sizes for assumption in found]:
                    found.append(Assumption(text, sizes))
    return found


def _names(source: Captured) -> dict[sympy.Symbol, str]:
    """The names of the inputs' dims by the program's symbols."""
    assert source.program is not None
    examples = {node.name: node.meta.get("val") for node in source.program.graph.nodes if node.op == "placeholder"}
    names: dict[sympy.Symbol, str] = {}
    for name, spec in zip(source.program.graph_signature.user_inputs, source.inputs, strict=True):
        value = examples.get(name)
        shape: Sequence[Any] = value.shape if isinstance(value, torch.Tensor) else ()
        for size, dim in zip(shape, spec.dims, strict=False):
            if isinstance(dim, DimSpec) and isinstance(size, torch.SymInt):
                symbol = size.node.expr / dim.factor
                if isinstance(symbol, sympy.Symbol):
                    names[symbol] = dim.symbol
    return names


def _conditions(source: Captured) -> Iterator[Any]:
    """The program's comparisons of sizes that no operator uses, and the ranges of its symbols."""
    assert source.program is not None
    for symbol, bounds in source.program.range_constraints.items():
        for condition in (symbol >= bounds.lower, symbol <= bounds.upper):
            if condition not in (sympy.true, sympy.false):
                yield condition
    for node in source.program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and not node.users and isinstance(value, torch.SymBool):
            yield value.node.expr


def _tried(condition: Any, low: int, high: int, usual: Collection[int]) -> list[int]:
    """The sizes of a dim to try, in order: see :data:`MOST_SCANNED`."""
    if high - low < MOST_SCANNED:
        return [*range(low, high + 1)]
    numbers = [abs(int(number)) for number in condition.atoms(sympy.Integer)]
    marks = {*numbers, *(a * b for a in numbers for b in numbers), *usual}
    sizes = {low + i for i in range(16)} | {mark + i for mark in marks for i in (-1, 0, 1)} | {high}
    return sorted(size for size in sizes if low <= size <= high)
